//! Adapters that begin with the largest singular values of their weights (PiSSA), on tiny random models, against what
//! PEFT and PyTorch in f32 say of them: `docs/bench/pissa_fixtures.py`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::{Cpu, CpuOptions, DType, IGNORED_TARGET};
use plimsoll_model::adapter::{Adapter, AdapterSet, AdapterStart, FirstValues, TargetModules};
use plimsoll_model::convert::{convert, encode};
use plimsoll_model::{AdapterConfig, AdapterLayout, ModelFiles, Parameter, Role, SafetensorsFile};
use plimsoll_parallel::Solo;
use plimsoll_plan::DryRun;
use plimsoll_step::{
    Adapters, EvaluateSettings, Evaluator, MicroBatch, OptimizerSettings, Precision, StepSettings, Trainer,
    TrainingMethod, WeightStorage,
};
use plimsoll_train::TrainError;
use serde_json::Value;

const EXACT: AdapterStart = AdapterStart::Pissa { power_iterations: None };

struct Case {
    name: String,
    expected: Value,
    tensors: SafetensorsFile,
    files: ModelFiles,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let read = |path: PathBuf| -> Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let case = |name: &str| {
        let expected = read(data.join("pissa").join(format!("{name}.json")));
        let tensors = SafetensorsFile::open(&data.join("pissa").join(format!("{name}.safetensors"))).unwrap();
        let family = data.join("families").join(expected["family"].as_str().unwrap());
        let ids = read(family.join("expected.json"))["tokens"].clone();
        let tokens: Vec<u32> = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let targets = tokens[1..].iter().copied().chain([IGNORED_TARGET]).collect();
        Case {
            name: name.to_owned(),
            expected,
            tensors,
            files: ModelFiles::open(&family).unwrap(),
            tokens,
            targets,
        }
    };
    ["llama", "llama-patterns", "llama-rslora", "gpt2", "phi3"].map(case).into()
}

fn cpu(bytes: u64) -> Cpu {
    Cpu::new(bytes, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

fn near(name: &str, got: f64, wanted: f64, tolerance: f64) {
    assert!((got - wanted).abs() < tolerance, "{name}: {got} instead of {wanted}");
}

impl Case {
    fn config(&self, start: AdapterStart) -> AdapterConfig {
        let settings = &self.expected["settings"];
        let patterns = |key: &str| settings[key].as_object().cloned().unwrap_or_default();
        AdapterConfig {
            rank: settings["r"].as_u64().unwrap() as usize,
            alpha: settings["lora_alpha"].as_f64().unwrap(),
            target_modules: match &settings["target_modules"] {
                Value::Array(names) => {
                    TargetModules::Names(names.iter().map(|name| name.as_str().unwrap().to_owned()).collect())
                }
                _ => TargetModules::AllLinear,
            },
            rank_pattern: patterns("rank_pattern")
                .into_iter()
                .map(|(k, v)| (k, v.as_u64().unwrap() as usize))
                .collect(),
            alpha_pattern: patterns("alpha_pattern")
                .into_iter()
                .map(|(k, v)| (k, v.as_f64().unwrap()))
                .collect(),
            use_rslora: settings["use_rslora"].as_bool().unwrap_or(false),
            start,
            ..AdapterConfig::default()
        }
    }

    fn layout(&self, start: AdapterStart) -> AdapterLayout {
        AdapterLayout::new(&self.config(start), self.files.spec()).unwrap()
    }

    fn settings(&self, layout: AdapterLayout, weight_type: Option<DType>) -> StepSettings {
        let parameters = self.files.spec().parameters();
        let adapted = parameters.iter().filter(|p| layout.adapts(p) && p.shape[1].is_multiple_of(8));
        let weight_types = weight_type
            .map(|dtype| adapted.map(|p| ((p.block, p.role), dtype)).collect())
            .unwrap_or_default();
        let adapters = Adapters { layout, dropout: 0.0, weight_types, in_files: HashMap::new() };
        StepSettings {
            method: TrainingMethod::Adapters(Arc::new(adapters)),
            optimizer: OptimizerSettings { weight_decay: 0.0, ..OptimizerSettings::default() },
            ..StepSettings::new(1, self.tokens.len() as u64)
        }
    }

    fn trainer<'d>(&self, device: &'d Cpu, settings: &StepSettings, first: &FirstValues) -> Trainer<'d> {
        let (spec, base) = (self.files.spec(), self.files.weights());
        let layout = &settings.method.adapters().unwrap().layout;
        let mut trainer =
            Trainer::new(device, Arc::default(), spec.clone(), settings.clone(), &Solo).unwrap();
        trainer
            .load::<TrainError>(|p, rows, dtype, out| match p.role {
                Role::Lora(..) => Ok(encode(&first.values(layout, spec, p)?, dtype, out)?),
                _ => Ok(first.residual_rows_into(layout, spec, base, p, rows, dtype, out)?),
            })
            .unwrap();
        trainer.reset_magnitudes().unwrap();
        trainer
    }

    fn batch(&self) -> MicroBatch<'_> {
        MicroBatch::new(&self.tokens, &self.targets)
    }

    /// The loss of an adapter's folder on the base as it is.
    fn loss_of(&self, folder: &Path) -> f64 {
        let spec = self.files.spec();
        let set = AdapterSet::open(&[(folder, 1.0)], spec).unwrap();
        let types = |_: &Parameter| DType::F32;
        let storage = WeightStorage { adapters: Some(set.layout()), ..WeightStorage::new(&types) };
        let device = cpu(1 << 24);
        let mut evaluator = Evaluator::new(
            &device,
            &Arc::default(),
            spec.clone(),
            EvaluateSettings { precision: Precision::F32, longest: 64, loss_chunk_tokens: 64 },
            storage,
        )
        .unwrap();
        let base = self.files.weights();
        evaluator
            .load::<TrainError>(
                |p, rows, dtype, out| Ok(set.read_rows_into(spec, base, p, rows, dtype, out)?),
            )
            .unwrap();
        let (sum, count) = evaluator.losses(1, &self.batch()).unwrap();
        sum / count as f64
    }

    fn stored(&self, name: &str) -> Vec<f32> {
        let mut values = vec![0.0; self.tensors.tensor(name).unwrap().shape.iter().product::<u64>() as usize];
        let bytes = self.tensors.bytes(name).unwrap();
        convert(DType::F32, bytes, DType::F32, bytemuck::cast_slice_mut(&mut values)).unwrap();
        values
    }
}

/// |a - b| / |b|
fn difference(got: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(got.len(), wanted.len());
    let square = |x: f32| f64::from(x).powi(2);
    let sums = got.iter().zip(wanted).map(|(a, b)| (square(a - b), square(*b)));
    let (apart, all) = sums.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
    (apart / all).sqrt()
}

/// `[columns, rows]` of `[rows, columns]`.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}

#[test]
fn products_and_residuals_are_those_of_peft() {
    let place = tempfile::tempdir().unwrap();
    for case in cases() {
        let (spec, base) = (case.files.spec(), case.files.weights());
        let layout = case.layout(EXACT);
        let folder = place.path().join(&case.name);
        let first = layout.first_folder(&folder, spec, base, 0).unwrap();
        let adapter = Adapter::open(&folder, spec).unwrap();
        let mut compared = 0;
        for module in layout.modules() {
            let low = &adapter.low_rank()[&format!("{}.weight", module.name)];
            let mut product = vec![0.0; low.b.rows * low.a.columns];
            for (row, out) in product.chunks_exact_mut(low.a.columns).enumerate() {
                low.add_to_row(row, 1.0, out);
            }
            let parameters = spec.block_parameters(module.block);
            let mut residual = Vec::new();
            for part in &module.parts {
                let p = parameters.iter().find(|p| p.role == part.role()).unwrap();
                let mut values = vec![0.0f32; p.elements() as usize];
                let bytes = bytemuck::cast_slice_mut(&mut values);
                first.residual_rows_into(&layout, spec, base, p, p.all_rows(), DType::F32, bytes).unwrap();
                residual.extend(values);
            }
            if case.name == "gpt2" {
                (product, residual) =
                    (transposed(&product, low.a.columns), transposed(&residual, low.a.columns));
            }
            for (what, got) in [("product", product), ("residual", residual)] {
                let apart = difference(&got, &case.stored(&format!("{}.{what}", module.name)));
                assert!(apart < 1e-4, "{} {} {what}: {apart}", case.name, module.name);
                compared += 1;
            }
        }
        assert_eq!(compared, case.tensors.tensors().len(), "{}", case.name);
    }
}

#[test]
fn training_and_what_is_written_are_those_of_peft() {
    let place = tempfile::tempdir().unwrap();
    for case in cases() {
        let spec = case.files.spec();
        let settings = case.settings(case.layout(EXACT), None);
        let layout = &settings.method.adapters().unwrap().layout;
        let folder = place.path().join(&case.name);
        let first = layout.first_folder(&folder.join("first"), spec, case.files.weights(), 0).unwrap();
        let dry = DryRun::training(spec, &settings, 1).unwrap();
        let device = cpu(dry.peak_bytes());
        let mut trainer = case.trainer(&device, &settings, &first);
        let number = |key: &str| case.expected[key].as_f64().unwrap();
        let losses = case.expected["losses"].as_array().unwrap();
        for (step, wanted) in losses.iter().enumerate() {
            let loss = trainer.step(&[case.batch()], number("learning_rate")).unwrap().loss;
            near(&format!("{} {step}", case.name), loss, wanted.as_f64().unwrap(), 1e-4);
            if step == 0 {
                near(&case.name, loss, number("plain_loss"), 1e-5);
            }
        }
        let written = folder.join("written");
        let values = |p: &Parameter| Ok(trainer.values(p).unwrap());
        layout.write_converted(&written, spec, &first, values).unwrap();
        near(&case.name, case.loss_of(&written), number("converted_loss"), 1e-4);

        let config: Value =
            serde_json::from_slice(&std::fs::read(written.join("adapter_config.json")).unwrap()).unwrap();
        assert_eq!((&config["r"], &config["init_lora_weights"]), (&8.into(), &true.into()));
        // What is written tells both apart again, to the bit.
        let (trained, begun) = Adapter::open(&written, spec).unwrap().split(layout).unwrap();
        let begun_as = Adapter::open(&folder.join("first"), spec).unwrap();
        assert_eq!(begun.low_rank(), begun_as.low_rank(), "{}", case.name);
        let set = AdapterSet::of(trained, &written, layout).unwrap();
        for p in layout.parameters() {
            let mut read = vec![0.0f32; p.elements() as usize];
            set.read_rows_into(
                spec,
                case.files.weights(),
                p,
                p.all_rows(),
                DType::F32,
                bytemuck::cast_slice_mut(&mut read),
            )
            .unwrap();
            assert!(read == trainer.values(p).unwrap(), "{} {}", case.name, p.name);
        }
    }
}

#[test]
fn few_power_iterations_and_quantised_residuals_begin_near_the_base() {
    let place = tempfile::tempdir().unwrap();
    for case in cases() {
        let spec = case.files.spec();
        let starts = [EXACT, AdapterStart::Pissa { power_iterations: Some(4) }];
        for (number, start) in starts.into_iter().enumerate() {
            for weight_type in [None, Some(DType::Nf4)] {
                let settings = case.settings(case.layout(start), weight_type);
                let layout = &settings.method.adapters().unwrap().layout;
                let folder = place.path().join(&case.name).join(number.to_string());
                let first = layout.first_folder(&folder, spec, case.files.weights(), 7).unwrap();
                let dry = DryRun::training(spec, &settings, 1).unwrap();
                let device = cpu(dry.peak_bytes());
                let mut trainer = case.trainer(&device, &settings, &first);
                let plain = case.expected["plain_loss"].as_f64().unwrap();
                let (loss, _) = trainer.accumulate(&[case.batch()]).unwrap();
                let tolerance = if weight_type.is_some() { 0.4 } else { 1e-4 };
                near(&format!("{} {start:?} {weight_type:?}", case.name), loss, plain, tolerance);
            }
        }
    }
}

#[test]
fn a_matrix_has_no_more_singular_values_than_its_shorter_side() {
    let cases = cases();
    let case = &cases[0];
    let config = AdapterConfig { rank: 13, ..case.config(EXACT) };
    let error = AdapterLayout::new(&config, case.files.spec()).unwrap_err().to_string();
    assert!(error.contains("k_proj") && error.contains("12") && error.contains("rank_pattern"), "{error}");
}
