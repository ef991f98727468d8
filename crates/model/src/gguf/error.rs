//! What can be wrong with a GGUF file.

use std::io;
use std::path::PathBuf;

use crate::shown::Shown;

/// A GGUF file that cannot be read. Names the file and the byte, key or tensor.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// The file does not begin as GGUF files do.
    #[error("{}: is not a GGUF file (begins with {:?} instead of \"GGUF\")", path.display(), found.escape_ascii().to_string())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// Its first bytes.
        found: [u8; 4],
    },
    /// A version that is not read.
    #[error("{}: byte 4: {}", path.display(), version_problem(*version))]
    Version {
        /// The file.
        path: PathBuf,
        /// The version.
        version: u32,
    },
    /// The file ends too early, or a length in it is a lie.
    #[error(
        "{}: byte {offset}: {place} needs {needed} bytes, but only {available} are left; \
         the file is cut short (fetch it again) or damaged", path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Where the bytes should be.
        offset: usize,
        /// What they are.
        place: String,
        /// How many.
        needed: u64,
        /// How many there are.
        available: u64,
    },
    /// The bytes at a place cannot be what they should be.
    #[error("{}: byte {offset}: {place} {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: usize,
        /// What is there.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A metadata key is missing.
    #[error("{}: metadata key {key} is missing; convert the model again with a current converter", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A metadata value that cannot be used.
    #[error("{}: byte {offset}: metadata key {key} {reason}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Where the value is.
        offset: usize,
        /// The key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor that cannot be used.
    #[error("{}: byte {offset}: tensor {}: {problem}", path.display(), Shown(tensor))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// Where its info is.
        offset: usize,
        /// Its name.
        tensor: String,
        /// What is wrong with it.
        problem: GgufTensorProblem,
    },
    /// A model of another family.
    #[error(
        "{}: metadata key general.architecture is {}, which is not supported; supported: {supported} \
         (nearest: {nearest:?})", path.display(), Shown(found)
    )]
    Architecture {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: String,
        /// What could stand there.
        supported: String,
        /// The supported one that is most like it.
        nearest: &'static str,
    },
    /// The metadata describe a shape that cannot be.
    #[error("{}: {source}", path.display())]
    Spec {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        source: crate::SpecError,
    },
}

/// What is wrong with a tensor info.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum GgufTensorProblem {
    #[error("is in the file twice")]
    Duplicate,
    #[error("is missing")]
    Missing,
    #[error("has {0} dimensions; the format has at most 4")]
    TooManyDimensions(u32),
    #[error("has an impossible shape {0:?}")]
    ImpossibleShape(Vec<u64>),
    #[error("rows of {columns} elements are no whole number of {dtype} blocks")]
    PartialBlocks { columns: u64, dtype: &'static str },
    #[error(
        "is stored as {0}, which is not supported; supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, \
         Q2_K to Q6_K, Q8_K, IQ4_NL and MXFP4 \
         (requantise the file, or use the original safetensors)"
    )]
    UnsupportedType(String),
    #[error("its offset {offset} is not a multiple of the file's alignment {alignment}")]
    Unaligned { offset: u64, alignment: u64 },
    #[error(
        "its {size} bytes at offset {offset} end outside the data section of {available} bytes; the file is cut short, fetch it again"
    )]
    OutsideFile { offset: u64, size: u64, available: u64 },
    #[error("its bytes overlap those of {}", Shown(other))]
    Overlap { other: String },
    #[error("{gap} bytes before it belong to no tensor")]
    Gap { gap: u64 },
    #[error("{0}")]
    Meaning(String),
}

fn version_problem(version: u32) -> String {
    match version {
        1 => "is GGUF version 1, which is obsolete; convert the model again".to_owned(),
        v if v.swap_bytes() < 1 << 16 && v >= 1 << 16 => {
            "is a big-endian GGUF file; only little-endian ones are read".to_owned()
        }
        v => format!("is GGUF version {v}; versions 2 and 3 are read"),
    }
}
