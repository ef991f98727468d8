//! What operations cost: arithmetic and bytes moved. The planner turns a tally into time.

use crate::{Compute, Op, PIECE_ROWS, Tensor};

/// The cost of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations of matrix products, and the precision in which they run.
    pub matmul: Option<(Compute, u64)>,
    /// Floating-point operations in attention (its products run on tiles, in `matmul`'s precision or f32).
    pub attention: Option<(Compute, u64)>,
    /// Bytes read and written.
    pub bytes: u64,
    /// Transcendental evaluations (exp and the like).
    pub exps: u64,
}

/// Costs added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Number of operations.
    pub operations: u64,
    /// Matrix-product FLOPs in f32.
    pub matmul_f32: u64,
    /// Matrix-product FLOPs in bf16.
    pub matmul_bf16: u64,
    /// Attention FLOPs in f32.
    pub attention_f32: u64,
    /// Attention FLOPs in bf16.
    pub attention_bf16: u64,
    /// Bytes moved by operations that are not matrix products.
    pub bytes: u64,
    /// Bytes moved by matrix products.
    pub matmul_bytes: u64,
    /// Transcendental evaluations.
    pub exps: u64,
}

impl Tally {
    /// Adds one operation.
    pub fn add(&mut self, cost: Cost) {
        let add = |total: &mut u64, more: u64| *total = total.saturating_add(more);
        add(&mut self.operations, 1);
        match cost.matmul {
            Some((Compute::F32, flops)) => add(&mut self.matmul_f32, flops),
            Some((Compute::Bf16, flops)) => add(&mut self.matmul_bf16, flops),
            None => {}
        }
        match cost.attention {
            Some((Compute::F32, flops)) => add(&mut self.attention_f32, flops),
            Some((Compute::Bf16, flops)) => add(&mut self.attention_bf16, flops),
            None => {}
        }
        let bytes = if cost.matmul.is_some() { &mut self.matmul_bytes } else { &mut self.bytes };
        add(bytes, cost.bytes);
        add(&mut self.exps, cost.exps);
    }

    /// Both together.
    pub fn plus(self, other: Tally) -> Tally {
        self.combine(other, u64::saturating_add)
    }

    /// What is left of this tally without `other`, which must be a part of it.
    pub fn less(self, other: Tally) -> Tally {
        self.combine(other, u64::saturating_sub)
    }

    /// The same so many times.
    pub fn times(self, times: u64) -> Tally {
        self.combine(self, |one, _| one.saturating_mul(times))
    }

    fn combine(self, other: Tally, with: impl Fn(u64, u64) -> u64) -> Tally {
        Tally {
            operations: with(self.operations, other.operations),
            matmul_f32: with(self.matmul_f32, other.matmul_f32),
            matmul_bf16: with(self.matmul_bf16, other.matmul_bf16),
            attention_f32: with(self.attention_f32, other.attention_f32),
            attention_bf16: with(self.attention_bf16, other.attention_bf16),
            bytes: with(self.bytes, other.bytes),
            matmul_bytes: with(self.matmul_bytes, other.matmul_bytes),
            exps: with(self.exps, other.exps),
        }
    }

    /// All floating-point operations of matrix products and attention.
    pub fn flops(&self) -> u64 {
        let all = [self.matmul_f32, self.matmul_bf16, self.attention_f32, self.attention_bf16];
        all.into_iter().fold(0, u64::saturating_add)
    }
}

impl Op<'_> {
    /// Arithmetic and bytes of this operation.
    pub fn cost(&self) -> Cost {
        let access = self.access();
        let bytes = access.reads.iter().chain(&access.writes).map(|t| t.bytes()).sum();
        let product =
            |out: &Tensor, inner: u64, compute| Some((compute, product_of(&[2, out.elements(), inner])));
        let mut cost = Cost { bytes, ..Cost::default() };
        match *self {
            Op::Linear { x, out, compute, .. } => cost.matmul = product(out, x.columns(), compute),
            Op::LinearBackwardInput { dout, dx, compute, .. } => {
                cost.matmul = product(dx, dout.columns(), compute)
            }
            Op::LinearBackwardWeight { dout, dweight, compute, .. } => {
                cost.matmul = product(dweight, dout.rows(), compute);
            }
            Op::Attention { q, k, v, probabilities, shape, compute, .. } => {
                let seen = (shape.kv_len - shape.first_seen()).min(shape.kv_capacity);
                let share = |t: &Tensor| t.bytes() / shape.kv_capacity.max(1) * seen;
                let written = probabilities.map_or(0, Tensor::bytes);
                cost.bytes = 2 * q.bytes() + share(k) + share(v) + written;
                cost.attention = Some((compute, product_of(&[4, shape.score_count(), shape.head_dim])));
                cost.exps = shape.score_count();
            }
            Op::AttentionBackward { probabilities, shape, compute, .. } => {
                // Five products, of which kept probabilities save the first.
                let products = if probabilities.is_some() { 4 } else { 5 };
                cost.attention =
                    Some((compute, product_of(&[2 * products, shape.score_count(), shape.head_dim])));
                cost.exps = if probabilities.is_some() { 0 } else { shape.score_count() };
            }
            Op::Gated { gate, .. } | Op::GatedBackward { gate, .. } => cost.exps = gate.elements(),
            Op::Activate { x, .. } | Op::ActivateBackward { x, .. } => cost.exps = x.elements(),
            Op::CrossEntropy { logits, .. } | Op::GradientOfRuns { logits, .. } => {
                cost.exps = logits.elements()
            }
            // Only the piece's runs are written.
            Op::LogitRuns { logits, targets, target_logits, .. } => {
                let runs = 2 * logits.rows() * logits.columns().div_ceil(PIECE_ROWS);
                let written = runs * target_logits.dtype().block_bytes();
                cost.bytes = logits.bytes() + targets.bytes() + target_logits.bytes() + written;
                cost.exps = logits.elements();
            }
            Op::LossOfRuns { runs, .. } => cost.exps = runs.elements() / 2,
            // Only the rows that are written move.
            Op::WriteCache { x, cache, .. } => {
                let row = cache.bytes() / cache.rows().max(1);
                cost.bytes = x.bytes() + x.rows() * row;
            }
            // Only the looked-up rows of the table move.
            Op::Embedding { tokens, out: rows, .. } | Op::EmbeddingBackward { tokens, dout: rows, .. } => {
                cost.bytes = tokens.bytes() + 2 * rows.bytes();
            }
            Op::Update(update) => cost.bytes += update.further_bytes(),
            // Once for the largest magnitude, once to round.
            Op::QuantizeFp8 { x, .. } => cost.bytes += x.bytes(),
            Op::NormRatios { a, b, .. } => cost.bytes = a.bytes() + b.bytes(),
            // A logarithm and a cosine for every element.
            Op::RandomNormal { out, .. } => cost.exps = 2 * out.elements(),
            // Twice, a product and a multiple of each row for each row before it.
            Op::Orthonormalize { x } => {
                cost.matmul = Some((Compute::F32, product_of(&[4, x.rows(), x.elements()])));
            }
            // Some eight sweeps, each of which rotates every pair of rows and columns, and vectors.
            Op::Eigenvectors { matrix, .. } => {
                cost.matmul = Some((Compute::F32, product_of(&[8 * 9, matrix.rows(), matrix.elements()])));
            }
            _ => {}
        }
        cost
    }
}

/// A product that ends at the largest number: sizes are whatever somebody wants planned.
fn product_of(factors: &[u64]) -> u64 {
    factors.iter().copied().fold(1, u64::saturating_mul)
}
