//! Biases of groups of rows, each row's times its factor.

use std::ops::Range;

use super::column_sums::add_assign;
use super::math::dot;
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{TILE, Tile, tiles};
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::Rounding;

/// The factor of each row.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Factors<'a> {
    pub values: &'a [f32],
    pub sources: &'a [u32],
}

impl Factors<'_> {
    fn of(&self, row: usize) -> f32 {
        // The row of nobody has none.
        self.values.get(self.sources[row] as usize).copied().unwrap_or(0.0)
    }
}

/// out[r] += factor * bias, for some rows of one group.
pub(in crate::cpu) fn add(
    exec: Exec<'_>,
    bias: Floats<'_>,
    factors: Factors<'_>,
    rows: Range<usize>,
    mut out: FloatsMut<'_>,
) {
    let columns = bias.len();
    let task_rows = rows_per_task(columns);
    let out = out.slice(rows.start * columns..rows.end * columns);
    let tasks = rows.len().div_ceil(task_rows);
    for_each_part(exec, tasks, SharedFloats::new(out, task_rows * columns), |task, mut out, _| {
        let [mut bias_tile, mut tile] = Tile::array();
        for index in 0..out.len() / columns.max(1) {
            let factor = factors.of(rows.start + task * task_rows + index);
            let mut out = out.row(index, columns);
            for range in tiles(columns) {
                let bias = bias.load(exec.simd, range.clone(), &mut bias_tile);
                out.modify(exec.simd, range, &mut tile, Rounding::Nearest, 0, |out| {
                    out.iter_mut().zip(bias).for_each(|(out, bias)| *out += factor * bias);
                });
            }
        }
    });
}

/// dbias (+)= the sum of factor * dout[r] over some rows, in order: a task for each run of columns.
pub(in crate::cpu) fn backward(
    exec: Exec<'_>,
    dout: Floats<'_>,
    factors: Factors<'_>,
    rows: Range<usize>,
    dbias: FloatsMut<'_>,
    accumulate: bool,
) {
    let columns = dbias.len();
    for_each_part(exec, columns.div_ceil(TILE), SharedFloats::new(dbias, TILE), |task, mut dbias, _| {
        let n = dbias.len();
        let own = task * TILE..task * TILE + n;
        let [mut dout_tile, mut scaled, mut tile] = Tile::array();
        let sum = dbias.current(exec.simd, 0..n, &mut tile);
        if !accumulate {
            sum.fill(0.0);
        }
        for row in rows.clone() {
            let dout = dout.row(row, columns).load(exec.simd, own.clone(), &mut dout_tile);
            let (factor, scaled) = (factors.of(row), &mut scaled.0[..n]);
            scaled.iter_mut().zip(dout).for_each(|(out, x)| *out = factor * x);
            add_assign(exec.simd, scaled, sum);
        }
        dbias.store(exec.simd, 0..n, &tile);
    });
}

/// dfactors[p] += the dot product of row places[p] of dout with the bias of its group.
pub(in crate::cpu) fn factors_backward(
    exec: Exec<'_>,
    [dout, bias]: [Floats<'_>; 2],
    places: &[u32],
    offsets: &[u32],
    dfactors: &mut [f32],
    columns: usize,
) {
    let each = rows_per_task(columns);
    let tasks = dfactors.len().div_ceil(each);
    for_each_part(exec, tasks, Shared::new(dfactors, each), |task, dfactors, _| {
        let [mut dout_tile, mut bias_tile] = Tile::array();
        for (dfactor, place) in dfactors.iter_mut().zip(&places[task * each..]) {
            let behind = offsets.partition_point(|first| first <= place);
            if behind == 0 || behind == offsets.len() {
                continue;
            }
            let (dout, bias) = (dout.row(*place as usize, columns), bias.row(behind - 1, columns));
            for range in tiles(columns) {
                let dout = dout.load(exec.simd, range.clone(), &mut dout_tile);
                *dfactor += dot(dout, bias.load(exec.simd, range, &mut bias_tile));
            }
        }
    });
}
