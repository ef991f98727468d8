//! Cross-entropy, of whole rows of logits and of pieces of them.

use super::parameters::{Emit, row_blocks, vector_blocks};
use crate::cuda::CudaError;
use crate::{Loss, PIECE_ROWS, Tensor};

/// Bytes of what a run of each thread adds to a row's sum.
const TERMS: u64 = 256 * 8;

pub(super) fn loss(op: Loss<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    // A cap is above 0: 0 stands for none.
    let cap = |cap: Option<f32>| cap.unwrap_or(0.0);
    match op {
        Loss::CrossEntropy { logits, targets, weights, losses, soft_cap, gradient_scale } => {
            let (rows, columns) = (logits.rows(), logits.columns());
            emit.check("target", targets, columns, logits, true)?;
            let shared = TERMS + 8 * columns.div_ceil(PIECE_ROWS);
            let kernel = emit.kernel("cross_entropy", row_blocks(rows)).shared(shared);
            let kernel = kernel.with(emit.address(logits)).with(emit.address(targets));
            let kernel = kernel.with(emit.address(weights)).with(emit.address(losses)).with(cap(soft_cap));
            let kernel = kernel.with(gradient_scale.unwrap_or(0.0)).with(u32::from(gradient_scale.is_some()));
            emit.launch(kernel.with(rows).with(columns))
        }
        Loss::LogitRuns { logits, first_column, targets, soft_cap, runs, target_logits } => {
            check_piece(emit, logits, first_column, targets, runs)?;
            let kernel = emit.kernel("logit_runs", row_blocks(logits.rows()));
            let kernel = kernel.with(emit.address(logits)).with(first_column).with(emit.address(targets));
            let kernel = kernel.with(cap(soft_cap)).with(emit.address(runs)).with(runs.columns());
            let kernel = kernel.with(emit.address(target_logits));
            emit.launch(kernel.with(logits.rows()).with(logits.columns()))
        }
        Loss::LossOfRuns { runs, target_logits, targets, weights, losses } => {
            let kernel = emit.kernel("loss_of_runs", vector_blocks(runs.rows())).with(emit.address(runs));
            let kernel = kernel.with(runs.columns()).with(emit.address(target_logits));
            let kernel = kernel.with(emit.address(targets)).with(emit.address(weights));
            emit.launch(kernel.with(emit.address(losses)).with(runs.rows()))
        }
        Loss::GradientOfRuns { logits, first_column, targets, weights, runs, soft_cap, gradient_scale } => {
            check_piece(emit, logits, first_column, targets, runs)?;
            let kernel = emit.kernel("gradient_of_runs", row_blocks(logits.rows())).shared(TERMS);
            let kernel = kernel.with(emit.address(logits)).with(first_column).with(emit.address(targets));
            let kernel = kernel.with(emit.address(weights)).with(emit.address(runs)).with(runs.columns());
            let kernel = kernel.with(cap(soft_cap)).with(gradient_scale);
            emit.launch(kernel.with(logits.rows()).with(logits.columns()))
        }
    }
}

/// Targets outside the vocabulary are found as far as the piece shows where that ends.
fn check_piece(
    emit: &mut Emit<'_>,
    logits: &Tensor,
    first_column: u64,
    targets: &Tensor,
    runs: &Tensor,
) -> Result<(), CudaError> {
    let (end, most) = (first_column + logits.columns(), runs.columns() / 2 * PIECE_ROWS);
    let is_last = end > most.saturating_sub(PIECE_ROWS);
    emit.check("target", targets, if is_last { end } else { most }, logits, true)
}
