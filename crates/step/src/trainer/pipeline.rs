//! Micro-batches on their way through a stage of a pipeline. A stage works on a micro-batch while its neighbours work on others: some
//! go forward ahead of the first that comes back, then one goes back for each that goes forward, and at last those that are left
//! come back. All of them being ahead is GPipe.
//!
//! Gradients are added up in the order of the micro-batches, as one rank does.

use plimsoll_device::{Collective, DeviceExt, Iterations, KnownRounds, Tensor};
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, Role};
use plimsoll_parallel::Communicator;

use super::lanes::{NOTHING_LEFT, again};
use super::parts::Part;
use super::pass::Pass;
use super::schedule::{Schedule, Side, Slot};
use super::{Completion, Trainer};
use crate::StepError;
use crate::block::{Held, Visit};
use crate::context::Context;
use crate::embedding;
use crate::settings::MicroBatches;
use crate::stage::{MOST_AT_ONCE, PipelineSchedule, Stage};

/// The ranks that micro-batches of this one go through.
pub(crate) struct Stages<'a> {
    /// In the order of the stages.
    pub(crate) ranks: Box<dyn Communicator + 'a>,
    /// This one's.
    pub(crate) stage: Stage,
}

/// The ranks that have the whole model between them.
pub(crate) struct Model<'a> {
    pub(crate) ranks: Box<dyn Communicator + 'a>,
    /// What this one has.
    pub(crate) stage: Stage,
}

/// What goes through the stages in one direction.
#[derive(Clone, Copy)]
pub(crate) struct Flow<'s> {
    stages: Option<&'s Stages<'s>>,
}

impl<'s> Flow<'s> {
    /// Through these; through this rank alone where there are none.
    pub fn through(stages: Option<&'s Stages<'s>>) -> Flow<'s> {
        Flow { stages }
    }

    /// What comes in: of the stage before, or what the first stage makes.
    pub fn enter(
        &self,
        ctx: &Context<'_>,
        tokens: &Tensor,
        first: impl FnOnce() -> Result<Tensor, StepError>,
    ) -> Result<Tensor, StepError> {
        match self.stages.filter(|stages| !stages.stage.is_first()) {
            None => first(),
            Some(stages) => {
                let x = embedding::residual(ctx, ctx.stream_rows(tokens.elements()))?;
                stages.exchange(ctx.device, Side::Previous, None, Some(&x))?;
                Ok(x)
            }
        }
    }

    /// What goes out: to the stage behind; `None` of what did, and what did not where this is the last one.
    pub fn leave(&self, ctx: &Context<'_>, x: Tensor) -> Result<Option<Tensor>, StepError> {
        match self.stages.filter(|stages| !stages.stage.is_last()) {
            None => Ok(Some(x)),
            Some(stages) => {
                stages.exchange(ctx.device, Side::Next, Some(&x), None)?;
                Ok(None)
            }
        }
    }
}

impl Stages<'_> {
    /// Sends to a neighbour and receives from it.
    fn exchange(
        &self,
        device: &dyn plimsoll_device::Device,
        side: Side,
        send: Option<&Tensor>,
        receive: Option<&Tensor>,
    ) -> Result<(), StepError> {
        let number = self.stage.number;
        let other = match side {
            Side::Previous => number.checked_sub(1).ok_or(NOTHING_LEFT)?,
            Side::Next => number + 1,
        };
        let (send, receive) = (send.map(|x| (other, x)), receive.map(|x| (other, x)));
        Ok(self.ranks.send_receive(device, Collective::Send, send, receive)?)
    }
}

/// The micro-batches of a step.
struct Way<'s, 'c, 'a> {
    trainer: &'s mut Trainer<'a>,
    micro_batches: MicroBatches<'c>,
    pass: Pass<'c>,
    completion: Completion,
    /// Those that go forward before the first comes back.
    ahead: u64,
    /// All.
    count: u64,
    /// Those that have gone forward, and those that are through. A dry run leaves out some.
    entered: u64,
    done: u64,
}

impl Trainer<'_> {
    /// All micro-batches of a step through this stage.
    pub(super) fn through_stage(
        &mut self,
        micro_batches: MicroBatches<'_>,
        scale: f32,
        completion: Completion,
    ) -> Result<(), StepError> {
        let stages = self.stages.clone().ok_or(NOTHING_LEFT)?;
        let (device, count) = (self.device, micro_batches.len());
        let behind = u64::from(stages.stage.count - 1 - stages.stage.number);
        if self.settings.pipeline_schedule == PipelineSchedule::GPipe && count > MOST_AT_ONCE {
            return Err(StepError::Invariant { what: "GPipe has too many micro-batches under way" });
        }
        let ahead = match self.settings.pipeline_schedule {
            PipelineSchedule::OneForwardOneBackward => behind.min(count),
            PipelineSchedule::GPipe => count,
        };
        if let Some(mover) = &self.mover {
            mover.settle()?;
        }
        let head = match self.spec.part.head {
            true => Some(self.weights.resident().gather(BlockId::Head)?),
            false => None,
        };
        let segments = self.policy.segments().collect();
        let pass = Pass { lanes: Vec::new(), head: head.as_ref(), segments, scale, group: 0, incoming: None };
        let (entered, done) = (0, 0);
        let mut way = Way { trainer: self, micro_batches, pass, completion, ahead, count, entered, done };
        for number in 0..ahead {
            let (enters, forward) = (way.enters(), way.forward(number)?);
            let leaves = way.side(Side::Next, Some(way.front()), None);
            way.perform(&[enters, Some(forward), leaves])?;
        }
        if ahead < count {
            let enters = way.enters();
            way.perform(&[enters])?;
            // The last one is followed by none that enters.
            device.repeat(count - ahead - 1, &mut way)?;
            way.one_each(count - ahead - 1)?;
        }
        for number in count - ahead..count {
            let lane = way.back();
            let (comes, goes) =
                (way.side(Side::Next, None, Some(lane)), way.side(Side::Previous, Some(lane), None));
            let backward = way.backward(number);
            way.perform(&[comes, Some(backward), goes, Some(Slot::Done { lane })])?;
            way.done += 1;
        }
        drop(way);
        self.tie_table()?;
        self.settle_lanes()
    }

    /// What a lane sends to a neighbour, and what comes from there.
    pub(super) fn exchange_lanes(
        &mut self,
        pass: &mut Pass<'_>,
        side: Side,
        send: Option<usize>,
        receive: Option<usize>,
    ) -> Result<(), StepError> {
        let stages = self.stages.clone().ok_or(NOTHING_LEFT)?;
        let (env, device) = (&self.env(), self.device);
        let mut sent = None;
        if let Some(lane) = send {
            let lane = pass.lane(lane)?;
            let held = match side {
                Side::Next => lane.x.take(),
                Side::Previous => lane.dx.take(),
            };
            let ready = self.ready(lane)?;
            sent = Some(again(held, &self.turn(env, lane, &ready, Visit::Forward)?)?);
        }
        let precision = self.settings.precision;
        let sizes = [self.settings.stream_rows(), self.spec.hidden_size];
        let name = if side == Side::Next { "dresidual" } else { "residual" };
        let room = receive.map(|_| device.alloc(precision.activations, &sizes, Tag::Activations, name));
        let received = room.transpose()?;
        stages.exchange(device, side, sent.as_ref(), received.as_ref())?;
        match (side, receive) {
            (Side::Next, Some(lane)) => pass.lane(lane)?.dx = received.map(Held::plain),
            (Side::Previous, _) => pass.incoming = received,
            (Side::Next, None) => {}
        }
        Ok(())
    }

    /// The block of the table that this stage and another one train.
    pub(super) fn tied_block(&self) -> Option<BlockId> {
        let stage = &self.stages.as_ref()?.stage;
        let block = match () {
            () if stage.is_first() => BlockId::Embedding,
            () if stage.is_last() => BlockId::Head,
            () => return None,
        };
        stage.ties_training.then_some(block)
    }

    /// Adds the gradients of a table that two stages have, and takes their norm.
    fn tie_table(&mut self) -> Result<(), StepError> {
        let Some(block) = self.tied_block() else { return Ok(()) };
        let schedule = Schedule::tie(&self.parts, self.between_ranks(), block);
        self.perform(&schedule, &mut Pass::empty())
    }

    /// Has the last stage's table have the values of the first one's.
    pub(super) fn follow_table(&mut self) -> Result<(), StepError> {
        let Some(block) = self.tied_block() else { return Ok(()) };
        let schedule = Schedule::follow(&self.parts, self.between_ranks(), block);
        self.perform(&schedule, &mut Pass::empty())
    }

    /// Adds what the last stage has of the gradient of a part of the table to what the first one has.
    pub(super) fn tie(&mut self, part: &Part) -> Result<(), StepError> {
        let Some(own) = self.summed(part)? else { return Ok(()) };
        let stages = self.stages.clone().ok_or(NOTHING_LEFT)?;
        if stages.stage.is_last() {
            let first = Some((0, &own));
            return Ok(stages.ranks.send_receive(self.device, Collective::Send, first, None)?);
        }
        let name = Role::LmHead.name();
        let theirs = self.device.alloc(own.dtype(), own.shape().dims(), Tag::Communication, name)?;
        let last = Some((stages.stage.count - 1, &theirs));
        stages.ranks.send_receive(self.device, Collective::Send, None, last)?;
        self.add_tied(part, &own, &theirs)
    }

    /// Sends a tensor from the first stage to the last one.
    pub(super) fn between_ends(&self, x: &Tensor) -> Result<(), StepError> {
        let stages = self.stages.clone().ok_or(NOTHING_LEFT)?;
        let (send, receive) = match stages.stage.is_last() {
            true => (None, Some((0, x))),
            false => (Some((stages.stage.count - 1, x)), None),
        };
        Ok(stages.ranks.send_receive(self.device, Collective::Send, send, receive)?)
    }

    /// The first block of all stages whose output is not finite, from that of this one.
    pub(super) fn first_of_stages(&self, own: Option<BlockId>) -> Result<Option<BlockId>, StepError> {
        let Some(stages) = &self.stages else { return Ok(own) };
        let all = stages.ranks.gather_numbers(&[own.map_or(f64::INFINITY, place_of)])?;
        Ok(block_at(all.into_iter().flatten().fold(f64::INFINITY, f64::min)))
    }

    /// The last block of the whole model whose gradient is not finite, from that of this rank: the first in the order of the backward
    /// pass.
    pub(super) fn last_of_model(&self, own: Option<BlockId>) -> Result<Option<BlockId>, StepError> {
        let Some(model) = &self.model else { return Ok(own) };
        let all = model.ranks.gather_numbers(&[own.map_or(f64::NEG_INFINITY, place_of)])?;
        Ok(block_at(all.into_iter().flatten().fold(f64::NEG_INFINITY, f64::max)))
    }
}

/// A number for a block, in the order of the forward pass.
fn place_of(block: BlockId) -> f64 {
    match block {
        BlockId::Embedding => -1.0,
        BlockId::Layer(layer) => f64::from(layer),
        BlockId::Head => f64::MAX,
    }
}

/// The block of a number; `None` of an endless one.
fn block_at(place: f64) -> Option<BlockId> {
    match place {
        _ if place.is_infinite() => None,
        -1.0 => Some(BlockId::Embedding),
        f64::MAX => Some(BlockId::Head),
        layer => Some(BlockId::Layer(layer as u32)),
    }
}

impl Way<'_, '_, '_> {
    /// The place of a micro-batch among those that are under way.
    fn lane(&self, nth: u64) -> usize {
        (nth % (self.ahead + 1).min(self.count).max(1)) as usize
    }

    /// That of the one that has gone forward last.
    fn front(&self) -> usize {
        self.lane(self.entered.saturating_sub(1))
    }

    /// That of the one that comes back next.
    fn back(&self) -> usize {
        self.lane(self.done)
    }

    fn stage(&self) -> Option<&Stage> {
        self.trainer.stages.as_ref().map(|stages| &stages.stage)
    }

    /// What is exchanged with a neighbour; nothing where there is none.
    fn side(&self, side: Side, send: Option<usize>, receive: Option<usize>) -> Option<Slot> {
        let is_end = match side {
            Side::Previous => Stage::is_first,
            Side::Next => Stage::is_last,
        };
        let exchange = Slot::Exchange { side, send, receive };
        self.stage().is_some_and(|stage| !is_end(stage)).then_some(exchange)
    }

    /// What comes from the stage before for the micro-batch that enters next.
    fn enters(&self) -> Option<Slot> {
        self.side(Side::Previous, None, Some(0))
    }

    fn completion(&self, number: u64) -> Option<Completion> {
        (number + 1 == self.count).then_some(self.completion)
    }

    /// A micro-batch forward, in a lane of its own from here on.
    fn forward(&mut self, number: u64) -> Result<Slot, StepError> {
        let (lane, completion) = (self.lane(self.entered), self.completion(number));
        self.entered += 1;
        let source = self.micro_batches.group(number, 1);
        let new = self.trainer.lanes(&source, number, None)?.pop().ok_or(NOTHING_LEFT)?;
        match self.pass.lanes.get_mut(lane) {
            Some(old) => *old = new,
            None => self.pass.lanes.push(new),
        }
        Ok(Slot::Forward { lane, number, completion })
    }

    fn backward(&self, number: u64) -> Slot {
        Slot::Backward { lane: self.back(), number, completion: self.completion(number) }
    }

    fn perform(&mut self, slots: &[Option<Slot>]) -> Result<(), StepError> {
        let slots: Vec<Slot> = slots.iter().copied().flatten().collect();
        let segments = self.pass.segments.clone();
        let schedule = Schedule::stage(&self.trainer.shape(&segments, 1), &slots);
        self.trainer.perform(&schedule, &mut self.pass)
    }

    /// One micro-batch forward, and the one back whose turn it is.
    fn one_each(&mut self, back: u64) -> Result<(), StepError> {
        self.trainer.device.enter(Phase::Forward, None);
        let number = back + self.ahead;
        let forward = self.forward(number)?;
        let (front, lane) = (self.front(), self.back());
        let between = self.side(Side::Next, Some(front), Some(lane));
        let enters = (number + 1 < self.count).then_some(0);
        let behind = self.side(Side::Previous, Some(lane), enters);
        let (backward, done) = (self.backward(back), Slot::Done { lane });
        self.perform(&[Some(forward), between, Some(backward), behind, Some(done)])?;
        self.done += 1;
        Ok(())
    }
}

impl Iterations for &mut Way<'_, '_, '_> {
    type Error = StepError;

    fn run(&mut self, index: u64) -> Result<(), StepError> {
        self.one_each(index)
    }

    fn state(&self) -> Option<u64> {
        Some(self.trainer.state_of_passes())
    }

    fn turn(&self) -> usize {
        (self.ahead + 1).min(self.count) as usize
    }

    fn known(&mut self) -> Option<&mut KnownRounds> {
        Some(&mut self.trainer.known_passes)
    }
}
