//! Micro-batches that a sampler makes of samples of different lengths: what decides the peak is the longest one that can come, and what
//! decides fragmentation is that each has another length than the one before.

/// So many micro-batches are run: from then on the allocator's cache hardly grows.
const MOST: usize = 48;

/// Tokens of each micro-batch's sequences, padding included: samples in a shuffled order that is always the same, and last the longest
/// samples together. No sequence has more than `cap` tokens.
pub(crate) fn micro_batches(lengths: &[u64], batch: u64, cap: u64) -> Vec<u64> {
    let batch = usize::try_from(batch).unwrap_or(usize::MAX).max(1);
    let mut order: Vec<u64> = lengths.iter().map(|length| (*length).clamp(1, cap.max(1))).collect();
    let Some(longest) = order.iter().copied().max() else { return Vec::new() };
    shuffle(&mut order);
    let longest_of = |samples: &[u64]| samples.iter().copied().max().unwrap_or(longest);
    let mut batches: Vec<u64> = order.chunks(batch).take(MOST - 1).map(longest_of).collect();
    batches.push(longest);
    batches
}

/// Fisher and Yates' shuffle with a generator of its own (splitmix64), so that an answer does not change from one call to the next.
fn shuffle(values: &mut [u64]) {
    let mut state = 0_u64;
    for end in (1..values.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let chosen = (mixed ^ (mixed >> 31)) % (end as u64 + 1);
        values.swap(end, usize::try_from(chosen).unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_samples_come_together_at_the_end() {
        let lengths: Vec<u64> = (1..=1000).collect();
        let batches = micro_batches(&lengths, 4, 600);
        assert_eq!(batches.len(), MOST);
        assert_eq!(batches.last(), Some(&600));
        assert!(batches.iter().all(|length| (1..=600).contains(length)));
        // Shuffled: not all of the first ones are short.
        assert!(batches[0] > 100, "{batches:?}");
        assert_eq!(batches, micro_batches(&lengths, 4, 600));
    }

    #[test]
    fn few_samples_make_few_batches() {
        assert!(micro_batches(&[], 4, 600).is_empty());
        assert_eq!(micro_batches(&[7], 4, 600), [7, 7]);
        assert_eq!(micro_batches(&[0, 900], 2, 600), [600, 600]);
    }
}
