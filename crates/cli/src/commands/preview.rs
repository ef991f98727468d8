//! `plimsoll preview`: what a model will read of chats and instructions, and which tokens of it are trained.

use std::fmt::Write as _;
use std::io::IsTerminal;

use plimsoll_data::chat::{EncodedSample, SampleEncoder, SampleReport};
use plimsoll_data::{DataError, RecordPlace};
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_train::{sample_encoder, tokenizer};
use serde_json::{Value, json};

use crate::args::PreviewArgs;
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::output::{out, outln};
use crate::session::load_config_with;

/// What is trained is green on a terminal, in other measure yellow; what is not is pale.
const GREEN: &str = "\u{1b}[1;32m";
const YELLOW: &str = "\u{1b}[1;33m";
const PALE: &str = "\u{1b}[2m";
const PLAIN: &str = "\u{1b}[0m";

pub fn run(args: &PreviewArgs) -> Result<(), Failure> {
    let config = load_config_with(
        &args.source,
        &[("data.train", "--data", &args.data), ("data.format", "--format", &args.format)],
    )?;
    let patterns = config.training_data()?.patterns().to_vec();
    let origin = models::origin(&config, Need::Files, args.json)?;
    let tokenizer = tokenizer(&config, &origin)?;
    let Some(encoder) = sample_encoder(&config, &tokenizer)? else {
        return Err(Failure::usage("a preview is of samples: set data.format to chat or instruction"));
    };
    let mut shown = Vec::new();
    let colours = std::io::stdout().is_terminal();
    let mut failed = None;
    let report = encoder.for_each(&patterns, &mut |place, sample| {
        if shown.len() as u64 >= args.samples || failed.is_some() {
            return Ok(());
        }
        if args.json {
            shown.push(as_json(&tokenizer, place, sample));
        } else {
            shown.push(Value::Null);
            failed = out!("{}\n", for_people(place, sample, colours)).err();
        }
        Ok::<(), DataError>(())
    })?;
    if let Some(failure) = failed {
        return Err(failure);
    }
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&json!({ "samples": shown, "report": report }))?)
    } else {
        outln!("{}", summary(&encoder, &report, colours))
    }
}

/// The counts of all samples.
fn summary(encoder: &SampleEncoder<'_>, report: &SampleReport, colours: bool) -> String {
    let legend = if colours { String::new() } else { "trained: ⟦so⟧; ".to_owned() };
    let options = encoder.options();
    let windows = if options.packing { "samples share them" } else { "a sample each" };
    format!("{legend}{report}\nsequences of {} tokens, {windows}", options.sequence_length)
}

/// A sample with what is trained of it.
fn for_people(place: &RecordPlace, sample: &EncodedSample, colours: bool) -> String {
    let cut = if sample.truncated { ", cut" } else { "" };
    let (tokens, trained) = (sample.tokens.len(), sample.trained_tokens());
    let mut out = format!("── {place}: {tokens} tokens, {trained} trained{cut}\n");
    for part in parts(sample) {
        let text = harmless(part.text);
        // Writing to a text cannot fail.
        let _ = match (colours, part.weight) {
            (true, 0.0) => write!(out, "{PALE}{text}{PLAIN}"),
            (true, 1.0) => write!(out, "{GREEN}{text}{PLAIN}"),
            (true, weight) => write!(out, "{YELLOW}[{weight}] {text}{PLAIN}"),
            (false, 0.0) => write!(out, "{text}"),
            (false, 1.0) => write!(out, "⟦{text}⟧"),
            (false, weight) => write!(out, "⟦{weight}: {text}⟧"),
        };
    }
    out
}

struct Part<'a> {
    text: &'a str,
    weight: f32,
}

/// The text in parts of tokens that count alike. A character that tokens share belongs to the first of them.
fn parts(sample: &EncodedSample) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut start = sample.offsets.first().map_or(0, |first| first.start);
    let tokens = || sample.weights.iter().zip(&sample.offsets);
    let nexts = tokens().skip(1).map(|(weight, _)| Some(*weight)).chain([None]);
    // Nothing predicts the first token.
    let weights = std::iter::once(0.0).chain(sample.weights.iter().skip(1).copied());
    for ((weight, bytes), next) in weights.zip(&sample.offsets).zip(nexts) {
        if next == Some(weight) {
            continue;
        }
        let end = bytes.end.max(start);
        parts.push(Part { text: sample.text.get(start..end).unwrap_or_default(), weight });
        start = end;
    }
    parts
}

/// A text of somebody else without what a terminal would obey.
fn harmless(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && !matches!(c, '\n' | '\t') {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

fn as_json(tokenizer: &Tokenizer, place: &RecordPlace, sample: &EncodedSample) -> Value {
    let pieces: Vec<Option<String>> = sample.tokens.iter().map(|id| tokenizer.id_to_token(*id)).collect();
    json!({
        "file": place.path.display().to_string(),
        place.unit: place.number,
        "text": sample.text,
        "tokens": sample.tokens,
        "pieces": pieces,
        "weights": sample.weights,
        "trained_tokens": sample.trained_tokens(),
        "truncated": sample.truncated,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> EncodedSample {
        EncodedSample {
            text: "<u>a\u{1b}<a>bc".to_owned(),
            tokens: vec![1, 2, 3, 4, 5],
            offsets: vec![0..3, 3..5, 5..8, 8..9, 9..10],
            weights: vec![1.0, 0.0, 0.0, 1.0, 0.5],
            ..EncodedSample::default()
        }
    }

    #[test]
    fn what_is_trained_is_marked() {
        let place = RecordPlace { path: "x.jsonl".into(), unit: "line", number: 3 };
        let shown = for_people(&place, &sample(), false);
        assert_eq!(shown, "── x.jsonl: line 3: 5 tokens, 2 trained\n<u>a\\u{1b}<a>⟦b⟧⟦0.5: c⟧");
        let coloured = for_people(&place, &sample(), true);
        assert!(coloured.contains("\u{1b}[1;32mb\u{1b}[0m\u{1b}[1;33m[0.5] c"));
    }
}
