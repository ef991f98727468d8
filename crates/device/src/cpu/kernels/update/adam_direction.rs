//! Adam's direction in a space of its own: for optimizers that keep its moments of a projected gradient.

use super::FLAT;
use crate::Adam;
use crate::cpu::kernels::simd::per_isa;
use crate::cpu::kernels::split::{Shared, for_each_part};
use crate::cpu::kernels::storage::tiles;
use crate::cpu::kernels::{Exec, FloatsMut, Input};

/// m and v move towards the gradient, out = m / (sqrt(v) + epsilon).
pub(in crate::cpu) fn adam_direction(
    exec: Exec<'_>,
    grad: Input<'_>,
    m: &mut [f32],
    v: &mut [f32],
    out: FloatsMut<'_>,
    hyper: Adam,
) {
    let FloatsMut::F32(out) = out else { return };
    let factors = Factors {
        betas: [hyper.beta1 as f32, hyper.beta2 as f32],
        less: [(1.0 - hyper.beta1) as f32, (1.0 - hyper.beta2) as f32],
        epsilon: hyper.epsilon as f32,
    };
    let tasks = out.len().div_ceil(FLAT);
    let parts = [out, m, v].map(|x| Shared::new(x, FLAT));
    for_each_part(exec, tasks, parts, |task, [out, m, v], _| {
        if let Input::Apart(crate::cpu::kernels::Floats::F32(grad)) = grad {
            out.copy_from_slice(&grad[task * FLAT..][..out.len()]);
        }
        for range in tiles(out.len()) {
            step(exec.simd, &mut out[range.clone()], &mut m[range.clone()], &mut v[range], factors);
        }
    });
}

#[derive(Clone, Copy)]
struct Factors {
    betas: [f32; 2],
    less: [f32; 2],
    epsilon: f32,
}

per_isa! {
    fn step(out: &mut [f32], m: &mut [f32], v: &mut [f32], factors: Factors) = step_body
}

#[inline(always)]
fn step_body<const FMA: bool>(out: &mut [f32], m: &mut [f32], v: &mut [f32], factors: Factors) {
    let Factors { betas, less, epsilon } = factors;
    for ((out, m), v) in out.iter_mut().zip(m).zip(v) {
        let grad = *out;
        *m = *m * betas[0] + grad * less[0];
        *v = *v * betas[1] + grad * grad * less[1];
        *out = *m / (v.sqrt() + epsilon);
    }
}
