//! Matrix products, and sums over rows.

use super::parameters::{Emit, Rounding, View, plain};
use super::tiles::{Side, WholeTiles};
use super::{Launch, Summed, sum_rows};
use crate::cuda::CudaError;
use crate::{Compute, DType, Product, Tensor};

/// Rows and columns of what a block makes: `TILE` of the kernels.
const TILE: u64 = 128;
/// Bytes of the tiles of both operands on ordinary units: `DEPTH` lines of `PITCH` numbers.
const SHARED_BYTES: u64 = 2 * 16 * (TILE + 4) * 4;
/// The same for tensor cores: `STAGES` times `STEP` numbers of 16 bits for each row and column.
const SHARED_BYTES_80: u64 = 3 * 2 * 32 * TILE * 2;
/// Rows of which a product has a kernel of its own, at most: `FEW` of the kernels.
const FEW: u64 = 16;
/// Columns that a block of that kernel has, and bytes of what its warps add up.
const FEW_COLUMNS: u64 = 8;
const FEW_SHARED_BYTES: u64 = 8 * FEW * FEW_COLUMNS * 4;

plain! {
    /// A matrix: element (row, column) is number row * row_stride + column * column_stride of a tensor.
    Matrix { values: View, row_stride: u64, column_stride: u64 }
}

/// The tensors of a product, the first two as matrices.
struct Operands<'a> {
    a: (&'a Tensor, Matrix),
    b: (&'a Tensor, Matrix),
    out: &'a Tensor,
    bias: Option<&'a Tensor>,
}

/// What the kernels of a form for tensor cores are called: in bf16, in f16, and of whole tiles, wide and narrow.
struct Names {
    bf16: &'static str,
    f16: &'static str,
    whole: [&'static str; 2],
    /// Whether lines of either operand are along the inner length: each kernel of whole tiles is for one form.
    along: [bool; 2],
}

const FORWARD: Names = Names {
    bf16: "product_bf16",
    f16: "product_f16",
    whole: ["product_90_wide", "product_90"],
    along: [true, true],
};
const OF_INPUT: Names = Names {
    bf16: "product_bf16_input",
    f16: "product_f16_input",
    whole: ["product_90_wide_input", "product_90_input"],
    along: [true, false],
};
const OF_WEIGHT: Names = Names {
    bf16: "product_bf16_weight",
    f16: "product_f16_weight",
    whole: ["product_90_wide_weight", "product_90_weight"],
    along: [false, false],
};

pub(super) fn product(op: Product<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let nearest = crate::Rounding::Nearest;
    let columns = |t: &Tensor| t.columns();
    let matrix = |emit: &Emit<'_>, t, row_stride, column_stride| Matrix {
        values: emit.view(t),
        row_stride,
        column_stride,
    };
    let whole = |emit: &Emit<'_>, t| matrix(emit, t, columns(t), 1);
    let transposed = |emit: &Emit<'_>, t| matrix(emit, t, 1, columns(t));
    let (names, operands, accumulate, compute, rounding) = match op {
        Product::Linear { x, weight, bias, out, accumulate, compute } => {
            let (a, b) = ((x, whole(emit, x)), (weight, transposed(emit, weight)));
            (&FORWARD, Operands { a, b, out, bias }, accumulate, compute, nearest)
        }
        Product::LinearBackwardInput { dout, weight, dx, accumulate, compute } => {
            let (a, b) = ((dout, whole(emit, dout)), (weight, whole(emit, weight)));
            let operands = Operands { a, b, out: dx, bias: None };
            (&OF_INPUT, operands, accumulate, compute, nearest)
        }
        Product::LinearBackwardWeight { dout, x, dweight, accumulate, rounding, compute } => {
            let (a, b) = ((dout, transposed(emit, dout)), (x, whole(emit, x)));
            let operands = Operands { a, b, out: dweight, bias: None };
            (&OF_WEIGHT, operands, accumulate, compute, rounding)
        }
        Product::BiasBackward { dout, dbias, accumulate } => {
            return sum_rows(emit, Summed::Values(dout), dbias, accumulate);
        }
    };
    let Some([rows, inner, columns]) = op.sides() else { return Ok(()) };
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let Operands { a: (x, a), b: (weight, b), out, bias } = operands;
    let compute = compute.beside(x.dtype());
    // Products of two numbers of f16 are exact in f32: tensor cores make them of operands as they are.
    let f16 = compute == Compute::F32 && [x, weight].iter().all(|t| t.dtype() == DType::F16);
    let bf16 = compute == Compute::Bf16;
    // What was there is rounded to nearest when nothing is added to it.
    let rounding = if accumulate { rounding } else { nearest };
    if bf16 && emit.has_whole_tiles() && !few_rows(&op, rows) {
        let [a, b] =
            [(x, names.along[0]), (weight, names.along[1])].map(|(tensor, along)| Side { tensor, along });
        let (sides, names) = ([rows, inner, columns], names.whole);
        if (WholeTiles { a, b, out, bias, sides, accumulate, rounding, names }).launch(emit)? {
            return Ok(());
        }
    }
    let tiles = rows.div_ceil(TILE).saturating_mul(columns.div_ceil(TILE));
    let few = few_rows(&op, rows);
    let tensor_cores = emit.has_tensor_cores() && (bf16 || f16 && !few);
    let (name, count, shared) = match (few, tensor_cores) {
        (true, true) => ("product_bf16_few", columns.div_ceil(FEW_COLUMNS), FEW_SHARED_BYTES),
        (true, false) => ("product_few", columns.div_ceil(FEW_COLUMNS), 0),
        (false, true) => (if f16 { names.f16 } else { names.bf16 }, tiles, SHARED_BYTES_80),
        (false, false) => ("product", tiles, SHARED_BYTES),
    };
    let kernel = emit.kernel(name, [emit.blocks(count)?, 1]).shared(shared);
    let kernel = if few { kernel.with(a.values).with(b.values) } else { kernel.with(a).with(b) };
    let kernel = kernel.with(emit.view(out)).with(bias.map_or(View::NONE, |bias| emit.view(bias)));
    let kernel = [rows, inner, columns].into_iter().fold(kernel, Launch::with);
    let kernel = if tensor_cores { kernel } else { kernel.with(u32::from(bf16)) };
    emit.launch(kernel.with(u32::from(accumulate)).with(Rounding::from(rounding)))
}

/// Whether a product has so few rows that the weight is read once for all of them.
fn few_rows(op: &Product<'_>, rows: u64) -> bool {
    matches!(op, Product::Linear { .. }) && rows <= FEW
}
