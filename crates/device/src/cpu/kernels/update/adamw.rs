//! AdamW (Loshchilov and Hutter 2019), with the order of operations and roundings of PyTorch's f32 implementation.

use super::{FLAT, Weights, update};
use crate::cpu::kernels::simd::{mul_add, per_isa};
use crate::cpu::kernels::split::SharedFloats;
use crate::cpu::kernels::storage::Tile;
use crate::cpu::kernels::{Exec, FloatsMut};
use crate::{Adam, Rounding};

/// One update; moments in f32 or bf16.
pub(in crate::cpu) fn adamw(exec: Exec<'_>, weights: Weights<'_>, moments: [FloatsMut<'_>; 2], hyper: Adam) {
    let factors = Factors::new(hyper, weights.grad_scale);
    let roundings = [1, 2].map(|stream| weights.rounding.stream(stream));
    let states = moments.map(|x| SharedFloats::new(x, FLAT));
    update(exec, weights, FLAT, states, |[m, v], span, param, grad| {
        let (part, at) = (span.part, span.at);
        let [mut m_tile, mut v_tile] = Tile::array();
        m.modify(exec.simd, part.clone(), &mut m_tile, roundings[0], at, |m| {
            v.modify(exec.simd, part, &mut v_tile, roundings[1], at, |v| {
                step(exec.simd, param, grad, m, v, factors);
            });
        });
    });
}

impl Rounding {
    /// The same with random numbers of its own, for another tensor of the same parameter.
    pub(super) fn stream(self, stream: u64) -> Rounding {
        match self {
            Rounding::Nearest => Rounding::Nearest,
            Rounding::Stochastic { seed, first } => {
                let seed = seed.wrapping_add(stream.wrapping_mul(0xd1b5_4a32_d192_ed03));
                Rounding::Stochastic { seed, first }
            }
        }
    }
}

/// The numbers of an update, worked out in f64 as PyTorch does.
#[derive(Clone, Copy)]
struct Factors {
    grad_scale: f32,
    decay: f32,
    one_less_beta1: f32,
    beta2: f32,
    one_less_beta2: f32,
    root_of_correction2: f32,
    epsilon: f32,
    step_size: f32,
}

impl Factors {
    fn new(hyper: Adam, grad_scale: f32) -> Factors {
        Factors {
            grad_scale,
            decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            one_less_beta1: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            one_less_beta2: (1.0 - hyper.beta2) as f32,
            root_of_correction2: hyper.root_of_correction2() as f32,
            epsilon: hyper.epsilon as f32,
            step_size: (hyper.lr / hyper.correction1()) as f32,
        }
    }
}

per_isa! {
    fn step(param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], factors: Factors) = step_body
}

/// Fused only where PyTorch fuses. Moments that fade below normal numbers become 0: those of rare tokens would stay
/// there for good, and arithmetic on them takes twice the time and more.
#[inline(always)]
fn step_body<const FMA: bool>(
    param: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    factors: Factors,
) {
    let normal = |x: f32| if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
    for (((param, grad), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        let grad = grad * factors.grad_scale;
        *m = normal(mul_add::<FMA>(factors.one_less_beta1, grad - *m, *m));
        *v = normal(*v * factors.beta2 + factors.one_less_beta2 * grad * grad);
        let denominator = v.sqrt() / factors.root_of_correction2 + factors.epsilon;
        *param = *param * factors.decay - factors.step_size * *m / denominator;
    }
}
