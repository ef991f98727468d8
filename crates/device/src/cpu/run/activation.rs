//! Non-linearities on the CPU.

use super::KernelCall;
use crate::Activation;
use crate::cpu::kernels::activation::{
    activate, activate_backward, clamped_swiglu, clamped_swiglu_backward, gated, gated_backward,
};

pub(super) fn run(op: Activation<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) {
    match op {
        Activation::Gated { gate, up, out, activation } => {
            let (gate, up) = (t.input(gate, &[out]), t.input(up, &[out]));
            gated(exec, gate, up, t.floats_mut(out), activation);
        }
        Activation::GatedBackward { gate, up, dout, dgate, dup, activation } => {
            let [gate, up, dout] = [gate, up, dout].map(|x| t.input(x, &[dgate, dup]));
            gated_backward(exec, gate, up, dout, t.floats_mut(dgate), t.floats_mut(dup), activation);
        }
        Activation::Activate { x, out, activation } => {
            activate(exec, t.input(x, &[out]), t.floats_mut(out), activation);
        }
        Activation::ActivateBackward { x, dout, dx, activation } => {
            let (x, dout) = (t.input(x, &[dx]), t.input(dout, &[dx]));
            activate_backward(exec, x, dout, t.floats_mut(dx), activation);
        }
        Activation::ClampedSwiglu { gate, up, out, alpha, limit } => {
            let inputs = [gate, up].map(|x| t.input(x, &[out]));
            clamped_swiglu(exec, inputs, t.floats_mut(out), alpha, limit);
        }
        Activation::ClampedSwigluBackward { gate, up, dout, dgate, dup, alpha, limit } => {
            let inputs = [gate, up, dout].map(|x| t.input(x, &[dgate, dup]));
            clamped_swiglu_backward(exec, inputs, [dgate, dup].map(|x| t.floats_mut(x)), alpha, limit);
        }
    }
}
