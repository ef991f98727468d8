//! `plimsoll export`: where the file and its notes go, and what is refused.

use std::fs;

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

const FLAGS: [&str; 9] = [
    "--model",
    "llama-3.1-8b",
    "--hardware",
    "8xa100-80",
    "--set",
    "parallel.zero_stage=3",
    "--set",
    "training.steps=10",
    "--mixed-precision=bf16",
];

#[test]
fn a_configuration_goes_to_standard_output_and_its_notes_where_they_can() {
    let folder = folder();
    let shown = plimsoll(folder.path(), &[&["export", "deepspeed"], &FLAGS[..]].concat());
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    let document: Value = serde_json::from_slice(&shown.stdout).unwrap();
    // Every device of the machine is a rank.
    let batch = |key: &str| document[key].as_u64().unwrap();
    let micro = batch("train_micro_batch_size_per_gpu") * batch("gradient_accumulation_steps");
    assert_eq!(batch("train_batch_size"), 8 * micro);
    assert!(text(&shown.stderr).contains("Not carried over"), "{}", text(&shown.stderr));
    let commented = plimsoll(folder.path(), &[&["export", "llama-factory"], &FLAGS[..]].concat());
    assert!(text(&commented.stdout).starts_with("# llama-3.1-8b, planned by Plimsoll"));
    assert!(commented.stderr.is_empty(), "{}", text(&commented.stderr));
}

#[test]
fn a_file_is_written_with_its_notes_beside_it() {
    let folder = folder();
    let to = |format: &str, file: &str| {
        ok(folder.path(), &[&["export", format, "-o", file], &FLAGS[..]].concat());
        fs::read_to_string(folder.path().join(file)).unwrap()
    };
    assert!(serde_json::from_str::<Value>(&to("transformers", "arguments.json")).is_ok());
    let notes = fs::read_to_string(folder.path().join("arguments.json.notes.txt")).unwrap();
    assert!(notes.contains("- training.master_weights: load the model in float32"), "{notes}");
    assert!(to("torchtitan", "titan.toml").contains("data_parallel_shard_degree = 8"));
    assert!(!folder.path().join("titan.toml.notes.txt").exists());
    let nowhere =
        plimsoll(folder.path(), &[&["export", "accelerate", "-o", "no/such/a.yaml"], &FLAGS[..]].concat());
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("no/such/a.yaml"), "{}", text(&nowhere.stderr));
}

#[test]
fn what_cannot_be_exported_writes_nothing_and_says_why() {
    let folder = folder();
    let refused = |arguments: &[&str], code: i32, words: &str| {
        let output = plimsoll(folder.path(), arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
        assert!(output.stdout.is_empty() && !folder.path().join("x").exists());
    };
    refused(&["export", "peft", "c.yaml", "-o", "x"], 2, "set training.method to lora or qlora");
    refused(&["export", "axolotl", "c.yaml", "-o", "x"], 2, "the model is made from scratch");
    refused(&["export", "megatron", "c.yaml", "-o", "x"], 2, "take one of deepspeed, accelerate");
    refused(&["export", "deepspeed", "c.yaml", "--memory", "4MiB", "-o", "x"], 3, "nothing was exported");
    ok(folder.path(), &["export", "deepspeed", "c.yaml", "-o", "x"]);
    assert!(folder.path().join("x").exists());
}

#[test]
fn what_was_exported_is_imported_again() {
    let folder = folder();
    ok(folder.path(), &[&["export", "deepspeed", "-o", "ds.json"], &FLAGS[..]].concat());
    let import = ["plan", "--import", "ds.json", "--model", "llama-3.1-8b", "--hardware", "8xa100-80"];
    let words = ok(folder.path(), &import);
    for line in ["  parallel.zero_stage: 3\n", "  parallel.data_parallel: 8\n", "  training.steps: 10\n"] {
        assert!(words.contains(line), "{line}{words}");
    }
    assert!(words.contains("ds.json:") && words.contains("reduce_bucket_size"), "{words}");
    let document: Value =
        serde_json::from_str(&ok(folder.path(), &[&import[..], &["--json"]].concat())).unwrap();
    assert_eq!(document["config"]["parallel"]["zero_stage"], 3);
    assert_eq!(document["config"]["training"]["steps"], 10);
    assert!(document["imported"]["left"].as_array().is_some_and(|left| !left.is_empty()));
    // Flags go over the file.
    let other = ok(folder.path(), &[&import[..], &["--json", "--set", "parallel.zero_stage=2"]].concat());
    let other: Value = serde_json::from_str(&other).unwrap();
    assert_eq!(other["config"]["parallel"]["zero_stage"], 2);
    fs::write(folder.path().join("torn.json"), "{\"zero_optimization\": {").unwrap();
    let torn = plimsoll(folder.path(), &["plan", "--import", "torn.json", "--model", "llama-3.1-8b"]);
    assert_eq!(torn.status.code(), Some(2));
    assert!(text(&torn.stderr).contains("torn.json:1:"), "{}", text(&torn.stderr));
}
