//! Conversion between stored types.

use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{Floats, FloatsMut};
use super::{Exec, PIECE};
use crate::Rounding;

/// out = x
pub(in crate::cpu) fn cast(exec: Exec<'_>, x: Floats<'_>, out: FloatsMut<'_>, rounding: Rounding) {
    let tasks = out.len().div_ceil(PIECE);
    for_each_part(exec, tasks, SharedFloats::new(out, PIECE), |task, mut out, _| {
        let first = task * PIECE;
        let x = x.slice(first..first + out.len());
        out.convert(exec.simd, x, rounding, first);
    });
}

/// out = x for integers.
pub(in crate::cpu) fn copy<T: Copy + Send + Sync>(exec: Exec<'_>, x: &[T], out: &mut [T]) {
    let tasks = out.len().div_ceil(PIECE);
    for_each_part(exec, tasks, Shared::new(out, PIECE), |task, out, _| {
        out.copy_from_slice(&x[task * PIECE..][..out.len()]);
    });
}
