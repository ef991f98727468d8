//! What the configuration of each family means. Keys and defaults are those of transformers' configuration classes.

use super::keys::Keys;
use super::{ConfigError, experts, latent, rope};
use crate::spec::{
    Activation, AttentionSpec, MlpSpec, ModelSpec, NormKind, NormPlacement, NormSpec, QkNorm, SlidingWindow,
};

/// The shape without its special tokens, not checked yet. `model_type` is a supported one.
pub(super) fn read(config: &Keys, model_type: &str, name: String) -> Result<ModelSpec, ConfigError> {
    if model_type == "gpt2" {
        return read_gpt2(config, name);
    }
    if config.f64("clip_qkv")?.is_some() {
        return Err(
            config.refuse("clip_qkv", "queries, keys and values that are clipped are not supported".into())
        );
    }
    let (gemma, gpt_oss) = (model_type.starts_with("gemma"), model_type == "gpt_oss");
    let hidden_size = config.require_u64("hidden_size")?;
    let heads = config.require_u64("num_attention_heads")?;
    let usual_head_dim = match model_type {
        "qwen3" => Some(128),
        "gpt_oss" => Some(64),
        _ if gemma => Some(256),
        _ => None,
    };
    let latent = latent::read(config, model_type)?;
    let head_dim = match latent {
        Some(heads) => heads.dim,
        None => head_dim(config, usual_head_dim, hidden_size, heads)?,
    };
    let num_layers = layers(config, "num_hidden_layers")?;
    let vocab_size = config.require_u64("vocab_size")?;
    let usual_context = if gpt_oss { 131_072 } else { 2048 };
    let max_position_embeddings = config.u64("max_position_embeddings")?.unwrap_or(usual_context);
    let attention_bias = config.bool("attention_bias")?.unwrap_or(gpt_oss);
    let qkv_bias = match model_type {
        "qwen2" => true,
        "qwen2_moe" => config.bool("qkv_bias")?.unwrap_or(true),
        _ => attention_bias,
    };
    let rotated = latent.map_or(head_dim, |heads| heads.rotated);
    let (global, local) = rope::read(config, model_type, rotated, max_position_embeddings)?;
    let soft_cap = |key, gemma2: f64| match model_type {
        "gemma2" if !config.has(key) => Ok(Some(gemma2)),
        "gemma2" | "gemma3_text" => config.f64(key),
        _ => Ok(None),
    };
    let scale = match model_type {
        "gemma2" | "gemma3_text" => {
            let scalar = config.f64("query_pre_attn_scalar")?.unwrap_or(256.0);
            // The usual one is said by the width of the heads already.
            (scalar != head_dim as f64).then(|| scalar.powf(-0.5))
        }
        _ if latent.is_some() => rope::latent_scale(config, head_dim)?,
        _ => None,
    };
    Ok(ModelSpec {
        name,
        architecture: model_type.to_owned(),
        vocab_size,
        hidden_size,
        num_layers,
        attention: AttentionSpec {
            heads,
            kv_heads: match latent {
                Some(_) => heads,
                None => config.u64("num_key_value_heads")?.unwrap_or(heads),
            },
            head_dim,
            qkv_bias,
            output_bias: !matches!(model_type, "qwen2" | "qwen2_moe" | "glm4_moe") && attention_bias,
            qk_norm: match model_type {
                "qwen3" | "qwen3_moe" | "gemma3_text" => Some(QkNorm::PerHead),
                "glm4_moe" if config.bool("use_qk_norm")? == Some(true) => Some(QkNorm::PerHead),
                "olmo2" | "olmoe" => Some(QkNorm::Whole),
                _ => None,
            },
            rope: Some(global),
            local_rope: local,
            sliding_window: sliding_window(config, model_type, num_layers)?,
            scale,
            soft_cap: soft_cap("attn_logit_softcapping", 50.0)?,
            sinks: gpt_oss,
            latent: latent.map(|heads| heads.attention),
        },
        mlp: MlpSpec {
            intermediate_size: config.require_u64("intermediate_size")?,
            activation: match gpt_oss {
                true => Activation::ClampedSwiglu {
                    alpha: config.f64("swiglu_alpha")?.unwrap_or(1.702),
                    limit: config.f64("swiglu_limit")?.unwrap_or(7.0),
                },
                false => gated_activation(config, gemma)?,
            },
            gated: true,
            bias: gpt_oss || config.bool("mlp_bias")?.unwrap_or(false),
        },
        experts: experts::read(config, model_type, num_layers)?,
        norm: NormSpec {
            kind: NormKind::Rms,
            epsilon: config.f64("rms_norm_eps")?.unwrap_or(match model_type {
                "phi3" | "olmo2" | "olmoe" | "mixtral" | "glm4_moe" | "glm4_moe_lite" | "gpt_oss" => 1e-5,
                _ => 1e-6,
            }),
            one_plus_weight: gemma,
            placement: match model_type {
                "gemma2" | "gemma3_text" => NormPlacement::Around,
                "olmo2" => NormPlacement::After,
                _ => NormPlacement::Before,
            },
        },
        embedding_scale: gemma.then_some((hidden_size as f64).sqrt()),
        logit_soft_cap: soft_cap("final_logit_softcapping", 30.0)?,
        tie_word_embeddings: config.bool("tie_word_embeddings")?.unwrap_or(gemma),
        max_position_embeddings,
        part: Default::default(),
        initializer_range: config.f64("initializer_range")?.unwrap_or(0.02),
        bos_token: None,
        eos_tokens: Vec::new(),
    })
}

fn read_gpt2(config: &Keys, name: String) -> Result<ModelSpec, ConfigError> {
    for (key, only) in [
        ("scale_attn_weights", true),
        ("scale_attn_by_inverse_layer_idx", false),
        ("add_cross_attention", false),
    ] {
        if config.bool(key)?.is_some_and(|value| value != only) {
            return Err(config.refuse(key, format!("is {}, which is not supported", !only)));
        }
    }
    let hidden_size = config.require_u64("n_embd")?;
    let heads = config.require_u64("n_head")?;
    let head_dim = head_dim(config, None, hidden_size, heads)?;
    let vocab_size = config.require_u64("vocab_size")?;
    let activation = match config.str("activation_function")? {
        None => Activation::GeluTanh,
        Some(name) => activation(config, "activation_function", name)?,
    };
    Ok(ModelSpec {
        name,
        architecture: "gpt2".to_owned(),
        vocab_size,
        hidden_size,
        num_layers: layers(config, "n_layer")?,
        attention: AttentionSpec {
            heads,
            kv_heads: heads,
            head_dim,
            qkv_bias: true,
            output_bias: true,
            qk_norm: None,
            rope: None,
            local_rope: None,
            sliding_window: None,
            scale: None,
            soft_cap: None,
            sinks: false,
            latent: None,
        },
        mlp: MlpSpec {
            intermediate_size: config.u64("n_inner")?.unwrap_or(hidden_size.saturating_mul(4)),
            activation,
            gated: false,
            bias: true,
        },
        experts: None,
        norm: NormSpec {
            kind: NormKind::Layer,
            epsilon: config.f64("layer_norm_epsilon")?.unwrap_or(1e-5),
            one_plus_weight: false,
            placement: NormPlacement::Before,
        },
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: config.bool("tie_word_embeddings")?.unwrap_or(true),
        max_position_embeddings: config.u64("n_positions")?.unwrap_or(1024),
        part: Default::default(),
        initializer_range: config.f64("initializer_range")?.unwrap_or(0.02),
        bos_token: None,
        eos_tokens: Vec::new(),
    })
}

fn layers(config: &Keys, key: &str) -> Result<u32, ConfigError> {
    let layers = config.require_u64(key)?;
    u32::try_from(layers)
        .ok()
        .filter(|layers| *layers <= 1 << 16)
        .ok_or_else(|| config.refuse(key, format!("{layers} is beyond any model")))
}

fn head_dim(config: &Keys, usual: Option<u64>, hidden_size: u64, heads: u64) -> Result<u64, ConfigError> {
    match config.u64("head_dim")?.or(usual) {
        Some(head_dim) => Ok(head_dim),
        None if heads > 0 && hidden_size.is_multiple_of(heads) => Ok(hidden_size / heads),
        None => {
            let reason =
                format!("{heads} does not divide hidden_size {hidden_size}, and there is no head_dim");
            Err(config.refuse("num_attention_heads", reason))
        }
    }
}

/// The window, and which layers have it: `layer_types` where it is given, else the family's rhythm.
fn sliding_window(
    config: &Keys,
    model_type: &str,
    num_layers: u32,
) -> Result<Option<SlidingWindow>, ConfigError> {
    let usual_size = match model_type {
        "gemma2" | "gemma3_text" => Some(4096),
        "mistral" if !config.has("sliding_window") => Some(4096),
        "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe" if config.bool("use_sliding_window")? != Some(true) => {
            return Ok(None);
        }
        "mistral" | "phi3" | "qwen2" | "qwen3" | "mixtral" => None,
        "qwen2_moe" | "qwen3_moe" => Some(4096),
        "gpt_oss" => Some(128),
        _ => return Ok(None),
    };
    let Some(size) = config.u64("sliding_window")?.or(usual_size) else { return Ok(None) };
    let pattern = config.u64("sliding_window_pattern")?.unwrap_or(6).max(1);
    let first_sliding = config.u64("max_window_layers")?.unwrap_or(28);
    let slides = |layer: u64| match model_type {
        "gemma2" | "gpt_oss" => layer.is_multiple_of(2),
        "gemma3_text" => !(layer + 1).is_multiple_of(pattern),
        "qwen2" | "qwen3" => layer >= first_sliding,
        "qwen2_moe" => layer.is_multiple_of(2) && layer < first_sliding,
        _ => true,
    };
    let layers = match config.strings("layer_types")? {
        None => (0..u64::from(num_layers)).map(slides).collect(),
        Some(types) => {
            let mut layers = Vec::with_capacity(types.len());
            for kind in types {
                layers.push(match kind {
                    "sliding_attention" => true,
                    "full_attention" => false,
                    other => {
                        let reason = format!(
                            "{other:?} is not supported; supported: full_attention, sliding_attention"
                        );
                        return Err(config.refuse("layer_types", reason));
                    }
                });
            }
            if layers.len() != num_layers as usize {
                let reason = format!("tells of {} layers; the model has {num_layers}", layers.len());
                return Err(config.refuse("layer_types", reason));
            }
            layers
        }
    };
    Ok(layers.contains(&true).then_some(SlidingWindow { size, layers }))
}

/// `hidden_act`; Gemma's is `hidden_activation`, which goes before the other.
fn gated_activation(config: &Keys, gemma: bool) -> Result<Activation, ConfigError> {
    if gemma {
        // transformers computes Gemma with this one whatever the older key says.
        return match config.str("hidden_activation")? {
            None => Ok(Activation::GeluTanh),
            Some(name) => activation(config, "hidden_activation", name),
        };
    }
    match config.str("hidden_act")? {
        None => Ok(Activation::Silu),
        Some(name) => activation(config, "hidden_act", name),
    }
}

fn activation(config: &Keys, key: &str, name: &str) -> Result<Activation, ConfigError> {
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
        other => {
            let reason = format!("{other:?} is not supported; supported: silu, gelu, gelu_pytorch_tanh");
            Err(config.refuse(key, reason))
        }
    }
}
