//! The built-in tokenizer for training from scratch: token i is byte i, token 256 ends a text.

use serde_json::{Map, Value, json};

/// What ends a text.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Its `tokenizer.json`.
pub fn tokenizer_json() -> Value {
    let mut vocab: Map<String, Value> =
        (0..=255u8).map(|byte| (byte_char(byte).to_string(), Value::from(byte))).collect();
    vocab.insert(END_OF_TEXT.to_owned(), Value::from(256));
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [super::gguf::added_token(256, END_OF_TEXT, true)],
        "normalizer": null,
        "pre_tokenizer": super::gguf::byte_level(true),
        "post_processor": null,
        "decoder": super::gguf::byte_level(true),
        "model": super::gguf::bpe(vocab.into(), Vec::new(), None, false),
    })
}

/// The printable character that stands for a byte in byte-level vocabularies (GPT-2's table): itself where it is
/// printable, else the next one from U+0100 on.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}
