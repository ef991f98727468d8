//! Tiny random models of every family, as transformers saves them, against what PyTorch in f32 says of them. The models
//! and values were made by `docs/bench/tiny_models.py`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::{Cpu, CpuOptions, DType, Device, IGNORED_TARGET};
use plimsoll_memory::Tier;
use plimsoll_model::{ModelFiles, Parameter, SaveWriter};
use plimsoll_parallel::Solo;
use plimsoll_plan::DryRun;
use plimsoll_step::{
    Checkpointing, DecodeSettings, Decoder, MicroBatch, Precision, StepError, StepSettings, Trainer,
    WeightStorage,
};
use serde_json::Value;

/// Feed-forward parts, and mixtures of experts.
fn folders() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let all = ["families", "experts"].map(|kind| std::fs::read_dir(data.join(kind)).unwrap());
    let mut folders: Vec<_> = all.into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 30);
    folders
}

fn name(folder: &Path) -> &str {
    folder.file_name().unwrap().to_str().unwrap()
}

fn expected(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn load(
    files: &ModelFiles,
) -> impl FnMut(&Parameter, std::ops::Range<u64>, DType, &mut [u8]) -> Result<(), StepError> {
    |parameter, rows, dtype, out| {
        files.weights().read_rows_into(parameter, rows, dtype, out).unwrap();
        Ok(())
    }
}

fn cpu(bytes: u64) -> Cpu {
    Cpu::new(bytes, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

#[test]
fn losses_and_gradients_are_those_of_pytorch() {
    for folder in folders() {
        let (files, reference) = (ModelFiles::open(&folder).unwrap(), expected(&folder));
        let (spec, tokens) = (files.spec().clone(), ids(&reference["tokens"]));
        let mut targets = tokens[1..].to_vec();
        targets.push(IGNORED_TARGET);
        let balance_loss = reference["router_aux_loss_coef"].as_f64().unwrap_or(0.0);
        for checkpointing in [Checkpointing::None, Checkpointing::Full] {
            let settings = StepSettings {
                checkpointing,
                loss_chunk_tokens: 7,
                balance_loss,
                ..StepSettings::new(1, tokens.len() as u64)
            };
            let dry = DryRun::training(&spec, &settings, 1).unwrap();
            let device = cpu(dry.peak_bytes());
            let mut trainer = Trainer::new(&device, Arc::default(), spec.clone(), settings, &Solo).unwrap();
            trainer.load(load(&files)).unwrap();
            let batch = MicroBatch::new(&tokens, &targets);
            let (loss, _) = trainer.accumulate(&[batch]).unwrap();
            let of_routers = balance_loss * reference["router_aux_loss"].as_f64().unwrap_or(0.0);
            let wanted = reference["loss"].as_f64().unwrap() + of_routers;
            assert!((loss - wanted).abs() < 1e-5, "{}: loss {loss} instead of {wanted}", name(&folder));

            let mut squares: BTreeMap<String, f64> = BTreeMap::new();
            for p in spec.parameters().into_iter().filter(|p| p.role.has_gradient()) {
                let gradient = device.read_f32(trainer.gradient(&p).unwrap()).unwrap();
                for (tensor, rows) in spec.hf_tensors(&p) {
                    let part =
                        &gradient[(rows.start * p.columns()) as usize..(rows.end * p.columns()) as usize];
                    let square: f64 = part.iter().map(|g| f64::from(*g).powi(2)).sum();
                    *squares.entry(tensor).or_default() += square;
                }
            }
            let norms = reference["gradient_norms"].as_object().unwrap();
            assert_eq!(norms.len(), squares.len(), "{}", name(&folder));
            for (tensor, wanted) in norms {
                let (norm, wanted) = (squares[tensor].sqrt(), wanted.as_f64().unwrap());
                let close = (norm - wanted).abs() < 1e-4 * wanted + 1e-6;
                assert!(close, "{} {tensor}: {norm} instead of {wanted}", name(&folder));
            }
            trainer.step(&[batch], 1e-3).unwrap();
            assert_eq!(device.arena().high_water(), dry.peak_bytes(), "{}", name(&folder));
        }
    }
}

#[test]
fn greedy_continuations_are_those_of_pytorch() {
    for folder in folders() {
        // There the rotation of all positions depends on the length so far; a cache keeps what it was.
        if name(&folder) == "llama-dynamic" || name(&folder) == "phi3-longrope" {
            continue;
        }
        let (files, reference) = (ModelFiles::open(&folder).unwrap(), expected(&folder));
        let spec = files.spec().clone();
        let (tokens, greedy) = (ids(&reference["tokens"]), ids(&reference["greedy"]));
        let prompt = reference["prompt_tokens"].as_u64().unwrap() as usize;
        for prompt_chunk_tokens in [4, 512] {
            let (precision, cache, context) = (Precision::F32, DType::F32, 32);
            let settings = DecodeSettings {
                precision,
                cache,
                cache_tier: Tier::Device,
                context,
                prompt_chunk_tokens,
                sequences: 1,
                pages: None,
                drafted_tokens: 0,
            };
            let device = cpu(DryRun::generation(&spec, settings, WeightStorage::new(&|_| DType::F32), 16)
                .unwrap()
                .peak_bytes());
            let mut decoder = Decoder::new(
                &device,
                &Arc::default(),
                spec.clone(),
                settings,
                WeightStorage::new(&|_| settings.precision.weights),
            )
            .unwrap();
            decoder.load(load(&files)).unwrap();
            let mut logits = decoder.append(&tokens[..prompt]).unwrap();
            let mut continuation = Vec::new();
            for _ in 0..greedy.len() {
                let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32;
                continuation.push(best);
                logits = decoder.append(&[best]).unwrap();
            }
            assert_eq!(continuation, greedy, "{}", name(&folder));
        }
    }
}

/// A saved model is the one that was opened: the same shape, and the same tensors as transformers wrote, byte by byte.
#[test]
fn saved_models_are_the_opened_ones() {
    let place = tempfile::tempdir().unwrap();
    for folder in folders() {
        let files = ModelFiles::open(&folder).unwrap();
        let saved = place.path().join(name(&folder));
        SaveWriter::new(files.spec(), DType::F32)
            .write(&saved, |parameter, out: &mut dyn Write| {
                let mut bytes = vec![0; 4 * parameter.elements() as usize];
                files.weights().read_into(parameter, DType::F32, &mut bytes).unwrap();
                out.write_all(&bytes)
            })
            .unwrap();
        let again = ModelFiles::open(&saved).unwrap();
        assert_eq!(again.spec(), files.spec(), "{}", name(&folder));
        let tensors = |folder: &Path| -> BTreeMap<String, Vec<u8>> {
            let file = plimsoll_model::SafetensorsFile::open(&folder.join("model.safetensors")).unwrap();
            file.tensors().iter().map(|t| (t.name.clone(), file.bytes(&t.name).unwrap().to_vec())).collect()
        };
        assert_eq!(tensors(&saved), tensors(&folder), "{}", name(&folder));
    }
}
