//! Lengths of rows and factors of columns on the CPU.

use std::ops::Range;

use super::KernelCall;
use super::grouped_product::{elements, groups, rest};
use crate::cpu::kernels::dora::{ColumnFactors, Sum, column_dots, row_lengths, row_squares, scale_columns};
use crate::cpu::kernels::elementwise::fill;
use crate::{Magnitude, Tensor};

pub(super) fn run(op: Magnitude<'_>, job: KernelCall<'_>) -> Result<(), String> {
    let (exec, t) = (job.exec, job.t);
    match op {
        Magnitude::RowSquares { x, out } => {
            row_squares(exec, t.bytes(x), x.dtype(), t.f32s_mut(out), x.columns() as usize);
        }
        Magnitude::RowLengths { squares, cross, gram, b, scale, lengths } => {
            let [squares, cross, gram, b] = [squares, cross, gram, b].map(|tensor| t.f32s(tensor));
            let rank = b.len() / lengths.elements().max(1) as usize;
            let stack = gram.len() / (rank * rank).max(1);
            for (nth, lengths) in chunks_mut(t.f32s_mut(lengths), stack).enumerate() {
                let [squares, cross, gram, b] = [squares, cross, gram, b].map(|all| chunk(all, nth, stack));
                row_lengths(exec, Sum { squares, cross, gram, b, scale }, lengths);
            }
        }
        Magnitude::ScaleColumns { x, factors, divisors, bias, offsets, out, accumulate } => {
            let columns = x.columns() as usize;
            let offsets = offsets.map(|offsets| t.u32s(offsets));
            if let (Some(offsets), false) = (offsets, accumulate) {
                let rest = rest(offsets, out)?;
                fill(exec, t.floats_mut(out).slice(elements(&rest, out)), 0.0);
            }
            for (group, rows) in row_groups(offsets, x)? {
                let own = group * columns..(group + 1) * columns;
                let vector = |all| t.f32s(all).get(own.clone()).unwrap_or_default();
                let factors = ColumnFactors { factors: vector(factors), divisors: divisors.map(vector) };
                let bias = bias.map(|bias| t.floats(bias).slice(own.clone()));
                let (mut all, places) = (t.floats_mut(out), elements(&rows, x));
                scale_columns(
                    exec,
                    t.floats(x).slice(places.clone()),
                    factors,
                    bias,
                    all.slice(places),
                    accumulate,
                );
            }
        }
        Magnitude::ColumnDots { a, b, divisors, offsets, out, accumulate } => {
            let columns = a.columns() as usize;
            let workspace: &mut [f32] = job.workspace();
            for (group, rows) in row_groups(offsets.map(|offsets| t.u32s(offsets)), a)? {
                let own = group * columns..(group + 1) * columns;
                let divisors = t.f32s(divisors).get(own.clone()).unwrap_or_default();
                let [a, b] = [a, b].map(|x| t.floats(x).slice(elements(&rows, x)));
                column_dots(exec, a, b, divisors, t.floats_mut(out).slice(own), accumulate, workspace);
            }
        }
    }
    Ok(())
}

/// The rows of x that go with each matrix: all with the only one where there are no offsets.
fn row_groups(offsets: Option<&[u32]>, x: &Tensor) -> Result<Vec<(usize, Range<usize>)>, String> {
    let Some(offsets) = offsets else { return Ok(vec![(0, 0..x.rows() as usize)]) };
    rest(offsets, x)?;
    Ok(groups(offsets).collect())
}

/// One of `count` parts of the same length.
fn chunk(all: &[f32], nth: usize, count: usize) -> &[f32] {
    let each = all.len() / count.max(1);
    all.get(nth * each..(nth + 1) * each).unwrap_or_default()
}

fn chunks_mut(all: &mut [f32], count: usize) -> impl Iterator<Item = &mut [f32]> {
    let each = all.len() / count.max(1);
    all.chunks_mut(each.max(1))
}
