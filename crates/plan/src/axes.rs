//! Round numbers for the axes of pictures.

/// Sizes on an axis up to `top` bytes: at least so many steps of a power of two, and less than twice as many.
pub fn byte_ticks(top: f64, least: f64) -> Vec<f64> {
    let step = (top / least).log2().floor().exp2().max(1.0);
    (0..9).map(|n| f64::from(n) * step).take_while(|tick| *tick <= top).collect()
}

/// The next of 1, 2, 5, 10 and so on.
pub fn nice_step(step: f64) -> f64 {
    let step = step.max(1e-9);
    let scale = 10f64.powf(step.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|n| n * scale);
    steps.into_iter().find(|nice| *nice >= step).unwrap_or(step)
}

/// A time with the decimals that its axis needs.
pub fn seconds(time: f64, step: f64) -> String {
    let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{time:.decimals$} s")
}
