//! DoRA: rows of weights with lengths of their own (Liu et al. 2024).

use std::sync::Arc;

use plimsoll_device::IGNORED_TARGET;
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tier};
use plimsoll_model::{BlockId, LoraPart, Role};
use plimsoll_parallel::Solo;
use plimsoll_step::{GradientClipping, Offload, StateKind, StepError, StepSettings};

use super::plain_llama::{Weights, losses_with, weights_of};
use super::plain_mixture::Mixture;
use super::*;

/// alpha / rank of [`adapters`].
fn scale() -> f64 {
    let config = AdapterConfig { rank: 3, ..AdapterConfig::default() };
    config.alpha / 3.0
}

/// The weight that an adapter changes.
fn base_of(spec: &ModelSpec, adapter: &Parameter) -> Parameter {
    let Role::Lora(_, of) = adapter.role else { panic!("{}", adapter.name) };
    spec.parameters().into_iter().find(|p| (p.block, p.role) == (adapter.block, of.role())).unwrap()
}

/// The weight with its adapter, row by row; each expert has an A of its own.
fn whole(
    values: &dyn Fn(&Parameter) -> Vec<f64>,
    trained: &[Parameter],
    spec: &ModelSpec,
    magnitude: &Parameter,
) -> Vec<Vec<f64>> {
    let Role::Lora(_, of) = magnitude.role else { panic!("{}", magnitude.name) };
    let base = base_of(spec, magnitude);
    let part = |part| {
        let role = Role::Lora(part, of);
        values(trained.iter().find(|p| (p.block, p.role) == (magnitude.block, role)).unwrap())
    };
    let (weight, a, b) = (values(&base), part(LoraPart::A), part(LoraPart::B));
    let (rows, columns) = (base.rows() as usize, base.columns() as usize);
    let each = rows / base.experts() as usize;
    let element = |row: usize, column: usize| {
        let own = row / each * 3;
        let product: f64 = (0..3).map(|k| b[row * 3 + k] * a[(own + k) * columns + column]).sum();
        weight[row * columns + column] + scale() * product
    };
    (0..rows).map(|row| (0..columns).map(|column| element(row, column)).collect()).collect()
}

fn length(row: &[f64]) -> f64 {
    squares(row).sqrt()
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
            let values = |p: &Parameter| trainer.values(p).unwrap().into_iter().map(f64::from).collect();
            let rows = whole(&values, trainer.trained(), &spec, p);
            let lengths = rows.iter().map(|row| length(row));
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

/// DoRA on every linear of a mixture, experts too, against its plain version: the loss, and every gradient, with the lengths of the rows as
/// they are now.
#[test]
fn experts_have_lengths_of_their_own() {
    let spec = moe_plus_plus();
    let TrainingMethod::Adapters(with) = adapters(&spec, 0.0, true) else { panic!("no adapters") };
    let trained = with.layout.parameters().to_vec();
    let magnitudes: Vec<&Parameter> = trained.iter().filter(is_magnitude).collect();
    assert!(magnitudes.iter().any(|p| p.is_of_experts()));
    let rows_of =
        |all: &Weights, p: &Parameter| whole(&|p: &Parameter| all[&p.name].clone(), &trained, &spec, p);
    let mut all = weights_of(&spec);
    all.extend(trained.iter().map(|p| (p.name.clone(), values(p).into_iter().map(f64::from).collect())));
    let lengths: HashMap<&str, Vec<f64>> = magnitudes
        .iter()
        .map(|p| (p.name.as_str(), rows_of(&all, p).iter().map(|row| length(row)).collect()))
        .collect();
    let plain = |all: &Weights| {
        let mut own = all.clone();
        for p in &magnitudes {
            let factors = all[&p.name].iter().zip(&lengths[p.name.as_str()]).map(|(m, c)| m / c);
            let rows = rows_of(all, p).into_iter().zip(factors);
            let weight = rows.flat_map(|(row, factor)| row.into_iter().map(move |x| factor * x)).collect();
            own.insert(base_of(&spec, p).name, weight);
        }
        let (tokens, targets) = tokens(5, 1, 24);
        let losses = losses_with(&spec, &own, &tokens, &targets, &mut Mixture::new(&spec, None));
        losses.iter().sum::<f64>() / 23.0
    };
    let clipping = GradientClipping::None;
    let method = TrainingMethod::Adapters(with.clone());
    let settings = StepSettings { method, clipping, balance_loss: 0.0, ..settings(1, 24) };
    let (tokens, targets) = tokens(5, 1, 24);
    let batch = [MicroBatch::new(&tokens, &targets)];
    let device = roomy(2);
    let mut trainer = trainer(&device, &spec, &settings);
    trainer.reset_magnitudes().unwrap();
    for p in &magnitudes {
        for (found, length) in trainer.values(p).unwrap().into_iter().zip(&lengths[p.name.as_str()]) {
            assert!((f64::from(found) / length - 1.0).abs() < 1e-5, "{}: {found} {length}", p.name);
        }
    }
    // Other lengths than those that the rows have.
    trainer.load(fill).unwrap();
    let loss = trainer.accumulate(&batch).unwrap().0;
    let expected = plain(&all);
    assert!((loss / expected - 1.0).abs() < 2e-6, "{loss}, not {expected}");
    for (p, gradient) in gradients(&device, &mut trainer, &batch) {
        let size = length(&gradient);
        let at = |step: f64| {
            let mut moved = all.clone();
            let own = moved.get_mut(&p.name).unwrap();
            own.iter_mut().zip(&gradient).for_each(|(w, g)| *w += step / size * g);
            plain(&moved)
        };
        let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
        assert!(size > 0.0 && (slope / size - 1.0).abs() < 1e-3, "{}: {slope} {size}", p.name);
    }
}
