//! Eight-bit codes with a scale for each run of elements.

use plimsoll_device::cpu::Isa;
use plimsoll_device::{DType, DeviceExt, Quantization};

use crate::harness::{Expected, Operand, check, decode, noise, refusal, run};

const CASES: [(usize, u64); 8] =
    [(1, 1), (7, 3), (64, 64), (1000, 64), (1000, 1000), (40_000, 256), (40_000, 30_000), (100_000, 100_000)];

/// Codes and scales by the definition, in f64.
fn reference(values: &[f64], block: usize) -> (Vec<f64>, Vec<f64>) {
    let scale = |run: &[f64]| f64::from(run.iter().fold(0.0f64, |most, x| most.max(x.abs())) as f32 / 127.0);
    let scales: Vec<f64> = values.chunks(block).map(scale).collect();
    let codes = values.iter().enumerate().map(|(i, x)| match scales[i / block] {
        0.0 => 0.0,
        scale => (x / scale).round_ties_even(),
    });
    (codes.collect(), scales)
}

#[test]
fn codes_are_the_nearest() {
    for dtype in [DType::F32, DType::Bf16] {
        for (n, block) in CASES {
            let x = Operand::new(dtype, &[n], noise(n as u64));
            let (codes, scales) = reference(&x.values, block as usize);
            let count = scales.len();
            let operands = [x, Operand::garbage(DType::I8, &[n]), Operand::garbage(DType::F32, &[count])];
            let label = format!("{dtype} {n} in runs of {block}");
            for isa in Isa::available() {
                let got = run(isa, 2, &operands, &|cpu, t| {
                    cpu.run(Quantization::QuantizeInt8 { x: &t[0], codes: &t[1], scales: &t[2], block })
                })
                .unwrap();
                assert_eq!(decode(DType::F32, &got[2]), scales, "{label}");
                // The reciprocal is rounded: a value half-way between two codes may go either way.
                for (i, (got, want)) in decode(DType::I8, &got[1]).iter().zip(&codes).enumerate() {
                    let exact = operands[0].values[i] / scales[i / block as usize];
                    assert!(got == want || (exact - got).abs() < 0.5001, "{label}, {i}: {got} for {exact}");
                }
            }
            check(
                &label,
                &operands,
                |cpu, t| cpu.run(Quantization::QuantizeInt8 { x: &t[0], codes: &t[1], scales: &t[2], block }),
                &[
                    Expected { operand: 1, values: codes, tolerance: 1.0 },
                    Expected { operand: 2, values: scales, tolerance: 0.0 },
                ],
            );
        }
    }
}

#[test]
fn values_come_back_within_half_a_scale() {
    for dtype in [DType::F32, DType::Bf16] {
        for (n, block) in CASES {
            let values: Vec<f64> = noise(7).take(n).collect();
            let (codes, scales) = reference(&values, block as usize);
            let codes = Operand::new(DType::I8, &[n], codes);
            let scales = Operand::new(DType::F32, &[scales.len()], scales);
            let scale = |i: usize| scales.values[i / block as usize];
            let want: Vec<f64> = codes.values.iter().enumerate().map(|(i, code)| code * scale(i)).collect();
            for (i, (x, want)) in values.iter().zip(&want).enumerate() {
                assert!((x - want).abs() <= 0.5001 * scale(i), "{x} became {want}");
            }
            let expected = Expected { operand: 2, values: want, tolerance: 1e-7 };
            let operands = [codes, scales, Operand::garbage(dtype, &[n])];
            check(
                &format!("{dtype} {n} in runs of {block}"),
                &operands,
                |cpu, t| {
                    cpu.run(Quantization::DequantizeInt8 { codes: &t[0], scales: &t[1], block, out: &t[2] })
                },
                &[expected],
            );
        }
    }
}

#[test]
fn what_is_not_finite_is_not_hidden() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for (n, block) in [(100, 10), (100_000, 100_000)] {
            let mut values: Vec<f64> = noise(1).take(n).collect();
            values[17] = bad;
            let sizes = [n.div_ceil(block as usize)];
            let operands = [
                Operand::new(DType::F32, &[n], values),
                Operand::garbage(DType::I8, &[n]),
                Operand::garbage(DType::F32, &sizes),
            ];
            let packed = run(Isa::detect(), 2, &operands, &|cpu, t| {
                cpu.run(Quantization::QuantizeInt8 { x: &t[0], codes: &t[1], scales: &t[2], block })
            })
            .unwrap();
            let operands = [
                Operand::new(DType::I8, &[n], decode(DType::I8, &packed[1])),
                Operand::new(DType::F32, &sizes, decode(DType::F32, &packed[2])),
                Operand::garbage(DType::F32, &[n]),
            ];
            let back = run(Isa::detect(), 2, &operands, &|cpu, t| {
                cpu.run(Quantization::DequantizeInt8 { codes: &t[0], scales: &t[1], block, out: &t[2] })
            })
            .unwrap();
            assert!(decode(DType::F32, &back[2])[17].is_nan(), "{bad}");
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let operands = [
        Operand::new(DType::F32, &[10], noise(1)),
        Operand::garbage(DType::I8, &[10]),
        Operand::garbage(DType::F32, &[2]),
    ];
    let words = refusal(&operands, |cpu, t| {
        cpu.run(Quantization::QuantizeInt8 { x: &t[0], codes: &t[1], scales: &t[2], block: 4 })
    });
    assert!(words.contains("does not have 3 elements"), "{words}");
    let words = refusal(&operands, |cpu, t| {
        cpu.run(Quantization::QuantizeInt8 { x: &t[0], codes: &t[2], scales: &t[1], block: 5 })
    });
    assert!(words.contains("is not i8"), "{words}");
}
