//! What would make a run smaller in its own stack, each change run dry: the cheapest first.

use serde::Serialize;

use crate::answer::Answer;
use crate::request::Request;

/// A change of a request, and what comes of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// In words: `expandable_segments:True`, or several with `and` between them.
    pub what: String,
    /// The request after it.
    pub request: Request,
    /// What the device would show.
    pub device_used_bytes: u64,
    /// Whether that fits.
    pub fits: bool,
}

/// A change: its words, and what it does to a request; `None` where there is nothing to change.
type Step = (&'static str, fn(&Answer, &Request) -> Option<Request>);

/// From those that change nothing but memory to those that change what is learned.
const STEPS: [Step; 8] = [
    ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", |_, request| {
        request
            .allocator
            .is_none()
            .then(|| Request { allocator: Some("expandable_segments:True".to_owned()), ..request.clone() })
    }),
    ("attn_implementation sdpa", |_, request| {
        let eager = request.attention.as_deref() == Some("eager");
        eager.then(|| Request { attention: Some("sdpa".to_owned()), ..request.clone() })
    }),
    ("adamw_torch_fused", |answer, request| {
        use crate::run::Optimizer::{AdamWForLoop, AdamWForeach};
        matches!(answer.resolved.run.optimizer, AdamWForLoop | AdamWForeach)
            .then(|| Request { optimizer: Some("adamw_torch_fused".to_owned()), ..request.clone() })
    }),
    ("Liger's fused loss", |_, request| {
        let whole = matches!(request.stack.as_str(), "hf" | "peft" | "deepspeed" | "fsdp");
        (whole && request.loss.is_none())
            .then(|| Request { loss: Some("liger".to_owned()), ..request.clone() })
    }),
    ("half the batch_size, twice the gradient_accumulation_steps", |_, request| {
        let accumulation = request.gradient_accumulation_steps.unwrap_or(1);
        (request.batch_size > 1).then(|| Request {
            batch_size: request.batch_size.div_ceil(2),
            gradient_accumulation_steps: Some(accumulation.saturating_mul(2)),
            ..request.clone()
        })
    }),
    ("gradient_checkpointing", |_, request| {
        (!request.gradient_checkpointing).then(|| Request { gradient_checkpointing: true, ..request.clone() })
    }),
    ("paged_adamw_8bit", |_, request| {
        let is_adam = request.optimizer.as_deref().is_none_or(|name| {
            let name = name.to_ascii_lowercase();
            name.contains("adam") && !(name.contains("8bit") && name.contains("paged"))
        });
        is_adam.then(|| Request { optimizer: Some("paged_adamw_8bit".to_owned()), ..request.clone() })
    }),
    ("quantization nf4", |_, request| {
        (request.lora.is_some() && request.quantization.is_none())
            .then(|| Request { quantization: Some("nf4".to_owned()), ..request.clone() })
    }),
];

/// A change counts from this part of the whole on.
const LEAST: u64 = 200;

impl Answer {
    /// Every change that helps, each by itself; and behind them the first of them together that fit, where none does alone.
    pub fn changes(&self, request: &Request) -> Vec<Change> {
        let run = |what: String, request: Request| {
            let answer = request.answer().ok()?;
            let device_used_bytes = answer.estimate.device_used_bytes;
            Some(Change { what, request, device_used_bytes, fits: answer.fits() })
        };
        let before = self.estimate.device_used_bytes;
        let least = before / LEAST;
        let single = STEPS.iter().filter_map(|(what, step)| run((*what).to_owned(), step(self, request)?));
        let mut changes: Vec<Change> =
            single.filter(|change| change.device_used_bytes.saturating_add(least) < before).collect();
        if changes.iter().any(|change| change.fits) {
            return changes;
        }
        let (mut together, mut words, mut used) = (request.clone(), Vec::new(), before);
        for (what, step) in STEPS {
            let Some(next) = step(self, &together) else { continue };
            let Some(change) = run(what.to_owned(), next) else { continue };
            if change.device_used_bytes.saturating_add(least) >= used {
                continue;
            }
            words.push(what);
            (together, used) = (change.request.clone(), change.device_used_bytes);
            if change.fits && words.len() > 1 {
                changes.push(Change { what: words.join(" and "), ..change });
                break;
            }
        }
        changes
    }
}
