//! Numbers from counters that have nothing in common.

/// The number at place `index` of the SplitMix64 sequence that `seed` begins (Steele, Lea and Flood 2014).
pub const fn splitmix64(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::splitmix64;

    #[test]
    fn the_sequence_is_the_published_one() {
        // The first outputs of the authors' program for the state 1234567.
        let published = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([0, 1, 2].map(|index| splitmix64(1_234_567, index)), published);
    }
}
