//! What a decoder-only transformer is, as data: every family that one configurable block covers.
//!
//! A `ModelSpec` comes from a `config.json`, a GGUF header, the catalogue, or the user's own sizes. The step
//! program reads it and nothing else; how weights are stored is told elsewhere.

use std::fmt;

use crate::parameters::BlockId;

/// 2^50: a thousand times the largest models, and small enough that no size in bytes overflows.
const MAX_PARAMETERS: u128 = 1 << 50;

/// A model's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// What to call it in reports: a folder's or file's name, or the catalogue's.
    pub name: String,
    /// The architecture's name as Hugging Face's `model_type` has it: `llama`.
    pub architecture: String,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Number of transformer blocks.
    pub num_layers: u32,
    /// Attention of every block.
    pub attention: AttentionSpec,
    /// Feed-forward part of every block.
    pub mlp: MlpSpec,
    /// Normalisation before attention, before the feed-forward part, and before the head.
    pub norm: NormSpec,
    /// Whether the head uses the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// The longest sequence that the model was made for.
    pub max_position_embeddings: u64,
    /// Standard deviation of the normal distribution that weights are drawn from at first.
    pub initializer_range: f64,
    /// Beginning-of-sequence token.
    pub bos_token: Option<u32>,
    /// End-of-sequence tokens; the first one ends documents.
    pub eos_tokens: Vec<u32>,
}

/// Multi-head attention with grouped key and value heads.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Width of a head; `heads * head_dim` need not be the hidden size.
    pub head_dim: u64,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Rotary position embedding.
    pub rope: RopeSpec,
}

/// Rotary position embedding, "rotate half" layout (dimension i is paired with i + dim/2).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// How positions beyond the original context are treated.
    pub scaling: RopeScaling,
}

/// The kinds of `rope_scaling` (`rope_type` in newer files).
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum RopeScaling {
    None,
    Linear {
        factor: f64,
    },
    Dynamic {
        factor: f64,
        /// Context beyond which the base grows.
        max_position_embeddings: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: f64,
    },
    Yarn {
        factor: f64,
        attention_factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_max_position_embeddings: f64,
    },
    LongRope {
        short_factor: Vec<f64>,
        long_factor: Vec<f64>,
        attention_factor: f64,
        original_max_position_embeddings: f64,
    },
    /// Every inverse frequency divided by its own factor (GGUF's `rope_freqs.weight`).
    PerFrequency {
        factors: Vec<f64>,
    },
}

/// The feed-forward part.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpSpec {
    /// Its inner width.
    pub intermediate_size: u64,
    /// The non-linearity.
    pub activation: Activation,
    /// Whether it is gated: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
    pub gated: bool,
    /// Whether its linears have biases.
    pub bias: bool,
}

/// Non-linearities of the feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// The exact GELU, with erf.
    Gelu,
    /// The tanh approximation (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
}

/// Normalisation over the hidden dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct NormSpec {
    /// RMSNorm or LayerNorm.
    pub kind: NormKind,
    /// Added to the variance.
    pub epsilon: f64,
}

/// The kinds of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// x / rms(x) * weight
    Rms,
    /// (x - mean) / std * weight + bias
    Layer,
}

/// A shape that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct SpecError {
    /// The configuration key that is wrong, in Hugging Face's words.
    pub key: &'static str,
    /// What is wrong with it.
    pub reason: String,
}

impl RopeScaling {
    /// What is wrong with the numbers, for heads of `pairs` rotated pairs.
    fn problem(&self, pairs: u64) -> Option<String> {
        let (numbers, lists): (Vec<f64>, Vec<&[f64]>) = match self {
            RopeScaling::None => return None,
            RopeScaling::Linear { factor } => (vec![*factor], vec![]),
            RopeScaling::Dynamic { factor, max_position_embeddings } => {
                (vec![*factor, *max_position_embeddings], vec![])
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                if low_freq_factor >= high_freq_factor {
                    return Some(format!(
                        "low_freq_factor {low_freq_factor} is not below high_freq_factor {high_freq_factor}"
                    ));
                }
                let original = *original_max_position_embeddings;
                (vec![*factor, *low_freq_factor, *high_freq_factor, original], vec![])
            }
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings,
            } => {
                let original = *original_max_position_embeddings;
                (vec![*factor, *attention_factor, *beta_fast, *beta_slow, original], vec![])
            }
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                attention_factor,
                original_max_position_embeddings,
            } => (
                vec![*attention_factor, *original_max_position_embeddings],
                vec![short_factor.as_slice(), long_factor.as_slice()],
            ),
            RopeScaling::PerFrequency { factors } => (vec![], vec![factors.as_slice()]),
        };
        if let Some(list) = lists.iter().find(|list| list.len() as u64 != pairs) {
            return Some(format!("{} factors for the {pairs} frequencies of a head", list.len()));
        }
        let mut all = numbers.iter().chain(lists.into_iter().flatten());
        let wrong = all.find(|number| !(number.is_finite() && **number > 0.0))?;
        Some(format!("{wrong} is not a positive number"))
    }
}

impl ModelSpec {
    /// Width of the query projection's output.
    pub fn q_size(&self) -> u64 {
        self.attention.heads * self.attention.head_dim
    }

    /// Width of the key and of the value projection's output.
    pub fn kv_size(&self) -> u64 {
        self.attention.kv_heads * self.attention.head_dim
    }

    /// Number of parameters, a tied head counted once.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().iter().map(|p| p.elements()).sum()
    }

    /// Refuses shapes that cannot be computed or whose sizes overflow.
    pub fn check(&self) -> Result<(), SpecError> {
        let fail = |key, reason: fmt::Arguments<'_>| Err(SpecError { key, reason: reason.to_string() });
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", u64::from(self.num_layers)),
            ("num_attention_heads", self.attention.heads),
            ("num_key_value_heads", self.attention.kv_heads),
            ("head_dim", self.attention.head_dim),
            ("intermediate_size", self.mlp.intermediate_size),
        ] {
            if value == 0 {
                return fail(key, format_args!("must be at least 1"));
            }
            if value > 1 << 28 {
                return fail(key, format_args!("{value} is beyond any model (at most {})", 1 << 28));
            }
        }
        if self.num_layers > 1 << 16 {
            return fail("num_hidden_layers", format_args!("{} is beyond any model", self.num_layers));
        }
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.attention;
        if !heads.is_multiple_of(kv_heads) {
            return fail(
                "num_key_value_heads",
                format_args!("{kv_heads} does not divide num_attention_heads {heads}"),
            );
        }
        if !head_dim.is_multiple_of(2) {
            return fail("head_dim", format_args!("{head_dim} is odd; rotary embedding needs pairs"));
        }
        if head_dim > 512 {
            return fail("head_dim", format_args!("{head_dim} is larger than 512"));
        }
        if !(self.norm.epsilon.is_finite() && self.norm.epsilon >= 0.0) {
            return fail(
                "rms_norm_eps",
                format_args!("{} is not a small positive number", self.norm.epsilon),
            );
        }
        if !(self.attention.rope.theta.is_finite() && self.attention.rope.theta > 0.0) {
            return fail("rope_theta", format_args!("{} is not positive", self.attention.rope.theta));
        }
        if let Some(reason) = self.attention.rope.scaling.problem(head_dim / 2) {
            return fail("rope_scaling", format_args!("{reason}"));
        }
        // Sizes are added up in u64 everywhere else; a layer stands for all of them.
        let elements = |block| -> u128 {
            let product = |shape: &[u64]| shape.iter().map(|size| u128::from(*size)).product::<u128>();
            self.block_parameters(block).iter().map(|parameter| product(&parameter.shape)).sum()
        };
        let layers = u128::from(self.num_layers) * elements(BlockId::Layer(0));
        let total = elements(BlockId::Embedding) + layers + elements(BlockId::Head);
        if total > MAX_PARAMETERS {
            return fail(
                "hidden_size",
                format_args!("makes a model of {total} parameters, beyond any computer"),
            );
        }
        Ok(())
    }
}
