//! What a run does at its edges, pinned to absolute values: learning rates and other fields of the metrics, how many checkpoints
//! there are at any moment, and what a checkpoint carries over.

use std::path::{Path, PathBuf};

use plimsoll_monitor::Status;
use plimsoll_plan::TrainingPlan;
use plimsoll_plan::config::RawConfig;
use plimsoll_train::{MemoryReading, Observer, Prepared, RunEvent, StopFlag, Surroundings};
use serde_json::Value;

use crate::common::{cpu, machine};

fn config(folder: &Path, set: &[&str]) -> RawConfig {
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.join("text.txt"), words).unwrap();
    let text = format!(
        "
model:
  from_scratch: {{hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2}}
data: {{train: '{}', sequence_length: 16}}
training: {{steps: 6, batch_size: 2, gradient_accumulation_steps: 3, learning_rate: 1e-2, mixed_precision: f32}}
memory: {{device_budget: 256MiB}}
output: {{dir: '{}', save_steps: 1, save_total_limit: 2}}
",
        folder.join("text.txt").display(),
        folder.join("out").display()
    );
    let mut config = RawConfig::from_str(&text, "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config
}

/// Looks into the run's folder whenever a checkpoint or the model is saved.
struct Looking {
    run: PathBuf,
    seen: Vec<Vec<String>>,
}

impl Observer for Looking {
    fn event(&mut self, event: RunEvent<'_>) {
        if let RunEvent::Saved(_) = event {
            self.seen.push(checkpoints(&self.run));
        }
    }
}

/// Whatever has to do with checkpoints in a run's folder.
fn checkpoints(run: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(run).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.contains("checkpoint")).collect();
    names.sort();
    names
}

fn run(config: RawConfig, resume: bool) -> (TrainingPlan, Vec<Vec<String>>) {
    let prepared = Prepared::new(config, resume).unwrap();
    let plan = prepared.plan(&machine()).unwrap();
    let mut looking = Looking { run: plan.config.output.dir(), seen: Vec::new() };
    let surroundings = Surroundings {
        device: &mut cpu,
        memory: &mut MemoryReading::default,
        observer: &mut looking,
        stop: StopFlag::new(),
        ranks: &plimsoll_parallel::Solo,
    };
    prepared.run(std::slice::from_ref(&plan), surroundings).unwrap();
    (plan, looking.seen)
}

fn metrics(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Epochs are steps over the sequences that there are, the last of them begun counts; a part of an epoch is a step at least.
#[test]
fn epochs_are_so_many_steps() {
    let folder = tempfile::tempdir().unwrap();
    let steps = |epochs: &str, batch: &[&str]| {
        let mut config = config(folder.path(), batch);
        config.training.steps = None;
        config.apply_set(&format!("training.epochs={epochs}")).unwrap();
        let prepared = Prepared::new(config, false).unwrap();
        prepared.total_steps(&prepared.plan(&machine()).unwrap())
    };
    let windows = steps("1", &["training.batch_size=1", "training.gradient_accumulation_steps=1"]);
    // Six sequences a step.
    assert!(windows > 12 && windows % 6 != 0, "{windows}");
    assert_eq!(steps("1", &[]), windows.div_ceil(6));
    assert_eq!(steps("2.5", &[]), (5 * windows).div_ceil(12));
    assert_eq!(steps("0.001", &[]), 1);
}

#[test]
fn the_learning_rates_of_a_run_are_those_of_its_schedule() {
    let folder = tempfile::tempdir().unwrap();
    let check = |set: &[&str], expected: [f64; 6]| {
        run(config(folder.path(), &[set, &["output.save_steps=0"]].concat()), false);
        let out = folder.path().join("out");
        let rates: Vec<f64> = metrics(&out).iter().map(|line| line["lr"].as_f64().unwrap()).collect();
        for (rate, expected) in rates.iter().zip(expected) {
            assert!((rate - expected).abs() < 1e-15, "{set:?}: {rates:?}");
        }
        std::fs::remove_dir_all(out).unwrap();
    };
    check(&["training.warmup_steps=2"], [5e-3, 1e-2, 1e-2, 7.5e-3, 5e-3, 2.5e-3]);
    check(
        &["training.lr_schedule=linear"],
        [1e-2, 1e-2 * 5.0 / 6.0, 1e-2 * 4.0 / 6.0, 5e-3, 1e-2 * 2.0 / 6.0, 1e-2 / 6.0],
    );
    // 0.2 of 6 steps are 1.2: two.
    check(
        &["training.warmup_ratio=0.2", "training.lr_schedule=constant"],
        [5e-3, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2],
    );
}

#[test]
fn the_fields_of_the_metrics_are_what_the_run_did() {
    let folder = tempfile::tempdir().unwrap();
    let (plan, _) = run(config(folder.path(), &["memory.offload={optimizer: disk}"]), false);
    let keys = [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_second",
        "batch_size",
        "memory",
        "rung",
        "micro_batch_size",
        "io",
    ];
    for (index, line) in metrics(&folder.path().join("out")).iter().enumerate() {
        let found: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert_eq!(found, keys);
        let number = |value: &Value| value.as_u64().unwrap();
        assert_eq!(number(&line["step"]), index as u64 + 1);
        // Two sequences of 16 tokens, three times a step.
        assert_eq!((number(&line["batch_size"]), number(&line["tokens"])), (6, 96 * (index as u64 + 1)));
        assert_eq!(number(&line["rung"]), 0);
        let memory = &line["memory"];
        let expected = [plan.peak_bytes(), plan.host_bytes(), plan.disk_bytes()];
        let found = ["device_peak_bytes", "host_peak_bytes", "disk_bytes"].map(|key| number(&memory[key]));
        assert_eq!(found, expected);
        assert!(plan.disk_bytes() > 0 && plan.host_bytes() > 0);
        assert!(number(&memory["process_rss_bytes"]) > plan.peak_bytes());
        for positive in ["loss", "grad_norm", "tokens_per_second"] {
            assert!(line[positive].as_f64().unwrap() > 0.0, "{positive}");
        }
    }
}

#[test]
fn as_many_checkpoints_are_kept_as_was_said_and_the_newest() {
    let folder = tempfile::tempdir().unwrap();
    let check = |limit: u64, expected: [&[u64]; 7]| {
        let limit = format!("output.save_total_limit={limit}");
        let (_, seen) = run(config(folder.path(), &[&limit]), false);
        let expected: Vec<Vec<String>> = expected
            .iter()
            .map(|steps| steps.iter().map(|step| format!("checkpoint-{step}")).collect())
            .collect();
        assert_eq!(seen, expected, "{limit}");
        std::fs::remove_dir_all(folder.path().join("out")).unwrap();
    };
    check(1, [&[1], &[2], &[3], &[4], &[5], &[6], &[6]]);
    check(3, [&[1], &[1, 2], &[1, 2, 3], &[2, 3, 4], &[3, 4, 5], &[4, 5, 6], &[4, 5, 6]]);
}

#[test]
fn what_killed_runs_left_half_done_is_tidied_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    run(config(folder.path(), &[]), false);
    let left = [".old-checkpoint-3", ".writing-checkpoint-aBcD", ".saving-aBcD"];
    for name in left.iter().chain(&["mine", ".mine"]) {
        std::fs::create_dir(out.join(name)).unwrap();
        std::fs::write(out.join(name).join("model.safetensors"), "half").unwrap();
    }
    std::fs::write(out.join(".writing-aBcD"), "half").unwrap();
    run(config(folder.path(), &["training.steps=7"]), true);
    assert_eq!(checkpoints(&out), ["checkpoint-6", "checkpoint-7"]);
    assert!(left.iter().chain(&[".writing-aBcD"]).all(|name| !out.join(name).exists()));
    assert!(out.join("mine/model.safetensors").exists() && out.join(".mine/model.safetensors").exists());
}

/// Where updates in the backward pass are clipped by the norm of the step before, the first step after a resumption needs the
/// norm of the last one before it.
#[test]
fn the_gradient_norm_of_the_step_before_is_carried_over() {
    let settings = [
        "training.optimizer_in_backward=true",
        "training.in_backward_clipping=previous_norm",
        "training.gradient_accumulation_steps=1",
        "training.max_gradient_norm=0.05",
        "training.optimizer=sgd",
        "training.learning_rate=1.0",
        "training.lr_schedule=constant",
        "output.save_total_limit=9",
    ];
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let model = || std::fs::read(out.join("model.safetensors")).unwrap();
    run(config(folder.path(), &settings), false);
    let (whole, lines) = (model(), metrics(&out));
    let norms: Vec<f64> = lines.iter().map(|line| line["grad_norm"].as_f64().unwrap()).collect();
    assert!(norms.windows(2).all(|pair| pair[0] > 0.05 && pair[0] != pair[1]), "{norms:?}");
    for step in 4..=6 {
        std::fs::remove_dir_all(out.join(format!("checkpoint-{step}"))).unwrap();
    }
    run(config(folder.path(), &settings), true);
    assert!(model() == whole, "other bits");
}

/// What is said of memory, and when something was saved.
#[derive(Default)]
struct Hearing {
    high: Vec<(u64, Status)>,
    saved: Vec<String>,
}

impl Observer for Hearing {
    fn event(&mut self, event: RunEvent<'_>) {
        match event {
            RunEvent::MemoryHigh { step, status, process_bytes, budget_bytes } => {
                assert!(process_bytes > 0 && budget_bytes > 0);
                self.high.push((step, status));
            }
            RunEvent::Saved(path) => {
                self.saved.push(path.file_name().unwrap().to_string_lossy().into_owned())
            }
            _ => {}
        }
    }
}

/// A process takes more than a ten-thousandth of its budget and less than all of it. It is said once; where it is an emergency a
/// checkpoint is written, once.
#[test]
fn high_memory_is_said_once_and_an_emergency_saves_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let hear = |thresholds: [f64; 3], silent: bool| {
        let [warning, critical, emergency] = thresholds;
        let settings = [
            "output.save_steps=0".to_owned(),
            "output.final_model=false".to_owned(),
            "memory.device_budget=16GiB".to_owned(),
            format!("memory.warning_threshold={warning}"),
            format!("memory.critical_threshold={critical}"),
            format!("memory.emergency_threshold={emergency}"),
            format!("memory.silent_mode={silent}"),
        ];
        let config = config(folder.path(), &settings.each_ref().map(String::as_str));
        let prepared = Prepared::new(config, false).unwrap();
        let plan = prepared.plan(&machine()).unwrap();
        let mut hearing = Hearing::default();
        let surroundings = Surroundings {
            device: &mut cpu,
            memory: &mut MemoryReading::default,
            observer: &mut hearing,
            stop: StopFlag::new(),
            ranks: &plimsoll_parallel::Solo,
        };
        prepared.run(std::slice::from_ref(&plan), surroundings).unwrap();
        std::fs::remove_dir_all(folder.path().join("out")).unwrap();
        (hearing.high, hearing.saved)
    };
    let checkpoint = vec!["checkpoint-1".to_owned()];
    assert_eq!(hear([0.9, 0.95, 0.98], false), (vec![], vec![]));
    assert_eq!(hear([1e-6, 0.95, 0.98], false), (vec![(1, Status::Warning)], vec![]));
    assert_eq!(hear([1e-7, 1e-6, 0.98], false), (vec![(1, Status::Critical)], vec![]));
    let emergency = [1e-8, 1e-7, 1e-6];
    assert_eq!(hear(emergency, false), (vec![(1, Status::Emergency)], checkpoint.clone()));
    assert_eq!(hear(emergency, true), (vec![], checkpoint));
}

/// Five steps of 96 tokens: the median speed is that of the step of median length.
#[test]
fn the_report_says_what_the_metrics_say() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["training.steps=5", "output.save_steps=0", "memory.offload={optimizer: host}"];
    let (plan, _) = run(config(folder.path(), &settings), false);
    let out = folder.path().join("out");
    let report: Value = serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let speed = number(&report["tokens_per_second_median"]);
    let seconds = number(&report["measured"]["step_seconds_median"]);
    assert!((speed * seconds / 96.0 - 1.0).abs() < 1e-9, "{speed} {seconds}");
    let mut speeds: Vec<f64> = metrics(&out).iter().map(|line| number(&line["tokens_per_second"])).collect();
    speeds.sort_by(f64::total_cmp);
    assert!((speeds[2] / speed - 1.0).abs() < 1e-9, "{speeds:?} {speed}");
    let bytes = |part: &str, key: &str| report[part][key].as_u64().unwrap();
    for key in ["device_peak_bytes", "host_peak_bytes"] {
        assert_eq!(bytes("measured", key), bytes("planned", key), "{key}");
    }
    // The states and what the pipeline holds.
    assert_eq!(bytes("measured", "host_peak_bytes"), plan.host_bytes());
    assert!(plan.host_bytes() > plan.pipeline_bytes() && plan.pipeline_bytes() > 0);
}

/// A window of several documents is another one to a model that tells them apart.
#[test]
fn documents_of_a_run_are_told_apart_where_that_was_said() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |mask: &str| {
        let config = config(folder.path(), &[mask, "output.save_steps=0", "data.append_eos=true"]);
        let lines: String = (0..60).map(|i| format!("{{\"text\": \"word{}\"}}\n", i * 7 % 23)).collect();
        let text = folder.path().join("text.jsonl");
        std::fs::write(&text, lines).unwrap();
        let mut config = config;
        config.apply_set(&format!("data.train={}", text.display())).unwrap();
        run(config, false);
        let out = folder.path().join("out");
        let losses: Vec<f64> = metrics(&out).iter().map(|line| line["loss"].as_f64().unwrap()).collect();
        std::fs::remove_dir_all(out).unwrap();
        losses
    };
    let (apart, together) = (losses("data.document_mask=true"), losses("data.document_mask=false"));
    assert_eq!(apart.len(), 6);
    assert!(apart[0] != together[0], "{apart:?} {together:?}");
}

/// Another type, or another shape, is another optimizer's.
#[test]
fn a_state_of_another_type_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    run(config(folder.path(), &["training.steps=1"]), false);
    let out = folder.path().join("out");
    let prepared = Prepared::new(config(folder.path(), &["training.steps=2"]), true).unwrap();
    assert_eq!(prepared.resumption().map(|resumption| resumption.step), Some(1));
    drop(prepared);
    let path = out.join("checkpoint-1/optimizer.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let (from, to) = (b"\"dtype\":\"F32\"", b"\"dtype\":\"I32\"");
    let place = bytes.windows(from.len()).position(|window| window == from).unwrap();
    let mut other = bytes.clone();
    other[place..place + to.len()].copy_from_slice(to);
    std::fs::write(&path, other).unwrap();
    let prepared = Prepared::new(config(folder.path(), &["training.steps=2"]), true).unwrap();
    let plan = prepared.plan(&machine()).unwrap();
    let surroundings = Surroundings {
        device: &mut cpu,
        memory: &mut MemoryReading::default,
        observer: &mut (),
        stop: StopFlag::new(),
        ranks: &plimsoll_parallel::Solo,
    };
    let error = prepared.run(std::slice::from_ref(&plan), surroundings).unwrap_err().to_string();
    assert!(error.contains("optimizer.safetensors") && error.contains("the run needs"), "{error}");
}

/// Nobody asks for another plan behind the last step.
#[test]
fn memory_is_judged_between_steps() {
    let folder = tempfile::tempdir().unwrap();
    let prepared = Prepared::new(config(folder.path(), &["output.save_steps=0"]), false).unwrap();
    let plan = prepared.plan(&machine()).unwrap();
    let mut readings = 0;
    let surroundings = Surroundings {
        device: &mut cpu,
        memory: &mut || {
            readings += 1;
            MemoryReading::default()
        },
        observer: &mut (),
        stop: StopFlag::new(),
        ranks: &plimsoll_parallel::Solo,
    };
    prepared.run(std::slice::from_ref(&plan), surroundings).unwrap();
    assert_eq!(readings, 5);
}
