//! Codes of 4 and 8 bits with a factor for each block of a matrix: 8-bit floats as DeepSeek, Qwen and Meta publish them, and what
//! compressed-tensors and NVIDIA's Model Optimizer write.
//!
//! - `weight [out, in]` in F8_E4M3, F8_E5M2 or I8, beside it `weight_scale_inv` or `weight_scale`: one factor, one for each row, for each
//!   group of a row, or for each block of rows and columns. A value is its code times its factor; what `_inv` says is that the
//!   factor is the inverse of the one that quantising multiplied by. Factors in F8_E8M0 or U8 are powers of two (OCP MX 1.0).
//! - `weight_packed` in U8 (of Model Optimizer `weight`), two floats E2M1 in a byte, the first in its lower half; a factor for each 16
//!   inputs in F8_E4M3, over `weight_global_scale` or times `weight_scale_2` (NVFP4), or a power of two for each 32 (MXFP4).
//! - `weight_packed [out, in * bits / 32]` in I32, words along the inputs, codes of 4 or 8 bits from the lowest bit on, 2^(bits - 1) more
//!   than the integers they stand for; `weight_shape`; `weight_zero_point [out * bits / 32, groups]` alike, along the outputs; `weight_g_idx
//!   [in]`, each input's group.

use std::ops::Range;

use plimsoll_memory::FileMap;

use super::{INT8_BLOCK, Span, arrange_int8, word};
use crate::safetensors::StoredDType;

/// E2M1 by its four bits (OCP MX 1.0).
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of an 8-bit float E4M3 without infinities (Micikevicius et al. 2022).
pub(super) fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * power_of_two(127 - 9),
        _ => (8.0 + mantissa) * power_of_two(127 - 10 + exponent),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The value of an 8-bit float E5M2, the upper half of an f16.
pub(super) fn e5m2(code: u8) -> f32 {
    half::f16::from_bits(u16::from(code) << 8).to_f32()
}

/// The value of an 8-bit exponent: 2^(code - 127), NaN for 255.
pub(super) fn power_of_two(code: u8) -> f32 {
    match code {
        0 => f32::MIN_POSITIVE / 2.0,
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// What codes stand for, and how they lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::source) enum Code {
    E4m3,
    E5m2,
    Int8,
    /// Two floats in a byte.
    E2m1,
    /// Integers of so many bits in 32-bit words.
    Words(usize),
}

impl Code {
    /// The 8-bit type's, if it is one that codes have.
    pub fn of(dtype: StoredDType) -> Option<Code> {
        match dtype {
            StoredDType::F8_E4M3 => Some(Code::E4m3),
            StoredDType::F8_E5M2 => Some(Code::E5m2),
            StoredDType::I8 => Some(Code::Int8),
            _ => None,
        }
    }
}

/// What is taken from integers before they are multiplied.
#[derive(Clone, Debug)]
pub(in crate::source) enum Zeros {
    /// Nothing.
    None,
    /// A signed byte for each factor.
    Bytes(Span),
    /// A code for each factor, in words along the outputs.
    Words(Span),
}

/// A factor of the whole matrix beside those of its blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::source) enum Global {
    /// None.
    One,
    /// Blocks' factors are multiplied by it.
    Times(f32),
    /// Blocks' factors are divided by it.
    Over(f32),
}

/// Where a factor reaches.
#[derive(Clone, Debug)]
pub(in crate::source) struct Blocks {
    /// Rows of a block.
    pub rows: usize,
    /// Columns of a block.
    pub columns: usize,
    /// Blocks beside each other.
    pub across: usize,
    /// Each column's block, where columns of a block do not lie beside each other.
    pub index: Option<Span>,
}

/// A matrix in codes with factors.
#[derive(Clone, Debug)]
pub(in crate::source) struct Scaled {
    pub codes: Span,
    pub code: Code,
    pub scales: Span,
    pub blocks: Blocks,
    pub zeros: Zeros,
    pub global: Global,
}

impl Scaled {
    /// Whether blocks of `DType::Int8` hold its values without loss.
    pub fn is_int8(&self, columns: usize) -> bool {
        let Blocks { columns: block, index, .. } = &self.blocks;
        let even = block.is_multiple_of(INT8_BLOCK.0) || *block >= columns;
        let plain = matches!(self.zeros, Zeros::None) && self.global == Global::One && index.is_none();
        self.code == Code::Int8 && plain && even && columns.is_multiple_of(INT8_BLOCK.0)
    }

    /// Writes the whole matrix in blocks of `DType::Int8`, where it [is](Scaled::is_int8) of that kind; `None` where `out` is not just
    /// large enough.
    pub fn keep_int8(&self, files: &[FileMap], columns: usize, out: &mut [u8]) -> Option<()> {
        if !self.is_int8(columns) {
            return None;
        }
        let scales = self.scales.of(files);
        let scale = |first: usize| {
            let block = first % columns / self.blocks.columns.max(1);
            self.scales.float(scales, self.place(first / columns, block))
        };
        arrange_int8(self.codes.of(files), scale, out)
    }

    /// All of its tensors.
    pub fn spans(&self) -> impl Iterator<Item = &Span> {
        let zeros = match &self.zeros {
            Zeros::None => None,
            Zeros::Bytes(span) | Zeros::Words(span) => Some(span),
        };
        [&self.codes, &self.scales].into_iter().chain(zeros).chain(&self.blocks.index)
    }

    /// The values of `rows`, which exist, of so many columns; `out` has room for just them.
    pub fn read_rows(&self, files: &[FileMap], columns: usize, rows: Range<usize>, out: &mut [f32]) {
        let table = match self.code {
            Code::E4m3 => std::array::from_fn(|code| e4m3(code as u8)),
            Code::E5m2 => std::array::from_fn(|code| e5m2(code as u8)),
            _ => std::array::from_fn(|code| f32::from((code as u8).cast_signed())),
        };
        let index = self.blocks.index.as_ref().map(|span| span.of(files));
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.max(1))) {
            self.read_codes(files, &table, row, out);
            let factors = self.factors(files, row);
            let apply = |x: &mut f32, block: usize| {
                let (zero, factor) = factors.get(block).copied().unwrap_or((0.0, f32::NAN));
                *x = (*x - zero) * factor;
            };
            match index {
                Some(index) => {
                    out.iter_mut().enumerate().for_each(|(i, x)| apply(x, word(index, i) as usize));
                }
                None => {
                    let runs = out.chunks_mut(self.blocks.columns.max(1)).enumerate();
                    runs.for_each(|(block, run)| run.iter_mut().for_each(|x| apply(x, block)));
                }
            }
        }
    }

    /// The codes of a row, as numbers.
    fn read_codes(&self, files: &[FileMap], table: &[f32; 256], row: usize, out: &mut [f32]) {
        let (codes, columns) = (self.codes.of(files), out.len());
        match self.code {
            Code::E4m3 | Code::E5m2 | Code::Int8 => {
                let own = codes.get(row * columns..).unwrap_or_default();
                out.iter_mut().zip(own).for_each(|(x, code)| *x = table[usize::from(*code)]);
            }
            Code::E2m1 => {
                let own = codes.get(row * columns / 2..).unwrap_or_default();
                for (pair, code) in out.chunks_mut(2).zip(own) {
                    let both = [code & 15, code >> 4].map(|code| E2M1[usize::from(code)]);
                    pair.iter_mut().zip(both).for_each(|(x, value)| *x = value);
                }
            }
            Code::Words(bits) => {
                let per_word = 32 / bits;
                let first = row * columns.div_ceil(per_word);
                for (i, x) in out.iter_mut().enumerate() {
                    *x = code_in_word(word(codes, first + i / per_word), i % per_word, bits);
                }
            }
        }
    }

    /// The number of the factor of a row's block.
    fn place(&self, row: usize, block: usize) -> usize {
        row / self.blocks.rows.max(1) * self.blocks.across + block
    }

    /// Zero point and factor of each block of a row.
    fn factors(&self, files: &[FileMap], row: usize) -> Vec<(f32, f32)> {
        let scales = self.scales.of(files);
        let of = |block: usize| {
            let place = self.place(row, block);
            let own = self.scales.float(scales, place);
            let factor = match self.global {
                Global::One => own,
                Global::Times(global) => own * global,
                Global::Over(global) => own / global,
            };
            let zero = match (&self.zeros, self.code) {
                (Zeros::Bytes(span), _) => {
                    f32::from(span.of(files).get(place).copied().unwrap_or(0).cast_signed())
                }
                (Zeros::Words(span), Code::Words(bits)) => {
                    let (per_word, row) = (32 / bits, row / self.blocks.rows.max(1));
                    let at = row / per_word * self.blocks.across + block;
                    code_in_word(word(span.of(files), at), row % per_word, bits)
                }
                (Zeros::None | Zeros::Words(_), _) => 0.0,
            };
            (zero, factor)
        };
        (0..self.blocks.across).map(of).collect()
    }
}

/// The integer that a code in a word stands for.
fn code_in_word(word: u32, place: usize, bits: usize) -> f32 {
    let code = word >> (place * bits) & ((1 << bits) - 1);
    code as f32 - (1 << (bits - 1)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_have_the_values_of_their_formats() {
        for (code, value) in
            [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x08, 2f32.powi(-6)), (0x38, 1.0), (0x7e, 448.0)]
        {
            assert_eq!(e4m3(code), value, "{code:#x}");
            assert_eq!(e4m3(code | 0x80), -value, "{code:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        for (code, value) in [(0x01, 2f32.powi(-16)), (0x3c, 1.0), (0x7b, 57344.0), (0xbc, -1.0)] {
            assert_eq!(e5m2(code), value, "{code:#x}");
        }
        assert_eq!([0, 1, 127, 254].map(power_of_two), [-127, -126, 0, 127].map(|e| 2f32.powi(e)));
        assert!(power_of_two(255).is_nan());
    }
}
