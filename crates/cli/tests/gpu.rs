//! Trainings and answers on a GPU that is none: the program as it is, with a driver library whose kernels run on the CPU.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

#[path = "../../device/tests/cuda/mock.rs"]
mod mock;

use crate::support::{folder, ok, text};

/// Runs the program where the system's loader finds that driver.
fn with_driver(driver: &Path, folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .env("LD_LIBRARY_PATH", driver.parent().unwrap())
        .envs(variables.iter().copied())
        .current_dir(folder)
        .args(arguments)
        .output()
        .unwrap()
}

fn succeeds(output: &Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn losses(run: &Path) -> Vec<f64> {
    let lines = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    lines.lines().map(loss).collect()
}

fn report(run: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(run.join("report.json")).unwrap()).unwrap()
}

/// What is trained, with what is set for it.
const RUNS: [(&str, &[&str]); 8] = [
    ("full", &["training.mixed_precision=f32"]),
    ("bf16", &["training.mixed_precision=bf16"]),
    ("8bit", &["training.mixed_precision=f32", "training.optimizer=adamw_8bit"]),
    ("accumulated", &["training.mixed_precision=f32", "training.gradient_accumulation_steps=3"]),
    ("offloaded", &["training.mixed_precision=f32", "memory.offload.optimizer=host"]),
    ("on disk", &["training.mixed_precision=f32", "memory.offload.parameters=disk"]),
    (
        "experts",
        &[
            "training.mixed_precision=f32",
            "model.from_scratch.architecture=moe",
            "model.from_scratch.num_experts=4",
            "model.from_scratch.shared_experts=1",
            "model.from_scratch.zero_experts=1",
            "model.from_scratch.copy_experts=1",
            "model.from_scratch.constant_experts=1",
            "training.expert_capacity_factor=0.8",
            "training.router_z_loss_coef=0.001",
            "training.router_jitter_noise=0.01",
        ],
    ),
    (
        "latent",
        &[
            "training.mixed_precision=f32",
            "model.from_scratch.architecture=deepseek_v3",
            "model.from_scratch.num_experts=4",
            "model.from_scratch.v_head_dim=6",
            "model.from_scratch.q_lora_rank=12",
        ],
    ),
];

#[test]
fn a_card_trains_as_the_cpu_does_in_just_the_planned_memory() {
    let Some(driver) = mock::library() else { return };
    let folder = folder();
    let path = folder.path();
    for (name, settings) in RUNS {
        let train = |device: &str, out: &str| -> Vec<String> {
            let fixed =
                ["train", "c.yaml", "--device", device, "--set", "memory.device_budget=1GiB", "--set"];
            let mut arguments: Vec<String> = fixed.map(str::to_owned).to_vec();
            arguments.push(format!("output.dir={out}"));
            settings.iter().for_each(|set| arguments.extend(["--set".to_owned(), (*set).to_owned()]));
            arguments
        };
        let arguments = |device: &str, out: &str| train(device, out);
        let on_cpu = arguments("cpu", "cpu");
        ok(path, &on_cpu.iter().map(String::as_str).collect::<Vec<_>>());
        let on_card = |out: &str| {
            let given = arguments("cuda", out);
            let given: Vec<&str> = given.iter().map(String::as_str).collect();
            succeeds(&with_driver(driver, path, &given, &[]))
        };
        let said = on_card("card");
        assert!(said.contains("Mock 0") && said.contains("the plan's claim"), "{said}");
        on_card("again");
        let [cpu, card, again] = ["cpu", "card", "again"].map(|run| losses(&path.join(run)));
        assert_eq!(card, again, "{name}: the same run gives other bits");
        assert!(!card.is_empty() && card.len() == cpu.len());
        let tolerance = if name == "bf16" { 2e-2 } else { 1e-5 };
        for (cpu, card) in cpu.iter().zip(&card) {
            assert!((cpu - card).abs() <= tolerance * cpu.abs(), "{name}: {cpu} and {card}");
        }
        let report = report(&path.join("card"));
        let [planned, measured] = ["planned", "measured"].map(|which| &report[which]["device_peak_bytes"]);
        assert_eq!(planned, measured, "{name}");
        for run in ["cpu", "card", "again"] {
            std::fs::remove_dir_all(path.join(run)).unwrap();
        }
    }
}

#[test]
fn a_run_is_resumed_on_a_card_with_the_same_bits() {
    let Some(driver) = mock::library() else { return };
    let folder = folder();
    let path = folder.path();
    let train = |more: &[&str]| {
        let fixed = ["train", "c.yaml", "--device", "cuda", "--set", "memory.device_budget=1GiB"];
        succeeds(&with_driver(driver, path, &[&fixed[..], more].concat(), &[]))
    };
    train(&["--set", "output.dir=whole"]);
    train(&["--set", "output.dir=parts"]);
    // The same again, from the checkpoint after step 2.
    std::fs::remove_dir_all(path.join("parts/checkpoint-4")).unwrap();
    train(&["--set", "output.dir=parts", "--resume"]);
    assert_eq!(losses(&path.join("whole")), losses(&path.join("parts")));
}

#[test]
fn a_card_answers_as_the_cpu_does() {
    let Some(driver) = mock::library() else { return };
    let folder = folder();
    let path = folder.path();
    ok(path, &["train", "c.yaml"]);
    let fixed = ["generate", "--model", "out", "--prompt", "wo", "--max-tokens", "8"];
    let greedy = [&fixed[..], &["--temperature", "0"]].concat();
    for more in [&[][..], &["--dtype", "bf16"], &["--quantize", "q8_0"], &["--kv-cache", "int8"]] {
        let given = [&greedy[..], more].concat();
        let cpu = ok(path, &[&given[..], &["--device", "cpu"]].concat());
        let card = succeeds(&with_driver(driver, path, &[&given[..], &["--device", "cuda"]].concat(), &[]));
        assert_eq!(cpu, card, "{more:?}");
    }
}

/// A budget of host memory that the machine has not is found before anything is taken.
#[test]
fn host_memory_that_is_not_there_is_refused() {
    let Some(driver) = mock::library() else { return };
    let folder = folder();
    let sets = [
        "training.mixed_precision=f32",
        "model.from_scratch.hidden_size=1024",
        "model.from_scratch.intermediate_size=2048",
        "model.from_scratch.num_hidden_layers=20000",
        "memory.offload.parameters=host",
        "memory.offload.gradients=host",
        "memory.offload.optimizer=host",
        "memory.offload.activations=host",
        "memory.host_budget=1000TiB",
        "memory.device_budget=4GiB",
    ];
    let given: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    let given = [&["train", "c.yaml", "--device", "cuda"], &given[..]].concat();
    let output = with_driver(driver, folder.path(), &given, &[]);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("of host memory below their cards"), "{said}");
}

/// Prompts that share a cache, and tokens that are guessed from the text.
#[test]
fn a_card_answers_many_prompts_and_guesses_as_the_cpu_does() {
    let Some(driver) = mock::library() else { return };
    let folder = folder();
    let path = folder.path();
    ok(path, &["train", "c.yaml"]);
    std::fs::write(path.join("p.txt"), "wo\nrd word\na\n").unwrap();
    let fixed = ["generate", "--model", "out", "--max-tokens", "6", "--temperature", "0", "--json"];
    let answers = |said: &str| -> Vec<Value> {
        // One answer, or a list of them.
        let document: Value = serde_json::from_str(said).unwrap();
        let each = document.as_array().cloned().unwrap_or_else(|| vec![document]);
        each.iter().map(|answer| answer["text"].clone()).collect()
    };
    for more in [
        &["--prompts", "p.txt", "--parallel", "3"][..],
        &["--prompts", "p.txt", "--parallel", "2", "--kv-cache", "int8"],
        &["--prompt", "word wo", "--speculative", "lookup"],
        &["--prompt", "word wo", "--draft-model", "out"],
    ] {
        let given = [&fixed[..], more].concat();
        let cpu = ok(path, &[&given[..], &["--device", "cpu"]].concat());
        let card = succeeds(&with_driver(driver, path, &[&given[..], &["--device", "cuda"]].concat(), &[]));
        let [cpu, card] = [cpu, card].map(|said| answers(&said));
        assert!(cpu.iter().all(Value::is_string) && !cpu.is_empty());
        assert_eq!(cpu, card, "{more:?}");
    }
}

#[test]
fn a_card_measures_what_the_cpu_does() {
    let Some(driver) = mock::library() else { return };
    let folder = folder();
    let path = folder.path();
    ok(path, &["train", "c.yaml"]);
    let sample = r#"{"instruction": "wo", "output": "word word"}"#;
    std::fs::write(path.join("samples.jsonl"), [sample; 3].join("\n")).unwrap();
    let text = ["--data", "text.txt", "--sequence-length", "12"];
    let samples = ["--data", "samples.jsonl", "--format", "instruction", "--sequence-length", "256"];
    for (data, more, tolerance) in [
        (&text[..], &[][..], 1e-5),
        (&text, &["--dtype", "bf16"], 2e-3),
        (&text, &["--quantize", "nf4"], 1e-5),
        (&text, &["--kv-cache", "int8"], 1e-4),
        (&samples, &[], 1e-5),
    ] {
        let given = [&["eval", "--model", "out", "--json"], data, more].concat();
        let cpu = ok(path, &[&given[..], &["--device", "cpu"]].concat());
        let card = succeeds(&with_driver(driver, path, &[&given[..], &["--device", "cuda"]].concat(), &[]));
        let [cpu, card] = [cpu, card].map(|said| serde_json::from_str::<Value>(&said).unwrap());
        assert_eq!(cpu["tokens"], card["tokens"], "{more:?}");
        let [on_cpu, on_card] = [&cpu, &card].map(|said| said["loss"].as_f64().unwrap());
        assert!((on_cpu - on_card).abs() <= tolerance * on_cpu, "{more:?}: {on_cpu} and {on_card}");
        // The line is the card's.
        assert_eq!(card["memory"]["limited_by"], "device memory");
    }
}

#[test]
fn what_is_wrong_with_a_card_is_said() {
    let folder = folder();
    let path = folder.path();
    let nowhere = ["train", "c.yaml", "--device", "gpu"];
    let said = text(&crate::support::plimsoll(path, &nowhere).stderr);
    assert!(said.contains("must be auto, cpu, cuda or cuda:N"), "{said}");
    let Some(driver) = mock::library() else { return };
    let fails = |arguments: &[&str], variables: &[(&str, &str)]| {
        let output = with_driver(driver, path, arguments, variables);
        assert!(!output.status.success(), "{}", text(&output.stdout));
        text(&output.stderr)
    };
    let cuda = ["train", "c.yaml", "--device", "cuda:1"];
    assert!(fails(&cuda, &[]).contains("there is no card 1: the driver finds 1"));
    let cuda = ["train", "c.yaml", "--device", "cuda"];
    assert!(fails(&cuda, &[("MOCK_CAPABILITY", "61")]).contains("compute capability 6.1; 7.5 is needed"));
    // Context and kernels alone take more than 256 MiB of that card.
    let short = fails(&cuda, &[]);
    assert!(short.contains("the load line is 256.0 MiB"), "{short}");
    let ranks = ["train", "c.yaml", "--device", "cuda", "--ranks", "2"];
    let refusal = if cfg!(feature = "mpi") { "have the same card" } else { "2 ranks need MPI" };
    assert!(fails(&ranks, &[]).contains(refusal));
    // A card that cannot be used is no reason not to train.
    let auto =
        with_driver(driver, path, &["train", "c.yaml", "--device", "auto"], &[("MOCK_CAPABILITY", "61")]);
    succeeds(&auto);
    let said = text(&auto.stderr);
    assert!(said.contains("the CPU computes: Mock 0 has compute capability 6.1"), "{said}");
    let found = succeeds(&with_driver(driver, path, &["doctor"], &[]));
    assert!(found.contains("the driver is for CUDA 12.4") && found.contains("--device cuda:0"), "{found}");
    let old = succeeds(&with_driver(driver, path, &["doctor"], &[("MOCK_DRIVER", "11040")]));
    assert!(old.contains("the NVIDIA driver is too old"), "{old}");
}
