//! Ids to text: what bytes a token stands for, and text out of bytes as they come.
//!
//! Bytes that are no UTF-8 become U+FFFD, one for each longest part that could have begun a character
//! (Unicode, chapter 3.9), whichever way the tokens cut them. Hugging Face's byte-fallback decoder differs
//! there alone: it replaces every byte of a run that has an invalid one.

use serde_json::Value;
use tokenizers::{DecoderWrapper, Tokenizer as Engine};

use super::byte_level::char_byte;
use super::guard::guarded;
use super::{Tokenizer, TokenizerError};

/// How tokens become bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decoding {
    /// GPT-2's printable characters for bytes.
    ByteLevel,
    /// `▁` for a space, `<0x0A>` for a byte; the space that encoding puts before a text is taken off again.
    SentencePiece { strip_first_space: bool },
    /// As the engine does, which needs all tokens at once.
    Engine,
}

impl Decoding {
    pub fn of(engine: &Engine) -> Decoding {
        match engine.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Decoding::ByteLevel,
            Some(DecoderWrapper::Metaspace(metaspace)) if metaspace.get_replacement() == '▁' => {
                let never = tokenizers::pre_tokenizers::metaspace::PrependScheme::Never;
                Decoding::SentencePiece { strip_first_space: metaspace.get_prepend_scheme() != never }
            }
            Some(other) => {
                serde_json::to_value(other).ok().and_then(|d| sentence_piece(&d)).unwrap_or(Decoding::Engine)
            }
            None => Decoding::Engine,
        }
    }
}

/// The row of decoders that SentencePiece's vocabularies come with: `▁` to space, bytes, all in one, and
/// perhaps one space off.
fn sentence_piece(decoder: &Value) -> Option<Decoding> {
    let steps = decoder.get("decoders")?.as_array()?;
    let kind = |step: &Value| step.get("type").and_then(Value::as_str).map(str::to_owned);
    let kinds: Vec<String> = steps.iter().filter_map(kind).collect();
    let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
    let strip_first_space = match kinds.as_slice() {
        ["Replace", "ByteFallback", "Fuse"] => false,
        ["Replace", "ByteFallback", "Fuse", "Strip"] => {
            let strip = steps.last()?;
            let is = |key: &str, wanted: Value| strip.get(key) == Some(&wanted);
            if !(is("content", " ".into()) && is("start", 1.into()) && is("stop", 0.into())) {
                return None;
            }
            true
        }
        _ => return None,
    };
    let replace = steps.first()?;
    let pattern = replace.get("pattern")?.get("String")?.as_str()?;
    (pattern == "▁" && replace.get("content")?.as_str()? == " ")
        .then_some(Decoding::SentencePiece { strip_first_space })
}

/// What becomes of special tokens in a decoded text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialTokens {
    /// They are left out.
    #[default]
    Skip,
    /// They are written out.
    Keep,
}

/// Text as tokens come in: only whole characters, and all of them once [`finish`](Self::finish) was called.
///
/// The pieces together are [`Tokenizer::decode_with`] of all tokens. Of a tokenizer whose decoder is neither
/// byte-level nor SentencePiece's, the text comes as a whole at the end.
#[derive(Clone, Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    special: SpecialTokens,
    /// The beginning of a character.
    held: Vec<u8>,
    /// Whether a space that comes next is the one that encoding put before the text.
    strip_space: bool,
    /// All tokens, where only the engine can decode them.
    tokens: Vec<u32>,
}

impl<'a> StreamDecoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, special: SpecialTokens) -> StreamDecoder<'a> {
        let strip_space = tokenizer.shared.decoding == Decoding::SentencePiece { strip_first_space: true };
        StreamDecoder { tokenizer, special, held: Vec::new(), strip_space, tokens: Vec::new() }
    }

    /// The text that the token completes; empty while a character is incomplete.
    ///
    /// # Errors
    /// The vocabulary has no such token; the stream goes on as if it had not been there.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        let token = self.tokenizer.id_to_token(id).ok_or_else(|| self.tokenizer.unknown_id(id))?;
        let added = self.tokenizer.shared.engine.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        if added.is_some_and(|added| added.special) && self.special == SpecialTokens::Skip {
            return Ok(String::new());
        }
        match self.tokenizer.shared.decoding {
            Decoding::Engine => {
                self.tokens.push(id);
                return Ok(String::new());
            }
            Decoding::ByteLevel => match token.chars().map(char_byte).collect::<Option<Vec<u8>>>() {
                Some(bytes) if added.is_none() => self.held.extend(bytes),
                // An added token stands for its own text.
                _ => self.held.extend_from_slice(token.as_bytes()),
            },
            Decoding::SentencePiece { .. } => match byte_token(&token) {
                Some(byte) => self.held.push(byte),
                None => self.held.extend_from_slice(token.replace('▁', " ").as_bytes()),
            },
        }
        if self.strip_space && !self.held.is_empty() {
            self.strip_space = false;
            if self.held.first() == Some(&b' ') {
                self.held.remove(0);
            }
        }
        Ok(take_text(&mut self.held))
    }

    /// What is left: U+FFFD for the beginning of a character whose end never came.
    pub fn finish(self) -> Result<String, TokenizerError> {
        if self.tokenizer.shared.decoding == Decoding::Engine {
            let skip = self.special == SpecialTokens::Skip;
            return guarded(|| self.tokenizer.shared.engine.decode(&self.tokens, skip))
                .map_err(|reason| self.tokenizer.undecodable(reason));
        }
        Ok(String::from_utf8_lossy(&self.held).into_owned())
    }
}

/// Takes whole characters and bytes that can be in none; leaves what may be the beginning of one.
fn take_text(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = held.as_slice();
    let left: &[u8] = loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                break &[];
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                let Some(invalid) = error.error_len() else { break after };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = after.get(invalid..).unwrap_or_default();
            }
        }
    };
    *held = left.to_vec();
    text
}

/// The byte of `<0x0A>`.
pub fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let hexadecimal = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    hexadecimal.then(|| u8::from_str_radix(digits, 16).ok())?
}
