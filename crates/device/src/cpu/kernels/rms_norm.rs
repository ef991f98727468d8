//! RMSNorm, row by row.

use super::column_sums::add_partials;
use super::simd::{LANES, mul_add, per_isa, sum_lanes};
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{Tile, buffers, spans, tiles};
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::op::RowPieces;

/// A norm's weight [H], with a constant that is added to it where it is used: 1 for Gemma's.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Weight<'a> {
    pub values: Floats<'a>,
    pub offset: f32,
}

/// out = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + epsilon); x, out [N, H], weight [H], rstd [N].
pub(in crate::cpu) fn rms_norm(
    exec: Exec<'_>,
    x: Floats<'_>,
    weight: Weight<'_>,
    epsilon: f32,
    out: FloatsMut<'_>,
    rstd: &mut [f32],
) {
    let Weight { values: weight, offset } = weight;
    let columns = weight.len();
    let task_rows = rows_per_task(columns);
    let tasks = rstd.len().div_ceil(task_rows);
    let outputs = (SharedFloats::new(out, task_rows * columns), Shared::new(rstd, task_rows));
    for_each_part(exec, tasks, outputs, |task, (mut out, rstd), worker| {
        let [x_buffer, weight_buffer] = buffers(worker.scratch, columns);
        let weight = weight.widened(exec.simd, weight_buffer);
        let [mut x_tile, mut weight_tile, mut out_tile] = Tile::array();
        for (row, rstd) in rstd.iter_mut().enumerate() {
            let x = x.row(task * task_rows + row, columns).widened(exec.simd, x_buffer);
            let mut squares = 0.0;
            for range in spans([x], columns) {
                squares += sum_of_squares(exec.simd, x.load(exec.simd, range, &mut x_tile));
            }
            *rstd = 1.0 / (squares / columns as f32 + epsilon).sqrt();
            let mut out = out.row(row, columns);
            for range in tiles(columns) {
                let x = x.load(exec.simd, range.clone(), &mut x_tile);
                let weight = weight.load(exec.simd, range.clone(), &mut weight_tile);
                normalize(exec.simd, x, weight, [*rstd, offset], out.target(range.clone(), &mut out_tile));
                out.store(exec.simd, range, &out_tile);
            }
        }
    });
}

/// dx += rstd * (g - xhat * mean(g * xhat)) with g = dout * weight, xhat = x * rstd; dweight (+)= sum of dout * xhat.
/// `partials` has room for the sums of all [`RowPieces`].
pub(in crate::cpu) fn rms_norm_backward(
    exec: Exec<'_>,
    x: Floats<'_>,
    weight: Weight<'_>,
    rstd: &[f32],
    dout: Floats<'_>,
    dx: FloatsMut<'_>,
    dweight: Option<FloatsMut<'_>>,
    accumulate_weight: bool,
    partials: &mut [f32],
) {
    let Weight { values: weight, offset } = weight;
    let columns = weight.len();
    let pieces = RowPieces::new(rstd.len(), columns);
    let partials = &mut partials[..pieces.count * columns];
    let outputs = (SharedFloats::new(dx, pieces.rows * columns), Shared::new(partials, columns));
    for_each_part(exec, pieces.count, outputs, |piece, (mut dx, dweight), worker| {
        let [x_buffer, weight_buffer, dout_buffer] = buffers(worker.scratch, columns);
        let weight = weight.widened(exec.simd, weight_buffer);
        dweight.fill(0.0);
        let [mut x_tile, mut weight_tile, mut dout_tile, mut dx_tile] = Tile::array();
        let first = piece * pieces.rows;
        for (row, &rstd) in rstd.iter().skip(first).take(pieces.rows).enumerate() {
            let x = x.row(first + row, columns).widened(exec.simd, x_buffer);
            let dout = dout.row(first + row, columns).widened(exec.simd, dout_buffer);
            let mut dot = 0.0;
            for range in spans([x, weight, dout], columns) {
                let x = x.load(exec.simd, range.clone(), &mut x_tile);
                let weight = weight.load(exec.simd, range.clone(), &mut weight_tile);
                let dout = dout.load(exec.simd, range, &mut dout_tile);
                dot += weighted_dot(exec.simd, x, weight, offset, dout);
            }
            let pull = -rstd * rstd * rstd * dot / columns as f32;
            let mut dx = dx.row(row, columns);
            for range in tiles(columns) {
                let x = x.load(exec.simd, range.clone(), &mut x_tile);
                let weight = weight.load(exec.simd, range.clone(), &mut weight_tile);
                let dout = dout.load(exec.simd, range.clone(), &mut dout_tile);
                let dx_row = dx.current(exec.simd, range.clone(), &mut dx_tile);
                let factors = [rstd, pull, offset];
                backward_tile(exec.simd, x, weight, dout, factors, dx_row, &mut dweight[range.clone()]);
                dx.store(exec.simd, range, &dx_tile);
            }
        }
    });
    if let Some(dweight) = dweight {
        add_partials(exec, partials, columns, 0, dweight, accumulate_weight);
    }
}

per_isa! {
    fn sum_of_squares(x: &[f32]) -> f32 = sum_of_squares_body
}

#[inline(always)]
fn sum_of_squares_body<const FMA: bool>(x: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] = mul_add::<FMA>(chunk[lane], chunk[lane], sums[lane]);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum = mul_add::<FMA>(*x, *x, *sum);
    }
    sum_lanes(sums)
}

per_isa! {
    fn normalize(x: &[f32], weight: &[f32], rstd_and_offset: [f32; 2], out: &mut [f32]) = normalize_body
}

#[inline(always)]
fn normalize_body<const FMA: bool>(x: &[f32], weight: &[f32], [rstd, offset]: [f32; 2], out: &mut [f32]) {
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * rstd * (weight + offset);
    }
}

per_isa! {
    /// The sum of x * (weight + offset) * dout.
    fn weighted_dot(x: &[f32], weight: &[f32], offset: f32, dout: &[f32]) -> f32 = weighted_dot_body
}

#[inline(always)]
fn weighted_dot_body<const FMA: bool>(x: &[f32], weight: &[f32], offset: f32, dout: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (xs, weights, douts) = (x.chunks_exact(LANES), weight.chunks_exact(LANES), dout.chunks_exact(LANES));
    let rest = xs.remainder().iter().zip(weights.remainder()).zip(douts.remainder());
    for (sum, ((x, weight), dout)) in sums.iter_mut().zip(rest) {
        *sum = x * (weight + offset) * dout;
    }
    for ((x, weight), dout) in xs.zip(weights).zip(douts) {
        for lane in 0..LANES {
            sums[lane] = mul_add::<FMA>(x[lane] * (weight[lane] + offset), dout[lane], sums[lane]);
        }
    }
    sum_lanes(sums)
}

per_isa! {
    /// dx += rstd * (weight + offset) * dout + pull * x, dweight += dout * x * rstd
    fn backward_tile(
        x: &[f32],
        weight: &[f32],
        dout: &[f32],
        rstd_pull_and_offset: [f32; 3],
        dx: &mut [f32],
        dweight: &mut [f32],
    ) = backward_body
}

#[inline(always)]
fn backward_body<const FMA: bool>(
    x: &[f32],
    weight: &[f32],
    dout: &[f32],
    [rstd, pull, offset]: [f32; 3],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    for ((((dx, dweight), x), weight), dout) in dx.iter_mut().zip(dweight).zip(x).zip(weight).zip(dout) {
        let scaled = dout * rstd;
        *dx += mul_add::<FMA>(scaled, *weight + offset, pull * x);
        *dweight = mul_add::<FMA>(scaled, *x, *dweight);
    }
}
