//! Products of rows that belong together with matrices of their own, and biases of such groups.

use super::parameters::{Emit, Rounding, View, row_blocks, vector_blocks};
use crate::cuda::CudaError;
use crate::{Compute, GroupedProduct, Tensor, WeightedBias};

/// Rows and columns of what a block makes: `GROUP_TILE` of the kernels.
const TILE: u64 = 64;
/// Bytes of the tiles of both operands: `GROUP_DEPTH` lines of `GROUP_PITCH` numbers.
const SHARED_BYTES: u64 = 2 * 16 * (TILE + 1) * 4;

pub(super) fn groups_of(offsets: &Tensor) -> u64 {
    offsets.elements().saturating_sub(1)
}

/// Refuses offsets of rows that there are not.
pub(super) fn check(emit: &mut Emit<'_>, offsets: &Tensor, rows: &Tensor) -> Result<(), CudaError> {
    emit.check("first row of a group", offsets, rows.rows() + 1, rows, false)
}

pub(super) fn product(op: GroupedProduct<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        GroupedProduct::Linear { x, weight, bias, offsets, out, accumulate, compute } => {
            let strides = [1, x.columns()];
            forward(emit, [x, weight, offsets, out], bias, strides, accumulate, compute)
        }
        GroupedProduct::LinearBackwardInput { dout, weight, offsets, dx, accumulate, compute } => {
            let strides = [dx.columns(), 1];
            forward(emit, [dout, weight, offsets, dx], None, strides, accumulate, compute)
        }
        GroupedProduct::LinearBackwardWeight { dout, x, offsets, dweight, accumulate, rounding, compute } => {
            check(emit, offsets, dout)?;
            let (outputs, inputs, groups) = (dout.columns(), x.columns(), groups_of(offsets));
            let tiles = outputs.div_ceil(TILE).saturating_mul(inputs.div_ceil(TILE));
            if tiles == 0 {
                return Ok(());
            }
            let blocks = [emit.blocks(tiles)?, groups as u32];
            let kernel = emit.kernel("grouped_weight", blocks).shared(SHARED_BYTES).with(emit.view(dout));
            let kernel = kernel.with(emit.view(x)).with(emit.address(offsets)).with(emit.view(dweight));
            let kernel = kernel.with(dout.rows()).with(outputs).with(inputs);
            let kernel = kernel.with(u32::from(compute == Compute::Bf16)).with(u32::from(accumulate));
            // What was there is rounded to nearest when nothing is added to it.
            let rounding = if accumulate { rounding } else { crate::Rounding::Nearest };
            emit.launch(kernel.with(Rounding::from(rounding)))
        }
        GroupedProduct::BiasBackward { dout, offsets, dbias, accumulate } => {
            bias_backward(emit, dout, None, offsets, dbias, accumulate)
        }
    }
}

fn forward(
    emit: &mut Emit<'_>,
    [x, weight, offsets, out]: [&Tensor; 4],
    bias: Option<&Tensor>,
    strides: [u64; 2],
    accumulate: bool,
    compute: Compute,
) -> Result<(), CudaError> {
    check(emit, offsets, x)?;
    let compute = compute.beside(x.dtype());
    let (rows, inner, columns, groups) = (x.rows(), x.columns(), out.columns(), groups_of(offsets));
    // A group has a tile more than its rows fill, and so has what is behind all.
    let most = (rows / TILE).saturating_add(groups + 1);
    let tiles = most.saturating_mul(columns.div_ceil(TILE));
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let blocks = [emit.blocks(tiles)?, 1];
    let kernel = emit.kernel("grouped_product", blocks).shared(SHARED_BYTES).with(emit.view(x));
    let kernel = kernel.with(emit.view(weight)).with(emit.address(offsets)).with(groups);
    let kernel = kernel.with(bias.map_or(View::NONE, |bias| emit.view(bias))).with(emit.view(out));
    let kernel =
        [rows, inner, columns].into_iter().chain(strides).fold(kernel, crate::cuda::lower::Launch::with);
    emit.launch(kernel.with(u32::from(compute == Compute::Bf16)).with(u32::from(accumulate)))
}

fn bias_backward(
    emit: &mut Emit<'_>,
    dout: &Tensor,
    factors: Option<[&Tensor; 2]>,
    offsets: &Tensor,
    dbias: &Tensor,
    accumulate: bool,
) -> Result<(), CudaError> {
    check(emit, offsets, dout)?;
    let (values, sources) = (factors.map(|[values, _]| values), factors.map(|[_, sources]| sources));
    let kernel = emit.kernel("grouped_bias", vector_blocks(dbias.elements())).with(emit.view(dout));
    let kernel = kernel.with(emit.address(values)).with(values.map_or(0, Tensor::elements));
    let kernel = kernel.with(emit.address(sources)).with(emit.address(offsets)).with(emit.view(dbias));
    let kernel = kernel.with(groups_of(offsets)).with(dout.rows()).with(dout.columns());
    emit.launch(kernel.with(u32::from(accumulate)))
}

pub(super) fn weighted_bias(op: WeightedBias<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        WeightedBias::Add { bias, factors, sources, offsets, out } => {
            check(emit, offsets, out)?;
            emit.check("place", sources, factors.elements(), factors, true)?;
            let kernel = emit.kernel("weighted_bias", vector_blocks(out.elements())).with(emit.view(bias));
            let kernel = kernel.with(emit.address(factors)).with(factors.elements());
            let kernel = kernel.with(emit.address(sources)).with(emit.address(offsets));
            let kernel = kernel.with(groups_of(offsets)).with(emit.view(out));
            emit.launch(kernel.with(out.rows()).with(out.columns()))
        }
        WeightedBias::Backward { dout, factors, sources, offsets, dbias, accumulate } => {
            emit.check("place", sources, factors.elements(), factors, true)?;
            bias_backward(emit, dout, Some([factors, sources]), offsets, dbias, accumulate)
        }
        WeightedBias::FactorsBackward { dout, bias, places, offsets, dfactors } => {
            check(emit, offsets, dout)?;
            emit.check("row", places, dout.rows(), dout, true)?;
            let kernel = emit.kernel("bias_factors_backward", row_blocks(dfactors.elements()));
            let kernel = kernel.scratch::<f32>().with(emit.view(dout)).with(emit.view(bias));
            let kernel = kernel.with(emit.address(places)).with(emit.address(offsets));
            let kernel = kernel.with(groups_of(offsets)).with(emit.address(dfactors));
            emit.launch(kernel.with(dfactors.elements()).with(dout.rows()).with(dout.columns()))
        }
    }
}
