//! SGD with or without momentum, as PyTorch computes it: the decay is a part of the gradient.

use super::{FLAT, Weights, update};
use crate::Sgd;
use crate::cpu::kernels::Exec;
use crate::cpu::kernels::simd::per_isa;
use crate::cpu::kernels::split::Shared;

/// One update; the momentum buffer in f32.
pub(in crate::cpu) fn sgd(exec: Exec<'_>, weights: Weights<'_>, m: Option<&mut [f32]>, hyper: Sgd) {
    let factors = Factors {
        grad_scale: weights.grad_scale,
        lr: hyper.lr as f32,
        weight_decay: hyper.weight_decay as f32,
        momentum: if hyper.first { 0.0 } else { hyper.momentum as f32 },
        share: if hyper.first { 1.0 } else { (1.0 - hyper.dampening) as f32 },
        ahead: if hyper.nesterov { Some(hyper.momentum as f32) } else { None },
    };
    match m {
        Some(m) => update(exec, weights, FLAT, Shared::new(m, FLAT), |m, span, param, grad| {
            with_momentum(exec.simd, param, grad, &mut m[span.part], factors);
        }),
        None => update(exec, weights, FLAT, None::<Shared<'_, f32>>, |_, _, param, grad| {
            plain(exec.simd, param, grad, factors);
        }),
    }
}

#[derive(Clone, Copy)]
struct Factors {
    grad_scale: f32,
    lr: f32,
    weight_decay: f32,
    momentum: f32,
    share: f32,
    ahead: Option<f32>,
}

per_isa! {
    fn plain(param: &mut [f32], grad: &[f32], factors: Factors) = plain_body
}

#[inline(always)]
fn plain_body<const FMA: bool>(param: &mut [f32], grad: &[f32], factors: Factors) {
    let Factors { grad_scale, lr, weight_decay, .. } = factors;
    for (param, grad) in param.iter_mut().zip(grad) {
        let grad = grad * grad_scale + *param * weight_decay;
        *param -= lr * grad;
    }
}

per_isa! {
    fn with_momentum(param: &mut [f32], grad: &[f32], m: &mut [f32], factors: Factors) = with_momentum_body
}

#[inline(always)]
fn with_momentum_body<const FMA: bool>(param: &mut [f32], grad: &[f32], m: &mut [f32], factors: Factors) {
    let Factors { grad_scale, lr, weight_decay, momentum, share, ahead } = factors;
    let normal = |x: f32| if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
    for ((param, grad), m) in param.iter_mut().zip(grad).zip(m) {
        let grad = grad * grad_scale + *param * weight_decay;
        *m = normal(*m * momentum + grad * share);
        let by = match ahead {
            Some(momentum) => grad + *m * momentum,
            None => *m,
        };
        *param -= lr * by;
    }
}
