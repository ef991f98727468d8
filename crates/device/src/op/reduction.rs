//! Sums over all elements of a tensor, and what a step makes of them.

use super::Family;
use crate::check::Description;
use crate::{Cost, DType, Tensor};

/// Elements of one of the sums that are then added.
pub(crate) const SUM_ELEMENTS: usize = 64 * 1024;

/// One number of a whole tensor.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Reduction<'a> {
    /// `out[0]` = sum of squares of x; out f32 `[1]`. Summed in f64 over pieces of a fixed size, in order. `finite`, f32
    /// `[1]`, becomes 0 where the sum is not finite, and stays as it is otherwise.
    SumSquares { x: &'a Tensor, out: &'a Tensor, finite: Option<&'a Tensor> },
    /// `out[0]` += sum of x f32, in f64 and in the order of its elements; out f64 `[1]`. `finite` as above.
    AddSum { x: &'a Tensor, out: &'a Tensor, finite: &'a Tensor },
    /// The factor on gradients that are `loss_scale` times too large and whose norm shall be at most `max_norm`, as PyTorch's
    /// `clip_grad_norm_` has it: `out[0]` = min(1, max_norm / (norm + 1e-6)) / loss_scale, worked out in f64 of f32 sums of
    /// squares; out f32 `[1]`.
    ClipFactor { squares: &'a Tensor, max_norm: f64, loss_scale: f64, out: &'a Tensor },
}

impl<'a> Family<'a> for Reduction<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Reduction::SumSquares { x, out, finite } => {
                let sums = x.elements().div_ceil(SUM_ELEMENTS as u64);
                Description::new("sum_squares", [x], [out])
                    .changing(finite)
                    .floats([x])
                    .f32_vectors([out], 1)
                    .f32_vectors(finite, 1)
                    .shared(sums * size_of::<f64>() as u64)
            }
            Reduction::AddSum { x, out, finite } => Description::new("add_sum", [x], [])
                .changing([out, finite])
                .f32s([x])
                .that(out.dtype() == DType::F64, || format!("{out:?} is not f64"))
                .vectors([out], 1)
                .f32_vectors([finite], 1),
            Reduction::ClipFactor { squares, out, .. } => {
                Description::new("clip_factor", [squares], [out]).f32s([squares]).f32_vectors([out], 1)
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        match self {
            Reduction::SumSquares { .. } | Reduction::AddSum { .. } => once,
            // One number for each part of the model: nothing beside the time of any operation.
            Reduction::ClipFactor { .. } => Cost::default(),
        }
    }
}
