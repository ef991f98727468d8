//! The step against numbers that were worked out without it, in plain f64: what a comparison of the step with itself
//! cannot see.

#[path = "../common/mod.rs"]
mod common;

mod lengths;
mod loss;
mod moe_plus_plus;
mod norm;
mod plain_llama;
mod plain_mixture;
mod rules;
mod seeds;
mod weights;

use std::collections::HashMap;
use std::sync::Arc;

use common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device};
use plimsoll_model::convert::convert;
use plimsoll_model::{AdapterConfig, AdapterLayout, ModelSpec, Parameter};
use plimsoll_step::{Adapters, MicroBatch, OptimizerKind, OptimizerSettings, Trainer, TrainingMethod};

/// Adapters of every linear, with lengths of rows where `use_dora`.
fn adapters(spec: &ModelSpec, dropout: f32, use_dora: bool) -> TrainingMethod {
    let config = AdapterConfig { rank: 3, use_dora, ..AdapterConfig::default() };
    let layout = AdapterLayout::new(&config, spec).unwrap();
    let (weight_types, in_files) = (HashMap::new(), HashMap::new());
    TrainingMethod::Adapters(Arc::new(Adapters { layout, dropout, weight_types, in_files }))
}

fn optimizer(kind: OptimizerKind, weight_decay: f64) -> OptimizerSettings {
    OptimizerSettings { kind, weight_decay, ..OptimizerSettings::default() }
}

/// A device with more memory than any of these steps needs.
fn roomy(threads: usize) -> Cpu {
    Cpu::new(64 << 20, CpuOptions { threads: Some(threads), isa: None }).unwrap()
}

/// Every gradient of the mean loss over some micro-batches, in the order of what is trained.
fn gradients(
    device: &Cpu,
    trainer: &mut Trainer<'_>,
    batches: &[MicroBatch<'_>],
) -> Vec<(Parameter, Vec<f64>)> {
    trainer.accumulate(batches).unwrap();
    let of = |p: &Parameter| {
        let gradient = trainer.gradient(p).unwrap();
        let (mut bytes, mut values) = (Vec::new(), vec![0; 4 * p.elements() as usize]);
        device.read(gradient, &mut |part| bytes.extend_from_slice(part)).unwrap();
        convert(gradient.dtype(), &bytes, DType::F32, &mut values).unwrap();
        let value = |bytes: &[u8; 4]| f64::from(f32::from_ne_bytes(*bytes));
        (p.clone(), values.as_chunks().0.iter().map(value).collect())
    };
    trainer.trained().iter().map(of).collect()
}

/// Every trained weight, or its master.
fn weights(trainer: &Trainer<'_>) -> Vec<Vec<f64>> {
    let of = |p| trainer.values(p).unwrap().into_iter().map(f64::from).collect();
    trainer.trained().iter().map(of).collect()
}

fn squares(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum()
}
