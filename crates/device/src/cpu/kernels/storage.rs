//! Floats as they are stored: f32, bf16 or f16, widened to f32 and narrowed back a tile at a time.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::rounding::{Dither, narrow_nearest, narrow_stochastic, narrow_stochastic_f16};
use super::simd::{Simd, per_isa};
use crate::Rounding;

/// Elements of a tile: inputs, outputs and intermediates of a kernel stay in the first-level cache.
pub(super) const TILE: usize = 1024;

/// A tile of f32 values on the stack.
#[repr(align(64))]
pub(in crate::cpu) struct Tile(pub [f32; TILE]);

impl Tile {
    pub fn new() -> Tile {
        Tile([0.0; TILE])
    }

    pub fn array<const N: usize>() -> [Tile; N] {
        std::array::from_fn(|_| Tile::new())
    }
}

/// The ranges of at most [`TILE`] elements that `0..n` falls into.
pub(super) fn tiles(n: usize) -> impl Iterator<Item = Range<usize>> {
    pieces(n, TILE)
}

fn pieces(n: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(most).map(move |start| start..n.min(start + most))
}

/// Cuts a thread's scratch into `N` buffers of `len` elements, empty ones where it is too short for all.
pub(super) fn buffers<const N: usize>(scratch: &mut [u8], len: usize) -> [&mut [f32]; N] {
    let mut rest: &mut [f32] = bytemuck::try_cast_slice_mut(scratch).unwrap_or_default();
    let len = if len.saturating_mul(N) <= rest.len() { len } else { 0 };
    std::array::from_fn(|_| {
        let (buffer, others) = std::mem::take(&mut rest).split_at_mut(len);
        rest = others;
        buffer
    })
}

/// Ranges in which to read rows of `columns` elements: all at once where no input has to be widened, else tiles.
pub(super) fn spans<const N: usize>(
    inputs: [Floats<'_>; N],
    columns: usize,
) -> impl Iterator<Item = Range<usize>> {
    let plain = inputs.iter().all(|x| matches!(x, Floats::F32(_)));
    pieces(columns, if plain { columns.max(1) } else { TILE })
}

/// Elements to read.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Floats<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

/// Elements to write.
pub(in crate::cpu) enum FloatsMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

impl<'a> Floats<'a> {
    pub fn len(&self) -> usize {
        match self {
            Floats::F32(x) => x.len(),
            Floats::Bf16(x) => x.len(),
            Floats::F16(x) => x.len(),
        }
    }

    /// Row number `row` of rows of `columns` elements.
    pub fn row(&self, row: usize, columns: usize) -> Floats<'a> {
        self.slice(row * columns..(row + 1) * columns)
    }

    /// The elements of `range`.
    pub fn slice(&self, range: Range<usize>) -> Floats<'a> {
        match self {
            Floats::F32(x) => Floats::F32(&x[range]),
            Floats::Bf16(x) => Floats::Bf16(&x[range]),
            Floats::F16(x) => Floats::F16(&x[range]),
        }
    }

    /// The same elements, widened once and for all where `buffer` has room for them.
    pub fn widened<'t>(self, simd: Simd, buffer: &'t mut [f32]) -> Floats<'t>
    where
        'a: 't,
    {
        match buffer.get_mut(..self.len()) {
            Some(buffer) if !matches!(self, Floats::F32(_)) => {
                self.copy_to(simd, 0..buffer.len(), buffer);
                Floats::F32(buffer)
            }
            _ => self,
        }
    }

    /// Copies the elements of `range`, as f32.
    pub fn copy_to(&self, simd: Simd, range: Range<usize>, out: &mut [f32]) {
        match self {
            Floats::F32(x) => out.copy_from_slice(&x[range]),
            Floats::Bf16(x) => widen(simd, &x[range], out),
            Floats::F16(x) => x[range].convert_to_f32_slice(out),
        }
    }

    /// The elements of `range` as f32: where they lie, if they are, or widened into `tile`.
    pub fn load<'t>(&self, simd: Simd, range: Range<usize>, tile: &'t mut Tile) -> &'t [f32]
    where
        'a: 't,
    {
        if let Floats::F32(x) = self {
            return &x[range];
        }
        let out = &mut tile.0[..range.len()];
        self.copy_to(simd, range, out);
        out
    }
}

impl<'a> FloatsMut<'a> {
    pub fn len(&self) -> usize {
        self.as_floats().len()
    }

    pub fn as_floats(&self) -> Floats<'_> {
        match self {
            FloatsMut::F32(x) => Floats::F32(x),
            FloatsMut::Bf16(x) => Floats::Bf16(x),
            FloatsMut::F16(x) => Floats::F16(x),
        }
    }

    /// Where the results of `range` go: the elements themselves, or `tile`, to be stored afterwards.
    pub fn target<'t>(&'t mut self, range: Range<usize>, tile: &'t mut Tile) -> &'t mut [f32] {
        match self {
            FloatsMut::F32(x) => &mut x[range],
            _ => &mut tile.0[..range.len()],
        }
    }

    /// Like [`target`](Self::target), holding the present values.
    pub fn current<'t>(&'t mut self, simd: Simd, range: Range<usize>, tile: &'t mut Tile) -> &'t mut [f32] {
        if !matches!(self, FloatsMut::F32(_)) {
            self.as_floats().load(simd, range.clone(), tile);
        }
        self.target(range, tile)
    }

    /// Lets `change` rewrite the elements of `range` as f32, where they lie or in `tile`, and stores what it left. The
    /// first of them has index `first` in the whole tensor.
    pub fn modify(
        &mut self,
        simd: Simd,
        range: Range<usize>,
        tile: &mut Tile,
        rounding: Rounding,
        first: usize,
        change: impl FnOnce(&mut [f32]),
    ) {
        if let FloatsMut::F32(x) = self {
            return change(&mut x[range]);
        }
        let values = &mut tile.0[..range.len()];
        self.as_floats().copy_to(simd, range.clone(), values);
        change(values);
        self.assign(simd, range, values, rounding, first);
    }

    /// The elements of `range`.
    pub fn slice(&mut self, range: Range<usize>) -> FloatsMut<'_> {
        match self {
            FloatsMut::F32(x) => FloatsMut::F32(&mut x[range]),
            FloatsMut::Bf16(x) => FloatsMut::Bf16(&mut x[range]),
            FloatsMut::F16(x) => FloatsMut::F16(&mut x[range]),
        }
    }

    /// Row number `row` of rows of `columns` elements.
    pub fn row(&mut self, row: usize, columns: usize) -> FloatsMut<'_> {
        self.slice(row * columns..(row + 1) * columns)
    }

    /// Stores what was put in [`target`](Self::target)'s tile, to nearest. Nothing is left to do for f32.
    pub fn store(&mut self, simd: Simd, range: Range<usize>, tile: &Tile) {
        self.narrow(simd, range.clone(), &tile.0[..range.len()]);
    }

    /// Narrows `values` to nearest. f32 elements stay as they are.
    fn narrow(&mut self, simd: Simd, range: Range<usize>, values: &[f32]) {
        match self {
            FloatsMut::F32(_) => {}
            FloatsMut::Bf16(x) => narrow_nearest(simd, values, &mut x[range]),
            FloatsMut::F16(x) => x[range].convert_from_f32_slice(values),
        }
    }

    /// Assigns `values` to the elements of `range`, the first of which has index `first` in the whole tensor.
    pub fn assign(
        &mut self,
        simd: Simd,
        range: Range<usize>,
        values: &[f32],
        rounding: Rounding,
        first: usize,
    ) {
        match (self, rounding) {
            (FloatsMut::F32(x), _) => x[range].copy_from_slice(values),
            (other, Rounding::Nearest) => other.narrow(simd, range, values),
            (other, Rounding::Stochastic { seed, first: of_tensor }) => {
                for (part, dither) in Dither::runs(seed, of_tensor.wrapping_add(first as u64), values.len()) {
                    let to = range.start + part.start..range.start + part.end;
                    match other {
                        FloatsMut::F32(_) => {}
                        FloatsMut::Bf16(x) => narrow_stochastic(simd, &values[part], &mut x[to], dither),
                        FloatsMut::F16(x) => narrow_stochastic_f16(&values[part], &mut x[to], dither),
                    }
                }
            }
        }
    }

    /// Converts all of `x`, which has as many elements; `first` is the index of the first in the whole tensor.
    pub fn convert(&mut self, simd: Simd, x: Floats<'_>, rounding: Rounding, first: usize) {
        match (self, x) {
            (FloatsMut::F32(out), Floats::F32(x)) => out.copy_from_slice(x),
            (FloatsMut::Bf16(out), Floats::Bf16(x)) => out.copy_from_slice(x),
            (FloatsMut::F16(out), Floats::F16(x)) => out.copy_from_slice(x),
            (FloatsMut::F32(out), x) => x.copy_to(simd, 0..out.len(), out),
            (out, x) => {
                let mut tile = Tile::new();
                for range in tiles(x.len()) {
                    let values = x.load(simd, range.clone(), &mut tile);
                    out.assign(simd, range.clone(), values, rounding, first + range.start);
                }
            }
        }
    }
}

per_isa! {
    /// bf16 to f32: exact.
    fn widen(x: &[bf16], out: &mut [f32]) = widen_body
}

#[inline(always)]
fn widen_body<const FMA: bool>(x: &[bf16], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}
