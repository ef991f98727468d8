//! `model`: a pretrained model, or the sizes of one to train from scratch.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde::Serializer;
use serde::ser::SerializeMap;
use serde_saphyr::Spanned;

use super::document::{Input, Node, Yaml};
use super::section::section;
use super::value::{ConfigValue, Mismatch, because, choice, mismatch};

section! {
    /// The model: either `path` or `from_scratch`. In a file `model: PATH` may be written for `model: {path: PATH}`.
    pub struct ModelConfig at "model" {
        /// A Hugging Face folder, a GGUF file, a model of the catalogue or a hub id.
        path: String, "none; from_scratch is given instead";
    }
    sections {
        /// Sizes of a model whose weights are drawn at random.
        from_scratch: FromScratchConfig;
    }
}

section! {
    /// Sizes of a model whose weights are drawn at random, in the words of Hugging Face's `config.json`.
    pub struct FromScratchConfig at "model.from_scratch" {
        /// The family.
        architecture: Architecture = Architecture::Llama;
        /// Rows of the embedding.
        vocab_size: u64, "the tokenizer's", COUNT;
        /// Width of the residual stream.
        hidden_size: u64, "none; required", COUNT;
        /// Inner width of the feed-forward part.
        intermediate_size: u64, "none; required", COUNT;
        /// Experts of a block, in a mixture of experts.
        num_experts: u64, "none; required for mixtral, qwen2_moe, qwen3_moe, olmoe, glm4_moe, deepseek_v3 and moe", EXPERTS;
        /// Experts that a token goes to.
        num_experts_per_token: u64 = 2, TOKEN_EXPERTS;
        /// Inner width of an expert; in mixtral and olmoe it is intermediate_size.
        expert_intermediate_size: u64, "intermediate_size", COUNT;
        /// Experts that every token goes through besides, as one of their width together.
        shared_experts: u64, "1 in qwen2_moe, glm4_moe and deepseek_v3, else 0", SHARED_EXPERTS;
        /// Experts that give nothing, among which routers of moe choose as well (MoE++).
        zero_experts: u64 = 0, SHARED_EXPERTS;
        /// Experts that give their input, in moe.
        copy_experts: u64 = 0, SHARED_EXPERTS;
        /// Experts that give a mixture of their input and a vector of their own, in moe.
        constant_experts: u64 = 0, SHARED_EXPERTS;
        /// Whether a router of moe adds to its logits a matrix times those of the layer before.
        gating_residuals: bool, "true where moe has zero, copy or constant experts, else false";
        /// What an expert with matrices gets of tokens where one without gets 1, in the balance and in capacities of moe.
        tau: f64 = 0.75, POSITIVE;
        /// The first blocks, which have a feed-forward part and no experts.
        dense_layers: u64 = 0, LAYERS_OR_NONE;
        /// Whether the weights of a token's experts are divided by their sum.
        norm_topk_prob: bool, "true for mixtral, qwen3_moe, glm4_moe and deepseek_v3, else false";
        /// Factor on the load-balancing loss.
        router_aux_loss_coef: f64, "0.01; 0 for glm4_moe and deepseek_v3", NOT_NEGATIVE;
        /// Number of transformer blocks.
        num_hidden_layers: u64, "none; required", LAYERS;
        /// Query heads of a block.
        num_attention_heads: u64, "none; required", COUNT;
        /// Key and value heads of a block; divides num_attention_heads.
        num_key_value_heads: u64, "num_attention_heads", COUNT;
        /// Width of a head; in deepseek_v3 of its queries and keys.
        head_dim: u64, "hidden_size / num_attention_heads", COUNT;
        /// Width of a head's rotated part in deepseek_v3.
        qk_rope_head_dim: u64, "half of head_dim, rounded up to an even number", COUNT;
        /// Width of a head's values in deepseek_v3.
        v_head_dim: u64, "head_dim", COUNT;
        /// Width of the vector that keys and values are made of in deepseek_v3.
        kv_lora_rank: u64, "hidden_size / 4, rounded up", COUNT;
        /// Width of the vector that queries are made of in deepseek_v3.
        q_lora_rank: u64, "none: queries come from the stream itself", COUNT;
        /// The longest sequence that the model is made for.
        max_position_embeddings: u64, "data.sequence_length", COUNT;
        /// Base of the rotary embedding's frequencies.
        rope_theta: f64 = 10000.0, POSITIVE;
        /// Added to the mean square in RMSNorm, or to the variance in LayerNorm.
        rms_norm_eps: f64 = 1e-5, POSITIVE;
        /// Whether the output head is the embedding's matrix.
        tie_word_embeddings: bool, "true for gemma, gemma2, gemma3 and gpt2, else false";
        /// Standard deviation of the first weights.
        initializer_range: f64 = 0.02, POSITIVE;
        /// The built-in tokenizer of single bytes, a folder with a tokenizer.json, a GGUF file with a tokenizer, or byte-level BPE that is trained on data.train first, with that many tokens at most.
        tokenizer: TokenizerSource = TokenizerSource::ByteLevel;
    }
}

choice! {
    /// Families that can be trained from scratch.
    pub enum Architecture {
        /// Llama: RMSNorm, rotary embedding, SwiGLU, grouped key and value heads.
        Llama = "llama",
        /// Mistral: Llama within a sliding window of 4096 tokens.
        Mistral = "mistral",
        /// Qwen 2: Llama with biases on queries, keys and values.
        Qwen2 = "qwen2",
        /// Qwen 3: Llama with norms of queries and keys.
        Qwen3 = "qwen3",
        /// Gemma: GeGLU, scaled embeddings, tied by default.
        Gemma = "gemma",
        /// Gemma 2: norms around each part, soft caps, every second layer within a window.
        Gemma2 = "gemma2",
        /// Gemma 3: norms of queries and keys, five layers of six within a window.
        Gemma3 = "gemma3",
        /// GPT-2: LayerNorm, learned positions, GELU, biases.
        Gpt2 = "gpt2",
        /// Phi 3: Llama with fused matrices.
        Phi3 = "phi3",
        /// OLMo 2: norms after each part, and of queries and keys.
        Olmo2 = "olmo2",
        /// Mixtral: Mistral without a window, with experts in the place of feed-forward parts.
        Mixtral = "mixtral",
        /// Qwen 2 with experts beside a shared one, which the token weighs.
        Qwen2Moe = "qwen2_moe",
        /// Qwen 3 with experts.
        Qwen3Moe = "qwen3_moe",
        /// OLMoE: norms of queries and keys, and experts.
        Olmoe = "olmoe",
        /// GLM 4.5: experts by sigmoid, beside shared ones; half of each head rotated.
        Glm4Moe = "glm4_moe",
        /// DeepSeek-V3: latent attention, experts by sigmoid, beside shared ones.
        DeepseekV3 = "deepseek_v3",
        /// Llama with experts, shared ones where they are asked for, and experts without matrices (MoE++).
        Moe = "moe",
    }
}

impl Architecture {
    /// What a `config.json` calls it.
    pub fn model_type(self) -> &'static str {
        match self {
            Architecture::Gemma3 => "gemma3_text",
            Architecture::Moe => "plimsoll_moe",
            _ => self.name(),
        }
    }

    /// Whether the output head is usually the embedding's matrix.
    pub fn ties_embeddings(self) -> bool {
        use Architecture::{Gemma, Gemma2, Gemma3, Gpt2};
        matches!(self, Gemma | Gemma2 | Gemma3 | Gpt2)
    }

    /// Whether heads may have another width than their share of `hidden_size`.
    pub fn has_head_dim(self) -> bool {
        use Architecture::{Gpt2, Olmo2, Olmoe, Phi3, Qwen2Moe};
        !matches!(self, Gpt2 | Phi3 | Olmo2 | Olmoe | Qwen2Moe)
    }

    /// Whether blocks have experts.
    pub fn has_experts(self) -> bool {
        use Architecture::{DeepseekV3, Glm4Moe, Mixtral, Moe, Olmoe, Qwen2Moe, Qwen3Moe};
        matches!(self, Mixtral | Qwen2Moe | Qwen3Moe | Olmoe | Glm4Moe | DeepseekV3 | Moe)
    }
}

/// Where the tokenizer of a model from scratch comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub enum TokenizerSource {
    /// One token a byte; built in.
    #[serde(rename = "byte-level")]
    ByteLevel,
    /// Byte-level BPE that is trained on the data: `{train: bpe, vocab_size: 32000}`.
    #[serde(untagged, serialize_with = "serialize_train")]
    Train {
        /// Tokens at most.
        vocab_size: u64,
    },
    /// A folder with a `tokenizer.json`, or a GGUF file, of which the tokenizer alone is read.
    #[serde(untagged)]
    Path(PathBuf),
}

/// The kind of tokenizer that can be trained.
const BPE: &str = "bpe";

/// Sizes of trained vocabularies: single bytes and the end of a text, and more than any in use.
const TRAINED_SIZES: RangeInclusive<u64> = 257..=1 << 20;

fn serialize_train<S: Serializer>(vocab_size: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(2))?;
    map.serialize_entry("train", BPE)?;
    map.serialize_entry("vocab_size", vocab_size)?;
    map.end()
}

impl TokenizerSource {
    fn read_train(input: Input<'_>, entries: &[(Spanned<String>, Node)]) -> Result<Self, Mismatch> {
        let (mut kind, mut size) = (None, None);
        for (key, node) in entries {
            let at = Input { node, ..input };
            match key.value.as_str() {
                "train" if matches!(&node.value, Yaml::Text(text) if text == BPE) => kind = Some(()),
                "vocab_size" => size = u64::read(at).ok().filter(|size| TRAINED_SIZES.contains(size)),
                _ => return Err(because::<Self>(at, format!("{}: {}", key.value, at.describe()))),
            }
        }
        match (kind, size) {
            (Some(()), Some(vocab_size)) => Ok(TokenizerSource::Train { vocab_size }),
            _ => Err(mismatch::<Self>(input)),
        }
    }
}

impl ConfigValue for TokenizerSource {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        if let Yaml::Map(entries) = &input.node.value {
            return Self::read_train(input, entries);
        }
        let path = PathBuf::read(input).map_err(|inner| Mismatch { expected: Self::describe(), ..inner })?;
        Ok(if path.as_os_str() == "byte-level" {
            TokenizerSource::ByteLevel
        } else {
            TokenizerSource::Path(path)
        })
    }
    fn describe() -> String {
        format!(
            "byte-level | folder | .gguf file | {{train: bpe, vocab_size: {} to {}}}",
            TRAINED_SIZES.start(),
            TRAINED_SIZES.end()
        )
    }
    fn text(&self) -> String {
        match self {
            TokenizerSource::ByteLevel => "byte-level".to_owned(),
            TokenizerSource::Train { vocab_size } => format!("{{train: {BPE}, vocab_size: {vocab_size}}}"),
            TokenizerSource::Path(path) => path.text(),
        }
    }
}
