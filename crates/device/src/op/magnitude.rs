//! Lengths of a weight's rows, and factors and sums of columns: what DoRA (Liu et al. 2024) takes beside products.

use super::Family;
use crate::Tensor;
use crate::check::Description;

/// A length, a factor or a sum for each of a linear's outputs.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Magnitude<'a> {
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
}

impl<'a> Family<'a> for Magnitude<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Magnitude::RowSquares { x, out } => {
                Description::new("row_squares", [x], [out]).weight(x).f32_vectors([out], x.rows())
            }
            Magnitude::RowLengths { squares, cross, gram, b, lengths, .. } => {
                Description::new("row_lengths", [squares, cross, gram, b], [lengths])
                    .f32s([cross, gram, b])
                    .f32_vectors([squares, lengths], b.rows())
                    .size(cross, b.columns(), b.rows())
                    .size(gram, b.columns(), b.columns())
            }
            Magnitude::ScaleColumns { x, factors, divisors, bias, out, .. } => {
                Description::new("scale_columns", [x, factors], [out])
                    .reading(divisors)
                    .reading(bias)
                    .floats([x, out])
                    .floats(bias)
                    .same_size(x, [out])
                    .f32_vectors([factors], x.columns())
                    .f32_vectors(divisors, x.columns())
                    .vectors(bias, x.columns())
            }
            Magnitude::ColumnDots { a, b, divisors, out, .. } => {
                Description::new("column_dots", [a, b, divisors], [out])
                    .floats([a, b, out])
                    .same_size(a, [b])
                    .f32_vectors([divisors], a.columns())
                    .vectors([out], a.columns())
                    .row_sums(a.rows(), divisors, 1)
            }
        }
    }
}
