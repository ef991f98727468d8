//! The 4-bit types of bitsandbytes: blocks of 64 elements that are places in a table times their largest magnitude.
//!
//! The blocks run over the flat matrix. A block's 32 bytes of codes hold its first 32 elements in their lower halves and
//! the others in the upper ones. Magnitudes are f32, or, doubly quantised, 8-bit codes: places in the signed dynamic map
//! (Dettmers 2015) times a factor that 256 blocks share, plus an offset, which is the tensor's but written with each
//! factor. Every product and sum is rounded to f32 by itself, as the definition has it.

use std::marker::PhantomData;

use super::{Blocks, Storage};
use crate::cpu::matmul::vector::{MAX_VECTORS, Vector};
use crate::cpu::quantize::{FP4_VALUES, NF4_VALUES, SIGNED_DYNAMIC_MAP};

/// Elements of a block.
const BLOCK: usize = 64;
/// Bytes of a block's codes.
const CODES: usize = BLOCK / 2;
/// Blocks that share a factor.
const SHARING: usize = 256;
/// Bytes of factor and offset.
const FACTOR: usize = 8;
/// Bytes of a block with the code of its magnitude.
const CODED: usize = 1 + CODES;

/// The values of 4-bit codes.
pub(in super::super) trait Values {
    const VALUES: &'static [f32; 16];
}

pub(in super::super) struct NormalFloat;
pub(in super::super) struct Float;

impl Values for NormalFloat {
    const VALUES: &'static [f32; 16] = &NF4_VALUES;
}

impl Values for Float {
    const VALUES: &'static [f32; 16] = &FP4_VALUES;
}

#[inline(always)]
unsafe fn read_f32(at: *const u8) -> f32 {
    // SAFETY: the caller's pointer holds 4 bytes.
    f32::from_bits(u32::from_le(unsafe { at.cast::<u32>().read_unaligned() }))
}

/// The codes of `V::LANES` elements from `at` on, in their lowest four bits.
#[inline(always)]
unsafe fn codes<V: Vector>(codes: *const u8, at: usize) -> V::Codes {
    // SAFETY: the caller's pointer holds 32 bytes, and `LANES` divides 32.
    unsafe {
        let bytes = V::codes(codes.add(at % CODES));
        if at < CODES { bytes } else { V::shift_right(bytes, 4) }
    }
}

/// Blocks with f32 magnitudes.
pub(in super::super) struct Quantized<T>(PhantomData<T>);

impl<T: Values> Blocks for Quantized<T> {
    const BLOCK: usize = BLOCK;
    const BYTES: usize = 4 + CODES;
    const CHUNK: usize = BLOCK;
    type Scales<V: Vector> = V::Table;

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> V::Table {
        // SAFETY: as the trait says.
        unsafe { V::table(T::VALUES, read_f32(block)) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, table: &V::Table) -> V {
        // SAFETY: the codes follow the magnitude.
        unsafe { V::choose(codes::<V>(block.add(4), at), *table) }
    }
}

/// Blocks with coded magnitudes.
pub(in super::super) struct DoublyQuantized<T>(PhantomData<T>);

/// A block with the factor of its magnitude.
#[derive(Clone, Copy)]
pub(in super::super) struct Coded {
    block: *const u8,
    factor: *const u8,
    /// Blocks up to the next factor, this one included.
    left: usize,
}

impl<T: Values> Storage for DoublyQuantized<T> {
    const BLOCK: usize = BLOCK;
    const CHUNK: usize = BLOCK;
    type Place = Coded;
    type Scales<V: Vector> = V::Table;

    #[inline(always)]
    unsafe fn place(data: *const u8, index: usize) -> Coded {
        let block = index / BLOCK;
        let factor = data.wrapping_add(block / SHARING * (FACTOR + SHARING * CODED));
        let within = block % SHARING;
        Coded { block: factor.wrapping_add(FACTOR + within * CODED), factor, left: SHARING - within }
    }

    #[inline(always)]
    unsafe fn next(place: Coded) -> Coded {
        let after = place.block.wrapping_add(CODED);
        if place.left > 1 {
            Coded { block: after, left: place.left - 1, ..place }
        } else {
            Coded { block: after.wrapping_add(FACTOR), factor: after, left: SHARING }
        }
    }

    #[inline(always)]
    fn address(place: Coded) -> *const u8 {
        place.block
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(place: Coded) -> V::Table {
        // SAFETY: a code begins the block; factor and offset follow each other.
        unsafe {
            let factor = read_f32(place.factor);
            let magnitude = SIGNED_DYNAMIC_MAP[usize::from(*place.block)] * factor;
            V::table(T::VALUES, magnitude + read_f32(place.factor.add(4)))
        }
    }

    #[inline(always)]
    unsafe fn chunk<V: Vector>(place: Coded, at: usize, table: &V::Table, out: &mut [V; MAX_VECTORS]) {
        for (i, out) in out.iter_mut().enumerate().take(BLOCK / V::LANES) {
            // SAFETY: the codes follow that of the magnitude.
            *out = unsafe { V::choose(codes::<V>(place.block.add(1), at + i * V::LANES), *table) };
        }
    }

    #[inline(always)]
    unsafe fn load_alone<V: Vector>(place: Coded, at: usize) -> V {
        // SAFETY: as above.
        unsafe { V::choose(codes::<V>(place.block.add(1), at), Self::scales::<V>(place)) }
    }

    #[inline(always)]
    fn bf16_at(_: Coded, _: usize) -> Option<*const u16> {
        None
    }

    #[inline(always)]
    fn offset(index: usize) -> usize {
        index / BLOCK * CODED
    }
}
