//! Row by row: norms, positions, rows of tables, lengths of rows.

use super::grouped::{check, groups_of};
use super::parameters::{Emit, Rounding, View, row_blocks, vector_blocks};
use super::{Summed, sum_rows};
use crate::cuda::CudaError;
use crate::{Embedding, HeadColumns, Heads, Magnitude, Norm, Position, Tensor};

/// Shared memory where `embedding_backward` has a bit for each place, and one for each word of these.
const PLACES_BYTES: u64 = 4 * (256 + 256 / 32);

pub(super) fn norm(op: Norm<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        Norm::RmsNorm { x, weight, weight_offset, epsilon, out, rstd } => {
            let kernel = emit.kernel("rms_norm", row_blocks(x.rows())).scratch::<f32>().with(emit.view(x));
            let kernel = kernel.with(emit.view(weight)).with(weight_offset).with(epsilon);
            let kernel = kernel.with(emit.view(out)).with(emit.address(rstd));
            emit.launch(kernel.with(x.rows()).with(x.columns()))
        }
        Norm::LayerNorm { x, weight, bias, epsilon, out, mean, rstd } => {
            let kernel = emit.kernel("layer_norm", row_blocks(x.rows())).scratch::<f32>().with(emit.view(x));
            let kernel = kernel.with(emit.view(weight)).with(emit.view(bias)).with(epsilon);
            let kernel = kernel.with(emit.view(out)).with(emit.address(mean)).with(emit.address(rstd));
            emit.launch(kernel.with(x.rows()).with(x.columns()))
        }
        Norm::RmsNormBackward { x, weight, weight_offset, rstd, dout, dx, dweight, accumulate_weight } => {
            backward(emit, [x, weight, dout, dx], weight_offset, None, rstd)?;
            let units = Summed::Units(dout, x, None, rstd);
            dweight.map_or(Ok(()), |dweight| sum_rows(emit, units, dweight, accumulate_weight))
        }
        Norm::LayerNormBackward { x, weight, mean, rstd, dout, dx, dweight, dbias, accumulate_weight } => {
            backward(emit, [x, weight, dout, dx], 0.0, Some(mean), rstd)?;
            let units = Summed::Units(dout, x, Some(mean), rstd);
            dweight.map_or(Ok(()), |dweight| sum_rows(emit, units, dweight, accumulate_weight))?;
            dbias.map_or(Ok(()), |dbias| sum_rows(emit, Summed::Values(dout), dbias, accumulate_weight))
        }
    }
}

fn backward(
    emit: &mut Emit<'_>,
    [x, weight, dout, dx]: [&Tensor; 4],
    offset: f32,
    mean: Option<&Tensor>,
    rstd: &Tensor,
) -> Result<(), CudaError> {
    let kernel = emit.kernel("norm_backward", row_blocks(x.rows())).scratch::<f32>().with(emit.view(x));
    let kernel =
        kernel.with(emit.view(weight)).with(offset).with(emit.address(mean)).with(emit.address(rstd));
    let kernel = kernel.with(emit.view(dout)).with(emit.view(dx));
    emit.launch(kernel.with(x.rows()).with(x.columns()))
}

pub(super) fn position(op: Position<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let Position::Rope { x, positions, cos, sin, heads: rotated, inverse } = op;
    emit.check("position", positions, cos.rows(), cos, false)?;
    let (rows, heads, pairs) = (x.rows(), x.columns() / rotated.dim.max(1), cos.columns());
    let kernel = emit.kernel("rope", vector_blocks((rows * heads * pairs).div_ceil(4))).with(emit.view(x));
    let kernel = [positions, cos, sin].into_iter().fold(kernel, |kernel, t| kernel.with(emit.address(t)));
    let numbers = [cos.rows(), rows, heads, rotated.dim, rotated.first, pairs];
    let kernel = numbers.into_iter().fold(kernel, super::Launch::with);
    emit.launch(kernel.with(u32::from(rotated.interleaved)).with(u32::from(inverse)))
}

pub(super) fn heads(op: Heads<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let (name, written, HeadColumns { tensor: x, first, stride }, to, heads, width) = match op {
        Heads::Copy { from, to, heads, width } => ("copy_heads", heads, from, to, heads, width),
        Heads::Sum { from, to, heads, width } => ("sum_heads", 1, from, to, heads, width),
    };
    let kernel = emit.kernel(name, vector_blocks(x.rows() * written * width)).with(emit.view(x));
    let kernel = kernel.with(x.columns()).with(first).with(stride).with(emit.view(to.tensor));
    let kernel = kernel.with(to.tensor.columns()).with(to.first);
    let kernel = if matches!(op, Heads::Copy { .. }) { kernel.with(to.stride) } else { kernel };
    emit.launch(kernel.with(x.rows()).with(heads).with(width))
}

pub(super) fn embedding(op: Embedding<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let look_up = |emit: &mut Emit<'_>, tokens: &Tensor, table: &Tensor, first_row: u64, out: &Tensor| {
        let kernel = emit.kernel("embedding", row_blocks(out.rows())).with(emit.address(tokens));
        let kernel = kernel.with(emit.view(table)).with(first_row).with(table.rows()).with(emit.view(out));
        emit.launch(kernel.with(tokens.elements()).with(table.columns()))
    };
    match op {
        Embedding::Lookup { tokens, table, out } => {
            emit.check("token", tokens, table.rows(), table, false)?;
            look_up(emit, tokens, table, 0, out)
        }
        Embedding::LookupPiece { tokens, table, first_row, out } => {
            look_up(emit, tokens, table, first_row, out)
        }
        Embedding::Backward { tokens, dout, dtable, first_row, rounding } => {
            let rows = tokens.elements();
            let kernel = emit.kernel("embedding_backward", row_blocks(rows)).shared(PLACES_BYTES);
            let kernel = kernel.with(emit.address(tokens)).with(emit.view(dout)).with(emit.view(dtable));
            let kernel = kernel.with(first_row).with(dtable.rows()).with(rows).with(dtable.columns());
            emit.launch(kernel.with(Rounding::from(rounding)))
        }
    }
}

pub(super) fn magnitude(op: Magnitude<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let kernel = match op {
        Magnitude::RowSquares { x, out } => {
            let kernel = emit.kernel("row_squares", row_blocks(x.rows())).scratch::<f64>().with(emit.view(x));
            kernel.with(emit.address(out)).with(x.rows()).with(x.columns())
        }
        Magnitude::RowLengths { squares, cross, gram, b, scale, lengths } => {
            let kernel = emit.kernel("row_lengths", vector_blocks(b.rows()));
            let tensors = [squares, cross, gram, b];
            let kernel = tensors.into_iter().fold(kernel, |kernel, t| kernel.with(emit.address(t)));
            kernel
                .with(scale)
                .with(emit.address(lengths))
                .with(b.rows())
                .with(b.columns())
                .with(cross.columns())
        }
        Magnitude::ScaleColumns { x, factors, divisors, bias, offsets: Some(offsets), out, accumulate } => {
            check(emit, offsets, x)?;
            let n = out.elements();
            let kernel = emit.kernel("grouped_scale_columns", vector_blocks(n)).with(emit.view(x));
            let kernel = kernel.with(emit.address(factors)).with(emit.address(divisors));
            let kernel = kernel.with(bias.map_or(View::NONE, |bias| emit.view(bias)));
            let kernel = kernel.with(emit.address(offsets)).with(groups_of(offsets)).with(emit.view(out));
            kernel.with(n).with(x.columns()).with(u32::from(accumulate))
        }
        Magnitude::ScaleColumns { x, factors, divisors, bias, offsets: None, out, accumulate } => {
            let n = out.elements();
            let kernel = emit.kernel("scale_columns", vector_blocks(n)).with(emit.view(x));
            let kernel = kernel.with(emit.address(factors)).with(emit.address(divisors));
            let kernel = kernel.with(bias.map_or(View::NONE, |bias| emit.view(bias))).with(emit.view(out));
            kernel.with(n).with(x.columns()).with(u32::from(accumulate))
        }
        Magnitude::ColumnDots { a, b, divisors, offsets: Some(offsets), out, accumulate } => {
            check(emit, offsets, a)?;
            let kernel = emit.kernel("grouped_column_dots", vector_blocks(out.elements()));
            let kernel = kernel.with(emit.view(a)).with(emit.view(b)).with(emit.address(divisors));
            let kernel = kernel.with(emit.address(offsets)).with(emit.view(out)).with(groups_of(offsets));
            kernel.with(a.rows()).with(a.columns()).with(u32::from(accumulate))
        }
        Magnitude::ColumnDots { a, b, divisors, offsets: None, out, accumulate } => {
            return sum_rows(emit, Summed::Products(a, b, divisors), out, accumulate);
        }
    };
    emit.launch(kernel)
}
