//! The program as a user runs it: exit codes, JSON, files, resuming, stopping.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn plimsoll(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .current_dir(folder)
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must succeed; its standard output.
fn ok(folder: &Path, arguments: &[&str]) -> String {
    let output = plimsoll(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command that must fail with that code; its standard error.
fn fails(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = plimsoll(folder, arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    error
}

const CONFIG: &str = "
model:
  from_scratch: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 2}
data: {train: text.txt, validation: text.txt, sequence_length: 12}
training: {steps: 6, batch_size: 2, gradient_accumulation_steps: 2, learning_rate: 1e-2}
memory: {device_budget: 256MiB}
output: {dir: out, save_steps: 2, save_total_limit: 9, eval_steps: 3}
";

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.path().join("text.txt"), words).unwrap();
    std::fs::write(folder.path().join("c.yaml"), CONFIG).unwrap();
    folder
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_run_leaves_its_metrics_report_checkpoints_and_model() {
    let folder = folder();
    let out = folder.path().join("out");
    ok(folder.path(), &["train", "c.yaml"]);
    let report = json(out.join("report.json"));
    assert_eq!(report["planned"]["device_peak_bytes"], report["measured"]["device_peak_bytes"]);
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 6);
    for key in ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "batch_size", "memory"] {
        assert!(lines.iter().all(|l| !l[key].is_null()), "{key}");
    }
    assert_eq!(
        (&lines[5]["step"], &lines[5]["tokens"], &lines[5]["batch_size"]),
        (&6.into(), &288.into(), &4.into())
    );
    for key in ["device_peak_bytes", "host_peak_bytes", "disk_bytes", "process_rss_bytes"] {
        assert!(lines[0]["memory"][key].is_u64(), "{key}");
    }
    for name in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "plimsoll.yaml",
        "checkpoint-6/optimizer.safetensors",
    ] {
        assert!(out.join(name).exists(), "{name}");
    }
    // The model can be used, and the resolved configuration can be run again, to the same losses.
    let eval: Value = serde_json::from_str(&ok(
        folder.path(),
        &["eval", "--model", "out", "--data", "text.txt", "--sequence-length", "12", "--json"],
    ))
    .unwrap();
    assert!(eval["loss"].as_f64().unwrap() < lines[0]["loss"].as_f64().unwrap());
    let generated: Value = serde_json::from_str(&ok(
        folder.path(),
        &[
            "generate",
            "--model",
            "out",
            "--prompt",
            "word",
            "--max-tokens",
            "5",
            "--temperature",
            "0",
            "--json",
        ],
    ))
    .unwrap();
    assert_eq!(generated["tokens"].as_array().unwrap().len(), 5);
    ok(folder.path(), &["train", "out/plimsoll.yaml", "--set", "output.dir=again"]);
    assert_eq!(losses(&folder.path().join("again")), losses(&out));
    let inspected: Value = serde_json::from_str(&ok(folder.path(), &["inspect", "out", "--json"])).unwrap();
    assert_eq!(inspected["hidden_size"], 16);
}

#[test]
fn a_prompt_can_be_a_chat_and_draws_have_settings() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml"]);
    let generate = |more: &[&'static str]| -> Vec<&str> {
        let usual = [
            "generate",
            "--model",
            "out",
            "--prompt",
            "word",
            "--max-tokens",
            "3",
            "--context",
            "64",
            "--json",
        ];
        [usual.as_slice(), more].concat()
    };
    let error = fails(folder.path(), 2, &generate(&["--chat"]));
    assert!(error.contains("no chat template"), "{error}");
    let template = folder.path().join("out/chat_template.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}").unwrap();
    let chat: Value =
        serde_json::from_str(&ok(folder.path(), &generate(&["--chat", "--system", "no"]))).unwrap();
    let bytes: Vec<u64> = "system:no;user:word;".bytes().map(u64::from).collect();
    assert_eq!(chat["prompt_tokens"], Value::from(bytes));
    std::fs::write(template, "{{ raise_exception('not this') }}").unwrap();
    let error = fails(folder.path(), 1, &generate(&["--chat"]));
    assert!(error.contains("chat_template.jinja") && error.contains("not this"), "{error}");
    // One token alone is left to draw.
    let drawn: Value = serde_json::from_str(&ok(
        folder.path(),
        &generate(&["--temperature", "2", "--top-k", "1", "--logit-bias", "65=1000"]),
    ))
    .unwrap();
    assert_eq!(drawn["text"], "AAA");
    let error = fails(folder.path(), 2, &generate(&["--top-p", "0"]));
    assert!(error.contains("top_p is 0"), "{error}");
}

fn losses(run: &Path) -> Vec<String> {
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let value = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    metrics.lines().map(value).map(|v| format!("{} {} {}", v["step"], v["loss"], v["grad_norm"])).collect()
}

#[test]
fn a_resumed_run_has_the_bits_of_an_unbroken_one() {
    for precision in ["f32", "bf16"] {
        let folder = folder();
        let set = format!("training.mixed_precision={precision}");
        ok(folder.path(), &["train", "c.yaml", "--set", &set]);
        // The same again, from the checkpoint after step 2.
        let (out, other) = (folder.path().join("out"), folder.path().join("other"));
        ok(folder.path(), &["train", "c.yaml", "--set", &set, "--set", "output.dir=other"]);
        for step in [4, 6] {
            std::fs::remove_dir_all(other.join(format!("checkpoint-{step}"))).unwrap();
        }
        ok(folder.path(), &["train", "c.yaml", "--set", &set, "--set", "output.dir=other", "--resume"]);
        assert_eq!(losses(&other), losses(&out));
        for name in ["model.safetensors", "checkpoint-6/optimizer.safetensors"] {
            assert!(
                std::fs::read(out.join(name)).unwrap() == std::fs::read(other.join(name)).unwrap(),
                "{name}"
            );
        }
    }
}

/// Whoever starts a run again until it is done may do so once too often.
#[test]
fn a_run_that_is_finished_is_left_as_it_is() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml"]);
    let read = || {
        ["report.json", "metrics.jsonl"]
            .map(|name| std::fs::read(folder.path().join("out").join(name)).unwrap())
    };
    let before = read();
    let said = ok(folder.path(), &["train", "c.yaml", "--resume"]);
    assert!(said.contains("finished: nothing is left to do"), "{said}");
    let report: Value =
        serde_json::from_str(&ok(folder.path(), &["train", "c.yaml", "--resume", "--json"])).unwrap();
    assert_eq!(report["steps"], 6);
    assert!(read() == before);
    // More steps go on; and where the last checkpoint is of an earlier step, nothing is left to do all the same.
    let seven = ["train", "c.yaml", "--resume", "--set", "training.steps=7"];
    ok(folder.path(), &seven);
    assert_eq!(losses(&folder.path().join("out")).len(), 7);
    assert!(!folder.path().join("out/checkpoint-7").exists());
    let before = read();
    let said = ok(folder.path(), &seven);
    assert!(said.contains("finished: nothing is left to do"), "{said}");
    assert!(read() == before);
}

#[test]
fn a_run_is_not_overwritten_and_other_data_is_not_resumed() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml"]);
    assert!(fails(folder.path(), 2, &["train", "c.yaml"]).contains("--resume"));
    std::fs::write(folder.path().join("text.txt"), "other words ".repeat(100)).unwrap();
    let error = fails(folder.path(), 1, &["train", "c.yaml", "--resume"]);
    assert!(error.contains("checkpoint-6") && error.contains("data"), "{error}");
}

#[test]
fn a_plan_says_what_is_asked_of_it_and_train_refuses_what_does_not_fit() {
    let folder = folder();
    let plan: Value = serde_json::from_str(&ok(folder.path(), &["plan", "c.yaml", "--json"])).unwrap();
    assert_eq!(plan["fits"], true);
    let device = &plan["memory"]["device"];
    let at_peak: u64 = device["at_peak"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(at_peak, device["peak_bytes"].as_u64().unwrap());
    assert_eq!(device["budget_bytes"], 256 << 20);
    assert!(plan["time"]["step_seconds"].as_f64().unwrap() > 0.0);
    assert_eq!(plan["config"]["training"]["gradient_checkpointing"], "none");

    let error = fails(folder.path(), 3, &["train", "c.yaml", "--set", "memory.device_budget=1MiB"]);
    assert!(error.contains("load line"), "{error}");
    assert!(!folder.path().join("out").join("metrics.jsonl").exists());

    let named = [
        "plan",
        "--model",
        "llama-3.1-405b",
        "--batch-size",
        "1",
        "--sequence-length",
        "512",
        "--budget",
        "16GiB",
    ];
    let refused = plimsoll(folder.path(), &named);
    assert_eq!(refused.status.code(), Some(3));
    assert!(text(&refused.stdout).contains("does NOT fit"));
}

#[test]
fn wrong_input_is_named_with_its_place_and_exit_code() {
    let folder = folder();
    let path = folder.path();
    std::fs::write(path.join("bad.yaml"), "training:\n  batchsize: 4\n").unwrap();
    std::fs::write(path.join("binary.txt"), b"abc\xff\xfe").unwrap();
    std::fs::write(path.join("empty.txt"), b"").unwrap();
    std::fs::write(path.join("broken.gguf"), b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f").unwrap();
    std::fs::write(path.join("file"), b"").unwrap();
    let train = |set: &'static str| vec!["train", "c.yaml", "--set", set];
    for (code, arguments, words) in [
        (2, vec!["train", "bad.yaml"], vec!["bad.yaml", "2", "batch_size"]),
        (2, vec!["train", "missing.yaml"], vec!["missing.yaml"]),
        (2, vec!["train", "c.yaml", "--set", "training.batch_siz=3"], vec!["training.batch_size"]),
        (2, vec!["plan", "--model", "smollm2-153m"], vec!["smollm2-135m"]),
        (2, vec!["frobnicate"], vec!["frobnicate"]),
        (1, train("data.train=nothing.txt"), vec!["nothing.txt"]),
        (1, train("data.train=binary.txt"), vec!["binary.txt", "byte 3"]),
        (1, train("data.train=empty.txt"), vec!["empty.txt"]),
        (1, train("data.sequence_length=99999"), vec!["99999", "tokens"]),
        (1, train("output.dir=file/below"), vec!["file/below"]),
        (2, train("model.from_scratch.num_attention_heads=3"), vec!["num_attention_heads"]),
        (2, vec!["eval", "--model", "broken.gguf", "--data", "text.txt"], vec!["broken.gguf"]),
    ] {
        let error = fails(path, code, &arguments);
        for word in words {
            assert!(error.contains(word), "{arguments:?}: {error:?} has no {word:?}");
        }
    }
}

#[cfg(unix)]
#[test]
fn a_signal_ends_the_run_after_its_step_with_a_checkpoint() {
    let folder = folder();
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .current_dir(folder.path())
        .args(["train", "c.yaml", "--set", "training.steps=1000000", "--set", "output.save_steps=0"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let metrics = folder.path().join("out/metrics.jsonl");
    while !std::fs::read_to_string(&metrics).is_ok_and(|t| t.lines().count() > 2) {
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(child.try_wait().unwrap().is_none(), "ended by itself");
    }
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let steps = std::fs::read_to_string(&metrics).unwrap().lines().count();
    assert!(folder.path().join(format!("out/checkpoint-{steps}/trainer_state.json")).exists());
    let report = json(folder.path().join("out/report.json"));
    assert_eq!(report["finished"], false);
}

/// With every optimizer a run that is continued from a checkpoint ends with the bits of one that was not interrupted:
/// states, quantised ones too, and weights.
#[test]
fn every_optimizer_resumes_to_the_same_bits() {
    let folder = folder();
    for (optimizer, options) in [
        ("adamw_bf16", "{}"),
        ("adamw_8bit", "{embedding_bits: 8}"),
        ("adam_mini", "{}"),
        ("lion", "{}"),
        ("lion_8bit", "{embedding_bits: 8}"),
        ("adafactor", "{relative_step: false, beta1: 0.9}"),
        ("adalomo", "{}"),
        ("sgd", "{}"),
        ("sgd", "{momentum: 0.9}"),
        ("galore", "{rank: 4, update_proj_gap: 3}"),
        ("apollo", "{rank: 4, update_proj_gap: 3}"),
    ] {
        let settings = [
            format!("training.optimizer={optimizer}"),
            format!("training.optimizer_options={options}"),
            "training.steps=4".to_owned(),
            "training.mixed_precision=bf16".to_owned(),
            "training.master_weights=none".to_owned(),
        ];
        let mut arguments = vec!["train", "c.yaml"];
        settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
        let out = folder.path().join("out");
        let files = || {
            ["model.safetensors", "checkpoint-4/optimizer.safetensors"]
                .map(|name| std::fs::read(out.join(name)).unwrap())
        };
        ok(folder.path(), &arguments);
        let whole = files();
        std::fs::remove_dir_all(out.join("checkpoint-4")).unwrap();
        arguments.push("--resume");
        ok(folder.path(), &arguments);
        assert!(files() == whole, "{optimizer} {options}");
        std::fs::remove_dir_all(out).unwrap();
    }
}

#[test]
fn another_optimizer_than_the_checkpoints_is_refused() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml", "--set", "training.steps=2"]);
    let resume =
        |optimizer: &str| plimsoll(folder.path(), &["train", "c.yaml", "--resume", "--set", optimizer]);
    let output = resume("training.optimizer=lion");
    let refused = text(&output.stderr);
    let words =
        "it holds the states of training.optimizer adamw, the configuration says lion; set it to adamw";
    assert!(refused.contains(words) && output.status.code() == Some(2), "{refused}");
    assert!(resume("training.optimizer=adamw").status.success());
}

/// Each is about what was asked for, and nothing is wrong with the machine or a file.
#[test]
fn what_cannot_be_asked_for_ends_with_2() {
    let folder = folder();
    ok(folder.path(), &["train", "c.yaml", "--set", "training.steps=1", "--set", "output.dir=base"]);
    let trained =
        ["--set", "model.path=base", "--set", "model.from_scratch=null", "--set", "training.method=lora"];
    for (more, words) in [
        (
            &[&trained[..], &["--set", "training.lora.target_modules=[nope]"]].concat()[..],
            "matches no tensor",
        ),
        (&["--ranks", "64", "--set", "parallel.pipeline_parallel=64"], "more than the model has layers"),
        (&["--ranks", "5", "--set", "parallel.tensor_parallel=5"], "not divisible by 5 ranks"),
        (
            &[
                "--ranks",
                "2",
                "--set",
                "parallel.zero_stage=1",
                "--set",
                "parallel.sharding_strategy=full_shard",
            ],
            "full_shard is stage 3",
        ),
        (&["--set", "training.router_bias_update_speed=0.001"], "is about experts, and the model has none"),
    ] {
        let output = plimsoll(folder.path(), &[&["plan", "c.yaml"], more].concat());
        let said = text(&output.stderr);
        assert!(said.contains(words) && output.status.code() == Some(2), "{more:?}: {said}");
    }
    let threads = plimsoll(folder.path(), &["train", "c.yaml", "--threads", "100000"]);
    assert!(text(&threads.stderr).contains("at most 1024 can be used") && threads.status.code() == Some(2));
    // A stage that is named twice.
    let twice = ["--set", "parallel.zero_stage=3", "--set", "parallel.sharding_strategy=full_shard"];
    ok(folder.path(), &[&["plan", "c.yaml", "--ranks", "2"], &twice[..]].concat());
}

#[test]
fn the_plan_says_what_an_optimizer_keeps() {
    let folder = folder();
    let bytes = |optimizer: &str| {
        let set = format!("training.optimizer={optimizer}");
        let plan: Value =
            serde_json::from_str(&ok(folder.path(), &["plan", "c.yaml", "--json", "--set", &set])).unwrap();
        assert_eq!(plan["optimizer"]["name"], optimizer);
        plan["optimizer"]["state_bytes_per_parameter"].as_f64().unwrap()
    };
    assert!((bytes("adamw") - 8.0).abs() < 0.5);
    assert!((bytes("adamw_bf16") - 4.0).abs() < 0.5);
    assert!((bytes("lion") - 4.0).abs() < 0.5);
    assert!(bytes("adafactor") < 1.0);
    assert_eq!(bytes("sgd"), 0.0);
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_with_a_diagnostic_and_keeps_checkpoints() {
    let folder = folder();
    let out = folder.path().join("out");
    let wild = ["train", "c.yaml", "--set", "training.learning_rate=1e30", "--set", "output.save_steps=1"];
    let error = fails(folder.path(), 1, &wild);
    assert!(error.contains("step 2") && error.contains("diagnostic.json"), "{error}");
    let diagnostic = json(out.join("diagnostic.json"));
    assert_eq!(diagnostic["step"], 2);
    assert_eq!(diagnostic["first_bad_output"]["micro_batch"], 0);
    assert!(diagnostic["first_bad_output"]["block"].is_string(), "{diagnostic}");
    // The last good one is still there, and no later one.
    assert!(out.join("checkpoint-1/trainer_state.json").exists() && !out.join("checkpoint-2").exists());
    // Skipping does not go on for ever.
    let skip = [&wild[..], &["--set", "training.not_finite=skip", "--set", "training.steps=40"]].concat();
    std::fs::remove_dir_all(&out).unwrap();
    let error = fails(folder.path(), 1, &skip);
    assert!(error.contains("step 12"), "{error}");
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    assert_eq!(metrics.matches("\"skipped\":true").count(), 10, "{metrics}");
}

#[test]
fn memory_techniques_compose_and_their_plans_are_exact() {
    for settings in [
        vec!["training.gradient_checkpointing=sqrt", "training.activation_compression=int8"],
        vec!["training.gradient_checkpointing={selective: [norms, swiglu]}", "training.mlp_chunk_tokens=8"],
        vec![
            "training.optimizer_in_backward=true",
            "training.in_backward_clipping=previous_norm",
            "training.gradient_accumulation_steps=1",
            "training.mixed_precision=bf16",
            "training.master_weights=none",
            "training.optimizer=adamw_8bit",
        ],
        vec!["training.mixed_precision=fp16", "training.gradient_checkpointing={ratio: 0.5}"],
        vec!["training.gradient_checkpointing={auto: 1MiB}"],
    ] {
        let folder = folder();
        let mut arguments = vec!["train", "c.yaml"];
        arguments.extend(settings.iter().flat_map(|s| ["--set", *s]));
        ok(folder.path(), &arguments);
        let report = json(folder.path().join("out/report.json"));
        let (planned, measured) = (&report["planned"], &report["measured"]);
        assert_eq!(planned["device_peak_bytes"], measured["device_peak_bytes"], "{settings:?}");
    }
}
