//! From a GGUF's `tokenizer.ggml.*` metadata to the `tokenizer.json` it came from.
//!
//! `gpt2` is byte-level BPE, split first as `tokenizer.ggml.pre` says; `llama` is SentencePiece's BPE with scores and
//! byte fallback, whose merges are found from the scores as `transformers` does. Token types are llama.cpp's:
//! 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::TokenizerError;

/// The tokenizer's part of a GGUF's metadata.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizerFields {
    /// `tokenizer.ggml.model`
    pub model: String,
    /// `tokenizer.ggml.pre`
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`; empty where absent.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`; empty where absent.
    pub token_types: Vec<i64>,
    /// `tokenizer.ggml.merges`; empty where absent.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`
    pub eos: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`
    pub unknown: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`
    pub padding: Option<u32>,
    /// `tokenizer.ggml.add_space_prefix`
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`
    pub chat_template: Option<String>,
}

const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Names of `tokenizer.ggml.pre` that split as GPT-2 does.
const GPT2_LIKE: &[&str] = &["gpt-2", "gpt2", "default", "phi-2", "olmo", "mpt", "exaone4"];
/// Those that take single digits first.
const SINGLE_DIGITS: &[&str] = &["smollm", "starcoder", "refact", "command-r", "codeshell"];
/// Those that split as Llama 3 does.
const LLAMA3_LIKE: &[&str] = &["llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"];
/// Those that split as Qwen 2 does.
const QWEN2_LIKE: &[&str] = &["qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"];

const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The document for `tokenizers`. `origin` is what errors call the file.
pub fn tokenizer_json(fields: &GgufTokenizerFields, origin: &str) -> Result<Value, TokenizerError> {
    let fail = |key, reason: String| TokenizerError::Field { origin: origin.to_owned(), key, reason };
    let count = fields.tokens.len();
    if count == 0 {
        return Err(fail("tokenizer.ggml.tokens", "the vocabulary is empty".to_owned()));
    }
    for (key, length) in [
        ("tokenizer.ggml.token_type", fields.token_types.len()),
        ("tokenizer.ggml.scores", fields.scores.len()),
    ] {
        if length != 0 && length != count {
            return Err(fail(key, format!("{length} entries for {count} tokens")));
        }
    }
    let mut vocab = Map::with_capacity(count);
    for (id, token) in fields.tokens.iter().enumerate() {
        if let Some(first) = vocab.insert(token.clone(), id.into()) {
            return Err(fail(
                "tokenizer.ggml.tokens",
                format!("token {id} {token:?} is token {first} already"),
            ));
        }
    }
    let kind = |id: usize| fields.token_types.get(id).copied().unwrap_or(1);
    let added: Vec<Value> = (fields.tokens.iter().enumerate())
        .filter(|(id, _)| matches!(kind(*id), UNKNOWN | CONTROL | USER_DEFINED))
        .map(|(id, token)| added_token(id, token, kind(id) != USER_DEFINED))
        .collect();
    let unknown = fields.unknown.and_then(|id| fields.tokens.get(id as usize)).cloned();
    let (normalizer, pre_tokenizer, decoder, model) = match fields.model.as_str() {
        "gpt2" => {
            let merges =
                given_merges(fields, &vocab).map_err(|reason| fail("tokenizer.ggml.merges", reason))?;
            let pre = fields.pre.as_deref().unwrap_or("default");
            let split = pre_tokenizer(pre).map_err(|reason| fail("tokenizer.ggml.pre", reason))?;
            (Value::Null, split, byte_level(true), bpe(vocab.into(), merges, None, false))
        }
        "llama" => {
            if fields.scores.is_empty() {
                return Err(fail(
                    "tokenizer.ggml.scores",
                    "a SentencePiece vocabulary needs them".to_owned(),
                ));
            }
            let prefix = fields.add_space_prefix.unwrap_or(true);
            let merges = merges_from_scores(fields);
            let model = bpe(vocab.into(), merges, unknown, true);
            (sentence_piece_normalizer(prefix), Value::Null, sentence_piece_decoder(prefix), model)
        }
        other => {
            let reason = format!(
                "{other:?} is not supported; gpt2 (byte-level BPE) and llama (SentencePiece BPE) are"
            );
            return Err(fail("tokenizer.ggml.model", reason));
        }
    };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": model,
    }))
}

/// An entry of `added_tokens`.
pub(super) fn added_token(id: usize, content: &str, special: bool) -> Value {
    json!({
        "id": id,
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": special,
    })
}

/// The byte-level step; `use_regex` splits as GPT-2 does.
pub(super) fn byte_level(use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}

/// A BPE model.
pub(super) fn bpe(vocab: Value, merges: Vec<Value>, unknown: Option<String>, byte_fallback: bool) -> Value {
    json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": unknown,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": false,
        "vocab": vocab,
        "merges": merges,
    })
}

fn pre_tokenizer(pre: &str) -> Result<Value, String> {
    let sequence = |first: Value, use_regex| json!({ "type": "Sequence", "pretokenizers": [first, byte_level(use_regex)] });
    let split = |pattern: &str| {
        let by_regex = json!({
            "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false,
        });
        sequence(by_regex, false)
    };
    match pre {
        _ if GPT2_LIKE.contains(&pre) => Ok(byte_level(true)),
        _ if SINGLE_DIGITS.contains(&pre) => {
            Ok(sequence(json!({ "type": "Digits", "individual_digits": true }), true))
        }
        _ if LLAMA3_LIKE.contains(&pre) => Ok(split(LLAMA3_PATTERN)),
        _ if QWEN2_LIKE.contains(&pre) => Ok(split(QWEN2_PATTERN)),
        _ => {
            let known = [GPT2_LIKE, SINGLE_DIGITS, LLAMA3_LIKE, QWEN2_LIKE].concat().join(", ");
            Err(format!("{pre:?} is not a known way to split text; known are {known}"))
        }
    }
}

/// The merges of the file, each checked: both parts and the whole are tokens.
fn given_merges(fields: &GgufTokenizerFields, vocab: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let mut merges = Vec::with_capacity(fields.merges.len());
    for (number, merge) in fields.merges.iter().enumerate() {
        // A part may itself begin with a space, never both: the separator is the first space after a character.
        let parts = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| merge.split_at(at));
        let parts = parts.map(|(left, right)| (left, &right[1..]));
        let Some((left, right)) = parts.filter(|(_, right)| !right.is_empty()) else {
            return Err(format!("merge {number} {merge:?} is not two tokens with a space between them"));
        };
        for part in [left, right, &format!("{left}{right}")] {
            if !vocab.contains_key(part) {
                return Err(format!("merge {number} {merge:?} needs {part:?}, which is not a token"));
            }
        }
        merges.push(json!([left, right]));
    }
    Ok(merges)
}

/// Every way to split a token into two others is a merge; better scores of the whole come first.
fn merges_from_scores(fields: &GgufTokenizerFields) -> Vec<Value> {
    let ids: HashMap<&str, usize> =
        fields.tokens.iter().enumerate().map(|(id, t)| (t.as_str(), id)).collect();
    let mut merges: Vec<(f32, usize, usize, usize)> = Vec::new();
    for (id, token) in fields.tokens.iter().enumerate() {
        let mut local: Vec<(usize, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| {
                let (left, right) = token.split_at(at);
                Some((*ids.get(left)?, *ids.get(right)?))
            })
            .collect();
        local.sort_unstable();
        merges.extend(local.into_iter().map(|(left, right)| (fields.scores[id], id, left, right)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    merges.into_iter().map(|(_, _, left, right)| json!([fields.tokens[left], fields.tokens[right]])).collect()
}

fn sentence_piece_normalizer(prefix: bool) -> Value {
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    match prefix {
        true => {
            json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, replace] })
        }
        false => replace,
    }
}

fn sentence_piece_decoder(prefix: bool) -> Value {
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
