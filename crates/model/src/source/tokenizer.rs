//! The tokenizer that comes with a model's files.

use std::path::Path;

use super::{Format, ModelError, ModelFiles};
use crate::gguf::{GgufError, GgufFile, Metadata, Value};
use crate::tokenizer::{GgufTokenizerFields, Tokenizer, TokenizerError};

impl ModelFiles {
    /// Reads the tokenizer: from the GGUF itself, or from `tokenizer.json` beside the weights.
    ///
    /// # Errors
    /// It is missing or unusable, or knows more tokens than the model has embeddings.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        let tokenizer = match self.format {
            Format::Gguf => Tokenizer::from_gguf_file(&self.path)?,
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

impl ModelFiles {
    /// The tokenizer as GGUF metadata: the file's own, or made from `tokenizer.json`.
    ///
    /// # Errors
    /// It is missing or unusable, or GGUF has no words for it.
    pub fn tokenizer_fields(&self) -> Result<GgufTokenizerFields, ModelError> {
        match self.format {
            Format::Gguf => {
                let file = GgufFile::open(&self.path)?;
                let fields = fields(&file.metadata())?;
                file.release();
                Ok(fields)
            }
            Format::Safetensors => Ok(self.tokenizer()?.to_gguf(&self.spec.name)?),
        }
    }
}

impl Tokenizer {
    /// The tokenizer in a GGUF, whatever model is in it, or none.
    ///
    /// # Errors
    /// The file is no GGUF, or its tokenizer is missing or unusable.
    pub fn from_gguf_file(path: &Path) -> Result<Tokenizer, ModelError> {
        let file = GgufFile::open(path)?;
        let fields = fields(&file.metadata())?;
        drop(file);
        Ok(Tokenizer::from_gguf_fields(fields, &path.display().to_string())?)
    }
}

fn fields(metadata: &Metadata<'_>) -> Result<GgufTokenizerFields, GgufError> {
    let texts = |key: &str| -> Result<Option<Vec<String>>, GgufError> {
        Ok(metadata.strings(key)?.map(|list| list.into_iter().map(str::to_owned).collect()))
    };
    let text = |key: &str| -> Result<Option<String>, GgufError> { Ok(metadata.str(key)?.map(str::to_owned)) };
    let id = |key: &str| -> Result<Option<u32>, GgufError> {
        if is_no_token(metadata, key) {
            return Ok(None);
        }
        match metadata.u64(key)? {
            Some(id) => {
                u32::try_from(id).map(Some).map_err(|_| metadata.refuse(key, format!("{id} is no token id")))
            }
            None => Ok(None),
        }
    };
    let model = metadata.require("tokenizer.ggml.model", text("tokenizer.ggml.model")?)?;
    let tokens = metadata.require("tokenizer.ggml.tokens", texts("tokenizer.ggml.tokens")?)?;
    let merges = texts("tokenizer.ggml.merges")?;
    if matches!(model.as_str(), "gpt2" | "gemma4") {
        // Without them every text would silently become single bytes.
        metadata.require("tokenizer.ggml.merges", merges.as_ref())?;
    }
    let charsmap = metadata.integers("tokenizer.ggml.precompiled_charsmap")?.unwrap_or_default();
    // Stored as signed or unsigned bytes; the bits count.
    let precompiled_charsmap = charsmap.into_iter().map(|byte| byte as u8).collect();
    Ok(GgufTokenizerFields {
        model_name: text("general.name")?,
        model,
        pre: text("tokenizer.ggml.pre")?,
        tokens,
        scores: metadata.f32s("tokenizer.ggml.scores")?.unwrap_or_default(),
        token_types: metadata.integers("tokenizer.ggml.token_type")?.unwrap_or_default(),
        merges: merges.unwrap_or_default(),
        bos: id("tokenizer.ggml.bos_token_id")?,
        eos: id("tokenizer.ggml.eos_token_id")?,
        eot: id("tokenizer.ggml.eot_token_id")?,
        eom: id("tokenizer.ggml.eom_token_id")?,
        unknown: id("tokenizer.ggml.unknown_token_id")?,
        padding: id("tokenizer.ggml.padding_token_id")?,
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        remove_extra_whitespaces: metadata.bool("tokenizer.ggml.remove_extra_whitespaces")?,
        precompiled_charsmap,
        chat_template: text("tokenizer.chat_template")?,
        named_chat_templates: named_chat_templates(metadata)?,
    })
}

/// Whether an id says that there is no such token: -1, in whichever type.
fn is_no_token(metadata: &Metadata<'_>, key: &str) -> bool {
    let value = metadata.get(key).map(|entry| &entry.value);
    matches!(value, Some(Value::Signed(-1)))
        || matches!(value, Some(Value::Unsigned(id)) if *id == u64::from(u32::MAX))
}

/// `tokenizer.chat_template.NAME`, in the file's order.
fn named_chat_templates(metadata: &Metadata<'_>) -> Result<Vec<(String, String)>, GgufError> {
    let mut templates = Vec::new();
    for entry in metadata.entries() {
        if let Some(name) = entry.key.strip_prefix("tokenizer.chat_template.")
            && let Some(source) = metadata.str(&entry.key)?
        {
            templates.push((name.to_owned(), source.to_owned()));
        }
    }
    Ok(templates)
}
