//! `inspect` of everything that there is.

use std::path::Path;

use crate::support::{folder, ok, plimsoll, text};
use serde_json::{Value, json};

fn inspect(folder: &Path, path: &str) -> Value {
    serde_json::from_str(&ok(folder, &["inspect", path, "--json"])).unwrap()
}

#[test]
fn a_run_its_checkpoints_its_weights_and_its_tokenizer() {
    let folder = folder();
    let folder = folder.path();
    ok(folder, &["train", "c.yaml", "--set", "training.mixed_precision=f32"]);

    let run = inspect(folder, "out");
    assert_eq!((&run["kind"], &run["architecture"]), (&json!("run"), &json!("llama")));
    assert_eq!(
        run["run"],
        json!({
            "steps": 4, "last_loss": run["run"]["last_loss"], "finished": true, "checkpoints": [2, 4]
        })
    );
    let groups = run["parameters_by_group"].as_object().unwrap();
    assert_eq!(
        groups.values().map(|n| n.as_u64().unwrap()).sum::<u64>(),
        run["parameters"].as_u64().unwrap()
    );
    assert_eq!(groups["feed_forward"], 2 * 3 * 16 * 24);
    assert_eq!(run["dtypes"][0]["bits_per_parameter"], 32.0);
    assert_eq!(run["parameters_by_dtype"]["f32"], run["parameters"]);
    assert_eq!(run["tokenizer"]["vocab_size"], 257);
    assert!(run.get("stored_tensors").is_none());
    let needs = run["needs"].as_array().unwrap();
    assert!(needs.iter().any(|need| need["what"] == "full fine-tune"));
    assert!(needs.iter().any(|need| need["what"] == "inference"));

    let checkpoint = inspect(folder, "out/checkpoint-2");
    assert_eq!((&checkpoint["kind"], &checkpoint["checkpoint"]["step"]), (&json!("checkpoint"), &json!(2)));
    assert!(checkpoint["checkpoint"]["optimizer_bytes"].as_u64().unwrap() > 0);

    assert_eq!(inspect(folder, "out/model.safetensors")["kind"], "model");
    let optimizer = inspect(folder, "out/checkpoint-2/optimizer.safetensors");
    assert_eq!(optimizer["kind"], "tensors");
    assert!(optimizer["notes"][0].as_str().unwrap().contains("cannot be run"));
    let tokenizer = inspect(folder, "out/tokenizer.json");
    assert_eq!((&tokenizer["kind"], &tokenizer["tokenizer"]["kind"]), (&json!("tokenizer"), &json!("BPE")));

    // A run that was broken off shows its last checkpoint.
    std::fs::remove_file(folder.join("out/model.safetensors")).unwrap();
    let broken = inspect(folder, "out");
    assert_eq!((&broken["kind"], &broken["parameters"]), (&json!("run"), &run["parameters"]));
    assert!(broken["notes"].to_string().contains("checkpoint-4"));

    let shown = ok(folder, &["inspect", "out/checkpoint-4", "--tensors"]);
    for part in [
        "shape\n",
        "storage\n",
        "feed forward",
        "needs",
        "full fine-tune",
        "model.norm.weight",
        "<|endoftext|>",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

#[test]
fn an_adapter_and_a_template() {
    let folder = folder();
    let folder = folder.path();
    ok(folder, &["train", "c.yaml"]);
    let adapter = folder.join("adapter");
    std::fs::create_dir(&adapter).unwrap();
    let config = json!({
        "peft_type": "LORA", "base_model_name_or_path": "org/base\u{1b}[31m", "r": 8, "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
    });
    std::fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    let found = inspect(folder, "adapter");
    assert_eq!((&found["kind"], &found["adapter"]["rank"]), (&json!("adapter"), &json!(8)));
    assert!(found["notes"][0].as_str().unwrap().contains("adapter_model.safetensors"));
    std::fs::copy(folder.join("out/model.safetensors"), adapter.join("adapter_model.safetensors")).unwrap();
    let shown = ok(folder, &["inspect", "adapter"]);
    assert!(shown.contains("q_proj, v_proj") && shown.contains("bits/parameter"), "{shown}");
    // What a file says is shown, not obeyed.
    assert!(!shown.contains('\u{1b}'), "{shown}");

    let lines: String = (0..40).map(|i| format!("{{# line {i} #}}\n")).collect();
    std::fs::write(folder.join("out/chat_template.jinja"), lines).unwrap();
    let shown = ok(folder, &["inspect", "out"]);
    assert!(
        shown.contains("line 3") && !shown.contains("line 30") && shown.contains("--template"),
        "{shown}"
    );
    assert!(ok(folder, &["inspect", "out", "--template"]).contains("line 39"));
}

#[test]
fn what_is_nothing_says_so() {
    let folder = folder();
    let fails = |path: &str| {
        let output = plimsoll(folder.path(), &["inspect", path]);
        assert!(!output.status.success(), "{path}");
        text(&output.stderr)
    };
    assert!(fails("text.txt").contains("text.txt: is no model"));
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    assert!(fails("empty").contains("is no model's folder"));
    std::fs::write(folder.path().join("bad.gguf"), "GGUFx").unwrap();
    assert!(fails("bad.gguf").contains("bad.gguf"));
    let shown = ok(folder.path(), &["inspect", "smollm2-135m"]);
    assert!(shown.contains("a model of the catalogue") && shown.contains("134515008"), "{shown}");
}
