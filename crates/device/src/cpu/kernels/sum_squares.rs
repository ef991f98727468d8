//! The sum of squares of a tensor, for the global gradient norm.

use super::simd::{LANES, per_isa};
use super::split::{Shared, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats};
use crate::op::SUM_ELEMENTS;

/// The sum of squares of x, summed in f64 over pieces of a fixed size, in order. `partials` holds a sum per piece;
/// more pieces than fit are taken in several rounds.
pub(in crate::cpu) fn sum_squares(exec: Exec<'_>, x: Floats<'_>, partials: &mut [f64]) -> f64 {
    let pieces = x.len().div_ceil(SUM_ELEMENTS);
    let mut sum = 0.0;
    for first in (0..pieces).step_by(partials.len().max(1)) {
        let count = partials.len().min(pieces - first);
        let partials = &mut partials[..count];
        for_each_part(exec, partials.len(), Shared::new(partials, 1), |task, partial, _| {
            let start = (first + task) * SUM_ELEMENTS;
            let x = x.slice(start..x.len().min(start + SUM_ELEMENTS));
            let mut tile = Tile::new();
            let sums = tiles(x.len()).map(|range| squares(exec.simd, x.load(exec.simd, range, &mut tile)));
            partial.fill(sums.sum());
        });
        sum += partials.iter().sum::<f64>();
    }
    sum
}

per_isa! {
    /// The sum of squares, in f64.
    pub(super) fn squares(x: &[f32]) -> f64 = squares_body
}

#[inline(always)]
fn squares_body<const FMA: bool>(x: &[f32]) -> f64 {
    let mut sums = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    for (sum, x) in sums.iter_mut().zip(chunks.remainder()) {
        *sum = f64::from(*x) * f64::from(*x);
    }
    for chunk in chunks {
        for lane in 0..LANES {
            let x = f64::from(chunk[lane]);
            sums[lane] += x * x;
        }
    }
    sums.iter().sum()
}
