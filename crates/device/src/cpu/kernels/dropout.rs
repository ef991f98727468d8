//! Dropout: which elements are kept is a function of a seed and their index, so that it is never stored.

use super::column_sums::add_assign;
use super::elementwise::Input;
use super::rounding::Dither;
use super::split::{SharedFloats, for_each_part};
use super::storage::{FloatsMut, Tile, tiles};
use super::{Exec, PIECE};

/// Which elements are dropped.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Mask {
    pub probability: f32,
    pub seed: u64,
    /// The index of the first element.
    pub first: u64,
}

/// out (+)= x, with elements dropped and the others scaled up.
pub(in crate::cpu) fn dropout(
    exec: Exec<'_>,
    x: Input<'_>,
    out: FloatsMut<'_>,
    mask: Mask,
    accumulate: bool,
) {
    // 24 random bits decide.
    let dropped = (mask.probability * 16_777_216.0) as u32;
    let factor = 1.0 / (1.0 - mask.probability);
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
            let random = Dither::new(mask.seed, mask.first + first as u64);
            for (i, value) in out_tile.0[..n].iter_mut().enumerate() {
                let kept = random.word(i as u32) >> 8 >= dropped;
                *value = if kept { *value * factor } else { 0.0 };
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
