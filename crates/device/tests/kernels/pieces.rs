//! What is computed from pieces of a table has the bits of what is computed from the whole.

use std::ops::Range;

use half::bf16;
use plimsoll_device::cpu::Isa;
use plimsoll_device::{
    Adam, BLOCK_8BIT, Codes, Compute, DType, DeviceExt, Elementwise, Embedding, IGNORED_TARGET, Lion, Loss,
    PIECE_ROWS, Product, Rounding, Rule, Sgd, Tensor, Update,
};

use crate::harness::{Operand, RunOp, decode, factor, noise, refusal, run};

const PIECE: usize = PIECE_ROWS as usize;

/// Rows cut into pieces of one, and of one to three times [`PIECE_ROWS`].
fn cuts(rows: usize) -> [Vec<Range<usize>>; 2] {
    let cut = |lengths: &[usize]| {
        let mut start = 0;
        let mut pieces = Vec::new();
        for length in lengths.iter().cycle() {
            if start >= rows {
                break;
            }
            pieces.push(start..rows.min(start + length * PIECE));
            start += length * PIECE;
        }
        pieces
    };
    [cut(&[1]), cut(&[2, 1, 3])]
}

/// Some columns of a matrix.
fn columns_of(x: &[f64], columns: usize, range: &Range<usize>) -> Vec<f64> {
    x.chunks(columns).flat_map(|row| &row[range.clone()]).copied().collect()
}

/// What the operation leaves in the operand of that number, alone and on three threads.
fn result(isa: Isa, operands: &[Operand], dtype: DType, number: usize, op: RunOp<'_>) -> Vec<f64> {
    let alone = run(isa, 1, operands, op).unwrap();
    assert!(alone == run(isa, 3, operands, op).unwrap(), "{isa}: three threads give other bits than one");
    decode(dtype, &alone[number])
}

fn assert_same(label: &str, whole: &[f64], pieces: &[f64]) {
    assert_eq!(whole.len(), pieces.len(), "{label}");
    let differing = whole.iter().zip(pieces).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(differing, None, "{label}: the first element that differs");
}

/// Every instruction set, precision, type of weights and number of tokens; vocabulary and hidden size.
fn products(mut body: impl FnMut(&str, Isa, Compute, DType, [usize; 3])) {
    for isa in Isa::available() {
        for compute in [Compute::F32, Compute::Bf16] {
            for dtype in [DType::F32, DType::Bf16] {
                for [n, v, h] in [
                    [1, 5197, 72],
                    [3, 4096, 40],
                    [16, 5197, 33],
                    [24, 3000, 64],
                    [25, 3000, 64],
                    [129, 5197, 72],
                ] {
                    body(&format!("{isa} {compute:?} {dtype} {n} {v} {h}"), isa, compute, dtype, [n, v, h]);
                }
            }
        }
    }
}

#[test]
fn logits() {
    products(|label, isa, compute, dtype, [n, v, h]| {
        let x = Operand::new(dtype, &[n, h], noise(1));
        let weight = Operand::new(dtype, &[v, h], noise(2));
        let logits_of = |rows: &Range<usize>| {
            let weight = Operand::new(dtype, &[rows.len(), h], weight.values[rows.start * h..].to_vec());
            let operands = [x.clone(), weight, Operand::garbage(DType::F32, &[n, rows.len()])];
            result(isa, &operands, DType::F32, 2, &|cpu, t| {
                cpu.run(Product::Linear {
                    x: &t[0],
                    weight: &t[1],
                    bias: None,
                    out: &t[2],
                    accumulate: false,
                    compute,
                })
            })
        };
        let whole = logits_of(&(0..v));
        for pieces in cuts(v) {
            for piece in pieces {
                assert_same(label, &columns_of(&whole, v, &piece), &logits_of(&piece));
            }
        }
    });
}

#[test]
fn input_gradients() {
    products(|label, isa, compute, dtype, [n, v, h]| {
        let dlogits: Vec<f64> = noise(1).take(n * v).collect();
        let weight: Vec<f64> = noise(2).take(v * h).collect();
        let gradient = |rows: &Range<usize>, before: Option<&[f64]>, out: DType| {
            let dx =
                before.map_or(Operand::garbage(out, &[n, h]), |x| Operand::new(out, &[n, h], x.to_vec()));
            let operands = [
                Operand::new(DType::F32, &[n, rows.len()], columns_of(&dlogits, v, rows)),
                Operand::new(dtype, &[rows.len(), h], weight[rows.start * h..].to_vec()),
                dx,
            ];
            result(isa, &operands, out, 2, &|cpu, t| {
                cpu.run(Product::LinearBackwardInput {
                    dout: &t[0],
                    weight: &t[1],
                    dx: &t[2],
                    accumulate: before.is_some(),
                    compute,
                })
            })
        };
        let whole = gradient(&(0..v), None, DType::F32);
        for pieces in cuts(v) {
            let mut sum: Option<Vec<f64>> = None;
            for piece in pieces {
                sum = Some(gradient(&piece, sum.as_deref(), DType::F32));
            }
            assert_same(label, &whole, &sum.unwrap());
        }
        let operands = [Operand::new(DType::F32, &[n, h], whole), Operand::garbage(DType::Bf16, &[n, h])];
        let cast = result(isa, &operands, DType::Bf16, 1, &|cpu, t| {
            cpu.run(Elementwise::Cast { x: &t[0], out: &t[1], rounding: Rounding::Nearest })
        });
        assert_same(&format!("{label}, cast"), &gradient(&(0..v), None, DType::Bf16), &cast);
    });
}

/// Over two chunks of tokens, of which the second is added to the first, stochastically in a narrow gradient.
#[test]
fn weight_gradients() {
    let check = |label: &str, isa, compute, dtype, [n, v, h]: [usize; 3]| {
        let chunks = [0..n.div_ceil(2), n.div_ceil(2)..n];
        let dlogits: Vec<f64> = noise(1).take(n * v).collect();
        let x: Vec<f64> = noise(2).take(n * h).collect();
        let gradient = |rows: &Range<usize>| {
            let mut sum: Option<Vec<f64>> = None;
            for (seed, tokens) in (5..).zip(&chunks) {
                let dlogits = columns_of(&dlogits[tokens.start * v..tokens.end * v], v, rows);
                let before = sum.take();
                let accumulate = before.is_some();
                let sizes = [rows.len(), h];
                let operands = [
                    Operand::new(DType::F32, &[tokens.len(), rows.len()], dlogits),
                    Operand::new(dtype, &[tokens.len(), h], x[tokens.start * h..].to_vec()),
                    before.map_or(Operand::garbage(dtype, &sizes), |x| Operand::new(dtype, &sizes, x)),
                ];
                let rounding = Rounding::Stochastic { seed, first: (rows.start * h) as u64 };
                sum = Some(result(isa, &operands, dtype, 2, &|cpu, t| {
                    cpu.run(Product::LinearBackwardWeight {
                        dout: &t[0],
                        x: &t[1],
                        dweight: &t[2],
                        accumulate,
                        rounding,
                        compute,
                    })
                }));
            }
            sum.unwrap()
        };
        let whole = gradient(&(0..v));
        for pieces in cuts(v) {
            for piece in pieces {
                assert_same(label, &whole[piece.start * h..piece.end * h], &gradient(&piece));
            }
        }
    };
    products(check);
    // Several blocks of tokens, whose sums a narrow gradient cannot hold.
    check("many tokens", Isa::detect(), Compute::Bf16, DType::Bf16, [3300, 1100, 40]);
    check("many tokens", Isa::detect(), Compute::F32, DType::Bf16, [1800, 1100, 40]);
}

/// Logits, targets, weights; two rows have no target, others' lie in all pieces.
fn labelled_logits(n: usize, v: usize) -> [Operand; 3] {
    let mut targets: Vec<u32> = (0..n).map(|i| (v - 1 - i * 811 % v) as u32).collect();
    targets.iter_mut().skip(1).step_by(4).for_each(|target| *target = IGNORED_TARGET);
    [
        // Runs of very different sizes.
        Operand::new(
            DType::F32,
            &[n, v],
            noise(1).enumerate().map(move |(i, x)| x * 8.0 + ((i % v) / PIECE * 37 % 50) as f64),
        ),
        Operand::u32s(&targets),
        Operand::new(DType::F32, &[n], noise(3).map(|x| 1.0 + x)),
    ]
}

#[test]
fn loss_and_its_gradient() {
    for ([n, v], cap) in
        [[1, 700], [9, 5197], [6, 4096], [2, 20_000]].iter().flat_map(|s| [(s, None), (s, Some(20.0))])
    {
        let (n, v) = (*n, *v);
        let [logits, targets, weights] = labelled_logits(n, v);
        let garbage = |sizes: &[usize]| Operand::garbage(DType::F32, sizes);
        for (isa, weighted) in Isa::available().flat_map(|isa| [(isa, false), (isa, true)]) {
            let label = format!("{isa} {n} {v} {cap:?} {weighted}");
            let whole = |gradient_scale, operand| {
                let operands = [logits.clone(), targets.clone(), garbage(&[n]), weights.clone()];
                result(isa, &operands, DType::F32, operand, &|cpu, t| {
                    cpu.run(Loss::CrossEntropy {
                        logits: &t[0],
                        targets: &t[1],
                        weights: weighted.then_some(&t[3]),
                        losses: &t[2],
                        soft_cap: cap,
                        gradient_scale,
                    })
                })
            };
            let (losses, gradient) = (whole(Some(0.125), 2), whole(Some(0.125), 0));
            assert_same(&label, &losses, &whole(None, 2));
            for pieces in cuts(v) {
                let piece_of = |piece: &Range<usize>| {
                    Operand::new(DType::F32, &[n, piece.len()], columns_of(&logits.values, v, piece))
                };
                let mut runs = garbage(&[n, 2 * v.div_ceil(PIECE)]);
                let mut target_logits = garbage(&[n]);
                for piece in &pieces {
                    let operands = [piece_of(piece), targets.clone(), runs.clone(), target_logits.clone()];
                    let op: RunOp<'_> = &|cpu, t| {
                        cpu.run(Loss::LogitRuns {
                            logits: &t[0],
                            first_column: piece.start as u64,
                            targets: &t[1],
                            soft_cap: cap,
                            runs: &t[2],
                            target_logits: &t[3],
                        })
                    };
                    let after = |operand| result(isa, &operands, DType::F32, operand, op);
                    assert_same(&label, &operands[0].values, &after(0));
                    runs = Operand::new(DType::F32, &[n, 2 * v.div_ceil(PIECE)], after(2));
                    target_logits = Operand::new(DType::F32, &[n], after(3));
                }
                assert!(runs.values.iter().all(|x| x.is_finite()), "{label}: all runs are written");
                let operands = [runs.clone(), target_logits, targets.clone(), weights.clone(), garbage(&[n])];
                let by_runs = result(isa, &operands, DType::F32, 4, &|cpu, t| {
                    cpu.run(Loss::LossOfRuns {
                        runs: &t[0],
                        target_logits: &t[1],
                        targets: &t[2],
                        weights: weighted.then_some(&t[3]),
                        losses: &t[4],
                    })
                });
                assert_same(&label, &losses, &by_runs);
                for piece in &pieces {
                    let operands = [piece_of(piece), targets.clone(), runs.clone(), weights.clone()];
                    let by_runs = result(isa, &operands, DType::F32, 0, &|cpu, t| {
                        cpu.run(Loss::GradientOfRuns {
                            logits: &t[0],
                            first_column: piece.start as u64,
                            targets: &t[1],
                            weights: weighted.then_some(&t[3]),
                            runs: &t[2],
                            soft_cap: cap,
                            gradient_scale: 0.125,
                        })
                    });
                    assert_same(&label, &columns_of(&gradient, v, piece), &by_runs);
                }
            }
        }
    }
}

/// The last piece shows where the vocabulary ends.
#[test]
fn targets_outside_the_vocabulary_are_refused() {
    let runs_of = |columns: usize, first_column, target| {
        let operands = [
            Operand::new(DType::F32, &[1, columns], noise(1)),
            Operand::u32s(&[target]),
            Operand::garbage(DType::F32, &[1, 4]),
            Operand::garbage(DType::F32, &[1]),
        ];
        refusal(&operands, |cpu, t| {
            cpu.run(Loss::LogitRuns {
                logits: &t[0],
                first_column,
                targets: &t[1],
                soft_cap: None,
                runs: &t[2],
                target_logits: &t[3],
            })
        })
    };
    assert_eq!(runs_of(1024, 0, 2047), "accepted");
    assert_eq!(runs_of(1024, 0, 2048), "logit_runs: target 2048 at 0 is outside operand f32[1, 1024]");
    assert_eq!(runs_of(10, 1024, 1033), "accepted");
    assert_eq!(runs_of(10, 1024, 1034), "logit_runs: target 1034 at 0 is outside operand f32[1, 10]");
    assert_eq!(runs_of(10, 1024, IGNORED_TARGET), "accepted");
}

#[test]
fn gradients_of_tables() {
    let (n, v, h) = (700, 11, 40);
    let tokens: Vec<u32> = (0..n).map(|i| (i * i % v) as u32).collect();
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let dout = Operand::new(DType::F32, &[n, h], noise(1));
        let table: Vec<f64> = noise(2).take(v * h).collect();
        for isa in Isa::available() {
            let gradient = |rows: &Range<usize>| {
                let rounding = Rounding::Stochastic { seed: 7, first: (rows.start * h) as u64 };
                let dtable = Operand::new(dtype, &[rows.len(), h], table[rows.start * h..].to_vec());
                let operands = [Operand::u32s(&tokens), dout.clone(), dtable];
                result(isa, &operands, dtype, 2, &|cpu, t| {
                    cpu.run(Embedding::Backward {
                        tokens: &t[0],
                        dout: &t[1],
                        dtable: &t[2],
                        first_row: rows.start as u64,
                        rounding,
                    })
                })
            };
            let whole = gradient(&(0..v));
            for piece in [0..1, 1..5, 5..10, 10..11] {
                let label = format!("{isa} {dtype} {piece:?}");
                assert_same(&label, &whole[piece.start * h..piece.end * h], &gradient(&piece));
            }
        }
    }
}

/// Parameter, gradient, and three states or parts of them.
type MakeRule = for<'a> fn(&'a [Tensor]) -> Rule<'a>;

#[test]
fn updates() {
    let n = 5000;
    let rules: [(&str, &[DType], MakeRule); 6] = [
        ("adamw", &[DType::F32, DType::F32], |t| Rule::AdamW { m: &t[2], v: &t[3], hyper: HYPER }),
        ("adamw, bf16", &[DType::Bf16, DType::Bf16], |t| Rule::AdamW { m: &t[2], v: &t[3], hyper: HYPER }),
        ("lion", &[DType::Bf16], |t| Rule::Lion { m: &t[2], hyper: LION }),
        ("sgd", &[DType::F32], |t| Rule::Sgd { m: Some(&t[2]), hyper: SGD }),
        ("lion_8bit", &[DType::U8, DType::F32], |t| Rule::Lion8bit {
            m: Codes { codes: &t[2], absmax: &t[3] },
            hyper: LION,
        }),
        ("adamw_8bit", &[DType::U8, DType::F32, DType::U8, DType::F32], |t| Rule::AdamW8bit {
            m: Codes { codes: &t[2], absmax: &t[3] },
            v: Codes { codes: &t[4], absmax: &t[5] },
            hyper: HYPER,
        }),
    ];
    for (name, states, rule) in rules {
        let in_blocks = name.ends_with("8bit");
        for (isa, first) in Isa::available().flat_map(|isa| [(isa, 0), (isa, (1 << 32) - 1500)]) {
            let step = |range: &Range<usize>| -> Vec<Vec<f64>> {
                let part = |dtype, seed, block: usize| {
                    let values: Vec<f64> = match dtype {
                        DType::U8 => noise(seed).map(|x| (x * 100.0 + 128.0).floor()).take(n).collect(),
                        _ => noise(seed).map(|x| (x * 0.1).abs()).take(n.div_ceil(block)).collect(),
                    };
                    let range = range.start / block..range.end.div_ceil(block);
                    Operand::new(dtype, &[range.len()], values[range].to_vec())
                };
                let mut operands = vec![part(DType::Bf16, 1, 1), part(DType::F32, 2, 1)];
                for (seed, dtype) in (3..).zip(states) {
                    let block = if in_blocks && *dtype == DType::F32 { BLOCK_8BIT as usize } else { 1 };
                    operands.push(part(*dtype, seed, block));
                }
                let rounding = Rounding::Stochastic { seed: 3, first: first + range.start as u64 };
                let op: RunOp<'_> = &|cpu, t| {
                    let factor = factor(cpu, 0.5)?;
                    cpu.run(Update {
                        param: &t[0],
                        master: None,
                        grad: &t[1],
                        grad_scale: Some(&factor),
                        rounding,
                        rule: rule(t),
                    })
                };
                let types = [DType::Bf16, DType::F32].into_iter().chain(states.iter().copied());
                types.enumerate().map(|(i, dtype)| result(isa, &operands, dtype, i, op)).collect()
            };
            let whole = step(&(0..n));
            let mut pieces = vec![Vec::new(); whole.len()];
            for range in [0..1024, 1024..3072, 3072..n] {
                pieces.iter_mut().zip(step(&range)).for_each(|(all, piece)| all.extend(piece));
            }
            for (whole, pieces) in whole.iter().zip(&pieces) {
                assert_same(&format!("{name} {isa} {first}"), whole, pieces);
            }
        }
    }
}

const HYPER: Adam = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, step: 3 };
const LION: Lion = Lion { lr: 1e-3, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
const SGD: Sgd =
    Sgd { lr: 1e-2, momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.1, first: false };

/// Wherever a piece begins, random numbers whose index does not fit 32 bits included.
#[test]
fn stochastic_casts() {
    let n = 3000;
    for (isa, first) in Isa::available().flat_map(|isa| [(isa, 0), (isa, 77), (isa, (1 << 32) - 700)]) {
        for dtype in [DType::Bf16, DType::F16] {
            let cast = |range: &Range<usize>| {
                let rounding = Rounding::Stochastic { seed: 9, first: first + range.start as u64 };
                let operands = [
                    Operand::new(DType::F32, &[range.len()], noise(1).skip(range.start)),
                    Operand::garbage(dtype, &[range.len()]),
                ];
                result(isa, &operands, dtype, 1, &|cpu, t| {
                    cpu.run(Elementwise::Cast { x: &t[0], out: &t[1], rounding })
                })
            };
            let whole = cast(&(0..n));
            for piece in [0..1, 1..500, 500..2900, 2900..n] {
                assert_same(&format!("{isa} {first} {piece:?}"), &whole[piece.clone()], &cast(&piece));
            }
        }
    }
}

/// Numbers too small for normal ones too: products that write bf16 round those as well.
#[test]
fn casts_to_nearest() {
    let bits = (0..5000u32).map(|i| i.wrapping_mul(0x9e37_79b9) >> if i % 3 == 0 { 9 } else { 0 });
    let values: Vec<f32> = bits.map(f32::from_bits).filter(|x| x.is_finite()).collect();
    let operands = [
        Operand::new(DType::F32, &[values.len()], values.iter().map(|x| f64::from(*x))),
        Operand::garbage(DType::Bf16, &[values.len()]),
    ];
    let want: Vec<f64> = values.iter().map(|x| bf16::from_f32(*x).to_f64()).collect();
    for isa in Isa::available() {
        let rounding = Rounding::Nearest;
        let got = result(isa, &operands, DType::Bf16, 1, &|cpu, t| {
            cpu.run(Elementwise::Cast { x: &t[0], out: &t[1], rounding })
        });
        assert_same(&isa.to_string(), &want, &got);
    }
}
