//! RMSNorm, LayerNorm, and the sums over rows behind their gradients.

use plimsoll_device::cpu::Isa;
use plimsoll_device::{DType, DeviceExt, Norm, Product};

use crate::harness::{Expected, Operand, RunOp, check, check_gradient, decode, noise, run, storages};
use crate::reference;

const SHAPES: [[usize; 2]; 8] = [[0, 5], [1, 1], [3, 7], [5, 63], [70, 20], [4, 576], [2, 1000], [3, 2500]];
const EPSILON: f32 = 1e-5;

fn offset(weight: &[f64], offset: f32) -> Vec<f64> {
    weight.iter().map(|w| w + f64::from(offset)).collect()
}

#[test]
fn rms_norm() {
    for ([n, h], [x, weight, out]) in SHAPES.iter().flat_map(|shape| storages().map(|types| (*shape, types)))
    {
        let operands = [
            Operand::new(x, &[n, h], noise(1).map(|x| 3.0 * x)),
            Operand::new(weight, &[h], noise(2)),
            Operand::garbage(out, &[n, h]),
            Operand::garbage(DType::F32, &[n]),
        ];
        // Gemma's norms multiply by 1 + weight.
        let weight_offset = if h % 2 == 0 { 1.0 } else { 0.0 };
        let factors = offset(&operands[1].values, weight_offset);
        let (y, rstd) = reference::rms_norm(&operands[0].values, &factors, EPSILON.into());
        check(
            &format!("{n} {h} {x} {weight} {out}"),
            &operands,
            |cpu, t| {
                cpu.run(Norm::RmsNorm {
                    x: &t[0],
                    weight: &t[1],
                    weight_offset,
                    epsilon: EPSILON,
                    out: &t[2],
                    rstd: &t[3],
                })
            },
            &[
                Expected { operand: 2, values: y, tolerance: 1e-6 },
                Expected { operand: 3, values: rstd, tolerance: 1e-6 },
            ],
        );
    }
}

#[test]
fn rms_norm_backward() {
    for ([n, h], types) in SHAPES.iter().flat_map(|shape| storages().map(|types| (*shape, types))) {
        let [x, weight, dout, dx, dweight] = types;
        for accumulate_weight in [false, true] {
            let x = Operand::new(x, &[n, h], noise(1).map(|x| 3.0 * x));
            let weight = Operand::new(weight, &[h], noise(2));
            let rstd = reference::rms_norm(&x.values, &weight.values, EPSILON.into()).1;
            let operands = [
                x,
                weight,
                Operand::new(DType::F32, &[n], rstd),
                Operand::new(dout, &[n, h], noise(3)),
                Operand::new(dx, &[n, h], noise(4)),
                Operand::new(dweight, &[h], noise(5)),
            ];
            let [x, weight, rstd, dout, base_dx, base_dweight] = operands.each_ref().map(|o| &o.values);
            let weight_offset = if h % 2 == 0 { 1.0 } else { 0.0 };
            let (dx, dweight) = reference::rms_norm_backward(x, &offset(weight, weight_offset), rstd, dout);
            check(
                &format!("{n} {h} {types:?} {accumulate_weight}"),
                &operands,
                |cpu, t| {
                    cpu.run(Norm::RmsNormBackward {
                        x: &t[0],
                        weight: &t[1],
                        weight_offset,
                        rstd: &t[2],
                        dout: &t[3],
                        dx: &t[4],
                        dweight: Some(&t[5]),
                        accumulate_weight,
                    })
                },
                &[
                    Expected { operand: 4, values: sum(base_dx, &dx), tolerance: 2e-6 },
                    accumulated(5, base_dweight, dweight, accumulate_weight),
                ],
            );
        }
    }
}

#[test]
fn layer_norm() {
    for ([n, h], types) in SHAPES.iter().flat_map(|shape| storages().map(|types| (*shape, types))) {
        let [x, weight, bias, out] = types;
        let operands = [
            Operand::new(x, &[n, h], noise(1).map(|x| 3.0 * x + 1.0)),
            Operand::new(weight, &[h], noise(2)),
            Operand::new(bias, &[h], noise(3)),
            Operand::garbage(out, &[n, h]),
            Operand::garbage(DType::F32, &[n]),
            Operand::garbage(DType::F32, &[n]),
        ];
        let [x, weight, bias, ..] = operands.each_ref().map(|o| &o.values);
        let (y, mean, rstd) = reference::layer_norm(x, weight, bias, EPSILON.into());
        let tolerance = 2e-6;
        check(
            &format!("{n} {h} {types:?}"),
            &operands,
            |cpu, t| {
                cpu.run(Norm::LayerNorm {
                    x: &t[0],
                    weight: &t[1],
                    bias: &t[2],
                    epsilon: EPSILON,
                    out: &t[3],
                    mean: &t[4],
                    rstd: &t[5],
                })
            },
            &[
                Expected { operand: 3, values: y, tolerance },
                Expected { operand: 4, values: mean, tolerance },
                Expected { operand: 5, values: rstd, tolerance },
            ],
        );
    }
}

#[test]
fn layer_norm_backward() {
    for ([n, h], types) in SHAPES.iter().flat_map(|shape| storages().map(|types| (*shape, types))) {
        let [x, weight, dout, dx, dweight, dbias] = types;
        let accumulate_weight = n % 2 == 0;
        let x = Operand::new(x, &[n, h], noise(1).map(|x| 3.0 * x + 1.0));
        let weight = Operand::new(weight, &[h], noise(2));
        let (_, mean, rstd) = reference::layer_norm(&x.values, &weight.values, &vec![0.0; h], EPSILON.into());
        let operands = [
            x,
            weight,
            Operand::new(DType::F32, &[n], mean),
            Operand::new(DType::F32, &[n], rstd),
            Operand::new(dout, &[n, h], noise(3)),
            Operand::new(dx, &[n, h], noise(4)),
            Operand::new(dweight, &[h], noise(5)),
            Operand::new(dbias, &[h], noise(6)),
        ];
        let [x, weight, mean, rstd, dout, base_dx, base_dweight, base_dbias] =
            operands.each_ref().map(|o| &o.values);
        let (dx, dweight, dbias) = reference::layer_norm_backward(x, weight, mean, rstd, dout);
        check(
            &format!("{n} {h} {types:?}"),
            &operands,
            |cpu, t| {
                cpu.run(Norm::LayerNormBackward {
                    x: &t[0],
                    weight: &t[1],
                    mean: &t[2],
                    rstd: &t[3],
                    dout: &t[4],
                    dx: &t[5],
                    dweight: Some(&t[6]),
                    dbias: Some(&t[7]),
                    accumulate_weight,
                })
            },
            &[
                Expected { operand: 5, values: sum(base_dx, &dx), tolerance: 1e-5 },
                accumulated(6, base_dweight, dweight, accumulate_weight),
                accumulated(7, base_dbias, dbias, accumulate_weight),
            ],
        );
    }
}

#[test]
fn bias_backward() {
    for ([n, h], [dout, dbias]) in SHAPES.iter().flat_map(|shape| storages().map(|types| (*shape, types))) {
        for accumulate in [false, true] {
            let operands = [Operand::new(dout, &[n, h], noise(1)), Operand::new(dbias, &[h], noise(2))];
            let mut sums = vec![0.0; h];
            for row in operands[0].values.chunks(h) {
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            check(
                &format!("{n} {h} {dout} {dbias} {accumulate}"),
                &operands,
                |cpu, t| cpu.run(Product::BiasBackward { dout: &t[0], dbias: &t[1], accumulate }),
                &[accumulated(1, &operands[1].values, sums, accumulate)],
            );
        }
    }
}

/// A row's results do not depend on how many rows there are: what decoding gives is what a whole sequence gives.
#[test]
fn a_row_alone() {
    let (n, h) = (40, 1100);
    for ([x, weight, out], isa) in storages().flat_map(|types| Isa::available().map(move |isa| (types, isa)))
    {
        let rows = Operand::new(x, &[n, h], noise(1));
        let last = rows.values[(n - 1) * h..].to_vec();
        let result = |x: Operand, n: usize| {
            let operands = [
                x,
                Operand::new(weight, &[h], noise(2)),
                Operand::garbage(out, &[n, h]),
                Operand::garbage(DType::F32, &[n]),
            ];
            let op: RunOp<'_> = &|cpu, t| {
                cpu.run(Norm::RmsNorm {
                    x: &t[0],
                    weight: &t[1],
                    weight_offset: 0.0,
                    epsilon: EPSILON,
                    out: &t[2],
                    rstd: &t[3],
                })
            };
            decode(out, &run(isa, 2, &operands, op).unwrap()[2])
        };
        let alone = result(Operand::new(x, &[1, h], last), 1);
        assert!(result(rows, n)[(n - 1) * h..] == alone, "{x} {weight} {out}, {isa}");
    }
}

#[test]
fn the_reference_gradients_are_derivatives() {
    let values = |seed, n| noise(seed).take(n).collect::<Vec<f64>>();
    let (x, weight, bias, dout) = (values(1, 15), values(2, 5), values(3, 5), values(4, 15));
    let dot = |out: &[f64]| out.iter().zip(&dout).map(|(a, b)| a * b).sum::<f64>();

    let rstd = reference::rms_norm(&x, &weight, 1e-5).1;
    let (dx, dweight) = reference::rms_norm_backward(&x, &weight, &rstd, &dout);
    check_gradient("rms dx", &x, &dx, |x| dot(&reference::rms_norm(x, &weight, 1e-5).0));
    check_gradient("rms dweight", &weight, &dweight, |w| dot(&reference::rms_norm(&x, w, 1e-5).0));

    let (_, mean, rstd) = reference::layer_norm(&x, &weight, &bias, 1e-5);
    let (dx, dweight, dbias) = reference::layer_norm_backward(&x, &weight, &mean, &rstd, &dout);
    check_gradient("layer dx", &x, &dx, |x| dot(&reference::layer_norm(x, &weight, &bias, 1e-5).0));
    check_gradient("layer dweight", &weight, &dweight, |w| dot(&reference::layer_norm(&x, w, &bias, 1e-5).0));
    check_gradient("layer dbias", &bias, &dbias, |b| dot(&reference::layer_norm(&x, &weight, b, 1e-5).0));
}

fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn accumulated(operand: usize, base: &[f64], gradient: Vec<f64>, accumulate: bool) -> Expected {
    let values = if accumulate { sum(base, &gradient) } else { gradient };
    Expected { operand, values, tolerance: 2e-6 }
}
