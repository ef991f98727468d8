//! Decoding with a cache against the whole sequence at once.

use std::path::Path;
use std::sync::Arc;

use crate::common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device, DeviceTraits, Dry, IGNORED_TARGET};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Arena, Region, Tag, Tier};
use plimsoll_model::adapter::TargetModules;
use plimsoll_model::{
    AdapterConfig, AdapterLayout, AttentionSpec, LatentAttention, ModelSpec, Parameter, Role, RopeSpec,
    SlidingWindow,
};
use plimsoll_step::{
    DecodeSettings, Decoder, EvaluateSettings, Evaluator, MicroBatch, Precision, WeightStorage,
};

/// A decoder whose weights have no values yet.
fn empty(device: &dyn Device, spec: ModelSpec, settings: DecodeSettings) -> Decoder<'_> {
    let storage = WeightStorage::new(&|_| DType::F32);
    Decoder::new(device, &Arc::default(), spec, settings, storage).unwrap()
}

fn evaluator(device: &dyn Device, spec: ModelSpec) -> Evaluator<'_> {
    let settings = EvaluateSettings { precision: Precision::F32, longest: 16, loss_chunk_tokens: 16 };
    let storage = WeightStorage::new(&|_| DType::F32);
    let mut evaluator = Evaluator::new(device, &Arc::default(), spec, settings, storage).unwrap();
    evaluator.load(fill).unwrap();
    evaluator
}

fn decoder(device: &dyn Device, spec: ModelSpec, settings: DecodeSettings) -> Decoder<'_> {
    let mut decoder = empty(device, spec, settings);
    decoder.load(fill).unwrap();
    decoder
}

fn settings(prompt_chunk_tokens: u64) -> DecodeSettings {
    DecodeSettings {
        precision: Precision::F32,
        cache: DType::F32,
        cache_tier: Tier::Device,
        context: 20,
        prompt_chunk_tokens,
        sequences: 1,
        pages: None,
        drafted_tokens: 0,
    }
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
        let mut evaluator = evaluator(&device, spec.clone());
        let other = self::device();
        let mut one = decoder(&other, spec, settings(5));
        for last in 1..16 {
            let mut targets = vec![IGNORED_TARGET; 16];
            targets[last - 1] = tokens[last];
            let batch = MicroBatch::new(&tokens, &targets);
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
        let _planned = empty(&dry, llama(), settings);
        let device = device();
        let mut decoder = decoder(&device, llama(), settings);
        let live = device.arena().ledger().live().total();
        assert_eq!(live, dry.arena().ledger().live().total());
        let loss = |pair: &[u32]| loss(&decoder.append(&pair[..1]).unwrap(), pair[1]);
        (live, tokens.windows(2).map(loss).collect::<Vec<_>>())
    };
    let (wide, exact) = losses(DType::F32);
    let (narrow, rounded) = losses(DType::Bf16);
    assert_eq!(losses(DType::F16).0, narrow);
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

/// A llama whose first and last layer see six positions.
fn windowed(size: u64) -> ModelSpec {
    let mut spec = llama();
    spec.attention.sliding_window = Some(SlidingWindow { size, layers: vec![true, false, true] });
    spec
}

fn greedy(logits: &[f32]) -> u32 {
    (0..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0
}

/// A context that a chunk fills holds every position of every layer; shorter chunks make windows forget.
#[test]
fn a_window_forgets_and_says_the_same() {
    let (tokens, _) = tokens(8, 1, 40);
    for cache in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_1] {
        let run = |chunk: u64| {
            let dry = Dry::new();
            let settings = DecodeSettings { cache, context: 100, ..settings(chunk) };
            let _planned = empty(&dry, windowed(6), settings);
            let device = device();
            let mut decoder = decoder(&device, windowed(6), settings);
            let bytes = device.arena().ledger().live().get(Tag::KvCache);
            assert_eq!(bytes, dry.arena().ledger().live().get(Tag::KvCache));
            let mut logits = Vec::new();
            for pass in tokens.chunks(chunk.min(3) as usize) {
                logits = decoder.append(pass).unwrap();
            }
            let mut said = Vec::new();
            for _ in 0..30 {
                said.push(greedy(&logits));
                logits = decoder.append(&said[said.len() - 1..]).unwrap();
            }
            (bytes, said, logits)
        };
        let (all, expected, last) = run(100);
        let (few, said, logits) = run(3);
        assert_eq!(said, expected, "{cache}");
        assert!(last.iter().zip(&logits).all(|(a, b)| (a - b).abs() < 1e-4), "{cache}");
        // Keys and values of two layers, of 6 + 3 - 1 positions instead of 100.
        let row = cache.bytes_for(2 * cache.cached_columns(6)).unwrap();
        let rounded = |rows: u64| (rows * row).next_multiple_of(64);
        assert_eq!(all - few, 4 * (rounded(100) - rounded(8)), "{cache}");
    }
}

#[test]
fn what_a_window_forgot_cannot_be_gone_back_to() {
    let (tokens, _) = tokens(8, 1, 20);
    let settings = DecodeSettings { context: 30, ..settings(4) };
    let device = device();
    let mut decoder = decoder(&device, windowed(6), settings);
    let first = decoder.append(&tokens[..10]).unwrap();
    decoder.append(&tokens[10..13]).unwrap();
    // Positions 4 to 12 are there: what position 9 sees begins at 4.
    assert_eq!(decoder.truncate(9), 9);
    let again = decoder.append(&tokens[9..10]).unwrap();
    assert!(first.iter().zip(&again).all(|(a, b)| (a - b).abs() < 1e-4));
    assert!(!decoder.is_empty() && decoder.len() == 10);
    assert_eq!(decoder.truncate(10), 10);
    assert_eq!(decoder.truncate(8), 0);
    assert!(decoder.is_empty());
    let again = decoder.append(&tokens[..10]).unwrap();
    assert!(first.iter().zip(&again).all(|(a, b)| (a - b).abs() < 1e-4));
}

/// Losses through the cache, in chunks, are those of the whole sequence, and plan what they take.
#[test]
fn losses_through_the_cache_are_those_of_the_whole() {
    for spec in families() {
        let (tokens, targets) = tokens(4, 1, 16);
        let batch = MicroBatch::new(&tokens, &targets);
        let device = device();
        let mut evaluator = evaluator(&device, spec.clone());
        let (whole, count) = evaluator.losses(1, &batch).unwrap();
        let dry = Dry::new();
        empty(&dry, spec.clone(), settings(5)).append_losses(&batch, 3).unwrap();
        let other = self::device();
        let mut decoder = decoder(&other, spec, settings(5));
        let (sum, targets) = decoder.append_losses(&batch, 3).unwrap();
        assert_eq!((targets, other.arena().high_water()), (count, dry.arena().high_water()));
        assert!((sum - whole).abs() < 1e-3, "{sum} {whole}");
    }
}

/// How far the losses through a cache of such rows are from those of the whole, and how many they are; in the memory that was planned.
fn checked_losses(
    spec: &ModelSpec,
    settings: DecodeSettings,
    storage: WeightStorage<'_>,
    row: u64,
) -> (f64, u64) {
    let (tokens, targets) = tokens(4, 1, 16);
    let batch = MicroBatch::new(&tokens, &targets);
    let dry = Dry::new();
    let mut planned = Decoder::new(&dry, &Arc::default(), spec.clone(), settings, storage).unwrap();
    let cached = dry.arena().ledger().live().get(Tag::KvCache);
    assert_eq!(cached, u64::from(spec.num_layers) * settings.context * row, "{settings:?}");
    planned.append_losses(&batch, 3).unwrap();
    let device = device();
    let mut real = Decoder::new(&device, &Arc::default(), spec.clone(), settings, storage).unwrap();
    real.load(fill).unwrap();
    let (sum, _) = real.append_losses(&batch, 3).unwrap();
    assert_eq!(device.arena().high_water(), dry.arena().high_water());
    let other = self::device();
    let asked = EvaluateSettings { precision: settings.precision, longest: 16, loss_chunk_tokens: 16 };
    let mut whole = Evaluator::new(&other, &Arc::default(), spec.clone(), asked, storage).unwrap();
    whole.load(fill).unwrap();
    let (wanted, count) = whole.losses(1, &batch).unwrap();
    ((sum - wanted).abs(), count)
}

/// Latent attention caches one narrow vector of a token, which bf16 and blocks hold too; where the matrix that the queries take in has an
/// adapter, it caches the keys and values of all heads.
#[test]
fn latent_attention_caches_a_narrow_vector() {
    let spec = latent_mixture();
    let adapted = |targets: &[&str]| {
        let names = targets.iter().map(|target| (*target).to_owned()).collect();
        let target_modules = TargetModules::Names(names);
        let config = AdapterConfig { rank: 3, target_modules, ..AdapterConfig::default() };
        AdapterLayout::new(&config, &spec).unwrap()
    };
    let [others, up] = [adapted(&["kv_a_proj_with_mqa", "o_proj"]), adapted(&["kv_b_proj"])];
    let types: &dyn Fn(&Parameter) -> DType = &|_| DType::F32;
    for (adapters, cache, row) in [
        (None, DType::F32, 13 * 4),
        (Some(&others), DType::F32, 13 * 4),
        (Some(&others), DType::Bf16, 13 * 2),
        (None, DType::Q8_0, 34),
        (Some(&up), DType::F32, 2 * 4 * 10 * 4),
    ] {
        let storage = WeightStorage { adapters, ..WeightStorage::new(types) };
        let settings = DecodeSettings { cache, context: 32, ..settings(5) };
        let (error, count) = checked_losses(&spec, settings, storage, row);
        let bound = if cache == DType::F32 { 1e-3 } else { 0.1 * count as f64 };
        assert!(error < bound, "{cache}: {error}");
    }
}

/// Heads of a quantised matrix are taken in where each is whole blocks of its type; and activations may be bf16.
#[test]
fn latent_attention_takes_in_quantised_heads() {
    let own = latent_mixture();
    let latent = own.attention.latent.map(|latent| LatentAttention { kv_rank: 32, ..latent });
    let spec = ModelSpec { attention: AttentionSpec { latent, ..own.attention.clone() }, ..own };
    for (dtype, precision, row, bound) in [
        (DType::Q8_0, Precision::F32, 36 * 4, 1e-3),
        // Groups of scales go from one head to the next.
        (DType::Nf4, Precision::F32, 2 * 4 * 10 * 4, 1e-3),
        (DType::Bf16, PURE_BF16, 36 * 4, 0.5),
    ] {
        let types = |p: &Parameter| if p.role == Role::KvUpProj { dtype } else { DType::F32 };
        let storage = WeightStorage::new(&types);
        let settings = DecodeSettings { precision, context: 32, ..settings(5) };
        let (error, _) = checked_losses(&spec, settings, storage, row);
        assert!(error < bound, "{dtype}: {error}");
    }
}

/// Sequences that are decoded in one pass, with a cache of their own or in shared pages, have the bits of those that are alone.
#[test]
fn latent_attention_of_many_sequences_has_the_bits_of_one() {
    let (tokens, _) = tokens(5, 3, 9);
    for pages in [None, Some(6)] {
        let settings = DecodeSettings { sequences: 3, pages, drafted_tokens: 2, ..settings(5) };
        let device = device();
        let mut many = decoder(&device, latent_mixture(), settings);
        let prompts: Vec<&[u32]> = tokens.chunks(9).collect();
        let lengths = [4, 6, 5];
        for (sequence, length) in (0..).zip(lengths) {
            many.append_to(sequence, &prompts[sequence as usize][..length]).unwrap();
        }
        let runs: Vec<(u32, &[u32])> =
            (0..).zip(lengths).map(|(own, at)| (own, &prompts[own as usize][at..at + 3])).collect();
        let together = many.decode(&runs).unwrap();
        let mut alone = Vec::new();
        for (sequence, tokens) in &runs {
            let device = self::device();
            let mut one = decoder(&device, latent_mixture(), self::settings(5));
            one.append(&prompts[*sequence as usize][..lengths[*sequence as usize]]).unwrap();
            for token in *tokens {
                alone.extend(one.append(&[*token]).unwrap());
            }
        }
        assert!(together == alone, "{pages:?}");
    }
}

#[test]
fn planned_and_measured_peaks_are_equal() {
    let dry = Dry::new();
    let mut planned = empty(&dry, llama(), settings(8));
    planned.append(&[0; 11]).unwrap();
    planned.append(&[0]).unwrap();
    let device = device();
    let mut real = decoder(&device, llama(), settings(8));
    real.append(&[5; 11]).unwrap();
    real.append(&[7]).unwrap();
    assert_eq!(device.arena().high_water(), dry.arena().high_water());
}

/// A cache on disk gives the bits of one in memory, in the memory and on the disk that were planned.
#[test]
fn a_cache_may_live_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (tokens, _) = tokens(4, 1, 60);
    for spec in families() {
        let spec = deeper(spec, 5);
        for cache in [DType::F32, DType::Q8_0] {
            said_alike(folder.path(), &spec, cache, &tokens);
        }
    }
}

/// The same with rows of a KiB, so that a page holds four positions: rows that are not read or written are missed. A layer
/// with a window holds fewer positions than it has seen, anywhere.
#[test]
fn a_cache_of_many_pages_may_live_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (tokens, _) = tokens(4, 1, 60);
    let wide = |spec: ModelSpec| ModelSpec {
        attention: plimsoll_model::AttentionSpec {
            head_dim: 128,
            local_rope: None,
            rope: Some(RopeSpec::plain(128, 10_000.0)),
            ..spec.attention.clone()
        },
        ..spec
    };
    for window in [3, 17, 40] {
        said_alike(folder.path(), &wide(windowed(window)), DType::F32, &tokens);
    }
    said_alike(folder.path(), &wide(llama()), DType::F32, &tokens);
}

/// A pass reads the positions before it and writes its own, in whole pages; of a ring all of them. A few layers are still in
/// their buffers from the pass before.
#[test]
fn a_cache_on_disk_moves_what_a_pass_needs() {
    const ROW: u64 = 1024;
    const LAYERS: u64 = 12;
    const IN_BUFFERS: u64 = 4;
    let mut spec = ModelSpec { num_layers: LAYERS as u32, ..windowed(9) };
    let own = &mut spec.attention;
    (own.head_dim, own.rope) = (128, Some(RopeSpec::plain(128, 10_000.0)));
    let layers = (0..LAYERS).map(|layer| layer % 2 == 0).collect();
    own.sliding_window = Some(SlidingWindow { size: 9, layers });
    let settings = DecodeSettings { cache_tier: Tier::Disk, context: 60, ..settings(8) };
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let storage = WeightStorage::new(&|_| DType::F32);
    let mut decoder = Decoder::new(&dry, &tiers, spec, settings, storage).unwrap();
    // Windows hold nine positions and those of a pass less one.
    let ring = 9 + 8 - 1;
    let mut past = 0;
    for n in [8, 8, 3, 1, 1, 8, 8] {
        let before = dry.moved();
        decoder.append(&vec![0; n as usize]).unwrap();
        let moved = dry.moved().less(before);
        let of = |in_window: u64, elsewhere: u64| ROW * LAYERS * (in_window + elsewhere);
        let full = past + n > ring;
        let (read, written) = if full { (of(ring, past), of(ring, n)) } else { (of(past, past), of(n, n)) };
        // Keys and values each have two ends in the middle of a page at most.
        let pages = LAYERS * 2 * 2 * 4096;
        let still_there = IN_BUFFERS * 2 * ROW * past.max(ring);
        let reads = read.saturating_sub(still_there)..=read + pages;
        assert!(reads.contains(&moved.read), "{past} + {n}: {moved:?} and {reads:?}");
        assert!(
            (written..=written + pages).contains(&moved.written),
            "{past} + {n}: {moved:?} and {written}"
        );
        past += n;
    }
}

/// Runs a decoder with its cache in memory, one with it on disk, and one with it on disk and a device with memory of its own, each
/// in the memory that was planned.
fn said_alike(folder: &Path, spec: &ModelSpec, cache: DType, tokens: &[u32]) {
    let run = |traits, cache_tier| {
        let settings = DecodeSettings { cache, cache_tier, context: 60, ..settings(7) };
        let (dry, dry_tiers) = (Dry::new().standing_for(traits), Arc::new(LowerTiers::dry()));
        let storage = WeightStorage::new(&|_| DType::F32);
        let mut planned = Decoder::new(&dry, &dry_tiers, spec.clone(), settings, storage).unwrap();
        say(&mut planned, tokens);
        let planned = [dry.arena(), dry_tiers.disk(), dry_tiers.host()].map(Arena::high_water);
        let device = Cpu::new(planned[0], CpuOptions { threads: Some(2), isa: None }).unwrap();
        let (device, host) = (device.standing_for(traits), Region::new(planned[2]).unwrap());
        let spill = SpillSettings { folder: folder.to_owned(), budget: None, direct: true };
        let tiers = Arc::new(LowerTiers::open(host, planned[1], &spill).unwrap());
        let mut decoder = Decoder::new(&device, &tiers, spec.clone(), settings, storage).unwrap();
        decoder.load(fill).unwrap();
        let said = say(&mut decoder, tokens);
        assert_eq!([device.arena(), tiers.disk(), tiers.host()].map(Arena::high_water), planned);
        (said, planned)
    };
    let ((memory, _), (disk, planned)) =
        (run(DeviceTraits::CPU, Tier::Device), run(DeviceTraits::CPU, Tier::Disk));
    assert!(memory == disk, "{} {cache}", spec.architecture);
    assert!(planned[1] > 0);
    let apart = DeviceTraits { unified: false, alignment: 256, cuda: false };
    assert!(memory == run(apart, Tier::Disk).0, "{} {cache}", spec.architecture);
}

/// A prompt in several passes, tokens one by one, and again from an earlier place.
fn say(decoder: &mut Decoder<'_>, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut said = vec![decoder.append(&tokens[..23]).unwrap()];
    said.extend(tokens[23..45].chunks(1).map(|token| decoder.append(token).unwrap()));
    let left = decoder.truncate(40) as usize;
    said.push(decoder.append(&tokens[left..57]).unwrap());
    said
}

/// Only a plan takes nothing for any number of tokens.
#[test]
fn an_evaluation_of_nothing_is_nothing() {
    let device = device();
    let mut evaluator = evaluator(&device, llama());
    assert_eq!(evaluator.losses(1, &MicroBatch::new(&[], &[])).unwrap(), (0.0, 0));
}

/// Keys and values that were written are waited for before the head computes.
#[test]
fn a_pass_waits_for_what_it_has_written_of_the_cache() {
    let (noting, tiers) = (Noting::default(), Arc::new(LowerTiers::dry()));
    let settings = DecodeSettings { cache_tier: Tier::Disk, ..settings(8) };
    let storage = WeightStorage::new(&|_| DType::F32);
    let mut decoder = Decoder::new(&noting, &tiers, llama(), settings, storage).unwrap();
    for tokens in [8, 1, 1] {
        decoder.append(&vec![0; tokens]).unwrap();
        let log = noting.log();
        assert!(log.contains('w') && log.trim_end_matches('o').ends_with('.'), "{log}");
    }
}

/// Three sequences of different lengths, each with prompts of its own, then a token for each in one pass; in the memory that was
/// planned, wherever the caches live.
#[test]
fn sequences_beside_each_other_say_what_each_says_alone() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (tokens, _) = tokens(7, 1, 40);
    let prompts = [&tokens[..9], &tokens[9..10], &tokens[3..15]];
    let together = |decoder: &mut Decoder<'_>| -> Vec<Vec<Vec<f32>>> {
        let prompts = (0..).zip(prompts);
        let mut said = vec![prompts.map(|(own, prompt)| decoder.append_to(own, prompt).unwrap()).collect()];
        for round in 0..5 {
            // The second one pauses once.
            let each: Vec<(u32, u32)> = (0..3)
                .filter(|sequence| (round, *sequence) != (2, 1))
                .map(|sequence| (sequence, tokens[(20 + 3 * round + sequence) as usize]))
                .collect();
            said.push(decoder.append_each(&each).unwrap());
        }
        said
    };
    let wide = ModelSpec { vocab_size: 1500, tie_word_embeddings: false, ..llama() };
    for spec in families().into_iter().chain([windowed(6), wide]) {
        let mut all = Vec::new();
        let ways = [Tier::Device, Tier::Host, Tier::Disk].map(|tier| (tier, None));
        for (cache_tier, pages) in ways.into_iter().chain([(Tier::Device, Some(3))]) {
            let settings = DecodeSettings { sequences: 3, cache_tier, pages, ..settings(5) };
            let storage = WeightStorage::new(&|_| DType::F32);
            let (dry, dry_tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
            let mut planned = Decoder::new(&dry, &dry_tiers, spec.clone(), settings, storage).unwrap();
            together(&mut planned);
            let planned = [dry.arena(), dry_tiers.disk(), dry_tiers.host()].map(Arena::high_water);
            let device = Cpu::new(planned[0], CpuOptions { threads: Some(2), isa: None }).unwrap();
            let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
            let host = Region::new(planned[2]).unwrap();
            let tiers = Arc::new(LowerTiers::open(host, planned[1], &spill).unwrap());
            let mut decoder = Decoder::new(&device, &tiers, spec.clone(), settings, storage).unwrap();
            decoder.load(fill).unwrap();
            all.push(together(&mut decoder));
            assert_eq!([device.arena(), tiers.disk(), tiers.host()].map(Arena::high_water), planned);
        }
        assert!(all.iter().all(|said| *said == all[0]), "{}", spec.architecture);
        for sequence in 0..3 {
            let device = device();
            let mut alone = decoder(&device, spec.clone(), settings(5));
            let mut expected = vec![alone.append(prompts[sequence]).unwrap()];
            for round in (0..5).filter(|round| (*round, sequence) != (2, 1)) {
                expected.push(alone.append(&tokens[20 + 3 * round + sequence..][..1]).unwrap());
            }
            let own = (0..).zip(&all[0]).filter_map(|(round, said)| match (round, sequence) {
                (3, 1) => None,
                (3, 2) => said.get(1),
                _ => said.get(sequence),
            });
            assert!(own.eq(expected.iter()), "{} {sequence}", spec.architecture);
        }
    }
}

#[test]
fn a_sequence_is_one_of_those_that_there_are_and_comes_once_in_a_pass() {
    let device = device();
    let settings = DecodeSettings { sequences: 2, ..settings(8) };
    let mut decoder = decoder(&device, llama(), settings);
    assert!(decoder.append_each(&[]).unwrap().is_empty());
    let refused = |error: plimsoll_step::StepError| error.to_string();
    let words = "is not one of 2, or comes twice in a pass";
    assert!(refused(decoder.append_to(2, &[1]).unwrap_err()).contains(words));
    assert!(refused(decoder.append_each(&[(1, 3), (1, 4)]).unwrap_err()).contains(words));
    assert!(refused(decoder.suppose(0, 5).unwrap_err()).contains("memory"));
    let first = decoder.append_each(&[(1, 3)]).unwrap();
    assert_eq!((decoder.len(), decoder.truncate_one(1, 0), decoder.truncate_one(9, 3)), (0, 0, 0));
    assert_eq!(decoder.append_to(1, &[3]).unwrap(), first[0]);
    let full = decoder.append_to(1, &[0; 20]).unwrap_err();
    assert_eq!(refused(full), "21 tokens do not fit the context of 20");
}

/// What a pass takes depends on how many tokens came before it, and not on whether they were run.
#[test]
fn a_dry_decoder_may_suppose_what_came_before() {
    for spec in [llama(), windowed(6)] {
        let settings = DecodeSettings { cache_tier: Tier::Disk, sequences: 2, ..settings(5) };
        let took = |run: &dyn Fn(&mut Decoder<'_>, u32)| {
            let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
            let storage = WeightStorage::new(&|_| DType::F32);
            let mut decoder = Decoder::new(&dry, &tiers, spec.clone(), settings, storage).unwrap();
            (0..2).for_each(|sequence| run(&mut decoder, sequence));
            decoder.append_each(&[(0, 0), (1, 0)]).unwrap();
            let before = dry.moved();
            dry.take_tally();
            decoder.append_each(&[(0, 0), (1, 0)]).unwrap();
            (dry.take_tally(), dry.moved().less(before))
        };
        let run = took(&|decoder, sequence| drop(decoder.append_to(sequence, &[0; 15]).unwrap()));
        assert_eq!(took(&|decoder, sequence| decoder.suppose(sequence, 15).unwrap()), run);
    }
}

/// Pages are given to three sequences as they grow, so that those of one lie apart; the logits have the bits of caches of their own, and
/// so have those of tokens that are appended at once, of which some are taken back.
#[test]
fn pages_and_tokens_at_once_change_no_bit() {
    let (text, _) = tokens(11, 1, 700);
    let wide = |window: Option<u64>| {
        let mut spec = llama();
        spec.attention.head_dim = 32;
        spec.attention.rope = Some(RopeSpec::plain(32, 10_000.0));
        spec.attention.sliding_window =
            window.map(|size| SlidingWindow { size, layers: vec![true, false, true] });
        spec
    };
    for (spec, cache) in [
        (wide(None), DType::F32),
        (wide(Some(40)), DType::F16),
        (wide(None), DType::Q8_0),
        (ModelSpec { logit_soft_cap: Some(30.0), ..wide(None) }, DType::Q4_1),
    ] {
        let settings =
            DecodeSettings { cache, context: 600, sequences: 3, drafted_tokens: 5, ..settings(256) };
        let said = |settings: DecodeSettings, together: bool| {
            let device = Cpu::new(1 << 24, CpuOptions { threads: Some(2), isa: None }).unwrap();
            let mut decoder = decoder(&device, spec.clone(), settings);
            let mut said = Vec::new();
            for (own, tokens) in [(0, 300), (1, 64), (2, 5)] {
                said.extend(decoder.append_to(own, &text[..tokens]).unwrap());
            }
            for round in 0..30 {
                let mut each = Vec::new();
                for own in [2, 0, 1] {
                    each.push((own, &text[round * 7 + own as usize..][..1 + (round + own as usize) % 6]));
                }
                match together {
                    true => said.extend(decoder.decode(&each).unwrap()),
                    false => {
                        for (own, tokens) in &each {
                            for token in *tokens {
                                said.extend(decoder.append_to(*own, &[*token]).unwrap());
                            }
                        }
                    }
                }
                for (own, tokens) in each.iter().filter(|(_, tokens)| tokens.len() > 3) {
                    let length = decoder.len_of(*own) - tokens.len() as u64 / 2;
                    assert_eq!(decoder.truncate_one(*own, length), length);
                }
            }
            said
        };
        let expected = said(settings, false);
        let pages = Some(settings.most_pages(&spec) / 2);
        assert!(said(settings, true) == expected, "{cache}: at once");
        assert!(said(DecodeSettings { pages, ..settings }, false) == expected, "{cache}: pages");
        assert!(said(DecodeSettings { pages, ..settings }, true) == expected, "{cache}: pages, at once");
    }
}

#[test]
fn pages_that_are_in_use_are_an_error_that_changes_nothing() {
    let device = Cpu::new(1 << 24, CpuOptions { threads: Some(2), isa: None }).unwrap();
    let settings = DecodeSettings { context: 150, sequences: 2, pages: Some(3), ..settings(8) };
    assert_eq!((settings.page_tokens(&llama()), settings.most_pages(&llama())), (64, 6));
    assert_eq!(settings.least_pages(&llama()), 4);
    let mut decoder = decoder(&device, llama(), settings);
    decoder.append_to(0, &[1; 100]).unwrap();
    assert!(decoder.has_pages_for(&[(0, 28), (1, 64)]) && !decoder.has_pages_for(&[(0, 29), (1, 1)]));
    let error = decoder.append_to(1, &[1; 70]).unwrap_err().to_string();
    assert!(error.contains("pages"), "{error}");
    decoder.truncate_one(1, 0);
    let first = decoder.append_to(1, &[1; 60]).unwrap();
    decoder.truncate_one(0, 64);
    decoder.append_to(1, &[2; 50]).unwrap();
    decoder.truncate_one(1, 59);
    assert_eq!(decoder.append_to(1, &[1]).unwrap(), first);
}
