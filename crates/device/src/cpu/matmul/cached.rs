//! What a decoding step does with cached keys and values: dot products with rows, and weighted sums of rows.
//!
//! Rows are read once, as they are stored, for up to [`MAX_TOGETHER`] queries that share them. Every sum has one order:
//! that of the elements in a dot product, that of the rows in a weighted sum.

use super::storage::{self, At, Elements, Storage};
use super::tile::{LINE, prefetch};
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use super::vector::{MAX_LANES, Portable, Vector};
use crate::DType;
use crate::cpu::Isa;

/// Queries that share one reading of the rows at most.
pub const MAX_TOGETHER: usize = 4;

/// Rows that are fetched ahead of their use.
const AHEAD: usize = 12;

/// Vectors of a weighted sum that are kept in registers for each query.
const COLUMN_VECTORS: usize = 4;

/// Rows of one head in a cache.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct CachedRows {
    /// The first row, of a block type the beginning of a block.
    pub data: *const u8,
    pub dtype: DType,
    pub rows: usize,
    /// Elements of a row that count.
    pub columns: usize,
    /// Elements from one row to the next: whole blocks.
    pub stride: usize,
}

/// Sets `out[i * out_stride + j]` to the dot product of query `i` and row `j`. Query `i` begins at `queries[i * stride]`,
/// holds the rows' columns and is zero from there up to `stride`.
///
/// # Safety
/// The rows are valid and of a type for caches ([`DType::is_cache`]).
///
/// # Panics
/// With fewer than 1 or more than [`MAX_TOGETHER`] queries, queries that are shorter than rows rounded up to 32 or no
/// room for the results.
pub unsafe fn dots(
    isa: Isa,
    queries: &[f32],
    stride: usize,
    rows: CachedRows,
    out: &mut [f32],
    out_stride: usize,
) {
    let count = queries.len() / stride.max(1);
    assert!((1..=MAX_TOGETHER).contains(&count) && stride >= rows.columns.next_multiple_of(storage::GROUP));
    assert!(rows.rows <= out_stride && (count - 1) * out_stride + rows.rows <= out.len());
    let task = Dots { queries: queries.as_ptr(), stride, rows, out: out.as_mut_ptr(), out_stride };
    // SAFETY: the caller vouches for the rows; queries and results are long enough.
    unsafe { (Kernels::new(isa).dots)(&task, count) }
}

/// Adds to sum number `i`, at `sums[i * stride]`, every row times its weight `weights[i * weight_stride + row]`.
///
/// # Safety
/// As for [`dots`].
///
/// # Panics
/// With fewer than 1 or more than [`MAX_TOGETHER`] sums, sums that are shorter than rows rounded up to 32 or too few
/// weights.
pub unsafe fn add_weighted(
    isa: Isa,
    weights: &[f32],
    weight_stride: usize,
    rows: CachedRows,
    sums: &mut [f32],
    stride: usize,
) {
    let count = sums.len() / stride.max(1);
    assert!((1..=MAX_TOGETHER).contains(&count) && stride >= rows.columns.next_multiple_of(storage::GROUP));
    assert!(rows.rows <= weight_stride && (count - 1) * weight_stride + rows.rows <= weights.len());
    let task = Weighted { weights: weights.as_ptr(), weight_stride, rows, sums: sums.as_mut_ptr(), stride };
    // SAFETY: the caller vouches for the rows; weights and sums are long enough.
    unsafe { (Kernels::new(isa).add_weighted)(&task, count) }
}

struct Dots {
    queries: *const f32,
    stride: usize,
    rows: CachedRows,
    out: *mut f32,
    out_stride: usize,
}

struct Weighted {
    weights: *const f32,
    weight_stride: usize,
    rows: CachedRows,
    sums: *mut f32,
    stride: usize,
}

/// Both functions compiled for an instruction set; their last argument is the number of queries.
struct Kernels {
    dots: unsafe fn(&Dots, usize),
    add_weighted: unsafe fn(&Weighted, usize),
}

impl Kernels {
    fn new(isa: Isa) -> &'static Kernels {
        match isa.min(Isa::detect()) {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => &avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::KERNELS,
            _ => &portable::KERNELS,
        }
    }
}

/// Calls a function with the storage type of `dtype` and the number of queries in the places of `[]`.
macro_rules! by_cache_and_count {
    ($dtype:expr, $count:expr, $function:ident($task:expr)) => {
        match $dtype {
            DType::F32 => by_cache_and_count!(@ F32, $count, $function($task)),
            DType::Bf16 => by_cache_and_count!(@ Bf16, $count, $function($task)),
            DType::F16 => by_cache_and_count!(@ F16, $count, $function($task)),
            DType::Q8_0 => by_cache_and_count!(@ Q8_0, $count, $function($task)),
            DType::Q4_0 => by_cache_and_count!(@ Q4_0, $count, $function($task)),
            DType::Q4_1 => by_cache_and_count!(@ Q4_1, $count, $function($task)),
            _ => {}
        }
    };
    (@ $storage:ident, $count:expr, $function:ident($task:expr)) => {
        match $count {
            1 => $function::<storage::$storage, 1>($task),
            2 => $function::<storage::$storage, 2>($task),
            3 => $function::<storage::$storage, 3>($task),
            _ => $function::<storage::$storage, 4>($task),
        }
    };
}

macro_rules! kernels {
    ($module:ident, $vector:ty $(, $features:literal)?) => {
        mod $module {
            use super::*;

            pub static KERNELS: Kernels = Kernels { dots, add_weighted };

            unsafe fn dots(task: &Dots, count: usize) {
                // SAFETY: the caller vouches for the task and the instruction set.
                unsafe { by_cache_and_count!(task.rows.dtype, count, stored_dots(task)) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn stored_dots<S: Storage, const R: usize>(task: &Dots) {
                // SAFETY: the caller vouches for the task, this function's attribute for the instruction set.
                unsafe { super::stored_dots::<$vector, S, R>(task) }
            }

            unsafe fn add_weighted(task: &Weighted, count: usize) {
                // SAFETY: as above.
                unsafe { by_cache_and_count!(task.rows.dtype, count, stored_add_weighted(task)) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn stored_add_weighted<S: Storage, const R: usize>(task: &Weighted) {
                // SAFETY: as above.
                unsafe { super::stored_add_weighted::<$vector, S, R>(task) }
            }
        }
    };
}

kernels!(portable, Portable);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernels!(avx512, Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");

impl CachedRows {
    #[inline(always)]
    fn row<S: Storage>(&self, row: usize) -> *const u8 {
        self.data.wrapping_add(S::offset(row * self.stride))
    }

    /// Fetches a row to come.
    #[inline(always)]
    fn fetch<S: Storage>(&self, row: usize) {
        let start = self.row::<S>(row);
        for line in (0..S::offset(self.columns.next_multiple_of(S::BLOCK))).step_by(LINE) {
            prefetch(start.wrapping_add(line));
        }
    }
}

/// `V::LANES` elements of a row from `at` on, zeros after the last that counts.
#[inline(always)]
unsafe fn elements<V: Vector, S: Storage>(row: *const u8, at: usize, columns: usize) -> V {
    // SAFETY: elements before the row's end exist; of a block type the whole block does.
    unsafe {
        if S::BLOCK > 1 || at + V::LANES <= columns {
            return At::<S>::new(row, at).load(0);
        }
        let mut bytes = [0u8; size_of::<f32>() * MAX_LANES];
        let left = columns.saturating_sub(at);
        std::ptr::copy_nonoverlapping(row.add(S::offset(at)), bytes.as_mut_ptr(), S::offset(left));
        At::<S>::new(bytes.as_ptr(), 0).load(0)
    }
}

/// # Safety
/// The machine has the vector's instruction set, and the task is as [`dots`] has checked it.
#[inline(always)]
unsafe fn stored_dots<V: Vector, S: Storage, const R: usize>(task: &Dots) {
    let Dots { queries, stride, rows, out, out_stride } = *task;
    let step = S::BLOCK.max(V::LANES);
    // As many rows as a vector has lanes go together: their sums are then transposed and added as vectors.
    for first in (0..rows.rows).step_by(V::LANES) {
        let count = V::LANES.min(rows.rows - first);
        // SAFETY: the rows and the queries exist, padding included, and there is room for the results.
        unsafe {
            let mut sums = [[V::splat(0.0); MAX_LANES]; R];
            for j in 0..count {
                rows.fetch::<S>(first + j + AHEAD);
                let row = rows.row::<S>(first + j);
                let mut partial = [V::splat(0.0); R];
                for start in (0..rows.columns).step_by(step) {
                    for at in (start..start + step).step_by(V::LANES) {
                        let elements = elements::<V, S>(row, at, rows.columns);
                        for (i, sum) in partial.iter_mut().enumerate() {
                            *sum = sum.plus_product(V::load(queries.add(i * stride + at)), elements);
                        }
                    }
                }
                for (sums, partial) in sums.iter_mut().zip(partial) {
                    sums[j] = partial;
                }
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                V::transpose(sums);
                let mut width = V::LANES / 2;
                while width > 0 {
                    for lane in 0..width {
                        sums[lane] = sums[lane].plus(sums[lane + width]);
                    }
                    width /= 2;
                }
                let to = out.add(i * out_stride + first);
                if count == V::LANES {
                    sums[0].store(to);
                } else {
                    let mut last = [0.0f32; MAX_LANES];
                    sums[0].store(last.as_mut_ptr());
                    std::ptr::copy_nonoverlapping(last.as_ptr(), to, count);
                }
            }
        }
    }
}

/// # Safety
/// The machine has the vector's instruction set, and the task is as [`add_weighted`] has checked it.
#[inline(always)]
unsafe fn stored_add_weighted<V: Vector, S: Storage, const R: usize>(task: &Weighted) {
    let Weighted { weights, weight_stride, rows, sums, stride } = *task;
    let width = COLUMN_VECTORS * V::LANES;
    let vectors = rows.columns.div_ceil(V::LANES);
    let whole = rows.columns / width * width;
    // SAFETY: rows, weights and sums exist, padding included.
    unsafe {
        for start in (0..whole).step_by(width) {
            let mut held = [[V::splat(0.0); COLUMN_VECTORS]; R];
            for (i, held) in held.iter_mut().enumerate() {
                for (c, held) in held.iter_mut().enumerate() {
                    *held = V::load(sums.add(i * stride + start + c * V::LANES));
                }
            }
            for j in 0..rows.rows {
                if start == 0 {
                    rows.fetch::<S>(j + AHEAD);
                }
                let row = rows.row::<S>(j);
                // No closure: one that is not inlined loses the instruction set.
                let mut elements = [V::splat(0.0); COLUMN_VECTORS];
                for (c, elements) in elements.iter_mut().enumerate() {
                    *elements = At::<S>::new(row, start + c * V::LANES).load(0);
                }
                for (i, held) in held.iter_mut().enumerate() {
                    let weight = V::splat(*weights.add(i * weight_stride + j));
                    for (held, elements) in held.iter_mut().zip(elements) {
                        *held = held.plus_product(weight, elements);
                    }
                }
            }
            for (i, held) in held.iter().enumerate() {
                for (c, held) in held.iter().enumerate() {
                    held.store(sums.add(i * stride + start + c * V::LANES));
                }
            }
        }
        for at in (whole / V::LANES..vectors).map(|vector| vector * V::LANES) {
            let mut held = [V::splat(0.0); R];
            for (i, held) in held.iter_mut().enumerate() {
                *held = V::load(sums.add(i * stride + at));
            }
            for j in 0..rows.rows {
                let elements = elements::<V, S>(rows.row::<S>(j), at, rows.columns);
                for (i, held) in held.iter_mut().enumerate() {
                    *held = held.plus_product(V::splat(*weights.add(i * weight_stride + j)), elements);
                }
            }
            for (i, held) in held.iter().enumerate() {
                held.store(sums.add(i * stride + at));
            }
        }
    }
}
