//! Adam-mini (Zhang et al. 2024), in the partition of its package since version 1.1: a second moment for each head of
//! the query and key projections, for each output row of the other matrices, for each token of embeddings, and one for
//! a norm. Biases have ordinary Adam.

use plimsoll_device::{DType, Rule};
use plimsoll_model::{Parameter, ParameterKind, Role};

use super::state::{NewState, StateKind};
use super::{AdamSettings, ParameterStep, adamw};
use crate::StepError;

pub(super) fn allocate(new: &mut NewState<'_>, head_dim: u64) -> Result<(), StepError> {
    match runs(new.parameter, head_dim) {
        None => adamw::allocate(new, DType::F32),
        Some(runs) => {
            new.like_parameter(StateKind::FirstMoment, DType::F32)?;
            new.zeros(StateKind::SecondMoment, DType::F32, &[runs])
        }
    }
}

pub(super) fn update(job: &ParameterStep<'_>, adam: AdamSettings) -> Result<(), StepError> {
    if is_bias(job.parameter) {
        return adamw::update(job, adam);
    }
    job.run(Rule::AdamMini {
        m: job.state(StateKind::FirstMoment)?,
        v: job.state(StateKind::SecondMoment)?,
        hyper: adamw::numbers(job, adam),
    })
}

/// Runs of elements that share a second moment; `None` where each has its own.
fn runs(p: &Parameter, head_dim: u64) -> Option<u64> {
    if is_bias(p) {
        return None;
    }
    let rows = if p.shape.len() > 1 { p.rows() } else { 1 };
    let of_heads = matches!(p.role, Role::QProj | Role::KProj | Role::QUpProj);
    let by_head = of_heads && head_dim > 0 && rows.is_multiple_of(head_dim);
    Some(if by_head { rows / head_dim } else { rows })
}

fn is_bias(p: &Parameter) -> bool {
    p.role.kind() == ParameterKind::Bias
}
