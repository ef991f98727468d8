//! What ranks do together with the gradients and weights of a step: gradients are summed, in an order that is fixed, and what one
//! rank has updated is brought to all.

use plimsoll_device::{Collective, DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_memory::Tag;
use plimsoll_parallel::Collectives;

use super::Trainer;
use super::parts::Part;
use super::schedule::BetweenRanks;
use crate::settings::ZeroStage;
use crate::{StepError, StepSettings};

impl Trainer<'_> {
    /// What the ranks do together.
    pub(super) fn between_ranks(&self) -> BetweenRanks {
        BetweenRanks {
            are_many: !self.communicator.is_alone(),
            reduce_each_pass: self.settings.sharding.reduces_each_pass(),
            share_updates: self.shares_updates(),
        }
    }

    /// Whether each rank has its own share of the optimizer's states, and updates that share of the weights.
    pub(super) fn shares_updates(&self) -> bool {
        shares_updates(&self.settings)
    }

    /// What a part's gradients add up to over all passes and ranks, of the rows that this rank updates; `None` where it updates
    /// none. Before they were summed it is what this rank has.
    pub(super) fn summed(&self, part: &Part) -> Result<Option<Tensor>, StepError> {
        let gradient = match self.gradients.total(part) {
            Some(total) => return Ok(Some(total.clone())),
            None if self.settings.sharding.reduces_each_pass() => return Ok(None),
            None => self.gradients.part(part)?,
        };
        match self.shares_updates() {
            true => Ok(part.view(&gradient, &part.share(self.communicator.rank(), self.communicator.size()))),
            false => Ok(Some(gradient)),
        }
    }

    /// Each rank's share of a tensor that holds a part.
    fn shares(&self, part: &Part, tensor: &Tensor) -> Vec<Option<Tensor>> {
        let ranks = self.communicator.size();
        (0..ranks).map(|rank| part.view(tensor, &part.share(rank, ranks))).collect()
    }

    /// Sends each rank its share of what this one has of a part's gradient. Gives this rank's share of what each of them has, in
    /// the order of the ranks; nothing where this rank has no share.
    fn exchange(&self, part: &Part, gradient: &Tensor, within: Collective) -> Result<Vec<Tensor>, StepError> {
        let (device, ranks) = (self.device, self.communicator);
        let shares = self.shares(part, gradient);
        let own = shares.get(ranks.rank() as usize).cloned().flatten();
        let place = |rank: u32| -> Result<Option<Tensor>, StepError> {
            let Some(own) = &own else { return Ok(None) };
            if rank == ranks.rank() {
                return Ok(Some(own.clone()));
            }
            let (tag, name) = (Tag::Communication, "gradients.received");
            Ok(Some(device.alloc(own.dtype(), own.shape().dims(), tag, name)?))
        };
        let received = (0..ranks.size()).map(place).collect::<Result<Vec<_>, _>>()?;
        ranks.all_to_all(device, within, &shares, &received)?;
        Ok(received.into_iter().flatten().collect())
    }

    /// Adds what a pass has written of a part, on all ranks, to what the passes before add up to: pass after pass and rank after
    /// rank, as one rank adds up the passes of the whole batch.
    pub(super) fn add_pass(&mut self, part: &Part, group: u64) -> Result<(), StepError> {
        let (device, ranks) = (self.device, self.communicator);
        let gradient = self.gradients.part(part)?;
        let terms = self.exchange(part, &gradient, Collective::ReduceScatter)?;
        let share = part.share(ranks.rank(), ranks.size());
        for (number, x) in (group * u64::from(ranks.size())..).zip(&terms) {
            let (out, is_first) = self.gradients.total_to_add_to(part, x)?;
            let rounding = self.gradients.rounding_of_sum(part, number, &share);
            match is_first {
                true => device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?,
                false => device.run(Elementwise::Accumulate { x, out: &out, rounding })?,
            }
        }
        Ok(())
    }

    /// Sums a part's gradient over all ranks, when all passes have added to it.
    pub(super) fn sum_over_ranks(&mut self, part: &Part) -> Result<(), StepError> {
        let (device, ranks) = (self.device, self.communicator);
        let everybody_updates = !self.shares_updates();
        if self.settings.sharding.reduces_each_pass() {
            return if everybody_updates { self.gather_total(part) } else { Ok(()) };
        }
        let within = if everybody_updates { Collective::AllReduce } else { Collective::ReduceScatter };
        let gradient = self.gradients.part(part)?;
        let terms = self.exchange(part, &gradient, within)?;
        let share = part.share(ranks.rank(), ranks.size());
        let own = ranks.rank() as usize;
        if let Some(out) = terms.get(own) {
            for (number, x) in (0..).zip(&terms).filter(|(number, _)| *number != own) {
                let rounding = self.gradients.rounding_of_sum(part, number as u64, &share);
                device.run(Elementwise::Accumulate { x, out, rounding })?;
            }
        }
        if everybody_updates {
            ranks.all_gather(device, within, &self.shares(part, &gradient))?;
        }
        Ok(())
    }

    /// Brings every rank all of a part's gradient, of which each has summed its share.
    fn gather_total(&mut self, part: &Part) -> Result<(), StepError> {
        let (device, ranks) = (self.device, self.communicator);
        let (rows, name) = (part.rows.end - part.rows.start, part.parameter.role.name());
        let sizes =
            if part.is_whole() { part.parameter.shape.clone() } else { vec![rows, part.parameter.columns()] };
        let dtype = self.gradients.dtype_of(part);
        let whole = device.alloc(dtype, &sizes, Tag::Gradients, name)?;
        let shares = self.shares(part, &whole);
        if let (Some(x), Some(Some(out))) = (self.gradients.total(part), shares.get(ranks.rank() as usize)) {
            device.run(Elementwise::Cast { x, out, rounding: Rounding::Nearest })?;
        }
        ranks.all_gather(device, Collective::AllReduce, &shares)?;
        self.gradients.set_total(part, whole);
        Ok(())
    }

    /// Brings every rank the rows of a part of a weight that the others have updated.
    pub(super) fn gather_weight(&self, part: &Part, weight: &Tensor) -> Result<(), StepError> {
        let shares = self.shares(part, weight);
        Ok(self.communicator.all_gather(self.device, Collective::AllGather, &shares)?)
    }
}

/// Whether each rank has its own share of the optimizer's states.
pub(super) fn shares_updates(settings: &StepSettings) -> bool {
    settings.ranks.count > 1 && settings.sharding.stage >= ZeroStage::States
}
