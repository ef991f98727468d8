//! More rows of A: a prompt's x W^T, or that of several sequences, in tiles of six rows by 32 columns whose f32 sums stay in registers.
//!
//! The machine multiplies unsigned bytes with signed ones: codes of A are stored 128 higher, and codes of B less that of zero where they
//! have one; others are below 128 anyway. A sum of products begins with -128 times the sum of B's codes, and so comes out exact. A group
//! of 32 values of k is a *step* of a panel, of whole rows of 32-bit lanes:
//!
//! | B, 32 lanes a row | A, 6 lanes a row |
//! |---|---|
//! | what sums begin with | eight rows of four codes |
//! | eight rows of four codes | scale |
//! | scales | scale times the sum of the codes, where B has minima |
//! | minima, if the type has them | |
//!
//! Where halves of a group have scales of their own, B has all its rows for each half, with four rows of codes, and A a sum for each.

use std::ops::Range;

use super::codes::{Blocks8, Codes, Scales, by_codes, each_group, next_blocks};
#[cfg(target_arch = "x86_64")]
use super::has_vnni;
use super::integers::Integers;
use super::{TOGETHER, group_of};
use crate::DType;
use crate::cpu::Isa;
use crate::cpu::matmul::few_rows;
use crate::cpu::matmul::kernels::Kernels;
use crate::cpu::matmul::pack::{Lines, Panels};
use crate::cpu::matmul::storage::{self, GROUP, Storage};
use crate::cpu::matmul::tile::{MAX_WIDTH, Tile};
use crate::cpu::matmul::vector::Vector;

/// Rows of a tile: with two vectors of columns, their f32 sums and a group's integers take 24 of 32 registers.
const HEIGHT: usize = 6;
const WIDTH: usize = MAX_WIDTH;
/// Rows of codes in a step.
const ROWS_OF_CODES: usize = GROUP / size_of::<f32>();
/// Blocks of k are cut at multiples of this, of which every type has whole blocks. Sums go on from one to the next.
const CHAIN_K: usize = 1024;
const _: () = assert!(CHAIN_K.is_multiple_of(256));

/// Parts of a step that have scales of their own.
const fn parts(halves: bool) -> usize {
    if halves { 2 } else { 1 }
}

/// Rows of a step.
const fn step_units(halves: bool, minima: bool) -> usize {
    ROWS_OF_CODES + parts(halves) * if minima { 3 } else { 2 }
}

/// Whether halves of a group have scales, and whether there are minima.
fn kind<S: Codes>() -> Option<[bool; 2]> {
    Some([S::HALVES, S::MINIMA])
}

/// The kernels of `isa`, or of the best that this machine has, for a B of a type of codes.
pub(in crate::cpu::matmul) fn kernels(isa: Isa, b: DType) -> Option<&'static Kernels> {
    #[cfg(target_arch = "x86_64")]
    if has_vnni(isa) {
        return avx512_vnni::kernels(b);
    }
    let _ = (isa, b);
    None
}

/// The same without the instructions.
#[cfg(test)]
pub(in crate::cpu::matmul) fn written(b: DType) -> Option<&'static Kernels> {
    written_out::kernels(b)
}

/// Multiplies bytes, 32 bits of a lane at a time.
///
/// # Safety
/// For every method: the machine has the instruction set, and pointers are valid for what is read.
trait Machine {
    type V: Vector;
    /// As many lanes of 32 bits as the vector has.
    type Lanes: Copy;

    unsafe fn load(p: *const f32) -> Self::Lanes;
    /// The same 32 bits in all lanes.
    unsafe fn splat(p: *const f32) -> Self::Lanes;
    /// Adds to each lane the products of its four unsigned and four signed bytes.
    unsafe fn plus_products(sum: Self::Lanes, unsigned: Self::Lanes, signed: Self::Lanes) -> Self::Lanes;
    unsafe fn to_floats(lanes: Self::Lanes) -> Self::V;
}

/// AVX-512 VNNI.
#[cfg(target_arch = "x86_64")]
struct Vnni;

#[cfg(target_arch = "x86_64")]
mod vnni {
    use std::arch::x86_64::*;

    use super::{Machine, Vnni};
    use crate::cpu::matmul::vector::Avx512;

    // SAFETY (all methods): the pointers hold what the trait says; the rest is registers only.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Machine for Vnni {
        type V = Avx512;
        type Lanes = __m512i;

        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m512i {
            unsafe { _mm512_loadu_si512(p.cast()) }
        }

        #[inline(always)]
        unsafe fn splat(p: *const f32) -> __m512i {
            unsafe { _mm512_set1_epi32(p.cast::<i32>().read()) }
        }

        #[inline(always)]
        unsafe fn plus_products(sum: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
            unsafe { _mm512_dpbusd_epi32(sum, unsigned, signed) }
        }

        #[inline(always)]
        unsafe fn to_floats(lanes: __m512i) -> Avx512 {
            unsafe { Avx512(_mm512_cvtepi32_ps(lanes)) }
        }
    }
}

/// Plain Rust, with vectors of four lanes.
#[cfg(test)]
struct Written;

// SAFETY (all methods): as the trait says.
#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks)]
impl Machine for Written {
    type V = crate::cpu::matmul::vector::Portable;
    type Lanes = [i32; 4];

    unsafe fn load(p: *const f32) -> [i32; 4] {
        unsafe { p.cast::<[i32; 4]>().read() }
    }

    unsafe fn splat(p: *const f32) -> [i32; 4] {
        [unsafe { p.cast::<i32>().read() }; 4]
    }

    unsafe fn plus_products(sum: [i32; 4], unsigned: [i32; 4], signed: [i32; 4]) -> [i32; 4] {
        std::array::from_fn(|lane| {
            let (unsigned, signed) = (unsigned[lane].to_ne_bytes(), signed[lane].to_ne_bytes());
            let products = unsigned.iter().zip(signed).map(|(a, b)| i32::from(*a) * i32::from(b as i8));
            sum[lane] + products.sum::<i32>()
        })
    }

    unsafe fn to_floats(lanes: [i32; 4]) -> Self::V {
        let floats = lanes.map(|lane| lane as f32);
        unsafe { Self::V::load(floats.as_ptr()) }
    }
}

/// Defines a module with the tables of a machine: `$vectors` hold the columns of a tile, `$integers` pack B.
macro_rules! kernels {
    ($module:ident, $machine:ty, $vectors:literal, $integers:ty, $isa:expr $(, $features:literal)?) => {
        mod $module {
            use std::sync::LazyLock;

            use super::*;
            use crate::Compute;
            use crate::cpu::matmul::engine::Single;
            use crate::cpu::matmul::tile::{self, Block};

            static KERNELS: LazyLock<[Kernels; 4]> = LazyLock::new(|| {
                [table::<false, false>(), table::<false, true>(), table::<true, false>(), table::<true, true>()]
            });

            pub fn kernels(b: DType) -> Option<&'static Kernels> {
                let [halves, minima] = by_codes!(b, kind::<[]>())?;
                KERNELS.get(2 * usize::from(halves) + usize::from(minima))
            }

            fn table<const HALVES: bool, const MINIMA: bool>() -> Kernels {
                Kernels {
                    rows: HEIGHT,
                    columns: WIDTH,
                    few_rows: 0,
                    step_k: GROUP,
                    step_units: step_units(HALVES, MINIMA),
                    chain_k: CHAIN_K,
                    pack_a: pack_a::<HALVES, MINIMA>,
                    pack_b,
                    multiply: multiply::<HALVES, MINIMA>,
                    ..*Kernels::new($isa, Compute::F32)
                }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_a<const HALVES: bool, const MINIMA: bool>(
                from: Lines,
                lines: Range<usize>,
                k: Range<usize>,
                to: Panels,
            ) {
                // SAFETY: the caller vouches for the operands, this function's attribute for the instruction set.
                unsafe { super::pack_a::<$integers, HALVES, MINIMA>(from, lines, k, to) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_b(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
                // SAFETY: as above.
                unsafe { by_codes!(from.dtype, stored_pack::<[]>(from, lines, k, to)) }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn stored_pack<S: Codes>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
                // SAFETY: as above.
                unsafe { super::pack_b::<$integers, S>(from, lines, k, to) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn multiply<const HALVES: bool, const MINIMA: bool>(block: &Block) {
                type Engine = Single<<$machine as Machine>::V>;
                // SAFETY: as above.
                unsafe { tile::multiply::<Engine, HEIGHT>(block, WIDTH, tile::<HALVES, MINIMA>) }
            }

            $(#[target_feature(enable = $features)])?
            unsafe fn tile<const HALVES: bool, const MINIMA: bool>(rows: usize, tile: &Tile) {
                // SAFETY: as above.
                unsafe {
                    match rows {
                        1 => sized_tile::<1, HALVES, MINIMA>(tile),
                        2 => sized_tile::<2, HALVES, MINIMA>(tile),
                        3 => sized_tile::<3, HALVES, MINIMA>(tile),
                        4 => sized_tile::<4, HALVES, MINIMA>(tile),
                        5 => sized_tile::<5, HALVES, MINIMA>(tile),
                        _ => sized_tile::<6, HALVES, MINIMA>(tile),
                    }
                }
            }

            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn sized_tile<const ROWS: usize, const HALVES: bool, const MINIMA: bool>(tile: &Tile) {
                // SAFETY: as above.
                unsafe { kernel::<$machine, ROWS, $vectors, HALVES, MINIMA>(tile) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernels!(
    avx512_vnni,
    Vnni,
    2,
    super::super::integers::Avx512Vnni,
    Isa::Avx512,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
);
#[cfg(test)]
kernels!(written_out, Written, 8, super::super::integers::Portable, Isa::Portable);

/// Rounds rows of A into panels of [`HEIGHT`]. Rows of the last panel that do not exist are not written.
///
/// # Safety
/// The machine has the instruction set, the operand is valid, `k` whole groups, and panels have room for their steps.
#[inline(always)]
unsafe fn pack_a<I: Integers, const HALVES: bool, const MINIMA: bool>(
    from: Lines,
    lines: Range<usize>,
    k: Range<usize>,
    to: Panels,
) {
    let Panels { data, width, stride } = to;
    for (index, row) in lines.enumerate() {
        let mut step = data.wrapping_add(index / width * stride + index % width);
        for k in k.clone().step_by(GROUP) {
            // SAFETY: as for this function.
            unsafe {
                let (codes, scale) = I::round(&group_of(from, row, k));
                let mut unsigned = [0u32; ROWS_OF_CODES];
                I::store_bytes(I::less(codes, 128), unsigned.as_mut_ptr().cast());
                for (unit, codes) in unsigned.iter().enumerate() {
                    step.add(unit * width).cast::<u32>().write(*codes);
                }
                step.add(ROWS_OF_CODES * width).write(scale);
                if MINIMA {
                    let [first, second] = I::half_sums(codes);
                    let sums = if HALVES { [first, second] } else { [first + second, 0] };
                    for (part, sum) in sums.iter().enumerate().take(parts(HALVES)) {
                        step.add((ROWS_OF_CODES + 1 + part) * width).write(scale * *sum as f32);
                    }
                }
            }
            step = step.wrapping_add(step_units(HALVES, MINIMA) * width);
        }
    }
}

/// Packs columns of B, stored as `S`, into panels of [`WIDTH`]: [`TOGETHER`] at a time. Where they are fewer, the last one is taken again.
///
/// # Safety
/// The machine has the instruction set, the operand is valid, `k` whole blocks, and panels have room for their steps.
#[inline(always)]
unsafe fn pack_b<I: Integers, S: Codes>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
    let mut panel = to.data;
    let ahead = few_rows::ahead(S::offset(TOGETHER * from.stride));
    for first in lines.clone().step_by(to.width) {
        for at in (first..lines.end.min(first + to.width)).step_by(TOGETHER) {
            let mut blocks = [from.data; TOGETHER];
            for (j, block) in blocks.iter_mut().enumerate() {
                let column = (at + j).min(lines.end - 1);
                *block = from.data.wrapping_add(S::offset(column * from.stride + k.start));
            }
            // SAFETY: as for this function.
            unsafe { pack_together::<I, S>(blocks, k.len(), ahead, panel.wrapping_add(at - first), to.width) }
        }
        panel = panel.wrapping_add(to.stride);
    }
}

/// Packs columns that begin with these blocks.
#[inline(always)]
unsafe fn pack_together<I: Integers, S: Codes>(
    mut blocks: Blocks8,
    k: usize,
    ahead: usize,
    mut to: *mut f32,
    width: usize,
) {
    let step = step_units(S::HALVES, S::MINIMA) * width;
    let groups = <S as Storage>::BLOCK / GROUP;
    for _ in 0..k / <S as Storage>::BLOCK {
        // SAFETY: as for the caller.
        unsafe {
            let scales = S::eight_scales::<I>(&blocks);
            each_group!(groups, group => {
                pack_group::<I, S>(&blocks, &scales, group, to.wrapping_add(group * step), width)
            });
        }
        to = to.wrapping_add(groups * step);
        next_blocks::<S>(&mut blocks, ahead);
    }
}

/// Packs a step of columns: a group of their blocks.
#[inline(always)]
unsafe fn pack_group<I: Integers, S: Codes>(
    blocks: &Blocks8,
    scales: &Scales<I::Floats>,
    group: usize,
    mut to: *mut f32,
    width: usize,
) {
    // SAFETY: as for the caller.
    unsafe {
        let mut codes = [I::zero(); TOGETHER];
        for (codes, block) in codes.iter_mut().zip(blocks) {
            *codes = S::codes::<I>(*block, group);
            if let Some(zero) = S::ZERO {
                *codes = I::less(*codes, zero);
            }
        }
        I::transpose(&mut codes);
        let parts = parts(S::HALVES);
        for (part, codes) in codes.chunks_exact(ROWS_OF_CODES / parts).enumerate() {
            let mut start = I::zero();
            for (i, codes) in codes.iter().enumerate() {
                start = I::less_128_times(start, *codes);
                I::store_bytes(*codes, to.add((1 + i) * width).cast());
            }
            I::store_bytes(start, to.cast());
            to = to.add((1 + codes.len()) * width);
            I::store(scales.scales[group * parts + part], to);
            to = to.add(width);
            if S::MINIMA {
                I::store(scales.minima[group * parts + part], to);
                to = to.add(width);
            }
        }
    }
}

/// The first `ROWS` rows of a panel of A times `NV` vectors of a panel of B: sums that go on from what is at `start`, if
/// that is not null.
///
/// # Safety
/// The machine has the instruction set and the tile is valid.
#[inline(always)]
unsafe fn kernel<M: Machine, const ROWS: usize, const NV: usize, const HALVES: bool, const MINIMA: bool>(
    tile: &Tile,
) {
    let lanes = M::V::LANES;
    let Tile { mut a, mut b, units, start, start_stride, out, out_stride, .. } = *tile;
    tile.fetch_ahead::<ROWS, { WIDTH * size_of::<f32>() }>();
    // SAFETY: panels hold so many steps, and the tile its sums.
    unsafe {
        let mut sums = [[M::V::splat(0.0); NV]; ROWS];
        if !start.is_null() {
            for (i, sums) in sums.iter_mut().enumerate() {
                for (j, sum) in sums.iter_mut().enumerate() {
                    *sum = M::V::load(start.add(i * start_stride + j * lanes));
                }
            }
        }
        for _ in 0..units / step_units(HALVES, MINIMA) {
            let row_scales = a.add(ROWS_OF_CODES * HEIGHT);
            for part in 0..parts(HALVES) {
                let mut products = [[M::load(b); NV]; ROWS];
                for products in &mut products {
                    for (j, products) in products.iter_mut().enumerate() {
                        *products = M::load(b.add(j * lanes));
                    }
                }
                b = b.add(WIDTH);
                for unit in 0..ROWS_OF_CODES / parts(HALVES) {
                    let row = a.add((part * ROWS_OF_CODES / 2 + unit) * HEIGHT);
                    let mut columns = [M::load(b); NV];
                    for (j, columns) in columns.iter_mut().enumerate() {
                        *columns = M::load(b.add(j * lanes));
                    }
                    for (i, products) in products.iter_mut().enumerate() {
                        let row = M::splat(row.add(i));
                        for (products, column) in products.iter_mut().zip(columns) {
                            *products = M::plus_products(*products, row, column);
                        }
                    }
                    b = b.add(WIDTH);
                }
                for j in 0..NV {
                    let scale = M::V::load(b.add(j * lanes));
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let scaled = M::to_floats(products[i][j]).times(scale);
                        sums[j] = sums[j].plus_product(scaled, M::V::splat(*row_scales.add(i)));
                    }
                }
                b = b.add(WIDTH);
                if MINIMA {
                    let row_sums = row_scales.add((1 + part) * HEIGHT);
                    for j in 0..NV {
                        let minimum = M::V::load(b.add(j * lanes));
                        for (i, sums) in sums.iter_mut().enumerate() {
                            sums[j] = sums[j].plus_product(minimum, M::V::splat(*row_sums.add(i)));
                        }
                    }
                    b = b.add(WIDTH);
                }
            }
            a = a.add(step_units(HALVES, MINIMA) * HEIGHT);
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                sum.store(out.add(i * out_stride + j * lanes));
            }
        }
    }
}
