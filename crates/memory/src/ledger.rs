//! The ledger: what is live, how large, under which tag and for which layer, at every moment.
//!
//! A ledger belongs to an [`Arena`](crate::Arena), which writes it. It keeps totals by tag and by layer, and what they were at
//! the peak: its size does not depend on how much happens. Only where recording is on it also keeps every event, for the
//! timeline.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::recording::{CountedEvents, Mark, MemoryEvent, Recording};
use crate::splitmix::splitmix64;

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default, Serialize)]
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

impl Phase {
    /// Every phase.
    pub const ALL: [Phase; 6] =
        [Phase::Setup, Phase::Forward, Phase::Loss, Phase::Backward, Phase::Optimizer, Phase::Generate];
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
    /// The sum of it.
    live_bytes: u64,
    /// What is live of each owner, and what of it has changed since the peak: of nobody first, then of layer after layer.
    owners: Vec<Owner>,
    /// The owners of which something has changed since the peak.
    changed: Vec<usize>,
    /// The most that was ever live under each tag.
    most: TagBytes,
    at_peak: AtPeak,
    /// The highest end of what was taken in each phase.
    phase_peaks: [u64; Phase::ALL.len()],
    phase: Phase,
    layer: Option<u32>,
    record: Option<Box<Recording>>,
}

/// What belongs to a layer, or to none.
#[derive(Clone, Copy, Debug, Default)]
struct Owner {
    live: TagBytes,
    /// Bytes given back and taken since the peak.
    gone: TagBytes,
    come: TagBytes,
    /// Whether it has held anything, ever and at the peak.
    known: bool,
    known_at_peak: bool,
    /// Whether it is among those that have changed.
    changed: bool,
}

impl Ledger {
    pub(crate) fn recording() -> Ledger {
        Ledger { record: Some(Box::new(Recording::new())), ..Ledger::default() }
    }

    /// A ledger that records where this one does, with events that are numbered together with this one's.
    pub(crate) fn beside(&self) -> Ledger {
        let record = self.record.as_ref().map(|record| Box::new(record.beside()));
        Ledger { record, ..Ledger::default() }
    }

    /// What was recorded so far; nothing more is.
    pub(crate) fn end_record(&mut self) -> Option<Box<Recording>> {
        self.record.take()
    }

    pub(crate) fn with_record(self, record: Option<Box<Recording>>) -> Ledger {
        Ledger { record, ..self }
    }

    pub(crate) fn enter(&mut self, phase: Phase, layer: Option<u32>) {
        (self.phase, self.layer) = (phase, layer);
    }

    pub(crate) fn took(&mut self, tag: Tag, name: &'static str, bytes: u64, end: u64) {
        let raised = end > self.at_peak.peak;
        self.live.add(tag, bytes);
        self.live_bytes += bytes;
        let owner = self.layer;
        let own = self.changed(owner);
        own.live.add(tag, bytes);
        own.come.add(tag, bytes);
        own.known = true;
        self.most.0[tag as usize] = self.most.get(tag).max(self.live.get(tag));
        let of_phase = &mut self.phase_peaks[self.phase as usize];
        *of_phase = end.max(*of_phase);
        if raised {
            self.at_peak = AtPeak { peak: end, by_tag: self.live, phase: self.phase, layer: self.layer };
            for place in self.changed.drain(..) {
                let own = &mut self.owners[place];
                *own =
                    Owner { live: own.live, known: own.known, known_at_peak: own.known, ..Owner::default() };
            }
        }
        self.record(tag, name, owner, end - bytes, bytes as i64, raised);
    }

    pub(crate) fn gave_back(
        &mut self,
        tag: Tag,
        name: &'static str,
        owner: Option<u32>,
        offset: u64,
        bytes: u64,
    ) {
        self.live.remove(tag, bytes);
        self.live_bytes -= bytes;
        let own = self.changed(owner);
        own.live.remove(tag, bytes);
        own.gone.add(tag, bytes);
        self.record(tag, name, owner, offset, -(bytes as i64), false);
    }

    /// An owner that changes now.
    fn changed(&mut self, owner: Option<u32>) -> &mut Owner {
        let place = owner.map_or(0, |layer| layer as usize + 1);
        if place >= self.owners.len() {
            self.owners.resize(place + 1, Owner::default());
        }
        let own = &mut self.owners[place];
        if !own.changed {
            own.changed = true;
            self.changed.push(place);
        }
        own
    }

    fn record(
        &mut self,
        tag: Tag,
        name: &'static str,
        owner: Option<u32>,
        offset: u64,
        delta: i64,
        raised_peak: bool,
    ) {
        if let Some(record) = &mut self.record {
            let (phase, layer, live) = (self.phase, self.layer, self.live_bytes);
            record.add(|number, seconds| MemoryEvent {
                number,
                seconds,
                phase,
                layer,
                owner,
                tag,
                name,
                offset,
                delta,
                live,
                raised_peak,
            });
        }
    }

    pub(crate) fn record_mut(&mut self) -> Option<&mut Recording> {
        self.record.as_deref_mut()
    }

    pub(crate) fn layer(&self) -> Option<u32> {
        self.layer
    }

    /// A number for what is live by layer and tag: equal ones mean the same.
    pub(crate) fn fingerprint(&self) -> u64 {
        let of_owner = |(place, own): (usize, &Owner)| {
            let held = own.live.iter().map(|(tag, bytes)| weight(place, tag).wrapping_mul(bytes));
            held.fold(0, u64::wrapping_add)
        };
        self.owners.iter().enumerate().map(of_owner).fold(0, u64::wrapping_add)
    }

    /// Live bytes by tag, now.
    pub fn live(&self) -> TagBytes {
        self.live
    }

    /// The most bytes that were ever live under a tag, at the peak or not.
    pub fn most(&self, tag: Tag) -> u64 {
        self.most.get(tag)
    }

    /// The highest end of what was taken in a phase; 0 where nothing was.
    pub fn phase_peak(&self, phase: Phase) -> u64 {
        self.phase_peaks[phase as usize]
    }

    /// What was live at the high-water mark.
    pub fn at_peak(&self) -> &AtPeak {
        &self.at_peak
    }

    /// What was live at the peak by owning layer (`None`: outside the layers) and tag.
    pub fn at_peak_by_layer(&self) -> BTreeMap<Option<u32>, TagBytes> {
        let known = (0u32..).zip(&self.owners).filter(|(_, own)| own.known_at_peak);
        let at_peak = |own: &Owner| {
            let of = |tag: Tag| own.live.get(tag) + own.gone.get(tag) - own.come.get(tag);
            TagBytes(Tag::ALL.map(of))
        };
        known.map(|(place, own)| (place.checked_sub(1), at_peak(own))).collect()
    }

    /// The recorded events; empty when recording is off.
    pub fn events(&self) -> &[MemoryEvent] {
        self.record.as_ref().map_or(&[], |record| &record.events)
    }

    /// The parts of the work that were marked, in order.
    pub fn marks(&self) -> &[Mark] {
        self.record.as_ref().map_or(&[], |record| &record.marks)
    }

    /// Which events stand for iterations that were counted.
    pub fn counted(&self) -> &[CountedEvents] {
        self.record.as_ref().map_or(&[], |record| &record.counted)
    }
}

/// What a byte adds to the fingerprint of what is live, by the place of its owner.
fn weight(owner: usize, tag: Tag) -> u64 {
    splitmix64((owner as u64) << 8 | tag as u64, 0)
}
