//! What operations cost: arithmetic and bytes moved. The planner turns a tally into time.

use crate::{Compute, DType, Tensor};

/// The cost of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// What a matrix product multiplies.
    pub matmul: Option<Multiplied>,
    /// Floating-point operations in attention (its products run on tiles, in `matmul`'s precision or f32).
    pub attention: Option<(Compute, u64)>,
    /// Bytes read and written.
    pub bytes: u64,
    /// Transcendental evaluations (exp and the like).
    pub exps: u64,
    /// 16-bit floats that are read or written one by one: a CPU computes in f32.
    pub conversions: u64,
}

/// Floating-point operations of a matrix product, and what their speed depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Multiplied {
    /// What is multiplied.
    pub arithmetic: Arithmetic,
    /// Whether a side is shorter than [`THIN`].
    pub thin: bool,
    /// Operations: two for each product of two numbers.
    pub flops: u64,
}

/// What is multiplied by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// f32.
    F32,
    /// f16, both, as they are: their products are exact in f32.
    F16,
    /// Numbers that are rounded to bf16.
    Half,
    /// 8-bit floats, both.
    Fp8,
}

impl Arithmetic {
    /// What a product of these operands multiplies.
    pub(crate) fn of(compute: Compute, operands: [&Tensor; 2]) -> Arithmetic {
        let both = |dtype| operands.iter().all(|operand| operand.dtype() == dtype);
        match compute.beside(operands[0].dtype()) {
            Compute::F32 if both(DType::F16) => Arithmetic::F16,
            Compute::F32 | Compute::Int8 => Arithmetic::F32,
            Compute::Bf16 if operands.iter().all(|operand| operand.dtype().is_fp8()) => Arithmetic::Fp8,
            Compute::Bf16 => Arithmetic::Half,
        }
    }
}

/// A product with a shorter side than this is thin: it reads its operands more than it multiplies them. Those of LoRA are.
pub const THIN: u64 = 64;

impl Multiplied {
    /// A product `[rows, inner]` times `[inner, columns]`.
    pub fn new(arithmetic: Arithmetic, [rows, inner, columns]: [u64; 3]) -> Multiplied {
        let thin = rows.min(inner).min(columns) < THIN;
        Multiplied { arithmetic, thin, flops: product_of(&[2, rows, inner, columns]) }
    }

    /// So many operations of products that are not thin.
    pub(crate) fn f32(flops: u64) -> Multiplied {
        Multiplied { arithmetic: Arithmetic::F32, thin: false, flops }
    }
}

/// Costs added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Number of operations.
    pub operations: u64,
    /// Matrix-product FLOPs in f32.
    pub matmul_f32: u64,
    /// Matrix-product FLOPs of f16.
    pub matmul_f16: u64,
    /// Matrix-product FLOPs in bf16.
    pub matmul_bf16: u64,
    /// Matrix-product FLOPs of 8-bit floats.
    pub matmul_fp8: u64,
    /// FLOPs of thin products in f32 and of f16, which are in none of the others.
    pub thin_f32: u64,
    /// FLOPs of thin products in narrower types.
    pub thin_bf16: u64,
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
    /// 16-bit floats read or written by operations that are neither matrix products nor attention.
    pub conversions: u64,
}

impl Tally {
    /// Adds one operation.
    pub fn add(&mut self, cost: Cost) {
        let add = |total: &mut u64, more: u64| *total = total.saturating_add(more);
        add(&mut self.operations, 1);
        if let Some(Multiplied { arithmetic, thin, flops }) = cost.matmul {
            let total = match (arithmetic, thin) {
                (Arithmetic::F32, false) => &mut self.matmul_f32,
                (Arithmetic::F16, false) => &mut self.matmul_f16,
                (Arithmetic::Half, false) => &mut self.matmul_bf16,
                (Arithmetic::Fp8, false) => &mut self.matmul_fp8,
                (Arithmetic::F32 | Arithmetic::F16, true) => &mut self.thin_f32,
                (Arithmetic::Half | Arithmetic::Fp8, true) => &mut self.thin_bf16,
            };
            add(total, flops);
        }
        match cost.attention {
            Some((Compute::F32 | Compute::Int8, flops)) => add(&mut self.attention_f32, flops),
            Some((Compute::Bf16, flops)) => add(&mut self.attention_bf16, flops),
            None => {}
        }
        let bytes = if cost.matmul.is_some() { &mut self.matmul_bytes } else { &mut self.bytes };
        add(bytes, cost.bytes);
        add(&mut self.exps, cost.exps);
        // The speeds of products and attention have their conversions in them.
        if cost.matmul.is_none() && cost.attention.is_none() {
            add(&mut self.conversions, cost.conversions);
        }
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
            matmul_f16: with(self.matmul_f16, other.matmul_f16),
            matmul_bf16: with(self.matmul_bf16, other.matmul_bf16),
            matmul_fp8: with(self.matmul_fp8, other.matmul_fp8),
            thin_f32: with(self.thin_f32, other.thin_f32),
            thin_bf16: with(self.thin_bf16, other.thin_bf16),
            attention_f32: with(self.attention_f32, other.attention_f32),
            attention_bf16: with(self.attention_bf16, other.attention_bf16),
            bytes: with(self.bytes, other.bytes),
            matmul_bytes: with(self.matmul_bytes, other.matmul_bytes),
            exps: with(self.exps, other.exps),
            conversions: with(self.conversions, other.conversions),
        }
    }

    /// All floating-point operations of matrix products and attention.
    pub fn flops(&self) -> u64 {
        let products = [self.matmul_f32, self.matmul_f16, self.matmul_bf16, self.matmul_fp8];
        let thin = [self.thin_f32, self.thin_bf16];
        let all = products.into_iter().chain(thin).chain([self.attention_f32, self.attention_bf16]);
        all.fold(0, u64::saturating_add)
    }
}

/// A product that ends at the largest number: sizes are whatever somebody wants planned.
pub(crate) fn product_of(factors: &[u64]) -> u64 {
    factors.iter().copied().fold(1, u64::saturating_mul)
}
