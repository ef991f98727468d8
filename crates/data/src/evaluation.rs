//! A text to evaluate: tokenised whole, cut into consecutive windows that are scored alone.

use std::path::Path;

use plimsoll_model::tokenizer::Tokenizer;

use crate::{DataError, documents};

/// The windows of a text. Only the last one may be shorter than the others; one shorter than 2 tokens is dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalWindows {
    tokens: Vec<u32>,
    length: usize,
}

impl EvalWindows {
    /// Reads and tokenises a text file, for windows of `length` tokens, at least 2.
    pub fn read(path: &Path, tokenizer: &Tokenizer, length: usize) -> Result<EvalWindows, DataError> {
        let text = documents::read_text(path)?;
        let windows = EvalWindows::new(tokenizer.encode_beginning(&text)?, length);
        if windows.is_empty() {
            return Err(DataError::Empty { path: path.to_owned() });
        }
        Ok(windows)
    }

    /// Windows of `length` tokens, at least 2.
    pub fn new(mut tokens: Vec<u32>, length: usize) -> EvalWindows {
        let length = length.max(2);
        let tail = tokens.len() % length;
        if tail < 2 {
            tokens.truncate(tokens.len() - tail);
        }
        EvalWindows { tokens, length }
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
}
