//! Attention as it is written down first (Vaswani et al. 2017): all scores exist at once and their softmax is kept for
//! the backward pass. Memory grows with the square of the sequence: it is here to be compared with.

use super::geometry::Geometry;
use super::*;

/// out [batch * q_len, heads * D], lse [batch, heads, q_len] and the probabilities [batch, heads, q_len, kv_len]. A task
/// is a block of queries of one head.
#[allow(clippy::too_many_arguments)]
pub(super) fn forward(
    exec: Exec<'_>,
    q: Floats<'_>,
    [k, v]: [Rows; 2],
    out: FloatsMut<'_>,
    lse: &mut [f32],
    probabilities: &mut [f32],
    g: Geometry<'_>,
    compute: Compute,
) {
    let (q, out) = (Rows::new(q), RowsMut::new(out));
    let lse = Shared::new(lse, 1);
    let all = RowsMut { data: probabilities.as_mut_ptr().cast(), dtype: DType::F32 };
    let isa = exec.simd.isa();
    exec.pool.run(g.query_tasks(), &|task, worker| {
        let block = g.query_task(task);
        let (rows, d) = (block.rows, g.d);
        let scratch = Scratch::new(worker.scratch);
        let first = block.statistics * g.kv_len;
        for range in g.tiles(&block) {
            let queries = q.operand(block.start, rows, d, g.q_stride());
            let at = g.key(block.batch, block.kv_head, range.start);
            let keys = transposed(k.operand(at, range.len(), d, g.k_stride()));
            let scores = all.output(first + range.start, rows, range.len(), g.kv_len);
            // SAFETY: the operands lie in slices that outlive this call, and no other task has these rows of scores.
            unsafe { matmul_serial(isa, compute, queries, keys, scores, false, scratch.matmul) };
        }
        let whole = 0..g.kv_len;
        for row in 0..rows {
            let start = all.data.cast::<f32>().wrapping_add(first + row * g.kv_len);
            // SAFETY: each row of each head belongs to one task, and so does its statistic.
            let (line, statistic) = unsafe {
                (std::slice::from_raw_parts_mut(start, g.kv_len), lse.part(block.statistics + row))
            };
            let value = softmax(exec.simd, only(line, g.visible(&block, row, &whole)), &g);
            statistic.fill(value);
        }
        let sums = &mut scratch.sums[..rows * d];
        sums.fill(0.0);
        for range in g.tiles(&block) {
            let weights = Rows { data: all.data, dtype: DType::F32 };
            let weights = weights.operand(first + range.start, rows, range.len(), g.kv_len);
            let at = g.value(block.batch, block.kv_head, range.start);
            let values = v.operand(at, range.len(), d, g.v_stride());
            let sums = tile(sums, rows, d);
            // SAFETY: as above; the sums lie in scratch.
            unsafe { matmul_serial(isa, compute, weights, values, sums, true, scratch.matmul) };
        }
        for (row, sums) in sums.chunks_exact_mut(d).enumerate() {
            // SAFETY: each row of each head is written by one task.
            unsafe { out.write(exec.simd, block.start + row * g.q_stride(), sums, 1.0) };
        }
    });
}

/// The parts of a row of products become probabilities; returns the log of the sum of their exponentials.
fn softmax(simd: Simd, parts: [&mut [f32]; 2], g: &Geometry<'_>) -> f32 {
    let [first, second] = parts;
    let scale = g.cap_scores(simd, first);
    g.cap_scores(simd, second);
    let max = row_max(simd, first).max(row_max(simd, second)) * scale;
    // A row whose every score is -inf, or that holds a NaN, keeps what its scores make of it.
    let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let total = exponentials(simd, first, scale, shift) + exponentials(simd, second, scale, shift);
    multiply(simd, first, 1.0 / total);
    multiply(simd, second, 1.0 / total);
    max + total.ln()
}
