//! Files that do not belong together, or were cut: each error names the file, the place and what to do.

use std::path::Path;

use plimsoll_device::DType;
use plimsoll_model::{ModelFiles, SaveWriter};
use serde_json::{Value, json};

use crate::support::{Gguf, Stored, save_tiny, tiny_gguf, tiny_spec, weights, write_file};

/// The error of a folder or file that must not open; it names the file.
fn refused(path: &Path, parts: &[&str]) {
    let error = ModelFiles::open(path).expect_err(parts[0]).to_string();
    for part in parts {
        assert!(error.contains(part), "expected {part:?} in {error:?}");
    }
    assert!(error.contains(&path.display().to_string()), "{error}");
}

fn change_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

/// The weights of a Llama with the configuration of another family, and the other way round.
#[test]
fn a_config_of_one_family_with_weights_of_another() {
    let with = |config: Value| {
        let folder = tempfile::tempdir().unwrap();
        save_tiny(folder.path(), &tiny_spec(), DType::F32);
        change_json(&folder.path().join("config.json"), |old| {
            for (key, value) in config.as_object().unwrap() {
                old[key] = value.clone();
            }
        });
        folder
    };
    let qwen3 = with(json!({ "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"] }));
    refused(qwen3.path(), &["lack", "self_attn.q_norm.weight", "config.json", "another family"]);
    let qwen2 = with(json!({ "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"] }));
    refused(qwen2.path(), &["lack", "self_attn.q_proj.bias", "config.json"]);
    let gpt2 = json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 256, "n_inner": 128, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    });
    refused(with(gpt2).path(), &["lack", "wte.weight", "config.json"]);
    let phi3 = with(json!({ "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0 }));
    refused(phi3.path(), &["lack", "qkv_proj", "config.json"]);

    // Biases that the configuration's family does not have.
    let mut spec = tiny_spec();
    spec.attention.qkv_bias = true;
    spec.architecture = "qwen2".to_owned();
    let folder = tempfile::tempdir().unwrap();
    save_tiny(folder.path(), &spec, DType::F32);
    change_json(&folder.path().join("config.json"), |config| {
        config["model_type"] = "llama".into();
        config["architectures"] = json!(["LlamaForCausalLM"]);
        config["attention_bias"] = false.into();
    });
    refused(folder.path(), &["have", "self_attn.k_proj.bias", "config.json", "another family"]);
}

/// A shard that ends before its tensors do, as a broken copy leaves it.
#[test]
fn a_shard_that_was_cut() {
    let folder = tempfile::tempdir().unwrap();
    let (spec, dtype) = (tiny_spec(), DType::F32);
    let writer = SaveWriter::new(&spec, dtype).shard_bytes(30_000);
    writer.write(folder.path(), |parameter, out| out.write_all(&weights(&spec, parameter, dtype))).unwrap();
    let mut shards: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    shards.sort();
    assert!(shards.len() > 1);
    let bytes = std::fs::read(&shards[1]).unwrap();
    write_file(&shards[1], &bytes[..bytes.len() - 1]);
    let error = ModelFiles::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains(&shards[1].display().to_string()), "{error}");
}

/// ggml's numbers of the types in blocks of 256 elements, and bytes of a block.
const K_QUANTS: [(u32, &str, usize); 6] = [
    (10, "q2_k", 84),
    (11, "q3_k", 110),
    (12, "q4_k", 144),
    (13, "q5_k", 176),
    (14, "q6_k", 210),
    (15, "q8_k", 292),
];

#[test]
fn k_quants_with_a_tail_that_is_no_whole_block() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tail.gguf");
    for (kind, name, block) in K_QUANTS {
        for (dims, data) in [
            (vec![255], block),
            (vec![257], 2 * block),
            (vec![256 + 32], 2 * block),
            // Whole blocks in all, but not in a row.
            (vec![128, 2], block),
            (vec![384, 2], 3 * block),
        ] {
            let file = tiny_gguf(&tiny_spec(), Stored::F32).tensor("extra", &dims, kind, vec![0; data]);
            write_file(&path, &file.bytes());
            refused(&path, &[&format!("no whole number of {name} blocks"), "\"extra\""]);
        }
        // Whole blocks by the header, but the file ends within the last one.
        let file =
            Gguf::default().text("general.architecture", "llama").tensor("t", &[256], kind, vec![0; block]);
        let bytes = file.bytes();
        let data = bytes.len() - block.next_multiple_of(32);
        write_file(&path, &bytes[..data + block - 1]);
        refused(&path, &["\"t\"", "outside the data section"]);
    }
}
