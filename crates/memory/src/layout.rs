//! The layout of an arena at one moment, and what happened between two: how a dry run finds that the iterations of a loop
//! repeat, so that it need not run all of them.

use crate::ledger::{LayerTags, Tag};

/// The free pieces of an arena and what is live in it.
///
/// Where the next allocations go depends on the holes and on where the open end begins, and on nothing else. Best fit looks
/// at sizes, takes the open end as endless and the lowest of equals: moving the open end moves what is put there by as
/// much and changes nothing else.
#[derive(Clone, Debug, PartialEq, Hash)]
pub struct Layout {
    pub(crate) holes: Vec<(u64, u64)>,
    /// Where the open end begins.
    pub(crate) end: u64,
    pub(crate) live: LayerTags,
}

/// What a layout has more than an earlier one with the same holes, all of it at the earlier one's open end.
#[derive(Clone, Debug, PartialEq)]
pub struct Growth {
    /// Bytes by the layer that owns them and tag.
    pub(crate) by_owner: Vec<(Option<u32>, Tag, u64)>,
}

impl Growth {
    /// Whether the layouts are equal.
    pub fn is_none(&self) -> bool {
        self.by_owner.is_empty()
    }
}

impl Layout {
    /// What was added since `earlier`; `None` where anything else has changed.
    pub fn growth_since(&self, earlier: &Layout) -> Option<Growth> {
        if self.holes != earlier.holes {
            return None;
        }
        let mut by_owner = Vec::new();
        for (owner, tags) in &self.live {
            let before = earlier.live.get(owner).copied().unwrap_or_default();
            for tag in Tag::ALL {
                let bytes = tags.get(tag).checked_sub(before.get(tag))?;
                if bytes > 0 {
                    by_owner.push((*owner, tag, bytes));
                }
            }
        }
        let added: u64 = by_owner.iter().map(|(.., bytes)| bytes).sum();
        (self.end.checked_sub(earlier.end)? == added).then_some(Growth { by_owner })
    }
}

/// What was allocated and given back, where and in which order, as one number: equal ones mean the same. Places behind
/// the open end at the beginning are taken relative to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    pub(crate) hash: u64,
    origin: u64,
}

impl Traffic {
    pub(crate) fn from_here(origin: u64) -> Traffic {
        Traffic { hash: 0, origin }
    }

    /// Whether the same happened, wherever the open end was.
    pub fn is_like(&self, other: &Traffic) -> bool {
        self.hash == other.hash
    }

    pub(crate) fn took(&mut self, offset: u64, size: u64, tag: Tag) {
        self.mix(self.place(offset));
        self.mix(size << 8 | tag as u64);
    }

    pub(crate) fn gave_back(&mut self, offset: u64) {
        self.mix(!self.place(offset));
    }

    fn place(&self, offset: u64) -> u64 {
        match offset.checked_sub(self.origin) {
            Some(behind) => behind << 1 | 1,
            None => offset << 1,
        }
    }

    pub(crate) fn mix(&mut self, value: u64) {
        // A step of splitmix64 for each value: its output depends on the order of all values.
        let mut x = (self.hash ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.hash = x ^ (x >> 31);
    }
}

#[cfg(test)]
mod tests {
    use crate::{Arena, Tag, Tier};

    #[test]
    fn growth_is_what_was_added_behind_everything() {
        let arena = Arena::unbounded(Tier::Device);
        let alloc = |size, tag| arena.alloc(size, tag, "x").unwrap();
        let (first, _kept) = (alloc(640, Tag::Weights), alloc(64, Tag::Data));
        let empty = arena.layout();
        let second = alloc(128, Tag::Activations);
        let grown = arena.layout();
        assert!(empty.growth_since(&empty).unwrap().is_none());
        let growth = grown.growth_since(&empty).unwrap();
        let ghosts = arena.extend(&growth, 3).unwrap();
        assert_eq!((ghosts.len(), ghosts[0].offset(), ghosts[0].size()), (1, 832, 384));
        assert_eq!(arena.ledger().live().get(Tag::Activations), 512);
        assert_eq!(arena.high_water(), 1216);
        // Less, or a hole that was not there, is no growth.
        assert_eq!(empty.growth_since(&grown), None);
        drop((second, ghosts, first));
        assert_eq!(arena.layout().growth_since(&empty), None);
    }

    #[test]
    fn traffic_is_the_same_wherever_the_open_end_is() {
        let arena = Arena::unbounded(Tier::Device);
        let mut held = Vec::new();
        let mut iteration = |size| {
            let before = arena.begin_traffic();
            let block = arena.alloc(size, Tag::Data, "x").unwrap();
            drop(arena.alloc(256, Tag::Data, "y").unwrap());
            held.push(block);
            arena.end_traffic(before)
        };
        let [first, second, other] = [64, 64, 128].map(&mut iteration);
        assert!(first.is_like(&second) && !first.is_like(&other));
    }
}
