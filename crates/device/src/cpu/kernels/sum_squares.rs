//! The sum of squares of a tensor, for the global gradient norm.

use super::simd::{LANES, per_isa};
use super::split::{Shared, for_each_part};
use super::storage::{TILE, Tile, tiles};
use super::{Exec, Floats};
use crate::ExactSum;
use crate::op::{RUN_ELEMENTS, SUM_ELEMENTS};

/// The sum of squares of x: runs of [`RUN_ELEMENTS`] in f64, the runs exactly. `words` holds a sum for each task; more tasks
/// than fit are taken in several rounds.
pub(in crate::cpu) fn sum_squares(exec: Exec<'_>, x: Floats<'_>, words: &mut [u64]) -> ExactSum {
    const { assert!(TILE.is_multiple_of(RUN_ELEMENTS) && SUM_ELEMENTS.is_multiple_of(TILE)) };
    const WORDS: usize = ExactSum::BYTES / size_of::<u64>();
    let tasks = x.len().div_ceil(SUM_ELEMENTS);
    let mut sum = ExactSum::ZERO;
    let at_once = (words.len() / WORDS).max(1);
    for first in (0..tasks).step_by(at_once) {
        let words = &mut words[..WORDS * at_once.min(tasks - first)];
        for_each_part(exec, words.len() / WORDS, Shared::new(words, WORDS), |task, words, _| {
            let start = (first + task) * SUM_ELEMENTS;
            let x = x.slice(start..x.len().min(start + SUM_ELEMENTS));
            let (mut tile, mut sum) = (Tile::new(), ExactSum::ZERO);
            for range in tiles(x.len()) {
                let x = x.load(exec.simd, range, &mut tile);
                x.chunks(RUN_ELEMENTS).for_each(|run| sum.add(squares(exec.simd, run)));
            }
            sum.write(bytemuck::cast_slice_mut(words));
        });
        words.chunks_exact(WORDS).for_each(|words| sum.add_sum(ExactSum::read(bytemuck::cast_slice(words))));
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
