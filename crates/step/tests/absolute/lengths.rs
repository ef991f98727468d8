//! DoRA: rows of weights with lengths of their own (Liu et al. 2024).

use std::sync::Arc;

use plimsoll_device::IGNORED_TARGET;
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tier};
use plimsoll_model::{BlockId, LoraPart, Role};
use plimsoll_parallel::Solo;
use plimsoll_step::{Offload, StateKind, StepError, StepSettings};

use super::*;

/// alpha / rank of [`adapters`].
fn scale() -> f64 {
    let config = AdapterConfig { rank: 3, ..AdapterConfig::default() };
    config.alpha / 3.0
}

/// The values of the weight that an adapter changes.
fn whole(trainer: &Trainer<'_>, spec: &ModelSpec, magnitude: &Parameter) -> Vec<Vec<f64>> {
    let Role::Lora(_, of) = magnitude.role else { panic!("{}", magnitude.name) };
    let values =
        |p: &Parameter| -> Vec<f64> { trainer.values(p).unwrap().into_iter().map(f64::from).collect() };
    let block = magnitude.block;
    let base = spec.parameters().into_iter().find(|p| (p.block, p.role) == (block, of.role())).unwrap();
    let part = |part| {
        let role = Role::Lora(part, of);
        let found = trainer.trained().iter().find(|p| (p.block, p.role) == (block, role)).unwrap();
        values(found)
    };
    let (weight, a, b) = (values(&base), part(LoraPart::A), part(LoraPart::B));
    let columns = base.columns() as usize;
    let element = |row: usize, column: usize| {
        let product: f64 = (0..3).map(|k| b[row * 3 + k] * a[k * columns + column]).sum();
        weight[row * columns + column] + scale() * product
    };
    (0..base.rows() as usize).map(|row| (0..columns).map(|column| element(row, column)).collect()).collect()
}

fn is_magnitude(p: &&Parameter) -> bool {
    matches!(p.role, Role::Lora(LoraPart::Magnitude, _))
}

fn loss(trainer: &mut Trainer<'_>) -> f64 {
    let (tokens, targets) = tokens(3, 2, 9);
    assert!(targets.contains(&IGNORED_TARGET));
    trainer.accumulate(&[MicroBatch::new(&tokens, &targets)]).unwrap().0
}

/// DoRA begins with the lengths that the rows have. With lengths of twice that the model is the one of LoRA with every adapted
/// weight, and its product, doubled. Weights that live below the device are measured there.
#[test]
fn rows_have_the_lengths_that_were_set() {
    let folder = tempfile::tempdir().unwrap();
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let spec = llama();
    let lora = StepSettings { method: adapters(&spec, 0.0, false), ..settings(2, 9) };
    let is_adapted = |p: &Parameter| {
        matches!(p.block, BlockId::Layer(_))
            && p.shape.len() == 2
            && !matches!(p.role, Role::Lora(LoraPart::A, _))
    };
    let doubled = {
        let device = roomy(1);
        let mut trainer = Trainer::new(&device, Arc::default(), spec.clone(), lora, &Solo).unwrap();
        trainer
            .load::<StepError>(|p, rows, dtype, out| {
                let [first, last] = [rows.start, rows.end].map(|row| (row * p.columns()) as usize);
                let factor = if is_adapted(p) { 2.0 } else { 1.0 };
                let values: Vec<f32> = values(p)[first..last].iter().map(|x| factor * x).collect();
                write_values(&values, dtype, out);
                Ok(())
            })
            .unwrap();
        loss(&mut trainer)
    };
    for parameters in [Tier::Device, Tier::Host] {
        let offload = Offload { parameters, ..Offload::NONE };
        let dora = StepSettings { method: adapters(&spec, 0.0, true), offload, ..settings(2, 9) };
        let (device, tiers) =
            (roomy(2), Arc::new(LowerTiers::open(Region::new(16 << 20).unwrap(), 0, &spill).unwrap()));
        let mut trainer = Trainer::new(&device, tiers, spec.clone(), dora, &Solo).unwrap();
        trainer.load(fill).unwrap();
        trainer.reset_magnitudes().unwrap();
        let magnitudes: Vec<Parameter> = trainer.trained().iter().filter(is_magnitude).cloned().collect();
        assert_eq!(magnitudes.len(), 7 * 3);
        for p in &magnitudes {
            let lengths = whole(&trainer, &spec, p).into_iter().map(|row| squares(&row).sqrt());
            for (found, length) in trainer.values(p).unwrap().into_iter().zip(lengths) {
                assert!((f64::from(found) / length - 1.0).abs() < 1e-5, "{}: {found} {length}", p.name);
            }
        }
        let plain = loss(&mut trainer);
        for named in trainer.state().unwrap() {
            let p = magnitudes.iter().find(|p| p.name == named.name);
            let Some(p) = p.filter(|_| named.kind == StateKind::Weight) else { continue };
            let twice: Vec<f32> = trainer.values(p).unwrap().iter().map(|x| 2.0 * x).collect();
            trainer.write_state(&named, &mut |out| write_values(&twice, DType::F32, out)).unwrap();
        }
        let found = loss(&mut trainer);
        assert!((found / doubled - 1.0).abs() < 1e-5, "{parameters:?}: {found} {doubled}");
        assert!((found / plain - 1.0).abs() > 1e-3, "{parameters:?}: {found} {plain}");
    }
}
