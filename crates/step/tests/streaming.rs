//! Weights that live on disk give the bits of those that are always on the device, in the memory that a dry run finds,
//! each block once in a pass.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use crate::common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device, DeviceTraits, Dry};
use plimsoll_disk::{ALIGNMENT, DiskError, LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tag, Tier};
use plimsoll_model::{BlockId, ModelSpec, Parameter, Role, StoredWeight, StoredWeights};
use plimsoll_step::{
    DecodeSettings, Decoder, EvaluateSettings, Evaluator, ExpertTraffic, MicroBatch, Precision, Residency,
    StepError, WeightOffload, WeightStorage,
};

/// A device with memory of its own.
const APART: DeviceTraits = DeviceTraits { unified: false, alignment: 256, cuda: false };

const TYPES: &dyn Fn(&Parameter) -> DType = &|_| DType::F32;

fn is_matrix(p: &Parameter) -> bool {
    let stays = p.role == Role::PositionEmbedding || p.role.is_small_matrix();
    p.shape.len() >= 2 && !stays
}

/// A file with some of the model's matrices, at places of no particular alignment.
fn model_file(folder: &Path, spec: &ModelSpec, chosen: &dyn Fn(&Parameter) -> bool) -> StoredWeights {
    let (path, mut bytes, mut stored) = (folder.join("model"), vec![0xff; 36], HashMap::new());
    for p in spec.parameters().into_iter().filter(is_matrix).filter(chosen) {
        let mut values_of = vec![0; 4 * p.elements() as usize];
        write_values(&values(&p), DType::F32, &mut values_of);
        let start = bytes.len() as u64;
        bytes.extend(values_of);
        let place = StoredWeight { path: path.clone(), bytes: start..bytes.len() as u64, dtype: DType::F32 };
        stored.insert((p.block, p.role), place);
        bytes.extend([0xff; 20]);
    }
    File::create(&path).unwrap().write_all(&bytes).unwrap();
    stored
}

fn on_disk(in_files: &StoredWeights, residency: Residency) -> WeightStorage<'_> {
    let offload = WeightOffload { tier: Tier::Disk, in_files: Some(in_files), residency, host_layers: 0 };
    WeightStorage { offload: Some(offload), ..WeightStorage::new(TYPES) }
}

fn residency(layers: u32, head: bool) -> Residency {
    Residency::Spread { layers, head, expert_slots: 0 }
}

fn settings() -> DecodeSettings {
    DecodeSettings {
        precision: Precision::F32,
        cache: DType::F32,
        cache_tier: Tier::Device,
        context: 20,
        prompt_chunk_tokens: 5,
        sequences: 1,
        pages: None,
        drafted_tokens: 0,
    }
}

fn cpu(bytes: u64) -> Cpu {
    Cpu::new(bytes, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

fn tiers(folder: &Path, bytes: u64) -> Arc<LowerTiers> {
    with_host(folder, bytes, 0)
}

fn with_host(folder: &Path, bytes: u64, host: u64) -> Arc<LowerTiers> {
    let settings = SpillSettings { folder: folder.to_owned(), budget: Some(bytes), direct: true };
    Arc::new(LowerTiers::open(Region::new(host).unwrap(), bytes, &settings).unwrap())
}

/// A prompt of several passes, and tokens one by one.
fn logits(decoder: &mut Decoder<'_>) -> Vec<Vec<f32>> {
    let (tokens, _) = tokens(4, 1, 16);
    let prompts = [&tokens[..12], &tokens[12..13], &tokens[13..14], &tokens[14..]];
    prompts.map(|tokens| decoder.append(tokens).unwrap()).to_vec()
}

/// The planned peak and the logits of a decoder in just as much memory, and on just as much disk.
fn decoded(folder: &Path, spec: &ModelSpec, storage: WeightStorage<'_>) -> (u64, Vec<Vec<f32>>) {
    decoded_on(DeviceTraits::CPU, folder, spec, storage)
}

/// The same on a device of these traits.
fn decoded_on(
    traits: DeviceTraits,
    folder: &Path,
    spec: &ModelSpec,
    storage: WeightStorage<'_>,
) -> (u64, Vec<Vec<f32>>) {
    let (dry, none) = (Dry::new().standing_for(traits), Arc::new(LowerTiers::dry()));
    logits(&mut Decoder::new(&dry, &none, spec.clone(), settings(), storage).unwrap());
    let (planned, on_disk) = (dry.arena().high_water(), none.disk().high_water());
    let host = none.host().high_water();
    let (device, tiers) = (cpu(planned).standing_for(traits), with_host(folder, on_disk, host));
    let mut decoder = Decoder::new(&device, &tiers, spec.clone(), settings(), storage).unwrap();
    decoder.load(fill).unwrap();
    let logits = logits(&mut decoder);
    assert_eq!(tiers.host().high_water(), host);
    assert_eq!((device.arena().high_water(), tiers.disk().high_water()), (planned, on_disk));
    (planned, logits)
}

fn losses(evaluator: &mut Evaluator<'_>) -> Vec<f64> {
    [(3, 2), (5, 1)]
        .map(|(seed, batch)| {
            let (tokens, targets) = tokens(seed, batch, 9);
            evaluator.losses(batch, &MicroBatch::new(&tokens, &targets)).unwrap().0
        })
        .to_vec()
}

fn evaluated(folder: &Path, spec: &ModelSpec, storage: WeightStorage<'_>) -> (u64, Vec<f64>) {
    let settings = EvaluateSettings { precision: Precision::F32, longest: 9, loss_chunk_tokens: 4 };
    let (dry, none) = (Dry::new(), Arc::new(LowerTiers::dry()));
    losses(&mut Evaluator::new(&dry, &none, spec.clone(), settings, storage).unwrap());
    let (planned, on_disk) = (dry.arena().high_water(), none.disk().high_water());
    let (device, tiers) = (cpu(planned), tiers(folder, on_disk));
    let mut evaluator = Evaluator::new(&device, &tiers, spec.clone(), settings, storage).unwrap();
    evaluator.load(fill).unwrap();
    let losses = losses(&mut evaluator);
    assert_eq!((device.arena().high_water(), tiers.disk().high_water()), (planned, on_disk));
    (planned, losses)
}

#[test]
fn weights_on_disk_give_the_same_bits_in_the_planned_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path();
    // A vocabulary of several pieces, too.
    let large = ModelSpec { vocab_size: 5000, tie_word_embeddings: false, ..llama() };
    for spec in families().into_iter().chain([ModelSpec { vocab_size: 3100, ..llama() }, large]) {
        let resident = WeightStorage::new(TYPES);
        let (logits, losses) = (decoded(path, &spec, resident).1, evaluated(path, &spec, resident).1);
        let in_file: [&dyn Fn(&Parameter) -> bool; 3] =
            [&|_| true, &|_| false, &|p| matches!(p.role, Role::QProj | Role::UpProj | Role::TokenEmbedding)];
        for in_file in in_file {
            let stored = model_file(path, &spec, in_file);
            for kept in [residency(0, false), residency(0, true), residency(2, false), residency(3, false)] {
                let storage = on_disk(&stored, kept);
                assert_eq!(decoded(path, &spec, storage).1, logits, "{kept:?}");
                assert_eq!(evaluated(path, &spec, storage).1, losses, "{kept:?}");
                assert_eq!(decoded_on(APART, path, &spec, storage).1, logits, "{kept:?}");
            }
        }
    }
}

#[test]
fn less_memory_is_planned_the_fewer_layers_stay() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let spec = ModelSpec { num_layers: 12, ..llama() };
    let stored = model_file(folder.path(), &spec, &|_| true);
    let peak = |layers| decoded(folder.path(), &spec, on_disk(&stored, residency(layers, true))).0;
    assert!(peak(0) < peak(4) && peak(4) < peak(7), "{} {} {}", peak(0), peak(4), peak(7));
    let (dry, none) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let storage = on_disk(&stored, residency(0, false));
    let _decoder = Decoder::new(&dry, &none, spec.clone(), settings(), storage).unwrap();
    let live = dry.arena().ledger().live();
    // Two buffers for the pages of the largest layer, or of the table, and room to begin with a whole page.
    let layer = |i| {
        let own = stored
            .iter()
            .filter(|((block, _), _)| *block == BlockId::Layer(i))
            .map(|(_, place)| &place.bytes);
        let (start, end) = own.fold((u64::MAX, 0), |(a, b), bytes| (a.min(bytes.start), b.max(bytes.end)));
        end.next_multiple_of(ALIGNMENT) - start / ALIGNMENT * ALIGNMENT
    };
    let largest = (0..12).map(layer).max().unwrap();
    assert_eq!(live.get(Tag::Staging), 2 * (largest + ALIGNMENT));
    // Norms are all that stays, and nothing is written.
    assert_eq!(live.get(Tag::Weights), (2 * 12 + 1) * 128);
    assert_eq!(none.disk().high_water(), 0);
}

#[test]
fn every_block_comes_once_in_a_pass() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let spec = llama();
    let stored = model_file(folder.path(), &spec, &|p| p.block != BlockId::Layer(1));
    let storage = on_disk(&stored, residency(0, false));
    let none = Arc::new(LowerTiers::dry());
    let dry = Dry::new();
    let mut planned = Decoder::new(&dry, &none, spec.clone(), settings(), storage).unwrap();
    let (device, tiers) = (cpu(1 << 20), tiers(folder.path(), none.disk().high_water()));
    let mut decoder = Decoder::new(&device, &tiers, spec.clone(), settings(), storage).unwrap();
    decoder.load(fill).unwrap();
    let meter = tiers.meter().unwrap();
    // The row of the token is read beside them.
    let row = 4 * spec.hidden_size;
    let mut before = meter.totals().bytes_read;
    let mut of_pass = Vec::new();
    for _ in 0..4 {
        let planned_before = dry.moved();
        planned.append(&[1]).unwrap();
        decoder.append(&[1]).unwrap();
        // What was prefetched for the next pass has arrived when this one is forgotten.
        decoder.truncate(0);
        planned.truncate(0);
        let now = meter.totals().bytes_read;
        of_pass.push((dry.moved().less(planned_before).read, now - before - row));
        before = now;
    }
    let planned: u64 = of_pass[1..].iter().map(|(planned, _)| planned).sum();
    let measured: u64 = of_pass[1..].iter().map(|(_, measured)| measured).sum();
    // Files are read in whole pages; the meter counts the bytes that were asked for.
    assert!(measured <= planned && measured * 2 > planned, "{of_pass:?}");
    assert!(of_pass[1..].iter().all(|(planned, _)| *planned == of_pass[1].0), "{of_pass:?}");
}

#[test]
fn a_disk_that_fails_once_is_an_error_once() {
    fails_once(biased(), residency(0, false));
}

/// An expert that could not be read is read again, and is not what its slot held.
#[test]
fn an_expert_that_could_not_be_read_is_read_again() {
    fails_once(mixture(), Residency::Spread { layers: 3, head: true, expert_slots: 2 });
}

fn fails_once(spec: ModelSpec, residency: Residency) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let stored = model_file(folder.path(), &spec, &|_| true);
    let storage = on_disk(&stored, residency);
    let exact = decoded(folder.path(), &spec, WeightStorage::new(TYPES)).1;
    let (device, tiers) = (cpu(1 << 20), tiers(folder.path(), 0));
    let mut decoder = Decoder::new(&device, &tiers, spec, settings(), storage).unwrap();
    decoder.load(fill).unwrap();
    let live = device.arena().ledger().live().total();
    let path = folder.path().join("model");
    let whole = std::fs::read(&path).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    for _ in 0..3 {
        file.set_len(whole.len() as u64 / 2).unwrap();
        let error = decoder.append(&[1, 2]).unwrap_err();
        assert!(matches!(error, StepError::Disk(DiskError::EndOfFile { .. })), "{error}");
        decoder.truncate(0);
        std::fs::write(&path, &whole).unwrap();
        // What was prefetched of the short file is an error once more at most.
        let _ = decoder.append(&[1, 2]);
        decoder.truncate(0);
    }
    assert_eq!(logits(&mut decoder), exact);
    assert_eq!(device.arena().ledger().live().total(), live);
}

#[test]
fn layers_that_stay_are_spread_and_the_head_stays_if_asked() {
    let spec = ModelSpec { num_layers: 10, ..llama() };
    let away = |layers, head, spec: &ModelSpec| -> Vec<BlockId> {
        spec.blocks().filter(|block| !residency(layers, head).keeps(spec, *block)).collect()
    };
    assert_eq!(away(10, true, &spec), []);
    assert_eq!(away(12, false, &spec), [BlockId::Embedding, BlockId::Head]);
    let half: Vec<BlockId> = [0, 2, 4, 6, 8].into_iter().map(BlockId::Layer).collect();
    assert_eq!(away(5, true, &spec), half);
    // An embedding that is no head is looked up where it is.
    let untied = ModelSpec { tie_word_embeddings: false, ..spec };
    assert_eq!(away(10, true, &untied), [BlockId::Embedding]);
}

/// Some layers on the device, some on the host and the rest in the model's file: the same bits, in the memory that was planned.
#[test]
fn weights_live_on_the_device_the_host_and_in_a_file_together() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path();
    for spec in families() {
        let spec = deeper(spec, 7);
        let logits = decoded(path, &spec, WeightStorage::new(TYPES)).1;
        let stored = model_file(path, &spec, &|_| true);
        let mut taken = Vec::new();
        for host_layers in [0, 2, 5] {
            let offload = WeightOffload {
                tier: Tier::Disk,
                in_files: Some(&stored),
                residency: residency(2, false),
                host_layers,
            };
            let storage = WeightStorage { offload: Some(offload), ..WeightStorage::new(TYPES) };
            assert_eq!(decoded_on(APART, path, &spec, storage).1, logits, "{host_layers}");
            let (dry, tiers) = (Dry::new().standing_for(APART), Arc::new(LowerTiers::dry()));
            let mut decoder = Decoder::new(&dry, &tiers, spec.clone(), settings(), storage).unwrap();
            decoder.append(&[0]).unwrap();
            let before = dry.moved();
            decoder.append(&[0]).unwrap();
            let moved = dry.moved().less(before);
            taken.push((tiers.host().ledger().live().get(Tag::Weights), moved.read, moved.copied_in));
        }
        let [(none, all, _), (some, fewer, _), (most, least, copied)] = taken[..] else { panic!() };
        assert_eq!((none, least), (0, 0));
        assert!(some > 0 && most > some && all > fewer && fewer > 0 && copied > 0, "{taken:?}");
    }
}

/// Experts that come when a token is sent to them, in however few slots, give the bits of those that are always there; and what the
/// slots hold is not read again.
#[test]
fn experts_come_when_they_are_needed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for spec in [mixture(), grouped_mixture()] {
        let here = decoded(path, &spec, WeightStorage::new(TYPES)).1;
        let experts = spec.experts.as_ref().unwrap().count as u32 * spec.num_layers;
        for (traits, in_file) in [(DeviceTraits::CPU, true), (DeviceTraits::CPU, false), (APART, true)] {
            let stored = model_file(path, &spec, &|_| in_file);
            let (mut taken, mut read) = (Vec::new(), Vec::new());
            for (expert_slots, layers) in [(1, 0), (3, 3), (4, 1), (experts, 3)] {
                let offload = WeightOffload {
                    tier: Tier::Disk,
                    in_files: Some(&stored),
                    residency: Residency::Spread { layers, head: true, expert_slots },
                    host_layers: 0,
                };
                let storage = WeightStorage { offload: Some(offload), ..WeightStorage::new(TYPES) };
                let (planned, logits) = decoded_on(traits, path, &spec, storage);
                assert_eq!(logits, here, "{} {expert_slots}", spec.name);
                taken.push(planned);
                read.push(traffic(path, &spec, storage));
            }
            // More slots take more memory, and spare reads.
            assert!(taken[1] < taken[3]);
            assert!(read.iter().all(|traffic| traffic.used == read[0].used));
            assert!(read[0].read > read[3].read && read[3].read <= 3 * u64::from(experts), "{read:?}");
            assert!(read[0].bytes > read[3].bytes);
        }
    }
}

/// What the prompts of [`logits`] have come and go.
fn traffic(folder: &Path, spec: &ModelSpec, storage: WeightStorage<'_>) -> ExpertTraffic {
    let (device, tiers) = (cpu(64 << 20), tiers(folder, 64 << 20));
    let mut decoder = Decoder::new(&device, &tiers, spec.clone(), settings(), storage).unwrap();
    decoder.load(fill).unwrap();
    logits(&mut decoder);
    decoder.expert_traffic().unwrap()
}
