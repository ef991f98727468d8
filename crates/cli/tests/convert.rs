//! `convert`, `merge` and `--quantize` as a user runs them, on a tiny model of bytes.

mod support;

use std::path::Path;

use serde_json::{Value, json};
use support::{ok, plimsoll, text};

const CONFIG: &str = "
model:
  from_scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}
data: {train: text.txt, sequence_length: 12}
training: {steps: 2, batch_size: 2, learning_rate: 1e-2}
memory: {device_budget: 256MiB}
output: {dir: out, save_steps: 0}
";

/// A folder with a text and the model `out`.
fn folder() -> tempfile::TempDir {
    let folder = support::folder();
    std::fs::write(folder.path().join("c.yaml"), CONFIG).unwrap();
    ok(folder.path(), &["train", "c.yaml"]);
    folder
}

fn loss(folder: &Path, model: &str, more: &[&str]) -> f64 {
    let arguments = ["eval", "--model", model, "--data", "text.txt", "--sequence-length", "32", "--json"];
    let document: Value = serde_json::from_str(&ok(folder, &[&arguments, more].concat())).unwrap();
    document["loss"].as_f64().unwrap()
}

fn convert(folder: &Path, model: &str, output: &str, dtype: &str) -> Value {
    let arguments = ["convert", "--model", model, "--output", output, "--dtype", dtype, "--json"];
    serde_json::from_str(&ok(folder, &arguments)).unwrap()
}

#[test]
fn a_model_goes_from_format_to_format() {
    let folder = folder();
    let folder = folder.path();
    let before = loss(folder, "out", &[]);
    for (output, dtype, within) in [
        ("f32.gguf", "f32", 1e-6),
        ("bf16.gguf", "bf16", 1e-2),
        ("q8_0.gguf", "q8_0", 1e-2),
        ("q4_0.gguf", "q4_0", 0.3),
        ("q6_k.gguf", "q6_k", 1e-2),
        ("f16", "f16", 1e-2),
        ("nf4", "nf4", 0.3),
        ("fp4", "fp4_f32", 0.3),
        ("int8", "int8", 2e-2),
    ] {
        let document = convert(folder, "out", output, dtype);
        assert_eq!(document["notes"], json!([]), "{output}");
        let after = loss(folder, output, &[]);
        assert!((after - before).abs() < within, "{output}: loss {after}, before {before}");
    }
    // And back: f32 loses nothing, a quantised file's values are what the folder then has.
    convert(folder, "f32.gguf", "back", "f32");
    assert!((loss(folder, "back", &[]) - before).abs() < 1e-6);
    convert(folder, "nf4", "wide", "f32");
    assert!((loss(folder, "wide", &[]) - loss(folder, "nf4", &[])).abs() < 1e-4);
}

#[test]
fn linears_are_quantised_while_loading() {
    let folder = folder();
    let folder = folder.path();
    let before = loss(folder, "out", &[]);
    for (dtype, within) in [("nf4", 0.3), ("int8", 1e-2), ("q8_0", 1e-2), ("q4_k", 0.3)] {
        let after = loss(folder, "out", &["--quantize", dtype]);
        assert!((after - before).abs() < within, "{dtype}: loss {after}, before {before}");
        let cached = loss(folder, "out", &["--quantize", dtype, "--kv-cache", "f32"]);
        assert!((cached - after).abs() < 1e-3, "{dtype}: loss {cached} through a cache, {after} without");
        ok(
            folder,
            &["generate", "--model", "out", "--prompt", "word", "--max-tokens", "4", "--quantize", dtype],
        );
    }
    // The same bits, whether they come from a file or are made while loading.
    convert(folder, "out", "nf4", "nf4");
    let (made, read) = (loss(folder, "out", &["--quantize", "nf4"]), loss(folder, "nf4", &[]));
    assert!((made - read).abs() < 1e-2, "loss {made} made while loading, {read} from the file");
}

#[test]
fn what_cannot_be_written_is_refused() {
    let folder = folder();
    let folder = folder.path();
    for (arguments, told) in [
        (["--output", "a.gguf", "--dtype", "nf4"], "--dtype nf4"),
        (["--output", "a", "--dtype", "q4_k"], "--dtype q4_k"),
        (["--output", "out", "--dtype", "f32"], "--force"),
    ] {
        let output = plimsoll(folder, &[&["convert", "--model", "out"][..], &arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(told), "{}", text(&output.stderr));
    }
    let output = plimsoll(folder, &["eval", "--model", "out", "--data", "text.txt", "--quantize", "q9"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("nf4"), "{}", text(&output.stderr));
}

#[test]
fn a_missing_tokenizer_is_noted_and_a_broken_one_refused() {
    let folder = folder();
    let folder = folder.path();
    std::fs::remove_file(folder.join("out/tokenizer.json")).unwrap();
    let document = convert(folder, "out", "bare.gguf", "q8_0");
    assert!(document["notes"][0].as_str().unwrap().contains("tokenizer"), "{document}");
    let document = convert(folder, "bare.gguf", "bare", "bf16");
    assert!(document["notes"][0].as_str().unwrap().contains("tokenizer"), "{document}");
    std::fs::write(folder.join("out/tokenizer.json"), "{}").unwrap();
    let output = plimsoll(folder, &["convert", "--model", "out", "--output", "b.gguf"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("tokenizer.json"), "{}", text(&output.stderr));
}

/// Merging into GGUF and into a folder gives one model, which is not the base.
#[test]
fn an_adapter_is_merged() {
    let folder = folder();
    let folder = folder.path();
    std::fs::create_dir(folder.join("adapter")).unwrap();
    let config = json!({
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": false, "from_the_future": true,
    });
    std::fs::write(folder.join("adapter/adapter_config.json"), config.to_string()).unwrap();
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for layer in 0..2 {
        for (part, shape) in [("A", [2, 64]), ("B", [64, 2])] {
            let name = format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight");
            let begin = data.len();
            (0..128).for_each(|i| data.extend((0.1 * ((i * 7 % 11) as f32 - 5.0)).to_le_bytes()));
            let tensor = json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()] });
            header.insert(name, tensor);
        }
    }
    let header = Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(&data);
    std::fs::write(folder.join("adapter/adapter_model.safetensors"), file).unwrap();

    let merge = |output: &str| {
        let arguments =
            ["merge", "--model", "out", "--adapter", "adapter", "--dtype", "f32", "--output", output];
        ok(folder, &arguments)
    };
    assert!(merge("merged").contains("from_the_future"));
    merge("merged.gguf");
    let (base, merged) = (loss(folder, "out", &[]), loss(folder, "merged", &[]));
    assert!((merged - base).abs() > 1e-4, "the adapter changes nothing: {merged}");
    assert!((merged - loss(folder, "merged.gguf", &[])).abs() < 1e-5);
    let refused = plimsoll(folder, &["merge", "--model", "out", "--adapter", "out", "--output", "none"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("adapter_config.json"), "{}", text(&refused.stderr));
}
