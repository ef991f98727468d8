//! Texts and chats to tokens to batches: files are read and tokenised once into a token file, from which windows are
//! read as training asks for them. This crate does not know what a step does with a batch.

#![forbid(unsafe_code)]

mod batches;
pub mod chat;
mod dataset;
mod documents;
mod error;
mod evaluation;
mod files;
mod order;
mod records;
mod texts;
mod token_file;

pub use batches::{Batch, Batches, IGNORED_TARGET, SpareBatches, Workers, targets};
pub use dataset::{Dataset, DatasetOptions};
pub use documents::json_lines;
pub use error::DataError;
pub use evaluation::EvalWindows;
pub use files::bytes_of;
pub use records::{Record, RecordPlace, for_each_record, panics_are_caught};
pub use texts::{TextOptions, for_each_text};
