//! A few rows of A: a decoding step's x W^T, with eight columns at a time, whose sums share a vector.

use std::marker::PhantomData;

use super::codes::{Blocks8, Codes, Scales, by_codes, each_group, next_blocks};
#[cfg(target_arch = "x86_64")]
use super::has_vnni;
#[cfg(target_arch = "x86_64")]
use super::integers::{Avx2, Avx512Vnni, AvxVnni};
use super::integers::{Integers, Portable};
use super::{TOGETHER, group_of};
use crate::cpu::Isa;
use crate::cpu::matmul::few_rows::{self, Columns, Dots};
use crate::cpu::matmul::kernels::Kernels;
use crate::cpu::matmul::pack::Lines;
use crate::cpu::matmul::storage::{self, GROUP, Storage};

/// Rows at most with which this is faster than packing B for tiles.
pub(super) const MOST: usize = 4;

/// The kernels of `isa`, or of the best that this machine has; only those of few rows are of use.
pub(super) fn kernels(isa: Isa) -> &'static Kernels {
    match isa.min(Isa::detect()) {
        #[cfg(target_arch = "x86_64")]
        isa if has_vnni(isa) => &avx512_vnni::KERNELS,
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

/// Those of every kind of integers that this machine has.
#[cfg(test)]
pub(in crate::cpu::matmul) fn all() -> Vec<&'static Kernels> {
    let mut all: Vec<&'static Kernels> = vec![&portable::KERNELS];
    #[cfg(target_arch = "x86_64")]
    if Isa::detect() >= Isa::Avx2 {
        all.push(&avx2::KERNELS);
        if is_x86_feature_detected!("avxvnni") {
            all.push(&avx_vnni::KERNELS);
        }
        if has_vnni(Isa::detect()) {
            all.push(&avx512_vnni::KERNELS);
        }
    }
    all
}

/// Defines a module with the table of a kind of integers, for so many rows at most, beside that of its f32.
macro_rules! kernels {
    ($module:ident, $integers:ty, $few:expr, $isa:expr $(, $features:literal)?) => {
        mod $module {
            use std::sync::LazyLock;

            use super::*;
            use crate::Compute;

            pub static KERNELS: LazyLock<Kernels> = LazyLock::new(|| Kernels {
                few_rows: $few,
                k_per_unit: 1,
                pack_rows,
                multiply_columns,
                ..*Kernels::new($isa, Compute::F32)
            });

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_rows(a: Lines, k: usize, to: *mut f32) {
                // SAFETY: the caller vouches for the operands, this function's attribute for the instruction set.
                unsafe { super::pack_rows::<$integers>(a, k, to) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_columns(task: &Columns) {
                // SAFETY: as above; these are the counts that `padded_rows` fills up to.
                unsafe {
                    match task.c.rows {
                        0..=1 => by_codes!(task.b.dtype, columns::<[], 1>(task)),
                        2 => by_codes!(task.b.dtype, columns::<[], 2>(task)),
                        3..=4 => by_codes!(task.b.dtype, columns::<[], 4>(task)),
                        _ if $few > MOST => by_codes!(task.b.dtype, columns::<[], 8>(task)),
                        _ => {}
                    }
                }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn columns<S: Codes, const R: usize>(task: &Columns) {
                // SAFETY: as above.
                unsafe { super::multiply_columns::<$integers, S, R>(task) }
            }
        }
    };
}

kernels!(portable, Portable, few_rows::MAX_ROWS, Isa::Portable);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, Avx2, few_rows::MAX_ROWS, Isa::Avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
kernels!(avx_vnni, AvxVnni, few_rows::MAX_ROWS, Isa::Avx2, "avx2,fma,f16c,avxvnni");
// More rows are for tiles there.
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512_vnni,
    Avx512Vnni,
    MOST,
    Isa::Avx512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
);

/// A packed row: codes; of each 32 the scale, and the sum of the codes as it is and times the scale; these for each 16.
#[derive(Clone, Copy)]
struct Row {
    codes: *mut i8,
    scales: *mut f32,
    sums: Sums,
    half_sums: Sums,
}

#[derive(Clone, Copy)]
struct Sums {
    codes: *mut i32,
    values: *mut f32,
}

impl Row {
    /// Row `index` of those packed at `rows`, of `k` values.
    #[inline(always)]
    fn at(rows: *mut f32, index: usize, k: usize) -> Row {
        let groups = k / GROUP;
        let start = rows.wrapping_add(index * few_rows::row_units(k, 1));
        let scales = start.wrapping_add(k / size_of::<f32>());
        let sums = |at: *mut f32, count| Sums { codes: at.cast(), values: at.wrapping_add(count) };
        Row {
            codes: start.cast(),
            scales,
            sums: sums(scales.wrapping_add(groups), groups),
            half_sums: sums(scales.wrapping_add(3 * groups), 2 * groups),
        }
    }

    /// The sums of a group, or of its halves.
    #[inline(always)]
    fn sums<S: Codes>(&self, group: usize, part: usize) -> (*mut i32, *mut f32) {
        let (sums, at) = if S::HALVES { (self.half_sums, 2 * group + part) } else { (self.sums, group) };
        (sums.codes.wrapping_add(at), sums.values.wrapping_add(at))
    }
}

/// Rounds rows of A to integers; then rows of zeros up to [`padded_rows`](few_rows::padded_rows).
///
/// # Safety
/// The machine has the instruction set, the operand is valid, of a float type, `k` is a multiple of a group and `to` has room for its rows.
#[inline(always)]
unsafe fn pack_rows<I: Integers>(a: Lines, k: usize, to: *mut f32) {
    for index in 0..few_rows::padded_rows(a.count) {
        let row = Row::at(to, index, k);
        for group in 0..k / GROUP {
            let mut values = [0.0; GROUP];
            if index < a.count {
                // SAFETY: the caller vouches for the operand.
                values = unsafe { group_of(a, index, group * GROUP) };
            }
            // SAFETY: the row has room for its groups.
            unsafe {
                let (codes, scale) = I::round(&values);
                let [first, second] = I::half_sums(codes);
                I::store_bytes(codes, row.codes.add(group * GROUP).cast());
                row.scales.add(group).write(scale);
                row.sums.codes.add(group).write(first + second);
                row.sums.values.add(group).write(scale * (first + second) as f32);
                row.half_sums.codes.add(2 * group).cast::<[i32; 2]>().write([first, second]);
                let halves = [scale * first as f32, scale * second as f32];
                row.half_sums.values.add(2 * group).cast::<[f32; 2]>().write(halves);
            }
        }
    }
}

/// With columns that are stored as `S`.
struct Products<'a, I, S> {
    task: &'a Columns,
    kind: PhantomData<(I, S)>,
}

impl<I: Integers, S: Codes, const R: usize> Dots<R, TOGETHER> for Products<'_, I, S> {
    const GO_ON: bool = true;

    #[inline(always)]
    unsafe fn dots(&self, first: usize, starts: [usize; TOGETHER], out: &mut [[f32; TOGETHER]; R]) {
        let Columns { rows, b, k, .. } = *self.task;
        let mut packed = [Row::at(rows.cast_mut(), first, k); R];
        for (row, index) in packed.iter_mut().zip(first..) {
            *row = Row::at(rows.cast_mut(), index, k);
        }
        let mut blocks = [b.data; TOGETHER];
        for (block, start) in blocks.iter_mut().zip(starts) {
            *block = b.data.wrapping_add(S::offset(start));
        }
        let ahead = few_rows::ahead(S::offset(TOGETHER * b.stride));
        // SAFETY: as the trait says.
        unsafe { add_dots::<I, S, R>(&packed, blocks, k, ahead, out) }
    }
}

/// As [`few_rows::multiply_columns`].
///
/// # Safety
/// The machine has the instruction set, B is stored as `S`, operands and C are valid, and packed rows are a multiple of `R`.
#[inline(always)]
unsafe fn multiply_columns<I: Integers, S: Codes, const R: usize>(task: &Columns) {
    // SAFETY: as for this function.
    unsafe { few_rows::each_column::<R, TOGETHER, _>(task, &Products::<I, S> { task, kind: PhantomData }) }
}

/// Adds to `out` the dot products of rows with columns that begin with these blocks.
#[inline(always)]
unsafe fn add_dots<I: Integers, S: Codes, const R: usize>(
    rows: &[Row; R],
    mut blocks: Blocks8,
    k: usize,
    ahead: usize,
    out: &mut [[f32; TOGETHER]; R],
) {
    let groups = <S as Storage>::BLOCK / GROUP;
    // SAFETY: columns and packed rows hold `k` values.
    unsafe {
        let mut sums = [I::splat(0.0); R];
        for (sum, out) in sums.iter_mut().zip(out.iter()) {
            *sum = I::load(out.as_ptr());
        }
        for first in (0..k / GROUP).step_by(groups) {
            let scales = S::eight_scales::<I>(&blocks);
            each_group!(groups, group => add_group::<I, S, R>(&mut sums, rows, &blocks, &scales, first, group));
            next_blocks::<S>(&mut blocks, ahead);
        }
        for (sum, out) in sums.iter().zip(out) {
            I::store(*sum, out.as_mut_ptr());
        }
    }
}

/// Adds the products with one group of blocks.
#[inline(always)]
unsafe fn add_group<I: Integers, S: Codes, const R: usize>(
    sums: &mut [I::Floats; R],
    rows: &[Row; R],
    blocks: &Blocks8,
    scales: &Scales<I::Floats>,
    first: usize,
    group: usize,
) {
    // SAFETY: as for the caller.
    unsafe {
        let mut codes = [I::zero(); TOGETHER];
        for (codes, block) in codes.iter_mut().zip(blocks) {
            *codes = S::codes::<I>(*block, group);
        }
        for (row, sum) in rows.iter().zip(sums) {
            let with = row.codes.add((first + group) * GROUP);
            let mut dots = [I::zero(); TOGETHER];
            for (dots, codes) in dots.iter_mut().zip(&codes) {
                *dots = I::dot(*codes, with, S::SIGNED);
            }
            let [low, high] = I::add_up(dots);
            let (parts, count) = if S::HALVES { ([low, high], 2) } else { ([I::plus(low, high); 2], 1) };
            let row_scale = I::splat(*row.scales.add(first + group));
            for (part, mut products) in parts.into_iter().enumerate().take(count) {
                let (codes, values) = row.sums::<S>(first + group, part);
                if let Some(zero) = S::ZERO {
                    products = I::minus(products, i32::from(zero) * *codes);
                }
                let scaled = I::times(I::to_floats(products), scales.scales[group * count + part]);
                *sum = I::plus_product(*sum, scaled, row_scale);
                if S::MINIMA {
                    let minimum = scales.minima[group * count + part];
                    *sum = I::plus_product(*sum, minimum, I::splat(*values));
                }
            }
        }
    }
}
