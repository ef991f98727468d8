//! `model`: a pretrained model, or the sizes of one to train from scratch.

use std::path::PathBuf;

use super::document::Input;
use super::section::section;
use super::value::{ConfigValue, Mismatch, choice};

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
        /// Number of transformer blocks.
        num_hidden_layers: u64, "none; required", LAYERS;
        /// Query heads of a block.
        num_attention_heads: u64, "none; required", COUNT;
        /// Key and value heads of a block; divides num_attention_heads.
        num_key_value_heads: u64, "num_attention_heads", COUNT;
        /// Width of a head.
        head_dim: u64, "hidden_size / num_attention_heads", COUNT;
        /// The longest sequence that the model is made for.
        max_position_embeddings: u64, "data.sequence_length", COUNT;
        /// Base of the rotary embedding's frequencies.
        rope_theta: f64 = 10000.0, POSITIVE;
        /// Added to the mean square in RMSNorm.
        rms_norm_eps: f64 = 1e-5, POSITIVE;
        /// Whether the output head is the embedding's matrix.
        tie_word_embeddings: bool = false;
        /// Standard deviation of the first weights.
        initializer_range: f64 = 0.02, POSITIVE;
        /// The built-in tokenizer of single bytes, a folder with a tokenizer.json, or a GGUF file with a tokenizer.
        tokenizer: TokenizerSource = TokenizerSource::ByteLevel;
    }
}

choice! {
    /// Families that can be trained from scratch.
    pub enum Architecture {
        /// Llama: RMSNorm, rotary embedding, SwiGLU, grouped key and value heads.
        Llama = "llama",
    }
}

/// Where the tokenizer of a model from scratch comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub enum TokenizerSource {
    /// One token a byte; built in.
    #[serde(rename = "byte-level")]
    ByteLevel,
    /// A folder with a `tokenizer.json`, or a GGUF file, of which the tokenizer alone is read.
    #[serde(untagged)]
    Path(PathBuf),
}

impl ConfigValue for TokenizerSource {
    fn read(input: Input<'_>) -> Result<Self, Mismatch> {
        let path = PathBuf::read(input).map_err(|inner| Mismatch { expected: Self::describe(), ..inner })?;
        Ok(if path.as_os_str() == "byte-level" {
            TokenizerSource::ByteLevel
        } else {
            TokenizerSource::Path(path)
        })
    }
    fn describe() -> String {
        "byte-level | folder | .gguf file".to_owned()
    }
    fn text(&self) -> String {
        match self {
            TokenizerSource::ByteLevel => "byte-level".to_owned(),
            TokenizerSource::Path(path) => path.text(),
        }
    }
}
