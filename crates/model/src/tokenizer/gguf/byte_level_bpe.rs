//! Byte-level BPE (`gpt2`): bytes as printable characters, merged in the order of a list.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::{Problem, TokenizerParts, bpe, byte_level, split};
use crate::tokenizer::GgufTokenizerFields;

pub fn parts(fields: &GgufTokenizerFields, vocab: Map<String, Value>) -> Result<TokenizerParts, Problem> {
    let merges = merges(fields, &vocab)?;
    let name = fields.pre.as_deref().unwrap_or("default");
    let way = split::by_name(name).map_err(|reason| Problem::new("tokenizer.ggml.pre", reason))?;
    Ok(TokenizerParts {
        normalizer: Value::Null,
        pre_tokenizer: way.pre_tokenizer(),
        decoder: byte_level(true),
        model: bpe(vocab.into(), merges, None, false, way.ignore_merges),
        add_bos: way.add_bos,
        add_eos: false,
    })
}

/// The merges of the file, each checked: both parts and the whole are tokens. Of equal ones the first counts.
///
/// A merge makes a token that is longer than both its parts, so that there can be no cycle among merges that pass.
pub fn merges(fields: &GgufTokenizerFields, vocab: &Map<String, Value>) -> Result<Vec<Value>, Problem> {
    const KEY: &str = "tokenizer.ggml.merges";
    let mut merges = Vec::with_capacity(fields.merges.len());
    let mut seen = HashSet::with_capacity(fields.merges.len());
    for (number, merge) in fields.merges.iter().enumerate() {
        // A part may itself begin with a space, never both: the separator is the first space after a character.
        let parts = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| merge.split_at(at));
        let parts = parts.map(|(left, right)| (left, right.strip_prefix(' ').unwrap_or(right)));
        let Some((left, right)) = parts.filter(|(_, right)| !right.is_empty()) else {
            let reason = format!("merge {number} {merge:?} is not two tokens with a space between them");
            return Err(Problem::new(KEY, reason));
        };
        for part in [left, right, &format!("{left}{right}")] {
            if !vocab.contains_key(part) {
                let reason = format!("merge {number} {merge:?} needs {part:?}, which is not a token");
                return Err(Problem::new(KEY, reason));
            }
        }
        if seen.insert((left, right)) {
            merges.push(json!([left, right]));
        }
    }
    Ok(merges)
}
