//! Lion (Chen et al. 2023): one momentum, and steps of one size.

use plimsoll_device::{DType, Lion, Rule};

use super::state::{NewState, StateKind};
use super::{LionSettings, ParameterStep};
use crate::StepError;

pub(super) fn allocate(new: &mut NewState<'_>) -> Result<(), StepError> {
    new.like_parameter(StateKind::FirstMoment, DType::F32)
}

pub(super) fn update(job: &ParameterStep<'_>, settings: LionSettings) -> Result<(), StepError> {
    job.run(Rule::Lion { m: job.state(StateKind::FirstMoment)?, hyper: numbers(job, settings) })
}

/// The numbers of a job's step.
pub(super) fn numbers(job: &ParameterStep<'_>, settings: LionSettings) -> Lion {
    let LionSettings { beta1, beta2 } = settings;
    Lion { lr: job.lr, beta1, beta2, weight_decay: job.weight_decay }
}
