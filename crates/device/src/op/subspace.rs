//! What optimizers that keep their states in a subspace of the gradients (GaLore, APOLLO) take beside products.

use super::{Family, PIECE};
use crate::check::Description;
use crate::cost::{Multiplied, product_of};
use crate::{Adam, Channels, Cost, Tensor};

/// A basis of a subspace, or what is done with a gradient in it.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Subspace<'a> {
    /// Adam's direction in place of the gradient: m and v move towards grad, out = m / (sqrt(v) + epsilon). All f32 of
    /// one shape. The learning rate, the bias corrections and the decay of `hyper` are left to the update. In place:
    /// out = grad.
    AdamDirection { grad: &'a Tensor, m: &'a Tensor, v: &'a Tensor, out: &'a Tensor, hyper: Adam },
    /// `out[c]` = |a| / (|b| + epsilon) over the elements of each channel; a, b f32, out f32, one for each channel.
    NormRatios { a: &'a Tensor, b: &'a Tensor, out: &'a Tensor, channels: Channels, epsilon: f32 },
    /// out f32 = normal random numbers of mean 0, from the seed and the element's index.
    RandomNormal { out: &'a Tensor, std: f32, seed: u64 },
    /// Makes the rows of x f32 `[K, N]` orthonormal in place, each within the span of itself and those before it, by
    /// modified Gram-Schmidt, twice. A row that depends on those before it becomes 0.
    Orthonormalize { x: &'a Tensor },
    /// The first K columns of out f32 `[N, K]` are unit eigenvectors of the symmetric matrix f32 `[N, N]`, for its K
    /// largest eigenvalues in falling order, by Jacobi's cyclic method. The matrix is destroyed; `vectors` f32 `[N, N]`
    /// is workspace.
    Eigenvectors { matrix: &'a Tensor, vectors: &'a Tensor, out: &'a Tensor },
}

impl<'a> Family<'a> for Subspace<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Subspace::AdamDirection { grad, m, v, out, .. } => Description::new("adam_direction", [grad], [])
                .changing([m, v])
                .writing([out])
                .in_place([(out, grad)])
                .f32s([grad, m, v, out])
                .same_size(grad, [m, v, out]),
            Subspace::NormRatios { a, b, out, channels, .. } => {
                let op = Description::new("norm_ratios", [a, b], [out])
                    .f32s([a, b])
                    .same_size(a, [b])
                    .f32_vectors([out], channels.count(a));
                if channels == Channels::Whole { op.task_sums(a, PIECE as u64) } else { op }
            }
            Subspace::RandomNormal { out, .. } => Description::new("random_normal", [], [out]).f32s([out]),
            Subspace::Orthonormalize { x } => {
                Description::new("orthonormalize", [], []).changing([x]).f32s([x])
            }
            Subspace::Eigenvectors { matrix, vectors, out } => {
                let n = matrix.rows();
                Description::new("eigenvectors", [], [])
                    .changing([matrix])
                    .writing([vectors, out])
                    .f32s([matrix, vectors, out])
                    .size(matrix, n, n)
                    .size(vectors, n, n)
                    .that(out.rows() == n && out.columns() <= n, || {
                        format!("{out:?} is not columns of {matrix:?}")
                    })
            }
        }
    }

    fn cost(&self, once: Cost) -> Cost {
        match *self {
            Subspace::AdamDirection { .. } => once,
            Subspace::NormRatios { a, b, .. } => Cost { bytes: a.bytes() + b.bytes(), ..once },
            // A logarithm and a cosine for every element.
            Subspace::RandomNormal { out, .. } => Cost { exps: 2 * out.elements(), ..once },
            // Twice, a product and a multiple of each row for each row before it.
            Subspace::Orthonormalize { x } => {
                Cost { matmul: Some(Multiplied::f32(product_of(&[4, x.rows(), x.elements()]))), ..once }
            }
            // Some eight sweeps, each of which rotates every pair of rows and columns, and vectors.
            Subspace::Eigenvectors { matrix, .. } => Cost {
                matmul: Some(Multiplied::f32(product_of(&[8 * 9, matrix.rows(), matrix.elements()]))),
                ..once
            },
        }
    }
}
