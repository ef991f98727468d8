//! Every optimizer in a whole step: planned = measured, thread counts and interruptions change no bit, losses fall.

use crate::common::*;
use plimsoll_device::Device;
use plimsoll_step::{
    AdafactorSettings, AdamSettings, ApolloChannels, EightBit, LionSettings, LowRankSettings, MicroBatch,
    OptimizerKind, OptimizerSettings, Precision, SgdSettings, StepProgress, StepSettings, Trainer,
};

/// Every optimizer, with a learning rate at which the tiny model learns.
fn optimizers() -> Vec<(OptimizerKind, f64)> {
    let adam = AdamSettings::default();
    let lion = LionSettings { beta1: 0.9, beta2: 0.99 };
    let bits = EightBit { embeddings: true };
    let adafactor = AdafactorSettings {
        epsilon: 1e-30,
        scale_by_parameter: Some(1e-3),
        clip_threshold: 1.0,
        decay_rate: -0.8,
        beta1: None,
    };
    let sgd =
        |momentum| OptimizerKind::Sgd(SgdSettings { momentum, dampening: 0.0, nesterov: momentum > 0.0 });
    let low_rank = LowRankSettings { rank: 4, update_proj_gap: 2, scale: 1.0, adam };
    vec![
        (OptimizerKind::AdamW(adam), 1e-2),
        (OptimizerKind::AdamWBf16(adam), 1e-2),
        (OptimizerKind::AdamW8bit(adam, bits), 1e-2),
        (OptimizerKind::AdamMini(adam), 1e-2),
        (OptimizerKind::Lion(lion), 3e-3),
        (OptimizerKind::Lion8bit(lion, bits), 3e-3),
        (OptimizerKind::Adafactor(adafactor), 0.1),
        (OptimizerKind::Adafactor(AdafactorSettings { beta1: Some(0.9), ..adafactor }), 0.1),
        (OptimizerKind::AdaLomo(adafactor), 0.1),
        (sgd(0.0), 1.0),
        (sgd(0.9), 0.3),
        (OptimizerKind::GaLore(low_rank), 1e-2),
        (OptimizerKind::Apollo(low_rank, ApolloChannels::Channel), 1e-2),
        (
            OptimizerKind::Apollo(
                LowRankSettings { rank: 1, scale: 16.0, ..low_rank },
                ApolloChannels::Tensor,
            ),
            1e-2,
        ),
    ]
}

/// With a head of its own and biases, and an embedding and feed-forward matrices large enough for 8-bit states.
fn spec() -> plimsoll_model::ModelSpec {
    let base = biased();
    let mlp = plimsoll_model::MlpSpec { intermediate_size: 180, ..base.mlp };
    plimsoll_model::ModelSpec { mlp, num_layers: 2, vocab_size: 180, ..base }
}

fn cases() -> impl Iterator<Item = (StepSettings, f64)> {
    optimizers().into_iter().flat_map(|(kind, lr)| {
        [Precision::F32, BF16_WITH_MASTERS, PURE_BF16].map(|precision| {
            let optimizer = OptimizerSettings { kind, ..OptimizerSettings::default() };
            (StepSettings { precision, optimizer, ..settings(2, 9) }, lr)
        })
    })
}

fn steps(trainer: &mut Trainer<'_>, lr: f64, count: usize) -> Vec<f64> {
    let (tokens, targets) = tokens(7, 2, 9);
    let batch = MicroBatch::new(&tokens, &targets);
    (0..count).map(|_| trainer.step(&[batch, batch], lr).unwrap().loss).collect()
}

#[test]
fn the_plan_is_the_step_run_dry() {
    for (settings, lr) in cases() {
        let device = device(&spec(), &settings, 2);
        steps(&mut trainer(&device, &spec(), &settings), lr, 2);
        let planned = planned_peak(&spec(), &settings, 2);
        assert_eq!(device.arena().high_water(), planned, "{settings:?}");
    }
}

#[test]
fn threads_and_interruptions_change_no_bit() {
    for (settings, lr) in cases() {
        let run = |threads, parts: &[usize]| {
            let mut kept: Option<(StepProgress, Vec<Vec<u8>>)> = None;
            for part in parts {
                let device = device(&spec(), &settings, threads);
                let mut trainer = trainer(&device, &spec(), &settings);
                if let Some((progress, bytes)) = &kept {
                    for (named, bytes) in trainer.state().unwrap().iter().zip(bytes) {
                        trainer.write_state(named, &mut |out| out.copy_from_slice(bytes)).unwrap();
                    }
                    trainer.resume(*progress);
                }
                steps(&mut trainer, lr, *part);
                kept = Some((trainer.progress(), state(&trainer)));
            }
            kept
        };
        let whole = run(1, &[4]);
        assert!(whole == run(2, &[4]), "threads: {settings:?}");
        assert!(whole == run(2, &[1, 3]), "interruption: {settings:?}");
    }
}

#[test]
fn losses_fall() {
    for (settings, lr) in cases() {
        let device = device(&spec(), &settings, 2);
        let losses = steps(&mut trainer(&device, &spec(), &settings), lr, 40);
        assert!(losses[39] < 0.8 * losses[0], "{settings:?}: {} to {}", losses[0], losses[39]);
    }
}
