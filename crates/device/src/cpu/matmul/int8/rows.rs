//! A few rows of A: a decoding step's x W^T.
//!
//! Of the 32 products of a group, four are added up in each of eight lanes; these are added to the f32 lanes of a sum, group after group.
//! So the result depends neither on the number of rows nor on how the bytes are multiplied: those of AVX2 and of VNNI are the same.

use std::marker::PhantomData;

use super::codes::{Codes, by_codes};
#[cfg(target_arch = "x86_64")]
use super::integers::{Avx2, Avx512Vnni, AvxVnni};
use super::integers::{Integers, Portable};
use super::{Rounded, group_of, round};
use crate::cpu::Isa;
use crate::cpu::matmul::few_rows::{self, Columns, Dots};
use crate::cpu::matmul::kernels::Kernels;
use crate::cpu::matmul::pack::Lines;
use crate::cpu::matmul::storage::{self, GROUP, GroupScales, MAX_GROUPS, Storage};
use crate::cpu::matmul::tile::{LINE, prefetch_later};

/// Lanes that a sum has.
const LANES: usize = 8;

/// The kernels of `isa`, or of the best that this machine has; only those of few rows are of use.
pub(super) fn kernels(isa: Isa) -> &'static Kernels {
    match isa.min(Isa::detect()) {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx if is_x86_feature_detected!("avx512vnni") => {
            &avx512_vnni::KERNELS
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => {
            if is_x86_feature_detected!("avxvnni") {
                &avx_vnni::KERNELS
            } else {
                &avx2::KERNELS
            }
        }
        _ => &portable::KERNELS,
    }
}

/// Defines a module with the table of a kind of integers, beside that of its f32.
macro_rules! kernels {
    ($module:ident, $integers:ty, $isa:expr $(, $features:literal)?) => {
        mod $module {
            use std::sync::LazyLock;

            use super::*;
            use crate::Compute;

            pub static KERNELS: LazyLock<Kernels> = LazyLock::new(|| Kernels {
                k_per_unit: 1,
                pack_rows,
                multiply_columns,
                ..*Kernels::new($isa, Compute::F32)
            });

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_rows(a: Lines, k: usize, to: *mut f32) {
                // SAFETY: the caller vouches for the operands, this function's attribute for the instruction set.
                unsafe { super::pack_rows(a, k, to) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_columns(task: &Columns) {
                // SAFETY: as above; these are the counts that `padded_rows` fills up to.
                unsafe {
                    match task.c.rows {
                        0..=1 => by_codes!(task.b.dtype, columns::<[], 1, 4>(task)),
                        2 => by_codes!(task.b.dtype, columns::<[], 2, 4>(task)),
                        3..=4 => by_codes!(task.b.dtype, columns::<[], 4, 2>(task)),
                        _ => by_codes!(task.b.dtype, columns::<[], 8, 1>(task)),
                    }
                }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn columns<S: Codes, const R: usize, const N: usize>(task: &Columns) {
                // SAFETY: as above.
                unsafe { super::multiply_columns::<$integers, S, R, N>(task) }
            }
        }
    };
}

kernels!(portable, Portable, Isa::Portable);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, Avx2, Isa::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernels!(avx_vnni, AvxVnni, Isa::Avx2, "avx2,fma,f16c,avxvnni");
#[cfg(target_arch = "x86_64")]
kernels!(avx512_vnni, Avx512Vnni, Isa::Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");

/// A packed row: codes, the scale of each 32, the same twice, an eighth of the values' sum of each 32 and of each 16.
#[derive(Clone, Copy)]
struct Row {
    codes: *mut i8,
    scales: *mut f32,
    twice: *mut f32,
    sums: *mut f32,
    half_sums: *mut f32,
}

impl Row {
    /// Row `index` of those packed at `rows`, of `k` values.
    #[inline(always)]
    fn at(rows: *mut f32, index: usize, k: usize) -> Row {
        let groups = k / GROUP;
        let start = rows.wrapping_add(index * few_rows::row_units(k, 1));
        let scales = start.wrapping_add(k / size_of::<f32>());
        let twice = scales.wrapping_add(groups);
        let sums = twice.wrapping_add(2 * groups);
        Row { codes: start.cast(), scales, twice, sums, half_sums: sums.wrapping_add(groups) }
    }
}

/// Rounds rows of A to integers; then rows of zeros up to [`padded_rows`](few_rows::padded_rows).
///
/// # Safety
/// The operand is valid, of a float type, `k` is a multiple of a group and `to` has room for its rows.
#[inline(always)]
unsafe fn pack_rows(a: Lines, k: usize, to: *mut f32) {
    for index in 0..few_rows::padded_rows(a.count) {
        let row = Row::at(to, index, k);
        for group in 0..k / GROUP {
            let mut values = [0.0; GROUP];
            if index < a.count {
                // SAFETY: the caller vouches for the operand.
                values = unsafe { group_of(a, index, group * GROUP) };
            }
            let Rounded { codes, scale, sums } = round(&values);
            // SAFETY: the row has room for its groups.
            unsafe {
                row.codes.add(group * GROUP).cast::<[i8; GROUP]>().write(codes);
                row.scales.add(group).write(scale);
                row.twice.add(2 * group).cast::<[f32; 2]>().write([scale; 2]);
                row.sums.add(group).write(scale * (sums[0] + sums[1]) as f32 / LANES as f32);
                let halves = sums.map(|sum| scale * sum as f32 / LANES as f32);
                row.half_sums.add(2 * group).cast::<[f32; 2]>().write(halves);
            }
        }
    }
}

/// With columns that are stored as `S`.
struct Products<'a, I, S> {
    task: &'a Columns,
    kind: PhantomData<(I, S)>,
}

impl<I: Integers, S: Codes, const R: usize, const N: usize> Dots<R, N> for Products<'_, I, S> {
    #[inline(always)]
    unsafe fn dots(&self, first: usize, starts: [usize; N], out: &mut [[f32; N]; R]) {
        let Columns { rows, b, k, .. } = *self.task;
        let ahead = few_rows::ahead(S::offset(N * b.stride));
        let mut packed = [Row::at(rows.cast_mut(), first, k); R];
        for (row, index) in packed.iter_mut().zip(first..) {
            *row = Row::at(rows.cast_mut(), index, k);
        }
        let mut columns = [b.data; N];
        for (column, start) in columns.iter_mut().zip(starts) {
            *column = b.data.wrapping_add(S::offset(start));
        }
        // SAFETY: as the trait says.
        unsafe { dot::<I, S, R, N>(packed, columns, k, ahead, out) }
    }
}

/// As [`few_rows::multiply_columns`].
///
/// # Safety
/// The machine has the instruction set, B is stored as `S`, operands and C are valid, and packed rows are a multiple of `R`.
#[inline(always)]
unsafe fn multiply_columns<I: Integers, S: Codes, const R: usize, const N: usize>(task: &Columns) {
    // SAFETY: as for this function.
    unsafe { few_rows::each_column::<R, N>(task, &Products::<I, S> { task, kind: PhantomData }) }
}

#[inline(always)]
unsafe fn dot<I: Integers, S: Codes, const R: usize, const N: usize>(
    rows: [Row; R],
    mut columns: [*const u8; N],
    k: usize,
    ahead: usize,
    out: &mut [[f32; N]; R],
) {
    let groups = <S as Storage>::BLOCK / GROUP;
    // SAFETY: columns and packed rows hold `k` values.
    unsafe {
        let mut sums = [[I::splat(0.0); N]; R];
        for block in 0..k / <S as Storage>::BLOCK {
            let first = block * groups;
            if groups < LANES {
                add_small::<I, S, R, N>(&mut sums, &rows, &columns, first);
            } else {
                add_large::<I, S, R, N>(&mut sums, &rows, &columns, first);
            }
            for column in &mut columns {
                for line in (0..S::BYTES).step_by(LINE) {
                    prefetch_later(column.wrapping_add(ahead + line));
                }
                *column = column.wrapping_add(S::BYTES);
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = I::sum(sum);
            }
        }
    }
}

/// Adds the products with a block of one scale.
#[inline(always)]
unsafe fn add_small<I: Integers, S: Codes, const R: usize, const N: usize>(
    sums: &mut [[I::Floats; N]; R],
    rows: &[Row; R],
    columns: &[*const u8; N],
    first: usize,
) {
    // SAFETY: as for the caller.
    unsafe {
        for (j, column) in columns.iter().enumerate() {
            let [scale, minimum] = S::scale::<I>(*column);
            let (scale, minimum) = (I::splat(scale), I::splat(minimum));
            for group in 0..<S as Storage>::BLOCK / GROUP {
                let codes = S::codes::<I>(*column, group);
                for (i, row) in rows.iter().enumerate() {
                    let products = I::dot(codes, row.codes.add((first + group) * GROUP), S::SIGNED);
                    let scale = I::times(scale, I::splat(*row.scales.add(first + group)));
                    sums[i][j] = I::plus_product(sums[i][j], products, scale);
                    if S::MINIMUM {
                        let sum = I::splat(*row.sums.add(first + group));
                        sums[i][j] = I::plus_product(sums[i][j], sum, minimum);
                    }
                }
            }
        }
    }
}

/// Adds the products with a block of eight groups of 32, or 16 of 16, that have scales of their own.
#[inline(always)]
unsafe fn add_large<I: Integers, S: Codes, const R: usize, const N: usize>(
    sums: &mut [[I::Floats; N]; R],
    rows: &[Row; R],
    columns: &[*const u8; N],
    first: usize,
) {
    let groups = <S as Storage>::BLOCK / GROUP;
    // SAFETY: as for the caller.
    unsafe {
        let mut scales = [[[0.0f32; MAX_GROUPS]; N]; R];
        for (j, column) in columns.iter().enumerate() {
            let GroupScales { scales: of_column, minima } = S::group_scales::<I>(*column);
            for (i, row) in rows.iter().enumerate() {
                let (row_scales, row_sums) = if S::HALVES {
                    (row.twice.add(2 * first), row.half_sums.add(2 * first))
                } else {
                    (row.scales.add(first), row.sums.add(first))
                };
                for at in (0..if S::HALVES { 2 * groups } else { groups }).step_by(LANES) {
                    let scale = I::times(I::load(of_column.as_ptr().add(at)), I::load(row_scales.add(at)));
                    I::store(scale, scales[i][j].as_mut_ptr().add(at));
                    if S::MINIMUM {
                        let minimum = I::times(I::load(minima.as_ptr().add(at)), I::splat(LANES as f32));
                        let sum = I::load(row_sums.add(at));
                        sums[i][j] = I::plus_product(sums[i][j], sum, minimum);
                    }
                }
            }
        }
        // Written out, as what is shifted and masked is then known beforehand.
        add_group::<I, S, R, N>(sums, rows, columns, &scales, first, 0);
        add_group::<I, S, R, N>(sums, rows, columns, &scales, first, 1);
        add_group::<I, S, R, N>(sums, rows, columns, &scales, first, 2);
        add_group::<I, S, R, N>(sums, rows, columns, &scales, first, 3);
        add_group::<I, S, R, N>(sums, rows, columns, &scales, first, 4);
        add_group::<I, S, R, N>(sums, rows, columns, &scales, first, 5);
        add_group::<I, S, R, N>(sums, rows, columns, &scales, first, 6);
        add_group::<I, S, R, N>(sums, rows, columns, &scales, first, 7);
    }
}

/// Adds the products with one group of such a block. `scales` are those of the block's groups times those of the rows.
#[inline(always)]
unsafe fn add_group<I: Integers, S: Codes, const R: usize, const N: usize>(
    sums: &mut [[I::Floats; N]; R],
    rows: &[Row; R],
    columns: &[*const u8; N],
    scales: &[[[f32; MAX_GROUPS]; N]; R],
    first: usize,
    group: usize,
) {
    // SAFETY: as for the caller.
    unsafe {
        for (j, column) in columns.iter().enumerate() {
            let codes = S::codes::<I>(*column, group);
            for (i, row) in rows.iter().enumerate() {
                let products = I::dot(codes, row.codes.add((first + group) * GROUP), S::SIGNED);
                let scale = if S::HALVES {
                    I::halves(scales[i][j].as_ptr().add(2 * group))
                } else {
                    I::splat(scales[i][j][group])
                };
                sums[i][j] = I::plus_product(sums[i][j], products, scale);
            }
        }
    }
}
