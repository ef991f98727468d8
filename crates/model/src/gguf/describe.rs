//! A model's shape and its tokenizer as GGUF metadata: the other way of `families`, with llama.cpp's keys.

use super::families::ARCHITECTURES;
use super::write::GgufValue;
use crate::save_error::SaveError;
use crate::spec::{ModelSpec, NormKind, RopeScaling};
use crate::tokenizer::GgufTokenizerFields;

/// The tensor of rotary factors that a shape needs beside its parameters.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Metadata entries by key.
pub(crate) type Entries = Vec<(String, GgufValue)>;

/// The metadata of a shape, and the factors of its rotary frequencies where it has such.
pub(crate) fn describe(spec: &ModelSpec) -> Result<(Entries, Vec<f32>), SaveError> {
    let fail = |reason: String| SaveError::Inexpressible { model: spec.name.clone(), target: "GGUF", reason };
    // llama.cpp runs Mistral's models as Llama's.
    let family = if spec.architecture == "mistral" { "llama" } else { &spec.architecture };
    let Some((architecture, _)) = ARCHITECTURES.into_iter().find(|(_, ours)| *ours == family) else {
        return Err(fail(format!("it is a {:?} model", spec.architecture)));
    };
    let mut entries = vec![
        ("general.architecture".to_owned(), GgufValue::String(architecture.to_owned())),
        ("general.name".to_owned(), GgufValue::String(spec.name.clone())),
    ];
    let mut set = |key: &str, value: GgufValue| entries.push((format!("{architecture}.{key}"), value));
    let attention = &spec.attention;
    for (key, number) in [
        ("context_length", spec.max_position_embeddings),
        ("embedding_length", spec.hidden_size),
        ("block_count", u64::from(spec.num_layers)),
        ("feed_forward_length", spec.mlp.intermediate_size),
        ("attention.head_count", attention.heads),
        ("attention.head_count_kv", attention.kv_heads),
        ("attention.key_length", attention.head_dim),
        ("attention.value_length", attention.head_dim),
        ("vocab_size", spec.vocab_size),
    ] {
        let number =
            u32::try_from(number).map_err(|_| fail(format!("{key} {number} is beyond any model")))?;
        set(key, GgufValue::U32(number));
    }
    let epsilon =
        if spec.norm.kind == NormKind::Layer { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
    set(&format!("attention.{epsilon}"), GgufValue::F32(spec.norm.epsilon as f32));
    if let Some(window) = &attention.sliding_window {
        set("attention.sliding_window", GgufValue::U32(window.size.min(u64::from(u32::MAX)) as u32));
    }
    if let Some(cap) = attention.soft_cap {
        set("attn_logit_softcapping", GgufValue::F32(cap as f32));
    }
    if let Some(cap) = spec.logit_soft_cap {
        set("final_logit_softcapping", GgufValue::F32(cap as f32));
    }
    if let Some(local) = &attention.local_rope {
        set("rope.freq_base_swa", GgufValue::F32(local.theta as f32));
    }
    let mut factors = Vec::new();
    if let Some(rope) = &attention.rope {
        set("rope.dimension_count", GgufValue::U32(rope.dims.min(u64::from(u32::MAX)) as u32));
        set("rope.freq_base", GgufValue::F32(rope.theta as f32));
        let mut scaling = |kind: &str, factor: f64| {
            set("rope.scaling.type", GgufValue::String(kind.to_owned()));
            set("rope.scaling.factor", GgufValue::F32(factor as f32));
        };
        match &rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => scaling("linear", *factor),
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings,
            } => {
                scaling("yarn", *factor);
                let usual = 0.1 * factor.max(1.0).ln() + 1.0;
                set("rope.scaling.attn_factor", GgufValue::F32((attention_factor / usual) as f32));
                set("rope.scaling.yarn_beta_fast", GgufValue::F32(*beta_fast as f32));
                set("rope.scaling.yarn_beta_slow", GgufValue::F32(*beta_slow as f32));
                let original = *original_max_position_embeddings as u32;
                set("rope.scaling.original_context_length", GgufValue::U32(original));
            }
            RopeScaling::PerFrequency { factors: own } => factors = own.iter().map(|x| *x as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                for i in 0..rope.dims / 2 {
                    let frequency = rope.theta.powf(-(2.0 * i as f64) / rope.dims as f64);
                    let wavelength = 2.0 * std::f64::consts::PI / frequency;
                    factors.push(if wavelength > original / low {
                        *factor as f32
                    } else if wavelength < original / high {
                        1.0
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                    });
                }
            }
            RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. } => {
                return Err(fail(
                    "its kind of rotary scaling has no words in GGUF, or is not written".to_owned(),
                ));
            }
        }
    }
    Ok((entries, factors))
}

/// The metadata of a tokenizer.
pub(crate) fn describe_tokenizer(fields: &GgufTokenizerFields) -> Vec<(String, GgufValue)> {
    let mut entries = Vec::new();
    let mut set = |key: &str, value: Option<GgufValue>| {
        entries.extend(value.map(|value| (format!("tokenizer.{key}"), value)));
    };
    let list = |list: &[String]| (!list.is_empty()).then(|| GgufValue::Strings(list.to_vec()));
    let text = |text: &Option<String>| text.clone().map(GgufValue::String);
    set("ggml.model", Some(GgufValue::String(fields.model.clone())));
    set("ggml.pre", text(&fields.pre));
    set("ggml.tokens", list(&fields.tokens));
    set("ggml.scores", (!fields.scores.is_empty()).then(|| GgufValue::F32s(fields.scores.clone())));
    let types: Vec<i32> = fields.token_types.iter().map(|kind| *kind as i32).collect();
    set("ggml.token_type", (!types.is_empty()).then_some(GgufValue::I32s(types)));
    set("ggml.merges", list(&fields.merges));
    for (key, id) in [
        ("bos", fields.bos),
        ("eos", fields.eos),
        ("eot", fields.eot),
        ("eom", fields.eom),
        ("unknown", fields.unknown),
        ("padding", fields.padding),
    ] {
        set(&format!("ggml.{key}_token_id"), id.map(GgufValue::U32));
    }
    for (key, truth) in [
        ("add_bos_token", fields.add_bos),
        ("add_eos_token", fields.add_eos),
        ("add_space_prefix", fields.add_space_prefix),
        ("remove_extra_whitespaces", fields.remove_extra_whitespaces),
    ] {
        set(&format!("ggml.{key}"), truth.map(GgufValue::Bool));
    }
    let map = &fields.precompiled_charsmap;
    set("ggml.precompiled_charsmap", (!map.is_empty()).then(|| GgufValue::U8s(map.clone())));
    set("chat_template", text(&fields.chat_template));
    for (name, template) in &fields.named_chat_templates {
        set(&format!("chat_template.{name}"), Some(GgufValue::String(template.clone())));
    }
    entries
}
