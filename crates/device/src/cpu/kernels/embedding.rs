//! Looking token embeddings up, and adding their gradients up.

use std::ops::Range;

use super::column_sums::add_assign;
use super::split::{SharedFloats, Split, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::cpu::matmul::dequantize;
use crate::{DType, Rounding};

/// out[n] = table[tokens[n] - first]; the table's `rows` from the first on `[V, H]` as they are stored, rows whole blocks of
/// `dtype`, out [N, H]. What other tokens have stays as it is.
pub(in crate::cpu) fn embedding(
    exec: Exec<'_>,
    tokens: &[u32],
    (table, rows): (&[u8], Range<u64>),
    dtype: DType,
    out: FloatsMut<'_>,
) {
    let columns = out.len() / tokens.len().max(1);
    let stored = |elements: usize| dtype.bytes_for(elements as u64).unwrap_or(0) as usize;
    let row_bytes = stored(columns);
    let task_rows = rows_per_task(columns);
    let tasks = tokens.len().div_ceil(task_rows);
    for_each_part(exec, tasks, SharedFloats::new(out, task_rows * columns), |task, mut out, _| {
        let mut tile = Tile::new();
        for (row, &token) in tokens.iter().skip(task * task_rows).take(task_rows).enumerate() {
            if !rows.contains(&u64::from(token)) {
                continue;
            }
            let place = (u64::from(token) - rows.start) as usize;
            let embedding = &table[place * row_bytes..][..row_bytes];
            let mut out = out.row(row, columns);
            for range in tiles(columns) {
                let values = out.target(range.clone(), &mut tile);
                // Tiles are whole blocks, rows too.
                let from = &embedding[stored(range.start)..stored(range.end)];
                let done = dequantize(exec.simd.isa(), dtype, from, values);
                debug_assert!(done.is_some());
                out.store(exec.simd, range, &tile);
            }
        }
    });
}

/// dtable[tokens[n] - first] += dout[n], dtable being the table's `rows` from the first on; other tokens are left out.
///
/// The tokens are sorted, the places of each in order, so that a row of the table is one task's, and is rounded once
/// for all its places. `order` holds the sorted places; more tokens than fit are taken in several rounds.
pub(in crate::cpu) fn embedding_backward(
    exec: Exec<'_>,
    tokens: &[u32],
    dout: Floats<'_>,
    dtable: FloatsMut<'_>,
    rows: Range<u64>,
    rounding: Rounding,
    order: &mut [u64],
) {
    let columns = dout.len() / tokens.len().max(1);
    let dtable = SharedFloats::new(dtable, columns);
    for (round, tokens) in tokens.chunks(order.len().max(1)).enumerate() {
        let first = round * order.len();
        let mut count = 0;
        for (place, token) in tokens.iter().map(|token| u64::from(*token)).enumerate() {
            if rows.contains(&token) {
                order[count] = (token - rows.start) << 32 | place as u64;
                count += 1;
            }
        }
        let order = &mut order[..count];
        order.sort_unstable();
        add_sorted(
            exec,
            order,
            dout.slice(first * columns..(first + tokens.len()) * columns),
            &dtable,
            rounding,
            columns,
        );
    }
}

/// Adds rows of `dout` to rows of `dtable`; `order` holds pairs (row of dtable, row of dout), sorted.
fn add_sorted(
    exec: Exec<'_>,
    order: &[u64],
    dout: Floats<'_>,
    dtable: &SharedFloats<'_>,
    rounding: Rounding,
    columns: usize,
) {
    let token = |key: u64| key >> 32;
    let task_rows = rows_per_task(columns);
    exec.pool.run(order.len().div_ceil(task_rows), &|task, _| {
        let [mut dout_tile, mut dtable_tile] = Tile::array();
        // This task's are the tokens whose first place lies in its range.
        let mut start = task * task_rows;
        let end = order.len().min(start + task_rows);
        while start < end && start > 0 && token(order[start]) == token(order[start - 1]) {
            start += 1;
        }
        while start < end {
            let same = order[start..].iter().take_while(|key| token(**key) == token(order[start])).count();
            let places = &order[start..start + same];
            // SAFETY: the places of one token are neighbours in the sorted order, and the task in whose range the
            // first of them lies is the only one that takes this row.
            let mut dtable = unsafe { dtable.part(token(order[start]) as usize) };
            for range in tiles(columns) {
                let sum = dtable.current(exec.simd, range.clone(), &mut dtable_tile);
                for place in places {
                    let dout = dout.row((*place & 0xffff_ffff) as usize, columns);
                    add_assign(exec.simd, dout.load(exec.simd, range.clone(), &mut dout_tile), sum);
                }
                // f32 sums were made in place.
                if !matches!(dtable, FloatsMut::F32(_)) {
                    let place = token(order[start]) as usize * columns + range.start;
                    let sums = &dtable_tile.0[..range.len()];
                    dtable.assign(exec.simd, range, sums, rounding, place);
                }
            }
            start += same;
        }
    });
}
