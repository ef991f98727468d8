//! Cutting long texts where no token can span the cut.
//!
//! In byte-level tokenizers a regular expression splits the text first, and tokens stay inside its matches.
//! In none of the expressions known here does a match go on from a letter or a digit into a space or the end of a line, and none
//! looks back; so a cut between the two gives the same matches on both sides. Added tokens are matched before that:
//! they must not hold white space. Where the expression is not known, a long text is tokenised as a whole:
//! there are tokenizers whose tokens span words.

use serde_json::Value;
use tokenizers::{PreTokenizerWrapper, Tokenizer as Engine};

use super::gguf::is_word_by_word;

/// Texts are cut into pieces of about this many bytes.
const PIECE_BYTES: usize = 32 << 10;

/// A piece without such a place is so much longer at most. Then it ends before a sign behind a word or, where a word goes on for so long,
/// in it: what is written in a file shall not decide how much memory its tokens take. Tokens there are not always those of the whole
/// text; added tokens stay whole.
const MOST_BEYOND: usize = 16 << 10;

/// Cuts texts for a tokenizer.
#[derive(Debug)]
pub struct Cutter {
    /// Bytes after which a piece may end.
    most: usize,
    /// The texts of added tokens.
    added: Vec<String>,
    /// Bytes of the longest of them.
    longest: usize,
}

impl Cutter {
    /// Of a tokenizer whose tokens cutting leaves as they are.
    pub fn of(engine: &Engine) -> Option<Cutter> {
        let steps = match engine.get_pre_tokenizer() {
            Some(PreTokenizerWrapper::Sequence(sequence)) => sequence.as_ref(),
            Some(only) => std::slice::from_ref(only),
            None => &[],
        };
        let added = engine.get_added_vocabulary().get_added_tokens_decoder();
        let is_cut = steps.iter().all(is_local)
            && steps.iter().any(parts_words)
            && engine.get_normalizer().is_none()
            && added.values().all(|t| !t.lstrip && !t.rstrip && !t.content.contains(char::is_whitespace));
        is_cut.then(|| Cutter::new(PIECE_BYTES, added.values().map(|token| token.content.clone()).collect()))
    }

    /// One whose pieces end after so many bytes at a fitting place, and part none of these texts.
    pub fn new(most: usize, added: Vec<String>) -> Cutter {
        let longest = added.iter().map(String::len).max().unwrap_or(0);
        Cutter { most, added, longest }
    }

    /// The text in pieces that end at the first fitting place after some bytes.
    pub fn pieces<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (piece, after) = rest.split_at(self.end_of_piece(rest).unwrap_or(rest.len()));
            rest = after;
            Some(piece)
        })
    }

    /// Where the first piece ends, whatever text may follow; `None` where more text would tell.
    pub fn end_of_piece(&self, text: &str) -> Option<usize> {
        if text.len() <= self.most {
            return None;
        }
        let start = text.floor_char_boundary(self.most);
        let (mut after_word, mut behind_word) = (false, None);
        for (offset, c) in text.get(start..)?.char_indices() {
            let place = start + offset;
            if after_word && matches!(c, ' ' | '\n') {
                return Some(place);
            }
            if offset >= MOST_BEYOND {
                // An added token that begins before such a place is to be seen whole.
                let known = text.len() >= place + self.longest;
                return known.then(|| self.outside_of_added(text, behind_word.unwrap_or(place)));
            }
            if after_word && parts_from_word(c) {
                behind_word = Some(place);
            }
            after_word = c.is_alphanumeric();
        }
        None
    }

    /// The place, or the beginning of an added token that it would part.
    fn outside_of_added(&self, text: &str, mut place: usize) -> usize {
        let parted = |place: usize| {
            let first = text.floor_char_boundary(place.saturating_sub(self.longest));
            let end = text.ceil_char_boundary((place + self.longest).min(text.len()));
            let around = text.get(first..end)?;
            let starts = self.added.iter().flat_map(|token| {
                let all = around.match_indices(token.as_str()).map(|(at, _)| first + at);
                all.filter(move |at| *at < place && place < at + token.len())
            });
            starts.min().filter(|start| *start > 0)
        };
        while let Some(start) = parted(place) {
            place = start;
        }
        place
    }
}

/// Whether a sign behind a letter or a digit begins something else in all expressions that are known: not an apostrophe, which may belong
/// to the word, and no mark that belongs to a letter.
fn parts_from_word(c: char) -> bool {
    let is_sign = c.is_ascii_punctuation() && c != '\'';
    is_sign
        || c.is_whitespace()
        || matches!(c, '\u{3000}'..='\u{303f}' | '\u{ff01}'..='\u{ff0f}' | '\u{ff1a}'..='\u{ff20}')
}

/// Whether what the step does at a place depends on the text around it alone.
fn is_local(step: &PreTokenizerWrapper) -> bool {
    match step {
        PreTokenizerWrapper::ByteLevel(level) => !level.add_prefix_space,
        PreTokenizerWrapper::Split(_)
        | PreTokenizerWrapper::Digits(_)
        | PreTokenizerWrapper::Punctuation(_) => true,
        _ => false,
    }
}

/// Whether a letter and a space after it are in different pieces after the step.
fn parts_words(step: &PreTokenizerWrapper) -> bool {
    match step {
        PreTokenizerWrapper::ByteLevel(level) => level.use_regex,
        PreTokenizerWrapper::Split(split) => {
            let described = serde_json::to_value(split).unwrap_or_default();
            let pattern = described.pointer("/pattern/Regex").and_then(Value::as_str);
            let each_match_apart = described.get("behavior").and_then(Value::as_str) == Some("Isolated");
            each_match_apart
                && described.get("invert") == Some(&false.into())
                && pattern.is_some_and(is_word_by_word)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const END: &str = "<|end_of_text|>";

    fn cutter(most: usize) -> Cutter {
        Cutter::new(most, vec![END.to_owned(), "<|im|>".to_owned()])
    }

    /// The pieces of a text that comes in parts.
    fn streamed(cutter: &Cutter, text: &str, part: usize) -> Vec<String> {
        let (mut held, mut all) = (String::new(), Vec::new());
        for c in text.chars() {
            held.push(c);
            if held.len() >= part {
                while let Some(end) = cutter.end_of_piece(&held) {
                    all.push(held.drain(..end).collect());
                }
            }
        }
        while let Some(end) = cutter.end_of_piece(&held) {
            all.push(held.drain(..end).collect());
        }
        all.extend(Some(held).filter(|rest| !rest.is_empty()));
        all
    }

    proptest! {
        #[test]
        fn pieces_are_the_text(text in "[ a-z\\n\\p{L}.1]{0,200}", most in 1usize..50) {
            let cutter = cutter(most);
            let pieces: Vec<&str> = cutter.pieces(&text).collect();
            prop_assert_eq!(pieces.concat(), text.as_str());
            for (left, right) in pieces.iter().zip(pieces.iter().skip(1)) {
                prop_assert!(left.ends_with(char::is_alphanumeric) && right.starts_with([' ', '\n']));
            }
            prop_assert_eq!(streamed(&cutter, &text, 1), pieces);
        }
    }

    #[test]
    fn a_word_without_an_end_is_cut_the_same_however_it_comes() {
        let endless = "é".repeat(20_000);
        let clauses = "word,".repeat(8000);
        let tokens = format!("字字。{END}").repeat(3000);
        let within = format!("{}{END}{END}{}", "x".repeat(100 + MOST_BEYOND - 20), "x".repeat(30_000));
        for text in [endless, clauses, tokens, within] {
            let cutter = cutter(100);
            let pieces: Vec<&str> = cutter.pieces(&text).collect();
            assert!(pieces.len() > 1 && pieces.concat() == text);
            assert!(pieces.iter().rev().skip(1).all(|piece| piece.len() <= 100 + MOST_BEYOND + 4));
            assert_eq!(streamed(&cutter, &text, 5000), pieces);
            // No added token is parted.
            let count = |text: &str| text.matches(END).count();
            assert_eq!(pieces.iter().map(|piece| count(piece)).sum::<usize>(), count(&text));
        }
        let clauses = "word,".repeat(8000);
        let first = cutter(100).pieces(&clauses).next().map(str::to_owned).unwrap();
        assert!(first.ends_with("word"), "behind a word rather than within one");
    }
}
