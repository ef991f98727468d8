//! Plans of inference: what a decoder takes is what was planned, wherever weights and caches live, and each suggestion fits when it is
//! applied.

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use plimsoll_device::{Cpu, CpuOptions, DType, Device, DeviceTraits};
use plimsoll_disk::{LowerTiers, SpillSettings};
use plimsoll_memory::{Arena, Region, Tag, Tier};
use plimsoll_model::{
    AttentionSpec, MlpSpec, ModelSpec, Parameter, RopeSpec, StoredWeight, StoredWeights, TypesByGroup,
    catalogue,
};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{
    DiskRates, InferenceChange, InferencePlan, InferenceQuestion, LayerPlaces, Machine, ModelOrigin,
    ProcessLimits, Rates, Resource, Wiring,
};
use plimsoll_step::{Decoder, Precision, StepError, WeightOffload, WeightStorage};

const APART: DeviceTraits = DeviceTraits { unified: false, alignment: 256, cuda: false };

/// A machine of so much memory; with so much host memory where the device has memory of its own.
fn machine(device_bytes: u64, host_bytes: Option<u64>) -> Machine {
    let wiring = match host_bytes {
        None => Wiring::CPU,
        Some(_) => Wiring { device: APART, host_link: Some(1e9), ..Wiring::CPU },
    };
    Machine {
        rates: Rates {
            disk: DiskRates { read: 1e8, write: 1e8 },
            wiring,
            ..Rates::of_cpu([1e12, 2e12], 1e11, 1e10)
        },
        limits: ProcessLimits::NONE,
        overhead_bytes: 0,
        host_bytes_per_token: 0,
        worker_bytes: 0,
        disk_available: Some(1 << 28),
        disk_reserved: 0,
        device_bytes: Some(device_bytes),
        host_bytes,
    }
}

/// Six layers of 6 MiB.
fn tiny() -> ModelOrigin {
    let whole = catalogue::find("smollm2-135m").unwrap();
    let rope = Some(RopeSpec::plain(64, 10_000.0));
    let attention = AttentionSpec { heads: 8, kv_heads: 4, head_dim: 64, rope, ..whole.attention };
    let mlp = MlpSpec { intermediate_size: 1536, ..whole.mlp };
    ModelOrigin::Catalogue(Box::new(ModelSpec {
        hidden_size: 512,
        num_layers: 6,
        vocab_size: 512,
        attention,
        mlp,
        ..whole
    }))
}

/// Some layers have no place on a device of so much less.
const LESS: u64 = 16 << 20;

/// Host memory for all of them; and for one beside the staging between disk and device, which takes 16 MiB.
const HOST: u64 = 64 << 20;
const LITTLE: u64 = 23 << 20;

/// 3 sequences of 40 tokens in f32.
fn question<'a>(
    origin: &'a ModelOrigin,
    config: &'a RawConfig,
    machine: &'a Machine,
) -> InferenceQuestion<'a> {
    InferenceQuestion {
        origin,
        config,
        machine,
        ranks: 1,
        precision: Precision::F32,
        quantize: TypesByGroup::default(),
        cache: Some(DType::F16),
        context: 40,
        sequences: 3,
    }
}

/// The types that a catalogue's model has.
fn types(p: &Parameter) -> DType {
    if p.shape.len() >= 2 { DType::Bf16 } else { DType::F32 }
}

/// A file of zeros with all weights, one behind the other.
fn file(folder: &Path, spec: &ModelSpec) -> StoredWeights {
    let (path, mut end) = (folder.join("model"), 0);
    let place = |p: Parameter| {
        let (start, dtype) = (end, types(&p));
        end += dtype.bytes_for(p.elements()).unwrap();
        ((p.block, p.role), StoredWeight { path: path.clone(), bytes: start..end, dtype })
    };
    let stored = spec.parameters().into_iter().map(place).collect();
    File::create(&path).unwrap().write_all(&vec![0; end as usize]).unwrap();
    stored
}

fn zeros(_: &Parameter, _: Range<u64>, _: DType, out: &mut [u8]) -> Result<(), StepError> {
    out.fill(0);
    Ok(())
}

/// Answers in just the memory that was planned, and says what it took of the device, the host and the disk.
fn taken(plan: &InferencePlan, traits: DeviceTraits) -> [u64; 3] {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (stage, generation) = (&plan.stages[0], &plan.stages[0].generation);
    let stored = file(folder.path(), &stage.spec);
    let offload = generation.residency.map(|residency| WeightOffload {
        tier: generation.below.tier,
        in_files: Some(&stored),
        residency,
        host_layers: generation.below.host_layers,
    });
    let storage = WeightStorage { offload, ..WeightStorage::new(&types) };
    let run = &generation.dry_run;
    let device = Cpu::new(run.peak_bytes(), CpuOptions { threads: Some(2), isa: None }).unwrap();
    let (device, host) = (device.standing_for(traits), Region::new(run.host_bytes()).unwrap());
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let tiers = Arc::new(LowerTiers::open(host, run.disk_bytes(), &spill).unwrap());
    let settings = generation.settings;
    let mut decoder = Decoder::new(&device, &tiers, stage.spec.clone(), settings, storage).unwrap();
    decoder.load(zeros).unwrap();
    let sequences = 0..settings.sequences as u32;
    for sequence in sequences.clone() {
        decoder.append_to(sequence, &vec![1; plan.prompt_tokens as usize]).unwrap();
    }
    decoder.append_each(&sequences.map(|sequence| (sequence, 1)).collect::<Vec<_>>()).unwrap();
    [device.arena(), tiers.host(), tiers.disk()].map(Arena::high_water)
}

#[test]
fn a_decoder_takes_what_was_planned_wherever_its_weights_live() {
    let (origin, config) = (tiny(), RawConfig::default());
    let whole = question(&origin, &config, &machine(1 << 30, None)).plan().unwrap();
    let all = whole.stages[0].generation.dry_run.peak_bytes();
    assert!(whole.fits() && whole.is_all_on_device() && whole.changes.is_empty());
    let mut places = Vec::new();
    for (room, host) in [
        (all, None),
        (all - LESS, None),
        (all, Some(HOST)),
        (all - LESS, Some(HOST)),
        (all - LESS, Some(LITTLE)),
    ] {
        let machine = machine(room, host);
        let plan = question(&origin, &config, &machine).plan().unwrap();
        assert!(plan.fits(), "{room} {host:?}: {:?}", plan.shortages);
        let run = &plan.stages[0].generation.dry_run;
        let planned = [run.peak_bytes(), run.host_bytes(), run.disk_bytes()];
        assert!(planned[0] <= room && planned[1] <= host.unwrap_or(0), "{planned:?}");
        assert_eq!(taken(&plan, machine.rates.wiring.device), planned);
        places.push(plan.layers());
    }
    let [whole, _, apart, on_host, mixed] = places[..] else { panic!() };
    assert_eq!((whole, apart), (LayerPlaces { device: 6, host: 0, disk: 0 }, whole));
    assert!(on_host.device > 0 && on_host.host > 0 && on_host.disk == 0, "{on_host:?}");
    assert!(mixed.host > 0 && mixed.disk > 0, "{mixed:?}");
}

/// What travels for a token is what is not on the device, and takes as long as the link does.
#[test]
fn a_token_waits_for_what_is_brought() {
    let (origin, config) = (tiny(), RawConfig::default());
    let plan = |room, host| question(&origin, &config, &machine(room, host)).plan().unwrap();
    let all = plan(1 << 30, Some(1 << 30));
    let room = all.stages[0].generation.dry_run.peak_bytes() - LESS;
    let (host, mixed) = (plan(room, Some(HOST)), plan(room, Some(LITTLE)));
    let moved = [&all, &host, &mixed].map(InferencePlan::moved_per_token);
    let of_layer = 2 * (512 * 512 * 2 + 512 * 256 * 2 + 512 * 1536 * 3) as u64;
    let away = host.layers().host;
    assert_eq!((moved[0].copied_in, moved[0].read, moved[1].read), (0, 0, 0));
    assert!(moved[1].copied_in >= u64::from(away) * of_layer, "{moved:?}");
    assert!(moved[1].copied_in < (u64::from(away) + 2) * (of_layer + (64 << 10)), "{moved:?}");
    assert!(moved[2].read > 0 && moved[2].read < moved[2].copied_in, "{moved:?}");
    assert!(all.token_seconds() < host.token_seconds() && host.token_seconds() < mixed.token_seconds());
    // The pass before begins to bring the first layer.
    assert!(host.token_seconds() >= (moved[1].copied_in - of_layer) as f64 / 1e9);
    // Sequences beside each other share what is brought.
    let machine = machine(room, Some(HOST));
    let one = InferenceQuestion { sequences: 1, ..question(&origin, &config, &machine) }.plan().unwrap();
    assert!(host.tokens_per_second() > 1.5 * one.tokens_per_second());
}

/// The question with a change as it is said.
fn with<'a>(question: InferenceQuestion<'a>, change: &InferenceChange) -> InferenceQuestion<'a> {
    let InferenceChange { flag, value, .. } = change;
    let number = || value.parse().unwrap();
    let cache = || match value.as_str() {
        "int8" => DType::Q8_0,
        "int4" => DType::Q4_1,
        other => panic!("{other}"),
    };
    match *flag {
        "--context" => InferenceQuestion { context: number(), ..question },
        "--parallel" => InferenceQuestion { sequences: number(), ..question },
        "--kv-cache" => InferenceQuestion { cache: Some(cache()), ..question },
        "--quantize" => InferenceQuestion {
            quantize: (DType::ALL.into_iter().find(|dtype| dtype.name() == value))
                .map_or_else(TypesByGroup::default, TypesByGroup::from),
            ..question
        },
        other => panic!("{other}"),
    }
}

#[test]
fn each_suggestion_fits_when_it_is_applied() {
    let config = RawConfig::default();
    let half = Precision { weights: DType::Bf16, activations: DType::Bf16, ..Precision::F32 };
    let mut flags = Vec::new();
    for (name, share, host, context, sequences) in [
        ("qwen2.5-0.5b", 0.85, 0, 2048, 24),
        ("qwen2.5-0.5b", 0.5, 64 << 20, 4096, 8),
        ("llama-3.2-1b", 0.7, 1 << 30, 1024, 1),
        ("gemma-3-1b", 0.7, 0, 1024, 2),
        ("smollm2-135m", 0.7, 0, 4096, 3),
    ] {
        let whole = catalogue::find(name).unwrap();
        let num_layers = if whole.attention.sliding_window.is_some() { whole.num_layers } else { 6 };
        let origin = ModelOrigin::Catalogue(Box::new(ModelSpec { num_layers, ..whole }));
        let ask = |machine| InferenceQuestion {
            precision: half,
            cache: Some(DType::Bf16),
            context,
            sequences,
            ..question(&origin, &config, machine)
        };
        let endless = machine(1 << 40, Some(0));
        let all = ask(&endless).plan().unwrap().stages[0].generation.dry_run.peak_bytes();
        let device = (all as f64 * share) as u64;
        let machine = machine(device, Some(host));
        let question = ask(&machine);
        let plan = question.plan().unwrap();
        for change in &plan.changes {
            let changed = with(question, change).plan().unwrap();
            assert!(changed.fits(), "{name}: {change:?}");
            assert!(!plan.fits() || changed.is_all_on_device(), "{name}: {change:?}");
            assert_eq!(changed.tokens_per_second(), change.tokens_per_second);
            assert_eq!(changed.is_all_on_device(), change.all_on_device);
            flags.push(change.flag);
        }
        if !plan.fits() {
            let short = plan.shortages[0];
            let run = &plan.stages[0].generation.dry_run;
            assert!([Resource::Memory, Resource::Host].contains(&short.resource) && short.bytes() > 0);
            assert!(run.peak_bytes() > device || run.host_bytes() > host);
        }
    }
    flags.sort_unstable();
    flags.dedup();
    assert_eq!(flags, ["--context", "--kv-cache", "--parallel", "--quantize"]);
}

/// The number of sequences narrows no cache: `generate` has the type that one has. What a narrower one would do is said.
#[test]
fn sequences_have_the_cache_that_one_has() {
    let config = RawConfig::default();
    let origin = ModelOrigin::Catalogue(Box::new(catalogue::find("smollm2-135m").unwrap()));
    let ask = |machine: &Machine, sequences| {
        let question = question(&origin, &config, machine);
        InferenceQuestion { cache: None, context: 2048, sequences, ..question }.plan().unwrap()
    };
    let all = ask(&machine(1 << 40, Some(0)), 24);
    assert_eq!((all.cache(), all.is_all_on_device()), (Some(DType::F16), true));
    let less = machine(all.stages[0].generation.dry_run.peak_bytes() - (64 << 20), Some(0));
    let (one, many) = (ask(&less, 1), ask(&less, 24));
    assert_eq!((one.cache(), many.cache()), (Some(DType::F16), Some(DType::F16)));
    assert!(one.is_all_on_device() && !many.is_all_on_device());
    let change = many.changes.iter().find(|change| change.flag == "--kv-cache").unwrap();
    assert_eq!((change.value.as_str(), change.all_on_device), ("int8", true));
}

/// Layers are divided among devices; all have passes of as many tokens and caches of one type.
#[test]
fn devices_have_the_layers_one_after_the_other() {
    let config = RawConfig::default();
    let origin = ModelOrigin::Catalogue(Box::new(catalogue::find("llama-3.2-1b").unwrap()));
    let machine = machine(2 << 30, Some(0));
    let plan = |ranks| {
        let question = InferenceQuestion { context: 4096, ..question(&origin, &config, &machine) };
        InferenceQuestion { ranks, ..question }.plan().unwrap()
    };
    let (one, two) = (plan(1), plan(2));
    assert!(!one.is_all_on_device() && two.is_all_on_device() && two.fits());
    assert_eq!((two.stages.len(), two.layers()), (2, LayerPlaces { device: 16, host: 0, disk: 0 }));
    let settings = two.stages.iter().map(|stage| stage.generation.settings).collect::<Vec<_>>();
    assert_eq!(settings[0], settings[1]);
    let seconds = |nth: usize| two.stages[nth].token.times.unwrap().elapsed;
    assert_eq!(two.token_seconds(), seconds(0) + seconds(1));
    assert_eq!(two.cache_bytes(), one.cache_bytes());
}

/// A window is all that its layer holds.
#[test]
fn windows_hold_less_than_the_context() {
    let config = RawConfig::default();
    let machine = machine(64 << 30, None);
    let origin = ModelOrigin::Catalogue(Box::new(catalogue::find("gemma-3-1b").unwrap()));
    let spec = origin.spec();
    let plan = InferenceQuestion { context: 32768, sequences: 2, ..question(&origin, &config, &machine) };
    let plan = plan.plan().unwrap();
    let settings = plan.stages[0].generation.settings;
    let row = 2 * 2 * spec.attention.kv_heads * spec.attention.head_dim;
    let positions = |layer: u32| {
        spec.attention.window(layer).map_or(32768, |window| window + settings.prompt_chunk_tokens - 1)
    };
    let expected: u64 = spec.layers().map(|layer| 2 * row * positions(layer)).sum();
    assert_eq!((plan.cache_bytes(), settings.cache_tier), (expected, Tier::Device));
    assert_eq!(plan.stages[0].generation.dry_run.tags_at_peak().get(Tag::KvCache), expected);
}
