//! Everything that a step brings from a lower tier is announced by its schedule, in order, so that it can be on its way
//! meanwhile. A pool refuses to give anything else.

use std::sync::Arc;

use crate::common::*;
use plimsoll_device::Dry;
use plimsoll_disk::LowerTiers;
use plimsoll_memory::Tier;
use plimsoll_model::ModelSpec;
use plimsoll_parallel::Solo;
use plimsoll_step::{
    Checkpointing, GradientClipping, MicroBatch, NormSource, Offload, StepError, StepSettings, Trainer,
    UpdateTiming,
};

const TWICE: UpdateTiming = UpdateTiming::InBackward(NormSource::SecondBackward);
const LAYERS: u64 = 7;
/// Tables of five pieces: runs of 1024 rows, the last of them longer.
const VOCABULARY: u64 = 5 * 1024 + 100;

/// Steps of three, one and two micro-batches. A parcel that is taken out of the order that its schedule announced is an error.
fn take_steps(spec: &ModelSpec, settings: &StepSettings) -> Result<(), StepError> {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let mut trainer = Trainer::new(&dry, tiers, spec.clone(), settings.clone(), &Solo)?;
    let data = [1, 2, 3].map(|seed| tokens(seed, settings.batch_size, settings.sequence_length));
    let batches: Vec<_> = data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
    for count in [3, 1, 2] {
        trainer.step(&batches[..count], 1e-3)?;
        trainer.evaluate(settings.batch_size, &batches[0])?;
    }
    trainer.first_bad_output(&batches[0]).map(drop)
}

#[test]
fn everything_that_is_fetched_was_announced() {
    let none = Offload::NONE;
    let all = Offload::all_on;
    let offloads = [
        all(Tier::Disk),
        Offload { prefetch: false, ..all(Tier::Host) },
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
                        let taken = take_steps(&spec, &settings);
                        assert!(taken.is_ok(), "{taken:?}: {}: {settings:?}", spec.name);
                    }
                }
            }
        }
    }
}
