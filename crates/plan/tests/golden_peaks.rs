//! What steps take of the device, the host and the disk, to the byte, beside what they took before (`golden_peaks.txt`).
//!
//! A plan is the step run dry, so that memory which both of them waste is seen by no test that compares the two. This one
//! sees it, and every saving too. Where a number changes for a reason, write the file anew and give the reason in it:
//!
//!     cargo test --release --workspace --locked --test golden_peaks -- --ignored

use std::fmt::Write as _;
use std::path::Path;

use plimsoll_disk::Moved;
use plimsoll_memory::{AtPeak, Ledger, Tag};
use plimsoll_model::{
    Activation, AttentionSpec, MlpSpec, ModelSpec, NormKind, NormSpec, RopeSpec, SlidingWindow, catalogue,
};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{DiskRates, DryRun, Machine, ProcessLimits, Rates, TrainingPlan};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden_peaks.txt");

/// What holds unless a case says otherwise: nothing is left to the planner.
const USUAL: [&str; 12] = [
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
            norm: NormSpec { kind: NormKind::Layer, ..odd().norm },
            tie_word_embeddings: false,
            ..odd()
        },
        name => catalogue::find(name).unwrap(),
    };
    let layers = layers.map_or(spec.num_layers, |layers| layers.parse::<u32>().unwrap());
    let mut spec = ModelSpec { num_layers: layers, ..spec };
    if let Some(window) = &mut spec.attention.sliding_window {
        window.layers.truncate(layers as usize);
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
        norm: NormSpec::rms(1e-5),
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: true,
        max_position_embeddings: 4096,
        initializer_range: 0.2,
        bos_token: None,
        eos_tokens: vec![2],
    }
}

fn dry_run(case: &Case<'_>) -> DryRun {
    let rates = Rates {
        matmul_f32: 1e11,
        matmul_bf16: 1e11,
        memory_bandwidth: 1e10,
        exps: 1e9,
        disk: DiskRates::USUAL,
    };
    let limits = ProcessLimits::NONE;
    let machine =
        Machine { rates, limits, overhead_bytes: 0, host_bytes_per_token: 0, disk_available: Some(1 << 60) };
    let mut config = RawConfig::from_str("{}", case.name).unwrap();
    for assignment in USUAL.iter().chain(&case.set) {
        config.apply_set(assignment).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    }
    let plan = TrainingPlan::new(&config, &model(case.model), &machine);
    plan.unwrap_or_else(|error| panic!("{}: {error}", case.name)).choice.dry_run
}

/// The lines of a dry run.
fn measured(run: &DryRun) -> Vec<String> {
    let DryRun { ledger, host, disk, moved, .. } = run;
    let Moved { read, written } = moved;
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
        let now = measured(&dry_run(case));
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

#[test]
#[ignore = "writes golden_peaks.txt anew"]
fn write_the_peaks_anew() {
    let text = std::fs::read_to_string(Path::new(FILE)).unwrap();
    let (head, _) = text.split_once("\n\n[").unwrap();
    let mut new = format!("{head}\n");
    for case in &cases(&text) {
        write!(new, "\n{}", block(case, &measured(&dry_run(case)))).unwrap();
    }
    std::fs::write(Path::new(FILE), new).unwrap();
}
