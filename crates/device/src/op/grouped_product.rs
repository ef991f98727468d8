//! Products with stacks of matrices: rows that belong together are multiplied with a matrix of their own. Experts are.

use super::{Compute, Family, MAX_PARTIAL_COLUMNS, Rounding};
use crate::check::Description;
use crate::cost::{Arithmetic, Multiplied};
use crate::{Cost, Tensor};

/// A product with a stack `[E, O, I]` of matrices. Rows `offsets[e]..offsets[e + 1]` are multiplied with matrix e; offsets u32
/// `[E + 1]`, the first 0. The matrices of a stack are whole runs of its type ([`DType::run_elements`](crate::DType::run_elements)).
/// Rows behind the last have no matrix, and products of zeros. Which rows have which matrix changes neither
/// shapes nor the memory that is needed, and of a matrix without rows nothing is read.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum GroupedProduct<'a> {
    /// `out (+)= x weight[e]^T + bias[e]`; x `[R, I]`, weight `[E, O, I]`, bias `[E, O]`, out `[R, O]`.
    Linear {
        x: &'a Tensor,
        weight: &'a Tensor,
        bias: Option<&'a Tensor>,
        offsets: &'a Tensor,
        out: &'a Tensor,
        accumulate: bool,
        compute: Compute,
    },
    /// `dx (+)= dout weight[e]`; dout `[R, O]`, weight `[E, O, I]`, dx `[R, I]`.
    LinearBackwardInput {
        dout: &'a Tensor,
        weight: &'a Tensor,
        offsets: &'a Tensor,
        dx: &'a Tensor,
        accumulate: bool,
        compute: Compute,
    },
    /// `dweight[e] (+)= dout^T x` over the rows of e; dout `[R, O]`, x `[R, I]`, dweight `[E, O, I]`. `rounding` as in
    /// [`Product::LinearBackwardWeight`](crate::Product::LinearBackwardWeight).
    LinearBackwardWeight {
        dout: &'a Tensor,
        x: &'a Tensor,
        offsets: &'a Tensor,
        dweight: &'a Tensor,
        accumulate: bool,
        rounding: Rounding,
        compute: Compute,
    },
    /// `dbias[e]` (+)= sum over the rows of e of dout; dout `[R, O]`, dbias `[E, O]`.
    BiasBackward { dout: &'a Tensor, offsets: &'a Tensor, dbias: &'a Tensor, accumulate: bool },
}

impl<'a> Family<'a> for GroupedProduct<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            GroupedProduct::Linear { x, weight, bias, offsets, out, .. } => {
                Description::new("grouped_linear", [x, weight, offsets], [out])
                    .reading(bias)
                    .floats([x, out])
                    .weight(weight)
                    .grouped(offsets, x, weight, out)
                    .each(bias, |op, bias| op.floats([bias]).vectors([bias], weight.rows()))
            }
            GroupedProduct::LinearBackwardInput { dout, weight, offsets, dx, .. } => {
                Description::new("grouped_linear_backward_input", [dout, weight, offsets], [dx])
                    .floats([dout, dx])
                    .weight(weight)
                    .grouped(offsets, dx, weight, dout)
            }
            GroupedProduct::LinearBackwardWeight { dout, x, offsets, dweight, .. } => {
                Description::new("grouped_linear_backward_weight", [dout, x, offsets], [dweight])
                    .floats([dout, x, dweight])
                    .grouped(offsets, x, dweight, dout)
            }
            GroupedProduct::BiasBackward { dout, offsets, dbias, .. } => {
                let columns = dout.columns().min(MAX_PARTIAL_COLUMNS as u64);
                Description::new("grouped_bias_backward", [dout, offsets], [dbias])
                    .floats([dout, dbias])
                    .groups(offsets, dbias)
                    .that(dbias.elements() == dbias.rows() * dout.columns(), || {
                        format!("{dout:?} does not add up to {dbias:?}")
                    })
                    .sums_of_pieces(dout.rows(), columns)
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        let (operands, compute, sides) = match *self {
            GroupedProduct::Linear { x, weight, out, compute, .. } => {
                ([x, weight], compute, [out.rows(), x.columns(), out.columns()])
            }
            GroupedProduct::LinearBackwardInput { dout, weight, dx, compute, .. } => {
                ([dout, weight], compute, [dx.rows(), dout.columns(), dx.columns()])
            }
            GroupedProduct::LinearBackwardWeight { dout, x, compute, .. } => {
                ([dout, x], compute, [dout.columns(), x.rows(), x.columns()])
            }
            GroupedProduct::BiasBackward { .. } => return once,
        };
        let arithmetic = Arithmetic::of(compute, operands);
        Cost { matmul: Some(Multiplied::new(arithmetic, sides)), ..once }
    }
}

impl Description<'_> {
    /// As many matrices as there are groups.
    fn groups(self, offsets: &Tensor, stack: &Tensor) -> Self {
        let groups = offsets.elements().saturating_sub(1);
        self.u32(offsets).that(groups > 0 && stack.rows().is_multiple_of(groups), || {
            format!("{stack:?} is not a matrix for each group of {offsets:?}")
        })
    }

    fn grouped(self, offsets: &Tensor, x: &Tensor, stack: &Tensor, out: &Tensor) -> Self {
        let groups = offsets.elements().saturating_sub(1).max(1);
        let fits = x.columns() == stack.columns()
            && out.columns() == stack.rows() / groups
            && x.rows() == out.rows()
            && x.rows() < u64::from(u32::MAX);
        let matrix = stack.elements() / groups;
        let apart = matrix.is_multiple_of(stack.dtype().run_elements()) && !stack.dtype().is_fp8();
        self.groups(offsets, stack)
            .that(fits, || format!("{x:?} times a matrix of {stack:?} does not give {out:?}"))
            .that(apart, || format!("a matrix of {stack:?} cannot be read by itself"))
    }
}
