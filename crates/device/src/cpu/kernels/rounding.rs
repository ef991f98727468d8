//! f32 to bf16, and stochastically to f16: random bits come from the seed and the element's index.

use std::ops::Range;

use half::{bf16, f16};
use plimsoll_memory::splitmix64;

use super::simd::{Simd, per_isa};
#[cfg(target_arch = "x86_64")]
use crate::cpu::Isa;

/// To nearest, ties to even; NaNs stay NaNs.
pub(super) fn narrow_nearest(simd: Simd, x: &[f32], out: &mut [bf16]) {
    #[cfg(target_arch = "x86_64")]
    if simd.isa() >= Isa::Avx512Bf16 {
        // SAFETY: a `Simd` is only made of an instruction set that this machine has.
        return unsafe { narrow_by_instruction(x, out) };
    }
    narrow_in_integers(simd, x, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn narrow_by_instruction(x: &[f32], out: &mut [bf16]) {
    let (xs, last_x) = x.as_chunks();
    let (outs, last_out) = out.as_chunks_mut();
    for (x, out) in xs.iter().zip(outs) {
        narrow_sixteen(x, out);
    }
    if !last_x.is_empty() {
        let (mut x, mut out) = ([0.0; 16], [bf16::ZERO; 16]);
        x[..last_x.len()].copy_from_slice(last_x);
        narrow_sixteen(&x, &mut out);
        last_out.copy_from_slice(&out[..last_out.len()]);
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn narrow_sixteen(x: &[f32; 16], out: &mut [bf16; 16]) {
    use std::arch::x86_64::{
        __m256bh, __m256i, _mm256_storeu_si256, _mm512_cvtneps_pbh, _mm512_fpclass_ps_mask, _mm512_loadu_ps,
    };

    const SUBNORMAL: i32 = 0x20;
    // SAFETY: both pointers are to 16 elements, and the two vector types are of 256 plain bits.
    unsafe {
        let wide = _mm512_loadu_ps(x.as_ptr());
        // The instruction takes subnormal numbers for zero, which products that store bf16 do not.
        if _mm512_fpclass_ps_mask::<SUBNORMAL>(wide) != 0 {
            return narrow_nearest_body::<true>(x, out);
        }
        let narrow = _mm512_cvtneps_pbh(wide);
        let bits = std::mem::transmute::<__m256bh, __m256i>(narrow);
        _mm256_storeu_si256(out.as_mut_ptr().cast(), bits);
    }
}

per_isa! {
    fn narrow_in_integers(x: &[f32], out: &mut [bf16]) = narrow_nearest_body
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
pub(in crate::cpu) struct Dither {
    keys: [u32; 2],
    first: u32,
}

impl Dither {
    /// For the elements from index `first` on; the run must not cross a multiple of 2^32.
    pub fn new(seed: u64, first: u64) -> Dither {
        // The seed and the upper half of the index are spread over both keys.
        let z = splitmix64(seed, first >> 32);
        Dither { keys: [z as u32, (z >> 32) as u32], first: first as u32 }
    }

    /// The runs that `len` elements from index `first` on fall into, with the range of each: two at most, as long as
    /// there are no more than 2^32 elements.
    pub fn runs(seed: u64, first: u64, len: usize) -> impl Iterator<Item = (Range<usize>, Dither)> {
        let before = ((1 << 32) - u64::from(first as u32)).min(len as u64) as usize;
        [0..before, before..len]
            .into_iter()
            .filter(|range| !range.is_empty())
            .map(move |range| (range.clone(), Dither::new(seed, first.wrapping_add(range.start as u64))))
    }

    /// 32 random bits for the `i`-th element of the run.
    #[inline(always)]
    pub fn word(self, i: u32) -> u32 {
        mix(mix(self.first.wrapping_add(i) ^ self.keys[0]).wrapping_add(self.keys[1]))
    }

    /// The value of the `i`-th element of the run as bf16, away from zero with the probability of what is cut off.
    #[inline(always)]
    pub fn bf16(self, x: f32, i: u32) -> bf16 {
        cut(x, x.to_bits().wrapping_add(self.bits(i)))
    }

    /// 16 random bits for the `i`-th element of the run.
    #[inline(always)]
    fn bits(self, i: u32) -> u32 {
        self.word(i) >> 16
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
        *out = dither.bf16(*x, i as u32);
    }
}

/// The same to f16.
pub(super) fn narrow_stochastic_f16(x: &[f32], out: &mut [f16], dither: Dither) {
    for (i, (out, x)) in out.iter_mut().zip(x).enumerate() {
        *out = to_f16_stochastic(*x, dither.bits(i as u32));
    }
}

fn to_f16_stochastic(x: f32, random: u32) -> f16 {
    if x.abs() < f32::from(f16::MIN_POSITIVE) {
        // Subnormal numbers of f16 are whole multiples of the smallest.
        let steps = x.abs() / f32::from(f16::MIN_POSITIVE_SUBNORMAL) + random as f32 / 65536.0;
        return f16::from_bits(steps as u16).copysign(f16::from_f32(x));
    }
    if !x.is_finite() {
        return f16::from_f32(x);
    }
    const CUT: u32 = (1 << 13) - 1;
    f16::from_f32(f32::from_bits((x.to_bits() + (random & CUT)) & !CUT))
}
