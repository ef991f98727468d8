//! From a GGUF's `tokenizer.ggml.*` metadata to the parts of the `tokenizer.json` it came from.
//!
//! `gpt2` is byte-level BPE, split first as `tokenizer.ggml.pre` says; `llama` and `gemma4` are
//! SentencePiece's BPE, with scores or with merges; `t5` is SentencePiece's unigram model. Token types are
//! llama.cpp's: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; any other counts as normal.
//! An empty token, which no text can hold, is called `[EMPTY_id]` as llama.cpp does.

mod byte_level_bpe;
mod charsmap;
mod sentence_piece;
mod split;
mod unigram;

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::{Value, json};
use tokenizers::AddedToken;
use tokenizers::models::bpe::Vocab;

use super::TokenizerError;
use super::engine::{ModelTables, Parts};
use super::specials::template_processing;
pub(super) use charsmap::check as check_charsmap;
pub(super) use split::{is_word_by_word, name_of as split_name};

/// The tokenizer's part of a GGUF's metadata.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizerFields {
    /// `general.name`: what some models' added tokens do to the text around them is known by it alone.
    pub model_name: Option<String>,
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
    /// `tokenizer.ggml.eot_token_id`: ends a turn.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`: ends a message.
    pub eom: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`
    pub unknown: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`
    pub padding: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`
    pub remove_extra_whitespaces: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`; empty where absent.
    pub precompiled_charsmap: Vec<u8>,
    /// `tokenizer.chat_template`
    pub chat_template: Option<String>,
    /// `tokenizer.chat_template.NAME`: name and template.
    pub named_chat_templates: Vec<(String, String)>,
}

impl GgufTokenizerFields {
    /// A token's type; normal where there are none.
    fn token_type(&self, id: usize) -> i64 {
        self.token_types.get(id).copied().unwrap_or(1)
    }

    /// Whether white space after an added token belongs to it. No metadata says so; as in llama.cpp, Phi-3's do by
    /// the model's name.
    fn strips_after(&self, token: &str) -> bool {
        let phi3 = self.model == "llama" && self.model_name.as_deref().is_some_and(is_phi_3);
        phi3 && !PLAIN_IN_PHI_3.contains(&token)
    }

    /// The tokens that end a sequence, each with its key.
    pub(super) fn ends(&self) -> [(&'static str, Option<u32>); 3] {
        [
            ("tokenizer.ggml.eos_token_id", self.eos),
            ("tokenizer.ggml.eot_token_id", self.eot),
            ("tokenizer.ggml.eom_token_id", self.eom),
        ]
    }
}

/// Tokens of Phi-3 that leave the white space after them alone.
const PLAIN_IN_PHI_3: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

fn is_phi_3(name: &str) -> bool {
    let name = name.to_lowercase();
    name.contains("phi-3") || name.contains("phi3")
}

/// What a model is called by whose name its added tokens are read: `name`, if that says of each whether the white space after it is
/// its own. Where some strip it and others do not, no name says so.
pub(super) fn name_for<'a>(name: &str, added: impl Iterator<Item = (&'a str, bool)>) -> String {
    let (mut strips, mut leaves) = (false, false);
    for (_, strip) in added.filter(|(token, _)| !PLAIN_IN_PHI_3.contains(token)) {
        (strips, leaves) = (strips || strip, leaves || !strip);
    }
    match (strips, leaves, is_phi_3(name)) {
        (true, false, false) => format!("Phi-3 {name}"),
        (false, true, true) => "model".to_owned(),
        _ => name.to_owned(),
    }
}

const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// What is wrong, and under which key.
struct Problem {
    key: &'static str,
    reason: String,
}

impl Problem {
    fn new(key: &'static str, reason: String) -> Problem {
        Problem { key, reason }
    }
}

/// What the kinds of tokenizer differ in.
struct TokenizerParts {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: ModelTables,
    /// Whether `bos` and `eos` are added where the file does not say.
    add_bos: bool,
    add_eos: bool,
}

/// The parts of the engine. Tokens and merges are moved, not copied: there are hundreds of thousands. `origin` is what
/// errors call the file.
///
/// # Errors
/// The kind is not supported, an id is outside of the vocabulary, or lists contradict each other; the key is named.
pub fn engine_parts(fields: GgufTokenizerFields, origin: &str) -> Result<Parts, TokenizerError> {
    parts(fields).map_err(|Problem { key, reason }| TokenizerError::Field {
        origin: origin.to_owned(),
        key,
        reason,
    })
}

fn parts(mut fields: GgufTokenizerFields) -> Result<Parts, Problem> {
    check_lengths(&fields)?;
    check_names(&fields)?;
    check_ids(&fields)?;
    let added_tokens: Vec<AddedToken> = (fields.tokens.iter().enumerate())
        .filter(|(id, token)| {
            !token.is_empty() && matches!(fields.token_type(*id), UNKNOWN | CONTROL | USER_DEFINED)
        })
        .map(|(id, token)| {
            let special = fields.token_type(id) != USER_DEFINED;
            added_token(token, special).rstrip(fields.strips_after(token))
        })
        .collect();
    let named = |id: Option<u32>| id.and_then(|id| Some((id, fields.tokens.get(id as usize)?.clone())));
    let (bos, eos) = (named(fields.bos), named(fields.eos));
    let parts = match fields.model.as_str() {
        "gpt2" if matches!(fields.pre.as_deref(), Some("gemma4" | "sarvam-moe")) => {
            sentence_piece::listed(&mut fields)?
        }
        "gpt2" => byte_level_bpe::parts(&mut fields)?,
        "llama" => sentence_piece::scored(&mut fields)?,
        "gemma4" => sentence_piece::listed(&mut fields)?,
        "t5" => unigram::parts(&mut fields)?,
        other => return Err(Problem::new("tokenizer.ggml.model", unsupported(other))),
    };
    let bos = added_by_encode("tokenizer.ggml.bos_token_id", bos, fields.add_bos, parts.add_bos)?;
    let eos = added_by_encode("tokenizer.ggml.eos_token_id", eos, fields.add_eos, parts.add_eos)?;
    Ok(Parts {
        added_tokens,
        normalizer: parts.normalizer,
        pre_tokenizer: parts.pre_tokenizer,
        post_processor: template_processing(bos.as_slice(), eos.as_slice()),
        decoder: parts.decoder,
        model: parts.model,
    })
}

fn check_lengths(fields: &GgufTokenizerFields) -> Result<(), Problem> {
    let count = fields.tokens.len();
    if count == 0 {
        return Err(Problem::new("tokenizer.ggml.tokens", "the vocabulary is empty".to_owned()));
    }
    for (key, length) in [
        ("tokenizer.ggml.token_type", fields.token_types.len()),
        ("tokenizer.ggml.scores", fields.scores.len()),
    ] {
        if length != 0 && length != count {
            return Err(Problem::new(key, format!("{length} entries for {count} tokens")));
        }
    }
    Ok(())
}

fn check_ids(fields: &GgufTokenizerFields) -> Result<(), Problem> {
    let others = [
        ("tokenizer.ggml.bos_token_id", fields.bos),
        ("tokenizer.ggml.unknown_token_id", fields.unknown),
        ("tokenizer.ggml.padding_token_id", fields.padding),
    ];
    for (key, id) in others.into_iter().chain(fields.ends()) {
        if let Some(id) = id.filter(|id| *id as usize >= fields.tokens.len()) {
            return Err(Problem::new(key, format!("{id} is not below {}", fields.tokens.len())));
        }
    }
    Ok(())
}

/// What a token is called: an empty one by its id.
fn name_of(id: usize, token: &str) -> Cow<'_, str> {
    if token.is_empty() { format!("[EMPTY_{id}]").into() } else { token.into() }
}

fn check_names(fields: &GgufTokenizerFields) -> Result<(), Problem> {
    let mut ids = HashMap::with_capacity(fields.tokens.len());
    for (id, token) in fields.tokens.iter().enumerate() {
        if let Some(first) = ids.insert(name_of(id, token), id) {
            let reason = format!("token {id} {token:?} is token {first} already");
            return Err(Problem::new("tokenizer.ggml.tokens", reason));
        }
    }
    Ok(())
}

/// Token to id, of tokens with names of their own.
fn vocabulary(tokens: Vec<String>) -> Vocab {
    let mut vocab = Vocab::with_capacity(tokens.len());
    for (id, token) in tokens.into_iter().enumerate() {
        let name = if token.is_empty() { name_of(id, &token).into_owned() } else { token };
        vocab.insert(name, id as u32);
    }
    vocab
}

/// A token that encoding adds, if it does: asked for, or usual for the kind and there.
fn added_by_encode(
    key: &'static str,
    token: Option<(u32, String)>,
    asked: Option<bool>,
    usual: bool,
) -> Result<Option<(u32, String)>, Problem> {
    match (asked, token) {
        (Some(true), None) => Err(Problem::new(
            key,
            "is missing, though the file says that the token is to be added".to_owned(),
        )),
        (Some(true), token) => Ok(token),
        (None, token) if usual => Ok(token),
        _ => Ok(None),
    }
}

/// Why a kind is refused.
fn unsupported(model: &str) -> String {
    let known = match model {
        "bert" => "is WordPiece, the tokenizer of encoders; nearest is t5 (SentencePiece unigram)",
        "rwkv" => "takes the longest token at each place; nearest is gpt2 (byte-level BPE)",
        "plamo2" => "is PLaMo-2's table-driven unigram model; nearest is t5 (SentencePiece unigram)",
        "whitespace" | "hybriddna" => "splits at white space alone; nearest is gpt2 (byte-level BPE)",
        "no_vocab" | "none" => "says that the file has no vocabulary; nearest is gpt2 (byte-level BPE)",
        _ => "is unknown",
    };
    format!(
        "{model:?} is not supported: it {known}. Supported are gpt2 (byte-level BPE), llama and gemma4 (SentencePiece BPE) and t5 (SentencePiece \
         unigram)"
    )
}

/// The text of the unknown token: the one named, or the first of that type.
fn unknown_token(fields: &GgufTokenizerFields) -> Option<String> {
    let by_type = || (0..fields.tokens.len()).find(|id| fields.token_type(*id) == UNKNOWN);
    let id = fields.unknown.map(|id| id as usize).or_else(by_type)?;
    fields.tokens.get(id).filter(|token| !token.is_empty()).cloned()
}

/// A token that is found in a text before anything else happens to it.
pub(super) fn added_token(content: &str, special: bool) -> AddedToken {
    AddedToken::from(content, special).normalized(false)
}

/// The byte-level step; `use_regex` splits as GPT-2 does.
pub(super) fn byte_level(use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}
