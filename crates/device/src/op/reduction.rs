//! Sums over all elements of a tensor.

use super::Family;
use crate::Tensor;
use crate::check::Description;

/// Elements of one of the sums that are then added.
pub(crate) const SUM_ELEMENTS: usize = 64 * 1024;

/// One number of a whole tensor.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Reduction<'a> {
    /// `out[0]` = sum of squares of x; out f32 `[1]`. Summed in f64 over pieces of a fixed size, in order.
    SumSquares { x: &'a Tensor, out: &'a Tensor },
}

impl<'a> Family<'a> for Reduction<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Reduction::SumSquares { x, out } => {
                let sums = x.elements().div_ceil(SUM_ELEMENTS as u64);
                Description::new("sum_squares", [x], [out])
                    .floats([x])
                    .f32_vectors([out], 1)
                    .shared(sums * size_of::<f64>() as u64)
            }
        }
    }
}
