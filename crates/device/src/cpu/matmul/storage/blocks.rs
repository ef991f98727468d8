//! Blocks of 32 or 64 elements with one scale and perhaps a minimum.
//!
//! A value is code * scale + minimum. The product is exact in f32 (an f16 has 11 bits, a code at most 8), so that it
//! makes no difference whether the sum is fused.

use super::{Blocks, GROUP};
use crate::cpu::matmul::vector::Vector;

pub(in super::super) struct Q8_0;
pub(in super::super) struct Q4_0;
pub(in super::super) struct Q4_1;
pub(in super::super) struct Q5_0;
pub(in super::super) struct Q5_1;
pub(in super::super) struct Iq4Nl;
pub(in super::super) struct Mxfp4;
pub(in super::super) struct Int8;

impl Blocks for Q8_0 {
    const BLOCK: usize = GROUP;
    const BYTES: usize = 34;
    type Scales<V: Vector> = V;

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> V {
        // SAFETY: as the trait says.
        unsafe { V::splat_two_f16(block).0 }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, scale: &V) -> V {
        // SAFETY: 32 codes follow the scale.
        unsafe { V::load_i8(block.add(2 + at).cast()).times(*scale) }
    }
}

/// Codes of 4 bits, two to a byte: the low halves of 16 bytes are the first 16 elements, the high ones the others. The
/// upper bits of what is given are anything.
#[inline(always)]
unsafe fn nibbles<V: Vector>(codes: *const u8, at: usize) -> V::Codes {
    // SAFETY: the caller's pointer holds 16 bytes, and `LANES` divides 16.
    unsafe {
        let bytes = V::codes(codes.add(at % 16));
        if at < 16 { bytes } else { V::shift_right(bytes, 4) }
    }
}

/// The same with a fifth bit, from the 32 bits at `fifth`.
#[inline(always)]
unsafe fn five_bits<V: Vector>(fifth: *const u8, codes: *const u8, at: usize) -> V::Codes {
    // SAFETY: as for `nibbles`; the fifth bits are 4 bytes.
    unsafe {
        let fifth = u32::from_le(fifth.cast::<u32>().read_unaligned());
        V::either(V::bits(nibbles::<V>(codes, at), 15, 0), V::sixteens(fifth >> at))
    }
}

impl Blocks for Q4_0 {
    const BLOCK: usize = GROUP;
    const BYTES: usize = 18;
    type Scales<V: Vector> = (V, V);

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> (V, V) {
        // SAFETY: as the trait says.
        unsafe {
            let (scale, _) = V::splat_two_f16(block);
            (scale, scale.times(V::splat(-8.0)))
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, (scale, minimum): &(V, V)) -> V {
        // SAFETY: 16 bytes of codes follow the scale.
        unsafe { V::scaled_nibbles(nibbles::<V>(block.add(2), at), *scale, *minimum) }
    }
}

impl Blocks for Q4_1 {
    const BLOCK: usize = GROUP;
    const BYTES: usize = 20;
    type Scales<V: Vector> = (V, V);

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> (V, V) {
        // SAFETY: as the trait says.
        unsafe { V::splat_two_f16(block) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, (scale, minimum): &(V, V)) -> V {
        // SAFETY: 16 bytes of codes follow scale and minimum.
        unsafe { V::scaled_nibbles(nibbles::<V>(block.add(4), at), *scale, *minimum) }
    }
}

impl Blocks for Q5_0 {
    const BLOCK: usize = GROUP;
    const BYTES: usize = 22;
    type Scales<V: Vector> = (V, V);

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> (V, V) {
        // SAFETY: as the trait says.
        unsafe {
            let (scale, _) = V::splat_two_f16(block);
            (scale, scale.times(V::splat(-16.0)))
        }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, (scale, minimum): &(V, V)) -> V {
        // SAFETY: a scale, 4 bytes of fifth bits, 16 of the others.
        unsafe {
            let codes = five_bits::<V>(block.add(2), block.add(6), at);
            minimum.plus_product(V::from_codes(codes), *scale)
        }
    }
}

impl Blocks for Q5_1 {
    const BLOCK: usize = GROUP;
    const BYTES: usize = 24;
    type Scales<V: Vector> = (V, V);

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> (V, V) {
        // SAFETY: as the trait says.
        unsafe { V::splat_two_f16(block) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, (scale, minimum): &(V, V)) -> V {
        // SAFETY: scale and minimum, 4 bytes of fifth bits, 16 of the others.
        unsafe {
            let codes = five_bits::<V>(block.add(4), block.add(8), at);
            minimum.plus_product(V::from_codes(codes), *scale)
        }
    }
}

/// The values of IQ4_NL's codes.
pub(in super::super) const IQ4_NL: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

impl Blocks for Iq4Nl {
    const BLOCK: usize = GROUP;
    const BYTES: usize = 18;
    type Scales<V: Vector> = V;

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> V {
        // SAFETY: as the trait says.
        unsafe { V::splat_two_f16(block).0 }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, scale: &V) -> V {
        // SAFETY: 16 bytes of codes follow the scale.
        unsafe { V::look_up(nibbles::<V>(block.add(2), at), &IQ4_NL).times(*scale) }
    }
}

/// Twice the values of E2M1 (OCP Microscaling Formats 1.0); the scale is halved in turn.
pub(in super::super) const TWICE_E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// 2^(exponent - 128), half of what an E8M0 byte stands for. ggml takes 255, the standard's NaN, as a number too.
pub(in super::super) fn half_e8m0(exponent: u8) -> f32 {
    let bits = match exponent {
        // Subnormal: 2^-128 and 2^-127.
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        _ => (u32::from(exponent) - 1) << 23,
    };
    f32::from_bits(bits)
}

impl Blocks for Mxfp4 {
    const BLOCK: usize = GROUP;
    const BYTES: usize = 17;
    type Scales<V: Vector> = V;

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> V {
        // SAFETY: as the trait says.
        unsafe { V::splat(half_e8m0(*block)) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, scale: &V) -> V {
        // SAFETY: 16 bytes of codes follow the scale.
        unsafe { V::look_up(nibbles::<V>(block.add(1), at), &TWICE_E2M1).times(*scale) }
    }
}

impl Blocks for Int8 {
    const BLOCK: usize = 64;
    const BYTES: usize = 68;
    const CHUNK: usize = 64;
    type Scales<V: Vector> = V;

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> V {
        // SAFETY: as the trait says.
        unsafe { V::splat(f32::from_bits(u32::from_le(block.cast::<u32>().read_unaligned()))) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, scale: &V) -> V {
        // SAFETY: 64 codes follow the scale.
        unsafe { V::load_i8(block.add(4 + at).cast()).times(*scale) }
    }
}
