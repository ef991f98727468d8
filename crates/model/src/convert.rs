//! Stored numbers to computed ones: every stored type (plain or in blocks) to f32, bf16 or f16.
//!
//! Works on whole runs of elements through a small buffer of f32 on the stack, so that each pair of types needs
//! a decoder and an encoder and no loop of its own. Blocks are decoded by the device. Rounding is to
//! nearest, ties to even; what lies outside f16's range becomes infinite.

use half::f16;
use half::slice::HalfFloatSliceExt;
use plimsoll_device::DType;
use plimsoll_device::cpu::{Isa, dequantize};

/// Elements converted at a time: whole blocks of every type, few enough to stay in the first cache.
const CHUNK: usize = 256;

/// Types or lengths that do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConversionError {
    /// There is no such conversion.
    #[error("{from} cannot be converted to {to}")]
    Unsupported {
        /// The stored type.
        from: DType,
        /// The type asked for.
        to: DType,
    },
    /// A value that blocks have no code for: it would become some number.
    #[error(
        "element {element} of them is {value}, which {to} cannot hold; the weights are damaged or their training diverged"
    )]
    NotFinite {
        /// The type asked for.
        to: DType,
        /// Which of the values that were converted together, from 0.
        element: usize,
        /// What it is.
        value: String,
    },
    /// The number of elements differs.
    #[error("{source_bytes} bytes of {from} do not hold the elements of {out_bytes} bytes of {to}")]
    Length {
        /// The stored type.
        from: DType,
        /// Bytes that hold it.
        source_bytes: usize,
        /// The type asked for.
        to: DType,
        /// Bytes to fill.
        out_bytes: usize,
    },
}

/// Converts the elements in `source` to `to` in `out`. Both are in the machine's order of bytes where they are
/// plain numbers in `out`, and little-endian in `source`, as files are. Blocks can be decoded, or copied as they are.
pub fn convert(from: DType, source: &[u8], to: DType, out: &mut [u8]) -> Result<(), ConversionError> {
    let copied = from == to && (from.is_block() || from.is_float() && cfg!(target_endian = "little"));
    let encode = match encoder(to) {
        Some(encode) if from.is_weight() => Some(encode),
        None if copied => None,
        _ => return Err(ConversionError::Unsupported { from, to }),
    };
    let out_size = to.block_bytes() as usize;
    if copied && to.is_block() {
        if out.len() != source.len() {
            let (source_bytes, out_bytes) = (source.len(), out.len());
            return Err(ConversionError::Length { from, source_bytes, to, out_bytes });
        }
        out.copy_from_slice(source);
        return Ok(());
    }
    let elements = (out.len() / out_size) as u64;
    if !out.len().is_multiple_of(out_size) || from.bytes_for(elements) != Some(source.len() as u64) {
        return Err(ConversionError::Length { from, source_bytes: source.len(), to, out_bytes: out.len() });
    }
    let Some(encode) = encode.filter(|_| !copied) else {
        out.copy_from_slice(source);
        return Ok(());
    };
    let mut values = [0.0f32; CHUNK];
    if !from.has_rows() {
        return convert_runs(from, source, elements as usize, out, out_size, encode);
    }
    let source_chunk = CHUNK / from.block_elements() as usize * from.block_bytes() as usize;
    for (source, out) in source.chunks(source_chunk).zip(out.chunks_mut(CHUNK * out_size)) {
        let values = &mut values[..out.len() / out_size];
        decode(from, source, values);
        encode(values, out);
    }
    Ok(())
}

/// The same of blocks that share factors, a run of them at a time.
fn convert_runs(
    from: DType,
    source: &[u8],
    elements: usize,
    out: &mut [u8],
    out_size: usize,
    encode: Encoder,
) -> Result<(), ConversionError> {
    let run = from.run_elements() as usize;
    let run_bytes = from.bytes_for(run as u64).unwrap_or(0).max(1) as usize;
    let mut values = vec![0.0; run.min(elements)];
    for (source, out) in source.chunks(run_bytes).zip(out.chunks_mut(run * out_size)) {
        let values = &mut values[..out.len() / out_size];
        decode_blocks(from, source, values);
        for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK * out_size)) {
            encode(values, out);
        }
    }
    Ok(())
}

/// Writes f32 values as `to` (f32, bf16 or f16), in the machine's order of bytes.
pub fn encode(values: &[f32], to: DType, out: &mut [u8]) -> Result<(), ConversionError> {
    match encoder(to) {
        Some(encode) if to.bytes_for(values.len() as u64) == Some(out.len() as u64) => {
            for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK * to.block_bytes() as usize)) {
                encode(values, out);
            }
            Ok(())
        }
        Some(_) => Err(ConversionError::Length {
            from: DType::F32,
            source_bytes: values.len() * 4,
            to,
            out_bytes: out.len(),
        }),
        None => Err(ConversionError::Unsupported { from: DType::F32, to }),
    }
}

/// Refuses values that are not finite, for blocks of a type.
pub(crate) fn check_finite(values: &[f32], to: DType) -> Result<(), ConversionError> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(element) => {
            let value = values.get(element).map(f32::to_string).unwrap_or_default();
            Err(ConversionError::NotFinite { to, element, value })
        }
    }
}

type Encoder = fn(&[f32], &mut [u8]);

/// `source` holds exactly the elements of `values`, at most `CHUNK`.
fn decode(from: DType, source: &[u8], values: &mut [f32]) {
    match from {
        DType::F32 => decode_f32(source, values),
        DType::Bf16 => decode_bf16(source, values),
        DType::F16 => decode_f16(source, values),
        _ => decode_blocks(from, source, values),
    }
}

/// `encode(values, out)`: at most `CHUNK` values, `out` just large enough.
fn encoder(to: DType) -> Option<Encoder> {
    match to {
        DType::F32 => Some(encode_f32),
        DType::Bf16 => Some(encode_bf16),
        DType::F16 => Some(encode_f16),
        _ => None,
    }
}

fn decode_f32(source: &[u8], values: &mut [f32]) {
    for (bytes, value) in source.as_chunks::<4>().0.iter().zip(values) {
        *value = f32::from_le_bytes(*bytes);
    }
}

fn decode_bf16(source: &[u8], values: &mut [f32]) {
    for (bytes, value) in source.as_chunks::<2>().0.iter().zip(values) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

fn decode_f16(source: &[u8], values: &mut [f32]) {
    let mut halves = [f16::ZERO; CHUNK];
    for (bytes, half) in source.as_chunks::<2>().0.iter().zip(&mut halves) {
        *half = f16::from_le_bytes(*bytes);
    }
    halves[..values.len()].convert_to_f32_slice(values);
}

/// Blocks, by the very code that computes with them.
fn decode_blocks(from: DType, source: &[u8], values: &mut [f32]) {
    let done = dequantize(Isa::detect(), from, source, values);
    debug_assert!(done.is_some(), "a chunk is whole blocks");
}

fn encode_f32(values: &[f32], out: &mut [u8]) {
    for (value, bytes) in values.iter().zip(out.as_chunks_mut::<4>().0) {
        *bytes = value.to_ne_bytes();
    }
}

fn encode_bf16(values: &[f32], out: &mut [u8]) {
    for (value, bytes) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // A NaN must not round to infinity: it is cut off and made quiet instead.
        let bits = if value.is_nan() { bits | 0x0040_0000 } else { rounded };
        *bytes = ((bits >> 16) as u16).to_ne_bytes();
    }
}

fn encode_f16(values: &[f32], out: &mut [u8]) {
    let mut halves = [f16::ZERO; CHUNK];
    let halves = &mut halves[..values.len()];
    halves.convert_from_f32_slice(values);
    for (half, bytes) in halves.iter().zip(out.as_chunks_mut::<2>().0) {
        *bytes = half.to_ne_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    }

    /// Every bf16 and f16 bit pattern decodes to the same number as by the reference crate, and comes back.
    #[test]
    fn sixteen_bit_types_are_exact_both_ways() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for (dtype, reference) in [
            (DType::Bf16, (|b| half::bf16::from_bits(b).to_f32()) as fn(u16) -> f32),
            (DType::F16, |b| f16::from_bits(b).to_f32()),
        ] {
            let mut wide = vec![0; all.len() * 2];
            convert(dtype, &all, DType::F32, &mut wide).unwrap();
            let values = f32s(&wide);
            for (bits, value) in (0..=u16::MAX).zip(&values) {
                assert!(value.to_bits() == reference(bits).to_bits() || value.is_nan(), "{dtype} {bits:#x}");
            }
            let mut back = vec![0; all.len()];
            encode(&values, dtype, &mut back).unwrap();
            for ((before, after), value) in all.chunks(2).zip(back.chunks(2)).zip(&values) {
                assert!(before == after || value.is_nan(), "{dtype} {before:?} {after:?}");
            }
        }
    }

    #[test]
    fn bf16_rounds_to_nearest_even_and_keeps_nan() {
        let check = |bits: u32, expected: u16| {
            let mut out = [0; 2];
            encode(&[f32::from_bits(bits)], DType::Bf16, &mut out).unwrap();
            assert_eq!(u16::from_ne_bytes(out), expected, "{bits:#x}");
        };
        check(0x3f80_0000, 0x3f80);
        check(0x3f80_8000, 0x3f80);
        check(0x3f81_8000, 0x3f82);
        check(0x3f80_8001, 0x3f81);
        check(0x7f7f_ffff, 0x7f80);
        check(0x7f80_0000, 0x7f80);
        check(0x7f80_0001, 0x7fc0);
        check(0xffff_ffff, 0xffff);
        check(0x0000_8001, 0x0001);
    }

    /// A block written by hand, to f32, and to bf16 through f32.
    #[test]
    fn blocks_follow_the_format() {
        let check = |dtype, block: &[u8], value_at: fn(usize) -> f32| {
            // 9 blocks: more than one chunk, with a rest.
            let source = block.repeat(9);
            let mut out = vec![0; 9 * 32 * 4];
            convert(dtype, &source, DType::F32, &mut out).unwrap();
            let expected: Vec<f32> = (0..9 * 32).map(|i| value_at(i % 32)).collect();
            assert_eq!(f32s(&out), expected, "{dtype}");
            let mut narrow = vec![0; 9 * 32 * 2];
            convert(dtype, &source, DType::Bf16, &mut narrow).unwrap();
            let mut twice = vec![0; 9 * 32 * 2];
            convert(DType::F32, &out, DType::Bf16, &mut twice).unwrap();
            assert_eq!(narrow, twice, "{dtype}");
        };
        let half = f16::from_f32(0.5).to_le_bytes();
        let minus_two = f16::from_f32(-2.0).to_le_bytes();
        let nibbles: Vec<u8> = (0..16).map(|j| j | (15 - j) << 4).collect();
        check(DType::Q4_0, &[&half[..], &nibbles].concat(), |i| {
            ((if i < 16 { i } else { 31 - i }) as f32 - 8.0) * 0.5
        });
        check(DType::Q4_1, &[&half[..], &minus_two, &nibbles].concat(), |i| {
            (if i < 16 { i } else { 31 - i }) as f32 * 0.5 - 2.0
        });
        let codes: Vec<u8> = (0..32i16).map(|j| (j * 8 - 127) as i8 as u8).collect();
        check(DType::Q8_0, &[&half[..], &codes].concat(), |i| (i as f32 * 8.0 - 127.0) * 0.5);
    }

    #[test]
    fn blocks_of_every_type_are_decoded_or_kept() {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_block()) {
            // More than one chunk, with a rest.
            let elements = 3 * 256;
            let source: Vec<u8> =
                (0..dtype.bytes_for(elements).unwrap()).map(|i| (i * 37 % 61) as u8).collect();
            let mut kept = vec![0; source.len()];
            convert(dtype, &source, dtype, &mut kept).unwrap();
            assert_eq!(kept, source, "{dtype}");
            let mut out = vec![0; elements as usize * 4];
            convert(dtype, &source, DType::F32, &mut out).unwrap();
            let mut expected = vec![0.0; elements as usize];
            dequantize(Isa::Portable, dtype, &source, &mut expected).unwrap();
            assert_eq!(f32s(&out), expected, "{dtype}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let check = |from, source: usize, to, out: usize| {
            assert!(
                convert(from, &vec![0; source], to, &mut vec![0; out]).is_err(),
                "{from} {source} {to} {out}"
            );
        };
        check(DType::F32, 8, DType::F32, 4);
        check(DType::F32, 4, DType::F32, 3);
        check(DType::Q8_0, 34, DType::F32, 124);
        check(DType::Q8_0, 33, DType::F32, 128);
        check(DType::F32, 128, DType::Q8_0, 34);
        check(DType::Q4K, 144, DType::Q5K, 176);
        check(DType::Q4K, 144, DType::Q4K, 143);
        check(DType::Q4K, 288, DType::Q4K, 144);
        check(DType::U32, 4, DType::F32, 4);
    }
}
