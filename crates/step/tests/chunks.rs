//! A sequence that is visited in chunks gives what the whole one gives, takes what a dry run says, and no more of the device for a
//! longer one.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use crate::common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device, Dry};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tier};
use plimsoll_model::{AdapterConfig, AdapterLayout, ModelSpec};
use plimsoll_parallel::Solo;
use plimsoll_step::{
    Adapters, AttentionKind, Checkpointing, MicroBatch, NormSource, Offload, Precision, StepError,
    StepSettings, Trainer, TrainingMethod, UpdateTiming,
};

const STEPS: u64 = 3;
/// Micro-batches of a step.
const MICRO_BATCHES: u64 = 2;

/// Sequences of `length` tokens, whole or in chunks.
fn sequence(length: u64, chunk: Option<u64>) -> StepSettings {
    StepSettings {
        checkpointing: Checkpointing::Full,
        sequence_chunk_tokens: chunk,
        loss_chunk_tokens: 4,
        offload: Offload { activations: Tier::Disk, ..Offload::NONE },
        ..settings(1, length)
    }
}

/// What steps end with.
struct Ended {
    losses: Vec<f64>,
    norms: Vec<f64>,
    evaluated: f64,
    weights: Vec<Vec<f32>>,
}

fn steps(trainer: &mut Trainer<'_>, settings: &StepSettings) -> (Vec<f64>, Vec<f64>, f64) {
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let data: Vec<_> =
            (0..MICRO_BATCHES).map(|i| tokens(50 + 9 * step + i, 1, settings.sequence_length)).collect();
        let batches: Vec<_> = data.iter().map(|(tokens, targets)| MicroBatch::new(tokens, targets)).collect();
        let outcome = trainer.step(&batches, 1e-2).unwrap();
        losses.push(outcome.loss);
        norms.push(outcome.grad_norm);
    }
    let (tokens, targets) = tokens(7, 1, settings.sequence_length);
    let evaluated = trainer.evaluate(1, &MicroBatch::new(&tokens, &targets)).unwrap().0;
    (losses, norms, evaluated)
}

/// Peaks of the device, the host and the disk.
fn planned(spec: &ModelSpec, settings: &StepSettings) -> [u64; 3] {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let mut trainer = Trainer::new(&dry, Arc::clone(&tiers), spec.clone(), settings.clone(), &Solo).unwrap();
    trainer.load::<StepError>(|_, _, _, _| Ok(())).unwrap();
    steps(&mut trainer, settings);
    [dry.arena().high_water(), tiers.host().high_water(), tiers.disk().high_water()]
}

fn run_in(folder: &Path, spec: &ModelSpec, settings: &StepSettings, threads: usize) -> Ended {
    let [peak, host, disk] = planned(spec, settings);
    let device = Cpu::new(peak, CpuOptions { threads: Some(threads), isa: None }).unwrap();
    let spill = SpillSettings { folder: folder.to_owned(), budget: None, direct: true };
    let tiers = Arc::new(LowerTiers::open(Region::new(host).unwrap(), disk, &spill).unwrap());
    let (own, step) = (spec.clone(), settings.clone());
    let mut trainer = Trainer::new(&device, Arc::clone(&tiers), own, step, &Solo).unwrap();
    trainer.load(fill).unwrap();
    let (losses, norms, evaluated) = steps(&mut trainer, settings);
    assert_eq!(device.arena().high_water(), peak, "{settings:?}");
    assert_eq!([tiers.host().high_water(), tiers.disk().high_water()], [host, disk], "{settings:?}");
    let weights = trainer.trained().iter().map(|p| trainer.values(p).unwrap()).collect();
    Ended { losses, norms, evaluated, weights }
}

fn run(spec: &ModelSpec, settings: &StepSettings) -> Ended {
    run_in(tempfile::tempdir().unwrap().path(), spec, settings, 2)
}

fn assert_near(chunks: &Ended, whole: &Ended, tolerance: f64, what: &str) {
    let near = |a: f64, b: f64| (a - b).abs() <= tolerance * b.abs().max(1e-3);
    let pairs = chunks.losses.iter().zip(&whole.losses).chain(chunks.norms.iter().zip(&whole.norms));
    for (a, b) in pairs.chain([(&chunks.evaluated, &whole.evaluated)]) {
        assert!(near(*a, *b), "{what}: {a} {b}");
    }
    // Where a gradient is next to nothing, its sign decides an update of AdamW.
    let pairs = || chunks.weights.iter().flatten().zip(whole.weights.iter().flatten());
    let distance = pairs().map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / pairs().count() as f64;
    assert!(distance.sqrt() <= 10.0 * tolerance, "{what}: {}", distance.sqrt());
}

#[test]
fn chunks_of_a_sequence_give_what_the_whole_gives() {
    for spec in families() {
        let whole = run(&spec, &sequence(24, None));
        for chunk in [8, 7] {
            let chunks = run(&spec, &sequence(24, Some(chunk)));
            assert_near(&chunks, &whole, 1e-5, &format!("{} in chunks of {chunk}", spec.name));
        }
    }
}

/// Documents, windows and patterns hide what lies in other chunks; weights, gradients and states may be away too, and updates
/// may come in the backward pass.
#[test]
fn whatever_else_is_asked_chunks_give_what_the_whole_gives() {
    let everything = Offload::all_on;
    let pattern = plimsoll_device::BlockSparse { block: 4, local_blocks: 1, global_blocks: 1 };
    for spec in [llama(), biased()].map(|spec| ModelSpec { vocab_size: 3101, ..spec }) {
        let of = |settings: StepSettings| {
            let whole = StepSettings { sequence_chunk_tokens: None, ..settings.clone() };
            (settings, whole)
        };
        let base = sequence(24, Some(8));
        for (chunks, whole) in [
            of(StepSettings { document_end: Some(3), ..base.clone() }),
            of(StepSettings { attention: AttentionKind::SlidingWindow(5), ..base.clone() }),
            of(StepSettings { attention: AttentionKind::BlockSparse(pattern), ..base.clone() }),
            of(StepSettings { offload: everything(Tier::Disk), ..base.clone() }),
            of(StepSettings { offload: everything(Tier::Host), ..base.clone() }),
            of(StepSettings {
                update: UpdateTiming::InBackward(NormSource::SecondBackward),
                mlp_chunk_tokens: Some(3),
                ..base.clone()
            }),
            of(StepSettings {
                update: UpdateTiming::InBackward(NormSource::PreviousStep),
                offload: everything(Tier::Disk),
                ..base.clone()
            }),
        ] {
            assert_near(&run(&spec, &chunks), &run(&spec, &whole), 2e-5, &format!("{chunks:?}"));
        }
        let chunks = StepSettings { precision: PURE_BF16, ..base.clone() };
        let whole = StepSettings { sequence_chunk_tokens: None, ..chunks.clone() };
        let (chunks, whole) = (run(&spec, &chunks), run(&spec, &whole));
        assert!(chunks.losses.iter().zip(&whole.losses).all(|(a, b)| (a - b).abs() < 2e-2 * b));
    }
}

#[test]
fn adapters_of_a_sequence_in_chunks_give_what_the_whole_gives() {
    let spec = llama();
    for (use_dora, weights) in [(false, DType::F32), (true, DType::F32), (false, DType::Nf4)] {
        let config = AdapterConfig { rank: 4, use_dora, ..AdapterConfig::default() };
        let layout = AdapterLayout::new(&config, &spec).unwrap();
        let matrices = spec.parameters().into_iter().filter(|p| p.role.is_block_matrix());
        let quantised = matrices.filter(|_| weights != DType::F32);
        let weight_types = quantised.map(|p| ((p.block, p.role), weights)).collect();
        let adapters = Adapters { layout, dropout: 0.2, weight_types, in_files: HashMap::new() };
        let method = TrainingMethod::Adapters(Arc::new(adapters));
        let chunks = StepSettings { method, precision: Precision::F32, ..sequence(24, Some(8)) };
        let whole = StepSettings { sequence_chunk_tokens: None, ..chunks.clone() };
        assert_near(&run(&spec, &chunks), &run(&spec, &whole), 1e-5, &format!("{use_dora}, {weights}"));
    }
}

/// Threads change no bit, and a longer sequence takes no more of the device.
#[test]
fn memory_of_the_device_does_not_depend_on_the_length() {
    let spec = ModelSpec { vocab_size: 3101, ..llama() };
    let of = |length| StepSettings { offload: Offload::all_on(Tier::Disk), ..sequence(length, Some(64)) };
    let peak = |length| planned(&spec, &of(length))[0];
    assert_eq!(peak(512), peak(1024));
    assert_eq!(peak(512), peak(8192));
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = [1, 2].map(|threads| run_in(folder.path(), &spec, &of(256), threads));
    assert_eq!(one.losses, two.losses);
    assert!(one.weights == two.weights);
}

/// What chunks cannot be taken together with is an error before anything is taken.
#[test]
fn what_chunks_rule_out_is_refused() {
    let spec = llama();
    let base = sequence(24, Some(8));
    for wrong in [
        StepSettings { batch_size: 2, ..base.clone() },
        StepSettings { offload: Offload::NONE, ..base.clone() },
        StepSettings { checkpointing: Checkpointing::None, ..base.clone() },
        StepSettings { attention: AttentionKind::Standard, ..base.clone() },
        StepSettings { micro_batches_per_pass: 2, ..base.clone() },
        StepSettings { sequence_chunk_tokens: Some(0), ..base },
    ] {
        let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
        let refused = Trainer::new(&dry, tiers, spec.clone(), wrong.clone(), &Solo);
        assert!(matches!(refused, Err(StepError::Invariant { .. })), "{wrong:?}");
    }
}
