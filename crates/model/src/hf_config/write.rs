//! A model's shape to `config.json` and `generation_config.json`, in the keys that transformers 4 and 5 both read.

use plimsoll_device::DType;
use serde_json::{Value, json};

use super::rope;
use crate::save_error::SaveError;
use crate::spec::{Activation, ModelSpec, NormKind};

const TARGET: &str = "LlamaForCausalLM";

/// The text of a `config.json` for weights stored as `dtype`.
pub fn config_json(spec: &ModelSpec, dtype: DType) -> Result<String, SaveError> {
    let fail = |reason: &str| {
        Err(SaveError::Inexpressible { model: spec.name.clone(), target: TARGET, reason: reason.to_owned() })
    };
    if spec.architecture != "llama" {
        return fail(&format!("it is a {:?} model", spec.architecture));
    }
    if spec.norm.kind != NormKind::Rms {
        return fail("it normalises with LayerNorm");
    }
    if !spec.mlp.gated {
        return fail("its feed-forward part has no gate");
    }
    if spec.attention.qkv_bias != spec.attention.output_bias {
        return fail("only some of its attention's projections have biases");
    }
    let torch_dtype = match dtype {
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
        other => return fail(&format!("weights cannot be stored as {other}")),
    };
    let hidden_act = match spec.mlp.activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_pytorch_tanh",
    };
    Ok(pretty(&json!({
        "architectures": [TARGET],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.attention.heads,
        "num_key_value_heads": spec.attention.kv_heads,
        "head_dim": spec.attention.head_dim,
        "hidden_act": hidden_act,
        "max_position_embeddings": spec.max_position_embeddings,
        "initializer_range": spec.initializer_range,
        "rms_norm_eps": spec.norm.epsilon,
        "rope_theta": spec.attention.rope.theta,
        "rope_scaling": rope::write_scaling(spec),
        "attention_bias": spec.attention.qkv_bias,
        "attention_dropout": 0.0,
        "mlp_bias": spec.mlp.bias,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": spec.bos_token,
        "eos_token_id": eos(spec),
        "use_cache": true,
        "torch_dtype": torch_dtype,
    })))
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
