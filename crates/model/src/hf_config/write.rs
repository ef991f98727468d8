//! A model's shape to `config.json` and `generation_config.json`, in the keys that transformers 4 and 5 both read.

use plimsoll_device::DType;
use serde_json::{Map, Value, json};

use super::{OWN_MIXTURE, SUPPORTED_MODEL_TYPES, experts, families, keys::Keys, latent, rope};
use crate::save_error::SaveError;
use crate::spec::{Activation, ModelSpec, RopeScaling, RopeSpec};

/// The class that loads a family's checkpoints.
fn class(architecture: &str) -> &'static str {
    match architecture {
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        "gemma" => "GemmaForCausalLM",
        "gemma2" => "Gemma2ForCausalLM",
        "gemma3_text" => "Gemma3ForCausalLM",
        "gpt2" => "GPT2LMHeadModel",
        "phi3" => "Phi3ForCausalLM",
        "olmo2" => "Olmo2ForCausalLM",
        "mixtral" => "MixtralForCausalLM",
        "qwen2_moe" => "Qwen2MoeForCausalLM",
        "qwen3_moe" => "Qwen3MoeForCausalLM",
        "olmoe" => "OlmoeForCausalLM",
        "glm4_moe" => "Glm4MoeForCausalLM",
        "deepseek" => "DeepseekForCausalLM",
        "deepseek_v2" => "DeepseekV2ForCausalLM",
        "deepseek_v3" => "DeepseekV3ForCausalLM",
        "glm4_moe_lite" => "Glm4MoeLiteForCausalLM",
        "gpt_oss" => "GptOssForCausalLM",
        OWN_MIXTURE => "PlimsollMoeForCausalLM",
        _ => "LlamaForCausalLM",
    }
}

/// The text of a `config.json` for weights stored as `dtype`.
///
/// It is read again before it is given out: a shape that its family's configuration has no words for is an error.
pub fn config_json(spec: &ModelSpec, dtype: DType) -> Result<String, SaveError> {
    let target = class(&spec.architecture);
    let fail = |reason: String| SaveError::Inexpressible { model: spec.name.clone(), target, reason };
    if !SUPPORTED_MODEL_TYPES.contains(&spec.architecture.as_str()) {
        return Err(fail(format!("it is a {:?} model", spec.architecture)));
    }
    let torch_dtype = match dtype {
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
        other => return Err(fail(format!("weights cannot be stored as {other}"))),
    };
    let mut keys = if spec.architecture == "gpt2" { gpt2(spec) } else { llama_like(spec) };
    let common = json!({
        "architectures": [target],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "initializer_range": spec.initializer_range,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": spec.bos_token,
        "eos_token_id": eos(spec),
        "use_cache": true,
        "torch_dtype": torch_dtype,
    });
    if let Value::Object(common) = common {
        keys.extend(common);
    }
    if spec.architecture == "phi3" {
        // transformers takes 32000 where nothing is said, which smaller vocabularies do not have.
        keys.insert("pad_token_id".to_owned(), Value::Null);
    }
    let text = pretty(&Value::Object(keys));
    let again = Keys::parse("config.json".as_ref(), &text)
        .and_then(|keys| families::read(&keys, &spec.architecture, spec.name.clone()))
        .map_err(|error| fail(error.to_string()))?;
    match difference(spec, &again) {
        Some(what) => Err(fail(format!("its configuration has no words for this model's {what}"))),
        None => Ok(text),
    }
}

/// What two shapes differ in. Rotary factors by frequency may have become the rule that they follow.
fn difference(spec: &ModelSpec, other: &ModelSpec) -> Option<&'static str> {
    let strip = |spec: &ModelSpec| {
        let mut attention = spec.attention.clone();
        attention.rope = None;
        attention.local_rope = None;
        attention.scale = None;
        attention
    };
    let base = |spec: &ModelSpec| {
        let is_plain = |rope: &RopeSpec| match &rope.scaling {
            RopeScaling::PerFrequency { factors } => factors.iter().all(|factor| *factor == 1.0),
            other => *other == RopeScaling::None,
        };
        spec.attention.rope.as_ref().map(|rope| (rope.theta, rope.dims, is_plain(rope)))
    };
    let local = |spec: &ModelSpec| spec.attention.local_rope.clone();
    let scale = |spec: &ModelSpec| spec.attention.scale.unwrap_or(0.0);
    // A factor that was computed from what is written may differ in the last digits.
    let same_scale = (scale(spec) - scale(other)).abs() <= 1e-9 * scale(spec);
    [
        ("attention", strip(spec) != strip(other) || !same_scale),
        ("rotary embedding", base(spec) != base(other) || local(spec) != local(other)),
        ("feed-forward part", spec.mlp != other.mlp),
        ("experts", !experts::same(spec, other)),
        ("norms", spec.norm != other.norm),
        ("embedding", spec.embedding_scale != other.embedding_scale),
        ("logits", spec.logit_soft_cap != other.logit_soft_cap),
    ]
    .into_iter()
    .find_map(|(what, differs)| differs.then_some(what))
}

fn llama_like(spec: &ModelSpec) -> Map<String, Value> {
    let attention = &spec.attention;
    let family = spec.architecture.as_str();
    let gemma = family.starts_with("gemma");
    let mut keys = Map::new();
    let mut set = |key: &str, value: Value| {
        keys.insert(key.to_owned(), value);
    };
    set("hidden_size", json!(spec.hidden_size));
    set("intermediate_size", json!(spec.mlp.intermediate_size));
    set("num_hidden_layers", json!(spec.num_layers));
    set("num_attention_heads", json!(attention.heads));
    set("num_key_value_heads", json!(attention.kv_heads));
    set("head_dim", json!(attention.head_dim));
    set("max_position_embeddings", json!(spec.max_position_embeddings));
    set("rms_norm_eps", json!(spec.norm.epsilon));
    set("attention_dropout", json!(0.0));
    set(if gemma { "hidden_activation" } else { "hidden_act" }, json!(activation(spec.mlp.activation)));
    // The key of the first Gemma, which others read too.
    if gemma {
        set("hidden_act", json!(activation(spec.mlp.activation)));
    }
    match family {
        "qwen2" => {}
        "qwen2_moe" => set("qkv_bias", json!(attention.qkv_bias)),
        "glm4_moe" => {
            set("attention_bias", json!(attention.qkv_bias));
            set("use_qk_norm", json!(attention.qk_norm.is_some()));
        }
        _ => set("attention_bias", json!(attention.output_bias)),
    }
    if family == "llama" {
        set("mlp_bias", json!(spec.mlp.bias));
    }
    if let Activation::ClampedSwiglu { alpha, limit } = spec.mlp.activation {
        set("swiglu_alpha", json!(alpha));
        set("swiglu_limit", json!(limit));
    }
    if let Some(rope) = &attention.rope {
        set("rope_theta", json!(rope.theta));
        set("rope_scaling", rope::write_scaling(spec, rope));
        let factor = rope.dims as f64 / attention.head_dim as f64;
        if (rope.dims != attention.head_dim && attention.latent.is_none()) || family == "glm4_moe" {
            set("partial_rotary_factor", json!(factor));
        }
        if family == "phi3"
            && let Some(original) = rope.scaling.original_context()
        {
            set("original_max_position_embeddings", json!(original as u64));
        }
    }
    if let Some(local) = &attention.local_rope {
        set("rope_local_base_freq", json!(local.theta));
    }
    if matches!(family, "gemma2" | "gemma3_text") {
        let scale = attention.scale.map_or(attention.head_dim as f64, |scale| scale.powi(-2));
        // Configurations hold whole numbers, whose root the scale is.
        let rounded = if (scale - scale.round()).abs() < 1e-6 * scale { scale.round() } else { scale };
        set(
            "query_pre_attn_scalar",
            if rounded.fract() == 0.0 { json!(rounded as u64) } else { json!(rounded) },
        );
        set("attn_logit_softcapping", json!(attention.soft_cap));
        set("final_logit_softcapping", json!(spec.logit_soft_cap));
    }
    match &attention.sliding_window {
        Some(window) => {
            set("sliding_window", json!(window.size));
            let kind = |slides: &bool| if *slides { "sliding_attention" } else { "full_attention" };
            if !matches!(family, "mistral" | "phi3" | "mixtral" | "qwen3_moe") {
                set("layer_types", json!(window.layers.iter().map(kind).collect::<Vec<_>>()));
            }
            if matches!(family, "qwen2_moe" | "qwen3_moe") {
                set("use_sliding_window", json!(true));
            }
            if matches!(family, "qwen2" | "qwen3") {
                set("use_sliding_window", json!(true));
                let first = window.layers.iter().position(|slides| *slides);
                set("max_window_layers", json!(first.unwrap_or(window.layers.len())));
            }
        }
        None => set("sliding_window", Value::Null),
    }
    keys.extend(latent::write(attention));
    if let Some(experts) = &spec.experts {
        keys.extend(experts::write(family, experts));
    }
    keys
}

fn gpt2(spec: &ModelSpec) -> Map<String, Value> {
    let keys = json!({
        "n_embd": spec.hidden_size,
        "n_head": spec.attention.heads,
        "n_layer": spec.num_layers,
        "n_inner": spec.mlp.intermediate_size,
        "n_positions": spec.max_position_embeddings,
        "activation_function": match spec.mlp.activation {
            Activation::GeluTanh => "gelu_new",
            other => activation(other),
        },
        "layer_norm_epsilon": spec.norm.epsilon,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    });
    match keys {
        Value::Object(keys) => keys,
        _ => Map::new(),
    }
}

fn activation(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu | Activation::ClampedSwiglu { .. } => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
    }
}

/// The text of a `generation_config.json`.
pub fn generation_config_json(spec: &ModelSpec) -> String {
    pretty(&json!({
        "_from_model_config": true,
        "bos_token_id": spec.bos_token,
        "eos_token_id": eos(spec),
    }))
}

/// One id, a list of them, or null.
fn eos(spec: &ModelSpec) -> Value {
    match spec.eos_tokens.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        many => json!(many),
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
