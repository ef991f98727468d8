//! Mixtures of experts under routers that do their worst: the plan holds, what nobody uses has no gradient, the load-balancing
//! loss is that of its definition, and frozen experts that come by themselves change no bit.

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device, DeviceTraits, Dry};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tier};
use plimsoll_model::adapter::TargetModules;
use plimsoll_model::{AdapterConfig, AdapterLayout, ModelSpec, Parameter, Role};
use plimsoll_parallel::Solo;
use plimsoll_step::{
    Adapters, Checkpointing, Compression, ExpertTraffic, KeptLayers, MicroBatch, Offload, Precision,
    StepError, StepSettings, Trainer, TrainingMethod,
};

/// What a router's weights are.
#[derive(Clone, Copy, Debug)]
enum Routers {
    /// Every expert is as good as any other: all tokens go to the first ones.
    Indifferent,
    /// Weights that are so large that a token's experts depend on its smallest change, drawn anew by a seed.
    Erratic(u64),
}

fn fill_with(routers: Routers) -> impl Fn(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), StepError> {
    move |p, rows, dtype, out| {
        let is_router = matches!(p.role, Role::Router | Role::RouterCorrection);
        match routers {
            _ if !is_router => return fill(p, rows, dtype, out),
            Routers::Indifferent => write_values(&vec![0.0; p.elements() as usize], dtype, out),
            Routers::Erratic(seed) => {
                let mut noise = noise(seed + p.elements());
                let values: Vec<f32> = (0..p.elements()).map(|_| 50.0 * noise() as f32).collect();
                write_values(&values, dtype, out);
            }
        }
        Ok(())
    }
}

fn mixtures() -> [ModelSpec; 2] {
    [mixture(), grouped_mixture()]
}

/// The device has the planned size and no byte more: a run that needed more would fail.
#[test]
fn the_plan_holds_whatever_the_router_does() {
    for spec in mixtures() {
        for checkpointing in [Checkpointing::None, Checkpointing::Full, Checkpointing::Every(2)] {
            for mlp_chunk_tokens in [None, Some(5)] {
                let base = StepSettings { checkpointing, mlp_chunk_tokens, ..settings(2, 9) };
                let balanced = StepSettings { balance_loss: 0.1, ..base.clone() };
                let compressed =
                    StepSettings { compression: Compression::Int8 { block: 64 }, ..base.clone() };
                for settings in [base, balanced, compressed] {
                    let planned = planned_peak(&spec, &settings, 2);
                    for routers in [Routers::Indifferent, Routers::Erratic(1), Routers::Erratic(2)] {
                        let device = device(&spec, &settings, 2);
                        let mut trainer =
                            Trainer::new(&device, Arc::default(), spec.clone(), settings.clone(), &Solo)
                                .unwrap();
                        trainer.load(fill_with(routers)).unwrap();
                        for step in 0..3 {
                            assert!(one_step(&mut trainer, &settings, step).is_finite(), "{routers:?}");
                        }
                        assert_eq!(device.arena().high_water(), planned, "{routers:?} {settings:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn experts_without_tokens_have_gradients_of_zero() {
    for spec in mixtures() {
        let settings = settings(2, 9);
        let device = device(&spec, &settings, 2);
        let mut trainer =
            Trainer::new(&device, Arc::default(), spec.clone(), settings.clone(), &Solo).unwrap();
        trainer.load(fill_with(Routers::Indifferent)).unwrap();
        let (tokens, targets) = tokens(5, 2, 9);
        trainer.accumulate(&[MicroBatch::new(&tokens, &targets)]).unwrap();
        let experts = spec.experts.clone().unwrap();
        let stacks = spec.parameters().into_iter().filter(|p| p.is_of_experts());
        for p in stacks {
            let gradient = device.read_f32(trainer.gradient(&p).unwrap()).unwrap();
            let each = (p.elements() / experts.count) as usize;
            for (expert, part) in gradient.chunks(each).enumerate() {
                let is_used = (expert as u64) < experts.per_token;
                assert_eq!(part.iter().any(|x| *x != 0.0), is_used, "{} {expert}", p.name);
            }
        }
    }
}

/// With a router that says the same of all tokens, the loss is its factor times experts for a token: a share of one to each of so
/// many, and the same mass to all.
#[test]
fn the_balance_loss_is_added_to_the_mean_loss() {
    let spec = mixture();
    let loss = |balance_loss: f64| {
        let settings = StepSettings { balance_loss, ..settings(2, 9) };
        let device = device(&spec, &settings, 2);
        let mut trainer =
            Trainer::new(&device, Arc::default(), spec.clone(), settings.clone(), &Solo).unwrap();
        trainer.load(fill_with(Routers::Indifferent)).unwrap();
        let halves = [tokens(5, 2, 9), tokens(6, 2, 9)];
        let batches = halves.each_ref().map(|(tokens, targets)| MicroBatch::new(tokens, targets));
        trainer.accumulate(&batches).unwrap().0
    };
    let experts = spec.experts.as_ref().unwrap().per_token as f64;
    let (plain, balanced) = (loss(0.0), loss(0.25));
    assert!((balanced - plain - 0.25 * experts).abs() < 1e-6, "{plain} {balanced}");
}

/// Adapters on everything, experts too, or on attention alone; all else is frozen.
fn adapters(spec: &ModelSpec, on_experts: bool, dropout: f32) -> TrainingMethod {
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned).to_vec();
    let target_modules = if on_experts { TargetModules::AllLinear } else { TargetModules::Names(attention) };
    let config = AdapterConfig { rank: 3, target_modules, ..AdapterConfig::default() };
    let layout = AdapterLayout::new(&config, spec).unwrap();
    let (weight_types, in_files) = (Default::default(), Default::default());
    TrainingMethod::Adapters(Arc::new(Adapters { layout, dropout, weight_types, in_files }))
}

/// What a run has left, and how its experts came and went.
#[derive(Debug, PartialEq)]
struct Left {
    losses: Vec<f64>,
    evaluated: (f64, u64),
    state: Vec<Vec<u8>>,
}

fn evaluated(trainer: &mut Trainer<'_>, settings: &StepSettings) -> (f64, u64) {
    let (tokens, targets) = tokens(77, settings.batch_size, settings.sequence_length);
    trainer.evaluate(settings.batch_size, &MicroBatch::new(&tokens, &targets)).unwrap()
}

/// Steps and an evaluation on tiers of the planned sizes.
fn run(
    spec: &ModelSpec,
    settings: &StepSettings,
    routers: Routers,
    threads: usize,
) -> (Left, Option<ExpertTraffic>) {
    let ([device_bytes, host_bytes, disk_bytes], at_most) = {
        let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
        let mut planned =
            Trainer::new(&dry, Arc::clone(&tiers), spec.clone(), settings.clone(), &Solo).unwrap();
        planned.load::<StepError>(|_, _, _, _| Ok(())).unwrap();
        for step in 0..3 {
            one_step(&mut planned, settings, step);
        }
        evaluated(&mut planned, settings);
        let peaks = [dry.arena().high_water(), tiers.host().high_water(), tiers.disk().high_water()];
        (peaks, dry.moved().experts)
    };
    let device = Cpu::new(device_bytes, CpuOptions { threads: Some(threads), isa: None }).unwrap();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let tiers = Arc::new(LowerTiers::open(Region::new(host_bytes).unwrap(), disk_bytes, &spill).unwrap());
    let mut trainer =
        Trainer::new(&device, Arc::clone(&tiers), spec.clone(), settings.clone(), &Solo).unwrap();
    trainer.load(fill_with(routers)).unwrap();
    let losses = (0..3).map(|step| one_step(&mut trainer, settings, step)).collect();
    let evaluated = evaluated(&mut trainer, settings);
    let peaks = [device.arena().high_water(), tiers.host().high_water(), tiers.disk().high_water()];
    assert_eq!(peaks, [device_bytes, host_bytes, disk_bytes], "{routers:?} {settings:?}");
    let traffic = trainer.expert_traffic();
    let read = traffic.map_or(0, |traffic| traffic.bytes);
    assert!(read <= at_most, "{read} of {at_most}: {routers:?} {} slots", settings.expert_slots);
    (Left { losses, evaluated, state: state(&trainer) }, traffic)
}

/// Wherever frozen experts live, in however few slots they come, whatever the router does: the bits of experts in memory, within the
/// planned bytes on every tier.
#[test]
fn frozen_experts_come_when_they_are_routed_to() {
    for spec in mixtures() {
        let all = spec.experts.as_ref().unwrap().count as u32 * spec.num_layers;
        for (number, (checkpointing, mlp_chunk_tokens, precision, on_experts)) in [
            (Checkpointing::None, None, Precision::F32, true),
            (Checkpointing::Full, None, PURE_BF16, true),
            (Checkpointing::Every(2), Some(5), Precision::F32, false),
            (Checkpointing::Full, None, PURE_FP8, true),
        ]
        .into_iter()
        .enumerate()
        {
            // 8-bit inputs are not dropped.
            let dropout = if precision == PURE_FP8 { 0.0 } else { 0.1 };
            let method = adapters(&spec, on_experts, dropout);
            let base = StepSettings { checkpointing, mlp_chunk_tokens, precision, method, ..settings(2, 9) };
            for routers in [Routers::Indifferent, Routers::Erratic(1)] {
                let (here, none) = run(&spec, &base, routers, 2);
                assert_eq!(none, None);
                let mut read = Vec::new();
                for (expert_slots, tier, kept, together) in
                    [(1, Tier::Disk, 0, 1), (3, Tier::Host, 1, 2), (all, Tier::Disk, spec.num_layers, 2)]
                {
                    let offload = Offload { parameters: tier, ..Offload::NONE };
                    let kept_layers = KeptLayers { parameters: kept, ..KeptLayers::NONE };
                    let (micro_batches_per_pass, base) = (together, base.clone());
                    let settings =
                        StepSettings { offload, kept_layers, expert_slots, micro_batches_per_pass, ..base };
                    let (away, traffic) = run(&spec, &settings, routers, 1 + number % 2);
                    assert_eq!(away, here, "{} {routers:?} {settings:?}", spec.name);
                    read.push(traffic.unwrap());
                }
                assert!(read[0].read > read[2].read && read[0].bytes > read[2].bytes, "{read:?}");
                let kinds = if spec.mlp.gated { 3 } else { 2 };
                assert!(read[2].read <= u64::from(all) * kinds, "{read:?}");
                if matches!(routers, Routers::Indifferent)
                    && spec.experts.as_ref().unwrap().router.groups.is_none()
                {
                    // Experts that no token goes to are not read.
                    let experts = spec.experts.as_ref().unwrap();
                    let layers = experts.layers.iter().filter(|has| **has).count() as u64;
                    assert_eq!(read[2].read, experts.per_token * layers * kinds);
                }
            }
        }
    }
}

/// All micro-batches of a pass share what was read, and so do the products that are made again, where there are slots for a layer.
#[test]
fn micro_batches_of_a_pass_share_experts() {
    let spec = deeper(mixture(), 6);
    let count = spec.experts.as_ref().unwrap().count as u32;
    let of = |expert_slots, micro_batches_per_pass| {
        let offload = Offload { parameters: Tier::Disk, ..Offload::NONE };
        let (checkpointing, method) = (Checkpointing::Full, adapters(&spec, true, 0.0));
        let base = StepSettings { offload, checkpointing, method, ..settings(2, 9) };
        let settings = StepSettings { expert_slots, micro_batches_per_pass, ..base };
        let dry = Dry::new().standing_for(DeviceTraits::CPU);
        let mut trainer =
            Trainer::new(&dry, Arc::new(LowerTiers::dry()), spec.clone(), settings.clone(), &Solo).unwrap();
        one_step(&mut trainer, &settings, 0);
        let before = dry.moved();
        one_step(&mut trainer, &settings, 1);
        dry.moved().less(before).experts
    };
    let (apart, together, few) = (of(count, 1), of(count, 2), of(1, 2));
    // Once forward and once backward; what is still there from the pass before need not come.
    assert!(together * 2 <= apart + apart / 4 && together > 0, "{apart} {together}");
    assert!(few > 2 * together, "{few} {together}");
}
