//! SentencePiece's BPE: characters with `▁` for a space, merged by the scores of what comes out (`llama`) or in the
//! order of a list (`gemma4`), and a token a byte for what the vocabulary does not have.
//!
//! Google, SentencePiece (Kudo and Richardson 2018). Merges are found from scores as `transformers` does: where two
//! different tokens have the same score the lower id is merged first, where SentencePiece takes the leftmost.

use std::collections::HashMap;

use serde_json::{Value, json};
use tokenizers::models::bpe::Merges;

use super::byte_level_bpe::tables;
use super::{BYTE, CONTROL, Problem, TokenizerParts, UNKNOWN, unknown_token, vocabulary};
use crate::tokenizer::GgufTokenizerFields;
use crate::tokenizer::engine::{BpeSettings, ModelTables};

/// A longer token is refused: finding its merges takes the square of its length.
const MAX_TOKEN_BYTES: usize = 4096;

/// `llama`: merged by scores.
pub fn scored(fields: &mut GgufTokenizerFields) -> Result<TokenizerParts, Problem> {
    if fields.scores.is_empty() {
        let reason = "a SentencePiece vocabulary needs them".to_owned();
        return Err(Problem::new("tokenizer.ggml.scores", reason));
    }
    if let Some((id, token)) = fields.tokens.iter().enumerate().find(|(_, t)| t.len() > MAX_TOKEN_BYTES) {
        let reason = format!("token {id} has {} bytes; at most {MAX_TOKEN_BYTES} are supported", token.len());
        return Err(Problem::new("tokenizer.ggml.tokens", reason));
    }
    let prefix = fields.add_space_prefix.unwrap_or(true);
    let (settings, merges) = (settings(fields), merges_from_scores(fields));
    let vocab = vocabulary(std::mem::take(&mut fields.tokens));
    Ok(TokenizerParts {
        normalizer: normalizer(prefix),
        pre_tokenizer: Value::Null,
        decoder: decoder(prefix),
        model: ModelTables::Bpe { vocab, merges, settings },
        add_bos: true,
        add_eos: false,
    })
}

/// `gemma4`: merged in the order of `tokenizer.ggml.merges`; lines are tokenised apart.
pub fn listed(fields: &mut GgufTokenizerFields) -> Result<TokenizerParts, Problem> {
    let settings = settings(fields);
    let (vocab, merges) = tables(fields)?;
    let prefix = fields.add_space_prefix.unwrap_or(false);
    let lines = json!({
        "type": "Split", "pattern": { "Regex": r"[^\n]+|\n+" }, "behavior": "Isolated", "invert": false,
    });
    Ok(TokenizerParts {
        normalizer: normalizer(prefix),
        pre_tokenizer: lines,
        decoder: decoder(prefix),
        model: ModelTables::Bpe { vocab, merges, settings },
        add_bos: true,
        add_eos: false,
    })
}

/// What no token has becomes tokens of a byte each, or one unknown token.
fn settings(fields: &GgufTokenizerFields) -> BpeSettings {
    let unk_token = unknown_token(fields);
    BpeSettings { unk_token, fuse_unk: Some(true), byte_fallback: Some(true), ..BpeSettings::default() }
}

/// Every way to split a token into two others is a merge; better scores of the whole come first. Control,
/// unknown and byte tokens never come out of text.
fn merges_from_scores(fields: &GgufTokenizerFields) -> Merges {
    let from_text = |id: usize| !matches!(fields.token_type(id), UNKNOWN | CONTROL | BYTE);
    let ids: HashMap<&str, usize> = (fields.tokens.iter().enumerate())
        .filter(|(id, _)| from_text(*id))
        .map(|(id, t)| (t.as_str(), id))
        .collect();
    let mut merges: Vec<(f32, usize, usize, usize)> = Vec::new();
    for (id, (token, score)) in fields.tokens.iter().zip(&fields.scores).enumerate() {
        if !from_text(id) {
            continue;
        }
        let mut local: Vec<(usize, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| {
                let (left, right) = token.split_at(at);
                Some((*ids.get(left)?, *ids.get(right)?))
            })
            .collect();
        local.sort_unstable();
        merges.extend(local.into_iter().map(|(left, right)| (*score, id, left, right)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let token = |id: usize| fields.tokens[id].clone();
    merges.into_iter().map(|(_, _, left, right)| (token(left), token(right))).collect()
}

fn normalizer(prefix: bool) -> Value {
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    match prefix {
        true => {
            json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, replace] })
        }
        false => replace,
    }
}

pub fn decoder(prefix: bool) -> Value {
    let mut steps = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": steps })
}
