//! What a decoder-only transformer is, as data: every family that one configurable block covers.
//!
//! A `ModelSpec` comes from a `config.json`, a GGUF header, the catalogue, or the user's own sizes. The step
//! program reads it and nothing else; how weights are stored is told elsewhere.

use std::fmt;
use std::ops::Range;

use plimsoll_device::{MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, MAX_HEAD_DIM, ZeroExperts};

use crate::parameters::{BlockId, Parameter};

/// 2^50: a thousand times the largest models, and small enough that no size in bytes overflows.
const MAX_PARAMETERS: u128 = 1 << 50;

/// Heads of latent attention at most: in GGUF files each has a place of its own.
const MAX_LATENT_HEADS: u64 = 1 << 10;

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
    /// Which of a larger model's blocks these are; all, but for a stage of a pipeline.
    pub part: ModelPart,
    /// Attention of every block.
    pub attention: AttentionSpec,
    /// Feed-forward part of every block; where a block has experts, what they have in common with such a part.
    pub mlp: MlpSpec,
    /// Experts in the place of feed-forward parts, in a mixture of experts.
    pub experts: Option<ExpertsSpec>,
    /// Normalisation in the blocks and before the head.
    pub norm: NormSpec,
    /// Factor on the token embeddings (Gemma: sqrt(hidden_size)).
    pub embedding_scale: Option<f64>,
    /// Logits become cap * tanh(logit / cap).
    pub logit_soft_cap: Option<f64>,
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

/// A part of a model: some of its layers, and what comes before or behind all of them; of the tables perhaps no more than some rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelPart {
    /// The numbers of its layers in the whole model, in runs of layers that follow each other; none where it has all of them.
    pub runs: Vec<Range<u32>>,
    /// Whether it begins with the embedding.
    pub embedding: bool,
    /// Whether it ends with the head.
    pub head: bool,
    /// The first row of the tables, and the one behind the last, where it does not have all.
    pub vocabulary: Option<(u64, u64)>,
    /// The first of a layer's experts, and the one behind the last, where it does not have all. Routers choose among all.
    pub experts: Option<(u64, u64)>,
}

impl ModelPart {
    /// All of a model.
    pub const WHOLE: ModelPart =
        ModelPart { runs: Vec::new(), embedding: true, head: true, vocabulary: None, experts: None };
}

impl Default for ModelPart {
    fn default() -> Self {
        ModelPart::WHOLE
    }
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
    /// Normalisation of queries and keys before they are rotated.
    pub qk_norm: Option<QkNorm>,
    /// Rotary position embedding; without it, learned positions are added to the token embedding.
    pub rope: Option<RopeSpec>,
    /// That of the layers with a sliding window, where it is another (Gemma 3).
    pub local_rope: Option<RopeSpec>,
    /// Layers that see a part of the past only.
    pub sliding_window: Option<SlidingWindow>,
    /// Factor on the scores; 1 / sqrt(head_dim) where `None`.
    pub scale: Option<f64>,
    /// Scores become cap * tanh(score / cap).
    pub soft_cap: Option<f64>,
    /// Whether each head has a sink: one more score, learned, which takes part in the softmax and has no value (gpt-oss).
    pub sinks: bool,
    /// Whether keys and values are made of a narrow vector, and how.
    pub latent: Option<LatentAttention>,
}

/// Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads are products of one normed vector of a token. Every
/// head has keys and values of its own. The last values of its queries and keys are rotated, in pairs that lie next to each other, as many
/// as [`RopeSpec::dims`] says; these of the keys are the same for all heads and do not come from the vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentAttention {
    /// Width of the normed vector that queries are products of; `None` where they are products of the block's normed input.
    pub query_rank: Option<u64>,
    /// Width of the vector that keys and values are products of.
    pub kv_rank: u64,
    /// Width of a head's values, at most that of its keys.
    pub value_dim: u64,
}

/// What of queries and keys an RMSNorm of their own sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself, with one weight for all heads (Qwen 3, Gemma 3).
    PerHead,
    /// All heads of a token together (OLMo 2).
    Whole,
}

impl LatentAttention {
    /// The epsilon of the norms of narrow vectors, whatever that of the others is.
    pub const NORM_EPSILON: f64 = 1e-6;
}

/// A window over the past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Positions that a token sees, its own included.
    pub size: u64,
    /// For each layer whether it has the window.
    pub layers: Vec<bool>,
}

/// Rotary position embedding, "rotate half" layout (dimension i is paired with i + dims/2).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Dimensions of a head that are rotated: its first ones, the last ones in latent attention.
    pub dims: u64,
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
        /// Whether the ramp between turning and stretched dimensions begins and ends with whole ones.
        truncate: bool,
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

/// Experts in the place of a feed-forward part (Shazeer et al. 2017): a router sends each token to a few of them, and their
/// outputs are added up with the router's weights. Activation, gate and biases are those of [`MlpSpec`].
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// Experts of a layer.
    pub count: u64,
    /// Experts that a token goes to.
    pub per_token: u64,
    /// Inner width of an expert.
    pub intermediate_size: u64,
    /// A feed-forward part beside them that every token goes through.
    pub shared: Option<SharedExpert>,
    /// Experts without matrices, which routers choose among as well (MoE++).
    pub zero_computation: Option<ZeroComputationSpec>,
    /// How experts are chosen and weighed.
    pub router: RouterSpec,
    /// For each layer whether it has experts; the others have a feed-forward part.
    pub layers: Vec<bool>,
    /// Whether Hugging Face files keep the matrices of all experts of a layer as one tensor.
    pub stacked_files: bool,
}

/// What distinguishes the layers of a model from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// Positions that a token sees, its own included; `None` for all before it.
    pub window: Option<u64>,
    /// Whether the layer has experts.
    pub experts: bool,
    /// Whether its router reads what that of a layer before said.
    pub gating_residual: bool,
}

/// Experts without matrices beside those with them, and what routers have for these (MoE++, Jin et al. 2024). They have the numbers
/// behind the others: zero experts give nothing, those that copy give their input, constant ones a mixture of it with a vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ZeroComputationSpec {
    /// Zero experts of a layer.
    pub zero: u64,
    /// Experts that copy.
    pub copy: u64,
    /// Constant experts.
    pub constant: u64,
    /// Whether a router adds to its logits a matrix times the logits of the layer with experts before.
    pub gating_residuals: bool,
    /// tau: what an expert with matrices gets of tokens where one without gets 1, in the balance and in capacities.
    pub tau: f64,
}

/// What every token goes through beside its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its inner width.
    pub intermediate_size: u64,
    /// Whether its output is multiplied by the sigmoid of one more product with the token (Qwen2-MoE).
    pub gated: bool,
}

/// How a router chooses experts and weighs their outputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterSpec {
    /// What logits become.
    pub scoring: Scoring,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f64,
    /// Experts stand in groups, of which the best come into question (DeepSeek-V3).
    pub groups: Option<ExpertGroups>,
    /// Whether a vector is added to the scores for the choice, and not for the weights (DeepSeek-V3).
    pub correction: bool,
    /// Whether logits have a bias (gpt-oss).
    pub bias: bool,
    /// Factor on the load-balancing loss (Fedus et al. 2021), where it is asked for.
    pub balance_loss: f64,
}

/// What a router makes of its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

/// Groups of experts that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of a layer.
    pub count: u64,
    /// Groups that a token's experts are in.
    pub chosen: u64,
    /// Whether a group is as good as its two best experts together (DeepSeek-V3); else it is as good as its best one (DeepSeek-V2).
    pub by_two: bool,
}

/// Non-linearities of the feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// The exact GELU, with erf.
    Gelu,
    /// The tanh approximation (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit` and up between -limit and limit (gpt-oss).
    ClampedSwiglu {
        /// Factor in the sigmoid.
        alpha: f64,
        /// Where gate and up end.
        limit: f64,
    },
}

/// Normalisation over the hidden dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct NormSpec {
    /// RMSNorm or LayerNorm.
    pub kind: NormKind,
    /// Added to the variance.
    pub epsilon: f64,
    /// Whether an RMSNorm multiplies by 1 + weight instead of weight, those of queries and keys too (Gemma).
    pub one_plus_weight: bool,
    /// Where norms stand in a block.
    pub placement: NormPlacement,
}

/// Where the norms of a block stand. The final norm is always there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and before the feed-forward part (Llama).
    Before,
    /// After either, before its sum with the residual stream (OLMo 2).
    After,
    /// Both (Gemma 2 and 3).
    Around,
}

impl NormPlacement {
    /// Whether there are norms before the parts.
    pub fn before(self) -> bool {
        self != NormPlacement::After
    }

    /// Whether there are norms after the parts.
    pub fn after(self) -> bool {
        self != NormPlacement::Before
    }
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
    /// The context that the model was trained with before it was stretched, where the rule depends on it.
    pub fn original_context(&self) -> Option<f64> {
        match self {
            RopeScaling::Dynamic { max_position_embeddings, .. } => Some(*max_position_embeddings),
            RopeScaling::Llama3 { original_max_position_embeddings, .. }
            | RopeScaling::Yarn { original_max_position_embeddings, .. }
            | RopeScaling::LongRope { original_max_position_embeddings, .. } => {
                Some(*original_max_position_embeddings)
            }
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::PerFrequency { .. } => None,
        }
    }

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
                truncate: _,
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

impl RopeSpec {
    /// Plain rotation of whole heads.
    pub fn plain(head_dim: u64, theta: f64) -> RopeSpec {
        RopeSpec { dims: head_dim, theta, scaling: RopeScaling::None }
    }

    fn check(&self, head_dim: u64) -> Result<(), SpecError> {
        let fail = |key, reason| Err(SpecError { key, reason });
        if self.dims == 0 || self.dims > head_dim || !self.dims.is_multiple_of(2) {
            let reason =
                format!("{} dimensions of heads of {head_dim} cannot be rotated in pairs", self.dims);
            return fail("partial_rotary_factor", reason);
        }
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return fail("rope_theta", format!("{} is not positive", self.theta));
        }
        match self.scaling.problem(self.dims / 2) {
            Some(reason) => fail("rope_scaling", reason),
            None => Ok(()),
        }
    }
}

impl AttentionSpec {
    /// Plain causal attention without biases, every head rotated as a whole.
    pub fn plain(heads: u64, kv_heads: u64, head_dim: u64, rope: RopeSpec) -> AttentionSpec {
        AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            qkv_bias: false,
            output_bias: false,
            qk_norm: None,
            rope: Some(rope),
            local_rope: None,
            sliding_window: None,
            scale: None,
            soft_cap: None,
            sinks: false,
            latent: None,
        }
    }

    /// Width of a head's values.
    pub fn value_dim(&self) -> u64 {
        self.latent.map_or(self.head_dim, |latent| latent.value_dim)
    }

    /// Width of the rotated part of a head.
    pub fn rotated_dim(&self) -> u64 {
        self.rope.as_ref().map_or(0, |rope| rope.dims)
    }

    fn check_latent(&self) -> Result<(), SpecError> {
        let fail = |key, reason: fmt::Arguments<'_>| Err(SpecError { key, reason: reason.to_string() });
        let Some(LatentAttention { query_rank, kv_rank, value_dim }) = self.latent else { return Ok(()) };
        for (key, value) in
            [("q_lora_rank", query_rank.unwrap_or(1)), ("kv_lora_rank", kv_rank), ("v_head_dim", value_dim)]
        {
            if value == 0 || value > 1 << 28 {
                return fail(key, format_args!("{value} is no width"));
            }
        }
        if self.head_dim > MAX_HEAD_DIM {
            let reason =
                format_args!("{} with qk_rope_head_dim is larger than {MAX_HEAD_DIM}", self.head_dim);
            return fail("qk_nope_head_dim", reason);
        }
        if value_dim > self.head_dim {
            let head_dim = self.head_dim;
            return fail(
                "v_head_dim",
                format_args!("values of {value_dim} are wider than keys of {head_dim}"),
            );
        }
        if self.heads > MAX_LATENT_HEADS {
            let reason = format_args!("{} is beyond any model (at most {MAX_LATENT_HEADS})", self.heads);
            return fail("num_attention_heads", reason);
        }
        if self.kv_heads != self.heads {
            return fail(
                "num_key_value_heads",
                format_args!("is not num_attention_heads, as latent attention has it"),
            );
        }
        let rotated = self.rotated_dim();
        if !rotated.is_multiple_of(2) {
            return fail("qk_rope_head_dim", format_args!("{rotated} values cannot be rotated in pairs"));
        }
        if rotated == 0 || rotated >= self.head_dim {
            return fail(
                "qk_rope_head_dim",
                format_args!("{rotated} of the {} of a head cannot be rotated", self.head_dim),
            );
        }
        let other = self.qkv_bias || self.output_bias || self.qk_norm.is_some() || self.sinks;
        match other || self.sliding_window.is_some() || self.local_rope.is_some() {
            true => fail(
                "kv_lora_rank",
                format_args!("latent attention has no biases, norms of heads, windows or sinks"),
            ),
            false => Ok(()),
        }
    }

    /// Positions that a token of a layer sees, its own included; `None` for all before it.
    pub fn window(&self, layer: u32) -> Option<u64> {
        let window = self.sliding_window.as_ref()?;
        window.layers.get(layer as usize).copied().unwrap_or(false).then_some(window.size)
    }
}

impl ExpertsSpec {
    /// All experts that a router chooses among, those without matrices too.
    pub fn total(&self) -> u64 {
        let without = self.zero_computation.map_or(0, |own| own.zero + own.copy + own.constant);
        self.count + without
    }

    /// Which experts have no matrices.
    pub fn zero_experts(&self) -> Option<ZeroExperts> {
        let ZeroComputationSpec { zero, copy, constant, .. } = self.zero_computation?;
        Some(ZeroExperts { first: self.count, zero, copy, constant })
    }

    /// tau, 1 where no expert is without matrices.
    pub fn tau(&self) -> f64 {
        self.zero_computation.map_or(1.0, |own| own.tau)
    }

    fn check(&self) -> Result<(), SpecError> {
        let fail = |key, reason: fmt::Arguments<'_>| Err(SpecError { key, reason: reason.to_string() });
        let shared = self.shared.map_or(1, |shared| shared.intermediate_size);
        for (key, value, most) in [
            ("num_experts", self.count, MAX_EXPERTS),
            ("num_experts_per_tok", self.per_token, MAX_EXPERTS_PER_TOKEN),
            ("moe_intermediate_size", self.intermediate_size, 1 << 28),
            ("shared_expert_intermediate_size", shared, 1 << 28),
        ] {
            if value == 0 {
                return fail(key, format_args!("must be at least 1"));
            }
            if value > most {
                return fail(key, format_args!("{value} is beyond any model (at most {most})"));
            }
        }
        if let Some(ZeroComputationSpec { zero, copy, constant, tau, .. }) = self.zero_computation {
            for (key, value) in
                [("num_zero_experts", zero), ("num_copy_experts", copy), ("num_constant_experts", constant)]
            {
                if value > MAX_EXPERTS {
                    return fail(key, format_args!("{value} is beyond any model (at most {MAX_EXPERTS})"));
                }
            }
            if self.total() > MAX_EXPERTS {
                return fail("num_experts", format_args!("{} in all are beyond any model", self.total()));
            }
            if !(tau > 0.0 && tau <= 1000.0) {
                return fail("moe_tau", format_args!("{tau} is not positive, or beyond any use"));
            }
            if self.router.groups.is_some() {
                return fail("n_group", format_args!("experts without matrices stand in no groups"));
            }
        }
        if self.per_token > self.total() {
            let (chosen, count) = (self.per_token, self.total());
            return fail("num_experts_per_tok", format_args!("{chosen} of {count} experts cannot be chosen"));
        }
        if let Some(ExpertGroups { count, chosen, .. }) = self.router.groups {
            if count == 0 || !self.count.is_multiple_of(count) {
                return fail("n_group", format_args!("{count} does not divide the {} experts", self.count));
            }
            if chosen == 0 || chosen > count {
                return fail("topk_group", format_args!("{chosen} of {count} groups cannot be chosen"));
            }
            if self.per_token > self.count / count * chosen {
                return fail("topk_group", format_args!("{chosen} groups have too few experts for a token"));
            }
        }
        for (key, number) in
            [("routed_scaling_factor", self.router.scale), ("router_aux_loss_coef", self.router.balance_loss)]
        {
            if !(number.is_finite() && number >= 0.0) {
                return fail(key, format_args!("{number} is no factor"));
            }
        }
        Ok(())
    }
}

impl NormSpec {
    /// RMSNorm before either part of a block.
    pub fn rms(epsilon: f64) -> NormSpec {
        NormSpec { kind: NormKind::Rms, epsilon, one_plus_weight: false, placement: NormPlacement::Before }
    }
}

impl ModelSpec {
    /// The feed-forward part of a layer.
    pub fn feed_forward(&self, _layer: u32) -> &MlpSpec {
        &self.mlp
    }

    /// What a layer has that others may not have.
    pub fn layer_kind(&self, layer: u32) -> LayerKind {
        LayerKind {
            window: self.attention.window(layer),
            experts: self.experts_of(layer).is_some(),
            gating_residual: self.gating_residual_of(layer).is_some(),
        }
    }

    /// The layer with experts before a layer, whose router its own reads, if it does.
    pub fn gating_residual_of(&self, layer: u32) -> Option<u32> {
        self.experts_of(layer)?.zero_computation.filter(|own| own.gating_residuals)?;
        (0..layer).rev().find(|before| self.experts_of(*before).is_some())
    }

    /// The experts of a layer, if it has any.
    pub fn experts_of(&self, layer: u32) -> Option<&ExpertsSpec> {
        self.experts.as_ref().filter(|experts| experts.layers.get(layer as usize) == Some(&true))
    }

    /// The experts of a layer that it has the matrices of.
    pub fn own_experts(&self, experts: &ExpertsSpec) -> Range<u64> {
        self.part.experts.map_or(0..experts.count, |(start, end)| start..end)
    }

    /// Number of parameters that one token is multiplied with or looked up in: all but those of experts that it does not go to.
    pub fn active_parameter_count(&self) -> u64 {
        let active = |p: &Parameter| match (p.role.is_expert_part(), p.block.layer()) {
            (true, Some(layer)) => match self.experts_of(layer) {
                Some(experts) => p.elements() / experts.count.max(1) * experts.per_token.min(experts.count),
                None => p.elements(),
            },
            _ => p.elements(),
        };
        self.parameters().iter().map(active).sum()
    }

    /// Width of the query projection's output.
    pub fn q_size(&self) -> u64 {
        self.attention.heads * self.attention.head_dim
    }

    /// Width of the key and of the value projection's output.
    pub fn kv_size(&self) -> u64 {
        self.attention.kv_heads * self.attention.head_dim
    }

    /// Width of what attention gives, all heads together.
    pub fn attended_size(&self) -> u64 {
        self.attention.heads * self.attention.value_dim()
    }

    /// Whether files of the model may have this layer although it has none: GLM 4.5 and DeepSeek-V3 predict further tokens by layers
    /// behind the last.
    pub(crate) fn is_behind_the_last(&self, layer: u32) -> bool {
        let has_further = matches!(self.architecture.as_str(), "glm4_moe" | "glm4_moe_lite" | "deepseek_v3");
        has_further && layer >= self.num_layers
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
        self.attention.check_latent()?;
        if head_dim > MAX_HEAD_DIM {
            return fail("head_dim", format_args!("{head_dim} is larger than {MAX_HEAD_DIM}"));
        }
        if !(self.norm.epsilon.is_finite() && self.norm.epsilon >= 0.0) {
            return fail(
                "rms_norm_eps",
                format_args!("{} is not a small positive number", self.norm.epsilon),
            );
        }
        let attention = &self.attention;
        for rope in [&attention.rope, &attention.local_rope].into_iter().flatten() {
            rope.check(head_dim)?;
        }
        if let Some(window) = &attention.sliding_window {
            if window.size == 0 {
                return fail("sliding_window", format_args!("must be at least 1"));
            }
            let (given, layers) = (window.layers.len(), self.layers().next_back().map_or(0, |last| last + 1));
            let tells_of_all = given == layers as usize || !self.part.head && given > layers as usize;
            if !tells_of_all {
                return fail("layer_types", format_args!("tells of {given} layers; the model has {layers}"));
            }
        }
        if let Some(experts) = &self.experts {
            experts.check()?;
            let is_whole = self.part.embedding && self.part.head;
            if experts.zero_computation.is_some_and(|own| own.gating_residuals) && !is_whole {
                return fail(
                    "gating_residuals",
                    format_args!("go from layer to layer; a model with them is not divided into stages"),
                );
            }
            let (given, layers) =
                (experts.layers.len(), self.layers().next_back().map_or(0, |last| last + 1));
            let tells_of_all = given == layers as usize || !self.part.head && given > layers as usize;
            if !tells_of_all {
                return fail(
                    "mlp_layer_types",
                    format_args!("tells of {given} layers; the model has {layers}"),
                );
            }
        }
        for (key, number) in [
            ("query_pre_attn_scalar", attention.scale),
            ("attn_logit_softcapping", attention.soft_cap),
            ("final_logit_softcapping", self.logit_soft_cap),
            ("hidden_size", self.embedding_scale),
        ] {
            if let Some(number) = number.filter(|number| !(number.is_finite() && *number > 0.0)) {
                return fail(key, format_args!("{number} is not positive"));
            }
        }
        if let Activation::ClampedSwiglu { alpha, limit } = self.mlp.activation {
            // They are computed with in f32.
            let (narrow_alpha, narrow_limit) = (alpha as f32, limit as f32);
            if !(narrow_alpha.is_finite() && narrow_limit.is_finite() && narrow_limit > 0.0) {
                return fail("swiglu_limit", format_args!("{limit} with swiglu_alpha {alpha} is no limit"));
            }
            if !self.mlp.gated {
                return fail("hidden_act", format_args!("a clamped activation needs a gate"));
            }
        }
        if self.norm.kind == NormKind::Layer && (self.norm.one_plus_weight || self.norm.placement.after()) {
            return fail("model_type", format_args!("LayerNorm stands before the parts of a block only"));
        }
        // Sizes are added up in u64 everywhere else; a layer stands for all of them.
        let elements = |block| -> u128 {
            let product = |shape: &[u64]| shape.iter().map(|size| u128::from(*size)).product::<u128>();
            self.block_parameters(block).iter().map(|parameter| product(&parameter.shape)).sum()
        };
        // Where some layers have experts, one of either kind.
        let with = |experts: bool| self.layers().find(|layer| self.experts_of(*layer).is_some() == experts);
        let largest =
            [with(false), with(true)].into_iter().flatten().map(|layer| elements(BlockId::Layer(layer)));
        let layers = u128::from(self.num_layers) * largest.max().unwrap_or(0);
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
