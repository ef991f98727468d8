//! Columns of heads, from one layout to another, row by row.

use super::split::{SharedFloats, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::Rounding;

/// Where heads have their columns in rows of so many.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Layout {
    pub columns: usize,
    pub first: usize,
    pub stride: usize,
}

impl Layout {
    fn begin(&self, head: usize) -> usize {
        self.first + head * self.stride
    }
}

/// to[n, h] = from[n, h], for each of `heads` heads of `width` values.
pub(in crate::cpu) fn copy(
    exec: Exec<'_>,
    (from, of_from): (Floats<'_>, Layout),
    (to, of_to): (FloatsMut<'_>, Layout),
    heads: usize,
    width: usize,
) {
    for_each_row(exec, to, of_to.columns, |row, mut to| {
        let from = from.row(row, of_from.columns);
        for head in 0..heads {
            let (begin, end) = (of_from.begin(head), of_to.begin(head));
            let own = from.slice(begin..begin + width);
            to.slice(end..end + width).convert(exec.simd, own, Rounding::Nearest, 0);
        }
    });
}

/// to[n] = the sum over the heads of from[n, h].
pub(in crate::cpu) fn sum(
    exec: Exec<'_>,
    (from, of_from): (Floats<'_>, Layout),
    (to, of_to): (FloatsMut<'_>, Layout),
    heads: usize,
    width: usize,
) {
    for_each_row(exec, to, of_to.columns, |row, mut to| {
        let from = from.row(row, of_from.columns);
        let mut to = to.slice(of_to.first..of_to.first + width);
        let [mut own, mut sums] = Tile::array();
        for range in tiles(width) {
            let n = range.len();
            let sum = &mut sums.0[..n];
            sum.fill(0.0);
            for head in 0..heads {
                let begin = of_from.begin(head) + range.start;
                let own = from.load(exec.simd, begin..begin + n, &mut own);
                sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
            }
            to.assign(exec.simd, range, sum, Rounding::Nearest, 0);
        }
    });
}

fn for_each_row(
    exec: Exec<'_>,
    to: FloatsMut<'_>,
    columns: usize,
    work: impl Fn(usize, FloatsMut<'_>) + Sync,
) {
    let each = rows_per_task(columns);
    let tasks = to.len().div_ceil(each * columns.max(1));
    for_each_part(exec, tasks, SharedFloats::new(to, each * columns), |task, mut to, _| {
        for row in 0..to.len() / columns.max(1) {
            work(task * each + row, to.row(row, columns));
        }
    });
}
