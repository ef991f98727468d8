//! What the metadata and tensor names of a `llama` GGUF mean: the model's shape, and which Hugging Face
//! parameter each tensor is.
//!
//! Converters to GGUF reorder the rows of q and k within every head, because llama.cpp rotates neighbouring pairs
//! (2i, 2i + 1) where Hugging Face rotates (i, i + head_dim / 2): see [`StoredName::interleaved`].

use plimsoll_device::DType;

use super::{GgufError, GgufFile, GgufTensor, GgufTensorProblem, Metadata, ValueType};
use crate::convert::convert;
use crate::shown::Shown;
use crate::source::RowOrder;
use crate::spec::{Activation, AttentionSpec, MlpSpec, ModelSpec, NormKind, NormSpec, RopeScaling, RopeSpec};

const ARCHITECTURE: &str = "llama";

/// The tensor that holds one factor for every rotary frequency.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The Hugging Face parameter that a GGUF tensor is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoredName {
    /// `model.layers.0.self_attn.q_proj.weight`
    pub name: String,
    /// Whether the rows of each head are stored in the order of interleaved rotary embedding.
    pub interleaved: bool,
}

/// The parameter that a tensor is, or `None` for a tensor that the family does not have.
pub(crate) fn parameter_name(tensor: &str) -> Option<StoredName> {
    let plain = |name: &str| Some(StoredName { name: name.to_owned(), interleaved: false });
    match tensor {
        "token_embd.weight" => return plain("model.embed_tokens.weight"),
        "output_norm.weight" => return plain("model.norm.weight"),
        "output.weight" => return plain("lm_head.weight"),
        _ => {}
    }
    let (layer, rest) = tensor.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind @ ("weight" | "bias")) = rest.split_once('.')? else { return None };
    let (part, interleaved) = match part {
        "attn_norm" => ("input_layernorm", false),
        "attn_q" => ("self_attn.q_proj", true),
        "attn_k" => ("self_attn.k_proj", true),
        "attn_v" => ("self_attn.v_proj", false),
        "attn_output" => ("self_attn.o_proj", false),
        "ffn_norm" => ("post_attention_layernorm", false),
        "ffn_gate" => ("mlp.gate_proj", false),
        "ffn_up" => ("mlp.up_proj", false),
        "ffn_down" => ("mlp.down_proj", false),
        _ => return None,
    };
    // Parsed and printed again, so that "blk.007" does not pass for a name of layer 7.
    let number: u32 = layer.parse().ok().filter(|n: &u32| n.to_string() == layer)?;
    Some(StoredName { name: format!("model.layers.{number}.{part}.{kind}"), interleaved })
}

/// The order of a tensor's rows, which can only be put right if no block of its type holds parts of two rows.
pub(crate) fn row_order(
    file: &GgufFile,
    tensor: &GgufTensor,
    interleaved: bool,
    head_dim: u64,
) -> Result<RowOrder, GgufError> {
    if !interleaved {
        return Ok(RowOrder::Natural);
    }
    let columns = tensor.shape.iter().skip(1).product::<u64>();
    if !columns.is_multiple_of(tensor.dtype.block_elements()) {
        let problem = GgufTensorProblem::PartialBlocks { columns, dtype: tensor.dtype.name() };
        let (path, offset) = (file.path().to_owned(), tensor.info_offset);
        return Err(GgufError::Tensor { path, offset, tensor: tensor.name.clone(), problem });
    }
    Ok(RowOrder::Interleaved { head_dim })
}

/// Tensors that are no parameters: the rotary factors, which the model's shape has taken in, and frequencies
/// that very old converters kept.
pub(crate) fn is_no_parameter(tensor: &str) -> bool {
    tensor == ROPE_FACTORS
        || tensor.ends_with(".attn_rot_embd")
        || tensor.ends_with(".attention.rotary_emb.inv_freq")
}

/// The model's shape.
pub(crate) fn model_spec(file: &GgufFile, name: String) -> Result<ModelSpec, GgufError> {
    let metadata = file.metadata();
    let architecture = metadata.require("general.architecture", metadata.str("general.architecture")?)?;
    if architecture != ARCHITECTURE {
        let found = architecture.to_owned();
        return Err(GgufError::Architecture { path: file.path().to_owned(), found });
    }
    let keys = Keys { metadata };
    if keys.u64("expert_count")?.unwrap_or(0) > 0 {
        return Err(
            keys.refuse("expert_count", "says a mixture of experts, which is not supported".to_owned())
        );
    }
    let hidden_size = keys.require_u64("embedding_length")?;
    let heads = keys.require_u64("attention.head_count")?;
    let head_dim = head_dim(&keys, hidden_size, heads)?;
    let num_layers = keys.require_u64("block_count")?;
    let num_layers = u32::try_from(num_layers)
        .map_err(|_| keys.refuse("block_count", format!("is {num_layers}, beyond any model")))?;
    let embedding = require_tensor(file, "token_embd.weight")?;
    let vocab_size = embedding.shape.first().copied().unwrap_or(0);
    let has = |tensor| file.tensor(tensor).is_some();
    let spec = ModelSpec {
        name,
        architecture: architecture.to_owned(),
        vocab_size,
        hidden_size,
        num_layers,
        attention: AttentionSpec {
            heads,
            kv_heads: keys.u64("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            qkv_bias: has("blk.0.attn_q.bias"),
            output_bias: has("blk.0.attn_output.bias"),
            rope: RopeSpec {
                theta: keys.f64("rope.freq_base")?.unwrap_or(10_000.0),
                scaling: rope_scaling(file, &keys, head_dim)?,
            },
        },
        mlp: MlpSpec {
            intermediate_size: keys.require_u64("feed_forward_length")?,
            activation: Activation::Silu,
            gated: true,
            bias: has("blk.0.ffn_down.bias"),
        },
        norm: NormSpec {
            kind: NormKind::Rms,
            epsilon: keys.require_f64("attention.layer_norm_rms_epsilon")?,
        },
        tie_word_embeddings: !has("output.weight"),
        max_position_embeddings: keys.require_u64("context_length")?,
        initializer_range: 0.02,
        bos_token: token_id(&metadata, "tokenizer.ggml.bos_token_id", vocab_size)?,
        eos_tokens: eos_tokens(&metadata, vocab_size)?,
    };
    spec.check().map_err(|source| GgufError::Spec { path: file.path().to_owned(), source })?;
    Ok(spec)
}

/// The metadata of this architecture, by the part of the key after its name.
struct Keys<'a> {
    metadata: Metadata<'a>,
}

impl Keys<'_> {
    fn key(key: &str) -> String {
        format!("{ARCHITECTURE}.{key}")
    }

    fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.metadata.u64(&Self::key(key))
    }

    fn f64(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.metadata.f64(&Self::key(key))
    }

    fn require_u64(&self, key: &str) -> Result<u64, GgufError> {
        self.metadata.require(&Self::key(key), self.u64(key)?)
    }

    fn require_f64(&self, key: &str) -> Result<f64, GgufError> {
        self.metadata.require(&Self::key(key), self.f64(key)?)
    }

    fn refuse(&self, key: &str, reason: String) -> GgufError {
        self.metadata.refuse(&Self::key(key), reason)
    }
}

fn head_dim(keys: &Keys<'_>, hidden_size: u64, heads: u64) -> Result<u64, GgufError> {
    let head_dim = match keys.u64("attention.key_length")? {
        Some(length) => length,
        None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let reason = format!("is {heads}, which does not divide the embedding_length {hidden_size}");
            return Err(keys.refuse("attention.head_count", reason));
        }
    };
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = keys.u64(key)?
            && other != head_dim
        {
            let reason = format!("is {other}, but heads are {head_dim} wide; only equal ones are supported");
            return Err(keys.refuse(key, reason));
        }
    }
    Ok(head_dim)
}

/// The kind of scaling by its metadata, or by the tensor of factors: a file has one of them.
fn rope_scaling(file: &GgufFile, keys: &Keys<'_>, head_dim: u64) -> Result<RopeScaling, GgufError> {
    let kind = keys.metadata.str(&Keys::key("rope.scaling.type"))?;
    let factor = match keys.f64("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The key of version 2 files.
        None => keys.f64("rope.scale_linear")?,
    };
    let factor_or_fail = || keys.metadata.require(&Keys::key("rope.scaling.factor"), factor);
    let scaling = match kind {
        Some("none") => RopeScaling::None,
        None if factor.is_none_or(|factor| factor == 1.0) => RopeScaling::None,
        None | Some("linear") => RopeScaling::Linear { factor: factor_or_fail()? },
        Some("yarn") => {
            let factor = factor_or_fail()?;
            let own = keys.f64("rope.scaling.attn_factor")?.unwrap_or(1.0);
            let original = "rope.scaling.original_context_length";
            RopeScaling::Yarn {
                factor,
                attention_factor: own * (0.1 * factor.max(1.0).ln() + 1.0),
                beta_fast: keys.f64("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: keys.f64("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                original_max_position_embeddings: keys.require_f64(original)?,
            }
        }
        Some(other) => {
            let reason = format!("is {}; supported are none, linear and yarn", Shown(other));
            return Err(keys.refuse("rope.scaling.type", reason));
        }
    };
    let Some(tensor) = file.tensor(ROPE_FACTORS) else { return Ok(scaling) };
    if scaling != RopeScaling::None {
        let reason =
            format!("asks for scaling, and so does the tensor {ROPE_FACTORS:?}; only one is supported");
        return Err(keys.refuse("rope.scaling.type", reason));
    }
    if tensor.dtype != DType::F32 || tensor.shape != [head_dim / 2] {
        let reason = format!(
            "is {:?} in {}; rotary factors are [{}] (half of a head) in f32",
            tensor.shape,
            tensor.dtype,
            head_dim / 2
        );
        return Err(tensor_error(file, tensor, reason));
    }
    let mut factors = vec![0.0f32; (head_dim / 2) as usize];
    convert(tensor.dtype, file.bytes(tensor), DType::F32, bytemuck::cast_slice_mut(&mut factors))
        .map_err(|error| tensor_error(file, tensor, error.to_string()))?;
    Ok(RopeScaling::PerFrequency { factors: factors.into_iter().map(f64::from).collect() })
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
