//! Sums over rows, one per column: rows are cut into pieces, each with a partial sum of its own, and the partial sums
//! are added in order. The gradients of norms' weights and of biases are such sums.

use super::simd::per_isa;
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{TILE, Tile, spans};
use super::{Exec, Floats, FloatsMut};
use crate::op::{MAX_PARTIAL_COLUMNS, RowPieces};

/// dbias (+)= sum over the rows of dout. `partials` has room for the pieces' sums of [`MAX_PARTIAL_COLUMNS`] columns
/// at most; more are taken by turns.
pub(in crate::cpu) fn bias_backward(
    exec: Exec<'_>,
    dout: Floats<'_>,
    mut dbias: FloatsMut<'_>,
    accumulate: bool,
    partials: &mut [f32],
) {
    let columns = dbias.len();
    let rows = dout.len() / columns.max(1);
    for first in (0..columns).step_by(MAX_PARTIAL_COLUMNS) {
        let block = first..columns.min(first + MAX_PARTIAL_COLUMNS);
        let width = block.len();
        let pieces = RowPieces::new(rows, width);
        let partials = &mut partials[..pieces.count * width];
        for_each_part(exec, pieces.count, Shared::new(partials, width), |piece, partial, _| {
            partial.fill(0.0);
            let mut tile = Tile::new();
            for row in piece * pieces.rows..rows.min((piece + 1) * pieces.rows) {
                let dout = dout.row(row, columns).slice(block.clone());
                for range in spans([dout], width) {
                    let dout = dout.load(exec.simd, range.clone(), &mut tile);
                    add_assign(exec.simd, dout, &mut partial[range]);
                }
            }
        });
        add_partials(exec, partials, width, 0, dbias.slice(block), accumulate);
    }
}

/// out (+)= the sum of the partial sums, in order. Each piece's begin at a multiple of `stride`; those for `out` at
/// `offset` from there.
pub(super) fn add_partials(
    exec: Exec<'_>,
    partials: &[f32],
    stride: usize,
    offset: usize,
    out: FloatsMut<'_>,
    accumulate: bool,
) {
    let tasks = out.len().div_ceil(TILE);
    for_each_part(exec, tasks, SharedFloats::new(out, TILE), |task, mut out, _| {
        let n = out.len();
        let first = offset + task * TILE;
        let mut tile = Tile::new();
        let sum = out.current(exec.simd, 0..n, &mut tile);
        if !accumulate {
            sum.fill(0.0);
        }
        for piece in partials.chunks_exact(stride) {
            add_assign(exec.simd, &piece[first..first + n], sum);
        }
        out.store(exec.simd, 0..n, &tile);
    });
}

per_isa! {
    /// sum += x
    pub(super) fn add_assign(x: &[f32], sum: &mut [f32]) = add_assign_body
}

#[inline(always)]
fn add_assign_body<const FMA: bool>(x: &[f32], sum: &mut [f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += x;
    }
}
