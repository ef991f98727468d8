//! Adafactor (Shazeer and Stern 2018), with the order of operations of the implementation in transformers. AdaLomo is
//! the same without momentum.
//!
//! A row's factor and a column's divisor stand for the second moment of an element; where the moment is not factored,
//! the row's factor is 1 and each element has a divisor of its own.

use super::norms::{column_squares, row_squares};
use super::{FLAT, Span, Weights, sum_over_spans, task_elements, update};
use crate::Adafactor;
use crate::cpu::kernels::simd::{LANES, per_isa};
use crate::cpu::kernels::split::{Shared, for_each_part};
use crate::cpu::kernels::storage::{Tile, tiles};
use crate::cpu::kernels::sum_squares::squares;
use crate::cpu::kernels::{Exec, Floats};

/// The second moment.
pub(in crate::cpu) enum Second<'a> {
    Factored { rows: &'a mut [f32], columns: &'a mut [f32] },
    Full(&'a mut [f32]),
}

/// One update. `partials` is workspace for sums.
pub(in crate::cpu) fn adafactor(
    exec: Exec<'_>,
    weights: Weights<'_>,
    second: Second<'_>,
    m: Option<&mut [f32]>,
    hyper: Adafactor,
    partials: &mut [f64],
) {
    let (n, simd, grad, scale) = (weights.param.len(), exec.simd, weights.grad, weights.grad_scale);
    let moment = match second {
        Second::Factored { rows, columns } => Moment::factored(exec, &weights, rows, columns, hyper),
        Second::Full(v) => {
            full(exec, grad, scale, v, hyper);
            Moment { rows: None, mean: 1.0, divisors: v, columns: FLAT }
        }
    };
    let update_squares = sum_over_spans(exec, n, moment.columns, partials, |[tile, _], span| {
        let grad = grad.load(simd, span.at..span.at + span.part.len(), tile);
        scaled_squares(simd, grad, moment.divisors(&span), moment.row_factor(span.row) * scale)
    });
    let root_mean = |squares: f64| (squares / n.max(1) as f64).sqrt();
    let clip = (root_mean(update_squares) / hyper.clip_threshold).max(1.0);
    let lr = match hyper.scale_by_parameter {
        None => hyper.lr,
        Some(least) => {
            let values = weights.values();
            let squares = sum_over_spans(exec, n, FLAT, partials, |[tile, _], span| {
                squares(simd, values.load(simd, span.at..span.at + span.part.len(), tile))
            });
            hyper.lr * root_mean(squares).max(least)
        }
    };
    let rate = lr / clip * f64::from(scale);
    let decay = (1.0 - lr * hyper.weight_decay) as f32;
    let betas = [hyper.beta1 as f32, (1.0 - hyper.beta1) as f32];
    let momentum = m.map(|m| Shared::new(m, task_elements(moment.columns)));
    update(exec, weights, moment.columns, momentum, |m, span, param, grad| {
        let factor = (f64::from(moment.row_factor(span.row)) * rate) as f32;
        let divisors = moment.divisors(&span);
        match m {
            None => step(simd, param, grad, divisors, factor, decay),
            Some(m) => {
                step_with_momentum(simd, param, grad, divisors, &mut m[span.part], factor, decay, betas);
            }
        }
    });
}

/// The second moment after its update.
struct Moment<'a> {
    rows: Option<&'a [f32]>,
    /// Of the rows.
    mean: f64,
    /// Of columns, or of elements.
    divisors: &'a [f32],
    columns: usize,
}

impl<'a> Moment<'a> {
    fn factored(
        exec: Exec<'_>,
        weights: &Weights<'_>,
        rows: &'a mut [f32],
        columns: &'a mut [f32],
        hyper: Adafactor,
    ) -> Moment<'a> {
        let (height, width) = (rows.len(), columns.len());
        let scale = f64::from(weights.grad_scale).powi(2);
        let average = |state: &mut f32, sum: f64, count: usize| {
            let mean = sum * scale / count.max(1) as f64 + hyper.epsilon;
            *state = (f64::from(*state) * hyper.beta2 + (1.0 - hyper.beta2) * mean) as f32;
        };
        row_squares(exec, weights.grad, width, rows, |sum, row| average(row, sum, width));
        column_squares(exec, weights.grad, width, columns, |sum, column| average(column, sum, height));
        let mean = rows.iter().map(|x| f64::from(*x)).sum::<f64>() / height.max(1) as f64;
        Moment { rows: Some(rows), mean, divisors: columns, columns: width }
    }

    fn row_factor(&self, row: usize) -> f32 {
        self.rows.map_or(1.0, |rows| (self.mean / f64::from(rows[row])).sqrt() as f32)
    }

    fn divisors(&self, span: &Span) -> &'a [f32] {
        let first = if self.rows.is_some() { span.column } else { span.at };
        &self.divisors[first..][..span.part.len()]
    }
}

/// v moves towards the squared gradient.
fn full(exec: Exec<'_>, grad: Floats<'_>, scale: f32, v: &mut [f32], hyper: Adafactor) {
    let numbers = [scale, hyper.beta2 as f32, (1.0 - hyper.beta2) as f32, hyper.epsilon as f32];
    for_each_part(exec, v.len().div_ceil(FLAT), Shared::new(v, FLAT), |task, v, _| {
        let grad = grad.slice(task * FLAT..task * FLAT + v.len());
        let mut tile = Tile::new();
        for range in tiles(v.len()) {
            let grad = grad.load(exec.simd, range.clone(), &mut tile);
            average(exec.simd, grad, &mut v[range], numbers);
        }
    });
}

per_isa! {
    fn average(grad: &[f32], v: &mut [f32], numbers: [f32; 4]) = average_body
}

#[inline(always)]
fn average_body<const FMA: bool>(grad: &[f32], v: &mut [f32], [scale, beta2, less, epsilon]: [f32; 4]) {
    for (grad, v) in grad.iter().zip(v) {
        let grad = grad * scale;
        *v = *v * beta2 + less * (grad * grad + epsilon);
    }
}

per_isa! {
    /// The sum of squares of grad * factor / sqrt(divisor), in f64.
    fn scaled_squares(grad: &[f32], divisors: &[f32], factor: f32) -> f64 = scaled_squares_body
}

#[inline(always)]
fn scaled_squares_body<const FMA: bool>(grad: &[f32], divisors: &[f32], factor: f32) -> f64 {
    let mut sums = [0.0; LANES];
    for (grad, divisors) in grad.chunks(LANES).zip(divisors.chunks(LANES)) {
        for ((sum, grad), divisor) in sums.iter_mut().zip(grad).zip(divisors) {
            let x = f64::from(grad * factor / divisor.sqrt());
            *sum += x * x;
        }
    }
    sums.iter().sum()
}

per_isa! {
    fn step(param: &mut [f32], grad: &[f32], divisors: &[f32], factor: f32, decay: f32) = step_body
}

#[inline(always)]
fn step_body<const FMA: bool>(param: &mut [f32], grad: &[f32], divisors: &[f32], factor: f32, decay: f32) {
    for ((param, grad), divisor) in param.iter_mut().zip(grad).zip(divisors) {
        *param = *param * decay - grad * factor / divisor.sqrt();
    }
}

per_isa! {
    fn step_with_momentum(
        param: &mut [f32],
        grad: &[f32],
        divisors: &[f32],
        m: &mut [f32],
        factor: f32,
        decay: f32,
        betas: [f32; 2],
    ) = step_with_momentum_body
}

#[inline(always)]
fn step_with_momentum_body<const FMA: bool>(
    param: &mut [f32],
    grad: &[f32],
    divisors: &[f32],
    m: &mut [f32],
    factor: f32,
    decay: f32,
    [beta1, less]: [f32; 2],
) {
    for (((param, grad), divisor), m) in param.iter_mut().zip(grad).zip(divisors).zip(m) {
        *m = *m * beta1 + less * (grad * factor / divisor.sqrt());
        *param = *param * decay - *m;
    }
}
