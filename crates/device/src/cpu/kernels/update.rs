//! Steps of optimizers on one parameter: what all of them share, handing out the weights.
//!
//! Each task has whole rows, each span of elements lies in one row and one tile; rules without rows take the elements
//! as rows of [`PIECE`].

use std::ops::Range;

use super::split::{Shared, SharedFloats, Split, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, FloatsMut, PIECE, task_elements};
use crate::Rounding;

mod adam_direction;
mod adam_mini;
mod adamw;
mod apollo;
mod dynamic_map;
mod eight_bit;
mod factored;
mod lion;
mod norms;
mod sgd;

pub(in crate::cpu) use adam_direction::adam_direction;
pub(in crate::cpu) use adam_mini::adam_mini;
pub(in crate::cpu) use adamw::adamw;
pub(in crate::cpu) use apollo::{apollo, norm_ratios};
pub(crate) use dynamic_map::state_maps;
pub(in crate::cpu) use eight_bit::{CodesMut, adamw_8bit, lion_8bit};
pub(in crate::cpu) use factored::{Second, adafactor};
pub(in crate::cpu) use lion::lion;
pub(in crate::cpu) use sgd::sgd;

/// The weights of a parameter, and the gradient to update them from.
pub(in crate::cpu) struct Weights<'a> {
    pub param: FloatsMut<'a>,
    /// With a master the update happens there and `param` gets it rounded to nearest; without, `param` itself is updated.
    pub master: Option<&'a mut [f32]>,
    pub grad: Floats<'a>,
    pub grad_scale: f32,
    pub rounding: Rounding,
}

impl Weights<'_> {
    /// The present values.
    fn values(&self) -> Floats<'_> {
        match &self.master {
            Some(master) => Floats::F32(master),
            None => self.param.as_floats(),
        }
    }
}

/// Where a span of elements lies.
#[derive(Clone)]
struct Span {
    /// In the task's part.
    part: Range<usize>,
    /// First element in the tensor.
    at: usize,
    /// Row in the tensor.
    row: usize,
    /// First column.
    column: usize,
}

/// The spans of the part of task number `task` that has `len` elements.
fn spans(task: usize, len: usize, columns: usize) -> impl Iterator<Item = Span> {
    let columns = columns.max(1);
    let first = task * task_elements(columns);
    (0..len).step_by(columns).flat_map(move |start| {
        tiles(columns.min(len - start)).map(move |range| Span {
            part: start + range.start..start + range.end,
            at: first + start + range.start,
            row: (first + start) / columns,
            column: range.start,
        })
    })
}

/// Calls `body(states, span, values, grad)` for every span: the values to update, the gradient not yet scaled, and the
/// task's part of the states, which fall into parts of [`task_elements`] elements.
fn update<S: Split>(
    exec: Exec<'_>,
    weights: Weights<'_>,
    columns: usize,
    states: S,
    body: impl Fn(&mut S::Part, Span, &mut [f32], &[f32]) + Sync,
) {
    let Weights { param, master, grad, rounding, .. } = weights;
    let width = task_elements(columns);
    let tasks = param.len().div_ceil(width);
    let params = (SharedFloats::new(param, width), master.map(|master| Shared::new(master, width)));
    for_each_part(exec, tasks, (params, states), |task, ((mut param, mut master), mut states), _| {
        let first = task * width;
        let grad = grad.slice(first..first + param.len());
        let [mut param_tile, mut grad_tile] = Tile::array();
        for span in spans(task, param.len(), columns) {
            let (range, at) = (span.part.clone(), span.at);
            let grad = grad.load(exec.simd, range.clone(), &mut grad_tile);
            match &mut master {
                Some(master) => {
                    let master = &mut master[range.clone()];
                    body(&mut states, span, master, grad);
                    // Beside its master it is that, as it is where a master is read from a file.
                    param.assign(exec.simd, range, master, Rounding::Nearest, at);
                }
                None => param.modify(exec.simd, range, &mut param_tile, rounding, at, |values| {
                    body(&mut states, span, values, grad);
                }),
            }
        }
    });
}

/// The sum over all spans of what `part` gives for each, in order. `partials` holds a sum for each task; more tasks
/// than fit are taken in several rounds.
fn sum_over_spans(
    exec: Exec<'_>,
    n: usize,
    columns: usize,
    partials: &mut [f64],
    part: impl Fn(&mut [Tile; 2], Span) -> f64 + Sync,
) -> f64 {
    let width = task_elements(columns);
    let tasks = n.div_ceil(width);
    let mut sum = 0.0;
    for first in (0..tasks).step_by(partials.len().max(1)) {
        let count = partials.len().min(tasks - first);
        let partials = &mut partials[..count];
        for_each_part(exec, count, Shared::new(partials, 1), |task, partial, _| {
            let task = first + task;
            let len = width.min(n - task * width);
            let mut buffers = Tile::array();
            partial.fill(spans(task, len, columns).map(|span| part(&mut buffers, span)).sum());
        });
        sum += partials.iter().sum::<f64>();
    }
    sum
}

/// Rows for rules that know none.
const FLAT: usize = PIECE;
