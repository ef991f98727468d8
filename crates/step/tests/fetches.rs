//! Everything that a step brings from a lower tier is announced before, so that it can be on its way meanwhile.

mod common;

use std::sync::Arc;

use common::*;
use plimsoll_device::Dry;
use plimsoll_disk::LowerTiers;
use plimsoll_memory::Tier;
use plimsoll_model::ModelSpec;
use plimsoll_parallel::Solo;
use plimsoll_step::{
    Checkpointing, GradientClipping, MicroBatch, NormSource, Offload, StepSettings, Trainer, UpdateTiming,
};

/// Of the tables: runs of 1024 rows, the last of them longer.
const PIECES: u64 = 5;
const TWICE: UpdateTiming = UpdateTiming::InBackward(NormSource::SecondBackward);
const LAYERS: u64 = 7;
const VOCABULARY: u64 = 5 * 1024 + 100;

fn fetches(spec: &ModelSpec, settings: &StepSettings) -> u64 {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let mut trainer = Trainer::with_tiers(&dry, tiers, spec.clone(), settings.clone(), &Solo).unwrap();
    let data = [1, 2, 3].map(|seed| tokens(seed, settings.batch_size, settings.sequence_length));
    let batches: Vec<_> = data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
    for count in [3, 1, 2] {
        trainer.step(&batches[..count], 1e-3).unwrap();
    }
    trainer.unannounced_fetches()
}

/// What is fetched without having been announced, for a reason, in steps of three, one and two micro-batches.
fn for_a_reason(spec: &ModelSpec, settings: &StepSettings) -> u64 {
    let Offload { parameters, gradients, .. } = settings.offload;
    let together = settings.micro_batches_per_pass > 1;
    let mut all = 0;
    // Gradients that the first pass of a step has begun itself and comes back to are not there when it announces: the
    // pieces of a tied table, and the layers of a segment that several micro-batches go through.
    if gradients != Tier::Device {
        let first_passes = if together { 3 + 1 + 2 } else { 3 };
        let twice = if settings.update == TWICE { 2 } else { 1 };
        let pieces = if spec.tie_word_embeddings { PIECES } else { 0 };
        let segments = together && matches!(settings.checkpointing, Checkpointing::Every(_));
        all += twice * first_passes * (pieces + if segments { LAYERS } else { 0 });
    }
    // The embedding is updated last. Brought ahead, its pieces would drive out the first layer, with which the next step
    // begins.
    if parameters != Tier::Device && settings.update != UpdateTiming::AfterBackward {
        all += 3 * PIECES;
    }
    all
}

#[test]
fn everything_that_is_fetched_was_announced() {
    let none = Offload::NONE;
    let all = |tier| Offload { parameters: tier, gradients: tier, optimizer: tier, activations: tier };
    let offloads = [
        all(Tier::Disk),
        Offload { parameters: Tier::Disk, ..none },
        Offload { gradients: Tier::Host, ..none },
        Offload { optimizer: Tier::Disk, ..none },
    ];
    let timings = [
        (UpdateTiming::AfterBackward, GradientClipping::GlobalNorm(1.0)),
        (TWICE, GradientClipping::GlobalNorm(1.0)),
        (UpdateTiming::InBackward(NormSource::PreviousStep), GradientClipping::None),
    ];
    let forms =
        [Checkpointing::None, Checkpointing::Full, Checkpointing::Every(2), Checkpointing::Ratio(0.5)];
    // More layers than buffers, and tables of several pieces.
    let large = |spec| ModelSpec { vocab_size: VOCABULARY, num_layers: LAYERS as u32, ..spec };
    for spec in [llama(), biased(), olmo(), gpt2()].map(large) {
        for offload in offloads {
            for (update, clipping) in timings {
                for checkpointing in forms {
                    for micro_batches_per_pass in [1, 3] {
                        let settings = StepSettings {
                            offload,
                            update,
                            clipping,
                            checkpointing,
                            micro_batches_per_pass,
                            ..settings(2, 9)
                        };
                        let found = fetches(&spec, &settings);
                        let most = for_a_reason(&spec, &settings);
                        assert!(found <= most, "{found}, not {most}: {}: {settings:?}", spec.name);
                    }
                }
            }
        }
    }
}
