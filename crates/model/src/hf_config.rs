//! Hugging Face's `config.json` and `generation_config.json` to a model's shape, and back.
//!
//! Reads the families of `families` with the keys of old files (`rope_theta`, `rope_scaling`) and of new ones
//! (`rope_parameters`). A key that is null counts as absent. What a key could say that the shape has no words
//! for is refused by name, never ignored. Weights are left to `source`.

mod experts;
mod families;
mod keys;
mod latent;
mod rope;
mod write;

use std::io;
use std::path::{Path, PathBuf};

pub(crate) use experts::is_corrected;
pub(crate) use rope::{latent_scale_of, latent_yarn_weights, yarn_scale};
pub use write::{config_json, generation_config_json};

use crate::shown::Shown;
use crate::spec::{ModelSpec, SpecError};
use keys::Keys;

/// The file's name in a model's folder.
pub const CONFIG_NAME: &str = "config.json";
/// The name of the file with further end-of-sequence tokens.
pub const GENERATION_CONFIG_NAME: &str = "generation_config.json";

/// Values of `model_type` that are read.
pub const SUPPORTED_MODEL_TYPES: [&str; 21] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "phi3",
    "olmo2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    OWN_MIXTURE,
];

/// The `model_type` of mixtures in the shape of Llama whose routers may choose experts without matrices (MoE++).
pub(crate) const OWN_MIXTURE: &str = "plimsoll_moe";

/// Values of `model_type` that are known and not read, and what they have that is missing here.
const MISSING: [(&str, &str); 1] =
    [("deepseek_v32", "chooses the keys of each query by an indexer, which is not supported")];

/// What a family has that is missing here, by its `model_type`, if it is known for that.
pub fn missing_of(model_type: &str) -> Option<&'static str> {
    MISSING.iter().find(|(name, _)| *name == model_type).map(|(_, what)| *what)
}

/// A configuration that cannot be used. Names the file and the key.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// Far longer than any configuration.
    #[error("{}: has {len} bytes; a configuration has at most {limit}", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        len: u64,
        /// The longest that is read.
        limit: u64,
    },
    /// No JSON object.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A key is missing or its value cannot be used.
    #[error("{}: {key}: {reason}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key, with dots where it is nested.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A family of models that is not supported.
    #[error(
        "{}: model_type {found:?} is not supported; supported: {} (nearest: {nearest:?})",
        path.display(), SUPPORTED_MODEL_TYPES.join(", ")
    )]
    UnsupportedModelType {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: String,
        /// The supported type that is most like it.
        nearest: &'static str,
    },
    /// The sizes cannot be.
    #[error("{}: {source}", path.display())]
    Spec {
        /// The file.
        path: PathBuf,
        /// Which one.
        source: SpecError,
    },
}

/// The shape of the model in a folder, by its `config.json`; `generation_config.json` may add end-of-sequence
/// tokens.
pub fn read_config(folder: &Path, name: String) -> Result<ModelSpec, ConfigError> {
    let config = Keys::read(&folder.join(CONFIG_NAME))?;
    let mut spec = model_spec(&config, name)?;
    let generation = folder.join(GENERATION_CONFIG_NAME);
    if generation.is_file() {
        for token in token_ids(&Keys::read(&generation)?, "eos_token_id", spec.vocab_size)? {
            if !spec.eos_tokens.contains(&token) {
                spec.eos_tokens.push(token);
            }
        }
    }
    Ok(spec)
}

/// The shape in a `config.json` that lies anywhere.
pub fn read_config_file(path: &Path, name: String) -> Result<ModelSpec, ConfigError> {
    model_spec(&Keys::read(path)?, name)
}

/// The shape that the text of a `config.json` describes; `path` is for errors.
pub fn parse_config(path: &Path, text: &str, name: String) -> Result<ModelSpec, ConfigError> {
    model_spec(&Keys::parse(path, text)?, name)
}

/// How a checkpoint's linears are packed, by the `quantization_config` of its `config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Quantization {
    /// bitsandbytes, 4 or 8 bits: the tensors say which.
    BitsAndBytes,
    /// GPTQ.
    Gptq {
        /// Bits of a code.
        bits: usize,
        /// Whether zero points are stored as they are, and not less 1.
        second_version: bool,
    },
    /// AWQ, 4 bits, arranged for matrix products.
    Awq,
    /// Blocks of 32 values with a power of two as scale: the experts of gpt-oss.
    Mxfp4,
    /// Codes of 4 and 8 bits with factors beside them.
    Scaled(Grouping),
}

/// What shares a factor, as far as the configuration says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Grouping {
    /// Rows and columns of a block.
    pub block: Option<[usize; 2]>,
    /// Columns of a group of a row.
    pub group: Option<usize>,
}

/// The packing of the checkpoint in a folder, if any.
pub(crate) fn read_quantization(folder: &Path) -> Result<Option<Quantization>, ConfigError> {
    quantization(&Keys::read(&folder.join(CONFIG_NAME))?)
}

fn quantization(config: &Keys) -> Result<Option<Quantization>, ConfigError> {
    let Some(keys) = config.object("quantization_config")? else { return Ok(None) };
    let method = match keys.str("quant_method")? {
        Some(method) => method,
        // Old versions of transformers wrote no method.
        None if keys.has("load_in_4bit") || keys.has("load_in_8bit") => "bitsandbytes",
        None => "an unnamed method",
    };
    match method {
        "bitsandbytes" => Ok(Some(Quantization::BitsAndBytes)),
        "mxfp4" => Ok(Some(Quantization::Mxfp4)),
        "gptq" => {
            let bits = keys.require_u64("bits")?;
            if ![2, 4, 8].contains(&bits) {
                return Err(keys.refuse("bits", format!("is {bits}; 2, 4 and 8 are supported")));
            }
            let second_version = match keys.str("checkpoint_format")? {
                None | Some("gptq") => false,
                Some("gptq_v2") => true,
                Some(other) => {
                    let reason = format!("is {}; gptq and gptq_v2 are supported", Shown(other));
                    return Err(keys.refuse("checkpoint_format", reason));
                }
            };
            Ok(Some(Quantization::Gptq { bits: bits as usize, second_version }))
        }
        "awq" => {
            let bits = keys.u64("bits")?.unwrap_or(4);
            if bits != 4 {
                return Err(keys.refuse("bits", format!("is {bits}; AWQ is supported with 4")));
            }
            match keys.str("version")?.map(str::to_lowercase).as_deref() {
                None | Some("gemm") => Ok(Some(Quantization::Awq)),
                Some(other) => Err(keys.refuse("version", format!("is {}; gemm is supported", Shown(other)))),
            }
        }
        "fp8" => {
            let block = match keys.has("weight_block_size") {
                true => block_of(&keys, "weight_block_size")?,
                false => Some([128; 2]),
            };
            Ok(Some(Quantization::Scaled(Grouping { block, group: None })))
        }
        "fbgemm_fp8" => Ok(Some(Quantization::Scaled(Grouping::default()))),
        "compressed-tensors" => compressed_tensors(&keys).map(Some),
        "modelopt" => match keys.str("quant_algo")? {
            None | Some("FP8" | "NVFP4") => Ok(Some(Quantization::Scaled(Grouping::default()))),
            Some(other) => {
                Err(keys.refuse("quant_algo", format!("is {}; FP8 and NVFP4 are read", Shown(other))))
            }
        },
        other => {
            let reason = format!(
                "the weights are quantised by {}; bitsandbytes, gptq, awq, mxfp4, fp8, fbgemm_fp8, compressed-tensors and \
                 modelopt are read; use the original weights",
                Shown(other)
            );
            Err(config.refuse("quantization_config", reason))
        }
    }
}

/// Rows and columns that share a factor, as a list or, in old versions, `128x128`; `None` for null.
fn block_of(keys: &Keys, key: &str) -> Result<Option<[usize; 2]>, ConfigError> {
    let sizes: Option<Vec<u64>> = match keys.str(key) {
        Ok(None) => return Ok(None),
        Ok(Some(text)) => text.split('x').map(|size| size.trim().parse().ok()).collect(),
        Err(_) => keys.numbers(key)?,
    };
    match sizes.as_deref() {
        Some([rows, columns]) if *rows > 0 && *columns > 0 => Ok(Some([*rows as usize, *columns as usize])),
        _ => Err(keys.refuse(key, "is not the rows and columns of a block, as [128, 128]".to_owned())),
    }
}

/// Which of the formats of compressed-tensors it is, and the blocks of its groups of layers.
fn compressed_tensors(keys: &Keys) -> Result<Quantization, ConfigError> {
    const FORMATS: [&str; 8] = [
        "float-quantized",
        "int-quantized",
        "naive-quantized",
        "pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    ];
    if let Some(format) = keys.str("format")?
        && !FORMATS.contains(&format)
    {
        let reason = format!("is {}; {} are read", Shown(format), FORMATS.join(", "));
        return Err(keys.refuse("format", reason));
    }
    if let Some(sparsity) = keys.object("sparsity_config")?
        && let Some(format) = sparsity.str("format")?.filter(|format| *format != "dense")
    {
        let reason = format!("is {}; weights that leave zeros out are not read", Shown(format));
        return Err(sparsity.refuse("format", reason));
    }
    let transforms = keys.object("transform_config")?.map(|transforms| transforms.objects("config_groups"));
    if transforms.transpose()?.is_some_and(|groups| !groups.is_empty()) {
        let reason = "turns activations before the products, which is not supported".to_owned();
        return Err(keys.refuse("transform_config", reason));
    }
    let mut all = Grouping::default();
    for group in keys.objects("config_groups")? {
        let Some(weights) = group.object("weights")? else { continue };
        if let Some(other) = weights.u64("num_bits")?.filter(|bits| ![4, 8].contains(bits)) {
            return Err(weights.refuse("num_bits", format!("is {other}; 4 and 8 are read")));
        }
        let own = Grouping {
            block: block_of(&weights, "block_structure")?,
            group: match weights.str("strategy")? {
                Some("group" | "tensor_group") => weights.u64("group_size")?.map(|size| size.max(1) as usize),
                _ => None,
            },
        };
        let others = |key| {
            let reason =
                "has another size than in another group of layers, which is not supported".to_owned();
            Err(weights.refuse(key, reason))
        };
        if all.block.is_some() && own.block.is_some() && all.block != own.block {
            return others("block_structure");
        }
        if all.group.is_some() && own.group.is_some() && all.group != own.group {
            return others("group_size");
        }
        all = Grouping { block: all.block.or(own.block), group: all.group.or(own.group) };
    }
    Ok(Quantization::Scaled(all))
}

fn model_spec(config: &Keys, name: String) -> Result<ModelSpec, ConfigError> {
    let model_type = config.require("model_type", config.str("model_type")?)?;
    // The language model of a multimodal one is configured inside.
    if let ("gemma3", Some(text)) = (model_type, config.object("text_config")?) {
        let reason = format!(
            "is multimodal; its language model alone is supported: save that with transformers ({})",
            text.str("model_type")?.unwrap_or("gemma3_text")
        );
        return Err(config.refuse("model_type", reason));
    }
    // Kimi K2's configuration differs in the name alone.
    let model_type = if model_type == "kimi_k2" { "deepseek_v3" } else { model_type };
    if let Some(what) = missing_of(model_type) {
        return Err(config.refuse("model_type", format!("{model_type} {what}")));
    }
    if !SUPPORTED_MODEL_TYPES.contains(&model_type) {
        return Err(ConfigError::UnsupportedModelType {
            path: config.path().to_owned(),
            found: model_type.to_owned(),
            nearest: nearest(model_type, &SUPPORTED_MODEL_TYPES),
        });
    }
    quantization(config)?;
    let mut spec = families::read(config, model_type, name)?;
    spec.check().map_err(|source| ConfigError::Spec { path: config.path().to_owned(), source })?;
    // After the sizes: an impossible vocabulary is the error to name, not the ids outside it.
    spec.bos_token = token_ids(config, "bos_token_id", spec.vocab_size)?.first().copied();
    spec.eos_tokens = token_ids(config, "eos_token_id", spec.vocab_size)?;
    Ok(spec)
}

/// A key that holds a token id, a list of them, or nothing. Negative ids mean none.
fn token_ids(config: &Keys, key: &str, vocab_size: u64) -> Result<Vec<u32>, ConfigError> {
    let mut tokens = Vec::new();
    for id in config.integers(key)? {
        match u32::try_from(id) {
            Ok(token) if u64::from(token) < vocab_size => {
                if !tokens.contains(&token) {
                    tokens.push(token);
                }
            }
            Err(_) if id < 0 => {}
            _ => {
                let reason = format!("{id} is outside the vocabulary of {vocab_size} tokens");
                return Err(config.refuse(key, reason));
            }
        }
    }
    Ok(tokens)
}

/// The supported name that is most like the one found.
pub(crate) fn nearest(found: &str, supported: &[&'static str]) -> &'static str {
    let found = found.to_lowercase();
    let likeness = |name: &&'static str| strsim::jaro_winkler(name, &found);
    supported.iter().copied().max_by(|a, b| likeness(a).total_cmp(&likeness(b))).unwrap_or("llama")
}
