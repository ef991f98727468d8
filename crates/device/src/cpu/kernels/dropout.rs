//! Dropout and jitter: what becomes of an element is a function of a seed and its index, so that it is never stored.

use super::column_sums::add_assign;
use super::elementwise::Input;
use super::rounding::Dither;
use super::split::{SharedFloats, for_each_part};
use super::storage::{FloatsMut, Tile, tiles};
use super::{Exec, PIECE};

/// Where the random words of elements come from.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Words {
    pub seed: u64,
    /// The index of the first element.
    pub first: u64,
}

/// As many values as 24 bits have.
const VALUES: f32 = 16_777_216.0;

/// out (+)= x, with elements dropped and the others scaled up.
pub(in crate::cpu) fn dropout(
    exec: Exec<'_>,
    x: Input<'_>,
    out: FloatsMut<'_>,
    probability: f32,
    words: Words,
    accumulate: bool,
) {
    let dropped = (probability * VALUES) as u32;
    let factor = 1.0 / (1.0 - probability);
    let keep = |value: f32, word: u32| if word >> 8 >= dropped { value * factor } else { 0.0 };
    by_words(exec, x, out, words, accumulate, keep);
}

/// out (+)= x times a factor between 1 - noise and 1 + noise.
pub(in crate::cpu) fn jitter(
    exec: Exec<'_>,
    x: Input<'_>,
    out: FloatsMut<'_>,
    noise: f32,
    words: Words,
    accumulate: bool,
) {
    let shaken = |value: f32, word: u32| {
        // In the middle of each of the values, so that factors are 1 in the mean.
        let share = ((word >> 8) as f32 + 0.5) * (2.0 / VALUES) - 1.0;
        value * (1.0 + noise * share)
    };
    by_words(exec, x, out, words, accumulate, shaken);
}

/// out (+)= what a function makes of each element of x and its word, of which 24 bits count.
fn by_words(
    exec: Exec<'_>,
    x: Input<'_>,
    out: FloatsMut<'_>,
    words: Words,
    accumulate: bool,
    change: impl Fn(f32, u32) -> f32 + Sync,
) {
    let tasks = out.len().div_ceil(PIECE);
    for_each_part(exec, tasks, SharedFloats::new(out, PIECE), |task, mut out, _| {
        let [mut x_tile, mut out_tile, mut sum_tile] = Tile::array();
        for range in tiles(out.len()) {
            let first = task * PIECE + range.start;
            let n = range.len();
            match x {
                Input::Apart(x) => {
                    let x = x.load(exec.simd, first..first + n, &mut x_tile);
                    out_tile.0[..n].copy_from_slice(x);
                }
                Input::InPlace(_) => {
                    out.as_floats().copy_to(exec.simd, range.clone(), &mut out_tile.0[..n]);
                }
            }
            let random = Dither::new(words.seed, words.first + first as u64);
            for (i, value) in out_tile.0[..n].iter_mut().enumerate() {
                *value = change(*value, random.word(i as u32));
            }
            if accumulate {
                let sum = out.current(exec.simd, range.clone(), &mut sum_tile);
                add_assign(exec.simd, &out_tile.0[..n], sum);
                out.store(exec.simd, range, &sum_tile);
            } else {
                out.target(range.clone(), &mut sum_tile).copy_from_slice(&out_tile.0[..n]);
                out.store(exec.simd, range, &sum_tile);
            }
        }
    });
}
