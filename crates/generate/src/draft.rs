//! Guesses of what comes next, to be verified in one pass (speculative decoding: Leviathan, Kalman, Matias 2023; by prompt look-up: Saxena
//! 2023). A guess changes no token: whatever is drawn is drawn from the model's own logits, by the same sampler.

use crate::sampler::likeliest;
use crate::{GenerateError, Session};

/// Who guesses.
pub trait Draft {
    /// Up to `most` tokens that may follow `context`, the likeliest continuation first to last.
    ///
    /// # Errors
    /// The guess could not be made.
    fn propose(&mut self, context: &[u32], most: usize) -> Result<Vec<u32>, GenerateError>;
}

/// Tokens of the longest end of a text that is looked up, and of the shortest.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;

/// Guesses that what followed the last tokens the last time follows them again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lookup;

impl Draft for Lookup {
    fn propose(&mut self, context: &[u32], most: usize) -> Result<Vec<u32>, GenerateError> {
        for length in (SHORTEST..=LONGEST).rev().filter(|length| *length < context.len()) {
            let end = context.len() - length;
            let (Some(last), Some(before)) = (context.get(end..), context.get(..context.len() - 1)) else {
                break;
            };
            let Some(found) = before.windows(length).rposition(|window| window == last) else { continue };
            // What follows may reach the end of the text: it then goes on as it began.
            let period = end - found;
            let mut guess: Vec<u32> = Vec::with_capacity(most);
            while guess.len() < most {
                let place = found + length + guess.len();
                let token = context.get(place).or_else(|| guess.get(guess.len().checked_sub(period)?));
                let Some(token) = token.copied() else { break };
                guess.push(token);
            }
            return Ok(guess);
        }
        Ok(Vec::new())
    }
}

/// Guesses the likeliest tokens of a smaller model of the same vocabulary.
pub struct DraftModel<'a> {
    session: Session<'a>,
    vocabulary: usize,
}

impl<'a> DraftModel<'a> {
    /// Of a session with that model; it guesses the first so many tokens of its vocabulary.
    pub fn new(session: Session<'a>, vocabulary: usize) -> DraftModel<'a> {
        DraftModel { session, vocabulary }
    }
}

impl Draft for DraftModel<'_> {
    fn propose(&mut self, context: &[u32], most: usize) -> Result<Vec<u32>, GenerateError> {
        let room = self.session.context().saturating_sub(context.len()).saturating_add(1);
        let (most, mut guess) = (most.min(room), Vec::new());
        if most == 0 || context.len() > self.session.context() {
            return Ok(guess);
        }
        let Some(mut logits) = self.session.prefill(context, &|| false)?.logits else { return Ok(guess) };
        loop {
            let known = logits.get(..self.vocabulary).unwrap_or(&logits);
            let Some(token) = likeliest(known) else { return Ok(guess) };
            guess.push(token);
            if guess.len() >= most {
                return Ok(guess);
            }
            logits = self.session.append(&[token])?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_place_where_the_last_tokens_stood_says_what_follows() {
        let guess = |context: &[u32], most| Lookup.propose(context, most).unwrap();
        assert_eq!(guess(&[1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 1, 2], 3), [5, 6, 7]);
        // A longer match counts more than a later one.
        assert_eq!(guess(&[8, 1, 2, 3, 9, 1, 2, 5, 8, 1, 2], 2), [3, 9]);
        assert_eq!(guess(&[1, 2, 3], 4), [0; 0]);
        assert_eq!(guess(&[5, 6, 5, 6], 0), [0; 0]);
        // What repeats itself goes on repeating.
        assert_eq!(guess(&[5, 6, 5, 6], 5), [5, 6, 5, 6, 5]);
        assert_eq!(guess(&[7, 7, 7], 3), [7, 7, 7]);
    }
}
