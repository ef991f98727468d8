//! Sums of squares over rows and over columns, in f64 and in the order of the elements.

use crate::cpu::kernels::simd::per_isa;
use crate::cpu::kernels::split::{Shared, for_each_part};
use crate::cpu::kernels::storage::{Tile, tiles};
use crate::cpu::kernels::sum_squares::squares;
use crate::cpu::kernels::{Exec, Floats, rows_per_task};

/// Columns that a task sums up: few enough that narrow matrices keep several threads busy.
const STRIP: usize = 128;

/// Calls `finish` with the sum of squares of each row and its place in `out`.
pub(super) fn row_squares(
    exec: Exec<'_>,
    x: Floats<'_>,
    columns: usize,
    out: &mut [f32],
    finish: impl Fn(f64, &mut f32) + Sync,
) {
    let rows = rows_per_task(columns);
    for_each_part(exec, out.len().div_ceil(rows), Shared::new(out, rows), |task, out, _| {
        let mut tile = Tile::new();
        for (i, out) in out.iter_mut().enumerate() {
            let row = x.row(task * rows + i, columns);
            let sums = tiles(columns).map(|range| squares(exec.simd, row.load(exec.simd, range, &mut tile)));
            finish(sums.sum(), out);
        }
    });
}

/// Calls `finish` with the sum of squares of each column and its place in `out`.
pub(super) fn column_squares(
    exec: Exec<'_>,
    x: Floats<'_>,
    columns: usize,
    out: &mut [f32],
    finish: impl Fn(f64, &mut f32) + Sync,
) {
    let rows = x.len() / columns.max(1);
    for_each_part(exec, columns.div_ceil(STRIP), Shared::new(out, STRIP), |task, out, _| {
        let (mut tile, mut sums) = (Tile::new(), [0.0; STRIP]);
        let strip = task * STRIP..task * STRIP + out.len();
        for row in 0..rows {
            let x = x.row(row, columns).load(exec.simd, strip.clone(), &mut tile);
            add_squares(exec.simd, x, &mut sums);
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| finish(sum, out));
    });
}

per_isa! {
    fn add_squares(x: &[f32], sums: &mut [f64]) = add_squares_body
}

#[inline(always)]
fn add_squares_body<const FMA: bool>(x: &[f32], sums: &mut [f64]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        *sum += f64::from(*x) * f64::from(*x);
    }
}
