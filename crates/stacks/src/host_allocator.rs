//! PyTorch's caching allocator of pinned host memory (`aten/src/ATen/core/CachingHostAllocator.h`): every request is rounded up to a
//! power of two, blocks are used again for the same power, never split, and kept until the cache is emptied.

use std::collections::{BTreeMap, HashMap};

use crate::allocator::Counter;

/// A block of pinned memory that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostBlockId(u64);

/// What is counted, in bytes: `torch.cuda.host_memory_stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStatistics {
    /// Blocks handed out.
    pub allocated: Counter,
    /// All blocks: what the process has pinned.
    pub reserved: Counter,
    /// What was asked for.
    pub requested: Counter,
}

/// More than a power of two of 64 bits, or than a request may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} bytes of pinned memory cannot be rounded up to a power of two")]
pub struct TooLarge {
    /// Bytes that were asked for.
    pub asked: u64,
}

/// The pinned memory of a process.
#[derive(Debug, Default)]
pub struct CachingHostAllocator {
    /// By id: what was asked for, and the size.
    blocks: HashMap<HostBlockId, (u64, u64)>,
    /// How many blocks of a size are free.
    free: BTreeMap<u64, u64>,
    next: u64,
    statistics: HostStatistics,
}

impl CachingHostAllocator {
    /// One that holds nothing.
    pub fn new() -> Self {
        CachingHostAllocator::default()
    }

    /// Hands out a block of at least `bytes`; `None` for no bytes, which take none.
    ///
    /// # Errors
    /// Where no power of two of 63 bits is large enough.
    pub fn malloc(&mut self, bytes: u64) -> Result<Option<HostBlockId>, TooLarge> {
        if bytes == 0 {
            return Ok(None);
        }
        let size = bytes.checked_next_power_of_two().filter(|size| *size < 1 << 63);
        let size = size.ok_or(TooLarge { asked: bytes })?;
        match self.free.get_mut(&size).filter(|free| **free > 0) {
            Some(free) => *free -= 1,
            None if self.statistics.reserved.current.checked_add(size).is_none() => {
                return Err(TooLarge { asked: bytes });
            }
            None => self.statistics.reserved.add(size),
        }
        self.statistics.allocated.add(size);
        self.statistics.requested.add(bytes);
        let id = HostBlockId(self.next);
        self.next += 1;
        self.blocks.insert(id, (bytes, size));
        Ok(Some(id))
    }

    /// Takes a block back. A block that is not handed out is ignored.
    pub fn free(&mut self, block: HostBlockId) {
        if let Some((bytes, size)) = self.blocks.remove(&block) {
            self.statistics.allocated.subtract(size);
            self.statistics.requested.subtract(bytes);
            *self.free.entry(size).or_default() += 1;
        }
    }

    /// Gives every free block back to the system.
    pub fn empty_cache(&mut self) {
        for (size, free) in std::mem::take(&mut self.free) {
            self.statistics.reserved.subtract(size * free);
        }
    }

    /// What was counted.
    pub fn statistics(&self) -> &HostStatistics {
        &self.statistics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_takes_the_next_power_of_two() {
        let mut host = CachingHostAllocator::new();
        // A layer of 14 GB of weights in pinned memory, the case that people run into: 16 GiB.
        let weights = host.malloc(14_000_000_000).unwrap().unwrap();
        assert_eq!(host.statistics().reserved.current, 16 << 30);
        assert_eq!(host.statistics().requested.current, 14_000_000_000);
        host.free(weights);
        host.free(weights);
        assert_eq!((host.statistics().allocated.current, host.statistics().reserved.current), (0, 16 << 30));
        host.malloc((8 << 30) + 1).unwrap();
        assert_eq!(host.statistics().reserved.current, 16 << 30, "the free block of the same power");
        host.malloc(8 << 30).unwrap();
        assert_eq!(host.statistics().reserved.current, 24 << 30, "a power of two stays what it is");
    }

    #[test]
    fn blocks_are_neither_split_nor_given_back_before_the_cache_is_emptied() {
        let mut host = CachingHostAllocator::new();
        let large = host.malloc(1 << 20).unwrap().unwrap();
        host.free(large);
        let small = host.malloc(1 << 19).unwrap().unwrap();
        assert_eq!(host.statistics().reserved.current, (1 << 20) + (1 << 19));
        host.empty_cache();
        assert_eq!(host.statistics().reserved.current, 1 << 19);
        host.free(small);
        host.empty_cache();
        assert_eq!(
            host.statistics().reserved,
            Counter { current: 0, peak: 3 << 19, allocated: 3 << 19, freed: 3 << 19 }
        );
    }

    #[test]
    fn no_bytes_take_none_and_too_many_are_refused() {
        let mut host = CachingHostAllocator::new();
        assert_eq!(host.malloc(0), Ok(None));
        assert_eq!(host.malloc(u64::MAX), Err(TooLarge { asked: u64::MAX }));
    }
}
