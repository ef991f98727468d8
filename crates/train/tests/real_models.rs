//! Real models against PyTorch's values. SmolLM2 is fetched by `examples/get-smollm2`, the larger ones by
//! `docs/bench/real-models`; of one that is not there these tests say so and check nothing.

use std::path::PathBuf;
use std::sync::Arc;

use plimsoll_data::{EvalWindows, IGNORED_TARGET, targets};
use plimsoll_device::{Cpu, CpuOptions, DType, Device, DeviceTraits};
use plimsoll_generate::{GenerateError, Limits, Sampler, SamplerSettings, Session};
use plimsoll_memory::Tier;
use plimsoll_model::{ModelError, ModelFiles, Parameter};
use plimsoll_parallel::DryRanks;
use plimsoll_parallel::Solo;
use plimsoll_plan::{DryRun, EvaluationPass};
use plimsoll_step::{
    Checkpointing, DecodeSettings, Decoder, EvaluateSettings, Evaluator, GradientClipping, MicroBatch,
    OptimizerSettings, Precision, StepError, StepSettings, Trainer, WeightStorage,
};
use serde_json::Value;

/// A model and its reference: `tests/data/real/NAME.json`, as `docs/bench/pytorch_reference.py` writes it.
struct Real {
    name: &'static str,
    files: ModelFiles,
    reference: Value,
}

/// Names and files, in `models`.
const MODELS: [(&str, &str); 3] = [
    ("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    ("qwen", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    ("gemma", "gemma-3-270m-q4_k_m.gguf"),
];

/// The models that are there, and a word on standard error for each of the others.
fn models() -> Vec<Real> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    for (name, file) in MODELS {
        let path = root.join("../../models").join(file);
        if !path.exists() {
            let script = if name == "smollm2" { "examples/get-smollm2" } else { "docs/bench/real-models" };
            eprintln!("skipped: {} is not there; {script} fetches it", path.display());
            continue;
        }
        let reference = std::fs::read(root.join(format!("tests/data/real/{name}.json"))).unwrap();
        let reference = serde_json::from_slice(&reference).unwrap();
        found.push(Real { name, files: ModelFiles::open(&path).unwrap(), reference });
    }
    found
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn load(
    files: &ModelFiles,
) -> impl FnMut(
    &plimsoll_model::Parameter,
    std::ops::Range<u64>,
    plimsoll_device::DType,
    &mut [u8],
) -> Result<(), Failure> {
    |p, rows, dtype, out| Ok(files.weights().read_rows_into(p, rows, dtype, out)?)
}

#[derive(Debug)]
#[allow(dead_code)]
enum Failure {
    Step(StepError),
    Model(ModelError),
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Failure {
        Failure::Step(error)
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Failure {
        Failure::Model(error)
    }
}

fn cpu(bytes: u64) -> Cpu {
    Cpu::new(bytes, CpuOptions::default()).unwrap()
}

#[test]
fn token_ids_are_identical() {
    for Real { name, files, reference } in models() {
        let tokenizer = files.tokenizer().unwrap();
        for case in reference["tokenizer_cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), ids(&case["ids"]), "{name}: {text:?}");
        }
        assert_eq!(
            tokenizer.encode(reference["text"].as_str().unwrap()).unwrap(),
            ids(&reference["token_ids"])
        );
        // Saved and read again it is the same.
        let folder = tempfile::tempdir().unwrap();
        tokenizer.save(folder.path()).unwrap();
        let again = plimsoll_model::tokenizer::Tokenizer::from_hf_dir(folder.path()).unwrap();
        assert_eq!(again.encode(reference["text"].as_str().unwrap()).unwrap(), ids(&reference["token_ids"]));
        assert_eq!((again.bos_token(), again.eos_tokens()), (tokenizer.bos_token(), tokenizer.eos_tokens()));
    }
}

#[test]
fn the_loss_of_a_text_is_that_of_the_reference() {
    for Real { name, files, reference } in models() {
        let tokens = ids(&reference["token_ids"]);
        let length = tokens.len();
        let spec = files.spec().clone();
        let types = |p: &Parameter| files.weights().inference_dtype(p, DType::F32);
        let pass = EvaluationPass {
            device: DeviceTraits::CPU,
            precision: Precision::F32,
            storage: WeightStorage::new(&types),
            batch_size: 1,
            length: 512,
            loss_chunk_tokens: 512,
            samples: false,
        };
        let dry = DryRun::evaluation(&spec, DryRanks::new(0, 1), pass).unwrap();
        let device = cpu(dry.peak_bytes());
        let mut evaluator = Evaluator::new(
            &device,
            &Arc::default(),
            spec,
            EvaluateSettings { precision: Precision::F32, longest: 512, loss_chunk_tokens: 512 },
            WeightStorage::new(&types),
        )
        .unwrap();
        evaluator.load(load(&files)).unwrap();
        let windows = EvalWindows::new(tokens, 512);
        let (mut sum, mut count) = (0.0, 0);
        for i in 0..windows.len() {
            let tokens = windows.window(i);
            let targets = targets(tokens, tokens.len());
            let (loss, n) = evaluator.losses(1, &MicroBatch::new(tokens, &targets)).unwrap();
            (sum, count) = (sum + loss, count + n);
        }
        let expected = reference["mean_loss_windows_512"].as_f64().unwrap();
        assert_eq!(count as usize, length - windows.len(), "{name}");
        assert!((sum / count as f64 - expected).abs() < 2e-4, "{name}: {} {expected}", sum / count as f64);
        assert_eq!(device.arena().high_water(), dry.peak_bytes());
    }
}

#[test]
fn gradients_and_steps_are_those_of_the_reference() {
    for Real { name, files, reference } in models() {
        let n = reference["step_tokens"].as_u64().unwrap() as usize;
        let tokens = &ids(&reference["token_ids"])[..n];
        let mut labels = tokens[1..].to_vec();
        labels.push(IGNORED_TARGET);
        let batch = MicroBatch::new(tokens, &labels);
        let settings = StepSettings {
            checkpointing: Checkpointing::Full,
            loss_chunk_tokens: 64,
            optimizer: OptimizerSettings { decay_norms_and_biases: true, ..OptimizerSettings::default() },
            clipping: GradientClipping::GlobalNorm(1.0),
            ..StepSettings::new(1, n as u64)
        };
        let spec = files.spec().clone();
        let dry = DryRun::training(&spec, &settings, 1).unwrap();
        let device = cpu(dry.peak_bytes());
        let mut trainer = Trainer::new(&device, Arc::default(), spec.clone(), settings, &Solo).unwrap();
        trainer.load(load(&files)).unwrap();
        trainer.accumulate(&[batch]).unwrap();
        for p in spec.parameters() {
            let gradient = device.read_f32(trainer.gradient(&p).unwrap()).unwrap();
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            let error = (norm / reference["gradient_norms"][&p.name].as_f64().unwrap() - 1.0).abs();
            // The reference itself, computed in f32, is up to 3.1e-4 (SmolLM2) from the same in f64.
            assert!(error < 1e-3, "{name} {}: {error:e}", p.name);
        }
        let losses = reference["loss_per_step"].as_array().map_or(&[][..], |losses| &losses[..5]);
        for (i, expected) in losses.iter().enumerate() {
            let outcome = trainer.step(&[batch], 1e-5).unwrap();
            assert!(
                (outcome.loss - expected.as_f64().unwrap()).abs() < 2e-3,
                "{name} {i}: {} {expected}",
                outcome.loss
            );
            let norm = reference["grad_global_norm_per_step"][i].as_f64().unwrap();
            assert!(
                (outcome.grad_norm / norm - 1.0).abs() < 1e-3,
                "{name} {i}: {} {norm}",
                outcome.grad_norm
            );
        }
        assert_eq!(device.arena().high_water(), dry.peak_bytes());
    }
}

#[test]
fn greedy_continuations_are_identical() {
    for Real { name, files, reference } in models() {
        let spec = files.spec().clone();
        let (precision, cache) = (Precision::F32, DType::F32);
        let settings = DecodeSettings {
            precision,
            cache,
            cache_tier: Tier::Device,
            context: 128,
            prompt_chunk_tokens: 512,
            sequences: 1,
            pages: None,
            drafted_tokens: 0,
        };
        let types = |p: &Parameter| files.weights().inference_dtype(p, DType::F32);
        let device =
            cpu(DryRun::generation(&spec, settings, WeightStorage::new(&types), 100).unwrap().peak_bytes());
        let mut decoder =
            Decoder::new(&device, &Arc::default(), spec, settings, WeightStorage::new(&types)).unwrap();
        decoder.load(load(&files)).unwrap();
        let tokenizer = files.tokenizer().unwrap();
        let mut session = Session::new(decoder, &settings);
        for case in reference["greedy"].as_array().unwrap() {
            let expected = ids(&case["output_ids"]);
            let mut sampler = Sampler::new(&SamplerSettings::default()).unwrap();
            let limits = Limits { max_tokens: expected.len(), ..Limits::default() };
            let prompt = ids(&case["prompt_ids"]);
            let show = |_: &str| Ok::<(), GenerateError>(());
            let generated =
                session.generate(&tokenizer, &prompt, &mut sampler, &limits, &|| false, show).unwrap();
            assert_eq!(generated.tokens, expected, "{name}: {}", case["prompt"]);
        }
    }
}
