//! Matrix products: a linear forward and backward, and its bias.

use super::{Family, MAX_PARTIAL_COLUMNS, Rounding, RowPieces};
use crate::check::Description;
use crate::cost::{Arithmetic, Multiplied};
use crate::{Cost, DType, Tensor};

/// The precision in which a matrix product multiplies; sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Operands as f32.
    F32,
    /// Operands rounded to bf16.
    Bf16,
    /// Rows of 8-bit integers, each 32 of which share a scale, where a CPU multiplies them with a weight of integer codes: any number of
    /// them with AVX-512 VNNI, but of bf16 ones beside AMX, as without AVX-512 VNNI, at most [`FEW_ROWS`](super::FEW_ROWS). Else
    /// [`Bf16`](Compute::Bf16) for rows of bf16, and [`F32`](Compute::F32) for others.
    Int8,
}

impl Compute {
    /// What multiplies rows of `dtype` where integers do not.
    pub fn beside(self, dtype: DType) -> Compute {
        match self {
            Compute::Int8 if dtype == DType::Bf16 => Compute::Bf16,
            Compute::Int8 => Compute::F32,
            Compute::F32 | Compute::Bf16 => self,
        }
    }
}

/// A product, or the gradient of a bias. Operands may be 8-bit floats: their values are bf16 numbers, so that
/// [`Compute::Bf16`] multiplies them exactly.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Product<'a> {
    /// out (+)= x weight^T + bias; x `[N, I]`, weight `[O, I]`, bias `[O]`, out `[N, O]`.
    Linear {
        x: &'a Tensor,
        weight: &'a Tensor,
        bias: Option<&'a Tensor>,
        out: &'a Tensor,
        accumulate: bool,
        compute: Compute,
    },
    /// dx (+)= dout weight; dout `[N, O]`, weight `[O, I]`, dx `[N, I]`. May be computed in pieces: cut weight by rows and
    /// dout by the matching columns at multiples of [`PIECE_ROWS`](crate::PIECE_ROWS). Assign the first product to an f32
    /// dx and add the rest in order: the bits are those of the uncut product, also after a cast to a narrow type.
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
}

impl<'a> Family<'a> for Product<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Product::Linear { x, weight, bias, out, .. } => Description::new("linear", [x, weight], [out])
                .reading(bias)
                .operands([x])
                .floats([out])
                .weight(weight)
                .linear(x, weight, out)
                .each(bias, |op, bias| op.floats([bias]).vectors([bias], weight.rows())),
            Product::LinearBackwardInput { dout, weight, dx, .. } => {
                Description::new("linear_backward_input", [dout, weight], [dx])
                    .operands([dout])
                    .floats([dx])
                    .weight(weight)
                    .linear(dx, weight, dout)
            }
            Product::LinearBackwardWeight { dout, x, dweight, .. } => {
                Description::new("linear_backward_weight", [dout, x], [dweight])
                    .operands([dout, x])
                    .floats([dweight])
                    .linear(x, dweight, dout)
            }
            // More columns than there is room for are taken by turns.
            Product::BiasBackward { dout, dbias, .. } => {
                let columns = dout.columns().min(MAX_PARTIAL_COLUMNS as u64);
                let pieces = RowPieces::new(dout.rows() as usize, columns as usize).count as u64;
                Description::new("bias_backward", [dout], [dbias])
                    .floats([dout, dbias])
                    .vectors([dbias], dout.columns())
                    .shared(pieces * columns * size_of::<f32>() as u64)
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        let (operands, compute) = match *self {
            Product::Linear { x, weight, compute, .. } => ([x, weight], compute),
            Product::LinearBackwardInput { dout, weight, compute, .. } => ([dout, weight], compute),
            Product::LinearBackwardWeight { dout, x, compute, .. } => ([dout, x], compute),
            Product::BiasBackward { .. } => return once,
        };
        let arithmetic = Arithmetic::of(compute, operands);
        Cost { matmul: self.sides().map(|sides| Multiplied::new(arithmetic, sides)), ..once }
    }
}

impl Product<'_> {
    /// Rows, inner length and columns of what is multiplied: `[rows, inner]` times `[inner, columns]`.
    pub fn sides(&self) -> Option<[u64; 3]> {
        let (out, inner) = match *self {
            Product::Linear { x, out, .. } => (out, x.columns()),
            Product::LinearBackwardInput { dout, dx, .. } => (dx, dout.columns()),
            Product::LinearBackwardWeight { dout, dweight, .. } => (dweight, dout.rows()),
            Product::BiasBackward { .. } => return None,
        };
        Some([out.rows(), inner, out.columns()])
    }
}

impl Description<'_> {
    /// What a product multiplies beside a weight.
    fn operands<'t>(self, tensors: impl IntoIterator<Item = &'t Tensor>) -> Self {
        self.each(tensors, |op, t| {
            op.that(t.dtype().is_float() || t.dtype().is_fp8(), || {
                format!("{t:?} is not f32, bf16, f16, e4m3 or e5m2")
            })
        })
    }

    fn linear(self, x: &Tensor, weight: &Tensor, out: &Tensor) -> Self {
        let fits =
            x.columns() == weight.columns() && out.columns() == weight.rows() && x.rows() == out.rows();
        self.that(fits, || format!("{x:?} times {weight:?} does not give {out:?}"))
    }
}
