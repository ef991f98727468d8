//! 8-bit floats and products of them, against PyTorch's and against sums in f64 (`docs/bench/fp8_fixtures.py`).

use plimsoll_device::cpu::Isa;
use plimsoll_device::{Compute, DType, DeviceExt, Elementwise, Product, Quantization, Rounding};
use serde_json::Value;

use crate::harness::{Expected, Operand, RunOp, check, decode, noise, refusal, run};

fn fixtures() -> Value {
    serde_json::from_str(include_str!("../fixtures/fp8.json")).unwrap()
}

fn numbers(of: &Value) -> Vec<f64> {
    of.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn bytes(of: &Value) -> Vec<u8> {
    let digits = of.as_str().unwrap().as_bytes();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// A tensor of 8-bit floats with its factor.
fn stored(dtype: DType, sizes: &[usize], factor: f32, codes: &[u8]) -> Operand {
    Operand::blocks(dtype, sizes, factor.to_ne_bytes().into_iter().chain(codes.iter().copied()).collect())
}

fn room(dtype: DType, sizes: &[usize]) -> Operand {
    stored(dtype, sizes, -1.0, &vec![0x55; sizes.iter().product()])
}

/// What the operation makes of `x`, on every instruction set and number of threads.
fn quantised(dtype: DType, x: &Operand, sizes: &[usize]) -> Vec<u8> {
    let operands = [x.clone(), room(dtype, sizes)];
    let make = |isa, threads| {
        let result = run(isa, threads, &operands, &|cpu, t| {
            cpu.run(Quantization::QuantizeFp8 { x: &t[0], out: &t[1] })
        })
        .unwrap()
        .remove(1);
        let (factor, codes) = result.split_first_chunk::<4>().unwrap();
        (f32::from_ne_bytes(*factor), codes.to_vec(), result)
    };
    let (_, _, first) = make(Isa::detect(), 1);
    for isa in Isa::available() {
        for threads in [1, 2, 3] {
            assert!(make(isa, threads).2 == first, "{isa}, {threads} threads");
        }
    }
    first
}

/// The value of a code, by the definition.
fn value(dtype: DType, code: u8) -> f64 {
    let (mantissa, bias) = if dtype == DType::F8E4m3 { (3, 7) } else { (2, 15) };
    let (exponent, fraction) = (i32::from(code & 0x7f) >> mantissa, i32::from(code) & ((1 << mantissa) - 1));
    let fraction = f64::from(fraction) / f64::from(1 << mantissa);
    let size = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    };
    if code & 0x80 == 0 { size } else { -size }
}

fn values(dtype: DType, stored: &[u8]) -> Vec<f64> {
    let (factor, codes) = stored.split_first_chunk::<4>().unwrap();
    let factor = f64::from(f32::from_ne_bytes(*factor));
    codes.iter().map(|code| value(dtype, *code) * factor).collect()
}

#[test]
fn codes_are_those_of_pytorch() {
    let casts = &fixtures()["casts"];
    let xs = numbers(&casts["x"]);
    for (dtype, name, most) in [(DType::F8E4m3, "e4m3", 448.0), (DType::F8E5m2, "e5m2", 57344.0)] {
        let codes = bytes(&casts[name]);
        // The largest magnitude makes the scale 1; what is larger than it has a test of its own.
        let (x, codes): (Vec<f64>, Vec<u8>) =
            xs.iter().zip(codes).filter(|(x, _)| x.abs() <= most).map(|(x, code)| (*x, code)).unzip();
        let n = x.len();
        let got = quantised(dtype, &Operand::new(DType::F32, &[n], x.clone()), &[n]);
        assert_eq!(got[..4], 1f32.to_ne_bytes());
        for (i, (got, want)) in got[4..].iter().zip(&codes).enumerate() {
            assert_eq!(got, want, "{name} of {}", x[i]);
        }
    }
}

#[test]
fn products_are_those_of_pytorch() {
    let all = &fixtures()["products"];
    let size = |name: &str| all[name].as_u64().unwrap() as usize;
    let [n, i, o] = ["tokens", "inputs", "outputs"].map(size);
    let operand = |name: &str, dtype, sizes: &[usize]| {
        let one = &all[name];
        let x = Operand::new(DType::F32, sizes, numbers(&one["values"]));
        let got = quantised(dtype, &x, sizes);
        assert_eq!(got[..4], (one["factor"].as_f64().unwrap() as f32).to_ne_bytes(), "{name}");
        assert_eq!(got[4..], bytes(&one["codes"]), "{name}");
        Operand::blocks(dtype, sizes, got)
    };
    let x = operand("x", DType::F8E4m3, &[n, i]);
    let weight = operand("weight", DType::F8E4m3, &[o, i]);
    let dout = operand("dout", DType::F8E5m2, &[n, o]);
    for compute in [Compute::Bf16, Compute::F32] {
        let expected = |name: &str| [Expected { operand: 2, values: numbers(&all[name]), tolerance: 1e-6 }];
        let operands = [x.clone(), weight.clone(), Operand::garbage(DType::F32, &[n, o])];
        check(
            "forward",
            &operands,
            |cpu, t| {
                cpu.run(Product::Linear {
                    x: &t[0],
                    weight: &t[1],
                    bias: None,
                    out: &t[2],
                    accumulate: false,
                    compute,
                })
            },
            &expected("out"),
        );
        let operands = [dout.clone(), weight.clone(), Operand::garbage(DType::F32, &[n, i])];
        check(
            "backward, input",
            &operands,
            |cpu, t| {
                cpu.run(Product::LinearBackwardInput {
                    dout: &t[0],
                    weight: &t[1],
                    dx: &t[2],
                    accumulate: false,
                    compute,
                })
            },
            &expected("dx"),
        );
        let operands = [dout.clone(), x.clone(), Operand::garbage(DType::F32, &[o, i])];
        check(
            "backward, weight",
            &operands,
            |cpu, t| {
                cpu.run(Product::LinearBackwardWeight {
                    dout: &t[0],
                    x: &t[1],
                    dweight: &t[2],
                    accumulate: false,
                    rounding: Rounding::Nearest,
                    compute,
                })
            },
            &expected("dweight"),
        );
    }
}

/// Products of all shapes, with one operand or both in 8 bits, are those of the very values in f32.
#[test]
fn operands_are_read_as_they_are_stored() {
    for (n, i, o) in [(1, 1, 1), (3, 70, 5), (33, 300, 45), (61, 45, 70)] {
        for (a, b) in [
            (DType::F8E4m3, DType::F8E4m3),
            (DType::F8E5m2, DType::F8E4m3),
            (DType::Bf16, DType::F8E4m3),
            (DType::F8E5m2, DType::Bf16),
        ] {
            let make = |dtype: DType, sizes: [usize; 2], seed| {
                let x = Operand::new(DType::Bf16, &sizes, noise(seed).map(|x| 37.0 * x));
                if !dtype.is_fp8() {
                    return (x.clone(), x);
                }
                let stored = quantised(dtype, &x, &sizes);
                let values = Operand::new(DType::Bf16, &sizes, values(dtype, &stored));
                (Operand::blocks(dtype, &sizes, stored), values)
            };
            let (x, weight, dout) = (make(a, [n, i], 1), make(b, [o, i], 2), make(a, [n, o], 3));
            let compare = |a: &(Operand, Operand), b: &(Operand, Operand), sizes: &[usize], op: RunOp<'_>| {
                let out = Operand::new(DType::Bf16, sizes, noise(4));
                for isa in Isa::available() {
                    let run = |a: &Operand, b: &Operand| {
                        let operands = [a.clone(), b.clone(), out.clone()];
                        decode(DType::Bf16, &run(isa, 2, &operands, op).unwrap()[2])
                    };
                    let (got, want) = (run(&a.0, &b.0), run(&a.1, &b.1));
                    // Few rows of 8-bit floats are summed in another order than those of bf16.
                    let near = |a: &f64, b: &f64| (a - b).abs() <= 0.01 * b.abs().max(1.0);
                    assert!(
                        if n > 24 { got == want } else { got.iter().zip(&want).all(|(a, b)| near(a, b)) },
                        "{isa} {n} {i} {o}: {got:?} {want:?}"
                    );
                }
            };
            let (accumulate, compute) = (true, Compute::Bf16);
            compare(&x, &weight, &[n, o], &|cpu, t| {
                cpu.run(Product::Linear {
                    x: &t[0],
                    weight: &t[1],
                    bias: None,
                    out: &t[2],
                    accumulate,
                    compute,
                })
            });
            compare(&dout, &weight, &[n, i], &|cpu, t| {
                cpu.run(Product::LinearBackwardInput {
                    dout: &t[0],
                    weight: &t[1],
                    dx: &t[2],
                    accumulate,
                    compute,
                })
            });
            compare(&dout, &x, &[o, i], &|cpu, t| {
                cpu.run(Product::LinearBackwardWeight {
                    dout: &t[0],
                    x: &t[1],
                    dweight: &t[2],
                    accumulate,
                    rounding: Rounding::Nearest,
                    compute,
                })
            });
        }
    }
}

/// Once a tensor is quantised, so are its rows: doing it again gives the same numbers.
#[test]
fn twice_is_once() {
    for dtype in [DType::F8E4m3, DType::F8E5m2] {
        for size in [1e-30, 3e-4, 1.0, 700.0, 1e20] {
            let (rows, columns) = (20, 50);
            let spread = |i: usize| 10f64.powi(-(i as i32 % 9));
            let x = noise(5).enumerate().map(|(i, x)| size * spread(i) * x);
            let once = quantised(dtype, &Operand::new(DType::F32, &[rows, columns], x), &[rows, columns]);
            let once = values(dtype, &once);
            for part in [0..rows, 0..1, 3..7] {
                let part = &once[part.start * columns..part.end * columns];
                let again = Operand::new(DType::Bf16, &[part.len()], part.iter().copied());
                assert_eq!(again.values, part, "bf16 does not hold the values");
                assert_eq!(values(dtype, &quantised(dtype, &again, &[part.len()])), part);
            }
        }
    }
}

#[test]
fn zeros_stay_zeros_and_what_is_not_finite_is_not_hidden() {
    for dtype in [DType::F8E4m3, DType::F8E5m2] {
        let zeros = quantised(dtype, &Operand::new(DType::Bf16, &[70], std::iter::repeat(0.0)), &[70]);
        assert_eq!(zeros[..4], 1f32.to_ne_bytes());
        assert!(zeros[4..].iter().all(|code| *code == 0));
        for bad in [f64::NAN, f64::INFINITY] {
            let mut x: Vec<f64> = noise(1).take(70 * 30).collect();
            x[17] = bad;
            let stored = quantised(dtype, &Operand::new(DType::F32, &[30, 70], x), &[30, 70]);
            assert!(f32::from_ne_bytes(stored[..4].try_into().unwrap()).is_nan());
            let operands = [
                Operand::blocks(dtype, &[30, 70], stored),
                Operand::new(DType::F32, &[5, 70], std::iter::repeat(0.0)),
                Operand::garbage(DType::F32, &[30, 5]),
            ];
            let out = run(Isa::detect(), 1, &operands, &|cpu, t| {
                cpu.run(Product::Linear {
                    x: &t[0],
                    weight: &t[1],
                    bias: None,
                    out: &t[2],
                    accumulate: false,
                    compute: Compute::Bf16,
                })
            })
            .unwrap();
            assert!(decode(DType::F32, &out[2]).iter().all(|x| x.is_nan()));
        }
    }
}

#[test]
fn other_uses_are_refused() {
    let operands = [
        Operand::new(DType::F32, &[4, 8], noise(1)),
        room(DType::F8E4m3, &[4, 8]),
        Operand::garbage(DType::F32, &[4, 4]),
        Operand::garbage(DType::F32, &[4, 8]),
    ];
    let words = refusal(&operands, |cpu, t| cpu.run(Quantization::QuantizeFp8 { x: &t[0], out: &t[3] }));
    assert!(words.contains("is not e4m3 or e5m2"), "{words}");
    let words = refusal(&operands, |cpu, t| cpu.run(Quantization::QuantizeFp8 { x: &t[1], out: &t[1] }));
    assert!(words.contains("overlaps"), "{words}");
    let words = refusal(&operands, |cpu, t| cpu.run(Elementwise::Add { a: &t[0], b: &t[1], out: &t[3] }));
    assert!(words.contains("is not f32, bf16 or f16"), "{words}");
    let words = refusal(&operands, |cpu, t| {
        cpu.run(Elementwise::Cast { x: &t[1], out: &t[3], rounding: Rounding::Nearest })
    });
    assert!(words.contains("codes are not cast"), "{words}");
}
