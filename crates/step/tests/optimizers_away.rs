//! Every rule with every kind of tensor on every tier: it runs, takes what a plan says, and gives the same bits.

use std::path::Path;
use std::sync::Arc;

use crate::common::*;
use plimsoll_device::{Cpu, CpuOptions, Device, Dry};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tier};
use plimsoll_model::ModelSpec;
use plimsoll_parallel::Solo;
use plimsoll_step::{
    AdafactorSettings, AdamSettings, ApolloChannels, EightBit, LionSettings, LowRankSettings, MicroBatch,
    NormSource, Offload, OptimizerKind, OptimizerSettings, SgdSettings, StepError, StepSettings, Trainer,
    UpdateTiming,
};

fn kinds() -> Vec<OptimizerKind> {
    let adam = AdamSettings::default();
    let eight_bit = EightBit { embeddings: true };
    let lion = LionSettings { beta1: 0.9, beta2: 0.99 };
    let adafactor = AdafactorSettings {
        decay_rate: -0.8,
        beta1: None,
        epsilon: 1e-30,
        scale_by_parameter: Some(1e-3),
        clip_threshold: 1.0,
    };
    let low_rank = LowRankSettings { rank: 4, update_proj_gap: 2, scale: 0.25, adam };
    vec![
        OptimizerKind::AdamW(adam),
        OptimizerKind::AdamWBf16(adam),
        OptimizerKind::AdamW8bit(adam, eight_bit),
        OptimizerKind::AdamMini(adam),
        OptimizerKind::Lion(lion),
        OptimizerKind::Lion8bit(lion, eight_bit),
        OptimizerKind::Adafactor(adafactor),
        OptimizerKind::Adafactor(AdafactorSettings { beta1: Some(0.9), ..adafactor }),
        OptimizerKind::AdaLomo(adafactor),
        OptimizerKind::Sgd(SgdSettings { momentum: 0.9, dampening: 0.0, nesterov: true }),
        OptimizerKind::GaLore(low_rank),
        OptimizerKind::Apollo(low_rank, ApolloChannels::Channel),
    ]
}

fn offloads() -> Vec<Offload> {
    let none = Offload::NONE;
    let each = |tier| {
        [
            Offload { parameters: tier, ..none },
            Offload { gradients: tier, ..none },
            Offload { optimizer: tier, ..none },
            Offload { activations: tier, ..none },
            Offload { parameters: tier, gradients: tier, ..none },
            Offload::all_on(tier),
            Offload { prefetch: false, ..Offload::all_on(tier) },
        ]
    };
    [Tier::Host, Tier::Disk].into_iter().flat_map(each).collect()
}

/// Two micro-batches a step.
fn steps(trainer: &mut Trainer<'_>, settings: &StepSettings, count: u64) -> Vec<[f64; 2]> {
    let step = |step| {
        let data = [0, 1].map(|i| tokens(40 + 2 * step + i, settings.batch_size, settings.sequence_length));
        let batches = data.each_ref().map(|(tokens, targets)| MicroBatch::new(tokens, targets));
        let outcome = trainer.step(&batches, 1e-2).unwrap();
        [outcome.loss, outcome.grad_norm]
    };
    (0..count).map(step).collect()
}

/// Loss and norm of every step, and the bytes of every weight.
type Outcome = (Vec<[f64; 2]>, Vec<Vec<u8>>);

fn train_in(folder: &Path, spec: &ModelSpec, settings: &StepSettings) -> Result<Outcome, StepError> {
    let (dry, planned) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let (own, step) = (spec.clone(), settings.clone());
    let mut plan = Trainer::new(&dry, Arc::clone(&planned), own, step, &Solo)?;
    plan.load::<StepError>(|_, _, _, _| Ok(()))?;
    steps(&mut plan, settings, 2);
    let peaks = [dry.arena(), planned.host(), planned.disk()].map(|arena| arena.high_water());

    let device = Cpu::new(peaks[0], CpuOptions { threads: Some(1), isa: None })?;
    let spill = SpillSettings { folder: folder.to_owned(), budget: None, direct: true };
    let tiers = Arc::new(LowerTiers::open(Region::new(peaks[1]).unwrap(), peaks[2], &spill)?);
    let (own, step) = (spec.clone(), settings.clone());
    let mut trainer = Trainer::new(&device, Arc::clone(&tiers), own, step, &Solo)?;
    trainer.load(fill)?;
    let results = steps(&mut trainer, settings, 3);
    assert_eq!([device.arena(), tiers.host(), tiers.disk()].map(|arena| arena.high_water()), peaks);
    Ok((results, state(&trainer)))
}

#[test]
fn every_rule_runs_with_every_kind_of_tensor_away() {
    let folder = tempfile::tempdir().unwrap();
    // A vocabulary of more pieces than one, for rules that have pieces.
    let specs = [llama(), biased()].map(|spec| ModelSpec { vocab_size: 2500, num_layers: 2, ..spec });
    for spec in specs {
        for kind in kinds() {
            let optimizer = OptimizerSettings { kind, ..Default::default() };
            let base = StepSettings { optimizer, ..settings(1, 10) };
            let in_backward = UpdateTiming::InBackward(NormSource::PreviousStep);
            for (update, offloads) in [
                (UpdateTiming::AfterBackward, offloads()),
                (in_backward, offloads().into_iter().filter(|o| o.parameters == o.gradients).collect()),
            ] {
                let base = StepSettings { update, ..base.clone() };
                let resident = train_in(folder.path(), &spec, &base).unwrap();
                for offload in offloads {
                    let settings = StepSettings { offload, ..base.clone() };
                    let away = train_in(folder.path(), &spec, &settings);
                    let away = away.unwrap_or_else(|e| panic!("{} {e}: {settings:?}", spec.name));
                    assert!(away == resident, "{} {settings:?}", spec.name);
                }
            }
        }
    }
}
