//! The three products of a linear layer, and its bias: that each is made of the right matrices.

use plimsoll_device::{Compute, DType, DeviceExt, Product, Rounding};

use crate::harness::{Expected, Operand, check_product as check, noise, storages};

/// Tokens, inputs, outputs.
const SHAPES: [[usize; 3]; 3] = [[1, 1, 1], [5, 7, 3], [33, 40, 50]];

/// a [m, k] times b [k, n].
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let element = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
    (0..m * n).map(|at| element(at / n, at % n)).collect()
}

fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    let rows = x.len() / columns;
    (0..x.len()).map(|at| x[at % rows * columns + at / rows]).collect()
}

fn expect(operand: usize, product: Vec<f64>, before: &[f64], accumulate: bool) -> Expected {
    let base = |i: usize| if accumulate { before[i] } else { 0.0 };
    let values = product.iter().enumerate().map(|(i, x)| x + base(i)).collect();
    Expected { operand, values, tolerance: 2e-6 }
}

#[test]
fn forward() {
    for ([n, i, o], [x, weight, bias, out]) in SHAPES.iter().flat_map(|s| storages().map(|t| (*s, t))) {
        for (with_bias, accumulate) in [(false, false), (false, true), (true, false), (true, true)] {
            let operands = [
                Operand::new(x, &[n, i], noise(1)),
                Operand::new(weight, &[o, i], noise(2)),
                Operand::new(bias, &[o], noise(3)),
                Operand::new(out, &[n, o], noise(4)),
            ];
            let [xs, weights, biases, before] = operands.each_ref().map(|operand| &operand.values);
            let mut result = product(xs, &transposed(weights, i), [n, i, o]);
            if with_bias {
                result.iter_mut().enumerate().for_each(|(at, x)| *x += biases[at % o]);
            }
            let mut expected = expect(3, result, before, accumulate);
            // A narrow output is rounded once more, when the bias has been added.
            expected.tolerance += if with_bias && out == DType::Bf16 { 0.01 } else { 0.0 };
            check(
                &format!("{n} {i} {o} {x} {weight} {bias} {out} {with_bias} {accumulate}"),
                &operands,
                |cpu, t| {
                    cpu.run(Product::Linear {
                        x: &t[0],
                        weight: &t[1],
                        bias: with_bias.then(|| &t[2]),
                        out: &t[3],
                        accumulate,
                        compute: Compute::F32,
                    })
                },
                &[expected],
            );
        }
    }
}

#[test]
fn backward_input() {
    for ([n, i, o], [dout, weight, dx]) in SHAPES.iter().flat_map(|s| storages().map(|t| (*s, t))) {
        for accumulate in [false, true] {
            let operands = [
                Operand::new(dout, &[n, o], noise(1)),
                Operand::new(weight, &[o, i], noise(2)),
                Operand::new(dx, &[n, i], noise(3)),
            ];
            let [douts, weights, before] = operands.each_ref().map(|operand| &operand.values);
            check(
                &format!("{n} {i} {o} {dout} {weight} {dx} {accumulate}"),
                &operands,
                |cpu, t| {
                    cpu.run(Product::LinearBackwardInput {
                        dout: &t[0],
                        weight: &t[1],
                        dx: &t[2],
                        accumulate,
                        compute: Compute::F32,
                    })
                },
                &[expect(2, product(douts, weights, [n, o, i]), before, accumulate)],
            );
        }
    }
}

#[test]
fn backward_weight() {
    for ([n, i, o], [dout, x, dweight]) in SHAPES.iter().flat_map(|s| storages().map(|t| (*s, t))) {
        for accumulate in [false, true] {
            let operands = [
                Operand::new(dout, &[n, o], noise(1)),
                Operand::new(x, &[n, i], noise(2)),
                Operand::new(dweight, &[o, i], noise(3)),
            ];
            let [douts, xs, before] = operands.each_ref().map(|operand| &operand.values);
            check(
                &format!("{n} {i} {o} {dout} {x} {dweight} {accumulate}"),
                &operands,
                |cpu, t| {
                    cpu.run(Product::LinearBackwardWeight {
                        dout: &t[0],
                        x: &t[1],
                        dweight: &t[2],
                        accumulate,
                        rounding: Rounding::Nearest,
                        compute: Compute::F32,
                    })
                },
                &[expect(2, product(&transposed(douts, o), xs, [o, n, i]), before, accumulate)],
            );
        }
    }
}

#[test]
fn half_precision_operands_and_outputs() {
    let [n, i, o] = [33, 40, 50];
    for accumulate in [false, true] {
        for rows in [1, n] {
            let operands = [
                Operand::new(DType::F16, &[rows, i], noise(1)),
                Operand::new(DType::F16, &[o, i], noise(2)),
                Operand::new(DType::F16, &[rows, o], noise(3)),
            ];
            let [x, weight, before] = operands.each_ref().map(|operand| &operand.values);
            let expected = expect(2, product(x, &transposed(weight, i), [rows, i, o]), before, accumulate);
            check(
                &format!("f16, {rows} rows, {accumulate}"),
                &operands,
                |cpu, t| {
                    cpu.run(Product::Linear {
                        x: &t[0],
                        weight: &t[1],
                        bias: None,
                        out: &t[2],
                        accumulate,
                        compute: Compute::F32,
                    })
                },
                &[expected],
            );
        }
    }
}

/// Terms too small for bf16 beside the sum add up all the same, on average.
#[test]
fn small_terms_are_not_lost_in_narrow_sums() {
    let [n, i, o] = [40, 48, 64];
    let operands = [
        Operand::new(DType::F32, &[n, o], std::iter::repeat(1.0)),
        Operand::new(DType::F32, &[n, i], std::iter::repeat(1e-4)),
        Operand::new(DType::Bf16, &[o, i], std::iter::repeat(4.0)),
    ];
    let mean = |rounding| {
        let op: crate::harness::RunOp<'_> = &|cpu, t| {
            cpu.run(Product::LinearBackwardWeight {
                dout: &t[0],
                x: &t[1],
                dweight: &t[2],
                accumulate: true,
                rounding,
                compute: Compute::F32,
            })
        };
        let mut sums = Vec::new();
        for isa in plimsoll_device::cpu::Isa::available() {
            let alone = crate::harness::run(isa, 1, &operands, op).unwrap();
            assert!(alone == crate::harness::run(isa, 3, &operands, op).unwrap());
            let values = crate::harness::decode(DType::Bf16, &alone[2]);
            sums.push(values.iter().sum::<f64>() / values.len() as f64);
        }
        sums
    };
    assert!(mean(Rounding::Nearest).iter().all(|mean| *mean == 4.0));
    for mean in mean(Rounding::Stochastic { seed: 5, first: 0 }) {
        assert!((mean - 4.004).abs() < 6e-4, "{mean}");
    }
}
