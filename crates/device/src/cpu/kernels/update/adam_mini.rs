//! Adam-mini (Zhang et al. 2024): one second moment for a run of elements.

use super::{Weights, update};
use crate::Adam;
use crate::cpu::kernels::simd::{mul_add, per_isa};
use crate::cpu::kernels::split::{Shared, for_each_part};
use crate::cpu::kernels::storage::{Tile, tiles};
use crate::cpu::kernels::sum_squares::squares;
use crate::cpu::kernels::{Exec, rows_per_task};

/// One update; v holds the second moment of each of as many runs of equal length.
pub(in crate::cpu) fn adam_mini(
    exec: Exec<'_>,
    weights: Weights<'_>,
    m: &mut [f32],
    v: &mut [f32],
    hyper: Adam,
) {
    let run = m.len() / v.len().max(1);
    let scale = f64::from(weights.grad_scale);
    let (grad, simd) = (weights.grad, exec.simd);
    let runs = rows_per_task(run);
    for_each_part(exec, v.len().div_ceil(runs), Shared::new(v, runs), |task, v, _| {
        let mut tile = Tile::new();
        for (i, v) in v.iter_mut().enumerate() {
            let grad = grad.row(task * runs + i, run);
            let sum: f64 = tiles(run).map(|range| squares(simd, grad.load(simd, range, &mut tile))).sum();
            let mean = sum * scale * scale / run.max(1) as f64;
            *v = (f64::from(*v) * hyper.beta2 + (1.0 - hyper.beta2) * mean) as f32;
        }
    });
    let v = &*v;
    let decay = (1.0 - hyper.lr * hyper.weight_decay) as f32;
    let less = (1.0 - hyper.beta1) as f32;
    let grad_scale = weights.grad_scale;
    let states = Shared::new(m, super::task_elements(run));
    update(exec, weights, run, states, |m, span, param, grad| {
        let root = f64::from(v[span.row]).sqrt() / hyper.root_of_correction2();
        let step_size = hyper.lr / hyper.correction1() / (root + hyper.epsilon);
        step(simd, param, grad, &mut m[span.part], [grad_scale, decay, less, step_size as f32]);
    });
}

per_isa! {
    fn step(param: &mut [f32], grad: &[f32], m: &mut [f32], factors: [f32; 4]) = step_body
}

#[inline(always)]
fn step_body<const FMA: bool>(param: &mut [f32], grad: &[f32], m: &mut [f32], factors: [f32; 4]) {
    let [grad_scale, decay, less, step_size] = factors;
    let normal = |x: f32| if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
    for ((param, grad), m) in param.iter_mut().zip(grad).zip(m) {
        *m = normal(mul_add::<FMA>(less, grad * grad_scale - *m, *m));
        *param = *param * decay - step_size * *m;
    }
}
