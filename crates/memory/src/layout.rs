//! The layout of an arena at one moment, and what happened between two: how a dry run finds that the iterations of a loop
//! repeat, so that it need not run all of them.

use crate::ledger::Tag;
use crate::splitmix::splitmix64;

/// The free pieces of an arena and what is live in it. Where the next allocations go depends on these pieces alone.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct Layout {
    pub(crate) holes: Vec<(u64, u64)>,
    /// A number for what is live, by layer and tag.
    pub(crate) live: u64,
}

/// What was allocated and given back, where and in which order, as one number: equal ones mean the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic(u64);

impl Traffic {
    pub(crate) fn took(&mut self, offset: u64, size: u64, tag: Tag) {
        self.mix(offset);
        self.mix(size << 8 | tag as u64);
    }

    pub(crate) fn gave_back(&mut self, offset: u64) {
        self.mix(!offset);
    }

    /// What was taken down of a part of the time, as one thing.
    pub(crate) fn includes(&mut self, part: Traffic) {
        self.mix(part.0);
    }

    fn mix(&mut self, value: u64) {
        self.0 = splitmix64(self.0 ^ value, 0);
    }
}

#[cfg(test)]
mod tests {
    use crate::{Arena, Phase, Tag, Tier};

    #[test]
    fn equal_traffic_is_the_same_memory_in_the_same_order() {
        let arena = Arena::unbounded(Tier::Device);
        let iteration = |sizes: [u64; 2], tag| {
            let before = arena.begin_traffic();
            let blocks = sizes.map(|size| arena.alloc(size, tag, "x").unwrap());
            drop(blocks);
            arena.end_traffic(before)
        };
        let first = iteration([64, 128], Tag::Data);
        assert_eq!(first, iteration([64, 128], Tag::Data));
        assert_ne!(first, iteration([128, 64], Tag::Data));
        assert_ne!(first, iteration([64, 128], Tag::Weights));
        let _kept = arena.alloc(64, Tag::Data, "x").unwrap();
        assert_ne!(first, iteration([64, 128], Tag::Data));
    }

    #[test]
    fn traffic_goes_on_around_a_part_of_it() {
        let arena = Arena::unbounded(Tier::Device);
        let whole = |parts: &[u64]| {
            let before = arena.begin_traffic();
            for &size in parts {
                let before = arena.begin_traffic();
                drop(arena.alloc(size, Tag::Data, "x").unwrap());
                let _ = arena.end_traffic(before);
            }
            arena.end_traffic(before)
        };
        assert_eq!(whole(&[64, 128]), whole(&[64, 128]));
        assert_ne!(whole(&[64, 128]), whole(&[128, 64]));
        assert_ne!(whole(&[64, 128]), whole(&[64]));
    }

    #[test]
    fn layouts_differ_by_what_is_free_and_by_whose_the_rest_is() {
        let arena = Arena::unbounded(Tier::Device);
        let alloc = |tag| arena.alloc(64, tag, "x").unwrap();
        let first = alloc(Tag::Data);
        let layout = arena.layout();
        arena.enter(Phase::Forward, Some(1));
        let of_layer = alloc(Tag::Data);
        let with_layer = arena.layout();
        drop(of_layer);
        arena.enter(Phase::Forward, Some(2));
        let of_another = alloc(Tag::Data);
        assert_ne!(arena.layout(), with_layer);
        drop(of_another);
        arena.enter(Phase::Setup, None);
        drop(alloc(Tag::Data));
        assert_eq!(arena.layout(), layout);
        let second = alloc(Tag::Data);
        drop(first);
        assert_ne!(arena.layout(), layout);
        drop(second);
        let _other = alloc(Tag::Weights);
        assert_ne!(arena.layout(), layout);
    }
}
