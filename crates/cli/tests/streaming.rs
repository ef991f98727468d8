//! A model that does not fit in memory answers as one that does, from its files or from a spill file; full disks and used-up
//! budgets are errors that say what to do, and nothing is left on the disk.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Some 28 million parameters: 108 MiB in f32, of which any memory limit below can hold a part at most.
const MODEL: &str = "
model:
  from_scratch: {hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 16, num_attention_heads: 6}
data: {train: text.txt, sequence_length: 64}
training: {steps: 1, batch_size: 1, optimizer: sgd, mixed_precision: f32}
output: {dir: out, save_steps: 0}
";

/// Less than the program and the model take, more than the program and a few layers.
const LIMITED: [&str; 4] = ["--memory", "100MiB", "--disk-path", "spill"];

/// The same for the model in 8 bits.
const LIMITED_QUANTIZED: [&str; 6] = ["--quantize", "q8_0", "--memory", "44MiB", "--disk-path", "spill"];

fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let words: String = (0..200).map(|i| format!("word{} ", i * 7 % 23)).collect();
    std::fs::write(folder.path().join("text.txt"), words).unwrap();
    std::fs::write(folder.path().join("c.yaml"), MODEL).unwrap();
    std::fs::create_dir(folder.path().join("spill")).unwrap();
    let trained = plimsoll(folder.path(), &["train", "c.yaml", "--threads", "2"]);
    assert!(trained.status.success(), "{}", text(&trained.stderr));
    folder
}

fn plimsoll(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.current_dir(folder).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const GENERATE: [&str; 12] = [
    "generate",
    "--model",
    "out",
    "--prompt",
    "word1 word",
    "--max-tokens",
    "6",
    "--temperature",
    "0",
    "--threads",
    "2",
    "--json",
];
const EVAL: [&str; 10] =
    ["eval", "--model", "out", "--data", "text.txt", "--sequence-length", "64", "--threads", "2", "--json"];

fn document(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn what_does_not_fit_is_streamed_and_gives_the_same() {
    let folder = model();
    let run = |command: &[&str], more: &[&str]| document(&plimsoll(folder.path(), &[command, more].concat()));
    let (resident, streamed) = (run(&GENERATE, &[]), run(&GENERATE, &LIMITED));
    assert_eq!(resident["tokens"], streamed["tokens"]);
    assert!(resident["streaming"].is_null());
    let (exact, evaluated) = (run(&EVAL, &[]), run(&EVAL, &LIMITED));
    assert_eq!(exact["loss"], evaluated["loss"]);
    let cached = ["--kv-cache", "f32"];
    let through_the_cache = run(&EVAL, &[&cached[..], &LIMITED].concat());
    assert_eq!(run(&EVAL, &cached)["loss"], through_the_cache["loss"]);
    for found in [streamed, evaluated, through_the_cache] {
        let streaming = &found["streaming"];
        assert!(streaming["resident_layers"].as_u64().unwrap() < 16, "{found}");
        assert!(streaming["bytes_read"].as_u64() >= streaming["bytes_per_pass"].as_u64(), "{found}");
        assert_eq!(streaming["spilled_bytes"], 0);
    }
    assert_eq!(std::fs::read_dir(folder.path().join("spill")).unwrap().count(), 0);
}

#[test]
fn weights_that_have_to_be_converted_need_room_on_the_disk() {
    let folder = model();
    let run = |more: &[&str]| plimsoll(folder.path(), &[&GENERATE[..], more].concat());
    let resident = document(&run(&LIMITED_QUANTIZED[..2]));
    let streamed = document(&run(&LIMITED_QUANTIZED));
    assert_eq!(resident["tokens"], streamed["tokens"]);
    assert!(streamed["streaming"]["spilled_bytes"].as_u64().unwrap() > 0, "{streamed}");

    // A folder that was not there goes again, however the program ends.
    let elsewhere = [&LIMITED_QUANTIZED[..4], &["--disk-path", "new/below"]].concat();
    assert_eq!(document(&run(&elsewhere))["tokens"], resident["tokens"]);
    assert!(!folder.path().join("new").exists());
    let over = run(&[&elsewhere[..], &["--disk-budget", "100KiB"]].concat());
    assert_eq!(over.status.code(), Some(3), "{}", text(&over.stderr));
    assert!(!folder.path().join("new").exists());

    let over = run(&[&LIMITED_QUANTIZED[..], &["--disk-budget", "100KiB"]].concat());
    assert_eq!(over.status.code(), Some(3), "{}", text(&over.stderr));
    assert!(text(&over.stderr).contains("raise the disk budget"), "{}", text(&over.stderr));
    let full = Command::new("sh")
        .current_dir(folder.path())
        .args(["-c", r#"ulimit -f 200 && exec "$0" "$@""#, env!("CARGO_BIN_EXE_plimsoll")])
        .args([&GENERATE[..], &LIMITED_QUANTIZED].concat())
        .output()
        .unwrap();
    assert_eq!(full.status.code(), Some(1), "{}", text(&full.stderr));
    assert!(text(&full.stderr).contains("has no room for"), "{}", text(&full.stderr));
    assert_eq!(std::fs::read_dir(folder.path().join("spill")).unwrap().count(), 0);
}
