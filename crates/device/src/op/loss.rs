//! Softmax cross-entropy with its gradient, of whole rows of logits or of pieces of them.

use std::cmp::Ordering;

use super::{Family, PIECE_ROWS};
use crate::check::Description;
use crate::{Cost, Tensor};

/// A target that does not count in the loss.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// The loss of rows of logits, or a part of working it out. A target outside the vocabulary is an error.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Loss<'a> {
    /// `losses[n] = -ln softmax(logits[n])[targets[n]]`, 0 for ignored targets; logits f32 `[N, V]`, losses f32 `[N]`.
    /// With `gradient_scale`, logits becomes the gradient times scale in place, (softmax - onehot) * scale, 0 for ignored
    /// targets. With `soft_cap` logits are cap * tanh(logits / cap) first, and so is the gradient that of the uncapped.
    /// With `weights`, f32 `[N]`, a row's loss and gradient are multiplied by its weight.
    ///
    /// The three operations that follow give the same bits from logits that are never there all at once.
    CrossEntropy {
        logits: &'a Tensor,
        targets: &'a Tensor,
        weights: Option<&'a Tensor>,
        losses: &'a Tensor,
        soft_cap: Option<f32>,
        gradient_scale: Option<f32>,
    },
    /// What a piece of the logits adds to the loss. logits f32 `[N, P]` are the columns from `first_column` on, a multiple
    /// of [`PIECE_ROWS`]; P is one too, unless the piece is the last. For every run of [`PIECE_ROWS`] columns,
    /// `runs[n, 2 r]` = the largest logit and `runs[n, 2 r + 1]` = the sum of e^(logit - largest), 0 both for ignored
    /// targets; runs f32 `[N, 2 R]`, R being those of the whole vocabulary, of which only the piece's are written.
    /// `target_logits[n]`, f32 `[N]`, is written where the target lies in the piece. With `soft_cap` all is of the
    /// capped logits.
    LogitRuns {
        logits: &'a Tensor,
        first_column: u64,
        targets: &'a Tensor,
        soft_cap: Option<f32>,
        runs: &'a Tensor,
        target_logits: &'a Tensor,
    },
    /// losses f32 `[N]`, as [`CrossEntropy`](Loss::CrossEntropy) gives them, from what [`LogitRuns`](Loss::LogitRuns) wrote
    /// for all pieces.
    LossOfRuns {
        runs: &'a Tensor,
        target_logits: &'a Tensor,
        targets: &'a Tensor,
        weights: Option<&'a Tensor>,
        losses: &'a Tensor,
    },
    /// logits, a piece as [`LogitRuns`](Loss::LogitRuns) took it, become their gradient in place, as those of
    /// [`CrossEntropy`](Loss::CrossEntropy) do; runs are those of all pieces.
    GradientOfRuns {
        logits: &'a Tensor,
        first_column: u64,
        targets: &'a Tensor,
        weights: Option<&'a Tensor>,
        runs: &'a Tensor,
        soft_cap: Option<f32>,
        gradient_scale: f32,
    },
}

/// Bytes of a run: its largest logit and its sum.
const RUN_BYTES: u64 = 2 * size_of::<f32>() as u64;

impl<'a> Family<'a> for Loss<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            // The runs of a row that is taken whole are workspace.
            Loss::CrossEntropy { logits, targets, weights, losses, .. } => {
                Description::new("cross_entropy", [], [])
                    .changing([logits])
                    .reading([targets])
                    .reading(weights)
                    .writing([losses])
                    .f32s([logits])
                    .u32_vector(targets, logits.rows())
                    .f32_vectors(weights, logits.rows())
                    .f32_vectors([losses], logits.rows())
                    .each_task(logits, PIECE_ROWS, RUN_BYTES)
            }
            Loss::LogitRuns { logits, first_column, targets, runs, target_logits, .. } => {
                Description::new("logit_runs", [logits, targets], [runs, target_logits])
                    .runs(runs, targets)
                    .piece_of_logits(logits, first_column, runs)
                    .f32_vectors([target_logits], runs.rows())
            }
            Loss::LossOfRuns { runs, target_logits, targets, weights, losses } => {
                Description::new("loss_of_runs", [runs, target_logits, targets], [losses])
                    .reading(weights)
                    .runs(runs, targets)
                    .f32_vectors([target_logits, losses], runs.rows())
                    .f32_vectors(weights, runs.rows())
            }
            Loss::GradientOfRuns { logits, first_column, targets, weights, runs, .. } => {
                Description::new("gradient_of_runs", [], [])
                    .changing([logits])
                    .reading([targets, runs])
                    .reading(weights)
                    .runs(runs, targets)
                    .piece_of_logits(logits, first_column, runs)
                    .f32_vectors(weights, runs.rows())
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        match *self {
            Loss::CrossEntropy { logits, .. } | Loss::GradientOfRuns { logits, .. } => {
                Cost { exps: logits.elements(), ..once }
            }
            // Only the piece's runs are written.
            Loss::LogitRuns { logits, targets, target_logits, .. } => {
                let runs = logits.rows() * logits.columns().div_ceil(PIECE_ROWS) * RUN_BYTES;
                let bytes = logits.bytes() + targets.bytes() + target_logits.bytes() + runs;
                Cost { bytes, exps: logits.elements(), ..once }
            }
            Loss::LossOfRuns { runs, .. } => Cost { exps: runs.elements() / 2, ..once },
        }
    }
}

impl Description<'_> {
    /// Runs of whole rows of logits, and the rows' targets.
    fn runs(self, runs: &Tensor, targets: &Tensor) -> Self {
        self.f32s([runs])
            .that(runs.columns() > 0 && runs.columns().is_multiple_of(2), || {
                format!("{runs:?} is not pairs of largest logits and sums")
            })
            .u32_vector(targets, runs.rows())
    }

    /// Some columns of the logits that `runs` are of: whole runs, or up to the last column.
    fn piece_of_logits(self, logits: &Tensor, first_column: u64, runs: &Tensor) -> Self {
        let end = first_column / PIECE_ROWS + logits.columns().div_ceil(PIECE_ROWS);
        let fits = first_column.is_multiple_of(PIECE_ROWS)
            && match end.cmp(&(runs.columns() / 2)) {
                Ordering::Less => logits.columns().is_multiple_of(PIECE_ROWS),
                Ordering::Equal => true,
                Ordering::Greater => false,
            };
        self.f32s([logits])
            .that(logits.rows() == runs.rows(), || format!("{logits:?} and {runs:?} differ in rows"))
            .that(fits, || {
                format!("{logits:?} from column {first_column} on is not whole runs of {PIECE_ROWS} of those of {runs:?}")
            })
    }
}
