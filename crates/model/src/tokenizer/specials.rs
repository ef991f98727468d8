//! The tokens around a text: which ones encoding adds before and after it.
//!
//! In `tokenizer.json` that is the post-processor's work. Where `tokenizer_config.json` has `add_bos_token` or
//! `add_eos_token`, these decide instead, as for the tokenizer classes of `transformers` that know them.

use serde_json::{Map, Value, json};
use tokenizers::{PostProcessorWrapper, Tokenizer as Engine};

/// What encoding with special tokens adds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Around {
    pub before: Vec<u32>,
    pub after: Vec<u32>,
}

impl Around {
    /// What the engine's post-processor adds. It is read, not run: the engine trusts that its parts fit together.
    pub fn of(engine: &Engine) -> Result<Around, String> {
        match engine.get_post_processor() {
            Some(processor) => described(&serde_json::to_value(processor).map_err(|e| e.to_string())?),
            None => Ok(Around::default()),
        }
    }
}

/// What a post-processor adds, from its description in `tokenizer.json`.
fn described(processor: &Value) -> Result<Around, String> {
    match processor.get("type").and_then(Value::as_str) {
        Some("ByteLevel") => Ok(Around::default()),
        Some("BertProcessing" | "RobertaProcessing") => {
            let token = |key: &str| {
                let id = processor.get(key).and_then(|pair| token_id(pair.get(1)?));
                id.ok_or_else(|| format!("post_processor: {key} is no pair of a token and its id"))
            };
            Ok(Around { before: vec![token("cls")?], after: vec![token("sep")?] })
        }
        Some("Sequence") => {
            let mut around = Around::default();
            for step in processor.get("processors").and_then(Value::as_array).into_iter().flatten() {
                let outer = described(step)?;
                around.before.splice(0..0, outer.before);
                around.after.extend(outer.after);
            }
            Ok(around)
        }
        Some("TemplateProcessing") => template(processor),
        other => Err(format!("post_processor: the kind {other:?} is unknown")),
    }
}

fn template(processor: &Value) -> Result<Around, String> {
    let mut around = Around::default();
    let mut after_text = false;
    for piece in processor.get("single").and_then(Value::as_array).into_iter().flatten() {
        let Some(name) = piece.pointer("/SpecialToken/id").and_then(Value::as_str) else {
            after_text = true;
            continue;
        };
        let ids = processor.get("special_tokens").and_then(|all| all.get(name)?.get("ids")?.as_array());
        let ids: Option<Vec<u32>> = ids.and_then(|ids| ids.iter().map(token_id).collect());
        let place = if after_text { &mut around.after } else { &mut around.before };
        place.extend(ids.ok_or_else(|| format!("post_processor: {name:?} is not among its special tokens"))?);
    }
    Ok(around)
}

pub fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
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
