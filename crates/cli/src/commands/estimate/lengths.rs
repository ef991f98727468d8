//! How long a user's samples are, in tokens.

use std::path::Path;

use plimsoll_data::for_each_record;
use plimsoll_model::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use crate::failure::Failure;

/// Bytes that are read at once.
const BUFFER: usize = 1 << 20;
/// Samples that are counted: the longest texts, and others throughout the file.
const LONGEST: usize = 128;
const OTHERS: usize = 384;

/// Keys whose number is a sample's length.
const LENGTHS: [&str; 4] = ["length", "num_tokens", "n_tokens", "token_count"];

/// Lengths of a file's samples, the longest among them. Tokens that are there are counted; texts are encoded with the tokenizer of the
/// model's folder, the longest ones and some of the others. Records that are none are left out, and named.
pub fn of_samples(path: &Path, model: Option<&Path>) -> Result<Vec<u64>, Failure> {
    let (mut lengths, mut texts) = (Vec::new(), Vec::new());
    let (mut left_out, mut first) = (0u64, String::new());
    for_each_record(path, BUFFER, &mut |place, record| {
        match record {
            Ok(record) => match length(&record) {
                Some(length) => lengths.push(length),
                None => texts.push(text(&record)),
            },
            Err(reason) => {
                if left_out == 0 {
                    first = format!("{place}: {reason}");
                }
                left_out += 1;
            }
        }
        Ok(())
    })?;
    if left_out > 0 {
        let s = if left_out == 1 { "" } else { "s" };
        eprintln!("{left_out} broken record{s} left out, the first of them {first}");
    }
    texts.retain(|text| !text.is_empty());
    if !texts.is_empty() {
        lengths.extend(encoded(path, model, texts)?);
    }
    match lengths.is_empty() {
        true => {
            Err(Failure::usage(format!("{}: no sample has input_ids, a length or a text", path.display())))
        }
        false => Ok(lengths),
    }
}

fn length(record: &Map<String, Value>) -> Option<u64> {
    if let Some(Value::Array(tokens)) = record.get("input_ids") {
        return Some(tokens.len() as u64);
    }
    LENGTHS.iter().find_map(|key| record.get(*key).and_then(Value::as_u64))
}

/// All texts of a record, one behind the other, as a template would join them.
fn text(record: &Map<String, Value>) -> String {
    let mut out = String::new();
    let mut waiting: Vec<&Value> = record.values().rev().collect();
    while let Some(value) = waiting.pop() {
        match value {
            Value::String(text) => {
                out.push_str(text);
                out.push('\n');
            }
            Value::Array(items) => waiting.extend(items.iter().rev()),
            Value::Object(inner) => waiting.extend(inner.values().rev()),
            _ => {}
        }
    }
    out
}

fn encoded(path: &Path, model: Option<&Path>, mut texts: Vec<String>) -> Result<Vec<u64>, Failure> {
    let folder = model.filter(|folder| folder.is_dir()).ok_or_else(|| {
        Failure::usage(format!(
            "{}: its samples are texts, and their tokens depend on the tokenizer; give the model's folder as --model, or samples with \
             input_ids or length",
            path.display()
        ))
    })?;
    let tokenizer = Tokenizer::from_hf_dir(folder)?;
    texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
    let others = texts.split_off(texts.len().min(LONGEST));
    let step = others.len().div_ceil(OTHERS).max(1);
    texts.extend(others.into_iter().step_by(step));
    texts.iter().map(|text| Ok(tokenizer.encode(text)?.len() as u64)).collect()
}
