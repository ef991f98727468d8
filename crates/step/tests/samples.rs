//! What a micro-batch says of its samples: where they start, and what each target counts.

use crate::common::*;
use plimsoll_device::{Device, IGNORED_TARGET};
use plimsoll_model::ModelSpec;
use plimsoll_step::{GradientClipping, MicroBatch, StepSettings};

/// Losses of four steps and the state after them; the arena is used up to its last byte.
fn steps(spec: &ModelSpec, settings: &StepSettings, batches: &[MicroBatch<'_>]) -> (Vec<f64>, Vec<Vec<u8>>) {
    let settings = StepSettings { clipping: GradientClipping::None, ..settings.clone() };
    let device = device(spec, &settings, 2);
    let mut trainer = trainer(&device, spec, &settings);
    let losses = (0..4).map(|_| trainer.step(batches, 1e-3).unwrap().loss).collect();
    assert_eq!(device.arena().high_water(), planned_peak(spec, &settings, batches.len()));
    (losses, state(&trainer))
}

#[test]
fn starts_that_are_given_are_those_that_an_end_token_makes() {
    let end = VOCAB - 1;
    let mut tokens: Vec<u32> = tokens(5, 2, 10).0.into_iter().map(|token| token % end).collect();
    (tokens[4], tokens[12]) = (end, end);
    let mut targets: Vec<u32> = tokens[1..].iter().copied().chain([IGNORED_TARGET]).collect();
    (targets[4], targets[9], targets[12]) = (IGNORED_TARGET, IGNORED_TARGET, IGNORED_TARGET);
    let starts = [[0; 5], [5; 5]].concat().into_iter().chain([0; 3]).chain([3; 7]).collect::<Vec<u32>>();
    let plain = MicroBatch::new(&tokens, &targets);
    let given = MicroBatch { document_starts: Some(&starts), ..plain };
    for spec in families() {
        let by_end = StepSettings { document_end: Some(end), ..settings(2, 10) };
        let by_starts = StepSettings { document_starts: true, ..settings(2, 10) };
        assert!(steps(&spec, &by_starts, &[given; 2]) == steps(&spec, &by_end, &[plain; 2]));
    }
}

#[test]
fn weights_of_one_change_no_bit_and_weights_of_zero_are_a_mask() {
    let (tokens, targets) = tokens(3, 2, 9);
    let weighted = StepSettings { target_weights: true, ..settings(2, 9) };
    let ones = vec![1.0; targets.len()];
    let half: Vec<f32> = (0..targets.len()).map(|i| (i % 2) as f32).collect();
    let masked: Vec<u32> =
        targets.iter().zip(&half).map(|(t, w)| if *w > 0.0 { *t } else { IGNORED_TARGET }).collect();
    let plain = MicroBatch::new(&tokens, &targets);
    for spec in families() {
        let all = steps(&spec, &settings(2, 9), &[plain; 2]);
        assert!(steps(&spec, &weighted, &[MicroBatch { weights: Some(&ones), ..plain }; 2]) == all);
        let mask = steps(&spec, &settings(2, 9), &[MicroBatch::new(&tokens, &masked); 2]);
        assert!(mask != all);
        // Where a target counts nothing its gradient is a zero that is computed, of either sign.
        let (losses, _) = steps(&spec, &weighted, &[MicroBatch { weights: Some(&half), ..plain }; 2]);
        assert_eq!(losses, mask.0);
    }
}

#[test]
fn the_loss_is_the_weighted_mean() {
    let spec = llama();
    let (tokens, targets) = tokens(3, 1, 9);
    let weights: Vec<f32> = [0.5, 2.0, 0.0, 1.0, 3.0, 0.25, 1.0, 1.0, 7.0].to_vec();
    let weighted = StepSettings { target_weights: true, ..settings(1, 9) };
    let device = device(&spec, &weighted, 2);
    let mut trainer = trainer(&device, &spec, &weighted);
    // Each loss alone.
    let (mut sum, mut weight) = (0.0, 0.0);
    for (i, target) in targets.iter().enumerate().take(8) {
        let mut alone = vec![IGNORED_TARGET; 9];
        alone[i] = *target;
        let (loss, count) = trainer.evaluate(1, &MicroBatch::new(&tokens, &alone)).unwrap();
        assert_eq!(count, 1);
        (sum, weight) = (sum + f64::from(weights[i]) * loss, weight + f64::from(weights[i]));
    }
    let batch = MicroBatch { weights: Some(&weights), ..MicroBatch::new(&tokens, &targets) };
    assert!((batch.target_weight() - weight).abs() < 1e-12);
    let (evaluated, count) = trainer.evaluate(1, &batch).unwrap();
    assert!((evaluated / sum - 1.0).abs() < 1e-6 && count == 8);
    let (loss, targets) = trainer.accumulate(&[batch]).unwrap();
    assert!((loss / (sum / weight) - 1.0).abs() < 1e-6 && targets == 8);
}

#[test]
fn samples_that_do_not_fit_the_batch_are_refused() {
    let spec = llama();
    let (tokens, targets) = tokens(3, 1, 9);
    let settings = StepSettings { target_weights: true, document_starts: true, ..settings(1, 9) };
    let device = device(&spec, &settings, 1);
    let mut trainer = trainer(&device, &spec, &settings);
    let plain = MicroBatch::new(&tokens, &targets);
    let mut refused = |batch: MicroBatch<'_>| trainer.step(&[batch], 1e-3).unwrap_err().to_string();
    assert_eq!(
        refused(MicroBatch { weights: Some(&[1.0; 8]), ..plain }),
        "a micro-batch of 8 tokens was given to a step made for 1 x 9"
    );
    let starts = [0, 0, 3, 0, 0, 0, 0, 0, 0];
    assert_eq!(
        refused(MicroBatch { document_starts: Some(&starts), ..plain }),
        "token 2 of a sequence is said to be of a document that starts at 3, after it"
    );
}
