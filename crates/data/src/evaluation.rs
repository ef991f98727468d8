//! A text to evaluate: tokenised whole, cut into consecutive windows that are scored alone.

use std::path::Path;

use plimsoll_model::tokenizer::Tokenizer;

use crate::chat::Skipped;
use crate::files::{Wanted, expand};
use crate::{DataError, documents};

/// Bytes between a file and the tokenizer.
const BUFFER_BYTES: usize = 64 << 10;

/// The windows of a text. Only the last one may be shorter than the others; one shorter than 2 tokens is dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalWindows {
    tokens: Vec<u32>,
    length: usize,
    left_out: Vec<Skipped>,
}

impl EvalWindows {
    /// Reads and tokenises a text file, or the texts of a file of records with the end-of-text token between them, as training does,
    /// for windows of `length` tokens, at least 2. `text_field` holds the text of a record; more than a share of
    /// `max_invalid_share` without one is an error.
    ///
    /// # Errors
    /// [`DataError`] with the file: it cannot be read, has no text, or too many records have none.
    pub fn read(
        path: &Path,
        text_field: &str,
        max_invalid_share: f64,
        tokenizer: &Tokenizer,
        length: usize,
    ) -> Result<EvalWindows, DataError> {
        let files = expand(&[path.to_string_lossy().into_owned()], Wanted::Texts)?;
        let mut tokens = Vec::new();
        let append = &mut |piece: &[u32]| {
            tokens.extend_from_slice(piece);
            Ok(())
        };
        let left_out =
            documents::tokens(&files, text_field, BUFFER_BYTES, max_invalid_share, tokenizer, append)?;
        let (found, path) = (tokens.len(), path.to_owned());
        let windows = EvalWindows { left_out, ..EvalWindows::new(tokens, length) };
        match (windows.is_empty(), found) {
            (false, _) => Ok(windows),
            (true, 0) => Err(DataError::Empty { path }),
            (true, tokens) => Err(DataError::TooFewTokens { path, tokens }),
        }
    }

    /// Windows of `length` tokens, at least 2.
    pub fn new(mut tokens: Vec<u32>, length: usize) -> EvalWindows {
        let length = length.max(2);
        let tail = tokens.len() % length;
        if tail < 2 {
            tokens.truncate(tokens.len() - tail);
        }
        EvalWindows { tokens, length, left_out: Vec::new() }
    }

    /// The records that have no text, by reason.
    pub fn left_out(&self) -> &[Skipped] {
        &self.left_out
    }

    /// Number of windows.
    pub fn len(&self) -> usize {
        self.tokens.len().div_ceil(self.length)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens of the longest window.
    pub fn longest(&self) -> usize {
        self.tokens.len().min(self.length)
    }

    /// The tokens of a window; none outside `0..len()`.
    pub fn window(&self, index: usize) -> &[u32] {
        let start = (index * self.length).min(self.tokens.len());
        &self.tokens[start..(start + self.length).min(self.tokens.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: u32, length: usize, expected: &[usize]) {
        let windows = EvalWindows::new((0..tokens).collect(), length);
        let lengths: Vec<usize> = (0..windows.len()).map(|i| windows.window(i).len()).collect();
        assert_eq!(lengths, expected, "{tokens} by {length}");
    }

    #[test]
    fn a_tail_counts_from_two_tokens_on() {
        check(10, 4, &[4, 4, 2]);
        check(9, 4, &[4, 4]);
        check(8, 4, &[4, 4]);
        check(3, 4, &[3]);
        check(1, 4, &[]);
        check(0, 4, &[]);
    }

    #[test]
    fn a_single_token_is_too_few() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.txt");
        let refused = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let read = EvalWindows::read(&path, "text", 0.0, &Tokenizer::byte_level().unwrap(), 8);
            read.map(|windows| windows.len()).unwrap_err().to_string()
        };
        let one = refused("a");
        assert!(one.contains("too few tokens: 1 found, and at least 2 are needed"), "{one}");
        assert!(refused("").contains("there is no text in it"));
    }
}
