//! What steps take of the device, the host and the disk, to the byte, beside what they took before (`golden_peaks.txt`).
//!
//! A plan is the step run dry, so that memory which both of them waste is seen by no test that compares the two. This one
//! sees it, and every saving too. Where a number changes for a reason, write the file anew and give the reason in it:
//!
//!     cargo test --release --workspace --locked --test all -- --ignored golden_peaks::

use std::fmt::Write as _;
use std::path::Path;

use plimsoll_device::{Clock, DeviceTraits, Dry, Transferred};
use plimsoll_memory::{AtPeak, Ledger, Tag, Tier};
use plimsoll_model::{
    Activation, AttentionSpec, MlpSpec, ModelSpec, NormKind, NormSpec, RopeSpec, SlidingWindow, catalogue,
};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{Choice, DryRun, Machine, ProcessLimits, Rates, TrainingPlan, Wiring};
use plimsoll_step::{Ranks, StepSettings};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden_peaks.txt");

/// What holds unless a case says otherwise: nothing is left to the planner.
const USUAL: [&str; 13] = [
    "memory.device_budget=1024TiB",
    "data.sequence_length=64",
    "training.batch_size=1",
    "training.gradient_accumulation_steps=1",
    "training.mixed_precision=f32",
    "training.gradient_checkpointing=none",
    "training.loss_chunk_tokens=64",
    "training.micro_batches_per_pass=1",
    "memory.offload.optimizer=device",
    "memory.offload.gradients=device",
    "memory.offload.activations=device",
    "memory.offload.parameters=device",
    "parallel.overlap_communication=false",
];

/// A case of the file: its head, its reason, and what was measured.
struct Case<'a> {
    name: &'a str,
    model: &'a str,
    set: Vec<&'a str>,
    reason: &'a str,
    measured: Vec<&'a str>,
}

fn cases(text: &str) -> Vec<Case<'_>> {
    let blocks = text.split("\n\n").filter(|block| block.starts_with('['));
    let case = |block| {
        let mut lines = str::lines(block);
        let (name, model) = lines.next().unwrap().strip_prefix('[').unwrap().split_once("] ").unwrap();
        let set = lines.next().unwrap().strip_prefix("set: ").unwrap().split("; ").collect();
        let reason = lines.next().unwrap().strip_prefix("why: ").unwrap();
        Case { name, model, set, reason, measured: lines.collect() }
    };
    blocks.map(case).collect()
}

/// A model of the catalogue, cut to so many layers where the name says so, or one of odd widths.
fn model(name: &str) -> ModelSpec {
    let (name, layers) = name.split_once('/').map_or((name, None), |(name, layers)| (name, Some(layers)));
    let spec = match name {
        "odd" => odd(),
        "odd-windows" => ModelSpec {
            attention: AttentionSpec {
                sliding_window: Some(SlidingWindow { size: 5, layers: vec![true, false, true] }),
                soft_cap: Some(50.0),
                ..odd().attention
            },
            logit_soft_cap: Some(30.0),
            ..odd()
        },
        "odd-biased" => ModelSpec {
            attention: AttentionSpec { qkv_bias: true, output_bias: true, ..odd().attention },
            mlp: MlpSpec { activation: Activation::GeluTanh, gated: false, bias: true, ..odd().mlp },
            experts: None,
            norm: NormSpec { kind: NormKind::Layer, ..odd().norm },
            tie_word_embeddings: false,
            ..odd()
        },
        name => catalogue::find(name).unwrap(),
    };
    let layers = layers.map_or(spec.num_layers, |layers| layers.parse::<u32>().unwrap());
    let mut spec = ModelSpec { num_layers: layers, ..spec };
    if let Some(window) = &mut spec.attention.sliding_window {
        window.layers = window.layers.iter().copied().cycle().take(layers as usize).collect();
    }
    spec
}

/// No width is a multiple of a cache line, and a table is a few pieces and a rest.
fn odd() -> ModelSpec {
    ModelSpec {
        name: "odd".into(),
        architecture: "llama".into(),
        vocab_size: 3101,
        hidden_size: 24,
        num_layers: 3,
        attention: AttentionSpec::plain(4, 2, 6, RopeSpec::plain(6, 10_000.0)),
        mlp: MlpSpec { intermediate_size: 41, activation: Activation::Silu, gated: true, bias: false },
        experts: None,
        norm: NormSpec::rms(1e-5),
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: true,
        max_position_embeddings: 4096,
        initializer_range: 0.2,
        part: Default::default(),
        bos_token: None,
        eos_tokens: vec![2],
    }
}

const RATES: Rates = Rates::of_cpu([1e11, 1e11], 1e10, 1e9);

fn chosen(case: &Case<'_>) -> Choice {
    let (rates, limits) = (RATES, ProcessLimits::NONE);
    let machine = Machine {
        rates,
        limits,
        overhead_bytes: 0,
        host_bytes_per_token: 0,
        worker_bytes: 0,
        disk_available: Some(1 << 60),
        disk_reserved: 0,
        device_bytes: None,
        host_bytes: None,
    };
    let mut config = RawConfig::from_str("{}", case.name).unwrap();
    for assignment in USUAL.iter().chain(&case.set) {
        config.apply_set(assignment).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    }
    let plan = TrainingPlan::new(&config, &model(case.model), &machine);
    plan.unwrap_or_else(|error| panic!("{}: {error}", case.name)).choice
}

/// The lines of a dry run.
fn measured(run: &DryRun) -> Vec<String> {
    let DryRun { ledger, host, disk, moved, .. } = run;
    let Transferred { read, written, .. } = moved;
    vec![
        format!("device {}", peak(ledger)),
        format!("most   {}", most(ledger)),
        format!("host   {}", peak(host)),
        format!("disk   {}", peak(disk)),
        format!("moved  read {read}, written {written}"),
    ]
}

/// The peak, where it was first reached, and what it was.
fn peak(ledger: &Ledger) -> String {
    let AtPeak { peak, by_tag, phase, layer } = ledger.at_peak();
    let layer = layer.map_or(String::new(), |layer| format!(" of layer {layer}"));
    let mut line = format!("{peak} in {phase}{layer}:");
    by_tag.iter().for_each(|(tag, bytes)| write!(line, " {tag} {bytes},").unwrap());
    write!(line, " gaps {}", ledger.at_peak().gaps()).unwrap();
    if *peak == 0 { "0".into() } else { line }
}

/// The most that ever was under each tag, at the peak or not.
fn most(ledger: &Ledger) -> String {
    let all = Tag::ALL.into_iter().map(|tag| (tag, ledger.most(tag))).filter(|(_, bytes)| *bytes > 0);
    all.map(|(tag, bytes)| format!("{tag} {bytes}")).collect::<Vec<_>>().join(", ")
}

fn block(case: &Case<'_>, measured: &[String]) -> String {
    let Case { name, model, set, reason, .. } = case;
    format!("[{name}] {model}\nset: {}\nwhy: {reason}\n{}\n", set.join("; "), measured.join("\n"))
}

#[test]
fn peaks_are_what_they_were() {
    let text = std::fs::read_to_string(Path::new(FILE)).unwrap();
    let cases = cases(&text);
    assert!(cases.len() >= 24);
    let mut changed = String::new();
    for case in &cases {
        let now = measured(&chosen(case).dry_run);
        if now != case.measured {
            write!(changed, "\n{}", block(case, &now)).unwrap();
            case.measured.iter().filter(|line| !now.iter().any(|now| now == *line)).for_each(|line| {
                writeln!(changed, "    was: {line}").unwrap();
            });
        }
    }
    assert!(
        changed.is_empty(),
        "what steps take has changed. If it is meant to, put these blocks into {FILE} (or run this test with \
         `-- --ignored`), with the reason in their lines `why:`\n{changed}"
    );
}

/// Forms that layers can take which the file's cases have not, or of too few layers.
const OF_MANY_LAYERS: [(&str, &str); 57] = [
    (
        "qwen3-30b-a3b",
        "training.method=qlora; training.lora={rank: 2}; training.gradient_checkpointing=full; memory.offload.parameters=host; memory.expert_slots=16; training.gradient_accumulation_steps=3",
    ),
    (
        "mixtral-8x7b",
        "training.method=lora; memory.offload.parameters=disk; memory.kept_layers.parameters=7; memory.expert_slots=8; training.micro_batches_per_pass=2; training.gradient_accumulation_steps=6",
    ),
    ("gemma-3-12b", "training.mixed_precision=bf16"),
    ("gemma-3-12b", "data.sequence_length=1024; memory.offload.parameters=disk"),
    ("gemma-3-12b", "data.sequence_length=1025; memory.offload.parameters=disk"),
    ("gemma-3-12b", "training.method=lora; training.gradient_checkpointing=full"),
    ("gemma-2-27b", "memory.offload.activations=host"),
    ("smollm2-135m/61", "training.gradient_checkpointing={every: 3}; training.gradient_accumulation_steps=5"),
    ("odd/90", "training.gradient_checkpointing=sqrt; memory.offload.activations=disk"),
    ("odd/64", "training.gradient_checkpointing=sqrt; training.optimizer_in_backward=true"),
    ("odd/40", "training.gradient_checkpointing={ratio: 0.4}; memory.offload.optimizer=disk"),
    ("odd-windows/40", "memory.offload.parameters=disk; memory.kept_layers.parameters=11"),
    ("odd/40", "training.gradient_checkpointing={mixed: {layers: 17, first: full, others: [swiglu, norms]}}"),
    (
        "odd/61",
        "training.gradient_checkpointing={mixed: {layers: 30, first: none, others: [ffn]}}; memory.offload.activations=disk; memory.kept_layers.activations=9",
    ),
    (
        "llama-2-7b",
        "parallel.pipeline_parallel=2; training.gradient_checkpointing={mixed: {layers: 7, first: full, others: none}}; training.gradient_accumulation_steps=4",
    ),
    (
        "odd/50",
        "memory.offload={parameters: disk, gradients: disk, optimizer: disk, activations: disk}; \
         memory.kept_layers={parameters: 9, gradients: 10, optimizer: 25, activations: 40}",
    ),
    ("odd-biased/30", "memory.offload.gradients=host; training.gradient_accumulation_steps=7"),
    (
        "llama-2-7b",
        "memory.offload={parameters: disk, gradients: disk, optimizer: disk, activations: host}; \
         training.micro_batches_per_pass=3; training.gradient_accumulation_steps=8",
    ),
    ("llama-2-7b", "training.method=qlora; memory.offload.parameters=host; training.mlp_chunk_tokens=16"),
    ("gpt2/30", "training.optimizer=adalomo; training.optimizer_in_backward=true"),
    ("qwen3-0.6b", "training.optimizer=galore; training.gradient_accumulation_steps=3"),
    ("olmo-2-1b/33", "training.activation_compression=int8; training.gradient_checkpointing=full"),
    ("llama-3.1-8b", "training.method=lora; training.lora={use_dora: true}"),
    ("llama-3.1-8b", "parallel.data_parallel=8; training.gradient_accumulation_steps=3"),
    ("llama-2-7b", "parallel.data_parallel=4; parallel.zero_stage=1; training.mixed_precision=bf16"),
    ("llama-2-7b", "parallel.data_parallel=5; parallel.zero_stage=2; training.gradient_accumulation_steps=4"),
    (
        "llama-3.1-8b",
        "parallel.data_parallel=2; parallel.zero_stage=2; training.gradient_accumulation_steps=3; memory.offload.parameters=disk; memory.offload.gradients=disk; memory.offload.optimizer=disk",
    ),
    (
        "gpt2/30",
        "parallel.data_parallel=3; parallel.zero_stage=1; training.optimizer=lion; training.optimizer_in_backward=true",
    ),
    (
        "llama-3.1-8b",
        "parallel.data_parallel=16; parallel.zero_stage=1; parallel.reproducible=true; training.method=lora",
    ),
    ("odd/64", "parallel.reproducible=true; training.gradient_accumulation_steps=3"),
    ("llama-2-7b", "parallel.data_parallel=4; parallel.zero_stage=3; training.gradient_accumulation_steps=3"),
    (
        "llama-3.1-8b",
        "parallel.data_parallel=8; parallel.zero_stage=3; training.mixed_precision=bf16; training.optimizer_in_backward=true; memory.offload.parameters=disk; memory.offload.gradients=disk; memory.offload.optimizer=disk",
    ),
    ("llama-2-7b", "parallel.data_parallel=3; parallel.zero_stage=3; training.method=qlora"),
    (
        "llama-2-7b",
        "data.sequence_length=4096; training.sequence_chunk_tokens=1024; training.batch_size=1; training.gradient_checkpointing=full; training.gradient_accumulation_steps=3; memory.offload={parameters: disk, gradients: disk, optimizer: disk, activations: disk}",
    ),
    (
        "qwen3-0.6b",
        "data.sequence_length=2048; training.sequence_chunk_tokens=512; training.batch_size=1; training.gradient_checkpointing=full; memory.offload.activations=host",
    ),
    (
        "llama-2-7b",
        "parallel.context_parallel=4; parallel.zero_stage=3; data.sequence_length=4096; training.gradient_accumulation_steps=3; training.mixed_precision=bf16",
    ),
    (
        "gemma-2-2b",
        "parallel.data_parallel=2; parallel.context_parallel=2; data.sequence_length=2048; training.method=lora",
    ),
    ("llama-2-7b", "parallel.pipeline_parallel=4; training.gradient_accumulation_steps=8"),
    (
        "llama-2-7b",
        "parallel.pipeline_parallel=2; parallel.data_parallel=2; parallel.zero_stage=2; training.gradient_accumulation_steps=5; training.mixed_precision=bf16",
    ),
    (
        "qwen3-0.6b",
        "parallel.pipeline_parallel=2; parallel.pipeline_schedule=gpipe; training.gradient_accumulation_steps=4",
    ),
    (
        "llama-3.1-8b",
        "parallel.pipeline_parallel=2; training.method=lora; training.gradient_accumulation_steps=3",
    ),
    (
        "llama-3.1-8b",
        "parallel.pipeline_parallel=2; training.gradient_checkpointing=full; training.gradient_accumulation_steps=4; memory.offload={parameters: disk, gradients: disk, optimizer: disk, activations: disk}",
    ),
    (
        "llama-2-7b",
        "parallel.pipeline_parallel=3; parallel.tensor_parallel=2; training.gradient_accumulation_steps=40; training.gradient_checkpointing=full; data.sequence_length=2048",
    ),
    (
        "llama-2-7b",
        "parallel.pipeline_parallel=2; parallel.pipeline_schedule=interleaved; training.gradient_accumulation_steps=8",
    ),
    (
        "llama-3.1-70b",
        "parallel.pipeline_parallel=2; parallel.pipeline_schedule=interleaved; training.gradient_checkpointing=full; training.gradient_accumulation_steps=6; memory.offload={parameters: disk, gradients: disk, optimizer: disk, activations: disk}",
    ),
    (
        "llama-3.1-70b",
        "parallel.pipeline_parallel=2; parallel.pipeline_schedule=interleaved; parallel.virtual_stages=4; training.gradient_checkpointing=full; training.gradient_accumulation_steps=40",
    ),
    (
        "llama-3.1-70b",
        "parallel.pipeline_parallel=3; parallel.pipeline_schedule=interleaved; parallel.tensor_parallel=2; parallel.data_parallel=2; parallel.zero_stage=2; training.gradient_accumulation_steps=6; training.mixed_precision=bf16",
    ),
    (
        "llama-3.1-70b",
        "parallel.pipeline_parallel=2; parallel.pipeline_schedule=interleaved; training.method=lora; training.gradient_checkpointing={every: 2}; training.gradient_accumulation_steps=4",
    ),
    (
        "llama-2-7b",
        "parallel.data_parallel=8; parallel.shard_size=4; parallel.zero_stage=3; training.gradient_accumulation_steps=3",
    ),
    ("llama-2-7b", "parallel.tensor_parallel=2; training.gradient_accumulation_steps=3"),
    (
        "llama-2-7b",
        "memory.offload={parameters: host, gradients: host, optimizer: host, activations: host}; training.gradient_accumulation_steps=2",
    ),
    (
        "llama-2-7b",
        "memory.offload={parameters: disk, gradients: disk, optimizer: disk, activations: disk}; memory.prefetch=false; training.gradient_accumulation_steps=2",
    ),
    (
        "llama-2-7b",
        "parallel.data_parallel=2; parallel.zero_stage=3; memory.offload={parameters: disk, optimizer: disk}; memory.prefetch=false",
    ),
    (
        "llama-2-7b",
        "parallel.tensor_parallel=2; parallel.sequence_parallel=false; training.gradient_accumulation_steps=3",
    ),
    (
        "llama-3.1-8b",
        "parallel.tensor_parallel=4; parallel.data_parallel=2; parallel.zero_stage=3; training.mixed_precision=bf16",
    ),
    (
        "llama-2-7b",
        "parallel.tensor_parallel=2; parallel.pipeline_parallel=2; training.gradient_accumulation_steps=4; training.gradient_checkpointing=full",
    ),
    (
        "llama-3.1-8b",
        "parallel.tensor_parallel=2; parallel.context_parallel=2; data.sequence_length=1024; training.method=lora; training.gradient_accumulation_steps=2",
    ),
];

#[test]
fn layers_that_are_counted_do_what_they_would_if_they_were_run() {
    let text = std::fs::read_to_string(Path::new(FILE)).unwrap();
    let cases = cases(&text);
    let deeper: Vec<String> = cases.iter().map(|case| deeper(case.model)).collect();
    let of_file = cases.iter().zip(&deeper).map(|(case, model)| (model.as_str(), case.set.clone()));
    let of_many = OF_MANY_LAYERS.iter().map(|(model, set)| (*model, set.split("; ").collect()));
    for (model_name, set) in of_file.chain(of_many) {
        let name = format!("{model_name} {}", set.join("; "));
        let case = Case { name: &name, model: model_name, set, reason: "", measured: Vec::new() };
        let Choice { settings, accumulation, .. } = chosen(&case);
        let spec = model(model_name);
        few_do_what_all_do(&name, &spec, (&settings, accumulation), DeviceTraits::CPU);
        if settings.can_overlap() {
            let settings = StepSettings { overlap_communication: true, ..settings.clone() };
            let name = format!("{name}, exchanges behind the computation");
            few_do_what_all_do(&name, &spec, (&settings, accumulation), DeviceTraits::CPU);
        }
        // Stages of a pipeline differ, and so do ranks that share products.
        for rank in settings.ranks.mesh.model_group(0).into_iter().skip(1) {
            let ranks = Ranks { rank, ..settings.ranks };
            let (name, settings) =
                (format!("{name}, rank {rank}"), StepSettings { ranks, ..settings.clone() });
            few_do_what_all_do(&name, &spec, (&settings, accumulation), DeviceTraits::CPU);
        }
        if settings.offload.uses(Tier::Disk) {
            let apart = DeviceTraits { unified: false, alignment: 256, cuda: false };
            few_do_what_all_do(&name, &spec, (&settings, accumulation), apart);
        }
    }
}

fn few_do_what_all_do(
    name: &str,
    spec: &ModelSpec,
    (settings, accumulation): (&StepSettings, u64),
    traits: DeviceTraits,
) {
    // Whoever is apart has a link that copies by itself.
    let host_link = (!traits.unified).then_some(1e10);
    let rates = Rates { wiring: Wiring { device: traits, host_link, ..RATES.wiring }, ..RATES };
    let timed = |dry: Dry| dry.standing_for(traits).timed(Clock::new(rates));
    let all = DryRun::training_of_all(&timed(Dry::new()), spec, settings, accumulation).unwrap();
    let few = DryRun::training_of_few(&timed(Dry::tracing()), spec, settings, accumulation);
    let few = few.unwrap_or_else(|| panic!("{name}: every layer is run"));
    assert_eq!(measured(&few), measured(&all), "{name}");
    for [few, all] in [[&few.ledger, &all.ledger], [&few.host, &all.host], [&few.disk, &all.disk]] {
        assert_eq!(few.at_peak_by_layer(), all.at_peak_by_layer(), "{name}");
        assert_eq!(few.live(), all.live(), "{name}");
    }
    assert_eq!(few.tally, all.tally, "{name}");
    assert_eq!(few.moved, all.moved, "{name}");
    let seconds = [few, all].map(|run| (run.times.unwrap().elapsed, run.updates.elapsed));
    let [few, all] = seconds.map(|(step, _)| step);
    assert!((few / all - 1.0).abs() < 0.01, "{name}: {few} s, {all} s");
    let [of_few, of_all] = seconds.map(|(_, updates)| updates);
    assert!((of_few - of_all).abs() < 0.01 * all, "{name}: {of_few} s of updates, {of_all} s");
}

/// The same with enough layers for some of them to be counted.
fn deeper(model: &str) -> String {
    let (name, layers) = model.split_once('/').unwrap_or((model, ""));
    match (name, layers) {
        ("smollm2-135m", "") => model.to_owned(),
        // Whole segments go.
        ("odd", "9") => "odd/64".to_owned(),
        _ => format!("{name}/24"),
    }
}

#[test]
#[ignore = "writes golden_peaks.txt anew"]
fn write_the_peaks_anew() {
    let text = std::fs::read_to_string(Path::new(FILE)).unwrap();
    let (head, _) = text.split_once("\n\n[").unwrap();
    let mut new = format!("{head}\n");
    for case in &cases(&text) {
        write!(new, "\n{}", block(case, &measured(&chosen(case).dry_run))).unwrap();
    }
    std::fs::write(Path::new(FILE), new).unwrap();
}
