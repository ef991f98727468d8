//! What can be wrong with a safetensors file or with the index of a sharded checkpoint.

use std::io;
use std::path::PathBuf;

use crate::shown::Shown;

/// A safetensors file or index that cannot be read. Names the file and the tensor or the place in it.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// The header as a whole is wrong.
    #[error("{}: {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: HeaderProblem,
    },
    /// The header's entry of one tensor is wrong.
    #[error("{}: tensor {}: {problem}", path.display(), Shown(tensor))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        problem: TensorProblem,
    },
    /// The index of a sharded checkpoint is wrong, or contradicts the shards.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong.
        problem: IndexProblem,
    },
}

/// What is wrong with a header as a whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum HeaderProblem {
    #[error("has {len} bytes, fewer than the 8 that give the header's length; fetch the file again")]
    TooShort { len: usize },
    #[error(
        "byte 0: the header is said to have {header} bytes, but only {available} follow; \
         the file is cut short (fetch it again) or is not a safetensors file"
    )]
    BeyondFile { header: u64, available: usize },
    #[error(
        "byte 0: the header is said to have {header} bytes, more than the {limit} that the format allows"
    )]
    TooLong { header: u64, limit: u64 },
    #[error("header, line {line} column {column}: {reason}")]
    Json { line: usize, column: usize, reason: String },
    #[error(
        "has {extra} bytes after the last tensor; the header does not belong to this file, fetch it again"
    )]
    Trailing { extra: u64 },
}

/// What is wrong with the entry of one tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum TensorProblem {
    #[error("its entry is malformed: {0}")]
    Malformed(String),
    #[error("is in the header twice")]
    Duplicate,
    #[error("unknown element type {0:?}; a newer version of the format, or a damaged file")]
    UnknownDType(String),
    #[error("a shape of {shape:?} in {dtype} has no whole number of bytes or overflows")]
    ImpossibleShape { shape: Vec<u64>, dtype: &'static str },
    #[error("{shape:?} in {dtype} takes {expected} bytes, but its data_offsets span {found}")]
    WrongLength { shape: Vec<u64>, dtype: &'static str, expected: u64, found: u64 },
    #[error("its data_offsets [{begin}, {end}] run backwards")]
    Backwards { begin: u64, end: u64 },
    #[error(
        "its data ends at byte {end} of the data section, which has {available}; \
         the file is cut short, fetch it again"
    )]
    OutsideFile { end: u64, available: u64 },
    #[error("its bytes overlap those of {}", Shown(other))]
    Overlap { other: String },
    #[error("{gap} bytes before it belong to no tensor")]
    Gap { gap: u64 },
}

/// What is wrong with an index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum IndexProblem {
    #[error("line {line} column {column}: {reason}")]
    Json { line: usize, column: usize, reason: String },
    #[error("has {len} bytes, more than the {limit} that an index may have")]
    TooLong { len: u64, limit: u64 },
    #[error("weight_map lists no tensor")]
    Empty,
    #[error("tensor {} is listed twice, in {} and in {}", Shown(tensor), Shown(first), Shown(second))]
    ListedTwice { tensor: String, first: String, second: String },
    #[error("tensor {} points to {}, which is not a file name in this folder", Shown(tensor), Shown(shard))]
    OutsideFolder { tensor: String, shard: String },
    #[error("{} of {of} shards are missing from the folder: {}; fetch them", missing.len(), first_shards(missing))]
    MissingShards { missing: Vec<String>, of: usize },
    #[error("tensor {} is said to be in {}, which does not hold it", Shown(tensor), Shown(shard))]
    NotInShard { tensor: String, shard: String },
    #[error("tensor {} is in two shards, {} and {}", Shown(tensor), Shown(first), Shown(second))]
    InTwoShards { tensor: String, first: String, second: String },
}

/// The first few names.
fn first_shards(missing: &[String]) -> String {
    const FEW: usize = 6;
    let names: Vec<String> = missing.iter().take(FEW).map(|name| Shown(name).to_string()).collect();
    names.join(", ") + if missing.len() > FEW { ", ..." } else { "" }
}
