//! Products of a few rows of A with a B whose columns are contiguous along k: a decoding step's x W^T.
//!
//! B is streamed once, as it is stored, and nothing of it is packed: time is what its bytes take to arrive. Each value
//! of C is a dot product whose partial sums lie in the lanes of one vector; its order does not depend on the number of
//! rows, but it is another order than that of the blocked product.

use std::ops::Range;

use super::Output;
use super::engine::{Engine, MAX_ALONG};
use super::pack::{Lines, along_end};
use super::storage::{self, Storage};
use super::tile::prefetch;
use super::vector::{MAX_LANES, Vector, bf16_bits, bf16_value};
use crate::DType;

/// Columns of B that are read side by side.
const COLUMNS: usize = 4;
/// Rows of A that share one reading of B's columns; further ones find them in the first-level cache.
const ROWS: usize = 4;
/// How far ahead of its use B is fetched, in bytes.
const AHEAD: usize = 4096;

/// Units of a packed row of `k` values: whole vectors.
pub(super) fn row_units(k: usize, k_per_unit: usize) -> usize {
    k.div_ceil(k_per_unit).next_multiple_of(MAX_LANES)
}

/// Packs rows of A one after the other, [`row_units`] each, zero after their end.
///
/// # Safety
/// The machine has the engine's instruction set, the operand is valid and `to` has room for its rows.
#[inline(always)]
pub(super) unsafe fn pack_rows<E: Engine>(a: Lines, k: usize, to: *mut f32) {
    let lanes = E::V::LANES;
    let whole = lanes * E::K_PER_UNIT;
    let units = row_units(k, E::K_PER_UNIT);
    for row in 0..a.count {
        for unit in (0..units).step_by(lanes) {
            let k_at = unit * E::K_PER_UNIT;
            let index = row * a.stride + k_at * a.k_stride;
            // SAFETY: what is read lies before the row's end, what is written inside the packed row.
            unsafe {
                let vector = if k_at >= k {
                    E::V::splat(0.0)
                } else if a.k_stride == 1 && k - k_at >= whole && a.dtype == DType::F32 {
                    E::along::<storage::F32>(a.data, index)
                } else if a.k_stride == 1 && k - k_at >= whole && a.dtype == DType::Bf16 {
                    E::along::<storage::Bf16>(a.data, index)
                } else {
                    along_end::<E>(a, index, (k - k_at).min(whole))
                };
                vector.store(to.add(row * units + unit));
            }
        }
    }
}

/// The part of C that lies in `columns`: packed rows of A times those columns of B.
///
/// # Safety
/// The machine has the engine's instruction set, `a` is what [`pack_rows`] made of `c.rows` rows, B's columns are
/// contiguous along k, whole blocks if its type has blocks, and C is valid.
#[inline(always)]
pub(super) unsafe fn multiply_columns<E: Engine>(
    a: *const f32,
    b: Lines,
    k: usize,
    c: Output,
    accumulate: bool,
    columns: Range<usize>,
) {
    // SAFETY (all calls): as for this function.
    unsafe {
        match b.dtype {
            DType::F32 => multiply_stored::<E, storage::F32>(a, b, k, c, accumulate, columns),
            DType::Bf16 => multiply_stored::<E, storage::Bf16>(a, b, k, c, accumulate, columns),
            DType::F16 => multiply_stored::<E, storage::F16>(a, b, k, c, accumulate, columns),
            DType::Q8_0 => multiply_stored::<E, storage::Q8_0>(a, b, k, c, accumulate, columns),
            DType::Q4_0 => multiply_stored::<E, storage::Q4_0>(a, b, k, c, accumulate, columns),
            DType::Q4_1 => multiply_stored::<E, storage::Q4_1>(a, b, k, c, accumulate, columns),
            DType::U32 => {}
        }
    }
}

#[inline(always)]
unsafe fn multiply_stored<E: Engine, S: Storage>(
    a: *const f32,
    b: Lines,
    k: usize,
    c: Output,
    accumulate: bool,
    columns: Range<usize>,
) {
    let units = row_units(k, E::K_PER_UNIT);
    for column in columns.clone().step_by(COLUMNS) {
        let count = COLUMNS.min(columns.end - column);
        for row in (0..c.rows).step_by(ROWS) {
            // SAFETY: rows and columns exist.
            unsafe {
                let a = a.add(row * units);
                let mut sums = [[0.0; COLUMNS]; ROWS];
                match (c.rows - row, count) {
                    (1, COLUMNS) => dot::<E, S, 1, COLUMNS>(a, b, k, column, &mut sums),
                    (2, COLUMNS) => dot::<E, S, 2, COLUMNS>(a, b, k, column, &mut sums),
                    (3, COLUMNS) => dot::<E, S, 3, COLUMNS>(a, b, k, column, &mut sums),
                    (_, COLUMNS) => dot::<E, S, 4, COLUMNS>(a, b, k, column, &mut sums),
                    (rows, _) => {
                        for i in 0..rows.min(ROWS) {
                            for j in 0..count {
                                let mut sum = [[0.0; COLUMNS]; ROWS];
                                dot::<E, S, 1, 1>(a.add(i * units), b, k, column + j, &mut sum);
                                sums[i][j] = sum[0][0];
                            }
                        }
                    }
                }
                for (i, sums) in sums.iter().enumerate().take(c.rows - row) {
                    for (j, sum) in sums.iter().enumerate().take(count) {
                        put(c, row + i, column + j, *sum, accumulate);
                    }
                }
            }
        }
    }
}

/// Dot products of `R` packed rows with `C` columns from `column` on.
#[inline(always)]
unsafe fn dot<E: Engine, S: Storage, const R: usize, const C: usize>(
    a: *const f32,
    b: Lines,
    k: usize,
    column: usize,
    out: &mut [[f32; COLUMNS]; ROWS],
) {
    let lanes = E::V::LANES;
    let whole = lanes * E::K_PER_UNIT;
    let units = row_units(k, E::K_PER_UNIT);
    let first = column * b.stride;
    // SAFETY: the columns hold `k` values, the packed rows `units` units.
    unsafe {
        let mut sums = [[E::V::splat(0.0); C]; R];
        let mut k_at = 0;
        while k - k_at >= whole {
            let mut columns = [E::V::splat(0.0); C];
            for (j, column) in columns.iter_mut().enumerate() {
                let index = first + j * b.stride + k_at;
                prefetch(b.data.wrapping_add(S::offset(index) + AHEAD));
                *column = E::along::<S>(b.data, index);
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let row = E::V::load(a.add(i * units + k_at / E::K_PER_UNIT));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = E::multiply_add(*sum, row, column);
                }
            }
            k_at += whole;
        }
        if k_at < k {
            for (i, sums) in sums.iter_mut().enumerate() {
                let row = E::V::load(a.add(i * units + k_at / E::K_PER_UNIT));
                for (j, sum) in sums.iter_mut().enumerate() {
                    let column = along_end::<E>(b, first + j * b.stride + k_at, k - k_at);
                    *sum = E::multiply_add(*sum, row, column);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = sum.sum();
            }
        }
    }
}

/// C (+)= sum at one place.
#[inline(always)]
unsafe fn put(c: Output, row: usize, column: usize, sum: f32, accumulate: bool) {
    let at = row * c.row_stride + column;
    // SAFETY: the caller's row and column lie in C.
    unsafe {
        if c.dtype == DType::Bf16 {
            let out = c.data.cast::<u16>().add(at);
            let old = if accumulate { bf16_value(*out) } else { 0.0 };
            *out = bf16_bits(old + sum);
        } else {
            let out = c.data.cast::<f32>().add(at);
            *out = if accumulate { *out + sum } else { sum };
        }
    }
}

const _: () = assert!(MAX_ALONG >= MAX_LANES);
