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
    let (tau, without) = (spec.tau(), spec.total() - spec.count);
    let all = tau * spec.count as f64 + without as f64;
    let of = |shares: f64| ((places * shares / all).ceil() as u64).clamp(1, tokens.max(1));
    Capacity { each: of(tau), first: spec.count, others: of(1.0) }
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

#[cfg(test)]
mod tests {
    use plimsoll_model::catalogue;

    use super::*;

    #[test]
    fn even_shares_are_not_rounded_up() {
        let spec = catalogue::find("olmoe-1b-7b").unwrap().experts.unwrap();
        for (count, tokens) in [(91, 273), (75, 225), (64, 64), (93, 279)] {
            let spec = ExpertsSpec { count, per_token: 2, ..spec.clone() };
            let each = |factor| capacity(factor, tokens, &spec).each;
            let even = tokens * 2 / count;
            assert_eq!([each(0.5), each(1.0), each(1.001)], [even / 2, even, even + 1], "{count}");
        }
    }
}
