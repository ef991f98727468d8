//! Sums over rows, one per column: rows are cut into pieces, each with a partial sum of its own, and the partial sums
//! are added in order. The gradients of norms' weights and of biases are such sums.

use super::simd::per_isa;
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{TILE, Tile, spans};
use super::{Exec, Floats, FloatsMut};

/// Columns of partial sums that the workspace holds.
pub(in crate::cpu) const MAX_PARTIAL_COLUMNS: usize = 256 * 1024;

/// At most this many pieces, each of at least this many rows.
const MAX_PIECES: usize = 32;
const MIN_PIECE_ROWS: usize = 16;

/// How rows fall into pieces: by the shape alone.
#[derive(Clone, Copy)]
pub(super) struct RowPieces {
    pub count: usize,
    pub rows: usize,
}

impl RowPieces {
    /// Pieces of `rows` rows with partial sums of `columns` columns, at most [`MAX_PARTIAL_COLUMNS`].
    pub fn new(rows: usize, columns: usize) -> RowPieces {
        let most = (MAX_PARTIAL_COLUMNS / columns.max(1)).clamp(1, MAX_PIECES);
        let piece = rows.div_ceil(most).max(MIN_PIECE_ROWS);
        RowPieces { count: rows.div_ceil(piece), rows: piece }
    }
}

/// dbias (+)= sum over the rows of dout. `partials` has room for [`MAX_PARTIAL_COLUMNS`]; more columns are taken by
/// turns.
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
