//! Mixtures of experts under routers that do their worst: the plan holds, what nobody uses has no gradient, what training does with
//! routers is that of its definitions, and frozen experts that come by themselves change no bit.

use std::ops::Range;
use std::sync::Arc;

use crate::common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device, DeviceTraits, Dry};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tier};
use plimsoll_model::adapter::TargetModules;
use plimsoll_model::{AdapterConfig, AdapterLayout, ModelSpec, Parameter, Role};
use plimsoll_parallel::Solo;
use plimsoll_step::{
    Adapters, Checkpointing, Compression, ExpertTraffic, Group, KeptLayers, MicroBatch, Offload, Precision,
    RouterTraining, StepError, StepSettings, Trainer, TrainingMethod,
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
        let is_router = matches!(p.role, Role::Router | Role::RouterCorrection | Role::RouterResidual);
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

fn mixtures() -> [ModelSpec; 3] {
    [mixture(), grouped_mixture(), moe_plus_plus()]
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
                let limited = |capacity| RouterTraining {
                    z_loss: 0.01,
                    jitter: 0.1,
                    capacity: Some(capacity),
                    correction_speed: 0.01,
                };
                let [tight, wide] = [0.6, 1.75]
                    .map(|capacity| StepSettings { routers: limited(capacity), ..balanced.clone() });
                for settings in [base, balanced, compressed, tight, wide] {
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
    adapters_with(spec, on_experts, dropout, false)
}

/// The same, with lengths of rows (DoRA) where that is asked for.
fn adapters_with(spec: &ModelSpec, on_experts: bool, dropout: f32, use_dora: bool) -> TrainingMethod {
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned).to_vec();
    let target_modules = if on_experts { TargetModules::AllLinear } else { TargetModules::Names(attention) };
    let config = AdapterConfig { rank: 3, target_modules, use_dora, ..AdapterConfig::default() };
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

/// DoRA of experts, whose lengths need whole matrices: experts come with their layers. The same bits with and without checkpointing, on
/// one thread and two, with weights, gradients and states on the device and on the disk; planned to the byte.
#[test]
fn lengths_of_experts_have_the_same_bits_everywhere() {
    for spec in mixtures() {
        let method = adapters_with(&spec, true, 0.1, true);
        for precision in [Precision::F32, PURE_BF16] {
            let base = StepSettings { precision, method: method.clone(), ..settings(2, 9) };
            let (here, _) = run(&spec, &base, Routers::Erratic(1), 1);
            let full = StepSettings { checkpointing: Checkpointing::Full, ..base.clone() };
            assert_eq!(run(&spec, &full, Routers::Erratic(1), 2).0, here, "{}", spec.name);
            let disk = Tier::Disk;
            let offload = Offload { parameters: disk, gradients: disk, optimizer: disk, ..Offload::NONE };
            // Slots are for experts that come by themselves.
            let away = StepSettings { offload, expert_slots: 2, ..full };
            let (away, traffic) = run(&spec, &away, Routers::Erratic(1), 2);
            assert_eq!(away, here, "{}", spec.name);
            assert_eq!(traffic, None);
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

/// What training can do with routers, all at once.
const EVERYTHING: RouterTraining =
    RouterTraining { z_loss: 0.05, jitter: 0.2, capacity: Some(0.8), correction_speed: 0.02 };

/// With logits of nothing, the logarithm of the sum of exponentials is that of the number of experts.
#[test]
fn the_z_loss_is_added_to_the_mean_loss() {
    for spec in mixtures() {
        let loss = |z_loss: f64, sequence_chunk_tokens| {
            let routers = RouterTraining { z_loss, ..RouterTraining::default() };
            let mut settings = StepSettings { routers, ..settings(1, 9) };
            settings.sequence_chunk_tokens = sequence_chunk_tokens;
            settings.checkpointing = Checkpointing::Full;
            settings.offload.activations = Tier::Host;
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
            let tiers = Arc::new(LowerTiers::open(Region::new(1 << 20).unwrap(), 0, &spill).unwrap());
            let device = Cpu::new(1 << 24, CpuOptions { threads: Some(2), isa: None }).unwrap();
            let mut trainer = Trainer::new(&device, tiers, spec.clone(), settings, &Solo).unwrap();
            trainer.load(fill_with(Routers::Indifferent)).unwrap();
            let halves = [tokens(5, 1, 9), tokens(6, 1, 9)];
            let batches = halves.each_ref().map(|(tokens, targets)| MicroBatch::new(tokens, targets));
            trainer.accumulate(&batches).unwrap().0
        };
        let expected = (spec.experts.as_ref().unwrap().total() as f64).ln().powi(2);
        for chunk in [None, Some(4)] {
            let more = loss(0.25, chunk) - loss(0.0, chunk);
            assert!((more - 0.25 * expected).abs() < 1e-6, "{more} {expected}");
        }
    }
}

/// The derivative along a gradient is its squared norm, with every loss of routers, noise that is drawn again, and dropped places.
#[test]
fn gradients_hold_whatever_routers_do() {
    for spec in mixtures() {
        let settings = StepSettings { balance_loss: 0.3, routers: EVERYTHING, ..settings(1, 12) };
        let (tokens, targets) = tokens(9, 1, 12);
        let batch = MicroBatch::new(&tokens, &targets);
        let device = device(&spec, &settings, 2);
        let mut trainer = trainer(&device, &spec, &settings);
        for p in spec.parameters().into_iter().filter(|p| p.role.has_gradient()) {
            trainer.load(fill).unwrap();
            trainer.accumulate(&[batch]).unwrap();
            let gradient = device.read_f32(trainer.gradient(&p).unwrap()).unwrap();
            let square: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum();
            assert!(square > 0.0, "{}", p.name);
            // So small a step changes no choice.
            let size = 1e-4 / square.sqrt();
            let mut loss_at = |distance: f64| {
                trainer
                    .load::<StepError>(|q, rows, dtype, out| {
                        if q.name != p.name {
                            return fill(q, rows, dtype, out);
                        }
                        let mut values = values(q);
                        for (v, g) in values.iter_mut().zip(&gradient) {
                            *v += (distance * f64::from(*g)) as f32;
                        }
                        write_values(&values, dtype, out);
                        Ok(())
                    })
                    .unwrap();
                trainer.accumulate(&[batch]).unwrap().0
            };
            let slope = (loss_at(size) - loss_at(-size)) / (2.0 * size);
            let noise = 1e-6 / (size * square);
            assert!((slope / square - 1.0).abs() < 0.02 + noise, "{}: {slope} {square}", p.name);
        }
    }
}

/// What is computed again draws the same noise and drops the same places.
#[test]
fn checkpointing_changes_no_bit_of_what_routers_do() {
    for spec in mixtures() {
        let trained = |checkpointing| {
            let settings =
                StepSettings { checkpointing, balance_loss: 0.1, routers: EVERYTHING, ..settings(2, 9) };
            train(&spec, &settings, 2, 3)
        };
        let kept = trained(Checkpointing::None);
        let groups = |group| Checkpointing::Selective([group].into_iter().collect());
        let mut forms = vec![Checkpointing::Full, Checkpointing::Every(2)];
        forms.extend(Group::ALL.map(groups));
        for form in forms {
            assert!(kept == trained(form), "{form:?}");
        }
        let plain = StepSettings { balance_loss: 0.1, ..settings(2, 9) };
        assert!(kept.0 != train(&spec, &plain, 2, 3).0);
    }
}

/// All tokens want the first experts, which take so many even shares, rounded up, of the choices of a micro-batch; those of the first
/// tokens. Less room is planned for less capacity.
#[test]
fn experts_take_no_more_than_their_capacity() {
    for spec in mixtures() {
        let experts = spec.experts.clone().unwrap();
        let planned = |capacity| {
            let routers = RouterTraining { capacity, ..RouterTraining::default() };
            planned_peak(&spec, &StepSettings { routers, ..settings(2, 9) }, 2)
        };
        assert!(planned(Some(0.5)) < planned(None));
        let (tau, without) = (experts.tau(), experts.total() - experts.count);
        let shares = tau * experts.count as f64 + without as f64;
        for (factor, places) in [(0.5, 18 * experts.per_token), (1.0, 18 * experts.per_token), (100.0, 0)] {
            let routers = RouterTraining { capacity: Some(factor), ..RouterTraining::default() };
            let settings = StepSettings { routers, ..settings(2, 9) };
            let device = device(&spec, &settings, 2);
            let mut trainer =
                Trainer::new(&device, Arc::default(), spec.clone(), settings.clone(), &Solo).unwrap();
            trainer.load(fill_with(Routers::Indifferent)).unwrap();
            one_step(&mut trainer, &settings, 0);
            let each = (factor * places as f64 * tau / shares).ceil() as u64;
            for counts in trainer.expert_loads().unwrap() {
                let used = counts.chosen.iter().filter(|chosen| **chosen == 2 * 18).count() as u64;
                assert_eq!(used, experts.per_token, "{counts:?}");
                // Two micro-batches.
                let dropped = if places == 0 { 0 } else { 2 * experts.per_token * (18 - each) };
                assert_eq!(u64::from(counts.dropped), dropped, "{factor}");
            }
        }
    }
}

/// A layer's corrections move by the speed, by the counts of all micro-batches; a step that is not taken moves none.
#[test]
fn corrections_follow_the_load() {
    let spec = grouped_mixture();
    let routers = RouterTraining { correction_speed: 0.125, ..RouterTraining::default() };
    let settings = StepSettings { routers, ..settings(2, 9) };
    let device = device(&spec, &settings, 2);
    let mut trainer = Trainer::new(&device, Arc::default(), spec.clone(), settings.clone(), &Solo).unwrap();
    trainer.load(fill_with(Routers::Indifferent)).unwrap();
    let corrections: Vec<Parameter> =
        spec.parameters().into_iter().filter(|p| p.role == Role::RouterCorrection).collect();
    let read = |trainer: &Trainer<'_>| -> Vec<Vec<f32>> {
        corrections.iter().map(|p| trainer.values(p).unwrap()).collect()
    };
    one_step(&mut trainer, &settings, 0);
    // Of the three groups, the first two are as good as the third: three of their four experts get all tokens.
    let expected: Vec<f32> = vec![-0.125, -0.125, -0.125, 0.125, 0.125, 0.125];
    assert_eq!(read(&trainer), [expected.clone(), expected.clone(), expected.clone()]);
    let state = trainer.state().unwrap();
    assert_eq!(state.iter().filter(|named| named.name.contains("e_score_correction_bias")).count(), 3);
    let poisoned = trainer.weight(&spec.parameters()[0]).unwrap().clone();
    device.write(&poisoned, &mut |bytes| bytes[..4].copy_from_slice(&f32::NAN.to_ne_bytes())).unwrap();
    let (mut tokens, targets) = tokens(5, 2, 9);
    tokens[0] = 0;
    trainer.step(&[MicroBatch::new(&tokens, &targets)], 1e-3).unwrap_err();
    assert_eq!(read(&trainer), [expected.clone(), expected.clone(), expected]);
}
