//! Matrix products: C (+)= A B with any strides and storage types, f32 sums.

use super::{Isa, Pool};
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
pub unsafe fn matmul(pool: &Pool, isa: Isa, compute: Compute, a: Operand, b: Operand, c: Output, accumulate: bool) {
    let _ = pool;
    // SAFETY: as for this function.
    unsafe { matmul_serial(isa, compute, a, b, c, accumulate, &mut []) }
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
    let _ = (isa, scratch);
    let round = |x: f32| if compute == Compute::Bf16 { half::bf16::from_f32(x).to_f32() } else { x };
    for i in 0..c.rows {
        for j in 0..c.columns {
            let mut sum = 0.0f32;
            for k in 0..a.columns {
                // SAFETY: the caller vouches for the matrices.
                let (x, y) = unsafe { (element(a, i, k), element(b, k, j)) };
                sum += round(x) * round(y);
            }
            // SAFETY: as above.
            unsafe {
                match c.dtype {
                    DType::Bf16 => {
                        let p = c.data.cast::<half::bf16>().add(i * c.row_stride + j);
                        let old = if accumulate { (*p).to_f32() } else { 0.0 };
                        *p = half::bf16::from_f32(old + sum);
                    }
                    _ => {
                        let p = c.data.cast::<f32>().add(i * c.row_stride + j);
                        *p = if accumulate { *p + sum } else { sum };
                    }
                }
            }
        }
    }
}

/// Element (i, j) as f32.
///
/// # Safety
/// The element lies inside the matrix.
unsafe fn element(x: Operand, i: usize, j: usize) -> f32 {
    let index = i * x.row_stride + j * x.column_stride;
    let half_at = |p: *const u8| {
        // SAFETY: inside the block, which is inside the matrix.
        let bytes = unsafe { [*p, *p.add(1)] };
        half::f16::from_le_bytes(bytes).to_f32()
    };
    let (block, at) = (index / 32, index % 32);
    // SAFETY: the caller vouches for the element; a block holds its scales and codes.
    unsafe {
        match x.dtype {
            DType::F32 => *x.data.cast::<f32>().add(index),
            DType::Bf16 => (*x.data.cast::<half::bf16>().add(index)).to_f32(),
            DType::F16 => (*x.data.cast::<half::f16>().add(index)).to_f32(),
            DType::U32 => *x.data.cast::<u32>().add(index) as f32,
            DType::Q8_0 => {
                let p = x.data.add(block * 34);
                half_at(p) * f32::from(*p.add(2 + at) as i8)
            }
            DType::Q4_0 | DType::Q4_1 => {
                let with_minimum = x.dtype == DType::Q4_1;
                let p = x.data.add(block * if with_minimum { 20 } else { 18 });
                let codes = p.add(if with_minimum { 4 } else { 2 });
                let byte = *codes.add(at % 16);
                let code = f32::from(if at < 16 { byte & 15 } else { byte >> 4 });
                if with_minimum { half_at(p) * code + half_at(p.add(2)) } else { half_at(p) * (code - 8.0) }
            }
        }
    }
}
