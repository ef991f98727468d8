//! f32 to bf16: to nearest, or stochastically with random bits from the seed and the element's index.

use half::bf16;

use super::simd::per_isa;

per_isa! {
    /// To nearest, ties to even; NaNs stay NaNs.
    pub(super) fn narrow_nearest(x: &[f32], out: &mut [bf16]) = narrow_nearest_body
}

#[inline(always)]
fn narrow_nearest_body<const FMA: bool>(x: &[f32], out: &mut [bf16]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = to_bf16(*x);
    }
}

/// To nearest, ties to even.
#[inline(always)]
pub(super) fn to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    cut(x, bits.wrapping_add(0x7fff + ((bits >> 16) & 1)))
}

/// The upper half of `rounded`; a quiet NaN where `x` is one, for adding to a NaN's bits may have changed its kind.
#[inline(always)]
fn cut(x: f32, rounded: u32) -> bf16 {
    let bits = if x.is_nan() { (x.to_bits() >> 16) | 0x40 } else { rounded >> 16 };
    bf16::from_bits(bits as u16)
}

/// Where the random bits of a run of elements come from.
#[derive(Clone, Copy)]
pub(super) struct Dither {
    keys: [u32; 2],
    first: u32,
}

impl Dither {
    /// For the elements from index `first` on; the run must not cross a multiple of 2^32.
    pub fn new(seed: u64, first: u64) -> Dither {
        // SplitMix64 (Steele, Lea and Flood 2014) spreads the seed and the upper half of the index over both keys.
        let mut z = seed.wrapping_add((first >> 32).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        Dither { keys: [z as u32, (z >> 32) as u32], first: first as u32 }
    }

    /// 16 random bits for the `i`-th element of the run.
    #[inline(always)]
    fn bits(self, i: u32) -> u32 {
        mix(mix(self.first.wrapping_add(i) ^ self.keys[0]).wrapping_add(self.keys[1])) >> 16
    }
}

/// A bijective hash of 32 bits (the "lowbias32" constants found by C. Wellons' hash prospector).
#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

per_isa! {
    /// Away from zero with the probability of what is cut off, towards it otherwise.
    pub(super) fn narrow_stochastic(x: &[f32], out: &mut [bf16], dither: Dither) = narrow_stochastic_body
}

#[inline(always)]
fn narrow_stochastic_body<const FMA: bool>(x: &[f32], out: &mut [bf16], dither: Dither) {
    for (i, (out, x)) in out.iter_mut().zip(x).enumerate() {
        *out = cut(*x, x.to_bits().wrapping_add(dither.bits(i as u32)));
    }
}
