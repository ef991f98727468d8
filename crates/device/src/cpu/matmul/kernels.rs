//! The kernels of each instruction set and precision, compiled for it, behind one table of functions.
//!
//! Engines that many machines multiply by have code of their own for every storage. The others have it for f32 and bf16, and read
//! what is stored in another way through a buffer of f32: the same bits, in an eighth of the code.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::engine::Pairs;
use super::engine::{Engine, Rounded, Single};
use super::few_rows::{self, Columns};
use super::pack::{self, Lines, Panels};
use super::storage::{self, Storage, by_storage};
use super::tile::{self, Block, CHAIN, Tile};
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use super::vector::{Portable, Vector};
use crate::cpu::Isa;
use crate::{Compute, DType};

/// What blocking needs to know and to call.
///
/// # Safety
/// Of its functions: those of the functions in `pack` and `tile` that they run. The instruction set is there where the
/// table came from [`Kernels::new`].
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    /// Lines in a panel of A: rows of a tile.
    pub rows: usize,
    /// Lines in a panel of B: columns of a tile.
    pub columns: usize,
    /// Rows of A at most that `multiply_columns` is for.
    pub few_rows: usize,
    /// Values of k in a unit of a row of `pack_rows`.
    pub k_per_unit: usize,
    /// Values of k that are packed together, and the units that they take in a panel, for each of its lines.
    pub step_k: usize,
    pub step_units: usize,
    /// Values of k in a chain of additions. Blocks of k are whole chains.
    pub chain_k: usize,
    /// Lines of A and of B: the lines, those to be packed, their values of k, the place for them.
    pub pack_a: unsafe fn(Lines, Range<usize>, Range<usize>, Panels),
    pub pack_b: unsafe fn(Lines, Range<usize>, Range<usize>, Panels),
    pub multiply: unsafe fn(&Block),
    /// Rows of A for `multiply_columns`: the rows, the values of k, the place for them.
    pub pack_rows: unsafe fn(Lines, usize, *mut f32),
    pub multiply_columns: unsafe fn(&Columns),
    /// Elements of a type as f32.
    pub dequantize: Dequantize,
}

/// Elements of a type as f32: the pointer, the first one, with which a block begins, their number, the place for them.
pub(super) type Dequantize = unsafe fn(DType, *const u8, usize, usize, *mut f32);

impl Kernels {
    /// The kernels for `compute` on `isa`, or on the best that this machine has where it lacks that one. Those of integers are in
    /// `int8`.
    pub fn new(isa: Isa, compute: Compute) -> &'static Kernels {
        match (isa.min(Isa::detect()), compute) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, Compute::Bf16) => &amx_pairs::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Compute::Bf16) => &avx512_pairs::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, Compute::F32 | Compute::Int8) => {
                &avx512_single::KERNELS
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, Compute::Bf16) => &avx512_rounded::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Compute::F32 | Compute::Int8) => &avx2_single::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Compute::Bf16) => &avx2_rounded::KERNELS,
            (_, Compute::F32 | Compute::Int8) => &portable_single::KERNELS,
            (_, Compute::Bf16) => &portable_rounded::KERNELS,
        }
    }
}

/// Calls `$direct`, for an engine with code of its `own` for every storage, or `$decoded` with a function that decodes, for one that
/// multiplies what was `decoded`, where the type is not one of those that both have code for.
macro_rules! by_code {
    (own, $dtype:expr, $direct:ident::<[] $(, $n:literal)*>($($argument:expr),*), $decoded:path) => {
        by_storage!($dtype, $direct::<[] $(, $n)*>($($argument),*))
    };
    (decoded, $dtype:expr, $direct:ident::<[] $(, $n:literal)*>($($argument:expr),*), $decoded:path) => {
        match $dtype {
            DType::F32 => $direct::<storage::F32 $(, $n)*>($($argument),*),
            DType::Bf16 => $direct::<storage::Bf16 $(, $n)*>($($argument),*),
            _ => $decoded($($argument),*),
        }
    };
}

/// Defines a module with the table of an engine. `rows` counts up to the rows of a whole tile; `code` is for [`by_code`]; of few
/// rows, 4 or 8 are multiplied with so many columns at a time: sums take a register each.
macro_rules! kernels {
    (
        $module:ident, $engine:ty, $code:ident,
        [$($rows:literal),*] of $height:literal, $vectors:literal,
        four by $by_four:literal, eight by $by_eight:literal $(, $features:literal)?
    ) => {
        mod $module {
            use super::*;

            pub static KERNELS: Kernels = Kernels {
                rows: $height,
                columns: $vectors * <$engine as Engine>::V::LANES,
                few_rows: few_rows::MAX_ROWS,
                k_per_unit: <$engine as Engine>::K_PER_UNIT,
                step_k: <$engine as Engine>::K_PER_UNIT,
                step_units: 1,
                chain_k: CHAIN * <$engine as Engine>::K_PER_UNIT,
                pack_a: pack,
                pack_b: pack,
                multiply,
                pack_rows,
                multiply_columns,
                dequantize,
            };

            $(#[target_feature(enable = $features)])?
            unsafe fn dequantize(dtype: DType, data: *const u8, first: usize, count: usize, out: *mut f32) {
                // SAFETY: the caller vouches for the pointers, this function's attribute for the instruction set.
                unsafe { by_storage!(dtype, stored_dequantize::<[]>(dtype, data, first, count, out)) }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn stored_dequantize<S: Storage>(
                dtype: DType,
                data: *const u8,
                first: usize,
                count: usize,
                out: *mut f32,
            ) {
                // SAFETY: as above.
                unsafe { storage::dequantize::<<$engine as Engine>::V, S>(dtype, data, first, count, out) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn pack(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
                // SAFETY: the caller vouches for the operands, this function's attribute for the instruction set.
                unsafe { by_code!($code, from.dtype, stored_pack::<[]>(from, lines, k, to), decoded_pack) }
            }

            $(#[target_feature(enable = $features)])?
            #[allow(dead_code)]
            unsafe fn decoded_pack(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
                let pack = stored_pack::<storage::F32>;
                // SAFETY: as above.
                unsafe { pack::pack_decoded::<$engine>(from, lines, k, to, dequantize, pack) }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn stored_pack<S: Storage>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
                // SAFETY: as above.
                unsafe { pack::pack::<$engine, S>(from, lines, k, to) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn multiply(block: &Block) {
                // SAFETY: as above.
                unsafe { tile::multiply::<$engine, $height>(block, KERNELS.columns, tile) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_rows(a: Lines, k: usize, to: *mut f32) {
                // SAFETY: as above.
                unsafe { few_rows::pack_rows::<$engine>(a, k, to) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_columns(task: &Columns) {
                // SAFETY: as above; these are the counts that `padded_rows` fills up to.
                unsafe {
                    let dtype = task.b.dtype;
                    match task.c.rows {
                        0..=1 => by_code!($code, dtype, stored_columns::<[], 1, 4>(task), decoded_columns::<1, 4>),
                        2 => by_code!($code, dtype, stored_columns::<[], 2, 4>(task), decoded_columns::<2, 4>),
                        3..=4 => by_code!($code, dtype, stored_columns::<[], 4, $by_four>(task), decoded_columns::<4, $by_four>),
                        _ => by_code!($code, dtype, stored_columns::<[], 8, $by_eight>(task), decoded_columns::<8, $by_eight>),
                    }
                }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            #[allow(dead_code)]
            unsafe fn decoded_columns<const R: usize, const N: usize>(task: &Columns) {
                // SAFETY: as above; what is decoded is f32.
                unsafe { few_rows::multiply_columns::<$engine, storage::F32, R, N>(task, Some(dequantize)) }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn stored_columns<S: Storage, const R: usize, const N: usize>(task: &Columns) {
                // SAFETY: as above.
                unsafe { few_rows::multiply_columns::<$engine, S, R, N>(task, None) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn tile(rows: usize, tile: &Tile) {
                // SAFETY: as above.
                unsafe {
                    match rows {
                        $($rows => sized_tile::<$rows>(tile),)*
                        _ => {}
                    }
                }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn sized_tile<const ROWS: usize>(tile: &Tile) {
                // SAFETY: as above.
                unsafe { tile::kernel::<$engine, ROWS, $height, $vectors>(tile) }
            }
        }
    };
}

// On aarch64 32 registers of four lanes take 8 rows by 2 vectors with ease; baseline x86-64 has 16 registers.
#[cfg(target_arch = "aarch64")]
kernels!(portable_single, Single<Portable>, own, [1, 2, 3, 4, 5, 6, 7, 8] of 8, 3, four by 4, eight by 2);
#[cfg(target_arch = "aarch64")]
kernels!(portable_rounded, Rounded<Portable>, own, [1, 2, 3, 4, 5, 6, 7, 8] of 8, 3, four by 4, eight by 2);
#[cfg(not(target_arch = "aarch64"))]
kernels!(portable_single, Single<Portable>, decoded, [1, 2, 3, 4] of 4, 2, four by 4, eight by 2);
#[cfg(not(target_arch = "aarch64"))]
kernels!(portable_rounded, Rounded<Portable>, decoded, [1, 2, 3, 4] of 4, 2, four by 4, eight by 2);

#[cfg(target_arch = "x86_64")]
kernels!(avx2_single, Single<Avx2>, own, [1, 2, 3, 4, 5, 6] of 6, 2, four by 2, eight by 1, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernels!(avx2_rounded, Rounded<Avx2>, decoded, [1, 2, 3, 4, 5, 6] of 6, 2, four by 2, eight by 1, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512_single, Single<Avx512>, own, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14] of 14, 2, four by 4, eight by 2,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512_rounded, Rounded<Avx512>, decoded, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14] of 14, 2, four by 4, eight by 2,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512_pairs, Pairs, own, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14] of 14, 2, four by 4, eight by 2,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
);

/// Tiles where a product has more than a few rows; those of a few rows are as without.
#[cfg(target_arch = "x86_64")]
pub(super) mod amx_pairs {
    use super::*;
    use crate::cpu::matmul::amx;

    pub static KERNELS: Kernels = Kernels {
        rows: amx::HEIGHT,
        columns: amx::WIDTH,
        step_k: amx::STEP_K,
        step_units: amx::STEP,
        pack_a: amx::pack_a,
        pack_b,
        multiply: amx::multiply,
        ..avx512_pairs::KERNELS
    };

    /// The same without the instructions.
    #[cfg(test)]
    pub static WRITTEN: Kernels = Kernels { multiply: amx::multiply_written, ..KERNELS };

    unsafe fn pack_b(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
        // SAFETY: the caller vouches for the operands and the instruction set, and panels have room for whole steps.
        unsafe {
            let (count, values) = (lines.len(), k.len());
            (avx512_pairs::KERNELS.pack_b)(from, lines, k, to);
            amx::fill_up_b(count, values, to);
        }
    }
}
