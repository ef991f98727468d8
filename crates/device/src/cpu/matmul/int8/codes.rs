//! Weights as integer codes: 32 at a time, as bytes in the order of their elements.
//!
//! How blocks are laid out is told in [`storage`]; codes are unsigned, or those of signed bytes and tables as they are.

use super::integers::Integers;
use crate::cpu::matmul::storage::{
    self, Blocks, GROUP, GroupScales, IQ4_NL, MAX_GROUPS, Storage, TWICE_E2M1, half_e8m0,
};
use crate::cpu::matmul::vector::Vector;

/// A type whose values are code * scale, or code * scale + minimum.
///
/// # Safety
/// For every method: the pointer holds the whole block, of which `group` is a group of 32 elements.
pub(super) trait Codes: Blocks + Storage {
    /// Codes are signed bytes.
    const SIGNED: bool = false;
    /// Halves of a group have scales of their own.
    const HALVES: bool = false;
    const MINIMUM: bool = true;
    /// The code of zero, of unsigned codes whose minimum is that of a scale: the minimum is `-ZERO * scale`.
    const ZERO: Option<u8> = None;

    unsafe fn codes<I: Integers>(block: *const u8, group: usize) -> I::Bytes;

    /// Scale and minimum of a block of fewer than eight groups.
    #[inline(always)]
    unsafe fn scale<I: Integers>(_block: *const u8) -> [f32; 2] {
        [0.0; 2]
    }

    /// Those of a block's eight groups, or of their halves.
    #[inline(always)]
    unsafe fn group_scales<I: Integers>(_block: *const u8) -> GroupScales {
        GroupScales { scales: [0.0; MAX_GROUPS], minima: [0.0; MAX_GROUPS] }
    }
}

/// Whether a type is one of those that [`by_codes`] names.
pub(super) fn has_codes(dtype: crate::DType) -> bool {
    fn yes<S: Codes>() -> bool {
        true
    }
    by_codes!(dtype, yes::<[]>())
}

/// Calls a function with the storage type of `dtype` in the place of `[]`; nothing for what has no integer codes.
macro_rules! by_codes {
    ($dtype:expr, $function:ident::<[] $(, $parameter:tt)*>($($argument:expr),*)) => {
        match $dtype {
            crate::DType::Q8_0 => $function::<storage::Q8_0 $(, $parameter)*>($($argument),*),
            crate::DType::Q4_0 => $function::<storage::Q4_0 $(, $parameter)*>($($argument),*),
            crate::DType::Q4_1 => $function::<storage::Q4_1 $(, $parameter)*>($($argument),*),
            crate::DType::Q5_0 => $function::<storage::Q5_0 $(, $parameter)*>($($argument),*),
            crate::DType::Q5_1 => $function::<storage::Q5_1 $(, $parameter)*>($($argument),*),
            crate::DType::Iq4Nl => $function::<storage::Iq4Nl $(, $parameter)*>($($argument),*),
            crate::DType::Mxfp4 => $function::<storage::Mxfp4 $(, $parameter)*>($($argument),*),
            crate::DType::Int8 => $function::<storage::Int8 $(, $parameter)*>($($argument),*),
            crate::DType::Q2K => $function::<storage::Q2K $(, $parameter)*>($($argument),*),
            crate::DType::Q3K => $function::<storage::Q3K $(, $parameter)*>($($argument),*),
            crate::DType::Q4K => $function::<storage::Q4K $(, $parameter)*>($($argument),*),
            crate::DType::Q5K => $function::<storage::Q5K $(, $parameter)*>($($argument),*),
            crate::DType::Q6K => $function::<storage::Q6K $(, $parameter)*>($($argument),*),
            _ => Default::default(),
        }
    };
}
pub(super) use by_codes;

/// Halves of 16 bytes: the low ones are the first elements.
#[inline(always)]
unsafe fn nibbles<I: Integers>(codes: *const u8) -> I::Bytes {
    // SAFETY: the caller's pointer holds 16 bytes.
    unsafe { I::mask(I::move_bits(I::bytes_twice(codes), [0, 4]), 15) }
}

/// The integers of a table.
const fn table(values: &[f32; 16]) -> [i8; 16] {
    let mut integers = [0; 16];
    let mut i = 0;
    while i < 16 {
        integers[i] = values[i] as i8;
        i += 1;
    }
    integers
}

/// An f16 scale, and a minimum that is so many times the scale.
#[inline(always)]
unsafe fn scale_times<I: Integers>(scale: *const u8, minimum: f32) -> [f32; 2] {
    // SAFETY: the caller's pointer holds four bytes, of which the first two are the scale.
    let [scale, _] = unsafe { I::V::two_f16(scale) };
    [scale, scale * minimum]
}

/// A type of small blocks: whether codes are signed, the code of zero if the scale gives the minimum, codes of a group of a block, and
/// the block's scale and minimum. Signed ones have no minimum.
macro_rules! small {
    ($storage:ident, signed: $signed:literal, $(zero: $zero:literal,)? ($block:ident, $group:pat) => $codes:expr, $scale:expr) => {
        impl Codes for storage::$storage {
            const SIGNED: bool = $signed;
            const MINIMUM: bool = !$signed;
            $(const ZERO: Option<u8> = Some($zero);)?

            #[inline(always)]
            unsafe fn codes<I: Integers>($block: *const u8, $group: usize) -> I::Bytes {
                // SAFETY: as the trait says.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scale<I: Integers>($block: *const u8) -> [f32; 2] {
                // SAFETY: as the trait says.
                unsafe { $scale }
            }
        }
    };
}

small!(Q8_0, signed: true, (block, _) => I::bytes(block.add(2)), scale_times::<I>(block, 0.0));
small!(Q4_0, signed: false, zero: 8, (block, _) => nibbles::<I>(block.add(2)), scale_times::<I>(block, -8.0));
small!(Q4_1, signed: false, (block, _) => nibbles::<I>(block.add(4)), I::V::two_f16(block));
small!(
    Q5_0, signed: false, zero: 16,
    (block, _) => I::either(nibbles::<I>(block.add(6)), I::sixteens(block.add(2))),
    scale_times::<I>(block, -16.0)
);
small!(
    Q5_1, signed: false,
    (block, _) => I::either(nibbles::<I>(block.add(8)), I::sixteens(block.add(4))),
    I::V::two_f16(block)
);
small!(
    Iq4Nl, signed: true,
    (block, _) => I::look_up(nibbles::<I>(block.add(2)), const { &table(&IQ4_NL) }),
    scale_times::<I>(block, 0.0)
);
small!(
    Mxfp4, signed: true,
    (block, _) => I::look_up(nibbles::<I>(block.add(1)), const { &table(&TWICE_E2M1) }),
    [half_e8m0(*block), 0.0]
);
small!(
    Int8, signed: true,
    (block, group) => I::bytes(block.add(4 + group * GROUP)),
    [f32::from_bits(u32::from_le(block.cast::<u32>().read_unaligned())), 0.0]
);

/// Some bits of each of 32 bytes, moved to the place of `mask`.
#[inline(always)]
unsafe fn bits<I: Integers>(bytes: *const u8, right: i32, mask: u8) -> I::Bytes {
    // SAFETY: the caller's pointer holds 32 bytes.
    unsafe { I::mask(I::move_bits(I::bytes(bytes), [right; 2]), mask) }
}

/// A type of blocks of 256.
macro_rules! large {
    ($storage:ident, halves: $halves:literal, $(zero: $zero:literal,)? ($block:ident, $group:ident) => $codes:expr) => {
        impl Codes for storage::$storage {
            const HALVES: bool = $halves;
            $(const ZERO: Option<u8> = Some($zero);)?

            #[inline(always)]
            unsafe fn codes<I: Integers>($block: *const u8, $group: usize) -> I::Bytes {
                // SAFETY: as the trait says.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn group_scales<I: Integers>(block: *const u8) -> GroupScales {
                // SAFETY: as the trait says.
                unsafe { <Self as Blocks>::scales::<I::V>(block) }
            }
        }
    };
}

large!(Q2K, halves: true, (block, group) => {
    bits::<I>(block.add(16 + group / 4 * 32), 2 * (group as i32 % 4), 3)
});
large!(Q3K, halves: true, zero: 4, (block, group) => {
    let lower = bits::<I>(block.add(32 + group / 4 * 32), 2 * (group as i32 % 4), 3);
    I::either(lower, bits::<I>(block, group as i32 - 2, 4))
});
large!(Q4K, halves: false, (block, group) => bits::<I>(block.add(16 + group / 2 * 32), 4 * (group as i32 % 2), 15));
large!(Q5K, halves: false, (block, group) => {
    let lower = bits::<I>(block.add(48 + group / 2 * 32), 4 * (group as i32 % 2), 15);
    I::either(lower, bits::<I>(block.add(16), group as i32 - 4, 16))
});
large!(Q6K, halves: true, zero: 32, (block, group) => {
    let (half, run) = (group / 4, group % 4);
    let lower = bits::<I>(block.add(64 * half + 32 * (run % 2)), 4 * (run as i32 / 2), 15);
    I::either(lower, bits::<I>(block.add(128 + 32 * half), 2 * run as i32 - 4, 48))
});
