//! What the metadata of a GGUF file means: the shape of a model of each supported family.

use plimsoll_device::DType;

use super::{GgufError, GgufFile, GgufTensor, GgufTensorProblem, Metadata, ValueType, experts};
use crate::convert::convert;
use crate::hf_config::{latent_scale_of, yarn_scale};
use crate::shown::Shown;
use crate::spec::{
    Activation, AttentionSpec, LatentAttention, MlpSpec, ModelSpec, NormKind, NormPlacement, NormSpec,
    QkNorm, RopeScaling, RopeSpec, SlidingWindow,
};

/// Values of `general.architecture` that are read, and Hugging Face's `model_type` of each.
pub(super) const ARCHITECTURES: [(&str, &str); 16] = [
    ("llama", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("gemma", "gemma"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3_text"),
    ("gpt2", "gpt2"),
    ("phi3", "phi3"),
    ("olmo2", "olmo2"),
    ("qwen2moe", "qwen2_moe"),
    ("qwen3moe", "qwen3_moe"),
    ("olmoe", "olmoe"),
    ("glm4moe", "glm4_moe"),
    ("deepseek", "deepseek"),
    (LATENT, "deepseek_v2"),
    ("gpt-oss", "gpt_oss"),
];

/// The architecture of files with latent attention: DeepSeek-V2, V3 and their successors, GLM-4.7-Flash.
pub(super) const LATENT: &str = "deepseek2";

/// The name in [`ARCHITECTURES`] of a family that shares an architecture with another.
pub(super) fn first_of_architecture(family: &str) -> &str {
    match family {
        // llama.cpp runs Mistral's and Mixtral's models as Llama's.
        "mistral" | "mixtral" => "llama",
        "deepseek_v3" | "glm4_moe_lite" => "deepseek_v2",
        other => other,
    }
}

/// The tensor that holds one factor for every rotary frequency, and those for contexts up to the original one and
/// beyond.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
pub(super) const ROPE_FACTORS_SHORT: &str = "rope_factors_short.weight";
pub(super) const ROPE_FACTORS_LONG: &str = "rope_factors_long.weight";

/// Base of Gemma 3's layers with a window.
const GEMMA3_LOCAL_THETA: f64 = 10_000.0;

/// Tensors that are no parameters: the rotary factors, which the model's shape has taken in, frequencies that very old
/// converters kept, the copy of a tied head, and the layers of GLM 4.5 and DeepSeek-V3 behind the last.
pub(crate) fn is_no_parameter(tensor: &str, spec: &ModelSpec) -> bool {
    let layer = tensor.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    if layer.is_some_and(|layer| spec.is_behind_the_last(layer)) {
        return true;
    }
    [ROPE_FACTORS, ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG].contains(&tensor)
        || tensor.ends_with(".attn_rot_embd")
        || tensor.ends_with(".attention.rotary_emb.inv_freq")
        || (spec.tie_word_embeddings && tensor == "output.weight")
}

/// Refuses a bias of q or k, or of both and v, in blocks: it is reordered or cut, which takes single elements. Rows of
/// matrices are whole blocks, or the file would not have been opened.
pub(crate) fn check_bias(file: &GgufFile, tensor: &GgufTensor) -> Result<(), GgufError> {
    let taken_apart = tensor.name.contains(".attn_q") || tensor.name.contains(".attn_k");
    if tensor.shape.len() != 1 || !taken_apart || !tensor.dtype.is_block() {
        return Ok(());
    }
    let problem = GgufTensorProblem::PartialBlocks { columns: 1, dtype: tensor.dtype.name() };
    let (path, offset) = (file.path().to_owned(), tensor.info_offset);
    Err(GgufError::Tensor { path, offset, tensor: tensor.name.clone(), problem })
}

/// The model's shape.
pub(crate) fn model_spec(file: &GgufFile, name: String) -> Result<ModelSpec, GgufError> {
    let metadata = file.metadata();
    let found = metadata.require("general.architecture", metadata.str("general.architecture")?)?;
    let Some((prefix, family)) = ARCHITECTURES.into_iter().find(|(name, _)| *name == found) else {
        let names = ARCHITECTURES.map(|(name, _)| name);
        return Err(GgufError::Architecture {
            path: file.path().to_owned(),
            found: found.to_owned(),
            supported: names.join(", "),
            nearest: crate::hf_config::nearest(found, &names),
        });
    };
    let keys = Keys { metadata, prefix };
    let has = |tensor| file.tensor(tensor).is_some();
    let gemma = family.starts_with("gemma");
    let gpt2 = family == "gpt2";
    // Routers of V3 and of its successors correct their choice.
    let corrects = |t: &GgufTensor| t.name.ends_with(".exp_probs_b.bias");
    let family = match prefix {
        LATENT if file.tensors().iter().any(corrects) => "deepseek_v3",
        _ => family,
    };
    let hidden_size = keys.require_u64("embedding_length")?;
    let heads = keys.require_u64("attention.head_count")?;
    let latent = latent(&keys)?;
    let head_dim = match latent {
        Some((_, head_dim)) => head_dim,
        None => head_dim(&keys, hidden_size, heads)?,
    };
    // Those behind the last that predict further tokens are none of the model's.
    let further = keys.u64("nextn_predict_layers")?.unwrap_or(0);
    let num_layers = keys.require_u64("block_count")?.saturating_sub(further);
    let num_layers = u32::try_from(num_layers)
        .map_err(|_| keys.refuse("block_count", format!("is {num_layers}, beyond any model")))?;
    let embedding = require_tensor(file, "token_embd.weight")?;
    let vocab_size = embedding.shape.first().copied().unwrap_or(0);
    let mut attention = AttentionSpec {
        heads,
        // Files say 1 for the one narrow vector.
        kv_heads: match latent {
            Some(_) => heads,
            None => keys.u64("attention.head_count_kv")?.unwrap_or(heads),
        },
        head_dim,
        qkv_bias: has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias"),
        output_bias: has("blk.0.attn_output.bias"),
        qk_norm: match family {
            "qwen3" | "qwen3_moe" | "gemma3_text" => Some(QkNorm::PerHead),
            "glm4_moe" if has("blk.0.attn_q_norm.weight") => Some(QkNorm::PerHead),
            "olmo2" | "olmoe" => Some(QkNorm::Whole),
            _ => None,
        },
        rope: None,
        local_rope: None,
        sliding_window: sliding_window(&keys, family, num_layers)?,
        scale: None,
        soft_cap: None,
        sinks: has("blk.0.attn_sinks.weight"),
        latent: latent.map(|(latent, _)| latent),
    };
    if !gpt2 {
        attention.rope = Some(rope(file, &keys, head_dim)?);
    }
    attention.scale = attention_scale(family, num_layers, hidden_size, heads);
    if attention.latent.is_some() {
        scale_latent(&keys, &mut attention)?;
    }
    if family == "gemma3_text" {
        let theta = keys.f64("rope.freq_base_swa")?.unwrap_or(GEMMA3_LOCAL_THETA);
        attention.local_rope = Some(RopeSpec::plain(head_dim, theta));
    }
    let mut logit_soft_cap = None;
    if family == "gemma2" {
        attention.soft_cap = Some(keys.f64("attn_logit_softcapping")?.unwrap_or(50.0));
        logit_soft_cap = Some(keys.f64("final_logit_softcapping")?.unwrap_or(30.0));
    }
    // Mistral's models are Llama's with a window, and Mixtral's Llama's with experts.
    let windowed = family == "llama" && attention.sliding_window.is_some();
    let mixed = family == "llama" && keys.u64("expert_count")?.is_some_and(|count| count > 0);
    let architecture = match (mixed, windowed) {
        (true, _) => "mixtral",
        (false, true) => "mistral",
        (false, false) => family,
    };
    let experts = experts::read(file, &keys, architecture, num_layers)?;
    let all_sparse = experts.as_ref().filter(|experts| !experts.layers.contains(&false));
    let intermediate_size = match (keys.u64("feed_forward_length")?.filter(|size| *size > 0), all_sparse) {
        (Some(size), _) => size,
        // No layer has such a part.
        (None, Some(experts)) => experts.intermediate_size,
        (None, None) => keys.require_u64("feed_forward_length")?,
    };
    let spec = ModelSpec {
        name,
        architecture: architecture.to_owned(),
        vocab_size,
        hidden_size,
        num_layers,
        attention,
        mlp: MlpSpec {
            intermediate_size,
            activation: activation(family),
            gated: !gpt2,
            bias: has("blk.0.ffn_down.bias") || has("blk.0.ffn_down_exps.bias"),
        },
        experts,
        norm: NormSpec {
            kind: if gpt2 { NormKind::Layer } else { NormKind::Rms },
            epsilon: keys.require_f64(if gpt2 {
                "attention.layer_norm_epsilon"
            } else {
                "attention.layer_norm_rms_epsilon"
            })?,
            one_plus_weight: gemma,
            placement: match family {
                "gemma2" | "gemma3_text" => NormPlacement::Around,
                "olmo2" => NormPlacement::After,
                _ => NormPlacement::Before,
            },
        },
        embedding_scale: gemma.then_some((hidden_size as f64).sqrt()),
        logit_soft_cap,
        // Converters write GPT-2's tied head twice.
        tie_word_embeddings: gpt2 || !has("output.weight"),
        max_position_embeddings: keys.require_u64("context_length")?,
        initializer_range: 0.02,
        part: Default::default(),
        bos_token: token_id(&metadata, "tokenizer.ggml.bos_token_id", vocab_size)?,
        eos_tokens: eos_tokens(&metadata, vocab_size)?,
    };
    spec.check().map_err(|source| GgufError::Spec { path: file.path().to_owned(), source })?;
    Ok(spec)
}

/// The activation, which no key says.
pub(super) fn activation(family: &str) -> Activation {
    match family {
        "gpt2" => Activation::GeluTanh,
        "gpt_oss" => Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        _ if family.starts_with("gemma") => Activation::GeluTanh,
        _ => Activation::Silu,
    }
}

/// The factor on scores where it is not the usual one, which no key says either: the 27B models of Gemma 2 and 3 scale by
/// the width that heads would have without a size of their own.
pub(super) fn attention_scale(family: &str, num_layers: u32, hidden_size: u64, heads: u64) -> Option<f64> {
    let largest = (family == "gemma2" && num_layers == 46) || (family == "gemma3_text" && num_layers == 62);
    (largest && heads > 0).then(|| (hidden_size as f64 / heads as f64).powf(-0.5))
}

/// Whether a layer sees a part of the past only: the families that alternate do so in a known rhythm. `None` where files
/// of the family have no windows.
pub(super) fn window_rhythm(family: &str) -> Option<fn(u32) -> bool> {
    match family {
        "gemma2" | "gpt_oss" => Some(|layer| layer % 2 == 0),
        "gemma3_text" => Some(|layer| layer % 6 != 5),
        "phi3" | "llama" => Some(|_| true),
        _ => None,
    }
}

/// The window, and which layers have it.
fn sliding_window(
    keys: &Keys<'_>,
    family: &str,
    num_layers: u32,
) -> Result<Option<SlidingWindow>, GgufError> {
    let Some(size) = keys.u64("attention.sliding_window")?.filter(|size| *size > 0) else { return Ok(None) };
    let Some(slides) = window_rhythm(family) else { return Ok(None) };
    // More layers than any model has are refused later; this must not take their memory.
    let layers = (0..num_layers.min(1 << 16)).map(slides).collect();
    Ok(Some(SlidingWindow { size, layers }))
}

/// The metadata of one architecture, by the part of the key after its name.
pub(super) struct Keys<'a> {
    metadata: Metadata<'a>,
    pub(super) prefix: &'static str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub(super) fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.metadata.u64(&self.key(key))
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.metadata.f64(&self.key(key))
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.metadata.bool(&self.key(key))
    }

    pub(super) fn require_u64(&self, key: &str) -> Result<u64, GgufError> {
        self.metadata.require(&self.key(key), self.u64(key)?)
    }

    fn require_f64(&self, key: &str) -> Result<f64, GgufError> {
        self.metadata.require(&self.key(key), self.f64(key)?)
    }

    pub(super) fn refuse(&self, key: &str, reason: String) -> GgufError {
        self.metadata.refuse(&self.key(key), reason)
    }
}

/// Latent attention and the width of its heads' keys, in files of the architecture that has it. Those of before April 2025 say the widths of
/// heads where others say those of the narrow vector.
fn latent(keys: &Keys<'_>) -> Result<Option<(LatentAttention, u64)>, GgufError> {
    if keys.prefix != LATENT {
        return Ok(None);
    }
    // Mistral Large 3 scales queries by their position.
    if keys.f64(QUERY_SCALE)?.is_some_and(|scale| scale != 0.0) {
        return Err(
            keys.refuse(QUERY_SCALE, "makes queries larger by position, which is not supported".to_owned())
        );
    }
    let width = |key: &str| match keys.u64(&format!("{key}_mla"))? {
        Some(width) => Ok(width),
        None => keys.require_u64(key),
    };
    let attention = LatentAttention {
        query_rank: keys.u64("attention.q_lora_rank")?.filter(|rank| *rank > 0),
        kv_rank: keys.require_u64("attention.kv_lora_rank")?,
        value_dim: width("attention.value_length")?,
    };
    Ok(Some((attention, width("attention.key_length")?)))
}

/// A factor on queries that grows with their position.
const QUERY_SCALE: &str = "attention.temperature_scale";

/// YaRN in latent attention: files have one number for its weights `mscale` and `mscale_all_dim`. Cosines stay as they are, and scores
/// become larger. llama.cpp has further rules for files without that number, and for those with a factor of their own.
fn scale_latent(keys: &Keys<'_>, attention: &mut AttentionSpec) -> Result<(), GgufError> {
    let head_dim = attention.head_dim;
    let Some(RopeSpec { scaling: RopeScaling::Yarn { factor, attention_factor, .. }, .. }) =
        &mut attention.rope
    else {
        return Ok(());
    };
    let written = keys.require_f64(YARN_WEIGHT)?;
    if !(written > 0.0 && written <= 10.0) {
        return Err(keys.refuse(YARN_WEIGHT, format!("is {written}, which is no weight of YaRN")));
    }
    if let Some(own) = keys.f64(COSINE_FACTOR)?.filter(|own| *own != 1.0) {
        return Err(keys.refuse(COSINE_FACTOR, format!("is {own}; only 1 is supported beside {YARN_WEIGHT}")));
    }
    *attention_factor = 1.0;
    attention.scale = (*factor > 1.0).then(|| latent_scale_of(head_dim, *factor, written / YARN_WEIGHT_UNIT));
    Ok(())
}

/// A factor on what scaling does to cosines: of YaRN beside its usual one, of LongRoPE the whole.
pub(super) const COSINE_FACTOR: &str = "rope.scaling.attn_factor";

/// The weight of YaRN in latent attention, a tenth of Hugging Face's `mscale_all_dim`.
pub(super) const YARN_WEIGHT: &str = "rope.scaling.yarn_log_multiplier";
pub(super) const YARN_WEIGHT_UNIT: f64 = 0.1;

fn head_dim(keys: &Keys<'_>, hidden_size: u64, heads: u64) -> Result<u64, GgufError> {
    let head_dim = match keys.u64("attention.key_length")? {
        Some(length) => length,
        None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let reason = format!("is {heads}, which does not divide the embedding_length {hidden_size}");
            return Err(keys.refuse("attention.head_count", reason));
        }
    };
    if let Some(other) = keys.u64("attention.value_length")?
        && other != head_dim
    {
        let reason = format!("is {other}, but heads are {head_dim} wide; only equal ones are supported");
        return Err(keys.refuse("attention.value_length", reason));
    }
    Ok(head_dim)
}

/// Whether the ramp of YaRN begins and ends with whole dimensions in models of an architecture, which no key says.
pub(super) fn truncates(architecture: &str) -> bool {
    architecture != "gpt-oss"
}

fn rope(file: &GgufFile, keys: &Keys<'_>, head_dim: u64) -> Result<RopeSpec, GgufError> {
    let dims = keys.u64("rope.dimension_count")?.unwrap_or(head_dim);
    if keys.prefix == "llama" && dims != head_dim {
        let reason = format!("is {dims}, but heads are {head_dim} wide; llama models rotate whole heads");
        return Err(keys.refuse("rope.dimension_count", reason));
    }
    let theta = keys.f64("rope.freq_base")?.unwrap_or(10_000.0);
    Ok(RopeSpec { dims, theta, scaling: rope_scaling(file, keys, dims)? })
}

/// The kind of scaling by its metadata, or by the tensor of factors: a file has one of them.
fn rope_scaling(file: &GgufFile, keys: &Keys<'_>, dims: u64) -> Result<RopeScaling, GgufError> {
    let kind = keys.metadata.str(&keys.key("rope.scaling.type"))?;
    let factor = match keys.f64("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The key of version 2 files.
        None => keys.f64("rope.scale_linear")?,
    };
    let factor_or_fail = || keys.metadata.require(&keys.key("rope.scaling.factor"), factor);
    let scaling = match kind {
        Some("none" | "longrope") => RopeScaling::None,
        None if factor.is_none_or(|factor| factor == 1.0) => RopeScaling::None,
        None | Some("linear") => RopeScaling::Linear { factor: factor_or_fail()? },
        Some("yarn") => {
            let factor = factor_or_fail()?;
            let own = keys.f64(COSINE_FACTOR)?.unwrap_or(1.0);
            let original = "rope.scaling.original_context_length";
            RopeScaling::Yarn {
                factor,
                attention_factor: own * yarn_scale(factor, 1.0),
                beta_fast: keys.f64("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: keys.f64("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                original_max_position_embeddings: keys.require_f64(original)?,
                truncate: truncates(keys.prefix),
            }
        }
        Some(other) => {
            let reason = format!("is {}; supported are none, linear, yarn and longrope", Shown(other));
            return Err(keys.refuse("rope.scaling.type", reason));
        }
    };
    if let Some(short) = file.tensor(ROPE_FACTORS_SHORT) {
        let original = keys.require_f64("rope.scaling.original_context_length")?;
        let stretch = keys.require_u64("context_length")? as f64 / original;
        let usual = if stretch > 1.0 { (1.0 + stretch.ln() / original.ln()).sqrt() } else { 1.0 };
        return Ok(RopeScaling::LongRope {
            short_factor: rope_factors(file, short, dims)?,
            long_factor: rope_factors(file, require_tensor(file, ROPE_FACTORS_LONG)?, dims)?,
            attention_factor: keys.f64(COSINE_FACTOR)?.unwrap_or(usual),
            original_max_position_embeddings: original,
        });
    }
    let Some(tensor) = file.tensor(ROPE_FACTORS) else { return Ok(scaling) };
    if scaling != RopeScaling::None {
        let reason =
            format!("asks for scaling, and so does the tensor {ROPE_FACTORS:?}; only one is supported");
        return Err(keys.refuse("rope.scaling.type", reason));
    }
    Ok(RopeScaling::PerFrequency { factors: rope_factors(file, tensor, dims)? })
}

fn rope_factors(file: &GgufFile, tensor: &GgufTensor, dims: u64) -> Result<Vec<f64>, GgufError> {
    if tensor.dtype != DType::F32 || tensor.shape != [dims / 2] {
        let reason = format!(
            "is {:?} in {}; rotary factors are [{}] (half of the rotated dimensions) in f32",
            tensor.shape,
            tensor.dtype,
            dims / 2
        );
        return Err(tensor_error(file, tensor, reason));
    }
    let mut factors = vec![0.0f32; (dims / 2) as usize];
    convert(tensor.dtype, file.bytes(tensor), DType::F32, bytemuck::cast_slice_mut(&mut factors))
        .map_err(|error| tensor_error(file, tensor, error.to_string()))?;
    Ok(factors.into_iter().map(f64::from).collect())
}

/// The id of a special token below `vocab_size`; absent, or -1 for none.
pub(crate) fn token_id(
    metadata: &Metadata<'_>,
    key: &str,
    vocab_size: u64,
) -> Result<Option<u32>, GgufError> {
    let Some(entry) = metadata.get(key) else { return Ok(None) };
    let none = match entry.kind {
        ValueType::I32 | ValueType::I64 => entry.value == super::Value::Signed(-1),
        _ => entry.value == super::Value::Unsigned(u64::from(u32::MAX)),
    };
    if none {
        return Ok(None);
    }
    match metadata.u64(key)? {
        Some(id) if id >= vocab_size => {
            Err(metadata.refuse(key, format!("is {id}, but the embedding has {vocab_size} rows")))
        }
        id => Ok(id.and_then(|id| u32::try_from(id).ok())),
    }
}

/// The end of text, and the end of a turn and of a message where they are other tokens.
fn eos_tokens(metadata: &Metadata<'_>, vocab_size: u64) -> Result<Vec<u32>, GgufError> {
    let mut tokens = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        if let Some(id) = token_id(metadata, key, vocab_size)?
            && !tokens.contains(&id)
        {
            tokens.push(id);
        }
    }
    Ok(tokens)
}

fn require_tensor<'a>(file: &'a GgufFile, name: &str) -> Result<&'a GgufTensor, GgufError> {
    file.tensor(name).ok_or_else(|| GgufError::Tensor {
        path: file.path().to_owned(),
        offset: 0,
        tensor: name.to_owned(),
        problem: GgufTensorProblem::Missing,
    })
}

fn tensor_error(file: &GgufFile, tensor: &GgufTensor, reason: String) -> GgufError {
    GgufError::Tensor {
        path: file.path().to_owned(),
        offset: tensor.info_offset,
        tensor: tensor.name.clone(),
        problem: GgufTensorProblem::Meaning(reason),
    }
}
