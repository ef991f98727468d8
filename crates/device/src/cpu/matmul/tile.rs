//! The tile kernel: a few rows by a few vectors of C in registers, over all k of a pair of panels.

use std::mem::MaybeUninit;

use super::Dithered;
use super::engine::Engine;
use super::vector::{Vector, bf16_bits, bf16_value, f16_bits, f16_value};
use crate::cpu::kernels::Dither;

/// What becomes of a tile's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// Stored as f32.
    F32,
    /// Rounded to bf16.
    Bf16,
    /// Added to the bf16 values there, then rounded.
    AddBf16,
    /// Added to the bf16 values there, then rounded stochastically.
    AddBf16Dithered(Dithered),
    /// Rounded to f16.
    F16,
    /// Added to the f16 values there, then rounded.
    AddF16,
}

impl Finish {
    fn bytes(self) -> usize {
        if self == Finish::F32 { 4 } else { 2 }
    }
}

/// Where sums go on from and where they end up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// f32 sums to go on from, or null: from zero.
    pub start: *const f32,
    pub start_stride: usize,
    pub out: *mut u8,
    pub out_stride: usize,
    pub finish: Finish,
}

impl Sums {
    /// The same, from `row` and `column` on.
    #[inline(always)]
    pub fn at(self, row: usize, column: usize) -> Sums {
        let start = if self.start.is_null() {
            self.start
        } else {
            self.start.wrapping_add(row * self.start_stride + column)
        };
        let out = self.out.wrapping_add((row * self.out_stride + column) * self.finish.bytes());
        Sums { start, out, ..self }
    }
}

/// A block of C and its packed operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Panels of A, and the units from one to the next.
    pub a: *const f32,
    pub a_stride: usize,
    /// Panels of B, and the units from one to the next.
    pub b: *const f32,
    pub b_stride: usize,
    /// Units of k.
    pub units: usize,
    pub rows: usize,
    pub columns: usize,
    pub sums: Sums,
    /// Whether the loop over panels of B is the outer one.
    pub b_outer: bool,
    /// Memory that will be wanted after this block.
    pub ahead: Option<Area>,
}

/// Rows of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    pub data: *const u8,
    pub rows: usize,
    pub row_bytes: usize,
    /// Bytes from one row to the next.
    pub stride: usize,
}

/// An area cut into runs of cache lines, a part of a run for each tile of a block.
#[derive(Clone, Copy)]
struct Runs {
    data: *const u8,
    /// Bytes from one run to the next, and from one line of a run to the next.
    run_stride: usize,
    line_stride: usize,
    /// Tiles that share a run, and the lines that each fetches.
    tiles_per_run: usize,
    lines: usize,
}

impl Runs {
    /// Along the rows or across them, whichever gives each run a tile at least; nothing where neither does.
    fn new(area: Option<Area>, tiles: usize) -> Runs {
        let nothing =
            Runs { data: std::ptr::null(), run_stride: 0, line_stride: 0, tiles_per_run: 1, lines: 0 };
        let Some(Area { data, rows, row_bytes, stride }) = area else { return nothing };
        let columns = row_bytes.div_ceil(LINE);
        let along = rows <= tiles;
        let (runs, length) = if along { (rows, columns) } else { (columns, rows) };
        if runs == 0 || runs > tiles {
            return nothing;
        }
        let tiles_per_run = tiles / runs;
        let (run_stride, line_stride) = if along { (stride, LINE) } else { (LINE, stride) };
        Runs { data, run_stride, line_stride, tiles_per_run, lines: length.div_ceil(tiles_per_run) }
    }

    /// The first line that tile number `tile` fetches.
    fn start(&self, tile: usize) -> *const u8 {
        let (run, part) = (tile / self.tiles_per_run, tile % self.tiles_per_run);
        self.data.wrapping_add(run * self.run_stride + part * self.lines * self.line_stride)
    }
}

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// A tile in f32.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub a: *const f32,
    pub b: *const f32,
    pub units: usize,
    /// Sums to go on from, or null, and where they end up.
    pub start: *const f32,
    pub start_stride: usize,
    pub out: *mut f32,
    pub out_stride: usize,
    /// The part of C that comes after this one, to be fetched meanwhile, and the bytes between its rows.
    next: *const u8,
    next_stride: usize,
    /// Lines wanted later.
    later: *const u8,
    later_stride: usize,
    later_lines: usize,
    /// Whether it is B's panels that change from one tile to the next.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub b_streams: bool,
    /// Room for a tile's sums, [`MAX_WIDTH`] to a row.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub spare: *mut f32,
}

impl Tile {
    /// Asks for the part of C that comes next and for a share of what is wanted later, all at once.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    #[inline(always)]
    pub fn fetch_ahead<const ROWS: usize, const ROW_BYTES: usize>(&self) {
        for row in 0..ROWS {
            for part in (0..ROW_BYTES).step_by(LINE) {
                prefetch(self.next.wrapping_add(row * self.next_stride + part));
            }
        }
        for line in 0..self.later_lines {
            prefetch_later(self.later.wrapping_add(line * self.later_stride));
        }
    }
}

/// Multiplies a block tile by tile. `tile(rows, tile)` runs [`kernel`] on a tile of at most `HEIGHT` rows, or does the same.
///
/// # Safety
/// The machine has the engine's instruction set, panels hold what `block` says, C is valid.
#[inline(always)]
pub(super) unsafe fn multiply<E: Engine, const HEIGHT: usize>(
    block: &Block,
    width: usize,
    tile: unsafe fn(usize, &Tile),
) {
    let a_panels = block.rows.div_ceil(HEIGHT);
    let b_panels = block.columns.div_ceil(width);
    let (outer, inner) = if block.b_outer { (b_panels, a_panels) } else { (a_panels, b_panels) };
    let place = |x, y| if block.b_outer { (y, x) } else { (x, y) };
    let runs = Runs::new(block.ahead, outer * inner);
    let (mut sums, mut spare) = (Buffer::<HEIGHT>::new(), Buffer::<HEIGHT>::new());
    for x in 0..outer {
        for y in 0..inner {
            let (i, j) = place(x, y);
            let (row, column) = (i * HEIGHT, j * width);
            let (rows, columns) = (HEIGHT.min(block.rows - row), width.min(block.columns - column));
            let Sums { start, start_stride, out, out_stride, finish } = block.sums.at(row, column);
            let (next_i, next_j) = if y + 1 < inner { place(x, y + 1) } else { place(x + 1, 0) };
            // SAFETY: panels i and j exist, and the tile lies in the block.
            unsafe {
                let whole = Tile {
                    a: block.a.add(i * block.a_stride),
                    b: block.b.add(j * block.b_stride),
                    units: block.units,
                    start,
                    start_stride,
                    out: out.cast(),
                    out_stride,
                    next: block.sums.at(next_i * HEIGHT, next_j * width).out,
                    next_stride: out_stride * finish.bytes(),
                    later: runs.start(x * inner + y),
                    later_stride: runs.line_stride,
                    later_lines: runs.lines,
                    b_streams: !block.b_outer,
                    spare: spare.start(),
                };
                if columns == width && finish == Finish::F32 {
                    tile(rows, &whole);
                } else {
                    buffered_tile::<E>(rows, columns, whole, finish, sums.start(), tile);
                }
            }
        }
    }
}

/// What added to a sum leaves it as it is, -0.0 too.
pub(super) const NOTHING: f32 = -0.0;

/// Columns of the widest tile of any engine.
pub(super) const MAX_WIDTH: usize = 32;

/// Room for the sums of a tile, which is written before it is read.
#[repr(align(64))]
struct Buffer<const HEIGHT: usize>(MaybeUninit<[[f32; MAX_WIDTH]; HEIGHT]>);

impl<const HEIGHT: usize> Buffer<HEIGHT> {
    #[inline(always)]
    fn new() -> Self {
        Buffer(MaybeUninit::uninit())
    }

    #[inline(always)]
    fn start(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// A tile whose sums are not simply stored as f32, or with fewer columns than its vectors hold: by way of a buffer with
/// room for the largest tile.
#[inline(always)]
unsafe fn buffered_tile<E: Engine>(
    rows: usize,
    columns: usize,
    tile: Tile,
    finish: Finish,
    buffer: *mut f32,
    run: unsafe fn(usize, &Tile),
) {
    let lanes = E::V::LANES;
    // SAFETY: `rows` by `columns` values exist at `start`, if it is not null, and at `out`; the buffer holds the
    // largest tile.
    unsafe {
        let mut inside = Tile { out: buffer, out_stride: MAX_WIDTH, ..tile };
        if !tile.start.is_null() {
            for i in 0..rows {
                let from = tile.start.add(i * tile.start_stride);
                let row = buffer.add(i * MAX_WIDTH);
                std::ptr::copy_nonoverlapping(from, row, columns);
                row.add(columns).write_bytes(0, MAX_WIDTH - columns);
            }
            inside.start = buffer;
            inside.start_stride = MAX_WIDTH;
        }
        run(rows, &inside);
        for i in 0..rows {
            let sums = buffer.add(i * MAX_WIDTH);
            if finish == Finish::F32 {
                std::ptr::copy_nonoverlapping(sums, tile.out.add(i * tile.out_stride), columns);
                continue;
            }
            let out = tile.out.cast::<u16>().add(i * tile.out_stride);
            if let Finish::AddBf16Dithered(Dithered { seed, first, base }) = finish {
                let dither = Dither::new(seed, first.wrapping_add((out.addr() - base) as u64 / 2));
                for j in 0..columns {
                    let sum = bf16_value(*out.add(j)) + *sums.add(j);
                    *out.add(j) = dither.bf16(sum, j as u32).to_bits();
                }
                continue;
            }
            if matches!(finish, Finish::F16 | Finish::AddF16) {
                for j in 0..columns {
                    let old = if finish == Finish::AddF16 { f16_value(*out.add(j)) } else { NOTHING };
                    *out.add(j) = f16_bits(old + *sums.add(j));
                }
                continue;
            }
            for j in (0..columns).step_by(lanes) {
                if columns - j >= lanes {
                    let mut sum = E::V::load(sums.add(j));
                    if finish == Finish::AddBf16 {
                        sum = E::V::load_bf16(out.add(j)).plus(sum);
                    }
                    sum.store_bf16(out.add(j));
                } else {
                    for j in j..columns {
                        let old = if finish == Finish::AddBf16 { bf16_value(*out.add(j)) } else { NOTHING };
                        *out.add(j) = bf16_bits(old + *sums.add(j));
                    }
                }
            }
        }
    }
}

/// Units of k in a chain of additions. A sum of n terms in one f32 chain is wrong by up to n roundings, each as
/// large as the largest partial sum's: where one term is huge, as in the residual stream of real models, gradients
/// were off in the third digit. A sum of chains is wrong by a chain's length and their number.
pub(super) const CHAIN: usize = 256;

/// Rows `ROWS` of a panel of A that is `HEIGHT` wide, times `NV` vectors of a panel of B.
///
/// Units are cut into chains of [`CHAIN`], the last one perhaps shorter, each a row of multiply-adds in the order of k
/// that begins with zero; its sum is added to what `start` and the chains before it gave. Where chains begin does not
/// depend on how many there are, so that units cut between two chains, into a sum that goes on, give the same bits.
///
/// # Safety
/// The machine has the engine's instruction set and the tile is valid.
#[inline(always)]
pub(super) unsafe fn kernel<E: Engine, const ROWS: usize, const HEIGHT: usize, const NV: usize>(tile: &Tile) {
    let lanes = E::V::LANES;
    let Tile { mut a, mut b, units, start, start_stride, out, out_stride, mut next, mut later, .. } = *tile;
    let chains = units.div_ceil(CHAIN).max(1);
    let length = units.min(CHAIN);
    // SAFETY: panels hold `units` units of `HEIGHT` and `NV * lanes` lines, the tile has `ROWS` by `NV * lanes`
    // values at `start`, where that is not null, and at `out`.
    unsafe {
        let mut sums = [[E::V::splat(0.0); NV]; ROWS];
        // One row of the next tile for each of the first units, so that the fetches do not pile up.
        let fetching = length.min(ROWS);
        for _ in 0..fetching {
            for part in 0..(NV * lanes * 4).div_ceil(LINE) {
                prefetch(next.wrapping_add(part * LINE));
            }
            next = next.wrapping_add(tile.next_stride);
            one_unit::<E, ROWS, NV>(&mut sums, a, b);
            a = a.add(HEIGHT);
            b = b.add(NV * lanes);
        }
        let fetching_later = tile.later_lines.min(length - fetching);
        for _ in 0..fetching_later {
            prefetch_later(later);
            later = later.wrapping_add(tile.later_stride);
            one_unit::<E, ROWS, NV>(&mut sums, a, b);
            a = a.add(HEIGHT);
            b = b.add(NV * lanes);
        }
        for _ in fetching + fetching_later..length {
            one_unit::<E, ROWS, NV>(&mut sums, a, b);
            a = a.add(HEIGHT);
            b = b.add(NV * lanes);
        }
        finish_chain(&mut sums, (start, start_stride), (out, out_stride));
        for chain in 1..chains {
            for _ in chain * CHAIN..units.min((chain + 1) * CHAIN) {
                one_unit::<E, ROWS, NV>(&mut sums, a, b);
                a = a.add(HEIGHT);
                b = b.add(NV * lanes);
            }
            finish_chain(&mut sums, (out.cast_const(), out_stride), (out, out_stride));
        }
    }
}

/// Stores what is at `start`, if that is not null, plus `sums`, which become zero.
#[inline(always)]
unsafe fn finish_chain<V: Vector, const ROWS: usize, const NV: usize>(
    sums: &mut [[V; NV]; ROWS],
    (start, start_stride): (*const f32, usize),
    (out, out_stride): (*mut f32, usize),
) {
    // SAFETY: the caller's tile has `ROWS` by `NV` vectors there.
    unsafe {
        for (i, row) in sums.iter_mut().enumerate() {
            for (j, sum) in row.iter_mut().enumerate() {
                let mut total = *sum;
                if !start.is_null() {
                    total = V::load(start.add(i * start_stride + j * V::LANES)).plus(total);
                }
                total.store(out.add(i * out_stride + j * V::LANES));
                *sum = V::splat(0.0);
            }
        }
    }
}

#[inline(always)]
unsafe fn one_unit<E: Engine, const ROWS: usize, const NV: usize>(
    sums: &mut [[E::V; NV]; ROWS],
    a: *const f32,
    b: *const f32,
) {
    // SAFETY: the caller's panels hold a unit from here.
    unsafe {
        let mut columns = [E::V::splat(0.0); NV];
        for (j, column) in columns.iter_mut().enumerate() {
            *column = E::V::load(b.add(j * E::V::LANES));
        }
        for (i, row) in sums.iter_mut().enumerate() {
            let value = E::V::splat(*a.add(i));
            for (sum, column) in row.iter_mut().zip(columns) {
                *sum = E::multiply_add(*sum, value, column);
            }
        }
    }
}

/// Asks for the cache line at `p` to be brought into the second-level cache; it need not be valid.
#[inline(always)]
pub(super) fn prefetch_later(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and cannot fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Asks for the cache line at `p`, which need not be valid.
#[inline(always)]
pub(super) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and cannot fault.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}
