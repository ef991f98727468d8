//! Matrix products: C (+)= A B with any strides and storage types, f32 sums.

mod blocked;
mod engine;
mod few_rows;
mod kernels;
mod pack;
mod storage;
#[cfg(test)]
mod tests;
mod tile;
mod vector;

use super::{Isa, Pool};
use blocked::{Alone, Crew, Everybody, Product};
use kernels::Kernels;
use pack::Lines;

use crate::{Compute, DType};

/// A matrix to read: element (i, j) lies at `data + (i * row_stride + j * column_stride)` elements of `dtype`.
/// A transposed matrix is the same memory with the strides exchanged.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Operand {
    pub data: *const u8,
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    pub row_stride: usize,
    pub column_stride: usize,
}

/// A matrix to write, rows contiguous, f32 or bf16.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Output {
    pub data: *mut u8,
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    pub row_stride: usize,
}

/// Bytes that [`matmul`] needs of each worker's scratch and [`matmul_serial`] of the caller's.
pub const SCRATCH_BYTES: usize = 1 << 20;

/// C = A B, or C += A B where `accumulate`, on all threads of the pool.
///
/// # Safety
/// The pointers are valid for the matrices described, and C overlaps neither A nor B.
pub unsafe fn matmul(
    pool: &Pool,
    isa: Isa,
    compute: Compute,
    a: Operand,
    b: Operand,
    c: Output,
    accumulate: bool,
) {
    // SAFETY: as for this function.
    unsafe { run(&mut Everybody(pool.session()), isa, compute, a, b, c, accumulate) }
}

/// The same on the calling thread alone, for tiles inside other kernels.
///
/// # Safety
/// As for [`matmul`].
pub unsafe fn matmul_serial(
    isa: Isa,
    compute: Compute,
    a: Operand,
    b: Operand,
    c: Output,
    accumulate: bool,
    scratch: &mut [u8],
) {
    // SAFETY: as for this function.
    unsafe { run(&mut Alone::new(scratch), isa, compute, a, b, c, accumulate) }
}

unsafe fn run(
    crew: &mut impl Crew,
    isa: Isa,
    compute: Compute,
    a: Operand,
    b: Operand,
    c: Output,
    accumulate: bool,
) {
    let product = Product {
        kernels: Kernels::new(isa, compute),
        a: Lines::rows_of(a),
        b: Lines::columns_of(b),
        k: a.columns,
        c,
        accumulate,
    };
    // SAFETY: as for this function.
    unsafe { product.run(crew) }
}
