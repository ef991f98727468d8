//! The backward pass, every tile of scores made anew once.
//!
//! Queries and keys are cut into sections. A phase handles the pairs (query section i, key section i - phase) of all
//! sequences and kv heads, each a task: no two tasks of a phase add to the same rows of dq, dk or dv, and phases follow
//! each other, so every sum has one order whatever the threads.

use super::geometry::{Block, Geometry};
use super::*;
use crate::Rounding;
use crate::cpu::kernels::cast::cast;

/// Positions of a section.
const SECTION: usize = 256;

const _: () = assert!(SECTION <= KEYS && SECTION.is_multiple_of(QUERIES));

/// dq, dk and dv; `delta` [batch, heads, q_len] becomes the sum over D of dout * out. Whole sequences only.
///
/// `sums` is where gradients that are not f32 are added up: one value for each of dq's, dk's and dv's.
#[allow(clippy::too_many_arguments)]
pub(in crate::cpu) fn backward(
    exec: Exec<'_>,
    [q, k, v, out, dout]: [Floats<'_>; 5],
    lse: &[f32],
    delta: &mut [f32],
    gradients: [FloatsMut<'_>; 3],
    sums: Option<&mut [f32]>,
    probabilities: Option<&[f32]>,
    g: Geometry<'_>,
    compute: Compute,
) {
    if g.d == 0 {
        return;
    }
    deltas(exec, out, dout, delta, g);
    let [q, k, v, dout] = [q, k, v, dout].map(Rows::new);
    let run = |[dq, dk, dv]: [&mut [f32]; 3]| {
        let [dq, dk, dv] = [dq, dk, dv].map(|x| RowsMut::new(FloatsMut::F32(x)));
        Backward { exec, compute, g, q, k, v, dout, lse, delta, probabilities, dq, dk, dv }.run();
    };
    match (gradients, sums) {
        ([FloatsMut::F32(dq), FloatsMut::F32(dk), FloatsMut::F32(dv)], _) => run([dq, dk, dv]),
        ([dq, dk, dv], Some(sums)) => {
            let (dq_sums, rest) = sums.split_at_mut(dq.len());
            let (dk_sums, dv_sums) = rest.split_at_mut(dk.len());
            run([&mut *dq_sums, &mut *dk_sums, &mut *dv_sums]);
            for (gradient, sums) in [(dq, dq_sums), (dk, dk_sums), (dv, dv_sums)] {
                cast(exec, Floats::F32(sums), gradient, Rounding::Nearest);
            }
        }
        // The operation's check asks for sums where a gradient is not f32.
        (_, None) => {}
    }
}

/// What a task needs.
pub(super) struct Backward<'a> {
    pub exec: Exec<'a>,
    pub compute: Compute,
    pub g: Geometry<'a>,
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
    pub dout: Rows,
    pub lse: &'a [f32],
    pub delta: &'a [f32],
    /// [batch, heads, q_len, kv_len], where they were kept.
    pub probabilities: Option<&'a [f32]>,
    pub dq: RowsMut,
    pub dk: RowsMut,
    pub dv: RowsMut,
}

impl Backward<'_> {
    fn run(&self) {
        let g = self.g;
        let sections = g.q_len.div_ceil(SECTION);
        let outer = g.batch * g.kv_heads;
        for phase in 0..sections {
            // The first query of a section and the last key of the one `phase` before it are the nearest.
            if phase > 0 && !g.reaches((phase - 1) * SECTION + 1) {
                break;
            }
            self.exec.pool.run(outer * (sections - phase), &|task, worker| {
                let (keys, pair) = (task / outer, task % outer);
                let mut scratch = Scratch::new(worker.scratch);
                self.sections(pair / g.kv_heads, pair % g.kv_heads, keys + phase, keys, &mut scratch);
            });
        }
    }

    /// The same with a piece of the keys, of which everything is added to what is there. A phase handles the pairs (query section
    /// i, key section j) of one i - j: a query adds the sections of a piece from the last on, as it does those of the whole.
    pub fn run_piece(&self) {
        let g = self.g;
        let held = g.held();
        let (queries, keys) = (g.q_len.div_ceil(SECTION), held.len().div_ceil(SECTION));
        let outer = g.batch * g.kv_heads;
        for phase in 0..(queries + keys).saturating_sub(1) {
            // The key section of query section i is the `phase - i`-th from the last one.
            let first = (phase + 1).saturating_sub(keys);
            let count = queries.min(phase + 1).saturating_sub(first);
            self.exec.pool.run(outer * count, &|task, worker| {
                let (query, pair) = (first + task / outer, task % outer);
                let key = keys - 1 - (phase - query);
                let start = held.start + key * SECTION;
                let section = start..held.end.min(start + SECTION);
                let mut scratch = Scratch::new(worker.scratch);
                let (batch, kv_head) = (pair / g.kv_heads, pair % g.kv_heads);
                for head in kv_head * g.group()..(kv_head + 1) * g.group() {
                    let queries = query * SECTION..g.q_len.min((query + 1) * SECTION);
                    for start in queries.step_by(QUERIES) {
                        let block = g.block(batch, head, start);
                        for seen in g.keys(&block) {
                            let range = seen.start.max(section.start)..seen.end.min(section.end);
                            if !range.is_empty() {
                                self.tile(&block, &range, true, &mut scratch);
                            }
                        }
                    }
                }
            });
        }
    }

    /// What the queries of one section and the keys of another, not later one owe to each other.
    fn sections(&self, batch: usize, kv_head: usize, queries: usize, keys: usize, scratch: &mut Scratch<'_>) {
        let g = self.g;
        let section = |number: usize| number * SECTION..g.q_len.min((number + 1) * SECTION);
        // A section's own pair comes before all others that add to its rows.
        let first = queries == keys;
        if first {
            for position in section(keys) {
                let at = g.key(batch, kv_head, position);
                // SAFETY: these rows exist, and no other task of this phase has them.
                unsafe {
                    self.dk.zero(at, g.d);
                    self.dv.zero(at, g.d);
                }
            }
        }
        for head in kv_head * g.group()..(kv_head + 1) * g.group() {
            for start in section(queries).step_by(QUERIES) {
                let block = g.block(batch, head, start);
                let section = section(keys);
                let mut accumulate = !first;
                for seen in g.keys(&block) {
                    let range = seen.start.max(section.start)..seen.end.min(section.end);
                    if !range.is_empty() {
                        self.tile(&block, &range, accumulate, scratch);
                        accumulate = true;
                    }
                }
            }
        }
    }

    /// Adds what a block of queries and a range of keys owe to each other.
    fn tile(&self, block: &Block, range: &Range<usize>, accumulate: bool, scratch: &mut Scratch<'_>) {
        self.score_gradients(block, range, scratch);
        let (g, rows, keys) = (self.g, block.rows, range.len());
        let at = g.key(block.batch, block.kv_head, range.start);
        let queries = self.q.operand(block.start, rows, g.d, g.q_stride());
        let douts = self.dout.operand(block.start, rows, g.d, g.q_stride());
        let key_rows = self.k.operand(at, keys, g.d, g.k_stride());
        let p = tile_operand(&scratch.scores[..rows * keys], rows, keys);
        let ds = tile_operand(&scratch.other[..rows * keys], rows, keys);
        let dq = self.dq.output(block.start, rows, g.d, g.q_stride());
        let dk = self.dk.output(at, keys, g.d, g.k_stride());
        let dv = self.dv.output(at, keys, g.d, g.k_stride());
        let isa = self.exec.simd.isa();
        // SAFETY: the operands lie in slices that outlive this call and in scratch, and no other task has these rows
        // of the gradients in this phase.
        unsafe {
            matmul_serial(isa, self.compute, ds, key_rows, dq, accumulate, scratch.matmul);
            matmul_serial(isa, self.compute, transposed(p), douts, dv, true, scratch.matmul);
            matmul_serial(isa, self.compute, transposed(ds), queries, dk, true, scratch.matmul);
        }
    }

    /// The tile's probabilities P, computed or as they were kept, into `scores` and the gradients of its products q k^T into `other`, both
    /// [rows, keys].
    fn score_gradients(&self, block: &Block, range: &Range<usize>, scratch: &mut Scratch<'_>) {
        let (g, rows, keys) = (self.g, block.rows, range.len());
        let at = g.key(block.batch, block.kv_head, range.start);
        let (isa, simd) = (self.exec.simd.isa(), self.exec.simd);
        let (scores, other) = (&mut scratch.scores[..rows * keys], &mut scratch.other[..rows * keys]);
        let key_rows = transposed(self.k.operand(at, keys, g.d, g.k_stride()));
        let value_rows = transposed(self.v.operand(at, keys, g.d, g.k_stride()));
        let queries = self.q.operand(block.start, rows, g.d, g.q_stride());
        let douts = self.dout.operand(block.start, rows, g.d, g.q_stride());
        let (scores_out, other_out) = (tile(scores, rows, keys), tile(other, rows, keys));
        // SAFETY: the operands lie in slices that outlive this call, the tiles in disjoint parts of scratch.
        unsafe {
            if self.probabilities.is_none() {
                matmul_serial(isa, self.compute, queries, key_rows, scores_out, false, scratch.matmul);
            }
            matmul_serial(isa, self.compute, douts, value_rows, other_out, false, scratch.matmul);
        }
        for (row, (scores, other)) in
            scores.chunks_exact_mut(keys).zip(other.chunks_exact_mut(keys)).enumerate()
        {
            let visible = g.visible(block, row, range);
            let statistic = block.statistics + row;
            let (lse, delta) = (self.lse[statistic], self.delta[statistic]);
            if let Some(probabilities) = self.probabilities {
                let start = statistic * g.kv_len + range.start;
                scores.copy_from_slice(&probabilities[start..start + keys]);
            }
            let (seen, gradients) = (only(scores, visible.clone()), only(other, visible));
            for (seen, gradients) in seen.into_iter().zip(gradients) {
                if self.probabilities.is_some() {
                    if let Some(cap) = g.soft_cap() {
                        kept_slopes(seen, gradients, [lse, delta], cap);
                        softmax_gradients(simd, seen, gradients, 0.0, g.scale);
                    } else {
                        softmax_gradients(simd, seen, gradients, delta, g.scale);
                    }
                    continue;
                }
                let scale = g.cap_scores(simd, seen);
                if let Some(cap) = g.soft_cap() {
                    capped_gradients(simd, seen, gradients, delta, cap);
                    exponentials(simd, seen, scale, lse);
                    softmax_gradients(simd, seen, gradients, 0.0, g.scale);
                } else {
                    exponentials(simd, seen, scale, lse);
                    softmax_gradients(simd, seen, gradients, delta, g.scale);
                }
            }
        }
    }
}

/// The same as [`capped_gradients`] from probabilities: a capped score is the logarithm of its own, plus the row's
/// log-sum-exp.
fn kept_slopes(probabilities: &[f32], gradients: &mut [f32], [lse, delta]: [f32; 2], cap: f32) {
    for (gradient, p) in gradients.iter_mut().zip(probabilities) {
        // One that is 0 has no part in the gradient, whatever its score was.
        let t = if *p > 0.0 { ((p.ln() + lse) / cap).clamp(-1.0, 1.0) } else { 1.0 };
        *gradient = (*gradient - delta) * (1.0 - t * t);
    }
}

/// delta of every head of every row: the sum over D of dout * out.
pub(in crate::cpu) fn deltas(
    exec: Exec<'_>,
    out: Floats<'_>,
    dout: Floats<'_>,
    delta: &mut [f32],
    g: Geometry<'_>,
) {
    let delta = Shared::new(delta, g.q_len);
    exec.pool.run(g.batch * g.heads, &|task, _| {
        // SAFETY: the pool runs each task once.
        let delta = unsafe { delta.part(task) };
        let (batch, head) = (task / g.heads, task % g.heads);
        let (mut a, mut b) = ([0.0; MAX_HEAD_DIM], [0.0; MAX_HEAD_DIM]);
        for (row, delta) in delta.iter_mut().enumerate() {
            let at = (batch * g.q_len + row) * g.q_stride() + head * g.d;
            out.copy_to(exec.simd, at..at + g.d, &mut a[..g.d]);
            dout.copy_to(exec.simd, at..at + g.d, &mut b[..g.d]);
            *delta = dot(exec.simd, &a[..g.d], &b[..g.d]);
        }
    });
}

per_isa! {
    /// gradients = probabilities * (gradients - delta) * scale, in place.
    fn softmax_gradients(probabilities: &[f32], gradients: &mut [f32], delta: f32, scale: f32) =
        softmax_gradients_body
}

#[inline(always)]
fn softmax_gradients_body<const FMA: bool>(
    probabilities: &[f32],
    gradients: &mut [f32],
    delta: f32,
    scale: f32,
) {
    for (gradient, p) in gradients.iter_mut().zip(probabilities) {
        *gradient = p * (*gradient - delta) * scale;
    }
}

per_isa! {
    /// gradients = (gradients - delta) * (1 - (scores / cap)^2), the slope of the cap, in place.
    fn capped_gradients(scores: &[f32], gradients: &mut [f32], delta: f32, cap: f32) = capped_gradients_body
}

#[inline(always)]
fn capped_gradients_body<const FMA: bool>(scores: &[f32], gradients: &mut [f32], delta: f32, cap: f32) {
    for (gradient, score) in gradients.iter_mut().zip(scores) {
        let t = score / cap;
        *gradient = (*gradient - delta) * (1.0 - t * t);
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
