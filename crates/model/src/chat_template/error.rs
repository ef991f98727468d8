//! What can be wrong with a chat template, or with what it is given.

use std::error::Error as _;

use minijinja::{Error, ErrorKind};
use plimsoll_memory::ByteSize;

/// A template that cannot be used, or not for these messages.
#[derive(Debug, thiserror::Error)]
pub enum ChatTemplateError {
    /// The source is no Jinja template.
    #[error("{origin}: chat template, line {line}: {reason}")]
    Syntax {
        /// The file.
        origin: String,
        /// Line of the template, from 1.
        line: usize,
        /// What is wrong there.
        reason: String,
    },
    /// The template itself refuses the messages (`raise_exception`).
    #[error("{origin}: chat template, line {line}, refuses the messages: {message}")]
    Refused {
        /// The file.
        origin: String,
        /// Line of the template, from 1.
        line: usize,
        /// The template's own words.
        message: String,
    },
    /// The template uses something that there is not, or wrongly.
    #[error("{origin}: chat template, line {line}: {reason}")]
    Render {
        /// The file.
        origin: String,
        /// Line of the template, from 1; 0 where it is not known.
        line: usize,
        /// What is wrong there.
        reason: String,
    },
    /// The template took more instructions than any in use needs.
    #[error("{origin}: chat template, line {line}: takes too long; it may loop for ever")]
    TooLong {
        /// The file.
        origin: String,
        /// Line of the template, from 1.
        line: usize,
    },
    /// The template made more than any in use needs.
    #[error(
        "{origin}: chat template, line {line}: it makes more than {} of texts and lists for this chat; no template in use needs as much", ByteSize(*limit)
    )]
    TooLarge {
        /// The file.
        origin: String,
        /// Line of the template, from 1.
        line: usize,
        /// The bytes that it may make.
        limit: u64,
    },
    /// There is no template of that name.
    #[error("{origin}: there is no chat template {name:?}; there are {known}")]
    Missing {
        /// The file.
        origin: String,
        /// The name.
        name: String,
        /// Those that there are.
        known: String,
    },
}

/// What `raise_exception` was called with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub String);

/// More was made than a template may make.
#[derive(Debug, thiserror::Error)]
#[error("more than {limit} bytes")]
pub(super) struct TooLarge {
    /// The bytes that it may make.
    pub limit: u64,
}

impl ChatTemplateError {
    pub(super) fn new(origin: &str, error: &Error) -> ChatTemplateError {
        let (origin, line) = (origin.to_owned(), error.line().unwrap_or(0));
        let mut cause = error.source();
        while let Some(inner) = cause {
            if let Some(Raised(message)) = inner.downcast_ref::<Raised>() {
                return ChatTemplateError::Refused { origin, line, message: message.clone() };
            }
            if let Some(TooLarge { limit }) = inner.downcast_ref::<TooLarge>() {
                return ChatTemplateError::TooLarge { origin, line, limit: *limit };
            }
            cause = inner.source();
        }
        let reason = match (error.detail(), error.source()) {
            (Some(detail), _) => format!("{}: {detail}", error.kind()),
            (None, Some(source)) => format!("{}: {source}", error.kind()),
            (None, None) => error.kind().to_string(),
        };
        match error.kind() {
            ErrorKind::OutOfFuel => ChatTemplateError::TooLong { origin, line },
            ErrorKind::SyntaxError => ChatTemplateError::Syntax { origin, line, reason },
            _ => ChatTemplateError::Render { origin, line, reason },
        }
    }
}
