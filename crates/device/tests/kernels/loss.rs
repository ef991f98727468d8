//! Cross-entropy and the sum of squares.

use plimsoll_device::cpu::Isa;
use plimsoll_device::{DType, DeviceExt, IGNORED_TARGET, Loss, Reduction, Tensor};

use crate::harness::{Expected, Operand, check, check_gradient, noise, refusal, run, storages};
use crate::reference;

fn operands(n: usize, v: usize, spread: f64) -> [Operand; 3] {
    let mut targets: Vec<u32> = (0..n).map(|i| (i * 37 % v) as u32).collect();
    if n > 2 {
        targets[1] = IGNORED_TARGET;
    }
    [
        Operand::new(DType::F32, &[n, v], noise(1).map(|x| x * spread)),
        Operand::u32s(&targets),
        Operand::garbage(DType::F32, &[n]),
    ]
}

fn op(t: &[Tensor], gradient_scale: Option<f32>) -> Loss<'_> {
    capped_op(t, None, gradient_scale)
}

fn capped_op(t: &[Tensor], soft_cap: Option<f32>, gradient_scale: Option<f32>) -> Loss<'_> {
    // The fourth operand, where there is one, are weights.
    let weights = t.get(3);
    Loss::CrossEntropy { logits: &t[0], targets: &t[1], weights, losses: &t[2], soft_cap, gradient_scale }
}

/// Every row by its weight, in f64; weights of one change no bit.
#[test]
fn weighted_cross_entropy() {
    for [n, v] in [[1, 1], [5, 7], [100, 576], [4, 1000]] {
        let [logits, targets, losses] = operands(n, v, 3.0);
        let ids: Vec<u32> = targets.values.iter().map(|t| *t as u32).collect();
        let weights: Vec<f64> = (0..n).map(|i| [0.25, 1.0, 0.0, 2.5, 1.0][i % 5]).collect();
        let (mut expected, mut gradient) = reference::cross_entropy(&logits.values, v, &ids, 0.125);
        expected.iter_mut().zip(&weights).for_each(|(loss, weight)| *loss *= weight);
        gradient
            .chunks_mut(v)
            .zip(&weights)
            .for_each(|(row, weight)| row.iter_mut().for_each(|g| *g *= weight));
        let weighted = |weights: &[f64]| {
            let weights = Operand::new(DType::F32, &[n], weights.to_vec());
            [logits.clone(), targets.clone(), losses.clone(), weights]
        };
        let losses = Expected { operand: 2, values: expected, tolerance: 1e-6 };
        let gradient = Expected { operand: 0, values: gradient, tolerance: 2e-6 };
        check(
            &format!("{n} {v}"),
            &weighted(&weights),
            |cpu, t| cpu.run(op(t, Some(0.125))),
            &[losses, gradient],
        );
        for isa in Isa::available() {
            let ones = run(isa, 1, &weighted(&vec![1.0; n]), &|cpu, t| cpu.run(op(t, Some(0.125)))).unwrap();
            let none =
                run(isa, 1, &weighted(&vec![1.0; n])[..3], &|cpu, t| cpu.run(op(t, Some(0.125)))).unwrap();
            assert_eq!(ones[..3], none[..], "{isa}");
        }
    }
}

#[test]
fn cross_entropy() {
    for [n, v] in [[1, 1], [5, 7], [3, 63], [100, 576], [4, 1000], [2, 49_152]] {
        for spread in [1.0, 30.0] {
            let operands = operands(n, v, spread);
            let targets: Vec<u32> = operands[1].values.iter().map(|t| *t as u32).collect();
            let (losses, gradient) = reference::cross_entropy(&operands[0].values, v, &targets, 0.125);
            let label = format!("{n} {v} {spread}");
            let losses = || Expected { operand: 2, values: losses.clone(), tolerance: 1e-6 };
            check(&label, &operands, |cpu, t| cpu.run(op(t, None)), &[losses()]);
            let gradient = Expected { operand: 0, values: gradient, tolerance: 2e-6 };
            check(&label, &operands, |cpu, t| cpu.run(op(t, Some(0.125))), &[losses(), gradient]);
        }
    }
}

#[test]
fn capped_cross_entropy() {
    for ([n, v], cap) in [([1, 1], 1.0), ([5, 7], 2.0), ([4, 1000], 30.0), ([3, 5197], 2.0)] {
        let operands = operands(n, v, 3.0);
        let targets: Vec<u32> = operands[1].values.iter().map(|t| *t as u32).collect();
        let capped: Vec<f64> = operands[0].values.iter().map(|x| cap * (x / cap).tanh()).collect();
        let (losses, mut gradient) = reference::cross_entropy(&capped, v, &targets, 0.125);
        gradient.iter_mut().zip(&capped).for_each(|(g, x)| *g *= 1.0 - (x / cap).powi(2));
        let soft_cap = Some(cap as f32);
        let losses = || Expected { operand: 2, values: losses.clone(), tolerance: 2e-6 };
        let gradient = Expected { operand: 0, values: gradient, tolerance: 4e-6 };
        check(
            &format!("{n} {v} {cap}"),
            &operands,
            |cpu, t| cpu.run(capped_op(t, soft_cap, Some(0.125))),
            &[losses(), gradient],
        );
        let capped = Expected {
            operand: 0,
            values: capped_or_ignored(&operands[0].values, &targets, cap),
            tolerance: 4e-6,
        };
        check(
            &format!("{n} {v} {cap}"),
            &operands,
            |cpu, t| cpu.run(capped_op(t, soft_cap, None)),
            &[losses(), capped],
        );
    }
}

/// Without a gradient the logits are left capped, those of ignored targets as they were.
fn capped_or_ignored(logits: &[f64], targets: &[u32], cap: f64) -> Vec<f64> {
    let columns = logits.len() / targets.len();
    let row = |(row, target): (&[f64], &u32)| -> Vec<f64> {
        let ignored = *target == IGNORED_TARGET;
        row.iter().map(|x| if ignored { *x } else { cap * (x / cap).tanh() }).collect()
    };
    logits.chunks(columns).zip(targets).flat_map(row).collect()
}

#[test]
fn the_loss_is_the_same_with_and_without_the_gradient_and_alone() {
    let [logits, targets, losses] = operands(5, 3000, 10.0);
    let alone = [
        Operand::new(DType::F32, &[1, 3000], logits.values[2 * 3000..].to_vec()),
        Operand::u32s(&[targets.values[2] as u32]),
        Operand::garbage(DType::F32, &[1]),
    ];
    for isa in Isa::available() {
        let losses_of = |operands: &[Operand], scale| {
            run(isa, 1, operands, &|cpu, t| cpu.run(op(t, scale))).unwrap()[2].clone()
        };
        let all = [logits.clone(), targets.clone(), losses.clone()];
        assert_eq!(losses_of(&all, None), losses_of(&all, Some(1.0)), "{isa}");
        assert_eq!(losses_of(&all, None)[8..12], losses_of(&alone, None), "{isa}");
    }
}

#[test]
fn infinitely_unlikely_tokens_have_no_gradient() {
    let operands = [
        Operand::new(DType::F32, &[1, 4], [f64::NEG_INFINITY, 2.0, 2.0, f64::NEG_INFINITY]),
        Operand::u32s(&[1]),
        Operand::garbage(DType::F32, &[1]),
    ];
    check(
        "masked",
        &operands,
        |cpu, t| cpu.run(op(t, Some(1.0))),
        &[
            Expected { operand: 0, values: vec![0.0, -0.5, 0.5, 0.0], tolerance: 1e-7 },
            Expected { operand: 2, values: vec![2f64.ln()], tolerance: 1e-7 },
        ],
    );
}

#[test]
fn targets_outside_the_vocabulary_are_refused() {
    let operands = [
        Operand::new(DType::F32, &[3, 4], noise(1)),
        Operand::u32s(&[3, IGNORED_TARGET, 4]),
        Operand::garbage(DType::F32, &[3]),
    ];
    let refusal = refusal(&operands, |cpu, t| cpu.run(op(t, None)));
    assert_eq!(refusal, "cross_entropy: target 4 at 2 is outside operand f32[3, 4]");
}

#[test]
fn the_reference_gradient_is_a_derivative() {
    let logits: Vec<f64> = noise(1).take(12).collect();
    let targets = [1, IGNORED_TARGET, 3];
    let gradient = reference::cross_entropy(&logits, 4, &targets, 0.5).1;
    let loss = |x: &[f64]| 0.5 * reference::cross_entropy(x, 4, &targets, 0.5).0.iter().sum::<f64>();
    check_gradient("cross-entropy", &logits, &gradient, loss);
}

#[test]
fn sum_squares() {
    for ([dtype], n) in storages().flat_map(|t| [0, 1, 7, 63, 1000, 300_000].map(|n| (t, n))) {
        let operands = [Operand::new(dtype, &[n], noise(1)), Operand::garbage(DType::F32, &[1])];
        let sum = operands[0].values.iter().map(|x| x * x).sum();
        check(
            &format!("{dtype} {n}"),
            &operands,
            |cpu, t| cpu.run(Reduction::SumSquares { x: &t[0], out: &t[1], finite: None }),
            &[Expected { operand: 1, values: vec![sum], tolerance: 0.0 }],
        );
    }
}
