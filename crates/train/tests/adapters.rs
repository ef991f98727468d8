//! LoRA adapters as PEFT writes them, on tiny random models, against what PyTorch in f32 says of them. Adapters and
//! values were made by `docs/bench/lora_fixtures.py`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::{Cpu, CpuOptions, DType, Device, DeviceTraits, IGNORED_TARGET};
use plimsoll_model::adapter::{AdapterSet, MergeSet};
use plimsoll_model::{AdapterLayout, ModelFiles, ModelSpec, Parameter, Role, Target, Transcoder};
use plimsoll_parallel::DryRanks;
use plimsoll_parallel::Solo;
use plimsoll_plan::{DryRun, EvaluationPass};
use plimsoll_step::{
    Adapters, Checkpointing, EvaluateSettings, Evaluator, MicroBatch, NormSource, Precision, StepSettings,
    Trainer, TrainingMethod, UpdateTiming, WeightStorage,
};
use plimsoll_train::TrainError;
use serde_json::Value;

struct Case {
    name: String,
    folder: PathBuf,
    files: ModelFiles,
    expected: Value,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let read = |path: PathBuf| -> Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(data.join("adapters")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 12);
    let case = |folder: PathBuf| {
        let expected = read(folder.join("expected.json"));
        let family = data.join("families").join(expected["family"].as_str().unwrap());
        let ids = read(family.join("expected.json"))["tokens"].clone();
        let tokens: Vec<u32> = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let targets = tokens[1..].iter().copied().chain([IGNORED_TARGET]).collect();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        Case { name, folder, files: ModelFiles::open(&family).unwrap(), expected, tokens, targets }
    };
    folders.into_iter().map(case).collect()
}

impl Case {
    fn spec(&self) -> &ModelSpec {
        self.files.spec()
    }

    fn batch(&self) -> MicroBatch<'_> {
        MicroBatch::new(&self.tokens, &self.targets)
    }

    fn set(&self) -> AdapterSet {
        AdapterSet::open(&[(&self.folder, 1.0)], self.spec()).unwrap()
    }

    /// The layout that the adapter's own configuration asks for.
    fn layout(&self) -> AdapterLayout {
        let set = self.set();
        AdapterLayout::new(set.adapters()[0].0.config(), self.spec()).unwrap()
    }

    fn settings(&self, layout: AdapterLayout) -> StepSettings {
        let adapters =
            Adapters { layout, dropout: 0.0, weight_types: HashMap::new(), in_files: HashMap::new() };
        StepSettings {
            loss_chunk_tokens: 7,
            method: TrainingMethod::Adapters(Arc::new(adapters)),
            ..StepSettings::new(1, self.tokens.len() as u64)
        }
    }

    fn trainer<'d>(&self, device: &'d Cpu, settings: &StepSettings) -> Trainer<'d> {
        let layout = &settings.method.adapters().unwrap().layout;
        let set = AdapterSet::for_layout(&self.folder, self.spec(), layout).unwrap();
        let mut trainer =
            Trainer::new(device, Arc::default(), self.spec().clone(), settings.clone(), &Solo).unwrap();
        let base = self.files.weights();
        trainer
            .load::<TrainError>(|p, rows, dtype, out| {
                Ok(set.read_rows_into(self.spec(), base, p, rows, dtype, out)?)
            })
            .unwrap();
        trainer
    }
}

fn cpu(bytes: u64) -> Cpu {
    Cpu::new(bytes, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

fn near(name: &str, got: f64, wanted: f64, tolerance: f64) {
    assert!((got - wanted).abs() < tolerance, "{name}: {got} instead of {wanted}");
}

#[test]
fn losses_are_those_of_pytorch() {
    for case in cases() {
        let (set, spec) = (case.set(), case.spec());
        let length = case.tokens.len() as u64;
        let types = |_: &Parameter| DType::F32;
        let storage = WeightStorage { adapters: Some(set.layout()), ..WeightStorage::new(&types) };
        let pass = EvaluationPass {
            device: DeviceTraits::CPU,
            precision: Precision::F32,
            storage,
            batch_size: 1,
            length,
            loss_chunk_tokens: 64,
            samples: false,
        };
        let dry = DryRun::evaluation(spec, DryRanks::new(0, 1), pass).unwrap();
        let device = cpu(dry.peak_bytes());
        let mut evaluator = Evaluator::new(
            &device,
            &Arc::default(),
            spec.clone(),
            EvaluateSettings { precision: Precision::F32, longest: length, loss_chunk_tokens: 64 },
            storage,
        )
        .unwrap();
        let base = case.files.weights();
        evaluator
            .load::<TrainError>(
                |p, rows, dtype, out| Ok(set.read_rows_into(spec, base, p, rows, dtype, out)?),
            )
            .unwrap();
        let (sum, count) = evaluator.losses(1, &case.batch()).unwrap();
        near(&case.name, sum / count as f64, case.expected["loss"].as_f64().unwrap(), 1e-5);
        assert_eq!(device.arena().high_water(), dry.peak_bytes(), "{}", case.name);
    }
}

/// The name under which PEFT has the gradient of a parameter.
fn peft_name(spec: &ModelSpec, p: &Parameter) -> String {
    match p.role {
        // Parts of one stored tensor bear a name after it.
        Role::Lora(..) => match p.name.split_once(".weight.") {
            Some((whole, _)) => format!("{whole}.weight"),
            None => match p.name.split_once("lora_magnitude_vector") {
                Some((module, _)) => format!("{module}lora_magnitude_vector.weight"),
                None => p.name.clone(),
            },
        },
        _ => spec.hf_tensor_name(p),
    }
}

#[test]
fn gradients_are_those_of_pytorch_and_plans_hold() {
    for case in cases() {
        for checkpointing in [Checkpointing::None, Checkpointing::Full] {
            let settings = StepSettings { checkpointing, ..case.settings(case.layout()) };
            let dry = DryRun::training(case.spec(), &settings, 1).unwrap();
            let device = cpu(dry.peak_bytes());
            let mut trainer = case.trainer(&device, &settings);
            let (loss, _) = trainer.accumulate(&[case.batch()]).unwrap();
            near(&case.name, loss, case.expected["loss"].as_f64().unwrap(), 1e-5);

            let mut squares: BTreeMap<String, f64> = BTreeMap::new();
            for p in trainer.trained() {
                let gradient = device.read_f32(trainer.gradient(p).unwrap()).unwrap();
                let square: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum();
                *squares.entry(peft_name(case.spec(), p)).or_default() += square;
            }
            let norms = case.expected["gradient_norms"].as_object().unwrap();
            let plain = |name: &str| {
                let name = name.strip_prefix("base_model.model.").unwrap();
                name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
            };
            let wanted: BTreeMap<String, f64> =
                norms.iter().map(|(name, norm)| (plain(name), norm.as_f64().unwrap())).collect();
            let names = |map: &BTreeMap<String, f64>| map.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&squares), names(&wanted), "{}", case.name);
            for (name, wanted) in wanted {
                near(&format!("{} {name}", case.name), squares[&name].sqrt(), wanted, 2e-4 * wanted + 1e-6);
            }
            trainer.step(&[case.batch()], 1e-3).unwrap();
            assert_eq!(device.arena().high_water(), dry.peak_bytes(), "{}", case.name);
        }
    }
}

fn trained_bits(device: &Cpu, trainer: &Trainer<'_>) -> Vec<Vec<u32>> {
    let bits = |p: &Parameter| {
        let values = device.read_f32(trainer.weight(p).unwrap()).unwrap();
        values.iter().map(|x| x.to_bits()).collect()
    };
    trainer.trained().iter().map(bits).collect()
}

#[test]
fn policies_change_no_bit_of_what_is_trained_even_where_inputs_are_dropped() {
    for case in cases() {
        let plain = {
            let mut settings = case.settings(case.layout());
            let adapters = settings.method.adapters().unwrap().clone();
            settings.method = TrainingMethod::Adapters(Arc::new(Adapters { dropout: 0.3, ..adapters }));
            settings
        };
        let run = |settings: &StepSettings| {
            let dry = DryRun::training(case.spec(), settings, 2).unwrap();
            let device = cpu(dry.peak_bytes());
            let mut trainer = case.trainer(&device, settings);
            let losses: Vec<f64> =
                (0..3).map(|_| trainer.step(&[case.batch(), case.batch()], 1e-2).unwrap().loss).collect();
            (losses, trained_bits(&device, &trainer))
        };
        let wanted = run(&plain);
        assert!(wanted.0[2] < wanted.0[0], "{}: {:?}", case.name, wanted.0);
        for settings in [
            StepSettings { checkpointing: Checkpointing::Full, ..plain.clone() },
            StepSettings { checkpointing: Checkpointing::Sqrt, ..plain.clone() },
            StepSettings { update: UpdateTiming::InBackward(NormSource::SecondBackward), ..plain.clone() },
        ] {
            assert!(
                run(&settings) == wanted,
                "{} {:?} {:?}",
                case.name,
                settings.checkpointing,
                settings.update
            );
        }
        // Chunks of tokens drop what the whole would; sums over tokens are cut otherwise, so that bits may differ.
        let chunks = run(&StepSettings { mlp_chunk_tokens: Some(5), ..plain.clone() });
        for (got, wanted) in chunks.0.iter().zip(&wanted.0) {
            near(&case.name, *got, *wanted, 1e-4);
        }
    }
}

#[test]
fn written_adapters_are_those_that_were_read() {
    let place = tempfile::tempdir().unwrap();
    for case in cases() {
        let settings = case.settings(case.layout());
        let dry = DryRun::training(case.spec(), &settings, 1).unwrap();
        let device = cpu(dry.peak_bytes());
        let trainer = case.trainer(&device, &settings);
        let folder = place.path().join(&case.name);
        let layout = &settings.method.adapters().unwrap().layout;
        let values = |p: &Parameter| Ok(trainer.values(p).unwrap());
        layout.write(&folder, case.spec(), values).unwrap();
        let again = AdapterSet::open(&[(&folder, 1.0)], case.spec()).unwrap();
        let (first, second) = (&case.set().adapters()[0].0.clone(), &again.adapters()[0].0);
        assert_eq!(first.low_rank(), second.low_rank(), "{}", case.name);
        // What the library saves of the base beside an adapted embedding is not trained.
        for (name, matrix) in second.replaced() {
            let other = first.replaced().get(name);
            assert!(other.is_none_or(|other| other == matrix), "{} {name}", case.name);
        }
    }
}

#[test]
fn several_adapters_are_added_up() {
    let cases = cases();
    let case = cases.iter().find(|case| case.name == "llama").unwrap();
    let spec = case.spec();
    let folder = case.folder.as_path();
    let loss = |folders: &[(&Path, f32)]| {
        let set = AdapterSet::open(folders, spec).unwrap();
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
        let base = case.files.weights();
        evaluator
            .load::<TrainError>(
                |p, rows, dtype, out| Ok(set.read_rows_into(spec, base, p, rows, dtype, out)?),
            )
            .unwrap();
        evaluator.losses(1, &case.batch()).unwrap().0
    };
    let whole = loss(&[(folder, 1.0)]);
    near("halves", loss(&[(folder, 0.5), (folder, 0.5)]), whole, 1e-4);
    assert!((loss(&[(folder, 0.5)]) - whole).abs() > 1e-3);
}

/// The library unties a trained embedding, so that the head is written as well; reading takes both for one.
#[test]
fn a_trained_embedding_of_a_tied_model_is_written_with_its_head_and_read_again() {
    let cases = cases();
    let case = cases.iter().find(|case| case.name == "llama").unwrap();
    let spec = case.spec();
    assert!(spec.tie_word_embeddings);
    let config = plimsoll_model::AdapterConfig {
        rank: 2,
        modules_to_save: vec!["embed_tokens".to_owned()],
        ..plimsoll_model::AdapterConfig::default()
    };
    let layout = AdapterLayout::new(&config, spec).unwrap();
    let values = |p: &Parameter| (0..p.elements()).map(|i| i as f32 / 64.0).collect::<Vec<f32>>();
    let folder = tempfile::tempdir().unwrap();
    layout.write(folder.path(), spec, |p| Ok(values(p))).unwrap();
    let set = AdapterSet::for_layout(folder.path(), spec, &layout).unwrap();
    for p in layout.trained() {
        let mut bytes = vec![0; 4 * p.elements() as usize];
        set.read_rows_into(spec, case.files.weights(), p, p.all_rows(), DType::F32, &mut bytes).unwrap();
        let wanted: Vec<u8> = values(p).iter().flat_map(|x| x.to_ne_bytes()).collect();
        assert!(bytes == wanted, "{}", p.name);
    }
    let path = folder.path().join("adapter_model.safetensors");
    let file = plimsoll_model::SafetensorsFile::open(&path).unwrap();
    let head = file.bytes("base_model.model.lm_head.weight").unwrap();
    assert_eq!(Some(head), file.bytes("base_model.model.model.embed_tokens.weight"));
    let place = head.as_ptr() as usize - file.bytes(&file.tensors()[0].name).unwrap().as_ptr() as usize;
    drop(file);
    let mut bytes = std::fs::read(&path).unwrap();
    let begin = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[begin + place] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = AdapterSet::open(&[(folder.path(), 1.0)], spec).unwrap_err().to_string();
    assert!(error.contains("embed_tokens") && error.contains("plimsoll merge"), "{error}");
}

/// The library leaves the head as it was where the embedding alone has an adapter, or is trained, and unties them when it
/// merges: so does merging here, and the merged model has the loss of the adapter beside the base.
#[test]
fn merging_an_adapter_of_a_tied_embedding_unties_the_head() {
    let cases = cases();
    let case = cases.iter().find(|case| case.name == "llama-embedding").unwrap();
    let spec = case.spec();
    assert!(spec.tie_word_embeddings);
    let merged_loss = |folder: &Path| {
        let set = MergeSet::open(&[(folder, 1.0)], spec).unwrap();
        let shape = set.spec();
        assert!(!shape.tie_word_embeddings);
        let merged = set.merged(case.files.weights());
        let place = tempfile::tempdir().unwrap();
        let written = place.path().join("merged");
        Transcoder::new(shape, &merged, &mut |_, _| {})
            .write_folder(&written, Target::HuggingFace(DType::F32))
            .unwrap();
        let files = ModelFiles::open(&written).unwrap();
        assert!(!files.spec().tie_word_embeddings);
        let head = files.spec().parameters().into_iter().find(|p| p.role == Role::LmHead).unwrap();
        let embedding = spec.parameters().into_iter().find(|p| p.role == Role::TokenEmbedding).unwrap();
        let read = |files: &ModelFiles, p: &Parameter| {
            let mut bytes = vec![0; 4 * p.elements() as usize];
            files.weights().read_into(p, DType::F32, &mut bytes).unwrap();
            bytes
        };
        assert!(read(&files, &head) == read(&case.files, &embedding));
        assert!(read(&files, &embedding) != read(&case.files, &embedding));
        let device = cpu(1 << 24);
        let mut evaluator = Evaluator::new(
            &device,
            &Arc::default(),
            files.spec().clone(),
            EvaluateSettings { precision: Precision::F32, longest: 64, loss_chunk_tokens: 64 },
            WeightStorage::new(&|_| DType::F32),
        )
        .unwrap();
        evaluator
            .load::<TrainError>(|p, rows, dtype, out| {
                Ok(files.weights().read_rows_into(p, rows, dtype, out)?)
            })
            .unwrap();
        let (sum, count) = evaluator.losses(1, &case.batch()).unwrap();
        sum / count as f64
    };
    near("merged", merged_loss(&case.folder), case.expected["loss"].as_f64().unwrap(), 1e-5);

    // A trained embedding alone, as the library writes it: it cannot be used beside a model that has one matrix for both.
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tied-embedding");
    let error = AdapterSet::open(&[(&data, 1.0)], spec).unwrap_err().to_string();
    assert!(error.contains("embed_tokens") && error.contains("plimsoll merge"), "{error}");
    let expected: Value =
        serde_json::from_slice(&std::fs::read(data.join("expected.json")).unwrap()).unwrap();
    near("trained alone", merged_loss(&data), expected["loss"].as_f64().unwrap(), 1e-5);
}
