//! `plimsoll bench memory` on a tiny model: planned peaks are measured ones for every technique, and the pictures are
//! whole. `plimsoll bench step`: what is measured is the step that was planned. `plimsoll bench disk`: every way is measured, and nothing is left on the disk.

use std::path::Path;
use std::process::{Command, Output};

use crate::svg::well_formed;
use serde_json::Value;

const MODEL: &str = "model.from_scratch={hidden_size: 16, intermediate_size: 24, num_hidden_layers: 4, num_attention_heads: 2}";

fn bench(folder: &Path, arguments: &[&str]) -> Output {
    bench_of("memory", folder, arguments)
}

fn bench_of(what: &str, folder: &Path, arguments: &[&str]) -> Output {
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.join("text.txt"), words).unwrap();
    Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .current_dir(folder)
        .args(["bench", what, "--set", MODEL, "--batch-size", "2", "--sequence-length", "12"])
        .args(["--threads", "1", "--data", "text.txt"])
        .args(arguments)
        .output()
        .unwrap()
}

fn document(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn names(rungs: &Value) -> Vec<&str> {
    rungs.as_array().unwrap().iter().map(|rung| rung["name"].as_str().unwrap()).collect()
}

#[test]
fn every_technique_takes_what_was_planned_and_pictures_are_whole() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench(folder.path(), &["--steps", "2", "--json", "--out", "out"]);
    let report = document(&output);
    let (ladder, alone) = (&report["ladder"], &report["alone"]);
    let rungs = || ladder.as_array().unwrap().iter().chain(alone.as_array().unwrap());
    assert!(rungs().count() > 30);
    for rung in rungs() {
        let name = &rung["name"];
        assert!(rung["error"].is_null(), "{name}: {}", rung["error"]);
        assert_eq!(rung["planned"]["peak_bytes"], rung["measured"]["peak_bytes"], "{name}");
        assert!(rung["measured"]["process_rss_bytes"].as_u64().unwrap() > 0, "{name}");
        assert_eq!(rung["measured"]["losses"].as_array().unwrap().len(), 2, "{name}");
        let by_tag: u64 =
            rung["planned"]["at_peak"].as_object().unwrap().values().map(|b| b.as_u64().unwrap()).sum();
        assert_eq!(rung["planned"]["peak_bytes"], by_tag, "{name}");
    }
    // The rungs are the techniques that have a place in the ladder, in the order in which they are tried alone.
    let (ladder, alone) = (names(ladder), names(alone));
    assert_eq!(ladder[0], "baseline");
    let places: Vec<_> = ladder[1..].iter().map(|name| alone.iter().position(|n| n == name)).collect();
    assert!(places.len() > 5 && places.iter().all(Option::is_some) && places.is_sorted(), "{ladder:?}");
    // What only computes again changes nothing.
    let checkpoints = rungs().filter(|rung| rung["group"] == "checkpointing");
    assert!(checkpoints.clone().count() > 5);
    checkpoints.for_each(|rung| assert_eq!(rung["measured"]["same_losses"], true, "{}", rung["name"]));

    let file = |name: &str| std::fs::read_to_string(folder.path().join("out").join(name)).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&file("memory.json")).unwrap(), report);
    for name in ["memory-ladder.svg", "checkpointing.svg"] {
        well_formed(&file(name));
    }
    assert!(ladder.iter().all(|name| file("memory-ladder.svg").contains(name)));
    assert!(file("memory.md").contains("| checkpoint_full |"));
}

#[test]
fn plans_need_no_training_and_techniques_can_be_chosen() {
    let folder = tempfile::tempdir().unwrap();
    let only = ["--plan-only", "--only", "in_backward,checkpoint_full,sgd", "--json"];
    let report = document(&bench(folder.path(), &only));
    assert_eq!(names(&report["ladder"]), ["baseline", "checkpoint_full", "in_backward"]);
    assert_eq!(names(&report["alone"]), ["checkpoint_full", "in_backward", "sgd"]);
    assert!(report["ladder"][0]["measured"].is_null());
    let table = bench(folder.path(), &["--plan-only"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("each alone"));

    let wrong = bench(folder.path(), &["--only", "magic"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("checkpoint_full"));
}

/// What a configuration says is trained, and said.
#[test]
fn a_configuration_decides_what_no_flag_does() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text.txt"), "word ".repeat(200)).unwrap();
    std::fs::write(
        folder.path().join("c.yaml"),
        format!("{}\ndata: {{train: text.txt, sequence_length: 12}}\ntraining: {{batch_size: 3, learning_rate: 0.1}}\n",
            MODEL.replacen("model.from_scratch=", "model:\n  from_scratch: ", 1)),
    )
    .unwrap();
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).current_dir(folder.path());
        command.args(["bench", "memory", "c.yaml", "--only", "loss_chunks", "--steps", "3", "--json"]);
        document(&command.args(more).output().unwrap())
    };
    let losses = |document: &Value| document["ladder"][0]["measured"]["losses"].clone();
    let said = run(&[]);
    assert_eq!((&said["batch_size"], &said["sequence_length"]), (&3.into(), &12.into()));
    assert_eq!(losses(&said), losses(&run(&["--set", "training.learning_rate=0.1"])));
    assert_ne!(losses(&said), losses(&run(&["--set", "training.learning_rate=0.001"])));
    let set = run(&["--set", "data.sequence_length=8", "--batch-size", "2"]);
    assert_eq!((&set["batch_size"], &set["sequence_length"]), (&2.into(), &8.into()));
}

#[test]
fn what_does_not_fit_is_said_and_a_model_without_weights_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench(folder.path(), &["--set", "memory.device_budget=1KiB", "--only", "sgd"]);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("the baseline: does not fit"), "{error}");
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .current_dir(folder.path())
        .args(["bench", "memory"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("examples/get-smollm2"));
}

#[test]
fn disks_are_measured_in_every_way() {
    let folder = tempfile::tempdir().unwrap();
    let bench = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
        command.args(["bench", "disk", "--size", "1MiB", "--path"]).arg(folder.path()).args(arguments);
        command.output().unwrap()
    };
    let found = document(&bench(&["--json"]));
    let ways = found["ways"].as_array().unwrap();
    assert_eq!(ways.len(), 2 * 3 * 3);
    for way in ways {
        assert!(way["write_bytes_per_second"].as_f64().unwrap() > 0.0, "{way}");
        assert!(way["read_bytes_per_second"].as_f64().unwrap() > 0.0, "{way}");
        assert!(way["asked_for"] == "direct" || way["mode"] == "buffered", "{way}");
    }
    let table = String::from_utf8(bench(&[]).stdout).unwrap();
    assert!(table.contains("queue depth") && table.lines().count() >= 20, "{table}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let missing = bench(&["--path", "no-such-folder"]);
    assert!(!missing.status.success());
    let nothing =
        Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(["bench", "disk", "--size", "0"]).output().unwrap();
    assert_eq!(nothing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("there is nothing to write"));
}

#[test]
fn the_operations_of_a_step_are_those_of_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let bf16 = ["--set", "training.mixed_precision=bf16", "--set", "training.gradient_checkpointing=full"];
    for set in [&bf16[..], &[]] {
        let arguments = [set, &["--steps", "3", "--kept-speeds"]].concat();
        let report = document(&bench_of("step", folder.path(), &[&arguments[..], &["--json"]].concat()));
        let (step, operations) = (&report["step"], report["operations"].as_array().unwrap());
        assert_eq!((report["steps"].as_u64(), &step["flops"]), (Some(2), &step["planned_flops"]));
        let sum = |key: &str| operations.iter().map(|one| one[key].as_f64().unwrap()).sum::<f64>();
        assert!(sum("seconds") > 0.0 && sum("seconds") <= step["seconds"].as_f64().unwrap(), "{step}");
        assert!((sum("bound_seconds") / step["bound_seconds"].as_f64().unwrap() - 1.0).abs() < 1e-9);
        let has =
            |phase: &str, name: &str| operations.iter().any(|o| o["phase"] == phase && o["name"] == name);
        assert!(
            has("forward", "linear")
                && has("backward", "linear_backward_weight")
                && has("optimizer", "adamw")
        );
        // What is computed again is a forward operation in the backward pass.
        assert_eq!(has("backward", "linear"), !set.is_empty());
        let words = String::from_utf8(bench_of("step", folder.path(), &arguments).stdout).unwrap();
        // Which operations have a line of their own depends on how long they took.
        let has_line = |one: &Value| {
            words.contains(&format!("{} {}", one["phase"].as_str().unwrap(), one["name"].as_str().unwrap()))
        };
        assert!(operations.iter().any(has_line) && words.contains("the sum of all bounds"), "{words}");
    }
}
