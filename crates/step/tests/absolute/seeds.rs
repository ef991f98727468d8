//! Random numbers of a step: another one for every step, micro-batch and tensor, and the same one whenever it is asked for
//! again.

use plimsoll_device::{DType, IGNORED_TARGET};
use plimsoll_model::{Adapted, LoraPart, Role};
use plimsoll_step::{GradientClipping, Precision, SgdSettings, StepProgress, StepSettings};

use super::*;

/// A sequence whose first token alone predicts. It sees nothing but itself, so that it alone has a gradient in every
/// layer: an input of an adapter that is dropped there leaves a column of zeros in the gradient of A.
const TOKENS: [u32; 2] = [5, 9];
const TARGETS: [u32; 2] = [9, IGNORED_TARGET];
const NOTHING: [u32; 2] = [IGNORED_TARGET; 2];

/// Which inputs of each adapter are dropped; of queries and keys nothing is known, as a single key has no scores.
fn masks(settings: &StepSettings, steps: u64, micro_batch: usize) -> Vec<(u32, Adapted, Vec<bool>)> {
    let spec = llama();
    let device = roomy(1);
    let mut trainer = trainer(&device, &spec, settings);
    trainer.resume(StepProgress { steps, ..trainer.progress() });
    let empty = MicroBatch::new(&TOKENS, &NOTHING);
    let mut batches = vec![empty; 3];
    batches[micro_batch] = MicroBatch::new(&TOKENS, &TARGETS);
    let all = gradients(&device, &mut trainer, &batches);
    let mask = |(p, gradient): &(Parameter, Vec<f64>)| {
        let Role::Lora(LoraPart::A, adapted) = p.role else { return None };
        let plimsoll_model::BlockId::Layer(layer) = p.block else { return None };
        let columns = p.shape[1] as usize;
        let dropped = |column: usize| gradient.iter().skip(column).step_by(columns).all(|g| *g == 0.0);
        let scores = matches!(adapted.role(), Role::QProj | Role::KProj);
        (!scores).then(|| (layer, adapted, (0..columns).map(dropped).collect()))
    };
    all.iter().filter_map(mask).collect()
}

#[test]
fn a_mask_of_dropout_serves_once() {
    let spec = llama();
    let with = |dropout, seed| StepSettings {
        method: adapters(&spec, dropout, false),
        clipping: GradientClipping::None,
        seed,
        ..settings(1, 2)
    };
    let settings = with(0.4, 3);
    let of = |steps, micro_batch| masks(&settings, steps, micro_batch);
    let first = of(0, 0);
    assert_eq!(first.len(), 3 * 5);
    assert!(masks(&with(0.0, 3), 0, 0).iter().all(|(.., mask)| mask.iter().all(|dropped| !dropped)));
    assert_eq!(first, of(0, 0));
    // Micro-batches that go through a block together have the masks that each has alone.
    let together = StepSettings { micro_batches_per_pass: 3, ..settings.clone() };
    for micro_batch in 0..3 {
        assert_eq!(masks(&together, 2, micro_batch), of(2, micro_batch));
    }
    let other_seed = masks(&with(0.4, 4), 0, 0);
    let all = [first, of(0, 1), of(0, 2), of(1, 0), of(1, 1), of(2, 0), other_seed];
    let masks: Vec<_> = all.iter().flatten().collect();
    for (i, (layer, part, mask)) in masks.iter().enumerate() {
        for (.., other) in &masks[i + 1..] {
            // Inputs of the down projection are wider than the others.
            assert!(
                mask.len() != other.len() || mask != other,
                "layer {layer}, {part:?}: twice the same mask"
            );
        }
    }
    let dropped: Vec<bool> = masks.iter().flat_map(|(.., mask)| mask.clone()).collect();
    let share = dropped.iter().filter(|dropped| **dropped).count() as f64 / dropped.len() as f64;
    assert!((share - 0.4).abs() < 0.03, "{share}");
}

/// How numbers were rounded to bf16: for each the share of a step that it lies above the lower neighbour in magnitude,
/// and whether it went up.
type Rounded = Vec<(f64, bool)>;

fn rounded(exact: &[f64], stored: &[f64]) -> Rounded {
    let one = |(exact, stored): (&f64, &f64)| {
        let lower = f32::from_bits((*exact as f32).abs().to_bits() & 0xffff_0000);
        let upper = f32::from_bits(lower.to_bits() + 0x1_0000);
        let share = (exact.abs() - f64::from(lower)) / f64::from(upper - lower);
        (share, stored.abs() > f64::from(lower))
    };
    exact.iter().zip(stored).map(one).collect()
}

/// Asserts that the random numbers of two tensors have nothing to do with each other. With the same ones it cannot be
/// that of two elements at one place the one that lies lower between its neighbours went up, and the other one down; with
/// others it happens about as often as the shares say.
fn assert_drawn_apart(label: &str, a: &Rounded, b: &Rounded) {
    let (mut expected, mut found) = (0.0, 0);
    for ((a, a_up), (b, b_up)) in a.iter().zip(b) {
        let ((low, low_up), (high, high_up)) =
            if a < b { ((a, a_up), (b, b_up)) } else { ((b, b_up), (a, a_up)) };
        if low + 1e-3 < *high {
            expected += low * (1.0 - high);
            found += u32::from(*low_up && !*high_up);
        } else if low == high {
            // The same number goes the same way with the same random ones.
            expected += 2.0 * low * (1.0 - low);
            found += u32::from(low_up != high_up);
        }
    }
    // Where hardly anything had to be rounded, nothing can be said.
    assert!(expected < 20.0 || f64::from(found) > expected / 10.0, "{label}: {found}, not about {expected}");
}

/// How the sums of two equal gradients of matrices are rounded. The first gradient is rounded to nearest; what is added
/// to it comes after `others` micro-batches that add nothing.
fn sum_roundings(steps: u64, seed: u64, others: usize) -> Vec<(String, Rounded)> {
    let spec = biased();
    let (tokens, targets) = tokens(3, 2, 9);
    let nothing = vec![IGNORED_TARGET; targets.len()];
    let of = |gradients_in, batches: &[MicroBatch<'_>]| {
        let precision = Precision { gradients: gradients_in, ..PURE_BF16 };
        let settings = StepSettings { precision, seed, ..settings(2, 9) };
        let device = roomy(2);
        let mut trainer = trainer(&device, &spec, &settings);
        trainer.resume(StepProgress { steps, ..trainer.progress() });
        gradients(&device, &mut trainer, batches)
    };
    let one = MicroBatch::new(&tokens, &targets);
    let mut two = vec![MicroBatch::new(&tokens, &nothing); 2 + others];
    (two[0], two[1 + others]) = (one, one);
    let (exact, first, both) = (of(DType::F32, &[one]), of(DType::Bf16, &[one]), of(DType::Bf16, &two));
    let matrices = exact.iter().zip(first.iter().zip(&both)).filter(|((p, _), _)| p.role.is_block_matrix());
    matrices
        .map(|((p, exact), ((_, first), (_, both)))| {
            // Each of the two is half of their mean.
            let sums: Vec<f64> =
                exact.iter().zip(first).map(|(exact, first)| (first + exact) / 2.0).collect();
            (p.name.clone(), rounded(&sums, both))
        })
        .collect()
}

fn gradient_roundings(steps: u64, seed: u64) -> Vec<(String, Rounded)> {
    sum_roundings(steps, seed, 0)
}

/// The same for the weights that an update rounds.
fn update_roundings(steps: u64, seed: u64) -> Vec<(String, Rounded)> {
    let spec = biased();
    let (tokens, targets) = tokens(3, 2, 9);
    let batch = MicroBatch::new(&tokens, &targets);
    let sgd = SgdSettings { momentum: 0.0, dampening: 0.0, nesterov: false };
    let precision = Precision { gradients: DType::F32, ..PURE_BF16 };
    let settings = StepSettings {
        precision,
        optimizer: optimizer(OptimizerKind::Sgd(sgd), 0.0),
        clipping: GradientClipping::None,
        seed,
        ..settings(2, 9)
    };
    let device = roomy(2);
    let mut trainer = trainer(&device, &spec, &settings);
    trainer.resume(StepProgress { steps, ..trainer.progress() });
    let before = weights(&trainer);
    let all = gradients(&device, &mut trainer, &[batch]);
    let lr = 0.3;
    trainer.step(&[batch], lr).unwrap();
    let after = weights(&trainer);
    let exact = |(before, (_, gradient)): (&Vec<f64>, &(Parameter, Vec<f64>))| -> Vec<f64> {
        before.iter().zip(gradient).map(|(w, g)| w - lr * g).collect()
    };
    let exacts = before.iter().zip(&all).map(exact);
    let matrices = all.iter().zip(exacts.zip(&after)).filter(|((p, _), _)| p.shape.len() == 2);
    matrices.map(|((p, _), (exact, after))| (p.name.clone(), rounded(&exact, after))).collect()
}

#[test]
fn roundings_are_drawn_anew_for_every_step_and_tensor() {
    for roundings in [gradient_roundings, update_roundings] {
        let first = roundings(0, 3);
        assert_eq!(first, roundings(0, 3));
        let up = first.iter().flat_map(|(_, all)| all).filter(|(_, up)| *up).count() as f64;
        let expected: f64 = first.iter().flat_map(|(_, all)| all).map(|(share, _)| share).sum();
        assert!((up / expected - 1.0).abs() < 0.05, "{up} went up, not {expected}");
        let all: Vec<_> = [first, roundings(1, 3), roundings(7, 3), roundings(0, 4)].concat();
        for (i, (name, a)) in all.iter().enumerate() {
            for (other, b) in &all[i + 1..] {
                assert_drawn_apart(&format!("{name} and {other}"), a, b);
            }
        }
    }
}

/// Each addition to a gradient is rounded by numbers of its own.
#[test]
fn roundings_of_one_gradient_are_drawn_anew_for_every_addition() {
    let all = [0, 1, 2].map(|others| sum_roundings(0, 3, others));
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        for ((name, a), (_, b)) in all[a].iter().zip(&all[b]) {
            assert_drawn_apart(name, a, b);
        }
    }
}
