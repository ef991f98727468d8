//! The operations of a step, as values: what each reads and writes, which shapes fit, and what it costs.
//!
//! Shapes: N tokens, H hidden size, O and I a linear's outputs and inputs, V vocabulary, D head size.
//! Float tensors are f32 or bf16, each by itself, unless said otherwise; kernels compute in f32.
//! "in place" lists which output may be the same memory as which input; nothing else may overlap.

use crate::{Adam, AttentionShape, Channels, Tensor, Update};

/// A target that does not count in the loss.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// Rows of a table of which a piece has a multiple, but for the last piece: what is computed from such pieces, one after
/// the other, has the bits of what is computed from the whole. That holds for products, the loss and its gradient,
/// the gradient of a table and updates that take every element by itself.
pub const PIECE_ROWS: u64 = 1024;

/// The precision in which a matrix product multiplies; sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Operands as f32.
    F32,
    /// Operands rounded to bf16.
    Bf16,
}

/// How an f32 result becomes a narrower type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest, ties to even.
    Nearest,
    /// Up with the probability of what is cut off. Element i is rounded by a random number from the seed and `first + i`.
    Stochastic {
        /// Seed; the same seed gives the same bits.
        seed: u64,
        /// Place of the tensor's first element in what it is a piece of; 0 of a whole tensor.
        first: u64,
    },
}

/// The non-linearity of a feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glu {
    /// x * sigmoid(x)
    Silu,
    /// x * Phi(x), with erf
    Gelu,
    /// The tanh approximation of GELU
    GeluTanh,
}

/// One operation. Field names are explained in each variant.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// out = value
    Fill { out: &'a Tensor, value: f32 },
    /// out = x, converted; any plain types, `U32` only to itself.
    Cast { x: &'a Tensor, out: &'a Tensor, rounding: Rounding },
    /// out = a + b. In place: out = a or out = b.
    Add { a: &'a Tensor, b: &'a Tensor, out: &'a Tensor },
    /// x *= factor
    Scale { x: &'a Tensor, factor: f32 },
    /// out (+)= x / (1 - probability) where an element is kept, 0 where it is dropped (Srivastava et al. 2014). Element i
    /// is dropped by a random number from the seed and `first + i`. In place: out = x.
    Dropout { x: &'a Tensor, out: &'a Tensor, probability: f32, seed: u64, first: u64, accumulate: bool },

    /// `out[n] = table[tokens[n]]`; tokens u32 `[N]`, table `[V, H]`, out `[N, H]`. A token outside the table is an error.
    Embedding { tokens: &'a Tensor, table: &'a Tensor, out: &'a Tensor },
    /// `dtable[tokens[n] - first_row] += dout[n]`, in token order; `rounding` is that of a narrow dtable's sums. dtable are
    /// the table's rows from `first_row` on; tokens of other rows are left out.
    EmbeddingBackward {
        tokens: &'a Tensor,
        dout: &'a Tensor,
        dtable: &'a Tensor,
        first_row: u64,
        rounding: Rounding,
    },

    /// RMSNorm (Zhang and Sennrich 2019): out = x * rstd * (weight_offset + weight), rstd = 1 / sqrt(mean(x^2) + epsilon).
    /// x, out `[N, H]`; weight `[H]`; rstd f32 `[N]`.
    RmsNorm {
        x: &'a Tensor,
        weight: &'a Tensor,
        weight_offset: f32,
        epsilon: f32,
        out: &'a Tensor,
        rstd: &'a Tensor,
    },
    /// dx += ..., dweight += ... (or = where `accumulate_weight` is false). Without a dweight none is written.
    RmsNormBackward {
        x: &'a Tensor,
        weight: &'a Tensor,
        weight_offset: f32,
        rstd: &'a Tensor,
        dout: &'a Tensor,
        dx: &'a Tensor,
        dweight: Option<&'a Tensor>,
        accumulate_weight: bool,
    },
    /// LayerNorm (Ba et al. 2016): out = (x - mean) * rstd * weight + bias; mean, rstd f32 `[N]`.
    LayerNorm {
        x: &'a Tensor,
        weight: &'a Tensor,
        bias: &'a Tensor,
        epsilon: f32,
        out: &'a Tensor,
        mean: &'a Tensor,
        rstd: &'a Tensor,
    },
    /// dx += ..., dweight and dbias as `accumulate_weight` says, where they are wanted.
    LayerNormBackward {
        x: &'a Tensor,
        weight: &'a Tensor,
        mean: &'a Tensor,
        rstd: &'a Tensor,
        dout: &'a Tensor,
        dx: &'a Tensor,
        dweight: Option<&'a Tensor>,
        dbias: Option<&'a Tensor>,
        accumulate_weight: bool,
    },

    /// out (+)= x weight^T + bias; x `[N, I]`, weight `[O, I]`, bias `[O]`, out `[N, O]`. Here and in the two products
    /// that follow, operands may be 8-bit floats: their values are bf16 numbers, so that [`Compute::Bf16`] multiplies
    /// them exactly.
    Linear {
        x: &'a Tensor,
        weight: &'a Tensor,
        bias: Option<&'a Tensor>,
        out: &'a Tensor,
        accumulate: bool,
        compute: Compute,
    },
    /// dx (+)= dout weight; dout `[N, O]`, weight `[O, I]`, dx `[N, I]`. From pieces of [`PIECE_ROWS`] of weight's rows, and
    /// of dout's columns, an f32 dx gets the bits of the whole product, that of the first piece being assigned and those
    /// of the others added; cast to a narrow type it is what the whole product writes to one.
    LinearBackwardInput {
        dout: &'a Tensor,
        weight: &'a Tensor,
        dx: &'a Tensor,
        accumulate: bool,
        compute: Compute,
    },
    /// dweight (+)= dout^T x; dout `[N, O]`, x `[N, I]`, dweight `[O, I]`. `rounding` is that of sums with what a bf16
    /// dweight held before.
    LinearBackwardWeight {
        dout: &'a Tensor,
        x: &'a Tensor,
        dweight: &'a Tensor,
        accumulate: bool,
        rounding: Rounding,
        compute: Compute,
    },
    /// dbias (+)= sum over rows of dout; dout `[N, O]`, dbias `[O]`.
    BiasBackward { dout: &'a Tensor, dbias: &'a Tensor, accumulate: bool },

    /// Rotates pairs (i, i + R/2) of the first R values of every head of x `[N, heads * head_dim]` in place by the angle
    /// of its position: row n uses row `positions[n]` of cos and sin, both f32 `[P, R/2]`. `inverse` rotates back: it is
    /// the backward pass.
    Rope {
        x: &'a Tensor,
        positions: &'a Tensor,
        cos: &'a Tensor,
        sin: &'a Tensor,
        head_dim: u64,
        inverse: bool,
    },

    /// Puts keys or values into a cache: row `(first + n) % C` of cache = row n of x, rounded to the cache's type, to
    /// nearest. x `[N, heads * head_dim]`, N at most C; cache `[C, heads * D']` of a plain type, Q8_0, Q4_0 or Q4_1, D'
    /// being `head_dim` filled up with zeros to whole blocks.
    WriteCache { x: &'a Tensor, cache: &'a Tensor, first: u64, head_dim: u64 },

    /// Causal attention by tiles with an online softmax (FlashAttention-2, Dao 2023). lse f32 `[batch, heads, q_len]` is
    /// the log of the sum of the exponentials of each row's scaled scores. k and v may be of any type that
    /// [`WriteCache`](Op::WriteCache) writes; they are read as they are stored. `documents` u32 `[batch * q_len]` is the
    /// first position that each query sees, whatever else the shape lets it see. With `probabilities`, f32
    /// `[batch, heads, q_len, kv_len]`, rows of scores are written out there and normalised, 0 where nothing is seen.
    Attention {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        documents: Option<&'a Tensor>,
        out: &'a Tensor,
        lse: &'a Tensor,
        probabilities: Option<&'a Tensor>,
        shape: AttentionShape,
        compute: Compute,
    },
    /// dq, dk, dv = gradients. `delta` f32 `[batch, heads, q_len]` is workspace, and so is `sums`, f32 with an element
    /// for each of dq's, dk's and dv's, without which all three are f32. Needs kv_capacity = kv_len = q_len. With
    /// `probabilities` they are read, without they are computed again tile by tile.
    AttentionBackward {
        q: &'a Tensor,
        k: &'a Tensor,
        v: &'a Tensor,
        documents: Option<&'a Tensor>,
        out: &'a Tensor,
        lse: &'a Tensor,
        probabilities: Option<&'a Tensor>,
        dout: &'a Tensor,
        delta: &'a Tensor,
        sums: Option<&'a Tensor>,
        dq: &'a Tensor,
        dk: &'a Tensor,
        dv: &'a Tensor,
        shape: AttentionShape,
        compute: Compute,
    },

    /// out = act(gate) * up, all `[N, I]`. In place: out = gate or out = up.
    Gated { gate: &'a Tensor, up: &'a Tensor, out: &'a Tensor, activation: Glu },
    /// dgate, dup from dout. In place: dgate = gate, dup = up, and either may be dout's memory.
    GatedBackward {
        gate: &'a Tensor,
        up: &'a Tensor,
        dout: &'a Tensor,
        dgate: &'a Tensor,
        dup: &'a Tensor,
        activation: Glu,
    },
    /// out = act(x). In place: out = x.
    Activate { x: &'a Tensor, out: &'a Tensor, activation: Glu },
    /// dx = dout * act'(x). In place: dx = x or dx = dout.
    ActivateBackward { x: &'a Tensor, dout: &'a Tensor, dx: &'a Tensor, activation: Glu },

    /// `losses[n] = -ln softmax(logits[n])[targets[n]]`, 0 for ignored targets; logits f32 `[N, V]`, losses f32 `[N]`.
    /// With `gradient_scale`, logits becomes the gradient times scale in place, (softmax - onehot) * scale, 0 for ignored
    /// targets. With `soft_cap` logits are cap * tanh(logits / cap) first, and so is the gradient that of the uncapped.
    /// With `weights`, f32 `[N]`, a row's loss and gradient are multiplied by its weight.
    ///
    /// The three operations that follow give the same bits from logits that are never there all at once.
    CrossEntropy {
        logits: &'a Tensor,
        targets: &'a Tensor,
        weights: Option<&'a Tensor>,
        losses: &'a Tensor,
        soft_cap: Option<f32>,
        gradient_scale: Option<f32>,
    },
    /// What a piece of the logits adds to the loss. logits f32 `[N, P]` are the columns from `first_column` on, a multiple
    /// of [`PIECE_ROWS`]; P is one too, unless the piece is the last. For every run of [`PIECE_ROWS`] columns,
    /// `runs[n, 2 r]` = the largest logit and `runs[n, 2 r + 1]` = the sum of e^(logit - largest), 0 both for ignored
    /// targets; runs f32 `[N, 2 R]`, R being those of the whole vocabulary, of which only the piece's are written.
    /// `target_logits[n]`, f32 `[N]`, is written where the target lies in the piece. With `soft_cap` all is of the
    /// capped logits.
    LogitRuns {
        logits: &'a Tensor,
        first_column: u64,
        targets: &'a Tensor,
        soft_cap: Option<f32>,
        runs: &'a Tensor,
        target_logits: &'a Tensor,
    },
    /// losses f32 `[N]`, as [`CrossEntropy`](Op::CrossEntropy) gives them, from what [`LogitRuns`](Op::LogitRuns) wrote for
    /// all pieces.
    LossOfRuns {
        runs: &'a Tensor,
        target_logits: &'a Tensor,
        targets: &'a Tensor,
        weights: Option<&'a Tensor>,
        losses: &'a Tensor,
    },
    /// logits, a piece as [`LogitRuns`](Op::LogitRuns) took it, become their gradient in place, as those of
    /// [`CrossEntropy`](Op::CrossEntropy) do; runs are those of all pieces.
    GradientOfRuns {
        logits: &'a Tensor,
        first_column: u64,
        targets: &'a Tensor,
        weights: Option<&'a Tensor>,
        runs: &'a Tensor,
        soft_cap: Option<f32>,
        gradient_scale: f32,
    },

    /// `out[o]` = sum of squares of row o of x, which may be of any storage of weights; x `[O, I]`, out f32 `[O]`.
    RowSquares { x: &'a Tensor, out: &'a Tensor },
    /// `lengths[o]` = |W_o + scale B_o A|, the length of a row with its adapter, from `squares` = |W_o|^2, `cross` = A W^T
    /// `[r, O]`, `gram` = A A^T `[r, r]` and b = B `[O, r]`. All f32.
    RowLengths {
        squares: &'a Tensor,
        cross: &'a Tensor,
        gram: &'a Tensor,
        b: &'a Tensor,
        scale: f32,
        lengths: &'a Tensor,
    },
    /// `out[n, o]` (+)= `x[n, o] * factors[o] / divisors[o] + bias[o]`; x, out `[N, O]`; factors, divisors f32 `[O]`.
    ScaleColumns {
        x: &'a Tensor,
        factors: &'a Tensor,
        divisors: Option<&'a Tensor>,
        bias: Option<&'a Tensor>,
        out: &'a Tensor,
        accumulate: bool,
    },
    /// `out[o]` (+)= sum over n of `a[n, o] * b[n, o]`, over `divisors[o]`; a, b `[N, O]`; divisors f32, out `[O]`.
    ColumnDots { a: &'a Tensor, b: &'a Tensor, divisors: &'a Tensor, out: &'a Tensor, accumulate: bool },

    /// codes = x over its scale, rounded; scales f32 `[ceil(elements / block)]`, one for each run of `block` elements of x
    /// in their order in memory. codes i8 of x's shape.
    QuantizeInt8 { x: &'a Tensor, codes: &'a Tensor, scales: &'a Tensor, block: u64 },
    /// out = codes times their scales: what [`Op::QuantizeInt8`] left of x, wrong by half a scale at most.
    DequantizeInt8 { codes: &'a Tensor, scales: &'a Tensor, block: u64, out: &'a Tensor },

    /// out = x in the 8-bit floats of out's type, to nearest even, with the smallest power of two as its factor that lets
    /// the largest magnitude of x fit: just-in-time scaling of a tensor. A factor of that kind makes rounding the only
    /// error, and quantising the result, or some rows of it, again gives the same numbers. Where a number of x is not
    /// finite no number of out is one.
    QuantizeFp8 { x: &'a Tensor, out: &'a Tensor },

    /// `out[0]` = sum of squares of x; out f32 `[1]`. Summed in f64 over pieces of a fixed size, in order.
    SumSquares { x: &'a Tensor, out: &'a Tensor },
    /// One step of an optimizer on a parameter: see [`Update`].
    Update(Update<'a>),
    /// Adam's direction in place of the gradient: m and v move towards grad, out = m / (sqrt(v) + epsilon). All f32 of
    /// one shape. The learning rate, the bias corrections and the decay of `hyper` are left to the update. In place:
    /// out = grad.
    AdamDirection { grad: &'a Tensor, m: &'a Tensor, v: &'a Tensor, out: &'a Tensor, hyper: Adam },
    /// `out[c]` = |a| / (|b| + epsilon) over the elements of each channel; a, b f32, out f32, one for each channel.
    NormRatios { a: &'a Tensor, b: &'a Tensor, out: &'a Tensor, channels: Channels, epsilon: f32 },
    /// out f32 = normal random numbers of mean 0, from the seed and the element's index.
    RandomNormal { out: &'a Tensor, std: f32, seed: u64 },
    /// Makes the rows of x f32 `[K, N]` orthonormal in place, each within the span of itself and those before it, by
    /// modified Gram-Schmidt, twice. A row that depends on those before it becomes 0.
    Orthonormalize { x: &'a Tensor },
    /// The first K columns of out f32 `[N, K]` are unit eigenvectors of the symmetric matrix f32 `[N, N]`, for its K
    /// largest eigenvalues in falling order, by Jacobi's cyclic method. The matrix is destroyed; `vectors` f32 `[N, N]`
    /// is workspace.
    Eigenvectors { matrix: &'a Tensor, vectors: &'a Tensor, out: &'a Tensor },
}

impl Op<'_> {
    /// The operation's name.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Fill { .. } => "fill",
            Op::Cast { .. } => "cast",
            Op::Add { .. } => "add",
            Op::Scale { .. } => "scale",
            Op::Dropout { .. } => "dropout",
            Op::Embedding { .. } => "embedding",
            Op::EmbeddingBackward { .. } => "embedding_backward",
            Op::RmsNorm { .. } => "rms_norm",
            Op::RmsNormBackward { .. } => "rms_norm_backward",
            Op::LayerNorm { .. } => "layer_norm",
            Op::LayerNormBackward { .. } => "layer_norm_backward",
            Op::Linear { .. } => "linear",
            Op::LinearBackwardInput { .. } => "linear_backward_input",
            Op::LinearBackwardWeight { .. } => "linear_backward_weight",
            Op::BiasBackward { .. } => "bias_backward",
            Op::Rope { .. } => "rope",
            Op::WriteCache { .. } => "write_cache",
            Op::Attention { .. } => "attention",
            Op::AttentionBackward { .. } => "attention_backward",
            Op::Gated { .. } => "gated",
            Op::GatedBackward { .. } => "gated_backward",
            Op::Activate { .. } => "activate",
            Op::ActivateBackward { .. } => "activate_backward",
            Op::CrossEntropy { .. } => "cross_entropy",
            Op::LogitRuns { .. } => "logit_runs",
            Op::LossOfRuns { .. } => "loss_of_runs",
            Op::GradientOfRuns { .. } => "gradient_of_runs",
            Op::RowSquares { .. } => "row_squares",
            Op::RowLengths { .. } => "row_lengths",
            Op::ScaleColumns { .. } => "scale_columns",
            Op::ColumnDots { .. } => "column_dots",
            Op::QuantizeInt8 { .. } => "quantize_int8",
            Op::DequantizeInt8 { .. } => "dequantize_int8",
            Op::QuantizeFp8 { .. } => "quantize_fp8",
            Op::SumSquares { .. } => "sum_squares",
            Op::Update(update) => update.name(),
            Op::AdamDirection { .. } => "adam_direction",
            Op::NormRatios { .. } => "norm_ratios",
            Op::RandomNormal { .. } => "random_normal",
            Op::Orthonormalize { .. } => "orthonormalize",
            Op::Eigenvectors { .. } => "eigenvectors",
        }
    }
}
