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

/// Values of four bits with a power of two as scale (OCP Microscaling Formats 1.0): that of the largest magnitude over 4, so that
/// what lies between 6 and 8 times the scale becomes 6.
pub(super) fn mxfp4(values: &[f32], out: &mut [u8]) {
    /// Between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
    const LIMITS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let exponent = (largest(values).to_bits() >> 23).saturating_sub(2).min(254);
    // The inverse of 2^(exponent - 127), in two steps: it may be beyond a normal number by itself.
    let (half, rest) = (exponent / 2, exponent - exponent / 2);
    let power = |exponent: u32| f32::from_bits((127 + 63 - exponent) << 23);
    let (head, codes) = out.split_at_mut(1);
    head[0] = exponent as u8;
    let code = |x: f32| {
        let size = x.abs() * power(half) * power(rest) * 2.0;
        let code = LIMITS.iter().filter(|limit| size > **limit).count() as u8;
        if code > 0 && x < 0.0 { code | 8 } else { code }
    };
    put_nibbles(code, values, codes);
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
