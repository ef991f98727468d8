//! Exponential, logistic and normal functions in plain f32 arithmetic without branches, which vectorises.
//!
//! The polynomials are Chebyshev fits made for this file; the errors stated are of the fits, and rounding adds a few
//! units in the last place.

use super::simd::mul_add;

/// e^x, held at e^87.3 above 87.3 and at 0 below -86.9: results and their reciprocals are normal numbers, for others
/// are slow. NaN for NaN. Relative error of the fit 1.1e-8.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with trailing zeros so that its products with small integers are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let held = if x > 87.3 { 87.3 } else { x };
    let shifted = mul_add::<FMA>(held, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = mul_add::<FMA>(n, -LN2_LOW, mul_add::<FMA>(n, -LN2_HIGH, held));
    let mut p = 0.001_392_625_1;
    for coefficient in [0.008_363_233, 0.041_666_554, 0.166_665_77, 0.5] {
        p = mul_add::<FMA>(p, r, coefficient);
    }
    let p = mul_add::<FMA>(p * r, r, r) + 1.0;
    // Times 2^n: onto the exponent, and all but n's bits are shifted out.
    let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < -86.9 { 0.0 } else { scaled }
}

/// 1 / (1 + e^-x); 0 below -87.3, so that its product with any number there is.
#[inline(always)]
pub(super) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    sigmoids::<FMA>(x).0
}

/// [`sigmoid`] of x and of -x; the latter's product with large numbers is exact, which that of 1 less the former is not.
#[inline(always)]
pub(super) fn sigmoids<const FMA: bool>(x: f32) -> (f32, f32) {
    let e = exp::<FMA>(-x);
    let s = 1.0 / (1.0 + e);
    (if x < -87.3 { 0.0 } else { s }, e * s)
}

/// Hyperbolic tangent: its Taylor polynomial up to 0.3, where the other form would cancel, with an error below 4e-9.
#[inline(always)]
pub(super) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let square = x * x;
    let mut p = -1382.0 / 155_925.0;
    for coefficient in [62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0] {
        p = mul_add::<FMA>(p, square, coefficient);
    }
    let near = mul_add::<FMA>(p * square, x, x);
    let (up, down) = sigmoids::<FMA>(2.0 * x);
    if square < 0.09 { near } else { up - down }
}

/// The normal distribution's cumulative function (1 + erf(x / sqrt 2)) / 2, and its density.
///
/// The upper tail is density times a polynomial in 1 / (1 + 0.3 |x|); relative error of the fit 4.4e-9 up to |x| = 15.
#[inline(always)]
pub(super) fn normal<const FMA: bool>(x: f32) -> (f32, f32) {
    let z = x.abs();
    let bell = exp::<FMA>(-0.5 * x * x);
    let t = 1.0 / mul_add::<FMA>(0.3, z, 1.0);
    let mut p = -0.020_984_67;
    for coefficient in [
        0.114_402_11,
        -0.232_835_48,
        0.197_921_64,
        -0.084_481_28,
        0.098_830_84,
        0.077_485_77,
        0.110_423_2,
        0.119_550_12,
        0.119_687_75,
    ] {
        p = mul_add::<FMA>(p, t, coefficient);
    }
    let tail = p * t * bell;
    let below = if x < 0.0 { tail } else { 1.0 - tail };
    (below, bell * 0.398_942_3)
}

/// Sums of products that lie beside each other: sixteen chains, added up in order.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a_runs, b_runs) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a_runs.0.iter().zip(b_runs.0) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_runs.1).zip(b_runs.1) {
        *sum += a * b;
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest error in units of the last place over the range.
    fn check(range: std::ops::Range<f32>, most: f64, f: fn(f32) -> f32, exact: fn(f64) -> f64) {
        let steps = 200_000;
        for i in 0..=steps {
            let x = range.start + (range.end - range.start) * (i as f32 / steps as f32);
            let want = exact(f64::from(x));
            let unit = f64::from((want as f32).abs().next_up() - (want as f32).abs());
            let error = (f64::from(f(x)) - want).abs() / unit;
            assert!(error <= most, "{x}: {:e} instead of {want:e}, {error} units away", f(x));
        }
    }

    #[test]
    fn errors_are_a_few_units() {
        for exp in [exp::<false>, exp::<true>] {
            check(-86.8..87.3, 2.0, exp, f64::exp);
            check(-1.0..1.0, 2.0, exp, f64::exp);
        }
        for sigmoid in [sigmoid::<false>, sigmoid::<true>] {
            check(-80.0..80.0, 3.0, sigmoid, |x| 1.0 / (1.0 + (-x).exp()));
        }
        check(-80.0..80.0, 4.0, |x| sigmoids::<false>(x).1, |x| 1.0 / (1.0 + x.exp()));
        // The rounding of x^2 grows with it.
        check(
            -5.0..5.0,
            16.0,
            |x| normal::<false>(x).1,
            |x| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt(),
        );
    }

    #[test]
    fn the_ends_are_held() {
        for exp in [exp::<false>, exp::<true>] {
            assert_eq!(exp(0.0), 1.0);
            assert_eq!(exp(f32::NEG_INFINITY), 0.0);
            assert_eq!(exp(-1e30), 0.0);
            assert_eq!(exp(f32::INFINITY), exp(87.3));
            assert!(exp(f32::NAN).is_nan() && exp(-f32::NAN).is_nan());
        }
        assert_eq!(sigmoids::<false>(-1e30), (0.0, 1.0));
        assert_eq!(sigmoids::<false>(1e30), (1.0, 0.0));
        assert_eq!(normal::<false>(-1e30), (0.0, 0.0));
        assert_eq!(normal::<false>(1e30), (1.0, 0.0));
    }
}
