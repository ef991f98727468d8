//! SiLU, GELU and its tanh approximation, alone and gated; rotary embedding.

use plimsoll_device::{Activation, DType, DeviceExt, Glu, Tensor};

use crate::harness::{Expected, Operand, check, check_gradient, check_in_place, noise, storages};
use crate::reference::{act, act_slope};

const SIZES: [usize; 5] = [1, 7, 63, 1000, 20_000];
const ALL: [Glu; 3] = [Glu::Silu, Glu::Gelu, Glu::GeluTanh];

/// Of a value, or of the typical one: a few units in the last place.
const TOLERANCE: f64 = 4e-7;

#[test]
fn activate() {
    for ([x, out], activation) in storages().flat_map(|types| ALL.map(|a| (types, a))) {
        for n in SIZES {
            let operands = [Operand::new(x, &[n], noise(1).map(|x| 8.0 * x)), Operand::garbage(out, &[n])];
            let values = operands[0].values.iter().map(|x| act(activation, *x)).collect();
            check(
                &format!("{activation:?} {n} {x} {out}"),
                &operands,
                |cpu, t| cpu.run(Activation::Activate { x: &t[0], out: &t[1], activation }),
                &[Expected { operand: 1, values, tolerance: TOLERANCE }],
            );
        }
    }
}

/// The tails, where little is left of the value: relative errors.
#[test]
fn activate_far_out() {
    for activation in ALL {
        for x in (-100..100).map(|x| f64::from(x) / 8.0) {
            let operands = [Operand::new(DType::F32, &[1], [x]), Operand::garbage(DType::F32, &[1])];
            check(
                &format!("{activation:?} of {x}"),
                &operands,
                |cpu, t| cpu.run(Activation::Activate { x: &t[0], out: &t[1], activation }),
                &[Expected { operand: 1, values: vec![act(activation, x)], tolerance: 2e-5 }],
            );
        }
    }
}

#[test]
fn activate_of_special_values() {
    for activation in ALL {
        let x = [f64::NAN, 0.0, -0.0, 1e30, -1e30, 3e38];
        let values = vec![f64::NAN, 0.0, 0.0, 1e30, 0.0, 3e38];
        let operands = [Operand::new(DType::F32, &[6], x), Operand::garbage(DType::F32, &[6])];
        let expected = Expected { operand: 1, values, tolerance: TOLERANCE };
        let label = format!("{activation:?}");
        check(
            &label,
            &operands,
            |cpu, t| cpu.run(Activation::Activate { x: &t[0], out: &t[1], activation }),
            &[expected],
        );
    }
}

#[test]
fn activate_backward() {
    for ([x, dout, dx], activation) in storages().flat_map(|types| ALL.map(|a| (types, a))) {
        for n in SIZES {
            let operands = [
                Operand::new(x, &[n], noise(1).map(|x| 8.0 * x)),
                Operand::new(dout, &[n], noise(2)),
                Operand::garbage(dx, &[n]),
            ];
            let [xs, douts, _] = operands.each_ref().map(|o| &o.values);
            let values = xs.iter().zip(douts).map(|(x, dout)| dout * act_slope(activation, *x)).collect();
            check(
                &format!("{activation:?} {n} {x} {dout} {dx}"),
                &operands,
                |cpu, t| {
                    cpu.run(Activation::ActivateBackward { x: &t[0], dout: &t[1], dx: &t[2], activation })
                },
                &[Expected { operand: 2, values, tolerance: 4.0 * TOLERANCE }],
            );
        }
    }
}

#[test]
fn gated() {
    for ([gate, up, out], activation) in storages().flat_map(|types| ALL.map(|a| (types, a))) {
        for n in SIZES {
            let operands = [
                Operand::new(gate, &[n], noise(1).map(|x| 8.0 * x)),
                Operand::new(up, &[n], noise(2)),
                Operand::garbage(out, &[n]),
            ];
            let [gates, ups, _] = operands.each_ref().map(|o| &o.values);
            let values = gates.iter().zip(ups).map(|(gate, up)| act(activation, *gate) * up).collect();
            check(
                &format!("{activation:?} {n} {gate} {up} {out}"),
                &operands,
                |cpu, t| cpu.run(Activation::Gated { gate: &t[0], up: &t[1], out: &t[2], activation }),
                &[Expected { operand: 2, values, tolerance: TOLERANCE }],
            );
        }
    }
}

#[test]
fn gated_backward() {
    for (types, activation) in storages().flat_map(|types| ALL.map(|a| (types, a))) {
        let [gate, up, dout, dgate, dup] = types;
        for n in [7, 1000, 17_000] {
            let operands = [
                Operand::new(gate, &[n], noise(1).map(|x| 8.0 * x)),
                Operand::new(up, &[n], noise(2)),
                Operand::new(dout, &[n], noise(3)),
                Operand::garbage(dgate, &[n]),
                Operand::garbage(dup, &[n]),
            ];
            let [gates, ups, douts, ..] = operands.each_ref().map(|o| &o.values);
            let dgates = (0..n).map(|i| douts[i] * ups[i] * act_slope(activation, gates[i])).collect();
            let dups = (0..n).map(|i| douts[i] * act(activation, gates[i])).collect();
            check(
                &format!("{activation:?} {n} {types:?}"),
                &operands,
                |cpu, t| {
                    cpu.run(Activation::GatedBackward {
                        gate: &t[0],
                        up: &t[1],
                        dout: &t[2],
                        dgate: &t[3],
                        dup: &t[4],
                        activation,
                    })
                },
                &[
                    Expected { operand: 3, values: dgates, tolerance: 4.0 * TOLERANCE },
                    Expected { operand: 4, values: dups, tolerance: TOLERANCE },
                ],
            );
        }
    }
}

#[test]
fn in_place() {
    let n = 2500;
    let activation = Glu::Silu;
    for [a, b, c] in storages() {
        let label = format!("{a} {b} {c}");
        let inputs = [
            Operand::new(a, &[n], noise(1)),
            Operand::new(b, &[n], noise(2)),
            Operand::new(c, &[n], noise(3)),
        ];
        let with = |out| [inputs.to_vec(), vec![Operand::garbage(out, &[n])]].concat();
        check_in_place(
            &label,
            (
                &with(a),
                &|cpu, t| cpu.run(Activation::Gated { gate: &t[0], up: &t[1], out: &t[3], activation }),
                3,
            ),
            (
                &inputs,
                &|cpu, t| cpu.run(Activation::Gated { gate: &t[0], up: &t[1], out: &t[0], activation }),
                0,
            ),
        );
        check_in_place(
            &label,
            (
                &with(b),
                &|cpu, t| cpu.run(Activation::Gated { gate: &t[0], up: &t[1], out: &t[3], activation }),
                3,
            ),
            (
                &inputs,
                &|cpu, t| cpu.run(Activation::Gated { gate: &t[0], up: &t[1], out: &t[1], activation }),
                1,
            ),
        );
        check_in_place(
            &label,
            (&with(a), &|cpu, t| cpu.run(Activation::Activate { x: &t[0], out: &t[3], activation }), 3),
            (&inputs, &|cpu, t| cpu.run(Activation::Activate { x: &t[0], out: &t[0], activation }), 0),
        );
        for (out, operand) in [(0, a), (1, b)] {
            check_in_place(
                &label,
                (
                    &with(operand),
                    &|cpu, t| {
                        cpu.run(Activation::ActivateBackward { x: &t[0], dout: &t[1], dx: &t[3], activation })
                    },
                    3,
                ),
                (
                    &inputs,
                    &|cpu, t| {
                        cpu.run(Activation::ActivateBackward {
                            x: &t[0],
                            dout: &t[1],
                            dx: &t[out],
                            activation,
                        })
                    },
                    out,
                ),
            );
        }
        // (dgate, dup) in the places of (gate, up), (dout, up) and (gate, dout).
        for (dgate, dup) in [(0, 1), (2, 1), (0, 2)] {
            let types = [a, b, c];
            let apart = [
                inputs.to_vec(),
                vec![Operand::garbage(types[dgate], &[n]), Operand::garbage(types[dup], &[n])],
            ]
            .concat();
            for (apart_at, at) in [(3, dgate), (4, dup)] {
                check_in_place(
                    &label,
                    (&apart, &|cpu, t| cpu.run(swiglu_backward(t, 3, 4)), apart_at),
                    (&inputs, &|cpu, t| cpu.run(swiglu_backward(t, dgate, dup)), at),
                );
            }
        }
    }
}

fn swiglu_backward(t: &[Tensor], dgate: usize, dup: usize) -> Activation<'_> {
    Activation::GatedBackward {
        gate: &t[0],
        up: &t[1],
        dout: &t[2],
        dgate: &t[dgate],
        dup: &t[dup],
        activation: Glu::Silu,
    }
}

#[test]
fn the_reference_slopes_are_derivatives() {
    for activation in ALL {
        let x: Vec<f64> = (-40..40).map(|x| f64::from(x) / 8.0 + 0.01).collect();
        let slopes: Vec<f64> = x.iter().map(|x| act_slope(activation, *x)).collect();
        check_gradient(&format!("{activation:?}"), &x, &slopes, |x| {
            x.iter().map(|x| act(activation, *x)).sum()
        });
    }
}

/// The clamped SwiGLU and its slopes: value, that of the gate, that of up.
fn clamped(gate: f64, up: f64, alpha: f64, limit: f64) -> [f64; 3] {
    let (held_gate, held_up) = (gate.min(limit), up.clamp(-limit, limit));
    let s = 1.0 / (1.0 + (-alpha * held_gate).exp());
    let slope = s * (1.0 + alpha * held_gate * (1.0 - s));
    let of_gate = if gate > limit { 0.0 } else { (held_up + 1.0) * slope };
    let of_up = if up.abs() > limit { 0.0 } else { held_gate * s };
    [(held_up + 1.0) * held_gate * s, of_gate, of_up]
}

#[test]
fn clamped_swiglu() {
    let (alpha, limit) = (1.702f32, 2.5f32);
    for types in storages() {
        let [gate, up, dout, out, dgate, dup] = types;
        for n in [1, 63, 5000] {
            let operands = [
                Operand::new(gate, &[n], noise(1).map(|x| 5.0 * x)),
                Operand::new(up, &[n], noise(2).map(|x| 5.0 * x)),
                Operand::new(dout, &[n], noise(3)),
                Operand::garbage(out, &[n]),
                Operand::garbage(dgate, &[n]),
                Operand::garbage(dup, &[n]),
            ];
            let [gates, ups, douts, ..] = operands.each_ref().map(|o| &o.values);
            let of = |i: usize| clamped(gates[i], ups[i], f64::from(alpha), f64::from(limit));
            let values = |slope: usize| (0..n).map(|i| douts[i] * of(i)[slope]).collect();
            check(
                &format!("{n} {types:?}"),
                &operands,
                |cpu, t| {
                    let (gate, up, dout) = (&t[0], &t[1], &t[2]);
                    cpu.run(Activation::ClampedSwiglu { gate, up, out: &t[3], alpha, limit })?;
                    let (dgate, dup) = (&t[4], &t[5]);
                    cpu.run(Activation::ClampedSwigluBackward { gate, up, dout, dgate, dup, alpha, limit })
                },
                &[
                    Expected { operand: 3, values: (0..n).map(|i| of(i)[0]).collect(), tolerance: TOLERANCE },
                    Expected { operand: 4, values: values(1), tolerance: 4.0 * TOLERANCE },
                    Expected { operand: 5, values: values(2), tolerance: TOLERANCE },
                ],
            );
        }
    }
}

#[test]
fn clamped_swiglu_in_place_and_of_special_values() {
    let (alpha, limit) = (1.702f32, 7.0f32);
    for [a, b] in storages() {
        let inputs = [
            Operand::new(a, &[2500], noise(1).map(|x| 9.0 * x)),
            Operand::new(b, &[2500], noise(2).map(|x| 9.0 * x)),
            Operand::garbage(b, &[2500]),
        ];
        check_in_place(
            &format!("{a} {b}"),
            (
                &inputs,
                &|cpu, t| {
                    cpu.run(Activation::ClampedSwiglu { gate: &t[0], up: &t[1], out: &t[2], alpha, limit })
                },
                2,
            ),
            (
                &inputs,
                &|cpu, t| {
                    cpu.run(Activation::ClampedSwiglu { gate: &t[0], up: &t[1], out: &t[1], alpha, limit })
                },
                1,
            ),
        );
    }
    let gates = [f64::NAN, 1.0, 1e30, -1e30, 7.5];
    let ups = [1.0, f64::NAN, 1e30, 1e30, -1e30];
    let value = |(gate, up): (f64, f64)| match gate.is_nan() || up.is_nan() {
        true => f64::NAN,
        false => clamped(gate, up, f64::from(alpha), f64::from(limit))[0],
    };
    let operands = [
        Operand::new(DType::F32, &[5], gates),
        Operand::new(DType::F32, &[5], ups),
        Operand::garbage(DType::F32, &[5]),
    ];
    check(
        "special values",
        &operands,
        |cpu, t| cpu.run(Activation::ClampedSwiglu { gate: &t[0], up: &t[1], out: &t[2], alpha, limit }),
        &[Expected {
            operand: 2,
            values: gates.into_iter().zip(ups).map(value).collect(),
            tolerance: TOLERANCE,
        }],
    );
}
