//! A deterministic arena: offsets in one address range, handed out best fit and given back on drop.
//!
//! The arena deals in offsets only; whether memory stands behind them (a [`Reservation`](crate::Reservation),
//! GPU memory, or nothing, in a dry run) is the device's affair. The same sequence of requests gives
//! the same offsets and the same high-water mark everywhere: that is what makes a plan exact.

mod replay;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::layout::{Layout, Traffic};
use crate::ledger::{Ledger, Phase, Tag, TagBytes};
use crate::{ByteSize, Tier};

pub use replay::{Piece, Replay};

/// Offsets and sizes are multiples of this where nothing else is said: a cache line, and the width of the widest vector.
pub const ALIGNMENT: u64 = 64;

/// The capacity of an arena that never fills up.
const ENDLESS: u64 = u64::MAX / 2;

/// A request that the arena could not meet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{tier} memory is used up: {name} ({tag}) asks for {}, {} of {} are in use and the largest free piece is {}",
    ByteSize(*.requested), ByteSize(.live.total()), ByteSize(*.capacity), ByteSize(*.largest_free)
)]
pub struct OutOfMemory {
    /// The tier that is full.
    pub tier: Tier,
    /// Bytes asked for.
    pub requested: u64,
    /// Under which tag.
    pub tag: Tag,
    /// The allocation's name.
    pub name: &'static str,
    /// The arena's size.
    pub capacity: u64,
    /// The largest piece that could have been had.
    pub largest_free: u64,
    /// What holds the memory.
    pub live: Box<TagBytes>,
}

/// A handle on an arena; clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    shared: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    tier: Tier,
    alignment: u64,
    capacity: u64,
    /// Free ranges, offset and size, in order and coalesced. They are few.
    free: Vec<(u64, u64)>,
    ledger: Ledger,
    traffic: Traffic,
}

impl Arena {
    /// An arena of `capacity` bytes.
    pub fn new(tier: Tier, capacity: u64) -> Arena {
        Arena::with_ledger(tier, capacity, Ledger::default())
    }

    /// An arena without an end: what a dry run uses.
    pub fn unbounded(tier: Tier) -> Arena {
        Arena::with_ledger(tier, ENDLESS, Ledger::default())
    }

    /// The same, which records every event: for the timeline.
    pub fn recording(tier: Tier) -> Arena {
        Arena::with_ledger(tier, ENDLESS, Ledger::recording())
    }

    /// An arena without an end for another tier. It records where this one does, and their events are numbered together.
    pub fn beside(&self, tier: Tier) -> Arena {
        Arena::with_ledger(tier, ENDLESS, self.lock().ledger.beside())
    }

    fn with_ledger(tier: Tier, capacity: u64, ledger: Ledger) -> Arena {
        Arena { shared: Arc::new(Mutex::new(Inner::new(tier, capacity, ledger))) }
    }

    /// Has what is allocated from here on begin at multiples of this, which is one of [`ALIGNMENT`]; for a new arena.
    pub fn align_to(&self, alignment: u64) {
        self.lock().align_to(alignment);
    }

    /// Takes `bytes` (rounded up to the alignment). They come back when the block is dropped.
    pub fn alloc(&self, bytes: u64, tag: Tag, name: &'static str) -> Result<Block, OutOfMemory> {
        let mut inner = self.lock();
        let size = inner.whole(bytes);
        let offset = inner.take(size, tag, name)?;
        inner.traffic.took(offset, size, tag);
        let owner = inner.ledger.layer();
        Ok(Block { arena: self.clone(), offset, size, tag, name, owner })
    }

    /// Labels what follows with a phase and a layer.
    pub fn enter(&self, phase: Phase, layer: Option<u32>) {
        self.lock().ledger.enter(phase, layer);
    }

    /// Marks the beginning of a part of the work, where events are recorded.
    pub fn mark(&self, name: &'static str) {
        if let Some(record) = self.lock().ledger.record_mut() {
            record.mark(name);
        }
    }

    /// Whether every event is recorded.
    pub fn is_recording(&self) -> bool {
        self.lock().ledger.record_mut().is_some()
    }

    /// The number of the next event; 0 where none is recorded.
    pub fn next_event(&self) -> u64 {
        self.lock().ledger.record_mut().map_or(0, |record| record.next_event())
    }

    /// Takes down, where events are recorded, that those from `first` on would happen so many times more.
    pub fn count_again(&self, first: u64, times: u64) {
        if let Some(record) = self.lock().ledger.record_mut() {
            record.count_again(first, times);
        }
    }

    /// Says what time it is for the events that follow, here and in the arenas [beside](Self::beside), in seconds.
    pub fn tell_time(&self, seconds: f64) {
        if let Some(record) = self.lock().ledger.record_mut() {
            record.tell_time(seconds);
        }
    }

    /// The arena's size in bytes.
    pub fn capacity(&self) -> u64 {
        self.lock().capacity
    }

    /// The highest end of any allocation so far: the memory that the work has needed.
    pub fn high_water(&self) -> u64 {
        self.lock().ledger.at_peak().peak
    }

    /// What of the arena decides where the next allocations go, and what is live: equal layouts behave alike.
    pub fn layout(&self) -> Layout {
        self.lock().layout()
    }

    /// Begins to take down what is allocated and given back, and where; what was taken down until now comes back, to be
    /// [continued](Self::end_traffic).
    pub fn begin_traffic(&self) -> Traffic {
        std::mem::take(&mut self.lock().traffic)
    }

    /// What was taken down since [`begin_traffic`](Self::begin_traffic), which gave `before`.
    pub fn end_traffic(&self, before: Traffic) -> Traffic {
        let mut inner = self.lock();
        let traffic = std::mem::replace(&mut inner.traffic, before);
        inner.traffic.includes(traffic);
        traffic
    }

    /// A copy of the ledger as it stands.
    pub fn ledger(&self) -> Ledger {
        self.lock().ledger.clone()
    }

    /// The ledger as it stands, with all that was recorded. Nothing more is.
    pub fn end_record(&self) -> Ledger {
        let ledger = &mut self.lock().ledger;
        let record = ledger.end_record();
        Ledger::with_record(ledger.clone(), record)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves the maps whole: every change below is complete or not begun.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn new(tier: Tier, capacity: u64, ledger: Ledger) -> Inner {
        let capacity = capacity / ALIGNMENT * ALIGNMENT;
        let free = if capacity > 0 { vec![(0, capacity)] } else { Vec::new() };
        Inner { tier, alignment: ALIGNMENT, capacity, free, ledger, traffic: Traffic::default() }
    }

    fn align_to(&mut self, alignment: u64) {
        self.alignment = alignment.next_multiple_of(ALIGNMENT);
    }

    /// What is taken for so many bytes.
    fn whole(&self, bytes: u64) -> u64 {
        bytes.max(1).div_ceil(self.alignment) * self.alignment
    }

    fn layout(&self) -> Layout {
        Layout { holes: self.free.clone(), live: self.ledger.fingerprint() }
    }

    fn take(&mut self, size: u64, tag: Tag, name: &'static str) -> Result<u64, OutOfMemory> {
        // Best fit, the lowest offset among equals.
        // The piece at the end counts as endless, whatever the capacity: an arena of just the size that a dry run found
        // then hands out the very same offsets as the dry run's.
        let mut best: Option<(u64, usize)> = None;
        for (index, (offset, free)) in self.free.iter().enumerate() {
            let length = if offset + free == self.capacity { u64::MAX } else { *free };
            if *free >= size && best.is_none_or(|(shortest, _)| length < shortest) {
                best = Some((length, index));
                // None fits better, and of those that fit as well this is the lowest.
                if length == size {
                    break;
                }
            }
        }
        let Some((index, hole)) = best.and_then(|(_, index)| Some((index, self.free.get_mut(index)?))) else {
            return Err(self.full(size, tag, name));
        };
        let (offset, free) = *hole;
        *hole = (offset + size, free - size);
        if free == size {
            self.free.remove(index);
        }
        self.ledger.took(tag, name, size, offset + size);
        Ok(offset)
    }

    fn full(&self, requested: u64, tag: Tag, name: &'static str) -> OutOfMemory {
        OutOfMemory {
            tier: self.tier,
            requested,
            tag,
            name,
            capacity: self.capacity,
            largest_free: self.free.iter().map(|(_, size)| *size).max().unwrap_or(0),
            live: Box::new(self.ledger.live()),
        }
    }

    fn give_back(&mut self, offset: u64, size: u64) {
        let index = self.free.partition_point(|(other, _)| *other < offset);
        let touches_next = self.free.get(index).is_some_and(|(next, _)| *next == offset + size);
        let next_bytes = if touches_next { self.free.remove(index).1 } else { 0 };
        let before = index.checked_sub(1).and_then(|before| self.free.get_mut(before));
        match before {
            Some((start, bytes)) if *start + *bytes == offset => *bytes += size + next_bytes,
            _ => self.free.insert(index, (offset, size + next_bytes)),
        }
    }
}

/// A piece of an arena. Dropping it gives the piece back.
#[derive(Debug)]
pub struct Block {
    arena: Arena,
    offset: u64,
    size: u64,
    tag: Tag,
    name: &'static str,
    /// The layer in whose scope it was taken.
    owner: Option<u32>,
}

impl Block {
    /// Where the piece starts, in bytes from the arena's start.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The piece's size in bytes (the request, rounded up).
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What it is for.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// The name it was asked for under.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether the piece belongs to `arena`.
    pub fn is_in(&self, arena: &Arena) -> bool {
        Arc::ptr_eq(&self.arena.shared, &arena.shared)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut inner = self.arena.lock();
        inner.give_back(self.offset, self.size);
        inner.traffic.gave_back(self.offset);
        inner.ledger.gave_back(self.tag, self.name, self.owner, self.offset, self.size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn arena(capacity: u64) -> Arena {
        Arena::new(Tier::Device, capacity)
    }

    /// A hole is taken before the end, even where the end is the smaller piece.
    #[test]
    fn the_capacity_changes_no_offset() {
        let offsets = |capacity| {
            let arena = Arena::new(Tier::Device, capacity);
            let alloc = |size| arena.alloc(size, Tag::Workspace, "x").unwrap();
            let (first, second) = (alloc(640), alloc(64));
            drop(first);
            let third = alloc(128);
            [second.offset(), third.offset()]
        };
        assert_eq!(offsets(640 + 64 + 128), offsets(1 << 40));
    }

    #[test]
    fn blocks_are_reused_and_the_peak_stays() {
        let arena = arena(1024);
        let a = arena.alloc(100, Tag::Weights, "a").unwrap();
        let b = arena.alloc(64, Tag::Activations, "b").unwrap();
        assert_eq!((a.offset(), a.size(), b.offset()), (0, 128, 128));
        drop(a);
        let c = arena.alloc(1, Tag::Logits, "c").unwrap();
        assert_eq!(c.offset(), 0);
        assert_eq!(arena.high_water(), 192);
        let at_peak = arena.ledger().at_peak().clone();
        assert_eq!((at_peak.by_tag.get(Tag::Weights), at_peak.gaps()), (128, 0));
    }

    #[test]
    fn going_over_is_an_error_that_says_who_holds_what() {
        let arena = arena(256);
        let _held = arena.alloc(200, Tag::Weights, "w").unwrap();
        let error = arena.alloc(65, Tag::Logits, "logits").unwrap_err();
        assert_eq!((error.requested, error.largest_free), (128, 0));
        assert_eq!(error.live.get(Tag::Weights), 256);
        assert_eq!(
            error.to_string(),
            "device memory is used up: logits (logits) asks for 128 B, 256 B of 256 B are in use and the largest free piece is 0 B"
        );
    }

    #[test]
    fn events_replay_to_the_live_set() {
        let arena = Arena::recording(Tier::Device);
        arena.enter(Phase::Forward, Some(3));
        let block = arena.alloc(640, Tag::Activations, "q").unwrap();
        drop(block);
        let ledger = arena.ledger();
        let deltas: Vec<i64> = ledger.events().iter().map(|e| e.delta).collect();
        assert_eq!(deltas, [640, -640]);
        assert_eq!(ledger.events()[0].layer, Some(3));
        assert_eq!(ledger.live().total(), 0);
    }

    #[test]
    fn memory_belongs_to_the_layer_that_took_it() {
        let arena = Arena::unbounded(Tier::Device);
        arena.enter(Phase::Forward, Some(0));
        let first = arena.alloc(64, Tag::Activations, "x").unwrap();
        arena.enter(Phase::Forward, Some(1));
        drop(first);
        let _second = arena.alloc(128, Tag::Attention, "q").unwrap();
        let by_layer = arena.ledger().at_peak_by_layer();
        assert_eq!(by_layer[&Some(0)].total(), 0);
        assert_eq!(by_layer[&Some(1)].get(Tag::Attention), 128);
    }

    proptest! {
        /// Live blocks never overlap, the ledger's total is their sum, and what is given back is whole again.
        #[test]
        fn random_traffic_keeps_the_books(steps in prop::collection::vec((any::<bool>(), 1u64..500, 0usize..8), 1..200)) {
            let arena = arena(16 << 10);
            let mut held: Vec<Block> = Vec::new();
            for (take, size, which) in steps {
                if take {
                    if let Ok(block) = arena.alloc(size, Tag::Workspace, "x") {
                        for other in &held {
                            prop_assert!(block.offset() + block.size() <= other.offset() || other.offset() + other.size() <= block.offset());
                        }
                        held.push(block);
                    }
                } else if !held.is_empty() {
                    let index = which % held.len();
                    held.swap_remove(index);
                }
                prop_assert_eq!(arena.ledger().live().total(), held.iter().map(Block::size).sum::<u64>());
            }
            held.clear();
            let whole = arena.alloc(16 << 10, Tag::Workspace, "all");
            prop_assert!(whole.is_ok());
        }
    }
}
