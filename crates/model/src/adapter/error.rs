//! What can be wrong with an adapter.

use std::io;
use std::path::PathBuf;

use crate::safetensors::SafetensorsError;
use crate::save_error::SaveError;
use crate::shown::Shown;

/// An adapter that cannot be read, or written. Names the file and the key or tensor.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// The configuration is no JSON object of the right kind.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key, and what is wrong with it.
        reason: String,
    },
    /// A tensor that does not fit.
    #[error("{}: tensor {}: {reason}", path.display(), Shown(tensor))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An adapter that a model cannot have.
    #[error("{0}")]
    Layout(String),
    /// The file of the weights is wrong.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// A file could not be written.
    #[error(transparent)]
    Save(#[from] SaveError),
}
