//! One model in every format gives the same weights; folders that are no model say why.

use std::path::Path;

use plimsoll_device::DType;
use plimsoll_model::{Format, ModelFiles, ModelSpec, Parameter, RowOrder};
use serde_json::{Value, json};

use crate::support::{
    Stored, f32_weights, floats, safetensors_bytes, save_tiny, tiny_gguf, tiny_spec, weights, write_file,
};

fn read(files: &ModelFiles, parameter: &Parameter, dtype: DType) -> Vec<u8> {
    let mut out = vec![0; dtype.bytes_for(parameter.elements()).unwrap() as usize];
    files.weights().read_into(parameter, dtype, &mut out).unwrap();
    out
}

fn read_f32(files: &ModelFiles, parameter: &Parameter) -> Vec<f32> {
    floats(&read(files, parameter, DType::F32))
}

fn untied_with_biases() -> ModelSpec {
    let mut spec = tiny_spec();
    (spec.attention.qkv_bias, spec.attention.output_bias, spec.mlp.bias) = (true, true, true);
    spec.tie_word_embeddings = false;
    spec
}

#[test]
fn a_folder_gives_the_weights_back() {
    for spec in [tiny_spec(), untied_with_biases()] {
        for stored in [DType::F32, DType::Bf16, DType::F16] {
            let folder = tempfile::tempdir().unwrap();
            save_tiny(folder.path(), &spec, stored);
            let files = ModelFiles::open(folder.path()).unwrap();
            assert_eq!(files.format(), Format::Safetensors);
            assert_eq!(ModelSpec { name: spec.name.clone(), ..files.spec().clone() }, spec);
            for parameter in spec.parameters() {
                assert_eq!(files.weights().stored_dtype(&parameter).unwrap(), stored);
                let exact = weights(&spec, &parameter, stored);
                assert_eq!(read(&files, &parameter, stored), exact, "{} as {stored}", parameter.name);
                assert_eq!(files.weights().view(&parameter).unwrap().bytes, exact);
                assert_eq!(read(&files, &parameter, DType::F32).len(), 4 * parameter.elements() as usize);
            }
        }
    }
}

#[test]
fn a_gguf_gives_the_weights_back_in_hugging_face_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    for spec in [tiny_spec(), untied_with_biases()] {
        write_file(&path, &tiny_gguf(&spec, Stored::F32).bytes());
        let files = ModelFiles::open(&path).unwrap();
        assert_eq!(files.format(), Format::Gguf);
        for parameter in spec.parameters() {
            assert_eq!(read_f32(&files, &parameter), f32_weights(&spec, &parameter), "{}", parameter.name);
            assert_eq!(read(&files, &parameter, DType::Bf16), weights(&spec, &parameter, DType::Bf16));
            let interleaved = parameter.name.contains("q_proj") || parameter.name.contains("k_proj");
            let rows = files.weights().view(&parameter).unwrap().rows;
            assert_eq!(rows != RowOrder::Natural, interleaved, "{}", parameter.name);
            files.weights().release(&parameter).unwrap();
        }
        write_file(&path, &tiny_gguf(&spec, Stored::Q8_0).bytes());
        let files = ModelFiles::open(&path).unwrap();
        for parameter in spec.parameters() {
            let exact = f32_weights(&spec, &parameter);
            for (a, b) in read_f32(&files, &parameter).iter().zip(&exact) {
                assert!((a - b).abs() < 6e-4, "{}: {a} {b}", parameter.name);
            }
        }
    }
}

/// A matrix longer than the reader's stripe, with a rest that is no whole stripe.
#[test]
fn long_parameters_are_read_in_stripes_without_a_seam() {
    let mut spec = tiny_spec();
    (spec.vocab_size, spec.num_layers) = (12_345, 1);
    spec.attention.heads = 256;
    spec.attention.kv_heads = 256;
    let folder = tempfile::tempdir().unwrap();
    save_tiny(folder.path(), &spec, DType::F32);
    let files = ModelFiles::open(folder.path()).unwrap();
    for parameter in spec.parameters() {
        assert_eq!(read_f32(&files, &parameter), f32_weights(&spec, &parameter), "{}", parameter.name);
        assert_eq!(read(&files, &parameter, DType::Bf16), weights(&spec, &parameter, DType::Bf16));
    }
}

#[test]
fn asking_for_what_is_not_there_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let spec = tiny_spec();
    save_tiny(folder.path(), &spec, DType::F32);
    let files = ModelFiles::open(folder.path()).unwrap();
    let mut parameter = spec.parameters().remove(0);
    let bytes = 4 * parameter.elements() as usize;
    assert!(files.weights().read_into(&parameter, DType::F32, &mut vec![0; bytes - 4]).is_err());
    assert!(files.weights().read_into(&parameter, DType::Bf16, &mut vec![0; bytes]).is_err());
    assert!(files.weights().read_into(&parameter, DType::Q8_0, &mut vec![0; bytes]).is_err());
    parameter.shape[0] += 1;
    assert!(files.weights().view(&parameter).is_err());
}

/// Changes a saved model's folder and gives the error's text.
fn refused(change: impl FnOnce(&Path), expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    save_tiny(folder.path(), &tiny_spec(), DType::F32);
    change(folder.path());
    let error = ModelFiles::open(folder.path()).expect_err(expected).to_string();
    assert!(error.contains(expected), "expected {expected:?} in {error:?}");
    assert!(error.contains(&folder.path().display().to_string()), "{error}");
}

fn set_config(folder: &Path, key: &str, value: Value) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(path, config.to_string()).unwrap();
}

#[test]
fn folders_that_are_no_model_say_why() {
    let rename = |from: &'static str, to: &'static str| {
        move |folder: &Path| std::fs::rename(folder.join(from), folder.join(to)).unwrap()
    };
    refused(rename("config.json", "x"), "there is no config.json");
    refused(rename("model.safetensors", "x"), "it has neither model.safetensors nor");
    refused(rename("model.safetensors", "pytorch_model.bin"), "convert them");
    refused(rename("model.safetensors", "model-q4.gguf"), "give the GGUF file itself");
    refused(|folder| write_file(&folder.join("config.json"), b"{"), "config.json");
    refused(|folder| write_file(&folder.join("config.json"), b"\xff\xfe"), "UTF-8");
    refused(|folder| write_file(&folder.join("model.safetensors"), b"x"), "model.safetensors");

    let path = Path::new("no/such/model");
    assert!(ModelFiles::open(path).unwrap_err().to_string().contains("no/such/model"));
    let folder = tempfile::tempdir().unwrap();
    for (name, expected) in [
        ("weights.bin", "pickle"),
        ("model.json", "give the folder"),
        ("notes.txt", "is no model"),
        ("alone.safetensors", "there is no config.json"),
    ] {
        let path = folder.path().join(name);
        write_file(&path, &safetensors_bytes("{}", 0));
        let error = ModelFiles::open(&path).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(name), "{error}");
    }
}

#[test]
fn a_config_that_contradicts_the_weights_is_refused() {
    let with = |key: &'static str, value: Value| move |folder: &Path| set_config(folder, key, value);
    refused(with("vocab_size", json!(97)), "has shape [96, 64], but");
    refused(with("vocab_size", json!(97)), "makes it [97, 64]");
    refused(with("intermediate_size", json!(64)), "mlp.gate_proj.weight\" has shape [128, 64]");
    refused(with("num_hidden_layers", json!(3)), "lack 9 tensors: model.layers.2.input_layernorm.weight");
    refused(with("num_hidden_layers", json!(65536)), "lack 589806 tensors");
    refused(with("num_hidden_layers", json!(1)), "have 9 tensors: model.layers.1.");
    refused(with("tie_word_embeddings", json!(false)), "lack 1 tensor: lm_head.weight");
    refused(with("num_attention_heads", json!(8)), "self_attn.q_proj.weight\" has shape [64, 64], but");
    refused(with("num_attention_heads", json!(2)), "makes it [32, 64]");
    refused(with("num_key_value_heads", json!(4)), "self_attn.k_proj.weight\" has shape [32, 64], but");
    refused(with("head_dim", json!(32)), "self_attn.q_proj.weight\" has shape [64, 64], but");
    refused(with("hidden_size", json!(32)), "embed_tokens.weight\" has shape [96, 64], but");
    refused(with("attention_bias", json!(true)), "self_attn.q_proj.bias");
}

/// The same weights under the names and extras of other checkpoints.
#[test]
fn harmless_differences_are_taken() {
    let spec = tiny_spec();
    let rewrite = |rename: fn(&str) -> String, extra: &[(&str, &str)]| {
        let folder = tempfile::tempdir().unwrap();
        save_tiny(folder.path(), &spec, DType::F32);
        let mut tensors: Vec<_> = spec
            .parameters()
            .iter()
            .map(|parameter| plimsoll_model::NewTensor {
                name: rename(&parameter.name),
                dtype: plimsoll_model::StoredDType::F32,
                shape: parameter.shape.clone(),
            })
            .collect();
        tensors.extend(extra.iter().map(|(name, dtype)| plimsoll_model::NewTensor {
            name: name.to_string(),
            dtype: plimsoll_model::StoredDType::parse(dtype).unwrap(),
            shape: vec![8],
        }));
        let path = folder.path().join("model.safetensors");
        plimsoll_model::write_tensors(&path, &[], &tensors, |tensor, out| {
            let original =
                spec.parameters().into_iter().find(|parameter| rename(&parameter.name) == tensor.name);
            let size = tensor.dtype.bytes_for(&tensor.shape).unwrap() as usize;
            out.write_all(&original.map_or(vec![0; size], |parameter| weights(&spec, &parameter, DType::F32)))
        })
        .unwrap();
        ModelFiles::open(folder.path()).map(|files| {
            for parameter in spec.parameters() {
                assert_eq!(
                    read_f32(&files, &parameter),
                    f32_weights(&spec, &parameter),
                    "{}",
                    parameter.name
                );
            }
        })
    };
    let same: fn(&str) -> String = str::to_owned;
    rewrite(same, &[("lm_head.weight", "F32"), ("model.layers.0.self_attn.rotary_emb.inv_freq", "F32")])
        .unwrap();
    rewrite(|name| name.trim_start_matches("model.").to_owned(), &[]).unwrap();
    let error = rewrite(same, &[("model.layers.0.self_attn.q_norm.weight", "F32")]).unwrap_err().to_string();
    assert!(error.contains("have 1 tensor: model.layers.0.self_attn.q_norm.weight"), "{error}");
    let wrong = |name: &str| name.replace("model.norm.weight", "model.normal.weight");
    let error = rewrite(wrong, &[("model.norm.weight", "I8")]).unwrap_err().to_string();
    assert!(error.contains("model.norm.weight"), "{error}");
}
