//! Values as 8-bit floats with one factor for a tensor: E4M3 and E5M2 of Micikevicius et al. 2022 ("FP8 formats for deep
//! learning"), scaled just in time.
//!
//! The factor is the smallest power of two that lets the largest magnitude fit. Where it would be that magnitude over the
//! format's largest number, scaling would round as well, and a product would have to be multiplied by two factors
//! afterwards; of the format's range, 2^18 for E4M3, a bit at most is lost.

use super::int8::largest_of_all;
use super::simd::per_isa;
use super::split::{Shared, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, PIECE};
use crate::dtype::FP8_FACTOR_BYTES;

/// A format of 8-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct Format {
    /// Bits of a mantissa.
    mantissa: u32,
    /// The exponent that is stored as 0 in a number of exponent 0.
    bias: u32,
    /// The exponent of the largest number, which is 1.75 times this power of two.
    largest: i32,
}

/// No infinity, and one NaN of either sign.
pub(in crate::cpu) const E4M3: Format = Format { mantissa: 3, bias: 7, largest: 8 };
pub(in crate::cpu) const E5M2: Format = Format { mantissa: 2, bias: 15, largest: 15 };

/// The mantissa bits of 1.75.
const LARGEST_MANTISSA: u32 = 0x60_0000;
/// Exponents of scales: their reciprocals are normal numbers, and so is the smallest code times one of them in bf16.
const SCALES: std::ops::RangeInclusive<i32> = -119..=100;

impl Format {
    /// 2 to the power of `exponent`, a normal number.
    fn power(exponent: i32) -> f32 {
        f32::from_bits(((127 + exponent) as u32) << 23)
    }

    /// The exponent of the largest power of two that `most` can be multiplied by.
    fn scale_exponent(self, most: f32) -> i32 {
        if most == 0.0 {
            return 0;
        }
        let bits = most.to_bits();
        let (exponent, mantissa) = ((bits >> 23) as i32 - 127, bits & 0x7f_ffff);
        let fits = self.largest - exponent - i32::from(mantissa > LARGEST_MANTISSA);
        fits.clamp(*SCALES.start(), *SCALES.end())
    }
}

/// out = the factor, in the machine's order of bytes, and the codes of x.
pub(in crate::cpu) fn quantize(exec: Exec<'_>, x: Floats<'_>, format: Format, out: &mut [u8]) {
    let Some((factor, codes)) = out.split_first_chunk_mut::<{ FP8_FACTOR_BYTES as usize }>() else { return };
    let most = largest_of_all(exec, x);
    // Where one number is not finite, all numbers are to be none: no error is hidden.
    let exponent = if most.is_finite() { format.scale_exponent(most) } else { 0 };
    *factor = if most.is_finite() { Format::power(-exponent) } else { f32::NAN }.to_ne_bytes();
    let scale = Format::power(exponent);
    let tasks = codes.len().div_ceil(PIECE);
    for_each_part(exec, tasks, Shared::new(codes, PIECE), |task, codes, _| {
        let first = task * PIECE;
        let mut tile = Tile::new();
        for part in tiles(codes.len()) {
            let x = x.load(exec.simd, first + part.start..first + part.end, &mut tile);
            match format {
                E4M3 => encode_e4m3(exec.simd, x, scale, &mut codes[part]),
                _ => encode_e5m2(exec.simd, x, scale, &mut codes[part]),
            }
        }
    });
}

per_isa! {
    fn encode_e4m3(x: &[f32], scale: f32, codes: &mut [u8]) = e4m3_body
}

per_isa! {
    fn encode_e5m2(x: &[f32], scale: f32, codes: &mut [u8]) = e5m2_body
}

#[inline(always)]
fn e4m3_body<const FMA: bool>(x: &[f32], scale: f32, codes: &mut [u8]) {
    codes.iter_mut().zip(x).for_each(|(code, x)| *code = encode(E4M3, x * scale));
}

#[inline(always)]
fn e5m2_body<const FMA: bool>(x: &[f32], scale: f32, codes: &mut [u8]) {
    codes.iter_mut().zip(x).for_each(|(code, x)| *code = encode(E5M2, x * scale));
}

/// The code nearest to x, ties to even; of what is too large, the largest number's.
#[inline(always)]
fn encode(format: Format, x: f32) -> u8 {
    let cut = 23 - format.mantissa;
    let largest = ((127 + format.largest) as u32) << 23 | LARGEST_MANTISSA;
    let smallest_normal = (127 + 1 - format.bias) << 23;
    let bits = x.to_bits();
    let size = (bits & 0x7fff_ffff).min(largest);
    // Normal numbers: the mantissa is cut off and the exponent's bias changed.
    let rounded = size + ((1 << (cut - 1)) - 1) + (size >> cut & 1);
    let normal = (rounded.wrapping_sub((127 - format.bias) << 23)) >> cut;
    // Subnormal ones are multiples of a power of two: added to 2^23 times that, their count is left in the low bits.
    let unit = (127 + 1 - format.bias + cut) << 23;
    let subnormal = (f32::from_bits(size) + f32::from_bits(unit)).to_bits() - unit;
    let code = if size < smallest_normal { subnormal } else { normal };
    (code | bits >> 24 & 0x80) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of a format from 0 on, by the definition, in rising order of codes and values.
    fn numbers(format: Format) -> Vec<f64> {
        let Format { mantissa, bias, largest } = format;
        let number = |code: u32| {
            let (exponent, fraction) = ((code >> mantissa) as i32, f64::from(code & ((1 << mantissa) - 1)));
            let fraction = fraction / f64::from(1 << mantissa);
            match exponent {
                0 => fraction * 2f64.powi(1 - bias as i32),
                _ => (1.0 + fraction) * 2f64.powi(exponent - bias as i32),
            }
        };
        (0..128).map(number).take_while(|x| *x <= 1.75 * 2f64.powi(largest)).collect()
    }

    #[test]
    fn codes_are_the_nearest() {
        for (format, count, most) in [(E4M3, 127, 448.0), (E5M2, 124, 57344.0)] {
            let numbers = numbers(format);
            assert_eq!((numbers.len(), numbers[count - 1]), (count, most));
            let check = |x: f64, code: usize| {
                assert_eq!(encode(format, x as f32), code as u8, "{format:?} {x}");
                assert_eq!(encode(format, -x as f32), code as u8 | 0x80, "{format:?} -{x}");
            };
            for (code, pair) in numbers.windows(2).enumerate() {
                // Both neighbours and the middle are f32 numbers, and so are those a little beside it.
                let middle = (pair[0] + pair[1]) / 2.0;
                check(pair[0], code);
                check(middle * (1.0 - 1e-6), code);
                check(middle, code + code % 2);
                check(middle * (1.0 + 1e-6), code + 1);
            }
            for x in [most, 1.01 * most, 1e30, f64::from(f32::MAX), f64::INFINITY] {
                check(x, count - 1);
            }
            check(f64::from(f32::MIN_POSITIVE) / 4.0, 0);
        }
    }

    #[test]
    fn scales_are_the_largest_that_fit() {
        for (format, most) in [(E4M3, 448.0), (E5M2, 57344.0)] {
            for x in [1.0f32, 1.75, 1.750001, 3e-5, 448.0, 449.0, 57344.0, 7e8, 1.9e30, 1e-24] {
                let scale = Format::power(format.scale_exponent(x));
                assert!(x * scale <= most && 2.0 * x * scale > most, "{format:?} {x}: {scale}");
            }
            assert_eq!(format.scale_exponent(0.0), 0);
            for x in [f32::MAX, f32::MIN_POSITIVE, 1e-45] {
                let exponent = format.scale_exponent(x);
                assert!(Format::power(exponent).is_normal() && Format::power(-exponent).is_normal());
            }
        }
    }
}
