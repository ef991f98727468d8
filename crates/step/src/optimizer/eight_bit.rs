//! AdamW and Lion with block-wise 8-bit states (Dettmers et al. 2022), as bitsandbytes has them: small parameters, and
//! embeddings unless wanted otherwise, have f32 states.

use plimsoll_device::{Adam, DType, Rule};

use super::state::{NewState, StateKind, codes};
use super::{AdamSettings, EightBit, LionSettings, ParameterStep, adamw, decay_after_step, lion};
use crate::StepError;

pub(super) fn allocate_adamw(new: &mut NewState<'_>, bits: EightBit) -> Result<(), StepError> {
    if !bits.holds(new.whole) {
        return adamw::allocate(new, DType::F32);
    }
    new.codes(StateKind::FirstMoment, StateKind::FirstMomentAbsmax)?;
    new.codes(StateKind::SecondMoment, StateKind::SecondMomentAbsmax)
}

/// Weights decay after the step, those with f32 states too.
pub(super) fn update_adamw(job: &ParameterStep<'_>, adam: AdamSettings) -> Result<(), StepError> {
    let hyper = adamw::numbers(job, adam);
    let m = codes(job.state, StateKind::FirstMoment, StateKind::FirstMomentAbsmax);
    let v = codes(job.state, StateKind::SecondMoment, StateKind::SecondMomentAbsmax);
    match m.zip(v) {
        Some((m, v)) => job.run(Rule::AdamW8bit { m, v, hyper }),
        None => {
            let (lr, weight_decay) = decay_after_step(hyper.lr, hyper.weight_decay);
            adamw::step(job, Adam { lr, weight_decay, ..hyper })
        }
    }
}

pub(super) fn allocate_lion(new: &mut NewState<'_>, bits: EightBit) -> Result<(), StepError> {
    if bits.holds(new.whole) {
        new.codes(StateKind::FirstMoment, StateKind::FirstMomentAbsmax)
    } else {
        lion::allocate(new)
    }
}

pub(super) fn update_lion(job: &ParameterStep<'_>, numbers: LionSettings) -> Result<(), StepError> {
    match codes(job.state, StateKind::FirstMoment, StateKind::FirstMomentAbsmax) {
        Some(m) => job.run(Rule::Lion8bit { m, hyper: lion::numbers(job, numbers) }),
        None => lion::update(job, numbers),
    }
}
