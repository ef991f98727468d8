//! What `estimate` says of other stacks.

use crate::support::{folder, ok, plimsoll, text};
use serde_json::Value;

const REQUEST: &str = r#"{"stack": "peft", "model": "smollm2-135m", "batch_size": 2, "sequence_length": 512, "precision": "fp16",
    "optimizer": "adamw_torch", "gradient_checkpointing": true, "attention": "eager", "hardware": "Tesla T4", "phase": "train",
    "lora": {"rank": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, "quantization": null}"#;

fn folder_with(name: &str, content: &str) -> tempfile::TempDir {
    let folder = folder();
    std::fs::write(folder.path().join(name), content).unwrap();
    folder
}

fn document(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// The keys that are promised, and numbers that belong together.
#[test]
fn the_document_has_what_is_promised() {
    let folder = folder_with("r.json", REQUEST);
    let answer = document(&ok(folder.path(), &["estimate", "--request", "r.json", "--json"]));
    let number = |key: &str| answer[key].as_u64().unwrap_or_else(|| panic!("{key}: {answer:#}"));
    let [allocated, reserved, used] =
        ["allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes"].map(number);
    assert!(0 < allocated && allocated <= reserved && reserved < used, "{allocated} {reserved} {used}");
    let kinds = answer["peak"]["at_peak"].as_object().unwrap();
    assert_eq!(kinds.values().map(|bytes| bytes.as_u64().unwrap()).sum::<u64>(), allocated, "{kinds:?}");
    let phases = answer["phases"].as_array().unwrap();
    let highest = phases.iter().map(|phase| phase["allocated_bytes"].as_u64().unwrap()).max();
    assert_eq!(highest, Some(allocated));
    assert!(phases.iter().any(|phase| phase["phase"] == answer["peak"]["phase"]), "{phases:?}");
    assert!(!answer["uncertain"].as_array().unwrap().is_empty());
    assert_eq!(answer["fits"], true);
    assert!(answer["plimsoll"]["device_used_bytes"].as_u64().unwrap() > 0);
    let fits_on = answer["fits_on"].as_array().unwrap();
    assert!(fits_on.iter().any(|card| card == "t4"), "{fits_on:?}");
}

#[test]
fn the_words_say_where_the_peak_is_and_what_would_help() {
    let folder = folder_with("r.json", REQUEST);
    let arguments = ["estimate", "--request", "r.json", "--batch-size", "64", "--sequence-length", "2048"];
    let shown = plimsoll(folder.path(), &arguments);
    assert_eq!(shown.status.code(), Some(3), "{}", text(&shown.stderr));
    let words = text(&shown.stdout);
    for part in [
        "max_memory_allocated",
        "nvidia-smi will show",
        "the peak is in the",
        "█",
        "does NOT fit",
        "Plimsoll would",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
    let helps = words.split("the cheapest first").nth(1).unwrap();
    assert!(helps.contains("half the batch_size") || helps.contains("sdpa"), "{words}");
}

/// Flags and files of the stack come to the same request.
#[test]
fn flags_and_files_say_the_same() {
    let folder = folder_with(
        "args.json",
        r#"{"per_device_train_batch_size": 2, "max_length": 512, "bf16": true, "optim": "adamw_torch", "learning_rate": 1e-4}"#,
    );
    let files = ["estimate", "args.json", "--model", "smollm2-135m", "--brief", "--json"];
    let flags = [
        "estimate",
        "--stack",
        "hf",
        "--model",
        "smollm2-135m",
        "--batch-size",
        "2",
        "--sequence-length",
        "512",
        "--precision",
        "bf16-amp",
        "--optimizer",
        "adamw_torch",
        "--brief",
        "--json",
    ];
    let [files, flags] = [&files[..], &flags].map(|arguments| document(&ok(folder.path(), arguments)));
    assert_eq!(files["allocated_peak_bytes"], flags["allocated_peak_bytes"]);
    assert_eq!(files["request"], flags["request"]);
    assert_eq!(files["not_read"].as_array().map(Vec::len), Some(1), "{}", files["not_read"]);
}

#[test]
fn versions_change_what_is_allocated() {
    let folder = folder_with("r.json", REQUEST);
    let of = |version: &str| {
        let arguments = ["estimate", "--request", "r.json", "--transformers", version, "--brief", "--json"];
        let answer = document(&ok(folder.path(), &arguments));
        answer["phases"].as_array().unwrap().iter().map(|p| p["allocated_bytes"].as_u64().unwrap()).max()
    };
    assert!(of("4.44") > of("5.0"));
}

/// The longest of the user's samples decides, not the average; a length to cut at goes over it.
#[test]
fn lengths_come_from_the_users_samples() {
    let mut samples: String = (1..200).map(|n| format!("{{\"length\": {}}}\n", 100 + n)).collect();
    samples.push_str("{\"input_ids\": [1, 2, 3]}\n");
    let folder = folder_with("samples.jsonl", &samples);
    let base = ["estimate", "--model", "smollm2-135m", "--hardware", "t4", "--brief", "--json"];
    let of = |more: &[&str]| {
        let answer = document(&ok(folder.path(), &[&base[..], more].concat()));
        ["allocated_peak_bytes", "reserved_peak_bytes"].map(|key| answer[key].as_u64().unwrap())
    };
    let [data, in_pieces] = of(&["--data", "samples.jsonl"]);
    let [longest, of_one_length] = of(&["--sequence-length", "299"]);
    assert!(data >= longest && data < longest + longest / 50, "{data} {longest}");
    // Lengths that differ leave pieces in the allocator's cache.
    assert!(in_pieces > of_one_length, "{in_pieces} {of_one_length}");
    let [cut, _] = of(&["--data", "samples.jsonl", "--sequence-length", "64"]);
    assert!(cut < data, "{cut} {data}");
    std::fs::write(folder.path().join("texts.jsonl"), "{\"text\": \"a\"}\n").unwrap();
    let shown = plimsoll(folder.path(), &[&base[..], &["--data", "texts.jsonl"]].concat());
    assert!(text(&shown.stderr).contains("give the model's folder"), "{}", text(&shown.stderr));
}

/// A log of memory that ran out, with the files of the run's stack.
#[test]
fn doctor_explains_a_log_by_the_phases_of_its_run() {
    let message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB of which \
                   1.02 GiB is free. Including non-PyTorch memory, this process has 22.61 GiB memory in use. Of the allocated memory \
                   21.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated.\n";
    let folder = folder_with("oom.log", message);
    let files =
        r#"{"per_device_train_batch_size": 8, "bf16": true, "optim": "adamw_torch", "output_dir": "out"}"#;
    std::fs::write(folder.path().join("args.json"), files).unwrap();
    let base = ["doctor", "oom.log", "--estimate", "args.json", "--model", "llama-3.2-1b"];
    let words = ok(folder.path(), &base);
    assert!(words.contains("that the device has beside"), "{words}");
    assert!(words.contains("the message counts 21.0 GiB in tensors: the run reaches that in the"), "{words}");
    let answer = document(&ok(folder.path(), &[&base[..], &["--json"]].concat()));
    assert!(
        answer["estimate"]["phases"].as_array().unwrap().iter().any(|phase| phase["phase"] == "backward")
    );
    assert!(answer["plan"].is_null());
}

/// A model's config.json alone is enough.
#[test]
fn a_config_json_alone_is_answered_with_what_was_taken() {
    let config = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": false}"#;
    let folder = folder_with("config.json", config);
    let words = ok(folder.path(), &["estimate", "config.json"]);
    assert!(words.contains("nothing says these, so they were taken: stack hf, batch_size 1"), "{words}");
}

#[test]
fn what_is_not_known_ends_with_2_and_says_what_is() {
    let folder = folder_with("r.json", REQUEST);
    for (arguments, words) in [
        (&["estimate"][..], "which model?"),
        (&["estimate", "--model", "gpt-5"], "the catalogue has no such model"),
        (&["estimate", "--model", "gpt2", "--stack", "keras"], "it can be hf, peft"),
        (&["estimate", "--model", "gpt2", "--hardware", "abacus"], "hardware: abacus"),
        (
            &["estimate", "--request", "r.json", "--attention", "flash_attention_2"],
            "needs compute capability 8.0",
        ),
        (&["estimate", "--request", "none.json"], "none.json"),
        (&["estimate", "none.yaml"], "none.yaml"),
    ] {
        let shown = plimsoll(folder.path(), arguments);
        let error = text(&shown.stderr);
        assert_eq!(shown.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
}

#[test]
fn a_plan_of_another_stack_is_its_estimate() {
    let folder = folder();
    let flags =
        ["--stack", "peft", "--model", "smollm2-135m", "--lora-rank", "8", "--hardware", "t4", "--json"];
    let [plan, estimate] =
        ["plan", "estimate"].map(|command| ok(folder.path(), &[&[command][..], &flags].concat()));
    assert_eq!(document(&plan), document(&estimate));
}

#[test]
fn what_a_run_does_besides_is_a_phase() {
    let arguments = r#"{"per_device_train_batch_size": 4, "output_dir": "out", "eval_strategy": "steps", "per_device_eval_batch_size": 32,
        "resume_from_checkpoint": "out/checkpoint-10", "dataloader_num_workers": 2, "learning_rate": 1e-4}"#;
    let folder = folder_with("training_args.json", arguments);
    let flags = [
        "--model",
        "smollm2-135m",
        "--lora-rank",
        "8",
        "--sequence-length",
        "256",
        "--merge",
        "--hardware",
        "a100-80",
        "--json",
    ];
    let answer = document(&ok(folder.path(), &[&["estimate", "training_args.json"][..], &flags].concat()));
    let phases: Vec<&str> =
        answer["phases"].as_array().unwrap().iter().map(|phase| phase["phase"].as_str().unwrap()).collect();
    for phase in ["resume", "evaluate", "merge"] {
        assert!(phases.contains(&phase), "{phase}: {phases:?}");
    }
    assert_eq!(answer["request"]["eval_batch_size"], 32);
    assert!(answer["phases"][2]["host_bytes"].as_u64().unwrap() > 0, "workers' batches: {answer:#}");
    let sharded = ["--zero-stage", "3", "--devices", "2"];
    let refused =
        plimsoll(folder.path(), &[&["estimate", "training_args.json"][..], &flags, &sharded].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("merge: "), "{}", text(&refused.stderr));
}
