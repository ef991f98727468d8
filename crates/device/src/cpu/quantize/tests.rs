//! Quantisers against their definitions and against the kernels that read what they write.

use proptest::prelude::*;

use super::four_bit::{BLOCK, FourBit, Magnitudes, arrange, code};
use super::*;
use crate::cpu::{Isa, dequantize};

fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (0..6).map(|_| uniform()).sum::<f32>() - 3.0).collect()
}

/// The root of the mean square of the error over that of the values.
fn relative_error(dtype: DType, values: &[f32], threads: usize) -> f64 {
    let mut stored = vec![0; dtype.bytes_for(values.len() as u64).unwrap() as usize];
    quantize(dtype, values, &mut stored, threads).unwrap();
    let mut back = vec![0.0; values.len()];
    dequantize(Isa::detect(), dtype, &stored, &mut back).unwrap();
    let square = |of: &mut dyn Iterator<Item = f32>| of.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let error = square(&mut values.iter().zip(&back).map(|(a, b)| a - b));
    (error / square(&mut values.iter().copied())).sqrt()
}

#[test]
fn errors_are_those_of_the_types() {
    let values = normal(256 * 64, 1);
    for (dtype, most) in [
        (DType::Q8_0, 0.006),
        (DType::Q4_0, 0.1),
        (DType::Q4_1, 0.09),
        (DType::Q5_0, 0.05),
        (DType::Q5_1, 0.045),
        (DType::Q4K, 0.075),
        (DType::Q6K, 0.02),
        (DType::Int8, 0.007),
        (DType::Mxfp4, 0.15),
        (DType::Nf4, 0.1),
        (DType::Nf4F32, 0.1),
        (DType::Fp4, 0.13),
        (DType::Fp4F32, 0.13),
    ] {
        let error = relative_error(dtype, &values, 1);
        assert!(error < most && error > most / 4.0, "{dtype}: {error}");
    }
}

#[test]
fn threads_change_nothing() {
    let values = normal(256 * 70, 2);
    for dtype in DType::ALL.into_iter().filter(|dtype| can_quantize(*dtype)) {
        let of = |threads| {
            let mut out = vec![0; dtype.bytes_for(values.len() as u64).unwrap() as usize];
            quantize(dtype, &values, &mut out, threads).unwrap();
            out
        };
        assert!(of(1) == of(3), "{dtype}");
    }
}

/// What a stored 4-bit tensor means, after the definition, element by element.
fn defined(kind: FourBit, codes: &[u8], magnitudes: &[f32], i: usize) -> f32 {
    let pair = codes[i / 2];
    let code = if i.is_multiple_of(2) { pair >> 4 } else { pair & 15 };
    kind.values()[usize::from(code)] * magnitudes[i / BLOCK]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn four_bits_are_the_nearest_entries(
        count in prop_oneof![1..400usize, 16300..16500usize],
        seed in any::<u64>(),
        doubly in any::<bool>(),
        nf4 in any::<bool>(),
    ) {
        let kind = if nf4 { FourBit::Nf4 } else { FourBit::Fp4 };
        let mut values = normal(count, seed);
        if seed % 3 == 0 {
            values.iter_mut().take(64).for_each(|x| *x = 0.0);
        }
        let (mut codes, mut largest) = (vec![0; count.div_ceil(2)], vec![0.0; count.div_ceil(BLOCK)]);
        code(kind, &values, &mut codes, &mut largest, 1).unwrap();
        for (i, value) in values.iter().enumerate() {
            let distance = |x: f32| (f64::from(x) * f64::from(largest[i / BLOCK]) - f64::from(*value)).abs();
            let least = kind.values().iter().map(|x| distance(*x)).fold(f64::INFINITY, f64::min);
            let own = f64::from(defined(kind, &codes, &largest, i)) - f64::from(*value);
            // bitsandbytes writes the limits of FP4 with six digits: 0.583333 for 7/12.
            let written = 2e-6 * f64::from(largest[i / BLOCK]);
            prop_assert!(own.abs() <= least + written, "element {i}");
        }

        let magnitudes = Magnitudes::new(largest.clone(), doubly);
        let decoded = magnitudes.values();
        let farthest = largest.iter().fold(0.0f32, |a, x| a.max(*x));
        for (decoded, exact) in decoded.iter().zip(&largest) {
            let most = if doubly { 0.02 * farthest } else { 0.0 };
            prop_assert!((decoded - exact).abs() <= most, "{decoded}, not {exact}");
        }
        let dtype = kind.dtype(doubly);
        let mut stored = vec![0; dtype.bytes_for(count as u64).unwrap() as usize];
        arrange(dtype, count, &codes, &magnitudes, &mut stored).unwrap();
        for isa in Isa::available() {
            let mut values = vec![0.0; count];
            dequantize(isa, dtype, &stored, &mut values).unwrap();
            for (i, value) in values.iter().enumerate() {
                let expected = defined(kind, &codes, &decoded, i);
                prop_assert!(value.to_bits() == expected.to_bits(), "{isa} {dtype} {i}: {value}, not {expected}");
            }
        }
    }

    #[test]
    fn finite_values_stay_finite(seed in any::<u64>(), scale in -30..30i32, alike in any::<bool>()) {
        let mut values = normal(512, seed);
        values.iter_mut().for_each(|x| *x = if alike { 1.0 } else { *x } * 2f32.powi(scale.min(14)));
        for dtype in DType::ALL.into_iter().filter(|dtype| can_quantize(*dtype)) {
            let mut stored = vec![0; dtype.bytes_for(512).unwrap() as usize];
            quantize(dtype, &values, &mut stored, 1).unwrap();
            let mut back = vec![f32::NAN; 512];
            dequantize(Isa::detect(), dtype, &stored, &mut back).unwrap();
            prop_assert!(back.iter().all(|x| x.is_finite()), "{dtype}");
        }
    }
}

/// Blocks whose largest magnitude is 4 or 6 times their scale come back byte by byte; all come back as the same values.
#[test]
fn mxfp4_values_stay() {
    for exponent in [0u8, 1, 2, 100, 127, 200, 250] {
        for top in [7u8, 6, 5, 2] {
            let mut block = vec![exponent];
            block.extend((0..16u8).map(|i| (i * 7 % 8).min(top) | (i * 5 % (top + 1)) << 4 | (i & 1) << 7));
            block[1] = top;
            // A negative zero is a zero.
            for byte in &mut block[1..] {
                let low = if *byte & 15 == 8 { 0 } else { *byte & 15 };
                *byte = low | if *byte >> 4 == 8 { 0 } else { *byte & 0xf0 };
            }
            let (mut values, mut again) = ([0.0; 32], [0; 17]);
            dequantize(Isa::detect(), DType::Mxfp4, &block, &mut values).unwrap();
            quantize(DType::Mxfp4, &values, &mut again, 1).unwrap();
            if top >= 6 && exponent > 0 {
                assert_eq!(again[..], block[..], "{exponent} {top}");
            }
            let mut back = [1.0; 32];
            dequantize(Isa::detect(), DType::Mxfp4, &again, &mut back).unwrap();
            assert_eq!(back, values, "{exponent} {top}");
        }
    }
}

#[test]
fn rows_share_a_scale() {
    let (rows, columns) = (3, 128);
    let values = normal(rows * columns, 3);
    let mut stored = vec![0; DType::Int8.bytes_for((rows * columns) as u64).unwrap() as usize];
    let mut magnitudes = vec![0.0; rows];
    quantize_rows(&values, columns, &mut stored, &mut magnitudes).unwrap();
    let mut back = vec![0.0; values.len()];
    dequantize(Isa::detect(), DType::Int8, &stored, &mut back).unwrap();
    for (row, magnitude) in magnitudes.iter().enumerate() {
        let own = row * columns..(row + 1) * columns;
        assert_eq!(*magnitude, values[own.clone()].iter().fold(0.0f32, |a, x| a.max(x.abs())));
        for i in own {
            assert!((values[i] - back[i]).abs() <= magnitude / 253.0);
        }
    }
    assert!(quantize_rows(&values, 100, &mut stored, &mut magnitudes).is_none());
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut out = [0; 200];
    assert!(quantize(DType::Q8_0, &[0.0; 31], &mut out[..34], 1).is_none());
    assert!(quantize(DType::Q8_0, &[0.0; 32], &mut out[..33], 1).is_none());
    assert!(quantize(DType::F32, &[0.0; 32], &mut out[..128], 1).is_none());
    assert!(quantize(DType::Q3K, &[0.0; 256], &mut out[..110], 1).is_none());
    let magnitudes = Magnitudes::F32(vec![1.0]);
    assert!(arrange(DType::Nf4, 64, &[0; 32], &magnitudes, &mut out[..41]).is_none());
    assert!(arrange(DType::Nf4F32, 64, &[0; 31], &magnitudes, &mut out[..36]).is_none());
    assert!(arrange(DType::Q4_0, 64, &[0; 32], &magnitudes, &mut out[..36]).is_none());
}
