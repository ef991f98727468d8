//! Rotary position embedding (Su et al. 2021): pairs (i, i + R/2), or (2 i, 2 i + 1).

use half::{bf16, f16};

use super::rounding::to_bf16;
use super::simd::{mul_add, per_isa};
use super::split::{SharedFloats, for_each_part};
use super::{Exec, FloatsMut, rows_per_task};
use crate::RotatedHeads;

/// Cosines and sines [P, R/2] of the angles of P positions.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Angles<'a> {
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    /// R/2
    pub pairs: usize,
}

/// Rotates R values of every head of x [N, heads * D] in place by the angles of its row's position, all of which are below P; back
/// where `inverse`.
pub(in crate::cpu) fn rope(
    exec: Exec<'_>,
    x: FloatsMut<'_>,
    positions: &[u32],
    angles: Angles<'_>,
    heads: RotatedHeads,
    inverse: bool,
) {
    if angles.pairs == 0 {
        return;
    }
    let columns = x.len() / positions.len().max(1);
    let task_rows = rows_per_task(columns);
    let tasks = positions.len().div_ceil(task_rows);
    let sign = if inverse { -1.0 } else { 1.0 };
    for_each_part(exec, tasks, SharedFloats::new(x, task_rows * columns), |task, mut x, _| {
        for (row, &position) in positions.iter().skip(task * task_rows).take(task_rows).enumerate() {
            let at = position as usize * angles.pairs;
            let (cos, sin) = (&angles.cos[at..at + angles.pairs], &angles.sin[at..at + angles.pairs]);
            match x.row(row, columns) {
                FloatsMut::F32(x) => rotate(exec.simd, x, cos, sin, heads, sign),
                FloatsMut::Bf16(x) => rotate(exec.simd, x, cos, sin, heads, sign),
                FloatsMut::F16(x) => rotate(exec.simd, x, cos, sin, heads, sign),
            }
        }
    });
}

/// A stored float.
trait Element: Copy {
    fn widen(self) -> f32;
    fn narrow(x: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(x: f32) -> f32 {
        x
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> bf16 {
        to_bf16(x)
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(x: f32) -> f16 {
        f16::from_f32(x)
    }
}

per_isa! {
    /// Rotates each head of a row.
    fn rotate<E: Element>(x: &mut [E], cos: &[f32], sin: &[f32], heads: RotatedHeads, sign: f32) = rotate_body
}

#[inline(always)]
fn rotate_body<E: Element, const FMA: bool>(
    x: &mut [E],
    cos: &[f32],
    sin: &[f32],
    heads: RotatedHeads,
    sign: f32,
) {
    let turn = |a: &mut E, b: &mut E, cos: f32, sin: f32| {
        let (x, y, sin) = (a.widen(), b.widen(), sin * sign);
        *a = E::narrow(mul_add::<FMA>(x, cos, -(y * sin)));
        *b = E::narrow(mul_add::<FMA>(y, cos, x * sin));
    };
    let first = heads.first as usize;
    for head in x.chunks_exact_mut(heads.dim as usize) {
        let rotated = &mut head[first..first + 2 * cos.len()];
        if heads.interleaved {
            for ((pair, cos), sin) in rotated.as_chunks_mut().0.iter_mut().zip(cos).zip(sin) {
                let [a, b] = pair;
                turn(a, b, *cos, *sin);
            }
            continue;
        }
        let (lower, upper) = rotated.split_at_mut(cos.len());
        for (((a, b), cos), sin) in lower.iter_mut().zip(upper).zip(cos).zip(sin) {
            turn(a, b, *cos, *sin);
        }
    }
}
