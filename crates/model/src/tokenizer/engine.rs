//! The engine, put together from its parts.
//!
//! The engine's own reader makes a tree of JSON values of the vocabulary and the merges first, which takes several times the
//! memory of the finished tables. Here they go straight into the tables, whether they come from a `tokenizer.json`
//! ([`document`]) or from a GGUF.

pub mod document;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::models::unigram::Unigram;
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    Tokenizer as Engine, TokenizerBuilder,
};

use super::TokenizerError;
use super::guard::guarded;
use crate::shown::short_reason;

type Builder = TokenizerBuilder<
    ModelWrapper,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// What an engine consists of; the small parts as `tokenizer.json` describes them, null where there is none.
pub struct Parts {
    pub added_tokens: Vec<AddedToken>,
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub post_processor: Value,
    pub decoder: Value,
    pub model: ModelTables,
}

/// The large part: a vocabulary, and how texts become tokens of it.
pub enum ModelTables {
    /// Pairs are merged in the order of a list.
    Bpe { vocab: Vocab, merges: Merges, settings: BpeSettings },
    /// The likeliest way to cut a text, by the logarithms of probabilities.
    Unigram { vocab: Vec<(String, f64)>, unk_id: Option<usize>, byte_fallback: bool },
}

/// What `tokenizer.json` says of a BPE model beside its tables.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct BpeSettings {
    pub dropout: Option<f32>,
    pub unk_token: Option<String>,
    pub continuing_subword_prefix: Option<String>,
    pub end_of_word_suffix: Option<String>,
    pub fuse_unk: Option<bool>,
    pub byte_fallback: Option<bool>,
    pub ignore_merges: Option<bool>,
}

impl Parts {
    /// The engine. `origin` is what the error calls the file.
    ///
    /// # Errors
    /// The parts contradict each other, or one is unknown.
    pub fn assemble(self, origin: &str) -> Result<Engine, TokenizerError> {
        guarded(|| {
            let mut engine: Engine = Builder::new()
                .with_model(self.model.build()?)
                .with_normalizer(serde_json::from_value(self.normalizer)?)
                .with_pre_tokenizer(serde_json::from_value(self.pre_tokenizer)?)
                .with_post_processor(serde_json::from_value(self.post_processor)?)
                .with_decoder(serde_json::from_value(self.decoder)?)
                .build()?
                .into();
            engine.add_tokens(self.added_tokens)?;
            Ok(engine)
        })
        .map_err(|reason| TokenizerError::invalid(origin, short_reason(&reason)))
    }
}

impl ModelTables {
    fn build(self) -> tokenizers::Result<ModelWrapper> {
        match self {
            ModelTables::Bpe { vocab, merges, settings } => {
                let mut model = BPE::builder()
                    .vocab_and_merges(vocab, merges)
                    .fuse_unk(settings.fuse_unk.unwrap_or(false))
                    .byte_fallback(settings.byte_fallback.unwrap_or(false))
                    .ignore_merges(settings.ignore_merges.unwrap_or(false));
                if let Some(dropout) = settings.dropout {
                    model = model.dropout(dropout);
                }
                if let Some(token) = settings.unk_token {
                    model = model.unk_token(token);
                }
                if let Some(prefix) = settings.continuing_subword_prefix {
                    model = model.continuing_subword_prefix(prefix);
                }
                if let Some(suffix) = settings.end_of_word_suffix {
                    model = model.end_of_word_suffix(suffix);
                }
                Ok(model.build()?.into())
            }
            ModelTables::Unigram { vocab, unk_id, byte_fallback } => {
                Ok(Unigram::from(vocab, unk_id, byte_fallback)?.into())
            }
        }
    }
}
