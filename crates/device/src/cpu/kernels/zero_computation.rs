//! Experts without matrices: what they make of a token is a few factors.

use super::math::sigmoid;
use super::split::{SharedFloats, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::ZeroExperts;

/// What a place is.
enum Kind {
    /// Another expert's, nobody's, or one that gives nothing.
    Nothing,
    Copy,
    Constant(usize),
}

fn kind(expert: u32, experts: ZeroExperts) -> Kind {
    let ZeroExperts { first, zero, copy, constant } = experts;
    match u64::from(expert).checked_sub(first + zero) {
        Some(number) if number < copy => Kind::Copy,
        Some(number) if number < copy + constant => Kind::Constant((number - copy) as usize),
        _ => Kind::Nothing,
    }
}

/// The softmax of a constant expert's two logits.
fn shares(gates: &[f32], constant: usize) -> [f32; 2] {
    let more = gates[2 * constant] - gates[2 * constant + 1];
    [more, -more].map(sigmoid::<false>)
}

/// The factors of each token; choice and weights [N, k], gates [N, 2 C], inputs [N], vectors [N, C].
pub(in crate::cpu) fn factors(
    choice: &[u32],
    weights: &[f32],
    gates: &[f32],
    experts: ZeroExperts,
    inputs: &mut [f32],
    vectors: &mut [f32],
) {
    let (each, constant) = (choice.len() / inputs.len().max(1), experts.constant as usize);
    vectors.fill(0.0);
    for (token, input) in inputs.iter_mut().enumerate() {
        let own = token * each..(token + 1) * each;
        let gates = &gates[token * 2 * constant..(token + 1) * 2 * constant];
        *input = 0.0;
        for (expert, weight) in choice[own.clone()].iter().zip(&weights[own]) {
            match kind(*expert, experts) {
                Kind::Nothing => {}
                Kind::Copy => *input += weight,
                Kind::Constant(number) => {
                    let [of_input, of_vector] = shares(gates, number);
                    *input += weight * of_input;
                    vectors[token * constant + number] += weight * of_vector;
                }
            }
        }
    }
}

/// The gradients of the weights of such places, and of the gates.
pub(in crate::cpu) fn factors_backward(
    choice: &[u32],
    weights: &[f32],
    gates: &[f32],
    experts: ZeroExperts,
    (dinputs, dvectors): (&[f32], &[f32]),
    (dweights, dgates): (&mut [f32], &mut [f32]),
) {
    let (each, constant) = (choice.len() / dinputs.len().max(1), experts.constant as usize);
    dgates.fill(0.0);
    for (token, dinput) in dinputs.iter().enumerate() {
        let own = token * each..(token + 1) * each;
        let gates = &gates[token * 2 * constant..(token + 1) * 2 * constant];
        let dgates = &mut dgates[token * 2 * constant..(token + 1) * 2 * constant];
        let places = choice[own.clone()].iter().zip(&weights[own.clone()]);
        for ((expert, weight), dweight) in places.zip(&mut dweights[own]) {
            match kind(*expert, experts) {
                Kind::Nothing => {}
                Kind::Copy => *dweight = *dinput,
                Kind::Constant(number) => {
                    let [of_input, of_vector] = shares(gates, number);
                    let dvector = dvectors[token * constant + number];
                    *dweight = of_input * dinput + of_vector * dvector;
                    let through = weight * of_input * of_vector * (dinput - dvector);
                    dgates[2 * number] += through;
                    dgates[2 * number + 1] -= through;
                }
            }
        }
    }
}

/// out[n] += x[n] * factors[n]
pub(in crate::cpu) fn add_scaled(
    exec: Exec<'_>,
    x: Floats<'_>,
    factors: &[f32],
    out: FloatsMut<'_>,
    columns: usize,
) {
    let task_rows = rows_per_task(columns);
    let tasks = factors.len().div_ceil(task_rows);
    for_each_part(exec, tasks, SharedFloats::new(out, task_rows * columns), |task, mut out, _| {
        let [mut x_tile, mut out_tile] = Tile::array();
        for index in 0..out.len() / columns.max(1) {
            let row = task * task_rows + index;
            let (x, factor) = (x.row(row, columns), factors[row]);
            // A token without such an expert keeps what it has, whatever its numbers are.
            if factor == 0.0 {
                continue;
            }
            let mut out = out.row(index, columns);
            for range in tiles(columns) {
                let sum = out.current(exec.simd, range.clone(), &mut out_tile);
                let x = x.load(exec.simd, range.clone(), &mut x_tile);
                sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x * factor);
                out.store(exec.simd, range, &out_tile);
            }
        }
    });
}
