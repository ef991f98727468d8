//! Giving memory back to the device: when a request fails, when a threshold is passed, when the program asks.

use super::blocks::{Block, FreeKey, Slot};
use super::sizes::is_small;
use super::{Action, CachingAllocator, Stream};

impl CachingAllocator {
    pub(super) fn collects_garbage(&self) -> bool {
        self.allowed.is_some() && self.settings.garbage_collection_threshold.is_some()
    }

    /// Above the threshold: gives back free segments of the large pool that have been free for as long as the average or longer, until
    /// the excess is gone.
    pub(super) fn collect_garbage(&mut self) {
        let (Some(allowed), Some(threshold)) = (self.allowed, self.settings.garbage_collection_threshold)
        else {
            return;
        };
        let threshold = (threshold * allowed as f64) as u64;
        let Some(excess) =
            self.statistics.reserved.current.checked_sub(threshold).filter(|excess| *excess > 0)
        else {
            return;
        };
        let age = |allocator: &Self, slot: Slot| allocator.large.searches - allocator.blocks[slot].freed_at;
        let mut segments = self.whole_segments(false);
        let mut ages: u64 = segments.iter().map(|&slot| age(self, slot)).sum();
        let mut reclaimed = 0;
        while reclaimed < excess && !segments.is_empty() {
            let average = ages as f64 / segments.len() as f64;
            let (old, young): (Vec<_>, Vec<_>) =
                segments.into_iter().partition(|&slot| age(self, slot) as f64 >= average);
            if old.is_empty() {
                return;
            }
            for slot in old {
                reclaimed += self.blocks[slot].size;
                ages -= age(self, slot);
                self.release(slot);
            }
            segments = young;
        }
    }

    /// Gives back one free block that `max_split_size` keeps whole and that is large enough, or several, the largest first. False
    /// where that does not help.
    pub(super) fn release_oversize(&mut self, size: u64, stream: Stream) -> bool {
        let Some(limit) = self.settings.max_split_size else { return false };
        let wanted = size.max(limit);
        let pool = self.pool(is_small(size));
        let enough = pool.free.range(FreeKey::at_least(stream, wanted)..).next();
        if let Some(key) = enough.filter(|key| key.stream == stream) {
            let slot = key.slot;
            self.release(slot);
            return true;
        }
        let largest = pool.free.range(..FreeKey::at_least(stream, wanted)).rev();
        let oversize = largest.take_while(|key| key.stream == stream && key.size >= limit);
        let mut released = 0;
        let slots: Vec<Slot> = oversize
            .take_while(|key| {
                let goes_on = released < wanted;
                released += if goes_on { key.size } else { 0 };
                goes_on
            })
            .map(|key| key.slot)
            .collect();
        for slot in slots {
            self.release(slot);
        }
        released >= wanted
    }

    /// Waits for all streams, then gives back every segment that is free as a whole, and every free page of expandable ones.
    pub(super) fn release_cached(&mut self) {
        self.statistics.num_sync_all_streams += 1;
        self.done = 0;
        for slot in std::mem::take(&mut self.pending) {
            self.make_free(slot);
        }
        for small in [false, true] {
            for slot in self.whole_segments(small) {
                self.release(slot);
            }
            let keys: Vec<FreeKey> = self.pool(small).free.iter().copied().collect();
            for key in keys {
                self.unmap(key.slot);
            }
        }
    }

    /// The free blocks that are a segment, in the pool's order.
    fn whole_segments(&self, small: bool) -> Vec<Slot> {
        let pool = if small { &self.small } else { &self.large };
        let whole = |slot: &Slot| !self.blocks[*slot].is_split() && self.blocks[*slot].expandable.is_none();
        pool.free.iter().map(|key| key.slot).filter(whole).collect()
    }

    /// `cudaFree`
    fn release(&mut self, slot: Slot) {
        let Block { address, size, small, stream, .. } = self.blocks[slot];
        let pool = if small { &mut self.small } else { &mut self.large };
        pool.remove_free(slot, &self.blocks[slot]);
        self.blocks.remove(slot);
        self.statistics.each(small, |pool| {
            pool.segments.subtract(1);
            pool.reserved.subtract(size);
        });
        if size >= self.settings.split_limit() {
            self.statistics.oversize_segments.subtract(1);
        }
        self.statistics.num_device_free += 1;
        self.record(Action::SegmentFree, address, size, stream);
    }
}
