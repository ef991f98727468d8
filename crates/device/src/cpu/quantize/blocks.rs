//! Blocks of 32 or 64 values with one scale, and perhaps a minimum, found without a search (ggml's reference).

use half::f16;

/// Values in a block of [`DType::Int8`](crate::DType::Int8).
pub(super) const INT8_BLOCK: usize = 64;

/// The largest magnitude.
pub(super) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0f32, |most, x| most.max(x.abs()))
}

/// The value of largest magnitude, with its sign; the first of several.
fn farthest(values: &[f32]) -> f32 {
    values.iter().fold(0.0f32, |far, x| if x.abs() > far.abs() { *x } else { far })
}

fn range(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), x| (min.min(*x), max.max(*x)))
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

fn put_f16(x: f32, out: &mut [u8]) {
    out.copy_from_slice(&f16::from_f32(x).to_le_bytes());
}

/// Codes of 4 bits: the first half of the values in the lower halves of the bytes.
fn put_nibbles(codes: impl Fn(f32) -> u8, values: &[f32], out: &mut [u8]) {
    let (low, high) = values.split_at(values.len() / 2);
    for ((low, high), out) in low.iter().zip(high).zip(out) {
        *out = codes(*low) & 15 | codes(*high) << 4;
    }
}

/// The same with the fifth bits in front, one after the other.
fn put_five_bits(codes: impl Fn(f32) -> u8, values: &[f32], out: &mut [u8]) {
    let (fifth, rest) = out.split_at_mut(4);
    let mut bits = 0u32;
    for (i, value) in values.iter().enumerate().take(32) {
        bits |= u32::from(codes(*value) >> 4 & 1) << i;
    }
    fifth.copy_from_slice(&bits.to_le_bytes());
    put_nibbles(codes, values, rest);
}

pub(super) fn q8_0(values: &[f32], out: &mut [u8]) {
    let scale = largest(values) / 127.0;
    let by = inverse(scale);
    let (head, codes) = out.split_at_mut(2);
    put_f16(scale, head);
    for (value, code) in values.iter().zip(codes) {
        *code = ((value * by).round() as i8).cast_unsigned();
    }
}

pub(super) fn q4_0(values: &[f32], out: &mut [u8]) {
    let scale = farthest(values) / -8.0;
    let by = inverse(scale);
    let (head, codes) = out.split_at_mut(2);
    put_f16(scale, head);
    put_nibbles(|x| (x * by + 8.5).clamp(0.0, 15.0) as u8, values, codes);
}

pub(super) fn q4_1(values: &[f32], out: &mut [u8]) {
    let (min, max) = range(values);
    let scale = (max - min) / 15.0;
    let by = inverse(scale);
    let (head, codes) = out.split_at_mut(4);
    put_f16(scale, &mut head[..2]);
    put_f16(min, &mut head[2..]);
    put_nibbles(|x| ((x - min) * by + 0.5).clamp(0.0, 15.0) as u8, values, codes);
}

pub(super) fn q5_0(values: &[f32], out: &mut [u8]) {
    let scale = farthest(values) / -16.0;
    let by = inverse(scale);
    let (head, codes) = out.split_at_mut(2);
    put_f16(scale, head);
    put_five_bits(|x| (x * by + 16.5).clamp(0.0, 31.0) as u8, values, codes);
}

pub(super) fn q5_1(values: &[f32], out: &mut [u8]) {
    let (min, max) = range(values);
    let scale = (max - min) / 31.0;
    let by = inverse(scale);
    let (head, codes) = out.split_at_mut(4);
    put_f16(scale, &mut head[..2]);
    put_f16(min, &mut head[2..]);
    put_five_bits(|x| ((x - min) * by + 0.5).clamp(0.0, 31.0) as u8, values, codes);
}

pub(super) fn int8(values: &[f32], out: &mut [u8]) {
    int8_scaled(values, int8_scale(largest(values)), out);
}

/// The scale of values up to `magnitude`.
pub(super) fn int8_scale(magnitude: f32) -> f32 {
    magnitude * (1.0 / 127.0)
}

pub(super) fn int8_scaled(values: &[f32], scale: f32, out: &mut [u8]) {
    let (head, codes) = out.split_at_mut(4);
    head.copy_from_slice(&scale.to_le_bytes());
    int8_codes(values, scale, codes);
}

pub(super) fn int8_codes(values: &[f32], scale: f32, codes: &mut [u8]) {
    let by = inverse(scale);
    for (value, code) in values.iter().zip(codes) {
        *code = ((value * by).round_ties_even().clamp(-127.0, 127.0) as i8).cast_unsigned();
    }
}
