//! What can go wrong in writing a file, for every format that this crate writes.

use std::io;
use std::path::{Path, PathBuf};

use crate::tokenizer::TokenizerError;

/// A file that could not be written. Nothing half-written is left behind.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The system refused, or the source of the bytes failed.
    #[error("could not {action} {}: {source}{}", path.display(), remedy(source))]
    Io {
        /// What was being done: "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The answer.
        source: io::Error,
    },
    /// A tensor that the format cannot hold.
    #[error("{}: tensor {tensor:?} cannot be written: {reason}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// Why not.
        reason: &'static str,
    },
    /// A tensor's source gave another number of bytes than its shape has: a programming error.
    #[error(
        "{}: tensor {tensor:?} has {expected} bytes, but {} were given", path.display(),
        if *missing == 0 { "more".to_owned() } else { format!("{missing} fewer") }
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// Bytes by its type and shape.
        expected: u64,
        /// Bytes that did not come; 0 where there were too many.
        missing: u64,
    },
    /// The new files are complete, and could not all be moved to where they belong.
    #[error(
        "{source}. The new files are complete in {}: those that are left there belong in {}, which is no model until its config.json is there",
        staging.display(), folder.display()
    )]
    NotMoved {
        /// Where they are.
        staging: PathBuf,
        /// Where they belong.
        folder: PathBuf,
        /// What went wrong.
        source: Box<SaveError>,
    },
    /// The tokenizer's files could not be written beside the model's.
    #[error(transparent)]
    Tokenizer(Box<TokenizerError>),
    /// The model has a trait that the target format has no words for.
    #[error("{model} cannot be saved as {target}: {reason}")]
    Inexpressible {
        /// The model's name.
        model: String,
        /// The class of models that the folder would be loaded as.
        target: &'static str,
        /// Which trait.
        reason: String,
    },
}

impl SaveError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> SaveError {
        SaveError::Io { action, path: path.to_owned(), source }
    }
}

/// What to do about the system's answer, where that is known.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space or choose another output folder"
        }
        io::ErrorKind::FileTooLarge => {
            "; raise `ulimit -f`, or choose an output folder on another file system"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; choose an output folder that you may write to"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "; a file is in the way of the folder, choose another name"
        }
        _ => "",
    }
}
