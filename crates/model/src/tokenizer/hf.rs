//! A tokenizer from a Hugging Face folder: `tokenizer.json`, and what other files there say of special tokens.

use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer as Engine;

use super::chat::ChatTemplates;
use super::specials::{Around, set_around, token_id};
use super::{Specials, Tokenizer, TokenizerError, engine};

impl Tokenizer {
    /// Reads `tokenizer.json` of a Hugging Face folder and what other files there say of special tokens and
    /// of chats.
    ///
    /// Encoding with special tokens adds what the post-processor of `tokenizer.json` does; where
    /// `tokenizer_config.json` has `add_bos_token` or `add_eos_token`, these decide instead.
    ///
    /// # Errors
    /// A file is missing or unusable, or asks for special tokens that there are not.
    pub fn from_hf_dir(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let io = |source| TokenizerError::Io { path: path.clone(), source };
        let bytes = std::fs::read(&path).map_err(io)?;
        let origin = path.display().to_string();
        let mut engine = engine::document::engine(bytes, &origin)?;

        let config = optional_json(&folder.join("tokenizer_config.json"))?;
        let generation = optional_json(&folder.join("generation_config.json"))?;
        let specials = special_tokens(folder, &engine, &config, &generation)?;
        let around =
            asked_around(&engine, &config, &specials).map_err(|(key, reason)| TokenizerError::Field {
                origin: folder.join("tokenizer_config.json").display().to_string(),
                key,
                reason,
            })?;
        if let Some(around) = around {
            set_around(&mut engine, &around.before, &around.after)
                .map_err(|reason| TokenizerError::invalid(&origin, reason))?;
        }
        Tokenizer::new(engine, origin, specials)
    }
}

fn special_tokens(
    folder: &Path,
    engine: &Engine,
    config: &Value,
    generation: &Value,
) -> Result<Specials, TokenizerError> {
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
    Ok(Specials {
        bos: named("bos_token").or_else(|| numbered("bos_token_id").first().copied()),
        eos,
        pad: named("pad_token"),
        chat_templates: ChatTemplates::from_hf_dir(folder, config)?,
        model_max_length: config.get("model_max_length").and_then(Value::as_u64),
    })
}

/// The tokens around a text where the configuration says so.
fn asked_around(
    engine: &Engine,
    config: &Value,
    specials: &Specials,
) -> Result<Option<Around>, (&'static str, String)> {
    let asked = |key: &'static str| match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(asked)) => Ok(Some(*asked)),
        Some(other) => Err((key, format!("{other} is neither true nor false"))),
    };
    let (bos, eos) = (asked("add_bos_token")?, asked("add_eos_token")?);
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    let mut around = Around::of(engine).map_err(|reason| ("add_bos_token", reason))?;
    let eos_token = specials.eos.first().copied();
    for (key, asked, token, place) in [
        ("bos_token", bos, specials.bos, &mut around.before),
        ("eos_token", eos, eos_token, &mut around.after),
    ] {
        match (asked, token) {
            (None, _) => {}
            (Some(false), token) => place.retain(|id| Some(*id) != token),
            (Some(true), Some(token)) if place.contains(&token) => {}
            (Some(true), Some(token)) => place.push(token),
            (Some(true), None) => {
                return Err((key, "is no token of this vocabulary, though it is to be added".to_owned()));
            }
        }
    }
    Ok(Some(around))
}

/// A file's JSON, or an empty document where there is no file.
pub(super) fn optional_json(path: &Path) -> Result<Value, TokenizerError> {
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
