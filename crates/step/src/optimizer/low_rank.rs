//! Gradients in a space of few dimensions: what GaLore and APOLLO share.
//!
//! Of a tall matrix's gradient `[M, N]`, M at least N, the rows are projected: low = G P^T `[M, R]`, P `[R, N]`. Of a wide
//! one's, the columns: low = P^T G `[R, N]`, P `[M, R]`. Other parameters, and those of a lower rank, have AdamW's states.

use plimsoll_device::{Adam, Compute, DType, Elementwise, Product, Rounding, Subspace, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::Parameter;

use super::state::{NewState, StateKind};
use super::{AdamSettings, ParameterStep, adamw, decay_after_step};
use crate::StepError;

/// The shapes of a projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Projected {
    pub rows: u64,
    pub columns: u64,
    pub rank: u64,
}

impl Projected {
    /// How a parameter's gradient is projected; `None` where it is not: only the matrices of blocks are.
    pub fn of(p: &Parameter, rank: u64) -> Option<Projected> {
        let &[rows, columns] = &p.shape[..] else { return None };
        let projected = p.role.is_block_matrix() && rank < rows.min(columns);
        projected.then_some(Projected { rows, columns, rank })
    }

    /// Whether it has at least as many rows as columns.
    pub fn is_tall(self) -> bool {
        self.rows >= self.columns
    }

    /// Shape of P.
    pub fn projection(self) -> [u64; 2] {
        if self.is_tall() { [self.rank, self.columns] } else { [self.rows, self.rank] }
    }

    /// Shape of the projected gradient.
    pub fn low(self) -> [u64; 2] {
        if self.is_tall() { [self.rows, self.rank] } else { [self.rank, self.columns] }
    }
}

/// Adam's moments: of the projected gradient, or of the gradient.
pub(super) fn allocate_moments(new: &mut NewState<'_>, rank: u64) -> Result<(), StepError> {
    match Projected::of(new.parameter, rank) {
        None => adamw::allocate(new, DType::F32),
        Some(projected) => {
            new.zeros(StateKind::FirstMoment, DType::F32, &projected.low())?;
            new.zeros(StateKind::SecondMoment, DType::F32, &projected.low())
        }
    }
}

/// The step of a parameter whose gradient is not projected, with the AdamW that both packages have: epsilon is added
/// before the bias correction, and weights decay after the step.
pub(super) fn update_plain(job: &ParameterStep<'_>, adam: AdamSettings) -> Result<(), StepError> {
    let hyper = adamw::numbers(job, adam);
    let (lr, weight_decay) = decay_after_step(hyper.lr, hyper.weight_decay);
    let epsilon = hyper.epsilon / hyper.root_of_correction2();
    adamw::step(job, Adam { lr, weight_decay, epsilon, ..hyper })
}

impl ParameterStep<'_> {
    /// An f32 tensor for the time of the step.
    pub(super) fn workspace(&self, shape: &[u64], name: &'static str) -> Result<Tensor, StepError> {
        Ok(self.device.alloc(DType::F32, shape, Tag::Workspace, name)?)
    }

    /// The gradient, projected and scaled.
    pub(super) fn project(&self, shape: Projected, projection: &Tensor) -> Result<Tensor, StepError> {
        let low = self.workspace(&shape.low(), "projected_gradient")?;
        let (accumulate, compute) = (false, Compute::F32);
        self.execute(if shape.is_tall() {
            Product::Linear { x: self.grad, weight: projection, bias: None, out: &low, accumulate, compute }
        } else {
            Product::LinearBackwardWeight {
                dout: projection,
                x: self.grad,
                dweight: &low,
                accumulate,
                rounding: Rounding::Nearest,
                compute,
            }
        })?;
        if let Some(factor) = self.control.factor {
            self.execute(Elementwise::ScaleBy { x: &low, factor })?;
        }
        Ok(low)
    }

    /// Writes Adam's direction for a projected gradient to `out`; the learning rate with both of Adam's bias corrections.
    pub(super) fn adam_direction(
        &self,
        adam: AdamSettings,
        grad: &Tensor,
        out: &Tensor,
    ) -> Result<f64, StepError> {
        let hyper = adamw::numbers(self, adam);
        let (m, v) = (self.state(StateKind::FirstMoment)?, self.state(StateKind::SecondMoment)?);
        self.execute(Subspace::AdamDirection { grad, m, v, out, hyper })?;
        Ok(self.lr * hyper.root_of_correction2() / hyper.correction1())
    }
}
