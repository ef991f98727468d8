//! PyTorch's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`), simulated request by request: size classes, pools, best fit,
//! splitting, merging, and what it does when memory runs out. Versions 2.0 to 2.9; the rules of sizes are the same in all.
//!
//! Left out: private pools of CUDA graphs, and where the driver puts segments. A new segment lies behind all earlier ones here.

mod blocks;
mod expandable;
mod release;
mod segments;
mod settings;
pub mod sizes;
mod statistics;
mod trace;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use blocks::{Block, Blocks, FreeKey, NONE, Pool, Slot, State};
pub use segments::{BlockState, Segment, SegmentBlock};
pub use settings::{CrossStreamReuse, DIVISION_RANGES, Settings, SettingsError};
use sizes::{LARGE_BUFFER, LARGEST_REQUEST, MIN_BLOCK, SMALL_SIZE, block_size, is_small, segment_size};
pub use statistics::{Counter, PoolStatistics, Statistics};
use trace::Trace;
pub use trace::{Action, TraceEntry, TraceTag};

/// Where the first segment lies. Drivers begin near here too.
const FIRST_ADDRESS: u64 = 0x7f00_0000_0000;

/// A CUDA stream; 0 is the one that computes.
pub type Stream = u32;

/// A block that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u64);

/// No block could be made, even after everything that was cached had been given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {asked} bytes asked, {allocated} allocated, {reserved} reserved of {capacity}")]
pub struct OutOfMemory {
    /// Bytes that were asked for.
    pub asked: u64,
    /// Bytes of blocks handed out.
    pub allocated: u64,
    /// Bytes of segments.
    pub reserved: u64,
    /// Bytes that there are.
    pub capacity: u64,
}

/// The allocator of one device.
#[derive(Debug)]
pub struct CachingAllocator {
    settings: Settings,
    capacity: u64,
    /// The limit by the memory fraction.
    allowed: Option<u64>,
    device_memory: u64,
    next_address: u64,
    blocks: Blocks,
    small: Pool,
    large: Pool,
    /// Freed, but used by other streams; of the first ones those streams are done.
    pending: Vec<Slot>,
    done: usize,
    statistics: Statistics,
    trace: Option<Trace>,
    tag: TraceTag,
}

impl CachingAllocator {
    /// An allocator on a device where `capacity` bytes can become segments.
    pub fn new(settings: Settings, capacity: u64) -> Self {
        CachingAllocator::with_device_memory(settings, capacity, capacity)
    }

    /// The same, on a device of `device_memory` bytes: what a memory fraction is a fraction of.
    pub fn with_device_memory(settings: Settings, capacity: u64, device_memory: u64) -> Self {
        CachingAllocator {
            allowed: settings.memory_fraction.map(|fraction| (fraction * device_memory as f64) as u64),
            settings,
            capacity,
            device_memory,
            next_address: FIRST_ADDRESS,
            blocks: Blocks::default(),
            small: Pool::default(),
            large: Pool::default(),
            pending: Vec::new(),
            done: 0,
            statistics: Statistics::default(),
            trace: None,
            tag: TraceTag::default(),
        }
    }

    /// Hands out a block of at least `bytes`. PyTorch's tensors of no bytes ask for none.
    ///
    /// # Errors
    /// As PyTorch's `OutOfMemoryError`: no segment could be made even after all cached ones were given back.
    pub fn malloc(&mut self, bytes: u64, stream: Stream) -> Result<BlockId, OutOfMemory> {
        self.reuse_what_streams_are_done_with();
        if bytes >= LARGEST_REQUEST {
            return Err(self.out_of_memory(bytes, bytes, stream));
        }
        let size = block_size(bytes, &self.settings);
        let Some(slot) = self.take_free(size, stream).or_else(|| self.take_new(size, stream)) else {
            return Err(self.out_of_memory(bytes, size, stream));
        };
        let slot = self.split(slot, size);
        Ok(self.hand_out(slot, bytes))
    }

    /// Takes a block back. A block that is not handed out is ignored.
    pub fn free(&mut self, block: BlockId) {
        let Some(slot) = self.blocks.allocated(block) else { return };
        self.blocks.retire_id(slot);
        let Block { size, small, used_elsewhere, requested, address, stream, .. } = self.blocks[slot];
        self.statistics.each(small, |pool| pool.block_taken_back(size));
        if size >= self.settings.split_limit() {
            self.statistics.oversize_allocations.subtract(1);
        }
        self.record(Action::FreeRequested, address, requested, stream);
        if used_elsewhere {
            self.blocks[slot].state = State::Pending;
            self.pending.push(slot);
        } else {
            self.make_free(slot);
        }
    }

    /// `Tensor.record_stream`: the block cannot be handed out again before `stream` is done. A block that is not handed out is ignored.
    pub fn record_stream(&mut self, block: BlockId, stream: Stream) {
        if let Some(slot) = self.blocks.allocated(block) {
            let block = &mut self.blocks[slot];
            block.used_elsewhere |= block.stream != stream;
        }
    }

    /// All streams are done with what they do: `torch.cuda.synchronize`. The next request sees it.
    pub fn synchronize(&mut self) {
        self.done = self.pending.len();
    }

    /// `torch.cuda.empty_cache`
    pub fn empty_cache(&mut self) {
        self.release_cached();
    }

    /// What was counted.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// `torch.cuda.reset_peak_memory_stats`
    pub fn reset_peaks(&mut self) {
        self.statistics.reset_peaks();
    }

    /// How it is set.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The size and the address of a block that is handed out.
    pub fn place(&self, block: BlockId) -> Option<(u64, u64)> {
        self.blocks.allocated(block).map(|slot| (self.blocks[slot].address, self.blocks[slot].size))
    }

    /// From now on keeps the latest `most` entries of the trace: `torch.cuda.memory._record_memory_history(max_entries=...)`.
    pub fn record_history(&mut self, most: usize) {
        self.trace = Some(Trace::new(most));
    }

    /// What the caller does from now on: the tag of blocks and entries.
    pub fn set_tag(&mut self, tag: TraceTag) {
        self.tag = tag;
    }

    /// What was recorded, oldest first.
    pub fn history(&self) -> impl Iterator<Item = &TraceEntry> {
        self.trace.iter().flat_map(Trace::entries)
    }

    fn pool(&mut self, small: bool) -> &mut Pool {
        if small { &mut self.small } else { &mut self.large }
    }

    fn free_memory(&self) -> u64 {
        self.capacity - self.statistics.reserved.current
    }

    fn record(&mut self, action: Action, address: u64, size: u64, stream: Stream) {
        if let Some(trace) = &mut self.trace {
            trace.push(TraceEntry { action, address, size, stream, tag: self.tag });
        }
    }

    fn reuse_what_streams_are_done_with(&mut self) {
        if self.settings.cross_stream_reuse == CrossStreamReuse::NextRequest {
            self.done = self.pending.len();
        }
        if self.done > 0 {
            let done = std::mem::take(&mut self.done);
            for slot in self.pending.drain(..done).collect::<Vec<_>>() {
                self.make_free(slot);
            }
        }
    }

    /// The best fit among the free blocks of the stream. There is no second candidate.
    fn take_free(&mut self, size: u64, stream: Stream) -> Option<Slot> {
        let small = is_small(size);
        let (counts, limit) = (self.collects_garbage(), self.settings.split_limit());
        let pool = self.pool(small);
        pool.searches += u64::from(counts);
        let key =
            *pool.free.range(FreeKey::at_least(stream, size)..).next().filter(|key| key.stream == stream)?;
        let key =
            if self.blocks[key.slot].expandable.is_some() { self.within_expandable(key, small) } else { key };
        let rounding = self.settings.max_non_split_rounding.unwrap_or(LARGE_BUFFER);
        let too_large =
            if size < limit { key.size >= limit } else { key.size >= size.saturating_add(rounding) };
        if too_large {
            return None;
        }
        self.pool(small).free.remove(&key);
        Some(key.slot)
    }

    /// A block of a new segment, at whatever price.
    fn take_new(&mut self, size: u64, stream: Stream) -> Option<Slot> {
        if self.collects_garbage() {
            self.collect_garbage();
        }
        if let Some(slot) = self.make_segment(size, stream) {
            return Some(slot);
        }
        if self.release_oversize(size, stream)
            && let Some(slot) = self.make_segment(size, stream)
        {
            return Some(slot);
        }
        self.release_cached();
        self.statistics.num_alloc_retries += 1;
        self.make_segment(size, stream)
    }

    /// `cudaMalloc`, or pages of an expandable segment.
    fn make_segment(&mut self, size: u64, stream: Stream) -> Option<Slot> {
        let bytes = segment_size(size);
        let reserved = self.statistics.reserved.current;
        if self.allowed.is_some_and(|allowed| reserved.saturating_add(bytes) > allowed) {
            return None;
        }
        if self.settings.expandable_segments {
            return self.expand(size, stream);
        }
        if bytes > self.free_memory() {
            return None;
        }
        let address = self.take_addresses(bytes)?;
        let small = is_small(size);
        let mut block = Block::new(address, bytes, stream, small);
        block.segment_tag = self.tag;
        self.statistics.each(small, |pool| {
            pool.segments.add(1);
            pool.reserved.add(bytes);
        });
        if bytes >= self.settings.split_limit() {
            self.statistics.oversize_segments.add(1);
        }
        self.statistics.num_device_alloc += 1;
        self.record(Action::SegmentAlloc, address, bytes, stream);
        Some(self.blocks.insert(block))
    }

    /// A range of addresses that nobody had before; none where 64 bits have no more.
    fn take_addresses(&mut self, bytes: u64) -> Option<u64> {
        let address = self.next_address;
        self.next_address = address.checked_add(bytes)?;
        Some(address)
    }

    /// Cuts the rest off a block that was taken from its pool, if there is enough of it. Gives the part that is handed out: the low one.
    fn split(&mut self, slot: Slot, size: u64) -> Slot {
        let Block { size: whole, small, address, stream, prev, expandable, segment_tag, .. } =
            self.blocks[slot];
        let rest = whole - size;
        let cuts = if small || self.settings.expandable_segments {
            rest >= MIN_BLOCK
        } else {
            size < self.settings.split_limit() && rest > SMALL_SIZE
        };
        let was_split = self.blocks[slot].is_split();
        let counts = expandable.is_none();
        if !cuts {
            if was_split && counts {
                self.statistics.each(small, |pool| {
                    pool.inactive_split.subtract(whole);
                    pool.inactive_split_blocks.subtract(1);
                });
            }
            return slot;
        }
        let low =
            self.blocks.insert(Block { expandable, segment_tag, ..Block::new(address, size, stream, small) });
        self.blocks.link(prev, low, slot);
        let high = &mut self.blocks[slot];
        (high.address, high.size) = (address + size, rest);
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.insert_free(slot, &mut self.blocks[slot]);
        if counts {
            self.statistics.each(small, |pool| {
                if was_split {
                    pool.inactive_split.subtract(size);
                } else {
                    pool.inactive_split.add(rest);
                    pool.inactive_split_blocks.add(1);
                }
            });
        }
        low
    }

    fn hand_out(&mut self, slot: Slot, requested: u64) -> BlockId {
        let tag = self.tag;
        let block = &mut self.blocks[slot];
        (block.state, block.requested, block.tag) = (State::Allocated, requested, tag);
        let Block { size, small, address, stream, .. } = *block;
        self.record(Action::Alloc, address, requested, stream);
        self.statistics.each(small, |pool| pool.block_handed_out(size, requested));
        if size >= self.settings.split_limit() {
            self.statistics.oversize_allocations.add(1);
        }
        self.blocks.id(slot)
    }

    /// Puts a block that nobody uses into its pool, as one with its free neighbours.
    fn make_free(&mut self, slot: Slot) {
        let block = &mut self.blocks[slot];
        (block.state, block.used_elsewhere) = (State::Free, false);
        let Block { size, small, address, stream, requested, prev, next, expandable, .. } = *block;
        self.record(Action::FreeCompleted, address, requested, stream);
        let absorbed = [self.absorb(slot, prev), self.absorb(slot, next)];
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.insert_free(slot, &mut self.blocks[slot]);
        let split = self.blocks[slot].is_split().then_some(self.blocks[slot].size);
        self.statistics.each(small, |pool| {
            if expandable.is_none() {
                let lost = absorbed.iter().filter(|bytes| **bytes > 0).count() as u64;
                change(&mut pool.inactive_split_blocks, u64::from(split.is_some()), lost);
                change(&mut pool.inactive_split, split.unwrap_or(0), absorbed.iter().sum());
            }
            pool.block_inactive(size, requested);
        });
    }

    /// Makes a neighbour part of `slot` if both are free or both have no memory. Gives the bytes of it, or 0.
    fn absorb(&mut self, slot: Slot, neighbour: Slot) -> u64 {
        if neighbour == NONE || self.blocks[neighbour].state != self.blocks[slot].state {
            return 0;
        }
        let Block { size, address, prev, next, segment_tag, small, state, .. } = self.blocks[neighbour];
        let pool = if small { &mut self.small } else { &mut self.large };
        match state {
            State::Unmapped => pool.remove_unmapped(neighbour, &self.blocks[neighbour]),
            _ => pool.remove_free(neighbour, &self.blocks[neighbour]),
        }
        if self.blocks[slot].prev == neighbour {
            (self.blocks[slot].address, self.blocks[slot].segment_tag) = (address, segment_tag);
            let behind = self.blocks[slot].next;
            self.blocks.link(prev, slot, behind);
        } else {
            let before = self.blocks[slot].prev;
            self.blocks.link(before, slot, next);
        }
        self.blocks[slot].size += size;
        self.blocks.remove(neighbour);
        size
    }

    fn out_of_memory(&mut self, asked: u64, size: u64, stream: Stream) -> OutOfMemory {
        let free = self.free_memory();
        self.record(Action::OutOfMemory, free, size, stream);
        self.statistics.num_ooms += 1;
        let (allocated, reserved) = (self.statistics.allocated.current, self.statistics.reserved.current);
        OutOfMemory {
            asked,
            allocated,
            reserved,
            capacity: self.allowed.unwrap_or(self.capacity).min(self.capacity),
        }
    }
}

/// Counts the difference alone, as PyTorch does.
fn change(counter: &mut Counter, more: u64, less: u64) {
    if more > less {
        counter.add(more - less);
    } else if less > more {
        counter.subtract(less - more);
    }
}
