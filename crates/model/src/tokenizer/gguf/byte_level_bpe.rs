//! Byte-level BPE (`gpt2`): bytes as printable characters, merged in the order of a list.

use std::collections::HashSet;

use serde_json::Value;
use tokenizers::models::bpe::{Merges, Vocab};

use super::{Problem, TokenizerParts, byte_level, split, vocabulary};
use crate::tokenizer::GgufTokenizerFields;
use crate::tokenizer::engine::{BpeSettings, ModelTables};

pub fn parts(fields: &mut GgufTokenizerFields) -> Result<TokenizerParts, Problem> {
    let (vocab, merges) = tables(fields)?;
    let name = fields.pre.as_deref().unwrap_or("default");
    let way = split::by_name(name).map_err(|reason| Problem::new("tokenizer.ggml.pre", reason))?;
    let settings = BpeSettings { ignore_merges: Some(way.ignore_merges), ..BpeSettings::default() };
    Ok(TokenizerParts {
        normalizer: Value::Null,
        pre_tokenizer: way.pre_tokenizer(),
        decoder: byte_level(true),
        model: ModelTables::Bpe { vocab, merges, settings },
        add_bos: way.add_bos,
        add_eos: false,
    })
}

/// The vocabulary and merges of the file, taken out of its fields. Each merge is checked: both parts and the whole are
/// tokens. Of equal ones the first counts.
///
/// A merge makes a token that is longer than both its parts, so that there can be no cycle among merges that pass.
pub fn tables(fields: &mut GgufTokenizerFields) -> Result<(Vocab, Merges), Problem> {
    const KEY: &str = "tokenizer.ggml.merges";
    let vocab = vocabulary(std::mem::take(&mut fields.tokens));
    let listed = std::mem::take(&mut fields.merges);
    let mut merges = Merges::with_capacity(listed.len());
    let mut seen = HashSet::with_capacity(listed.len());
    for (number, merge) in listed.into_iter().enumerate() {
        // A part may itself begin with a space, never both: the separator is the first space after a character.
        let parts = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| merge.split_at(at));
        let parts = parts.map(|(left, right)| (left, right.strip_prefix(' ').unwrap_or(right)));
        let Some((left, right)) = parts.filter(|(_, right)| !right.is_empty()) else {
            let reason = format!("merge {number} {merge:?} is not two tokens with a space between them");
            return Err(Problem::new(KEY, reason));
        };
        let id = |part: &str| {
            vocab.get(part).copied().ok_or_else(|| {
                let reason = format!("merge {number} {merge:?} needs {part:?}, which is not a token");
                Problem::new(KEY, reason)
            })
        };
        let pair = (id(left)?, id(right)?);
        id(&format!("{left}{right}"))?;
        if seen.insert(pair) {
            merges.push((left.to_owned(), right.to_owned()));
        }
    }
    Ok((vocab, merges))
}
