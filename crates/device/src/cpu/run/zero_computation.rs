//! Experts without matrices on the CPU.

use super::KernelCall;
use crate::ZeroComputation;
use crate::cpu::kernels::zero_computation::{add_scaled, factors, factors_backward};

pub(super) fn run(op: ZeroComputation<'_>, KernelCall { exec, t, .. }: KernelCall<'_>) {
    match op {
        ZeroComputation::Factors { choice, weights, gates, experts, inputs, vectors } => {
            let gates = gates.map_or(&[][..], |gates| t.f32s(gates));
            let vectors = vectors.map_or(&mut [][..], |vectors| t.f32s_mut(vectors));
            factors(t.u32s(choice), t.f32s(weights), gates, experts, t.f32s_mut(inputs), vectors);
        }
        ZeroComputation::FactorsBackward {
            choice,
            weights,
            gates,
            experts,
            dinputs,
            dvectors,
            dweights,
            dgates,
        } => {
            let gates = gates.map_or(&[][..], |gates| t.f32s(gates));
            let dvectors = dvectors.map_or(&[][..], |dvectors| t.f32s(dvectors));
            let dgates = dgates.map_or(&mut [][..], |dgates| t.f32s_mut(dgates));
            let (from, to) = ((t.f32s(dinputs), dvectors), (t.f32s_mut(dweights), dgates));
            factors_backward(t.u32s(choice), t.f32s(weights), gates, experts, from, to);
        }
        ZeroComputation::AddScaled { x, factors, out } => {
            let columns = x.columns() as usize;
            add_scaled(exec, t.floats(x), t.f32s(factors), t.floats_mut(out), columns);
        }
    }
}
