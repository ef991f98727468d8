//! Matrix products, and sums over rows.

use super::parameters::{Emit, Rounding, View, plain};
use super::{Summed, sum_rows};
use crate::cuda::CudaError;
use crate::{Compute, Product, Tensor};

/// Rows and columns of what a block makes: `TILE` of the kernel.
const TILE: u64 = 64;
/// Bytes of the tiles of both operands: `DEPTH` columns of `TILE` numbers, and one more against conflicts.
const SHARED_BYTES: u64 = 2 * 16 * (TILE + 1) * 4;

plain! {
    /// A matrix: element (row, column) is number row * row_stride + column * column_stride of a tensor.
    Matrix { values: View, row_stride: u64, column_stride: u64 }
}

pub(super) fn product(op: Product<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let nearest = crate::Rounding::Nearest;
    let whole = |emit: &Emit<'_>, t: &Tensor| Matrix {
        values: emit.view(t),
        row_stride: t.columns(),
        column_stride: 1,
    };
    let transposed = |emit: &Emit<'_>, t: &Tensor| Matrix {
        values: emit.view(t),
        row_stride: 1,
        column_stride: t.columns(),
    };
    let (a, b, c, bias, accumulate, compute, rounding) = match op {
        Product::Linear { x, weight, bias, out, accumulate, compute } => {
            (whole(emit, x), transposed(emit, weight), out, bias, accumulate, compute, nearest)
        }
        Product::LinearBackwardInput { dout, weight, dx, accumulate, compute } => {
            (whole(emit, dout), whole(emit, weight), dx, None, accumulate, compute, nearest)
        }
        Product::LinearBackwardWeight { dout, x, dweight, accumulate, rounding, compute } => {
            (transposed(emit, dout), whole(emit, x), dweight, None, accumulate, compute, rounding)
        }
        Product::BiasBackward { dout, dbias, accumulate } => {
            return sum_rows(emit, Summed::Values(dout), dbias, accumulate);
        }
    };
    let Some([rows, inner, columns]) = op.sides() else { return Ok(()) };
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let blocks = emit.blocks(rows.div_ceil(TILE).saturating_mul(columns.div_ceil(TILE)))?;
    let kernel = emit.kernel("product", [blocks, 1]).shared(SHARED_BYTES).with(a).with(b).with(emit.view(c));
    let kernel = kernel.with(bias.map_or(View::NONE, |bias| emit.view(bias)));
    let kernel = kernel.with(rows).with(inner).with(columns).with(u32::from(compute == Compute::Bf16));
    // What was there is rounded to nearest when nothing is added to it.
    let rounding = if accumulate { rounding } else { nearest };
    emit.launch(kernel.with(u32::from(accumulate)).with(Rounding::from(rounding)))
}
