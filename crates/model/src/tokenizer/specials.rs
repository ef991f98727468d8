//! The tokens around a text: which ones encoding adds before and after it.
//!
//! In `tokenizer.json` that is the post-processor's work. Where `tokenizer_config.json` has `add_bos_token` or
//! `add_eos_token`, these decide instead, as for the tokenizer classes of `transformers` that know them.

use serde_json::{Map, Value, json};
use tokenizers::tokenizer::{PostProcessor, Token};
use tokenizers::{Encoding, PostProcessorWrapper, Tokenizer as Engine};

/// What encoding with special tokens adds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Around {
    pub before: Vec<u32>,
    pub after: Vec<u32>,
}

/// An id that stands for the text; vocabularies are far smaller.
const TEXT: u32 = u32::MAX;

impl Around {
    /// What the engine's post-processor adds.
    pub fn of(engine: &Engine) -> tokenizers::Result<Around> {
        let Some(processor) = engine.get_post_processor() else { return Ok(Around::default()) };
        let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let whole = processor.process(text, None, true)?;
        let mut parts = whole.get_ids().splitn(2, |id| *id == TEXT);
        let (before, after) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        Ok(Around { before: before.to_vec(), after: after.to_vec() })
    }
}

/// Makes the engine add exactly these.
pub fn set_around(engine: &mut Engine, before: &[u32], after: &[u32]) -> Result<(), String> {
    let named = |ids: &[u32]| -> Result<Vec<(u32, String)>, String> {
        let name = |id: &u32| engine.id_to_token(*id).ok_or_else(|| format!("there is no token {id}"));
        ids.iter().map(|id| Ok((*id, name(id)?))).collect()
    };
    let (before, after) = (named(before)?, named(after)?);
    let processor: Option<PostProcessorWrapper> =
        serde_json::from_value(template_processing(&before, &after)).map_err(|e| e.to_string())?;
    engine.with_post_processor(processor);
    Ok(())
}

/// The post-processor that puts tokens around a text, each given by id and text; null for none.
pub fn template_processing(before: &[(u32, String)], after: &[(u32, String)]) -> Value {
    if before.is_empty() && after.is_empty() {
        return Value::Null;
    }
    let token = |name: &str, part: u32| json!({ "SpecialToken": { "id": name, "type_id": part } });
    let around = |part: u32| {
        let text = json!({ "Sequence": { "id": if part == 0 { "A" } else { "B" }, "type_id": part } });
        let before = before.iter().map(|(_, name)| token(name, part));
        before.chain([text]).chain(after.iter().map(|(_, name)| token(name, part))).collect::<Vec<Value>>()
    };
    let special: Map<String, Value> = (before.iter().chain(after))
        .map(|(id, name)| (name.clone(), json!({ "id": name, "ids": [id], "tokens": [name] })))
        .collect();
    let pair = [around(0), around(1)].concat();
    json!({
        "type": "TemplateProcessing",
        "single": around(0),
        "pair": pair,
        "special_tokens": special,
    })
}
