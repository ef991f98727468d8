//! Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"), with the order of operations of
//! lion-pytorch: decay, step by the sign, then the momentum.

use super::{FLAT, Weights, update};
use crate::Lion;
use crate::cpu::kernels::simd::per_isa;
use crate::cpu::kernels::split::SharedFloats;
use crate::cpu::kernels::storage::Tile;
use crate::cpu::kernels::{Exec, FloatsMut};

/// One update; the momentum in f32 or bf16.
pub(in crate::cpu) fn lion(exec: Exec<'_>, weights: Weights<'_>, m: FloatsMut<'_>, hyper: Lion) {
    let factors = Factors::new(hyper, weights.grad_scale);
    let rounding = weights.rounding.stream(1);
    update(exec, weights, FLAT, SharedFloats::new(m, FLAT), |m, span, param, grad| {
        let mut tile = Tile::new();
        m.modify(exec.simd, span.part, &mut tile, rounding, span.at, |m| {
            step(exec.simd, param, grad, m, factors);
        });
    });
}

/// The numbers of an update.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub grad_scale: f32,
    pub lr: f32,
    pub decay: f32,
    pub betas: [f32; 2],
    pub less: [f32; 2],
}

impl Factors {
    pub fn new(hyper: Lion, grad_scale: f32) -> Factors {
        let betas = [hyper.beta1, hyper.beta2];
        Factors {
            grad_scale,
            lr: hyper.lr as f32,
            decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            betas: betas.map(|beta| beta as f32),
            less: betas.map(|beta| (1.0 - beta) as f32),
        }
    }
}

per_isa! {
    pub(super) fn step(param: &mut [f32], grad: &[f32], m: &mut [f32], factors: Factors) = step_body
}

#[inline(always)]
fn step_body<const FMA: bool>(param: &mut [f32], grad: &[f32], m: &mut [f32], factors: Factors) {
    let Factors { grad_scale, lr, decay, betas, less } = factors;
    let normal = |x: f32| if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
    for ((param, grad), m) in param.iter_mut().zip(grad).zip(m) {
        let grad = grad * grad_scale;
        let between = *m * betas[0] + grad * less[0];
        let by = if between == 0.0 { 0.0 } else { lr.copysign(between) };
        *param = *param * decay - by;
        *m = normal(*m * betas[1] + grad * less[1]);
    }
}
