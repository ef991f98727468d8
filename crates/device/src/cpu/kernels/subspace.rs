//! What finding a subspace needs beside products: orthonormal rows, and the eigenvectors of a small matrix.

use super::simd::{LANES, per_isa};
use super::split::{Shared, for_each_part};
use super::{Exec, rows_per_task};

/// A row whose norm falls to this share of what it was depends on the rows before it, to f32's precision.
const DEPENDENT: f64 = 1e-6;

/// Sweeps of Jacobi's method; it converges quadratically, in some six.
const MOST_SWEEPS: usize = 15;

/// Rows are orthogonal enough where their product is this share of their lengths'.
const ORTHOGONAL: f64 = 1e-7;

/// Makes the rows of x orthonormal by modified Gram-Schmidt, twice, for one pass leaves errors of the condition's size.
pub(in crate::cpu) fn orthonormalize(exec: Exec<'_>, x: &mut [f32], columns: usize) {
    if columns == 0 {
        return;
    }
    for pass in 0..2 {
        let norms: Vec<f64> = x.chunks(columns).map(|row| dot(exec.simd, row, row).sqrt()).collect();
        for (i, before) in norms.iter().enumerate() {
            let (head, tail) = x.split_at_mut((i + 1) * columns);
            let row = &mut head[i * columns..];
            let norm = dot(exec.simd, row, row).sqrt();
            let dependent = norm <= before * DEPENDENT || (pass == 1 && norm < 0.5);
            let factor = if dependent { 0.0 } else { (1.0 / norm) as f32 };
            row.iter_mut().for_each(|x| *x *= factor);
            let (row, rows) = (&*row, rows_per_task(columns));
            let width = rows * columns;
            for_each_part(exec, tail.len().div_ceil(width), Shared::new(tail, width), |_, part, _| {
                for other in part.chunks_mut(columns) {
                    let share = dot(exec.simd, row, other) as f32;
                    subtract(exec.simd, other, row, share);
                }
            });
        }
    }
}

per_isa! {
    fn dot(a: &[f32], b: &[f32]) -> f64 = dot_body
}

#[inline(always)]
fn dot_body<const FMA: bool>(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    sums.iter().sum()
}

per_isa! {
    fn subtract(x: &mut [f32], row: &[f32], share: f32) = subtract_body
}

#[inline(always)]
fn subtract_body<const FMA: bool>(x: &mut [f32], row: &[f32], share: f32) {
    for (x, row) in x.iter_mut().zip(row) {
        *x -= share * row;
    }
}

/// Puts unit eigenvectors of the symmetric `matrix` `[n, n]` into the columns of `out` `[n, kept]`, for the largest
/// eigenvalues in falling order, by Jacobi's cyclic method (1846). `vectors` `[n, n]` is workspace.
pub(in crate::cpu) fn eigenvectors(
    exec: Exec<'_>,
    matrix: &mut [f32],
    vectors: &mut [f32],
    out: &mut [f32],
    n: usize,
) {
    vectors.fill(0.0);
    vectors.iter_mut().step_by(n + 1).for_each(|x| *x = 1.0);
    for _ in 0..MOST_SWEEPS {
        let mut turned = false;
        for p in 0..n {
            for q in p + 1..n {
                turned |= annihilate(exec, matrix, vectors, n, p, q);
            }
        }
        if !turned {
            break;
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|a, b| matrix[b * n + b].total_cmp(&matrix[a * n + a]).then(a.cmp(b)));
    let kept = out.len() / n.max(1);
    for (row, out) in out.chunks_mut(kept.max(1)).enumerate() {
        for (out, vector) in out.iter_mut().zip(&order) {
            *out = vectors[vector * n + row];
        }
    }
}

/// Turns rows and columns p and q so that element (p, q) becomes 0; whether it was not.
fn annihilate(exec: Exec<'_>, matrix: &mut [f32], vectors: &mut [f32], n: usize, p: usize, q: usize) -> bool {
    let at = |i: usize, j: usize| f64::from(matrix[i * n + j]);
    let (app, aqq, apq) = (at(p, p), at(q, q), at(p, q));
    if apq * apq <= ORTHOGONAL * ORTHOGONAL * (app * aqq).abs() || apq.abs() < f64::from(f32::MIN_POSITIVE) {
        return false;
    }
    let theta = (aqq - app) / (2.0 * apq);
    let tangent = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
    let cosine = 1.0 / (tangent * tangent + 1.0).sqrt();
    let (c, s) = (cosine as f32, (cosine * tangent) as f32);
    for rows in [&mut *matrix, vectors] {
        let (head, tail) = rows.split_at_mut(q * n);
        rotate(exec.simd, &mut head[p * n..][..n], &mut tail[..n], c, s);
    }
    for row in matrix.chunks_mut(n) {
        let (x, y) = (row[p], row[q]);
        row[p] = c * x - s * y;
        row[q] = s * x + c * y;
    }
    matrix[p * n + q] = 0.0;
    matrix[q * n + p] = 0.0;
    true
}

per_isa! {
    fn rotate(x: &mut [f32], y: &mut [f32], c: f32, s: f32) = rotate_body
}

#[inline(always)]
fn rotate_body<const FMA: bool>(x: &mut [f32], y: &mut [f32], c: f32, s: f32) {
    for (x, y) in x.iter_mut().zip(y) {
        (*x, *y) = (c * *x - s * *y, s * *x + c * *y);
    }
}
