//! The clamped SwiGLU of gpt-oss's experts, forward and backward.

use super::super::elementwise::{Input, for_each_tile};
use super::super::math::{sigmoid, sigmoids};
use super::super::simd::{mul_add, per_isa};
use super::super::{Exec, FloatsMut};

/// out = (up + 1) * gate * sigmoid(alpha * gate) of clamped gate and up.
pub(in crate::cpu) fn clamped_swiglu(
    exec: Exec<'_>,
    [gate, up]: [Input<'_>; 2],
    out: FloatsMut<'_>,
    alpha: f32,
    limit: f32,
) {
    for_each_tile(exec, [gate, up], [out], |[gate, up], [out]| {
        forward_tile(exec.simd, gate, up, out, alpha, limit);
    });
}

/// Its gradients. As outputs, dgate is number 0 and dup number 1.
pub(in crate::cpu) fn clamped_swiglu_backward(
    exec: Exec<'_>,
    [gate, up, dout]: [Input<'_>; 3],
    [dgate, dup]: [FloatsMut<'_>; 2],
    alpha: f32,
    limit: f32,
) {
    for_each_tile(exec, [gate, up, dout], [dgate, dup], |[gate, up, dout], [dgate, dup]| {
        backward_tile(exec.simd, gate, up, dout, dgate, dup, alpha, limit);
    });
}

/// Comparisons, so that what is no number stays none.
#[inline(always)]
fn clamped(gate: f32, up: f32, limit: f32) -> (f32, f32) {
    let gate = if gate > limit { limit } else { gate };
    let up = if up > limit { limit } else { up };
    (gate, if up < -limit { -limit } else { up })
}

per_isa! {
    fn forward_tile(gate: &[f32], up: &[f32], out: &mut [f32], alpha: f32, limit: f32) = forward_body
}

#[inline(always)]
fn forward_body<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [f32], alpha: f32, limit: f32) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let (gate, up) = clamped(*gate, *up, limit);
        *out = (up + 1.0) * (gate * sigmoid::<FMA>(alpha * gate));
    }
}

per_isa! {
    fn backward_tile(
        gate: &[f32],
        up: &[f32],
        dout: &[f32],
        dgate: &mut [f32],
        dup: &mut [f32],
        alpha: f32,
        limit: f32,
    ) = backward_body
}

#[inline(always)]
fn backward_body<const FMA: bool>(
    gates: &[f32],
    ups: &[f32],
    dout: &[f32],
    dgate: &mut [f32],
    dup: &mut [f32],
    alpha: f32,
    limit: f32,
) {
    for ((((dgate, dup), gate), up), dout) in dgate.iter_mut().zip(dup).zip(gates).zip(ups).zip(dout) {
        let (held_gate, held_up) = clamped(*gate, *up, limit);
        let (s, rest) = sigmoids::<FMA>(alpha * held_gate);
        let slope = s * mul_add::<FMA>(alpha * held_gate, rest, 1.0);
        let (through_gate, through_up) = (dout * (held_up + 1.0) * slope, dout * (held_gate * s));
        *dgate = if *gate > limit { 0.0 } else { through_gate };
        *dup = if *up > limit || *up < -limit { 0.0 } else { through_up };
    }
}
