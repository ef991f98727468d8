//! `expandable_segments:True`: one address range per stream and pool, whose pages get memory as they are needed.

use super::blocks::{Block, FreeKey, NONE, Slot, State};
use super::sizes::{is_small, page_size};
use super::{Action, CachingAllocator, Stream};

/// Address space of an expandable segment where the device has no limit: what 47-bit addresses leave room for.
const MOST_ADDRESSES: u64 = 1 << 46;

impl CachingAllocator {
    /// The best fit from `key` on. A block before unmapped pages counts as large as it could grow, so that holes are filled first.
    pub(super) fn within_expandable(&self, key: FreeKey, small: bool) -> FreeKey {
        let room = |key: &FreeKey| {
            let next = self.blocks[key.slot].next;
            let unmapped = next != NONE && self.blocks[next].state == State::Unmapped;
            key.size + if unmapped { self.blocks[next].size } else { 0 }
        };
        let pool = if small { &self.small } else { &self.large };
        let mut best = key;
        for candidate in pool.free.range(key..).skip(1) {
            let ends = self.blocks[best.slot].expandable.is_none() || candidate.stream != key.stream;
            if ends || room(candidate) >= room(&best) {
                break;
            }
            best = *candidate;
        }
        best
    }

    /// A block of at least `size`, taken from its pool, after mapping what is missing.
    pub(super) fn expand(&mut self, size: u64, stream: Stream) -> Option<Slot> {
        let mut slot = self.find_address_space(size, stream)?;
        if self.blocks[slot].state == State::Unmapped {
            self.map(slot, size)?;
        }
        while self.blocks[slot].size < size {
            let (next, missing) = (self.blocks[slot].next, size - self.blocks[slot].size);
            if next == NONE {
                return None;
            }
            self.map(next, missing)?;
            slot = next;
        }
        let small = is_small(size);
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.remove_free(slot, &self.blocks[slot]);
        Some(slot)
    }

    /// The lowest unmapped pages that have room, together with a free block before them and what is free behind them; else a new segment.
    fn find_address_space(&mut self, size: u64, stream: Stream) -> Option<Slot> {
        let small = is_small(size);
        let usable =
            |slot: Slot| slot != NONE && matches!(self.blocks[slot].state, State::Free | State::Unmapped);
        let has_room = |mut slot: Slot| {
            let mut bytes = 0;
            while bytes < size && usable(slot) {
                bytes += self.blocks[slot].size;
                slot = self.blocks[slot].next;
            }
            bytes >= size
        };
        let pool = if small { &self.small } else { &self.large };
        let found = pool.unmapped.range((stream, 0, 0)..).take_while(|(of, ..)| *of == stream).find_map(
            |&(_, _, slot)| {
                let prev = self.blocks[slot].prev;
                let first = if usable(prev) { prev } else { slot };
                has_room(first).then_some(first)
            },
        );
        found.or_else(|| self.new_expandable(small, stream))
    }

    /// Address space for 1 1/8 of the device's memory, with no memory behind it.
    fn new_expandable(&mut self, small: bool, stream: Stream) -> Option<Slot> {
        let bytes = self.device_memory.saturating_add(self.device_memory / 8).min(MOST_ADDRESSES);
        let bytes = bytes.next_multiple_of(page_size(small));
        let address = self.take_addresses(bytes)?;
        let block = Block { expandable: Some(address), ..Block::new(address, bytes, stream, small) };
        let slot = self.blocks.insert(block);
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.insert_unmapped(slot, &mut self.blocks[slot]);
        Some(slot)
    }

    /// Gives memory to the first `size` bytes, or to all if there are fewer, of an unmapped block, in whole pages; all of them or none.
    fn map(&mut self, slot: Slot, size: u64) -> Option<()> {
        let Block { address, size: whole, small, stream, expandable, next, .. } = self.blocks[slot];
        let bytes = size.min(whole).next_multiple_of(page_size(small));
        if bytes > self.free_memory() {
            return None;
        }
        let tag = self.tag;
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.remove_unmapped(slot, &self.blocks[slot]);
        if bytes < whole {
            let rest = Block { expandable, ..Block::new(address + bytes, whole - bytes, stream, small) };
            let rest = self.blocks.insert(rest);
            self.blocks.link(slot, rest, next);
            self.blocks[slot].size = bytes;
            let pool = if small { &mut self.small } else { &mut self.large };
            pool.insert_unmapped(rest, &mut self.blocks[rest]);
        }
        (self.blocks[slot].state, self.blocks[slot].segment_tag) = (State::Free, tag);
        let Block { prev, next, .. } = self.blocks[slot];
        self.absorb(slot, prev);
        self.absorb(slot, next);
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.insert_free(slot, &mut self.blocks[slot]);
        self.statistics.each(small, |pool| pool.reserved.add(bytes));
        self.statistics.num_device_alloc += 1;
        self.record(Action::SegmentMap, address, bytes, stream);
        Some(())
    }

    /// Takes the memory of the whole pages of a free block away. A segment without any memory ends.
    pub(super) fn unmap(&mut self, slot: Slot) {
        let Block { address, size, small, stream, expandable, prev, next, .. } = self.blocks[slot];
        let Some(base) = expandable else { return };
        let page = page_size(small);
        let begin = base + (address - base).next_multiple_of(page);
        let end = base + (address + size - base) / page * page;
        if begin >= end {
            return;
        }
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.remove_free(slot, &self.blocks[slot]);
        let (mut before, mut behind) = (prev, next);
        if begin > address {
            let part = Block { expandable, ..Block::new(address, begin - address, stream, small) };
            before = self.insert_between(prev, part, slot);
        }
        if address + size > end {
            let part = Block { expandable, ..Block::new(end, address + size - end, stream, small) };
            behind = self.insert_between(slot, part, next);
        }
        let block = &mut self.blocks[slot];
        (block.address, block.size, block.state) = (begin, end - begin, State::Unmapped);
        self.absorb(slot, before);
        self.absorb(slot, behind);
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.insert_unmapped(slot, &mut self.blocks[slot]);
        self.statistics.each(small, |pool| pool.reserved.subtract(end - begin));
        self.statistics.num_device_free += 1;
        self.record(Action::SegmentUnmap, begin, end - begin, stream);
        if !self.blocks[slot].is_split() {
            let pool = if small { &mut self.small } else { &mut self.large };
            pool.remove_unmapped(slot, &self.blocks[slot]);
            self.blocks.remove(slot);
        }
    }

    fn insert_between(&mut self, prev: Slot, block: Block, next: Slot) -> Slot {
        let small = block.small;
        let slot = self.blocks.insert(block);
        self.blocks.link(prev, slot, next);
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.insert_free(slot, &mut self.blocks[slot]);
        slot
    }
}
