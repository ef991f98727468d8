//! The global norm of the gradients: of all of them, wherever they live.

use std::path::Path;

use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tier};
use plimsoll_parallel::Solo;
use plimsoll_step::{GradientClipping, NormSource, Offload, StepSettings, UpdateTiming};

use super::*;

/// Relative error of sums of squares in f32.
const ROUNDING: f64 = 1.5e-7;

/// Tables of a few pieces each.
const VOCABULARY: u64 = 3101;

fn batches(settings: &StepSettings) -> [(Vec<u32>, Vec<u32>); 2] {
    [5, 6].map(|seed| tokens(seed, settings.batch_size, settings.sequence_length))
}

fn view(data: &[(Vec<u32>, Vec<u32>)]) -> Vec<MicroBatch<'_>> {
    data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect()
}

/// The norm that the gradients themselves have. That of every one of them counts: without it the norm would be another
/// one by far more than rounding.
fn expected(spec: &ModelSpec, settings: &StepSettings) -> f64 {
    let settings = StepSettings {
        offload: Offload::NONE,
        update: UpdateTiming::AfterBackward,
        micro_batches_per_pass: 1,
        ..settings.clone()
    };
    let device = roomy(1);
    let mut trainer = trainer(&device, spec, &settings);
    trainer.reset_magnitudes().unwrap();
    let all = gradients(&device, &mut trainer, &view(&batches(&settings)));
    let sum: f64 = all.iter().map(|(_, gradient)| squares(gradient)).sum();
    for (p, gradient) in &all {
        // A bias of the keys changes no probability where nothing is rotated.
        let nothing = p.role == plimsoll_model::Role::KBias && spec.attention.rope.is_none();
        let without = (1.0 - squares(gradient) / sum).sqrt();
        assert!(nothing || without < 1.0 - 3.0 * ROUNDING, "{}: {without}", p.name);
    }
    sum.sqrt()
}

/// The norm that a step says it had.
fn reported(folder: &Path, spec: &ModelSpec, settings: &StepSettings) -> f64 {
    let device = roomy(2);
    let spill = SpillSettings { folder: folder.to_owned(), budget: None, direct: true };
    let tiers = Arc::new(LowerTiers::open(Region::new(16 << 20).unwrap(), 16 << 20, &spill).unwrap());
    let mut trainer = Trainer::new(&device, tiers, spec.clone(), settings.clone(), &Solo).unwrap();
    trainer.load(fill).unwrap();
    trainer.reset_magnitudes().unwrap();
    trainer.step(&view(&batches(settings)), 0.0).unwrap().grad_norm
}

#[test]
fn the_norm_is_that_of_every_gradient_wherever_it_lives() {
    let folder = tempfile::tempdir().unwrap();
    let all = Offload::all_on;
    let offloads = [
        Offload::NONE,
        Offload { gradients: Tier::Host, ..Offload::NONE },
        Offload { optimizer: Tier::Disk, ..Offload::NONE },
        all(Tier::Disk),
    ];
    let timings = [UpdateTiming::AfterBackward, UpdateTiming::InBackward(NormSource::SecondBackward)];
    let large = [llama(), biased()].map(|spec| ModelSpec { vocab_size: VOCABULARY, ..spec });
    for spec in families().iter().chain(&large) {
        let lengths = spec.experts.is_none().then(|| adapters(spec, 0.0, true));
        for method in [TrainingMethod::Full, adapters(spec, 0.0, false)].into_iter().chain(lengths) {
            let base = StepSettings { method, ..settings(2, 9) };
            let expected = expected(spec, &base);
            for (offload, update) in offloads.iter().flat_map(|o| timings.map(|t| (*o, t))) {
                let settings = StepSettings { offload, update, ..base.clone() };
                let reported = reported(folder.path(), spec, &settings);
                let near = (reported / expected - 1.0).abs() < ROUNDING;
                assert!(near, "{}: {reported}, not {expected}: {settings:?}", spec.name);
            }
        }
    }
}

/// Plain gradient descent with a rate of 1: the weights change by what the gradient was scaled to.
#[test]
fn clipping_makes_long_gradients_shorter_and_leaves_short_ones() {
    let spec = llama();
    let sgd = plimsoll_step::SgdSettings { momentum: 0.0, dampening: 0.0, nesterov: false };
    let plain = StepSettings {
        optimizer: optimizer(OptimizerKind::Sgd(sgd), 0.0),
        clipping: GradientClipping::None,
        ..settings(2, 9)
    };
    let data = batches(&plain);
    let norm = expected(&spec, &plain);
    let scales = |settings: &StepSettings, steps: usize| -> Vec<f64> {
        let device = device(&spec, settings, 1);
        let mut trainer = trainer(&device, &spec, settings);
        let mut scales = Vec::new();
        for _ in 0..steps {
            let before = weights(&trainer);
            // The norm of the step is not that of the one before where weights have moved.
            let gradient: f64 = {
                let probe = roomy(1);
                let mut other = super::common::trainer(&probe, &spec, &plain);
                copy_weights(&trainer, &mut other);
                gradients(&probe, &mut other, &view(&data)).iter().map(|(_, g)| squares(g)).sum()
            };
            trainer.step(&view(&data), 1.0 / 64.0).unwrap();
            let change: f64 = weights(&trainer)
                .iter()
                .zip(&before)
                .map(|(after, before)| {
                    let change: Vec<f64> = after.iter().zip(before).map(|(a, b)| 64.0 * (a - b)).collect();
                    squares(&change)
                })
                .sum();
            scales.push((change / gradient).sqrt());
        }
        scales
    };
    let near = |got: f64, want: f64, settings: &StepSettings| {
        assert!((got / want - 1.0).abs() < 1e-4, "{got}, not {want}: {settings:?}");
    };
    for update in [UpdateTiming::AfterBackward, UpdateTiming::InBackward(NormSource::SecondBackward)] {
        for (most, scale) in [(1e6, 1.0), (2.0 * norm, 1.0), (norm / 2.0, 0.5), (norm / 100.0, 0.01)] {
            let clipping = GradientClipping::GlobalNorm(most);
            let settings = StepSettings { update, clipping, ..plain.clone() };
            near(scales(&settings, 1)[0], scale, &settings);
        }
        let settings = StepSettings { update, ..plain.clone() };
        near(scales(&settings, 1)[0], 1.0, &settings);
    }
    // By the norm of the step before, the first step's by its own.
    let update = UpdateTiming::InBackward(NormSource::PreviousStep);
    let settings =
        StepSettings { update, clipping: GradientClipping::GlobalNorm(norm / 3.0), ..plain.clone() };
    let device = roomy(1);
    let mut trainer = trainer(&device, &spec, &settings);
    let mut before = norm;
    for scale in scales(&settings, 3) {
        near(scale, (norm / 3.0 / before).min(1.0), &settings);
        before = trainer.step(&view(&data), 1.0 / 64.0).unwrap().grad_norm;
    }
}

fn copy_weights(from: &Trainer<'_>, to: &mut Trainer<'_>) {
    let load = |p: &Parameter, rows: std::ops::Range<u64>, dtype, out: &mut [u8]| {
        let values = from.values(p)?;
        let [first, last] = [rows.start, rows.end].map(|row| (row * p.columns()) as usize);
        write_values(&values[first..last], dtype, out);
        Ok::<(), plimsoll_step::StepError>(())
    };
    to.load(load).unwrap();
}
