//! Reading elements of every storage type as vectors of f32; block types are dequantised on the way.

use super::vector::{Vector, bf16_value, f16_value};
use crate::DType;

/// A storage type.
///
/// # Safety
/// For every method: `data` holds the elements named. Of a block type, `index` is a multiple of `V::LANES`.
pub(super) trait Storage {
    /// `V::LANES` elements from element `index` on.
    unsafe fn load<V: Vector>(data: *const u8, index: usize) -> V;

    /// Bytes from the start to element `index`, or to its block.
    fn offset(index: usize) -> usize;

    /// Where the bits of `load` in bf16 can be had as they are: the address of element `index`.
    #[inline(always)]
    fn bf16_at(_data: *const u8, _index: usize) -> Option<*const u16> {
        None
    }
}

pub(super) struct F32;
pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct Q8_0;
pub(super) struct Q4_0;
pub(super) struct Q4_1;

impl Storage for F32 {
    #[inline(always)]
    fn offset(index: usize) -> usize {
        4 * index
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(data: *const u8, index: usize) -> V {
        // SAFETY: as the trait says.
        unsafe { V::load(data.cast::<f32>().add(index)) }
    }
}

impl Storage for Bf16 {
    #[inline(always)]
    fn offset(index: usize) -> usize {
        2 * index
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(data: *const u8, index: usize) -> V {
        // SAFETY: as the trait says.
        unsafe { V::load_bf16(data.cast::<u16>().add(index)) }
    }

    #[inline(always)]
    fn bf16_at(data: *const u8, index: usize) -> Option<*const u16> {
        Some(data.cast::<u16>().wrapping_add(index))
    }
}

impl Storage for F16 {
    #[inline(always)]
    fn offset(index: usize) -> usize {
        2 * index
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(data: *const u8, index: usize) -> V {
        // SAFETY: as the trait says.
        unsafe { V::load_f16(data.cast::<u16>().add(index)) }
    }
}

/// The block that element `index` lies in, of `bytes` bytes, and its place there.
#[inline(always)]
unsafe fn block(data: *const u8, index: usize, bytes: usize) -> (*const u8, usize) {
    // SAFETY: the block holds an element that the caller may read.
    (unsafe { data.add(index / BLOCK * bytes) }, index % BLOCK)
}

/// Elements of a block of the quantised types.
pub(super) const BLOCK: usize = 32;

impl Storage for Q8_0 {
    #[inline(always)]
    fn offset(index: usize) -> usize {
        index / BLOCK * 34
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(data: *const u8, index: usize) -> V {
        // SAFETY: a block is a scale and 32 codes, and `LANES` divides 32.
        unsafe {
            let (block, at) = block(data, index, 34);
            V::load_i8(block.add(2 + at).cast()).times(V::splat_two_f16(block).0)
        }
    }
}

/// Codes of a block of 4-bit codes: the low halves of its 16 bytes are the first 16 elements. Products with the scale
/// are exact, 11 bits by 4, so that it makes no difference whether the sum is fused.
#[inline(always)]
unsafe fn nibbles<V: Vector>(codes: *const u8, at: usize, scale: V, minimum: V) -> V {
    // SAFETY: the caller's pointer holds 16 bytes and `LANES` divides 16.
    unsafe {
        if at < 16 {
            V::load_nibbles::<false>(codes.add(at), scale, minimum)
        } else {
            V::load_nibbles::<true>(codes.add(at - 16), scale, minimum)
        }
    }
}

impl Storage for Q4_0 {
    #[inline(always)]
    fn offset(index: usize) -> usize {
        index / BLOCK * 18
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(data: *const u8, index: usize) -> V {
        // SAFETY: a block is a scale and 16 bytes of codes.
        unsafe {
            let (block, at) = block(data, index, 18);
            let (scale, _) = V::splat_two_f16(block);
            nibbles(block.add(2), at, scale, scale.times(V::splat(-8.0)))
        }
    }
}

impl Storage for Q4_1 {
    #[inline(always)]
    fn offset(index: usize) -> usize {
        index / BLOCK * 20
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(data: *const u8, index: usize) -> V {
        // SAFETY: a block is a scale, a minimum and 16 bytes of codes.
        unsafe {
            let (block, at) = block(data, index, 20);
            let (scale, minimum) = V::splat_two_f16(block);
            nibbles(block.add(4), at, scale, minimum)
        }
    }
}

/// One element, of any type.
///
/// # Safety
/// `data` holds element `index`.
pub(super) unsafe fn element(dtype: DType, data: *const u8, index: usize) -> f32 {
    let half = |p: *const u8| {
        // SAFETY: inside the block, which holds an element that the caller may read.
        f16_value(unsafe { p.cast::<u16>().read_unaligned() })
    };
    // SAFETY: the caller vouches for the element, and a block lies whole in memory.
    unsafe {
        match dtype {
            DType::F32 => *data.cast::<f32>().add(index),
            DType::Bf16 => bf16_value(*data.cast::<u16>().add(index)),
            DType::F16 => half(data.add(2 * index)),
            DType::U32 => *data.cast::<u32>().add(index) as f32,
            DType::Q8_0 => {
                let (block, at) = block(data, index, 34);
                half(block) * f32::from(*block.add(2 + at).cast::<i8>())
            }
            DType::Q4_0 => {
                let (block, at) = block(data, index, 18);
                half(block) * (nibble(block.add(2), at) - 8.0)
            }
            DType::Q4_1 => {
                let (block, at) = block(data, index, 20);
                half(block) * nibble(block.add(4), at) + half(block.add(2))
            }
        }
    }
}

unsafe fn nibble(codes: *const u8, at: usize) -> f32 {
    // SAFETY: the caller's pointer holds 16 bytes.
    let byte = unsafe { *codes.add(at % 16) };
    f32::from(if at < 16 { byte & 15 } else { byte >> 4 })
}
