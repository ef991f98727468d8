//! Pages of the key-value cache, and whose they are (Kwon et al. 2023). A sequence takes pages as it grows and gives them back as it is cut.
//! All layers that have pages have as many, and a sequence's are the same numbers in each.

use std::ops::Range;

use crate::StepError;

/// The pages of a cache.
pub(super) struct Pages {
    /// Positions of a page.
    tokens: u64,
    count: u32,
    /// Those of no sequence; the next to be taken is the last.
    free: Vec<u32>,
    /// Those of each sequence, in the order of its positions.
    own: Vec<Vec<u32>>,
}

impl Pages {
    /// So many free pages of so many positions each.
    pub fn new(tokens: u64, count: u64) -> Result<Pages, StepError> {
        let too_many = StepError::Invariant { what: "pages of a cache are numbered in 32 bits" };
        let rows = count.checked_mul(tokens).and_then(|rows| u32::try_from(rows).ok());
        let (Some(_), Ok(count)) = (rows, u32::try_from(count)) else { return Err(too_many) };
        Ok(Pages { tokens: tokens.max(1), count, free: (0..count).rev().collect(), own: Vec::new() })
    }

    /// Positions of a page.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Rows of all pages.
    pub fn rows(&self) -> u64 {
        u64::from(self.count) * self.tokens
    }

    /// The pages of a sequence.
    pub fn of(&self, sequence: u32) -> &[u32] {
        self.own.get(sequence as usize).map_or(&[], Vec::as_slice)
    }

    fn missing(&self, sequence: u32, length: u64) -> u64 {
        length.div_ceil(self.tokens).saturating_sub(self.of(sequence).len() as u64)
    }

    /// Whether there are pages for sequences that become so long.
    pub fn has_for(&self, lengths: impl Iterator<Item = (u32, u64)> + Clone) -> bool {
        self.check(lengths).is_ok()
    }

    /// Refuses sequences that become longer than there are pages for.
    pub fn check(&self, lengths: impl Iterator<Item = (u32, u64)> + Clone) -> Result<(), StepError> {
        let wanted = lengths.clone().map(|(_, length)| length).sum();
        let missing: u64 = lengths.map(|(sequence, length)| self.missing(sequence, length)).sum();
        match missing.saturating_sub(self.free.len() as u64) {
            0 => Ok(()),
            missing => Err(StepError::PagesInUse { wanted, missing }),
        }
    }

    /// Takes the pages that a sequence of so many tokens needs beyond its own.
    pub fn reserve(&mut self, sequence: u32, wanted: u64) -> Result<(), StepError> {
        self.check(std::iter::once((sequence, wanted)))?;
        let left = (self.free.len() as u64).saturating_sub(self.missing(sequence, wanted));
        let place = sequence as usize;
        if self.own.len() <= place {
            self.own.resize(place + 1, Vec::new());
        }
        if let Some(own) = self.own.get_mut(place) {
            own.extend(self.free.drain(left as usize..).rev());
        }
        Ok(())
    }

    /// Gives back the pages behind so many tokens of a sequence.
    pub fn keep(&mut self, sequence: u32, length: u64) {
        let pages = usize::try_from(length.div_ceil(self.tokens)).unwrap_or(usize::MAX);
        if let Some(own) = self.own.get_mut(sequence as usize)
            && pages < own.len()
        {
            self.free.extend(own.drain(pages..).rev());
        }
    }

    /// The rows of a sequence's positions, for which there are pages.
    pub fn rows_of(&self, sequence: u32, positions: Range<u64>) -> impl Iterator<Item = u32> {
        let own = self.of(sequence);
        positions.filter_map(move |position| {
            let page = own.get((position / self.tokens) as usize)?;
            Some((u64::from(*page) * self.tokens + position % self.tokens) as u32)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_as_sequences_grow_and_given_back_as_they_are_cut() {
        let mut pages = Pages::new(4, 5).unwrap();
        pages.reserve(0, 5).unwrap();
        pages.reserve(2, 4).unwrap();
        assert_eq!((pages.of(0), pages.of(1), pages.of(2)), (&[0, 1][..], &[][..], &[2][..]));
        assert_eq!(pages.rows_of(0, 3..6).collect::<Vec<_>>(), [3, 4, 5]);
        assert!(pages.has_for([(0, 8), (1, 8)].into_iter()) && !pages.has_for([(0, 9), (1, 8)].into_iter()));
        let error = pages.reserve(2, 17).unwrap_err().to_string();
        assert_eq!(error, "17 tokens need 2 more pages of the cache than are free");
        assert_eq!(pages.of(2), [2], "what failed has taken nothing");
        pages.keep(0, 4);
        pages.reserve(2, 9).unwrap();
        assert_eq!((pages.of(0), pages.of(2)), (&[0][..], &[2, 1, 3][..]));
        assert_eq!(pages.rows_of(2, 7..9).collect::<Vec<_>>(), [7, 12]);
        pages.keep(2, 0);
        assert!(pages.has_for([(1, 16)].into_iter()) && !pages.has_for([(1, 17)].into_iter()));
    }
}
