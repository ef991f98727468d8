//! What `plimsoll generate` says in JSON.

use plimsoll_generate::{BatchSummary, Drafted, Generated, StopReason};
use plimsoll_step::DecodeSettings;
use serde_json::{Value, json};

use super::Prompt;
use crate::load_line::PlannedProcess;
use crate::streaming::Streaming;

/// What is the same for all prompts.
pub struct Document {
    pub planned: PlannedProcess,
    pub streaming: Option<Streaming>,
    /// How several were answered at once.
    pub batch: Option<DecodeSettings>,
}

impl Document {
    /// The first sample's fields, and all of them in `samples` where there are more.
    pub(super) fn of(&self, prompt: &Prompt, samples: Vec<Value>) -> Value {
        let mut document = json!({ "prompt_tokens": prompt.tokens, "memory": self.planned.document() });
        if let Some(first) = samples.first() {
            merge(&mut document, first.clone());
        }
        if let Some(streaming) = &self.streaming {
            merge(&mut document, json!({ "streaming": streaming.document() }));
        }
        if samples.len() > 1 {
            merge(&mut document, json!({ "samples": samples }));
        }
        document
    }

    /// What answering all of them took.
    pub fn batch(&self, summary: &BatchSummary) -> Value {
        json!({ "batch": {
            "parallel": self.batch.map(|settings| settings.sequences),
            "kv_cache_pages": self.batch.and_then(|settings| settings.pages),
            "at_once": summary.at_once,
            "tokens": summary.tokens,
            "passes": summary.passes,
            "waits": summary.waits,
            "seconds": summary.seconds,
            "tokens_per_second": summary.tokens_per_second(),
        }})
    }
}

/// An answer of a prompt; `guessed`: whether tokens were guessed ahead, or would have been.
pub fn sample(generated: &Generated, seed: u64, guessed: bool) -> Value {
    let mut document = json!({
        "tokens": generated.tokens,
        "text": generated.text,
        "tokens_per_second": generated.tokens_per_second(),
        "stop_reason": generated.stop_reason.name(),
        "reused_tokens": generated.reused_tokens,
        "prompt_seconds": generated.prompt_seconds,
        "seed": seed,
    });
    match &generated.stop_reason {
        StopReason::StopString(stop) => merge(&mut document, json!({ "stop": stop })),
        StopReason::StopToken(stop) => merge(&mut document, json!({ "stop": stop })),
        _ => {}
    }
    if guessed {
        merge(&mut document, guesses_document(&generated.drafted));
    }
    document
}

/// What came of guesses; null for the rate where there were none.
pub fn guesses_document(drafted: &Drafted) -> Value {
    let Drafted { tokens, accepted } = drafted;
    json!({ "drafted_tokens": tokens, "accepted_tokens": accepted, "acceptance_rate": drafted.acceptance_rate() })
}

/// The same for people: nothing where nobody guessed.
pub fn guesses(drafted: &Drafted) -> String {
    match drafted.acceptance_rate() {
        Some(rate) => format!("; {:.0} % of {} guessed tokens came true", 100.0 * rate, drafted.tokens),
        None => String::new(),
    }
}

/// A prompt's document with its text.
pub(super) fn with_prompt(prompt: &Prompt, fields: Value) -> Value {
    let mut document = json!({ "prompt": prompt.text });
    merge(&mut document, fields);
    document
}

/// Adds an object's fields to another.
pub fn merge(into: &mut Value, fields: Value) {
    if let (Value::Object(into), Value::Object(fields)) = (into, fields) {
        into.extend(fields);
    }
}
