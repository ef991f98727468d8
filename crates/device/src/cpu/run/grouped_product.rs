//! Products with stacks of matrices on the CPU: the product of each group, one after the other, on all threads.

use std::ops::Range;

use super::KernelCall;
use crate::cpu::kernels::column_sums::bias_backward;
use crate::cpu::kernels::elementwise::{add_rows, fill};
use crate::cpu::matmul::{Operand, Output};
use crate::{GroupedProduct, Tensor};

pub(super) fn run(op: GroupedProduct<'_>, job: KernelCall<'_>) -> Result<(), String> {
    let (exec, t) = (job.exec, job.t);
    match op {
        GroupedProduct::Linear { x, weight, bias, offsets, out, accumulate, compute } => {
            let rest = rest(t.u32s(offsets), out)?;
            if !accumulate {
                fill(exec, t.floats_mut(out).slice(elements(&rest, out)), 0.0);
            }
            for (group, rows) in groups(t.u32s(offsets)).filter(|(_, rows)| !rows.is_empty()) {
                if let Some(bias) = bias {
                    let bias = t.floats(bias).row(group, out.columns() as usize);
                    add_rows(exec, bias, t.floats_mut(out).slice(elements(&rows, out)), accumulate);
                }
                let (x, out) = (part(t.matrix(x), &rows), part_of_output(t.output(out), &rows));
                let weight = matrix(t.matrix(weight), group, out.columns).transposed();
                job.matmul(compute, x, weight, out, accumulate || bias.is_some());
            }
        }
        GroupedProduct::LinearBackwardInput { dout, weight, offsets, dx, accumulate, compute } => {
            let rest = rest(t.u32s(offsets), dx)?;
            if !accumulate {
                fill(exec, t.floats_mut(dx).slice(elements(&rest, dx)), 0.0);
            }
            for (group, rows) in groups(t.u32s(offsets)).filter(|(_, rows)| !rows.is_empty()) {
                let dout = part(t.matrix(dout), &rows);
                let weight = matrix(t.matrix(weight), group, dout.columns);
                job.matmul(compute, dout, weight, part_of_output(t.output(dx), &rows), accumulate);
            }
        }
        GroupedProduct::LinearBackwardWeight { dout, x, offsets, dweight, accumulate, rounding, compute } => {
            rest(t.u32s(offsets), dout)?;
            let outputs = dout.columns() as usize;
            for (group, rows) in groups(t.u32s(offsets)) {
                let own = group * outputs..(group + 1) * outputs;
                if rows.is_empty() {
                    if !accumulate {
                        fill(exec, t.floats_mut(dweight).slice(elements(&own, dweight)), 0.0);
                    }
                    continue;
                }
                let (dout, x) = (part(t.matrix(dout), &rows).transposed(), part(t.matrix(x), &rows));
                let out = part_of_output(t.sums(dweight, rounding), &own);
                job.matmul(compute, dout, x, out, accumulate);
            }
        }
        GroupedProduct::BiasBackward { dout, offsets, dbias, accumulate } => {
            rest(t.u32s(offsets), dout)?;
            let workspace: &mut [f32] = job.workspace();
            for (group, rows) in groups(t.u32s(offsets)) {
                let dout = t.floats(dout).slice(elements(&rows, dout));
                let columns = dbias.columns() as usize;
                let mut dbias = t.floats_mut(dbias);
                bias_backward(exec, dout, dbias.row(group, columns), accumulate, workspace);
            }
        }
    }
    Ok(())
}

/// The rows of each group.
pub(super) fn groups(offsets: &[u32]) -> impl Iterator<Item = (usize, Range<usize>)> {
    offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).enumerate()
}

/// The rows of x that are of no group. Refuses offsets that do not cut its rows.
pub(super) fn rest(offsets: &[u32], x: &Tensor) -> Result<Range<usize>, String> {
    let rows = x.rows() as usize;
    let last = offsets.last().map_or(0, |last| *last as usize);
    if offsets.first() != Some(&0) || !offsets.is_sorted() || last > rows {
        return Err(format!("offsets do not cut the rows of {x:?} into groups"));
    }
    Ok(last..rows)
}

pub(super) fn elements(rows: &Range<usize>, x: &Tensor) -> Range<usize> {
    let columns = x.columns() as usize;
    rows.start * columns..rows.end * columns
}

/// Some rows of a matrix whose rows can be had by themselves, or whole matrices of a stack.
fn part(x: Operand, rows: &Range<usize>) -> Operand {
    let before = x.dtype.bytes_for((rows.start * x.row_stride) as u64).unwrap_or(0);
    Operand { data: x.data.wrapping_add(before as usize), rows: rows.len(), ..x }
}

fn part_of_output(out: Output, rows: &Range<usize>) -> Output {
    let before = out.dtype.bytes_for((rows.start * out.row_stride) as u64).unwrap_or(0);
    Output { data: out.data.wrapping_add(before as usize), rows: rows.len(), ..out }
}

/// Matrix `index` of a stack of matrices of so many rows.
fn matrix(stack: Operand, index: usize, rows: usize) -> Operand {
    part(stack, &(index * rows..(index + 1) * rows))
}
