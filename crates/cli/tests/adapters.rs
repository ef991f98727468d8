//! Training adapters and using them, as a user does it.

use std::path::Path;

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

/// A small trained base in `base`, and a configuration that trains adapters of it into `lora`.
fn base() -> tempfile::TempDir {
    let folder = folder();
    let path = folder.path();
    let sizes = "model.from_scratch.hidden_size=64";
    ok(path, &["train", "c.yaml", "--set", sizes, "--set", "output.dir=base"]);
    let config = "
model: base
data: {train: text.txt, sequence_length: 12}
training: {method: lora, steps: 4, batch_size: 2, gradient_accumulation_steps: 1, learning_rate: 1e-2, lora: {rank: 4}}
memory: {device_budget: 256MiB}
output: {dir: lora, save_steps: 2}
";
    std::fs::write(path.join("lora.yaml"), config).unwrap();
    folder
}

fn json(path: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path.join(name)).unwrap()).unwrap()
}

fn loss(path: &Path, arguments: &[&str]) -> f64 {
    let data = ["eval", "--data", "text.txt", "--sequence-length", "12", "--json"];
    let out = ok(path, &[&data, arguments].concat());
    serde_json::from_str::<Value>(&out).unwrap()["loss"].as_f64().unwrap()
}

fn fails(path: &Path, arguments: &[&str]) -> String {
    let output = plimsoll(path, arguments);
    assert!(!output.status.success(), "{arguments:?}");
    text(&output.stderr)
}

#[test]
fn a_run_leaves_a_peft_folder_that_every_command_takes() {
    let folder = base();
    let path = folder.path();
    let plan: Value = serde_json::from_str(&ok(path, &["plan", "lora.yaml", "--json"])).unwrap();
    let [all, trained] =
        ["parameters", "trainable_parameters"].map(|key| plan["model"][key].as_u64().unwrap());
    assert!(trained > 0 && trained * 4 < all, "{trained} of {all}");
    let words = ok(path, &["plan", "lora.yaml"]);
    assert!(words.contains("trained: ") && words.contains(" %; adapters of 14 modules"), "{words}");
    ok(path, &["train", "lora.yaml"]);
    let report = json(path, "lora/report.json");
    assert_eq!(report["planned"]["device_peak_bytes"], report["measured"]["device_peak_bytes"]);
    assert_eq!(report["measured"]["device_peak_bytes"], plan["memory"]["device"]["peak_bytes"]);
    let config = json(path, "lora/adapter_config.json");
    assert_eq!((&config["peft_type"], &config["r"]), (&"LORA".into(), &4.into()));
    assert!(!path.join("lora/model.safetensors").exists());

    let (plain, adapted) =
        (loss(path, &["--model", "base"]), loss(path, &["--model", "base", "--adapter", "lora"]));
    assert!(adapted < plain, "{adapted} {plain}");
    let halves =
        loss(path, &["--model", "base", "--adapter", "lora=0.5", "--adapter", "lora/checkpoint-4=0.5"]);
    assert!((halves - adapted).abs() < 1e-5, "{halves} {adapted}");
    ok(path, &["merge", "--model", "base", "--adapter", "lora", "--output", "merged", "--dtype", "f32"]);
    let merged = loss(path, &["--model", "merged"]);
    assert!((merged - adapted).abs() < 1e-4, "{merged} {adapted}");
    let weighted = ["--adapter", "lora=0.5", "--adapter", "lora/checkpoint-4=0.5", "--output", "halves"];
    ok(path, &[&["merge", "--model", "base", "--dtype", "f32"], &weighted[..]].concat());
    let merged = loss(path, &["--model", "halves"]);
    assert!((merged - halves).abs() < 1e-4, "{merged} {halves}");
    let prompt = ["--prompt", "word1 ", "--max-tokens", "8", "--temperature", "0"];
    let say = |model: &[&str]| ok(path, &[&["generate"], model, &prompt[..]].concat());
    assert_eq!(say(&["--model", "base", "--adapter", "lora"]), say(&["--model", "merged"]));
    let seen = ok(path, &["inspect", "lora"]);
    assert!(seen.contains("LORA") || seen.contains("LoRA"), "{seen}");
}

#[test]
fn a_resumed_run_has_the_bits_of_an_unbroken_one() {
    let folder = base();
    let path = folder.path();
    let dropout = ["--set", "training.lora.dropout=0.2", "--set", "training.lora.use_dora=true"];
    let train = |rest: &[&str]| ok(path, &[&["train", "lora.yaml"], &dropout[..], rest].concat());
    train(&["--set", "output.dir=whole"]);
    train(&["--set", "output.dir=parts"]);
    // As if the run had been killed after its first checkpoint.
    for name in ["checkpoint-4", "adapter_model.safetensors"] {
        let victim = path.join("parts").join(name);
        if victim.is_dir() {
            std::fs::remove_dir_all(&victim).unwrap();
        } else {
            std::fs::remove_file(&victim).unwrap();
        }
    }
    train(&["--set", "output.dir=parts", "--resume"]);
    let bytes = |run: &str| std::fs::read(path.join(run).join("adapter_model.safetensors")).unwrap();
    assert!(bytes("whole") == bytes("parts"));
}

#[test]
fn adapters_that_begin_with_singular_values_are_written_for_the_base_as_it_is() {
    let folder = base();
    let path = folder.path();
    let plain = loss(path, &["--model", "base"]);
    for (init, more) in
        [("pissa", "training.lora.use_dora=true"), ("pissa_niter_4", "training.lora.dropout=0.2")]
    {
        let begin = format!("training.lora.init_lora_weights={init}");
        let train = |run: &str, rest: &[&str]| {
            let dir = format!("output.dir={init}-{run}");
            let set = ["--set", begin.as_str(), "--set", more, "--set", dir.as_str()];
            ok(path, &[&["train", "lora.yaml"], &set[..], rest].concat())
        };
        let [whole, parts] = ["whole", "parts"].map(|run| path.join(format!("{init}-{run}")));
        train("whole", &[]);
        train("parts", &[]);
        std::fs::remove_dir_all(parts.join("checkpoint-4")).unwrap();
        std::fs::remove_dir_all(parts.join("initial_adapter")).unwrap();
        std::fs::remove_file(parts.join("adapter_model.safetensors")).unwrap();
        train("parts", &["--resume"]);
        // What it began with is half of it, found again from the checkpoint.
        let bytes = |run: &Path| std::fs::read(run.join("adapter_model.safetensors")).unwrap();
        assert!(bytes(&whole) == bytes(&parts), "{init}");
        let config = json(&whole, "adapter_config.json");
        assert_eq!((&config["r"], &config["init_lora_weights"]), (&8.into(), &true.into()));
        let run = format!("{init}-whole");
        let adapted = loss(path, &["--model", "base", "--adapter", &run]);
        assert!(adapted < plain, "{init}: {adapted} {plain}");
        let first = loss(path, &["--model", "base", "--adapter", &format!("{run}/checkpoint-2")]);
        // Half of the steps at so high a rate are no gain yet.
        assert!(adapted < first, "{init}: {adapted} {first}");
        let report = json(&whole, "report.json");
        assert_eq!(report["planned"]["device_peak_bytes"], report["measured"]["device_peak_bytes"]);
    }
    // Blocks of a file cannot be changed, but what is left of them can be stored anew.
    ok(path, &["convert", "--model", "base", "--output", "base.gguf", "--dtype", "q8_0"]);
    let gguf =
        ["train", "lora.yaml", "--set", "model=base.gguf", "--set", "training.lora.init_lora_weights=pissa"];
    let error = fails(path, &[&gguf[..], &["--set", "output.dir=gguf"]].concat());
    assert!(error.contains("pissa") && error.contains("training.quantization to nf4"), "{error}");
    let anew =
        ["--set", "output.dir=gguf", "--set", "training.method=qlora", "--set", "training.quantization=nf4"];
    ok(path, &[&gguf[..], &anew].concat());
    let error = fails(path, &["train", "lora.yaml", "--set", "training.lora.init_lora_weights=pissa_niter"]);
    assert!(error.contains("pissa_niter_N"), "{error}");
}

#[test]
fn quantised_bases_train_and_stay_as_they_are() {
    let folder = base();
    let path = folder.path();
    for (method, quantization) in [("qlora", "nf4"), ("lora", "q8_0"), ("qlora", "int8")] {
        let dir = format!("output.dir={quantization}");
        let (method, storage) =
            (format!("training.method={method}"), format!("training.quantization={quantization}"));
        let set = ["--set", dir.as_str(), "--set", method.as_str(), "--set", storage.as_str()];
        ok(path, &[&["train", "lora.yaml"], &set[..]].concat());
        let report = json(path, &format!("{quantization}/report.json"));
        assert_eq!(report["planned"]["device_peak_bytes"], report["measured"]["device_peak_bytes"]);
        let base = ["--model", "base", "--quantize", quantization];
        let adapted = loss(path, &[&base[..], &["--adapter", quantization]].concat());
        let plain = loss(path, &base);
        assert!(adapted < plain, "{quantization}: {adapted} {plain}");
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let folder = base();
    let path = folder.path();
    let set = |assignment: &str| fails(path, &["train", "lora.yaml", "--set", assignment]);
    let error = set("training.lora.target_modules=[query]");
    assert!(error.contains("query") && error.contains("q_proj") && error.contains("all-linear"), "{error}");
    let error = set("training.lora.rank=0");
    assert!(error.contains("training.lora.rank"), "{error}");
    let error = set("training.lora.modules_to_save=[heads]");
    assert!(error.contains("heads"), "{error}");
    let error = fails(path, &["train", "c.yaml", "--set", "training.lora.rank=8"]);
    assert!(error.contains("training.method"), "{error}");
    let error = fails(
        path,
        &["train", "lora.yaml", "--set", "training.method=full", "--set", "training.quantization=nf4"],
    );
    assert!(error.contains("training.quantization"), "{error}");

    ok(path, &["train", "lora.yaml"]);
    let small = "model.from_scratch.hidden_size=32";
    ok(path, &["train", "c.yaml", "--set", small, "--set", "output.dir=other"]);
    let data = ["--data", "text.txt", "--sequence-length", "12"];
    let error = fails(path, &[&["eval", "--model", "other", "--adapter", "lora"], &data[..]].concat());
    assert!(error.contains("belongs to another"), "{error}");
    let weights = path.join("lora/adapter_model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&weights, &bytes).unwrap();
    let error = fails(path, &[&["eval", "--model", "base", "--adapter", "lora"], &data[..]].concat());
    assert!(error.contains("NaN"), "{error}");
    std::fs::write(&weights, &bytes[..end - 100]).unwrap();
    let error = fails(path, &[&["eval", "--model", "base", "--adapter", "lora"], &data[..]].concat());
    assert!(error.contains("adapter_model.safetensors"), "{error}");
}
