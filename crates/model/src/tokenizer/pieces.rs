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
        let (piece, after) = rest.split_at(end_of_piece(rest, most));
        rest = after;
        Some(piece)
    })
}

fn end_of_piece(text: &str, most: usize) -> usize {
    if text.len() <= most {
        return text.len();
    }
    let start = text.floor_char_boundary(most);
    let mut after_word = false;
    for (offset, c) in text[start..].char_indices() {
        if after_word && matches!(c, ' ' | '\n') {
            return start + offset;
        }
        after_word = c.is_alphanumeric();
    }
    text.len()
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
    }
}
