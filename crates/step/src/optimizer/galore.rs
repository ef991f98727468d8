//! GaLore (Zhao et al. 2024): Adam in the space of the gradient's largest singular vectors, which are found anew every
//! so many steps, and its direction projected back.
//!
//! The vectors come from subspace iteration with a random start (Halko, Martinsson and Tropp 2011, algorithm 4.4) and a
//! Rayleigh-Ritz step, so that they are singular vectors and not only a basis. Signs are whatever comes out: the
//! update does not depend on them.

use plimsoll_device::{Compute, DType, Product, Rounding, Rule, Sgd, Subspace, Tensor, Update};
use plimsoll_memory::splitmix64;

use super::low_rank::{Projected, allocate_moments, update_plain};
use super::state::{NewState, StateKind};
use super::{LowRankSettings, ParameterStep};
use crate::StepError;

/// Dimensions of the iteration beyond those that are kept.
const OVERSAMPLING: u64 = 16;

/// Products with the gradient and its transpose: the error falls with the ratio of singular values to this power.
const ITERATIONS: u32 = 4;

/// Bytes of the update that exist at once.
const CHUNK_BYTES: u64 = 4 << 20;

pub(super) fn allocate(new: &mut NewState<'_>, settings: &LowRankSettings) -> Result<(), StepError> {
    allocate_moments(new, settings.rank)?;
    match Projected::of(new.parameter, settings.rank) {
        Some(shape) => new.zeros(StateKind::Projection, DType::F32, &shape.projection()),
        None => Ok(()),
    }
}

pub(super) fn update(job: &ParameterStep<'_>, settings: &LowRankSettings) -> Result<(), StepError> {
    let Some(shape) = Projected::of(job.parameter, settings.rank) else {
        return update_plain(job, settings.adam);
    };
    let projection = job.state(StateKind::Projection)?;
    if job.step.saturating_sub(1).is_multiple_of(settings.update_proj_gap.max(1)) {
        find_projection(job, shape, projection)?;
    }
    let low = job.project(shape, projection)?;
    let lr = job.adam_direction(settings.adam, &low, &low)?;
    apply(job, shape, projection, &low, lr * settings.scale)
}

/// Projects the direction back, some rows at a time, and takes it off the weights, which decay afterwards.
fn apply(
    job: &ParameterStep<'_>,
    shape: Projected,
    projection: &Tensor,
    low: &Tensor,
    rate: f64,
) -> Result<(), StepError> {
    let rows = (CHUNK_BYTES / (4 * shape.columns)).clamp(1, shape.rows);
    // P's rows or the direction's belong to the rows of the weights; the other is the matrix that they multiply.
    let (left, right) = if shape.is_tall() { (low, projection) } else { (projection, low) };
    let lr = rate * (1.0 - job.lr * job.weight_decay);
    let hyper = Sgd {
        lr,
        momentum: 0.0,
        dampening: 0.0,
        nesterov: false,
        weight_decay: if lr == 0.0 { 0.0 } else { job.lr * job.weight_decay / lr },
        first: true,
    };
    let buffer = job.workspace(&[rows, shape.columns], "update")?;
    let slice = |tensor: &Tensor, range| tensor.slice_rows(range).ok_or_else(|| job.missing());
    let mut first = 0;
    while first < shape.rows {
        let range = first..(first + rows).min(shape.rows);
        let chunk = slice(&buffer, 0..range.end - range.start)?;
        job.execute(Product::LinearBackwardInput {
            dout: &slice(left, range.clone())?,
            weight: right,
            dx: &chunk,
            accumulate: false,
            compute: Compute::F32,
        })?;
        let master = job.state.master().map(|master| slice(master, range.clone())).transpose()?;
        job.execute(Update {
            param: &slice(job.weight, range)?,
            master: master.as_ref(),
            grad: &chunk,
            grad_scale: None,
            rounding: Rounding::Stochastic { seed: splitmix64(job.seed(), first), first: 0 },
            rule: Rule::Sgd { m: None, hyper },
        })?;
        first += rows;
    }
    Ok(())
}

/// Fills the projection with the singular vectors of the gradient's largest singular values: right ones of a tall
/// matrix in rows, left ones of a wide one in columns.
fn find_projection(job: &ParameterStep<'_>, shape: Projected, projection: &Tensor) -> Result<(), StepError> {
    let (grad, compute, accumulate) = (job.grad, Compute::F32, false);
    let (narrow, wide) =
        if shape.is_tall() { (shape.columns, shape.rows) } else { (shape.rows, shape.columns) };
    let count = (shape.rank + OVERSAMPLING).min(narrow);
    // Both hold vectors in rows: of the side that is projected, and of the other.
    let basis = job.workspace(&[count, narrow], "subspace")?;
    let image = job.workspace(&[count, wide], "subspace_image")?;
    job.execute(Subspace::RandomNormal { out: &basis, std: 1.0, seed: job.seed() })?;
    let product = |x: &Tensor, transposed: bool, out: &Tensor| {
        job.execute(if transposed {
            Product::Linear { x, weight: grad, bias: None, out, accumulate, compute }
        } else {
            Product::LinearBackwardInput { dout: x, weight: grad, dx: out, accumulate, compute }
        })
    };
    job.execute(Subspace::Orthonormalize { x: &basis })?;
    for _ in 0..ITERATIONS {
        product(&basis, shape.is_tall(), &image)?;
        job.execute(Subspace::Orthonormalize { x: &image })?;
        product(&image, !shape.is_tall(), &basis)?;
        job.execute(Subspace::Orthonormalize { x: &basis })?;
    }
    // Rayleigh-Ritz: the eigenvectors of (Q G^T)(Q G^T)^T turn the basis into singular vectors.
    product(&basis, shape.is_tall(), &image)?;
    let matrix = job.workspace(&[count, count], "subspace_products")?;
    job.execute(Product::Linear {
        x: &image,
        weight: &image,
        bias: None,
        out: &matrix,
        accumulate,
        compute,
    })?;
    drop(image);
    let vectors = job.workspace(&[count, count], "subspace_vectors")?;
    let turn = job.workspace(&[count, shape.rank], "subspace_turn")?;
    job.execute(Subspace::Eigenvectors { matrix: &matrix, vectors: &vectors, out: &turn })?;
    let (dout, x) = if shape.is_tall() { (&turn, &basis) } else { (&basis, &turn) };
    job.execute(Product::LinearBackwardWeight {
        dout,
        x,
        dweight: projection,
        accumulate,
        rounding: Rounding::Nearest,
        compute,
    })
}
