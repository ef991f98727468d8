//! Normal random numbers from a counter: element i of a tensor is the same whoever computes it.

use super::rounding::Dither;
use super::simd::{mul_add, per_isa};
use super::split::{Shared, for_each_part};
use super::{Exec, PIECE};

/// out = normal numbers of mean 0 and this standard deviation (Box and Muller 1958).
pub(in crate::cpu) fn random_normal(exec: Exec<'_>, out: &mut [f32], std: f32, seed: u64) {
    for_each_part(exec, out.len().div_ceil(PIECE), Shared::new(out, PIECE), |task, out, _| {
        let first = (task * PIECE) as u64;
        let sources = [seed, !seed].map(|seed| Dither::new(seed, first));
        fill(exec.simd, out, std, sources);
    });
}

per_isa! {
    fn fill(out: &mut [f32], std: f32, sources: [Dither; 2]) = fill_body
}

#[inline(always)]
fn fill_body<const FMA: bool>(out: &mut [f32], std: f32, [radius, angle]: [Dither; 2]) {
    for (i, out) in out.iter_mut().enumerate() {
        // 24 bits each: above 0 and at most 1, and from -1/2 to 1/2.
        let share = ((radius.word(i as u32) >> 8) + 1) as f32 / 16_777_216.0;
        let turn = (angle.word(i as u32) >> 8) as f32 / 16_777_216.0 - 0.5;
        *out = std * (-2.0 * ln::<FMA>(share)).sqrt() * cos_turn::<FMA>(turn);
    }
}

/// The natural logarithm of a normal number: that of the power of two, and atanh's series for the rest.
#[inline(always)]
fn ln<const FMA: bool>(x: f32) -> f32 {
    // The mantissa is taken from sqrt(1/2) to sqrt(2).
    let bits = x.to_bits().wrapping_sub(0x3f35_04f3);
    let exponent = (bits as i32 >> 23) as f32;
    let mantissa = f32::from_bits((bits & 0x007f_ffff).wrapping_add(0x3f35_04f3));
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    let mut p = 2.0 / 9.0;
    for coefficient in [2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0, 2.0] {
        p = mul_add::<FMA>(p, square, coefficient);
    }
    mul_add::<FMA>(exponent, std::f32::consts::LN_2, p * t)
}

/// cos(2 pi x) for x from -1/2 to 1/2, by its Taylor polynomial.
#[inline(always)]
fn cos_turn<const FMA: bool>(x: f32) -> f32 {
    let square = x * x;
    let mut p = -0.036_382_843;
    for coefficient in [
        0.282_005_97,
        -1.714_390_7,
        7.903_536,
        -26.426_256,
        60.244_64,
        -85.456_82,
        64.939_39,
        -19.739_21,
        1.0,
    ] {
        p = mul_add::<FMA>(p, square, coefficient);
    }
    p
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_and_cosine_are_close() {
        for i in 1..100_000u32 {
            let x = i as f32 / 100_000.0;
            assert!((ln::<false>(x) - x.ln()).abs() < 2e-6, "{x}");
            let turn = x - 0.5;
            let want = (std::f64::consts::TAU * f64::from(turn)).cos();
            assert!((f64::from(cos_turn::<false>(turn)) - want).abs() < 1e-5, "{turn}");
        }
    }
}
