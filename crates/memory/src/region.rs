//! A region: memory that has one owner at a time and may be moved to another thread, as a disk's worker that fills it
//! while others compute.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::arena::{Arena, Block, OutOfMemory};
use crate::reservation::{Reservation, ReservationError};
use crate::{Tag, Tier};

/// What memory needs beside itself while it is used, as being page-locked; dropped with the last region of it.
pub trait Keeper: fmt::Debug + Send + Sync {}

/// Bytes of a reservation that nobody else reads or writes. Regions can be split and joined again.
#[derive(Debug)]
pub struct Region {
    memory: Arc<Reservation>,
    range: Range<usize>,
    /// The piece of an arena that the bytes belong to, which stays taken while any region of it lives.
    block: Option<Arc<Block>>,
    keeper: Option<Arc<dyn Keeper>>,
}

impl Region {
    /// Memory of its own, of zeros. Pages that are not touched cost nothing.
    pub fn new(bytes: u64) -> Result<Region, ReservationError> {
        let memory = Arc::new(Reservation::new(bytes)?);
        Ok(Region { range: 0..memory.len(), memory, block: None, keeper: None })
    }

    /// All of `memory`, with what keeps it.
    ///
    /// # Safety
    /// Nobody accesses the bytes of `memory` while any region of it lives.
    pub unsafe fn kept_by(memory: Arc<Reservation>, keeper: Arc<dyn Keeper>) -> Region {
        Region { range: 0..memory.len(), memory, block: None, keeper: Some(keeper) }
    }

    /// The bytes of `block`, whose arena's first byte is that of `memory`; `None` where they do not lie in it.
    ///
    /// # Safety
    /// `block` belongs to the arena that `memory` stands behind, and nobody else accesses its bytes while any region of
    /// it lives.
    pub unsafe fn of_block(memory: Arc<Reservation>, block: Arc<Block>) -> Option<Region> {
        let start = usize::try_from(block.offset()).ok()?;
        let end = start.checked_add(usize::try_from(block.size()).ok()?)?;
        (end <= memory.len()).then(|| Region { memory, range: start..end, block: Some(block), keeper: None })
    }

    /// The block again, once this region is all that is left of it and it belongs to `arena`.
    pub fn into_block(mut self, arena: &Arena) -> Result<Arc<Block>, Region> {
        match self.block.take() {
            Some(block) if block.is_in(arena) && Arc::strong_count(&block) == 1 => Ok(block),
            block => Err(Region { block, ..self }),
        }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Bytes from its start to the first whose address is a multiple of `alignment`; its length where there is none.
    pub fn skip_to(&self, alignment: usize) -> usize {
        let address = self.memory.as_ptr().addr() + self.range.start;
        (address.next_multiple_of(alignment.max(1)) - address).min(self.len())
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in the reservation, any bytes are valid, and only this region accesses them: the range
        // of a new one is the whole reservation, `of_block` and `kept_by` ask for it, split ones have no byte in common, and so have
        // those that a pool hands out of its own.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(self.range.start), self.range.len()) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.as_ptr().add(self.range.start), self.range.len())
        }
    }

    /// The first `at` bytes and the rest; all and nothing where it has no more.
    pub fn split_at(self, at: usize) -> (Region, Region) {
        let middle = self.range.start + at.min(self.len());
        let rest = Region {
            memory: Arc::clone(&self.memory),
            range: middle..self.range.end,
            block: self.block.clone(),
            keeper: self.keeper.clone(),
        };
        (Region { range: self.range.start..middle, ..self }, rest)
    }

    /// The two as one, where `next` begins where this one ends.
    pub fn join(self, next: Region) -> Result<Region, (Region, Region)> {
        if !Arc::ptr_eq(&self.memory, &next.memory) || self.range.end != next.range.start {
            return Err((self, next));
        }
        let range = self.range.start..next.range.end;
        Ok(Region { range, ..self })
    }
}

/// Host memory of which pieces are taken and given back, with the arena that says where.
#[derive(Debug)]
pub struct HostPool {
    arena: Arena,
    /// All of it. It is never looked at itself.
    memory: Region,
}

impl HostPool {
    /// A pool of this memory.
    pub fn new(memory: Region) -> HostPool {
        HostPool { arena: Arena::new(Tier::Host, memory.len() as u64), memory }
    }

    /// Says what is taken.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Takes a piece, which comes back when its last region is dropped.
    ///
    /// # Errors
    /// There is no piece of that size.
    pub fn take(&self, bytes: u64, tag: Tag, name: &'static str) -> Result<Region, OutOfMemory> {
        let block = self.arena.alloc(bytes, tag, name)?;
        // The arena is no larger than the memory, and its blocks have no byte in common.
        let start = self.memory.range.start + block.offset() as usize;
        let range = start..start + block.size() as usize;
        let (memory, keeper) = (Arc::clone(&self.memory.memory), self.memory.keeper.clone());
        Ok(Region { memory, range, block: Some(Arc::new(block)), keeper })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_pool_are_apart_and_come_back() {
        let pool = HostPool::new(Region::new(8192 + 127).unwrap().split_at(64).1);
        assert_eq!(pool.arena().capacity(), 8192);
        let mut pieces = [1, 2].map(|value| {
            let mut piece = pool.take(4000, Tag::Staging, "x").unwrap();
            piece.bytes_mut().fill(value);
            piece
        });
        assert!(pool.take(4000, Tag::Staging, "x").is_err());
        assert!(pieces[0].bytes().iter().all(|byte| *byte == 1) && pieces[0].len() == 4032);
        pieces[0] = pool.take(128, Tag::Staging, "x").unwrap();
        assert!(pieces[1].bytes().iter().all(|byte| *byte == 2));
        drop(pieces);
        assert_eq!((pool.arena().ledger().live().total(), pool.arena().high_water()), (0, 8192));
    }

    #[test]
    fn parts_are_apart_and_come_together() {
        let region = Region::new(10_000).unwrap();
        let (mut first, rest) = region.split_at(4096);
        let (mut second, mut third) = rest.split_at(4096);
        assert_eq!([first.len(), second.len(), third.len()], [4096, 4096, 1808]);
        std::thread::scope(|scope| {
            for (value, part) in [(1, &mut first), (2, &mut second), (3, &mut third)] {
                scope.spawn(move || part.bytes_mut().fill(value));
            }
        });
        let (first, third) = first.join(third).unwrap_err();
        let whole = first.join(second).unwrap().join(third).unwrap();
        assert_eq!([whole.bytes()[4095], whole.bytes()[4096], whole.bytes()[9999]], [1, 2, 3]);
        let (all, nothing) = whole.split_at(usize::MAX);
        assert!(nothing.is_empty() && all.len() == 10_000);
        assert_eq!([all.skip_to(4096), nothing.skip_to(4096)], [0, 0]);
    }

    #[test]
    fn a_block_stays_taken_until_its_last_region_is_gone() {
        let memory = Arc::new(Reservation::new(4096).unwrap());
        let arena = Arena::new(Tier::Device, 4096);
        let lend = || {
            let block = Arc::new(arena.alloc(4096, Tag::Staging, "x").unwrap());
            // SAFETY: nobody else uses the arena.
            unsafe { Region::of_block(Arc::clone(&memory), block) }.unwrap()
        };
        let (first, second) = lend().split_at(100);
        assert_eq!(first.skip_to(64), 0);
        assert_eq!(second.skip_to(64), 28);
        let first = first.into_block(&arena).unwrap_err();
        drop(first);
        assert_eq!(arena.ledger().live().total(), 4096);
        let other = Arena::new(Tier::Device, 4096);
        let second = second.into_block(&other).unwrap_err();
        drop(second.into_block(&arena).unwrap());
        assert_eq!(arena.ledger().live().total(), 0);
        drop(lend());
        assert_eq!(arena.ledger().live().total(), 0);
        assert!(Region::new(64).unwrap().into_block(&arena).is_err());
    }
}
