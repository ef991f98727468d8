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
pub const PIECE_BYTES: usize = 32 << 10;

/// A piece without such a place is so much longer at most. Then it ends behind a word or, where a word goes on for so long, in it: what is
/// written in a file shall not decide how much memory its tokens take.
const MOST_BEYOND: usize = 16 << 10;

/// Whether cutting leaves all tokens as they are.
pub fn may_be_cut(engine: &Engine) -> bool {
    let steps = match engine.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::Sequence(sequence)) => sequence.as_ref(),
        Some(only) => std::slice::from_ref(only),
        None => &[],
    };
    let added = engine.get_added_vocabulary().get_added_tokens_decoder();
    steps.iter().all(is_local)
        && steps.iter().any(parts_words)
        && engine.get_normalizer().is_none()
        && added.values().all(|t| !t.lstrip && !t.rstrip && !t.content.contains(char::is_whitespace))
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

/// The text in pieces that end at the first fitting place after `most` bytes.
pub fn cut(text: &str, most: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, after) = rest.split_at(end_of_piece(rest, most).unwrap_or(rest.len()));
        rest = after;
        Some(piece)
    })
}

/// Where the first piece ends, whatever text may follow; `None` where more text would tell.
pub fn end_of_piece(text: &str, most: usize) -> Option<usize> {
    if text.len() <= most {
        return None;
    }
    let start = text.floor_char_boundary(most);
    let (mut after_word, mut behind_word) = (false, None);
    for (offset, c) in text.get(start..)?.char_indices() {
        if after_word && matches!(c, ' ' | '\n') {
            return Some(start + offset);
        }
        if offset >= MOST_BEYOND {
            return Some(behind_word.unwrap_or(start + offset));
        }
        let in_word = c.is_alphanumeric();
        if after_word && !in_word {
            behind_word = Some(start + offset);
        }
        after_word = in_word;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_the_text(text in "[ a-z\\n\\p{L}.1]{0,200}", most in 1usize..50) {
            let pieces: Vec<&str> = cut(&text, most).collect();
            prop_assert_eq!(pieces.concat(), text.as_str());
            for (left, right) in pieces.iter().zip(pieces.iter().skip(1)) {
                prop_assert!(left.ends_with(char::is_alphanumeric) && right.starts_with([' ', '\n']));
            }
        }

        /// A text that comes bit by bit is cut as one that is there from the beginning.
        #[test]
        fn a_piece_ends_where_it_ends_whatever_follows(text in "[ a-z\\n\\p{L}.1]{0,200}", most in 1usize..50) {
            let Some(end) = end_of_piece(&text, most) else { return Ok(()) };
            for (more, c) in text.char_indices().map(|(place, c)| (place + c.len_utf8(), c)) {
                let known = end_of_piece(&text[..more], most);
                prop_assert!(known == Some(end) || known.is_none() && more < end + c.len_utf8());
            }
        }
    }

    #[test]
    fn a_word_without_an_end_is_cut() {
        let lengths = |text: &str| cut(text, 100).map(str::len).collect::<Vec<usize>>();
        assert_eq!(lengths(&"é".repeat(10_000)), [100 + MOST_BEYOND, 20_000 - 100 - MOST_BEYOND]);
        // Behind a word rather than within one.
        let clauses = "word,".repeat(4000);
        let pieces: Vec<&str> = cut(&clauses, 100).collect();
        assert!(pieces.len() == 2 && pieces[0].ends_with("word") && pieces.concat() == clauses);
    }
}
