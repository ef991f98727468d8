//! MoE++ against its plain version: the loss with the heterogeneous balance, and every gradient, with and without capacities.

use plimsoll_step::{GradientClipping, RouterTraining, StepSettings};

use super::plain_llama::{Weights, losses_with, weights_of};
use super::plain_mixture::Mixture;
use super::*;

const TOKENS: u64 = 24;
const BALANCE: f64 = 0.3;

/// The mean loss, with the balance of experts; and how many choices were dropped.
fn plain(weights: &Weights, capacity: Option<f64>) -> (f64, usize) {
    let spec = moe_plus_plus();
    let (tokens, targets) = tokens(5, 1, TOKENS);
    let mut mixture = Mixture::new(&spec, capacity);
    let losses = losses_with(&spec, weights, &tokens, &targets, &mut mixture);
    let mean = losses.iter().sum::<f64>() / (TOKENS - 1) as f64;
    (mean + BALANCE * mixture.balance_loss(), mixture.dropped)
}

#[test]
fn moe_plus_plus_is_that_of_the_paper() {
    let spec = moe_plus_plus();
    for capacity in [None, Some(0.9)] {
        let routers = RouterTraining { capacity, ..RouterTraining::default() };
        let clipping = GradientClipping::None;
        let settings = StepSettings { balance_loss: BALANCE, routers, clipping, ..settings(1, TOKENS) };
        let (tokens, targets) = tokens(5, 1, TOKENS);
        let batch = [MicroBatch::new(&tokens, &targets)];
        let device = roomy(2);
        let mut trainer = trainer(&device, &spec, &settings);
        let loss = trainer.accumulate(&batch).unwrap().0;
        let all = weights_of(&spec);
        let (expected, dropped) = plain(&all, capacity);
        assert!((loss / expected - 1.0).abs() < 2e-6, "{loss}, not {expected}");
        assert_eq!(dropped > 0, capacity.is_some());
        let counted: u32 = trainer.expert_loads().unwrap().iter().map(|counts| counts.dropped).sum();
        assert_eq!(counted as usize, dropped);
        for (p, gradient) in gradients(&device, &mut trainer, &batch) {
            let mut noise = noise(p.elements());
            let along: Vec<f64> = gradient.iter().map(|_| noise()).collect();
            for direction in [&gradient, &along] {
                let length = squares(direction).sqrt();
                // So small a step changes no choice.
                let at = |size: f64| {
                    let mut moved = all.clone();
                    let own = moved.get_mut(&p.name).unwrap();
                    own.iter_mut().zip(direction).for_each(|(w, d)| *w += size / length * d);
                    plain(&moved, capacity).0
                };
                let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                let expected = gradient.iter().zip(direction).map(|(g, d)| g * d).sum::<f64>() / length;
                let size = squares(&gradient).sqrt();
                assert!(
                    size > 0.0 && (slope - expected).abs() < 1e-3 * size,
                    "{}: {slope} {expected}",
                    p.name
                );
            }
        }
    }
}
