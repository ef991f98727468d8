//! Models that begin from nothing: every family, and a tokenizer that is trained on the data.

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

const FAMILIES: [&str; 11] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "olmo2",
    "deepseek_v3",
];

fn set(values: &[&str]) -> Vec<String> {
    values.iter().flat_map(|value| ["--set".to_owned(), (*value).to_owned()]).collect()
}

/// A command line with such values behind it.
fn with<'a>(command: &[&'a str], values: &'a [String]) -> Vec<&'a str> {
    command.iter().copied().chain(values.iter().map(String::as_str)).collect()
}

#[test]
fn every_family_trains_is_saved_and_loads_again() {
    let folder = folder();
    for family in FAMILIES {
        let out = format!("out-{family}");
        let values = set(&[
            &format!("model.from_scratch.architecture={family}"),
            "model.from_scratch.tokenizer={train: bpe, vocab_size: 300}",
            &format!("output.dir={out}"),
            "training.steps=2",
        ]);
        let experts =
            if family == "deepseek_v3" { set(&["model.from_scratch.num_experts=4"]) } else { Vec::new() };
        let values = [values, experts].concat();
        let arguments = with(&["train", "c.yaml", "--json"], &values);
        let report: Value = serde_json::from_str(&ok(folder.path(), &arguments)).unwrap();
        assert_eq!(
            report["planned"]["device_peak_bytes"], report["measured"]["device_peak_bytes"],
            "{family}"
        );
        let model = folder.path().join(&out);
        assert!(model.join("tokenizer/tokenizer.json").is_file() && model.join("plimsoll.yaml").is_file());
        let saved = ["final", "model", "."]
            .map(|name| model.join(name))
            .into_iter()
            .find(|path| path.join("config.json").is_file());
        let saved = saved.unwrap_or_else(|| {
            panic!("{family}: {:?}", std::fs::read_dir(&model).unwrap().collect::<Vec<_>>())
        });
        let config: Value =
            serde_json::from_slice(&std::fs::read(saved.join("config.json")).unwrap()).unwrap();
        let model_type = if family == "gemma3" { "gemma3_text" } else { family };
        assert_eq!(
            (&config["model_type"], &config["vocab_size"], &config["eos_token_id"]),
            (&model_type.into(), &300.into(), &0.into())
        );
        let evaluated = ok(
            folder.path(),
            &[
                "eval",
                "--model",
                saved.to_str().unwrap(),
                "--data",
                "text.txt",
                "--sequence-length",
                "12",
                "--json",
            ],
        );
        let evaluated: Value = serde_json::from_str(&evaluated).unwrap();
        assert!(evaluated["loss"].as_f64().unwrap().is_finite(), "{family}");
        if family == "gpt2" {
            // There are no positions beyond those that were learned.
            let eval = ["eval", "--model", saved.to_str().unwrap(), "--data", "text.txt"];
            ok(folder.path(), &eval);
            let refused = plimsoll(folder.path(), &[&eval[..], &["--sequence-length", "13"]].concat());
            assert_eq!(refused.status.code(), Some(2));
            assert!(text(&refused.stderr).contains("has learned 12 positions and none beyond"));
        }
    }
}

/// How long a word is decides neither how much memory its tokens take nor how long a tokenizer learns from it.
#[test]
fn a_word_without_an_end_keeps_to_the_line() {
    let folder = folder();
    std::fs::write(folder.path().join("word.txt"), "x".repeat(2_000_000)).unwrap();
    let train = |more: &[&str]| {
        let values = set(&[&["data.train=word.txt", "training.steps=1"], more].concat());
        let values = values.iter().map(String::as_str);
        let arguments: Vec<&str> =
            ["train", "c.yaml", "--json", "--memory", "96MiB"].into_iter().chain(values).collect();
        ok(folder.path(), &arguments);
    };
    train(&[]);
    train(&["model.from_scratch.tokenizer={train: bpe, vocab_size: 300}", "output.dir=bpe"]);
}

#[test]
fn what_is_said_of_experts_needs_some() {
    let folder = folder();
    for set in
        ["training.router_z_loss_coef=0.001", "training.expert_capacity_factor=1.5", "memory.expert_slots=4"]
    {
        let output = plimsoll(folder.path(), &["plan", "c.yaml", "--set", set]);
        let (key, _) = set.split_once('=').unwrap();
        let error = text(&output.stderr);
        assert!(error.contains(&format!("{key} is about experts, and the model has none")), "{error}");
        assert_eq!(output.status.code(), Some(2));
    }
    ok(folder.path(), &["plan", "c.yaml", "--set", "training.router_z_loss_coef=0"]);
}

/// Slots are for experts that are frozen, and for no more than there are.
#[test]
fn slots_that_no_expert_has_use_for_are_refused() {
    let folder = folder();
    let mixture = set(&[
        "model.from_scratch.architecture=moe",
        "model.from_scratch.num_experts=4",
        "output.dir=base",
        "training.steps=1",
    ]);
    let begin = with(&["train", "c.yaml"], &mixture);
    ok(folder.path(), &begin);
    let said = |method: &str, slots: &str| {
        let (method, slots) = (format!("training={{{method}}}"), format!("memory.expert_slots={slots}"));
        let sets = set(&["model=base", &method, &slots]);
        let arguments = with(&["plan", "c.yaml"], &sets);
        let output = plimsoll(folder.path(), &arguments);
        (output.status.code(), text(&output.stderr))
    };
    for (method, slots, words) in [
        ("", "2", "set training.method to lora or qlora"),
        ("method: full", "2", "set training.method to lora or qlora"),
        ("method: lora", "9", "the model has 8 experts in all its layers"),
    ] {
        let (code, error) = said(method, slots);
        assert!(code == Some(2) && error.contains(words), "{error}");
    }
    for (method, slots) in [("method: full", "0"), ("method: lora", "8")] {
        assert_eq!(said(method, slots).0, Some(0), "{method} {slots}");
    }
}

/// Experts without matrices, with a capacity: the run takes what was planned, and its model loads, answers, and is no GGUF.
#[test]
fn moe_plus_plus_trains_is_saved_and_answers() {
    let folder = folder();
    let values = set(&[
        "model.from_scratch.architecture=moe",
        "model.from_scratch.num_experts=4",
        "model.from_scratch.shared_experts=1",
        "model.from_scratch.zero_experts=1",
        "model.from_scratch.copy_experts=1",
        "model.from_scratch.constant_experts=2",
        "training.expert_capacity_factor=0.8",
        "training.router_z_loss_coef=0.001",
        "training.router_jitter_noise=0.01",
        "training.steps=2",
    ]);
    let arguments = with(&["train", "c.yaml", "--json"], &values);
    let report: Value = serde_json::from_str(&ok(folder.path(), &arguments)).unwrap();
    assert_eq!(report["planned"]["device_peak_bytes"], report["measured"]["device_peak_bytes"]);
    let metrics = std::fs::read_to_string(folder.path().join("out/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let load = &last["experts"][0];
    assert_eq!(load["fractions"].as_array().unwrap().len(), 8);
    assert!(load["dropped"].as_f64().unwrap() > 0.0, "{load}");
    let saved = ["final", "model", "."]
        .map(|name| folder.path().join("out").join(name))
        .into_iter()
        .find(|path| path.join("config.json").is_file())
        .unwrap();
    let config: Value = serde_json::from_slice(&std::fs::read(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["model_type"], &config["moe_tau"]), (&"plimsoll_moe".into(), &0.75.into()));
    let model = saved.to_str().unwrap();
    ok(
        folder.path(),
        &["generate", "--model", model, "--prompt", "a", "--max-tokens", "3", "--temperature", "0"],
    );
    let output = plimsoll(folder.path(), &["convert", "--model", model, "--output", "m.gguf"]);
    assert!(!output.status.success() && !folder.path().join("m.gguf").exists());
    assert!(String::from_utf8_lossy(&output.stderr).contains("a family of Plimsoll's own"), "{output:?}");
}

/// QLoRA over experts that come one by one from below: each is quantised as the whole stack would be, so that losses have the same
/// bits with all of them in memory. A matrix of theirs is one run of doubly quantised NF4.
#[test]
fn experts_that_come_one_by_one_are_quantised_as_the_whole() {
    let folder = folder();
    let values = set(&[
        "model.from_scratch.architecture=mixtral",
        "model.from_scratch.hidden_size=128",
        "model.from_scratch.intermediate_size=128",
        "model.from_scratch.num_experts=4",
        "training.steps=1",
        "output.dir=base",
    ]);
    let run = |values: &[String]| {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        ok(folder.path(), &[&["train", "c.yaml", "--json"], values.as_slice()].concat())
    };
    run(&values);
    let losses = |out: &str, more: &[&str]| -> Vec<u64> {
        let (model, dir) = ("model=base".to_owned(), format!("output.dir={out}"));
        let usual = [&model, &dir, "training.method=qlora", "training.lora.rank=4", "training.steps=3"];
        let report: Value = serde_json::from_str(&run(&set(&[&usual[..], more].concat()))).unwrap();
        for peak in ["device_peak_bytes", "host_peak_bytes", "disk_bytes"] {
            assert_eq!(report["planned"][peak], report["measured"][peak], "{out}: {peak}");
        }
        let metrics = std::fs::read_to_string(folder.path().join(out).join("metrics.jsonl")).unwrap();
        let loss =
            |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap().to_bits();
        metrics.lines().map(loss).collect()
    };
    let whole = losses("whole", &["memory.expert_slots=0"]);
    assert_eq!(whole.len(), 3);
    for (out, tier, kind) in [("disk", "disk", "nf4"), ("host", "host", "nf4"), ("plain", "disk", "nf4_f32")]
    {
        let (tier, kind) =
            (format!("memory.offload={{parameters: {tier}}}"), format!("training.quantization={kind}"));
        let by_one = losses(out, &[&tier, &kind, "memory.expert_slots=2"]);
        let expected = match kind.ends_with("nf4") {
            true => whole.clone(),
            false => losses("whole-plain", &[&kind, "memory.expert_slots=0"]),
        };
        assert_eq!(by_one, expected, "{tier} {kind}");
    }
}

#[test]
fn a_trained_tokenizer_is_kept_with_the_run() {
    let folder = folder();
    let values = set(&["model.from_scratch.tokenizer={train: bpe, vocab_size: 300}", "training.steps=4"]);
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    let plan = ok(folder.path(), &[&["plan", "c.yaml", "--json"], values.as_slice()].concat());
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert!(plan["fits"].as_bool().unwrap());
    ok(folder.path(), &[&["train", "c.yaml"], values.as_slice(), &["--set", "training.steps=2"]].concat());
    let file = folder.path().join("out/tokenizer/tokenizer.json");
    let before = std::fs::read(&file).unwrap();
    // What is continued reads with the tokenizer that it began with.
    ok(folder.path(), &[&["train", "c.yaml", "--resume"], values.as_slice()].concat());
    assert_eq!(std::fs::read(&file).unwrap(), before);
    // The resolved configuration can be run again, and gives the same tokenizer.
    ok(folder.path(), &["train", "out/plimsoll.yaml", "--set", "output.dir=again"]);
    assert_eq!(std::fs::read(folder.path().join("again/tokenizer/tokenizer.json")).unwrap(), before);
    let wrong = plimsoll(
        folder.path(),
        &["plan", "c.yaml", "--set", "model.from_scratch.tokenizer={train: wordpiece, vocab_size: 9}"],
    );
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        text(&wrong.stderr).contains("{train: bpe, vocab_size: 257 to 1048576}"),
        "{}",
        text(&wrong.stderr)
    );
}
