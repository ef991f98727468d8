//! SentencePiece's unigram model (`t5`): the likeliest way to cut a text into tokens, their scores being logarithms
//! of probabilities. Kudo 2018, "Subword Regularization".
//!
//! Character maps are read as Hugging Face's engine does, which drops a combining mark after a character that the map
//! replaces; SentencePiece keeps it.

use serde_json::{Value, json};

use super::{BYTE, Problem, TokenizerParts, UNKNOWN, charsmap, sentence_piece};
use crate::tokenizer::GgufTokenizerFields;
use crate::tokenizer::engine::ModelTables;

/// What `tokenizer.ggml.unknown_token_id` is where the file does not say and no token has the type "unknown".
const DEFAULT_UNKNOWN: u32 = 2;

pub fn parts(fields: &mut GgufTokenizerFields) -> Result<TokenizerParts, Problem> {
    const SCORES: &str = "tokenizer.ggml.scores";
    if fields.scores.is_empty() {
        return Err(Problem::new(SCORES, "a unigram vocabulary needs them".to_owned()));
    }
    if let Some((id, score)) = fields.scores.iter().enumerate().find(|(_, s)| !s.is_finite()) {
        return Err(Problem::new(SCORES, format!("that of token {id} is {score}")));
    }
    let by_type = || (0..fields.tokens.len()).find(|id| fields.token_type(*id) == UNKNOWN);
    let unknown = (fields.unknown.map(|id| id as usize)).or_else(by_type).unwrap_or(DEFAULT_UNKNOWN as usize);
    if unknown >= fields.tokens.len() {
        let reason =
            format!("a unigram vocabulary needs one; {unknown} is not below {}", fields.tokens.len());
        return Err(Problem::new("tokenizer.ggml.unknown_token_id", reason));
    }
    let byte_fallback = (0..fields.tokens.len()).filter(|id| fields.token_type(*id) == BYTE).count() == 256;
    let tokens = std::mem::take(&mut fields.tokens);
    let vocab = tokens.into_iter().zip(&fields.scores).map(|(t, s)| (t, f64::from(*s))).collect();
    let prefix = fields.add_space_prefix.unwrap_or(true);
    Ok(TokenizerParts {
        normalizer: normalizer(fields)?,
        pre_tokenizer: json!({
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": if prefix { "always" } else { "never" },
            "split": false,
        }),
        decoder: sentence_piece::decoder(prefix),
        model: ModelTables::Unigram { vocab, unk_id: Some(unknown), byte_fallback },
        add_bos: false,
        add_eos: true,
    })
}

/// The file's own character map, and single spaces between words and none around them where the file asks for that.
fn normalizer(fields: &GgufTokenizerFields) -> Result<Value, Problem> {
    let mut steps = Vec::new();
    if !fields.precompiled_charsmap.is_empty() {
        charsmap::check(&fields.precompiled_charsmap)
            .map_err(|reason| Problem::new("tokenizer.ggml.precompiled_charsmap", reason))?;
        steps.push(json!({
            "type": "Precompiled", "precompiled_charsmap": charsmap::base64(&fields.precompiled_charsmap),
        }));
    }
    if fields.remove_extra_whitespaces.unwrap_or(false) {
        steps.push(json!({ "type": "Strip", "strip_left": true, "strip_right": true }));
        steps.push(json!({ "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": " " }));
    }
    Ok(match steps.is_empty() {
        true => Value::Null,
        false => json!({ "type": "Sequence", "normalizers": steps }),
    })
}
