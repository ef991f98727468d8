//! Blocks of 256 values whose groups have scales of a few bits. Scales are searched: of several candidates, each improved
//! by least squares, the one with the smallest weighted error is taken. The layouts are ggml's; the search is this
//! engine's own, so that files differ in bits from those of llama.cpp, but not in meaning.

use half::f16;

/// Values in a block.
const BLOCK: usize = 256;

/// A group's scale and minimum: value = scale * code - minimum.
#[derive(Clone, Copy, Default)]
struct Affine {
    scale: f32,
    minimum: f32,
}

/// How much errors at each value matter: large values more, small ones still.
fn weights(values: &[f32], out: &mut [f32]) {
    let mean_square = values.iter().map(|x| x * x).sum::<f32>() / values.len().max(1) as f32;
    let base = mean_square.sqrt();
    for (out, value) in out.iter_mut().zip(values) {
        *out = base + value.abs();
    }
}

/// Scale and minimum, neither below zero, for codes of 0 to `most`.
fn affine(values: &[f32], weights: &[f32], most: f32) -> Affine {
    let low = values.iter().fold(0.0f32, |a, x| a.min(*x));
    let high = values.iter().fold(f32::NEG_INFINITY, |a, x| a.max(*x));
    if high <= low {
        return Affine { scale: 0.0, minimum: -low };
    }
    let mut best = Affine { scale: (high - low) / most, minimum: -low };
    let mut least = error(values, weights, most, best);
    for step in 0..=20 {
        let by = (most - 1.0 + 0.1 * step as f32) / (high - low);
        let found = fitted(values, weights, |x| ((x - low) * by).round().clamp(0.0, most));
        let error = error(values, weights, most, found);
        if error < least {
            (best, least) = (found, error);
        }
    }
    best
}

/// The scale and minimum with the least squares error for given codes.
fn fitted(values: &[f32], weights: &[f32], code: impl Fn(f32) -> f32) -> Affine {
    let (mut w, mut wc, mut wcc, mut wx, mut wcx) = (0.0f32, 0.0f32, 0.0f32, 0.0f32, 0.0f32);
    for (x, weight) in values.iter().zip(weights) {
        let c = code(*x);
        w += weight;
        wc += weight * c;
        wcc += weight * c * c;
        wx += weight * x;
        wcx += weight * c * x;
    }
    let determinant = w * wcc - wc * wc;
    if determinant > 0.0 {
        let scale = (w * wcx - wx * wc) / determinant;
        let minimum = -(wcc * wx - wc * wcx) / determinant;
        if scale > 0.0 && minimum >= 0.0 {
            return Affine { scale, minimum };
        }
    }
    // The minimum would be on the wrong side of zero.
    Affine { scale: if wcc > 0.0 { (wcx / wcc).max(0.0) } else { 0.0 }, minimum: 0.0 }
}

fn error(values: &[f32], weights: &[f32], most: f32, Affine { scale, minimum }: Affine) -> f32 {
    let by = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let one = |(x, weight): (&f32, &f32)| {
        let difference = scale * ((x + minimum) * by).round().clamp(0.0, most) - minimum - x;
        weight * difference * difference
    };
    values.iter().zip(weights).map(one).sum()
}

fn put_f16(x: f32, out: &mut [u8]) -> f32 {
    let half = f16::from_f32(x);
    out.copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// `x / unit` as a whole number up to `most`.
fn units(x: f32, unit: f32, most: f32) -> u8 {
    if unit > 0.0 { (x / unit).round().clamp(0.0, most) as u8 } else { 0 }
}

pub(super) fn q4_k(values: &[f32], out: &mut [u8]) {
    const GROUP: usize = 32;
    let mut groups = [Affine::default(); BLOCK / GROUP];
    for (group, values) in groups.iter_mut().zip(values.chunks_exact(GROUP)) {
        let mut weight = [0.0; GROUP];
        weights(values, &mut weight);
        *group = affine(values, &weight, 15.0);
    }
    let most = |of: fn(&Affine) -> f32| groups.iter().map(of).fold(0.0f32, f32::max);
    let (head, codes) = out.split_at_mut(16);
    let scale = put_f16(most(|group| group.scale) / 63.0, &mut head[..2]);
    let minimum = put_f16(most(|group| group.minimum) / 63.0, &mut head[2..4]);
    let scales = groups.map(|group| units(group.scale, scale, 63.0));
    let minima = groups.map(|group| units(group.minimum, minimum, 63.0));
    let packed = &mut head[4..];
    for i in 0..4 {
        packed[i] = scales[i] | scales[i + 4] >> 4 << 6;
        packed[i + 4] = minima[i] | minima[i + 4] >> 4 << 6;
        packed[i + 8] = scales[i + 4] & 15 | minima[i + 4] << 4;
    }
    let code = |group: usize, x: f32| {
        units(x + minimum * f32::from(minima[group]), scale * f32::from(scales[group]), 15.0)
    };
    for (pair, (values, codes)) in
        values.chunks_exact(2 * GROUP).zip(codes.chunks_exact_mut(GROUP)).enumerate()
    {
        let (low, high) = values.split_at(GROUP);
        for ((low, high), out) in low.iter().zip(high).zip(codes) {
            *out = code(2 * pair, *low) | code(2 * pair + 1, *high) << 4;
        }
    }
}

/// The scale, of either sign, for codes of -32 to 31.
fn symmetric(values: &[f32], weights: &[f32]) -> f32 {
    let far = values.iter().fold(0.0f32, |far, x| if x.abs() > far.abs() { *x } else { far });
    if far == 0.0 {
        return 0.0;
    }
    let mut best = (0.0, f32::INFINITY);
    for step in -9..=9 {
        let by = -(32.0 + 0.1 * step as f32) / far;
        let (mut cc, mut cx) = (0.0f32, 0.0f32);
        for (x, weight) in values.iter().zip(weights) {
            let c = (x * by).round().clamp(-32.0, 31.0);
            cc += weight * c * c;
            cx += weight * c * x;
        }
        let scale = if cc > 0.0 { cx / cc } else { 0.0 };
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let one = |(x, weight): (&f32, &f32)| {
            let difference = scale * (x * inverse).round().clamp(-32.0, 31.0) - x;
            weight * difference * difference
        };
        let error: f32 = values.iter().zip(weights).map(one).sum();
        if error < best.1 {
            best = (scale, error);
        }
    }
    best.0
}

pub(super) fn q6_k(values: &[f32], out: &mut [u8]) {
    const GROUP: usize = 16;
    let mut groups = [0.0f32; BLOCK / GROUP];
    for (group, values) in groups.iter_mut().zip(values.chunks_exact(GROUP)) {
        let mut weight = [0.0; GROUP];
        weights(values, &mut weight);
        *group = symmetric(values, &weight);
    }
    let far = groups.iter().fold(0.0f32, |far, x| if x.abs() > far.abs() { *x } else { far });
    let scale = put_f16(far / -128.0, &mut out[208..210]);
    let scales =
        groups.map(|group| if scale == 0.0 { 0 } else { (group / scale).round().clamp(-128.0, 127.0) as i8 });
    for (out, scale) in out[192..208].iter_mut().zip(scales) {
        *out = scale.cast_unsigned();
    }
    let mut codes = [0u8; BLOCK];
    for (i, (code, value)) in codes.iter_mut().zip(values).enumerate() {
        let unit = scale * f32::from(scales[i / GROUP]);
        let whole = if unit == 0.0 { 0.0 } else { (value / unit).round().clamp(-32.0, 31.0) };
        *code = (whole + 32.0) as u8;
    }
    // Of each half, lower 4 bits: runs 0 and 2, 1 and 3 of 32 share bytes; upper 2 bits: all four runs do.
    for (half, codes) in codes.chunks_exact(128).enumerate() {
        for i in 0..64 {
            out[64 * half + i] = codes[i] & 15 | codes[64 + i] << 4;
        }
        for i in 0..32 {
            let upper = |run: usize| codes[32 * run + i] >> 4 << (2 * run);
            out[128 + 32 * half + i] = upper(0) | upper(1) | upper(2) | upper(3);
        }
    }
}
