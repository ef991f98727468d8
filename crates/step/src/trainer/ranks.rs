//! What ranks do together with the gradients and weights of a step: gradients are summed, in an order that is fixed, and what one
//! rank has updated is brought to all.

use std::collections::VecDeque;
use std::ops::Range;

use plimsoll_device::{Collective, Communicated, DType, DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_memory::Tag;
use plimsoll_parallel::{Collectives, Exchange, Span, Ticket};

use super::Trainer;
use super::parts::Part;
use super::schedule::BetweenRanks;
use crate::head::rows;
use crate::settings::ZeroStage;
use crate::{StepError, StepSettings};

/// What each rank has of this one's share of a gradient.
struct Terms {
    own: Tensor,
    /// Those of the others, in the order of the ranks: `[N - 1, elements]`.
    received: Option<Tensor>,
    /// This rank, before which so many terms come.
    rank: u64,
}

/// What ranks exchange while the step computes.
#[derive(Default)]
pub(super) struct Exchanged {
    /// Gradients, in the order in which they were begun.
    gradients: VecDeque<Reducing>,
    /// Weights of a unit that others have updated.
    pub weights: Vec<(Part, Ticket)>,
}

/// A part of a pass's gradient on its way to those who have shares of it.
struct Reducing {
    part: Part,
    /// The pass.
    group: u64,
    ticket: Ticket,
}

impl Terms {
    /// Terms of ranks before this one.
    fn of_lower(&self, ranks: Range<u64>) -> Option<Tensor> {
        let within = ranks.start.min(self.rank)..ranks.end.min(self.rank);
        self.received.as_ref()?.slice_rows(within).filter(|terms| terms.elements() > 0)
    }

    /// Terms of the ranks behind this one.
    fn of_higher(&self) -> Option<Tensor> {
        let received = self.received.as_ref()?;
        received.slice_rows(self.rank..received.rows())
    }
}

impl Trainer<'_> {
    /// What the ranks do together.
    pub(super) fn between_ranks(&self) -> BetweenRanks {
        BetweenRanks {
            sum_once: !self.replicas.is_alone() && !self.settings.sharding.reduces_each_pass(),
            reduce_each_pass: self.settings.sharding.reduces_each_pass(),
            share_updates: self.shares_updates(),
            share_weights: shares_weights(&self.settings),
            overlap: self.settings.overlap_communication && !self.replicas.is_alone(),
        }
    }

    /// Whether each rank has its own share of the optimizer's states, and updates that share of the weights.
    pub(super) fn shares_updates(&self) -> bool {
        shares_updates(&self.settings)
    }

    /// The rows of a part that this rank has as its share.
    fn own_share(&self, part: &Part) -> Range<u64> {
        part.share(self.sharers.rank(), self.sharers.size())
    }

    /// The rows of a part that this rank updates.
    pub(super) fn updated_rows(&self, part: &Part) -> Range<u64> {
        if self.shares_updates() { self.own_share(part) } else { part.rows.clone() }
    }

    /// What a part's gradients add up to over all passes and ranks: of the rows of which this rank has the sum, which are its share
    /// or all; `None` where there are none.
    pub(super) fn summed(&self, part: &Part) -> Result<Option<Tensor>, StepError> {
        if self.settings.sharding.reduces_each_pass() {
            return Ok(self.gradients.total(part).cloned());
        }
        let gradient = self.gradients.part(part)?;
        Ok(part.view(&gradient, &self.updated_rows(part)))
    }

    /// The same of the rows that this rank updates. Where it updates all rows and has summed its share, the others' are
    /// gathered.
    pub(super) fn to_update(&self, part: &Part) -> Result<Option<Tensor>, StepError> {
        let summed = self.summed(part)?;
        if self.shares_updates() || !shares_sums(&self.settings) {
            return Ok(summed);
        }
        let (device, ranks) = (self.device, &*self.sharers);
        let sizes = part.parameter.shape_of(&part.rows);
        let dtype = self.gradients.dtype_of(part);
        let whole = device.alloc(dtype, &sizes, Tag::Communication, "gradients.gathered")?;
        if let (Some(x), Some(out)) = (&summed, self.share(part, &whole, ranks.rank())) {
            device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?;
        }
        ranks.all_gather(device, Collective::AllReduce, &|rank| self.share(part, &whole, rank))?;
        Ok(Some(whole))
    }

    /// The share of a rank, of those that share or of all with the same weights, of a tensor that holds a part.
    fn share(&self, part: &Part, tensor: &Tensor, rank: u32) -> Option<Tensor> {
        let sharers = self.sharers.size();
        part.view(tensor, &part.share(rank % sharers, sharers))
    }

    /// Sends each rank its share of what this one has of a part's gradient. Gives what each of them has of this rank's share;
    /// nothing where this rank has none.
    fn exchange(
        &self,
        part: &Part,
        gradient: &Tensor,
        within: Collective,
    ) -> Result<Option<Terms>, StepError> {
        let (device, ranks) = (self.device, &*self.replicas);
        let (rank, size) = (ranks.rank(), ranks.size());
        let own = self.share(part, gradient, rank);
        let others = u64::from(size.saturating_sub(1));
        let received = match &own {
            Some(own) if others > 0 => {
                let sizes = [others, own.elements()];
                Some(device.alloc(own.dtype(), &sizes, Tag::Communication, "gradients.received")?)
            }
            _ => None,
        };
        let place = |from: u32| {
            let row = ranks.place_of(from);
            received.as_ref()?.slice_rows(row..row + 1)
        };
        let sent = self.sent(part, gradient.bytes(), own.as_ref().map_or(0, Tensor::bytes), within);
        ranks.all_to_all(device, within, sent, &|to| self.share(part, gradient, to), &place)?;
        Ok(own.map(|own| Terms { own, received, rank: u64::from(rank) }))
    }

    /// What this rank sends of a part's gradient, of which so many bytes are its own share.
    fn sent(&self, part: &Part, bytes: u64, own: u64, within: Collective) -> Communicated {
        // Every group that shares has as many shares.
        let sharers = self.sharers.size();
        let groups = u64::from(self.replicas.size() / sharers.max(1));
        let messages = groups * u64::from(part.sharing(sharers)) - u64::from(own > 0);
        Communicated::of_many(within, groups * bytes - own, messages)
    }

    /// The bytes of a rank's share in a tensor that holds a part in this type; `None` where it has none.
    fn share_bytes(&self, part: &Part, dtype: DType, rank: u32) -> Option<Range<u64>> {
        let sharers = self.sharers.size();
        let rows = part.share(rank % sharers, sharers);
        let byte = |row: u64| dtype.bytes_for((row - part.rows.start) * part.parameter.columns());
        let bytes = byte(rows.start)?..byte(rows.end)?;
        (!bytes.is_empty()).then_some(bytes)
    }

    /// Begins to send each rank its share of what a pass has written of a part.
    pub(super) fn begin_to_add_pass(&mut self, part: &Part, group: u64) -> Result<(), StepError> {
        let gradient = self.gradients.take_part(part)?;
        let (device, ranks, within) = (self.device, &*self.replicas, Collective::ReduceScatter);
        let (rank, dtype) = (ranks.rank(), gradient.dtype());
        let own = self.share_bytes(part, dtype, rank).map_or(0, |bytes| bytes.end - bytes.start);
        let sent = self.sent(part, gradient.bytes(), own, within);
        let mut buffers = vec![gradient];
        if own > 0 {
            let elements = part.share(rank % self.sharers.size(), self.sharers.size());
            let elements = (elements.end - elements.start) * part.parameter.columns();
            let sizes = [u64::from(ranks.size().saturating_sub(1)), elements];
            buffers.push(device.alloc(dtype, &sizes, Tag::Communication, "gradients.received")?);
        }
        let send = |to| Some(Span { buffer: 0, bytes: self.share_bytes(part, dtype, to)? });
        let receive = |from: u32| {
            let row = ranks.place_of(from);
            (own > 0).then_some(Span { buffer: 1, bytes: row * own..(row + 1) * own })
        };
        let exchange = Exchange { within, sent, buffers, send: &send, receive: &receive };
        let ticket = ranks.begin(device, exchange)?;
        self.exchanged.gradients.push_back(Reducing { part: part.clone(), group, ticket });
        Ok(())
    }

    /// Adds what was begun first of all that is under way.
    pub(super) fn add_begun_pass(&mut self) -> Result<(), StepError> {
        let what = "gradients are added that were not exchanged";
        let begun = self.exchanged.gradients.pop_front();
        let Reducing { part, group, ticket } = begun.ok_or(StepError::Invariant { what })?;
        let mut buffers = ticket.wait(self.device)?.into_iter();
        let gradient = buffers.next().ok_or(StepError::Invariant { what })?;
        let rank = self.replicas.rank();
        let Some(own) = self.share(&part, &gradient, rank) else { return Ok(()) };
        drop(gradient);
        self.add_terms(&part, group, &Terms { own, received: buffers.next(), rank: u64::from(rank) })
    }

    /// Begins to bring every rank the rows of a part of a weight that the others have updated, in a buffer of their own.
    pub(super) fn begin_to_gather_weight(
        &self,
        part: &Part,
        weight: &Tensor,
    ) -> Result<(Part, Ticket), StepError> {
        let (device, ranks, within) = (self.device, &*self.sharers, Collective::AllGather);
        let (sizes, dtype) = (part.parameter.shape_of(&part.rows), weight.dtype());
        let buffer = device.alloc(dtype, &sizes, Tag::Communication, "weights.updated")?;
        let own = self.share(part, weight, ranks.rank());
        if let (Some(x), Some(out)) = (&own, self.share(part, &buffer, ranks.rank())) {
            device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?;
        }
        let others = u64::from(ranks.size().saturating_sub(1));
        let sent = own.map(|own| Communicated::of_many(within, own.bytes().saturating_mul(others), others));
        let span = |of| Some(Span { buffer: 0, bytes: self.share_bytes(part, dtype, of)? });
        let send = |_| span(ranks.rank());
        let (buffers, sent) = (vec![buffer], sent.unwrap_or_default());
        let ticket = ranks.begin(device, Exchange { within, sent, buffers, send: &send, receive: &span })?;
        Ok((part.clone(), ticket))
    }

    /// Puts what was brought into the weight.
    pub(super) fn take_gathered_weight(&self, part: &Part, ticket: Ticket) -> Result<(), StepError> {
        let what = "a weight is not what ranks have gathered of it";
        let buffers = ticket.wait(self.device)?;
        let weight = self.weights.resident().tensor(&part.parameter)?;
        let own = match part.is_whole() {
            true => weight.clone(),
            false => rows(weight, part.rows.start, part.rows.end)?,
        };
        let x = buffers.first().ok_or(StepError::Invariant { what })?;
        Ok(self.device.run(Elementwise::Cast { x, out: &own, rounding: Rounding::Nearest })?)
    }

    /// Adds terms to a sum, one after the other; the first of them is the `number`-th of the sum.
    fn add(&self, part: &Part, out: &Tensor, terms: Option<Tensor>, number: u64) -> Result<(), StepError> {
        let Some(terms) = terms.filter(|terms| terms.elements() > 0) else { return Ok(()) };
        let first = self.own_share(part).start * part.parameter.columns();
        let seed = self.gradients.seed_of_sums(part);
        Ok(self.device.run(Elementwise::AccumulateAll { terms: &terms, out, seed, number, first })?)
    }

    /// Adds the gradient of another stage's copy of a table to what this rank has summed of it.
    pub(super) fn add_tied(&self, part: &Part, own: &Tensor, theirs: &Tensor) -> Result<(), StepError> {
        /// Sets it apart from the terms of all passes.
        const NUMBER: u64 = 1 << 40;
        let rows = if shares_sums(&self.settings) { self.own_share(part) } else { part.rows.clone() };
        let (seed, first) = (self.gradients.seed_of_sums(part), rows.start * part.parameter.columns());
        let terms = theirs;
        Ok(self.device.run(Elementwise::AccumulateAll { terms, out: own, seed, number: NUMBER, first })?)
    }

    /// Adds what a pass has written of a part, on all ranks, to what the passes before add up to: pass after pass and rank after
    /// rank, as one rank adds up the passes of the whole batch.
    pub(super) fn add_pass(&mut self, part: &Part, group: u64) -> Result<(), StepError> {
        let gradient = self.gradients.part(part)?;
        match self.exchange(part, &gradient, Collective::ReduceScatter)? {
            Some(terms) => self.add_terms(part, group, &terms),
            None => Ok(()),
        }
    }

    fn add_terms(&mut self, part: &Part, group: u64, terms: &Terms) -> Result<(), StepError> {
        let number = group * u64::from(self.replicas.size());
        let (out, is_first) = self.gradients.total_to_add_to(part, &terms.own)?;
        let mut added = 0;
        if is_first {
            let first = terms.of_lower(0..1).unwrap_or_else(|| terms.own.clone());
            let x = &first.reshape(out.shape().dims()).unwrap_or(first);
            self.device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?;
            added = 1;
        }
        self.add(part, &out, terms.of_lower(added.min(terms.rank)..terms.rank), number + added)?;
        if terms.rank >= added {
            self.add(part, &out, Some(terms.own.clone()), number + terms.rank)?;
        }
        self.add(part, &out, terms.of_higher(), number + terms.rank + 1)
    }

    /// Sums a part's gradient over all ranks, when all passes have added to it and none was summed by itself.
    pub(super) fn sum_over_ranks(&mut self, part: &Part) -> Result<(), StepError> {
        let (device, ranks) = (self.device, &*self.sharers);
        let everybody_updates = !self.shares_updates();
        let within = if everybody_updates { Collective::AllReduce } else { Collective::ReduceScatter };
        let gradient = self.gradients.part(part)?;
        if let Some(terms) = self.exchange(part, &gradient, within)? {
            // In the order of the ranks: others may have the same share, and come to the same sum.
            match terms.of_lower(0..1) {
                None => self.add(part, &terms.own, terms.of_higher(), 0)?,
                Some(sum) => {
                    let sum = &sum.reshape(terms.own.shape().dims()).unwrap_or(sum);
                    self.add(part, sum, terms.of_lower(1..terms.rank), 0)?;
                    self.add(part, sum, Some(terms.own.clone()), terms.rank - 1)?;
                    self.add(part, sum, terms.of_higher(), terms.rank)?;
                    let (x, out, rounding) = (sum, &terms.own, Rounding::Nearest);
                    device.run(Elementwise::Cast { x, out, rounding })?;
                }
            }
        }
        if everybody_updates {
            ranks.all_gather(device, within, &|rank| self.share(part, &gradient, rank))?;
        }
        Ok(())
    }

    /// Brings every rank the rows of a part of a weight that the others have updated.
    pub(super) fn gather_weight(&self, part: &Part, weight: &Tensor) -> Result<(), StepError> {
        let share = |rank| self.share(part, weight, rank);
        Ok(self.sharers.all_gather(self.device, Collective::AllGather, &share)?)
    }
}

/// Whether each rank has its own share of the optimizer's states.
pub(super) fn shares_updates(settings: &StepSettings) -> bool {
    settings.ranks.mesh.replicas() > 1 && settings.sharding.stage >= ZeroStage::States
}

/// Whether each rank has its own share of the weights.
pub(super) fn shares_weights(settings: &StepSettings) -> bool {
    settings.ranks.mesh.replicas() > 1 && settings.sharding.stage >= ZeroStage::Weights
}

/// Whether each rank has the sums of its own share of the gradients alone.
pub(super) fn shares_sums(settings: &StepSettings) -> bool {
    shares_updates(settings) || settings.ranks.mesh.replicas() > 1 && settings.sharding.reduces_each_pass()
}
