//! Ranks that have different experts, and each its own tokens (GShard, Lepikhin et al. 2020). No size depends on the routing, so there are
//! two ways to the experts and back:
//!
//! - Without capacities any rank may need all tokens of all others. Each sends them to everybody, computes the rows of its own experts, and
//!   gets the sum of what all ranks have made of its tokens.
//! - Where capacities leave fewer rows for the experts of a rank than there are tokens, rows alone are sent, in blocks of as many slots for
//!   each rank as there may be rows (all-to-all), and come back the same way. A token's rows are then added up where it is at home, in the
//!   order in which one rank adds them.
//!
//! Choices and weights of tokens, which are small, come together in both.

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
    /// The choice of this rank's tokens, and the slots that it has for rows of each rank, where rows are exchanged.
    own: Option<(Tensor, u64)>,
}

/// Where rows are that ranks exchange, in P blocks of M slots.
pub(super) struct Blocks {
    /// u32 `[P M]`: the place of the row in each slot that this rank sends.
    sent: Tensor,
    /// u32 `[N, k]`: the slot of each of its places.
    taken: Tensor,
    /// u32 `[R]`: the slot in which each row of its own experts arrives.
    slots: Tensor,
    /// u32 `[P M]`: the row of its own experts in each of those.
    rows: Tensor,
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
        let own = self.slots_for_rank(normed.rows(), routed).map(|slots| (routed.sent().clone(), slots));
        Ok(Tokens {
            normed: if own.is_some() { normed.clone() } else { of_all(normed)? },
            choice: of_all(routed.sent())?,
            weights: of_all(&routed.weights)?,
            most,
            own,
        })
    }

    /// Rows that a rank's experts may take of so many tokens of another, where they are clearly fewer than these.
    fn slots_for_rank(&self, tokens: u64, routed: &Routed) -> Option<u64> {
        let (_, (_, capacity)) = (self.ctx.expert_ranks?, routed.taken.as_ref()?);
        let experts = self.ctx.spec.own_experts(self.spec);
        let experts = experts.end - experts.start;
        let rows = (tokens * self.spec.per_token.min(experts)).min(experts.saturating_mul(capacity.each));
        // What is recomputed goes to the experts once more, where tokens that came together are kept.
        (rows.saturating_mul(6) < tokens.saturating_mul(5)).then_some(rows)
    }

    /// The way of rows that are sorted by the experts of this rank, over the tokens of all.
    pub(super) fn blocks(
        &self,
        all: &Tokens,
        sources: &Tensor,
        offsets: &Tensor,
    ) -> Result<Option<Blocks>, StepError> {
        let (Some((choice, slots)), device) = (&all.own, self.ctx.device) else { return Ok(None) };
        let alloc = |sizes: &[u64], name| device.alloc(DType::U32, sizes, Tag::Activations, name);
        let experts = offsets.elements() - 1;
        let blocks = self.spec.count / experts.max(1);
        let sizes = choice.shape();
        let (sent, taken) = (alloc(&[blocks * slots], "sent")?, alloc(sizes.dims(), "taken")?);
        {
            // Rows of this rank's tokens, by all experts.
            let most = choice.elements().min(self.spec.count * all.most / blocks.max(1));
            let (sources, places) = (alloc(&[most], "sources")?, alloc(sizes.dims(), "places")?);
            let offsets = alloc(&[self.spec.count + 1], "offsets")?;
            let (sources, places, offsets) = (&sources, &places, &offsets);
            device.run(Routing::Sort { choice, first: 0, sources, places, offsets })?;
            device.run(Routing::ToBlocks { sources, offsets, each: experts, slots: &sent, taken: &taken })?;
        }
        let (rows, slots) = (alloc(&[blocks * slots], "rows")?, alloc(&[sources.elements()], "slots")?);
        let each = choice.elements();
        device.run(Routing::FromBlocks { sources, offsets, each, blocks, rows: &rows, slots: &slots })?;
        Ok(Some(Blocks { sent, taken, slots, rows }))
    }

    /// Rows `[R, H]` for the experts of this rank, of the tokens x `[N, H]` of each.
    pub(super) fn exchange_rows(
        &self,
        ranks: &Products<'_>,
        blocks: &Blocks,
        x: &Tensor,
        rows: u64,
    ) -> Result<Tensor, StepError> {
        let device = self.ctx.device;
        let received = self.exchange(ranks, x, &blocks.sent, blocks.taken.columns())?;
        let out = device.alloc(x.dtype(), &[rows, x.columns()], Tag::Activations, "routed")?;
        device.run(Routing::Gather { x: &received, sources: &blocks.slots, each: 1, out: &out })?;
        Ok(out)
    }

    /// out `[N, H]` (+)= the rows x of this rank's tokens, which come back from all ranks.
    pub(super) fn combine_blocks(
        &self,
        ranks: &Products<'_>,
        blocks: &Blocks,
        x: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let returned = self.exchange(ranks, x, &blocks.rows, 1)?;
        let places = &blocks.taken;
        Ok(self.ctx.device.run(Routing::Combine { x: &returned, places, out, accumulate })?)
    }

    /// Sends a row of x for each slot, `sources[q] / each` for slot q, and returns what the others have sent in theirs.
    fn exchange(
        &self,
        ranks: &Products<'_>,
        x: &Tensor,
        sources: &Tensor,
        each: u64,
    ) -> Result<Tensor, StepError> {
        let (device, sizes) = (self.ctx.device, [sources.elements(), x.columns()]);
        let sent = device.alloc(x.dtype(), &sizes, Tag::Communication, "rows.sent")?;
        device.run(Routing::Gather { x, sources, each, out: &sent })?;
        ranks.exchange(device, &sent)
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
