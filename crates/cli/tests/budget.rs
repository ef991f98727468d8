//! The budget as a promise: whose limit counts, tiers in the plan, and runs that are killed or stopped in the middle.
#![cfg(unix)]

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

/// Runs the program as `"$0" "$@"` of a shell script.
fn shell(folder: &Path, script: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.current_dir(folder).args(["-c", script, env!("CARGO_BIN_EXE_plimsoll")]).args(arguments);
    command.output().unwrap()
}

fn plan(folder: &Path, set: &[&str]) -> Value {
    let mut arguments = vec!["plan", "c.yaml", "--json"];
    set.iter().for_each(|assignment| arguments.extend(["--set", assignment]));
    let output = plimsoll(folder, &arguments);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(if plan["fits"] == true { 0 } else { 3 }), "{plan}");
    plan
}

#[test]
fn the_smaller_of_the_budget_and_the_shells_limit_is_the_load_line() {
    let folder = folder();
    let limited = |kib: u64, arguments: &[&str]| {
        shell(folder.path(), &format!(r#"ulimit -v {kib} && exec "$0" "$@""#), arguments)
    };
    let output = limited(1 << 20, &["plan", "c.yaml", "--memory", "1TiB", "--json"]);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let device = &plan["memory"]["device"];
    assert_eq!(device["limited_by"], "ulimit -v");
    assert!(device["budget_bytes"].as_u64().unwrap() < 1 << 30);
    // A run lives within what it was left, and says what is wrong where nothing is left.
    let output = limited(1 << 20, &["train", "c.yaml", "--threads", "2", "--memory", "auto"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = limited(1 << 20, &["train", "c.yaml", "--threads", "2", "--resume"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let large = ["train", "c.yaml", "--threads", "2", "--memory", "auto", "--set", "output.dir=large"];
    let sizes =
        ["--set", "model.from_scratch.hidden_size=1024", "--set", "model.from_scratch.num_hidden_layers=40"];
    let output = limited(1 << 20, &[&large[..], &sizes[..]].concat());
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(error.contains("ulimit -v"), "{error}");
}

#[test]
fn a_stated_budget_is_the_line_and_another_machine_is_planned_for_without_this_ones_limits() {
    let folder = folder();
    let device = plan(folder.path(), &[])["memory"]["device"].clone();
    assert_eq!((&device["budget_bytes"], &device["limited_by"]), (&(256 << 20).into(), &"budget".into()));
    let script = r#"ulimit -v 1048576 && exec "$0" "$@""#;
    let arguments = ["plan", "c.yaml", "--json", "--memory", "1TiB", "--elsewhere"];
    let plan: Value = serde_json::from_slice(&shell(folder.path(), script, &arguments).stdout).unwrap();
    assert_eq!(plan["memory"]["device"]["budget_bytes"], 1u64 << 40);
}

#[test]
fn tiers_are_planned_resolved_and_measured() {
    let folder = folder();
    let set = ["memory.offload.optimizer=disk", "memory.offload.gradients=host"];
    let planned = plan(folder.path(), &set);
    assert_eq!(planned["fits"], true);
    let offload = &planned["config"]["memory"]["offload"];
    assert_eq!((&offload["optimizer"], &offload["gradients"]), (&"disk".into(), &"host".into()));
    assert_eq!((&offload["parameters"], &offload["activations"]), (&"device".into(), &"device".into()));
    for tier in ["device", "host", "disk"] {
        let tier = &planned["memory"][tier];
        let parts = tier["at_peak"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum::<u64>();
        assert_eq!(parts, tier["peak_bytes"].as_u64().unwrap(), "{tier}");
    }
    let disk = planned["memory"]["disk"]["peak_bytes"].as_u64().unwrap();
    let mut arguments = vec!["train", "c.yaml", "--json"];
    set.iter().for_each(|assignment| arguments.extend(["--set", assignment]));
    let report: Value = serde_json::from_str(&ok(folder.path(), &arguments)).unwrap();
    for key in ["device_peak_bytes", "host_peak_bytes", "disk_bytes"] {
        assert_eq!(report["planned"][key], report["measured"][key], "{key}");
    }
    assert_eq!(report["planned"]["disk_bytes"], disk);
    // The spill file has no name.
    let left = std::fs::read_dir(folder.path().join("out/spill"));
    assert!(left.map_or(0, Iterator::count) == 0);
}

#[test]
fn a_disk_budget_that_is_too_small_is_refused_before_anything_begins() {
    let folder = folder();
    let set = ["memory.offload.optimizer=disk", "memory.disk_budget=1"];
    let planned = plan(folder.path(), &set);
    if planned["memory"]["disk"]["peak_bytes"] == 0 {
        println!("skipped: the step keeps its optimizer on the device");
        return;
    }
    assert_eq!(planned["fits"], false);
    let mut arguments = vec!["train", "c.yaml"];
    set.iter().for_each(|assignment| arguments.extend(["--set", assignment]));
    let output = plimsoll(folder.path(), &arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(error.contains("of disk") && error.contains("memory.disk_budget is 1 B"), "{error}");
    assert!(!folder.path().join("out/metrics.jsonl").exists());
}

fn steps(run: &Path) -> usize {
    std::fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

/// Starts a run and waits until it has taken a step of its own, or has come to its end.
fn started(folder: &Path, arguments: &[&str], run: &Path) -> Child {
    let before = steps(run);
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .current_dir(folder)
        .args(arguments)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    while steps(run) <= before && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child
}

#[test]
fn a_run_that_was_killed_again_and_again_ends_with_the_bits_of_an_unbroken_one() {
    let folder = folder();
    let run = folder.path().join("out");
    let settings = ["train", "c.yaml", "--threads", "1", "--set", "training.steps=1200", "--set"];
    let whole = [&settings[..], &["output.save_steps=40", "--set", "output.dir=whole"]].concat();
    let broken = [&settings[..], &["output.save_steps=40"]].concat();
    ok(folder.path(), &whole);
    for _ in 0..3 {
        let resume = has_checkpoint(&run).then_some("--resume");
        let arguments: Vec<&str> = broken.iter().copied().chain(resume).collect();
        let mut child = started(folder.path(), &arguments, &run);
        if child.try_wait().unwrap().is_some() {
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // A run that has come to its end is resumed too: there is nothing left to do.
    let resume = has_checkpoint(&run).then_some("--resume");
    ok(folder.path(), &broken.iter().copied().chain(resume).collect::<Vec<_>>());
    let whole = folder.path().join("whole");
    for name in ["model.safetensors", "checkpoint-1200/optimizer.safetensors"] {
        assert!(std::fs::read(run.join(name)).unwrap() == std::fs::read(whole.join(name)).unwrap(), "{name}");
    }
    assert_eq!(steps(&run), steps(&whole));
}

fn has_checkpoint(run: &Path) -> bool {
    let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("checkpoint-"))
}

#[test]
fn a_run_that_is_stopped_or_killed_leaves_nothing_in_its_spill_folder() {
    for signal in ["-TERM", "-KILL"] {
        let folder = folder();
        let run = folder.path().join("out");
        let arguments = [
            "train",
            "c.yaml",
            "--set",
            "training.steps=1000000",
            "--set",
            "memory.disk_path=spill",
            "--set",
            "memory.offload={optimizer: disk, activations: disk}",
        ];
        let mut child = started(folder.path(), &arguments, &run);
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), (signal == "-TERM").then_some(143));
        let left = std::fs::read_dir(folder.path().join("spill")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "{signal}");
    }
}
