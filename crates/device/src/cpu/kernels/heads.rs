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

/// What is done with `heads` heads of `width` values of each row.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Work {
    /// to[n, h] = from[n, h]
    Copy,
    /// to[n] = the sum over the heads of from[n, h]
    Sum,
}

pub(in crate::cpu) fn heads(
    exec: Exec<'_>,
    work: Work,
    (from, of_from): (Floats<'_>, Layout),
    (to, of_to): (FloatsMut<'_>, Layout),
    heads: usize,
    width: usize,
) {
    let columns = of_to.columns;
    let each = rows_per_task(columns);
    let tasks = to.len().div_ceil(each * columns.max(1));
    for_each_part(exec, tasks, SharedFloats::new(to, each * columns), |task, mut to, _| {
        for row in 0..to.len() / columns.max(1) {
            let (from, mut to) = (from.row(task * each + row, of_from.columns), to.row(row, columns));
            let begins = (0..heads).map(|head| of_from.begin(head));
            match work {
                Work::Copy => {
                    for (head, begin) in begins.enumerate() {
                        let mut to = to.slice(of_to.begin(head)..of_to.begin(head) + width);
                        to.convert(exec.simd, from.slice(begin..begin + width), Rounding::Nearest, 0);
                    }
                }
                Work::Sum => sum(exec, from, begins, to.slice(of_to.first..of_to.first + width)),
            }
        }
    });
}

/// out = the sum of as many values of x from each of these places on, in order.
fn sum(exec: Exec<'_>, x: Floats<'_>, begins: impl Iterator<Item = usize> + Clone, mut out: FloatsMut<'_>) {
    let [mut tile, mut sums] = Tile::array();
    for range in tiles(out.len()) {
        let n = range.len();
        let sum = &mut sums.0[..n];
        sum.fill(0.0);
        for begin in begins.clone() {
            let begin = begin + range.start;
            let own = x.load(exec.simd, begin..begin + n, &mut tile);
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
        out.assign(exec.simd, range, sum, Rounding::Nearest, 0);
    }
}
