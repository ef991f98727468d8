//! `convert`, `merge` and `--quantize` as a user runs them, on a tiny model of bytes.

use std::path::Path;

use crate::support::{ok, plimsoll, text};
use serde_json::{Value, json};

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
    let folder = crate::support::folder();
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
        let notes = match dtype {
            "q6_k" => json!(["16 matrices are in q8_0 instead of q6_k, whose rows are multiples of 256"]),
            _ => json!([]),
        };
        assert_eq!(document["notes"], notes, "{output}");
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
    let arguments = ["generate", "--model", "out", "--prompt", "word", "--max-tokens", "1", "--quantize"];
    for (dtype, said) in [("q4_k", "14 matrices are in q5_0 instead of q4_k"), ("q5_0", "")] {
        let words = text(&plimsoll(folder, &[&arguments[..], &[dtype]].concat()).stderr);
        assert!(words.contains(said) && words.contains("instead") != said.is_empty(), "{words}");
    }
    // The same bits, whether they come from a file or are made while loading.
    convert(folder, "out", "nf4", "nf4");
    let (made, read) = (loss(folder, "out", &["--quantize", "nf4"]), loss(folder, "nf4", &[]));
    assert!((made - read).abs() < 1e-2, "loss {made} made while loading, {read} from the file");
}

/// In 8-bit integers: other losses, but hardly; the same ones where weights have no integer codes; and guesses change no token. Few tokens
/// at a time, as some machines multiply more of them as without.
#[test]
fn activations_are_quantised_where_they_meet_integer_codes() {
    let folder = folder();
    let folder = folder.path();
    // Through a cache, as windows without one share a pass.
    let loss_of = |more: &[&str]| -> f64 {
        let few = ["--sequence-length", "16", "--kv-cache", "f32", "--json"];
        let arguments = [&["eval", "--model", "out", "--data", "text.txt"], &few[..], more].concat();
        serde_json::from_str::<Value>(&ok(folder, &arguments)).unwrap()["loss"].as_f64().unwrap()
    };
    for (weights, rounds) in [("q8_0", true), ("q5_1", true), ("int8", true), ("nf4", false)] {
        let plain = loss_of(&["--quantize", weights]);
        let rounded = loss_of(&["--quantize", weights, "--quantize-activations"]);
        assert_eq!(plain != rounded, rounds, "{weights}: {plain} and {rounded}");
        assert!((plain - rounded).abs() < 5e-3, "{weights}: {plain} and {rounded}");
    }
    let usual = ["generate", "--model", "out", "--prompt", "word1 word8", "--max-tokens", "24", "--json"];
    let answer = |more: &[&str]| {
        let document = ok(folder, &[&usual[..], &["--quantize", "q8_0"], more].concat());
        serde_json::from_str::<Value>(&document).unwrap()
    };
    let (plain, rounded) = (answer(&[]), answer(&["--quantize-activations"]));
    assert_eq!(plain["memory"]["planned_model_bytes"], rounded["memory"]["planned_model_bytes"]);
    let guessed = answer(&["--quantize-activations", "--speculative", "lookup"]);
    assert_eq!(guessed["tokens"], rounded["tokens"]);
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
    // Folders of something else are left alone, whatever is said.
    std::fs::create_dir(folder.join("photos")).unwrap();
    std::fs::write(folder.join("photos/a.png"), "").unwrap();
    std::fs::create_dir(folder.join("empty")).unwrap();
    let into = |output| {
        plimsoll(folder, &["convert", "--model", "out", "--dtype", "f32", "--force", "--output", output])
    };
    let output = into("photos");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("something else than a model"), "{}", text(&output.stderr));
    assert!(into("empty").status.success() && folder.join("empty/config.json").exists());
    let output = plimsoll(folder, &["eval", "--model", "out", "--data", "text.txt", "--quantize", "q9"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("nf4"), "{}", text(&output.stderr));
}

/// Experts, attention and all else in types of their own, in a file and while loading.
#[test]
fn groups_have_types_of_their_own() {
    let folder = folder();
    let folder = folder.path();
    let sizes = "{architecture: qwen2_moe, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, \
                 num_attention_heads: 2, num_experts: 4, expert_intermediate_size: 64, shared_experts: 1}";
    let config = CONFIG.replace("output: {dir: out", "output: {dir: mixture");
    let begin = config.find("  from_scratch").unwrap();
    let end = config.find("\ndata").unwrap();
    let config = format!("{}  from_scratch: {sizes}{}", &config[..begin], &config[end..]);
    std::fs::write(folder.join("m.yaml"), config).unwrap();
    ok(folder, &["train", "m.yaml", "--set", "training.mixed_precision=f32"]);
    let inspect =
        |model: &str| -> Value { serde_json::from_str(&ok(folder, &["inspect", model, "--json"])).unwrap() };
    let before = loss(folder, "mixture", &[]);
    let close = |a: f64, b: f64, within: f64, what: &str| {
        assert!((a - b).abs() < within, "{what}: losses {a} and {b}");
    };

    // A GGUF file has any types beside each other.
    convert(folder, "mixture", "mixed.gguf", "experts=q4_0, attention=Q8_0,bf16");
    let of = inspect("mixed.gguf")["parameters_by_dtype"].clone();
    let (layers, experts, attention) = (2, 4 * 3 * 64 * 64, 4 * 64 * 64);
    assert_eq!((&of["q4_0"], &of["q8_0"]), (&json!(layers * experts), &json!(layers * attention)), "{of}");
    assert!(of["bf16"].as_u64().unwrap() >= layers * 3 * 64 * 64, "shared experts: {of}");
    let mixed = loss(folder, "mixed.gguf", &[]);
    close(mixed, before, 0.3, "mixed.gguf");
    assert!((mixed - before).abs() > 1e-7, "4 bits change nothing");

    // The same while loading; the plan counts what is loaded.
    let by_group = "experts=q4_0,attention=q8_0";
    close(loss(folder, "mixture", &["--quantize", by_group]), mixed, 1e-2, "while loading");
    let weights = |model: &str, more: &[&str]| {
        let arguments = ["plan", "--inference", "--model", model, "--context", "32", "--json"];
        let plan: Value = serde_json::from_str(&ok(folder, &[&arguments, more].concat())).unwrap();
        plan["model"]["weight_bytes"].as_u64().unwrap_or_else(|| panic!("{plan}"))
    };
    let (four, both, eight) = (
        weights("mixture", &["--quantize", "q4_0"]),
        weights("mixture", &["--quantize", "experts=q4_0,q8_0"]),
        weights("mixture", &["--quantize", "q8_0"]),
    );
    assert!(four < both && both < eight, "{four}, {both}, {eight}");
    assert!(weights("mixed.gguf", &[]) < both, "tables of the file are bf16, of the folder f32");

    // A folder packs some groups and leaves the rest in bf16.
    convert(folder, "mixture", "nf4", "experts=nf4_f32,bf16");
    let config: Value =
        serde_json::from_slice(&std::fs::read(folder.join("nf4/config.json")).unwrap()).unwrap();
    let left = config["quantization_config"]["llm_int8_skip_modules"].to_string();
    for module in ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.shared_expert.up_proj"] {
        assert!(left.contains(module) && !left.contains(".experts"), "{module}: {left}");
    }
    close(loss(folder, "nf4", &[]), loss(folder, "mixture", &["--quantize", "experts=nf4_f32"]), 1e-2, "nf4");
    convert(folder, "mixture", "nf4-attention", "attention=nf4");
    let config = std::fs::read_to_string(folder.join("nf4-attention/config.json")).unwrap();
    assert!(config.contains("model.layers.0.mlp.experts\""), "{config}");

    for (model, output, dtype, told) in [
        ("mixture", "a.gguf", "expert=q4_0", "it has embedding, attention, experts, shared_experts, router"),
        ("out", "a.gguf", "experts=q4_0", "it has embedding, attention, mlp"),
        ("mixture", "a.gguf", "experts=q9", "q4_k"),
        ("mixture", "a.gguf", "experts=nf4", "a GGUF file holds"),
        ("mixture", "a.gguf", "router=q8_0,bf16", "routers in f32"),
        ("mixture", "a.gguf", "experts=q4_0,experts=q8_0", "two types"),
        ("mixture", "a.gguf", "q4_0,q8_0", "two types"),
        ("mixture", "a", "experts=nf4,attention=int8", "int8 and nf4"),
        ("mixture", "a", "experts=nf4,f32", "not f32"),
        ("mixture", "a", "embedding=nf4,bf16", "embedding is not packed"),
        ("mixture", "a", "experts=f32,bf16", "experts cannot be f32 beside bf16"),
        ("mixture", "a", "experts=bf16,mxfp4", "no group of this model's linears would be packed"),
        ("out", "a", "attention=bf16,mlp=bf16,nf4", "no group of this model's linears would be packed"),
    ] {
        let output = plimsoll(folder, &["convert", "--model", model, "--output", output, "--dtype", dtype]);
        assert_eq!(output.status.code(), Some(2), "{dtype}");
        assert!(text(&output.stderr).contains(told), "{dtype}: {}", text(&output.stderr));
    }
    let arguments = ["eval", "--model", "mixture", "--data", "text.txt", "--quantize", "router=q8_0"];
    let output = plimsoll(folder, &arguments);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("router is not quantised"), "{}", text(&output.stderr));
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
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("adapter_config.json"), "{}", text(&refused.stderr));
}

/// QLoRA over the experts of gpt-oss in MXFP4: trained, answered with, merged into folders and files. Its vocabulary has 61 tokens.
#[test]
fn adapters_over_mxfp4_experts_are_trained_and_merged() {
    let folder = crate::support::folder();
    let folder = folder.path();
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/../train/tests/data/mxfp4/gpt-oss");
    std::fs::create_dir(folder.join("base")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(Path::new(base).join(name), folder.join("base").join(name)).unwrap();
    }
    let words: serde_json::Map<String, Value> =
        (0..23).map(|i| (format!("word{i}"), json!(i + 1))).chain([("<unk>".to_owned(), json!(0))]).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": words, "unk_token": "<unk>" },
    })
    .to_string();
    let tokenizer = |of: &str| std::fs::write(folder.join(of).join("tokenizer.json"), &tokenizer).unwrap();
    tokenizer("base");
    let config = "
model: base
data: {train: text.txt, sequence_length: 12}
training: {method: qlora, steps: 3, batch_size: 2, learning_rate: 1e-2, lora: {rank: 2, target_modules: all-linear}}
memory: {device_budget: 256MiB}
output: {dir: lora, save_steps: 0}
";
    std::fs::write(folder.join("q.yaml"), config).unwrap();
    let said = ok(folder, &["plan", "q.yaml"]);
    assert!(said.contains("quantised as mxfp4") && said.contains("adapters of 21 modules"), "{said}");
    ok(folder, &["train", "q.yaml"]);
    let report: Value =
        serde_json::from_slice(&std::fs::read(folder.join("lora/report.json")).unwrap()).unwrap();
    assert_eq!(report["planned"]["device_peak_bytes"], report["measured"]["device_peak_bytes"]);
    let adapter = std::fs::read(folder.join("lora/adapter_model.safetensors")).unwrap();
    assert!(text(&adapter).contains(".mlp.experts.5.down_proj.lora_B"), "no adapter on the last expert");

    let adapted = ["--adapter", "lora"];
    let (before, after) = (loss(folder, "base", &[]), loss(folder, "base", &adapted));
    assert!(after < before - 0.05, "trained to {after} from {before}");
    let prompt = ["generate", "--model", "base", "--prompt", "word0 word7", "--max-tokens", "4"];
    ok(folder, &[&prompt[..], &adapted].concat());

    // Without a tokenizer, which a GGUF file could not hold.
    std::fs::remove_file(folder.join("base/tokenizer.json")).unwrap();
    let merge = |output: &str, dtype: &str| {
        let arguments =
            ["merge", "--model", "base", "--adapter", "lora", "--output", output, "--dtype", dtype];
        ok(folder, &arguments);
    };
    merge("merged", "f32");
    merge("merged.gguf", "f32");
    convert(folder, "merged.gguf", "back", "f32");
    // Rounded to 4 bits again.
    merge("merged4", "experts=mxfp4,bf16");
    merge("merged4.gguf", "experts=mxfp4,bf16");
    convert(folder, "merged4.gguf", "back4", "f32");
    for (model, within) in [("merged", 1e-4), ("back", 1e-4), ("merged4", 0.3), ("back4", 0.3)] {
        tokenizer(model);
        let merged = loss(folder, model, &[]);
        assert!((merged - after).abs() < within, "{model}: loss {merged}, {after} with the adapter");
    }
    // Both files of 4 bits have the same experts, and routers are in bf16 in one and in f32 in the other.
    let both = ["merged4", "back4"].map(|model| loss(folder, model, &[]));
    assert!((both[0] - both[1]).abs() < 1e-2, "{both:?}");
}

#[test]
fn the_size_of_files_is_one_that_a_folder_can_have() {
    let folder = folder();
    for (output, size, words) in [
        ("a", "0", "--max-shard-size is 0 B; give at least 1.00 MiB"),
        ("a.gguf", "50MB", "--max-shard-size is about a folder's files, and a GGUF is one file"),
    ] {
        let output = plimsoll(
            folder.path(),
            &["convert", "--model", "out", "--output", output, "--max-shard-size", size],
        );
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
        assert_eq!(output.status.code(), Some(2));
    }
}

/// A GGUF keeps the name that its tokens are read by, whatever its file is called.
#[test]
fn a_gguf_that_is_copied_keeps_its_name() {
    let folder = folder();
    let name = |file: &str| {
        let bytes = std::fs::read(folder.path().join(file)).unwrap();
        let key = bytes.windows(12).position(|bytes| bytes == b"general.name").unwrap();
        // The key is followed by a type and the length of the text.
        let length = u64::from_le_bytes(bytes[key + 16..key + 24].try_into().unwrap()) as usize;
        text(&bytes[key + 24..key + 24 + length])
    };
    convert(folder.path(), "out", "first.gguf", "f32");
    convert(folder.path(), "first.gguf", "second.gguf", "f32");
    assert_eq!([name("first.gguf"), name("second.gguf")], ["out", "out"]);
}

#[cfg(unix)]
#[test]
fn links_lead_to_what_is_written_and_devices_are_refused() {
    let folder = folder();
    let folder = folder.path();
    std::os::unix::fs::symlink("real.gguf", folder.join("link.gguf")).unwrap();
    convert(folder, "out", "link.gguf", "f32");
    assert!(std::fs::symlink_metadata(folder.join("link.gguf")).unwrap().is_symlink());
    assert!(folder.join("real.gguf").is_file());
    let refused = plimsoll(
        folder,
        &["convert", "--model", "out", "--output", "/dev/null", "--force", "--dtype", "f32"],
    );
    let said = text(&refused.stderr);
    assert!(said.contains("/dev/null is no file, and none can be put there"), "{said}");
}

#[test]
fn an_adapter_whose_rank_is_another_than_its_tensors_is_refused() {
    let folder = folder();
    let folder = folder.path();
    let lora =
        ["--set", "model.path=out", "--set", "model.from_scratch=null", "--set", "training.method=lora"];
    ok(folder, &[&["train", "c.yaml", "--set", "output.dir=lora"], &lora[..]].concat());
    let path = folder.join("lora/adapter_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let rank = config["r"].as_u64().unwrap();
    config["r"] = json!(2 * rank);
    std::fs::write(&path, config.to_string()).unwrap();
    let merge = ["merge", "--model", "out", "--adapter", "lora", "--output", "merged"];
    let said = text(&plimsoll(folder, &merge).stderr);
    let words = format!("A has rank {rank}, and the configuration says r is {} for it", 2 * rank);
    assert!(said.contains(&words), "{said}");
}
