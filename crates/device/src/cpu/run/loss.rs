//! Cross-entropy on the CPU.

use std::ops::Range;

use super::{KernelCall, in_table};
use crate::cpu::kernels::cross_entropy::{Labels, cross_entropy, gradient_of_runs, logit_runs, loss_of_runs};
use crate::cpu::slices::Slices;
use crate::{IGNORED_TARGET, Loss, PIECE_ROWS, Tensor};

pub(super) fn run(op: Loss<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) -> Result<(), String> {
    match op {
        Loss::CrossEntropy { logits, targets, weights, losses, soft_cap, gradient_scale } => {
            in_vocabulary(t.u32s(targets), logits.columns(), logits)?;
            let labels = labels(t, targets, weights);
            cross_entropy(exec, t.f32s_mut(logits), labels, t.f32s_mut(losses), soft_cap, gradient_scale);
        }
        Loss::LogitRuns { logits, first_column, targets, soft_cap, runs, target_logits } => {
            let columns = columns(t.u32s(targets), logits, first_column, runs)?;
            let (logits, targets) = (t.f32s(logits), t.u32s(targets));
            let (runs, target_logits) = (t.f32s_mut(runs), t.f32s_mut(target_logits));
            logit_runs(exec, logits, columns, targets, soft_cap, runs, target_logits);
        }
        Loss::LossOfRuns { runs, target_logits, targets, weights, losses } => {
            let labels = labels(t, targets, weights);
            loss_of_runs(exec, t.f32s(runs), t.f32s(target_logits), labels, t.f32s_mut(losses));
        }
        Loss::GradientOfRuns { logits, first_column, targets, weights, runs, soft_cap, gradient_scale } => {
            let columns = columns(t.u32s(targets), logits, first_column, runs)?;
            let (logits, labels) = (t.f32s_mut(logits), labels(t, targets, weights));
            gradient_of_runs(exec, logits, columns, labels, t.f32s(runs), soft_cap, gradient_scale);
        }
    }
    Ok(())
}

fn in_vocabulary(targets: &[u32], limit: u64, logits: &Tensor) -> Result<(), String> {
    in_table("target", targets, limit, Some(IGNORED_TARGET), logits)
}

/// The columns of the vocabulary that a piece of the logits holds. Refuses targets outside the vocabulary, as far as the
/// piece shows where that ends.
fn columns(
    targets: &[u32],
    logits: &Tensor,
    first_column: u64,
    runs: &Tensor,
) -> Result<Range<usize>, String> {
    let (end, most) = (first_column + logits.columns(), runs.columns() / 2 * PIECE_ROWS);
    let is_last = end > most - PIECE_ROWS;
    in_vocabulary(targets, if is_last { end } else { most }, logits)?;
    Ok(first_column as usize..end as usize)
}

fn labels<'a>(t: Slices<'a>, targets: &Tensor, weights: Option<&Tensor>) -> Labels<'a> {
    Labels { targets: t.u32s(targets), weights: weights.map(|weights| t.f32s(weights)) }
}
