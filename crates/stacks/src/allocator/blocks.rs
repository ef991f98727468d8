//! Blocks, and the pools of those that are free.

use std::collections::BTreeSet;

use super::trace::TraceTag;
use super::{BlockId, Stream};

/// The place of a block in [`Blocks`].
pub(super) type Slot = u32;

/// No block.
pub(super) const NONE: Slot = Slot::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Can be handed out; in its pool's `free`.
    Free,
    /// Handed out.
    Allocated,
    /// Freed, but another stream uses it.
    Pending,
    /// Address space of an expandable segment without memory; in its pool's `unmapped`.
    Unmapped,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub address: u64,
    pub size: u64,
    pub requested: u64,
    pub stream: Stream,
    pub small: bool,
    pub state: State,
    /// Another stream uses it.
    pub used_elsewhere: bool,
    /// Neighbours in the segment.
    pub prev: Slot,
    pub next: Slot,
    /// The expandable segment's first address, if it is part of one.
    pub expandable: Option<u64>,
    /// Searches of its pool that had happened when it became free, for garbage collection.
    pub freed_at: u64,
    /// Doing what it was handed out.
    pub tag: TraceTag,
    /// Doing what the segment was made; of a segment's first block alone.
    pub segment_tag: TraceTag,
    /// Of the ids under which this place is handed out.
    pub generation: u32,
}

impl Block {
    pub fn new(address: u64, size: u64, stream: Stream, small: bool) -> Self {
        Block {
            address,
            size,
            requested: 0,
            stream,
            small,
            state: State::Free,
            used_elsewhere: false,
            prev: NONE,
            next: NONE,
            expandable: None,
            freed_at: 0,
            tag: TraceTag::default(),
            segment_tag: TraceTag::default(),
            generation: 0,
        }
    }

    pub fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }
}

/// All blocks of all segments.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    slots: Vec<Block>,
    vacant: Vec<Slot>,
}

impl Blocks {
    pub fn insert(&mut self, mut block: Block) -> Slot {
        match self.vacant.pop() {
            Some(slot) => {
                block.generation = self.slots[slot as usize].generation;
                self.slots[slot as usize] = block;
                slot
            }
            None => {
                self.slots.push(block);
                self.slots.len() as Slot - 1
            }
        }
    }

    pub fn remove(&mut self, slot: Slot) {
        self.slots[slot as usize].size = 0;
        self.vacant.push(slot);
    }

    /// Puts `slot` between two neighbours.
    pub fn link(&mut self, prev: Slot, slot: Slot, next: Slot) {
        (self[slot].prev, self[slot].next) = (prev, next);
        if prev != NONE {
            self[prev].next = slot;
        }
        if next != NONE {
            self[next].prev = slot;
        }
    }

    pub fn id(&self, slot: Slot) -> BlockId {
        BlockId(u64::from(self[slot].generation) << 32 | u64::from(slot))
    }

    /// The block that is handed out under `id`.
    pub fn allocated(&self, id: BlockId) -> Option<Slot> {
        let slot = id.0 as Slot;
        let block = self.slots.get(slot as usize)?;
        (block.state == State::Allocated && block.size > 0 && u64::from(block.generation) == id.0 >> 32)
            .then_some(slot)
    }

    /// The id under which a block was handed out means nothing any more.
    pub fn retire_id(&mut self, slot: Slot) {
        let generation = &mut self[slot].generation;
        *generation = generation.wrapping_add(1);
    }

    /// The first block of every segment, and of every run of mapped pages in an expandable one, by address.
    pub fn heads(&self) -> Vec<Slot> {
        let mut heads: Vec<Slot> = (0..self.slots.len() as Slot)
            .filter(|&slot| {
                let Block { size, state, prev, .. } = self[slot];
                size > 0 && state != State::Unmapped && (prev == NONE || self[prev].state == State::Unmapped)
            })
            .collect();
        heads.sort_by_key(|&slot| self[slot].address);
        heads
    }
}

impl std::ops::Index<Slot> for Blocks {
    type Output = Block;

    fn index(&self, slot: Slot) -> &Block {
        &self.slots[slot as usize]
    }
}

impl std::ops::IndexMut<Slot> for Blocks {
    fn index_mut(&mut self, slot: Slot) -> &mut Block {
        &mut self.slots[slot as usize]
    }
}

/// The order of best fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FreeKey {
    pub stream: Stream,
    pub size: u64,
    pub address: u64,
    pub slot: Slot,
}

impl FreeKey {
    /// Before every block of that stream that is at least so large.
    pub fn at_least(stream: Stream, size: u64) -> Self {
        FreeKey { stream, size, address: 0, slot: 0 }
    }

    pub fn of(slot: Slot, block: &Block) -> Self {
        FreeKey { stream: block.stream, size: block.size, address: block.address, slot }
    }
}

/// The small or the large pool.
#[derive(Debug, Default)]
pub(super) struct Pool {
    pub free: BTreeSet<FreeKey>,
    /// By stream and address.
    pub unmapped: BTreeSet<(Stream, u64, Slot)>,
    /// Searches, counted where garbage collection is on.
    pub searches: u64,
}

impl Pool {
    pub fn insert_free(&mut self, slot: Slot, block: &mut Block) {
        block.state = State::Free;
        block.freed_at = self.searches;
        self.free.insert(FreeKey::of(slot, block));
    }

    pub fn remove_free(&mut self, slot: Slot, block: &Block) {
        self.free.remove(&FreeKey::of(slot, block));
    }

    pub fn insert_unmapped(&mut self, slot: Slot, block: &mut Block) {
        block.state = State::Unmapped;
        self.unmapped.insert((block.stream, block.address, slot));
    }

    pub fn remove_unmapped(&mut self, slot: Slot, block: &Block) {
        self.unmapped.remove(&(block.stream, block.address, slot));
    }
}
