//! Writing keys and values into a cache: rounded, or quantised a head at a time in blocks of 32.
//!
//! Codes are found with the scale and minimum as they are stored, rounded to f16, so that their rounding costs nothing.

use half::{bf16, f16};

use super::simd::per_isa;
use super::split::{Shared, Split};
use super::storage::{Floats, FloatsMut};
use super::{Exec, rows_per_task};
use crate::{DType, Rounding};

/// Elements of a block of any of the types.
const BLOCK: usize = 32;

/// A cache to write to, as it is stored.
pub(in crate::cpu) struct Cache<'a> {
    pub dtype: DType,
    pub rows: usize,
    pub bytes: &'a mut [u8],
}

/// Row `place(n)` of the cache = row n of x, `rows` of them, heads of `head_dim` in whole blocks.
///
/// # Safety
/// The places of different rows differ.
pub(in crate::cpu) unsafe fn write(
    exec: Exec<'_>,
    x: Floats<'_>,
    cache: Cache<'_>,
    rows: usize,
    place: impl Fn(usize) -> usize + Sync,
    head_dim: usize,
) {
    if rows == 0 || cache.rows == 0 || head_dim == 0 {
        return;
    }
    let columns = x.len() / rows;
    let row_bytes = cache.bytes.len() / cache.rows;
    let task_rows = rows_per_task(columns);
    let out = Shared::new(cache.bytes, row_bytes);
    exec.pool.run(rows.div_ceil(task_rows), &|task, _| {
        for row in task * task_rows..rows.min((task + 1) * task_rows) {
            // SAFETY: each row of x is one task's, and the caller vouches that its place is no other's.
            let out = unsafe { out.part(place(row)) };
            write_row(exec, x.row(row, columns), cache.dtype, head_dim, out);
        }
    });
}

fn write_row(exec: Exec<'_>, x: Floats<'_>, dtype: DType, head_dim: usize, out: &mut [u8]) {
    // Rows of plain types are as aligned as their tensor.
    let plain = match dtype {
        DType::F32 => bytemuck::try_cast_slice_mut(out).ok().map(FloatsMut::F32),
        DType::Bf16 => bytemuck::try_cast_slice_mut::<u8, bf16>(out).ok().map(FloatsMut::Bf16),
        DType::F16 => bytemuck::try_cast_slice_mut::<u8, f16>(out).ok().map(FloatsMut::F16),
        _ => None,
    };
    if let Some(mut plain) = plain {
        return plain.convert(exec.simd, x, Rounding::Nearest, 0);
    }
    let block_bytes = dtype.block_bytes() as usize;
    let head_bytes = head_dim.div_ceil(BLOCK) * block_bytes;
    for (head, out) in out.chunks_exact_mut(head_bytes).enumerate() {
        for (start, out) in (0..head_dim).step_by(BLOCK).zip(out.chunks_exact_mut(block_bytes)) {
            let count = BLOCK.min(head_dim - start);
            let at = head * head_dim + start;
            let mut values = [0.0; BLOCK];
            x.copy_to(exec.simd, at..at + count, &mut values[..count]);
            // What fills up does not widen the range.
            let last = values[count - 1];
            values[count..].fill(last);
            match dtype {
                DType::Q8_0 => q8_0(exec.simd, &values, out),
                DType::Q4_0 => q4_0(exec.simd, &values, out),
                _ => q4_1(exec.simd, &values, out),
            }
        }
    }
}

per_isa! {
    /// f16 scale, then signed bytes.
    fn q8_0(values: &[f32; BLOCK], out: &mut [u8]) = q8_0_body
}

#[inline(always)]
fn q8_0_body<const FMA: bool>(values: &[f32; BLOCK], out: &mut [u8]) {
    let scale = stored(out, 0, largest(values) / 127.0);
    let factor = reciprocal(scale);
    for (code, value) in out[2..].iter_mut().zip(values) {
        *code = code_of(*value * factor, -127.0, 127.0) as i8 as u8;
    }
}

per_isa! {
    /// f16 scale, then 4-bit codes less 8.
    fn q4_0(values: &[f32; BLOCK], out: &mut [u8]) = q4_0_body
}

#[inline(always)]
fn q4_0_body<const FMA: bool>(values: &[f32; BLOCK], out: &mut [u8]) {
    // The value that is furthest from 0 gets the code -8, which has no counterpart.
    let furthest = values.iter().fold(0.0f32, |best, x| if x.abs() > best.abs() { *x } else { best });
    let broken = values.iter().sum::<f32>() * 0.0;
    let scale = stored(out, 0, furthest / -8.0 + broken);
    let factor = reciprocal(scale);
    nibbles(&mut out[2..], |i| code_of(values[i] * factor, -8.0, 7.0) + 8);
}

per_isa! {
    /// f16 scale and minimum, then 4-bit codes.
    fn q4_1(values: &[f32; BLOCK], out: &mut [u8]) = q4_1_body
}

#[inline(always)]
fn q4_1_body<const FMA: bool>(values: &[f32; BLOCK], out: &mut [u8]) {
    let broken = values.iter().sum::<f32>() * 0.0;
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let minimum = stored(out, 1, low + broken);
    let scale = stored(out, 0, (high - minimum) / 15.0 + broken);
    let factor = reciprocal(scale);
    nibbles(&mut out[4..], |i| code_of((values[i] - minimum) * factor, 0.0, 15.0));
}

/// The largest magnitude; NaN where there is a NaN or an infinity.
#[inline(always)]
fn largest(values: &[f32; BLOCK]) -> f32 {
    let broken = values.iter().sum::<f32>() * 0.0;
    values.iter().fold(0.0f32, |best, x| best.max(x.abs())) + broken
}

/// Stores an f16, number `place` of the block, and returns its value. What is too large for it is held at the largest.
#[inline(always)]
fn stored(out: &mut [u8], place: usize, x: f32) -> f32 {
    let limit = f16::MAX.to_f32();
    let narrow = f16::from_f32(if x.is_nan() { x } else { x.clamp(-limit, limit) });
    out[2 * place..2 * place + 2].copy_from_slice(&narrow.to_le_bytes());
    narrow.to_f32()
}

/// 1 / scale, and 0 for a scale of 0, with which every code stands for the same value.
#[inline(always)]
fn reciprocal(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The nearest code between two; 0 for NaN.
#[inline(always)]
fn code_of(x: f32, low: f32, high: f32) -> i32 {
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
    const MAGIC: f32 = 12_582_912.0;
    ((x.clamp(low, high) + MAGIC) - MAGIC) as i32
}

/// Codes of 4 bits: element i in the low half of byte i, element i + 16 in its high half.
#[inline(always)]
fn nibbles(out: &mut [u8], code: impl Fn(usize) -> i32) {
    for (i, byte) in out.iter_mut().enumerate().take(BLOCK / 2) {
        *byte = code(i) as u8 | (code(i + BLOCK / 2) as u8) << 4;
    }
}
