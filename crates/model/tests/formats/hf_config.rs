//! `config.json` of many ages, and the way back.

use std::path::Path;

use plimsoll_device::DType;
use plimsoll_model::hf_config::{config_json, parse_config};
use plimsoll_model::{Activation, ModelSpec, RopeScaling, RopeSpec, catalogue};
use serde_json::{Map, Value, json};

use crate::support::tiny_spec;

/// A plain configuration with some keys replaced, or taken away where null stands for that.
fn parse(changes: Value) -> Result<ModelSpec, String> {
    let mut config = json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1,
    });
    let (Value::Object(config), Value::Object(changes)) = (&mut config, changes) else { panic!() };
    config.extend(changes);
    let text = Value::Object(config.clone()).to_string();
    parse_config(Path::new("folder/config.json"), &text, "tiny".to_owned()).map_err(|error| {
        let text = error.to_string();
        assert!(text.contains("folder/config.json"), "{text}");
        text
    })
}

#[test]
fn old_and_new_keys_mean_the_same() {
    let check = |changes: Value, change: fn(&mut ModelSpec)| {
        let mut expected = tiny_spec();
        change(&mut expected);
        assert_eq!(parse(changes.clone()), Ok(expected), "{changes}");
    };
    check(json!({}), |_| ());
    check(
        json!({ "rope_scaling": null, "head_dim": null, "torch_dtype": "bfloat16", "mlp_bias": null }),
        |_| (),
    );
    check(json!({ "rope_parameters": null, "dtype": "float32" }), |_| ());
    check(json!({ "num_key_value_heads": null }), |spec| spec.attention.kv_heads = 4);
    check(json!({ "rope_theta": 5e5 }), |spec| spec.attention.rope.as_mut().unwrap().theta = 5e5);
    check(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } }), |spec| {
        spec.attention.rope.as_mut().unwrap().theta = 5e5;
    });
    check(json!({ "rope_theta": 5e5, "rope_parameters": { "rope_type": "linear", "factor": 2 } }), |spec| {
        spec.attention.rope.as_mut().unwrap().theta = 5e5;
        spec.attention.rope.as_mut().unwrap().scaling = RopeScaling::Linear { factor: 2.0 };
    });
    check(json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }), |spec| {
        spec.attention.rope.as_mut().unwrap().scaling = RopeScaling::Linear { factor: 2.0 };
    });
    check(json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }), |spec| {
        spec.attention.rope.as_mut().unwrap().scaling =
            RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 256.0 };
    });
    check(
        json!({ "head_dim": 32, "attention_bias": true, "mlp_bias": true, "hidden_act": "gelu_new" }),
        |spec| {
            spec.attention.head_dim = 32;
            spec.attention.rope.as_mut().unwrap().dims = 32;
            (spec.attention.qkv_bias, spec.attention.output_bias, spec.mlp.bias) = (true, true, true);
            spec.mlp.activation = Activation::GeluTanh;
        },
    );
    check(json!({ "eos_token_id": [7, 2, 7], "bos_token_id": null }), |spec| {
        (spec.eos_tokens, spec.bos_token) = (vec![7, 2], None);
    });
    check(json!({ "eos_token_id": -1 }), |spec| spec.eos_tokens = vec![]);
}

#[test]
fn what_is_wrong_is_named() {
    let check = |changes: Value, expected: &str| {
        let error = parse(changes).expect_err(expected);
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
    };
    check(json!({ "model_type": "mistrel" }), "model_type \"mistrel\" is not supported; supported: llama");
    check(json!({ "model_type": null }), "model_type: is missing");
    check(json!({ "vocab_size": null }), "vocab_size: is missing");
    check(json!({ "vocab_size": "many" }), "vocab_size: \"many\" is not a whole number");
    check(json!({ "vocab_size": -3 }), "vocab_size: -3 is not a whole number");
    check(json!({ "vocab_size": 0 }), "vocab_size: must be at least 1");
    check(json!({ "hidden_size": 66 }), "4 does not divide hidden_size 66");
    check(json!({ "num_attention_heads": 0 }), "num_attention_heads");
    check(json!({ "num_key_value_heads": 3 }), "num_key_value_heads");
    check(json!({ "head_dim": 15 }), "15 dimensions of heads of 15 cannot be rotated in pairs");
    check(json!({ "num_hidden_layers": 1u64 << 40 }), "beyond any model");
    check(json!({ "hidden_size": 1u64 << 28, "vocab_size": 1u64 << 28, "head_dim": 16 }), "beyond any");
    check(json!({ "hidden_act": "relu" }), "hidden_act: \"relu\" is not supported");
    check(json!({ "rms_norm_eps": -1.0 }), "rms_norm_eps");
    check(json!({ "eos_token_id": 96 }), "eos_token_id: 96 is outside the vocabulary of 96");
    check(json!({ "eos_token_id": "</s>" }), "eos_token_id");
    check(json!({ "rope_theta": 0 }), "rope_theta");
    check(json!({ "partial_rotary_factor": 1.5 }), "partial_rotary_factor: 24 dimensions of heads of 16");
    check(json!({ "rope_scaling": 3 }), "rope_scaling: 3 is not an object");
    check(
        json!({ "rope_scaling": { "type": "mrope" } }),
        "rope_scaling.rope_type: \"mrope\" is not supported",
    );
    check(json!({ "rope_scaling": { "type": "linear" } }), "rope_scaling.factor: is missing");
    check(
        json!({ "rope_scaling": { "type": "linear", "factor": 0 } }),
        "rope_scaling: 0 is not a positive number",
    );
    let lists = json!({ "type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0 });
    check(json!({ "rope_scaling": lists }), "1 factors for the 8 frequencies");
    check(json!({ "quantization_config": { "quant_method": "gptq" } }), "bits: is missing");
    for (quantization, told) in [
        (
            json!({ "quant_method": "fp8", "weight_block_size": [128] }),
            "weight_block_size: is not the rows and columns",
        ),
        (json!({ "quant_method": "modelopt", "quant_algo": "W4A16_AWQ" }), "quant_algo: is \"W4A16_AWQ\""),
        (json!({ "quant_method": "compressed-tensors", "format": "marlin-24" }), "format: is \"marlin-24\""),
        (
            json!({ "quant_method": "compressed-tensors", "sparsity_config": { "format": "sparse-24-bitmask" } }),
            "sparsity_config.format: is \"sparse-24-bitmask\"",
        ),
        (
            json!({ "quant_method": "compressed-tensors", "transform_config": { "config_groups": { "a": {} } } }),
            "transform_config: turns activations",
        ),
        (
            json!({ "quant_method": "compressed-tensors", "config_groups": {
                "a": { "weights": { "block_structure": [128, 128] } },
                "b": { "weights": { "block_structure": "64x64" } },
            } }),
            "config_groups.b.weights.block_structure: has another size",
        ),
        (
            json!({ "quant_method": "compressed-tensors", "config_groups": { "a": { "weights": { "num_bits": 3 } } } }),
            "config_groups.a.weights.num_bits: is 3; 4 and 8 are read",
        ),
        (json!({ "quant_method": "quip" }), "compressed-tensors"),
    ] {
        check(json!({ "quantization_config": quantization }), told);
    }
    for text in ["", "{", "[]", "{\"model_type\": NaN}"] {
        let error = parse_config(Path::new("config.json"), text, String::new()).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains("line 1"), "{error}");
    }
}

/// A gpt-oss that says nothing of its rotation has YaRN: one without says so.
#[test]
fn what_is_not_stretched_is_said_where_silence_means_something() {
    let mut spec = catalogue::find("gpt-oss-20b").unwrap();
    for scaling in [spec.attention.rope.clone().unwrap().scaling, RopeScaling::None] {
        spec.attention.rope.as_mut().unwrap().scaling = scaling;
        let text = config_json(&spec, DType::Bf16).unwrap();
        assert_eq!(parse_config(Path::new("c"), &text, spec.name.clone()).unwrap(), spec, "{text}");
    }
}

#[test]
fn what_is_written_is_read_back() {
    let check = |change: &dyn Fn(&mut ModelSpec)| {
        let mut spec = tiny_spec();
        change(&mut spec);
        let text = config_json(&spec, DType::Bf16).unwrap();
        assert_eq!(parse_config(Path::new("c"), &text, "tiny".to_owned()).unwrap(), spec, "{text}");
    };
    check(&|_| ());
    check(&|spec| (spec.eos_tokens, spec.bos_token) = (vec![], None));
    check(&|spec| spec.eos_tokens = vec![3, 4]);
    check(&|spec| (spec.attention.qkv_bias, spec.attention.output_bias, spec.mlp.bias) = (true, true, true));
    check(&|spec| {
        spec.attention.rope.as_mut().unwrap().dims = 32;
        (spec.attention.head_dim, spec.tie_word_embeddings) = (32, false);
    });
    for activation in [Activation::Gelu, Activation::GeluTanh] {
        check(&|spec| spec.mlp.activation = activation);
    }
    let factors = |n: f64| (1..=8).map(|i| n * f64::from(i)).collect::<Vec<_>>();
    for scaling in [
        RopeScaling::Linear { factor: 2.0 },
        RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 256.0 },
        RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 64.0 },
        llama3(8.0),
        RopeScaling::Yarn {
            factor: 4.0,
            attention_factor: 1.1,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 64.0,
            truncate: false,
        },
        RopeScaling::LongRope {
            short_factor: factors(1.0),
            long_factor: factors(2.0),
            attention_factor: 1.2,
            original_max_position_embeddings: 64.0,
        },
    ] {
        check(&|spec| spec.attention.rope.as_mut().unwrap().scaling = scaling.clone());
    }
}

fn llama3(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192.0,
    }
}

/// Factors of a GGUF: those of Llama 3 get their name back, any others become LongRoPE with the same frequencies.
#[test]
fn factors_by_frequency_are_written_in_words_that_exist() {
    let written = |factors: &[f64]| {
        let mut spec = tiny_spec();
        let head_dim = 2 * factors.len() as u64;
        spec.attention.head_dim = head_dim;
        let scaling = RopeScaling::PerFrequency { factors: factors.to_vec() };
        spec.attention.rope = Some(RopeSpec { dims: head_dim, theta: 5e5, scaling });
        let text = config_json(&spec, DType::F32).unwrap();
        parse_config(Path::new("c"), &text, String::new()).unwrap().attention.rope.unwrap().scaling
    };
    let exact: Vec<f64> = (0..32)
        .map(|i| {
            let wavelength = std::f64::consts::TAU * 5e5f64.powf(f64::from(i) / 32.0);
            match wavelength {
                short if short < 8192.0 / 4.0 => 1.0,
                long if long > 8192.0 => 32.0,
                between => {
                    let smooth = (8192.0 / between - 1.0) / 3.0;
                    f64::from((1.0 / ((1.0 - smooth) / 32.0 + smooth)) as f32)
                }
            }
        })
        .collect();
    assert_eq!(written(&exact), llama3(32.0));
    let other = [1.0, 1.5, 2.0, 2.5];
    let RopeScaling::LongRope { short_factor, long_factor, attention_factor, .. } = written(&other) else {
        panic!()
    };
    assert_eq!(
        (short_factor.as_slice(), long_factor.as_slice(), attention_factor),
        (&other[..], &other[..], 1.0)
    );
}

#[test]
fn a_shape_that_the_family_has_no_words_for_is_not_written() {
    let check = |change: fn(&mut ModelSpec), expected: &str| {
        let mut spec = tiny_spec();
        change(&mut spec);
        let error = config_json(&spec, DType::F32).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(|spec| spec.architecture = "mamba".to_owned(), "\"mamba\" model");
    check(|spec| spec.architecture = "gemma".to_owned(), "GemmaForCausalLM: its configuration has no words");
    check(|spec| spec.mlp.gated = false, "this model's feed-forward part");
    check(|spec| spec.attention.qkv_bias = true, "this model's attention");
    assert!(config_json(&tiny_spec(), DType::Q8_0).is_err());
}

/// Any JSON under the known keys gives a shape or an error, never a panic.
#[test]
fn arbitrary_values_never_panic() {
    use proptest::prelude::*;
    let value = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0u64..1 << 20).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9]{0,8}".prop_map(Value::from),
        proptest::collection::vec(any::<f64>().prop_map(Value::from), 0..4).prop_map(Value::from),
    ];
    let keys = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "eos_token_id",
        "rope_scaling",
        "initializer_range",
        "tie_word_embeddings",
        "hidden_act",
    ];
    let pair = (proptest::sample::select(keys.to_vec()), value);
    let scaling = proptest::sample::select(vec!["linear", "dynamic", "llama3", "yarn", "longrope"]);
    let numbers = proptest::collection::vec(any::<f64>(), 4);
    proptest!(|(pairs in proptest::collection::vec(pair, 1..4), kind in scaling, n in numbers)| {
        let mut changes: Map<String, Value> = pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        changes.entry("rope_scaling").or_insert(json!({
            "rope_type": kind, "factor": n[0], "low_freq_factor": n[1], "high_freq_factor": n[2],
            "original_max_position_embeddings": n[3], "short_factor": n, "long_factor": n,
        }));
        if let Ok(spec) = parse(Value::Object(changes)) {
            spec.parameter_count();
            prop_assert!(config_json(&spec, DType::F32).is_ok());
        }
    });
}
