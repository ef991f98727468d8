//! The micro-batches of a pass on their way, or the chunks of a sequence: what each has on the device, what waits for its next
//! turn, and what its turn needs to know.

use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::rc::Rc;

use plimsoll_device::Tensor;
use plimsoll_model::ModelSpec;

use super::Trainer;
use crate::StepError;
use crate::adapter::Dropout;
use crate::block::{Around, Attend, Chunk, Held, Keys, Mover, Ring, Saved, Turn, Visit, chunks};
use crate::context::Context;
use crate::head::PiecedLoss;
use crate::inputs::{Inputs, Places, starts_after};
use crate::policy::Save;
use crate::products::Products;
use crate::rope::RopeTables;
use crate::router_losses::{Balance, RouterLosses, ZLoss};
use crate::routes::{ForTraining, Jitter, Routes};
use crate::settings::{MicroBatch, StepSettings};
use crate::store::ExpertWeights;

/// Sets the seeds of routers' noise apart from others.
const JITTER: u64 = 0x717e;

/// One micro-batch on its way, or one chunk of a sequence.
pub(super) struct Lane<'c> {
    /// Which micro-batch of the step it is.
    pub number: u64,
    pub source: MicroBatch<'c>,
    /// Which of its tokens.
    pub places: Places,
    /// Which chunk it is of its sequence.
    pub chunk: Option<u32>,
    /// Its tokens on the device. Those of a chunk come when its turn does.
    pub ready: Option<Rc<Ready<'c>>>,
    /// The residual stream.
    pub x: Option<Held<Tensor>>,
    /// What enters the segment that it goes through.
    pub entered: Option<Tensor>,
    /// What the forward pass left of each segment.
    pub kept: Vec<Option<Kept>>,
    /// The inputs of the layers of a segment, computed again.
    pub again: Vec<Tensor>,
    /// The loss, where the head comes in pieces.
    pub loss: Option<PiecedLoss<'c>>,
    /// The gradient of the residual stream.
    pub dx: Option<Held<Tensor>>,
    /// What routers have decided for it.
    pub routes: Rc<Routes>,
}

/// The tokens of a lane on the device, and their rotations where they have their own.
pub(super) struct Ready<'c> {
    pub inputs: Inputs<'c>,
    pub ropes: Option<RopeTables>,
    pub routes: Rc<Routes>,
}

/// What contexts borrow of a trainer.
pub(super) struct Env<'a> {
    pub spec: Rc<ModelSpec>,
    pub ropes: Option<Rc<RopeTables>>,
    pub mover: Option<Rc<Mover<'a>>>,
    pub keys: Option<Rc<Keys<'a>>>,
    pub ring: Option<Rc<Ring<'a>>>,
    pub products: Option<Rc<Products<'a>>>,
    pub experts: Option<Rc<dyn ExpertWeights + 'a>>,
}

/// What a forward pass left of a segment.
pub(super) enum Kept {
    /// The activations of its one layer.
    Layer(Box<Saved>),
    /// The input of the first of its layers.
    Input(Held<Tensor>),
}

impl Kept {
    /// Begins to bring what it keeps elsewhere.
    pub fn prefetch(&mut self, away: Option<&Mover<'_>>) -> Result<(), StepError> {
        match self {
            Kept::Layer(saved) => saved.fetch(away),
            Kept::Input(input) => input.fetch(away),
        }
    }
}

/// An action without what those before it should have left.
pub(super) const NOTHING_LEFT: StepError =
    StepError::Invariant { what: "a schedule asks for what no action before has left" };

/// A tensor between two turns of a lane.
pub(super) fn again(held: Option<Held<Tensor>>, ctx: &Context<'_>) -> Result<Tensor, StepError> {
    held.ok_or(NOTHING_LEFT)?.restore(ctx, || Err(NOTHING_LEFT))
}

/// Has a tensor wait for the next turn of its lane: that of a chunk goes below the device.
pub(super) fn until_next(ctx: &Context<'_>, x: Tensor) -> Result<Option<Held<Tensor>>, StepError> {
    Ok(Some(match ctx.chunk {
        Some(_) => Held::new(ctx, Save::Keep, x)?,
        None => Held::plain(x),
    }))
}

impl Lane<'_> {
    /// A chunk's turn is over: its tokens leave the device.
    pub fn leave(&mut self) {
        if self.chunk.is_some() {
            self.ready = None;
        }
    }

    /// Feeds where its tokens and the inputs of its segments lie on the device to a hasher.
    pub fn hash_places(&self, hasher: &mut impl Hasher) {
        let place = |x: Option<&Tensor>| x.map(|x| x.range().start);
        place(self.ready.as_ref().map(|ready| &ready.inputs.tokens)).hash(hasher);
        for kept in self.kept.iter().flatten() {
            let input = match kept {
                Kept::Layer(saved) => &saved.input,
                Kept::Input(input) => input,
            };
            place(input.value()).hash(hasher);
        }
    }

    pub fn take_kept(&mut self, segment: usize) -> Result<Kept, StepError> {
        self.kept.get_mut(segment).and_then(Option::take).ok_or(NOTHING_LEFT)
    }
}

impl<'a> Trainer<'a> {
    /// Where each token's document begins in its sequence, of a sequence that is visited in chunks.
    pub(super) fn starts_of_chunks(&self, micro_batch: &MicroBatch<'_>) -> Option<Vec<u32>> {
        let StepSettings { sequence_length, document_end, .. } = self.settings;
        self.settings.chunk_tokens()?;
        match micro_batch.document_starts {
            Some(starts) => Some(starts.to_vec()),
            None => document_end.map(|end| starts_after(micro_batch.tokens, sequence_length, end)),
        }
    }

    /// A lane for each micro-batch, with its tokens on the device; or for each chunk of the only one. What is only looked at is not
    /// trained.
    pub(super) fn lanes<'c>(
        &self,
        micro_batches: &[MicroBatch<'c>],
        first: u64,
        starts: Option<&'c [u32]>,
        visit: Visit,
    ) -> Result<Vec<Lane<'c>>, StepError> {
        let StepSettings { batch_size, sequence_length: length, .. } = self.settings;
        let lane = |number, source, runs, chunk, routes: Option<ForTraining>| Lane {
            number,
            source,
            places: Places { batch_size, length, runs },
            chunk,
            ready: None,
            x: None,
            entered: None,
            kept: Vec::new(),
            again: Vec::new(),
            loss: None,
            dx: None,
            routes: Rc::new(Routes::new(routes)),
        };
        let training = |number| match visit {
            Visit::Evaluate => Ok(None),
            Visit::Forward | Visit::Backward => self.routers(number).map(Some),
        };
        let Some(chunk) = self.settings.chunk_tokens() else {
            let numbered = (first..).zip(micro_batches);
            let ready = |(number, source): (u64, &MicroBatch<'c>)| {
                let runs = self.settings.own_runs(length);
                let lane = lane(number, *source, runs, None, training(number)?);
                Ok(Lane { ready: Some(self.ready(&lane)?), ..lane })
            };
            return numbered.map(ready).collect();
        };
        let Some(whole) = micro_batches.first() else { return Ok(Vec::new()) };
        let source = MicroBatch { document_starts: starts, ..*whole };
        // All chunks of a sequence have their losses together.
        let training = training(first)?;
        let of_chunk = |(number, tokens): (u32, Range<u64>)| {
            let training = training.clone().map(|training| {
                let jitter = training.jitter.map(|jitter| Jitter { first_row: tokens.start, ..jitter });
                ForTraining { jitter, ..training }
            });
            lane(first, source, vec![tokens], Some(number), training)
        };
        Ok((0..).zip(chunks(length, chunk)).map(of_chunk).collect())
    }

    /// A lane's tokens on the device.
    pub(super) fn ready<'c>(&self, lane: &Lane<'c>) -> Result<Rc<Ready<'c>>, StepError> {
        if let Some(ready) = &lane.ready {
            return Ok(Rc::clone(ready));
        }
        let (device, spec, places, source) = (self.device, &*self.spec, &lane.places, &lane.source);
        // A chunk knows the beginnings of documents from the whole sequence.
        let end = self.settings.document_end.filter(|_| lane.chunk.is_none());
        let inputs = Inputs::upload(device, spec, places, end, source)?;
        let ropes = match &self.ropes {
            Some(_) => None,
            None => Some(inputs.ropes(device, spec, places)?),
        };
        Ok(Rc::new(Ready { inputs, ropes, routes: Rc::clone(&lane.routes) }))
    }

    /// What training does with the routers of a micro-batch.
    fn routers(&self, number: u64) -> Result<ForTraining, StepError> {
        let Some(experts) = &self.spec.experts else { return Ok(ForTraining::default()) };
        let (StepSettings { balance_loss, routers, .. }, factors) = (&self.settings, self.loss_factors);
        let layers = self.spec.layers().filter(|layer| self.spec.experts_of(*layer).is_some()).count() as u64;
        let rows = layers * self.settings.batch_size.saturating_mul(self.settings.own_tokens());
        let balance = match *balance_loss > 0.0 {
            true => Some(Balance::new(self.device, experts, rows, *balance_loss, factors)?),
            false => None,
        };
        let z = match routers.z_loss > 0.0 {
            true => Some(ZLoss::new(self.device, rows, routers.z_loss, factors)?),
            false => None,
        };
        let has_losses = balance.is_some() || z.is_some();
        let seed = self.seed_of(JITTER, self.deal.place(number));
        let jitter = Jitter { noise: routers.jitter, seed, first_row: 0 };
        Ok(ForTraining {
            losses: has_losses.then(|| Rc::new(RouterLosses { balance, z })),
            jitter: (routers.jitter > 0.0).then_some(jitter),
            capacity: routers.capacity,
        })
    }

    pub(super) fn env(&self) -> Env<'a> {
        let Trainer { spec, ropes, mover, keys, ring, products, .. } = self;
        let (spec, ropes, ring) = (Rc::clone(spec), ropes.clone(), ring.clone());
        let experts = self.weights.expert_weights();
        Env {
            spec,
            ropes,
            mover: mover.clone(),
            keys: keys.clone(),
            ring,
            products: products.clone(),
            experts,
        }
    }

    /// What a lane's turn needs to know.
    pub(super) fn turn<'x>(
        &self,
        env: &'x Env<'a>,
        lane: &Lane<'_>,
        ready: &'x Ready<'_>,
        visit: Visit,
    ) -> Result<Context<'x>, StepError>
    where
        'a: 'x,
    {
        let ropes = ready.ropes.as_ref().or(env.ropes.as_deref()).ok_or(NOTHING_LEFT)?;
        let keys = env.keys.as_deref().map(|keys| -> &dyn Attend { keys });
        let of = |(number, keys)| Chunk { keys, turn: Turn { number, layer: 0, visit } };
        let chunk = lane.chunk.zip(keys).map(of);
        let dropout = self.dropout(self.deal.place(lane.number));
        let first_row = lane.chunk.map_or(0, |_| lane.places.runs.first().map_or(0, |run| run.start));
        let dropout = dropout.map(|dropout| Dropout { first_row, ..dropout });
        let around = env.ring.as_deref().map(|ring| Around { ring, length: lane.places.length });
        let ctx = self.context(&ready.inputs, &env.spec, ropes);
        let routes = Some(&*ready.routes);
        let expert_weights = env.experts.as_deref();
        let ctx =
            Context { dropout, away: env.mover.as_deref(), chunk, around, routes, expert_weights, ..ctx };
        Ok(ctx.sharing(env.products.as_deref(), lane.places.rows()))
    }

    /// Waits until what lanes have left below the device is there.
    pub(super) fn settle_lanes(&self) -> Result<(), StepError> {
        if let Some(keys) = &self.keys {
            keys.settle()?;
        }
        self.mover.as_ref().map_or(Ok(()), |mover| mover.settle())
    }

    pub(super) fn context<'c>(
        &self,
        inputs: &'c Inputs<'_>,
        spec: &'c ModelSpec,
        ropes: &'c RopeTables,
    ) -> Context<'c>
    where
        'a: 'c,
    {
        let StepSettings { precision, attention, mlp_chunk_tokens, .. } = self.settings;
        let ctx = inputs.context(self.device, spec, precision, ropes);
        Context { attention_kind: attention, mlp_chunk_tokens, ..ctx }
    }
}
