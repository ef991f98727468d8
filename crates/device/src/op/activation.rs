//! Non-linearities of feed-forward parts, with and without a gate.

use super::Family;
use crate::check::Description;
use crate::{Cost, Tensor};

/// The non-linearity of a feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glu {
    /// x * sigmoid(x)
    Silu,
    /// x * Phi(x), with erf
    Gelu,
    /// The tanh approximation of GELU
    GeluTanh,
}

/// A non-linearity, or its backward pass.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Activation<'a> {
    /// out = act(gate) * up, all `[N, I]`. In place: out = gate or out = up.
    Gated { gate: &'a Tensor, up: &'a Tensor, out: &'a Tensor, activation: Glu },
    /// dgate, dup from dout. In place: dgate = gate, dup = up, and either may be dout's memory.
    GatedBackward {
        gate: &'a Tensor,
        up: &'a Tensor,
        dout: &'a Tensor,
        dgate: &'a Tensor,
        dup: &'a Tensor,
        activation: Glu,
    },
    /// out = act(x). In place: out = x.
    Activate { x: &'a Tensor, out: &'a Tensor, activation: Glu },
    /// dx = dout * act'(x). In place: dx = x or dx = dout.
    ActivateBackward { x: &'a Tensor, dout: &'a Tensor, dx: &'a Tensor, activation: Glu },
    /// out = (up + 1) * gate * sigmoid(alpha * gate), of a gate of at most `limit` and an up of at least -limit and at most limit
    /// (gpt-oss). In place: out = gate or out = up.
    ClampedSwiglu { gate: &'a Tensor, up: &'a Tensor, out: &'a Tensor, alpha: f32, limit: f32 },
    /// dgate, dup from dout; none passes what was clamped. In place as [`Activation::GatedBackward`].
    ClampedSwigluBackward {
        gate: &'a Tensor,
        up: &'a Tensor,
        dout: &'a Tensor,
        dgate: &'a Tensor,
        dup: &'a Tensor,
        alpha: f32,
        limit: f32,
    },
}

impl<'a> Family<'a> for Activation<'a> {
    fn describe(&self) -> Description<'a> {
        let op = match *self {
            Activation::Gated { gate, up, out, .. } => {
                Description::new("gated", [gate, up], [out]).in_place([(out, gate), (out, up)])
            }
            Activation::GatedBackward { gate, up, dout, dgate, dup, .. } => {
                let in_place = [(dgate, gate), (dup, up), (dgate, dout), (dup, dout)];
                Description::new("gated_backward", [gate, up, dout], [dgate, dup]).in_place(in_place)
            }
            Activation::Activate { x, out, .. } => {
                Description::new("activate", [x], [out]).in_place([(out, x)])
            }
            Activation::ActivateBackward { x, dout, dx, .. } => {
                Description::new("activate_backward", [x, dout], [dx]).in_place([(dx, x), (dx, dout)])
            }
            Activation::ClampedSwiglu { gate, up, out, alpha, limit } => {
                Description::new("clamped_swiglu", [gate, up], [out])
                    .in_place([(out, gate), (out, up)])
                    .clamped(alpha, limit)
            }
            Activation::ClampedSwigluBackward { gate, up, dout, dgate, dup, alpha, limit } => {
                let in_place = [(dgate, gate), (dup, up), (dgate, dout), (dup, dout)];
                Description::new("clamped_swiglu_backward", [gate, up, dout], [dgate, dup])
                    .in_place(in_place)
                    .clamped(alpha, limit)
            }
        };
        let all: Vec<_> = op.tensors().collect();
        op.floats(all.iter().copied()).same_size(self.input(), all)
    }

    fn cost(&self, once: Cost) -> Cost {
        Cost { exps: self.input().elements(), ..once }
    }
}

impl<'a> Activation<'a> {
    /// What the non-linearity is taken of.
    fn input(&self) -> &'a Tensor {
        match *self {
            Activation::Gated { gate: x, .. }
            | Activation::GatedBackward { gate: x, .. }
            | Activation::Activate { x, .. }
            | Activation::ActivateBackward { x, .. }
            | Activation::ClampedSwiglu { gate: x, .. }
            | Activation::ClampedSwigluBackward { gate: x, .. } => x,
        }
    }
}

impl Description<'_> {
    fn clamped(self, alpha: f32, limit: f32) -> Self {
        self.that(alpha.is_finite() && limit > 0.0, || {
            format!("alpha {alpha} with limit {limit} is no SwiGLU")
        })
    }
}
