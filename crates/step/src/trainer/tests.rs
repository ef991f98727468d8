//! What a trainer does at its edges, and what its passes take, move and compute, with numbers worked out by hand.

use std::collections::HashMap;

use plimsoll_device::{Collective, Communicated, Cpu, CpuOptions, DType, Dry, Iterations, Tensor};
use plimsoll_disk::SpillSettings;
use plimsoll_memory::Region;
use plimsoll_model::{AdapterConfig, AdapterLayout, BlockId};
use plimsoll_parallel::{CommunicationError, Exchange, Solo, Ticket};

use super::numbers::Found;
use super::pass::Pass;
use super::*;
use crate::common::*;
use crate::optimizer::{LowRankSettings, OptimizerKind, OptimizerSettings};
use crate::settings::{Adapters, KeptLayers, LossScaling, Offload, TrainingMethod};
use crate::tier::Unit;
use crate::{AdamSettings, Checkpointing, Group, Precision};

fn cpu() -> Cpu {
    Cpu::new(16 << 20, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

fn dry_trainer<'a>(device: &'a dyn Device, spec: &ModelSpec, settings: &StepSettings) -> Trainer<'a> {
    let tiers = Arc::new(LowerTiers::dry());
    Trainer::new(device, tiers, spec.clone(), settings.clone(), &Solo).unwrap()
}

fn on_dry_device<'a>(dry: &'a Dry, spec: &ModelSpec, settings: &StepSettings) -> Trainer<'a> {
    dry_trainer(dry, spec, settings)
}

/// Adapters of every linear of the layers.
fn adapters(spec: &ModelSpec, dropout: f32) -> TrainingMethod {
    let config = AdapterConfig { rank: 3, ..AdapterConfig::default() };
    let layout = AdapterLayout::new(&config, spec).unwrap();
    let (weight_types, in_files) = (HashMap::new(), HashMap::new());
    TrainingMethod::Adapters(Arc::new(Adapters { layout, dropout, weight_types, in_files }))
}

/// One of two ranks, of which the other brings so much to every sum.
struct Others(f64);

impl Communicator for Others {
    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        2
    }

    fn sent(&self) -> Communicated {
        Communicated::default()
    }

    fn group(&self, _: Vec<u32>) -> Result<Box<dyn Communicator + '_>, CommunicationError> {
        Ok(Box::new(Others(self.0)))
    }

    fn begin(&self, device: &dyn Device, exchange: Exchange<'_>) -> Result<Ticket, CommunicationError> {
        Solo.begin(device, exchange)
    }

    fn send_receive(
        &self,
        _: &dyn Device,
        _: Collective,
        _: Option<(u32, &Tensor)>,
        _: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn send_bytes(&self, _: u32, _: &[u8]) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn receive_bytes(&self, _: u32, _: &mut [u8]) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn gather_numbers(&self, own: &[f64]) -> Result<Vec<Vec<f64>>, CommunicationError> {
        Ok(vec![own.to_vec(), vec![self.0; own.len()]])
    }
}

/// Eight targets, which weigh eight, and losses of eight in all.
#[test]
fn a_rank_without_micro_batches_has_the_loss_of_the_others() {
    let device = cpu();
    let of_two = StepSettings { ranks: Ranks::of_data(0, 2), ..settings(1, 9) };
    let mut trainer = Trainer::new(&device, Arc::default(), llama(), of_two, &Others(8.0)).unwrap();
    trainer.load(fill).unwrap();
    assert_eq!(trainer.accumulate(&[]).unwrap(), (1.0, 8));
    let mut alone = Trainer::new(&device, Arc::default(), llama(), settings(1, 9), &Solo).unwrap();
    assert_eq!(alone.accumulate(&[]).unwrap(), (0.0, 0));
}

#[test]
fn a_batch_without_a_target_changes_nothing_and_is_no_error() {
    let device = cpu();
    let plain = OptimizerSettings { weight_decay: 0.0, ..OptimizerSettings::default() };
    let settings = StepSettings { optimizer: plain, ..settings(1, 9) };
    let mut trainer = trainer(&device, &llama(), &settings);
    let before = trainer.values(&trainer.trained()[3]).unwrap();
    let micro_batch = MicroBatch::new(&[7; 9], &[plimsoll_device::IGNORED_TARGET; 9]);
    let outcome = trainer.step(&[micro_batch], 1e-2).unwrap();
    assert_eq!(outcome, StepOutcome { loss: 0.0, grad_norm: 0.0, targets: 0, skipped: false });
    assert_eq!(trainer.values(&trainer.trained()[3]).unwrap(), before);
}

/// Numbers of a step in which the gradients of some blocks are not finite.
fn spoiled(trainer: &Trainer<'_>, blocks: &[BlockId]) -> Found {
    let mut squares = vec![1.0; trainer.parts.count() as usize];
    for part in blocks.iter().flat_map(|block| trainer.parts.of_block(*block)) {
        squares[part.norm_row as usize] = f32::INFINITY;
    }
    Found { loss: 1.0, squares }
}

/// It is the one that comes first in the backward pass.
#[test]
fn a_gradient_that_is_not_finite_is_blamed_on_a_block() {
    use BlockId::{Embedding, Head, Layer};
    let device = cpu();
    let mut trainer = trainer(&device, &biased(), &settings(1, 9));
    let passed = |within| Passed { targets: 1, scale: 2.0, within };
    let mut blamed = |loss, bad: &[BlockId], within| {
        let found = Found { loss, ..spoiled(&trainer, bad) };
        match trainer.conclude(passed(within), &found) {
            Err(StepError::NotFinite { block, .. }) => Some((block, false)),
            Err(StepError::NotFiniteWithin { block }) => Some((Some(block), true)),
            Ok(_) => None,
            Err(other) => panic!("{other}"),
        }
    };
    for within in [false, true] {
        for (bad, expected) in [
            (&[Layer(0), Layer(2)][..], Layer(2)),
            (&[Embedding, Layer(1)], Layer(1)),
            (&[Embedding], Embedding),
            (&[Head, Layer(0)], Head),
        ] {
            assert_eq!(blamed(2.0, bad, within), Some((Some(expected), within)), "{bad:?}");
            // Where the loss is none, no gradient is to blame, and nothing was updated.
            assert_eq!(blamed(f64::NAN, bad, within), Some((None, false)), "{bad:?}");
            assert_eq!(blamed(f64::INFINITY, bad, within), Some((None, false)), "{bad:?}");
        }
        assert_eq!(blamed(f64::NAN, &[], within), Some((None, false)));
        assert_eq!(blamed(2.0, &[], within), None);
    }
    assert_eq!(trainer.progress().steps, 2);
}

#[test]
fn a_short_gradient_is_divided_by_a_little_more_than_its_norm() {
    let (dry, device) = (Dry::new(), cpu());
    let scaling = LossScaling { initial: 4.0, ..LossScaling::default() };
    let clipping = GradientClipping::GlobalNorm(1e-6);
    let settings = StepSettings { clipping, loss_scaling: Some(scaling), ..settings(1, 9) };
    let planned = on_dry_device(&dry, &llama(), &settings);
    let trainer = trainer(&device, &llama(), &settings);
    // The host's factor and the device's are the same bits.
    let factor = |norm: Option<f64>| {
        let factor = planned.gradient_factor(norm);
        let mut found = spoiled(&trainer, &[]);
        found.squares.fill(0.0);
        // The squares of gradients that are four times too large; as f32 has them.
        found.squares[3] = (4.0 * norm.unwrap_or(0.0)).powi(2) as f32;
        trainer.numbers.set_squares(&device, &found.squares).unwrap();
        trainer.clip().unwrap();
        let clipped = device.read_f32(trainer.numbers.control().factor.unwrap()).unwrap();
        let exact = (found.norm() / 4.0 - norm.unwrap_or(0.0)).abs() == 0.0;
        assert!(!exact || clipped == [factor], "{norm:?}");
        f64::from(factor) * 4.0
    };
    assert_eq!([factor(None), factor(Some(0.0))], [1.0, 1.0]);
    assert!((factor(Some(1e-6)) - 0.5).abs() < 1e-7 && (factor(Some(3e-6)) - 0.25).abs() < 1e-7);
    for norm in [2.0, 0.5, 0.015625] {
        assert!(factor(Some(norm)) < 1.0);
    }
    assert_eq!((trainer.next_update(0.5).lr, trainer.next_update(0.5).step), (0.5, 1));
}

#[test]
fn nothing_is_dropped_without_a_probability() {
    let dry = Dry::new();
    let dropout = |method| {
        let trainer = on_dry_device(&dry, &llama(), &StepSettings { method, ..settings(1, 9) });
        trainer.dropout(0).map(|dropout| (dropout.probability, dropout.first_row))
    };
    assert_eq!(dropout(TrainingMethod::Full), None);
    assert_eq!(dropout(adapters(&llama(), 0.0)), None);
    assert_eq!(dropout(adapters(&llama(), 0.25)), Some((0.25, 0)));
}

/// The number by which a dry run knows that passes repeat.
fn number(trainer: &mut Trainer<'_>) -> u64 {
    let micro_batches = MicroBatches::These(&[]);
    Passes { trainer, micro_batches, together: 1, gradient_scale: 1.0 }.state().unwrap()
}

#[test]
fn passes_are_alike_where_all_that_they_find_is() {
    let dry = Dry::new();
    let settings = StepSettings { offload: Offload::all_on(Tier::Disk), ..settings(2, 9) };
    let mut trainer = on_dry_device(&dry, &llama(), &settings);
    let mut numbers = vec![number(&mut trainer)];
    assert_eq!(number(&mut trainer), numbers[0]);
    // What is on its way to the buffers of each store.
    trainer.weights.announce([Unit::Layer(1)]).unwrap();
    numbers.push(number(&mut trainer));
    trainer.optimizer.announce([(BlockId::Layer(1), Role::QProj, 0)]).unwrap();
    numbers.push(number(&mut trainer));
    // Which gradients there are, in buffers and on the device.
    trainer.gradients.announce([(Unit::Layer(1), false)].into_iter()).unwrap();
    trainer.gradients.hold(Unit::Layer(1)).unwrap();
    numbers.push(number(&mut trainer));
    // Whether anything was added to them, and not how often.
    trainer.gradients.target(BlockId::Layer(1), Role::QProj).unwrap();
    numbers.push(number(&mut trainer));
    trainer.gradients.target(BlockId::Layer(1), Role::QProj).unwrap();
    assert_eq!(number(&mut trainer), numbers[4]);
    trainer.gradients.target(BlockId::Head, Role::FinalNorm).unwrap();
    numbers.push(number(&mut trainer));
    // What is taken of the tiers.
    let tiers = Arc::clone(&trainer.tiers);
    let homes = [Tier::Host, Tier::Disk].map(|tier| {
        let home = tiers.take(tier, 1, plimsoll_memory::Tag::Data, "test").unwrap();
        numbers.push(number(&mut trainer));
        home
    });
    drop(homes);
    assert_eq!(number(&mut trainer), numbers[5]);
    let mut different = numbers.clone();
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), numbers.len(), "{numbers:?}");
}

/// Losses of five different micro-batches.
fn loss(spec: &ModelSpec, settings: &StepSettings) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let tiers = Arc::new(LowerTiers::open(Region::new(16 << 20).unwrap(), 16 << 20, &spill).unwrap());
    let device = cpu();
    let mut trainer = Trainer::new(&device, tiers, spec.clone(), settings.clone(), &Solo).unwrap();
    trainer.load(fill).unwrap();
    let data = [1, 2, 3, 4, 5].map(|seed| tokens(seed, 1, 9));
    let batches: Vec<_> = data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
    trainer.accumulate(&batches).unwrap().0
}

/// Groups of two, with one left over; and a head that comes in pieces.
#[test]
fn every_micro_batch_is_taken_once() {
    for spec in [llama(), biased()].map(|spec| ModelSpec { vocab_size: 3101, num_layers: 1, ..spec }) {
        let one_by_one = loss(&spec, &settings(1, 9));
        for offload in [Offload::NONE, Offload { gradients: Tier::Host, ..Offload::NONE }] {
            for micro_batches_per_pass in [1, 2, 5, 9] {
                let settings = StepSettings { offload, micro_batches_per_pass, ..settings(1, 9) };
                let found = loss(&spec, &settings);
                assert!((found / one_by_one - 1.0).abs() < 1e-5, "{found} {one_by_one} {settings:?}");
            }
        }
    }
}

/// Three layers in segments of two and of one.
#[test]
fn segments_begin_with_what_enters_their_first_layer() {
    let (device, spec) = (cpu(), llama());
    let (tokens, targets) = tokens(3, 2, 9);
    let gradients = |checkpointing| {
        let settings = StepSettings { checkpointing, ..settings(2, 9) };
        let mut trainer = trainer(&device, &spec, &settings);
        trainer.accumulate(&[MicroBatch::new(&tokens, &targets)]).unwrap();
        let of = |p| device.read_f32(trainer.gradient(p).unwrap()).unwrap();
        trainer.trained().iter().map(of).collect::<Vec<_>>()
    };
    let plain = gradients(Checkpointing::None);
    for every in [2, 3] {
        assert!(gradients(Checkpointing::Every(every)) == plain, "every {every}");
    }
}

/// What a step writes of its activations: those of the layers that do not stay, of which each has as many.
#[test]
fn layers_whose_activations_stay_send_none_away() {
    let written = |kept| {
        let dry = Dry::new();
        let offload = Offload { activations: Tier::Disk, ..Offload::NONE };
        let kept_layers = KeptLayers { activations: kept, ..KeptLayers::NONE };
        let settings = StepSettings { offload, kept_layers, ..settings(2, 48) };
        let mut trainer = on_dry_device(&dry, &llama(), &settings);
        trainer.step_alike(&MicroBatch::new(&[], &[]), 1, 1e-3).unwrap();
        dry.moved().written
    };
    assert!(written(0) > 0);
    assert_eq!([0, 1, 2, 3].map(|kept| 3 * written(kept)), [3, 2, 1, 0].map(|left| left * written(0)));
}

/// The names, phases and layers of what a step takes memory for.
fn taken(spec: &ModelSpec, settings: &StepSettings) -> Vec<(&'static str, Phase, Option<u32>)> {
    let dry = Dry::recording();
    let mut trainer = on_dry_device(&dry, spec, settings);
    trainer.step_alike(&MicroBatch::new(&[], &[]), 1, 1e-3).unwrap();
    let ledger = dry.arena().ledger();
    let taken = ledger.events().iter().filter(|event| event.delta > 0);
    taken.map(|event| (event.name, event.phase, event.layer)).collect()
}

fn count(taken: &[(&str, Phase, Option<u32>)], name: &str, phase: Phase) -> usize {
    taken.iter().filter(|(of, within, _)| (*of, *within) == (name, phase)).count()
}

/// Two norms in each of three layers. A norm whose output was kept is not made again for the queries; one that was not is
/// made for the queries, and again for their gradients.
#[test]
fn norms_are_made_again_where_they_were_not_kept() {
    let again = |groups: &[Group]| {
        let checkpointing = Checkpointing::Selective(groups.iter().copied().collect());
        let taken = taken(&llama(), &StepSettings { checkpointing, ..settings(2, 9) });
        assert_eq!(count(&taken, "norm", Phase::Forward), 2 * 3);
        count(&taken, "norm", Phase::Backward)
    };
    assert_eq!(again(&[Group::Swiglu]), 0);
    assert_eq!(again(&[Group::Qkv]), 0);
    assert_eq!(again(&[Group::Norms]), 2 * 3);
    assert_eq!(again(&[Group::Norms, Group::Qkv]), (1 + 2) * 3);
}

/// Gradients of queries, keys and values are summed in f32: in place where they are f32 themselves.
#[test]
fn sums_of_narrow_gradients_have_room_of_their_own() {
    let sums = |precision| {
        count(&taken(&llama(), &StepSettings { precision, ..settings(2, 9) }), "dqkv.sums", Phase::Backward)
    };
    assert_eq!([sums(Precision::F32), sums(PURE_BF16)], [0, 3]);
}

/// Updates in the backward pass are a part of it; others have a phase of their own.
#[test]
fn updates_are_noted_where_they_happen() {
    let adam = AdamSettings::default();
    let galore = LowRankSettings { rank: 4, update_proj_gap: 10, scale: 0.25, adam };
    let optimizer = OptimizerSettings { kind: OptimizerKind::GaLore(galore), ..OptimizerSettings::default() };
    let updates = |update| {
        let settings = StepSettings { optimizer: optimizer.clone(), update, ..settings(2, 9) };
        let taken = taken(&llama(), &settings);
        assert!(taken.iter().all(|(name, _, layer)| *name != "update" || layer.is_some()));
        [Phase::Backward, Phase::Optimizer].map(|phase| count(&taken, "update", phase))
    };
    // Seven matrices in each of three layers.
    assert_eq!(updates(UpdateTiming::AfterBackward), [0, 21]);
    assert_eq!(updates(UpdateTiming::InBackward(NormSource::SecondBackward)), [21, 0]);
    assert!(Pass::empty().is_empty());
}

/// For 18 tokens: runs of at most 1024 columns, of which pieces of 1024, 1024 and 1053 rows have 4, with two numbers each; the
/// target's logit; and logits of 10 tokens against the widest piece. In lines of 64 bytes.
#[test]
fn a_loss_in_pieces_takes_the_logits_of_one() {
    let dry = Dry::new();
    let offload = Offload { gradients: Tier::Host, ..Offload::NONE };
    let settings = StepSettings { offload, loss_chunk_tokens: 10, ..settings(2, 9) };
    let spec = ModelSpec { vocab_size: 3101, ..llama() };
    let mut trainer = on_dry_device(&dry, &spec, &settings);
    trainer.step_alike(&MicroBatch::new(&[], &[]), 1, 1e-3).unwrap();
    let floats = |count: u64| (4 * count).next_multiple_of(64);
    let expected = floats(18 * 2 * 4) + floats(18) + floats(10 * 1053);
    assert_eq!(dry.arena().ledger().most(plimsoll_memory::Tag::Logits), expected);
}

/// When the backward pass comes to a layer, everything that the layer has kept is on its way, and everything that the one before
/// it has: its input, two norms, queries, keys, values, what attention gave, the residual stream in the middle, gate, up and their
/// product.
#[test]
fn what_a_layer_has_kept_is_on_its_way_while_the_one_behind_it_computes() {
    let noting = Noting::default();
    let offload = Offload { activations: Tier::Disk, ..Offload::NONE };
    // Tensors of more than a page.
    let settings = StepSettings { offload, ..settings(2, 48) };
    let mut trainer = dry_trainer(&noting, &llama(), &settings);
    trainer.step(&[MicroBatch::new(&[], &[])], 1e-3).unwrap();
    assert_eq!(noting.most_reads(), 2 * 11);
}

/// What is written back at the end of a step is waited for, so that the next one, or a checkpoint, finds it.
#[test]
fn a_step_ends_when_everything_has_arrived() {
    let none = Offload::NONE;
    for offload in [Offload { parameters: Tier::Disk, ..none }, Offload { optimizer: Tier::Disk, ..none }] {
        let noting = Noting::default();
        let settings = StepSettings { offload, ..settings(1, 9) };
        let mut trainer = dry_trainer(&noting, &llama(), &settings);
        trainer.step(&[MicroBatch::new(&[], &[])], 1e-3).unwrap();
        assert!(noting.log().ends_with('.'), "{offload:?}: {}", noting.log());
    }
}

/// Gemma's embeddings are scaled; their gradients are where they have any, which adapters of the layers do not give them.
#[test]
fn a_frozen_embedding_has_no_gradient() {
    let scaled = |method| {
        let noting = Noting::default();
        let settings = StepSettings { method, ..settings(1, 9) };
        let mut trainer = dry_trainer(&noting, &gemma(), &settings);
        trainer.step(&[MicroBatch::new(&[], &[])], 1e-3).unwrap();
        noting.scaled()
    };
    // Each of seven adapters in three layers scales the middle of its product, forward and for the gradients of A and B.
    assert_eq!([scaled(TrainingMethod::Full), scaled(adapters(&gemma(), 0.0))], [2, 1 + 3 * 7 * 3]);
}

/// Masters of matrices live below the device while the weights do not, and the other way round.
#[test]
fn weights_and_masters_have_their_values_wherever_they_live() {
    let folder = tempfile::tempdir().unwrap();
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let none = Offload::NONE;
    for offload in [Offload { optimizer: Tier::Host, ..none }, Offload { parameters: Tier::Host, ..none }] {
        let tiers = Arc::new(LowerTiers::open(Region::new(16 << 20).unwrap(), 16 << 20, &spill).unwrap());
        let settings = StepSettings { offload, precision: BF16_WITH_MASTERS, ..settings(1, 9) };
        let device = cpu();
        let mut trainer = Trainer::new(&device, tiers, llama(), settings, &Solo).unwrap();
        trainer.load(fill).unwrap();
        for p in trainer.trained() {
            assert!(trainer.values(p).unwrap() == values(p), "{}: {offload:?}", p.name);
        }
    }
}

/// Frozen weights of a type of their own, below the device.
#[test]
fn values_are_read_in_the_type_of_their_weight() {
    let (spec, folder) = (llama(), tempfile::tempdir().unwrap());
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let TrainingMethod::Adapters(method) = adapters(&spec, 0.0) else { unreachable!() };
    let weight_types =
        [((BlockId::Layer(1), Role::UpProj), DType::F16), ((BlockId::Layer(2), Role::KProj), DType::F32)];
    let method = Adapters { weight_types: weight_types.into_iter().collect(), ..(*method).clone() };
    let method = TrainingMethod::Adapters(Arc::new(method));
    let offload = Offload { parameters: Tier::Host, ..Offload::NONE };
    let precision = Precision { weights: DType::Bf16, activations: DType::Bf16, ..Precision::F32 };
    let settings = StepSettings { method, offload, precision, ..settings(1, 9) };
    let (tiers, device) =
        (Arc::new(LowerTiers::open(Region::new(16 << 20).unwrap(), 0, &spill).unwrap()), cpu());
    let mut trainer = Trainer::new(&device, tiers, spec.clone(), settings, &Solo).unwrap();
    trainer.load(fill).unwrap();
    for p in spec.parameters() {
        let precision = match (p.block, p.role) {
            (BlockId::Layer(1), Role::UpProj) => 1.0 / 1024.0,
            (BlockId::Layer(2), Role::KProj) => 0.0,
            _ => 1.0 / 128.0,
        };
        let found = trainer.values(&p).unwrap();
        let near = found.iter().zip(values(&p)).all(|(found, x)| (found - x).abs() <= precision * x.abs());
        assert!(near, "{}", p.name);
    }
    // What is trained is the adapters, which are f32 whatever they stand beside.
    assert!(trainer.state().unwrap().iter().all(|named| named.dtype == DType::F32));
}

/// Of an embedding that is no head, and whose gradient is away, the rows that were looked up are kept until they are needed.
#[test]
fn rows_are_kept_of_an_embedding_that_is_no_head() {
    let kept = |spec: ModelSpec, gradients| {
        let dry = Dry::recording();
        let offload = Offload { gradients, ..Offload::NONE };
        let spec = ModelSpec { vocab_size: 3101, ..spec };
        let mut trainer = on_dry_device(&dry, &spec, &StepSettings { offload, ..settings(2, 9) });
        trainer.step_alike(&MicroBatch::new(&[], &[]), 3, 1e-3).unwrap();
        let ledger = dry.arena().ledger();
        let rows = ledger.events().iter().find(|event| event.name == "looked_up.rows" && event.delta > 0);
        rows.map(|event| event.delta)
    };
    // Of the two micro-batches before the last one, 18 rows of 24 numbers each, in lines of 64 bytes.
    assert_eq!(kept(biased(), Tier::Host), Some((2 * 18 * 24 * 4_i64 + 63) / 64 * 64));
    assert_eq!(kept(biased(), Tier::Device), None);
    assert_eq!(kept(llama(), Tier::Host), None);
}

/// A checkpoint holds the same tensors wherever they live.
#[test]
fn the_state_has_the_shapes_of_the_parameters_wherever_it_lives() {
    let spec = ModelSpec { vocab_size: 3101, ..biased() };
    let state = |offload| {
        let dry = Dry::new();
        let settings = StepSettings { offload, precision: BF16_WITH_MASTERS, ..settings(1, 9) };
        let mut all = on_dry_device(&dry, &spec, &settings).state().unwrap();
        let key = |named: &NamedTensor| (named.name.clone(), format!("{:?}", named.kind));
        all.sort_by_key(key);
        all.iter().map(|named| (key(named), named.dtype, named.shape.clone())).collect::<Vec<_>>()
    };
    let resident = state(Offload::NONE);
    // A weight, its master and two moments of each.
    assert_eq!(resident.len(), 4 * spec.parameters().len());
    for ((name, kind), dtype, shape) in &resident {
        let p = spec.parameters().into_iter().find(|p| p.name == *name).unwrap();
        assert_eq!(*shape, p.shape, "{name} {kind}");
        assert_eq!(*dtype, if kind == "Weight" { DType::Bf16 } else { DType::F32 }, "{name} {kind}");
    }
    assert_eq!(state(Offload::all_on(Tier::Disk)), resident);
}
