//! What lives on the host or on disk between its uses changes no bit, and takes what a dry run says on every tier.

use std::path::Path;
use std::sync::Arc;

use crate::common::watched::Watched;
use crate::common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device, Dry};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tier};
use plimsoll_model::{AdapterConfig, AdapterLayout, BlockId, ModelSpec, Parameter};
use plimsoll_parallel::Solo;
use plimsoll_step::{
    AdamSettings, Adapters, Checkpointing, Compression, EightBit, GradientClipping, Group, KeptLayers,
    MicroBatch, NormSource, Offload, OptimizerKind, Precision, StepError, StepSettings, Trainer,
    TrainingMethod, UpdateTiming,
};

/// Enough tokens for a table of several pieces, the last of them no multiple of anything.
const TOKENS: u64 = 3101;

fn large(spec: ModelSpec) -> ModelSpec {
    ModelSpec { vocab_size: TOKENS, ..spec }
}

/// Sequences that reach all pieces of the vocabulary.
fn spread(seed: u64, settings: &StepSettings) -> (Vec<u32>, Vec<u32>) {
    let (tokens, targets) = crate::common::tokens(seed, settings.batch_size, settings.sequence_length);
    let far = |token: u32| if token == u32::MAX { token } else { token * 509 % TOKENS as u32 };
    (tokens.into_iter().map(far).collect(), targets.into_iter().map(far).collect())
}

#[derive(PartialEq)]
struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    state: Vec<Vec<u8>>,
}

fn steps(trainer: &mut Trainer<'_>, settings: &StepSettings, count: u64) -> (Vec<f64>, Vec<f64>) {
    let mut results = (Vec::new(), Vec::new());
    for step in 0..count {
        let data: Vec<_> = (0..3).map(|i| spread(100 + 3 * step + i, settings)).collect();
        let batches: Vec<_> = data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
        let outcome = trainer.step(&batches, 1e-2).unwrap();
        results.0.push(outcome.loss);
        results.1.push(outcome.grad_norm);
    }
    results
}

/// Peaks of the device, the host and the disk.
fn planned(spec: &ModelSpec, settings: &StepSettings) -> [u64; 3] {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let mut trainer = Trainer::new(&dry, Arc::clone(&tiers), spec.clone(), settings.clone(), &Solo).unwrap();
    trainer.load::<StepError>(|_, _, _, _| Ok(())).unwrap();
    steps(&mut trainer, settings, 2);
    [dry.arena().high_water(), tiers.host().high_water(), tiers.disk().high_water()]
}

fn train_in(folder: &Path, spec: &ModelSpec, settings: &StepSettings) -> Trained {
    let [device_bytes, host_bytes, disk_bytes] = planned(spec, settings);
    let cpu = Cpu::new(device_bytes, CpuOptions { threads: Some(2), isa: None }).unwrap();
    let device = Watched::new(cpu);
    let spill = SpillSettings { folder: folder.to_owned(), budget: None, direct: true };
    let tiers = Arc::new(LowerTiers::open(Region::new(host_bytes).unwrap(), disk_bytes, &spill).unwrap());
    let mut trainer =
        Trainer::new(&device, Arc::clone(&tiers), spec.clone(), settings.clone(), &Solo).unwrap();
    trainer.load(fill).unwrap();
    let reads = device.reads.get();
    let (losses, norms) = steps(&mut trainer, settings, 3);
    assert_eq!(device.reads.get() - reads, 3, "one at the end of each step: {settings:?}");
    assert_eq!(device.arena().high_water(), device_bytes);
    assert_eq!([tiers.host().high_water(), tiers.disk().high_water()], [host_bytes, disk_bytes]);
    let offload = settings.offload;
    assert_eq!(host_bytes > 0, offload.uses(Tier::Host), "{offload:?}");
    assert_eq!(disk_bytes > 0, offload.uses(Tier::Disk), "{offload:?}");
    Trained { losses, norms, state: state(&trainer) }
}

/// Settings in which every kind of state, of update and of checkpointing appears.
fn cases() -> Vec<StepSettings> {
    let base = settings(4, 24);
    let eight_bit = EightBit { embeddings: true };
    let in_backward = |source| UpdateTiming::InBackward(source);
    vec![
        base.clone(),
        StepSettings {
            checkpointing: Checkpointing::Full,
            update: in_backward(NormSource::PreviousStep),
            ..base.clone()
        },
        StepSettings {
            precision: PURE_BF16,
            checkpointing: Checkpointing::Full,
            optimizer: with_kind(OptimizerKind::AdamW8bit(AdamSettings::default(), eight_bit)),
            update: in_backward(NormSource::SecondBackward),
            ..base.clone()
        },
        StepSettings {
            precision: BF16_WITH_MASTERS,
            checkpointing: Checkpointing::Every(2),
            compression: Compression::Int8 { block: 32 },
            ..base.clone()
        },
        StepSettings {
            precision: Precision::F16,
            loss_scaling: Some(Default::default()),
            checkpointing: Checkpointing::Selective([Group::Norms, Group::Ffn].into_iter().collect()),
            clipping: GradientClipping::None,
            ..base.clone()
        },
        StepSettings { precision: PURE_FP8, optimizer: with_kind(OptimizerKind::AdaLomo(ADALOMO)), ..base },
    ]
}

#[test]
fn no_tier_changes_a_bit() {
    let folder = tempfile::tempdir().unwrap();
    for spec in [llama(), olmo(), gemma(), mixture(), grouped_mixture()].map(large) {
        for settings in cases() {
            let resident = train_in(folder.path(), &spec, &settings);
            let plain = StepSettings { checkpointing: Checkpointing::None, ..settings.clone() };
            let lossless = settings.compression == Compression::None;
            assert!(!lossless || train_in(folder.path(), &spec, &plain) == resident, "{settings:?}");
            let waits = Offload { prefetch: false, ..Offload::all_on(Tier::Disk) };
            for offload in [Offload::all_on(Tier::Disk), Offload::all_on(Tier::Host), waits] {
                let settings = StepSettings { offload, ..settings.clone() };
                let away = train_in(folder.path(), &spec, &settings);
                assert_eq!(away.losses, resident.losses, "{} {settings:?}", spec.name);
                assert_eq!(away.norms, resident.norms, "{} {settings:?}", spec.name);
                assert!(away.state == resident.state, "{} {settings:?}", spec.name);
            }
        }
    }
}

#[test]
fn each_kind_of_tensor_may_be_away_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let none = Offload::NONE;
    let offloads = [
        Offload { parameters: Tier::Disk, ..none },
        Offload { gradients: Tier::Host, ..none },
        Offload { optimizer: Tier::Disk, ..none },
        Offload { activations: Tier::Disk, ..none },
        Offload { parameters: Tier::Host, optimizer: Tier::Disk, ..none },
    ];
    for spec in [llama(), biased()].map(large) {
        for settings in &cases()[..3] {
            let resident = train_in(folder.path(), &spec, settings);
            for offload in offloads {
                let settings = StepSettings { offload, ..settings.clone() };
                assert!(train_in(folder.path(), &spec, &settings) == resident, "{} {settings:?}", spec.name);
            }
        }
    }
}

#[test]
fn the_last_layers_may_stay_on_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let none = KeptLayers::NONE;
    let kept = [
        KeptLayers { parameters: 1, ..none },
        KeptLayers { gradients: 2, ..none },
        KeptLayers { optimizer: 1, ..none },
        KeptLayers { activations: 1, ..none },
        KeptLayers { parameters: 1, gradients: 1, optimizer: 2, activations: 2 },
        KeptLayers { parameters: 99, gradients: 99, optimizer: 99, activations: 99 },
    ];
    for spec in [llama(), biased()].map(large) {
        for settings in &cases()[..4] {
            let away = StepSettings { offload: Offload::all_on(Tier::Disk), ..settings.clone() };
            let expected = train_in(folder.path(), &spec, &away);
            for kept_layers in kept {
                let settings = StepSettings { kept_layers, ..away.clone() };
                assert!(train_in(folder.path(), &spec, &settings) == expected, "{} {settings:?}", spec.name);
            }
        }
    }
}

#[test]
fn each_layer_that_stays_takes_its_room_on_the_device_and_leaves_the_disk() {
    let spec = ModelSpec { num_layers: 6, ..large(llama()) };
    let peaks = |kept: u32| {
        let kept_layers = KeptLayers { parameters: kept, ..KeptLayers::NONE };
        planned(&spec, &StepSettings { offload: Offload::all_on(Tier::Disk), kept_layers, ..settings(4, 24) })
    };
    let matrices = |p: &Parameter| p.block == BlockId::Layer(0) && p.shape.len() == 2;
    let layer: u64 = spec.parameters().iter().filter(|p| matrices(p)).map(|p| 4 * p.elements()).sum();
    for kept in 0..6 {
        let ([device, _, disk], [more, _, less]) = (peaks(kept), peaks(kept + 1));
        assert_eq!(more, device + layer, "{kept}");
        // Homes are whole pages.
        assert!(disk >= less + layer && disk < less + 2 * layer, "{kept} {disk} {less}");
    }
}

#[test]
fn memory_of_the_device_does_not_depend_on_depth() {
    let peak = |layers, offload| {
        let spec = ModelSpec { num_layers: layers, ..large(llama()) };
        let checkpointing = Checkpointing::Full;
        planned(&spec, &StepSettings { checkpointing, offload, ..settings(4, 24) })[0]
    };
    assert!(peak(12, Offload::NONE) > peak(6, Offload::NONE) + (1 << 17));
    // Norms stay, with their gradients and states, and a page or so of what is in order.
    assert!(peak(12, Offload::all_on(Tier::Disk)) < peak(6, Offload::all_on(Tier::Disk)) + (1 << 15));
}

/// Weights are brought once for all micro-batches then. A tied embedding's gradient has another order of additions.
#[test]
fn micro_batches_may_go_through_a_block_together() {
    let folder = tempfile::tempdir().unwrap();
    for spec in [olmo(), biased()].map(large) {
        for settings in cases() {
            let apart = train_in(folder.path(), &spec, &settings);
            for (micro_batches_per_pass, offload) in [(2, Offload::NONE), (3, Offload::all_on(Tier::Disk))] {
                let settings = StepSettings { micro_batches_per_pass, offload, ..settings.clone() };
                assert!(train_in(folder.path(), &spec, &settings) == apart, "{settings:?}");
            }
        }
    }
}

#[test]
fn a_table_is_brought_to_its_tier_a_part_at_a_time() {
    let rows = 50_021;
    let spec = ModelSpec { vocab_size: rows, ..llama() };
    let table = spec.parameters().into_iter().find(Parameter::is_table).unwrap();
    for (tier, precision) in [(Tier::Disk, Precision::F32), (Tier::Host, BF16_WITH_MASTERS)] {
        let offload = Offload { parameters: tier, optimizer: tier, ..Offload::NONE };
        let settings = StepSettings { precision, offload, ..StepSettings::new(1, 8) };
        let [device_bytes, host_bytes, disk_bytes] = planned(&spec, &settings);
        let device = Cpu::new(device_bytes, CpuOptions { threads: Some(2), isa: None }).unwrap();
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
        let tiers = Arc::new(LowerTiers::open(Region::new(host_bytes).unwrap(), disk_bytes, &spill).unwrap());
        let mut trainer = Trainer::new(&device, tiers, spec.clone(), settings, &Solo).unwrap();
        let (mut most, mut covered) = (0, Vec::new());
        trainer
            .load::<StepError>(|p, part, dtype, out| {
                if *p == table {
                    most = most.max(out.len());
                    covered.push(part.clone());
                }
                fill(p, part, dtype, out)
            })
            .unwrap();
        assert!(covered.len() > 2 && most < 2 << 20, "{covered:?}");
        assert!(covered.windows(2).all(|pair| pair[1].start == pair[0].end % rows));
        let expected = values(&table);
        assert_eq!(trainer.values(&table).unwrap(), expected);
        let mut weight = Vec::new();
        trainer.read_weight(&table, &mut |part| weight.extend_from_slice(part)).unwrap();
        let dtype = if precision == Precision::F32 { DType::F32 } else { DType::Bf16 };
        let mut bytes = vec![0; dtype.bytes_for(table.elements()).unwrap() as usize];
        write_values(&expected, dtype, &mut bytes);
        assert!(weight == bytes);

        // An error ends the loading.
        let failed = trainer.load::<StepError>(|p, part, dtype, out| match part.start {
            0 => fill(p, part, dtype, out),
            _ => Err(StepError::MissingWeight { block: p.block, role: p.role }),
        });
        assert!(matches!(failed, Err(StepError::MissingWeight { role, .. }) if role == table.role));
    }
}

/// Gradients and states of adapters are small, but for those of experts, which live below the device with the rest.
#[test]
fn adapters_of_experts_go_below_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let spec = large(mixture());
    let config = AdapterConfig { rank: 3, ..AdapterConfig::default() };
    let layout = AdapterLayout::new(&config, &spec).unwrap();
    let (weight_types, in_files) = (Default::default(), Default::default());
    let adapters = Adapters { layout, dropout: 0.0, weight_types, in_files };
    let method = TrainingMethod::Adapters(Arc::new(adapters));
    let here = StepSettings { method, ..settings(4, 24) };
    let resident = train_in(folder.path(), &spec, &here);
    let below = Offload { gradients: Tier::Disk, optimizer: Tier::Disk, ..Offload::NONE };
    let away = StepSettings { offload: below, ..here.clone() };
    // That the disk is used is seen to there.
    assert!(train_in(folder.path(), &spec, &away) == resident);
}
