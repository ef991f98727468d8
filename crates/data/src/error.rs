//! What can be wrong with data.

use std::path::{Path, PathBuf};

use plimsoll_model::chat_template::ChatTemplateError;
use plimsoll_model::tokenizer::TokenizerError;

use crate::records::RecordPlace;

/// Data that cannot be trained or evaluated on.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The OS refused.
    #[error("could not {action} {}: {source}{}", path.display(), remedy(source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// The answer.
        source: std::io::Error,
    },
    /// A pattern that is none.
    #[error("data: {pattern:?} is not a file, a folder or a pattern: {reason}")]
    Pattern {
        /// What was written.
        pattern: String,
        /// Why not.
        reason: String,
    },
    /// A pattern that nothing matches.
    #[error(
        "data: nothing matches {pattern:?}; give a text or JSONL file, a folder of them, or a pattern such as data/*.txt"
    )]
    NothingFound {
        /// What was written.
        pattern: String,
    },
    /// A file whose name does not say what it holds.
    #[error("{}: not a kind of file that is known; .txt, .text and .md are text, .jsonl and .ndjson have a record a line, .json is a list of records, .parquet, .csv and .tsv are tables", path.display())]
    UnknownKind {
        /// The file.
        path: PathBuf,
    },
    /// Bytes that are no text.
    #[error("{}: not UTF-8 at byte {offset}; convert the file to UTF-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Where the first bad byte is, from 0.
        offset: u64,
    },
    /// A line that is no document.
    #[error("{}: line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: u64,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// A record that is none, or does not have the fields.
    #[error("{place}: {reason}")]
    Record {
        /// Where it is.
        place: RecordPlace,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// A file that is not what its name says.
    #[error("{}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A text where records are needed.
    #[error("{}: chats and instructions are records: .jsonl, .ndjson, .json, .parquet, .csv or .tsv; for running text set data.format=text", path.display())]
    NoRecords {
        /// The file.
        path: PathBuf,
    },
    /// A sample that is longer than a sequence, where that is not allowed.
    #[error(
        "{place}: {tokens} tokens, more than data.sequence_length={sequence_length}; raise it, or set data.truncation to right, left or drop"
    )]
    TooLong {
        /// Where it is.
        place: RecordPlace,
        /// Its tokens.
        tokens: usize,
        /// Tokens that a sequence has.
        sequence_length: u64,
    },
    /// More of the data than is allowed are no records, or records of something else.
    #[error(
        "{invalid} of {records} records cannot be used, more than data.max_invalid_share={most} allows; mend them, or raise it to leave them out:{examples}"
    )]
    TooManyInvalid {
        /// Records that are none, or have none of the fields.
        invalid: u64,
        /// Records in all.
        records: u64,
        /// The share that is allowed.
        most: f64,
        /// The first ones, each on a line.
        examples: String,
    },
    /// Files of records without any.
    #[error("{}: there are no records in it", path.display())]
    NoneThere {
        /// The file, or the first of several.
        path: PathBuf,
    },
    /// A device, a pipe or a socket in place of a file.
    #[error("{}: {what}, not a file; write the data to a file first", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Samples of which none can be trained on.
    #[error("none of the {samples} samples can be trained on; {first}")]
    NothingToTrain {
        /// Samples in all.
        samples: u64,
        /// The first one, and why not.
        first: String,
    },
    /// A model without a chat template, where one is needed.
    #[error(
        "{origin}: the model has no chat template; set data.chat_template to a Jinja file, or to alpaca for plain text with headings"
    )]
    NoChatTemplate {
        /// What the tokenizer came from.
        origin: String,
    },
    /// A chat template that is none.
    #[error(transparent)]
    ChatTemplate(#[from] ChatTemplateError),
    /// A text that has nothing in it.
    #[error("{}: there is no text in it", path.display())]
    Empty {
        /// The file, or the first of several.
        path: PathBuf,
    },
    /// A text in which nothing can be predicted.
    #[error(
        "{}: too few tokens: {tokens} found, and at least 2 are needed, for the first is context; add text", path.display()
    )]
    TooFewTokens {
        /// The file, or the first of several.
        path: PathBuf,
        /// Tokens in all.
        tokens: usize,
    },
    /// Less text than one sequence.
    #[error(
        "{key}: {files}: {tokens} tokens, fewer than one sequence of {sequence_length}; {}", shorter(key, *tokens)
    )]
    TooShort {
        /// What it is for: the key that names it.
        key: &'static str,
        /// The files, as they were named.
        files: String,
        /// Tokens in all.
        tokens: u64,
        /// Tokens wanted.
        sequence_length: u64,
    },
    /// Documents without a token to put between them.
    #[error("the tokenizer names no end-of-text token, which goes between documents and after answers")]
    NoEndOfText,
    /// The tokenizer refused.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The background thread is gone without a word.
    #[error("the thread that prepares batches ended unexpectedly")]
    WorkerGone,
}

impl DataError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> DataError {
        move |source| DataError::Io { action, path: path.to_owned(), source }
    }
}

/// What to do about the system's answer, where that is known: the tokens are all that is written here.
fn remedy(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "; the tokens of all texts take 4 bytes each: free some space or choose another output.dir"
        }
        ErrorKind::FileTooLarge => "; raise `ulimit -f`, or choose an output.dir on another file system",
        _ => "",
    }
}

/// What to do about too little text: a sequence's length is that of the training too.
fn shorter(key: &str, tokens: u64) -> String {
    match key {
        "data.validation" => format!("add text, or leave {key} out"),
        _ => format!("add text, or set data.sequence_length={tokens} or less"),
    }
}
