//! Tokenizers: text to token ids and back, as the model's own files define it.
//!
//! The engine is Hugging Face's `tokenizers`; a GGUF's metadata is turned into the `tokenizer.json` that it was
//! once made from ([`gguf`]), so that there is one way from files to ids, and saving is writing that document.

mod byte_level;
mod error;
pub mod gguf;
mod guard;
mod pieces;
mod save;

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::Tokenizer as Engine;

pub use error::TokenizerError;
pub use gguf::GgufTokenizerFields;

use crate::shown::short_reason;
use guard::guarded;

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
    vocab_size: usize,
    /// Whether long texts may be cut after a letter and before white space without changing any token.
    cuttable: bool,
}

/// The tokens and texts around the vocabulary.
#[derive(Clone, Debug, Default, PartialEq)]
struct Specials {
    bos: Option<u32>,
    eos: Vec<u32>,
    pad: Option<u32>,
    chat_template: Option<String>,
    model_max_length: Option<u64>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a Hugging Face folder and what other files there say of special tokens.
    ///
    /// # Errors
    /// The file is missing, is no tokenizer, or names special tokens that it does not have.
    pub fn from_hf_dir(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let io = |source| TokenizerError::Io { path: path.clone(), source };
        let bytes = std::fs::read(&path).map_err(io)?;
        let origin = path.display().to_string();
        let engine = load(&bytes, &origin)?;
        drop(bytes);
        let config = optional_json(&folder.join("tokenizer_config.json"))?;
        let generation = optional_json(&folder.join("generation_config.json"))?;
        let named = |key: &str| token_text(config.get(key)).and_then(|text| engine.token_to_id(&text));
        let numbered = |key: &str| match generation.get(key) {
            Some(Value::Array(list)) => list.iter().filter_map(token_id).collect(),
            Some(value) => token_id(value).into_iter().collect(),
            None => Vec::new(),
        };
        let mut eos: Vec<u32> = named("eos_token").into_iter().collect();
        for id in numbered("eos_token_id") {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
        let template_file = std::fs::read_to_string(folder.join("chat_template.jinja")).ok();
        let specials = Specials {
            bos: named("bos_token").or_else(|| numbered("bos_token_id").first().copied()),
            eos,
            pad: named("pad_token"),
            chat_template: template_file
                .or_else(|| config.get("chat_template").and_then(Value::as_str).map(str::to_owned)),
            model_max_length: config.get("model_max_length").and_then(Value::as_u64),
        };
        Ok(Tokenizer::new(engine, origin, specials))
    }

    /// The tokenizer that a GGUF's metadata describes.
    ///
    /// # Errors
    /// The kind is unknown, or lists contradict each other; `origin` is what the error calls the file.
    pub fn from_gguf(fields: &GgufTokenizerFields, origin: &str) -> Result<Tokenizer, TokenizerError> {
        let document = gguf::tokenizer_json(fields, origin)?;
        let text = document.to_string();
        drop(document);
        let engine = load(text.as_bytes(), origin)?;
        let size = fields.tokens.len() as u64;
        let inside = |key: &'static str, id: Option<u32>| match id {
            Some(id) if u64::from(id) >= size => Err(TokenizerError::Field {
                origin: origin.to_owned(),
                key,
                reason: format!("{id} is not below {size}"),
            }),
            id => Ok(id),
        };
        inside("tokenizer.ggml.unknown_token_id", fields.unknown)?;
        let specials = Specials {
            bos: inside("tokenizer.ggml.bos_token_id", fields.bos)?,
            eos: inside("tokenizer.ggml.eos_token_id", fields.eos)?.into_iter().collect(),
            pad: inside("tokenizer.ggml.padding_token_id", fields.padding)?,
            chat_template: fields.chat_template.clone(),
            model_max_length: None,
        };
        Ok(Tokenizer::new(engine, origin.to_owned(), specials))
    }

    /// The built-in tokenizer: a token for every byte, and `<|endoftext|>`.
    pub fn byte_level() -> Result<Tokenizer, TokenizerError> {
        let origin = "the built-in byte tokenizer";
        let text = byte_level::tokenizer_json().to_string();
        let engine = load(text.as_bytes(), origin)?;
        let end = engine.token_to_id(byte_level::END_OF_TEXT);
        let specials = Specials { bos: end, eos: end.into_iter().collect(), pad: end, ..Specials::default() };
        Ok(Tokenizer::new(engine, origin.to_owned(), specials))
    }

    fn new(mut engine: Engine, origin: String, specials: Specials) -> Tokenizer {
        // A tokenizer saved during training keeps the truncation of its batches, which would cut documents silently.
        engine.with_padding(None);
        // Only a truncation that is set can be refused.
        let _ = engine.with_truncation(None);
        let cuttable = pieces::may_be_cut(&engine);
        // Ids need not be dense, so their number does not tell the greatest.
        let vocab_size = engine.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
        Tokenizer { shared: Arc::new(Shared { engine, origin, specials, vocab_size, cuttable }) }
    }

    /// The ids of a text. No special token is added; those written in the text are recognised.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.encode_document::<TokenizerError>(text, &mut |piece| {
            ids.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(ids)
    }

    /// As [`encode`](Self::encode), piece by piece, so that the memory of long texts stays bounded where the
    /// tokenizer can be cut: byte-level ones can; others take the text as a whole.
    pub fn encode_document<E: From<TokenizerError>>(
        &self,
        text: &str,
        sink: &mut dyn FnMut(&[u32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let most = if self.shared.cuttable { pieces::PIECE_BYTES } else { usize::MAX };
        for piece in pieces::cut(text, most) {
            let encoding = guarded(|| self.shared.engine.encode_fast(piece, false))
                .map_err(|reason| TokenizerError::Encode { origin: self.shared.origin.clone(), reason })?;
            sink(encoding.get_ids())?;
        }
        Ok(())
    }

    /// The text of ids, special tokens left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        if let Some(id) = ids.iter().find(|id| self.id_to_token(**id).is_none()) {
            return Err(self.unknown_id(*id));
        }
        guarded(|| self.shared.engine.decode(ids, true)).map_err(|reason| self.undecodable(reason))
    }

    /// Decodes one token at a time, never a part of a character.
    pub fn decode_stream(&self) -> DecodeStream<'_> {
        DecodeStream { tokenizer: self, inner: self.shared.engine.decode_stream(true) }
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

    /// The chat template (Jinja), where there is one.
    pub fn chat_template(&self) -> Option<&str> {
        self.shared.specials.chat_template.as_deref()
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

type InnerStream<'a> = tokenizers::tokenizer::DecodeStream<
    'a,
    tokenizers::ModelWrapper,
    tokenizers::NormalizerWrapper,
    tokenizers::PreTokenizerWrapper,
    tokenizers::PostProcessorWrapper,
    tokenizers::DecoderWrapper,
>;

/// Text as tokens come in.
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    inner: InnerStream<'a>,
}

impl DecodeStream<'_> {
    /// What the token adds to the text; `None` while a character is incomplete.
    pub fn step(&mut self, id: u32) -> Result<Option<String>, TokenizerError> {
        if self.tokenizer.id_to_token(id).is_none() {
            return Err(self.tokenizer.unknown_id(id));
        }
        guarded(|| self.inner.step(id)).map_err(|reason| self.tokenizer.undecodable(reason))
    }
}

fn load(document: &[u8], origin: &str) -> Result<Engine, TokenizerError> {
    guarded(|| Engine::from_bytes(document))
        .map_err(|reason| TokenizerError::invalid(origin, short_reason(&reason)))
}

/// A file's JSON, or an empty document where there is no file.
fn optional_json(path: &Path) -> Result<Value, TokenizerError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|e| TokenizerError::invalid(&path.display().to_string(), e)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(source) => Err(TokenizerError::Io { path: path.to_owned(), source }),
    }
}

/// A special token as configurations write it: its text, or an object that has it.
fn token_text(value: Option<&Value>) -> Option<String> {
    let value = value?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
