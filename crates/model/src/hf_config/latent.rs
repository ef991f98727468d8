//! Multi-head latent attention in `config.json` (DeepSeek-V2 and V3, GLM-4.7-Flash), both ways.

use serde_json::{Map, Value, json};

use super::ConfigError;
use super::keys::Keys;
use crate::spec::{AttentionSpec, LatentAttention};

/// Whether a family has it.
pub(super) fn has(family: &str) -> bool {
    matches!(family, "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite")
}

/// The heads of latent attention.
#[derive(Clone, Copy)]
pub(super) struct LatentHeads {
    pub attention: LatentAttention,
    /// Width of a head's keys.
    pub dim: u64,
    /// How much of it is rotated.
    pub rotated: u64,
}

/// That of a family which has it.
pub(super) fn read(config: &Keys, family: &str) -> Result<Option<LatentHeads>, ConfigError> {
    if !has(family) {
        return Ok(None);
    }
    for (key, only) in [("attention_bias", false), ("rope_interleave", true)] {
        if config.bool(key)?.is_some_and(|value| value != only) {
            return Err(config.refuse(key, format!("is {}, which is not supported", !only)));
        }
    }
    if config.f64("partial_rotary_factor")?.is_some_and(|part| part != 1.0) {
        let reason = "is not 1; qk_rope_head_dim says what is rotated".to_owned();
        return Err(config.refuse("partial_rotary_factor", reason));
    }
    let number = |key, usual| Ok::<_, ConfigError>(config.u64(key)?.unwrap_or(usual));
    let (usual_rank, usual_plain, usual_value) = match family {
        "glm4_moe_lite" => (768, 192, 256),
        _ => (1536, 128, 128),
    };
    // Null says that there is none.
    let query_rank = if config.has("q_lora_rank") { config.u64("q_lora_rank")? } else { Some(usual_rank) };
    let (plain, rotated) = (number("qk_nope_head_dim", usual_plain)?, number("qk_rope_head_dim", 64)?);
    Ok(Some(LatentHeads {
        attention: LatentAttention {
            query_rank,
            kv_rank: number("kv_lora_rank", 512)?,
            value_dim: number("v_head_dim", usual_value)?,
        },
        dim: plain.saturating_add(rotated),
        rotated,
    }))
}

/// Its keys; none where there is none.
pub(super) fn write(attention: &AttentionSpec) -> Map<String, Value> {
    let Some(LatentAttention { query_rank, kv_rank, value_dim }) = attention.latent else {
        return Map::new();
    };
    let rotated = attention.rotated_dim();
    let keys = json!({
        "q_lora_rank": query_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": attention.head_dim.saturating_sub(rotated),
        "qk_rope_head_dim": rotated,
        "v_head_dim": value_dim,
        // transformers makes the rotation for heads of this width.
        "head_dim": rotated,
        "rope_interleave": true,
    });
    match keys {
        Value::Object(keys) => keys,
        _ => Map::new(),
    }
}
