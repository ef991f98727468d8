//! Blocks of 256 elements, whose groups of 16 or 32 have scales and minima that are a few bits times the block's own.
//!
//! A value is code * scale + minimum, scale and minimum exact products of an f16 and an integer of at most 8 bits. The
//! product with the code is exact too (at most 24 bits), so that it makes no difference whether the sum is fused.

use super::Blocks;
use crate::cpu::matmul::vector::{MAX_VECTORS, Vector};

/// Elements of a block.
const BLOCK: usize = 256;
/// Elements that are read together.
const CHUNK: usize = 64;
/// Groups of a block at most.
pub(in super::super) const MAX_GROUPS: usize = 16;

/// Scales and minima of a block's groups. They are filled by loops, which become vector code of the caller's instruction
/// set; `map` would be a call.
#[derive(Clone, Copy)]
pub(in super::super) struct GroupScales {
    scales: [f32; MAX_GROUPS],
    minima: [f32; MAX_GROUPS],
}

impl GroupScales {
    /// scale = d * `scales`, minimum = -dmin * `minima`, of groups of 32.
    #[inline(always)]
    fn of_eight([d, dmin]: [f32; 2], scales: [u8; 8], minima: [u8; 8]) -> GroupScales {
        let mut all = GroupScales { scales: [0.0; MAX_GROUPS], minima: [0.0; MAX_GROUPS] };
        for i in 0..8 {
            all.scales[i] = d * f32::from(scales[i]);
            all.minima[i] = -dmin * f32::from(minima[i]);
        }
        all
    }

    /// scale = d * `scales`, minimum = `zero` * scale.
    #[inline(always)]
    fn signed(d: f32, scales: [i8; 16], zero: f32) -> GroupScales {
        let mut all = GroupScales { scales: [0.0; MAX_GROUPS], minima: [0.0; MAX_GROUPS] };
        for ((out, minimum), scale) in all.scales.iter_mut().zip(&mut all.minima).zip(scales) {
            *out = d * f32::from(scale);
            *minimum = zero * *out;
        }
        all
    }
}

/// A type in blocks of 256.
///
/// # Safety
/// For every method: the pointer holds the whole block; `at` is a multiple of `V::LANES` inside it.
trait SuperBlock {
    const BYTES: usize;
    /// Elements of a group.
    const GROUP: usize;
    unsafe fn group_scales<V: Vector>(block: *const u8) -> GroupScales;

    /// Scale and minimum of one group.
    unsafe fn group_scale<V: Vector>(block: *const u8, group: usize) -> [f32; 2];

    /// The codes of `V::LANES` elements from `at` on.
    unsafe fn codes<V: Vector>(block: *const u8, at: usize) -> V::Codes;

    /// The codes of [`CHUNK`] elements from `at` on, a multiple of their number.
    #[inline(always)]
    unsafe fn chunk_of_codes<V: Vector>(block: *const u8, at: usize, out: &mut [V::Codes; MAX_VECTORS]) {
        for (i, out) in out.iter_mut().enumerate().take(CHUNK / V::LANES) {
            // SAFETY: as the trait says.
            *out = unsafe { Self::codes::<V>(block, at + i * V::LANES) };
        }
    }

    /// code * scale + minimum
    #[inline(always)]
    unsafe fn values<V: Vector>(codes: V::Codes, scale: V, minimum: V) -> V {
        // SAFETY: registers only.
        unsafe { minimum.plus_product(V::from_codes(codes), scale) }
    }
}

impl<T: SuperBlock> Blocks for T {
    const BLOCK: usize = BLOCK;
    const BYTES: usize = T::BYTES;
    const CHUNK: usize = CHUNK;
    type Scales<V: Vector> = GroupScales;

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> GroupScales {
        // SAFETY: as the trait says.
        unsafe { T::group_scales::<V>(block) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, all: &GroupScales) -> V {
        let group = at / T::GROUP % MAX_GROUPS;
        // SAFETY: as the trait says; a vector lies in one group.
        unsafe {
            T::values(T::codes::<V>(block, at), V::splat(all.scales[group]), V::splat(all.minima[group]))
        }
    }

    #[inline(always)]
    unsafe fn chunk<V: Vector>(block: *const u8, at: usize, all: &GroupScales, out: &mut [V; MAX_VECTORS]) {
        // SAFETY: as for `load`.
        unsafe {
            let mut codes = [V::sixteens(0); MAX_VECTORS];
            T::chunk_of_codes::<V>(block, at, &mut codes);
            for (i, (out, codes)) in out.iter_mut().zip(codes).enumerate().take(CHUNK / V::LANES) {
                let group = (at + i * V::LANES) / T::GROUP % MAX_GROUPS;
                *out = T::values(codes, V::splat(all.scales[group]), V::splat(all.minima[group]));
            }
        }
    }

    #[inline(always)]
    unsafe fn load_alone<V: Vector>(block: *const u8, at: usize) -> V {
        // SAFETY: as for `load`.
        unsafe {
            let [scale, minimum] = T::group_scale::<V>(block, at / T::GROUP);
            T::values(T::codes::<V>(block, at), V::splat(scale), V::splat(minimum))
        }
    }
}

pub(in super::super) struct Q2K;
pub(in super::super) struct Q3K;
pub(in super::super) struct Q4K;
pub(in super::super) struct Q5K;
pub(in super::super) struct Q6K;
pub(in super::super) struct Q8K;

/// Two bits of each of the 64 bytes at `codes`: bytes are shared by four runs of 32 elements, 128 apart.
#[inline(always)]
unsafe fn two_bits<V: Vector>(codes: *const u8, at: usize) -> V::Codes {
    // SAFETY: the caller's pointer holds 64 bytes.
    unsafe {
        let bytes = V::codes(codes.add(32 * (at / 128) + at % 32));
        V::bits(V::shift_right(bytes, 2 * (at as u32 / 32 % 4)), 3, 0)
    }
}

/// The same of 64 elements, which begin at a multiple of their number.
#[inline(always)]
unsafe fn two_bits_of_64<V: Vector>(codes: *const u8, at: usize) -> V::Bytes {
    let run = at as i32 / 32 % 4;
    // SAFETY: as above.
    unsafe {
        let bytes = V::bytes_twice(codes.add(32 * (at / 128)));
        V::mask_bytes(V::move_bits(bytes, [2 * run, 2 * run + 2]), 3)
    }
}

/// Halves of the bytes at `codes`, whose upper bits are anything: 32 bytes are 64 elements, the low halves the first.
#[inline(always)]
unsafe fn nibbles<V: Vector>(codes: *const u8, at: usize) -> V::Codes {
    // SAFETY: the caller's pointer holds 128 bytes.
    unsafe {
        let bytes = V::codes(codes.add(32 * (at / 64) + at % 32));
        V::shift_right(bytes, 4 * (at as u32 / 32 % 2))
    }
}

impl SuperBlock for Q2K {
    const BYTES: usize = 84;
    const GROUP: usize = 16;

    #[inline(always)]
    unsafe fn group_scales<V: Vector>(block: *const u8) -> GroupScales {
        // SAFETY: 16 bytes of scales come first, the block's own f16 numbers last.
        unsafe {
            let [d, dmin] = V::two_f16(block.add(80));
            let bytes = block.cast::<[u8; 16]>().read();
            let mut all = GroupScales { scales: [0.0; MAX_GROUPS], minima: [0.0; MAX_GROUPS] };
            for ((scale, minimum), byte) in all.scales.iter_mut().zip(&mut all.minima).zip(bytes) {
                *scale = d * f32::from(byte & 15);
                *minimum = -dmin * f32::from(byte >> 4);
            }
            all
        }
    }

    #[inline(always)]
    unsafe fn group_scale<V: Vector>(block: *const u8, group: usize) -> [f32; 2] {
        // SAFETY: as above.
        unsafe {
            let [d, dmin] = V::two_f16(block.add(80));
            let byte = *block.add(group);
            [d * f32::from(byte & 15), -dmin * f32::from(byte >> 4)]
        }
    }

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, at: usize) -> V::Codes {
        // SAFETY: the codes come after the scales.
        unsafe { two_bits::<V>(block.add(16), at) }
    }

    #[inline(always)]
    unsafe fn chunk_of_codes<V: Vector>(block: *const u8, at: usize, out: &mut [V::Codes; MAX_VECTORS]) {
        // SAFETY: the codes come after the scales.
        unsafe { V::widen(two_bits_of_64::<V>(block.add(16), at), out) }
    }
}

/// The scales of a Q3_K block: 4 bits of each in 8 bytes, the low halves first, then the upper 2 bits in 4 bytes.
#[inline(always)]
unsafe fn q3_k_scales(scales: *const u8) -> [i8; 16] {
    const EACH_4: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    const EACH_2: u64 = 0x0303_0303_0303_0303;
    // SAFETY: the caller's pointer holds 12 bytes.
    let (lower, upper) = unsafe {
        (
            u64::from_le(scales.cast::<u64>().read_unaligned()),
            u64::from(u32::from_le(scales.add(8).cast::<u32>().read_unaligned())),
        )
    };
    let first = (lower & EACH_4) | ((upper | upper >> 2 << 32) & EACH_2) << 4;
    let second = (lower >> 4 & EACH_4) | ((upper >> 4 | upper >> 6 << 32) & EACH_2) << 4;
    let mut all = [0; 16];
    for (scale, byte) in all.iter_mut().zip(first.to_le_bytes().into_iter().chain(second.to_le_bytes())) {
        *scale = byte as i8 - 32;
    }
    all
}

impl SuperBlock for Q3K {
    const BYTES: usize = 110;
    const GROUP: usize = 16;

    #[inline(always)]
    unsafe fn group_scales<V: Vector>(block: *const u8) -> GroupScales {
        // SAFETY: the scales and the f16 number end the block; the 2 bytes before that number are read with it.
        unsafe { GroupScales::signed(V::two_f16(block.add(106))[1], q3_k_scales(block.add(96)), -4.0) }
    }

    #[inline(always)]
    unsafe fn group_scale<V: Vector>(block: *const u8, group: usize) -> [f32; 2] {
        // SAFETY: as above.
        unsafe {
            let scale = V::two_f16(block.add(106))[1] * f32::from(q3_k_scales(block.add(96))[group]);
            [scale, -4.0 * scale]
        }
    }

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, at: usize) -> V::Codes {
        // SAFETY: 32 bytes with a third bit for each of 8 runs of 32 elements, then 64 with the other two.
        unsafe {
            let third = V::shift_right(V::codes(block.add(at % 32)), at as u32 / 32);
            V::either(two_bits::<V>(block.add(32), at), V::bits(third, 1, 2))
        }
    }

    #[inline(always)]
    unsafe fn chunk_of_codes<V: Vector>(block: *const u8, at: usize, out: &mut [V::Codes; MAX_VECTORS]) {
        let run = at as i32 / 32;
        // SAFETY: as for `codes`.
        unsafe {
            let third = V::move_bits(V::bytes_twice(block), [run - 2, run - 1]);
            let lower = two_bits_of_64::<V>(block.add(32), at);
            V::widen(V::either_bytes(lower, V::mask_bytes(third, 4)), out);
        }
    }
}

/// Scales and minima of 6 bits in 12 bytes: 6 bits of the first four of either, then 4 bits of the others, whose upper 2
/// lie above the first ones.
#[inline(always)]
unsafe fn six_bits(packed: *const u8) -> ([u8; 8], [u8; 8]) {
    const EACH_6: u32 = 0x3f3f_3f3f;
    const EACH_4: u32 = 0x0f0f_0f0f;
    const EACH_2: u32 = 0x0303_0303;
    // SAFETY: the caller's pointer holds 12 bytes.
    let [a, b, c] = unsafe { packed.cast::<[u32; 3]>().read_unaligned() };
    let [a, b, c] = [u32::from_le(a), u32::from_le(b), u32::from_le(c)];
    let join = |first: u32, second: u32| (u64::from(first) | u64::from(second) << 32).to_le_bytes();
    (
        join(a & EACH_6, (c & EACH_4) | (a >> 6 & EACH_2) << 4),
        join(b & EACH_6, (c >> 4 & EACH_4) | (b >> 6 & EACH_2) << 4),
    )
}

/// Scale and minimum of one group of Q4_K or Q5_K.
#[inline(always)]
unsafe fn one_of_eight<V: Vector>(block: *const u8, group: usize) -> [f32; 2] {
    // SAFETY: both types begin with two f16 numbers and 12 bytes of scales.
    unsafe {
        let [d, dmin] = V::two_f16(block);
        let packed = |i: usize| u32::from(*block.add(4 + i));
        let (scale, minimum) = if group < 4 {
            (packed(group) & 63, packed(group + 4) & 63)
        } else {
            let (low, above) = (packed(group + 4), [packed(group - 4) >> 6, packed(group) >> 6]);
            (low & 15 | above[0] << 4, low >> 4 | above[1] << 4)
        };
        [d * scale as f32, -dmin * minimum as f32]
    }
}

#[inline(always)]
unsafe fn all_of_eight<V: Vector>(block: *const u8) -> GroupScales {
    // SAFETY: as above.
    unsafe {
        let (scales, minima) = six_bits(block.add(4));
        GroupScales::of_eight(V::two_f16(block), scales, minima)
    }
}

impl SuperBlock for Q4K {
    const BYTES: usize = 144;
    const GROUP: usize = 32;

    #[inline(always)]
    unsafe fn group_scales<V: Vector>(block: *const u8) -> GroupScales {
        // SAFETY: as the trait says.
        unsafe { all_of_eight::<V>(block) }
    }

    #[inline(always)]
    unsafe fn group_scale<V: Vector>(block: *const u8, group: usize) -> [f32; 2] {
        // SAFETY: as the trait says.
        unsafe { one_of_eight::<V>(block, group) }
    }

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, at: usize) -> V::Codes {
        // SAFETY: the codes end the block.
        unsafe { nibbles::<V>(block.add(16), at) }
    }

    #[inline(always)]
    unsafe fn values<V: Vector>(codes: V::Codes, scale: V, minimum: V) -> V {
        // SAFETY: registers only.
        unsafe { V::scaled_nibbles(codes, scale, minimum) }
    }
}

impl SuperBlock for Q5K {
    const BYTES: usize = 176;
    const GROUP: usize = 32;

    #[inline(always)]
    unsafe fn group_scales<V: Vector>(block: *const u8) -> GroupScales {
        // SAFETY: as the trait says.
        unsafe { all_of_eight::<V>(block) }
    }

    #[inline(always)]
    unsafe fn group_scale<V: Vector>(block: *const u8, group: usize) -> [f32; 2] {
        // SAFETY: as the trait says.
        unsafe { one_of_eight::<V>(block, group) }
    }

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, at: usize) -> V::Codes {
        // SAFETY: 32 bytes with a fifth bit for each of 8 runs of 32 elements, then 128 with the others.
        unsafe {
            let fifth = V::shift_right(V::codes(block.add(16 + at % 32)), at as u32 / 32);
            V::either(V::bits(nibbles::<V>(block.add(48), at), 15, 0), V::bits(fifth, 1, 4))
        }
    }

    #[inline(always)]
    unsafe fn chunk_of_codes<V: Vector>(block: *const u8, at: usize, out: &mut [V::Codes; MAX_VECTORS]) {
        let run = at as i32 / 32;
        // SAFETY: as for `codes`.
        unsafe {
            let fifth = V::move_bits(V::bytes_twice(block.add(16)), [run - 4, run - 3]);
            let lower = V::move_bits(V::bytes_twice(block.add(48 + at / 2)), [0, 4]);
            V::widen(V::either_bytes(V::mask_bytes(lower, 15), V::mask_bytes(fifth, 16)), out);
        }
    }
}

impl SuperBlock for Q6K {
    const BYTES: usize = 210;
    const GROUP: usize = 16;

    #[inline(always)]
    unsafe fn group_scales<V: Vector>(block: *const u8) -> GroupScales {
        // SAFETY: 16 scales and the f16 number end the block; the 2 bytes before that number are read with it.
        unsafe {
            let scales = block.add(192).cast::<[i8; 16]>().read();
            GroupScales::signed(V::two_f16(block.add(206))[1], scales, -32.0)
        }
    }

    #[inline(always)]
    unsafe fn group_scale<V: Vector>(block: *const u8, group: usize) -> [f32; 2] {
        // SAFETY: as above.
        unsafe {
            let scale = V::two_f16(block.add(206))[1] * f32::from(*block.add(192 + group).cast::<i8>());
            [scale, -32.0 * scale]
        }
    }

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, at: usize) -> V::Codes {
        // Of each half block, 64 bytes hold the lower 4 bits, low halves first, and 32 bytes the upper 2 of four runs.
        let (half, run) = (at / 128, at as u32 / 32 % 4);
        // SAFETY: 128 bytes with the lower bits, then 64 with the upper ones.
        unsafe {
            let lower = V::codes(block.add(64 * half + at % 64));
            let lower = V::bits(V::shift_right(lower, 4 * (run / 2)), 15, 0);
            let upper = V::codes(block.add(128 + 32 * half + at % 32));
            V::either(lower, V::bits(V::shift_right(upper, 2 * run), 3, 4))
        }
    }

    #[inline(always)]
    unsafe fn chunk_of_codes<V: Vector>(block: *const u8, at: usize, out: &mut [V::Codes; MAX_VECTORS]) {
        let (half, run) = (at / 128, at as i32 / 32 % 4);
        // SAFETY: as for `codes`.
        unsafe {
            let lower = V::move_bits(V::bytes(block.add(64 * half)), [2 * run; 2]);
            let upper = V::bytes_twice(block.add(128 + 32 * half));
            let upper = V::move_bits(upper, [2 * run - 4, 2 * run - 2]);
            V::widen(V::either_bytes(V::mask_bytes(lower, 15), V::mask_bytes(upper, 48)), out);
        }
    }
}

impl Blocks for Q8K {
    const BLOCK: usize = BLOCK;
    const BYTES: usize = 292;
    type Scales<V: Vector> = V;

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> V {
        // SAFETY: as the trait says.
        unsafe { V::splat(f32::from_bits(u32::from_le(block.cast::<u32>().read_unaligned()))) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(block: *const u8, at: usize, scale: &V) -> V {
        // SAFETY: 256 codes follow the scale.
        unsafe { V::load_i8(block.add(4 + at).cast()).times(*scale) }
    }
}
