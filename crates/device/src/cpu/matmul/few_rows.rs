//! Products of a few rows of A with a B whose columns are contiguous along k: a decoding step's x W^T.
//!
//! B is streamed once, as it is stored, and nothing of it is packed: time is what its bytes take to arrive. Each value
//! of C is a dot product whose partial sums lie in the lanes of one vector; its order does not depend on the number of
//! rows, so that a decoder's passes over several tokens have the bits of those over one. It is another order than that of the
//! blocked product.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::crew::Crew;
use super::engine::Engine;
use super::kernels::Dequantize;
use super::pack::{Lines, along_end};
use super::storage::{self, At, GROUP, Read, Storage};
use super::tile::{LINE, NOTHING, prefetch_later};
use super::vector::{MAX_LANES, MAX_VECTORS, SUMS, Vector, bf16_bits, bf16_value, f16_bits, f16_value};
use super::{Dithered, Output, Product};
use crate::DType;
use crate::cpu::kernels::Dither;

/// Rows of A at most: with more of them it pays to pack B. Kernels may have fewer.
pub(super) const MAX_ROWS: usize = crate::op::FEW_ROWS;
/// Bytes of B that a task streams, about. The tasks of a thread follow each other, so that they may be small.
const TASK_BYTES: usize = 16 << 10;
/// How far ahead of its use B is fetched, in bytes at least, into the second-level cache: the few lines that the first-level cache can
/// wait for at a time let a core read half as fast. On two cores of an EPYC of Zen 4, products of a row with 134 million weights in Q8_0
/// took 9.9 ms by way of the first level, and 6.0 now. With 4096 bytes Q5_K and Q6_K in integers took 18 and 7 % longer.
const AHEAD: usize = 6144;

/// Columns at most that kernels multiply together.
pub(super) const MOST_COLUMNS: usize = 8;

/// Values of a column that are decoded at a time: whole blocks of every type.
const DECODED: usize = 256;

/// Bytes of a packed row at most.
const MAX_ROW_BYTES: usize = 512 << 10;

/// Whether this is the way to compute a product.
pub(super) fn suits(product: &Product) -> bool {
    product.a.count <= product.kernels.few_rows && streams(product)
}

/// Whether this can stream B, but for the number of rows.
pub(super) fn streams(product: &Product) -> bool {
    let Product { kernels, a, b, k, .. } = *product;
    k > 0
        && a.dtype.is_float()
        && row_units(k, kernels.k_per_unit) * size_of::<f32>() <= MAX_ROW_BYTES
        && b.k_stride == 1
        && b.stride.is_multiple_of(b.dtype.block_elements() as usize)
}

/// Computes a product that this suits.
///
/// # Safety
/// Operands and C are valid, and C overlaps neither.
pub(super) unsafe fn run(product: &Product, crew: &mut impl Crew) {
    let Product { kernels, a, b, k, c, accumulate } = *product;
    let common = crew.common();
    let row_bytes = row_units(k, kernels.k_per_unit) * size_of::<f32>();
    let fits = |rows: &usize| padded_rows(*rows) * row_bytes <= common.bytes;
    let group = [MAX_ROWS, 16, 8, 4, 2].into_iter().find(fits).unwrap_or(1);
    let column_bytes = b.dtype.bytes_for(b.stride as u64).unwrap_or(0) as usize;
    let each = (TASK_BYTES / column_bytes.max(1)).max(1).next_multiple_of(MOST_COLUMNS);
    for first in (0..a.count).step_by(group) {
        let a = a.part(first..a.count.min(first + group));
        let c_bytes = c.dtype.block_bytes() as usize;
        let c = Output { data: c.data.wrapping_add(first * c.row_stride * c_bytes), rows: a.count, ..c };
        let rows = common.start.cast::<f32>();
        // SAFETY: the rows fit in the common memory, which no task uses yet.
        unsafe { (kernels.pack_rows)(a, k, rows) };
        let all = Columns { rows, b, k, c, accumulate, start: 0, end: b.count };
        crew.run_side_by_side(b.count.div_ceil(each), &|task, follows| {
            if !follows {
                all.fetch(task * each * column_bytes, AHEAD.min(each * column_bytes));
            }
            // SAFETY: no other task has these columns of C, and the rows stay as they are.
            unsafe { (kernels.multiply_columns)(&all.part(task * each, each)) };
        });
    }
}

/// How far ahead of its use B is fetched where columns of `together` bytes are multiplied together: the same place in columns to
/// come.
pub(super) fn ahead(together: usize) -> usize {
    AHEAD.next_multiple_of(together.max(1))
}

/// Units of a packed row of `k` values: whole vectors.
pub(super) fn row_units(k: usize, k_per_unit: usize) -> usize {
    k.div_ceil(k_per_unit).next_multiple_of(MAX_LANES)
}

/// Packed rows for `rows` rows of A: what the kernels take at a time.
pub(super) fn padded_rows(rows: usize) -> usize {
    match rows {
        0..=2 => rows,
        3..=4 => 4,
        _ => rows.next_multiple_of(8),
    }
}

/// Packs rows of A one after the other, [`row_units`] each, zero after their end; then rows of zeros up to
/// [`padded_rows`].
///
/// # Safety
/// The machine has the engine's instruction set, the operand is valid and `to` has room for its rows.
#[inline(always)]
pub(super) unsafe fn pack_rows<E: Engine>(a: Lines, k: usize, to: *mut f32) {
    let lanes = E::V::LANES;
    let whole = lanes * E::K_PER_UNIT;
    let units = row_units(k, E::K_PER_UNIT);
    for row in 0..padded_rows(a.count) {
        for unit in (0..units).step_by(lanes) {
            let k_at = unit * E::K_PER_UNIT;
            let index = row * a.stride + k_at * a.k_stride;
            // SAFETY: what is read lies before the row's end, what is written inside the packed row.
            unsafe {
                let vector = if k_at >= k || row >= a.count {
                    E::V::splat(0.0)
                } else if a.k_stride == 1 && k - k_at >= whole && a.dtype == DType::F32 {
                    E::along(At::<storage::F32>::new(a.data, index))
                } else if a.k_stride == 1 && k - k_at >= whole && a.dtype == DType::Bf16 {
                    E::along(At::<storage::Bf16>::new(a.data, index))
                } else {
                    along_end::<E>(a, index, (k - k_at).min(whole))
                };
                vector.store(to.add(row * units + unit));
            }
        }
    }
}

/// Some columns of C to be computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    /// What [`pack_rows`] made of A.
    pub rows: *const f32,
    /// Columns of B, contiguous along k; whole blocks if its type has blocks.
    pub b: Lines,
    pub k: usize,
    pub c: Output,
    pub accumulate: bool,
    pub start: usize,
    pub end: usize,
}

// SAFETY: rows and B are only read, and each task writes columns of its own.
unsafe impl Sync for Columns {}

impl Columns {
    /// `count` columns from `start` on, or as many as there are.
    fn part(&self, start: usize, count: usize) -> Columns {
        Columns { start, end: self.end.min(start + count), ..*self }
    }

    /// Fetches some bytes of B, which the columns before them would else have done.
    fn fetch(&self, start: usize, bytes: usize) {
        for line in (start..start + bytes).step_by(LINE) {
            prefetch_later(self.b.data.wrapping_add(line));
        }
    }
}

/// Dot products of `R` rows with `N` columns. No closure: one would be compiled without the caller's instruction set.
pub(super) trait Dots<const R: usize, const N: usize> {
    /// They are added to `out`, and so go on from what an f32 C holds where it is accumulated.
    const GO_ON: bool = false;

    /// Those of packed rows from number `first` on with columns that start at these elements.
    ///
    /// # Safety
    /// The machine has the instruction set, and rows and columns exist.
    unsafe fn dots(&self, first: usize, starts: [usize; N], out: &mut [[f32; N]; R]);
}

/// With columns that are stored as `S`, or decoded to it, by an engine.
struct Floats<'a, E, S> {
    task: &'a Columns,
    decode: Option<Dequantize>,
    kind: PhantomData<(E, S)>,
}

impl<E: Engine, S: Storage, const R: usize, const N: usize> Dots<R, N> for Floats<'_, E, S> {
    #[inline(always)]
    unsafe fn dots(&self, first: usize, starts: [usize; N], out: &mut [[f32; N]; R]) {
        let Columns { rows, b, k, .. } = *self.task;
        // SAFETY: as the trait says.
        unsafe {
            let rows = rows.add(first * row_units(k, E::K_PER_UNIT));
            dot::<E, S, R, N>(rows, b, k, starts, self.decode, out);
        }
    }
}

/// Computes columns of C, `N` at a time; `R` rows share one reading of them, and further rows find them in the
/// first-level cache.
///
/// # Safety
/// The machine has the engine's instruction set, B is stored as `S` or decoded to it, operands and C are valid, and packed rows
/// are a multiple of `R`.
#[inline(always)]
pub(super) unsafe fn multiply_columns<E: Engine, S: Storage, const R: usize, const N: usize>(
    task: &Columns,
    decode: Option<Dequantize>,
) {
    // SAFETY: as for this function.
    unsafe { each_column::<R, N, _>(task, &Floats::<E, S> { task, decode, kind: PhantomData }) }
}

/// The same by any dot products. Where columns are fewer than `N`, the last one is taken again: what is in its place counts for
/// nothing, and a loop for other widths would make every kernel half as large again.
///
/// # Safety
/// As of [`multiply_columns`] and of the dot products.
#[inline(always)]
pub(super) unsafe fn each_column<const R: usize, const N: usize, D: Dots<R, N>>(task: &Columns, dots: &D) {
    let Columns { b, c, start, end, .. } = *task;
    let goes_on = D::GO_ON && c.dtype == DType::F32 && task.accumulate;
    let accumulate = task.accumulate && !goes_on;
    for column in (start..end).step_by(N) {
        let count = N.min(end - column);
        let mut starts = [0; N];
        for (j, start) in starts.iter_mut().enumerate() {
            *start = (column + j).min(end - 1) * b.stride;
        }
        for row in (0..c.rows).step_by(R) {
            let mut sums = [[0.0; N]; R];
            // SAFETY: rows and columns exist.
            unsafe {
                if goes_on {
                    for (i, sums) in sums.iter_mut().enumerate().take(c.rows - row) {
                        let from = c.data.cast::<f32>().add((row + i) * c.row_stride + column);
                        for (j, sum) in sums.iter_mut().enumerate().take(count) {
                            *sum = *from.add(j);
                        }
                    }
                }
                dots.dots(row, starts, &mut sums);
                if count == N && c.dtype == DType::F32 && !accumulate {
                    let out = c.data.cast::<f32>().add(row * c.row_stride + column);
                    for (i, sums) in sums.iter().enumerate().take(c.rows - row) {
                        out.add(i * c.row_stride).cast::<[f32; N]>().write_unaligned(*sums);
                    }
                    continue;
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

/// Dot products of `R` packed rows with `N` columns.
#[inline(always)]
unsafe fn dot<E: Engine, S: Storage, const R: usize, const N: usize>(
    rows: *const f32,
    b: Lines,
    k: usize,
    starts: [usize; N],
    decode: Option<Dequantize>,
    out: &mut [[f32; N]; R],
) {
    let units = row_units(k, E::K_PER_UNIT);
    // SAFETY: the columns hold `k` values, the packed rows `units` units.
    unsafe {
        let mut sums = [[E::V::splat(0.0); N]; R];
        match decode {
            Some(decode) => add_decoded::<E, R, N>(&mut sums, rows, units, b, k, starts, decode),
            None => add_stored::<E, S, R, N>(&mut sums, rows, units, b, k, starts),
        }
        if R * N == SUMS {
            let mut all = [E::V::splat(0.0); SUMS];
            for (i, sums) in sums.iter().enumerate() {
                for (j, sum) in sums.iter().enumerate() {
                    all[i * N + j] = *sum;
                }
            }
            let mut totals = [0.0; SUMS];
            E::V::sums(all, &mut totals);
            for (i, out) in out.iter_mut().enumerate() {
                out.copy_from_slice(&totals[i * N..(i + 1) * N]);
            }
        } else {
            for (out, sums) in out.iter_mut().zip(&sums) {
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = sum.sum();
                }
            }
        }
    }
}

/// Adds the products of columns that are stored as `S`, a block of a quantised type at a time, so that its scales are read once.
#[inline(always)]
unsafe fn add_stored<E: Engine, S: Storage, const R: usize, const N: usize>(
    sums: &mut [[E::V; N]; R],
    rows: *const f32,
    units: usize,
    b: Lines,
    k: usize,
    starts: [usize; N],
) {
    let whole = E::V::LANES * E::K_PER_UNIT;
    let block = S::BLOCK.max(GROUP);
    let block_bytes = S::offset(block).max(1);
    let ahead = ahead(S::offset(N * b.stride));
    // SAFETY: as for the caller.
    unsafe {
        let mut columns = [S::place(b.data, starts[0]); N];
        for (place, start) in columns.iter_mut().zip(starts).skip(1) {
            *place = S::place(b.data, start);
        }
        let mut row = rows;
        for _ in 0..k / block {
            let mut scales = [const { MaybeUninit::<S::Scales<E::V>>::uninit() }; N];
            for (scales, place) in scales.iter_mut().zip(&columns) {
                scales.write(S::scales(*place));
            }
            for start in (0..block).step_by(S::CHUNK) {
                for (j, (place, scales)) in columns.iter().zip(&scales).enumerate() {
                    let mut vectors = [E::V::splat(0.0); MAX_VECTORS];
                    S::chunk(*place, start, scales.assume_init_ref(), &mut vectors);
                    for at in (0..S::CHUNK).step_by(whole) {
                        let bf16 = S::bf16_at(*place, start + at);
                        let column = E::along(Read { vectors: &vectors, at, bf16 });
                        let row = row.add((start + at) / E::K_PER_UNIT);
                        for (i, sums) in sums.iter_mut().enumerate() {
                            sums[j] = E::multiply_add(sums[j], E::V::load(row.add(i * units)), column);
                        }
                    }
                }
            }
            for place in &mut columns {
                for line in (0..block_bytes).step_by(LINE) {
                    prefetch_later(S::address(*place).wrapping_add(ahead + line));
                }
                *place = S::next(*place);
            }
            row = row.add(block / E::K_PER_UNIT);
        }
        let left = k % block;
        for at in (0..left).step_by(whole) {
            let mut vectors = [E::V::splat(0.0); N];
            for (vector, start) in vectors.iter_mut().zip(starts) {
                let index = start + k - left + at;
                *vector = if left - at >= whole {
                    E::along(At::<S>::new(b.data, index))
                } else {
                    along_end::<E>(b, index, left - at)
                };
            }
            add_products::<E, R, N>(sums, row.add(at / E::K_PER_UNIT), units, vectors);
        }
    }
}

/// Adds the products of columns that are decoded first, a piece of each at a time: in the order of [`add_stored`].
#[inline(always)]
unsafe fn add_decoded<E: Engine, const R: usize, const N: usize>(
    sums: &mut [[E::V; N]; R],
    rows: *const f32,
    units: usize,
    b: Lines,
    k: usize,
    starts: [usize; N],
    decode: Dequantize,
) {
    let whole = E::V::LANES * E::K_PER_UNIT;
    let mut pieces = [[0.0; DECODED]; N];
    for first in (0..k).step_by(DECODED) {
        let count = DECODED.min(k - first);
        for (piece, start) in pieces.iter_mut().zip(starts) {
            // SAFETY: the column holds the values, and a block begins with the first one.
            unsafe { decode(b.dtype, b.data, start + first, count, piece.as_mut_ptr()) };
            piece[count..].fill(0.0);
        }
        for at in (0..count).step_by(whole) {
            // SAFETY: pieces hold whole vectors, with zeros after the last value; rows have a vector for each.
            unsafe {
                // A closure would be compiled without the instruction set.
                let mut vectors = [E::V::splat(0.0); N];
                for (vector, piece) in vectors.iter_mut().zip(&pieces) {
                    *vector = E::along(At::<storage::F32>::new(piece.as_ptr().add(at).cast(), 0));
                }
                add_products::<E, R, N>(sums, rows.add((first + at) / E::K_PER_UNIT), units, vectors);
            }
        }
    }
}

/// Adds the products of a vector of each row and column.
#[inline(always)]
unsafe fn add_products<E: Engine, const R: usize, const N: usize>(
    sums: &mut [[E::V; N]; R],
    rows: *const f32,
    units: usize,
    columns: [E::V; N],
) {
    for (i, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's rows hold a vector from here.
        unsafe {
            let row = E::V::load(rows.add(i * units));
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = E::multiply_add(*sum, row, column);
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
        let narrow = c.data.cast::<u16>().add(at);
        match c.dtype {
            DType::Bf16 => {
                let old = if accumulate { bf16_value(*narrow) } else { NOTHING };
                *narrow = match c.dither {
                    Some(Dithered { seed, first, base }) if accumulate => {
                        let place = first.wrapping_add((narrow.addr() - base) as u64 / 2);
                        Dither::new(seed, place).bf16(old + sum, 0).to_bits()
                    }
                    _ => bf16_bits(old + sum),
                };
            }
            DType::F16 => {
                let old = if accumulate { f16_value(*narrow) } else { NOTHING };
                *narrow = f16_bits(old + sum);
            }
            _ => {
                let out = c.data.cast::<f32>().add(at);
                *out = if accumulate { *out + sum } else { sum };
            }
        }
    }
}
