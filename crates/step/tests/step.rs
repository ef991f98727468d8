//! The step against itself: planned = measured, policies and thread counts change no bit, gradients are gradients.

use crate::common::*;
use plimsoll_device::{DType, Device};
use plimsoll_model::{ModelSpec, Role};
use plimsoll_step::{Checkpointing, GradientClipping, MicroBatch, Precision, StepSettings};

/// Every precision: 8-bit floats with bf16 gradients too, which f32 weights have nowhere else.
fn precisions() -> [Precision; 6] {
    let narrow_gradients = Precision { gradients: DType::Bf16, ..Precision::FP8 };
    [Precision::F32, BF16_WITH_MASTERS, PURE_BF16, Precision::FP8, PURE_FP8, narrow_gradients]
}

/// Every family in every precision, with everything kept and with everything recomputed.
fn every_case() -> Vec<(ModelSpec, StepSettings)> {
    let mut cases = Vec::new();
    for spec in families() {
        for precision in precisions() {
            for checkpointing in [Checkpointing::None, Checkpointing::Full] {
                cases.push((spec.clone(), StepSettings { precision, checkpointing, ..settings(2, 9) }));
            }
        }
    }
    cases
}

#[test]
fn the_plan_is_the_step_run_dry() {
    for (spec, settings) in every_case() {
        let device = device(&spec, &settings, 2);
        let mut trainer = trainer(&device, &spec, &settings);
        for step in 0..2 {
            one_step(&mut trainer, &settings, step);
        }
        let (planned, workspace) = planned(&spec, &settings, 2);
        assert_eq!(device.arena().high_water(), planned, "{settings:?}");
        assert_eq!(device.workspace(), workspace, "{settings:?}");
        assert_eq!(device.arena().capacity(), planned, "{settings:?}");
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for (spec, settings) in every_case() {
        let one = train(&spec, &settings, 1, 3);
        assert!(one == train(&spec, &settings, 2, 3), "{settings:?}");
        assert!(one == train(&spec, &settings, 3, 3), "{settings:?}");
    }
}

#[test]
fn training_learns_in_every_precision() {
    for (spec, settings) in every_case() {
        let device = device(&spec, &settings, 2);
        let mut trainer = trainer(&device, &spec, &settings);
        let losses: Vec<f64> = (0..30).map(|_| one_step(&mut trainer, &settings, 0)).collect();
        assert!(losses[29] < 0.7 * losses[0], "{settings:?}: {losses:?}");
    }
}

#[test]
fn narrow_precision_stays_near_f32() {
    for spec in families() {
        let loss = |precision| train(&spec, &StepSettings { precision, ..settings(2, 9) }, 2, 1).0[0];
        let exact = loss(Precision::F32);
        for precision in [BF16_WITH_MASTERS, PURE_BF16] {
            assert!((loss(precision) / exact - 1.0).abs() < 0.02, "{} {exact}", loss(precision));
        }
    }
}

/// 30 steps on three batches in 8-bit floats are those in f32, about: three or two bits of mantissa are enough where every
/// tensor has a scale of its own.
#[test]
fn eight_bit_floats_learn_as_f32_does() {
    for spec in families() {
        let losses = |precision| {
            let settings = StepSettings { precision, ..settings(4, 9) };
            let device = device(&spec, &settings, 2);
            let mut trainer = trainer(&device, &spec, &settings);
            (0..30).map(|step| one_step(&mut trainer, &settings, step % 3)).collect::<Vec<f64>>()
        };
        let exact = losses(Precision::F32);
        for precision in [Precision::FP8, PURE_FP8] {
            let narrow = losses(precision);
            // Single steps of so small a model part soon; a few of them together stay near.
            for (a, b) in narrow.chunks(6).zip(exact.chunks(6)) {
                let (a, b) = (a.iter().sum::<f64>() / 6.0, b.iter().sum::<f64>() / 6.0);
                assert!((a - b).abs() < 0.2, "{precision:?}: {narrow:?} {exact:?}");
            }
        }
    }
}

#[test]
fn micro_batches_add_up_to_the_large_batch() {
    for spec in families() {
        let (tokens, targets) = tokens(5, 4, 9);
        let gradients = |parts: usize| {
            let settings = settings(4 / parts as u64, 9);
            let device = device(&spec, &settings, 2);
            let mut trainer = trainer(&device, &spec, &settings);
            let size = tokens.len() / parts;
            let batches: Vec<MicroBatch<'_>> = tokens
                .chunks(size)
                .zip(targets.chunks(size))
                .map(|(tokens, targets)| MicroBatch::new(tokens, targets))
                .collect();
            let (loss, count) = trainer.accumulate(&batches).unwrap();
            assert_eq!(count, 4 * 8);
            let all: Vec<Vec<f32>> = trainer
                .trained()
                .iter()
                .map(|p| device.read_f32(trainer.gradient(p).unwrap()).unwrap())
                .collect();
            (loss, all)
        };
        let (loss, whole) = gradients(1);
        let (sum, parts) = gradients(4);
        assert!((loss - sum).abs() < 1e-6);
        for (a, b) in whole.iter().flatten().zip(parts.iter().flatten()) {
            assert!((a - b).abs() < 4e-6 + 1e-4 * a.abs(), "{a} {b}");
        }
    }
}

/// The derivative along the gradient is the gradient's squared norm.
#[test]
fn gradients_are_derivatives_of_the_loss() {
    for spec in families() {
        let settings = StepSettings { clipping: GradientClipping::None, ..settings(1, 12) };
        let (tokens, targets) = tokens(9, 1, 12);
        let batch = MicroBatch::new(&tokens, &targets);
        for p in spec.parameters().into_iter().filter(|p| p.role.has_gradient()) {
            let device = device(&spec, &settings, 2);
            let mut trainer = trainer(&device, &spec, &settings);
            trainer.accumulate(&[batch]).unwrap();
            let gradient = device.read_f32(trainer.gradient(&p).unwrap()).unwrap();
            let square: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum();
            // A bias of the keys alone changes no probability where nothing is rotated.
            if square < 1e-12 {
                assert!(p.role == Role::KBias && spec.attention.rope.is_none(), "{}: {square}", p.name);
                continue;
            }
            let mut loss_at = |distance: f64| {
                trainer
                    .load::<plimsoll_step::StepError>(|q, _, dtype, out| {
                        let mut values = values(q);
                        if q.name == p.name {
                            for (v, g) in values.iter_mut().zip(&gradient) {
                                *v += (distance * f64::from(*g)) as f32;
                            }
                        }
                        write_values(&values, dtype, out);
                        Ok(())
                    })
                    .unwrap();
                let (sum, count) = trainer.evaluate(1, &batch).unwrap();
                sum / count as f64
            };
            // A token that goes to another expert is a step of the loss: where one lies on the way, a shorter one is gone.
            let slopes = [2e-3, 2e-4].map(|length| {
                let size = length / square.sqrt();
                (loss_at(size) - loss_at(-size)) / (2.0 * size)
            });
            let is_square = |slope: &f64| (slope / square - 1.0).abs() < 0.02;
            assert!(slopes.iter().any(is_square), "{}: {slopes:?} {square}", p.name);
        }
    }
}

#[test]
fn a_wrong_batch_or_token_is_refused_and_nothing_changes() {
    let (spec, settings) = (llama(), settings(1, 4));
    let device = device(&spec, &settings, 1);
    let mut trainer = trainer(&device, &spec, &settings);
    let before = state(&trainer);
    for (tokens, targets, words) in [
        (vec![1, 2, 3], vec![1, 2, 3], "3 tokens was given to a step made for 1 x 4"),
        (vec![1, 2, 3, VOCAB], vec![1, 2, 3, 4], "token 61 is outside the vocabulary of 61"),
        (vec![1, 2, 3, 4], vec![1, 2, 3, 99], "token 99 is outside the vocabulary of 61"),
    ] {
        let batch = MicroBatch::new(&tokens, &targets);
        let error = trainer.step(&[batch], 1e-3).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(before == state(&trainer));
}

#[test]
fn a_loss_that_is_not_a_number_leaves_the_weights_alone() {
    let (spec, settings) = (llama(), settings(1, 4));
    let device = device(&spec, &settings, 1);
    let mut trainer = trainer(&device, &spec, &settings);
    let poisoned = trainer.weight(&spec.parameters()[0]).unwrap().clone();
    device.write(&poisoned, &mut |bytes| bytes[..4].copy_from_slice(&f32::NAN.to_ne_bytes())).unwrap();
    let before = state(&trainer);
    let batch = MicroBatch::new(&[0, 1, 2, 3], &[1, 2, 3, 0]);
    let error = trainer.step(&[batch], 1e-3).unwrap_err().to_string();
    assert!(error.contains("the weights were not changed"), "{error}");
    assert!(before == state(&trainer));
}
