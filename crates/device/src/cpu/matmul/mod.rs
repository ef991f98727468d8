//! Matrix products: C (+)= A B with any strides and storage types, f32 sums.

#[cfg(target_arch = "x86_64")]
mod amx;
mod blocked;
pub(super) mod cached;
mod crew;
mod engine;
mod few_rows;
mod int8;
mod kernels;
mod pack;
mod storage;
#[cfg(test)]
mod tests;
mod tile;
mod vector;

use super::{Isa, Pool};
use crate::{Compute, DType};
use crew::{Alone, Crew, Everybody};
use kernels::Kernels;
use pack::Lines;

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

impl Operand {
    /// The transposed matrix.
    pub fn transposed(self) -> Operand {
        let Operand { data, dtype, rows, columns, row_stride, column_stride } = self;
        Operand {
            data,
            dtype,
            rows: columns,
            columns: rows,
            row_stride: column_stride,
            column_stride: row_stride,
        }
    }
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
    /// How a bf16 C is rounded after the old value was added; to nearest where `None`.
    pub dither: Option<Dithered>,
}

/// Stochastic rounding of sums: random bits come from the seed and the element's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Dithered {
    pub seed: u64,
    /// Place of the matrix's first element in that of which it is a piece.
    pub first: u64,
    /// Address of the tensor's first element.
    pub base: usize,
}

/// Bytes that [`matmul`] needs of each worker's scratch and [`matmul_serial`] of the caller's.
pub const SCRATCH_BYTES: usize = 1 << 20;

/// C = A B, or C += A B where `accumulate`, on all threads of the pool.
///
/// What the bits of the result do not depend on: the number of threads; the other rows and columns computed with an
/// element, as long as A has at most 24 rows, or more in both cases, or B is not contiguous along k. Sums are made
/// of chains of 256 additions (of pairs, where the machine has an instruction for pairs of bf16; of 16 sums of 16 pairs with
/// AMX), so that their error does not grow with k; those of integers are told in `int8`. A bf16 C is rounded once, to nearest even, after the old value was added. f32 products of more
/// than 24 rows are the same on AVX2 and AVX-512.
///
/// A B that is not contiguous along k may be cut along it at multiples of [`PIECE_ROWS`](crate::PIECE_ROWS): the products
/// of the pieces, added one after the other to an f32 C, give the bits of the whole.
///
/// # Safety
/// The pointers are valid for the matrices described, of block types whole blocks along the contiguous dimension, C
/// overlaps neither A nor B, and the pool's threads have [`SCRATCH_BYTES`] of scratch.
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

/// The same, to the bit, on the calling thread alone: for tiles inside other kernels.
///
/// # Panics
/// With less than [`SCRATCH_BYTES`] of scratch.
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

/// The elements of `stored`, as f32: what products compute with.
///
/// `None`, and nothing done, where `stored` does not hold exactly the elements of `out`, in whole blocks, or is of a
/// type that is no weight.
pub fn dequantize(isa: Isa, dtype: DType, stored: &[u8], out: &mut [f32]) -> Option<()> {
    if !dtype.is_weight() || dtype.bytes_for(out.len() as u64) != Some(stored.len() as u64) {
        return None;
    }
    let kernels = Kernels::new(isa, Compute::F32);
    // SAFETY: the source holds as many elements as there is room for, and the table's instruction set is there.
    unsafe { (kernels.dequantize)(dtype, stored.as_ptr(), 0, out.len(), out.as_mut_ptr()) };
    Some(())
}

/// Elements from `first` on of the `total` that `stored` holds, of any type; beginnings inside blocks are slower.
///
/// `None`, and nothing done, where `stored` holds another number of elements, or too few.
pub(in crate::cpu) fn read_elements(
    dtype: DType,
    stored: &[u8],
    total: usize,
    first: usize,
    out: &mut [f32],
) -> Option<()> {
    let end = first.checked_add(out.len())?;
    if dtype.bytes_for(total as u64) != Some(stored.len() as u64) || end > total {
        return None;
    }
    for (index, out) in (first..end).zip(out) {
        // SAFETY: `stored` holds all blocks of `total` elements, of which this is one.
        *out = unsafe { storage::element(dtype, stored.as_ptr(), index) };
    }
    Some(())
}

/// A product to compute.
#[derive(Clone, Copy)]
struct Product {
    kernels: &'static Kernels,
    /// Rows of A.
    a: Lines,
    /// Columns of B.
    b: Lines,
    k: usize,
    c: Output,
    accumulate: bool,
}

impl Product {
    fn new(kernels: &'static Kernels, a: Operand, b: Operand, c: Output, accumulate: bool) -> Product {
        Product { kernels, a: Lines::rows_of(a), b: Lines::columns_of(b), k: a.columns, c, accumulate }
    }
}

/// # Safety
/// As for [`matmul`].
unsafe fn run(
    crew: &mut impl Crew,
    isa: Isa,
    compute: Compute,
    a: Operand,
    b: Operand,
    c: Output,
    accumulate: bool,
) {
    let floats = Product::new(Kernels::new(isa, compute.beside(a.dtype)), a, b, c, accumulate);
    let integers = if compute == Compute::Int8 { int8::product(isa, &floats) } else { None };
    let product = integers.unwrap_or(floats);
    // SAFETY: as for this function.
    unsafe { run_on(&product, crew) }
}

/// # Safety
/// As for [`matmul`], and the machine has the kernels' instructions.
unsafe fn run_on(product: &Product, crew: &mut impl Crew) {
    if few_rows::suits(product) {
        // SAFETY: as for this function.
        unsafe { few_rows::run(product, crew) }
    } else {
        // SAFETY: as for this function.
        unsafe { blocked::run(product, crew) }
    }
}
