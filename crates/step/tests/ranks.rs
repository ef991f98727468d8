//! Many ranks take the step of one: the same bits where sums are in the order of the whole batch, and close to them elsewhere;
//! each with the memory and the messages that a dry run says.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use crate::common::meets::meeting_ranks;
use crate::common::*;
use plimsoll_device::{Collective, Communicated, Cpu, CpuOptions, DType, Device, Dry};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Phase, Region, Tag, Tier};
use plimsoll_model::{
    AdapterConfig, AdapterLayout, AttentionSpec, BlockId, ExpertsSpec, MlpSpec, ModelSpec, Parameter, QkNorm,
    RopeSpec, SharedExpert,
};
use plimsoll_parallel::{
    Collectives, Communicator, Deal, DryRanks, Mesh, ThreadRank, Transport, Wired, thread_ranks,
};
use plimsoll_step::{
    AdamSettings, Adapters, AttentionKind, Checkpointing, DecodeSettings, Decoder, EightBit,
    EvaluateSettings, Evaluator, GradientClipping, Linears, LionSettings, MicroBatch, NamedTensor,
    NormSource, Offload, OptimizerKind, PipelineSchedule, Precision, Ranks, RouterTraining, Sharding, Stage,
    StateKind, StepError, StepSettings, Trainer, TrainingMethod, UpdateTiming, WeightStorage, ZeroStage,
};

/// Micro-batches of a step, over all ranks.
const MICRO_BATCHES: u32 = 8;
const STEPS: u64 = 3;

/// A model whose matrices have a share for each of some ranks.
fn wider(spec: ModelSpec) -> ModelSpec {
    let local_rope = spec.attention.local_rope.as_ref().map(|_| RopeSpec::plain(8, 100.0));
    let dims = if spec.attention.latent.is_some() { 4 } else { 8 };
    let rope = spec.attention.rope.as_ref().map(|_| RopeSpec::plain(dims, 10_000.0));
    let experts = spec.experts.map(|experts| ExpertsSpec { count: 6, ..experts });
    ModelSpec {
        experts,
        hidden_size: 32,
        attention: AttentionSpec { head_dim: 8, rope, local_rope, ..spec.attention },
        mlp: MlpSpec { intermediate_size: 96, ..spec.mlp },
        ..spec
    }
}

/// With exchanges behind the computation.
fn sharded(settings: StepSettings, stage: ZeroStage, reproducible: bool) -> StepSettings {
    let sharding = Sharding { stage, reproducible, among: None };
    StepSettings { sharding, overlap_communication: true, ..settings }
}

/// With exchanges that are waited for.
fn one_after_the_other(settings: &StepSettings) -> StepSettings {
    StepSettings { overlap_communication: false, ..settings.clone() }
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

/// Those of a rank; who does not take other micro-batches takes another part of the mesh.
fn of_rank(settings: &StepSettings, ranks: &dyn Communicator) -> StepSettings {
    let mesh = settings.ranks.mesh;
    let mesh = Mesh { data: ranks.size() / mesh.context / mesh.pipeline / mesh.tensor, ..mesh };
    StepSettings { ranks: Ranks { rank: ranks.rank(), mesh }, ..settings.clone() }
}

/// This rank's micro-batches of a step.
fn own_batches(settings: &StepSettings, step: u64) -> Vec<(Vec<u32>, Vec<u32>)> {
    let Ranks { mesh: Mesh { data: ranks, .. }, .. } = settings.ranks;
    let (own, together) = (u64::from(MICRO_BATCHES / ranks), settings.micro_batches_per_pass);
    let deal = Deal { rank: settings.ranks.place().data, ranks, own, together };
    let seed = |micro_batch| 100 + step * u64::from(MICRO_BATCHES) + deal.place(micro_batch);
    (0..own).map(|own| tokens(seed(own), settings.batch_size, settings.sequence_length)).collect()
}

/// Losses and norms; last, the loss of a batch that is evaluated on every group of ranks that share sequences.
fn steps(trainer: &mut Trainer<'_>, ranks: &dyn Communicator) -> (Vec<f64>, Vec<f64>) {
    let mut ended = (Vec::new(), Vec::new());
    let settings = trainer.settings().clone();
    for step in 0..STEPS {
        let data = own_batches(&settings, step);
        let batches: Vec<_> = data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
        let outcome = trainer.step(&batches, 1e-2).unwrap();
        ended.0.push(outcome.loss);
        ended.1.push(outcome.grad_norm);
    }
    let (tokens, targets) = tokens(7, settings.batch_size, settings.sequence_length);
    let own = trainer.evaluate(settings.batch_size, &MicroBatch::new(&tokens, &targets)).unwrap().0;
    // Ranks with different experts have counted once what all of them have evaluated.
    let Mesh { data, expert, .. } = settings.ranks.mesh;
    ended.0.push(ranks.sum(own).unwrap() / f64::from(data / expert));
    ended
}

/// The device after a rank's steps, what lies below it at most, and the rank's messages.
fn planned(spec: &ModelSpec, settings: &StepSettings, ranks: DryRanks) -> (Dry, [u64; 2], Communicated) {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let (own, step) = (spec.clone(), of_rank(settings, &ranks));
    let mut trainer = Trainer::new(&dry, Arc::clone(&tiers), own, step, &ranks).unwrap();
    trainer.load::<StepError>(|_, _, _, _| Ok(())).unwrap();
    trainer.reset_magnitudes().unwrap();
    steps(&mut trainer, &ranks);
    drop(trainer);
    let sent = dry.moved().sent;
    (dry, [tiers.host().high_water(), tiers.disk().high_water()], sent)
}

fn run_rank(
    spec: &ModelSpec,
    settings: &StepSettings,
    rank: impl Transport + Send + Sync + 'static,
    folder: &Path,
) -> Ended {
    let ranks = Wired::new(rank).unwrap();
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
    let (losses, norms) = steps(&mut trainer, &ranks);
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
    run_over(spec, settings, thread_ranks(ranks))
}

/// The same over any transport.
fn run_over<T: Transport + Send + Sync + 'static>(
    spec: &ModelSpec,
    settings: &StepSettings,
    ranks: Vec<T>,
) -> Ended {
    let folder = &tempfile::tempdir().unwrap();
    let ended: Vec<Ended> = std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || run_rank(spec, settings, rank, folder.path()));
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
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
    let (ours, theirs) = (&a.losses, &b.losses);
    for (a, b) in ours.iter().zip(theirs) {
        assert!((a - b).abs() <= tolerance * b.abs(), "{what}: {ours:?} {theirs:?}");
    }
}

/// The loss of the first step, before any rounding could have turned a choice.
fn assert_first_close(a: &Ended, b: &Ended, precision: Precision, what: &str) {
    let tolerance = if precision == Precision::F32 { 1e-6 } else { 2e-3 };
    let (own, one) = (a.losses[0], b.losses[0]);
    assert!((own - one).abs() <= tolerance * one, "{what}: {own} {one}");
}

/// A run that is taken up from the masters alone, as from a folder of adapters, has the weights that it would have had.
#[test]
fn a_weight_is_its_master_to_nearest() {
    let settings = StepSettings { precision: BF16_WITH_MASTERS, ..settings(1, 12) };
    let state: HashMap<String, Vec<u8>> = run(&wider(llama()), &settings, 1).state.into_iter().collect();
    let mut compared = 0;
    for (name, weight) in state.iter().filter(|(name, _)| name.contains(" Weight ")) {
        let master = &state[&name.replace(" Weight ", " Master ")];
        for (weight, master) in weight.chunks_exact(2).zip(master.chunks_exact(4)) {
            let bits = u32::from_le_bytes(master.try_into().unwrap());
            let nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            assert_eq!(u32::from(u16::from_le_bytes(weight.try_into().unwrap())), nearest, "{name}");
            compared += 1;
        }
    }
    assert!(compared > 10_000, "{compared}");
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

/// Routers see the same noise and drop the same places whoever takes a micro-batch, and their corrections follow the load of all
/// ranks; a run that is taken up again goes on with them.
#[test]
fn routers_are_trained_alike_on_any_number_of_ranks() {
    let spec = ModelSpec { tie_word_embeddings: false, ..wider(grouped_mixture()) };
    let losses = RouterTraining { z_loss: 0.01, jitter: 0.1, capacity: Some(0.8), correction_speed: 0.01 };
    let routers = |routers| StepSettings { routers, ..settings(1, 9) };
    let base = StepSettings { balance_loss: 0.01, ..routers(losses) };
    let one = run(&spec, &sharded(base.clone(), ZeroStage::Gradients, false), 1);
    for (ranks, stage) in [(2, ZeroStage::Gradients), (4, ZeroStage::Weights)] {
        let many = run(&spec, &sharded(base.clone(), stage, false), ranks);
        assert_same_weights(&many, &one, &format!("{ranks} ranks"));
    }
    // The losses are of all layers, which no stage has.
    let staged = routers(RouterTraining { z_loss: 0.0, ..losses });
    let one = run(&spec, &sharded(staged.clone(), ZeroStage::Gradients, false), 1);
    let stages = in_stages(sharded(staged.clone(), ZeroStage::Gradients, false), 2, SCHEDULES[0]);
    assert_same_weights(&run(&spec, &stages, 2), &one, "stages");
    for (settings, ranks) in
        [(sharded(base.clone(), ZeroStage::Weights, false), 2), (stages, 2), (sharing_sequences(base, 2), 2)]
    {
        let [unbroken, resumed] = resumed(&spec, &settings, ranks);
        assert_eq!(unbroken, resumed, "{settings:?}");
    }
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

/// Exchanges behind the computation add the same terms in the same order, and send as much.
#[test]
fn what_is_exchanged_behind_the_computation_changes_no_bit() {
    let spec = ModelSpec { vocab_size: 3101, ..wider(llama()) };
    let everything = away(Tier::Disk, Tier::Disk, Tier::Disk, Tier::Disk);
    let mut all = cases();
    all.push(StepSettings { offload: everything, ..settings(1, 12) });
    all.push(StepSettings { offload: Offload { prefetch: false, ..everything }, ..settings(1, 12) });
    all.push(StepSettings { method: adapters(&spec, false, DType::Nf4), ..settings(1, 12) });
    for settings in all {
        for stage in [ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights] {
            let behind = sharded(settings.clone(), stage, stage == ZeroStage::States);
            let waited = one_after_the_other(&behind);
            let what = format!("{behind:?}");
            assert_same_weights(&run(&spec, &behind, 2), &run(&spec, &waited, 2), &what);
            let sent = |settings| planned(&spec, settings, DryRanks::new(1, 3)).2;
            assert_eq!(sent(&behind), sent(&waited), "{what}");
        }
    }
}

/// When a layer begins, what ranks share of the next one is on its way: its room is taken before any operation of the layer, forward and
/// back, and no more than one unit ahead.
#[test]
fn the_next_layer_is_gathered_while_one_computes() {
    let spec = ModelSpec { num_layers: 6, ..wider(llama()) };
    let matrices = spec.block_parameters(BlockId::Layer(0)).iter().filter(|p| p.shape.len() > 1).count();
    let settings = sharded(settings(1, 12), ZeroStage::Weights, false);
    let gathered = |settings: &StepSettings, phase| -> Vec<usize> {
        let (dry, tiers) = (Dry::tracing(), Arc::new(LowerTiers::dry()));
        let ranks = DryRanks::new(0, 2);
        let step = of_rank(settings, &ranks);
        let mut trainer = Trainer::new(&dry, tiers, spec.clone(), step, &ranks).unwrap();
        trainer.load::<StepError>(|_, _, _, _| Ok(())).unwrap();
        let (tokens, targets) = tokens(1, 1, 12);
        trainer.step(&[MicroBatch::new(&tokens, &targets)], 1e-2).unwrap();
        drop(trainer);
        let (trace, ledger) = (dry.take_trace().unwrap(), dry.arena().end_record());
        let of_layers = trace.scopes.iter().filter(|scope| scope.phase == phase && scope.layer.is_some());
        // Whole units that are there, or on their way, when a layer begins.
        let there = |first: u64| {
            let events = ledger.events().iter().filter(|event| event.number < first);
            let gathered = events.filter(|event| event.name == "weights.gathered");
            gathered.map(|event| event.delta.signum()).sum::<i64>()
        };
        of_layers.map(|scope| there(scope.first_event) as usize / matrices).collect()
    };
    // Behind the last layer comes the norm, and a piece of the table.
    let of_forward = gathered(&settings, Phase::Forward);
    assert_eq!(of_forward[..5], [2; 5], "{of_forward:?}");
    let of_backward = gathered(&settings, Phase::Backward);
    assert_eq!(of_backward[1..5], [2; 4], "{of_backward:?}");
    assert_eq!(gathered(&one_after_the_other(&settings), Phase::Forward), [1; 6]);
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

fn away(parameters: Tier, gradients: Tier, optimizer: Tier, activations: Tier) -> Offload {
    Offload { parameters, gradients, optimizer, activations, ..Offload::NONE }
}

/// The same method, of which nothing is dropped: another choice is made for other tokens.
fn without_dropout(settings: &StepSettings) -> TrainingMethod {
    match &settings.method {
        TrainingMethod::Full => TrainingMethod::Full,
        TrainingMethod::Adapters(adapters) => {
            TrainingMethod::Adapters(Arc::new(Adapters { dropout: 0.0, ..(**adapters).clone() }))
        }
    }
}

/// Shares may live on the host or on a disk of their rank.
#[test]
fn what_lives_below_a_rank_changes_no_bit() {
    let (host, disk) = (Tier::Host, Tier::Disk);
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
                offloads.push(Offload { prefetch: false, ..away(disk, disk, disk, disk) });
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

/// Ranks of which so many have parts of the same sequences.
fn sharing_sequences(settings: StepSettings, context: u32) -> StepSettings {
    let mesh = Mesh { context, ..Mesh::ALONE };
    StepSettings { ranks: Ranks { rank: 0, mesh }, ..settings }
}

#[test]
fn ranks_that_share_sequences_come_near_one() {
    for spec in families().map(wider) {
        // What is rounded otherwise in bf16 may send a token to another expert, and then nothing is near.
        for precision in [Precision::F32, PURE_BF16].into_iter().take(2 - usize::from(spec.experts.is_some()))
        {
            let settings = StepSettings { precision, ..settings(1, 18) };
            let one = run(&spec, &settings, 1);
            let tolerance = if precision == Precision::F32 { 2e-5 } else { 2e-2 };
            for (context, ranks) in [(2, 2), (2, 4), (4, 4)] {
                let shared = run(&spec, &sharing_sequences(settings.clone(), context), ranks);
                assert_close(&shared, &one, tolerance, &format!("{} {context} {ranks}", spec.name));
            }
        }
    }
}

/// Documents, windows, patterns, shares of everything, lower tiers, forms of checkpointing and adapters go with them.
#[test]
fn whatever_else_is_asked_ranks_that_share_sequences_come_near_one() {
    let (spec, base) = (wider(llama()), settings(2, 19));
    let everything = away(Tier::Disk, Tier::Disk, Tier::Disk, Tier::Disk);
    let pattern = plimsoll_device::BlockSparse { block: 4, local_blocks: 1, global_blocks: 1 };
    for settings in [
        StepSettings { document_end: Some(3), ..base.clone() },
        StepSettings { attention: AttentionKind::SlidingWindow(5), ..base.clone() },
        StepSettings { attention: AttentionKind::BlockSparse(pattern), ..base.clone() },
        StepSettings { offload: everything, checkpointing: Checkpointing::Every(2), ..base.clone() },
        StepSettings { checkpointing: Checkpointing::Full, micro_batches_per_pass: 2, ..base.clone() },
        StepSettings { update: UpdateTiming::InBackward(NormSource::SecondBackward), ..base.clone() },
        StepSettings { method: adapters(&spec, false, DType::F32), ..base.clone() },
        StepSettings { method: adapters(&spec, true, DType::Nf4), ..base.clone() },
    ] {
        let settings = StepSettings { method: without_dropout(&settings), ..settings };
        let one = run(&spec, &settings, 1);
        let shared = sharing_sequences(settings, 2);
        for (stage, ranks) in [
            (ZeroStage::Nothing, 2),
            (ZeroStage::States, 4),
            (ZeroStage::Gradients, 2),
            (ZeroStage::Weights, 4),
        ] {
            let shared = sharded(shared.clone(), stage, false);
            assert_close(&run(&spec, &shared, ranks), &one, 2e-5, &format!("{ranks} ranks, {shared:?}"));
        }
    }
}

/// Keys are received and given back, and all ranks have as much to do.
#[test]
fn a_rank_has_its_part_of_every_sequence() {
    let (spec, settings) = (wider(llama()), settings(1, 64));
    let alone = at_peak(&spec, &settings, DryRanks::new(0, 1), Tag::Activations);
    let shared = sharing_sequences(settings, 4);
    for rank in 0..4 {
        let own = at_peak(&spec, &shared, DryRanks::new(rank, 4), Tag::Activations);
        assert!(own * 3 < alone, "{own} of {alone}");
    }
}

/// Ranks of which so many have some of the layers each.
fn in_stages(settings: StepSettings, pipeline: u32, pipeline_schedule: PipelineSchedule) -> StepSettings {
    let mesh = Mesh { pipeline, ..settings.ranks.mesh };
    StepSettings { ranks: Ranks { rank: 0, mesh }, pipeline_schedule, ..settings }
}

const SCHEDULES: [PipelineSchedule; 2] = [PipelineSchedule::OneForwardOneBackward, PipelineSchedule::GPipe];

/// Two runs of layers on every rank.
const INTERLEAVED: PipelineSchedule = PipelineSchedule::Interleaved(2);

/// Every run of layers has its micro-batches in their order, forward and backward.
#[test]
fn interleaved_stages_change_no_bit() {
    for spec in divisible().into_iter().map(wider) {
        let spec = ModelSpec { tie_word_embeddings: false, ..deeper(spec, 9) };
        for precision in [Precision::F32, PURE_BF16, BF16_WITH_MASTERS] {
            let settings = StepSettings { precision, ..settings(1, 12) };
            let one = run(&spec, &settings, 1);
            for (stages, rounds) in [(2, 2), (2, 4), (4, 2)] {
                let settings = in_stages(settings.clone(), stages, PipelineSchedule::Interleaved(rounds));
                let what = format!("{} {precision:?} {stages} {rounds}", spec.name);
                assert_same_weights(&run(&spec, &settings, stages), &one, &what);
            }
            let reduced = run(&spec, &sharded(settings.clone(), ZeroStage::Gradients, false), 1);
            let shared =
                [(ZeroStage::Nothing, true), (ZeroStage::Gradients, false), (ZeroStage::Weights, false)];
            for (stage, reproducible) in shared {
                let settings = in_stages(sharded(settings.clone(), stage, reproducible), 2, INTERLEAVED);
                let what = format!("{} {precision:?} {stage:?}", spec.name);
                assert_same_weights(&run(&spec, &settings, 4), &reduced, &what);
            }
        }
    }
}

/// A rank sends nothing before another one receives it, and fails where that takes long.
#[test]
fn no_rank_of_interleaved_stages_waits_for_one_that_waits() {
    for (stages, rounds, num_layers) in [(2, 2, 4), (2, 3, 7), (4, 2, 8), (4, 3, 12), (8, 2, 16)] {
        let spec = ModelSpec { tie_word_embeddings: false, ..deeper(wider(llama()), num_layers) };
        let one = run(&spec, &settings(1, 12), 1);
        let settings = in_stages(settings(1, 12), stages, PipelineSchedule::Interleaved(rounds));
        let many = run_over(&spec, &settings, meeting_ranks(stages));
        assert_same_weights(&many, &one, &format!("{stages} {rounds}"));
    }
    // Two groups of one micro-batch a stage each; other ways of dividing the work beside them.
    let spec = ModelSpec { tie_word_embeddings: true, ..deeper(wider(llama()), 4) };
    let products = sharing_products(settings(1, 12), 2);
    for settings in [settings(1, 12), products] {
        let one = run(&spec, &settings_of_one(&settings), 1);
        for stage in [ZeroStage::Nothing, ZeroStage::Weights] {
            let many = in_stages(sharded(settings.clone(), stage, false), 2, INTERLEAVED);
            assert_close(&run_over(&spec, &many, meeting_ranks(8)), &one, 2e-5, &format!("{many:?}"));
        }
    }
}

/// The same on one rank.
fn settings_of_one(settings: &StepSettings) -> StepSettings {
    StepSettings { ranks: Ranks::default(), ..settings.clone() }
}

/// The residual stream of a micro-batch goes over every border between two runs of layers, and its gradient comes back.
#[test]
fn what_interleaved_stages_send() {
    let spec = ModelSpec { tie_word_embeddings: false, ..deeper(wider(llama()), 12) };
    let settings = settings(1, 12);
    let (batches, residual) = (STEPS * u64::from(MICRO_BATCHES), 12 * spec.hidden_size * 4);
    for (stages, rounds) in [(2, 1), (2, 2), (4, 1), (4, 3)] {
        let schedule = match rounds {
            1 => PipelineSchedule::OneForwardOneBackward,
            rounds => PipelineSchedule::Interleaved(rounds),
        };
        let settings = in_stages(settings.clone(), stages, schedule);
        let sent = |rank| planned(&spec, &settings, DryRanks::new(rank, stages)).2;
        let sent = (0..stages).map(sent).fold(Communicated::default(), Communicated::plus);
        let borders = u64::from(stages * rounds - 1);
        // Forward and backward; forward alone where a batch is evaluated.
        let messages = borders * (2 * batches + 1);
        assert_eq!(sent.messages(Collective::Send), messages, "{stages} {rounds}");
        assert_eq!(sent.bytes(Collective::Send), messages * residual, "{stages} {rounds}");
    }
}

/// Fewer than GPipe has, more than there are with one run.
#[test]
fn interleaved_stages_keep_a_warm_up_of_activations() {
    let spec = ModelSpec { num_layers: 8, ..wider(llama()) };
    let of = |schedule, rank| {
        let settings = in_stages(settings(1, 64), 2, schedule);
        at_peak(&spec, &settings, DryRanks::new(rank, 2), Tag::Activations)
    };
    for rank in [0, 1] {
        let [one, interleaved, all] =
            [SCHEDULES[0], INTERLEAVED, SCHEDULES[1]].map(|schedule| of(schedule, rank));
        assert!(one < interleaved && interleaved < all, "{rank}: {one} {interleaved} {all}");
    }
}

#[test]
fn what_cannot_be_interleaved_is_refused() {
    let (spec, base) = (deeper(wider(llama()), 5), settings(1, 12));
    let refused = |rounds| {
        let (dry, ranks) = (Dry::new(), DryRanks::new(0, 2));
        let settings = in_stages(base.clone(), 2, PipelineSchedule::Interleaved(rounds));
        let trainer = Trainer::new(&dry, Arc::default(), spec.clone(), of_rank(&settings, &ranks), &ranks);
        let step = |mut trainer: Trainer<'_>| trainer.step_alike(&MicroBatch::new(&[], &[]), 3, 1e-2);
        trainer.and_then(step).unwrap_err().to_string()
    };
    let layers = refused(3);
    assert!(
        layers.contains("need 6 layers") && layers.contains("set parallel.virtual_stages to 2"),
        "{layers}"
    );
    assert!(refused(2).contains("training.gradient_accumulation_steps to a multiple of 2"), "{}", refused(2));
}

/// Every stage adds up the gradients of micro-batches in their order, as one rank does.
#[test]
fn a_pipeline_changes_no_bit() {
    for spec in divisible().into_iter().map(wider) {
        let spec = ModelSpec { tie_word_embeddings: false, ..spec };
        for precision in [Precision::F32, PURE_BF16, BF16_WITH_MASTERS] {
            let settings = StepSettings { precision, ..settings(1, 12) };
            let one = run(&spec, &settings, 1);
            let reduced = run(&spec, &sharded(settings.clone(), ZeroStage::Gradients, false), 1);
            for schedule in SCHEDULES {
                for stages in [2, 3] {
                    let settings = in_stages(settings.clone(), stages, schedule);
                    let what = format!("{} {precision:?} {schedule:?} {stages}", spec.name);
                    assert_same_weights(&run(&spec, &settings, stages), &one, &what);
                }
                for (stage, reproducible) in
                    [(ZeroStage::Nothing, true), (ZeroStage::Gradients, false), (ZeroStage::Weights, false)]
                {
                    let settings = in_stages(sharded(settings.clone(), stage, reproducible), 2, schedule);
                    let what = format!("{} {precision:?} {schedule:?} {stage:?}", spec.name);
                    assert_same_weights(&run(&spec, &settings, 4), &reduced, &what);
                }
            }
        }
    }
}

/// A table that the first and the last stage have: its gradient is added up in another order, and both have the same values.
#[test]
fn a_pipeline_of_a_tied_model_comes_near_one() {
    for spec in divisible().into_iter().map(wider) {
        let spec = ModelSpec { tie_word_embeddings: true, ..spec };
        // Tables of several pieces too.
        for spec in [spec.clone(), ModelSpec { vocab_size: 3101, ..spec }] {
            let settings = settings(1, 12);
            let one = run(&spec, &settings, 1);
            let everything = away(Tier::Disk, Tier::Disk, Tier::Disk, Tier::Disk);
            for (stage, offload, ranks) in [
                (ZeroStage::Nothing, Offload::NONE, 2),
                (ZeroStage::Nothing, everything, 4),
                (ZeroStage::States, Offload::NONE, 4),
                (ZeroStage::Gradients, everything, 4),
                (ZeroStage::Weights, everything, 4),
            ] {
                let settings = StepSettings { offload, ..sharded(settings.clone(), stage, false) };
                let many = run(&spec, &in_stages(settings, 2, SCHEDULES[0]), ranks);
                assert_close(&many, &one, 2e-5, &format!("{} {stage:?} {offload:?}", spec.name));
            }
            let spec = deeper(spec, 5);
            let one = run(&spec, &settings, 1);
            for (stage, offload) in [(ZeroStage::States, Offload::NONE), (ZeroStage::Weights, everything)] {
                let settings = StepSettings { offload, ..sharded(settings.clone(), stage, false) };
                let many = run(&spec, &in_stages(settings, 2, INTERLEAVED), 4);
                assert_close(&many, &one, 2e-5, &format!("{} {stage:?} {offload:?}", spec.name));
            }
        }
    }
}

/// Precisions, optimizers, forms of checkpointing, lower tiers, adapters, documents and shared sequences go with stages.
#[test]
fn whatever_else_is_asked_a_pipeline_changes_no_bit() {
    let sizes = ModelSpec { num_layers: 5, vocab_size: 3101, ..wider(llama()) };
    let spec = ModelSpec { tie_word_embeddings: false, ..sizes };
    let base = settings(1, 12);
    let after = |settings: &StepSettings| settings.update == UpdateTiming::AfterBackward;
    let goes = |settings: &StepSettings| {
        after(settings) && settings.sequence_chunk_tokens.is_none() && settings.micro_batches_per_pass == 1
    };
    let mut all: Vec<StepSettings> = cases().into_iter().filter(goes).collect();
    all.extend([
        StepSettings { document_end: Some(3), ..base.clone() },
        StepSettings { method: adapters(&spec, false, DType::F32), ..base.clone() },
        StepSettings { method: adapters(&spec, true, DType::Nf4), ..base.clone() },
        StepSettings { offload: away(Tier::Disk, Tier::Disk, Tier::Disk, Tier::Disk), ..base.clone() },
        StepSettings { offload: away(Tier::Host, Tier::Device, Tier::Disk, Tier::Disk), ..base.clone() },
        StepSettings { offload: Offload { prefetch: false, ..Offload::all_on(Tier::Disk) }, ..base.clone() },
        StepSettings {
            offload: away(Tier::Disk, Tier::Device, Tier::Device, Tier::Disk),
            checkpointing: Checkpointing::Every(2),
            ..base.clone()
        },
        StepSettings { checkpointing: Checkpointing::Sqrt, ..base.clone() },
    ]);
    for settings in all {
        let one = run(&spec, &settings, 1);
        for (stages, schedule) in [(2, SCHEDULES[0]), (4, SCHEDULES[0]), (3, SCHEDULES[1]), (2, INTERLEAVED)]
        {
            let settings = in_stages(settings.clone(), stages, schedule);
            assert_same_weights(&run(&spec, &settings, stages), &one, &format!("{stages}, {settings:?}"));
        }
        let shared = sharing_sequences(StepSettings { method: without_dropout(&settings), ..settings }, 2);
        let flat = run(&spec, &shared, 2);
        for schedule in [SCHEDULES[0], INTERLEAVED] {
            let staged = run(&spec, &in_stages(shared.clone(), 2, schedule), 4);
            assert_same_weights(&staged, &flat, &format!("{schedule:?} {shared:?}"));
        }
    }
}

/// What a stage has under way is no more than there are stages behind it, and itself.
#[test]
fn one_forward_one_backward_keeps_fewer_activations() {
    let spec = ModelSpec { num_layers: 8, ..wider(llama()) };
    let of = |schedule, rank| {
        let settings = in_stages(settings(1, 64), 2, schedule);
        at_peak(&spec, &settings, DryRanks::new(rank, 2), Tag::Activations)
    };
    let [[first, last], [first_of_all, last_of_all]] =
        SCHEDULES.map(|schedule| [0, 1].map(|rank| of(schedule, rank)));
    assert!(2 * first < first_of_all && 2 * last < last_of_all && last < first);
}

/// Ranks of which so many share every product, and the rows of the residual stream.
fn sharing_products(settings: StepSettings, tensor: u32) -> StepSettings {
    let mesh = Mesh { tensor, ..settings.ranks.mesh };
    StepSettings { ranks: Ranks { rank: 0, mesh }, sequence_parallel: true, ..settings }
}

/// Ranks of which so many have different experts.
fn sharing_experts(settings: StepSettings, expert: u32) -> StepSettings {
    let mesh = Mesh { expert, ..settings.ranks.mesh };
    StepSettings { ranks: Ranks { rank: 0, mesh }, ..settings }
}

/// Each takes its own micro-batches, and has a loss of its own that balances its experts.
#[test]
fn ranks_with_different_experts_come_near_one() {
    for spec in families().map(wider).into_iter().filter(|spec| spec.experts.is_some()) {
        for precision in [Precision::F32, PURE_BF16] {
            let all =
                RouterTraining { z_loss: 0.01, jitter: 0.1, capacity: Some(1.2), correction_speed: 0.01 };
            // Of few places rows alone are exchanged.
            let few = RouterTraining { capacity: Some(0.5), ..all };
            for routers in [RouterTraining::default(), all, few] {
                let settings = StepSettings { precision, balance_loss: 0.05, routers, ..settings(1, 12) };
                let one = run(&spec, &settings, 1);
                // A rounding may send a token to another expert, or another token to where there is no more room.
                let tolerance = match precision == Precision::F32 {
                    true if routers == RouterTraining::default() => 2e-5,
                    true => 2e-4,
                    false => 2e-1,
                };
                for ranks in [2, 4, 8] {
                    let shared = sharing_experts(settings.clone(), 2);
                    let what = format!("{} {precision:?} {routers:?} {ranks}", spec.name);
                    let shared = run(&spec, &shared, ranks);
                    assert_first_close(&shared, &one, precision, &what);
                    assert_close(&shared, &one, tolerance, &what);
                }
            }
        }
    }
}

/// Where capacities leave fewer rows for a rank than there are tokens, it is sent rows and not tokens: a step sends less, and needs less.
#[test]
fn ranks_exchange_rows_where_these_are_fewer_than_tokens() {
    let spec = wider(mixture());
    let of = |capacity| {
        let routers = RouterTraining { capacity, ..RouterTraining::default() };
        let settings = sharing_experts(StepSettings { routers, ..settings(1, 12) }, 2);
        let (dry, ranks) = (Dry::new(), DryRanks::new(0, 2));
        let settings = of_rank(&settings, &ranks);
        let mut trainer = Trainer::new(&dry, Arc::default(), spec.clone(), settings.clone(), &ranks).unwrap();
        one_step(&mut trainer, &settings, 0);
        (dry.moved().sent, dry.arena().high_water())
    };
    let ([tokens, rows], [roomy, tight]) = {
        let (all, few) = (of(Some(1.0)), of(Some(0.5)));
        ([all.0, few.0], [all.1, few.1])
    };
    assert_eq!(tokens.messages(Collective::AllToAll), 0);
    // To the experts and back in each direction, and once more to them backward.
    let layers = spec.experts.as_ref().unwrap().layers.iter().filter(|has| **has).count() as u64;
    let passes = 2;
    assert_eq!(rows.messages(Collective::AllToAll), passes * layers * 5);
    let row_bytes = spec.hidden_size * 4;
    assert_eq!(rows.bytes(Collective::AllToAll), passes * layers * 5 * 6 * row_bytes);
    assert!(rows.total_bytes() < tokens.total_bytes(), "{rows:?} {tokens:?}");
    assert!(tight < roomy, "{tight} {roomy}");
}

/// Weights, gradients and states of experts are a part of the whole, and those of all else are whole.
#[test]
fn a_rank_has_its_own_experts() {
    let spec = wider(mixture());
    let alone = settings(1, 12);
    let shared = sharing_experts(alone.clone(), 2);
    let experts: u64 = spec.parameters().iter().filter(|p| p.is_of_experts()).map(Parameter::elements).sum();
    for tag in [Tag::Weights, Tag::Optimizer, Tag::Gradients] {
        let of = |settings, ranks| at_peak(&spec, settings, DryRanks::new(ranks - 1, ranks), tag);
        let each = if tag == Tag::Optimizer { 8 } else { 4 };
        let (whole, own) = (of(&alone, 1), of(&shared, 2));
        assert!(whole - own >= experts / 2 * each && whole - own < experts / 2 * each * 11 / 10, "{tag:?}");
    }
}

#[test]
fn experts_that_do_not_come_out_even_are_refused() {
    let error = |spec: &ModelSpec, experts: u32| {
        let (dry, ranks) = (Dry::new(), DryRanks::new(0, experts));
        let settings = of_rank(&sharing_experts(settings(1, 12), experts), &ranks);
        Trainer::new(&dry, Arc::default(), spec.clone(), settings, &ranks).err().unwrap().to_string()
    };
    let odd = error(&wider(mixture()), 4);
    assert!(odd.contains("6 experts are not divisible by 4 ranks"), "{odd}");
    assert!(error(&llama(), 2).contains("parallel.expert_parallel"), "{}", error(&llama(), 2));
}

#[test]
fn ranks_that_share_products_come_near_one() {
    for spec in families().map(wider) {
        // A vocabulary that each rank has some rows of.
        for spec in [spec.clone(), ModelSpec { vocab_size: 3101, ..spec }] {
            // Nobody has all heads, and experts without matrices are on every rank.
            let without = spec.experts.as_ref().is_some_and(|experts| experts.zero_computation.is_some());
            if spec.attention.qk_norm == Some(QkNorm::Whole) || without {
                continue;
            }
            for precision in [Precision::F32, PURE_BF16] {
                let balance_loss = if spec.experts.is_some() { 0.05 } else { 0.0 };
                let settings = StepSettings { precision, balance_loss, ..settings(1, 12) };
                let one = run(&spec, &settings, 1);
                // A rounding may send a token to another expert.
                let tolerance = match precision == Precision::F32 {
                    true => 2e-5,
                    false if spec.experts.is_some() => 2e-1,
                    false => 5e-2,
                };
                for (ranks, sequence_parallel) in [(2, false), (2, true), (4, true)] {
                    let shared = StepSettings { sequence_parallel, ..sharing_products(settings.clone(), 2) };
                    let shared = run(&spec, &shared, ranks);
                    let what = format!("{} {precision:?} {ranks} {sequence_parallel}", spec.name);
                    assert_first_close(&shared, &one, precision, &what);
                    assert_close(&shared, &one, tolerance, &what);
                    let names =
                        |ended: &Ended| ended.state.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
                    assert_eq!(names(&shared), names(&one));
                }
            }
        }
    }
}

/// Stages, shares of everything, shared sequences, lower tiers, forms of checkpointing, adapters and quantised weights go with them.
#[test]
fn whatever_else_is_asked_ranks_that_share_products_come_near_one() {
    // Halves of heads and of the feed-forward width are whole blocks of quantised weights.
    let sizes = wider(llama());
    let spec = ModelSpec {
        num_layers: 4,
        vocab_size: 3101,
        attention: AttentionSpec { head_dim: 32, rope: Some(RopeSpec::plain(32, 1e4)), ..sizes.attention },
        mlp: MlpSpec { intermediate_size: 256, ..sizes.mlp },
        ..sizes
    };
    let specs = |_| vec![spec.clone(), untied(&spec)];
    // Rows with lengths, whole or of some columns.
    let lengths = [DType::F32, DType::Q8_0].map(|weights| {
        let method = adapters(&spec, true, weights);
        let lengths = StepSettings { method, ..settings(1, 16) };
        (StepSettings { method: without_dropout(&lengths), ..lengths }, 2e-5)
    });
    whatever_else_is_asked_they_come_near_one(&specs, &settings(1, 16), sharing_products, &lengths);
}

fn untied(spec: &ModelSpec) -> ModelSpec {
    ModelSpec { tie_word_embeddings: false, ..spec.clone() }
}

/// The same where each has some of a layer's experts: beside its part of every product, or alone.
#[test]
fn whatever_else_is_asked_ranks_that_share_experts_come_near_one() {
    let sizes = deeper(wider(mixture()), 4);
    let shared = SharedExpert { intermediate_size: 128, gated: true };
    let sized = |intermediate_size| {
        // Every token goes to all: a choice between close scores would turn with a rounding.
        let experts = sizes.experts.clone().map(|experts| ExpertsSpec {
            per_token: experts.count,
            intermediate_size,
            shared: Some(shared),
            ..experts
        });
        ModelSpec {
            vocab_size: 3101,
            attention: AttentionSpec {
                head_dim: 32,
                rope: Some(RopeSpec::plain(32, 1e4)),
                ..sizes.attention.clone()
            },
            mlp: MlpSpec { intermediate_size: 256, ..sizes.mlp },
            experts,
            ..sizes.clone()
        }
    };
    // Half of a matrix is one group of NF4's scales: 16384 elements.
    let of = |nf4| sized(if nf4 { 1024 } else { 256 });
    let base = settings(1, 16);
    whatever_else_is_asked_they_come_near_one(&|nf4| vec![untied(&of(nf4))], &base, sharing_products, &[]);
    // Experts with their lengths, and rows that are exchanged.
    let method = adapters(&of(false), true, DType::F32);
    let lengths = StepSettings { method, ..base.clone() };
    let lengths = StepSettings { method: without_dropout(&lengths), ..lengths };
    let routers = RouterTraining { capacity: Some(0.5), ..RouterTraining::default() };
    let rows = StepSettings { routers, checkpointing: Checkpointing::Full, ..base.clone() };
    // Chunks whose last has fewer tokens than there may be rows.
    let chunks = StepSettings { mlp_chunk_tokens: Some(11), ..rows.clone() };
    let more = [(lengths, 2e-5), (rows, 2e-5), (chunks, 2e-5)];
    let specs = |nf4| vec![of(nf4), untied(&of(nf4))];
    whatever_else_is_asked_they_come_near_one(&specs, &base, sharing_experts, &more);
}

/// `specs` has the models, those for weights in NF4 too.
fn whatever_else_is_asked_they_come_near_one(
    specs: &dyn Fn(bool) -> Vec<ModelSpec>,
    base: &StepSettings,
    share: fn(StepSettings, u32) -> StepSettings,
    more: &[(StepSettings, f64)],
) {
    let everything = away(Tier::Disk, Tier::Disk, Tier::Disk, Tier::Disk);
    let adapters = |weights| {
        let spec = &specs(weights == DType::Nf4)[0];
        without_dropout(&StepSettings { method: adapters(spec, false, weights), ..base.clone() })
    };
    let lion = OptimizerKind::Lion(LionSettings { beta1: 0.9, beta2: 0.99 });
    for (settings, tolerance) in [
        (StepSettings { document_end: Some(3), mlp_chunk_tokens: Some(5), ..base.clone() }, 2e-5),
        (StepSettings { offload: everything, checkpointing: Checkpointing::Every(2), ..base.clone() }, 2e-5),
        (
            StepSettings { checkpointing: Checkpointing::Full, micro_batches_per_pass: 2, ..base.clone() },
            2e-5,
        ),
        (StepSettings { update: UpdateTiming::InBackward(NormSource::SecondBackward), ..base.clone() }, 2e-5),
        (StepSettings { precision: BF16_WITH_MASTERS, optimizer: with_kind(lion), ..base.clone() }, 2e-2),
        (StepSettings { method: adapters(DType::F32), ..base.clone() }, 2e-5),
        (StepSettings { method: adapters(DType::Q8_0), ..base.clone() }, 2e-5),
        (StepSettings { method: adapters(DType::Nf4), ..base.clone() }, 2e-2),
    ]
    .into_iter()
    .chain(more.iter().cloned())
    {
        let weights =
            settings.method.adapters().into_iter().flat_map(|adapters| adapters.weight_types.values());
        let nf4 = weights.copied().any(|dtype| dtype == DType::Nf4);
        for spec in &specs(nf4) {
            let one = run(spec, &settings, 1);
            let shared = share(settings.clone(), 2);
            for (stage, ranks, sequence_parallel) in [
                (ZeroStage::Nothing, 2, true),
                (ZeroStage::States, 4, false),
                (ZeroStage::Gradients, 2, true),
                (ZeroStage::Weights, 4, false),
                (ZeroStage::Weights, 4, true),
            ] {
                let shared = StepSettings { sequence_parallel, ..sharded(shared.clone(), stage, false) };
                let what = format!("{ranks} ranks, {shared:?}");
                assert_close(&run(spec, &shared, ranks), &one, tolerance, &what);
            }
            let sequences = share(sharing_sequences(settings.clone(), 2), 2);
            assert_close(&run(spec, &sequences, 4), &one, tolerance, &format!("{sequences:?}"));
            let after =
                settings.update == UpdateTiming::AfterBackward && settings.micro_batches_per_pass == 1;
            for schedule in SCHEDULES.into_iter().chain([INTERLEAVED]).filter(|_| after) {
                let staged = in_stages(shared.clone(), 2, schedule);
                assert_close(&run(spec, &staged, 4), &one, tolerance, &format!("{staged:?}"));
                let staged = sharded(staged, ZeroStage::Weights, false);
                assert_close(&run(spec, &staged, 8), &one, tolerance, &format!("{staged:?}"));
            }
        }
    }
}

#[test]
fn a_rank_has_its_part_of_every_product() {
    let spec = ModelSpec { vocab_size: 64 * 32, hidden_size: 256, ..wider(llama()) };
    let of = |settings: &StepSettings, ranks, tag| {
        (0..ranks).map(|rank| at_peak(&spec, settings, DryRanks::new(rank, ranks), tag)).max().unwrap()
    };
    let (alone, shared) = (settings(1, 12), sharing_products(settings(1, 12), 2));
    for tag in [Tag::Weights, Tag::Optimizer, Tag::Gradients] {
        let (whole, share) = (of(&alone, 1, tag), of(&shared, 2, tag));
        assert!(share * 100 < whole * 52, "{tag:?}: {share} of {whole}");
    }
}

/// Each normalises and keeps its rows of what is between the halves of layers.
#[test]
fn ranks_that_share_rows_keep_a_part_of_the_residual_stream() {
    let spec = ModelSpec { num_layers: 8, ..wider(llama()) };
    let of = |sequence_parallel| {
        let settings = StepSettings { checkpointing: Checkpointing::Full, ..settings(1, 256) };
        let shared = StepSettings { sequence_parallel, ..sharing_products(settings, 2) };
        at_peak(&spec, &shared, DryRanks::new(0, 2), Tag::Activations)
    };
    let inputs = 8 * 256 * spec.hidden_size * 4;
    assert!(of(true) + inputs / 2 <= of(false), "{} {}", of(true), of(false));
}

/// An odd number of tokens: every rank has all rows, as where it is not asked to share them.
#[test]
fn rows_that_cannot_be_divided_are_not() {
    let (spec, settings) = (wider(llama()), sharing_products(settings(1, 11), 2));
    let whole = StepSettings { sequence_parallel: false, ..settings.clone() };
    assert_same_weights(&run(&spec, &settings, 2), &run(&spec, &whole, 2), "11 tokens");
    // Nor those of 8-bit floats, which have one factor for a tensor.
    let precision = Precision { linears: Linears::Fp8, ..BF16_WITH_MASTERS };
    let fp8 = StepSettings { precision, ..sharing_products(crate::common::settings(1, 12), 2) };
    let whole = StepSettings { sequence_parallel: false, ..fp8.clone() };
    assert_same_weights(&run(&spec, &fp8, 2), &run(&spec, &whole, 2), "fp8");
}

#[test]
fn what_products_cannot_be_divided_by_is_refused() {
    let error = |spec: &ModelSpec, settings: StepSettings| {
        let (dry, settings) = (Dry::new(), of_rank(&settings, &DryRanks::new(0, settings.ranks.mesh.size())));
        let ranks = DryRanks::new(0, settings.ranks.mesh.size());
        Trainer::new(&dry, Arc::default(), spec.clone(), settings, &ranks).err().map(|e| e.to_string())
    };
    let (spec, base) = (wider(llama()), settings(1, 12));
    let heads = error(&spec, sharing_products(base.clone(), 3)).unwrap();
    assert!(heads.contains("are not divisible by 3 ranks; set parallel.tensor_parallel"), "{heads}");
    let stages = error(&spec, in_stages(base.clone(), 4, SCHEDULES[0])).unwrap();
    assert!(stages.contains("set parallel.pipeline_parallel to 3 or less"), "{stages}");
    let eight_bit = OptimizerKind::AdamW8bit(AdamSettings::default(), EightBit { embeddings: true });
    let settings = StepSettings { optimizer: with_kind(eight_bit), ..base };
    assert!(error(&spec, sharing_products(settings, 2)).unwrap().contains("whole matrices"));
}

/// Neighbours share what others have too: the same sums in the same order.
#[test]
fn the_number_of_ranks_that_share_changes_no_bit() {
    let spec = ModelSpec { vocab_size: 3101, ..wider(llama()) };
    let everything = away(Tier::Disk, Tier::Disk, Tier::Disk, Tier::Disk);
    for (precision, offload) in [(Precision::F32, Offload::NONE), (BF16_WITH_MASTERS, everything)] {
        let settings = StepSettings { precision, offload, ..settings(1, 12) };
        for stage in [ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights] {
            let all = sharded(settings.clone(), stage, false);
            let (four, eight) = (run(&spec, &all, 4), run(&spec, &all, 8));
            let some = |among| {
                let sharding = Sharding { among: Some(among), ..all.sharding };
                StepSettings { sharding, ..all.clone() }
            };
            assert_same_weights(&run(&spec, &some(2), 4), &four, &format!("{stage:?}"));
            assert_same_weights(&run(&spec, &some(1), 4), &four, &format!("{stage:?}"));
            assert_same_weights(&run(&spec, &some(4), 8), &eight, &format!("{stage:?}"));
        }
    }
    let share = |among| {
        let sharding = Sharding { stage: ZeroStage::Weights, reproducible: false, among };
        let settings = StepSettings { sharding, ..settings(1, 12) };
        at_peak(&wider(llama()), &settings, DryRanks::new(0, 4), Tag::Optimizer)
    };
    assert!(share(Some(2)) > share(None) * 3 / 2);
}

/// The losses of the fourth and the fifth step of a run that goes on, and of one that is taken up again from what it has saved.
fn resumed(spec: &ModelSpec, settings: &StepSettings, ranks: u32) -> [[f64; 2]; 2] {
    let of_rank = |rank: ThreadRank| -> [[f64; 2]; 2] {
        let ranks = Wired::new(rank).unwrap();
        let step = of_rank(settings, &ranks);
        let device = Cpu::new(1 << 26, CpuOptions { threads: Some(1), isa: None }).unwrap();
        let new = || Trainer::new(&device, Arc::default(), spec.clone(), step.clone(), &ranks).unwrap();
        let take = |trainer: &mut Trainer<'_>, number: u64| {
            let data = own_batches(&step, number);
            let batches: Vec<_> =
                data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
            trainer.step(&batches, 1e-2).unwrap().loss
        };
        let mut trainer = new();
        trainer.load(fill).unwrap();
        for number in 0..STEPS {
            take(&mut trainer, number);
        }
        let own = trainer.on_first_rank::<_, StepError>(|| Ok(saved(&trainer))).unwrap().unwrap_or_default();
        let of = |number: usize| own.get(number).map(|(_, bytes)| bytes.clone()).unwrap_or_default();
        let named = trainer.state().unwrap();
        let all: Vec<Vec<u8>> = (0..named.len()).map(|number| ranks.broadcast(of(number)).unwrap()).collect();
        let progress = trainer.progress();
        let unbroken = [3, 4].map(|number| take(&mut trainer, number));
        drop(trainer);
        let mut trainer = new();
        let weights: HashMap<&str, &[u8]> = named
            .iter()
            .zip(&all)
            .filter(|(tensor, _)| tensor.kind == StateKind::Weight)
            .map(|(tensor, bytes)| (tensor.name.as_str(), &bytes[..]))
            .collect();
        trainer
            .load::<StepError>(|p, rows, _, out| {
                let whole = weights[p.name.as_str()];
                let row = whole.len() / p.rows() as usize;
                out.copy_from_slice(&whole[rows.start as usize * row..rows.end as usize * row]);
                Ok(())
            })
            .unwrap();
        for (tensor, bytes) in named.iter().zip(&all) {
            let mut rest = &bytes[..];
            let mut fill = |out: &mut [u8]| out.copy_from_slice(rest.split_off(..out.len()).unwrap());
            if tensor.kind != StateKind::Weight {
                trainer.write_state(tensor, &mut fill).unwrap();
                assert!(rest.is_empty());
            }
        }
        trainer.resume(progress);
        [unbroken, [3, 4].map(|number| take(&mut trainer, number))]
    };
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || of_rank(rank));
        let threads: Vec<_> = thread_ranks(ranks).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).next().unwrap()
    })
}

/// Every rank finds its own part of what was saved.
#[test]
fn what_was_saved_goes_on_with_the_same_bits() {
    let dense = ModelSpec { num_layers: 4, ..wider(llama()) };
    let experts = deeper(wider(mixture()), 4);
    let stages = [ZeroStage::Nothing, ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights];
    for (spec, stage) in [&dense, &experts].into_iter().flat_map(|spec| stages.map(|stage| (spec, stage))) {
        let base = sharded(settings(1, 12), stage, false);
        let among = Sharding { among: Some(2), ..base.sharding };
        let apart = (sharing_experts(base.clone(), 2), 4);
        for (settings, ranks) in [
            (sharing_products(base.clone(), 2), 4),
            (in_stages(base.clone(), 2, SCHEDULES[0]), 4),
            (in_stages(base.clone(), 2, INTERLEAVED), 4),
            (in_stages(sharing_products(base.clone(), 2), 2, SCHEDULES[0]), 8),
            (sharing_sequences(base.clone(), 2), 4),
            (StepSettings { sharding: among, ..base.clone() }, 4),
        ]
        .into_iter()
        .chain(Some(apart).filter(|_| spec.experts.is_some()))
        {
            let [unbroken, resumed] = resumed(spec, &settings, ranks);
            assert_eq!(unbroken, resumed, "{settings:?}");
        }
    }
}

/// Tables of several pieces beside a part of a layer that would make for others.
#[test]
fn a_rank_cuts_tables_as_the_whole_model_does() {
    let sizes = wider(llama());
    let mlp = MlpSpec { intermediate_size: 8192, ..sizes.mlp };
    let spec = ModelSpec { vocab_size: 3101, num_layers: 1, mlp, ..sizes };
    let one = run(&spec, &settings(1, 12), 1);
    assert_close(&run(&spec, &sharing_products(settings(1, 12), 2), 2), &one, 2e-5, "wide");
}

/// Some rank has all of what the rule has to see whole; of a table that two stages have, the same one.
#[test]
fn whole_matrices_of_tied_models_go_with_stages() {
    let adalomo = with_kind(OptimizerKind::AdaLomo(ADALOMO));
    for num_layers in [3, 4, 5] {
        let spec = ModelSpec { num_layers, ..wider(llama()) };
        let settings = StepSettings { optimizer: adalomo.clone(), ..settings(1, 12) };
        let one = run(&spec, &settings, 1);
        for stage in [ZeroStage::States, ZeroStage::Weights] {
            let many = in_stages(sharded(settings.clone(), stage, false), 2, SCHEDULES[0]);
            assert_close(&run(&spec, &many, 4), &one, 2e-5, &format!("{num_layers} {stage:?}"));
        }
    }
}

/// Two micro-batches for three stages.
#[test]
fn fewer_micro_batches_than_stages_go_through() {
    let spec = ModelSpec { tie_word_embeddings: false, ..wider(llama()) };
    let base = sharded(settings(1, 12), ZeroStage::Gradients, false);
    let one = run(&spec, &base, 1);
    for schedule in SCHEDULES {
        let many = run(&spec, &in_stages(base.clone(), 3, schedule), 12);
        assert_same_weights(&many, &one, &format!("{schedule:?}"));
    }
}

/// The logits behind a prompt and behind each of two tokens, on every rank that has some of the layers.
fn answers(spec: &ModelSpec, cache: DType, ranks: u32) -> Vec<Vec<Vec<f32>>> {
    let settings = DecodeSettings {
        precision: Precision::F32,
        cache,
        cache_tier: Tier::Device,
        context: 24,
        prompt_chunk_tokens: 5,
        sequences: 1,
        pages: None,
        drafted_tokens: 0,
    };
    let types = |_: &Parameter| DType::F32;
    let (prompt, _) = tokens(5, 1, 12);
    let append = |decoder: &mut Decoder<'_>| -> Vec<Vec<f32>> {
        let mut all = vec![decoder.append(&prompt).unwrap()];
        all.extend([3, 7].map(|token| decoder.append(&[token]).unwrap()));
        all
    };
    let of_rank = |rank: ThreadRank| {
        let ranks = Wired::new(rank).unwrap();
        let part = Stage::part(spec, ranks.rank(), ranks.size());
        let dry = Dry::new();
        let new = |device| {
            Decoder::new(device, &Arc::default(), part.clone(), settings, WeightStorage::new(&types)).unwrap()
        };
        append(&mut new(&dry));
        let device = Cpu::new(dry.arena().high_water(), CpuOptions { threads: Some(1), isa: None }).unwrap();
        let mut decoder =
            Decoder::new(&device, &Arc::default(), part.clone(), settings, WeightStorage::new(&types))
                .unwrap();
        decoder.load(|p, rows, dtype, out| fill(&spec.original(p), rows, dtype, out)).unwrap();
        decoder.join(ranks.group((0..ranks.size()).collect()).unwrap());
        let logits = append(&mut decoder);
        assert_eq!(device.arena().high_water(), dry.arena().high_water());
        logits
    };
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || of_rank(rank));
        let threads: Vec<_> = thread_ranks(ranks).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_model_in_stages_answers_with_the_same_bits() {
    for spec in divisible().into_iter().map(wider) {
        for cache in [DType::F32, DType::Q8_0] {
            let spec = ModelSpec {
                attention: AttentionSpec { head_dim: 32, ..spec.attention.clone() },
                ..spec.clone()
            };
            let one = answers(&spec, cache, 1);
            for ranks in [2, 3] {
                for of_rank in answers(&spec, cache, ranks) {
                    assert!(of_rank == one[0], "{} {cache} {ranks}", spec.name);
                }
            }
        }
    }
}

fn evaluator<'a>(device: &'a dyn Device, part: &ModelSpec) -> Evaluator<'a> {
    let settings = EvaluateSettings { precision: Precision::F32, longest: 12, loss_chunk_tokens: 5 };
    let storage = WeightStorage::new(&|_| DType::F32);
    Evaluator::new(device, &Arc::default(), part.clone(), settings, storage).unwrap()
}

/// The losses of two micro-batches, as the ranks have them that have some of the layers each; and each rank's arena is the planned.
fn measured(spec: &ModelSpec, ranks: u32) -> Vec<f64> {
    let of_rank = |rank: ThreadRank| {
        let ranks = Wired::new(rank).unwrap();
        let part = Stage::part(spec, ranks.rank(), ranks.size());
        let dry = Dry::new();
        let mut planned = evaluator(&dry, &part);
        planned.join(Box::new(DryRanks::new(ranks.rank(), ranks.size())), spec);
        planned.losses(3, &MicroBatch::new(&[], &[])).unwrap();
        let device = Cpu::new(dry.arena().high_water(), CpuOptions { threads: Some(1), isa: None }).unwrap();
        let mut evaluator = evaluator(&device, &part);
        evaluator.load(|p, rows, dtype, out| fill(&spec.original(p), rows, dtype, out)).unwrap();
        evaluator.join(ranks.group((0..ranks.size()).collect()).unwrap(), spec);
        let losses = [5, 8].map(|seed| {
            let (tokens, targets) = tokens(seed, 3, 12);
            evaluator.losses(3, &MicroBatch::new(&tokens, &targets)).unwrap().0
        });
        assert_eq!(device.arena().high_water(), dry.arena().high_water());
        let is_last = ranks.rank() + 1 == ranks.size();
        assert!(is_last || losses == [0.0, 0.0]);
        losses.map(|loss| ranks.sum(loss).unwrap()).to_vec()
    };
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || of_rank(rank));
        let threads: Vec<_> = thread_ranks(ranks).into_iter().map(start).collect();
        let all: Vec<Vec<f64>> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(all.iter().all(|losses| *losses == all[0]));
        all[0].clone()
    })
}

#[test]
fn a_model_in_stages_is_measured_with_the_same_bits() {
    for spec in divisible().into_iter().map(wider) {
        let one = measured(&spec, 1);
        assert!(one.iter().all(|loss| *loss > 0.0) && one[0] != one[1]);
        for ranks in [2, 3] {
            assert_eq!(measured(&spec, ranks), one, "{} {ranks}", spec.name);
        }
    }
}

/// What a conversation finds out that goes on, goes back, and goes on: the first rank alone knows its tokens.
fn told(spec: &ModelSpec, ranks: u32) -> Vec<Vec<f32>> {
    let settings = DecodeSettings {
        precision: Precision::F32,
        cache: DType::F32,
        cache_tier: Tier::Device,
        context: 24,
        prompt_chunk_tokens: 5,
        sequences: 1,
        pages: None,
        drafted_tokens: 0,
    };
    let of_rank = |rank: ThreadRank| -> Vec<Vec<f32>> {
        let ranks = Wired::new(rank).unwrap();
        let part = Stage::part(spec, ranks.rank(), ranks.size());
        let device = Cpu::new(1 << 20, CpuOptions { threads: Some(1), isa: None }).unwrap();
        let storage = WeightStorage::new(&|_| DType::F32);
        let mut decoder = Decoder::new(&device, &Arc::default(), part, settings, storage).unwrap();
        decoder.load(|p, rows, dtype, out| fill(&spec.original(p), rows, dtype, out)).unwrap();
        decoder.join(ranks.group((0..ranks.size()).collect()).unwrap());
        if ranks.rank() > 0 {
            decoder.follow().unwrap();
            return Vec::new();
        }
        decoder.lead();
        let (prompt, _) = tokens(5, 1, 12);
        let mut all = vec![decoder.append(&prompt).unwrap(), decoder.append(&[3]).unwrap()];
        decoder.truncate(9);
        decoder.truncate(7);
        all.push(decoder.append(&[1, 2, 4]).unwrap());
        // What is refused is told to nobody.
        assert!(decoder.append(&[0; 30]).is_err());
        decoder.truncate(0);
        all.push(decoder.append(&[6]).unwrap());
        decoder.dismiss().unwrap();
        all
    };
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || of_rank(rank));
        let threads: Vec<_> = thread_ranks(ranks).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).next().unwrap()
    })
}

#[test]
fn ranks_that_follow_the_first_compute_what_it_would_alone_in_stages() {
    for spec in divisible().into_iter().map(wider) {
        let one = told(&spec, 1);
        for ranks in [2, 3] {
            assert!(told(&spec, ranks) == one, "{} {ranks}", spec.name);
        }
    }
}
