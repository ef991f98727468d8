//! Sinks of attention on the CPU.

use super::KernelCall;
use crate::Sink;
use crate::cpu::kernels::sink::{apply, backward};

pub(super) fn run(op: Sink<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) {
    match op {
        Sink::Apply { sinks, out, lse, probabilities, shape } => {
            let probabilities = probabilities.map(|x| t.f32s_mut(x));
            apply(exec, t.floats(sinks), t.floats_mut(out), t.f32s_mut(lse), probabilities, shape);
        }
        Sink::Backward { sinks, out, lse, dout, dsinks, accumulate, shape } => {
            let inputs = [sinks, out, dout].map(|x| t.floats(x));
            backward(exec, inputs, t.f32s(lse), t.floats_mut(dsinks), accumulate, shape);
        }
    }
}
