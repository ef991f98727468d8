//! Weights as integer codes: 32 at a time, as bytes in the order of their elements.
//!
//! How blocks are laid out is told in [`storage`]; codes are unsigned, or those of signed bytes and tables as they are.

use super::TOGETHER;
use super::integers::Integers;
use crate::cpu::matmul::storage::{self, Blocks, GROUP, IQ4_NL, MAX_GROUPS, Storage, TWICE_E2M1, half_e8m0};
use crate::cpu::matmul::tile::{LINE, prefetch_later};

/// Scales and minima of eight columns' blocks, a lane for each: of their groups, or of the halves of groups.
#[derive(Clone, Copy)]
pub(super) struct Scales<F> {
    pub scales: [F; MAX_GROUPS],
    pub minima: [F; MAX_GROUPS],
}

/// A block of each of the columns that are multiplied together.
pub(super) type Blocks8 = [*const u8; TOGETHER];

/// A type whose values are code * scale, or code * scale + minimum.
///
/// # Safety
/// For every method: the pointer holds the whole block, of which `group` is a group of 32 elements.
pub(super) trait Codes: Blocks + Storage {
    /// Codes are signed bytes.
    const SIGNED: bool = false;
    /// The code of zero, of unsigned ones without minima.
    const ZERO: Option<u8> = None;
    /// Halves of a group have scales of their own.
    const HALVES: bool = false;
    /// There are minima.
    const MINIMA: bool = !Self::SIGNED && Self::ZERO.is_none();

    unsafe fn codes<I: Integers>(block: *const u8, group: usize) -> I::Bytes;

    /// Those of eight blocks.
    unsafe fn eight_scales<I: Integers>(blocks: &Blocks8) -> Scales<I::Floats>;
}

/// Goes on to the next blocks, and asks for those `ahead` bytes further on.
#[inline(always)]
pub(super) fn next_blocks<S: Codes>(blocks: &mut Blocks8, ahead: usize) {
    for block in blocks {
        for line in (0..S::BYTES).step_by(LINE) {
            prefetch_later(block.wrapping_add(ahead + line));
        }
        *block = block.wrapping_add(S::BYTES);
    }
}

/// Does something with each group of a block that has so many. Written out, as what is shifted and masked is then known beforehand.
macro_rules! each_group {
    ($groups:ident, $group:ident => $does:expr) => {
        each_group!($groups, $group => $does; 0, 1, 2, 3, 4, 5, 6, 7)
    };
    ($groups:ident, $group:ident => $does:expr; $($number:literal),*) => {
        $(if $number < $groups {
            let $group: usize = $number;
            $does;
        })*
    };
}
pub(super) use each_group;

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

/// The same scale and minimum for all groups.
#[inline(always)]
fn alike<F: Copy>([scale, minimum]: [F; 2]) -> Scales<F> {
    Scales { scales: [scale; MAX_GROUPS], minima: [minimum; MAX_GROUPS] }
}

/// An f16 at the beginning of each block.
#[inline(always)]
unsafe fn f16_scales<I: Integers>(blocks: &Blocks8) -> Scales<I::Floats> {
    // SAFETY: the caller's blocks hold an f16.
    unsafe { alike([I::eight_f16(*blocks), I::splat(0.0)]) }
}

/// Two of them, the second one the minimum.
#[inline(always)]
unsafe fn f16_scales_and_minima<I: Integers>(blocks: &Blocks8) -> Scales<I::Floats> {
    // SAFETY: the caller's blocks hold two f16.
    unsafe { alike([I::eight_f16(*blocks), I::eight_f16(after(blocks, 2))]) }
}

/// What a function finds in each block.
macro_rules! each {
    ($blocks:ident, $block:ident => $scale:expr) => {{
        let mut scales = [0.0; TOGETHER];
        for (scale, $block) in scales.iter_mut().zip($blocks) {
            *scale = $scale;
        }
        alike([I::load(scales.as_ptr()), I::splat(0.0)])
    }};
}

/// A type with integer codes: what is said of them besides, as constants of [`Codes`]; the codes of a group of a block; and the scales and
/// minima of eight blocks.
macro_rules! codes {
    (
        $storage:ident $(, $constant:ident: $of:ty = $value:expr)*;
        ($block:ident, $group:pat) => $codes:expr, $blocks:ident => $scales:expr
    ) => {
        impl Codes for storage::$storage {
            $(const $constant: $of = $value;)*

            #[inline(always)]
            unsafe fn codes<I: Integers>($block: *const u8, $group: usize) -> I::Bytes {
                // SAFETY: as the trait says.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn eight_scales<I: Integers>($blocks: &Blocks8) -> Scales<I::Floats> {
                // SAFETY: as the trait says.
                unsafe { $scales }
            }
        }
    };
}

codes!(Q8_0, SIGNED: bool = true; (block, _) => I::bytes(block.add(2)), blocks => f16_scales::<I>(blocks));
codes!(Q4_0, ZERO: Option<u8> = Some(8); (block, _) => nibbles::<I>(block.add(2)), blocks => f16_scales::<I>(blocks));
codes!(Q4_1; (block, _) => nibbles::<I>(block.add(4)), blocks => f16_scales_and_minima::<I>(blocks));
codes!(
    Q5_0, ZERO: Option<u8> = Some(16);
    (block, _) => I::either(nibbles::<I>(block.add(6)), I::sixteens(block.add(2))),
    blocks => f16_scales::<I>(blocks)
);
codes!(
    Q5_1;
    (block, _) => I::either(nibbles::<I>(block.add(8)), I::sixteens(block.add(4))),
    blocks => f16_scales_and_minima::<I>(blocks)
);
codes!(
    Iq4Nl, SIGNED: bool = true;
    (block, _) => I::look_up(nibbles::<I>(block.add(2)), const { &table(&IQ4_NL) }),
    blocks => f16_scales::<I>(blocks)
);
codes!(
    Mxfp4, SIGNED: bool = true;
    (block, _) => I::look_up(nibbles::<I>(block.add(1)), const { &table(&TWICE_E2M1) }),
    blocks => each!(blocks, block => half_e8m0(**block))
);
codes!(
    Int8, SIGNED: bool = true;
    (block, group) => I::bytes(block.add(4 + group * GROUP)),
    blocks => each!(blocks, block => f32::from_bits(u32::from_le(block.cast::<u32>().read_unaligned())))
);

/// Some bits of each of 32 bytes, moved to the place of `mask`.
#[inline(always)]
unsafe fn bits<I: Integers>(bytes: *const u8, right: i32, mask: u8) -> I::Bytes {
    // SAFETY: the caller's pointer holds 32 bytes.
    unsafe { I::mask(I::move_bits(I::bytes(bytes), [right; 2]), mask) }
}

/// Byte `i` of 8 or 16 bytes, in each lane of words of four: the scales of a group or a half.
#[inline(always)]
unsafe fn byte<I: Integers, const N: usize>(words: &[I::Bytes; N], i: usize, signed: bool) -> I::Floats {
    // SAFETY: registers only.
    unsafe { I::byte_floats(words[i / 4], i % 4, signed) }
}

/// 8 numbers of 6 bits, of which the first four are the lower bits of `first`; of the others 4 bits are the lower ones of `lower`, and 2 the
/// upper ones of `first`.
#[inline(always)]
unsafe fn six_bits<I: Integers>(first: I::Bytes, lower: I::Bytes) -> [I::Bytes; 2] {
    // SAFETY: registers only.
    unsafe {
        let upper = I::mask(I::move_bits(first, [2; 2]), 0x30);
        [I::mask(first, 0x3f), I::either(I::mask(lower, 0x0f), upper)]
    }
}

/// Scales and minima of Q4_K and Q5_K: two f16 numbers, then 12 bytes of 6 bits each.
#[inline(always)]
unsafe fn scales_of_six_bits<I: Integers>(blocks: &Blocks8) -> Scales<I::Floats> {
    // SAFETY: the caller's blocks begin with 16 such bytes.
    unsafe {
        let [d, scales, minima, others] = I::four_words(*blocks);
        let scales = six_bits::<I>(scales, others);
        let minima = six_bits::<I>(minima, I::move_bits(others, [4; 2]));
        let [d, dmin] = I::two_f16(d);
        let dmin = I::times(dmin, I::splat(-1.0));
        let mut all = alike([d; 2]);
        for i in 0..MAX_GROUPS / 2 {
            all.scales[i] = I::times(d, byte::<I, 2>(&scales, i, false));
            all.minima[i] = I::times(dmin, byte::<I, 2>(&minima, i, false));
        }
        all
    }
}

/// Scales of 16 halves of groups: an f16 number times signed bytes.
#[inline(always)]
unsafe fn scales_of_bytes<I: Integers>(d: I::Floats, bytes: [I::Bytes; 4]) -> Scales<I::Floats> {
    let mut all = alike([d; 2]);
    for i in 0..MAX_GROUPS {
        // SAFETY: registers only.
        all.scales[i] = unsafe { I::times(d, byte::<I, 4>(&bytes, i, true)) };
    }
    all
}

/// The place `bytes` after the beginning of each block.
#[inline(always)]
fn after(blocks: &Blocks8, bytes: usize) -> Blocks8 {
    let mut places = *blocks;
    for place in &mut places {
        *place = place.wrapping_add(bytes);
    }
    places
}

codes!(
    Q2K, HALVES: bool = true;
    (block, group) => bits::<I>(block.add(16 + group / 4 * 32), 2 * (group as i32 % 4), 3),
    blocks => {
        let words = I::four_words(*blocks);
        let (mut scales, mut minima) = (words, words);
        for (scales, minima) in scales.iter_mut().zip(&mut minima) {
            (*scales, *minima) = (I::mask(*scales, 15), I::mask(I::move_bits(*minima, [4; 2]), 15));
        }
        let d = I::eight_f16(after(blocks, 80));
        let dmin = I::times(I::eight_f16(after(blocks, 82)), I::splat(-1.0));
        let mut all = scales_of_bytes::<I>(d, scales);
        all.minima = scales_of_bytes::<I>(dmin, minima).scales;
        all
    }
);
codes!(
    Q3K, HALVES: bool = true, ZERO: Option<u8> = Some(4);
    (block, group) => {
        let lower = bits::<I>(block.add(32 + group / 4 * 32), 2 * (group as i32 % 4), 3);
        I::either(lower, bits::<I>(block, group as i32 - 2, 4))
    },
    blocks => {
        // 4 bits of each in 8 bytes, the low halves first, then the upper 2 bits in 4 bytes. What comes before them fills up a word.
        let [_, a, b, upper] = I::four_words(after(blocks, 92));
        let mut scales = [I::zero(); 4];
        for (i, (scales, lower)) in scales.iter_mut().zip([a, b, a, b]).enumerate() {
            let lower = I::mask(I::move_bits(lower, [if i < 2 { 0 } else { 4 }; 2]), 15);
            let upper = I::mask(I::move_bits(upper, [2 * i as i32 - 4; 2]), 0x30);
            *scales = I::less(I::either(lower, upper), 32);
        }
        scales_of_bytes::<I>(I::eight_f16(after(blocks, 108)), scales)
    }
);
codes!(
    Q4K;
    (block, group) => bits::<I>(block.add(16 + group / 2 * 32), 4 * (group as i32 % 2), 15),
    blocks => scales_of_six_bits::<I>(blocks)
);
codes!(
    Q5K;
    (block, group) => {
        let lower = bits::<I>(block.add(48 + group / 2 * 32), 4 * (group as i32 % 2), 15);
        I::either(lower, bits::<I>(block.add(16), group as i32 - 4, 16))
    },
    blocks => scales_of_six_bits::<I>(blocks)
);
codes!(
    Q6K, HALVES: bool = true, ZERO: Option<u8> = Some(32);
    (block, group) => {
        let (half, run) = (group / 4, group % 4);
        let lower = bits::<I>(block.add(64 * half + 32 * (run % 2)), 4 * (run as i32 / 2), 15);
        I::either(lower, bits::<I>(block.add(128 + 32 * half), 2 * run as i32 - 4, 48))
    },
    blocks => scales_of_bytes::<I>(I::eight_f16(after(blocks, 208)), I::four_words(after(blocks, 192)))
);
