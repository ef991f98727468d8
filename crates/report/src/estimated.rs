//! A run of another stack, as `plimsoll estimate` has it: its peak by kind, its phases, what was decided, and what would make it smaller.
//!
//! The run is answered by `plimsoll_stacks`; here the answer becomes what a page says.

use plimsoll_memory::{ByteSize, Tag};
use plimsoll_stacks::{Answer, Decision, Estimate, Kind, PhasePeak, Request};
use serde::Serialize;

use crate::breakdown::{Breakdown, Part};
use crate::document::Document;
use crate::headline::Fact;

/// What only a page of an estimate has.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimated {
    /// The phases in their order.
    pub phases: Vec<PhasePeak>,
    /// What would make it smaller in that stack, the cheapest first.
    pub changes: Vec<Smaller>,
    /// Defaults that were taken, with their rules.
    pub decided: Vec<Decision>,
}

/// A change, and what the device would show then.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Smaller {
    /// In words.
    pub what: String,
    /// Bytes.
    pub device_used_bytes: u64,
    /// Whether the card holds that.
    pub fits: bool,
}

impl Document {
    /// What there is to say of an estimate that was asked with `request`.
    ///
    /// # Errors
    /// A request that cannot be written: none that was read.
    pub fn of_estimate(name: String, request: &Request, answer: &Answer) -> serde_json::Result<Document> {
        let Answer { resolved, estimate } = answer;
        let run = &resolved.run;
        let title = &resolved.target.title;
        let memory = resolved.target.device.memory;
        let uncertain = estimate
            .uncertain
            .iter()
            .map(|one| format!("Not known: {}, ± {}.", one.what, ByteSize(one.bytes)));
        let changes = answer.changes(request).into_iter().map(|change| Smaller {
            what: change.what,
            device_used_bytes: change.device_used_bytes,
            fits: change.fits,
        });
        Ok(Document {
            title: run.model.name.clone(),
            settings: Some(format!("{}, {} x {} tokens, on {title}", request.stack, run.batch, run.sequence)),
            headline: headline(answer),
            fits: Some(answer.fits()),
            facts: facts(estimate, memory, title),
            notes: uncertain.collect(),
            misfits: Vec::new(),
            alternatives: Vec::new(),
            memory: breakdowns(estimate, memory.0, title),
            timeline: None,
            run: None,
            compared: Vec::new(),
            waterfall: Vec::new(),
            pareto: Vec::new(),
            configuration: Some(serde_json::to_string_pretty(request)?),
            plan: None,
            estimated: Some(Estimated {
                phases: estimate.phases.clone(),
                changes: changes.collect(),
                decided: resolved.decided.clone(),
            }),
            name,
        })
    }
}

fn headline(answer: &Answer) -> String {
    let Answer { resolved, estimate } = answer;
    let title = &resolved.target.title;
    let used = ByteSize(estimate.device_used_bytes);
    let fits = match (answer.fits(), answer.fits_without_cache()) {
        (true, _) => format!("Fits: {title} will show {used}."),
        (false, true) => format!(
            "Does not fit {title} as it is: {used}, unless the caching allocator finds room by giving back what it keeps."
        ),
        (false, false) => format!("Does not fit {title}: {used}."),
    };
    format!("{fits} The peak is in the {} phase, at {}.", estimate.peak.phase, estimate.peak.moment)
}

fn facts(estimate: &Estimate, memory: ByteSize, title: &str) -> Vec<Fact> {
    let fact = |what, bytes: u64, beside: &str| Fact {
        what,
        value: ByteSize(bytes).to_string(),
        beside: beside.to_owned(),
    };
    let host = estimate.phases.iter().max_by_key(|phase| phase.host_bytes);
    let host = host.filter(|phase| phase.host_bytes > 0);
    let mut facts = vec![
        fact("in tensors", estimate.allocated_peak_bytes, "max_memory_allocated"),
        fact("reserved", estimate.reserved_peak_bytes, "max_memory_reserved"),
        fact("on the device", estimate.device_used_bytes, &format!("nvidia-smi; {title} has {memory}")),
    ];
    facts.extend(
        host.map(|phase| fact("on the host", phase.host_bytes, &format!("in the {} phase", phase.phase))),
    );
    facts
}

/// The device at the peak of tensors. What the allocator reserves beside them, and what lies outside of it, are counted too: together they
/// are what the device shows.
fn breakdowns(estimate: &Estimate, memory: u64, title: &str) -> Vec<Breakdown> {
    let mut parts: Vec<Part> = estimate
        .peak
        .at_peak
        .iter()
        .map(|(kind, bytes)| {
            let (kind, what) = of_kind(*kind);
            Part { kind, what: what.to_owned(), bytes: *bytes }
        })
        .collect();
    let cached = estimate.reserved_peak_bytes.saturating_sub(estimate.allocated_peak_bytes);
    let outside = estimate.device_used_bytes.saturating_sub(estimate.reserved_peak_bytes);
    parts.push(Part {
        kind: "gaps",
        what: "reserved beside them by the caching allocator".into(),
        bytes: cached,
    });
    parts.push(Part { kind: "overhead", what: "context, kernels and communication".into(), bytes: outside });
    parts.retain(|part| part.bytes > 0);
    vec![Breakdown {
        title: "Device",
        bytes: parts.iter().map(|part| part.bytes).sum(),
        budget_bytes: Some(memory),
        limited_by: Some(title.to_owned()),
        parts,
    }]
}

/// The colour that a kind has on our own pages, and its words.
fn of_kind(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Weights => (Tag::Weights.name(), "weights"),
        Kind::Adapters => (Tag::Adapters.name(), "adapters"),
        Kind::WeightCopies => (Tag::MasterWeights.name(), "copies of weights"),
        Kind::Gradients => (Tag::Gradients.name(), "gradients"),
        Kind::OptimizerStates => (Tag::Optimizer.name(), "optimizer states"),
        Kind::SavedActivations => (Tag::Activations.name(), "saved for backward"),
        Kind::Temporary => (Tag::Staging.name(), "temporary"),
        Kind::Logits => (Tag::Logits.name(), "logits and loss"),
        Kind::KvCache => (Tag::KvCache.name(), "key-value cache"),
        Kind::Communication => (Tag::Communication.name(), "communication"),
        Kind::Workspace => (Tag::Workspace.name(), "workspaces of libraries"),
    }
}
