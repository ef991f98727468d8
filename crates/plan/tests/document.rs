//! What a plan says of itself, in numbers that are worked out by hand from the model's sizes.

use plimsoll_device::DType;
use plimsoll_memory::{Phase, Tag, TagBytes, Tier};
use plimsoll_model::{ModelSpec, Parameter, catalogue};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{
    DiskNeeds, DryRun, LimitedBy, LoadLine, Machine, Past, ProcessLimits, Resource, SavedBytes, TrainingPlan,
    needs, tags_json,
};
use plimsoll_step::{
    Checkpointing, DecodeSettings, GradientClipping, Offload, Precision, StepSettings, WeightStorage,
};
use serde_json::{Value, json};

use crate::common::machine;

/// Two layers of 576 dimensions, nine heads and three for keys and values, with a tied embedding of 4096 rows.
fn spec() -> ModelSpec {
    ModelSpec { num_layers: 2, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() }
}

/// Elements of a layer: queries and the output, keys and values, three matrices of the feed-forward part, two norms.
const LAYER: u64 = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576;
const MODEL: u64 = 4096 * 576 + 2 * LAYER + 576;

fn config(set: &[&str]) -> RawConfig {
    let mut config = RawConfig::from_str("model: m\ndata: {sequence_length: 64}", "test").unwrap();
    config.apply_set("memory.device_budget=64GiB").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config.validate().unwrap();
    config
}

fn plan_on(machine: &Machine, set: &[&str]) -> TrainingPlan {
    TrainingPlan::new(&config(set), &spec(), machine).unwrap()
}

fn plan(set: &[&str]) -> TrainingPlan {
    plan_on(&machine(), set)
}

const HOME: &str =
    "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}";
const F32: &str = "training.mixed_precision=f32";
const STEP: [&str; 4] = [F32, HOME, "training.batch_size=1", "training.gradient_checkpointing=none"];

fn with(more: &[&str]) -> Vec<String> {
    STEP.iter().chain(more).map(|set| set.to_string()).collect()
}

fn step(more: &[&str]) -> TrainingPlan {
    let set = with(more);
    plan(&set.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn the_document_of_a_plan() {
    let overhead = Machine { overhead_bytes: 1000, ..machine() };
    let plan = plan_on(&overhead, &STEP);
    let document = plan.to_json();
    assert_eq!(
        document["model"],
        json!({"name": plan.spec.name, "architecture": "llama", "parameters": MODEL, "trainable_parameters": MODEL})
    );
    assert_eq!(
        document["optimizer"],
        json!({"name": "adamw", "state_bytes": 8 * MODEL, "state_bytes_per_parameter": 8.0})
    );
    assert_eq!(document["fits"], json!(true));
    let device = &document["memory"]["device"];
    assert_eq!((&device["budget_bytes"], &device["limited_by"]), (&json!(64u64 << 30), &json!("budget")));
    assert_eq!((&device["peak_bytes"], &device["overhead_bytes"]), (&json!(plan.peak_bytes()), &json!(1000)));
    let at_peak = device["at_peak"].as_object().unwrap();
    assert_eq!((&at_peak["weights"], &at_peak["optimizer"]), (&json!(4 * MODEL), &json!(8 * MODEL)));
    let live: u64 = at_peak.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(live, plan.peak_bytes());
    let layers = device["layers"].as_array().unwrap();
    let by_layer = |layer: &Value, tag: &str| {
        let found = layers.iter().find(|found| found["layer"] == *layer).unwrap();
        found["by_tag"][tag].as_u64().unwrap()
    };
    for layer in [json!(0), json!(1)] {
        assert_eq!(by_layer(&layer, "weights"), 4 * LAYER);
    }
    assert_eq!(by_layer(&Value::Null, "weights"), 4 * (MODEL - 2 * LAYER));
    assert_eq!(
        (&device["peak_phase"], &device["peak_layer"]),
        (&json!(plan.peak_place().0), &json!(plan.peak_place().1))
    );
    // 32 bytes of the data pipeline for each token.
    let host = &document["memory"]["host"];
    assert_eq!(
        *host,
        json!({"budget_bytes": null, "peak_bytes": 2048, "overhead_bytes": 0, "at_peak": {"data": 2048}})
    );
    let disk = &document["memory"]["disk"];
    assert_eq!((&disk["peak_bytes"], &disk["at_peak"]), (&json!(0), &json!({})));
    assert_eq!((&disk["available_bytes"], &disk["budget_bytes"]), (&json!(1u64 << 40), &Value::Null));
    assert_eq!(disk["path"], json!(plan.config.disk_path()));
    assert_eq!(document["time"]["step_seconds"], json!(plan.choice.time.step_seconds));
    assert_eq!(document["alternatives"].as_array().unwrap().len(), plan.alternatives.len());
    assert_eq!((&document["shortages"], &document["refusal"]), (&json!([]), &Value::Null));
    // No pipeline, no line for it.
    let quiet = plan_on(&Machine { host_bytes_per_token: 0, ..machine() }, &STEP);
    assert_eq!(quiet.to_json()["memory"]["host"]["at_peak"], json!({}));
    assert_eq!((quiet.pipeline_bytes(), plan.pipeline_bytes()), (0, 2048));
    // With few tokens gradients are most, which are all there when the first layer is done; with many, logits are.
    assert_eq!(plan.peak_place(), (Phase::Backward, Some(0)));
    assert_eq!(step(&["training.batch_size=64"]).peak_place(), (Phase::Loss, None));
}

#[test]
fn gaps_between_allocations_are_named_where_there_are_any() {
    let tags = TagBytes::default();
    assert_eq!(tags_json(&tags, 0), json!({}));
    assert_eq!(tags_json(&tags, 1), json!({"gaps": 1}));
    assert_eq!(tags_json(&tags, 4096), json!({"gaps": 4096}));
}

#[test]
fn a_timeline_has_every_allocation_of_the_step_and_its_peak() {
    let plan = step(&[]);
    let timeline = plan.timeline().unwrap();
    let device = &timeline.tiers[0];
    assert_eq!(device.at_peak.peak, plan.peak_bytes());
    assert!(device.allocations.len() > 100);
    let states = device.allocations.iter().filter(|allocation| allocation.tag == Tag::Optimizer);
    assert_eq!(states.map(|allocation| allocation.bytes).sum::<u64>(), 8 * MODEL);
}

#[test]
fn adapters_are_counted_with_the_model() {
    let lora = step(&["training.method=lora", "training.lora={rank: 4, target_modules: [q_proj, k_proj]}"]);
    // A of rank x in and B of out x rank, in two layers: 576 to 576 and 576 to 192.
    let adapters = 2 * 4 * ((576 + 576) + (576 + 192));
    assert_eq!((lora.parameters(), lora.trainable_parameters()), (MODEL + adapters, adapters));
    assert_eq!(lora.state_bytes_per_parameter(), 8.0);
    assert_eq!(
        lora.saved,
        SavedBytes { model: lora.saved.model, checkpoint: lora.saved.model + 8 * adapters }
    );
    assert!(lora.saved.model >= 4 * adapters && lora.saved.model < 5 * adapters);
}

/// Bytes of a checkpoint for each parameter: the weights, Adam's two moments, masters.
#[test]
fn a_run_takes_its_steps_and_its_checkpoints() {
    let plan = step(&["training.steps=100", "output={save_steps: 10, save_total_limit: 2}"]);
    assert_eq!(plan.saved, SavedBytes { model: 4 * MODEL, checkpoint: 12 * MODEL });
    let needs = plan.run_needs(None);
    let seconds = 100.0 * plan.choice.time.step_seconds;
    assert_eq!((needs.steps, needs.seconds), (Some(100), Some(seconds)));
    assert_eq!((needs.checkpoints, needs.left_bytes), (2, 2 * 12 * MODEL + 4 * MODEL));
    assert_eq!(needs.most_bytes, 3 * 12 * MODEL);
    assert_eq!(plan.run_needs(Some(7)).steps, Some(7));
    assert_eq!(step(&["training.epochs=2"]).run_needs(None).steps, None);
    let most =
        DiskNeeds { model_bytes: 0, checkpoint_bytes: 12 * MODEL, most_checkpoints: 3, spill_bytes: 0 };
    assert_eq!(plan.still_to_write(100, Past::default()), most);
    let past = Past { steps: 95, checkpoints: 2 };
    assert_eq!(plan.still_to_write(100, past), DiskNeeds { most_checkpoints: 1, ..most });
    let end = DiskNeeds { model_bytes: 4 * MODEL, checkpoint_bytes: 12 * MODEL, ..DiskNeeds::default() };
    assert_eq!(plan.still_to_write(99, past), end);
    let least = |set: &[&str]| {
        let set = [&["training.steps=100", "output={save_steps: 10, save_total_limit: 2}"], set].concat();
        DiskNeeds::least(&config(&set), &spec(), None, Past::default()).unwrap()
    };
    assert_eq!(least(&[F32]), most);
    // Weights and moments of two bytes and four, and masters of four beside the narrow ones.
    let bf16 = "training.mixed_precision=bf16";
    assert_eq!(least(&[bf16]).checkpoint_bytes, (2 + 4 + 8) * MODEL);
    assert_eq!(least(&[bf16, "training.master_weights=none"]).checkpoint_bytes, (2 + 8) * MODEL);
    // Of what is left to the planner, f32 writes the least.
    assert_eq!(least(&[]), most);
}

#[test]
fn the_line_is_held_against_device_and_host_unless_the_host_has_a_budget() {
    let machine = Machine { overhead_bytes: 1000, ..machine() };
    let one = plan_on(&machine, &STEP);
    assert_eq!(one.bytes_under_the_line(), one.peak_bytes() + 2048 + 1000);
    assert_eq!(one.process_bytes(), one.peak_bytes() + 2048 + 1000);
    let own = plan_on(&machine, &[&STEP[..], &["memory.host_budget=1GiB"]].concat());
    assert_eq!(own.bytes_under_the_line(), own.peak_bytes() + 1000);
    // Half of the line, less what the program takes.
    let half = plan_on(&machine, &[&STEP[..], &["memory.target_utilization=0.5"]].concat());
    assert_eq!((half.limits.target_bytes, half.limits.room_bytes), ((32 << 30) - 1000, (64 << 30) - 1000));
}

#[test]
fn of_limits_within_each_other_the_innermost_is_named() {
    let all = step(&[]).process_bytes();
    let named = |limits: ProcessLimits, device: u64, host: u64| {
        let budgets = [format!("memory.device_budget={device}"), format!("memory.host_budget={host}")];
        let set = [&STEP[..], &[&budgets[0], &budgets[1]]].concat();
        let plan = plan_on(&Machine { limits, ..machine() }, &set);
        plan.shortages().iter().map(|shortage| shortage.resource).collect::<Vec<_>>()
    };
    let (device, host) = (all - 2048, 2048);
    // The margin of a limit is 16 MiB.
    let limit = |bytes: u64| ProcessLimits { container: Some(bytes + (16 << 20)), ..ProcessLimits::NONE };
    assert_eq!(named(limit(all), device, host), []);
    assert_eq!(named(limit(all - 1), device, host), [Resource::Process]);
    assert_eq!(named(limit(all - 1), device - 1, host), [Resource::Memory]);
    assert_eq!(named(limit(all - 1), device, host - 1), [Resource::Host]);
    assert_eq!(named(limit(all - 1), device - 1, host - 1), [Resource::Memory, Resource::Host]);
    // A checkpoint has twelve bytes for each parameter, and is mapped while it is read.
    let address = |bytes: u64, limits| ProcessLimits { address_space: Some(bytes), ..limits };
    let mapped = all + 12 * MODEL;
    assert_eq!(named(address(mapped, ProcessLimits::NONE), device, host), []);
    assert_eq!(named(address(mapped - 1, ProcessLimits::NONE), device, host), [Resource::AddressSpace]);
    assert_eq!(named(address(mapped - 1, limit(all - 1)), device, host), [Resource::Process]);
    assert_eq!(named(address(mapped - 1, limit(all - 1)), device - 1, host), [Resource::Memory]);
}

#[test]
fn what_does_not_fit_is_as_near_as_can_be() {
    let set = |disk: &str| {
        let mut config = config(&["memory.device_budget=1MiB", disk]);
        config.apply_set("training.batch_size=1").unwrap();
        TrainingPlan::new(&config, &spec(), &machine()).unwrap()
    };
    // With a disk, what needs the least memory; without, what needs the least of what stays at home.
    let away = set("memory.disk_budget=auto");
    assert!(!away.fits());
    let everything = Offload { prefetch: false, ..Offload::all_on(Tier::Disk) };
    assert_eq!(
        (away.choice.settings.offload, away.choice.settings.precision.weights),
        (everything, DType::Bf16)
    );
    let moved = away.choice.dry_run.moved;
    let io = json!({ "bytes_read": moved.read, "bytes_written": moved.written });
    assert!(moved.read > 0 && away.to_json()["io"] == io);
    let home = set("memory.disk_budget=0");
    assert_eq!(home.to_json().get("io"), None);
    assert_eq!(
        (home.choice.settings.offload, home.choice.settings.precision),
        (Offload::NONE, Precision::F32)
    );
}

#[test]
fn lines_have_a_margin_of_a_thirty_second_part_within_bounds() {
    const MIB: u64 = 1 << 20;
    for (limit, left) in
        [(64, 48), (512, 496), (1024, 992), (16 << 10, (16 << 10) - 512), (1 << 20, (1 << 20) - 512)]
    {
        let limits = ProcessLimits { container: Some(limit * MIB), ..ProcessLimits::NONE };
        let line = LoadLine { bytes: left * MIB, by: LimitedBy::Container };
        assert_eq!(limits.enforced(), Some(line), "{limit} MiB");
        // At a line that is as low the user's own word counts.
        let own = LoadLine { bytes: left * MIB, by: LimitedBy::Budget };
        assert_eq!(limits.load_line(Some(left * MIB)), own);
        assert_eq!(limits.load_line(Some(left * MIB + 1)), line);
    }
    let unknown = LoadLine { bytes: u64::MAX / 2, by: LimitedBy::Available };
    assert_eq!(ProcessLimits::NONE.load_line(None), unknown);
    #[cfg(target_os = "linux")]
    assert!(ProcessLimits::detect().available.is_some_and(|bytes| bytes > MIB));
}

/// Each use of a model by a dry run of its own.
#[test]
fn needs_at_a_glance_are_those_of_dry_runs() {
    let spec = ModelSpec { max_position_embeddings: 300, ..spec() };
    let types = |_: &Parameter| DType::Bf16;
    let found = needs(&spec, &types).unwrap();
    let bf16 =
        Precision { weights: DType::Bf16, activations: DType::Bf16, master_weights: true, ..Precision::F32 };
    let training = |precision, checkpointing| {
        let settings = StepSettings {
            precision,
            checkpointing,
            clipping: GradientClipping::GlobalNorm(1.0),
            ..StepSettings::new(1, 300)
        };
        DryRun::training(&spec, &settings, 1).unwrap().peak_bytes()
    };
    let inference = |cache| {
        let settings = DecodeSettings {
            precision: Precision::F32,
            cache,
            cache_tier: Tier::Device,
            context: 300,
            prompt_chunk_tokens: 512,
            sequences: 1,
            pages: None,
            drafted_tokens: 0,
        };
        DryRun::generation(&spec, settings, WeightStorage::new(&types), 299).unwrap().peak_bytes()
    };
    let peaks: Vec<u64> = found.iter().map(|need| need.peak_bytes).collect();
    assert_eq!(
        peaks[..2],
        [training(Precision::F32, Checkpointing::None), training(bf16, Checkpointing::Full)]
    );
    assert_eq!(peaks[4..], [inference(DType::F32), inference(DType::Bf16)]);
    let weights: Vec<u64> = found.iter().map(|need| need.weight_bytes).collect();
    assert_eq!(
        [weights[0], weights[1], weights[2], weights[4], weights[5]],
        [4, 2, 2, 2, 2].map(|bytes| bytes * MODEL)
    );
    // Half a byte for the layers' elements, and a little for the scales of their blocks.
    let table = 2 * 4096 * 576;
    assert!(weights[3] > table + LAYER && weights[3] < table + LAYER * 21 / 20, "{}", weights[3]);
    for (need, method) in found[2..4].iter().zip(["lora", "qlora"]) {
        let method = format!("training.method={method}");
        let set =
            [HOME, "training.mixed_precision=bf16", "training.batch_size=1", "data.sequence_length=300"];
        let full = "training.gradient_checkpointing=full";
        assert_eq!(need.peak_bytes, plan(&[&set[..], &[full, &method]].concat()).peak_bytes(), "{method}");
    }
}
