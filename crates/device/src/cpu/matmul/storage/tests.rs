//! Every block type against its definition, written element by element in f64.

use half::f16;
use proptest::prelude::*;

use super::element;
use crate::DType;
use crate::cpu::Isa;
use crate::cpu::matmul::dequantize;
use crate::cpu::quantize::{FP4_VALUES, NF4_VALUES};

/// Where the f16 numbers of a block are; the other bytes may be anything.
fn half_places(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::Iq4Nl => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        _ => &[],
    }
}

/// A block whose values are around one: random bits but for its own scales.
pub(in super::super) fn random_block(dtype: DType, mut bits: impl FnMut() -> u8) -> Vec<u8> {
    let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| bits()).collect();
    let mut small = || f32::from(bits().cast_signed()) / 2048.0;
    for at in half_places(dtype) {
        block[*at..at + 2].copy_from_slice(&f16::from_f32(small()).to_le_bytes());
    }
    match dtype {
        DType::Q8K | DType::Int8 | DType::Nf4F32 | DType::Fp4F32 => {
            block[..4].copy_from_slice(&small().to_le_bytes());
        }
        DType::Mxfp4 => block[0] = 120 + block[0] % 8,
        _ => {}
    }
    block
}

/// Blocks as [`random_block`] makes them, with factors where they share some: a tensor.
pub(in super::super) fn random_blocks(dtype: DType, count: usize, mut bits: impl FnMut() -> u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    for block in 0..count {
        if !dtype.has_rows() && block % 256 == 0 {
            for _ in 0..2 {
                bytes.extend((f32::from(bits().cast_signed()) / 64.0).to_le_bytes());
            }
        }
        bytes.extend(random_block(dtype, &mut bits));
    }
    bytes
}

/// Element `i` of a block.
fn defined(dtype: DType, block: &[u8], i: usize) -> f64 {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f64();
    let bits = |at: usize, shift: usize, count: u32| u32::from(block[at]) >> shift & ((1 << count) - 1);
    let nibble = |at: usize, high: bool| bits(at, if high { 4 } else { 0 }, 4);
    let nibble_of_32 = |codes: usize| nibble(codes + i % 16, i >= 16);
    let fifth_of_32 = |at: usize| bits(at + i / 8, i % 8, 1) << 4;
    let signed = |at: usize| f64::from(block[at].cast_signed());
    // Scale (`which` 0) or minimum (1) of group j of Q4_K and Q5_K, from the 12 bytes at 4.
    let six_bits = |which: usize, j: usize| match j {
        0..4 => f64::from(bits(4 + 4 * which + j, 0, 6)),
        _ => f64::from(bits(4 + 4 + j, 4 * which, 4) | bits(4 + 4 * which + j - 4, 6, 2) << 4),
    };
    match dtype {
        DType::Q8_0 => half(0) * signed(2 + i),
        DType::Q4_0 => half(0) * (f64::from(nibble_of_32(2)) - 8.0),
        DType::Q4_1 => half(0) * f64::from(nibble_of_32(4)) + half(2),
        DType::Q5_0 => half(0) * (f64::from(nibble_of_32(6) | fifth_of_32(2)) - 16.0),
        DType::Q5_1 => half(0) * f64::from(nibble_of_32(8) | fifth_of_32(4)) + half(2),
        DType::Iq4Nl => {
            let table = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
            half(0) * f64::from(table[nibble_of_32(2) as usize])
        }
        DType::Mxfp4 => {
            let code = nibble_of_32(1);
            let (exponent, mantissa) = (code >> 1 & 3, f64::from(code & 1));
            let size = match exponent {
                0 => mantissa / 2.0,
                _ => (1.0 + mantissa / 2.0) * 2f64.powi(exponent as i32 - 1),
            };
            (if code & 8 == 0 { size } else { -size }) * 2f64.powi(i32::from(block[0]) - 127)
        }
        DType::Q2K => {
            let code = bits(16 + i / 128 * 32 + i % 32, i % 128 / 32 * 2, 2);
            let (scale, minimum) = (f64::from(nibble(i / 16, false)), f64::from(nibble(i / 16, true)));
            half(80) * scale * f64::from(code) - half(82) * minimum
        }
        DType::Q3K => {
            let code = bits(32 + i / 128 * 32 + i % 32, i % 128 / 32 * 2, 2) | bits(i % 32, i / 32, 1) << 2;
            let j = i / 16;
            let scale = nibble(96 + j % 8, j >= 8) | bits(104 + j % 4, j / 4 * 2, 2) << 4;
            half(108) * (f64::from(scale) - 32.0) * (f64::from(code) - 4.0)
        }
        DType::Q4K => {
            let code = f64::from(nibble(16 + i / 64 * 32 + i % 32, i % 64 >= 32));
            half(0) * six_bits(0, i / 32) * code - half(2) * six_bits(1, i / 32)
        }
        DType::Q5K => {
            let lower = nibble(48 + i / 64 * 32 + i % 32, i % 64 >= 32);
            let code = f64::from(lower | bits(16 + i % 32, i / 32, 1) << 4);
            half(0) * six_bits(0, i / 32) * code - half(2) * six_bits(1, i / 32)
        }
        DType::Q6K => {
            let lower = nibble(i / 128 * 64 + i % 64, i % 128 >= 64);
            let code = lower | bits(128 + i / 128 * 32 + i % 32, i % 128 / 32 * 2, 2) << 4;
            half(208) * signed(192 + i / 16) * (f64::from(code) - 32.0)
        }
        DType::Q8K => {
            let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            f64::from(scale) * signed(4 + i)
        }
        DType::Int8 => {
            let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            f64::from(scale) * signed(4 + i)
        }
        DType::Nf4F32 | DType::Fp4F32 => {
            let magnitude = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            let values = if dtype == DType::Nf4F32 { NF4_VALUES } else { FP4_VALUES };
            f64::from(magnitude) * f64::from(values[nibble(4 + i % 32, i >= 32) as usize])
        }
        DType::Nf4 | DType::Fp4 => unreachable!("blocks that share factors"),
        DType::F64
        | DType::F32
        | DType::Bf16
        | DType::F16
        | DType::U32
        | DType::I8
        | DType::U8
        | DType::F8E4m3
        | DType::F8E5m2 => {
            unreachable!("no block type")
        }
    }
}

/// Types whose blocks are read by themselves; the others are tested with what quantises them.
fn separate_blocks() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| dtype.is_block() && dtype.has_rows())
}

/// Blocks in a row that begin at an odd address, on every instruction set and element by element.
fn check(dtype: DType, blocks: &[Vec<u8>]) {
    let bytes: Vec<u8> = std::iter::once(0).chain(blocks.iter().flatten().copied()).collect();
    let each = dtype.block_elements() as usize;
    let expected: Vec<f32> =
        blocks.iter().flat_map(|block| (0..each).map(|i| defined(dtype, block, i) as f32)).collect();
    // Where a scale is infinite, a value is some number that is not finite.
    let same = |a: f32, b: f32| a == b || !a.is_finite() && !b.is_finite();
    for isa in Isa::available() {
        let mut values = vec![f32::NAN; expected.len()];
        dequantize(isa, dtype, &bytes[1..], &mut values).unwrap();
        for (i, (value, expected)) in values.iter().zip(&expected).enumerate() {
            assert!(same(*value, *expected), "{isa} {dtype} element {i}: {value} is not {expected}");
        }
    }
    for (i, expected) in expected.iter().enumerate() {
        // SAFETY: the blocks lie in `bytes`.
        let value = unsafe { element(dtype, bytes[1..].as_ptr(), i) };
        assert!(same(value, *expected), "{dtype} element {i} alone: {value} is not {expected}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn blocks_follow_the_format(
        dtype in prop::sample::select(separate_blocks().collect::<Vec<_>>()),
        seed in any::<u64>(),
        count in 1..4usize,
        wild in any::<bool>(),
    ) {
        let mut state = seed;
        let mut bits = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let blocks: Vec<Vec<u8>> = (0..count)
            .map(|_| match wild {
                // All bits random: scales may be infinite, NaN or subnormal.
                true => (0..dtype.block_bytes()).map(|_| bits()).collect(),
                false => random_block(dtype, &mut bits),
            })
            .collect();
        check(dtype, &blocks);
    }
}

#[test]
fn extreme_scales() {
    for dtype in separate_blocks() {
        for half in [0x0001, 0x83ff, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x0000, 0x8000_u16] {
            for fill in [0, 0x55, 0xff] {
                let mut block = vec![fill; dtype.block_bytes() as usize];
                for at in half_places(dtype) {
                    block[*at..at + 2].copy_from_slice(&half.to_le_bytes());
                }
                check(dtype, &[block]);
            }
        }
    }
    for exponent in 0..=255 {
        check(DType::Mxfp4, &[std::iter::once(exponent).chain((0..16).map(|i| i * 17)).collect()]);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |dtype, stored: usize, values: usize| {
        let mut out = vec![1.0; values];
        assert!(dequantize(Isa::detect(), dtype, &vec![0; stored], &mut out).is_none(), "{dtype}");
        assert!(out.iter().all(|x| *x == 1.0));
    };
    refused(DType::Q4K, 143, 256);
    refused(DType::Q4K, 144, 255);
    refused(DType::Q8_0, 34, 31);
    refused(DType::U32, 4, 1);
    refused(DType::I8, 1, 1);
    refused(DType::U8, 1, 1);
    refused(DType::F8E4m3, 5, 1);
    refused(DType::F32, 8, 1);
}
