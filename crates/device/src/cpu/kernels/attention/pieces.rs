//! Attention over keys that come a piece at a time. What the queries have of the pieces so far waits in memory between them.

use super::backward::Backward;
use super::*;

/// Adds what the queries see of a piece: values to sums [batch * q_len, heads * D], and to the highest scores and sums of
/// exponentials [batch, heads, q_len].
pub(in crate::cpu) fn add_piece(
    exec: Exec<'_>,
    [q, k, v]: [Floats<'_>; 3],
    [all_sums, most, total]: [&mut [f32]; 3],
    g: Geometry<'_>,
    compute: Compute,
) {
    if g.d == 0 {
        return;
    }
    let rows = [q, k, v].map(Rows::new);
    let all_sums = Shared::new(all_sums, g.d);
    let (most, total) = (Shared::new(most, 1), Shared::new(total, 1));
    exec.pool.run(g.query_tasks(), &|task, worker| {
        let block = g.query_task(task);
        if g.tiles(&block).next().is_none() {
            return;
        }
        let mut scratch = Scratch::new(worker.scratch);
        let mut seen = Softmax { max: [f32::NEG_INFINITY; QUERIES], total: [0.0; QUERIES] };
        // SAFETY: each row of each head is one task's, and so are its statistics.
        let place = |row: usize| unsafe {
            let sums = all_sums.part(block.start / g.d + row * g.heads);
            (sums, most.part(block.statistics + row), total.part(block.statistics + row))
        };
        for row in 0..block.rows {
            let (sums, most, total) = place(row);
            scratch.sums[row * g.d..(row + 1) * g.d].copy_from_slice(sums);
            (seen.max[row], seen.total[row]) = (most[0], total[0]);
        }
        over_keys(exec, rows, &g, &block, &mut seen, &mut scratch, compute);
        for row in 0..block.rows {
            let (sums, most, total) = place(row);
            sums.copy_from_slice(&scratch.sums[row * g.d..(row + 1) * g.d]);
            (most[0], total[0]) = (seen.max[row], seen.total[row]);
        }
    });
}

/// out and lse of what all pieces gave.
pub(in crate::cpu) fn finish(
    exec: Exec<'_>,
    [sums, most, total]: [&[f32]; 3],
    out: FloatsMut<'_>,
    lse: &mut [f32],
    g: Geometry<'_>,
) {
    if g.d == 0 {
        return;
    }
    let out = RowsMut::new(out);
    let lse = Shared::new(lse, 1);
    exec.pool.run(g.query_tasks(), &|task, worker| {
        let block = g.query_task(task);
        let scratch = Scratch::new(worker.scratch);
        for row in 0..block.rows {
            let (at, statistic) = (block.start + row * g.q_stride(), block.statistics + row);
            let values = &mut scratch.sums[..g.d];
            values.copy_from_slice(&sums[at..at + g.d]);
            // SAFETY: each row of each head is written by one task, and so is its statistic.
            unsafe {
                out.write(exec.simd, at, values, 1.0 / total[statistic]);
                lse.part(statistic)[0] = most[statistic] + total[statistic].ln();
            }
        }
    });
}

/// Adds to dq, dk and dv what the queries and a piece of the keys owe to each other.
pub(in crate::cpu) fn add_piece_gradients(
    exec: Exec<'_>,
    [q, k, v, dout]: [Floats<'_>; 4],
    [lse, delta]: [&[f32]; 2],
    [dq, dk, dv]: [&mut [f32]; 3],
    g: Geometry<'_>,
    compute: Compute,
) {
    if g.d == 0 {
        return;
    }
    let [q, k, v, dout] = [q, k, v, dout].map(Rows::new);
    let [dq, dk, dv] = [dq, dk, dv].map(|x| RowsMut::new(FloatsMut::F32(x)));
    Backward { exec, compute, g, q, k, v, dout, lse, delta, probabilities: None, dq, dk, dv }.run_piece();
}
