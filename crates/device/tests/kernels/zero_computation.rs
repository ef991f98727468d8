//! Experts without matrices, against plain f64.

use plimsoll_device::cpu::Isa;
use plimsoll_device::{DType, DeviceExt, NOWHERE, ZeroComputation, ZeroExperts};

use crate::harness::{Expected, Operand, check, check_gradient_within, decode, noise, run, storages};
use DType::{F32, U32};

/// Two experts with matrices; one that gives nothing, two that copy, two constant ones.
const EXPERTS: ZeroExperts = ZeroExperts { first: 2, zero: 1, copy: 2, constant: 2 };
const CHOICE: [[u32; 3]; 6] = [[0, 1, 2], [3, 4, 5], [5, 6, 0], [6, 3, NOWHERE], [NOWHERE, 2, 4], [1, 6, 5]];

/// The factors on the input and on the two vectors of each token.
fn factors(weights: &[f64], gates: &[f64]) -> Vec<[f64; 3]> {
    let of_token = |(token, choice): (usize, &[u32; 3])| {
        let mut all = [0.0; 3];
        for (expert, weight) in choice.iter().zip(&weights[token * 3..]) {
            match expert {
                3 | 4 => all[0] += weight,
                5 | 6 => {
                    let number = *expert as usize - 5;
                    let logits = &gates[token * 4 + 2 * number..];
                    let sum = logits[0].exp() + logits[1].exp();
                    all[0] += weight * logits[0].exp() / sum;
                    all[1 + number] += weight * logits[1].exp() / sum;
                }
                _ => {}
            }
        }
        all
    };
    CHOICE.iter().enumerate().map(of_token).collect()
}

#[test]
fn factors_and_their_gradients() {
    let tokens = CHOICE.len();
    let (weights, gates) = (
        Operand::new(F32, &[tokens, 3], noise(1)),
        Operand::new(F32, &[tokens, 4], noise(2).map(|x| 3.0 * x)),
    );
    let (dinputs, dvectors) =
        (Operand::new(F32, &[tokens, 1], noise(3)), Operand::new(F32, &[tokens, 2], noise(4)));
    // What other experts have had written is kept.
    let before = Operand::new(F32, &[tokens, 3], noise(5));
    let operands = [
        Operand::new(U32, &[tokens, 3], CHOICE.iter().flatten().map(|x| f64::from(*x))),
        weights.clone(),
        gates.clone(),
        Operand::garbage(F32, &[tokens, 1]),
        Operand::garbage(F32, &[tokens, 2]),
        dinputs.clone(),
        dvectors.clone(),
        before.clone(),
        Operand::garbage(F32, &[tokens, 4]),
    ];
    let written = run(Isa::detect(), 2, &operands, &|cpu, t| {
        let (choice, weights, gates, experts) = (&t[0], &t[1], Some(&t[2]), EXPERTS);
        let (inputs, vectors) = (&t[3], Some(&t[4]));
        cpu.run(ZeroComputation::Factors { choice, weights, gates, experts, inputs, vectors })?;
        cpu.run(ZeroComputation::FactorsBackward {
            choice,
            weights,
            gates,
            experts,
            dinputs: &t[5],
            dvectors: Some(&t[6]),
            dweights: &t[7],
            dgates: Some(&t[8]),
        })
    })
    .unwrap();
    let expected = factors(&weights.values, &gates.values);
    let found = (decode(F32, &written[3]), decode(F32, &written[4]));
    for (token, [input, first, second]) in expected.iter().enumerate() {
        let found = [found.0[token], found.1[2 * token], found.1[2 * token + 1]];
        let pairs = found.iter().zip([input, first, second]);
        assert!(pairs.clone().all(|(a, b)| (a - b).abs() < 1e-6), "{token}: {found:?}");
    }
    let loss = |weights: &[f64], gates: &[f64]| -> f64 {
        let of_token = |(token, [input, first, second]): (usize, [f64; 3])| {
            let dvectors = &dvectors.values[2 * token..];
            input * dinputs.values[token] + first * dvectors[0] + second * dvectors[1]
        };
        factors(weights, gates).into_iter().enumerate().map(of_token).sum()
    };
    let dgates = decode(F32, &written[8]);
    check_gradient_within(2e-6, "gates", &gates.values, &dgates, |gates| loss(&weights.values, gates));
    let kept = |at: usize| !(3..7).contains(&CHOICE[at / 3][at % 3]);
    let mut dweights = decode(F32, &written[7]);
    for (at, dweight) in dweights.iter_mut().enumerate().filter(|(at, _)| kept(*at)) {
        assert_eq!(*dweight, before.values[at]);
        *dweight = 0.0;
    }
    check_gradient_within(2e-6, "weights", &weights.values, &dweights, |w| loss(w, &gates.values));
}

#[test]
fn scaled_rows_are_added() {
    let (rows, columns) = (9, 1300);
    for [x, out] in storages() {
        let operands = [
            Operand::new(x, &[rows, columns], noise(1)),
            Operand::new(F32, &[rows, 1], (0..rows).map(|row| row as f64 / 4.0)),
            Operand::new(out, &[rows, columns], noise(2)),
        ];
        let values = (0..rows * columns)
            .map(|at| {
                let factor = operands[1].values[at / columns];
                operands[2].values[at] + operands[0].values[at] * factor
            })
            .collect();
        check(
            &format!("{x} {out}"),
            &operands,
            |cpu, t| cpu.run(ZeroComputation::AddScaled { x: &t[0], factors: &t[1], out: &t[2] }),
            &[Expected { operand: 2, values, tolerance: 1e-6 }],
        );
    }
}
