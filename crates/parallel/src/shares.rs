//! Which rows of a tensor belong to which rank.

use std::ops::Range;

/// Elements that nobody shares: blocks of 8-bit states, and the runs of which norms consist, are whole.
const GRAIN: u64 = 256;

/// Rows of a tensor, cut into a share for each rank: runs of rows that follow each other, as even as whole grains allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    rows: u64,
    grain_rows: u64,
    ranks: u32,
}

impl Shares {
    /// Of so many rows of `columns` elements.
    pub fn new(rows: u64, columns: u64, ranks: u32) -> Shares {
        let columns = columns.max(1);
        Shares { rows, grain_rows: GRAIN / gcd(columns, GRAIN), ranks: ranks.max(1) }
    }

    /// The rows of a rank's share; none where there are fewer grains than ranks.
    pub fn of(self, rank: u32) -> Range<u64> {
        let (grains, ranks) = (self.rows.div_ceil(self.grain_rows), u64::from(self.ranks));
        let (each, rest) = (grains / ranks, grains % ranks);
        // The first ranks have what is left over: nobody has more than the rank before.
        let first = |rank: u32| {
            let rank = u64::from(rank.min(self.ranks));
            (rank * each + rank.min(rest)).saturating_mul(self.grain_rows).min(self.rows)
        };
        first(rank)..first(rank.saturating_add(1))
    }

    /// How many ranks have any rows: the first ones.
    pub fn filled(self) -> u32 {
        u32::try_from(self.rows.div_ceil(self.grain_rows)).unwrap_or(u32::MAX).min(self.ranks)
    }

    /// All shares, in the order of the ranks.
    pub fn all(self) -> impl Iterator<Item = Range<u64>> {
        (0..self.ranks).map(move |rank| self.of(rank))
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least number that both divide; `u64::MAX` where it is larger.
pub fn least_common_multiple(a: u64, b: u64) -> u64 {
    (a / gcd(a, b).max(1)).saturating_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_whole_grains_and_all_of_the_rows() {
        for rows in [1, 7, 32, 576, 1000, 49_152] {
            for columns in [1, 3, 32, 576, 1536, 4096] {
                for ranks in [1, 2, 3, 8, 1024] {
                    let shares = Shares::new(rows, columns, ranks);
                    let mut end = 0;
                    for share in shares.all() {
                        assert_eq!(share.start, end);
                        assert!(share.end == rows || (share.end * columns).is_multiple_of(GRAIN));
                        end = share.end;
                    }
                    assert_eq!(end, rows);
                    let filled = shares.all().filter(|share| !share.is_empty()).count();
                    assert_eq!(filled as u32, shares.filled());
                }
            }
        }
    }

    #[test]
    fn shares_are_even() {
        assert_eq!(Shares::new(576, 576, 2).all().collect::<Vec<_>>(), [0..288, 288..576]);
        assert_eq!(Shares::new(64, 256, 3).all().collect::<Vec<_>>(), [0..22, 22..43, 43..64]);
        // Fewer grains than ranks.
        assert_eq!(Shares::new(300, 1, 3).all().collect::<Vec<_>>(), [0..256, 256..300, 300..300]);
        assert_eq!(Shares::new(5, 1, 2).all().collect::<Vec<_>>(), [0..5, 5..5]);
        assert_eq!(Shares::new(0, 1, 2).of(1), 0..0);
    }
}
