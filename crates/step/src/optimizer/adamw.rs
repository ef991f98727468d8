//! AdamW (Loshchilov and Hutter 2019) with states in f32, or in bf16 with stochastic rounding.

use plimsoll_device::{Adam, DType, Rule};

use super::state::{NewState, StateKind};
use super::{AdamSettings, ParameterStep};
use crate::StepError;

/// First and second moment in `dtype`.
pub(super) fn allocate(new: &mut NewState<'_>, dtype: DType) -> Result<(), StepError> {
    new.like_parameter(StateKind::FirstMoment, dtype)?;
    new.like_parameter(StateKind::SecondMoment, dtype)
}

pub(super) fn update(job: &ParameterStep<'_>, adam: AdamSettings) -> Result<(), StepError> {
    step(job, numbers(job, adam))
}

/// A step with the given numbers on the moments that [`allocate`] made.
pub(super) fn step(job: &ParameterStep<'_>, hyper: Adam) -> Result<(), StepError> {
    job.run(Rule::AdamW {
        m: job.state(StateKind::FirstMoment)?,
        v: job.state(StateKind::SecondMoment)?,
        hyper,
    })
}

/// The numbers of a job's step.
pub(super) fn numbers(job: &ParameterStep<'_>, adam: AdamSettings) -> Adam {
    let AdamSettings { beta1, beta2, epsilon } = adam;
    Adam { lr: job.lr, beta1, beta2, epsilon, weight_decay: job.weight_decay, step: job.step }
}
