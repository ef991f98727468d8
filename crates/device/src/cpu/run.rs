//! From operations on tensors to kernels on slices: a file for each family.

mod activation;
mod attention;
mod elementwise;
mod embedding;
mod grouped_product;
mod heads;
mod loss;
mod magnitude;
mod norm;
mod pieced_attention;
mod position;
mod product;
mod quantization;
mod reduction;
mod routing;
mod sink;
mod subspace;
mod update;
mod weighted_bias;
mod zero_computation;

use bytemuck::Pod;

use super::kernels::Exec;
use super::matmul::{self, Operand, Output};
use super::slices::Slices;
use crate::{Compute, Op, Tensor};

/// What the kernels of an operation are called with. The operation has been checked.
pub(super) struct KernelCall<'a> {
    pub exec: Exec<'a>,
    /// Of all tensors.
    pub t: Slices<'a>,
    /// For partial sums and sort keys.
    pub workspace: &'a mut [u64],
}

/// Calls the operation's kernel. The operation has been checked; what only its numbers can tell is checked here, and is
/// the error.
pub(super) fn run(op: Op<'_>, job: KernelCall<'_>) -> Result<(), String> {
    match op {
        Op::Activation(op) => activation::run(op, job),
        Op::Attention(op) => attention::run(op, job),
        Op::Elementwise(op) => elementwise::run(op, job),
        Op::Embedding(op) => return embedding::run(op, job),
        Op::GroupedProduct(op) => return grouped_product::run(op, job),
        Op::Heads(op) => heads::run(op, job),
        Op::Loss(op) => return loss::run(op, job),
        Op::Magnitude(op) => return magnitude::run(op, job),
        Op::PiecedAttention(op) => pieced_attention::run(op, job),
        Op::Norm(op) => norm::run(op, job),
        Op::Position(op) => return position::run(op, job),
        Op::Product(op) => product::run(op, job),
        Op::Quantization(op) => quantization::run(op, job),
        Op::Reduction(op) => reduction::run(op, job),
        Op::Routing(op) => return routing::run(op, job),
        Op::Sink(op) => sink::run(op, job),
        Op::Subspace(op) => subspace::run(op, job),
        Op::Update(step) => update::run(step, job),
        Op::WeightedBias(op) => return weighted_bias::run(op, job),
        Op::ZeroComputation(op) => zero_computation::run(op, job),
    }
    Ok(())
}

impl<'a> KernelCall<'a> {
    /// The workspace as numbers of a type.
    fn workspace<T: Pod>(self) -> &'a mut [T] {
        bytemuck::cast_slice_mut(self.workspace)
    }

    fn matmul(&self, compute: Compute, a: Operand, b: Operand, c: Output, accumulate: bool) {
        // SAFETY: the matrices are tensors of an operation whose check found the shapes to fit and the output to
        // overlap no input; the memory is borrowed for the operation.
        unsafe { matmul::matmul(self.exec.pool, self.exec.simd.isa(), compute, a, b, c, accumulate) }
    }
}

/// Refuses numbers that are neither below `limit`, the rows or columns of `table`, nor `ignored`.
fn in_table(
    what: &str,
    numbers: &[u32],
    limit: u64,
    ignored: Option<u32>,
    table: &Tensor,
) -> Result<(), String> {
    let outside = |number: u32| u64::from(number) >= limit && Some(number) != ignored;
    match numbers.iter().position(|&number| outside(number)) {
        None => Ok(()),
        Some(place) => Err(format!("{what} {} at {place} is outside {table:?}", numbers[place])),
    }
}
