//! AdamW (Loshchilov and Hutter 2019), with the order of operations and roundings of PyTorch's f32 implementation.

use super::simd::{mul_add, per_isa};
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, FloatsMut, PIECE};
use crate::{AdamW, Rounding};

/// One update. With `master` the update happens there and `param` gets it rounded; without, `param` itself is updated.
pub(in crate::cpu) fn adamw(
    exec: Exec<'_>,
    param: FloatsMut<'_>,
    master: Option<&mut [f32]>,
    grad: Floats<'_>,
    [m, v]: [&mut [f32]; 2],
    hyper: AdamW,
    rounding: Rounding,
) {
    let factors = Factors::new(hyper);
    let tasks = param.len().div_ceil(PIECE);
    let params = (SharedFloats::new(param, PIECE), master.map(|master| Shared::new(master, PIECE)));
    let moments = [Shared::new(m, PIECE), Shared::new(v, PIECE)];
    for_each_part(exec, tasks, (params, moments), |task, ((mut param, mut master), [m, v]), _| {
        let first = task * PIECE;
        let grad = grad.slice(first..first + param.len());
        let [mut param_tile, mut grad_tile] = Tile::array();
        for range in tiles(param.len()) {
            let grad = grad.load(exec.simd, range.clone(), &mut grad_tile);
            let (m, v) = (&mut m[range.clone()], &mut v[range.clone()]);
            let at = first + range.start;
            if let Some(master) = &mut master {
                let master = &mut master[range.clone()];
                update(exec.simd, master, grad, m, v, factors);
                param.assign(exec.simd, range, master, rounding, at);
            } else if let FloatsMut::F32(param) = &mut param {
                update(exec.simd, &mut param[range], grad, m, v, factors);
            } else {
                let values = param.current(exec.simd, range.clone(), &mut param_tile);
                update(exec.simd, values, grad, m, v, factors);
                param.assign(exec.simd, range.clone(), &param_tile.0[..range.len()], rounding, at);
            }
        }
    });
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
    fn new(hyper: AdamW) -> Factors {
        let (lr, beta1, beta2) = (f64::from(hyper.lr), decimal(hyper.beta1), decimal(hyper.beta2));
        let power = |beta: f64| beta.powf(hyper.step as f64);
        Factors {
            grad_scale: hyper.grad_scale,
            decay: (1.0 - lr * f64::from(hyper.weight_decay)) as f32,
            one_less_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_less_beta2: (1.0 - beta2) as f32,
            root_of_correction2: (1.0 - power(beta2)).sqrt() as f32,
            epsilon: hyper.epsilon,
            step_size: (lr / (1.0 - power(beta1))) as f32,
        }
    }
}

/// The number of seven decimals that became `x`, if there is one: 1 - 0.999 differs by 1e-5 of itself from 1 less
/// 0.999 rounded to f32.
fn decimal(x: f32) -> f64 {
    let rounded = (f64::from(x) * 1e7).round() / 1e7;
    if rounded as f32 == x { rounded } else { f64::from(x) }
}

per_isa! {
    fn update(param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], factors: Factors) = update_body
}

/// Fused only where PyTorch fuses. Moments that fade below normal numbers become 0: those of rare tokens would stay
/// there for good, and arithmetic on them takes twice the time and more.
#[inline(always)]
fn update_body<const FMA: bool>(
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
