//! Packing: lines of a matrix become panels in the order in which the tile kernel reads them.
//!
//! A *line* is a row of A or a column of B: what is multiplied and summed along k. A panel holds `width` lines; its
//! unit u of line l lies at `u * width + l`. Conversion, dequantisation and rounding happen here.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::Operand;
use super::engine::{Engine, MAX_ALONG};
use super::kernels::Dequantize;
use super::storage::{self, At, GROUP, MAX_CHUNK, Read, Storage};
use super::tile::{Area, prefetch};
use super::vector::{MAX_LANES, MAX_VECTORS, Vector};
use crate::DType;

/// An operand seen as lines along k.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines {
    pub data: *const u8,
    pub dtype: DType,
    pub count: usize,
    pub stride: usize,
    pub k_stride: usize,
}

// SAFETY: plain memory that is only read while a product runs.
unsafe impl Sync for Lines {}

impl Lines {
    pub fn rows_of(a: Operand) -> Lines {
        Lines { data: a.data, dtype: a.dtype, count: a.rows, stride: a.row_stride, k_stride: a.column_stride }
    }

    pub fn columns_of(b: Operand) -> Lines {
        Lines {
            data: b.data,
            dtype: b.dtype,
            count: b.columns,
            stride: b.column_stride,
            k_stride: b.row_stride,
        }
    }

    /// Some of the lines, of a plain type.
    pub fn part(self, lines: Range<usize>) -> Lines {
        debug_assert!(self.dtype.is_float());
        let bytes = lines.start * self.stride * self.dtype.block_bytes() as usize;
        Lines { data: self.data.wrapping_add(bytes), count: lines.len(), ..self }
    }

    /// Where the elements of `lines` and `k` lie, beginning with the block of the first one.
    pub fn area(self, lines: Range<usize>, k: Range<usize>) -> Area {
        let (block, block_bytes) = (self.dtype.block_elements() as usize, self.dtype.block_bytes() as usize);
        let bytes = |elements: usize| elements / block * block_bytes;
        let data = self.data.wrapping_add(bytes(lines.start * self.stride + k.start * self.k_stride));
        let (rows, columns, stride) = if self.k_stride == 1 {
            (lines.len(), k.len(), self.stride)
        } else {
            (k.len(), lines.len(), self.k_stride)
        };
        Area { data, rows, row_bytes: bytes(columns), stride: bytes(stride) }
    }
}

/// Where panels go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panels {
    pub data: *mut f32,
    /// Lines in a panel.
    pub width: usize,
    /// Units from one panel to the next: at least `units * width + MAX_LANES`, which leaves room for whole vectors.
    pub stride: usize,
}

/// How far ahead of its use an operand is fetched, in bytes: along each of its lines, and over whole rows of k.
const AHEAD_ALONG: usize = 256;
const AHEAD_ACROSS: usize = 8192;

/// Packs the lines of `lines`, of which the first begins a panel, with their k in `k`. Lines of the last panel that
/// do not exist are not written.
///
/// # Safety
/// The machine has the engine's instruction set; the operand and the panels are valid. `k` begins on a multiple of
/// [`GROUP`] elements.
#[inline(always)]
pub(super) unsafe fn pack<E: Engine, S: Storage>(
    from: Lines,
    lines: Range<usize>,
    k: Range<usize>,
    to: Panels,
) {
    let lanes = E::V::LANES;
    let blocks = S::BLOCK > 1;
    let aligned = |x: usize, to: usize| !blocks || x.is_multiple_of(to);
    // SAFETY: as for this function, in all calls.
    unsafe {
        // Vectors begin at multiples of their lanes, and so lie in one block each.
        if from.k_stride == 1 && aligned(from.stride, lanes) {
            pack_along::<E, S>(from, lines, k, to);
        } else if from.stride == 1
            && aligned(from.k_stride, lanes)
            && aligned(to.width, lanes)
            && aligned(from.count, GROUP)
        {
            pack_across::<E, S>(from, lines, k, to);
        } else {
            pack_any::<E>(from, lines, k, to);
        }
    }
}

/// Values that follow each other in memory and are decoded together: whole blocks of every type, and whole panels.
const RUN: usize = 256;
/// Runs in the buffer.
const RUNS: usize = 32;

/// Runs of an operand as f32, each behind room for the values of its first block that come before it.
struct Decoded([[MaybeUninit<f32>; 2 * RUN]; RUNS]);

impl Decoded {
    /// Decodes `inner` of the contiguous dimension for each of `outer`, `stride` elements apart.
    ///
    /// # Safety
    /// The operand has the elements.
    unsafe fn fill(
        &mut self,
        from: Lines,
        outer: Range<usize>,
        stride: usize,
        inner: Range<usize>,
        decode: Dequantize,
    ) {
        assert!(outer.len() <= RUNS && inner.len() <= RUN, "{outer:?} by {inner:?} are too many");
        let block = from.dtype.block_elements() as usize;
        for (outer, run) in outer.zip(&mut self.0) {
            let index = outer * stride + inner.start;
            let before = index % block;
            let to = run.as_mut_ptr().cast::<f32>().wrapping_add(RUN - before);
            // SAFETY: there is room for a run, and before it for as many elements as a block has.
            unsafe { decode(from.dtype, from.data, index - before, before + inner.len(), to) };
        }
    }

    /// What was decoded, as lines.
    fn lines(&self, count: usize, stride: usize, k_stride: usize) -> Lines {
        let data = self.0.as_ptr().cast::<u8>().wrapping_add(RUN * size_of::<f32>());
        Lines { data, dtype: DType::F32, count, stride, k_stride }
    }
}

/// As [`pack`], of any type that `decode` decodes; `pack` packs f32, in units of one value.
///
/// # Safety
/// As of [`pack`].
#[inline(always)]
pub(super) unsafe fn pack_decoded<E: Engine>(
    from: Lines,
    lines: Range<usize>,
    k: Range<usize>,
    to: Panels,
    decode: Dequantize,
    pack: unsafe fn(Lines, Range<usize>, Range<usize>, Panels),
) {
    const { assert!(E::K_PER_UNIT == 1) };
    let mut decoded = Decoded([[MaybeUninit::uninit(); 2 * RUN]; RUNS]);
    let along = from.k_stride == 1;
    if !along && from.stride != 1 {
        // SAFETY: as for this function.
        return unsafe { pack_any::<E>(from, lines, k, to) };
    }
    // Whole panels, as the buffer has room for them.
    let (lines_each, k_each) = if along { (to.width, RUN) } else { (RUN / to.width * to.width, RUNS) };
    for first in lines.clone().step_by(lines_each) {
        let some = first..lines.end.min(first + lines_each);
        let panel = to.data.wrapping_add((first - lines.start) / to.width * to.stride);
        for first in k.clone().step_by(k_each) {
            let values = first..k.end.min(first + k_each);
            let data = panel.wrapping_add((first - k.start) * to.width);
            // SAFETY: the lines have these values, and the panels room for them.
            unsafe {
                let part = if along {
                    decoded.fill(from, some.clone(), from.stride, values.clone(), decode);
                    decoded.lines(some.len(), 2 * RUN, 1)
                } else {
                    decoded.fill(from, values.clone(), from.k_stride, some.clone(), decode);
                    decoded.lines(some.len(), 1, 2 * RUN)
                };
                pack(part, 0..some.len(), 0..values.len(), Panels { data, ..to });
            }
        }
    }
}

/// k is contiguous in memory: vectors along k, transposed in registers.
#[inline(always)]
unsafe fn pack_along<E: Engine, S: Storage>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
    let lanes = E::V::LANES;
    let whole = lanes * E::K_PER_UNIT;
    let mut panel = to.data;
    for first in lines.clone().step_by(to.width) {
        for group in (0..to.width).step_by(lanes) {
            let start = first + group;
            let valid = lines.end.min(first + to.width).saturating_sub(start).min(lanes);
            if valid == 0 {
                break;
            }
            let mut k_at = k.start;
            if S::BLOCK > 1 && from.stride.is_multiple_of(S::BLOCK) && k.start.is_multiple_of(S::CHUNK) {
                k_at = k.end - k.len() % S::CHUNK;
                // SAFETY: lines `start..start + valid` and these chunks exist; the panel has room for whole vectors.
                unsafe {
                    let out = panel.add(group);
                    pack_chunks::<E, S>(from, start..start + valid, k.start..k_at, out, to.width);
                }
            }
            while k_at < k.end {
                let left = k.end - k_at;
                // SAFETY: lines `start..start + valid` and k from `k_at` on exist; the panel has room for whole
                // vectors after its last unit.
                unsafe {
                    let mut vectors = [E::V::splat(0.0); MAX_LANES];
                    let base = start * from.stride + k_at;
                    for i in 0..lanes {
                        prefetch(from.data.wrapping_add(S::offset(base + i * from.stride) + AHEAD_ALONG));
                    }
                    if left >= whole {
                        // The last line stands in for those that do not exist, so that there is one number of them.
                        for (i, vector) in vectors.iter_mut().enumerate().take(lanes) {
                            let line = i.min(valid - 1);
                            *vector = E::along(At::<S>::new(from.data, base + line * from.stride));
                        }
                    } else {
                        for (i, vector) in vectors.iter_mut().enumerate().take(valid) {
                            *vector = along_end::<E>(from, base + i * from.stride, left);
                        }
                    }
                    E::V::transpose(&mut vectors);
                    let units = left.min(whole).div_ceil(E::K_PER_UNIT);
                    let out = panel.add((k_at - k.start) / E::K_PER_UNIT * to.width + group);
                    if units == lanes {
                        for (i, vector) in vectors.iter().enumerate().take(lanes) {
                            vector.store(out.add(i * to.width));
                        }
                    } else {
                        for (i, vector) in vectors.iter().enumerate().take(units) {
                            vector.store(out.add(i * to.width));
                        }
                    }
                }
                k_at += whole;
            }
        }
        panel = panel.wrapping_add(to.stride);
    }
}

/// Units of [`MAX_LANES`] lines, or fewer, of a chunk of each.
#[repr(align(64))]
struct Units([f32; MAX_LANES * MAX_CHUNK]);

/// Whole chunks of a vector's lanes of lines at most: each block's scales are read once, and its elements a chunk at a time.
///
/// # Safety
/// The machine has the engine's instruction set; the lines begin with a block each, and the panel has room from `to` on.
#[inline(always)]
unsafe fn pack_chunks<E: Engine, S: Storage>(
    from: Lines,
    lines: Range<usize>,
    k: Range<usize>,
    mut to: *mut f32,
    width: usize,
) {
    let lanes = E::V::LANES;
    let whole = lanes * E::K_PER_UNIT;
    let mut scales = [const { MaybeUninit::<S::Scales<E::V>>::uninit() }; MAX_LANES];
    let mut units = Units([0.0; MAX_LANES * MAX_CHUNK]);
    let units = units.0.as_mut_ptr();
    for k_at in k.clone().step_by(S::CHUNK) {
        let at = k_at % S::BLOCK;
        // SAFETY: the chunks exist, scales are those of their blocks, and the units of `lanes` lines fit in their memory.
        unsafe {
            for (i, scales) in scales.iter_mut().enumerate().take(lines.len()) {
                let index = (lines.start + i) * from.stride + k_at;
                let place = S::place(from.data, index);
                prefetch(
                    from.data
                        .wrapping_add(S::offset(index) + at * S::offset(S::BLOCK) / S::BLOCK + AHEAD_ALONG),
                );
                if at == 0 || k_at == k.start {
                    scales.write(S::scales(place));
                }
                let mut vectors = [E::V::splat(0.0); MAX_VECTORS];
                S::chunk(place, at, scales.assume_init_ref(), &mut vectors);
                for (j, at) in (0..S::CHUNK).step_by(whole).enumerate() {
                    let vector = E::along(Read { vectors: &vectors, at, bf16: None });
                    vector.store(units.add((j * lanes + i) * lanes));
                }
            }
            for square in 0..S::CHUNK / whole {
                let mut vectors = [E::V::splat(0.0); MAX_LANES];
                for (i, vector) in vectors.iter_mut().enumerate().take(lanes) {
                    *vector = E::V::load(units.add((square * lanes + i) * lanes));
                }
                E::V::transpose(&mut vectors);
                for vector in vectors.iter().take(lanes) {
                    vector.store(to);
                    to = to.wrapping_add(width);
                }
            }
        }
    }
}

/// A vector of the units of `left` values of k from element `index` on, with any stride; zero after them.
#[inline(always)]
pub(super) unsafe fn along_end<E: Engine>(from: Lines, index: usize, left: usize) -> E::V {
    let mut values = [0.0f32; MAX_ALONG];
    for (i, value) in values.iter_mut().enumerate().take(left) {
        // SAFETY: the elements exist.
        *value = unsafe { storage::element(from.dtype, from.data, index + i * from.k_stride) };
    }
    // SAFETY: the array holds a vector of units.
    unsafe { E::along(At::<storage::F32>::new(values.as_ptr().cast(), 0)) }
}

/// Lines are neighbours in memory: vectors across them, one unit at a time.
#[inline(always)]
unsafe fn pack_across<E: Engine, S: Storage>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
    let lanes = E::V::LANES;
    // Panels whose vectors all lie inside the matrix.
    let vectors_end = |first: usize| first + to.width.next_multiple_of(lanes);
    let whole_panels =
        lines.clone().step_by(to.width).take_while(|first| vectors_end(*first) <= from.count).count();
    let ends = lines.start + whole_panels * to.width;
    let ahead = (AHEAD_ACROSS / (S::offset(lines.len()) + 64)).max(2);
    for (unit, k_at) in k.clone().step_by(E::K_PER_UNIT).enumerate() {
        let row = k_at * from.k_stride;
        let second = (k_at + 1 < k.end).then_some(row + from.k_stride);
        // SAFETY: rows of k exist, vectors of whole panels lie inside them, and panels have room for whole vectors.
        unsafe {
            let mut out = to.data.add(unit * to.width);
            let mut first = lines.start;
            for value in 0..E::K_PER_UNIT {
                let row = (k_at + value + ahead) * from.k_stride;
                let (mut p, end) = (S::offset(row + lines.start), S::offset(row + lines.end));
                while p < end {
                    prefetch(from.data.wrapping_add(p));
                    p += 64;
                }
            }
            while first < ends {
                for group in (0..to.width).step_by(lanes) {
                    let at = first + group;
                    E::across::<S>(from.data, row + at, second.map(|row| row + at)).store(out.add(group));
                }
                first += to.width;
                out = out.wrapping_add(to.stride);
            }
        }
    }
    if ends < lines.end {
        let to = Panels { data: to.data.wrapping_add(whole_panels * to.stride), ..to };
        // SAFETY: as for this function.
        unsafe { pack_any::<E>(from, ends..lines.end, k, to) }
    }
}

/// Any strides, element by element.
#[inline(always)]
unsafe fn pack_any<E: Engine>(from: Lines, lines: Range<usize>, k: Range<usize>, to: Panels) {
    let lanes = E::V::LANES;
    let mut panel = to.data;
    for first in lines.clone().step_by(to.width) {
        let end = lines.end.min(first + to.width);
        for (unit, k_at) in k.clone().step_by(E::K_PER_UNIT).enumerate() {
            for group in (first..end).step_by(lanes) {
                let mut values = [[0.0f32; MAX_LANES]; 2];
                for (i, values) in values.iter_mut().enumerate().take(k.end.min(k_at + E::K_PER_UNIT) - k_at)
                {
                    for (line, value) in (group..end).zip(values).take(lanes) {
                        let index = line * from.stride + (k_at + i) * from.k_stride;
                        // SAFETY: the element exists.
                        *value = unsafe { storage::element(from.dtype, from.data, index) };
                    }
                }
                // SAFETY: the arrays hold a vector each; the panel has room for whole vectors.
                unsafe {
                    let units = E::across::<storage::F32>(values.as_ptr().cast(), 0, Some(MAX_LANES));
                    units.store(panel.add(unit * to.width + group - first));
                }
            }
        }
        panel = panel.wrapping_add(to.stride);
    }
}
