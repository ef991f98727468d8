//! Decoding with a cache against the whole sequence at once.

mod common;

use common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device, Dry, IGNORED_TARGET};
use plimsoll_model::ModelSpec;
use plimsoll_step::{DecodeSettings, Decoder, Evaluator, MicroBatch, Precision, StepError};

fn decoder<D: Device>(device: &D, spec: ModelSpec, settings: DecodeSettings) -> Decoder<'_, D> {
    let mut decoder = Decoder::new(device, spec, settings).unwrap();
    decoder
        .load::<StepError>(|p, dtype, out| {
            write_values(&values(p), dtype, out);
            Ok(())
        })
        .unwrap();
    decoder
}

fn settings(prompt_chunk_tokens: u64) -> DecodeSettings {
    DecodeSettings { precision: Precision::F32, cache: DType::F32, context: 20, prompt_chunk_tokens }
}

fn device() -> Cpu {
    Cpu::new(1 << 20, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

fn loss(logits: &[f32], target: u32) -> f64 {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - best).exp()).sum();
    f64::from(best) + sum.ln() - f64::from(logits[target as usize])
}

#[test]
fn token_by_token_gives_the_losses_of_the_whole() {
    for spec in families() {
        let (tokens, _) = tokens(4, 1, 16);
        let device = device();
        let mut evaluator = Evaluator::new(&device, spec.clone(), Precision::F32, 16, 16).unwrap();
        evaluator
            .load::<StepError>(|p, dtype, out| {
                write_values(&values(p), dtype, out);
                Ok(())
            })
            .unwrap();
        let other = self::device();
        let mut one = decoder(&other, spec, settings(5));
        for last in 1..16 {
            let mut targets = vec![IGNORED_TARGET; 16];
            targets[last - 1] = tokens[last];
            let batch = MicroBatch { tokens: &tokens, targets: &targets };
            let (sum, count) = evaluator.losses(1, &batch).unwrap();
            assert_eq!(count, 1);
            let logits = one.append(&tokens[last - 1..last]).unwrap();
            assert!((loss(&logits, tokens[last]) - sum).abs() < 1e-4, "{last}");
        }
    }
}

/// A narrow cache moves a token's loss a little, and plans what it takes.
#[test]
fn a_narrow_cache_stays_near_f32() {
    let (tokens, _) = tokens(4, 1, 16);
    let losses = |cache| {
        let settings = DecodeSettings { cache, ..settings(5) };
        let dry = Dry::new();
        let _planned = Decoder::new(&dry, llama(), settings).unwrap();
        let device = device();
        let mut decoder = decoder(&device, llama(), settings);
        let live = device.arena().ledger().live().total();
        assert_eq!(live, dry.arena().ledger().live().total());
        let loss = |pair: &[u32]| loss(&decoder.append(&pair[..1]).unwrap(), pair[1]);
        (live, tokens.windows(2).map(loss).collect::<Vec<_>>())
    };
    let (wide, exact) = losses(DType::F32);
    let (narrow, rounded) = losses(DType::Bf16);
    // Three layers of 20 keys and values of 12, in half the bytes, rounded up to lines of 64.
    assert_eq!(wide - narrow, 3 * 2 * (20 * 12 * 4 - 512));
    assert_ne!(exact, rounded);
    assert!(exact.iter().zip(&rounded).all(|(a, b)| (a - b).abs() < 0.1), "{exact:?} {rounded:?}");
}

#[test]
fn prompts_in_chunks_give_the_same_next_token() {
    let (tokens, _) = tokens(6, 1, 17);
    let logits = |chunk| {
        let device = device();
        decoder(&device, llama(), settings(chunk)).append(&tokens).unwrap()
    };
    let whole = logits(17);
    for chunk in [1, 2, 5, 16] {
        for (a, b) in whole.iter().zip(logits(chunk)) {
            assert!((a - b).abs() < 1e-4, "{chunk}: {a} {b}");
        }
    }
}

#[test]
fn the_context_ends_with_an_error_and_can_be_cut_back() {
    let device = device();
    let mut decoder = decoder(&device, llama(), settings(8));
    let first = decoder.append(&[1, 2, 3]).unwrap();
    let error = decoder.append(&[0; 18]).unwrap_err().to_string();
    assert_eq!(error, "21 tokens do not fit the context of 20");
    decoder.truncate(2);
    assert_eq!(decoder.append(&[3]).unwrap(), first);
}

#[test]
fn planned_and_measured_peaks_are_equal() {
    let dry = Dry::new();
    let mut planned = Decoder::new(&dry, llama(), settings(8)).unwrap();
    planned.append(&[0; 11]).unwrap();
    planned.append(&[0]).unwrap();
    let device = device();
    let mut real = decoder(&device, llama(), settings(8));
    real.append(&[5; 11]).unwrap();
    real.append(&[7]).unwrap();
    assert_eq!(device.arena().high_water(), dry.arena().high_water());
}
