//! Softmax cross-entropy, with the gradient in place of the logits.

use super::math::exp;
use super::simd::{LANES, per_isa, sum_lanes};
use super::soft_cap::soft_cap;
use super::split::{Shared, for_each_part};
use super::storage::tiles;
use super::{Exec, rows_per_task};
use crate::IGNORED_TARGET;

/// losses[n] = -ln softmax(logits[n])[targets[n]], 0 for ignored targets; logits [N, V], every other target below V.
/// With `gradient_scale`, logits becomes (softmax - onehot) * scale, 0 for ignored targets. With `soft_cap` logits are
/// cap * tanh(logits / cap) before that, and the gradient is that of the uncapped. With weights [N] a row's loss and
/// gradient are multiplied by its weight.
pub(in crate::cpu) fn cross_entropy(
    exec: Exec<'_>,
    logits: &mut [f32],
    targets: &[u32],
    weights: Option<&[f32]>,
    losses: &mut [f32],
    soft_cap: Option<f32>,
    gradient_scale: Option<f32>,
) {
    let columns = logits.len() / targets.len().max(1);
    let task_rows = rows_per_task(columns);
    let tasks = targets.len().div_ceil(task_rows);
    let outputs = (Shared::new(logits, task_rows * columns), Shared::new(losses, task_rows));
    for_each_part(exec, tasks, outputs, |task, (logits, losses), _| {
        for (row, loss) in losses.iter_mut().enumerate() {
            let logits = &mut logits[row * columns..(row + 1) * columns];
            let target = targets[task * task_rows + row];
            let weight = weights.map_or(1.0, |weights| weights[task * task_rows + row]);
            let gradient_scale = gradient_scale.map(|scale| scale * weight);
            let unweighted = match soft_cap {
                None => row_loss(exec, logits, target, gradient_scale),
                Some(cap) => capped_row_loss(exec, logits, target, cap, gradient_scale),
            };
            *loss = unweighted * weight;
        }
    });
}

fn row_loss(exec: Exec<'_>, logits: &mut [f32], target: u32, gradient_scale: Option<f32>) -> f32 {
    if target == IGNORED_TARGET {
        if gradient_scale.is_some() {
            logits.fill(0.0);
        }
        return 0.0;
    }
    let target = target as usize;
    let max = largest(exec.simd, logits);
    let above = f64::from(logits[target]) - f64::from(max);
    let mut sum = 0.0;
    for range in tiles(logits.len()) {
        let tile = &mut logits[range];
        sum += f64::from(match gradient_scale {
            Some(_) => exponentials(exec.simd, tile, max),
            None => sum_of_exponentials(exec.simd, tile, max),
        });
    }
    if let Some(scale) = gradient_scale {
        multiply(exec.simd, logits, (f64::from(scale) / sum) as f32);
        logits[target] -= scale;
    }
    (sum.ln() - above) as f32
}

/// The same of capped logits, which keep their capped values until the gradient's slope has been taken from them.
fn capped_row_loss(
    exec: Exec<'_>,
    logits: &mut [f32],
    target: u32,
    cap: f32,
    gradient_scale: Option<f32>,
) -> f32 {
    if target == IGNORED_TARGET {
        return row_loss(exec, logits, target, gradient_scale);
    }
    soft_cap(exec.simd, logits, 1.0, cap);
    let loss = row_loss(exec, logits, target, None);
    if let Some(scale) = gradient_scale {
        let target = target as usize;
        // ln of the sum of the exponentials, from the loss and the target's own logit.
        let lse = loss + logits[target];
        let slope = 1.0 - (logits[target] / cap) * (logits[target] / cap);
        capped_gradient(exec.simd, logits, lse, cap, scale);
        logits[target] -= scale * slope;
    }
    loss
}

per_isa! {
    /// x = e^(x - lse) (1 - (x / cap)^2) scale
    fn capped_gradient(x: &mut [f32], lse: f32, cap: f32, scale: f32) = capped_gradient_body
}

#[inline(always)]
fn capped_gradient_body<const FMA: bool>(x: &mut [f32], lse: f32, cap: f32, scale: f32) {
    for x in x {
        let t = *x / cap;
        *x = exp::<FMA>(*x - lse) * (1.0 - t * t) * scale;
    }
}

per_isa! {
    /// The largest element that is not NaN.
    fn largest(x: &[f32]) -> f32 = largest_body
}

#[inline(always)]
fn largest_body<const FMA: bool>(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = larger(*lane, *x);
    }
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, larger)
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
