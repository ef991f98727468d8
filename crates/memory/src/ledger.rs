//! The ledger: what is live, how large, under which tag and for which layer, at every moment.
//!
//! A ledger belongs to an [`Arena`](crate::Arena), which writes it. It always keeps the totals by tag
//! and what they were at the peak; when recording is on it also keeps every event, from which the
//! timeline and the per-layer breakdown are replayed.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Tag {
    Weights,
    MasterWeights,
    Gradients,
    Optimizer,
    Adapters,
    Activations,
    Attention,
    Logits,
    KvCache,
    Communication,
    Staging,
    Workspace,
    Data,
}

impl Tag {
    /// Every tag, in the order in which breakdowns list them.
    pub const ALL: [Tag; 13] = [
        Tag::Weights,
        Tag::MasterWeights,
        Tag::Gradients,
        Tag::Optimizer,
        Tag::Adapters,
        Tag::Activations,
        Tag::Attention,
        Tag::Logits,
        Tag::KvCache,
        Tag::Communication,
        Tag::Staging,
        Tag::Workspace,
        Tag::Data,
    ];

    /// The tag's name in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Tag::Weights => "weights",
            Tag::MasterWeights => "master_weights",
            Tag::Gradients => "gradients",
            Tag::Optimizer => "optimizer",
            Tag::Adapters => "adapters",
            Tag::Activations => "activations",
            Tag::Attention => "attention",
            Tag::Logits => "logits",
            Tag::KvCache => "kv_cache",
            Tag::Communication => "communication",
            Tag::Staging => "staging",
            Tag::Workspace => "workspace",
            Tag::Data => "data",
        }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Bytes by tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagBytes([u64; Tag::ALL.len()]);

impl TagBytes {
    /// Bytes under one tag.
    pub fn get(&self, tag: Tag) -> u64 {
        self.0[tag as usize]
    }

    /// The sum over all tags.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The tags that hold anything, in listing order.
    pub fn iter(&self) -> impl Iterator<Item = (Tag, u64)> + '_ {
        Tag::ALL.into_iter().map(|tag| (tag, self.get(tag))).filter(|(_, bytes)| *bytes > 0)
    }

    pub(crate) fn add(&mut self, tag: Tag, bytes: u64) {
        self.0[tag as usize] += bytes;
    }

    pub(crate) fn remove(&mut self, tag: Tag, bytes: u64) {
        self.0[tag as usize] -= bytes;
    }
}

/// The part of the work in which memory is taken or given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Phase {
    #[default]
    Setup,
    Forward,
    Loss,
    Backward,
    Optimizer,
    Generate,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Setup => "setup",
            Phase::Forward => "forward",
            Phase::Loss => "loss",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
            Phase::Generate => "generate",
        })
    }
}

/// One allocation or release, as recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    /// Phase of the step.
    pub phase: Phase,
    /// Layer in whose scope it happened.
    pub layer: Option<u32>,
    /// Layer in whose scope the memory was taken: the one it belongs to.
    pub owner: Option<u32>,
    /// What the memory is for.
    pub tag: Tag,
    /// The allocation's own name, such as `q` or `mlp.gate`.
    pub name: &'static str,
    /// Bytes taken (positive) or given back (negative).
    pub delta: i64,
    /// Bytes live after the event.
    pub live: u64,
    /// Whether the event raised the arena's high-water mark.
    pub raised_peak: bool,
}

/// What was live when the arena's high-water mark was reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AtPeak {
    /// The high-water mark itself: the highest end of any allocation.
    pub peak: u64,
    /// Live bytes by tag at that moment; their sum is at most `peak`, the rest is gaps.
    pub by_tag: TagBytes,
    /// The phase in which it was reached.
    pub phase: Phase,
    /// The layer in which it was reached.
    pub layer: Option<u32>,
}

impl AtPeak {
    /// Bytes below the high-water mark that nothing used at that moment.
    pub fn gaps(&self) -> u64 {
        self.peak - self.by_tag.total()
    }
}

/// Totals and, where recording is on, the events of one arena.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    live: TagBytes,
    /// The most that was ever live under each tag.
    most: TagBytes,
    at_peak: AtPeak,
    phase: Phase,
    layer: Option<u32>,
    events: Option<Vec<Event>>,
}

impl Ledger {
    pub(crate) fn recording() -> Ledger {
        Ledger { events: Some(Vec::new()), ..Ledger::default() }
    }

    pub(crate) fn enter(&mut self, phase: Phase, layer: Option<u32>) {
        (self.phase, self.layer) = (phase, layer);
    }

    pub(crate) fn took(&mut self, tag: Tag, name: &'static str, bytes: u64, end: u64) {
        self.live.add(tag, bytes);
        self.most.0[tag as usize] = self.most.get(tag).max(self.live.get(tag));
        let raised = end > self.at_peak.peak;
        if raised {
            self.at_peak = AtPeak { peak: end, by_tag: self.live, phase: self.phase, layer: self.layer };
        }
        self.record(tag, name, self.layer, bytes as i64, raised);
    }

    pub(crate) fn gave_back(&mut self, tag: Tag, name: &'static str, owner: Option<u32>, bytes: u64) {
        self.live.remove(tag, bytes);
        self.record(tag, name, owner, -(bytes as i64), false);
    }

    fn record(&mut self, tag: Tag, name: &'static str, owner: Option<u32>, delta: i64, raised_peak: bool) {
        let (phase, layer, live) = (self.phase, self.layer, self.live.total());
        if let Some(events) = &mut self.events {
            events.push(Event { phase, layer, owner, tag, name, delta, live, raised_peak });
        }
    }

    pub(crate) fn layer(&self) -> Option<u32> {
        self.layer
    }

    /// Live bytes by tag, now.
    pub fn live(&self) -> TagBytes {
        self.live
    }

    /// The most bytes that were ever live under a tag, at the peak or not.
    pub fn most(&self, tag: Tag) -> u64 {
        self.most.get(tag)
    }

    /// What was live at the high-water mark.
    pub fn at_peak(&self) -> &AtPeak {
        &self.at_peak
    }

    /// What was live at the peak by owning layer (`None`: outside the layers) and tag, replayed from the events;
    /// empty when recording is off.
    pub fn at_peak_by_layer(&self) -> BTreeMap<Option<u32>, TagBytes> {
        let last = self.events().iter().rposition(|event| event.raised_peak).map_or(0, |i| i + 1);
        let mut live: BTreeMap<Option<u32>, TagBytes> = BTreeMap::new();
        for event in &self.events()[..last] {
            let bytes = live.entry(event.owner).or_default();
            if event.delta > 0 {
                bytes.add(event.tag, event.delta.unsigned_abs());
            } else {
                bytes.remove(event.tag, event.delta.unsigned_abs());
            }
        }
        live
    }

    /// Forgets the recorded events, which take memory themselves; totals and the peak stay.
    pub fn forget_events(&mut self) {
        self.events = None;
    }

    /// The recorded events; empty when recording is off.
    pub fn events(&self) -> &[Event] {
        self.events.as_deref().unwrap_or(&[])
    }
}
