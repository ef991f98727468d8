//! Lengths of a weight's rows, and factors and sums of columns: what DoRA (Liu et al. 2024) takes beside products.

use super::{Family, MAX_PARTIAL_COLUMNS};
use crate::Tensor;
use crate::check::Description;

/// A length, a factor or a sum for each of a linear's outputs. Of a stack of E matrices each has its own; a row of x, a or b goes with
/// matrix e where it is one of `offsets[e]..offsets[e + 1]` (u32 `[E + 1]`, the first 0). Rows behind the last have no matrix, and are
/// zeros of a linear.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Magnitude<'a> {
    /// `out[o]` = sum of squares of row o of x, which may be of any storage of weights; x `[O, I]`, out f32 `[O]`.
    RowSquares { x: &'a Tensor, out: &'a Tensor },
    /// `lengths[o]` = |W_o + scale B_o A|, the length of a row with its adapter, from `squares` = |W_o|^2, `cross` = A W^T
    /// `[r, O]`, `gram` = A A^T `[r, r]` and b = B `[O, r]`. All f32. Of a stack: `[E, r, O]`, `[E, r, r]`, `[E, O, r]`.
    RowLengths {
        squares: &'a Tensor,
        cross: &'a Tensor,
        gram: &'a Tensor,
        b: &'a Tensor,
        scale: f32,
        lengths: &'a Tensor,
    },
    /// `out[n, o]` (+)= `x[n, o] * factors[o] / divisors[o] + bias[o]`; x, out `[N, O]`; factors, divisors f32 `[O]`, of a stack
    /// `[E, O]`, and bias alike.
    ScaleColumns {
        x: &'a Tensor,
        factors: &'a Tensor,
        divisors: Option<&'a Tensor>,
        bias: Option<&'a Tensor>,
        offsets: Option<&'a Tensor>,
        out: &'a Tensor,
        accumulate: bool,
    },
    /// `out[o]` (+)= sum over n of `a[n, o] * b[n, o]`, over `divisors[o]`; a, b `[N, O]`; divisors f32, out `[O]`, of a stack `[E, O]`.
    ColumnDots {
        a: &'a Tensor,
        b: &'a Tensor,
        divisors: &'a Tensor,
        offsets: Option<&'a Tensor>,
        out: &'a Tensor,
        accumulate: bool,
    },
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
                    .size(gram, stack_of(gram) * b.columns(), b.columns())
                    .size(cross, stack_of(gram) * b.columns(), b.rows() / stack_of(gram))
                    .that(b.rows().is_multiple_of(stack_of(gram)), || {
                        format!("{b:?} is not a matrix for each of {gram:?}")
                    })
            }
            Magnitude::ScaleColumns { x, factors, divisors, bias, offsets, out, .. } => {
                let all = groups(offsets) * x.columns();
                Description::new("scale_columns", [x, factors], [out])
                    .reading(divisors)
                    .reading(bias)
                    .grouped_by(offsets)
                    .floats([x, out])
                    .floats(bias)
                    .same_size(x, [out])
                    .f32_vectors([factors], all)
                    .f32_vectors(divisors, all)
                    .vectors(bias, all)
            }
            Magnitude::ColumnDots { a, b, divisors, offsets, out, .. } => {
                let (columns, most) = (a.columns(), MAX_PARTIAL_COLUMNS as u64);
                Description::new("column_dots", [a, b, divisors], [out])
                    .grouped_by(offsets)
                    .floats([a, b, out])
                    .same_size(a, [b])
                    .f32_vectors([divisors], groups(offsets) * columns)
                    .vectors([out], groups(offsets) * columns)
                    .sums_of_pieces(a.rows(), columns)
                    .that(columns <= most, || format!("{divisors:?} has more than {most} columns"))
            }
        }
    }
}

/// Matrices of a stack, by the products of their A's.
fn stack_of(gram: &Tensor) -> u64 {
    (gram.rows() / gram.columns().max(1)).max(1)
}

/// Matrices that rows are of.
fn groups(offsets: Option<&Tensor>) -> u64 {
    offsets.map_or(1, |offsets| offsets.elements().saturating_sub(1))
}

impl<'a> Description<'a> {
    fn grouped_by(self, offsets: Option<&'a Tensor>) -> Self {
        self.reading(offsets).each(offsets, |op, offsets| {
            op.u32(offsets).that(offsets.elements() > 1, || format!("{offsets:?} are of no matrix"))
        })
    }
}
