//! Causal attention by tiles (FlashAttention-2, Dao 2023): memory grows with the sequence, not its square.
//!
//! Forward: a task is a block of queries of one head, which goes over the keys it sees with an online softmax; a single
//! query of each head is `decode`'s affair, scores that are written out `standard`'s. The backward pass is in `backward`,
//! where heads, blocks and what they see are in `geometry`. Products of tiles are matrix products like all others. Keys
//! and values are read as they are stored.

mod backward;
mod decode;
mod geometry;
mod paged;
mod pieces;
mod standard;

use std::ops::Range;

use half::bf16;

use super::math::exp;
use super::simd::{LANES, max_of_lanes, per_isa, sum_lanes};
use super::split::{Shared, Split};
use super::{Exec, Floats, FloatsMut, Simd};
use crate::cpu::matmul::{Operand, Output, SCRATCH_BYTES as MATMUL_SCRATCH_BYTES, matmul_serial};
use crate::{Compute, DType};

pub(in crate::cpu) use backward::{backward, deltas};
use geometry::Block;
pub(in crate::cpu) use geometry::Geometry;
pub(in crate::cpu) use paged::{Paged, paged};
pub(in crate::cpu) use pieces::{add_piece, add_piece_gradients, finish};

/// Queries of a block.
const QUERIES: usize = 128;
/// Keys of a tile.
const KEYS: usize = crate::op::TILE_POSITIONS as usize;
/// The widest head.
const MAX_HEAD_DIM: usize = crate::op::MAX_HEAD_DIM as usize;

/// Scratch for two tiles of scores and a block of results, and for the products.
pub(in crate::cpu) const SCRATCH_BYTES: usize =
    4 * (2 * QUERIES * KEYS + QUERIES * MAX_HEAD_DIM) + MATMUL_SCRATCH_BYTES;

const _: () = assert!(crate::op::TOGETHER_BYTES as usize <= 4 * QUERIES * KEYS);

/// Rows of all heads, to read.
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

    /// Rows of any type, whole blocks each.
    fn stored(bytes: &[u8], dtype: DType) -> Rows {
        Rows { data: bytes.as_ptr(), dtype }
    }

    /// Where element `index` lies, or its block begins.
    fn at(self, index: usize) -> *const u8 {
        let block = self.dtype.block_elements() as usize;
        self.data.wrapping_add(index / block * self.dtype.block_bytes() as usize)
    }

    /// `rows` rows of `columns` elements from element `start` on, `stride` elements apart.
    fn operand(self, start: usize, rows: usize, columns: usize, stride: usize) -> Operand {
        Operand {
            data: self.at(start),
            dtype: self.dtype,
            rows,
            columns,
            row_stride: stride,
            column_stride: 1,
        }
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

    /// `rows` rows of `columns` f32 elements from element `start` on, `stride` elements apart.
    fn output(self, start: usize, rows: usize, columns: usize, stride: usize) -> Output {
        let data = self.data.wrapping_add(start * self.dtype.block_bytes() as usize);
        Output { data, dtype: self.dtype, rows, columns, row_stride: stride, dither: None }
    }

    /// Makes `count` elements from element `start` on zero.
    ///
    /// # Safety
    /// The elements lie inside, and nobody else uses them meanwhile.
    unsafe fn zero(self, start: usize, count: usize) {
        let size = self.dtype.block_bytes() as usize;
        // SAFETY: the caller vouches for the range, and zero bytes are zeros of every type.
        unsafe { std::ptr::write_bytes(self.data.wrapping_add(start * size), 0, count * size) };
    }

    /// Writes values from element `start` on, times `factor`.
    ///
    /// # Safety
    /// The elements lie inside, and nobody else uses them meanwhile.
    unsafe fn write(self, simd: Simd, start: usize, values: &mut [f32], factor: f32) {
        multiply(simd, values, factor);
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

/// The parts of a row that are seen, in order; the rest becomes 0.
fn only(row: &mut [f32], [first, second]: [Range<usize>; 2]) -> [&mut [f32]; 2] {
    // An empty range may lie anywhere.
    let first = if first.is_empty() { second.start..second.start } else { first };
    let second = if second.is_empty() { first.end..first.end } else { second };
    let (row, after) = row.split_at_mut(second.end);
    let (row, second) = row.split_at_mut(second.start);
    let (row, between) = row.split_at_mut(first.end);
    let (before, first) = row.split_at_mut(first.start);
    [before, between, after].into_iter().for_each(|unseen| unseen.fill(0.0));
    [first, second]
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
    Output {
        data: data.as_mut_ptr().cast(),
        dtype: DType::F32,
        rows,
        columns,
        row_stride: columns,
        dither: None,
    }
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
    sums: &'a mut [f32],
    matmul: &'a mut [u8],
}

impl Scratch<'_> {
    fn new(bytes: &mut [u8]) -> Scratch<'_> {
        let (own, matmul) = bytes.split_at_mut(SCRATCH_BYTES - MATMUL_SCRATCH_BYTES);
        // SAFETY: any bytes are f32 values, and scratch is aligned to 64 bytes.
        let (_, floats, _) = unsafe { own.align_to_mut::<f32>() };
        let (scores, rest) = floats.split_at_mut(QUERIES * KEYS);
        let (other, sums) = rest.split_at_mut(QUERIES * KEYS);
        Scratch { scores, other, sums, matmul }
    }
}

/// out [batch * q_len, heads * D] and lse [batch, heads, q_len] from q and from k and v as they are stored, and the
/// probabilities [batch, heads, q_len, kv_len] where they are asked for. `workspace` is for the parts of single queries.
#[allow(clippy::too_many_arguments)]
pub(in crate::cpu) fn forward(
    exec: Exec<'_>,
    q: Floats<'_>,
    [k, v]: [(&[u8], DType); 2],
    out: FloatsMut<'_>,
    lse: &mut [f32],
    probabilities: Option<&mut [f32]>,
    g: Geometry<'_>,
    compute: Compute,
    workspace: &mut [f32],
) {
    let g = g.cached(k.1, v.1);
    if g.d == 0 {
        return;
    }
    let [k, v] = [k, v].map(|(bytes, dtype)| Rows::stored(bytes, dtype));
    if let Some(probabilities) = probabilities {
        return standard::forward(exec, q, [k, v], out, lse, probabilities, g, compute);
    }
    let (out, lse) = (RowsMut::new(out), Shared::new(lse, 1));
    if decode::forward(exec, q, [k, v], out, &lse, &[g], workspace) {
        return;
    }
    by_tiles(exec, [Rows::new(q), k, v], out, &lse, g, compute);
}

/// The same by tiles of keys.
fn by_tiles(
    exec: Exec<'_>,
    [q, k, v]: [Rows; 3],
    out: RowsMut,
    lse: &Shared<'_, f32>,
    g: Geometry<'_>,
    compute: Compute,
) {
    exec.pool.run(g.query_tasks(), &|task, worker| {
        let block = g.query_task(task);
        let (rows, d) = (block.rows, g.d);
        let mut scratch = Scratch::new(worker.scratch);
        scratch.sums[..rows * d].fill(0.0);
        let mut seen = Softmax { max: [f32::NEG_INFINITY; QUERIES], total: [0.0; QUERIES] };
        over_keys(exec, [q, k, v], &g, &block, &mut seen, &mut scratch, compute);
        let Softmax { max, total } = seen;
        for (row, sums) in scratch.sums[..rows * d].chunks_exact_mut(d).enumerate() {
            // SAFETY: each row of each head is written by one task, and so is its statistic.
            unsafe {
                out.write(exec.simd, block.start + row * g.q_stride(), sums, 1.0 / total[row]);
                if let Some(lse) = lse.part(block.statistics + row).first_mut() {
                    *lse = max[row] + total[row].ln();
                }
            }
        }
    });
}

/// What the rows of a block have seen: the highest score of each, and the sum of the exponentials of all, counted from the highest.
struct Softmax {
    max: [f32; QUERIES],
    total: [f32; QUERIES],
}

/// Takes a block of queries over the tiles of keys that it sees, with an online softmax: the weighted values are added to
/// the `sums` of the scratch.
fn over_keys(
    exec: Exec<'_>,
    [q, k, v]: [Rows; 3],
    g: &Geometry<'_>,
    block: &Block,
    Softmax { max, total }: &mut Softmax,
    scratch: &mut Scratch<'_>,
    compute: Compute,
) {
    let (rows, d) = (block.rows, g.d);
    let sums = &mut scratch.sums[..rows * d];
    for range in g.tiles(block) {
        let keys = range.len();
        let queries = q.operand(block.start, rows, d, g.q_stride());
        let key = |position| g.key(block.batch, block.kv_head, position);
        let key_rows = together(k, g, &range, key, g.k_stride(), scratch.other);
        let scores = &mut scratch.scores[..rows * keys];
        // SAFETY: the operands lie in slices that outlive this call, the tile in scratch.
        unsafe {
            let c = tile(scores, rows, keys);
            matmul_serial(exec.simd.isa(), compute, queries, transposed(key_rows), c, false, scratch.matmul);
        }
        for (row, scores) in scores.chunks_exact_mut(keys).enumerate() {
            let seen = only(scores, g.visible(block, row, &range));
            let [first, second] = seen;
            let scale = g.cap_scores(exec.simd, first);
            g.cap_scores(exec.simd, second);
            let highest = row_max(exec.simd, first).max(row_max(exec.simd, second));
            let higher = (highest * scale).max(max[row]);
            // A row whose every score is -inf, or that holds a NaN, keeps what its scores make of it.
            let shift = if higher == f32::NEG_INFINITY { 0.0 } else { higher };
            let fade = if max[row] == f32::NEG_INFINITY { 0.0 } else { (max[row] - shift).exp() };
            let sum =
                exponentials(exec.simd, first, scale, shift) + exponentials(exec.simd, second, scale, shift);
            total[row] = total[row] * fade + sum;
            if fade != 1.0 {
                multiply(exec.simd, &mut sums[row * d..(row + 1) * d], fade);
            }
            max[row] = higher;
        }
        let value = |position| g.value(block.batch, block.kv_head, position);
        let value_rows = together(v, g, &range, value, g.v_stride(), scratch.other);
        // SAFETY: as above.
        unsafe {
            let p = tile_operand(scores, rows, keys);
            let c = tile(sums, rows, d);
            matmul_serial(exec.simd.isa(), compute, p, value_rows, c, true, scratch.matmul);
        }
    }
}

/// The rows of a head at some positions: where they lie, `stride` elements apart, or one behind the other in `memory` where they
/// lie in several pages. `element` is where a position's row begins.
fn together(
    stored: Rows,
    g: &Geometry<'_>,
    positions: &Range<usize>,
    element: impl Fn(usize) -> usize,
    stride: usize,
    memory: &mut [f32],
) -> Operand {
    if g.run_end(positions) == positions.end {
        return stored.operand(element(positions.start), positions.len(), g.d, stride);
    }
    let width = stored.dtype.cached_columns(g.d as u64);
    let row_bytes = stored.dtype.bytes_for(width).unwrap_or(0) as usize;
    let memory: &mut [u8] = bytemuck::cast_slice_mut(memory);
    for (position, row) in positions.clone().zip(memory.chunks_exact_mut(row_bytes)) {
        // SAFETY: the position's row exists in whole blocks, and is no memory of this thread's own.
        row.copy_from_slice(unsafe { std::slice::from_raw_parts(stored.at(element(position)), row_bytes) });
    }
    Rows::stored(memory, stored.dtype).operand(0, positions.len(), g.d, width as usize)
}

per_isa! {
    /// The largest element; -inf for none.
    fn row_max(x: &[f32]) -> f32 = row_max_body
}

#[inline(always)]
fn row_max_body<const FMA: bool>(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    for (lane, value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = if *value > *lane { *value } else { *lane };
    }
    max_of_lanes(lanes)
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
    /// x *= factor.
    fn multiply(x: &mut [f32], factor: f32) = multiply_body
}

#[inline(always)]
fn multiply_body<const FMA: bool>(x: &mut [f32], factor: f32) {
    for value in x {
        *value *= factor;
    }
}
