//! Element-wise kernels: the driver that cuts, widens and narrows, and fill, add and scale on it.

use super::column_sums::add_assign;
use super::simd::per_isa;
use super::split::{SharedFloats, for_each_part};
use super::storage::{Floats, FloatsMut, Tile, tiles};
use super::{Exec, PIECE, rows_per_task};
use crate::Rounding;

/// An input of an element-wise kernel.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Input<'a> {
    /// Memory of its own.
    Apart(Floats<'a>),
    /// The memory of the output of that number, as it was before.
    InPlace(usize),
}

/// Calls `body(inputs, outputs)` on tiles of f32 values. All inputs and outputs have the same number of elements.
pub(super) fn for_each_tile<const I: usize, const O: usize>(
    exec: Exec<'_>,
    inputs: [Input<'_>; I],
    outputs: [FloatsMut<'_>; O],
    body: impl Fn([&[f32]; I], [&mut [f32]; O]) + Sync,
) {
    let elements = outputs.first().map_or(0, FloatsMut::len);
    let outputs = outputs.map(|out| SharedFloats::new(out, PIECE));
    for_each_part(exec, elements.div_ceil(PIECE), outputs, |task, mut outputs, _| {
        let (first, n) = (task * PIECE, outputs.first().map_or(0, FloatsMut::len));
        let mut in_tiles = Tile::array::<I>();
        let mut out_tiles = Tile::array::<O>();
        for range in tiles(n) {
            let mut sources = inputs.iter();
            let x = in_tiles.each_mut().map(|tile| match sources.next() {
                Some(Input::Apart(floats)) => {
                    floats.load(exec.simd, first + range.start..first + range.end, tile)
                }
                Some(Input::InPlace(output)) => {
                    let x = &mut tile.0[..range.len()];
                    outputs[*output].as_floats().copy_to(exec.simd, range.clone(), x);
                    x
                }
                None => &[],
            });
            let mut targets = out_tiles.iter_mut();
            let out = outputs.each_mut().map(|out| match targets.next() {
                Some(tile) => out.target(range.clone(), tile),
                None => &mut [],
            });
            body(x, out);
            for (out, tile) in outputs.iter_mut().zip(&out_tiles) {
                out.store(exec.simd, range.clone(), tile);
            }
        }
    });
}

/// out = value
pub(in crate::cpu) fn fill(exec: Exec<'_>, out: FloatsMut<'_>, value: f32) {
    for_each_tile(exec, [], [out], |[], [out]| out.fill(value));
}

/// out = a + b
pub(in crate::cpu) fn add(exec: Exec<'_>, a: Input<'_>, b: Input<'_>, out: FloatsMut<'_>) {
    for_each_tile(exec, [a, b], [out], |[a, b], [out]| add_tile(exec.simd, a, b, out));
}

/// out += each of the terms in turn, of which each has as many elements.
pub(in crate::cpu) fn accumulate_all(
    exec: Exec<'_>,
    terms: Floats<'_>,
    out: FloatsMut<'_>,
    rounding: impl Fn(u64) -> Rounding + Sync,
) {
    let each = out.len().max(1);
    for_each_part(exec, out.len().div_ceil(PIECE), SharedFloats::new(out, PIECE), |task, mut out, _| {
        let first = task * PIECE;
        let [mut x_tile, mut out_tile] = Tile::array();
        for range in tiles(out.len()) {
            let place = first + range.start;
            for (term, start) in (0..).zip((0..terms.len()).step_by(each)) {
                let x = terms.load(exec.simd, start + place..start + first + range.end, &mut x_tile);
                let add = |out: &mut [f32]| add_assign(exec.simd, x, out);
                out.modify(exec.simd, range.clone(), &mut out_tile, rounding(term), place, add);
            }
        }
    });
}

/// out (+)= row, for every row of out.
pub(in crate::cpu) fn add_rows(exec: Exec<'_>, row: Floats<'_>, out: FloatsMut<'_>, accumulate: bool) {
    let columns = row.len();
    let task_rows = rows_per_task(columns);
    let tasks = out.len().div_ceil(task_rows * columns.max(1));
    for_each_part(exec, tasks, SharedFloats::new(out, task_rows * columns), |_, mut out, _| {
        let [mut row_tile, mut out_tile] = Tile::array();
        for index in 0..out.len() / columns {
            let mut out = out.row(index, columns);
            for range in tiles(columns) {
                let row = row.load(exec.simd, range.clone(), &mut row_tile);
                if accumulate {
                    add_assign(exec.simd, row, out.current(exec.simd, range.clone(), &mut out_tile));
                } else {
                    out.target(range.clone(), &mut out_tile).copy_from_slice(row);
                }
                out.store(exec.simd, range, &out_tile);
            }
        }
    });
}

/// x *= factor
pub(in crate::cpu) fn scale(exec: Exec<'_>, x: FloatsMut<'_>, factor: f32) {
    let tasks = x.len().div_ceil(PIECE);
    for_each_part(exec, tasks, SharedFloats::new(x, PIECE), |_, mut x, _| {
        let mut tile = Tile::new();
        for range in tiles(x.len()) {
            scale_tile(exec.simd, x.current(exec.simd, range.clone(), &mut tile), factor);
            x.store(exec.simd, range, &tile);
        }
    });
}

per_isa! {
    fn add_tile(a: &[f32], b: &[f32], out: &mut [f32]) = add_body
}

#[inline(always)]
fn add_body<const FMA: bool>(a: &[f32], b: &[f32], out: &mut [f32]) {
    for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
        *out = a + b;
    }
}

per_isa! {
    fn scale_tile(x: &mut [f32], factor: f32) = scale_body
}

#[inline(always)]
fn scale_body<const FMA: bool>(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}
