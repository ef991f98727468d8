//! Softmax cross-entropy, with the gradient in place of the logits, of whole rows or piece by piece.
//!
//! A row is cut into runs of [`RUN`] columns. Each has its largest logit and its sum of exponentials, which the row's are
//! combined from in order: who has the runs needs the logits no more, and what is worked out of pieces of whole runs
//! has the bits of what is worked out of the row.

use std::ops::Range;

use super::math::exp;
use super::simd::{LANES, Simd, per_isa, sum_lanes};
use super::soft_cap::soft_cap;
use super::split::{Shared, for_each_part};
use super::storage::{TILE, Tile, buffers};
use super::{Exec, attention, rows_per_task};
use crate::op::Workspace;
use crate::{IGNORED_TARGET, PIECE_ROWS};

/// Columns of a run.
const RUN: usize = PIECE_ROWS as usize;
const _: () = assert!(RUN <= TILE);

/// The runs of a row that is taken whole lie in a thread's scratch. The operation's check has found them to fit.
const _: () = assert!(Workspace::MOST.each_task as usize <= attention::SCRATCH_BYTES);

/// What rows of logits are compared with: targets [N] and, where rows count differently, their weights [N].
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Labels<'a> {
    pub targets: &'a [u32],
    pub weights: Option<&'a [f32]>,
}

impl Labels<'_> {
    /// The target of a row, if it has one, and the row's weight.
    fn of(&self, row: usize) -> (Option<usize>, f32) {
        (target(self.targets[row]), self.weights.map_or(1.0, |weights| weights[row]))
    }
}

fn target(target: u32) -> Option<usize> {
    (target != IGNORED_TARGET).then_some(target as usize)
}

/// losses[n] = -ln softmax(logits[n])[targets[n]], 0 for ignored targets; logits [N, V], every other target below V.
/// With `gradient_scale`, logits becomes (softmax - onehot) * scale, 0 for ignored targets. With
/// `cap` logits are cap * tanh(logits / cap) before that, and the gradient is that of the uncapped. With weights [N] a
/// row's loss and gradient are multiplied by its weight.
pub(in crate::cpu) fn cross_entropy(
    exec: Exec<'_>,
    logits: &mut [f32],
    labels: Labels<'_>,
    losses: &mut [f32],
    cap: Option<f32>,
    gradient_scale: Option<f32>,
) {
    let simd = exec.simd;
    let columns = logits.len() / losses.len().max(1);
    let task_rows = rows_per_task(columns);
    let tasks = losses.len().div_ceil(task_rows);
    let outputs = (Shared::new(logits, task_rows * columns), Shared::new(losses, task_rows));
    for_each_part(exec, tasks, outputs, |task, (logits, losses), worker| {
        let [runs] = buffers(worker.scratch, 2 * columns.div_ceil(RUN));
        for (row, loss) in losses.iter_mut().enumerate() {
            let logits = &mut logits[row * columns..(row + 1) * columns];
            let (Some(target), weight) = labels.of(task * task_rows + row) else {
                *loss = 0.0;
                if gradient_scale.is_some() {
                    logits.fill(0.0);
                }
                continue;
            };
            let target_logit = logit(simd, logits[target], cap);
            for (x, run) in logits.chunks_mut(RUN).zip(runs.chunks_exact_mut(2)) {
                if let Some(cap) = cap {
                    soft_cap(simd, x, 1.0, cap);
                }
                run[0] = largest(simd, x);
                run[1] = match (gradient_scale, cap) {
                    (Some(_), None) => exponentials(simd, x, run[0]),
                    _ => sum_of_exponentials(simd, x, run[0]),
                };
            }
            let total = Total::of(runs);
            *loss = total.loss(target_logit) * weight;
            if let Some(scale) = gradient_scale.map(|scale| scale * weight) {
                for (x, run) in logits.chunks_mut(RUN).zip(runs.chunks_exact(2)) {
                    run_gradient(simd, x, run[0], cap, total.factor(run[0], scale));
                }
                logits[target] -= scale * slope(target_logit, cap);
            }
        }
    });
}

/// Writes the runs of some whole runs of columns to runs [N, 2 R], those of the whole rows, and the targets' logits, as far
/// as they lie there, to target_logits [N]; logits [N, columns].
pub(in crate::cpu) fn logit_runs(
    exec: Exec<'_>,
    logits: &[f32],
    columns: Range<usize>,
    targets: &[u32],
    cap: Option<f32>,
    runs: &mut [f32],
    target_logits: &mut [f32],
) {
    let simd = exec.simd;
    let task_rows = rows_per_task(columns.len());
    let tasks = targets.len().div_ceil(task_rows);
    let width = runs.len() / targets.len().max(1);
    let outputs = (Shared::new(runs, task_rows * width), Shared::new(target_logits, task_rows));
    for_each_part(exec, tasks, outputs, |task, (runs, target_logits), _| {
        let mut tile = Tile::new();
        for (row, target_logit) in target_logits.iter_mut().enumerate() {
            let place = task * task_rows + row;
            let logits = &logits[place * columns.len()..(place + 1) * columns.len()];
            let runs = &mut runs[row * width..(row + 1) * width][own(&columns)];
            let Some(target) = target(targets[place]) else {
                runs.fill(0.0);
                continue;
            };
            for (x, run) in logits.chunks(RUN).zip(runs.chunks_exact_mut(2)) {
                let x = match cap {
                    None => x,
                    Some(cap) => {
                        let capped = &mut tile.0[..x.len()];
                        capped.copy_from_slice(x);
                        soft_cap(simd, capped, 1.0, cap);
                        capped
                    }
                };
                run[0] = largest(simd, x);
                run[1] = sum_of_exponentials(simd, x, run[0]);
            }
            if columns.contains(&target) {
                *target_logit = logit(simd, logits[target - columns.start], cap);
            }
        }
    });
}

/// The losses [N] of rows of which the runs [N, 2 R] and the targets' logits [N] are known.
pub(in crate::cpu) fn loss_of_runs(
    exec: Exec<'_>,
    runs: &[f32],
    target_logits: &[f32],
    labels: Labels<'_>,
    losses: &mut [f32],
) {
    let width = runs.len() / losses.len().max(1);
    let task_rows = rows_per_task(width);
    let tasks = losses.len().div_ceil(task_rows);
    for_each_part(exec, tasks, Shared::new(losses, task_rows), |task, losses, _| {
        for (row, loss) in losses.iter_mut().enumerate() {
            let row = task * task_rows + row;
            *loss = match labels.of(row) {
                (None, _) => 0.0,
                (Some(_), weight) => {
                    Total::of(&runs[row * width..(row + 1) * width]).loss(target_logits[row]) * weight
                }
            };
        }
    });
}

/// Logits of some whole runs of columns, [N, columns], become their gradient; runs [N, 2 R] are those of the whole rows.
pub(in crate::cpu) fn gradient_of_runs(
    exec: Exec<'_>,
    logits: &mut [f32],
    columns: Range<usize>,
    labels: Labels<'_>,
    runs: &[f32],
    cap: Option<f32>,
    gradient_scale: f32,
) {
    let simd = exec.simd;
    let rows = labels.targets.len();
    let task_rows = rows_per_task(columns.len());
    let width = runs.len() / rows.max(1);
    let logits = Shared::new(logits, task_rows * columns.len());
    for_each_part(exec, rows.div_ceil(task_rows), logits, |task, logits, _| {
        for (row, logits) in logits.chunks_exact_mut(columns.len().max(1)).enumerate() {
            let row = task * task_rows + row;
            let (Some(target), weight) = labels.of(row) else {
                logits.fill(0.0);
                continue;
            };
            let scale = gradient_scale * weight;
            let target = columns.contains(&target).then(|| target - columns.start);
            let target_logit = target.map_or(0.0, |target| logit(simd, logits[target], cap));
            let runs = &runs[row * width..(row + 1) * width];
            let total = Total::of(runs);
            for (x, run) in logits.chunks_mut(RUN).zip(runs[own(&columns)].chunks_exact(2)) {
                match cap {
                    Some(cap) => soft_cap(simd, x, 1.0, cap),
                    None => {
                        exponentials(simd, x, run[0]);
                    }
                }
                run_gradient(simd, x, run[0], cap, total.factor(run[0], scale));
            }
            if let Some(target) = target {
                logits[target] -= scale * slope(target_logit, cap);
            }
        }
    });
}

/// Where the runs of some columns lie among those of their row.
fn own(columns: &Range<usize>) -> Range<usize> {
    2 * (columns.start / RUN)..2 * columns.end.div_ceil(RUN)
}

/// The logit of one column.
fn logit(simd: Simd, x: f32, cap: Option<f32>) -> f32 {
    let mut x = [x];
    if let Some(cap) = cap {
        soft_cap(simd, &mut x, 1.0, cap);
    }
    x[0]
}

/// The derivative of a logit by what it was before it was capped.
fn slope(logit: f32, cap: Option<f32>) -> f32 {
    cap.map_or(1.0, |cap| 1.0 - (logit / cap) * (logit / cap))
}

/// A row's largest logit, and its sum of e^(logit - largest).
struct Total {
    largest: f32,
    sum: f64,
}

impl Total {
    /// From the runs of the whole row.
    fn of(runs: &[f32]) -> Total {
        let largest =
            runs.chunks_exact(2).fold(f32::MIN, |most, run| if run[0] > most { run[0] } else { most });
        let sum = runs.chunks_exact(2).map(|run| f64::from(run[1]) * share(run[0], largest)).sum();
        Total { largest, sum }
    }

    fn loss(&self, target_logit: f32) -> f32 {
        (self.sum.ln() - (f64::from(target_logit) - f64::from(self.largest))) as f32
    }

    /// What turns exponentials of a run, relative to its largest logit, into `scale` times their probabilities. 0 where it
    /// would be no normal number: arithmetic on those is slow.
    fn factor(&self, largest: f32, scale: f32) -> f32 {
        let factor = (f64::from(scale) / self.sum * share(largest, self.largest)) as f32;
        if factor.abs() < f32::MIN_POSITIVE { 0.0 } else { factor }
    }
}

/// e^(x - largest)
fn share(x: f32, largest: f32) -> f64 {
    (f64::from(x) - f64::from(largest)).exp()
}

/// The gradient of a run, but for its target. `x` holds e^(logit - largest), or with a cap the capped logits; `factor` is
/// that of [`Total::factor`].
fn run_gradient(simd: Simd, x: &mut [f32], largest: f32, cap: Option<f32>, factor: f32) {
    match cap {
        None => multiply(simd, x, factor),
        Some(cap) => capped_gradient(simd, x, largest, cap, factor),
    }
}

per_isa! {
    /// x = e^(x - largest) (1 - (x / cap)^2) factor
    fn capped_gradient(x: &mut [f32], largest: f32, cap: f32, factor: f32) = capped_gradient_body
}

#[inline(always)]
fn capped_gradient_body<const FMA: bool>(x: &mut [f32], largest: f32, cap: f32, factor: f32) {
    for x in x {
        let t = *x / cap;
        *x = exp::<FMA>(*x - largest) * (1.0 - t * t) * factor;
    }
}

per_isa! {
    /// The largest element that is not NaN, at least the lowest finite number: what is infinitely far below any other
    /// has an exponential of 0, even where all of a run is.
    fn largest(x: &[f32]) -> f32 = largest_body
}

#[inline(always)]
fn largest_body<const FMA: bool>(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::MIN; LANES];
    let chunks = x.chunks_exact(LANES);
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = larger(*lane, *x);
    }
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    lanes.into_iter().fold(f32::MIN, larger)
}

per_isa! {
    /// x = e^(x - max); returns the sum.
    fn exponentials(x: &mut [f32], max: f32) -> f32 = exponentials_body
}

#[inline(always)]
fn exponentials_body<const FMA: bool>(x: &mut [f32], max: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let mut chunks = x.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            chunk[lane] = exp::<FMA>(chunk[lane] - max);
            sums[lane] += chunk[lane];
        }
    }
    for (sum, x) in sums.iter_mut().zip(chunks.into_remainder()) {
        *x = exp::<FMA>(*x - max);
        *sum += *x;
    }
    sum_lanes(sums)
}

per_isa! {
    /// The sum of e^(x - max), added as in `exponentials`.
    fn sum_of_exponentials(x: &[f32], max: f32) -> f32 = sum_of_exponentials_body
}

#[inline(always)]
fn sum_of_exponentials_body<const FMA: bool>(x: &[f32], max: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += exp::<FMA>(chunk[lane] - max);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += exp::<FMA>(*x - max);
    }
    sum_lanes(sums)
}

per_isa! {
    fn multiply(x: &mut [f32], factor: f32) = multiply_body
}

#[inline(always)]
fn multiply_body<const FMA: bool>(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}
