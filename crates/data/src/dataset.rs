//! A data set: files tokenised into one stream of tokens, cut into windows of equal length.
//!
//! Documents are joined by the end-of-text token where there is more than one. A tail shorter than a window is left out.

use std::path::Path;

use plimsoll_model::tokenizer::Tokenizer;

use crate::files::expand;
use crate::order;
use crate::token_file::{TokenFile, TokenWriter};
use crate::{DataError, documents};

/// What a data set is made of, and how it is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetOptions {
    /// Files, folders, patterns.
    pub patterns: Vec<String>,
    /// Field of a JSONL line that holds its text.
    pub text_field: String,
    /// Whether an end-of-text token follows the last document too.
    pub append_eos: bool,
    /// Bytes between a file with a document a line and the tokenizer.
    pub buffer_bytes: usize,
    /// Tokens of a window.
    pub sequence_length: u64,
    /// Seed of the order of windows; `None` takes them as they come.
    pub shuffle: Option<u64>,
    /// Whether documents of a window are told apart: the end of one does not predict the beginning of the next.
    pub document_mask: bool,
}

/// A data set.
#[derive(Debug)]
pub struct Dataset {
    tokens: TokenFile,
    sequence_length: u64,
    shuffle: Option<u64>,
    document_end: Option<u32>,
}

impl Dataset {
    /// Reads and tokenises the files. Tokens are kept in an unnamed file in `folder`.
    pub fn open(
        options: &DatasetOptions,
        tokenizer: &Tokenizer,
        folder: &Path,
    ) -> Result<Dataset, DataError> {
        let files = expand(&options.patterns)?;
        let mut writer = TokenWriter::new(folder)?;
        let end = tokenizer.eos_token();
        let mut documents = 0u64;
        for file in &files {
            documents::for_each(file, &options.text_field, options.buffer_bytes, &mut |text| {
                if documents > 0 {
                    writer.append(&[end.ok_or(DataError::NoEndOfText)?])?;
                }
                documents += 1;
                tokenizer.encode_document(text, &mut |piece| writer.append(piece))
            })?;
        }
        if documents == 0 {
            let path = files.first().map(|f| f.path.clone()).unwrap_or_default();
            return Err(DataError::Empty { path });
        }
        if options.append_eos {
            writer.append(&[end.ok_or(DataError::NoEndOfText)?])?;
        }
        let document_end = match options.document_mask {
            true => Some(end.ok_or(DataError::NoEndOfText)?),
            false => None,
        };
        let tokens = writer.finish()?;
        let sequence_length = options.sequence_length;
        if tokens.len() < sequence_length || sequence_length == 0 {
            return Err(DataError::TooShort { tokens: tokens.len(), sequence_length });
        }
        Ok(Dataset { tokens, sequence_length, shuffle: options.shuffle, document_end })
    }

    /// Tokens in all.
    pub fn tokens(&self) -> u64 {
        self.tokens.len()
    }

    /// Tokens of a window.
    pub fn sequence_length(&self) -> u64 {
        self.sequence_length
    }

    /// The token that ends a document, where documents are told apart.
    pub fn document_end(&self) -> Option<u32> {
        self.document_end
    }

    /// Whole windows: an epoch.
    pub fn windows(&self) -> u64 {
        self.tokens.len() / self.sequence_length
    }

    /// A text that differs where the windows or their order do, for runs that are resumed.
    pub fn identity(&self) -> String {
        let order = self.shuffle.map_or("in order".to_owned(), |seed| format!("shuffled by {seed}"));
        let documents = if self.document_end.is_some() { ", documents apart" } else { "" };
        format!(
            "{:016x}, {} tokens, windows of {}, {order}{documents}",
            self.tokens.hash(),
            self.tokens.len(),
            self.sequence_length
        )
    }

    /// Appends the window that is the `position`-th since the beginning of training; after the last one they begin anew.
    pub fn read_window(&self, position: u64, out: &mut Vec<u32>) -> Result<(), DataError> {
        let window = order::window(position, self.windows(), self.shuffle);
        self.tokens.read(window * self.sequence_length, self.sequence_length as usize, out)
    }
}
