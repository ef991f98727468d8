//! Bases of subspaces, and what is done with gradients in them, on the CPU.

use super::KernelCall;
use crate::Subspace;
use crate::cpu::kernels::random::random_normal;
use crate::cpu::kernels::subspace::{eigenvectors, orthonormalize};
use crate::cpu::kernels::update::{adam_direction, norm_ratios};

pub(super) fn run(op: Subspace<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    match op {
        Subspace::AdamDirection { grad, m, v, out, hyper } => {
            let (m, v) = (t.f32s_mut(m), t.f32s_mut(v));
            adam_direction(exec, t.input(grad, &[out]), m, v, t.floats_mut(out), hyper);
        }
        Subspace::NormRatios { a, b, out, channels, epsilon } => {
            let (columns, out, operands) =
                (a.columns() as usize, t.f32s_mut(out), [t.floats(a), t.floats(b)]);
            norm_ratios(exec, operands, columns, out, channels, epsilon, job.workspace());
        }
        Subspace::RandomNormal { out, std, seed } => random_normal(exec, t.f32s_mut(out), std, seed),
        Subspace::Orthonormalize { x } => orthonormalize(exec, t.f32s_mut(x), x.columns() as usize),
        Subspace::Eigenvectors { matrix, vectors, out } => {
            let n = matrix.rows() as usize;
            eigenvectors(exec, t.f32s_mut(matrix), t.f32s_mut(vectors), t.f32s_mut(out), n);
        }
    }
}
