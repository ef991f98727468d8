//! `plimsoll export`: where the file and its notes go, and what is refused.

mod support;

use std::fs;

use serde_json::Value;
use support::{folder, ok, plimsoll, text};

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
