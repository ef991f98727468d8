//! Ranks that have different experts, and each its own tokens (GShard, Lepikhin et al. 2020): the tokens of all come together, each rank
//! computes the rows of its own experts, and gets the sum of what all ranks have made of its own tokens. Every rank sends all of its tokens
//! to all others, so that no size depends on the routing.

use plimsoll_device::{DType, DeviceExt, Elementwise, Rounding, Routing, Tensor};
use plimsoll_memory::Tag;

use super::{Experts, Routed};
use crate::StepError;
use crate::products::Products;

/// Tokens that experts are computed for.
pub(super) struct Tokens {
    /// `[N, H]`
    pub normed: Tensor,
    /// u32 `[N, k]`: the places that experts take.
    pub choice: Tensor,
    /// f32 `[N, k]`
    pub weights: Tensor,
    /// What an expert takes of them at most.
    most: u64,
}

impl Tokens {
    /// Rows that there is room for, of so many experts.
    pub fn row_bound(&self, experts: u64) -> u64 {
        let (tokens, per_token) = (self.choice.rows(), self.choice.columns());
        (tokens * per_token.min(experts)).min(experts.saturating_mul(self.most))
    }
}

impl Experts<'_, '_> {
    /// The tokens of all ranks that have different experts; this one's, where it has all experts.
    pub(super) fn of_all_ranks(&self, normed: &Tensor, routed: &Routed) -> Result<Tokens, StepError> {
        let of_all = |x| self.rows_of_all_ranks(x);
        let ranks = self.ctx.expert_ranks.map_or(1, |ranks| u64::from(ranks.ranks().size()));
        let most = routed.taken.as_ref().map_or(u64::MAX, |(_, capacity)| capacity.each * ranks);
        Ok(Tokens {
            normed: of_all(normed)?,
            choice: of_all(routed.sent())?,
            weights: of_all(&routed.weights)?,
            most,
        })
    }

    /// What all of them have of x.
    pub(super) fn rows_of_all_ranks(&self, x: &Tensor) -> Result<Tensor, StepError> {
        let (ranks, device) = (self.ctx.expert_ranks, self.ctx.device);
        ranks.map_or_else(|| Ok(x.clone()), |ranks| ranks.rows_of_all(device, x))
    }

    /// Sets out, f32 `[N, k]`, to the sum over the ranks of what `write` makes of the tokens of all.
    pub(super) fn sum_of_ranks(
        &self,
        out: &Tensor,
        write: impl FnOnce(&Tensor) -> Result<(), StepError>,
    ) -> Result<(), StepError> {
        let (Some(ranks), device) = (self.ctx.expert_ranks, self.ctx.device) else { return write(out) };
        let sizes = [out.rows() * u64::from(ranks.ranks().size()), out.columns()];
        let all = device.alloc(DType::F32, &sizes, Tag::Communication, "experts.partial")?;
        write(&all)?;
        let x = &ranks.own_sum(device, &all)?;
        Ok(device.run(Elementwise::Cast { x, out, rounding: Rounding::Nearest })?)
    }

    /// out `[N, H]` (+)= the rows of this rank's tokens on all ranks, added up.
    pub(super) fn combine_ranks(
        &self,
        ranks: &Products<'_>,
        places: &Tensor,
        x: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let (device, sizes) = (self.ctx.device, [places.rows(), x.columns()]);
        let all = device.alloc(out.dtype(), &sizes, Tag::Communication, "experts.partial")?;
        device.run(Routing::Combine { x, places, out: &all, accumulate: false })?;
        let own = ranks.own_sum(device, &all)?;
        match accumulate {
            true => device.run(Elementwise::Add { a: &own, b: out, out })?,
            false => device.run(Elementwise::Cast { x: &own, out, rounding: Rounding::Nearest })?,
        }
        Ok(())
    }
}
