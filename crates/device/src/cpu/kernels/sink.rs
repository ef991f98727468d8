//! Sinks of attention: what attention gave is scaled by what is left of the softmax beside them.

use super::math::dot;
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::{AttentionShape, Rounding};

/// The sizes of a shape as numbers of a slice.
struct Sizes {
    heads: usize,
    queries: usize,
    head_dim: usize,
}

impl Sizes {
    fn of(shape: AttentionShape) -> Sizes {
        let [heads, queries, head_dim] = [shape.heads, shape.q_len, shape.head_dim].map(|size| size as usize);
        Sizes { heads, queries, head_dim }
    }

    /// Where the statistic of a head of a row of queries lies.
    fn statistic(&self, row: usize, head: usize) -> usize {
        let (batch, query) = (row / self.queries.max(1), row % self.queries.max(1));
        (batch * self.heads + head) * self.queries + query
    }

    /// The head of a statistic.
    fn head(&self, statistic: usize) -> usize {
        statistic / self.queries.max(1) % self.heads.max(1)
    }
}

fn widened(exec: Exec<'_>, sinks: Floats<'_>) -> Vec<f32> {
    let mut all = vec![0.0; sinks.len()];
    sinks.copy_to(exec.simd, 0..sinks.len(), &mut all);
    all
}

/// The part of the softmax that is left beside a sink.
fn left(lse: f32, sink: f32) -> f32 {
    1.0 / (1.0 + (sink - lse).exp())
}

/// out *= sigmoid(lse - sink), and probabilities; lse = ln(e^lse + e^sink)
pub(in crate::cpu) fn apply(
    exec: Exec<'_>,
    sinks: Floats<'_>,
    out: FloatsMut<'_>,
    lse: &mut [f32],
    probabilities: Option<&mut [f32]>,
    shape: AttentionShape,
) {
    let (s, sinks) = (Sizes::of(shape), widened(exec, sinks));
    let columns = s.heads * s.head_dim;
    if columns == 0 || s.queries == 0 {
        return;
    }
    let sums = &*lse;
    let task_rows = rows_per_task(columns);
    let tasks = out.len().div_ceil(task_rows * columns);
    for_each_part(exec, tasks, SharedFloats::new(out, task_rows * columns), |task, mut out, _| {
        let mut tile = Tile::new();
        for index in 0..out.len() / columns {
            let mut row = out.row(index, columns);
            for (head, sink) in sinks.iter().enumerate() {
                let factor = left(sums[s.statistic(task * task_rows + index, head)], *sink);
                let scale = |values: &mut [f32]| values.iter_mut().for_each(|value| *value *= factor);
                let own = head * s.head_dim..(head + 1) * s.head_dim;
                row.modify(exec.simd, own, &mut tile, Rounding::Nearest, 0, scale);
            }
        }
    });
    if let Some(probabilities) = probabilities {
        let keys = probabilities.len() / sums.len().max(1);
        for_each_part(exec, sums.len(), Shared::new(probabilities, keys), |row, weights, _| {
            let factor = left(sums[row], sinks[s.head(row)]);
            weights.iter_mut().for_each(|weight| *weight *= factor);
        });
    }
    let each = rows_per_task(1);
    for_each_part(exec, lse.len().div_ceil(each), Shared::new(lse, each), |task, lse, _| {
        for (row, lse) in (task * each..).zip(lse) {
            let sink = sinks[s.head(row)];
            let (most, least) = if sink > *lse { (sink, *lse) } else { (*lse, sink) };
            *lse = most + (least - most).exp().ln_1p();
        }
    });
}

/// dsinks (+)= -sum over the queries of e^(sink - lse) * (dout . out): a task for each head, rows in order.
pub(in crate::cpu) fn backward(
    exec: Exec<'_>,
    [sinks, out, dout]: [Floats<'_>; 3],
    lse: &[f32],
    dsinks: FloatsMut<'_>,
    accumulate: bool,
    shape: AttentionShape,
) {
    let (s, sinks) = (Sizes::of(shape), widened(exec, sinks));
    let columns = s.heads * s.head_dim;
    let rows = out.len().checked_div(columns).unwrap_or(0);
    for_each_part(exec, s.heads, SharedFloats::new(dsinks, 1), |head, mut dsink, _| {
        let [mut out_tile, mut dout_tile, mut tile] = Tile::array();
        let mut sum = 0.0f64;
        for row in 0..rows {
            let start = row * columns + head * s.head_dim;
            let [out, dout] = [out, dout].map(|x| x.slice(start..start + s.head_dim));
            let mut product = 0.0f32;
            for range in tiles(s.head_dim) {
                let a = out.load(exec.simd, range.clone(), &mut out_tile);
                let b = dout.load(exec.simd, range, &mut dout_tile);
                product += dot(a, b);
            }
            let weight = (sinks[head] - lse[s.statistic(row, head)]).exp();
            sum -= f64::from(weight * product);
        }
        dsink.modify(exec.simd, 0..1, &mut tile, Rounding::Nearest, 0, |dsink| {
            let before = if accumulate { f64::from(dsink[0]) } else { 0.0 };
            dsink[0] = (before + sum) as f32;
        });
    });
}
