//! SGD with or without momentum, as PyTorch defines it: weight decay is L2 regularisation.

use plimsoll_device::{DType, Rule, Sgd};

use super::state::{NewState, StateKind};
use super::{ParameterStep, SgdSettings};
use crate::StepError;

pub(super) fn allocate(new: &mut NewState<'_>, settings: &SgdSettings) -> Result<(), StepError> {
    if settings.momentum > 0.0 { new.like_parameter(StateKind::FirstMoment, DType::F32) } else { Ok(()) }
}

pub(super) fn update(job: &ParameterStep<'_>, settings: &SgdSettings) -> Result<(), StepError> {
    let hyper = Sgd {
        lr: job.lr,
        momentum: settings.momentum,
        dampening: settings.dampening,
        nesterov: settings.nesterov,
        weight_decay: job.weight_decay,
        first: job.step == 1,
    };
    job.run(Rule::Sgd { m: job.find(StateKind::FirstMoment), hyper })
}
