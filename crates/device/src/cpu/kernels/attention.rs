//! Causal attention by tiles (FlashAttention-2, Dao 2023): memory grows with the sequence, not its square.
//!
//! Forward: a task is a block of queries of one head, which goes over the keys it sees with an online softmax. Backward
//! takes two passes, one over blocks of queries for dq and one over blocks of keys for dk and dv, so that every sum
//! is made in one task and in one order; the scores are made anew in each from the saved log-sum-exp. Products of
//! tiles are matrix products like all others. Which keys a block of queries sees is said in [`Block::keys`] alone.

use std::ops::Range;

use half::bf16;

use super::math::exp;
use super::simd::{LANES, per_isa, sum_lanes};
use super::split::{Shared, Split};
use super::{Exec, Floats, FloatsMut, Simd};
use crate::cpu::matmul::{Operand, Output, SCRATCH_BYTES as MATMUL_SCRATCH_BYTES, matmul_serial};
use crate::{AttentionShape, Compute, DType};

/// Queries of a block.
const QUERIES: usize = 128;
/// Keys of a tile.
const KEYS: usize = 256;
/// The widest head.
const MAX_HEAD_DIM: usize = 512;

/// Scratch for two tiles of scores and two blocks of results, and for the products.
pub(in crate::cpu) const SCRATCH_BYTES: usize =
    4 * (2 * QUERIES * KEYS + 2 * KEYS * MAX_HEAD_DIM) + MATMUL_SCRATCH_BYTES;

/// Rows of all heads, to read: f32 or bf16.
#[derive(Clone, Copy)]
struct Rows {
    data: *const u8,
    dtype: DType,
}

// SAFETY: it stands for a shared slice of plain numbers.
unsafe impl Sync for Rows {}

/// Rows of all heads, to write: tasks write disjoint parts.
#[derive(Clone, Copy)]
struct RowsMut {
    data: *mut u8,
    dtype: DType,
}

// SAFETY: it stands for an exclusive slice whose disjoint parts go to different tasks.
unsafe impl Sync for RowsMut {}

impl Rows {
    fn new(x: Floats<'_>) -> Rows {
        let (data, dtype) = match x {
            Floats::F32(x) => (x.as_ptr().cast(), DType::F32),
            Floats::Bf16(x) => (x.as_ptr().cast(), DType::Bf16),
            Floats::F16(x) => (x.as_ptr().cast(), DType::F16),
        };
        Rows { data, dtype }
    }

    /// `rows` rows of `columns` elements from element `start` on, `stride` elements apart.
    fn operand(self, start: usize, rows: usize, columns: usize, stride: usize) -> Operand {
        let data = self.data.wrapping_add(start * self.dtype.block_bytes() as usize);
        Operand { data, dtype: self.dtype, rows, columns, row_stride: stride, column_stride: 1 }
    }
}

impl RowsMut {
    fn new(x: FloatsMut<'_>) -> RowsMut {
        let (data, dtype) = match x {
            FloatsMut::F32(x) => (x.as_mut_ptr().cast(), DType::F32),
            FloatsMut::Bf16(x) => (x.as_mut_ptr().cast(), DType::Bf16),
            FloatsMut::F16(x) => (x.as_mut_ptr().cast(), DType::F16),
        };
        RowsMut { data, dtype }
    }

    /// Writes values from element `start` on, times `factor`.
    ///
    /// # Safety
    /// The elements lie inside, and nobody else uses them meanwhile.
    unsafe fn write(self, simd: Simd, start: usize, values: &mut [f32], factor: f32) {
        scale(simd, values, factor);
        let data = self.data.wrapping_add(start * self.dtype.block_bytes() as usize);
        // SAFETY: the caller vouches for the range; rows are aligned for their type as the tensor is.
        let mut out = unsafe {
            match self.dtype {
                DType::Bf16 => {
                    FloatsMut::Bf16(std::slice::from_raw_parts_mut(data.cast::<bf16>(), values.len()))
                }
                DType::F16 => FloatsMut::F16(std::slice::from_raw_parts_mut(data.cast(), values.len())),
                _ => FloatsMut::F32(std::slice::from_raw_parts_mut(data.cast(), values.len())),
            }
        };
        out.assign(simd, 0..values.len(), values, crate::Rounding::Nearest, 0);
    }
}

fn transposed(x: Operand) -> Operand {
    Operand {
        rows: x.columns,
        columns: x.rows,
        row_stride: x.column_stride,
        column_stride: x.row_stride,
        ..x
    }
}

fn tile(data: &mut [f32], rows: usize, columns: usize) -> Output {
    debug_assert!(rows * columns <= data.len());
    Output { data: data.as_mut_ptr().cast(), dtype: DType::F32, rows, columns, row_stride: columns }
}

fn tile_operand(data: &[f32], rows: usize, columns: usize) -> Operand {
    debug_assert!(rows * columns <= data.len());
    Operand {
        data: data.as_ptr().cast(),
        dtype: DType::F32,
        rows,
        columns,
        row_stride: columns,
        column_stride: 1,
    }
}

/// A thread's scratch in parts.
struct Scratch<'a> {
    scores: &'a mut [f32],
    other: &'a mut [f32],
    first: &'a mut [f32],
    second: &'a mut [f32],
    matmul: &'a mut [u8],
}

impl Scratch<'_> {
    fn new(bytes: &mut [u8]) -> Scratch<'_> {
        let (own, matmul) = bytes.split_at_mut(SCRATCH_BYTES - MATMUL_SCRATCH_BYTES);
        // SAFETY: any bytes are f32 values, and scratch is aligned to 64 bytes.
        let (_, floats, _) = unsafe { own.align_to_mut::<f32>() };
        let (scores, rest) = floats.split_at_mut(QUERIES * KEYS);
        let (other, rest) = rest.split_at_mut(QUERIES * KEYS);
        let (first, second) = rest.split_at_mut(KEYS * MAX_HEAD_DIM);
        Scratch { scores, other, first, second, matmul }
    }
}

/// The shape as indices.
#[derive(Clone, Copy)]
struct Geometry {
    batch: usize,
    q_len: usize,
    kv_len: usize,
    kv_capacity: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
    scale: f32,
    /// Consecutive query heads that a block takes together: all of a group where there is one query, else one.
    together: usize,
}

/// Queries that are handled together: consecutive positions of one head, or one position of a group of heads.
struct Block {
    /// Element of the first row, and elements from one to the next.
    start: usize,
    stride: usize,
    rows: usize,
    /// Index of the first row's log-sum-exp; the others follow.
    statistics: usize,
    /// Element of the first key.
    keys_start: usize,
    /// Position of the first row, and whether the others are further on.
    position: usize,
    consecutive: bool,
}

impl Geometry {
    fn new(s: AttentionShape) -> Geometry {
        let group = (s.heads / s.kv_heads.max(1)) as usize;
        Geometry {
            batch: s.batch as usize,
            q_len: s.q_len as usize,
            kv_len: s.kv_len as usize,
            kv_capacity: s.kv_capacity as usize,
            heads: s.heads as usize,
            kv_heads: s.kv_heads as usize,
            d: s.head_dim as usize,
            scale: s.scale,
            together: if s.q_len == 1 && group <= QUERIES { group } else { 1 },
        }
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn query_blocks(&self) -> usize {
        self.q_len.div_ceil(QUERIES)
    }

    fn query_tasks(&self) -> usize {
        self.batch * (self.heads / self.together) * self.query_blocks()
    }

    /// The block of a task; blocks that see most come first.
    fn query_task(&self, task: usize) -> Block {
        let outer = self.batch * (self.heads / self.together);
        let block = self.query_blocks() - 1 - task / outer;
        let (batch, head) =
            ((task % outer) / (self.heads / self.together), task % (self.heads / self.together));
        self.block(batch, head * self.together, block)
    }

    fn block(&self, batch: usize, head: usize, block: usize) -> Block {
        let first = block * QUERIES;
        let many = self.together > 1;
        Block {
            start: ((batch * self.q_len + first) * self.heads + head) * self.d,
            stride: if many { self.d } else { self.heads * self.d },
            rows: if many { self.together } else { QUERIES.min(self.q_len - first) },
            statistics: (batch * self.heads + head) * self.q_len + first,
            keys_start: (batch * self.kv_capacity * self.kv_heads + head / self.group()) * self.d,
            position: self.kv_len - self.q_len + first,
            consecutive: !many,
        }
    }

    fn kv_stride(&self) -> usize {
        self.kv_heads * self.d
    }
}

impl Block {
    /// Keys that the last row sees: no other sees more.
    fn keys(&self) -> usize {
        self.position + 1 + if self.consecutive { self.rows - 1 } else { 0 }
    }

    /// How many of the keys in `range` a row sees.
    fn visible(&self, row: usize, range: &Range<usize>) -> usize {
        let position = self.position + if self.consecutive { row } else { 0 };
        (position + 1).saturating_sub(range.start).min(range.len())
    }

    /// The tiles of keys that the block sees.
    fn tiles(&self) -> impl Iterator<Item = Range<usize>> {
        let keys = self.keys();
        (0..keys).step_by(KEYS).map(move |start| start..keys.min(start + KEYS))
    }
}

/// out [batch * q_len, heads * D] and lse [batch, heads, q_len] from q, k and v.
pub(in crate::cpu) fn forward(
    exec: Exec<'_>,
    [q, k, v]: [Floats<'_>; 3],
    out: FloatsMut<'_>,
    lse: &mut [f32],
    shape: AttentionShape,
    compute: Compute,
) {
    let g = Geometry::new(shape);
    if g.d == 0 || g.d > MAX_HEAD_DIM {
        return;
    }
    let q = Rows::new(q);
    let [k, v] = [k, v].map(Rows::new);
    let out = RowsMut::new(out);
    let lse = Shared::new(lse, 1);
    exec.pool.run(g.query_tasks(), &|task, worker| {
        let block = g.query_task(task);
        let (rows, d) = (block.rows, g.d);
        let scratch = Scratch::new(worker.scratch);
        let sums = &mut scratch.first[..rows * d];
        sums.fill(0.0);
        let (mut max, mut total) = ([f32::NEG_INFINITY; QUERIES], [0.0f32; QUERIES]);
        for range in block.tiles() {
            let keys = range.len();
            let at = block.keys_start + range.start * g.kv_stride();
            let queries = q.operand(block.start, rows, d, block.stride);
            let key_rows = k.operand(at, keys, d, g.kv_stride());
            let scores = &mut scratch.scores[..rows * keys];
            // SAFETY: the operands lie in slices that outlive this call, the tile in scratch.
            unsafe {
                let c = tile(scores, rows, keys);
                matmul_serial(
                    exec.simd.isa(),
                    compute,
                    queries,
                    transposed(key_rows),
                    c,
                    false,
                    scratch.matmul,
                );
            }
            for (row, scores) in scores.chunks_exact_mut(keys).enumerate() {
                let (seen, unseen) = scores.split_at_mut(block.visible(row, &range));
                unseen.fill(0.0);
                let higher = row_max(exec.simd, seen).mul_add(g.scale, 0.0).max(max[row]);
                // A row whose every score is -inf, or that holds a NaN, keeps what its scores make of it.
                let shift = if higher == f32::NEG_INFINITY { 0.0 } else { higher };
                let fade = if max[row] == f32::NEG_INFINITY { 0.0 } else { (max[row] - shift).exp() };
                total[row] = total[row] * fade + exponentials(exec.simd, seen, g.scale, shift);
                if fade != 1.0 {
                    scale(exec.simd, &mut sums[row * d..(row + 1) * d], fade);
                }
                max[row] = higher;
            }
            let value_rows = v.operand(at, keys, d, g.kv_stride());
            // SAFETY: as above.
            unsafe {
                let p = tile_operand(scores, rows, keys);
                let c = tile(sums, rows, d);
                matmul_serial(exec.simd.isa(), compute, p, value_rows, c, true, scratch.matmul);
            }
        }
        for (row, sums) in sums.chunks_exact_mut(d).enumerate() {
            // SAFETY: each row of each head is written by one task, and so is its statistic.
            unsafe {
                out.write(exec.simd, block.start + row * block.stride, sums, 1.0 / total[row]);
                if let Some(lse) = lse.part(block.statistics + row).first_mut() {
                    *lse = max[row] + total[row].ln();
                }
            }
        }
    });
}

/// dq, dk and dv; `delta` [batch, heads, q_len] becomes the sum over D of dout * out. Whole sequences only.
pub(in crate::cpu) fn backward(
    exec: Exec<'_>,
    [q, k, v, out, dout]: [Floats<'_>; 5],
    lse: &[f32],
    delta: &mut [f32],
    [dq, dk, dv]: [FloatsMut<'_>; 3],
    shape: AttentionShape,
    compute: Compute,
) {
    // Blocks of one head even for single queries: statistics and gradients are by head.
    let g = Geometry { together: 1, ..Geometry::new(shape) };
    if g.d == 0 || g.d > MAX_HEAD_DIM {
        return;
    }
    deltas(exec, out, dout, delta, g);
    let [q, dout] = [q, dout].map(Rows::new);
    let [k, v] = [k, v].map(Rows::new);
    let dq = RowsMut::new(dq);
    let [dk, dv] = [dk, dv].map(RowsMut::new);
    let pass = Backward { exec, compute, g, q, k, v, dout, lse, delta };

    exec.pool.run(g.query_tasks(), &|task, worker| {
        let block = g.query_task(task);
        let mut scratch = Scratch::new(worker.scratch);
        let (rows, d) = (block.rows, g.d);
        for (number, range) in block.tiles().enumerate() {
            pass.score_gradients(&block, &range, &mut scratch);
            let keys =
                k.operand(block.keys_start + range.start * g.kv_stride(), range.len(), d, g.kv_stride());
            // SAFETY: the operands lie in slices that outlive this call, the tiles in disjoint parts of scratch.
            unsafe {
                let ds = tile_operand(&scratch.other[..rows * range.len()], rows, range.len());
                let c = tile(&mut scratch.first[..rows * d], rows, d);
                matmul_serial(exec.simd.isa(), compute, ds, keys, c, number > 0, scratch.matmul);
            }
        }
        for (row, sums) in scratch.first[..rows * d].chunks_exact_mut(d).enumerate() {
            // SAFETY: each row of each head is written by one task.
            unsafe { dq.write(exec.simd, block.start + row * block.stride, sums, g.scale) };
        }
    });

    let key_blocks = g.kv_len.div_ceil(KEYS);
    let outer = g.batch * g.kv_heads;
    exec.pool.run(outer * key_blocks, &|task, worker| {
        // The first keys are seen by most queries.
        let (first, batch, kv_head) = (task / outer * KEYS, (task % outer) / g.kv_heads, task % g.kv_heads);
        let range = first..g.kv_len.min(first + KEYS);
        let (keys, d) = (range.len(), g.d);
        let mut scratch = Scratch::new(worker.scratch);
        let mut accumulate = false;
        for head in kv_head * g.group()..(kv_head + 1) * g.group() {
            for number in first / QUERIES..g.query_blocks() {
                let block = g.block(batch, head, number);
                pass.score_gradients(&block, &range, &mut scratch);
                let rows = block.rows;
                let douts = dout.operand(block.start, rows, d, block.stride);
                let queries = q.operand(block.start, rows, d, block.stride);
                // SAFETY: as above.
                unsafe {
                    let p = transposed(tile_operand(&scratch.scores[..rows * keys], rows, keys));
                    let c = tile(&mut scratch.first[..keys * d], keys, d);
                    matmul_serial(exec.simd.isa(), compute, p, douts, c, accumulate, scratch.matmul);
                    let ds = transposed(tile_operand(&scratch.other[..rows * keys], rows, keys));
                    let c = tile(&mut scratch.second[..keys * d], keys, d);
                    matmul_serial(exec.simd.isa(), compute, ds, queries, c, accumulate, scratch.matmul);
                }
                accumulate = true;
            }
        }
        let start = ((batch * g.kv_capacity + first) * g.kv_heads + kv_head) * d;
        for row in 0..keys {
            let at = start + row * g.kv_stride();
            let sums = row * d..(row + 1) * d;
            // SAFETY: each row of each kv head is written by one task.
            unsafe {
                dv.write(exec.simd, at, &mut scratch.first[sums.clone()], 1.0);
                dk.write(exec.simd, at, &mut scratch.second[sums], g.scale);
            }
        }
    });
}

/// What both passes of the backward read.
struct Backward<'a> {
    exec: Exec<'a>,
    compute: Compute,
    g: Geometry,
    q: Rows,
    k: Rows,
    v: Rows,
    dout: Rows,
    lse: &'a [f32],
    delta: &'a [f32],
}

impl Backward<'_> {
    /// The tile's probabilities P into `scores` and P * (dP - delta) into `other`, both [rows, keys].
    fn score_gradients(&self, block: &Block, range: &Range<usize>, scratch: &mut Scratch<'_>) {
        let (g, rows, keys) = (self.g, block.rows, range.len());
        let at = block.keys_start + range.start * g.kv_stride();
        let (isa, simd) = (self.exec.simd.isa(), self.exec.simd);
        let (scores, other) = (&mut scratch.scores[..rows * keys], &mut scratch.other[..rows * keys]);
        let key_rows = transposed(self.k.operand(at, keys, g.d, g.kv_stride()));
        let value_rows = transposed(self.v.operand(at, keys, g.d, g.kv_stride()));
        let queries = self.q.operand(block.start, rows, g.d, block.stride);
        let douts = self.dout.operand(block.start, rows, g.d, block.stride);
        // SAFETY: the operands lie in slices that outlive this call, the tiles in disjoint parts of scratch.
        unsafe {
            matmul_serial(
                isa,
                self.compute,
                queries,
                key_rows,
                tile(scores, rows, keys),
                false,
                scratch.matmul,
            );
            matmul_serial(
                isa,
                self.compute,
                douts,
                value_rows,
                tile(other, rows, keys),
                false,
                scratch.matmul,
            );
        }
        for (row, (scores, other)) in
            scores.chunks_exact_mut(keys).zip(other.chunks_exact_mut(keys)).enumerate()
        {
            let visible = block.visible(row, range);
            let (seen, unseen) = scores.split_at_mut(visible);
            let (gradients, nothing) = other.split_at_mut(visible);
            unseen.fill(0.0);
            nothing.fill(0.0);
            let statistic = block.statistics + row;
            exponentials(simd, seen, g.scale, self.lse[statistic]);
            softmax_gradients(simd, seen, gradients, self.delta[statistic]);
        }
    }
}

/// delta of every head of every row.
fn deltas(exec: Exec<'_>, out: Floats<'_>, dout: Floats<'_>, delta: &mut [f32], g: Geometry) {
    let delta = Shared::new(delta, g.q_len);
    exec.pool.run(g.batch * g.heads, &|task, _| {
        // SAFETY: the pool runs each task once.
        let delta = unsafe { delta.part(task) };
        let (batch, head) = (task / g.heads, task % g.heads);
        let (mut a, mut b) = ([0.0; MAX_HEAD_DIM], [0.0; MAX_HEAD_DIM]);
        for (row, delta) in delta.iter_mut().enumerate() {
            let at = ((batch * g.q_len + row) * g.heads + head) * g.d;
            out.copy_to(exec.simd, at..at + g.d, &mut a[..g.d]);
            dout.copy_to(exec.simd, at..at + g.d, &mut b[..g.d]);
            *delta = dot(exec.simd, &a[..g.d], &b[..g.d]);
        }
    });
}

per_isa! {
    /// The largest element; -inf for none.
    fn row_max(x: &[f32]) -> f32 = row_max_body
}

#[inline(always)]
fn row_max_body<const FMA: bool>(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |best, value| best.max(*value))
}

per_isa! {
    /// x = e^(x * scale - shift) in place; returns the sum.
    fn exponentials(x: &mut [f32], scale: f32, shift: f32) -> f32 = exponentials_body
}

#[inline(always)]
fn exponentials_body<const FMA: bool>(x: &mut [f32], scale: f32, shift: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let mut chunks = x.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *value = exp::<FMA>(*value * scale - shift);
            *lane += *value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *value = exp::<FMA>(*value * scale - shift);
        *lane += *value;
    }
    sum_lanes(lanes)
}

per_isa! {
    /// gradients = probabilities * (gradients - delta), in place.
    fn softmax_gradients(probabilities: &[f32], gradients: &mut [f32], delta: f32) = softmax_gradients_body
}

#[inline(always)]
fn softmax_gradients_body<const FMA: bool>(probabilities: &[f32], gradients: &mut [f32], delta: f32) {
    for (gradient, p) in gradients.iter_mut().zip(probabilities) {
        *gradient = p * (*gradient - delta);
    }
}

per_isa! {
    /// x *= factor.
    fn scale(x: &mut [f32], factor: f32) = scale_body
}

#[inline(always)]
fn scale_body<const FMA: bool>(x: &mut [f32], factor: f32) {
    for value in x {
        *value *= factor;
    }
}

per_isa! {
    /// The sum of a * b.
    fn dot(a: &[f32], b: &[f32]) -> f32 = dot_body
}

#[inline(always)]
fn dot_body<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    sum_lanes(lanes)
}
