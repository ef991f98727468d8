//! Fill, cast, add, scale.

use std::ops::Range;

use half::{bf16, f16};
use plimsoll_device::cpu::Isa;
use plimsoll_device::{DType, Device, DeviceError, DeviceExt, Elementwise, Rounding, Tensor};

use crate::harness::{Expected, Operand, check, check_in_place, decode, noise, run, storages};

const SIZES: [usize; 7] = [0, 1, 7, 63, 576, 1000, 40_000];

#[test]
fn fill() {
    for [dtype] in storages() {
        for n in SIZES {
            let values = Operand::new(dtype, &[n], vec![0.1; n]).values;
            let expected = Expected { operand: 0, values, tolerance: 0.0 };
            let out = Operand::garbage(dtype, &[n]);
            check(
                &format!("{dtype} {n}"),
                &[out],
                |cpu, t| cpu.run(Elementwise::Fill { out: &t[0], value: 0.1 }),
                &[expected],
            );
        }
    }
}

#[test]
fn add() {
    for [a, b, out] in storages() {
        for n in SIZES {
            let operands = [
                Operand::new(a, &[n], noise(1)),
                Operand::new(b, &[n], noise(2)),
                Operand::garbage(out, &[n]),
            ];
            let values = operands[0].values.iter().zip(&operands[1].values).map(|(a, b)| a + b).collect();
            let expected = Expected { operand: 2, values, tolerance: 0.0 };
            check(
                &format!("{a} {b} {out} {n}"),
                &operands,
                |cpu, t| cpu.run(Elementwise::Add { a: &t[0], b: &t[1], out: &t[2] }),
                &[expected],
            );
        }
    }
}

#[test]
fn add_in_place() {
    for [kept, changed] in storages() {
        let pair = [Operand::new(kept, &[2500], noise(1)), Operand::new(changed, &[2500], noise(2))];
        let apart = [pair[0].clone(), pair[1].clone(), Operand::garbage(changed, &[2500])];
        let label = format!("{kept} {changed}");
        check_in_place(
            &label,
            (&apart, &|cpu, t| cpu.run(Elementwise::Add { a: &t[0], b: &t[1], out: &t[2] }), 2),
            (&pair, &|cpu, t| cpu.run(Elementwise::Add { a: &t[0], b: &t[1], out: &t[1] }), 1),
        );
        check_in_place(
            &label,
            (&apart, &|cpu, t| cpu.run(Elementwise::Add { a: &t[1], b: &t[1], out: &t[2] }), 2),
            (&pair, &|cpu, t| cpu.run(Elementwise::Add { a: &t[1], b: &t[1], out: &t[1] }), 1),
        );
    }
}

/// Whatever the pieces, and wherever the terms come from, each sum is rounded as it is in the whole.
#[test]
fn terms_accumulate_in_turn_in_pieces_as_in_the_whole() {
    let n = 70_000u64;
    for dtype in [DType::F32, DType::Bf16] {
        let terms = Operand::new(dtype, &[3, n as usize], noise(1));
        let operands = [terms, Operand::new(dtype, &[n as usize], noise(2))];
        // Terms of a run, and rows before these places by themselves.
        let sum = |runs: &[Range<u64>], cuts: &[u64], seed| {
            let add = |cpu: &dyn Device, t: &[Tensor]| {
                let ends = cuts.iter().copied().chain([n]);
                let pieces = [0].iter().chain(cuts).copied().zip(ends);
                for (start, end) in pieces {
                    for run in runs {
                        let out = t[1].reshape(&[n, 1]).unwrap().slice_rows(start..end).unwrap();
                        // Only whole terms follow each other.
                        let whole = (end - start) == n;
                        let each =
                            if whole { vec![run.clone()] } else { run.clone().map(|t| t..t + 1).collect() };
                        for terms in each {
                            let number = terms.start + 7;
                            let of = t[0].slice_rows(terms).unwrap();
                            let of = match whole {
                                true => of,
                                false => of.reshape(&[n, 1]).unwrap().slice_rows(start..end).unwrap(),
                            };
                            let (terms, out, first) = (&of, &out, 9 + start);
                            cpu.run(Elementwise::AccumulateAll { terms, out, seed, number, first })?;
                        }
                    }
                }
                Ok(())
            };
            run(Isa::detect(), 2, &operands, &add).unwrap().swap_remove(1)
        };
        let all = 0..3;
        let whole = sum(std::slice::from_ref(&all), &[], 5);
        assert_eq!(sum(&[0..1, 1..3], &[], 5), whole);
        assert_eq!(sum(std::slice::from_ref(&all), &[1, 20_000], 5), whole);
        let rounded = dtype == DType::Bf16;
        assert_eq!(sum(std::slice::from_ref(&all), &[], 6) != whole, rounded);
        let values = decode(dtype, &whole);
        for (i, value) in values.iter().enumerate().step_by(997) {
            let of = |t: usize| f64::from(operands[0].values[t * n as usize + i] as f32);
            let expected = f64::from(operands[1].values[i] as f32) + of(0) + of(1) + of(2);
            let tolerance = if rounded { 0.03 } else { 1e-6 };
            assert!(
                (f64::from(*value as f32) - expected).abs() <= tolerance,
                "{dtype} {i}: {value} {expected}"
            );
        }
    }
}

#[test]
fn scale() {
    for [dtype] in storages() {
        for n in SIZES {
            let x = Operand::new(dtype, &[n], noise(1));
            let values = x.values.iter().map(|x| x * 0.75).collect();
            let expected = Expected { operand: 0, values, tolerance: 0.0 };
            check(
                &format!("{dtype} {n}"),
                &[x],
                |cpu, t| cpu.run(Elementwise::Scale { x: &t[0], factor: 0.75 }),
                &[expected],
            );
        }
    }
}

#[test]
fn cast() {
    let plain = [DType::F32, DType::Bf16, DType::F16];
    for (from, to) in plain.iter().flat_map(|from| plain.map(|to| (*from, to))) {
        for n in SIZES {
            let x = Operand::new(from, &[n], noise(1).map(|x| x * 100.0));
            let values = Operand::new(to, &[n], x.values.clone()).values;
            let expected = Expected { operand: 1, values, tolerance: 0.0 };
            check_exact_cast(&format!("{from} {to} {n}"), x, to, n, expected);
        }
    }
    let tokens = Operand::u32s(&(0..40_000).collect::<Vec<u32>>());
    let expected = Expected { operand: 1, values: tokens.values.clone(), tolerance: 0.0 };
    check_exact_cast("u32", tokens, DType::U32, 40_000, expected);
}

/// Tolerance 0 would still allow for rounding: here the bits must be those of the `half` crate.
fn check_exact_cast(label: &str, x: Operand, to: DType, n: usize, expected: Expected) {
    let operands = [x, Operand::new(to, &[n], vec![0.0; n])];
    for isa in Isa::available() {
        let got = decode(to, &run(isa, 1, &operands, &cast_nearest).unwrap()[1]);
        assert_eq!(got, expected.values, "{label}, {isa}");
    }
    check(label, &operands, cast_nearest, &[expected]);
}

fn cast_nearest(cpu: &dyn Device, t: &[Tensor]) -> Result<(), DeviceError> {
    cpu.run(Elementwise::Cast { x: &t[0], out: &t[1], rounding: Rounding::Nearest })
}

#[test]
fn cast_of_special_values() {
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-40,
        -1e-45,
        65519.0,
        65520.0,
        5.9e-8,
        1.0 + f32::EPSILON,
        f32::from_bits(0x3f80_8000),
        f32::from_bits(0x3f81_8000),
        f32::from_bits(0x3f80_8001),
        f32::from_bits(0x7f80_0001),
        f32::from_bits(0xffff_ffff),
    ];
    let x = Operand::new(DType::F32, &[special.len()], special.map(f64::from));
    for to in [DType::Bf16, DType::F16] {
        let operands = [x.clone(), Operand::garbage(to, &[special.len()])];
        for isa in Isa::available() {
            let got = decode(to, &run(isa, 1, &operands, &cast_nearest).unwrap()[1]);
            for (x, got) in special.iter().zip(got) {
                let want =
                    if to == DType::Bf16 { bf16::from_f32(*x).to_f64() } else { f16::from_f32(*x).to_f64() };
                // The bf16 instruction takes subnormal numbers for zero.
                let want =
                    if want.abs() < f64::from(f32::MIN_POSITIVE) && got == 0.0 { 0.0 * want } else { want };
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(same, "{isa}: {x:e} becomes {got:e} instead of {want:e}");
            }
        }
    }
}

#[test]
fn stochastic_rounding_is_right_on_average_and_repeats_with_the_seed() {
    let n = 100_000;
    // 0.3 of the way from one number to the next, the last from one subnormal number to the next.
    let cases = [
        (DType::Bf16, 1.0, 1.0 / 128.0),
        (DType::Bf16, -3.0, -1.0 / 64.0),
        (DType::F16, 1.0, 1.0 / 1024.0),
        (DType::F16, -6e-8 * 0.993_410_7, -5.960_464_5e-8),
    ];
    for (to, lower, step) in cases {
        let lower = Operand::new(to, &[1], [lower]).values[0];
        let x = lower + 0.3 * step;
        let operands = [Operand::new(DType::F32, &[n], vec![x; n]), Operand::garbage(to, &[n])];
        let rounded = |seed, isa, threads| {
            let results = run(isa, threads, &operands, &|cpu, t| cpu.run(cast_stochastic(t, seed)));
            decode(to, &results.unwrap()[1])
        };
        let first = rounded(1, Isa::detect(), 1);
        let up = first.iter().filter(|y| **y != lower).count() as f64 / n as f64;
        let next = Operand::new(to, &[1], [lower + step]).values[0];
        assert!(first.iter().all(|y| *y == lower || *y == next), "{to} {lower}");
        assert!((up - 0.3).abs() < 0.006, "{to} {lower}: {up} were rounded away from zero");
        for isa in Isa::available() {
            assert_eq!(first, rounded(1, isa, 2), "{isa}");
        }
        let second = rounded(2, Isa::detect(), 1);
        let agree = first.iter().zip(&second).filter(|(a, b)| a == b).count() as f64 / n as f64;
        assert!((agree - 0.58).abs() < 0.01, "{to} {lower}: two seeds agree in {agree}");
    }
}

#[test]
fn stochastic_rounding_keeps_what_is_exact() {
    for to in [DType::Bf16, DType::F16] {
        let special = [0.0, 1.0, -2.5, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        let operands = [Operand::new(DType::F32, &[6], special), Operand::garbage(to, &[6])];
        for isa in Isa::available() {
            let results = run(isa, 1, &operands, &|cpu, t| cpu.run(cast_stochastic(t, 7)));
            let got = decode(to, &results.unwrap()[1]);
            assert_eq!(got[..5], special[..5], "{isa}");
            assert!(got[5].is_nan(), "{isa}");
        }
    }
}

fn cast_stochastic(t: &[Tensor], seed: u64) -> Elementwise<'_> {
    Elementwise::Cast { x: &t[0], out: &t[1], rounding: Rounding::Stochastic { seed, first: 0 } }
}
