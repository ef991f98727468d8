//! Tokenizers: text to token ids and back, as the model's own files define it.
//!
//! The engine is Hugging Face's `tokenizers`; a GGUF's metadata is turned into the parts of the `tokenizer.json` that it
//! was once made from ([`gguf`]), so that there is one way from files to ids, and saving is writing that document.

mod byte_level;
mod chat;
mod decode;
mod describe;
mod encode;
mod engine;
mod error;
pub mod gguf;
mod guard;
mod hf;
mod pieces;
mod save;
mod specials;
mod to_gguf;
mod train;

use std::sync::Arc;

use tokenizers::Tokenizer as Engine;

pub use chat::{ChatTemplateSource, ChatTemplates};
pub use decode::{SpecialTokens, StreamDecoder};
pub use describe::{SpecialToken, TokenizerKind};
pub use encode::{DocumentEncoder, EncodeOptions, EncodedText};
pub use error::TokenizerError;
pub use gguf::GgufTokenizerFields;
pub use train::BPE_END_OF_TEXT;

/// A tokenizer. Clones share it.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    engine: Engine,
    /// What errors call it: a file's name.
    origin: String,
    specials: Specials,
    /// What encoding with special tokens adds.
    around: specials::Around,
    hidden: encode::Hidden,
    vocab_size: usize,
    decoding: decode::Decoding,
    /// Whether long texts may be cut between words without changing any token.
    /// How texts are cut into pieces, where that leaves tokens as they are.
    cutter: Option<pieces::Cutter>,
}

/// The tokens and texts around the vocabulary.
#[derive(Clone, Debug, Default, PartialEq)]
struct Specials {
    bos: Option<u32>,
    eos: Vec<u32>,
    pad: Option<u32>,
    chat_templates: ChatTemplates,
    model_max_length: Option<u64>,
}

impl Tokenizer {
    /// The tokenizer that a GGUF's metadata describes.
    ///
    /// # Errors
    /// The kind is unknown, or lists contradict each other; `origin` is what the error calls the file.
    pub fn from_gguf(fields: &GgufTokenizerFields, origin: &str) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::from_gguf_fields(fields.clone(), origin)
    }

    /// As [`from_gguf`](Self::from_gguf), using up the fields.
    pub(crate) fn from_gguf_fields(
        mut fields: GgufTokenizerFields,
        origin: &str,
    ) -> Result<Tokenizer, TokenizerError> {
        let mut eos: Vec<u32> = Vec::new();
        for id in fields.ends().into_iter().filter_map(|(_, id)| id) {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
        let specials = Specials {
            bos: fields.bos,
            eos,
            pad: fields.padding,
            chat_templates: ChatTemplates::new(
                fields.chat_template.take(),
                &fields.named_chat_templates,
                origin,
            ),
            model_max_length: None,
        };
        let engine = gguf::engine_parts(fields, origin)?.assemble(origin)?;
        Tokenizer::new(engine, origin.to_owned(), specials)
    }

    /// The built-in tokenizer: a token for every byte, and `<|endoftext|>`.
    pub fn byte_level() -> Result<Tokenizer, TokenizerError> {
        let origin = "the built-in byte tokenizer";
        let engine = byte_level::engine_parts().assemble(origin)?;
        let end = engine.token_to_id(byte_level::END_OF_TEXT);
        let specials = Specials { bos: end, eos: end.into_iter().collect(), pad: end, ..Specials::default() };
        Tokenizer::new(engine, origin.to_owned(), specials)
    }

    fn new(mut engine: Engine, origin: String, specials: Specials) -> Result<Tokenizer, TokenizerError> {
        // A tokenizer saved during training keeps the truncation of its batches, which would cut documents.
        engine.with_padding(None);
        engine.with_truncation(None).map_err(|e| TokenizerError::invalid(&origin, e))?;
        // Ids need not be dense, so their number does not tell the greatest.
        let vocab_size = engine.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
        let around = specials::Around::of(&engine).map_err(|e| TokenizerError::invalid(&origin, e))?;
        let (hidden, decoding) = (encode::Hidden::of(&engine), decode::Decoding::of(&engine));
        let cutter = pieces::Cutter::of(&engine);
        let shared = Shared { engine, origin, specials, around, hidden, vocab_size, decoding, cutter };
        Ok(Tokenizer { shared: Arc::new(shared) })
    }

    /// The text of ids, special tokens left out.
    ///
    /// # Errors
    /// The vocabulary has no such token.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decode_with(ids, SpecialTokens::Skip)
    }

    /// The text of ids.
    ///
    /// # Errors
    /// The vocabulary has no such token.
    pub fn decode_with(&self, ids: &[u32], special: SpecialTokens) -> Result<String, TokenizerError> {
        let mut stream = self.stream_decoder(special);
        let mut text = String::new();
        for id in ids {
            text.push_str(&stream.push(*id)?);
        }
        text.push_str(&stream.finish()?);
        Ok(text)
    }

    /// Decodes one token at a time, never a part of a character.
    pub fn stream_decoder(&self, special: SpecialTokens) -> StreamDecoder<'_> {
        StreamDecoder::new(self, special)
    }

    /// Rows that an embedding needs for all tokens, added ones included: one more than the greatest id.
    pub fn vocab_size(&self) -> usize {
        self.shared.vocab_size
    }

    /// Beginning-of-sequence token.
    pub fn bos_token(&self) -> Option<u32> {
        self.shared.specials.bos
    }

    /// The end-of-text token: the first of those that end a sequence.
    pub fn eos_token(&self) -> Option<u32> {
        self.shared.specials.eos.first().copied()
    }

    /// All tokens that end a sequence.
    pub fn eos_tokens(&self) -> &[u32] {
        &self.shared.specials.eos
    }

    /// Padding token.
    pub fn pad_token(&self) -> Option<u32> {
        self.shared.specials.pad
    }

    /// The tokens that encoding with special tokens puts before and after a text.
    pub fn special_tokens_around(&self) -> (&[u32], &[u32]) {
        (&self.shared.around.before, &self.shared.around.after)
    }

    /// The chat templates (Jinja sources).
    pub fn chat_templates(&self) -> &ChatTemplates {
        &self.shared.specials.chat_templates
    }

    /// What errors call it: the file that it came from.
    pub fn origin(&self) -> &str {
        &self.shared.origin
    }

    /// The id of a token.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.shared.engine.token_to_id(token)
    }

    /// The token of an id, as the vocabulary spells it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.shared.engine.id_to_token(id)
    }

    fn unknown_id(&self, id: u32) -> TokenizerError {
        TokenizerError::UnknownId { origin: self.shared.origin.clone(), id, size: self.vocab_size() }
    }

    fn undecodable(&self, reason: String) -> TokenizerError {
        TokenizerError::Decode { origin: self.shared.origin.clone(), reason }
    }
}
