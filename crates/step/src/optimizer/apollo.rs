//! APOLLO (Zhu et al. 2024): Adam in a random space of few dimensions says how much to scale each channel of the
//! gradient, or all of it (APOLLO-Mini). The projection is made anew from its seed at every step, and not kept.

use plimsoll_device::{Apollo, Channels, DType, Rule, Subspace};
use plimsoll_memory::splitmix64;

use super::low_rank::{Projected, allocate_moments, update_plain};
use super::state::{NewState, StateKind};
use super::{ApolloChannels, LowRankSettings, ParameterStep};
use crate::StepError;

/// Added to the projected gradient's norm.
const EPSILON: f32 = 1e-8;

/// The scaled gradient's norm grows by this factor at most in a step (Fira, Chen et al. 2024).
const GROWTH_LIMIT: f64 = 1.01;

pub(super) fn allocate(new: &mut NewState<'_>, settings: &LowRankSettings) -> Result<(), StepError> {
    allocate_moments(new, settings.rank)?;
    match Projected::of(new.parameter, settings.rank) {
        Some(_) => new.zeros(StateKind::UpdateNorm, DType::F32, &[1]),
        None => Ok(()),
    }
}

pub(super) fn update(
    job: &ParameterStep<'_>,
    settings: &LowRankSettings,
    channels: ApolloChannels,
) -> Result<(), StepError> {
    let Some(shape) = Projected::of(job.parameter, settings.rank) else {
        return update_plain(job, settings.adam);
    };
    let projection = job.workspace(&shape.projection(), "projection")?;
    let seed = splitmix64(job.own_seed, job.step.saturating_sub(1) / settings.update_proj_gap.max(1));
    let std = (settings.rank as f64).powf(-0.5) as f32;
    job.execute(Subspace::RandomNormal { out: &projection, std, seed })?;
    let low = job.project(shape, &projection)?;
    drop(projection);

    let direction = job.workspace(&shape.low(), "direction")?;
    let lr = job.adam_direction(settings.adam, &low, &direction)? * settings.scale.sqrt();
    let (channels, count) = match channels {
        ApolloChannels::Tensor => (Channels::Whole, 1),
        ApolloChannels::Channel if shape.is_tall() => (Channels::Rows, shape.rows),
        ApolloChannels::Channel => (Channels::Columns, shape.columns),
    };
    let ratios = job.workspace(&[count], "channel_scales")?;
    job.execute(Subspace::NormRatios { a: &direction, b: &low, out: &ratios, channels, epsilon: EPSILON })?;
    let hyper = Apollo { lr, decay: job.lr * job.weight_decay, growth_limit: GROWTH_LIMIT };
    job.run(Rule::Apollo { ratios: &ratios, channels, norm: job.state(StateKind::UpdateNorm)?, hyper })
}
