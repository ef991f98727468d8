//! Training what lives on disk between its uses, as a user does it: the same bits as in memory, and what was planned.

use std::path::Path;

use crate::support::{folder, ok};
use serde_json::Value;

const AWAY: [&str; 8] = [
    "--set",
    "memory.offload.parameters=disk",
    "--set",
    "memory.offload.gradients=disk",
    "--set",
    "memory.offload.optimizer=disk",
    "--set",
    "memory.offload.activations=disk",
];

fn report(path: &Path, run: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path.join(run).join("report.json")).unwrap()).unwrap()
}

/// What was planned was measured on every tier.
fn as_planned(report: &Value) {
    for key in ["device_peak_bytes", "host_peak_bytes", "disk_bytes"] {
        assert_eq!(report["planned"][key], report["measured"][key], "{key}: {report}");
    }
}

fn same(path: &Path, file: &str, runs: [&str; 2]) {
    let [a, b] = runs.map(|run| std::fs::read(path.join(run).join(file)).unwrap());
    assert!(a == b, "{file} of {runs:?} differ");
}

#[test]
fn a_run_on_disk_has_the_bits_of_one_in_memory_and_can_be_resumed() {
    let folder = folder();
    let path = folder.path();
    let train = |run: &str, more: &[&str]| {
        let output = format!("output.dir={run}");
        let fixed =
            ["train", "c.yaml", "--set", "model.from_scratch.hidden_size=64", "--set", "output.save_steps=2"];
        ok(path, &[&fixed, &["--set", &output][..], more].concat());
    };
    train("memory", &[]);
    train("disk", &AWAY);
    same(path, "model.safetensors", ["memory", "disk"]);
    // The last of the two layers stays.
    let kept = "memory.kept_layers={optimizer: 1, gradients: 1, activations: 1, parameters: 1}";
    let part = [&AWAY[..], &["--set", kept]].concat();
    train("part", &part);
    same(path, "model.safetensors", ["memory", "part"]);
    as_planned(&report(path, "part"));
    let on_disk = |run: &str| report(path, run)["planned"]["disk_bytes"].as_u64().unwrap();
    assert!(on_disk("part") > 0 && on_disk("part") < on_disk("disk"));
    let found = report(path, "disk");
    as_planned(&found);
    assert!(found["planned"]["disk_bytes"].as_u64().unwrap() > 0, "{found}");
    assert!(found["io"]["bytes_read"].as_u64().unwrap() > 0, "{found}");

    // Checkpoints of either can be gone on from by the other.
    let steps = report(path, "memory")["steps"].as_u64().unwrap();
    let last = std::fs::read_dir(path.join("disk")).unwrap().flatten().map(|entry| entry.file_name());
    let last = last.filter_map(|name| name.to_str()?.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    let before = last.filter(|step| *step < steps).max().unwrap();
    for (from, to, away) in [
        ("disk", "then-memory", &[][..]),
        ("memory", "then-disk", &AWAY[..]),
        ("part", "part-then-memory", &[]),
        ("disk", "then-part", &part),
    ] {
        let checkpoint = format!("checkpoint-{before}");
        copy(&path.join(from).join(&checkpoint), &path.join(to).join(&checkpoint));
        for file in std::fs::read_dir(path.join(from)).unwrap().flatten() {
            if file.file_type().unwrap().is_file() && file.file_name() != "metrics.jsonl" {
                std::fs::copy(file.path(), path.join(to).join(file.file_name())).unwrap();
            }
        }
        train(to, &[&["--resume"], away].concat());
        same(path, "model.safetensors", [from, to]);
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for file in std::fs::read_dir(from).unwrap().flatten() {
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

#[test]
fn frozen_weights_come_from_the_files_that_hold_them() {
    let folder = folder();
    let path = folder.path();
    let base = ["model.from_scratch.hidden_size=64", "output.dir=base", "training.mixed_precision=f32"];
    ok(path, &[&["train", "c.yaml"][..], &base.map(|set| ["--set", set]).concat()].concat());
    ok(path, &["convert", "--model", "base", "--output", "base.gguf", "--dtype", "q8_0"]);
    for (model, method) in [("base", "lora"), ("base.gguf", "qlora"), ("base", "qlora")] {
        let config = format!(
            "
model: {model}
data: {{train: text.txt, sequence_length: 12}}
training: {{method: {method}, steps: 4, batch_size: 2, gradient_accumulation_steps: 1, learning_rate: 1e-2, mixed_precision: f32, lora: {{rank: 4}}}}
memory: {{device_budget: 256MiB}}
"
        );
        std::fs::write(path.join("lora.yaml"), config).unwrap();
        let train = |run: &str, more: &[&str]| {
            let _ = std::fs::remove_dir_all(path.join(run));
            let output = format!("output.dir={run}");
            ok(path, &[&["train", "lora.yaml", "--set", &output], more].concat());
        };
        train("memory", &[]);
        train("disk", &["--set", "memory.offload.parameters=disk"]);
        same(path, "adapter_model.safetensors", ["memory", "disk"]);
        let found = report(path, "disk");
        as_planned(&found);
        let (spilled, read) = (&found["planned"]["disk_bytes"], &found["io"]["bytes_read"]);
        assert!(read.as_u64().unwrap() > 0, "{found}");
        // NF4 of f32 matrices is in no file, and the rows of queries and keys have another order in a GGUF: these are
        // written to a file of the run's own.
        assert_eq!(spilled.as_u64().unwrap() > 0, method == "qlora", "{found}");
    }
}
