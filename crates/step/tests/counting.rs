//! A dry run counts what repeats, and finds exactly what running all of it finds.

use std::sync::Arc;

use crate::common::*;
use plimsoll_device::{Device, DeviceError, Dry, Due, Lent, Op, Tally, Tensor, Transferred};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Arena, AtPeak, Ledger, Loan, Tag, Tier};
use plimsoll_model::ModelSpec;
use plimsoll_parallel::{DryRanks, Mesh};
use plimsoll_step::{
    AdamSettings, Checkpointing, Compression, EightBit, GradientClipping, MicroBatch, NormSource, Offload,
    OptimizerKind, OptimizerSettings, PipelineSchedule, Ranks, StepError, StepSettings, Trainer,
    UpdateTiming,
};

/// A device without memory that runs every iteration.
struct RunsAll(Dry);

impl Device for RunsAll {
    fn arena(&self) -> &Arena {
        self.0.arena()
    }

    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError> {
        self.0.execute(op, unless_zero)
    }

    fn is_dry(&self) -> bool {
        true
    }

    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        self.0.write(out, fill)
    }

    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        self.0.read(x, look)
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        self.0.lend(tensor)
    }

    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError> {
        self.0.reclaim(memory)
    }

    fn transfer(&self, moved: Transferred, behind: Due) -> Due {
        self.0.transfer(moved, behind)
    }
}

/// Bytes by kind.
type Tags = Vec<(Tag, u64)>;

/// What is known of a tier afterwards.
#[derive(Debug, PartialEq)]
struct Books {
    at_peak: AtPeak,
    by_layer: Vec<(Option<u32>, Tags)>,
    most: Vec<u64>,
    live: Vec<(Tag, u64)>,
}

impl Books {
    fn of(ledger: &Ledger) -> Books {
        let by_layer = ledger.at_peak_by_layer().into_iter();
        Books {
            at_peak: ledger.at_peak().clone(),
            by_layer: by_layer.map(|(layer, tags)| (layer, tags.iter().collect())).collect(),
            most: Tag::ALL.map(|tag| ledger.most(tag)).to_vec(),
            live: ledger.live().iter().collect(),
        }
    }
}

/// The books of the device, the host and the disk, and what each of two steps and an evaluation cost.
#[derive(Debug, PartialEq)]
struct Found {
    books: [Books; 3],
    costs: Vec<(Tally, Transferred)>,
}

fn found(device: &dyn Device, dry: &Dry, spec: &ModelSpec, settings: &StepSettings, times: u64) -> Found {
    let tiers = Arc::new(LowerTiers::dry());
    let (own, step) = (spec.clone(), settings.clone());
    let ranks = DryRanks::new(settings.ranks.rank, settings.ranks.count());
    let mut trainer = Trainer::new(device, Arc::clone(&tiers), own, step, &ranks).unwrap();
    trainer.load::<StepError>(|_, _, _, _| Ok(())).unwrap();
    let micro_batch = MicroBatch::new(&[], &[]);
    let mut costs = Vec::new();
    let mut note = || costs.push((dry.take_tally(), dry.moved()));
    note();
    for _ in 0..2 {
        trainer.step_alike(&micro_batch, times, 0.0).unwrap();
        note();
    }
    trainer.evaluate(settings.batch_size, &micro_batch).unwrap();
    note();
    let books = [device.arena(), tiers.host(), tiers.disk()].map(|arena| Books::of(&arena.ledger()));
    Found { books, costs }
}

fn check(spec: &ModelSpec, settings: &StepSettings, times: u64) {
    let (dry, all) = (Dry::new(), RunsAll(Dry::new()));
    let counted = found(&dry, &dry, spec, settings, times);
    let run = found(&all, &all.0, spec, settings, times);
    assert_eq!(counted, run, "{} x {times}: {settings:?}", spec.name);
}

/// A vocabulary of several pieces.
fn large(spec: ModelSpec) -> ModelSpec {
    ModelSpec { vocab_size: 3101, ..spec }
}

fn offloads() -> Vec<Offload> {
    let none = Offload::NONE;
    let all = Offload::all_on;
    vec![
        none,
        Offload { parameters: Tier::Disk, ..none },
        Offload { gradients: Tier::Host, ..none },
        Offload { activations: Tier::Disk, ..none },
        Offload { parameters: Tier::Host, gradients: Tier::Disk, optimizer: Tier::Disk, ..none },
        all(Tier::Disk),
        Offload { prefetch: false, ..all(Tier::Disk) },
    ]
}

fn cases() -> Vec<StepSettings> {
    let base = settings(2, 12);
    let optimizer = |kind| OptimizerSettings { kind, ..Default::default() };
    let eight_bit = EightBit { embeddings: true };
    vec![
        StepSettings { mlp_chunk_tokens: Some(1), loss_chunk_tokens: 1, ..base.clone() },
        StepSettings {
            precision: PURE_BF16,
            checkpointing: Checkpointing::Full,
            mlp_chunk_tokens: Some(7),
            loss_chunk_tokens: 5,
            optimizer: optimizer(OptimizerKind::AdamW8bit(AdamSettings::default(), eight_bit)),
            update: UpdateTiming::InBackward(NormSource::SecondBackward),
            ..base.clone()
        },
        StepSettings {
            precision: BF16_WITH_MASTERS,
            checkpointing: Checkpointing::Every(2),
            compression: Compression::Int8 { block: 32 },
            mlp_chunk_tokens: Some(3),
            update: UpdateTiming::InBackward(NormSource::PreviousStep),
            ..base.clone()
        },
        StepSettings { clipping: GradientClipping::None, loss_chunk_tokens: 1000, ..base },
    ]
}

/// Tied tables and others, whose gradients are kept as rows that were looked up where they are away.
#[test]
fn counting_finds_what_running_all_finds() {
    for spec in [large(llama()), large(biased()), gemma()] {
        for settings in cases() {
            for offload in offloads() {
                for times in [1, 2, 3, 4, 9] {
                    check(&spec, &StepSettings { offload, ..settings.clone() }, times);
                }
            }
        }
    }
}

#[test]
fn so_it_does_over_many_micro_batches_and_groups_of_them() {
    for spec in [llama(), large(olmo())] {
        for offload in offloads() {
            let settings = StepSettings { offload, ..cases().swap_remove(2) };
            check(&spec, &settings, 70);
            let settings = StepSettings { micro_batches_per_pass: 3, ..settings };
            check(&spec, &settings, 29);
        }
    }
}

/// Numbers that no run would end with: the plan does, or is refused.
#[test]
fn a_plan_of_any_size_ends() {
    for spec in [llama(), large(biased())] {
        for offload in offloads() {
            let tokens = StepSettings {
                mlp_chunk_tokens: Some(1),
                loss_chunk_tokens: 1,
                offload,
                ..settings(1 << 24, 1 << 20)
            };
            let dry = Dry::new();
            found(&dry, &dry, &spec, &tokens, 1);
            let dry = Dry::new();
            let few_tokens = StepSettings { offload, ..settings(2, 12) };
            let steps = found(&dry, &dry, &spec, &few_tokens, 1 << 40);
            let few = found(&dry, &dry, &spec, &few_tokens, 2);
            assert!(steps.costs[2].0.flops() > few.costs[2].0.flops() << 38, "{offload:?}");
        }
    }
}

/// Legs of a pipeline whose stages are interleaved come round in groups.
#[test]
fn micro_batches_of_interleaved_stages_are_counted() {
    let all = Offload::all_on;
    let specs = [(llama(), 12), (biased(), 12), (llama(), 7)];
    for spec in specs.map(|(spec, num_layers)| large(ModelSpec { num_layers, ..spec })) {
        for (pipeline, rounds) in [(2, 2), (2, 3), (3, 2)] {
            let mesh = Mesh { pipeline, ..Mesh::ALONE };
            for rank in 0..mesh.size() {
                for (checkpointing, offload) in [
                    (Checkpointing::None, Offload::NONE),
                    (Checkpointing::Full, all(Tier::Disk)),
                    (Checkpointing::Every(2), all(Tier::Host)),
                ] {
                    let settings = StepSettings {
                        ranks: Ranks { rank, mesh },
                        pipeline_schedule: PipelineSchedule::Interleaved(rounds),
                        checkpointing,
                        offload,
                        ..settings(1, 9)
                    };
                    check(&spec, &settings, 24);
                    check(&spec, &settings, 120);
                }
            }
        }
    }
}

/// Micro-batches take each other's place in a stage of a pipeline, and come round after as many as there are stages.
#[test]
fn micro_batches_of_a_pipeline_are_counted() {
    let all = Offload::all_on;
    for spec in [llama(), biased()].map(|spec| large(ModelSpec { num_layers: 6, ..spec })) {
        for (mesh, schedule) in [
            (Mesh { pipeline: 3, ..Mesh::ALONE }, PipelineSchedule::OneForwardOneBackward),
            (Mesh { pipeline: 2, tensor: 2, ..Mesh::ALONE }, PipelineSchedule::OneForwardOneBackward),
            (Mesh { pipeline: 2, ..Mesh::ALONE }, PipelineSchedule::GPipe),
        ] {
            for rank in 0..mesh.size() {
                for (checkpointing, offload) in [
                    (Checkpointing::None, Offload::NONE),
                    (Checkpointing::Full, all(Tier::Disk)),
                    (Checkpointing::Every(2), all(Tier::Host)),
                ] {
                    let settings = StepSettings {
                        ranks: Ranks { rank, mesh },
                        pipeline_schedule: schedule,
                        checkpointing,
                        offload,
                        ..settings(1, 9)
                    };
                    check(&spec, &settings, 23);
                }
            }
        }
    }
}
