//! Adafactor (Shazeer and Stern 2018) and AdaLomo (Lv et al. 2023): of a matrix's second moment only the means over rows
//! and columns are kept.

use plimsoll_device::{Adafactor, DType, Rule, SecondMoment};

use super::state::{NewState, StateKind};
use super::{AdafactorSettings, ParameterStep};
use crate::StepError;

pub(super) fn allocate(new: &mut NewState<'_>, settings: &AdafactorSettings) -> Result<(), StepError> {
    if let [rows, columns] = new.parameter.shape[..] {
        new.zeros(StateKind::SecondMomentRows, DType::F32, &[rows])?;
        new.zeros(StateKind::SecondMomentColumns, DType::F32, &[columns])?;
    } else {
        new.like_parameter(StateKind::SecondMoment, DType::F32)?;
    }
    if settings.beta1.is_some() { new.like_parameter(StateKind::FirstMoment, DType::F32) } else { Ok(()) }
}

pub(super) fn update(job: &ParameterStep<'_>, settings: &AdafactorSettings) -> Result<(), StepError> {
    let factors = job.find(StateKind::SecondMomentRows).zip(job.find(StateKind::SecondMomentColumns));
    let second = match factors {
        Some((rows, columns)) => SecondMoment::Factored { rows, columns },
        None => SecondMoment::Full(job.state(StateKind::SecondMoment)?),
    };
    let hyper = Adafactor {
        lr: job.lr,
        beta2: 1.0 - (job.step as f64).powf(settings.decay_rate),
        beta1: settings.beta1.unwrap_or(0.0),
        epsilon: settings.epsilon,
        scale_by_parameter: settings.scale_by_parameter,
        clip_threshold: settings.clip_threshold,
        weight_decay: job.weight_decay,
    };
    job.run(Rule::Adafactor { second, m: job.find(StateKind::FirstMoment), hyper })
}
