//! Which micro-batches of a batch belong to which rank.

/// How the micro-batches of a step are dealt to ranks: those that go through the model together stay together, and such groups
/// go to the ranks in turn. So a run on many ranks takes the batches of a run on one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Micro-batches of each rank in a step.
    pub own: u64,
    /// Micro-batches that go through the model together.
    pub together: u64,
}

impl Deal {
    /// All micro-batches are this rank's.
    pub const ALONE: Deal = Deal { rank: 0, ranks: 1, own: 1, together: 1 };

    /// Micro-batches of a step, of all ranks.
    pub fn all(self) -> u64 {
        self.own.saturating_mul(u64::from(self.ranks))
    }

    /// The place in the step's batch of one of this rank's micro-batches.
    pub fn place(self, micro_batch: u64) -> u64 {
        let (together, ranks) = (self.together.max(1), u64::from(self.ranks.max(1)));
        let (group, within) = (micro_batch / together, micro_batch % together);
        let first = group * together;
        // The last group may be smaller than the others.
        let size = self.own.saturating_sub(first).clamp(1, together);
        first * ranks + u64::from(self.rank) * size + within
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_micro_batch_is_dealt_once() {
        for (ranks, own, together) in [(1, 5, 1), (2, 4, 1), (3, 5, 2), (4, 1, 1), (2, 7, 7), (2, 3, 8)] {
            let of = |rank| Deal { rank, ranks, own, together };
            let mut all: Vec<u64> =
                (0..ranks).flat_map(|rank| (0..own).map(move |i| of(rank).place(i))).collect();
            all.sort_unstable();
            assert_eq!(all, (0..of(0).all()).collect::<Vec<_>>(), "{ranks} {own} {together}");
        }
        let of = |rank| Deal { rank, ranks: 2, own: 3, together: 2 };
        assert_eq!([0, 1, 2].map(|i| of(0).place(i)), [0, 1, 4]);
        assert_eq!([0, 1, 2].map(|i| of(1).place(i)), [2, 3, 5]);
    }
}
