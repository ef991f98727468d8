//! Many ranks take the step of one: the same bits where sums are in the order of the whole batch, and close to them elsewhere;
//! each with the memory and the messages that a dry run says.

mod common;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use common::*;
use plimsoll_device::{Communicated, Cpu, CpuOptions, DType, Device, Dry};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tag, Tier};
use plimsoll_model::{AdapterConfig, AdapterLayout, AttentionSpec, MlpSpec, ModelSpec, RopeSpec};
use plimsoll_parallel::{Communicator, Deal, DryRanks, ThreadRank, Wired, thread_ranks};
use plimsoll_step::{
    AdamSettings, Adapters, Checkpointing, EightBit, GradientClipping, LionSettings, MicroBatch, NamedTensor,
    NormSource, Offload, OptimizerKind, Precision, Ranks, Sharding, StepError, StepSettings, Trainer,
    TrainingMethod, UpdateTiming, ZeroStage,
};

/// Micro-batches of a step, over all ranks.
const MICRO_BATCHES: u32 = 8;
const STEPS: u64 = 3;

/// A model whose matrices have a share for each of some ranks.
fn wider(spec: ModelSpec) -> ModelSpec {
    let local_rope = spec.attention.local_rope.as_ref().map(|_| RopeSpec::plain(8, 100.0));
    let rope = spec.attention.rope.as_ref().map(|_| RopeSpec::plain(8, 10_000.0));
    ModelSpec {
        hidden_size: 32,
        attention: AttentionSpec { head_dim: 8, rope, local_rope, ..spec.attention },
        mlp: MlpSpec { intermediate_size: 96, ..spec.mlp },
        ..spec
    }
}

fn sharded(settings: StepSettings, stage: ZeroStage, reproducible: bool) -> StepSettings {
    StepSettings { sharding: Sharding { stage, reproducible }, ..settings }
}

/// What a rank ends with.
#[derive(Clone, PartialEq)]
struct Ended {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Of all ranks, on the first one.
    weights: Vec<Vec<u8>>,
    /// What a checkpoint holds, on the first rank.
    state: Vec<(String, Vec<u8>)>,
}

fn of_rank(settings: &StepSettings, ranks: &dyn Communicator) -> StepSettings {
    StepSettings { ranks: Ranks { rank: ranks.rank(), count: ranks.size() }, ..settings.clone() }
}

/// This rank's micro-batches of a step.
fn own_batches(settings: &StepSettings, step: u64, rank: u32, ranks: u32) -> Vec<(Vec<u32>, Vec<u32>)> {
    let (own, together) = (u64::from(MICRO_BATCHES / ranks), settings.micro_batches_per_pass);
    let deal = Deal { rank, ranks, own, together };
    let seed = |micro_batch| 100 + step * u64::from(MICRO_BATCHES) + deal.place(micro_batch);
    (0..own).map(|own| tokens(seed(own), settings.batch_size, settings.sequence_length)).collect()
}

fn steps(
    trainer: &mut Trainer<'_>,
    settings: &StepSettings,
    ranks: &dyn Communicator,
) -> (Vec<f64>, Vec<f64>) {
    let mut ended = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let data = own_batches(settings, step, ranks.rank(), ranks.size());
        let batches: Vec<_> = data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
        let outcome = trainer.step(&batches, 1e-2).unwrap();
        ended.0.push(outcome.loss);
        ended.1.push(outcome.grad_norm);
    }
    ended
}

/// The device after a rank's steps, what lies below it at most, and the rank's messages.
fn planned(spec: &ModelSpec, settings: &StepSettings, ranks: DryRanks) -> (Dry, [u64; 2], Communicated) {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let (own, step) = (spec.clone(), of_rank(settings, &ranks));
    let mut trainer = Trainer::new(&dry, Arc::clone(&tiers), own, step, &ranks).unwrap();
    trainer.load::<StepError>(|_, _, _, _| Ok(())).unwrap();
    trainer.reset_magnitudes().unwrap();
    steps(&mut trainer, settings, &ranks);
    drop(trainer);
    let sent = dry.moved().sent;
    (dry, [tiers.host().high_water(), tiers.disk().high_water()], sent)
}

fn run_rank(spec: &ModelSpec, settings: &StepSettings, rank: ThreadRank, folder: &Path) -> Ended {
    let ranks = Wired::new(rank);
    let (dry, below, sent) = planned(spec, settings, DryRanks::new(ranks.rank(), ranks.size()));
    let peak = dry.arena().high_water();
    let device = Cpu::new(peak, CpuOptions { threads: Some(1), isa: None }).unwrap();
    let [host, disk] = below;
    let spill = SpillSettings { folder: folder.to_owned(), budget: None, direct: true };
    let tiers = Arc::new(LowerTiers::open(Region::new(host).unwrap(), disk, &spill).unwrap());
    let (own, step) = (spec.clone(), of_rank(settings, &ranks));
    let mut trainer = Trainer::new(&device, Arc::clone(&tiers), own, step, &ranks).unwrap();
    trainer.load(fill).unwrap();
    trainer.reset_magnitudes().unwrap();
    let (losses, norms) = steps(&mut trainer, settings, &ranks);
    assert_eq!(device.arena().high_water(), peak, "rank {}", ranks.rank());
    assert_eq!([tiers.host().high_water(), tiers.disk().high_water()], below, "rank {}", ranks.rank());
    assert_eq!(ranks.sent(), sent, "rank {}", ranks.rank());
    let weight = |p| {
        let mut bytes = Vec::new();
        trainer.read_weight(p, &mut |part| bytes.extend_from_slice(part)).unwrap();
        bytes
    };
    let (weights, state) = trainer
        .on_first_rank::<_, StepError>(|| {
            Ok((trainer.trained().iter().map(weight).collect(), saved(&trainer)))
        })
        .unwrap()
        .unwrap_or_default();
    // What was saved can be read back, each rank its own.
    for (tensor, (_, bytes)) in trainer.state().unwrap().iter().zip(&state) {
        let mut rest = &bytes[..];
        let mut fill = |out: &mut [u8]| {
            rest.split_off(..out.len()).unwrap().iter().zip(out).for_each(|(byte, out)| *out = *byte)
        };
        trainer.write_state(tensor, &mut fill).unwrap();
        assert!(rest.is_empty());
    }
    Ended { losses, norms, weights, state }
}

/// What a checkpoint holds, on the first rank.
fn saved(trainer: &Trainer<'_>) -> Vec<(String, Vec<u8>)> {
    let read = |tensor: &NamedTensor| {
        let mut bytes = Vec::new();
        trainer.read_state(tensor, &mut |part| bytes.extend_from_slice(part)).unwrap();
        (format!("{} {:?} {:?}", tensor.name, tensor.kind, tensor.shape), bytes)
    };
    trainer.state().unwrap().iter().map(read).collect()
}

/// What all ranks end with, which is the same.
fn run(spec: &ModelSpec, settings: &StepSettings, ranks: u32) -> Ended {
    let folder = &tempfile::tempdir().unwrap();
    let ended: Vec<Ended> = std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || run_rank(spec, settings, rank, folder.path()));
        let threads: Vec<_> = thread_ranks(ranks).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let alike = |a: &Ended, b: &Ended| (&a.losses, &a.norms) == (&b.losses, &b.norms);
    assert!(ended.windows(2).all(|pair| alike(&pair[0], &pair[1])), "all ranks end alike: {settings:?}");
    ended.into_iter().next().unwrap()
}

fn assert_same_weights(a: &Ended, b: &Ended, what: &str) {
    assert_eq!(a.norms, b.norms, "{what}");
    assert!(a.weights == b.weights, "other weights: {what}");
    let names = |ended: &Ended| ended.state.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(a), names(b), "{what}");
    assert!(a.state == b.state, "another checkpoint: {what}");
    assert_close(a, b, 1e-12, what);
}

fn assert_close(a: &Ended, b: &Ended, tolerance: f64, what: &str) {
    for (a, b) in a.losses.iter().zip(&b.losses) {
        assert!((a - b).abs() <= tolerance * b.abs(), "{what}: {a} {b}");
    }
}

/// Settings in which every kind of precision, state, timing and checkpointing appears.
fn cases() -> Vec<StepSettings> {
    let base = settings(1, 12);
    let in_backward = |source| UpdateTiming::InBackward(source);
    let eight_bit = OptimizerKind::AdamW8bit(AdamSettings::default(), EightBit { embeddings: true });
    vec![
        base.clone(),
        StepSettings { precision: BF16_WITH_MASTERS, checkpointing: Checkpointing::Full, ..base.clone() },
        StepSettings { precision: PURE_BF16, optimizer: with_kind(eight_bit), ..base.clone() },
        StepSettings {
            precision: PURE_BF16,
            optimizer: with_kind(OptimizerKind::Lion(LionSettings { beta1: 0.9, beta2: 0.99 })),
            update: in_backward(NormSource::PreviousStep),
            ..base.clone()
        },
        StepSettings {
            update: in_backward(NormSource::SecondBackward),
            checkpointing: Checkpointing::Every(2),
            ..base.clone()
        },
        StepSettings {
            precision: Precision::F16,
            loss_scaling: Some(Default::default()),
            clipping: GradientClipping::None,
            ..base.clone()
        },
        StepSettings { optimizer: with_kind(OptimizerKind::AdaLomo(ADALOMO)), ..base.clone() },
        StepSettings {
            optimizer: with_kind(OptimizerKind::AdamMini(AdamSettings::default())),
            ..base.clone()
        },
        StepSettings {
            sequence_chunk_tokens: Some(5),
            checkpointing: Checkpointing::Full,
            offload: Offload { activations: Tier::Disk, ..Offload::NONE },
            ..base.clone()
        },
        StepSettings { micro_batches_per_pass: 2, ..base },
    ]
}

/// Adapters of every linear, some of whose inputs are dropped; beside weights of a type.
fn adapters(spec: &ModelSpec, use_dora: bool, weights: DType) -> TrainingMethod {
    let config = AdapterConfig { rank: 8, use_dora, ..AdapterConfig::default() };
    let layout = AdapterLayout::new(&config, spec).unwrap();
    let matrices = spec.parameters().into_iter().filter(|p| p.role.is_block_matrix());
    let weight_types = match weights {
        DType::F32 => HashMap::new(),
        quantised => matrices.map(|p| ((p.block, p.role), quantised)).collect(),
    };
    let adapters = Adapters { layout, dropout: 0.1, weight_types, in_files: HashMap::new() };
    TrainingMethod::Adapters(Arc::new(adapters))
}

/// What a rank has a share of changes no bit, and where sums are in the order of the whole batch the number of ranks does not
/// either.
#[test]
fn the_number_of_ranks_changes_no_bit() {
    let spec = wider(llama());
    for settings in cases() {
        let one = run(&spec, &sharded(settings.clone(), ZeroStage::Gradients, false), 1);
        for ranks in [2, 4] {
            for (stage, reproducible) in [
                (ZeroStage::Nothing, true),
                (ZeroStage::States, true),
                (ZeroStage::Gradients, false),
                (ZeroStage::Weights, false),
            ] {
                let settings = sharded(settings.clone(), stage, reproducible);
                let many = run(&spec, &settings, ranks);
                assert_same_weights(&many, &one, &format!("{ranks} ranks, {settings:?}"));
            }
        }
    }
}

#[test]
fn ranks_of_every_family_and_any_number_have_the_same_bits() {
    for spec in families().map(wider) {
        let settings = sharded(settings(1, 12), ZeroStage::Gradients, false);
        let one = run(&spec, &settings, 1);
        for (ranks, stage) in [(2, ZeroStage::Gradients), (8, ZeroStage::Gradients), (4, ZeroStage::Weights)]
        {
            let settings = sharded(settings.clone(), stage, false);
            let what = format!("{ranks} ranks of {}, {stage:?}", spec.name);
            assert_same_weights(&run(&spec, &settings, ranks), &one, &what);
        }
    }
}

#[test]
fn adapters_have_the_same_bits_on_any_number_of_ranks() {
    let spec = wider(llama());
    for method in [
        adapters(&spec, false, DType::F32),
        adapters(&spec, true, DType::F32),
        adapters(&spec, false, DType::Nf4),
        adapters(&spec, true, DType::Q8_0),
    ] {
        for precision in [Precision::F32, PURE_BF16] {
            let settings = StepSettings { method: method.clone(), precision, ..settings(1, 12) };
            let one = run(&spec, &sharded(settings.clone(), ZeroStage::Gradients, false), 1);
            for ranks in [2, 4] {
                let stages =
                    [(ZeroStage::States, true), (ZeroStage::Gradients, false), (ZeroStage::Weights, false)];
                for (stage, reproducible) in stages {
                    let settings = sharded(settings.clone(), stage, reproducible);
                    assert_same_weights(
                        &run(&spec, &settings, ranks),
                        &one,
                        &format!("{ranks}, {settings:?}"),
                    );
                }
            }
        }
    }
}

/// Shares may live on the host or on a disk of their rank.
#[test]
fn what_lives_below_a_rank_changes_no_bit() {
    let (host, disk) = (Tier::Host, Tier::Disk);
    let away = |parameters, gradients, optimizer, activations| Offload {
        parameters,
        gradients,
        optimizer,
        activations,
    };
    // Tables of several pieces.
    for spec in [llama(), biased()].map(|spec| ModelSpec { vocab_size: 3101, ..wider(spec) }) {
        for precision in [Precision::F32, BF16_WITH_MASTERS] {
            let stages = [ZeroStage::Nothing, ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights];
            let in_order = [(ZeroStage::Nothing, true)];
            for (stage, reproducible) in stages.map(|stage| (stage, false)).into_iter().chain(in_order) {
                let settings = StepSettings { precision, ..sharded(settings(1, 12), stage, reproducible) };
                let resident = run(&spec, &settings, 2);
                let mut offloads = vec![
                    away(Tier::Device, Tier::Device, disk, Tier::Device),
                    away(disk, Tier::Device, host, disk),
                ];
                offloads.push(away(disk, disk, disk, disk));
                for offload in offloads {
                    let settings = StepSettings { offload, ..settings.clone() };
                    assert_same_weights(&run(&spec, &settings, 2), &resident, &format!("{settings:?}"));
                }
            }
        }
    }
}

/// Gradients that are summed once a step come near those of one rank, and what is sharded changes no bit.
#[test]
fn ranks_that_sum_once_a_step_come_near_one() {
    for spec in families().map(wider) {
        for precision in [Precision::F32, PURE_BF16] {
            let settings = StepSettings { precision, ..settings(1, 12) };
            let one = run(&spec, &settings, 1);
            let replicated = run(&spec, &sharded(settings.clone(), ZeroStage::Nothing, false), 4);
            let tolerance = if precision == Precision::F32 { 2e-5 } else { 2e-2 };
            assert_close(&replicated, &one, tolerance, &spec.name);
            let shared = run(&spec, &sharded(settings.clone(), ZeroStage::States, false), 4);
            assert_same_weights(&shared, &replicated, &spec.name);
        }
    }
}

/// Bytes under a tag at the peak of a rank's step.
fn at_peak(spec: &ModelSpec, settings: &StepSettings, ranks: DryRanks, tag: Tag) -> u64 {
    planned(spec, settings, ranks).0.arena().end_record().at_peak().by_tag.get(tag)
}

#[test]
fn a_rank_has_its_share_of_what_is_sharded() {
    let spec = ModelSpec { vocab_size: 64 * 32, hidden_size: 256, ..wider(llama()) };
    let of = |stage, tag| {
        let settings = sharded(settings(1, 12), stage, false);
        (0..2).map(|rank| at_peak(&spec, &settings, DryRanks::new(rank, 2), tag)).max().unwrap()
    };
    let whole = of(ZeroStage::Nothing, Tag::Optimizer);
    for stage in [ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights] {
        let share = of(stage, Tag::Optimizer);
        assert!(share * 100 < whole * 51, "{stage:?}: {share} of {whole}");
    }
    let (whole, share) = (of(ZeroStage::Gradients, Tag::Weights), of(ZeroStage::Weights, Tag::Weights));
    assert!(share * 100 < whole * 51, "{share} of {whole}");
}
