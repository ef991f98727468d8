//! SiLU, GELU and GELU's tanh approximation, alone and gated, forward and backward; gpt-oss's clamped gate is in a file of its own.

mod clamped;

use super::elementwise::{Input, for_each_tile};
use super::math::{normal, sigmoid, sigmoids};
use super::simd::{mul_add, per_isa};
use super::{Exec, FloatsMut};
use crate::Glu;

pub(in crate::cpu) use clamped::{clamped_swiglu, clamped_swiglu_backward};

/// out = act(x)
pub(in crate::cpu) fn activate(exec: Exec<'_>, x: Input<'_>, out: FloatsMut<'_>, activation: Glu) {
    let tile = match activation {
        Glu::Silu => activate_tile::<Silu>,
        Glu::Gelu => activate_tile::<Gelu>,
        Glu::GeluTanh => activate_tile::<GeluTanh>,
    };
    for_each_tile(exec, [x], [out], |[x], [out]| tile(exec.simd, x, out));
}

/// dx = dout * act'(x)
pub(in crate::cpu) fn activate_backward(
    exec: Exec<'_>,
    x: Input<'_>,
    dout: Input<'_>,
    dx: FloatsMut<'_>,
    activation: Glu,
) {
    let tile = match activation {
        Glu::Silu => activate_backward_tile::<Silu>,
        Glu::Gelu => activate_backward_tile::<Gelu>,
        Glu::GeluTanh => activate_backward_tile::<GeluTanh>,
    };
    for_each_tile(exec, [x, dout], [dx], |[x, dout], [dx]| tile(exec.simd, x, dout, dx));
}

/// out = act(gate) * up
pub(in crate::cpu) fn gated(
    exec: Exec<'_>,
    gate: Input<'_>,
    up: Input<'_>,
    out: FloatsMut<'_>,
    activation: Glu,
) {
    let tile = match activation {
        Glu::Silu => gated_tile::<Silu>,
        Glu::Gelu => gated_tile::<Gelu>,
        Glu::GeluTanh => gated_tile::<GeluTanh>,
    };
    for_each_tile(exec, [gate, up], [out], |[gate, up], [out]| tile(exec.simd, gate, up, out));
}

/// dgate = dout * up * act'(gate), dup = dout * act(gate). As outputs, dgate is number 0 and dup number 1.
pub(in crate::cpu) fn gated_backward(
    exec: Exec<'_>,
    gate: Input<'_>,
    up: Input<'_>,
    dout: Input<'_>,
    dgate: FloatsMut<'_>,
    dup: FloatsMut<'_>,
    activation: Glu,
) {
    let tile = match activation {
        Glu::Silu => gated_backward_tile::<Silu>,
        Glu::Gelu => gated_backward_tile::<Gelu>,
        Glu::GeluTanh => gated_backward_tile::<GeluTanh>,
    };
    for_each_tile(exec, [gate, up, dout], [dgate, dup], |[gate, up, dout], [dgate, dup]| {
        tile(exec.simd, gate, up, dout, dgate, dup);
    });
}

/// A non-linearity: its value and its derivative.
trait Activation {
    fn value<const FMA: bool>(x: f32) -> f32;
    fn value_and_slope<const FMA: bool>(x: f32) -> (f32, f32);
}

struct Silu;

impl Activation for Silu {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        x * sigmoid::<FMA>(x)
    }

    #[inline(always)]
    fn value_and_slope<const FMA: bool>(x: f32) -> (f32, f32) {
        let (s, rest) = sigmoids::<FMA>(x);
        (x * s, s * mul_add::<FMA>(x, rest, 1.0))
    }
}

struct Gelu;

impl Activation for Gelu {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        x * normal::<FMA>(x).0
    }

    #[inline(always)]
    fn value_and_slope<const FMA: bool>(x: f32) -> (f32, f32) {
        let (below, density) = normal::<FMA>(x);
        (x * below, mul_add::<FMA>(x, density, below))
    }
}

struct GeluTanh;

/// 2 sqrt(2 / pi): (1 + tanh u) / 2 is sigmoid(2 u).
const TWICE_ROOT: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

impl Activation for GeluTanh {
    #[inline(always)]
    fn value<const FMA: bool>(x: f32) -> f32 {
        x * sigmoid::<FMA>(TWICE_ROOT * x * mul_add::<FMA>(CUBIC * x, x, 1.0))
    }

    #[inline(always)]
    fn value_and_slope<const FMA: bool>(x: f32) -> (f32, f32) {
        let (s, rest) = sigmoids::<FMA>(TWICE_ROOT * x * mul_add::<FMA>(CUBIC * x, x, 1.0));
        let inner = TWICE_ROOT * mul_add::<FMA>(3.0 * CUBIC * x, x, 1.0);
        (x * s, s * mul_add::<FMA>(x * rest, inner, 1.0))
    }
}

per_isa! {
    fn activate_tile<A: Activation>(x: &[f32], out: &mut [f32]) = activate_body
}

#[inline(always)]
fn activate_body<A: Activation, const FMA: bool>(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = A::value::<FMA>(*x);
    }
}

per_isa! {
    fn activate_backward_tile<A: Activation>(x: &[f32], dout: &[f32], dx: &mut [f32]) = activate_backward_body
}

#[inline(always)]
fn activate_backward_body<A: Activation, const FMA: bool>(x: &[f32], dout: &[f32], dx: &mut [f32]) {
    for ((dx, x), dout) in dx.iter_mut().zip(x).zip(dout) {
        *dx = dout * A::value_and_slope::<FMA>(*x).1;
    }
}

per_isa! {
    fn gated_tile<A: Activation>(gate: &[f32], up: &[f32], out: &mut [f32]) = gated_body
}

#[inline(always)]
fn gated_body<A: Activation, const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = A::value::<FMA>(*gate) * up;
    }
}

per_isa! {
    fn gated_backward_tile<A: Activation>(
        gate: &[f32],
        up: &[f32],
        dout: &[f32],
        dgate: &mut [f32],
        dup: &mut [f32],
    ) = gated_backward_body
}

#[inline(always)]
fn gated_backward_body<A: Activation, const FMA: bool>(
    gate: &[f32],
    up: &[f32],
    dout: &[f32],
    dgate: &mut [f32],
    dup: &mut [f32],
) {
    for ((((dgate, dup), gate), up), dout) in dgate.iter_mut().zip(dup).zip(gate).zip(up).zip(dout) {
        let (value, slope) = A::value_and_slope::<FMA>(*gate);
        *dgate = dout * up * slope;
        *dup = dout * value;
    }
}
