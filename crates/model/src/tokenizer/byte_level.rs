//! The built-in tokenizer for training from scratch: token i is byte i, token 256 ends a text.

use serde_json::Value;
use tokenizers::models::bpe::Vocab;

use super::engine::{BpeSettings, ModelTables, Parts};
use super::gguf::{added_token, byte_level};

/// What ends a text.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// The parts of its engine.
pub fn engine_parts() -> Parts {
    let bytes = (0..=255u8).map(|byte| (byte_char(byte).to_string(), u32::from(byte)));
    let mut vocab = Vocab::new();
    vocab.extend(bytes.chain([(END_OF_TEXT.to_owned(), 256)]));
    Parts {
        added_tokens: vec![added_token(END_OF_TEXT, true)],
        normalizer: Value::Null,
        pre_tokenizer: byte_level(true),
        post_processor: Value::Null,
        decoder: byte_level(true),
        model: ModelTables::Bpe { vocab, merges: Vec::new(), settings: BpeSettings::default() },
    }
}

/// The printable character that stands for a byte in byte-level vocabularies (GPT-2's table): itself where it is
/// printable, else the next one from U+0100 on.
fn byte_char(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !is_printable(*b)).count() as u32;
    char::from_u32(FIRST_STAND_IN + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that a character stands for; none for a character that stands for no byte.
pub fn char_byte(character: char) -> Option<u8> {
    match u8::try_from(u32::from(character)) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => {
            let place = u32::from(character).checked_sub(FIRST_STAND_IN)?;
            (0..=255u8).filter(|b| !is_printable(*b)).nth(place as usize)
        }
    }
}

const FIRST_STAND_IN: u32 = 0x100;

fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_stand_for_their_bytes() {
        assert!((0..=255u8).all(|byte| char_byte(byte_char(byte)) == Some(byte)));
        assert_eq!([' ', '\u{ad}', '\u{144}', '中'].map(char_byte), [None; 4]);
        assert_eq!((byte_char(b' '), byte_char(b'\n')), ('Ġ', 'Ċ'));
    }
}
