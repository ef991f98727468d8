//! DoRA (Liu et al. 2024): rows of a weight have lengths of their own. What is as large as the weight is never made.

use super::column_sums::add_partials;
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{Tile, spans, tiles};
use super::sum_squares::squares;
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::DType;
use crate::cpu::matmul::read_elements;
use crate::op::RowPieces;

/// Elements of a row that are read at a time.
const ROW_PART: usize = 256;

/// `out[o]` = the sum of squares of row o of a matrix as it is stored.
pub(in crate::cpu) fn row_squares(exec: Exec<'_>, x: &[u8], dtype: DType, out: &mut [f32], columns: usize) {
    let total = out.len() * columns;
    let task_rows = rows_per_task(columns);
    for_each_part(exec, out.len().div_ceil(task_rows), Shared::new(out, task_rows), |task, out, _| {
        let mut values = [0.0f32; ROW_PART];
        for (row, out) in (task * task_rows..).zip(out) {
            let mut sum = 0.0;
            for start in (0..columns).step_by(ROW_PART) {
                let values = &mut values[..ROW_PART.min(columns - start)];
                let done = read_elements(dtype, x, total, row * columns + start, values);
                debug_assert!(done.is_some());
                sum += squares(exec.simd, values);
            }
            *out = sum as f32;
        }
    });
}

/// What the lengths of the rows of W + s B A are made of: |W_o|^2, A W^T `[r, O]`, A A^T `[r, r]`, B `[O, r]`, s.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Sum<'a> {
    pub squares: &'a [f32],
    pub cross: &'a [f32],
    pub gram: &'a [f32],
    pub b: &'a [f32],
    pub scale: f32,
}

/// The length of each row of the sum.
pub(in crate::cpu) fn row_lengths(exec: Exec<'_>, of: Sum<'_>, lengths: &mut [f32]) {
    let outputs = lengths.len();
    let rank = of.b.len() / outputs.max(1);
    let task_rows = rows_per_task(rank * rank);
    let scale = f64::from(of.scale);
    for_each_part(exec, outputs.div_ceil(task_rows), Shared::new(lengths, task_rows), |task, lengths, _| {
        for (row, length) in (task * task_rows..).zip(lengths) {
            let b = &of.b[row * rank..(row + 1) * rank];
            let (mut cross, mut own) = (0.0f64, 0.0f64);
            for (k, value) in b.iter().enumerate() {
                cross += f64::from(*value) * f64::from(of.cross[k * outputs + row]);
                let gram = &of.gram[k * rank..(k + 1) * rank];
                let product: f64 = gram.iter().zip(b).map(|(g, b)| f64::from(*g) * f64::from(*b)).sum();
                own += f64::from(*value) * product;
            }
            let square = f64::from(of.squares[row]) + 2.0 * scale * cross + scale * scale * own;
            // Rounding may leave a little less than nothing of a row of zeros.
            *length = square.max(0.0).sqrt() as f32;
        }
    });
}

/// What each column is multiplied by: a factor over a divisor; a divisor of 0 counts as 1.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct ColumnFactors<'a> {
    pub factors: &'a [f32],
    pub divisors: Option<&'a [f32]>,
}

impl ColumnFactors<'_> {
    fn at(self, column: usize) -> f32 {
        let divisor = self.divisors.map_or(1.0, |divisors| divisors[column]);
        self.factors[column] / if divisor == 0.0 { 1.0 } else { divisor }
    }
}

/// out (+)= x times the factors of its columns, + bias.
pub(in crate::cpu) fn scale_columns(
    exec: Exec<'_>,
    x: Floats<'_>,
    factors: ColumnFactors<'_>,
    bias: Option<Floats<'_>>,
    out: FloatsMut<'_>,
    accumulate: bool,
) {
    let columns = factors.factors.len();
    let task_rows = rows_per_task(columns);
    let tasks = out.len().div_ceil(task_rows * columns.max(1));
    for_each_part(exec, tasks, SharedFloats::new(out, task_rows * columns), |task, mut out, _| {
        let [mut x_tile, mut bias_tile, mut out_tile] = Tile::array();
        for index in 0..out.len() / columns.max(1) {
            let x = x.row(task * task_rows + index, columns);
            let mut out = out.row(index, columns);
            for range in tiles(columns) {
                let x = x.load(exec.simd, range.clone(), &mut x_tile);
                let bias = bias.map(|bias| bias.load(exec.simd, range.clone(), &mut bias_tile));
                let out_values = if accumulate {
                    out.current(exec.simd, range.clone(), &mut out_tile)
                } else {
                    let values = out.target(range.clone(), &mut out_tile);
                    values.fill(0.0);
                    values
                };
                for (i, (out, x)) in out_values.iter_mut().zip(x).enumerate() {
                    *out += x * factors.at(range.start + i) + bias.map_or(0.0, |bias| bias[i]);
                }
                out.store(exec.simd, range, &out_tile);
            }
        }
    });
}

/// `out[o]` (+)= the sum over rows of a * b, over the divisor of the column. `partials` has room for
/// [`MAX_PARTIAL_COLUMNS`].
pub(in crate::cpu) fn column_dots(
    exec: Exec<'_>,
    a: Floats<'_>,
    b: Floats<'_>,
    divisors: &[f32],
    out: FloatsMut<'_>,
    accumulate: bool,
    partials: &mut [f32],
) {
    let columns = divisors.len();
    let pieces = RowPieces::new(a.len() / columns.max(1), columns);
    let rows = a.len() / columns.max(1);
    let partials = &mut partials[..pieces.count * columns];
    for_each_part(exec, pieces.count, Shared::new(partials, columns), |piece, partial, _| {
        partial.fill(0.0);
        let [mut a_tile, mut b_tile] = Tile::array();
        for row in piece * pieces.rows..rows.min((piece + 1) * pieces.rows) {
            let (a, b) = (a.row(row, columns), b.row(row, columns));
            for range in spans([a, b], columns) {
                let a = a.load(exec.simd, range.clone(), &mut a_tile);
                let b = b.load(exec.simd, range.clone(), &mut b_tile);
                for ((sum, a), b) in partial[range].iter_mut().zip(a).zip(b) {
                    *sum += a * b;
                }
            }
        }
        for (sum, divisor) in partial.iter_mut().zip(divisors) {
            *sum /= if *divisor == 0.0 { 1.0 } else { *divisor };
        }
    });
    add_partials(exec, partials, columns, 0, out, accumulate);
}
