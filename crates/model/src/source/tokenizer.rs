//! The tokenizer that comes with a model's files.

use super::{Format, ModelError, ModelFiles};
use crate::gguf::families::token_id;
use crate::gguf::{GgufError, GgufFile, Metadata};
use crate::tokenizer::{GgufTokenizerFields, Tokenizer, TokenizerError};

impl ModelFiles {
    /// Reads the tokenizer: from the GGUF itself, or from `tokenizer.json` beside the weights.
    ///
    /// # Errors
    /// It is missing or unusable, or knows more tokens than the model has embeddings.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        let tokenizer = match self.format {
            Format::Gguf => {
                let file = GgufFile::open(&self.path)?;
                let fields = fields(&file.metadata(), self.spec.vocab_size)?;
                file.release();
                Tokenizer::from_gguf(&fields, &self.path.display().to_string())?
            }
            Format::Safetensors => {
                let folder =
                    if self.path.is_dir() { self.path.as_path() } else { super::open::parent(&self.path) };
                Tokenizer::from_hf_dir(folder)?
            }
        };
        let (known, rows) = (tokenizer.vocab_size() as u64, self.spec.vocab_size);
        if known > rows {
            return Err(TokenizerError::Invalid {
                origin: self.path.display().to_string(),
                reason: format!("its tokens have ids up to {}, but the model has embeddings for {rows} only; it belongs to another model", known - 1),
            }
            .into());
        }
        Ok(tokenizer)
    }
}

fn fields(metadata: &Metadata<'_>, vocab_size: u64) -> Result<GgufTokenizerFields, GgufError> {
    let texts = |key: &str| -> Result<Option<Vec<String>>, GgufError> {
        Ok(metadata.strings(key)?.map(|list| list.into_iter().map(str::to_owned).collect()))
    };
    let text = |key: &str| -> Result<Option<String>, GgufError> { Ok(metadata.str(key)?.map(str::to_owned)) };
    let id = |key: &str| token_id(metadata, key, vocab_size);
    let model = metadata.require("tokenizer.ggml.model", text("tokenizer.ggml.model")?)?;
    let tokens = metadata.require("tokenizer.ggml.tokens", texts("tokenizer.ggml.tokens")?)?;
    let merges = texts("tokenizer.ggml.merges")?;
    if model == "gpt2" {
        // Without them every text would silently become single bytes.
        metadata.require("tokenizer.ggml.merges", merges.as_ref())?;
    }
    Ok(GgufTokenizerFields {
        model,
        pre: text("tokenizer.ggml.pre")?,
        tokens,
        scores: metadata.f32s("tokenizer.ggml.scores")?.unwrap_or_default(),
        token_types: metadata.integers("tokenizer.ggml.token_type")?.unwrap_or_default(),
        merges: merges.unwrap_or_default(),
        bos: id("tokenizer.ggml.bos_token_id")?,
        eos: id("tokenizer.ggml.eos_token_id")?,
        unknown: id("tokenizer.ggml.unknown_token_id")?,
        padding: id("tokenizer.ggml.padding_token_id")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        chat_template: text("tokenizer.chat_template")?,
    })
}
