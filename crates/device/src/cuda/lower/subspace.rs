//! Bases of subspaces, and what is done with gradients in them.

use super::parameters::{Emit, plain, vector_blocks};
use super::reduction::{Factors, Squared, channel_squares, squares};
use crate::cuda::CudaError;
use crate::{Channels, Subspace};

plain! {
    /// `DirectionNumbers` of the kernels.
    Direction { beta1: f32, less1: f32, beta2: f32, less2: f32, epsilon: f32, unused: u32 }
}

pub(super) fn subspace(op: Subspace<'_>, emit: &mut Emit<'_>) -> Result<(), CudaError> {
    let kernel = match op {
        Subspace::AdamDirection { grad, m, v, out, hyper } => {
            let n = out.elements();
            let kernel = emit.kernel("adam_direction", vector_blocks(n));
            let kernel = [grad, m, v, out].into_iter().fold(kernel, |kernel, t| kernel.with(emit.address(t)));
            kernel.with(n).with(Direction {
                beta1: hyper.beta1 as f32,
                less1: (1.0 - hyper.beta1) as f32,
                beta2: hyper.beta2 as f32,
                less2: (1.0 - hyper.beta2) as f32,
                epsilon: hyper.epsilon as f32,
                unused: 0,
            })
        }
        Subspace::NormRatios { a, b, out, channels, epsilon } => {
            let n = out.elements();
            emit.needs(16 * n)?;
            let [above, below] = [emit.workspace(0), emit.workspace(8 * n)];
            for (x, sums) in [(a, above), (b, below)] {
                if channels == Channels::Whole {
                    let by = Factors { rows: 0, columns: 0, width: 1, whole: 0, unused: 0 };
                    squares(emit, Squared::Values, x, None, by, 0, [emit.workspace(32), sums])?;
                } else {
                    let kernel = channel_squares(emit, x, channels == Channels::Rows, sums);
                    emit.launch(kernel)?;
                }
            }
            let kernel = emit.kernel("norm_ratios", vector_blocks(n)).with(above).with(below);
            kernel.with(emit.address(out)).with(n).with(epsilon).with(u32::from(channels != Channels::Whole))
        }
        Subspace::RandomNormal { out, std, seed } => {
            let n = out.elements();
            let kernel = emit.kernel("random_normal", vector_blocks(n)).with(emit.address(out));
            kernel.with(n).with(std).with(seed)
        }
        Subspace::Orthonormalize { x } => {
            emit.needs(8 * x.rows())?;
            let kernel = emit.kernel("orthonormalize", [1, 1]).scratch::<f64>().with(emit.address(x));
            kernel.with(emit.workspace(0)).with(x.rows()).with(x.columns())
        }
        Subspace::Eigenvectors { matrix, vectors, out } => {
            emit.needs(4 * matrix.rows())?;
            let kernel = emit.kernel("eigenvectors", [1, 1]);
            let tensors = [matrix, vectors, out];
            let kernel = tensors.into_iter().fold(kernel, |kernel, t| kernel.with(emit.address(t)));
            kernel.with(emit.workspace(0)).with(matrix.rows()).with(out.columns())
        }
    };
    emit.launch(kernel)
}
