//! The way of tokens to experts and back, and products with a matrix for each group of rows, against plain f64.

use plimsoll_device::{
    Capacity, Compute, DType, DeviceExt, GroupedProduct, LoadRatio, NOWHERE, Product, Rounding, Router,
    RouterGroups, Routing, WeightedBias,
};

use crate::harness::{
    Expected, Operand, check, check_gradient_within, check_in_place, decode, noise, refusal, run, storages,
};
use DType::{F32, F64, U32};
use plimsoll_device::cpu::Isa;

/// Rows, inputs, outputs of each matrix, and how many rows each has.
const GROUPS: [(usize, usize, usize, &[u32]); 5] = [
    (1, 1, 1, &[1]),
    (7, 5, 3, &[0, 4, 0, 3, 0]),
    (60, 33, 40, &[25, 1, 30]),
    (60, 64, 32, &[60, 0]),
    // Five rows have no matrix.
    (12, 8, 6, &[3, 4]),
];

fn offsets(rows: &[u32]) -> Vec<u32> {
    let mut sum = 0;
    std::iter::once(0)
        .chain(rows.iter().map(|rows| {
            sum += rows;
            sum
        }))
        .collect()
}

/// For each row the matrix that it belongs to, if any.
fn owners(rows: usize, offsets: &[u32]) -> Vec<Option<usize>> {
    let of = |row: usize| offsets.windows(2).position(|pair| (pair[0]..pair[1]).contains(&(row as u32)));
    (0..rows).map(of).collect()
}

#[test]
fn grouped_products() {
    for ((r, i, o, each), [x, weight, bias, out]) in GROUPS.iter().flat_map(|g| storages().map(|t| (*g, t))) {
        let (offsets, groups) = (offsets(each), each.len());
        let owners = owners(r, &offsets);
        for (with_bias, accumulate) in [(false, false), (true, false), (true, true)] {
            let label = format!("{r} {i} {o} {x} {weight} {bias} {out} {with_bias} {accumulate}");
            let operands = [
                Operand::new(x, &[r, i], noise(1)),
                Operand::new(weight, &[groups, o, i], noise(2)),
                Operand::new(bias, &[groups, o], noise(3)),
                Operand::u32s(&offsets),
                Operand::new(out, &[r, o], noise(4)),
            ];
            let [xs, ws, bs, _, before] = operands.each_ref().map(|operand| &operand.values);
            let value = |at: usize| {
                let (row, column) = (at / o, at % o);
                let old = if accumulate { before[at] } else { 0.0 };
                let Some(group) = owners[row] else { return old };
                let product: f64 = (0..i).map(|k| xs[row * i + k] * ws[(group * o + column) * i + k]).sum();
                old + product + if with_bias { bs[group * o + column] } else { 0.0 }
            };
            let values = (0..r * o).map(value).collect();
            let tolerance = 2e-6 + if with_bias && out == DType::Bf16 { 0.01 } else { 0.0 };
            check(
                &label,
                &operands,
                |cpu, t| {
                    cpu.run(GroupedProduct::Linear {
                        x: &t[0],
                        weight: &t[1],
                        bias: with_bias.then(|| &t[2]),
                        offsets: &t[3],
                        out: &t[4],
                        accumulate,
                        compute: Compute::F32,
                    })
                },
                &[Expected { operand: 4, values, tolerance }],
            );
        }
        for accumulate in [false, true] {
            let label = format!("backward {r} {i} {o} {x} {weight} {out} {accumulate}");
            // dout, weight, offsets, x, dx, dweight, dbias
            let operands = [
                Operand::new(x, &[r, o], noise(1)),
                Operand::new(weight, &[groups, o, i], noise(2)),
                Operand::u32s(&offsets),
                Operand::new(bias, &[r, i], noise(3)),
                Operand::new(out, &[r, i], noise(4)),
                Operand::new(out, &[groups, o, i], noise(5)),
                Operand::new(out, &[groups, o], noise(6)),
            ];
            let [douts, ws, _, xs, dx, dw, db] = operands.each_ref().map(|operand| &operand.values);
            let old = |before: &[f64], at: usize| if accumulate { before[at] } else { 0.0 };
            let dinput = |at: usize| {
                let (row, column) = (at / i, at % i);
                let sum = |group: usize| {
                    (0..o).map(|k| douts[row * o + k] * ws[(group * o + k) * i + column]).sum::<f64>()
                };
                old(dx, at) + owners[row].map_or(0.0, sum)
            };
            let own = |group: usize| {
                let all = owners.iter().enumerate();
                all.filter(move |(_, owner)| **owner == Some(group)).map(|(row, _)| row)
            };
            let dweight = |at: usize| {
                let (group, output, input) = (at / (o * i), at / i % o, at % i);
                old(dw, at) + own(group).map(|row| douts[row * o + output] * xs[row * i + input]).sum::<f64>()
            };
            let dbias = |at: usize| old(db, at) + own(at / o).map(|row| douts[row * o + at % o]).sum::<f64>();
            let expected = |operand, values| Expected { operand, values, tolerance: 4e-6 };
            check(
                &label,
                &operands,
                |cpu, t| {
                    let (dout, offsets, compute) = (&t[0], &t[2], Compute::F32);
                    cpu.run(GroupedProduct::LinearBackwardInput {
                        dout,
                        weight: &t[1],
                        offsets,
                        dx: &t[4],
                        accumulate,
                        compute,
                    })?;
                    cpu.run(GroupedProduct::LinearBackwardWeight {
                        dout,
                        x: &t[3],
                        offsets,
                        dweight: &t[5],
                        accumulate,
                        rounding: Rounding::Nearest,
                        compute,
                    })?;
                    cpu.run(GroupedProduct::BiasBackward { dout, offsets, dbias: &t[6], accumulate })
                },
                &[
                    expected(4, (0..r * i).map(dinput).collect()),
                    expected(5, (0..groups * o * i).map(dweight).collect()),
                    expected(6, (0..groups * o).map(dbias).collect()),
                ],
            );
        }
    }
}

/// The product of a group has the bits of the same product by itself, for weights in blocks too.
#[test]
fn groups_have_the_bits_of_plain_products() {
    let (rows, inputs, outputs) = (30, 256, 64);
    let bytes = |dtype: DType, elements: u64| -> Vec<u8> {
        let codes = noise(9).map(|x| (x * 20.0) as i8 as u8 & 0x3f);
        codes.take(dtype.bytes_for(elements).unwrap() as usize).collect()
    };
    for dtype in [DType::Q8_0, DType::Q4_0, DType::Nf4] {
        let all = bytes(dtype, 2 * outputs * inputs);
        let half = all.len() / 2;
        let x = Operand::new(F32, &[rows, inputs as usize], noise(1));
        let out = Operand::garbage(F32, &[rows, outputs as usize]);
        let stack = Operand::blocks(dtype, &[2, outputs as usize, inputs as usize], all.clone());
        let grouped = [x.clone(), stack, Operand::u32s(&[0, 0, rows as u32]), out.clone()];
        let second = Operand::blocks(dtype, &[outputs as usize, inputs as usize], all[half..].to_vec());
        let plain = [x, second, out];
        let (bias, accumulate, compute) = (None, false, Compute::Bf16);
        let one = run(Isa::detect(), 2, &grouped, &|cpu, t| {
            let (x, weight, offsets, out) = (&t[0], &t[1], &t[2], &t[3]);
            cpu.run(GroupedProduct::Linear { x, weight, bias, offsets, out, accumulate, compute })
        });
        let other = run(Isa::detect(), 2, &plain, &|cpu, t| {
            cpu.run(Product::Linear { x: &t[0], weight: &t[1], bias, out: &t[2], accumulate, compute })
        });
        assert!(one.unwrap()[3] == other.unwrap()[2], "{dtype}");
    }
}

#[test]
fn offsets_that_do_not_cut() {
    let product = |offsets: &[u32]| {
        let operands = [
            Operand::new(F32, &[4, 2], noise(1)),
            Operand::new(F32, &[2, 3, 2], noise(2)),
            Operand::u32s(offsets),
            Operand::garbage(F32, &[4, 3]),
        ];
        refusal(&operands, |cpu, t| {
            let (x, weight, offsets, out) = (&t[0], &t[1], &t[2], &t[3]);
            let (bias, accumulate, compute) = (None, false, Compute::F32);
            cpu.run(GroupedProduct::Linear { x, weight, bias, offsets, out, accumulate, compute })
        })
    };
    for offsets in [[0, 3, 2], [1, 2, 4], [0, 2, 5]] {
        let message = product(&offsets);
        assert!(message.contains("do not cut the rows of"), "{message}");
    }
    assert!(
        product(&[0, 4]).contains("is not a matrix for each group")
            || product(&[0, 4]).contains("does not give")
    );
}

const PLAIN: Router = Router { sigmoid: false, normalise: true, scale: 1.0, groups: None };

fn chosen(
    logits: &[f64],
    experts: usize,
    each: usize,
    correction: Option<&[f64]>,
    router: Router,
) -> Vec<u32> {
    let tokens = logits.len() / experts;
    let mut operands = vec![Operand::new(F32, &[tokens, experts], logits.iter().copied())];
    operands.push(Operand::garbage(U32, &[tokens, each]));
    operands.extend(correction.map(|values| Operand::new(F32, &[experts], values.iter().copied())));
    let run = |threads| {
        run(Isa::detect(), threads, &operands, &|cpu, t| {
            cpu.run(Routing::Choose { logits: &t[0], correction: t.get(2), router, choice: &t[1] })
        })
    };
    let (alone, together) = (run(1).unwrap(), run(3).unwrap());
    assert!(alone == together);
    decode(U32, &alone[1]).into_iter().map(|x| x as u32).collect()
}

#[test]
fn the_best_experts_are_chosen_and_ties_have_a_rule() {
    assert_eq!(chosen(&[0.1, 0.7, 0.7, -2.0, 0.9], 5, 3, None, PLAIN), [4, 1, 2]);
    assert_eq!(chosen(&[0.0; 6], 6, 4, None, PLAIN), [0, 1, 2, 3]);
    assert_eq!(chosen(&[f64::NAN, f64::NEG_INFINITY, f64::NAN, 3.0], 4, 4, None, PLAIN), [3, 1, 0, 2]);
    let many: Vec<f64> = noise(3).take(700 * 40).collect();
    let choice = chosen(&many, 40, 6, None, PLAIN);
    for (logits, choice) in many.chunks(40).zip(choice.chunks(6)) {
        let mut order: Vec<u32> = (0..40).collect();
        order.sort_by(|a, b| (logits[*b as usize] as f32).total_cmp(&(logits[*a as usize] as f32)));
        assert_eq!(&order[..6], choice);
    }
}

/// A correction changes the choice; groups count for their two best, and no expert comes from another.
#[test]
fn corrections_and_groups_decide() {
    let sigmoid = Router { sigmoid: true, ..PLAIN };
    let logits = [2.0, 1.0, 0.0, -1.0];
    assert_eq!(chosen(&logits, 4, 2, None, sigmoid), [0, 1]);
    assert_eq!(chosen(&logits, 4, 2, Some(&[0.0, 0.0, 0.0, 1.0]), sigmoid), [3, 0]);
    let of = |chosen, by_two| Router { groups: Some(RouterGroups { count: 3, chosen, by_two }), ..sigmoid };
    let groups = |chosen| of(chosen, true);
    // The first group has the best expert; the second the best pair.
    let logits = [3.0, -9.0, 1.5, 1.4, 0.0, 0.1];
    assert_eq!(chosen(&logits, 6, 2, None, groups(1)), [2, 3]);
    assert_eq!(chosen(&logits, 6, 3, None, groups(2)), [2, 3, 5]);
    assert_eq!(chosen(&logits, 6, 2, None, of(1, false)), [0, 1]);
    assert_eq!(chosen(&logits, 6, 3, None, of(2, false)), [0, 2, 3]);
}

/// The weights of a token's experts, in f64.
fn weights(logits: &[f64], experts: usize, choice: &[u32], router: Router) -> Vec<f64> {
    let each = choice.len() / (logits.len() / experts);
    let of_token = |(logits, chosen): (&[f64], &[u32])| -> Vec<f64> {
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        let score = |e: &u32| {
            let x = logits[*e as usize];
            if router.sigmoid { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / sum }
        };
        let scores: Vec<f64> = chosen.iter().map(score).collect();
        let total = if router.normalise { scores.iter().sum() } else { 1.0 };
        scores.iter().map(|s| f64::from(router.scale) * s / total).collect()
    };
    logits.chunks(experts).zip(choice.chunks(each)).flat_map(of_token).collect()
}

#[test]
fn weights_and_their_gradient() {
    let (tokens, experts, each) = (37, 6, 3);
    let logits: Vec<f64> = noise(5).map(|x| 3.0 * x).take(tokens * experts).collect();
    let logits = Operand::new(F32, &[tokens, experts], logits);
    for sigmoid in [false, true] {
        for normalise in [false, true] {
            let router = Router { sigmoid, normalise, scale: 1.75, groups: None };
            let all: Vec<u32> = (0..tokens).flat_map(|_| 0..experts as u32).collect();
            for (choice, is_chosen) in
                [(chosen(&logits.values, experts, each, None, PLAIN), true), (all, false)]
            {
                let each = choice.len() / tokens;
                let label = format!("{sigmoid} {normalise} {is_chosen}");
                let mut places = Operand::u32s(&choice);
                places = Operand::new(U32, &[tokens, each], places.values);
                let dweights = Operand::new(F32, &[tokens, each], noise(6));
                let operands = [
                    logits.clone(),
                    places,
                    Operand::garbage(F32, &[tokens, each]),
                    dweights.clone(),
                    Operand::garbage(F32, &[tokens, experts]),
                ];
                let loss = |logits: &[f64]| -> f64 {
                    let weights = weights(logits, experts, &choice, router);
                    weights.iter().zip(&dweights.values).map(|(w, d)| w * d).sum()
                };
                let written = run(Isa::detect(), 2, &operands, &|cpu, t| {
                    let (logits, choice) = (&t[0], is_chosen.then_some(&t[1]));
                    cpu.run(Routing::Weigh { logits, choice, router, weights: &t[2] })?;
                    let (dweights, dlogits) = (&t[3], &t[4]);
                    cpu.run(Routing::WeighBackward { logits, choice, router, dweights, dlogits })
                })
                .unwrap();
                let expected = weights(&logits.values, experts, &choice, router);
                let found = decode(F32, &written[2]);
                let close = |(a, b): (&f64, &f64)| (a - b).abs() < 2e-6 * (1.0 + b.abs());
                assert!(found.iter().zip(&expected).all(close), "{label}");
                check_gradient_within(2e-6, &label, &logits.values, &decode(F32, &written[4]), loss);
            }
        }
    }
}

#[test]
fn rows_are_sorted_by_expert_and_found_again() {
    let choice = [2, 0, 2, 3, 1, 2, 7, 0];
    let operands = [
        Operand::new(U32, &[4, 2], choice.iter().map(|x| f64::from(*x))),
        Operand::garbage(U32, &[8]),
        Operand::garbage(U32, &[4, 2]),
        Operand::garbage(U32, &[5]),
    ];
    let expected = |operand, values: &[u32]| Expected {
        operand,
        values: values.iter().map(|x| f64::from(*x)).collect(),
        tolerance: 0.0,
    };
    // Those that have no offset come last: expert 7, or all but two.
    let cases = [
        (0, &[0, 2, 3, 6, 7][..], [1, 7, 4, 0, 2, 5, 3, 6], [3, 0, 4, 6, 2, 5, 7, 1]),
        (2, &[0, 3, 4], [0, 2, 5, 3, 1, 4, 6, 7], [0, 4, 1, 3, 5, 2, 6, 7]),
    ];
    for (first, offsets, sources, places) in cases {
        let mut operands = operands.clone();
        operands[3] = Operand::garbage(U32, &[offsets.len()]);
        check(
            "sort",
            &operands,
            |cpu, t| {
                let [choice, sources, places, offsets] = [&t[0], &t[1], &t[2], &t[3]];
                cpu.run(Routing::Sort { choice, first, sources, places, offsets })
            },
            &[expected(1, &sources), expected(2, &places), expected(3, offsets)],
        );
    }
}

/// Two ranks with two experts each, of tokens of their own: rows go out in blocks of three slots, and arrive at the experts' rank in the
/// order of its experts over the tokens of both.
#[test]
fn rows_go_to_other_ranks_in_blocks() {
    let no = NOWHERE;
    let numbers = |values: &[u32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let expected = |operand, values: &[u32]| Expected { operand, values: numbers(values), tolerance: 0.0 };
    // The choice [2, 0], [3, nobody], [1, 2], sorted by four experts; the last row is nobody's.
    let operands = [
        Operand::new(U32, &[6], numbers(&[1, 4, 0, 5, 2, no])),
        Operand::new(U32, &[5], numbers(&[0, 1, 2, 4, 5])),
        Operand::garbage(U32, &[6]),
        Operand::garbage(U32, &[3, 2]),
    ];
    check(
        "out",
        &operands,
        |cpu, t| {
            let [sources, offsets, slots, taken] = [&t[0], &t[1], &t[2], &t[3]];
            cpu.run(Routing::ToBlocks { sources, offsets, each: 2, slots, taken })
        },
        &[expected(2, &[1, 4, no, 0, 5, 2]), expected(3, &[3, 0, 5, no, 1, 4])],
    );
    // Experts 2 and 3 over the places of both ranks, of which the second's begin at 6: 0, 5, 8 and 2, 7.
    let operands = [
        Operand::new(U32, &[6], numbers(&[0, 5, 8, 2, 7, no])),
        Operand::new(U32, &[3], numbers(&[0, 3, 5])),
        Operand::garbage(U32, &[6]),
        Operand::garbage(U32, &[6]),
    ];
    check(
        "in",
        &operands,
        |cpu, t| {
            let [sources, offsets, rows, slots] = [&t[0], &t[1], &t[2], &t[3]];
            cpu.run(Routing::FromBlocks { sources, offsets, each: 6, blocks: 2, rows, slots })
        },
        &[expected(2, &[0, 1, 3, 2, 4, no]), expected(3, &[0, 1, 3, 2, 4, no])],
    );
    let refused = run(Isa::detect(), 1, &operands, &|cpu, t| {
        let [sources, offsets, rows, slots] = [&t[0], &t[1], &t[2], &t[3]];
        cpu.run(Routing::FromBlocks { sources, offsets, each: 6, blocks: 3, rows, slots })
    });
    assert!(refused.unwrap_err().to_string().contains("do not fit into the blocks"));
}

/// With fewer rows than places: nobody's places have none, nor those of experts without an offset that find no more room.
#[test]
fn places_without_a_row_are_nowhere() {
    let sorted = |choice: [u32; 8], rows: usize| {
        let operands = [
            Operand::new(U32, &[4, 2], choice.map(f64::from)),
            Operand::garbage(U32, &[rows]),
            Operand::garbage(U32, &[4, 2]),
            Operand::garbage(U32, &[4]),
        ];
        let written = run(Isa::detect(), 2, &operands, &|cpu, t| {
            cpu.run(Routing::Sort { choice: &t[0], first: 0, sources: &t[1], places: &t[2], offsets: &t[3] })
        })
        .map_err(|error| error.to_string())?;
        Ok::<_, String>(
            [1, 2, 3].map(|operand| {
                decode(U32, &written[operand]).into_iter().map(|x| x as u32).collect::<Vec<_>>()
            }),
        )
    };
    let [sources, places, offsets] = sorted([2, 0, NOWHERE, 7, 1, NOWHERE, 7, 0], 6).unwrap();
    assert_eq!(sources, [1, 7, 4, 0, 3, 6]);
    assert_eq!(places, [3, 0, NOWHERE, 4, 2, NOWHERE, 5, 1]);
    assert_eq!(offsets, [0, 2, 3, 4]);
    let [sources, places, _] = sorted([2, 0, NOWHERE, 7, 1, NOWHERE, 7, 0], 5).unwrap();
    assert_eq!((sources[4], places[6]), (3, NOWHERE));
    let [sources, ..] = sorted([NOWHERE, 0, NOWHERE, NOWHERE, 1, NOWHERE, NOWHERE, 0], 5).unwrap();
    assert_eq!(sources, [1, 7, 4, NOWHERE, NOWHERE]);
    let message = sorted([0, 1, 2, 0, 1, 2, 0, 1], 7).unwrap_err();
    assert!(message.contains("fewer rows than experts have places"), "{message}");
}

#[test]
fn nobody_gives_zeros_and_takes_nothing() {
    let no = f64::from(NOWHERE);
    let operands = [
        Operand::new(F32, &[2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        Operand::new(U32, &[3], [2.0, 1.0, no]),
        Operand::garbage(F32, &[3, 3]),
        Operand::new(U32, &[2, 2], [no, 1.0, 0.0, no]),
        Operand::garbage(F32, &[2, 3]),
        Operand::new(F32, &[4], [1.0, 10.0, 100.0, 1000.0]),
        Operand::garbage(F32, &[3, 3]),
        Operand::garbage(F32, &[4]),
    ];
    let expected = |operand, values: &[f64]| Expected { operand, values: values.to_vec(), tolerance: 0.0 };
    check(
        "nowhere",
        &operands,
        |cpu, t| {
            let sources = Some(&t[1]);
            cpu.run(Routing::Gather { x: &t[0], sources: &t[1], each: 2, out: &t[2] })?;
            cpu.run(Routing::Combine { x: &t[2], places: &t[3], out: &t[4], accumulate: false })?;
            cpu.run(Routing::ScaleRows { x: &t[2], factors: &t[5], sources, out: &t[6] })?;
            cpu.run(Routing::RowDots { a: &t[2], b: &t[2], places: Some(&t[3]), out: &t[7] })
        },
        &[
            expected(2, &[4.0, 5.0, 6.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0]),
            expected(4, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            expected(6, &[400.0, 500.0, 600.0, 10.0, 20.0, 30.0, 0.0, 0.0, 0.0]),
            expected(7, &[0.0, 14.0, 77.0, 0.0]),
        ],
    );
}

/// The first places in the order of tokens are taken.
#[test]
fn experts_take_their_capacity_and_no_more() {
    let operands = [
        Operand::new(U32, &[4, 2], [0.0, 1.0, 0.0, 2.0, 1.0, 0.0, 2.0, 0.0]),
        Operand::garbage(U32, &[4, 2]),
        Operand::new(U32, &[1], [5.0]),
    ];
    let no = f64::from(NOWHERE);
    check(
        "limit",
        &operands,
        |cpu, t| {
            let capacity = Capacity { each: 2, first: 2, others: 1 };
            cpu.run(Routing::Limit { choice: &t[0], capacity, taken: &t[1], dropped: Some(&t[2]) })
        },
        &[
            Expected { operand: 1, values: vec![0.0, 1.0, 0.0, 2.0, 1.0, no, no, no], tolerance: 0.0 },
            Expected { operand: 2, values: vec![8.0], tolerance: 0.0 },
        ],
    );
}

#[test]
fn corrections_follow_the_sign_of_the_load() {
    let operands = [
        Operand::new(U32, &[4], [3.0, 1.0, 2.0, 2.0]),
        Operand::new(F32, &[4], [0.5, 0.0, -1.0, 0.25]),
        Operand::new(U32, &[4], [1.0, 1.0, 0.0, 0.0]),
    ];
    check(
        "corrections",
        &operands,
        |cpu, t| {
            cpu.run(Routing::AdjustCorrection { counts: &t[0], speed: 0.125, correction: &t[1] })?;
            cpu.run(Routing::AddCounts { counts: &t[0], out: &t[2] })
        },
        &[
            Expected { operand: 1, values: vec![0.375, 0.125, -1.0, 0.25], tolerance: 0.0 },
            Expected { operand: 2, values: vec![4.0, 2.0, 2.0, 2.0], tolerance: 0.0 },
        ],
    );
}

/// Factors are near 1, in the mean as well; the same for the same elements, and others for another seed.
#[test]
fn jitter_multiplies_by_numbers_near_one() {
    let (count, noise) = (20_000, 0.125);
    let ones = |columns: usize| Operand::new(F32, &[1, columns], vec![1.0; columns]);
    let shaken = |columns: usize, seed, first| {
        let operands = [ones(columns), Operand::garbage(F32, &[1, columns])];
        let written = run(Isa::detect(), 3, &operands, &|cpu, t| {
            let (x, out, accumulate) = (&t[0], &t[1], false);
            cpu.run(Routing::Jitter { x, out, noise, seed, first, accumulate })
        });
        decode(F32, &written.unwrap()[1])
    };
    let all = shaken(count, 7, 0);
    assert!(all.iter().all(|x| (x - 1.0).abs() <= f64::from(noise)));
    let moments = all.iter().fold([0.0; 2], |[a, b], x| [a + x - 1.0, b + (x - 1.0).powi(2)]);
    let [mean, square] = moments.map(|sum| sum / count as f64);
    // A uniform distribution has a third of the square of its half width as variance.
    assert!(mean.abs() < 2e-3 && (square / (f64::from(noise).powi(2) / 3.0) - 1.0).abs() < 0.03);
    assert_eq!(shaken(1000, 7, 5000), all[5000..6000]);
    assert_ne!(shaken(1000, 8, 5000), all[5000..6000]);
}

#[test]
fn the_z_loss_and_its_gradient() {
    let (tokens, experts, factor) = (50, 5, 0.02);
    let logits = Operand::new(F32, &[tokens, experts], noise(1).map(|x| 4.0 * x));
    let loss = |logits: &[f64]| -> f64 {
        let of_token = |logits: &[f64]| logits.iter().map(|x| x.exp()).sum::<f64>().ln().powi(2);
        factor * logits.chunks(experts).map(of_token).sum::<f64>()
    };
    let operands = [
        logits.clone(),
        Operand::new(F32, &[1], [2.0]),
        Operand::new(F32, &[tokens, experts], vec![0.0; tokens * experts]),
    ];
    let written = run(Isa::detect(), 2, &operands, &|cpu, t| {
        cpu.run(Routing::ZLoss { logits: &t[0], factor, out: &t[1] })?;
        cpu.run(Routing::ZBackward { logits: &t[0], factor, dlogits: &t[2] })
    })
    .unwrap();
    let found = decode(F32, &written[1])[0];
    assert!((found - 2.0 - loss(&logits.values)).abs() < 1e-6 * found, "{found}");
    check_gradient_within(2e-6, "z-loss", &logits.values, &decode(F32, &written[2]), loss);
}

#[test]
fn rows_go_out_and_come_back() {
    let (tokens, each, columns) = (9, 2, 1300);
    let sources: Vec<u32> = [5, 3, 17, 0, 1, 2, 16, 4, 6, 15, 14, 7, 8, 9, 13, 10, 12, 11].into();
    let mut places = vec![0u32; sources.len()];
    (0..).zip(&sources).for_each(|(row, place)| places[*place as usize] = row);
    let rows = sources.len();
    for [x, out] in storages() {
        for accumulate in [false, true] {
            // x, sources, routed, places, combined, factors, scaled, dots
            let operands = [
                Operand::new(x, &[tokens, columns], noise(1)),
                Operand::u32s(&sources),
                Operand::garbage(x, &[rows, columns]),
                Operand::new(U32, &[tokens, each], places.iter().map(|x| f64::from(*x))),
                Operand::new(out, &[tokens, columns], noise(2)),
                Operand::new(F32, &[rows], noise(3)),
                Operand::garbage(out, &[rows, columns]),
                Operand::garbage(F32, &[rows]),
            ];
            let [xs, _, _, _, before, factors, ..] = operands.each_ref().map(|operand| &operand.values);
            let routed: Vec<f64> = sources
                .iter()
                .flat_map(|s| {
                    let token = *s as usize / each;
                    xs[token * columns..(token + 1) * columns].to_vec()
                })
                .collect();
            let row = |r: usize| &routed[r * columns..(r + 1) * columns];
            let combined = (0..tokens * columns)
                .map(|at| {
                    let old = if accumulate { before[at] } else { 0.0 };
                    old + 2.0 * xs[at]
                })
                .collect();
            let scaled: Vec<f64> =
                (0..rows * columns).map(|at| routed[at] * factors[sources[at / columns] as usize]).collect();
            let dot = |place: usize| row(places[place] as usize).iter().map(|x| x * x).sum::<f64>();
            let dots = (0..rows).map(dot).collect();
            let expected = |operand, values, tolerance| Expected { operand, values, tolerance };
            check(
                &format!("{x} {out} {accumulate}"),
                &operands,
                |cpu, t| {
                    cpu.run(Routing::Gather { x: &t[0], sources: &t[1], each: 2, out: &t[2] })?;
                    cpu.run(Routing::Combine { x: &t[2], places: &t[3], out: &t[4], accumulate })?;
                    let sources = Some(&t[1]);
                    cpu.run(Routing::ScaleRows { x: &t[2], factors: &t[5], sources, out: &t[6] })?;
                    cpu.run(Routing::RowDots { a: &t[2], b: &t[2], places: Some(&t[3]), out: &t[7] })
                },
                &[
                    expected(2, routed.clone(), 0.0),
                    expected(4, combined, 1e-6),
                    expected(6, scaled, 1e-6),
                    expected(7, dots, 1e-5),
                ],
            );
        }
    }
    let apart = [
        Operand::new(F32, &[3, 500], noise(1)),
        Operand::garbage(F32, &[3, 500]),
        Operand::new(F32, &[3], noise(2)),
    ];
    let within = [apart[0].clone(), apart[2].clone()];
    check_in_place(
        "scale in place",
        (
            &apart,
            &|cpu, t| cpu.run(Routing::ScaleRows { x: &t[0], factors: &t[2], sources: None, out: &t[1] }),
            1,
        ),
        (
            &within,
            &|cpu, t| cpu.run(Routing::ScaleRows { x: &t[0], factors: &t[1], sources: None, out: &t[0] }),
            0,
        ),
    );
}

#[test]
fn the_balance_loss_and_its_gradient() {
    let (tokens, experts, factor) = (50, 5, 0.3);
    // The last two experts count less.
    let ratio = LoadRatio { first: 3, of_others: 0.75 };
    let logits = Operand::new(F32, &[tokens, experts], noise(1).map(|x| 2.0 * x));
    let choice = chosen(&logits.values, experts, 2, None, PLAIN);
    let mut counts = vec![0.0; experts];
    choice.iter().for_each(|expert| counts[*expert as usize] += 1.0);
    // Two lots of tokens count together.
    let rows = 2 * tokens as u64;
    let mass = |logits: &[f64]| -> Vec<f64> {
        let mut mass = vec![0.0; experts];
        for logits in logits.chunks(experts) {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            mass.iter_mut().zip(logits).for_each(|(mass, x)| *mass += x.exp() / sum);
        }
        mass
    };
    let loss_of = |mass: &[f64], counts: &[f64]| -> f64 {
        let n = rows as f64;
        let weight = |expert| if expert < 3 { 1.0 } else { 0.75 };
        let pairs = mass.iter().zip(counts).enumerate();
        let products = pairs.map(|(expert, (mass, count))| weight(expert) * mass / n * count / n);
        factor * experts as f64 * products.sum::<f64>()
    };
    let operands = [
        logits.clone(),
        Operand::new(U32, &[tokens, 2], choice.iter().map(|x| f64::from(*x))),
        Operand::new(U32, &[experts], counts.clone()),
        Operand::new(F64, &[experts], mass(&logits.values)),
        Operand::garbage(F32, &[1]),
        Operand::new(F32, &[tokens, experts], vec![0.0; tokens * experts]),
    ];
    let written = run(Isa::detect(), 2, &operands, &|cpu, t| {
        let (logits, choice, counts, mass) = (&t[0], &t[1], &t[2], &t[3]);
        cpu.run(Routing::Count { choice, counts })?;
        cpu.run(Routing::Mass { logits, mass })?;
        cpu.run(Routing::BalanceLoss { counts, mass, rows, ratio, factor, out: &t[4] })?;
        cpu.run(Routing::BalanceBackward { logits, counts, rows, ratio, factor, dlogits: &t[5] })
    })
    .unwrap();
    let twice: Vec<f64> = counts.iter().map(|count| 2.0 * count).collect();
    assert_eq!(decode(U32, &written[2]), twice);
    let both: Vec<f64> = mass(&logits.values).iter().map(|mass| 2.0 * mass).collect();
    let loss = decode(F32, &written[4])[0];
    assert!((loss - loss_of(&both, &twice)).abs() < 1e-6, "{loss}");
    // The other lot's mass does not depend on these logits.
    let of_logits = |x: &[f64]| {
        let more = mass(x);
        let all: Vec<f64> = more.iter().zip(mass(&logits.values)).map(|(a, b)| a + b).collect();
        loss_of(&all, &twice)
    };
    check_gradient_within(2e-6, "balance", &logits.values, &decode(F32, &written[5]), of_logits);
}

#[test]
fn numbers_that_are_of_nobody_are_refused() {
    let x = Operand::new(F32, &[2, 4], noise(1));
    let gathered = Operand::garbage(F32, &[4, 4]);
    let message = refusal(&[x.clone(), Operand::u32s(&[0, 1, 4, 2]), gathered], |cpu, t| {
        cpu.run(Routing::Gather { x: &t[0], sources: &t[1], each: 2, out: &t[2] })
    });
    assert!(message.contains("place 4 at 2 is not one of 4"), "{message}");
    let places = Operand::new(U32, &[1, 2], [0.0, 9.0]);
    let message = refusal(&[x, places, Operand::garbage(F32, &[1, 4])], |cpu, t| {
        cpu.run(Routing::Combine { x: &t[0], places: &t[1], out: &t[2], accumulate: false })
    });
    assert!(message.contains("row 9 at 1 is not one of 2"), "{message}");
}

/// Biases that come after weights: each row's is its group's times the weight of its place.
#[test]
fn weighted_biases_and_their_gradients() {
    for ((r, _, o, each), [bias, out]) in GROUPS.iter().flat_map(|g| storages().map(|t| (*g, t))) {
        let (offsets, groups) = (offsets(each), each.len());
        let owners = owners(r, &offsets);
        // Some order of the places.
        let sources: Vec<u32> = (0..r as u32).rev().collect();
        for accumulate in [false, true] {
            let operands = [
                Operand::new(bias, &[groups, o], noise(1)),
                Operand::new(F32, &[r], noise(2)),
                Operand::u32s(&sources),
                Operand::u32s(&offsets),
                Operand::new(out, &[r, o], noise(3)),
                Operand::new(out, &[r, o], noise(4)),
                Operand::new(bias, &[groups, o], noise(5)),
                Operand::new(F32, &[r], noise(6)),
            ];
            let [biases, factors, _, _, before, dout, dbias_before, dfactors_before] =
                operands.each_ref().map(|operand| &operand.values);
            let factor = |row: usize| factors[r - 1 - row];
            let value = |at: usize| {
                let of = |group: usize| factor(at / o) * biases[group * o + at % o];
                before[at] + owners[at / o].map_or(0.0, of)
            };
            let dbias = |at: usize| {
                let own = (0..r).filter(|row| owners[*row] == Some(at / o));
                let sum: f64 = own.map(|row| factor(row) * dout[row * o + at % o]).sum();
                sum + if accumulate { dbias_before[at] } else { 0.0 }
            };
            // The reversal is its own inverse: places are as sources.
            let dfactor = |place: usize| {
                let row = r - 1 - place;
                let dot = |group: usize| (0..o).map(|c| dout[row * o + c] * biases[group * o + c]).sum();
                dfactors_before[place] + owners[row].map_or(0.0, dot)
            };
            let expected = |operand, values| Expected { operand, values, tolerance: 2e-6 };
            check(
                &format!("{r} {o} {bias} {out} {accumulate}"),
                &operands,
                |cpu, t| {
                    let (bias, factors, sources, offsets) = (&t[0], &t[1], &t[2], &t[3]);
                    let (out, dout, dbias, dfactors, places) = (&t[4], &t[5], &t[6], &t[7], sources);

                    cpu.run(WeightedBias::Add { bias, factors, sources, offsets, out })?;
                    cpu.run(WeightedBias::Backward { dout, factors, sources, offsets, dbias, accumulate })?;
                    cpu.run(WeightedBias::FactorsBackward { dout, bias, places, offsets, dfactors })
                },
                &[
                    expected(4, (0..r * o).map(value).collect()),
                    expected(6, (0..groups * o).map(dbias).collect()),
                    expected(7, (0..r).map(dfactor).collect()),
                ],
            );
        }
    }
}
