//! A model's shape and its tokenizer as GGUF metadata: the other way of `families`, with llama.cpp's keys. What the keys
//! do not say, a shape must have as its family has it.

use super::experts;
use super::families::{
    ARCHITECTURES, COSINE_FACTOR, ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, YARN_WEIGHT,
    YARN_WEIGHT_UNIT, activation, attention_scale, first_of_architecture, truncates, window_rhythm,
};
use super::write::GgufValue;
use crate::hf_config::{OWN_MIXTURE, latent_yarn_weights, yarn_scale};
use crate::save_error::SaveError;
use crate::spec::{ModelSpec, NormKind, RopeScaling};
use crate::tokenizer::GgufTokenizerFields;

/// A shape in GGUF's words.
pub(crate) struct Description {
    /// Metadata by key.
    pub entries: Vec<(String, GgufValue)>,
    /// Tensors that are no parameters, by name: the factors of rotary frequencies.
    pub factors: Vec<(&'static str, Vec<f32>)>,
}

/// The metadata of a shape, of a model of that name, and the tensors that belong to it.
///
/// # Errors
/// The shape has a trait that a reader of the file would not find in it.
pub(crate) fn describe(spec: &ModelSpec, name: &str) -> Result<Description, SaveError> {
    let fail = |reason: String| SaveError::Inexpressible { model: spec.name.clone(), target: "GGUF", reason };
    let family = first_of_architecture(&spec.architecture);
    if family == OWN_MIXTURE {
        return Err(fail(format!("{OWN_MIXTURE} is a family of Plimsoll's own; save it in a folder")));
    }
    let Some((architecture, _)) = ARCHITECTURES.into_iter().find(|(_, ours)| *ours == family) else {
        return Err(fail(format!("it is a {:?} model", spec.architecture)));
    };
    if let Some(reason) = unsaid(spec, family).or_else(|| experts::unsaid(spec)) {
        return Err(fail(reason));
    }
    let mut entries = vec![
        ("general.architecture".to_owned(), GgufValue::String(architecture.to_owned())),
        ("general.name".to_owned(), GgufValue::String(name.to_owned())),
    ];
    let mut set = |key: &str, value: GgufValue| entries.push((format!("{architecture}.{key}"), value));
    let attention = &spec.attention;
    // Latent attention is said as the one head that a cache of narrow vectors is read as.
    let [kv_heads, key_length, value_length] = match &attention.latent {
        Some(latent) => [1, latent.kv_rank + attention.rotated_dim(), latent.kv_rank],
        None => [attention.kv_heads, attention.head_dim, attention.head_dim],
    };
    let of_latent = attention.latent.iter().flat_map(|latent| {
        let rank = latent.query_rank.map(|rank| ("attention.q_lora_rank", rank));
        let others = [
            ("attention.kv_lora_rank", latent.kv_rank),
            ("attention.key_length_mla", attention.head_dim),
            ("attention.value_length_mla", latent.value_dim),
        ];
        rank.into_iter().chain(others)
    });
    let of_all = [
        ("context_length", spec.max_position_embeddings),
        ("embedding_length", spec.hidden_size),
        ("block_count", u64::from(spec.num_layers)),
        ("feed_forward_length", spec.mlp.intermediate_size),
        ("attention.head_count", attention.heads),
        ("attention.head_count_kv", kv_heads),
        ("attention.key_length", key_length),
        ("attention.value_length", value_length),
        ("vocab_size", spec.vocab_size),
    ];
    for (key, number) in of_all.into_iter().chain(of_latent) {
        let number =
            u32::try_from(number).map_err(|_| fail(format!("{key} {number} is beyond any model")))?;
        set(key, GgufValue::U32(number));
    }
    experts::describe(spec).into_iter().for_each(|(key, value)| set(key, value));
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
                truncate,
            } => {
                if *truncate != truncates(architecture) {
                    return Err(fail(format!("truncate: {truncate} of its YaRN has no words there")));
                }
                scaling("yarn", *factor);
                match latent_yarn_weights(spec, *factor, *attention_factor) {
                    Some((mscale, all)) if mscale != all => {
                        return Err(fail("mscale of its YaRN is not mscale_all_dim".to_owned()));
                    }
                    None if attention.latent.is_some() => {
                        return Err(fail("YaRN without mscale_all_dim has no words there".to_owned()));
                    }
                    Some((_, all)) => {
                        set(YARN_WEIGHT, GgufValue::F32((all * YARN_WEIGHT_UNIT) as f32));
                    }
                    None => {
                        let own = attention_factor / yarn_scale(*factor, 1.0);
                        set(COSINE_FACTOR, GgufValue::F32(own as f32));
                    }
                }
                set("rope.scaling.yarn_beta_fast", GgufValue::F32(*beta_fast as f32));
                set("rope.scaling.yarn_beta_slow", GgufValue::F32(*beta_slow as f32));
                let original = *original_max_position_embeddings as u32;
                set("rope.scaling.original_context_length", GgufValue::U32(original));
            }
            RopeScaling::PerFrequency { factors: own } => factors.push((ROPE_FACTORS, to_f32(own))),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                let of = |i: u64| {
                    let frequency = rope.theta.powf(-(2.0 * i as f64) / rope.dims as f64);
                    let wavelength = 2.0 * std::f64::consts::PI / frequency;
                    if wavelength > original / low {
                        *factor as f32
                    } else if wavelength < original / high {
                        1.0
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                    }
                };
                factors.push((ROPE_FACTORS, (0..rope.dims / 2).map(of).collect()));
            }
            // Without a type: the two tensors say it.
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                attention_factor,
                original_max_position_embeddings,
            } => {
                set(COSINE_FACTOR, GgufValue::F32(*attention_factor as f32));
                let original = *original_max_position_embeddings as u32;
                set("rope.scaling.original_context_length", GgufValue::U32(original));
                factors.push((ROPE_FACTORS_LONG, to_f32(long_factor)));
                factors.push((ROPE_FACTORS_SHORT, to_f32(short_factor)));
            }
            RopeScaling::Dynamic { .. } => {
                return Err(fail("its rotary scaling, dynamic, has no words in GGUF".to_owned()));
            }
        }
    }
    Ok(Description { entries, factors })
}

fn to_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|x| *x as f32).collect()
}

/// What the family's files have no words for, if the shape has such a trait.
fn unsaid(spec: &ModelSpec, family: &str) -> Option<String> {
    let attention = &spec.attention;
    let effective = attention.sliding_window.as_ref().filter(|w| w.size < spec.max_position_embeddings);
    if let Some(window) = effective
        && !window_rhythm(family)
            .is_some_and(|slides| (0..).zip(&window.layers).all(|(i, slid)| slides(i) == *slid))
    {
        return Some(format!("a window of {} tokens in these layers has no words there", window.size));
    }
    // What YaRN makes of it in latent attention has a key.
    let of_yarn = attention.latent.is_some()
        && attention.rope.as_ref().is_some_and(|rope| matches!(rope.scaling, RopeScaling::Yarn { .. }));
    let usual = |scale: Option<f64>| scale.unwrap_or((attention.head_dim as f64).powf(-0.5));
    let read = attention_scale(family, spec.num_layers, spec.hidden_size, attention.heads);
    if !of_yarn && (usual(attention.scale) / usual(read) - 1.0).abs() > 1e-6 {
        return Some("its factor on attention scores is not its family's, and has no words there".to_owned());
    }
    let capped = [attention.soft_cap, spec.logit_soft_cap].map(|cap| cap.is_some());
    if capped != [family == "gemma2"; 2] {
        return Some("soft caps other than its family's have no words there".to_owned());
    }
    if attention.latent.is_some() && spec.experts.is_none() {
        return Some("latent attention without experts has no words there".to_owned());
    }
    if attention.sinks != (family == "gpt_oss") {
        return Some("sinks in attention are in files of gpt-oss alone, and in all of them".to_owned());
    }
    if spec.mlp.activation != activation(family) {
        return Some(format!("the activation {:?} is not its family's", spec.mlp.activation));
    }
    if family == "llama" && attention.rope.as_ref().is_some_and(|rope| rope.dims != attention.head_dim) {
        return Some("only a part of each head is rotated".to_owned());
    }
    if family == "gpt2" && !spec.tie_word_embeddings {
        return Some("its head is not the embedding".to_owned());
    }
    None
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
    // Readers of byte-level BPE want the key even where a vocabulary of single bytes has no merges.
    let merges = fields.model == "gpt2" || !fields.merges.is_empty();
    set("ggml.merges", merges.then(|| GgufValue::Strings(fields.merges.clone())));
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
