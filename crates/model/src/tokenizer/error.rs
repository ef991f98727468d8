//! What can be wrong with a tokenizer, its files, or what it is given.

use std::fmt::Display;
use std::path::PathBuf;

/// A tokenizer that cannot be used, or not for this.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The OS refused.
    #[error("could not read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The answer.
        source: std::io::Error,
    },
    /// The document is no tokenizer.
    #[error("{origin}: not a usable tokenizer: {reason}")]
    Invalid {
        /// The file.
        origin: String,
        /// Why not, and where in the file.
        reason: String,
    },
    /// A metadata key is missing or contradicts the others.
    #[error("{origin}: {key}: {reason}")]
    Field {
        /// The file.
        origin: String,
        /// The key.
        key: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// An id that the vocabulary does not have.
    #[error("{origin}: there is no token {id}; the vocabulary has {size}")]
    UnknownId {
        /// The file.
        origin: String,
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        size: usize,
    },
    /// A text that could not be encoded.
    #[error("{origin}: the text could not be tokenised: {reason}")]
    Encode {
        /// The file.
        origin: String,
        /// The engine's reason.
        reason: String,
    },
    /// Ids that could not be decoded.
    #[error("{origin}: the tokens could not be decoded: {reason}")]
    Decode {
        /// The file.
        origin: String,
        /// The engine's reason.
        reason: String,
    },
    /// The files could not be written.
    #[error(transparent)]
    Save(#[from] crate::SaveError),
}

impl TokenizerError {
    pub(super) fn invalid(origin: &str, reason: impl Display) -> TokenizerError {
        TokenizerError::Invalid { origin: origin.to_owned(), reason: reason.to_string() }
    }
}
