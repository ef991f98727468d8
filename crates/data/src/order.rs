//! The order of windows: as they come, or shuffled anew in every epoch by a keyed permutation that takes no memory.

use plimsoll_memory::splitmix64;

/// Which window is the `position`-th since the beginning, of `windows` in an epoch.
pub fn window(position: u64, windows: u64, shuffle: Option<u64>) -> u64 {
    let windows = windows.max(1);
    let (epoch, index) = (position / windows, position % windows);
    match shuffle {
        None => index,
        Some(seed) => permute(index, windows, mix(seed ^ mix(epoch))),
    }
}

/// A bijection of `0..size`: a four-round Feistel network on the next even power of two, walked until it lands inside
/// (Black and Rogaway 2002).
fn permute(index: u64, size: u64, key: u64) -> u64 {
    let half_bits = (64 - size.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half_bits) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half_bits, value & mask);
        for round in 0..4 {
            (left, right) = (right, left ^ (mix(key ^ mix(round ^ (right << 8))) & mask));
        }
        value = (left << half_bits) | right;
        if value < size {
            return value;
        }
    }
}

/// A number that has nothing in common with those of other values.
fn mix(value: u64) -> u64 {
    splitmix64(value, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn without_shuffling_windows_come_in_order_and_wrap_around() {
        let order: Vec<u64> = (0..7).map(|p| window(p, 3, None)).collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn epochs_differ_and_so_do_seeds() {
        let epoch =
            |number: u64, seed| (0..50).map(|i| window(50 * number + i, 50, Some(seed))).collect::<Vec<_>>();
        assert_ne!(epoch(0, 1), epoch(1, 1));
        assert_ne!(epoch(0, 1), epoch(0, 2));
        assert_ne!(epoch(0, 1), (0..50).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn every_window_comes_once_an_epoch(windows in 1u64..300, epoch in 0u64..5, seed: u64) {
            let mut seen: Vec<u64> = (0..windows).map(|i| window(epoch * windows + i, windows, Some(seed))).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..windows).collect::<Vec<_>>());
        }
    }
}
