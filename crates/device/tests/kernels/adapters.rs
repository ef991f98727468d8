//! Dropout and the row lengths of adapters, against plain f64.

use plimsoll_device::cpu::Isa;
use plimsoll_device::{DType, DeviceExt, Elementwise, Magnitude};

use crate::harness::{Expected, Operand, check, check_in_place, decode, noise, run, storages};

const SHAPES: [[usize; 2]; 5] = [[1, 1], [3, 8], [17, 33], [64, 100], [130, 1040]];

/// What is left of ones.
fn mask_of(ones: &Operand, out: &Operand, probability: f32, seed: u64, first: u64) -> Vec<f64> {
    let operands = [ones.clone(), out.clone()];
    let written = run(Isa::detect(), 2, &operands, &|cpu, t| {
        cpu.run(Elementwise::Dropout { x: &t[0], out: &t[1], probability, seed, first, accumulate: false })
    });
    decode(DType::F32, &written.unwrap()[1])
}

#[test]
fn dropout_keeps_the_mean_and_its_mask_is_a_function_of_seed_and_index() {
    let n = 40_000;
    let [x, out] = [Operand::new(DType::F32, &[n], vec![1.0; n]), Operand::garbage(DType::F32, &[n])];
    let kept = |seed: u64, first: u64| mask_of(&x, &out, 0.25, seed, first);
    let mask = kept(7, 0);
    assert!(mask.iter().all(|x| *x == 0.0 || (x - 4.0 / 3.0).abs() < 1e-6));
    let share = mask.iter().filter(|x| **x == 0.0).count() as f64 / n as f64;
    assert!((share - 0.25).abs() < 0.01, "{share}");
    assert_eq!(kept(7, 0), mask);
    assert_ne!(kept(8, 0), mask);
    assert_eq!(kept(7, 1000)[..n - 1000], mask[1000..]);
}

#[test]
fn dropout() {
    for [x, out] in storages() {
        for n in [0, 1, 63, 5000] {
            let ones = Operand::new(DType::F32, &[n], vec![1.0; n]);
            let mask = mask_of(&ones, &Operand::garbage(DType::F32, &[n]), 0.5, 3, 9);
            for accumulate in [false, true] {
                let operands = [Operand::new(x, &[n], noise(1)), Operand::new(out, &[n], noise(2))];
                let [x, base] = operands.each_ref().map(|o| &o.values);
                let old = |i: usize| if accumulate { base[i] } else { 0.0 };
                let values = (0..n).map(|i| x[i] * mask[i] + old(i)).collect();
                check(
                    &format!("{n} {accumulate}"),
                    &operands,
                    |cpu, t| {
                        cpu.run(Elementwise::Dropout {
                            x: &t[0],
                            out: &t[1],
                            probability: 0.5,
                            seed: 3,
                            first: 9,
                            accumulate,
                        })
                    },
                    &[Expected { operand: 1, values, tolerance: 1e-6 }],
                );
            }
        }
    }
    let apart = [Operand::new(DType::F32, &[2500], noise(1)), Operand::garbage(DType::F32, &[2500])];
    check_in_place(
        "in place",
        (
            &apart,
            &|cpu, t| {
                cpu.run(Elementwise::Dropout {
                    x: &t[0],
                    out: &t[1],
                    probability: 0.3,
                    seed: 1,
                    first: 0,
                    accumulate: false,
                })
            },
            1,
        ),
        (
            &apart[..1],
            &|cpu, t| {
                cpu.run(Elementwise::Dropout {
                    x: &t[0],
                    out: &t[0],
                    probability: 0.3,
                    seed: 1,
                    first: 0,
                    accumulate: false,
                })
            },
            0,
        ),
    );
}

#[test]
fn row_squares() {
    for [x] in storages() {
        for [o, i] in SHAPES {
            let operands = [Operand::new(x, &[o, i], noise(1)), Operand::garbage(DType::F32, &[o])];
            let rows = operands[0].values.chunks(i);
            let values = rows.map(|row| row.iter().map(|x| x * x).sum()).collect();
            let expected = Expected { operand: 1, values, tolerance: 2e-6 };
            check(
                &format!("{o} {i}"),
                &operands,
                |cpu, t| cpu.run(Magnitude::RowSquares { x: &t[0], out: &t[1] }),
                &[expected],
            );
        }
    }
}

#[test]
fn row_lengths_are_those_of_the_sum() {
    for ([o, i], r) in SHAPES.into_iter().zip([1, 2, 4, 16, 3]) {
        let take = |seed, n: usize| noise(seed).take(n).collect::<Vec<f64>>();
        let (w, a, b, scale) = (take(1, o * i), take(2, r * i), take(3, o * r), 0.75f32);
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let rows = |m: &[f64], width: usize| m.chunks(width).map(<[f64]>::to_vec).collect::<Vec<_>>();
        let (w_rows, a_rows, b_rows) = (rows(&w, i), rows(&a, i), rows(&b, r));
        let squares: Vec<f64> = w_rows.iter().map(|row| dot(row, row)).collect();
        let product = |x: &[Vec<f64>], y: &[Vec<f64>]| -> Vec<f64> {
            x.iter().flat_map(|x| y.iter().map(move |y| dot(x, y))).collect()
        };
        let values = w_rows.iter().zip(&b_rows).map(|(w, b)| {
            let at = |k: usize| w[k] + f64::from(scale) * (0..r).map(|l| b[l] * a_rows[l][k]).sum::<f64>();
            (0..i).map(|k| at(k).powi(2)).sum::<f64>().sqrt()
        });
        let operands = [
            Operand::new(DType::F32, &[o], squares),
            Operand::new(DType::F32, &[r, o], product(&a_rows, &w_rows)),
            Operand::new(DType::F32, &[r, r], product(&a_rows, &a_rows)),
            Operand::new(DType::F32, &[o, r], b),
            Operand::garbage(DType::F32, &[o]),
        ];
        check(
            &format!("{o} {i} {r}"),
            &operands,
            |cpu, t| {
                cpu.run(Magnitude::RowLengths {
                    squares: &t[0],
                    cross: &t[1],
                    gram: &t[2],
                    b: &t[3],
                    scale,
                    lengths: &t[4],
                })
            },
            &[Expected { operand: 4, values: values.collect(), tolerance: 1e-5 }],
        );
    }
}

#[test]
fn scale_columns() {
    for [x, bias, out] in storages() {
        for ([n, o], whole) in SHAPES.into_iter().zip([true, false, true, true, false]) {
            for accumulate in [false, true] {
                let operands = [
                    Operand::new(x, &[n, o], noise(1)),
                    Operand::new(DType::F32, &[o], noise(2)),
                    Operand::new(DType::F32, &[o], noise(3).map(|x| x.abs() + 0.5)),
                    Operand::new(bias, &[o], noise(4)),
                    Operand::new(out, &[n, o], noise(5)),
                ];
                let [x, factors, divisors, bias, base] = operands.each_ref().map(|operand| &operand.values);
                let value = |i: usize| {
                    let (c, old) = (i % o, if accumulate { base[i] } else { 0.0 });
                    let rest = if whole { (divisors[c], bias[c]) } else { (1.0, 0.0) };
                    old + x[i] * factors[c] / rest.0 + rest.1
                };
                check(
                    &format!("{n} {o} {accumulate}"),
                    &operands,
                    |cpu, t| {
                        cpu.run(Magnitude::ScaleColumns {
                            x: &t[0],
                            factors: &t[1],
                            divisors: whole.then_some(&t[2]),
                            bias: whole.then_some(&t[3]),
                            offsets: None,
                            out: &t[4],
                            accumulate,
                        })
                    },
                    &[Expected { operand: 4, values: (0..n * o).map(value).collect(), tolerance: 2e-6 }],
                );
            }
        }
    }
}

#[test]
fn column_dots() {
    for [a, b, out] in storages() {
        for [n, o] in SHAPES {
            for accumulate in [false, true] {
                let operands = [
                    Operand::new(a, &[n, o], noise(1)),
                    Operand::new(b, &[n, o], noise(2)),
                    Operand::new(DType::F32, &[o], noise(3).map(|x| x.abs() + 0.5)),
                    Operand::new(out, &[o], noise(4)),
                ];
                let [a, b, divisors, base] = operands.each_ref().map(|operand| &operand.values);
                let value = |c: usize| {
                    let sum: f64 = (0..n).map(|row| a[row * o + c] * b[row * o + c]).sum();
                    sum / divisors[c] + if accumulate { base[c] } else { 0.0 }
                };
                check(
                    &format!("{n} {o} {accumulate}"),
                    &operands,
                    |cpu, t| {
                        cpu.run(Magnitude::ColumnDots {
                            a: &t[0],
                            b: &t[1],
                            divisors: &t[2],
                            offsets: None,
                            out: &t[3],
                            accumulate,
                        })
                    },
                    &[Expected { operand: 3, values: (0..o).map(value).collect(), tolerance: 5e-6 }],
                );
            }
        }
    }
}

/// Rows of three matrices, none of the second, and two rows of no matrix.
const OFFSETS: [f64; 4] = [0.0, 3.0, 3.0, 7.0];

/// The matrix that a row of nine is of.
fn matrix_of(row: usize) -> Option<usize> {
    (0..3).find(|e| (OFFSETS[*e] as usize..OFFSETS[e + 1] as usize).contains(&row))
}

#[test]
fn each_matrix_of_a_stack_has_lengths_of_its_own() {
    let (n, o, stack) = (9, 33, 3);
    for types in storages::<3>() {
        for accumulate in [false, true] {
            let operands = [
                Operand::new(types[0], &[n, o], noise(1)),
                Operand::new(DType::F32, &[stack, o], noise(2)),
                Operand::new(DType::F32, &[stack, o], noise(3).map(|x| x.abs() + 0.5)),
                Operand::new(types[1], &[stack, o], noise(4)),
                Operand::new(DType::U32, &[stack + 1], OFFSETS),
                Operand::new(types[2], &[n, o], noise(5)),
            ];
            let [x, factors, divisors, bias, _, base] = operands.each_ref().map(|operand| &operand.values);
            let value = |i: usize| {
                let old = if accumulate { base[i] } else { 0.0 };
                let own = matrix_of(i / o).map(|e| e * o + i % o);
                old + own.map_or(0.0, |own| x[i] * factors[own] / divisors[own] + bias[own])
            };
            check(
                &format!("scaled {accumulate}"),
                &operands,
                |cpu, t| {
                    cpu.run(Magnitude::ScaleColumns {
                        x: &t[0],
                        factors: &t[1],
                        divisors: Some(&t[2]),
                        bias: Some(&t[3]),
                        offsets: Some(&t[4]),
                        out: &t[5],
                        accumulate,
                    })
                },
                &[Expected { operand: 5, values: (0..n * o).map(value).collect(), tolerance: 2e-6 }],
            );
            let operands = [
                Operand::new(types[0], &[n, o], noise(1)),
                Operand::new(types[1], &[n, o], noise(2)),
                operands[2].clone(),
                operands[4].clone(),
                Operand::new(types[2], &[stack, o], noise(4)),
            ];
            let [a, b, divisors, _, base] = operands.each_ref().map(|operand| &operand.values);
            let value = |i: usize| {
                let rows = (0..n).filter(|row| matrix_of(*row) == Some(i / o));
                let sum: f64 = rows.map(|row| a[row * o + i % o] * b[row * o + i % o]).sum();
                sum / divisors[i] + if accumulate { base[i] } else { 0.0 }
            };
            check(
                &format!("dots {accumulate}"),
                &operands,
                |cpu, t| {
                    cpu.run(Magnitude::ColumnDots {
                        a: &t[0],
                        b: &t[1],
                        divisors: &t[2],
                        offsets: Some(&t[3]),
                        out: &t[4],
                        accumulate,
                    })
                },
                &[Expected { operand: 4, values: (0..stack * o).map(value).collect(), tolerance: 5e-6 }],
            );
        }
    }
}

/// A stack's lengths are those of its matrices.
#[test]
fn row_lengths_of_a_stack() {
    let (o, r, stack) = (17, 3, 4);
    let take = |seed, n: usize| noise(seed).take(n).collect::<Vec<f64>>();
    // What is under the root stays above zero.
    let squares: Vec<f64> = take(1, stack * o).iter().map(|x| x.abs() + 40.0).collect();
    let (cross, gram, b) = (take(2, stack * r * o), take(3, stack * r * r), take(4, stack * o * r));
    let value = |row: usize| {
        let (e, own) = (row / o, row % o);
        let b = &b[row * r..][..r];
        let cross: f64 = (0..r).map(|k| b[k] * cross[(e * r + k) * o + own]).sum();
        let of = |k: usize, l: usize| b[k] * b[l] * gram[(e * r + k) * r + l];
        let product: f64 = (0..r * r).map(|i| of(i / r, i % r)).sum();
        (squares[row] + 1.5 * cross + 0.5625 * product).sqrt()
    };
    let values = (0..stack * o).map(value).collect();
    let operands = [
        Operand::new(DType::F32, &[stack * o], squares.clone()),
        Operand::new(DType::F32, &[stack, r, o], cross.clone()),
        Operand::new(DType::F32, &[stack, r, r], gram.clone()),
        Operand::new(DType::F32, &[stack, o, r], b.clone()),
        Operand::garbage(DType::F32, &[stack * o]),
    ];
    check(
        "stack",
        &operands,
        |cpu, t| {
            let [squares, cross, gram, b, lengths] = [&t[0], &t[1], &t[2], &t[3], &t[4]];
            cpu.run(Magnitude::RowLengths { squares, cross, gram, b, scale: 0.75, lengths })
        },
        &[Expected { operand: 4, values, tolerance: 1e-5 }],
    );
}
