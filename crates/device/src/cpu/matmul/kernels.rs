//! The kernels of each instruction set and precision, compiled for it, behind one table of functions.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::engine::Pairs;
use super::engine::{Engine, Rounded, Single};
use super::few_rows;
use super::pack::{self, Lines, Panels};
use super::Output;
use super::tile::{self, Block, Tile};
use super::vector::{Portable, Vector};
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use crate::Compute;
use crate::cpu::Isa;

/// What blocking needs to know and to call.
///
/// # Safety
/// Of its functions: those of the functions in `pack` and `tile` that they run. The instruction set is there where the
/// table came from [`Kernels::new`].
pub(super) struct Kernels {
    /// Lines in a panel of A: rows of a tile.
    pub rows: usize,
    /// Lines in a panel of B: columns of a tile.
    pub columns: usize,
    /// Values of k in a unit.
    pub k_per_unit: usize,
    pub pack: unsafe fn(Lines, Range<usize>, Range<usize>, Panels),
    pub multiply: unsafe fn(&Block),
    /// Rows of A for `multiply_columns`: the rows, the values of k, the place for them.
    pub pack_rows: unsafe fn(Lines, usize, *mut f32),
    /// Packed rows of A times columns of B: those rows, B, the values of k, C, whether to accumulate, the columns.
    pub multiply_columns: unsafe fn(*const f32, Lines, usize, Output, bool, Range<usize>),
}

impl Kernels {
    /// The kernels for `compute` on `isa`, or on the best that this machine has where it lacks that one.
    pub fn new(isa: Isa, compute: Compute) -> &'static Kernels {
        match (isa.min(Isa::detect()), compute) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Compute::Bf16) => &avx512_pairs::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, Compute::F32) => &avx512_single::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, Compute::Bf16) => &avx512_rounded::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Compute::F32) => &avx2_single::KERNELS,
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, Compute::Bf16) => &avx2_rounded::KERNELS,
            (_, Compute::F32) => &portable_single::KERNELS,
            (_, Compute::Bf16) => &portable_rounded::KERNELS,
        }
    }
}

/// Defines a module with the table of an engine. `rows` counts up to the rows of a whole tile.
macro_rules! kernels {
    ($module:ident, $engine:ty, [$($rows:literal),*] of $height:literal, $vectors:literal $(, $features:literal)?) => {
        mod $module {
            use super::*;

            pub static KERNELS: Kernels = Kernels {
                rows: $height,
                columns: $vectors * <$engine as Engine>::V::LANES,
                k_per_unit: <$engine as Engine>::K_PER_UNIT,
                pack,
                multiply,
                pack_rows,
                multiply_columns,
            };

            $(#[target_feature(enable = $features)])?
            unsafe fn pack(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
                // SAFETY: the caller vouches for the operands, this function's attribute for the instruction set.
                unsafe { pack::pack::<$engine>(from, lines, k, to) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn multiply(block: &Block) {
                // SAFETY: as above.
                unsafe { tile::multiply::<$engine>(block, $height, KERNELS.columns, tile) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_rows(a: Lines, k: usize, to: *mut f32) {
                // SAFETY: as above.
                unsafe { few_rows::pack_rows::<$engine>(a, k, to) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_columns(
                a: *const f32,
                b: Lines,
                k: usize,
                c: Output,
                accumulate: bool,
                columns: Range<usize>,
            ) {
                // SAFETY: as above.
                unsafe { few_rows::multiply_columns::<$engine>(a, b, k, c, accumulate, columns) }
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
kernels!(portable_single, Single<Portable>, [1, 2, 3, 4, 5, 6, 7, 8] of 8, 3);
#[cfg(target_arch = "aarch64")]
kernels!(portable_rounded, Rounded<Portable>, [1, 2, 3, 4, 5, 6, 7, 8] of 8, 3);
#[cfg(not(target_arch = "aarch64"))]
kernels!(portable_single, Single<Portable>, [1, 2, 3, 4] of 4, 2);
#[cfg(not(target_arch = "aarch64"))]
kernels!(portable_rounded, Rounded<Portable>, [1, 2, 3, 4] of 4, 2);

#[cfg(target_arch = "x86_64")]
kernels!(avx2_single, Single<Avx2>, [1, 2, 3, 4, 5, 6] of 6, 2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernels!(avx2_rounded, Rounded<Avx2>, [1, 2, 3, 4, 5, 6] of 6, 2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512_single, Single<Avx512>, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14] of 14, 2,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512_rounded, Rounded<Avx512>, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14] of 14, 2,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512_pairs, Pairs, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14] of 14, 2,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
);
