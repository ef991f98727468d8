//! What stays in memory of a model that does not fit whole, and what is said where nothing fits.

use plimsoll_device::{DType, DeviceTraits};
use plimsoll_memory::{Tag, Tier};
use plimsoll_model::{ModelSpec, Parameter, StoredWeights, catalogue};
use plimsoll_plan::{
    CacheContext, DoesNotFit, DryRun, GenerationPlan, GenerationPlanError, GenerationRequest, PassFootprint,
    fitting_residency, streaming_overhead_bytes,
};
use plimsoll_step::{DecodeSettings, Precision, Residency, WeightOffload, WeightStorage};

/// Of twelve layers each takes 10 bytes and spares 100 of reading; the head takes `head[0]` and spares `head[1]`.
fn kept(room: u64, head: [u64; 2]) -> Option<Residency> {
    let spec = ModelSpec { num_layers: 12, ..catalogue::find("smollm2-135m").unwrap() };
    let mut runs = 0;
    let found = fitting_residency(&spec, room, |residency| {
        runs += 1;
        assert!(runs < 100, "the search does not end");
        let Residency::Spread { layers, head: kept, .. } = residency else { panic!("{residency:?}") };
        let [bytes, spared] = if kept { head } else { [0, 0] };
        let layers = u64::from(layers);
        Ok(PassFootprint {
            peak_bytes: 10 + 10 * layers + bytes,
            read_bytes: 2000 - 100 * layers - spared,
            host_bytes: 0,
            disk_bytes: 0,
        })
    });
    found.unwrap()
}

#[test]
fn what_is_kept_is_what_spares_the_most_reading() {
    let spread = |layers, head| Some(Residency::Spread { layers, head, expert_slots: 0 });
    for (room, head, expected) in [
        // With the head there is room for six layers, without for nine.
        (100, [30, 250], spread(9, false)),
        (100, [30, 350], spread(6, true)),
        (100, [30, 300], spread(6, true)),
        (99, [30, 300], spread(5, true)),
        (1000, [30, 0], spread(12, true)),
        (130, [30, 350], spread(9, true)),
        (10, [30, 1000], spread(0, false)),
        (20, [1, 1], spread(1, false)),
        (9, [0, 0], None),
    ] {
        assert_eq!(kept(room, head), expected, "{room} {head:?}");
    }
}

fn spec() -> ModelSpec {
    ModelSpec { num_layers: 8, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() }
}

#[test]
fn a_row_of_the_embedding_is_read_in_buffers_of_its_own() {
    let overhead =
        |types: &dyn Fn(&Parameter) -> DType| streaming_overhead_bytes(&spec(), WeightStorage::new(types));
    let [f32, bf16] = [overhead(&|_| DType::F32), overhead(&|_| DType::Bf16)];
    // Sixteen rows are read at once; each has 576 elements of two bytes more.
    assert_eq!(f32 - bf16, 16 * 2 * 576);
    assert!(bf16 > 16 * 2 * 576);
}

#[test]
fn what_does_not_fit_says_what_would() {
    let one = |cache, context| CacheContext { cache, context };
    let error = DoesNotFit {
        context: 4096,
        cache: DType::F16,
        needed: 3 << 20,
        weights: 1 << 20,
        streamed: false,
        room: 2 << 20,
        possible: vec![one(DType::F16, 64), one(DType::Q8_0, 128), one(DType::Q4_1, 192)],
    };
    let begin = |cache: &str| {
        format!(
            "a context of 4096 tokens with a cache in {cache} needs 3.00 MiB beside the program, and 2.00 MiB may be used; "
        )
    };
    assert_eq!(
        error.to_string(),
        begin("f16")
            + "what fits: --context 64 --kv-cache f16, --context 128 --kv-cache int8, --context 192 --kv-cache int4"
    );
    let nothing = DoesNotFit { cache: DType::Q8_0, possible: Vec::new(), ..error.clone() };
    assert_eq!(
        nothing.to_string(),
        begin("int8")
            + "no context fits, for the weights alone take 1.00 MiB: a load line that is 1.00 MiB higher is needed, or a model of a smaller type or size"
    );
    let streamed = DoesNotFit { streamed: true, ..nothing };
    assert_eq!(
        streamed.to_string(),
        begin("int8")
            + "no context fits, for those weights that are in memory at a time take 1.00 MiB: a load line that is 1.00 MiB higher is needed, or a model of a smaller type or size"
    );
}

fn types(_: &Parameter) -> DType {
    DType::F32
}

fn request<'a>(spec: &'a ModelSpec, context: [u64; 2], room: u64) -> GenerationRequest<'a> {
    GenerationRequest {
        spec,
        precision: Precision::F32,
        storage: WeightStorage::new(&types),
        prompt_tokens: None,
        context: context[0]..=context[1],
        cache: Some(DType::F16),
        room,
        in_files: None,
        enough_context: 1,
        pass_tokens: None,
        sequences: 1,
        drafted_tokens: 0,
        apart: None,
        disk_room: u64::MAX,
    }
}

/// As many sequences as fit share the pages that fit; their cache and their passes are those of one.
#[test]
fn sequences_beside_each_other_take_what_room_there_is() {
    let spec = spec();
    let request = |room| request(&spec, [1000, 1000], room);
    let alone = GenerationPlan::resolve(&request(u64::MAX)).unwrap();
    let with = |room, most, asked| alone.with_sequences(&request(room), most, asked, None).unwrap();
    let all = with(u64::MAX, 4, false);
    assert_eq!((all.settings.sequences, all.settings.pages), (4, Some(4 * 16)));
    assert_eq!((all.settings.cache, all.settings.context), (alone.settings.cache, alone.settings.context));
    assert_eq!(all.settings.prompt_chunk_tokens, alone.settings.prompt_chunk_tokens);
    // Half of the pages will do, and then fewer sequences.
    let pages = |plan: &GenerationPlan| plan.settings.pages.unwrap();
    let mut seen = Vec::new();
    let mut room = all.dry_run.peak_bytes();
    while room > alone.dry_run.peak_bytes() {
        let plan = with(room, 4, false);
        assert!(plan.dry_run.peak_bytes() <= room);
        if plan.settings.sequences > 1 {
            let most = plan.settings.most_pages(&spec);
            assert!(pages(&plan) >= (most / 2).max(plan.settings.least_pages(&spec)), "{:?}", plan.settings);
        }
        seen.push(plan.settings.sequences);
        room -= 1 << 19;
    }
    assert!(
        seen.is_sorted_by(|a, b| a >= b) && seen.first() == Some(&4) && seen.last() < Some(&4),
        "{seen:?}"
    );
    // What is asked for is kept, with the least pages if need be.
    let (peak, least) = (all.dry_run.peak_bytes(), all.settings.least_pages(&spec));
    let fewer = with(peak - 1, 4, true);
    let page = (peak - fewer.dry_run.peak_bytes()) / (64 - pages(&fewer));
    let tight = with(peak - (64 - least) * page, 4, true);
    assert_eq!((tight.settings.sequences, pages(&tight)), (4, least));
    assert_eq!(with(alone.dry_run.peak_bytes(), 4, true).settings.sequences, 1);
}

fn refused(request: &GenerationRequest<'_>) -> DoesNotFit {
    match GenerationPlan::resolve(request) {
        Err(GenerationPlanError::DoesNotFit(error)) => *error,
        other => panic!("{:?}", other.map(|plan| plan.settings)),
    }
}

fn settings(cache_tier: Tier, context: u64) -> DecodeSettings {
    DecodeSettings {
        precision: Precision::F32,
        cache: DType::F16,
        cache_tier,
        context,
        prompt_chunk_tokens: 16,
        sequences: 1,
        pages: None,
        drafted_tokens: 0,
    }
}

#[test]
fn the_largest_context_is_found_between_the_least_and_the_most() {
    let spec = spec();
    let needed = |context| {
        let storage = WeightStorage::new(&types);
        DryRun::generation_footprint(
            DeviceTraits::CPU,
            &spec,
            settings(Tier::Device, context),
            storage,
            context,
        )
        .unwrap()
        .peak_bytes
    };
    // 20 times 64 tokens fit, and no further 64.
    let plan = GenerationPlan::resolve(&request(&spec, [1000, 2048], needed(1280))).unwrap();
    assert_eq!(plan.settings.context, 1280);
    let plan = GenerationPlan::resolve(&request(&spec, [1000, 2048], needed(1000))).unwrap();
    assert_eq!(plan.settings.context, 1000);
    let error = refused(&request(&spec, [1000, 2048], needed(1000) - 1));
    assert_eq!((error.context, error.needed, error.streamed), (1000, needed(1000), false));
    let storage = WeightStorage::new(&types);
    let tags = DryRun::generation(&spec, settings(Tier::Device, 1000), storage, 1000).unwrap().tags_at_peak();
    assert_eq!(error.weights, tags.get(Tag::Weights));
}

#[test]
fn what_does_not_fit_waits_on_disk() {
    let spec = spec();
    let files = StoredWeights::default();
    let with_files =
        |context, room| GenerationRequest { in_files: Some(&files), ..request(&spec, context, room) };
    let run = |tier, context, residency| {
        let offload = WeightOffload { tier: Tier::Disk, in_files: Some(&files), residency, host_layers: 0 };
        let storage = WeightStorage { offload: Some(offload), ..WeightStorage::new(&types) };
        DryRun::generation(&spec, settings(tier, context), storage, context).unwrap()
    };
    let overhead = streaming_overhead_bytes(&spec, WeightStorage::new(&types));
    let least = |tier| {
        let peaks = [true, false]
            .map(|head| run(tier, 1024, Residency::Spread { layers: 0, head, expert_slots: 0 }).peak_bytes());
        overhead + peaks.into_iter().min().unwrap()
    };
    let whole = GenerationPlan::resolve(&request(&spec, [1024, 1024], u64::MAX)).unwrap();
    assert_eq!((whole.residency, whole.dry_run.disk_bytes()), (None, 0));
    // Weights go first, as few as possible; then the cache.
    let streamed = GenerationPlan::resolve(&with_files([1024, 1024], least(Tier::Device))).unwrap();
    assert!(streamed.residency.is_some() && streamed.dry_run.disk_bytes() > 0);
    assert!(streamed.dry_run.peak_bytes() + overhead <= least(Tier::Device));
    assert_eq!(streamed.settings.cache_tier, Tier::Device);
    let room = least(Tier::Device) - 1;
    let cache = GenerationPlan::resolve(&with_files([1024, 1024], room)).unwrap();
    assert_eq!((cache.settings.cache_tier, cache.settings.context), (Tier::Disk, 1024));
    assert!(cache.dry_run.peak_bytes() + overhead <= room);
    let error = refused(&with_files([1024, 1024], least(Tier::Disk) - 1));
    let residency = |head| Residency::Spread { layers: 0, head, expert_slots: 0 };
    // What is needed is what is enough: a byte more than was refused, with the cache on disk too.
    assert_eq!(error.needed, least(Tier::Disk));
    let smallest = [true, false].map(|head| run(Tier::Disk, 1024, residency(head)));
    let smallest = smallest.into_iter().min_by_key(DryRun::peak_bytes).unwrap();
    let tags = smallest.tags_at_peak();
    assert!(tags.get(Tag::Weights) > 0 && tags.get(Tag::Staging) > 0);
    assert_eq!(error.weights, tags.get(Tag::Weights) + tags.get(Tag::Staging));
    assert_eq!((error.needed, error.streamed), (smallest.peak_bytes() + overhead, true));
}

/// A mixture of experts that does not fit is run with slots for experts, in much less memory than a layer's experts take.
#[test]
fn experts_have_slots_where_their_layers_do_not_fit() {
    let spec = catalogue::find("qwen3-30b-a3b").unwrap();
    let files = StoredWeights::new();
    let types =
        |p: &Parameter| if p.role.is_block_matrix() || p.is_table() { DType::Q4_0 } else { DType::F32 };
    let settings = DecodeSettings {
        precision: Precision::F32,
        cache: DType::F16,
        cache_tier: Tier::Device,
        context: 512,
        prompt_chunk_tokens: 16,
        sequences: 1,
        pages: None,
        drafted_tokens: 0,
    };
    let peak = |layers, head, expert_slots| {
        let residency = Residency::Spread { layers, head, expert_slots };
        let offload = WeightOffload { tier: Tier::Disk, in_files: Some(&files), residency, host_layers: 0 };
        let storage = WeightStorage { offload: Some(offload), ..WeightStorage::new(&types) };
        let found = DryRun::generation_footprint(DeviceTraits::CPU, &spec, settings, storage, 16).unwrap();
        (found.peak_bytes, found.read_bytes)
    };
    let (layers, mib) = (spec.num_layers, 1 << 20);
    for (kept, head, slots) in [(layers, true, 8), (layers, false, 8), (0, false, 8), (0, false, 0)] {
        let (peak, read) = peak(kept, head, slots);
        println!("{kept} {head} {slots}: {} MiB, {} MiB read", peak / mib, read / mib);
    }
    assert!(peak(0, false, 8).0 < 300 * mib);
}
