//! Mixtures of experts under routers that do their worst: the plan holds, what nobody uses has no gradient, and the load-balancing
//! loss is that of its definition.

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::*;
use plimsoll_device::{DType, Device};
use plimsoll_model::{ModelSpec, Parameter, Role};
use plimsoll_parallel::Solo;
use plimsoll_step::{Checkpointing, Compression, MicroBatch, StepError, StepSettings, Trainer};

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
