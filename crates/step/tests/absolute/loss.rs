//! The loss of a step: the mean over all targets of all micro-batches, each by its weight.

use plimsoll_device::IGNORED_TARGET;
use plimsoll_step::{GradientClipping, StepSettings};

use super::plain_llama::token_losses;
use super::*;

/// Micro-batches that count very unequally: targets 2 of 3, 1 of 5, all, none.
fn unequal(length: u64) -> Vec<(Vec<u32>, Vec<u32>, Vec<f32>)> {
    let keeps: [fn(usize) -> bool; 4] = [|i| !i.is_multiple_of(3), |i| i % 5 == 1, |_| true, |_| false];
    let one = |(seed, keep): (u64, &fn(usize) -> bool)| {
        let (tokens, mut targets) = tokens(seed, 2, length);
        for (i, target) in targets.iter_mut().enumerate() {
            if !keep(i) {
                *target = IGNORED_TARGET;
            }
        }
        let weights = (0..targets.len()).map(|i| [0.5, 2.0, 0.0, 1.25][(i + seed as usize) % 4]).collect();
        (tokens, targets, weights)
    };
    (1..).zip(&keeps).map(one).collect()
}

fn near(got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 2e-6, "{got}, not {want}");
}

#[test]
fn the_loss_is_the_weighted_mean_of_a_plain_forward_pass() {
    for spec in [llama(), ModelSpec { tie_word_embeddings: false, ..llama() }] {
        let data = unequal(9);
        for weighted in [false, true] {
            for micro_batches_per_pass in [1, 3] {
                let settings =
                    StepSettings { target_weights: weighted, micro_batches_per_pass, ..settings(2, 9) };
                let (mut sum, mut weight, mut count) = (0.0, 0.0, 0);
                for (tokens, targets, weights) in &data {
                    for sequence in 0..2 {
                        let range = sequence * 9..(sequence + 1) * 9;
                        let losses = token_losses(&spec, &tokens[range.clone()], &targets[range.clone()]);
                        for (i, loss) in range.zip(losses) {
                            let counts = targets[i] != IGNORED_TARGET;
                            let own = if weighted { f64::from(weights[i]) } else { 1.0 };
                            sum += own * loss;
                            weight += if counts { own } else { 0.0 };
                            count += u64::from(counts);
                        }
                    }
                }
                let batches: Vec<_> = data
                    .iter()
                    .map(|(tokens, targets, weights)| MicroBatch {
                        weights: weighted.then_some(weights),
                        ..MicroBatch::new(tokens, targets)
                    })
                    .collect();
                let device = roomy(2);
                let mut trainer = trainer(&device, &spec, &settings);
                let outcome = trainer.step(&batches, 1e-3).unwrap();
                assert_eq!(outcome.targets, count);
                near(outcome.loss, sum / weight);
            }
        }
    }
}

/// The gradient of the mean is the mean of the gradients by what the micro-batches count.
#[test]
fn gradients_of_unequal_micro_batches_add_up_by_their_weight() {
    for spec in families() {
        let settings =
            StepSettings { target_weights: true, clipping: GradientClipping::None, ..settings(2, 9) };
        let data = unequal(9);
        let batches: Vec<_> = data
            .iter()
            .map(|(tokens, targets, weights)| MicroBatch {
                weights: Some(weights),
                ..MicroBatch::new(tokens, targets)
            })
            .collect();
        let device = roomy(2);
        let mut trainer = trainer(&device, &spec, &settings);
        let all: f64 = batches.iter().map(MicroBatch::target_weight).sum();
        let mut wanted: Vec<Vec<f64>> = Vec::new();
        for batch in &batches {
            let share = batch.target_weight() / all;
            let parts = gradients(&device, &mut trainer, &[*batch]);
            wanted.resize_with(parts.len(), Vec::new);
            for (sum, (_, part)) in wanted.iter_mut().zip(parts) {
                sum.resize(part.len(), 0.0);
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += share * part);
            }
        }
        let largest = |of: &[f64]| of.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        // A softmax takes no notice of what all keys share: a bias of keys has a gradient of nothing but rounding.
        let rounding = 1e-6 * wanted.iter().map(|of| largest(of)).fold(0.0, f64::max);
        for ((p, got), wanted) in gradients(&device, &mut trainer, &batches).iter().zip(&wanted) {
            let allowed = 1e-5 * largest(wanted) + rounding;
            for (got, want) in got.iter().zip(wanted) {
                assert!((got - want).abs() <= allowed, "{}: {got}, not {want}", p.name);
            }
        }
    }
}
