//! Attention of one query of each head, which is what a decoding step has: time is what the cache takes to arrive.
//!
//! A task is a piece of the positions and a kv head, with as many query heads of its group as share a reading of keys and values.
//! Every piece leaves its maximum, the sum of its exponentials and the weighted sum of its values, which are then put
//! together in the order of the positions. Pieces are cut by the shape alone. (Split over the keys: "Flash-Decoding",
//! Dao, Haziza, Massa, Sizov 2023.)

use std::ops::Range;

use super::geometry::Geometry;
use super::{MAX_HEAD_DIM, Rows, RowsMut, exponentials, row_max};
use crate::cpu::kernels::split::{Shared, Split};
use crate::cpu::kernels::storage::buffers;
use crate::cpu::kernels::{Exec, Floats};
use crate::cpu::matmul::cached::{CachedRows, MAX_TOGETHER, add_weighted, dots};
use crate::op;

/// Positions of a piece at most: their scores lie in a thread's scratch.
const MAX_POSITIONS: usize = op::MAX_POSITIONS as usize;
/// Elements of a query, a sum or a part in scratch: whole groups of 32.
const PADDED: usize = MAX_HEAD_DIM;
/// Heads whose parts one task puts together.
const HEADS_TOGETHER: usize = 16;

const _: () = assert!(4 * MAX_TOGETHER * (MAX_POSITIONS + 2 * PADDED) <= super::SCRATCH_BYTES);

/// A sequence, or several of one shape, and where its pieces leave what they found: for each query head of each sequence and each piece
/// its maximum, its sum of exponentials and its weighted sum of values.
struct Parts<'a> {
    g: Geometry<'a>,
    /// Number of the first part.
    start: usize,
    /// Positions of a piece.
    positions: usize,
    /// Number of the first piece, and how many there are.
    first: usize,
    pieces: usize,
    /// Tasks of those before.
    tasks: usize,
}

impl<'a> Parts<'a> {
    /// `None` where all positions are better taken by tiles.
    fn of(g: Geometry<'a>, start: usize, tasks: usize) -> Option<Parts<'a>> {
        let pieces = g.key_pieces()?;
        let [positions, first, pieces] = [pieces.positions, pieces.first, pieces.count].map(|n| n as usize);
        Some(Parts { g, start, positions, first, pieces, tasks })
    }

    /// Query heads of all sequences.
    fn rows(&self) -> usize {
        self.g.batch * self.g.heads
    }

    /// Tasks of a piece: query heads that are taken together.
    fn units(&self) -> usize {
        self.g.batch * self.g.kv_heads * self.g.group().div_ceil(MAX_TOGETHER)
    }
}

/// Sequences of one query, all with heads of one kind. False where any of them is better taken by tiles; then nothing is done.
pub(super) fn forward(
    exec: Exec<'_>,
    q: Floats<'_>,
    [k, v]: [Rows; 2],
    out: RowsMut,
    lse: &Shared<'_, f32>,
    sequences: &[Geometry<'_>],
    workspace: &mut [f32],
) -> bool {
    let Some(d) = sequences.first().map(|g| g.d) else { return true };
    let part = 2 + d;
    let (mut all, mut count, mut tasks) = (Vec::with_capacity(sequences.len()), 0, 0);
    for g in sequences {
        let Some(own) = Parts::of(*g, count, tasks) else { return false };
        count += own.rows() * own.pieces;
        tasks += own.units() * own.pieces;
        all.push(own);
    }
    let Some(values) = workspace.get_mut(..count * part) else { return false };
    let shared = Shared::new(values, part);
    exec.pool.run(tasks, &|task, worker| {
        let own = &all[all.partition_point(|own| own.tasks <= task) - 1];
        let Parts { g, start, positions, first, pieces, tasks } = *own;
        let decode = Decode { exec, g, q, k, v };
        let (task, units) = (task - tasks, own.units());
        let (unit, piece) = (task % units, task / units);
        // Heads of a group that are not taken together follow each other: what the first have read is near.
        let together = g.group().div_ceil(MAX_TOGETHER);
        let (unit, part) = (unit / together, unit % together);
        let (batch, kv_head) = (unit / g.kv_heads, unit % g.kv_heads);
        let head = kv_head * g.group() + part * MAX_TOGETHER;
        let count = MAX_TOGETHER.min((kv_head + 1) * g.group() - head);
        let begin = (first + piece) * positions;
        let index = |i: usize| start + (batch * g.heads + head + i) * pieces + piece;
        // SAFETY: every part of every head is written by one task.
        let parts = std::array::from_fn(|i| (i < count).then(|| unsafe { shared.part(index(i)) }));
        decode.piece(batch, head, begin..begin + positions, parts, worker.scratch);
    });
    let values = &*values;
    // Sequences have the same heads, so that those of all are numbered through.
    let each = all.first().map_or(1, Parts::rows).max(1);
    let rows = each * all.len();
    exec.pool.run(rows.div_ceil(HEADS_TOGETHER), &|task, _| {
        let mut sum = [0.0; MAX_HEAD_DIM];
        for number in (task * HEADS_TOGETHER..rows).take(HEADS_TOGETHER) {
            let (Parts { g, start, pieces, .. }, row) = (&all[number / each], number % each);
            let sum = &mut sum[..d];
            let parts = &values[(start + row * pieces) * part..(start + (row + 1) * pieces) * part];
            let (max, total) = put_together(parts, sum);
            let row = g.first_row() + row;
            // SAFETY: each row is written by one task, and so is its statistic.
            unsafe {
                out.write(exec.simd, row * d, sum, 1.0 / total);
                if let Some(lse) = lse.part(row).first_mut() {
                    *lse = max + total.ln();
                }
            }
        }
    });
    true
}

struct Decode<'a> {
    exec: Exec<'a>,
    g: Geometry<'a>,
    q: Floats<'a>,
    k: Rows,
    v: Rows,
}

impl Decode<'_> {
    /// What the query heads from `head` on, as many as there are parts, find in a piece of the positions.
    fn piece(
        &self,
        batch: usize,
        head: usize,
        positions: Range<usize>,
        mut parts: [Option<&mut [f32]>; MAX_TOGETHER],
        scratch: &mut [u8],
    ) {
        let (g, simd) = (self.g, self.exec.simd);
        let count = parts.iter().flatten().count();
        let block = g.block(batch, head, 0);
        let [_, seen] = g.keys(&block);
        let positions = positions.start.max(seen.start)..positions.end.min(seen.end);
        let stride = g.d.next_multiple_of(32);
        let [scores, queries, sums] = {
            let [scores] = buffers(scratch, MAX_TOGETHER * (MAX_POSITIONS + 2 * PADDED));
            let (scores, rest) = scores.split_at_mut(MAX_TOGETHER * MAX_POSITIONS);
            let (queries, sums) = rest.split_at_mut(MAX_TOGETHER * PADDED);
            [
                &mut scores[..count * positions.len()],
                &mut queries[..count * stride],
                &mut sums[..count * stride],
            ]
        };
        for (i, query) in queries.chunks_exact_mut(stride).enumerate() {
            let start = block.start + i * g.d;
            self.q.copy_to(simd, start..start + g.d, &mut query[..g.d]);
            query[g.d..].fill(0.0);
        }
        for (range, rows) in self.rows(self.k, &positions, |at| g.key(batch, block.kv_head, at), g.k_stride())
        {
            let scores = &mut scores[range.start..];
            // SAFETY: the positions' rows exist, of a type that the operation's check has found to be for caches.
            unsafe { dots(simd.isa(), queries, stride, rows, scores, positions.len()) };
        }
        sums.fill(0.0);
        for (i, part) in parts.iter_mut().flatten().enumerate() {
            let scores = &mut scores[i * positions.len()..(i + 1) * positions.len()];
            let scale = g.cap_scores(simd, scores);
            let max = row_max(simd, scores) * scale;
            // A row whose every score is -inf, or that holds a NaN, keeps what its scores make of it.
            let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
            let total = exponentials(simd, scores, scale, shift);
            part[..2].copy_from_slice(&[max, total]);
        }
        for (range, rows) in
            self.rows(self.v, &positions, |at| g.value(batch, block.kv_head, at), g.v_stride())
        {
            let weights = &scores[range.start..];
            // SAFETY: as above.
            unsafe { add_weighted(simd.isa(), weights, positions.len(), rows, sums, stride) };
        }
        for (part, sum) in parts.iter_mut().flatten().zip(sums.chunks_exact(stride)) {
            part[2..].copy_from_slice(&sum[..g.d]);
        }
    }

    /// The rows of `positions` in runs that follow each other, each with its place among them.
    fn rows(
        &self,
        stored: Rows,
        positions: &Range<usize>,
        element: impl Fn(usize) -> usize,
        stride: usize,
    ) -> impl Iterator<Item = (Range<usize>, CachedRows)> {
        let (g, begin) = (self.g, positions.start);
        let mut left = positions.clone();
        std::iter::from_fn(move || {
            let run = left.start..g.run_end(&left);
            left.start = run.end;
            // Behind the last position there need not be a row.
            (!run.is_empty()).then(|| {
                let data = stored.at(element(run.start));
                let rows = CachedRows { data, dtype: stored.dtype, rows: run.len(), columns: g.d, stride };
                (run.start - begin..run.end - begin, rows)
            })
        })
    }
}

/// The maximum and the sum of exponentials of a head's parts; `sum` becomes the weighted sum of its values.
fn put_together(parts: &[f32], sum: &mut [f32]) -> (f32, f32) {
    let part = 2 + sum.len();
    let max = parts.chunks_exact(part).map(|part| part[0]).fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    sum.fill(0.0);
    for part in parts.chunks_exact(part) {
        // A piece of nothing but -inf counts for nothing; what is NaN stays so.
        let fade = if part[0] == f32::NEG_INFINITY { 0.0 } else { (part[0] - max).exp() };
        total += part[1] * fade;
        for (sum, value) in sum.iter_mut().zip(&part[2..]) {
            *sum += value * fade;
        }
    }
    (max, total)
}
