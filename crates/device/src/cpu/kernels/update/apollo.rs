//! The parts of APOLLO (Zhu et al. 2024) that are its own: how much Adam would scale each channel, and the gradient so
//! scaled, held by the norm-growth limiter of Fira (Chen et al. 2024).

use super::norms::{column_squares, row_squares};
use super::{FLAT, Span, Weights, sum_over_spans, update};
use crate::cpu::kernels::simd::{LANES, per_isa};
use crate::cpu::kernels::split::Shared;
use crate::cpu::kernels::sum_squares::squares;
use crate::cpu::kernels::{Exec, Floats};
use crate::{Apollo, Channels};

/// `out[c]` = |a| / (|b| + epsilon) over each channel.
pub(in crate::cpu) fn norm_ratios(
    exec: Exec<'_>,
    [a, b]: [Floats<'_>; 2],
    columns: usize,
    out: &mut [f32],
    channels: Channels,
    epsilon: f32,
    partials: &mut [f64],
) {
    let numerator = |sum: f64, out: &mut f32| *out = sum.sqrt() as f32;
    let divide =
        |sum: f64, out: &mut f32| *out = (f64::from(*out) / (sum.sqrt() + f64::from(epsilon))) as f32;
    match channels {
        Channels::Rows => {
            row_squares(exec, a, columns, out, numerator);
            row_squares(exec, b, columns, out, divide);
        }
        Channels::Columns => {
            column_squares(exec, a, columns, out, numerator);
            column_squares(exec, b, columns, out, divide);
        }
        Channels::Whole => {
            let [a, b] = [a, b].map(|x| {
                sum_over_spans(exec, x.len(), FLAT, partials, |[tile, _], span| {
                    squares(exec.simd, x.load(exec.simd, span.at..span.at + span.part.len(), tile))
                })
            });
            out.fill((a.sqrt() / (b.sqrt() + f64::from(epsilon))) as f32);
        }
    }
}

/// One update from the scaled gradient. `norm` is that of the last one, 0 before the first.
pub(in crate::cpu) fn apollo(
    exec: Exec<'_>,
    weights: Weights<'_>,
    ratios: &[f32],
    channels: Channels,
    columns: usize,
    norm: &mut [f32],
    hyper: Apollo,
    partials: &mut [f64],
) {
    let (n, simd, grad, scale) = (weights.param.len(), exec.simd, weights.grad, weights.grad_scale);
    let factors = |span: &Span, factor: f32| match channels {
        Channels::Rows => (factor * ratios[span.row], None),
        Channels::Columns => (factor, Some(&ratios[span.column..][..span.part.len()])),
        Channels::Whole => (factor * ratios[0], None),
    };
    let sum = sum_over_spans(exec, n, columns, partials, |[tile, _], span| {
        let (factor, ratios) = factors(&span, scale);
        scaled_squares(simd, grad.load(simd, span.at..span.at + span.part.len(), tile), ratios, factor)
    });
    let now = sum.sqrt();
    let mut shorter = 1.0;
    if let Some(last) = norm.first_mut() {
        if *last > 0.0 {
            shorter = (now / (f64::from(*last) + 1e-8)).max(hyper.growth_limit) / hyper.growth_limit;
        }
        *last = (now / shorter) as f32;
    }
    let rate = (hyper.lr / shorter * f64::from(scale)) as f32;
    let decay = (1.0 - hyper.decay) as f32;
    update(exec, weights, columns, None::<Shared<'_, f32>>, |_, span, param, grad| {
        let (factor, ratios) = factors(&span, rate);
        step(simd, param, grad, ratios, factor, decay);
    });
}

per_isa! {
    fn scaled_squares(grad: &[f32], ratios: Option<&[f32]>, factor: f32) -> f64 = scaled_squares_body
}

#[inline(always)]
fn scaled_squares_body<const FMA: bool>(grad: &[f32], ratios: Option<&[f32]>, factor: f32) -> f64 {
    let mut sums = [0.0; LANES];
    for (i, grad) in grad.chunks(LANES).enumerate() {
        match ratios {
            None => {
                for (sum, grad) in sums.iter_mut().zip(grad) {
                    let x = f64::from(grad * factor);
                    *sum += x * x;
                }
            }
            Some(ratios) => {
                for ((sum, grad), ratio) in sums.iter_mut().zip(grad).zip(&ratios[i * LANES..]) {
                    let x = f64::from(grad * factor * ratio);
                    *sum += x * x;
                }
            }
        }
    }
    sums.iter().sum()
}

per_isa! {
    fn step(param: &mut [f32], grad: &[f32], ratios: Option<&[f32]>, factor: f32, decay: f32) = step_body
}

#[inline(always)]
fn step_body<const FMA: bool>(
    param: &mut [f32],
    grad: &[f32],
    ratios: Option<&[f32]>,
    factor: f32,
    decay: f32,
) {
    match ratios {
        None => {
            for (param, grad) in param.iter_mut().zip(grad) {
                *param = (*param - factor * grad) * decay;
            }
        }
        Some(ratios) => {
            for ((param, grad), ratio) in param.iter_mut().zip(grad).zip(ratios) {
                *param = (*param - factor * ratio * grad) * decay;
            }
        }
    }
}
