//! Sums over all elements of a tensor, and what a step makes of them.

use super::Family;
use crate::check::Description;
use crate::{Cost, DType, ExactSum, Tensor};

/// Elements of a task of a sum.
pub(crate) const SUM_ELEMENTS: usize = 64 * 1024;

/// Elements that are summed in f64, in order, before anything is added exactly.
pub(crate) const RUN_ELEMENTS: usize = 256;

/// One number of a whole tensor.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Reduction<'a> {
    /// `out[0]` = sum of squares of x; out f32 `[1]`. Runs of 256 elements are summed in f64, in order; the runs are added
    /// exactly. `finite`, f32 `[1]`, becomes 0 where the sum is not finite, and stays as it is otherwise.
    SumSquares { x: &'a Tensor, out: &'a Tensor, finite: Option<&'a Tensor> },
    /// The same, not rounded: out is an [`ExactSum`], U8. Sums of pieces of a tensor that are whole runs, but for the last
    /// one, add up to that of the tensor, in whichever order.
    ExactSquares { x: &'a Tensor, out: &'a Tensor },
    /// `out[i]` += `x[i]`, exactly; rows of [`ExactSum`]s, U8 `[N, ExactSum::BYTES]`.
    AddExact { x: &'a Tensor, out: &'a Tensor },
    /// `out[i]` = `x[i]`, rounded; x as in `AddExact`, out f32 `[N, 1]`. `finite` as above.
    RoundExact { x: &'a Tensor, out: &'a Tensor, finite: &'a Tensor },
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
                    .shared(sums * ExactSum::BYTES as u64)
            }
            Reduction::ExactSquares { x, out } => {
                let sums = x.elements().div_ceil(SUM_ELEMENTS as u64);
                Description::new("exact_squares", [x], [out])
                    .floats([x])
                    .that(are_exact(out, 1), || format!("{out:?} is no exact sum"))
                    .shared(sums * ExactSum::BYTES as u64)
            }
            Reduction::AddExact { x, out } => Description::new("add_exact", [x], [])
                .changing([out])
                .that(are_exact(x, x.rows()) && are_exact(out, x.rows()), || {
                    format!("{x:?} and {out:?} are not as many exact sums")
                }),
            Reduction::RoundExact { x, out, finite } => Description::new("round_exact", [x], [out])
                .changing([finite])
                .that(are_exact(x, x.rows()), || format!("{x:?} are no exact sums"))
                .f32_vectors([out], x.rows())
                .f32_vectors([finite], 1),
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
            Reduction::SumSquares { .. } | Reduction::ExactSquares { .. } | Reduction::AddSum { .. } => once,
            // One number for each part of the model: nothing beside the time of any operation.
            Reduction::ClipFactor { .. } | Reduction::AddExact { .. } | Reduction::RoundExact { .. } => {
                Cost::default()
            }
        }
    }
}

/// Whether a tensor holds so many exact sums.
fn are_exact(x: &Tensor, count: u64) -> bool {
    x.dtype() == DType::U8 && x.elements() == count.saturating_mul(ExactSum::BYTES as u64)
}
