//! LayerNorm, row by row.

use super::column_sums::add_partials;
use super::simd::{LANES, mul_add, per_isa, sum_lanes};
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{Tile, buffers, spans, tiles};
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::op::RowPieces;

/// out = (x - mean) * rstd * weight + bias; x, out [N, H], weight, bias [H], mean, rstd [N].
pub(in crate::cpu) fn layer_norm(
    exec: Exec<'_>,
    x: Floats<'_>,
    weight: Floats<'_>,
    bias: Floats<'_>,
    epsilon: f32,
    out: FloatsMut<'_>,
    mean: &mut [f32],
    rstd: &mut [f32],
) {
    let columns = weight.len();
    let task_rows = rows_per_task(columns);
    let tasks = rstd.len().div_ceil(task_rows);
    let outputs = (
        SharedFloats::new(out, task_rows * columns),
        [Shared::new(mean, task_rows), Shared::new(rstd, task_rows)],
    );
    for_each_part(exec, tasks, outputs, |task, (mut out, [mean, rstd]), worker| {
        let [x_buffer, weight_buffer, bias_buffer] = buffers(worker.scratch, columns);
        let weight = weight.widened(exec.simd, weight_buffer);
        let bias = bias.widened(exec.simd, bias_buffer);
        let [mut x_tile, mut weight_tile, mut bias_tile, mut out_tile] = Tile::array();
        for (row, (mean, rstd)) in mean.iter_mut().zip(rstd).enumerate() {
            let x = x.row(task * task_rows + row, columns).widened(exec.simd, x_buffer);
            let mut sum = 0.0;
            for range in spans([x], columns) {
                sum += row_sum(exec.simd, x.load(exec.simd, range, &mut x_tile));
            }
            *mean = sum / columns as f32;
            let mut squares = 0.0;
            for range in spans([x], columns) {
                squares += squared_distance(exec.simd, x.load(exec.simd, range, &mut x_tile), *mean);
            }
            *rstd = 1.0 / (squares / columns as f32 + epsilon).sqrt();
            let mut out = out.row(row, columns);
            for range in tiles(columns) {
                let x = x.load(exec.simd, range.clone(), &mut x_tile);
                let weight = weight.load(exec.simd, range.clone(), &mut weight_tile);
                let bias = bias.load(exec.simd, range.clone(), &mut bias_tile);
                let target = out.target(range.clone(), &mut out_tile);
                normalize(exec.simd, x, weight, bias, [*mean, *rstd], target);
                out.store(exec.simd, range, &out_tile);
            }
        }
    });
}

/// dx += rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dout * weight, xhat = (x - mean) * rstd;
/// dweight (+)= sum of dout * xhat, dbias (+)= sum of dout.
/// `partials` has room for the sums of all [`RowPieces`].
pub(in crate::cpu) fn layer_norm_backward(
    exec: Exec<'_>,
    x: Floats<'_>,
    weight: Floats<'_>,
    [mean, rstd]: [&[f32]; 2],
    dout: Floats<'_>,
    dx: FloatsMut<'_>,
    [dweight, dbias]: [Option<FloatsMut<'_>>; 2],
    accumulate_weight: bool,
    partials: &mut [f32],
) {
    let columns = weight.len();
    let pieces = RowPieces::new(rstd.len(), 2 * columns);
    let partials = &mut partials[..pieces.count * 2 * columns];
    let outputs = (SharedFloats::new(dx, pieces.rows * columns), Shared::new(partials, 2 * columns));
    for_each_part(exec, pieces.count, outputs, |piece, (mut dx, partial), worker| {
        let [x_buffer, weight_buffer, dout_buffer] = buffers(worker.scratch, columns);
        let weight = weight.widened(exec.simd, weight_buffer);
        partial.fill(0.0);
        let (dweight, dbias) = partial.split_at_mut(columns);
        let [mut x_tile, mut weight_tile, mut dout_tile, mut dx_tile] = Tile::array();
        let first = piece * pieces.rows;
        for (row, (&mean, &rstd)) in mean.iter().zip(rstd).skip(first).take(pieces.rows).enumerate() {
            let x = x.row(first + row, columns).widened(exec.simd, x_buffer);
            let dout = dout.row(first + row, columns).widened(exec.simd, dout_buffer);
            let mut sums = [0.0; 2];
            for range in spans([x, weight, dout], columns) {
                let x = x.load(exec.simd, range.clone(), &mut x_tile);
                let weight = weight.load(exec.simd, range.clone(), &mut weight_tile);
                let dout = dout.load(exec.simd, range, &mut dout_tile);
                let tile = gradient_sums(exec.simd, x, weight, dout, mean);
                sums = [sums[0] + tile[0], sums[1] + tile[1]];
            }
            let n = columns as f32;
            let (mean_g, pull) = (sums[0] / n, rstd * rstd * sums[1] / n);
            let mut dx = dx.row(row, columns);
            for range in tiles(columns) {
                let x = x.load(exec.simd, range.clone(), &mut x_tile);
                let weight = weight.load(exec.simd, range.clone(), &mut weight_tile);
                let dout = dout.load(exec.simd, range.clone(), &mut dout_tile);
                let dx_row = dx.current(exec.simd, range.clone(), &mut dx_tile);
                let (dweight, dbias) = (&mut dweight[range.clone()], &mut dbias[range.clone()]);
                backward_tile(exec.simd, x, weight, dout, [mean, rstd, mean_g, pull], dx_row, dweight, dbias);
                dx.store(exec.simd, range, &dx_tile);
            }
        }
    });
    for (gradient, offset) in [(dweight, 0), (dbias, columns)] {
        if let Some(gradient) = gradient {
            add_partials(exec, partials, 2 * columns, offset, gradient, accumulate_weight);
        }
    }
}

per_isa! {
    fn row_sum(x: &[f32]) -> f32 = row_sum_body
}

#[inline(always)]
fn row_sum_body<const FMA: bool>(x: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    for (sum, x) in sums.iter_mut().zip(chunks.remainder()) {
        *sum = *x;
    }
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += chunk[lane];
        }
    }
    sum_lanes(sums)
}

per_isa! {
    /// The sum of (x - mean)^2.
    fn squared_distance(x: &[f32], mean: f32) -> f32 = squared_distance_body
}

#[inline(always)]
fn squared_distance_body<const FMA: bool>(x: &[f32], mean: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    for (sum, x) in sums.iter_mut().zip(chunks.remainder()) {
        *sum = (x - mean) * (x - mean);
    }
    for chunk in chunks {
        for lane in 0..LANES {
            let distance = chunk[lane] - mean;
            sums[lane] = mul_add::<FMA>(distance, distance, sums[lane]);
        }
    }
    sum_lanes(sums)
}

per_isa! {
    fn normalize(x: &[f32], weight: &[f32], bias: &[f32], mean_and_rstd: [f32; 2], out: &mut [f32]) = normalize_body
}

#[inline(always)]
fn normalize_body<const FMA: bool>(
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    [mean, rstd]: [f32; 2],
    out: &mut [f32],
) {
    for (((out, x), weight), bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
        *out = mul_add::<FMA>((x - mean) * rstd, *weight, *bias);
    }
}

per_isa! {
    /// The sums of g and of g * (x - mean), g = dout * weight.
    fn gradient_sums(x: &[f32], weight: &[f32], dout: &[f32], mean: f32) -> [f32; 2] = gradient_sums_body
}

#[inline(always)]
fn gradient_sums_body<const FMA: bool>(x: &[f32], weight: &[f32], dout: &[f32], mean: f32) -> [f32; 2] {
    let mut plain = [0.0; LANES];
    let mut weighted = [0.0; LANES];
    let (xs, weights, douts) = (x.chunks_exact(LANES), weight.chunks_exact(LANES), dout.chunks_exact(LANES));
    let rest = xs.remainder().iter().zip(weights.remainder()).zip(douts.remainder());
    for (lane, ((x, weight), dout)) in rest.enumerate() {
        plain[lane] = weight * dout;
        weighted[lane] = weight * dout * (x - mean);
    }
    for ((x, weight), dout) in xs.zip(weights).zip(douts) {
        for lane in 0..LANES {
            let g = weight[lane] * dout[lane];
            plain[lane] += g;
            weighted[lane] = mul_add::<FMA>(g, x[lane] - mean, weighted[lane]);
        }
    }
    [sum_lanes(plain), sum_lanes(weighted)]
}

per_isa! {
    /// dx += rstd * (g - mean_g - pull * (x - mean)) with g = dout * weight, dweight += dout * (x - mean) * rstd, dbias += dout
    fn backward_tile(
        x: &[f32],
        weight: &[f32],
        dout: &[f32],
        row: [f32; 4],
        dx: &mut [f32],
        dweight: &mut [f32],
        dbias: &mut [f32],
    ) = backward_body
}

#[inline(always)]
fn backward_body<const FMA: bool>(
    x: &[f32],
    weight: &[f32],
    dout: &[f32],
    [mean, rstd, mean_g, pull]: [f32; 4],
    dx: &mut [f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    let gradients = dx.iter_mut().zip(dweight).zip(dbias);
    for ((((dx, dweight), dbias), x), (weight, dout)) in gradients.zip(x).zip(weight.iter().zip(dout)) {
        let distance = x - mean;
        let g = dout * weight;
        *dx = mul_add::<FMA>(rstd, mul_add::<FMA>(-pull, distance, g - mean_g), *dx);
        *dweight = mul_add::<FMA>(dout * rstd, distance, *dweight);
        *dbias += dout;
    }
}
