//! Values as signed 8-bit codes with an f32 scale for each run of elements, and back.
//!
//! The scale is the largest magnitude over 127, so that a code is wrong by half a scale at most (the symmetric
//! absolute-maximum quantisation of LLM.int8(), Dettmers et al. 2022, over runs instead of rows).

use super::simd::per_isa;
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, FloatsMut, PIECE};

/// The largest code.
const LARGEST: f32 = 127.0;

/// codes, scales = x in runs of `block` elements.
pub(in crate::cpu) fn quantize(
    exec: Exec<'_>,
    x: Floats<'_>,
    codes: &mut [i8],
    scales: &mut [f32],
    block: usize,
) {
    find_scales(exec, x, scales, block);
    let scales = &*scales;
    let tasks = codes.len().div_ceil(PIECE);
    for_each_part(exec, tasks, Shared::new(codes, PIECE), |task, codes, _| {
        let first = task * PIECE;
        let mut tile = Tile::new();
        for_each_run(first, codes.len(), block, |range, run| {
            let scale = scales[run];
            let inverse = if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
            for part in tiles(range.len()) {
                let at = range.start + part.start..range.start + part.end;
                let x = x.load(exec.simd, first + at.start..first + at.end, &mut tile);
                encode(exec.simd, x, inverse, &mut codes[at]);
            }
        });
    });
}

/// out = codes times their scales.
pub(in crate::cpu) fn dequantize(
    exec: Exec<'_>,
    codes: &[i8],
    scales: &[f32],
    block: usize,
    out: FloatsMut<'_>,
) {
    let tasks = codes.len().div_ceil(PIECE);
    for_each_part(exec, tasks, SharedFloats::new(out, PIECE), |task, mut out, _| {
        let first = task * PIECE;
        let mut tile = Tile::new();
        for_each_run(first, out.len(), block, |range, run| {
            for part in tiles(range.len()) {
                let at = range.start + part.start..range.start + part.end;
                let codes = &codes[first + at.start..first + at.end];
                decode(exec.simd, codes, scales[run], out.target(at.clone(), &mut tile));
                out.store(exec.simd, at, &tile);
            }
        });
    });
}

/// The scale of every run. A run longer than a task's piece is looked through in pieces: a maximum has no order.
fn find_scales(exec: Exec<'_>, x: Floats<'_>, scales: &mut [f32], block: usize) {
    let runs = (PIECE / block).max(1);
    let tasks = scales.len().div_ceil(runs);
    if block <= 4 * PIECE || tasks > 1 {
        return for_each_part(exec, tasks, Shared::new(scales, runs), |task, scales, _| {
            for (i, scale) in scales.iter_mut().enumerate() {
                let start = (task * runs + i) * block;
                *scale = largest(exec, x, start..x.len().min(start + block)) / LARGEST;
            }
        });
    }
    scales.fill(largest_of_all(exec, x) / LARGEST);
}

/// The largest magnitude; not a number where one of them is none.
pub(super) fn largest_of_all(exec: Exec<'_>, x: Floats<'_>) -> f32 {
    const PARTS: usize = 64;
    let mut parts = [0.0; PARTS];
    let width = x.len().div_ceil(PARTS).max(1);
    for_each_part(exec, PARTS, Shared::new(&mut parts, 1), |task, part, _| {
        let range = x.len().min(task * width)..x.len().min((task + 1) * width);
        part.fill(largest(exec, x, range));
    });
    parts.iter().fold(0.0, |most, part| larger(most, *part))
}

/// Calls `body(range, run)` for the pieces of runs that `first..first + n` falls into; ranges count from `first`.
fn for_each_run(first: usize, n: usize, block: usize, mut body: impl FnMut(std::ops::Range<usize>, usize)) {
    let mut start = 0;
    while start < n {
        let run = (first + start) / block;
        let end = n.min((run + 1) * block - first);
        body(start..end, run);
        start = end;
    }
}

fn largest(exec: Exec<'_>, x: Floats<'_>, range: std::ops::Range<usize>) -> f32 {
    let x = x.slice(range);
    let mut tile = Tile::new();
    tiles(x.len())
        .fold(0.0, |most, part| larger(most, magnitude(exec.simd, x.load(exec.simd, part, &mut tile))))
}

/// The larger of two magnitudes; not a number where one of them is none, so that no error is hidden.
fn larger(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

per_isa! {
    fn magnitude(x: &[f32]) -> f32 = magnitude_body
}

/// Magnitudes compare like their bits, and so do those of infinities and of what is not a number.
#[inline(always)]
fn magnitude_body<const FMA: bool>(x: &[f32]) -> f32 {
    f32::from_bits(x.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff)))
}

per_isa! {
    fn encode(x: &[f32], inverse: f32, codes: &mut [i8]) = encode_body
}

/// To nearest, ties to even: adding 1.5 * 2^23 leaves the nearest integer in the low bits.
#[inline(always)]
fn encode_body<const FMA: bool>(x: &[f32], inverse: f32, codes: &mut [i8]) {
    const MAGIC: f32 = 12_582_912.0;
    for (code, x) in codes.iter_mut().zip(x) {
        let shifted = (x * inverse).clamp(-LARGEST, LARGEST) + MAGIC;
        *code = shifted.to_bits() as i8;
    }
}

per_isa! {
    fn decode(codes: &[i8], scale: f32, out: &mut [f32]) = decode_body
}

#[inline(always)]
fn decode_body<const FMA: bool>(codes: &[i8], scale: f32, out: &mut [f32]) {
    for (out, code) in out.iter_mut().zip(codes) {
        *out = f32::from(*code) * scale;
    }
}
