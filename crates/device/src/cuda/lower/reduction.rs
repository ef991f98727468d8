//! Sums over whole tensors.

use super::parameters::{Emit, Launch, plain, vector_blocks};
use crate::cuda::CudaError;
use crate::{ExactSum, Reduction, Tensor};

/// Words of an exact sum.
const WORDS: u64 = (ExactSum::BYTES / 8) as u64;
/// Elements of which a block of `exact_squares` has the squares at once, and its shared memory: sums of 32 runs' lanes, and exact sums.
const AT_ONCE: u64 = 32 * 256;
const SQUARES_BYTES: u64 = 32 * (32 + 1) * 8 + 32 * WORDS * 8;
/// Elements that a block sums up in f64.
const EACH: u64 = 32 * 1024;

plain! {
    /// Where the factor of an element lies: `Factors` of the kernels.
    Factors { rows: u64, columns: u64, width: u64, whole: u32, unused: u32 }
}

pub(super) fn reduction(op: Reduction<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    match op {
        Reduction::SumSquares { x, out, finite } => {
            let sum = emit.workspace(0);
            exact_squares(emit, x, sum)?;
            let kernel = emit.kernel("round_exact", [1, 1]).with(sum).with(emit.address(out));
            emit.launch(kernel.with(emit.address(finite)).with(1u64))
        }
        Reduction::ExactSquares { x, out } => {
            let sum = emit.address(out);
            exact_squares(emit, x, sum)?;
            let kernel = emit.kernel("carry_exact", [1, 1]).with(sum);
            emit.launch(kernel)
        }
        Reduction::AddExact { x, out } => {
            let kernel = emit.kernel("add_exact", vector_blocks(x.rows())).with(emit.address(x));
            emit.launch(kernel.with(emit.address(out)).with(x.rows()))
        }
        Reduction::RoundExact { x, out, finite } => {
            let kernel = emit.kernel("round_exact", vector_blocks(x.rows())).with(emit.address(x));
            let kernel = kernel.with(emit.address(out)).with(emit.address(finite));
            emit.launch(kernel.with(x.rows()))
        }
        Reduction::AddSum { x, out, finite } => {
            let kernel = emit.kernel("add_sum", [1, 1]).scratch::<f32>().with(emit.address(x));
            emit.launch(kernel.with(x.elements()).with(emit.address(out)).with(emit.address(finite)))
        }
        Reduction::ClipFactor { squares, max_norm, loss_scale, out } => {
            let kernel = emit.kernel("clip_factor", [1, 1]).with(emit.address(squares));
            let kernel = kernel.with(squares.elements()).with(max_norm).with(loss_scale);
            emit.launch(kernel.with(emit.address(out)))
        }
    }
}

/// Puts the sum of squares of x, exact, at an address.
fn exact_squares(emit: &mut Emit<'_>, x: &Tensor, sum: u64) -> Result<(), CudaError> {
    let clear = emit.kernel("clear_words", [1, 1]).with(sum).with(WORDS).with(0u64);
    emit.launch(clear)?;
    let n = x.elements();
    let kernel = emit
        .kernel("exact_squares", emit.at_once(n.div_ceil(AT_ONCE)))
        .shared(SQUARES_BYTES)
        .with(emit.view(x));
    emit.launch(kernel.with(n).with(sum))
}

/// What is squared: numbers of `Squared` in the kernels.
#[derive(Clone, Copy)]
pub(super) enum Squared {
    Values = 0,
    Divided = 1,
    Scaled = 2,
}

/// Puts a sum of squares of x in f64 at an address; partial sums go to `partials`.
pub(super) fn squares(
    emit: &mut Emit<'_>,
    what: Squared,
    x: &Tensor,
    scale: Option<&Tensor>,
    by: Factors,
    mean: u64,
    [partials, out]: [u64; 2],
) -> Result<(), CudaError> {
    let (n, blocks) = (x.elements(), x.elements().div_ceil(EACH).max(1));
    emit.needs(8 * (blocks + 4))?;
    let kernel = emit.kernel("partial_squares", [emit.blocks(blocks)?, 1]).scratch::<f64>();
    let kernel = kernel.with(what as u32).with(emit.view(x)).with(n).with(EACH).with(emit.address(scale));
    emit.launch(kernel.with(by).with(mean).with(partials))?;
    let kernel = emit.kernel("sum_partials", [1, 1]).scratch::<f64>().with(partials);
    emit.launch(kernel.with(blocks).with(out))
}

/// The kernel that puts the sums of squares of rows or of columns, in f64, at an address.
pub(super) fn channel_squares(emit: &Emit<'_>, x: &Tensor, of_rows: bool, sums: u64) -> Launch {
    let blocks = if of_rows { super::parameters::row_blocks(x.rows()) } else { vector_blocks(x.columns()) };
    let kernel = emit.kernel("channel_squares", blocks).scratch::<f64>().with(emit.view(x));
    kernel.with(x.rows()).with(x.columns()).with(u32::from(of_rows)).with(sums)
}
