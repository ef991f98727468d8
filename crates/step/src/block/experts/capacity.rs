//! How many places experts take in training, where that is limited: so many shares of the places of a choice, N tokens times k, rounded
//! up. Shares are even, but that an expert with matrices has tau where one without has 1 (MoE++, Jin et al. 2024). The first in the order of tokens are served, so that no token depends on a later one; the others are dropped, and the
//! residual stream passes on what they were.

use plimsoll_device::{Capacity, DType, DeviceExt, Routing, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::ExpertsSpec;

use super::Experts;
use crate::StepError;

/// What experts take of the places of so many tokens.
pub(super) fn capacity(factor: f64, tokens: u64, spec: &ExpertsSpec) -> Capacity {
    let places = factor * (tokens * spec.per_token) as f64;
    // A token has an expert once.
    let of = |share: f64| ((places * share).ceil() as u64).clamp(1, tokens.max(1));
    let (tau, without) = (spec.tau(), spec.total() - spec.count);
    let all = tau * spec.count as f64 + without as f64;
    Capacity { each: of(tau / all), first: spec.count, others: of(1.0 / all) }
}

impl Experts<'_, '_> {
    /// The places of a choice that experts take, where it is limited. What is dropped is counted where `dropped` is given.
    pub(super) fn limit(
        &self,
        choice: &Tensor,
        dropped: Option<&Tensor>,
    ) -> Result<Option<(Tensor, Capacity)>, StepError> {
        let factor = self.ctx.routes.and_then(|routes| routes.training()?.capacity);
        let Some(factor) = factor else { return Ok(None) };
        let device = self.ctx.device;
        let capacity = capacity(factor, choice.rows(), self.spec);
        let sizes = choice.shape();
        let taken = device.alloc(DType::U32, sizes.dims(), Tag::Activations, "experts.taken")?;
        device.run(Routing::Limit { choice, capacity, taken: &taken, dropped })?;
        Ok(Some((taken, capacity)))
    }
}
