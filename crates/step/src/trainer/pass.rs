//! A pass: micro-batches forward through all blocks, the loss, and backward again, as its schedule says.

use std::ops::Range;
use std::rc::Rc;

use plimsoll_device::{Device, DeviceExt, Reduction, Tensor};
use plimsoll_memory::Phase;
use plimsoll_model::{BlockId, ModelSpec, Role};

use super::schedule::{Action, EmbeddingGradient, Lanes, LossForm, PassShape, Schedule};
use super::{Completion, Trainer};
use crate::StepError;
use crate::adapter::Dropout;
use crate::block::{self, Attend, Chunk, Held, Keys, Mover, Saved, Turn, Visit, chunks};
use crate::context::Context;
use crate::embedding;
use crate::evaluate::{EvaluateSettings, Evaluation};
use crate::head::{self, Head, HeadPiece, PiecedLoss};
use crate::inputs::{Inputs, positions_within, starts_after, sum};
use crate::policy::{LayerPolicy, Save};
use crate::rope::RopeTables;
use crate::settings::{AttentionKind, MicroBatch, StepSettings, stays};
use crate::store::BlockWeights;
use crate::tier::Unit;

/// What a pass carries from action to action.
pub(super) struct Pass<'c> {
    lanes: Vec<Lane<'c>>,
    /// What the head has beside a table that comes in pieces.
    head: Option<&'c BlockWeights>,
    /// The layers of each segment.
    segments: Vec<Range<u32>>,
    /// Factor on the gradients.
    scale: f32,
    /// Which of the step's passes it is.
    pub group: u64,
}

/// One micro-batch on its way, or one chunk of a sequence.
struct Lane<'c> {
    /// Which micro-batch of the step it is.
    number: u64,
    source: MicroBatch<'c>,
    /// Tokens of each sequence before these, and these.
    span: (u64, u64),
    /// Which chunk it is of its sequence.
    chunk: Option<u32>,
    /// Its tokens on the device. Those of a chunk come when its turn does.
    ready: Option<Rc<Ready<'c>>>,
    /// The residual stream.
    x: Option<Held<Tensor>>,
    /// What enters the segment that it goes through.
    entered: Option<Tensor>,
    /// What the forward pass left of each segment.
    kept: Vec<Option<Kept>>,
    /// The inputs of the layers of a segment, computed again.
    again: Vec<Tensor>,
    /// The loss, where the head comes in pieces.
    loss: Option<PiecedLoss<'c>>,
    /// The gradient of the residual stream.
    dx: Option<Held<Tensor>>,
}

/// Sees what comes out of each block.
type Look<'l> = &'l mut dyn FnMut(&dyn Device, BlockId, &Tensor) -> Result<(), StepError>;

/// The tokens of a lane on the device, and the rotations of a chunk's.
struct Ready<'c> {
    inputs: Inputs<'c>,
    ropes: Option<RopeTables>,
}

/// What contexts borrow of a trainer.
struct Env<'a> {
    spec: Rc<ModelSpec>,
    ropes: Option<Rc<RopeTables>>,
    mover: Option<Rc<Mover<'a>>>,
    keys: Option<Rc<Keys<'a>>>,
}

/// What a forward pass left of a segment.
enum Kept {
    /// The activations of its one layer.
    Layer(Box<Saved>),
    /// The input of the first of its layers.
    Input(Held<Tensor>),
}

impl Kept {
    /// Begins to bring what it keeps elsewhere.
    fn prefetch(&mut self, away: Option<&Mover<'_>>) -> Result<(), StepError> {
        match self {
            Kept::Layer(saved) => saved.fetch(away),
            Kept::Input(input) => input.fetch(away),
        }
    }
}

/// An action without what those before it should have left.
const NOTHING_LEFT: StepError =
    StepError::Invariant { what: "a schedule asks for what no action before has left" };

impl<'c> Pass<'c> {
    /// One without micro-batches, for updates alone.
    pub fn empty() -> Self {
        let (lanes, segments) = (Vec::new(), Vec::new());
        Pass { lanes, head: None, segments, scale: 1.0, group: 0 }
    }

    /// Whether it has no micro-batches.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    fn lane(&mut self, micro_batch: usize) -> Result<&mut Lane<'c>, StepError> {
        self.lanes.get_mut(micro_batch).ok_or(NOTHING_LEFT)
    }

    /// Those that an action is of.
    fn lanes(&mut self, lanes: Lanes) -> &mut [Lane<'c>] {
        let range = match lanes {
            Lanes::All => 0..self.lanes.len(),
            Lanes::One(lane) => lane..lane + 1,
        };
        self.lanes.get_mut(range).unwrap_or_default()
    }

    fn segment(&self, segment: usize) -> Range<u32> {
        self.segments.get(segment).cloned().unwrap_or_default()
    }
}

/// A tensor between two turns of a lane.
fn again(held: Option<Held<Tensor>>, ctx: &Context<'_>) -> Result<Tensor, StepError> {
    held.ok_or(NOTHING_LEFT)?.restore(ctx, || Err(NOTHING_LEFT))
}

/// Has a tensor wait for the next turn of its lane: that of a chunk goes below the device.
fn until_next(ctx: &Context<'_>, x: Tensor) -> Result<Option<Held<Tensor>>, StepError> {
    Ok(Some(match ctx.chunk {
        Some(_) => Held::new(ctx, Save::Keep, x)?,
        None => Held::plain(x),
    }))
}

impl Lane<'_> {
    /// A chunk's turn is over: its tokens leave the device.
    fn leave(&mut self) {
        if self.chunk.is_some() {
            self.ready = None;
        }
    }

    fn take_kept(&mut self, segment: usize) -> Result<Kept, StepError> {
        self.kept.get_mut(segment).and_then(Option::take).ok_or(NOTHING_LEFT)
    }
}

impl<'a> Trainer<'a> {
    /// Some micro-batches forward and backward, each block for all of them before the next block. `first` is the number of the first of them in the step; `completion` is `None` where more
    /// micro-batches will add to the gradients.
    pub(super) fn forward_backward(
        &mut self,
        micro_batches: &[MicroBatch<'_>],
        first: u64,
        scale: f32,
        completion: Option<Completion>,
    ) -> Result<(), StepError> {
        let device = self.device;
        let group = first / self.settings.micro_batches_per_pass.max(1);
        if self.settings.sharding.reduces_each_pass() {
            let ranks = self.communicator;
            self.gradients.begin_pass(group * u64::from(ranks.size()) + u64::from(ranks.rank()));
        }
        device.enter(Phase::Forward, None);
        let starts = micro_batches.first().and_then(|m| self.starts_of_chunks(m));
        let lanes = self.lanes(micro_batches, first, starts.as_deref())?;
        if let Some(mover) = &self.mover {
            mover.settle()?;
        }
        let segments: Vec<Range<u32>> = self.policy.segments().collect();
        let schedule = Schedule::pass(&self.shape(&segments, lanes.len()), completion);
        let head = self.weights.resident().gather(BlockId::Head)?;
        let mut pass = Pass { lanes, head: Some(&head), segments, scale, group };
        self.perform(&schedule, &mut pass)?;
        drop(pass);
        self.settle_lanes()
    }

    /// Waits until what lanes have left below the device is there.
    fn settle_lanes(&self) -> Result<(), StepError> {
        if let Some(keys) = &self.keys {
            keys.settle()?;
        }
        self.mover.as_ref().map_or(Ok(()), |mover| mover.settle())
    }

    /// Where each token's document begins in its sequence, of a sequence that is visited in chunks.
    fn starts_of_chunks(&self, micro_batch: &MicroBatch<'_>) -> Option<Vec<u32>> {
        let StepSettings { sequence_length, document_end, .. } = self.settings;
        self.settings.chunk_tokens()?;
        match micro_batch.document_starts {
            Some(starts) => Some(starts.to_vec()),
            None => document_end.map(|end| starts_after(micro_batch.tokens, sequence_length, end)),
        }
    }

    /// A lane for each micro-batch, with its tokens on the device; or for each chunk of the only one.
    fn lanes<'c>(
        &self,
        micro_batches: &[MicroBatch<'c>],
        first: u64,
        starts: Option<&'c [u32]>,
    ) -> Result<Vec<Lane<'c>>, StepError> {
        let length = self.settings.sequence_length;
        let lane = |number, source, span, chunk| Lane {
            number,
            source,
            span,
            chunk,
            ready: None,
            x: None,
            entered: None,
            kept: Vec::new(),
            again: Vec::new(),
            loss: None,
            dx: None,
        };
        let Some(chunk) = self.settings.chunk_tokens() else {
            let numbered = (first..).zip(micro_batches);
            let ready = |(number, source): (u64, &MicroBatch<'c>)| {
                let lane = lane(number, *source, (0, length), None);
                Ok(Lane { ready: Some(self.ready(&lane)?), ..lane })
            };
            return numbered.map(ready).collect();
        };
        let Some(whole) = micro_batches.first() else { return Ok(Vec::new()) };
        let got = whole.tokens.len() as u64;
        if got != length && !(got == 0 && self.device.is_dry()) {
            let got = whole.tokens.len();
            return Err(StepError::BatchShape { got, batch_size: 1, sequence_length: length });
        }
        let of_chunk = |(number, tokens): (u32, Range<u64>)| {
            let place = tokens.start as usize..tokens.end as usize;
            let source = MicroBatch {
                tokens: whole.tokens.get(place.clone()).unwrap_or_default(),
                targets: whole.targets.get(place.clone()).unwrap_or_default(),
                weights: whole.weights.map(|weights| weights.get(place.clone()).unwrap_or_default()),
                document_starts: starts.map(|starts| starts.get(place.clone()).unwrap_or_default()),
            };
            lane(first, source, (tokens.start, tokens.end - tokens.start), Some(number))
        };
        Ok((0..).zip(chunks(length, chunk)).map(of_chunk).collect())
    }

    /// A lane's tokens on the device.
    fn ready<'c>(&self, lane: &Lane<'c>) -> Result<Rc<Ready<'c>>, StepError> {
        if let Some(ready) = &lane.ready {
            return Ok(Rc::clone(ready));
        }
        let StepSettings { batch_size, sequence_length, document_end, .. } = self.settings;
        let (device, spec, span, source) = (self.device, &*self.spec, lane.span, &lane.source);
        // A chunk knows the beginnings of documents from the whole sequence.
        let end = document_end.filter(|_| lane.chunk.is_none());
        let inputs = Inputs::upload_behind(device, spec, batch_size, span, end, source)?;
        let ropes = match lane.chunk {
            None => None,
            Some(_) => {
                let within =
                    source.document_starts.map(|starts| positions_within(starts, span)).transpose()?;
                let position = |token: u64| match &within {
                    Some(within) => within.get(token as usize).copied().map_or(0, u64::from),
                    None => span.0 + token,
                };
                Some(RopeTables::of_tokens(device, spec, sequence_length, (span.1, &position))?)
            }
        };
        Ok(Rc::new(Ready { inputs, ropes }))
    }

    fn env(&self) -> Env<'a> {
        let Trainer { spec, ropes, mover, keys, .. } = self;
        Env { spec: Rc::clone(spec), ropes: ropes.clone(), mover: mover.clone(), keys: keys.clone() }
    }

    /// What a lane's turn needs to know.
    fn turn<'x>(
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
        let dropout = dropout.map(|dropout| Dropout { first_row: lane.span.0, ..dropout });
        let ctx = self.context(&ready.inputs, &env.spec, ropes);
        Ok(Context { dropout, away: env.mover.as_deref(), chunk, ..ctx })
    }

    /// What decides the order of a pass.
    fn shape<'s>(&'s self, segments: &'s [Range<u32>], micro_batches: usize) -> PassShape<'s> {
        let (head, _) = Head::table(self.spec.tie_word_embeddings);
        let loss = match &self.loss_pieces {
            Some(pieces) => LossForm::Pieces(head, pieces.len() as u32),
            None => LossForm::Whole,
        };
        let pieces = self.parts.pieces(BlockId::Embedding);
        let in_pieces = self.gradients.is_in_pieces(BlockId::Embedding, Role::TokenEmbedding);
        let embedding = match in_pieces {
            _ if !self.trained.iter().any(|p| p.block == BlockId::Embedding) => EmbeddingGradient::Frozen,
            true if self.keeps_looked_up() => EmbeddingGradient::LookedUp(pieces),
            true => EmbeddingGradient::Scattered(pieces),
            false => EmbeddingGradient::Whole,
        };
        PassShape {
            segments,
            micro_batches,
            chunks: self.settings.chunk_tokens().is_some(),
            embedding_pieces: self.weights.embedding_pieces().count() as u32,
            loss,
            embedding,
            parts: &self.parts,
            ranks: self.between_ranks(),
        }
    }

    /// Whether the embedding's gradient is kept as the rows that were looked up: of a table that is no head as well.
    pub(super) fn keeps_looked_up(&self) -> bool {
        let in_pieces = self.gradients.is_in_pieces(BlockId::Embedding, Role::TokenEmbedding);
        // What all chunks of a sequence look up is as long as the sequence.
        in_pieces && !self.spec.tie_word_embeddings && self.settings.chunk_tokens().is_none()
    }

    /// An action of a pass. `weights` are those that it holds.
    pub(super) fn act(
        &mut self,
        pass: &mut Pass<'_>,
        action: Action,
        weights: Option<&BlockWeights>,
    ) -> Result<(), StepError> {
        let device = self.device;
        let enter = |phase, layer| device.enter(phase, layer);
        let weights = || weights.ok_or(NOTHING_LEFT);
        let env = &self.env();
        match action {
            Action::Embed { micro_batch } => {
                enter(Phase::Forward, None);
                let lane = pass.lane(micro_batch)?;
                let ready = self.ready(lane)?;
                let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
                let Inputs { tokens, ids, .. } = &ready.inputs;
                let x = embedding::forward(&ctx, &mut self.weights, (tokens, ids))?;
                lane.x = until_next(&ctx, x)?;
            }
            Action::EmbedPiece { unit, lanes, last } => {
                enter(Phase::Forward, None);
                let piece = self.weights.embedding_pieces().find(|(piece, _)| *piece == unit);
                let first_row = piece.ok_or(NOTHING_LEFT)?.1.start;
                for lane in pass.lanes(lanes) {
                    // A chunk stays until it has all pieces.
                    let ready = self.ready(lane)?;
                    lane.ready = Some(Rc::clone(&ready));
                    let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
                    let tokens = &ready.inputs.tokens;
                    let x = match lane.x.take() {
                        Some(x) => again(Some(x), &ctx)?,
                        None => embedding::residual(&ctx, tokens)?,
                    };
                    embedding::look_up_piece(&ctx, weights()?, tokens, first_row, &x)?;
                    lane.x = Some(Held::plain(x));
                }
                if last {
                    let own = self.weights.resident().gather(BlockId::Embedding)?;
                    for lane in pass.lanes(lanes) {
                        let ready = self.ready(lane)?;
                        let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
                        let x = again(lane.x.take(), &ctx)?;
                        embedding::finish(&ctx, &own, &ready.inputs.tokens, &x)?;
                        lane.x = until_next(&ctx, x)?;
                        lane.leave();
                    }
                }
            }
            Action::Forward { layer, segment, micro_batch } => {
                enter(Phase::Forward, Some(layer));
                let layers = pass.segment(segment);
                self.forward(env, pass.lane(micro_batch)?, weights()?, layer, &layers)?;
                // The next chunk comes ahead of its turn.
                if let Some(next) = pass.lanes.get_mut(micro_batch + 1).and_then(|lane| lane.x.as_mut()) {
                    next.fetch(env.mover.as_deref())?;
                }
            }
            Action::Loss { micro_batch } => {
                enter(Phase::Loss, None);
                self.loss(pass, micro_batch)?;
            }
            Action::LossBegin { micro_batch } => {
                enter(Phase::Loss, None);
                let (head, chunk_tokens) = (pass.head, self.settings.loss_chunk_tokens);
                let lane = pass.lane(micro_batch)?;
                let ready = self.ready(lane)?;
                lane.ready = Some(Rc::clone(&ready));
                let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
                let (own, x) = (head.ok_or(NOTHING_LEFT)?, again(lane.x.take(), &ctx)?);
                let norm = own.norm(Role::FinalNorm, Some(Role::FinalNormBias), &ctx.spec.norm)?;
                let pieces = self.loss_pieces.as_deref().unwrap_or_default();
                let labels = &ready.inputs.labels;
                lane.loss = Some(PiecedLoss::begin(&ctx, norm, x, labels, chunk_tokens, pieces)?);
            }
            Action::LossPiece { unit, lanes } => {
                let pieces = self.loss_pieces.as_deref();
                let piece = head_piece(self.spec.tie_word_embeddings, pieces, unit, weights()?)?;
                for lane in pass.lanes(lanes) {
                    let ready = self.ready(lane)?;
                    let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
                    lane.loss.as_ref().ok_or(NOTHING_LEFT)?.add(&ctx, piece)?;
                }
            }
            Action::LossTotal { lanes } => {
                for lane in pass.lanes(lanes) {
                    let ready = self.ready(lane)?;
                    let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
                    lane.loss.as_ref().ok_or(NOTHING_LEFT)?.losses(&ctx)?;
                    self.numbers.add_losses(device, &ready.inputs.labels.losses)?;
                }
            }
            Action::LossBackward { unit, lanes, last } => {
                let (mut additions, scale) = (0, pass.scale);
                let pieces = self.loss_pieces.as_deref();
                let piece = head_piece(self.spec.tie_word_embeddings, pieces, unit, weights()?)?;
                for lane in pass.lanes(lanes) {
                    let ready = self.ready(lane)?;
                    let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
                    let loss = lane.loss.as_mut().ok_or(NOTHING_LEFT)?;
                    loss.backward(&ctx, &mut self.gradients, piece, scale, additions)?;
                    additions += loss.additions();
                }
                if last && self.gradients.wants(piece.block, piece.role) {
                    self.gradients.count_rows(piece.block, piece.role, additions);
                }
            }
            Action::LossEnd { micro_batch } => {
                let lane = pass.lane(micro_batch)?;
                let ready = self.ready(lane)?;
                let ctx = self.turn(env, lane, &ready, Visit::Backward)?;
                let loss = lane.loss.take().ok_or(NOTHING_LEFT)?;
                let dx = loss.finish(&ctx, &mut self.gradients)?;
                lane.dx = until_next(&ctx, dx)?;
                lane.leave();
            }
            Action::PrefetchKept { segment, micro_batch } => {
                let (lane, away) = (pass.lane(micro_batch)?, env.mover.as_deref());
                let kept = lane.kept.get_mut(segment).and_then(Option::as_mut).ok_or(NOTHING_LEFT)?;
                kept.prefetch(away)?;
                if let Some(dx) = &mut lane.dx {
                    dx.fetch(away)?;
                }
            }
            Action::Recompute { layer, segment, micro_batch } => {
                enter(Phase::Backward, Some(layer));
                self.recompute(env, pass.lane(micro_batch)?, weights()?, layer, segment)?;
            }
            Action::Backward { layer, segment, micro_batch } => {
                enter(Phase::Backward, Some(layer));
                let alone = pass.segment(segment).len() == 1;
                let lane = pass.lane(micro_batch)?;
                let saved = match alone {
                    true => match lane.take_kept(segment)? {
                        Kept::Layer(saved) => *saved,
                        Kept::Input(input) => Saved::of_input(input),
                    },
                    false => Saved::of_input(Held::plain(lane.again.pop().ok_or(NOTHING_LEFT)?)),
                };
                let ready = self.ready(lane)?;
                let ctx = self.turn(env, lane, &ready, Visit::Backward)?;
                let dx = again(lane.dx.take(), &ctx)?;
                block::backward(&ctx.layer(layer), weights()?, saved, &dx, &mut self.gradients)?;
                lane.dx = until_next(&ctx, dx)?;
            }
            Action::EmbedBackward { micro_batch } => {
                enter(Phase::Backward, None);
                self.embed_backward(env, pass.lane(micro_batch)?)?;
            }
            Action::Scatter { unit, micro_batch, last } => {
                let part = self.parts.of(unit).first().cloned().ok_or(NOTHING_LEFT)?;
                let lane = pass.lane(micro_batch)?;
                let dx = lane.dx.as_ref().and_then(Held::value).ok_or(NOTHING_LEFT)?;
                let ready = lane.ready.as_ref().ok_or(NOTHING_LEFT)?;
                self.gradients.scatter_rows(&part, &ready.inputs.tokens, dx, 0)?;
                if last {
                    self.gradients.count_rows(part.parameter.block, part.parameter.role, 1);
                    lane.dx = None;
                    lane.leave();
                }
            }
            Action::GatherLookedUp { .. }
            | Action::Reduce { .. }
            | Action::Sum { .. }
            | Action::Measure { .. }
            | Action::Update { .. }
            | Action::AllGather { .. }
            | Action::Free { .. } => self.complete(pass, action, weights().ok())?,
        }
        Ok(())
    }

    fn forward(
        &mut self,
        env: &Env<'a>,
        lane: &mut Lane<'_>,
        weights: &BlockWeights,
        layer: u32,
        layers: &Range<u32>,
    ) -> Result<(), StepError> {
        let ready = self.ready(lane)?;
        let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
        let x = again(lane.x.take(), &ctx)?;
        let alone = layers.len() == 1;
        if !alone && layer == layers.start {
            lane.entered = Some(x.clone());
        }
        let policy = if alone { self.policy.layer(layer) } else { LayerPolicy::nothing() };
        let (x, saved) = block::forward(&self.saving(&ctx, layer), weights, policy, x)?;
        lane.x = until_next(&ctx, x)?;
        if lane.chunk.is_some() {
            lane.kept.push(Some(Kept::Input(saved.input)));
        } else if alone {
            lane.kept.push(Some(Kept::Layer(Box::new(saved))));
        } else if layer + 1 == layers.end {
            let input = lane.entered.take().ok_or(NOTHING_LEFT)?;
            let save = self.policy.layer(layers.start).input;
            let held = Held::new(&self.saving(&ctx, layers.start), save, input)?;
            lane.kept.push(Some(Kept::Input(held)));
        }
        Ok(())
    }

    fn recompute(
        &mut self,
        env: &Env<'a>,
        lane: &mut Lane<'_>,
        weights: &BlockWeights,
        layer: u32,
        segment: usize,
    ) -> Result<(), StepError> {
        let ready = self.ready(lane)?;
        let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
        if lane.again.is_empty() {
            let Kept::Input(input) = lane.take_kept(segment)? else { return Err(NOTHING_LEFT) };
            lane.again.push(input.restore(&ctx, || Err(NOTHING_LEFT))?);
        }
        let x = lane.again.last().cloned().ok_or(NOTHING_LEFT)?;
        let ctx = &self.saving(&ctx, layer);
        lane.again.push(block::forward(ctx, weights, LayerPolicy::nothing(), x)?.0);
        Ok(())
    }

    /// The loss and the gradient of the last layer's output, with a head that is there as a whole.
    fn loss(&mut self, pass: &mut Pass<'_>, micro_batch: usize) -> Result<(), StepError> {
        let (scale, chunk_tokens) = (pass.scale, self.settings.loss_chunk_tokens);
        let head = Head::gather(&mut self.weights, self.spec.tie_word_embeddings)?;
        let (lane, env) = (pass.lane(micro_batch)?, &self.env());
        let ready = self.ready(lane)?;
        let ctx = self.turn(env, lane, &ready, Visit::Forward)?;
        let x = again(lane.x.take(), &ctx)?;
        let (labels, gradients) = (&ready.inputs.labels, &mut self.gradients);
        let dx = head::loss_and_backward(&ctx, &head, &x, labels, chunk_tokens, scale, gradients)?;
        lane.dx = until_next(&ctx, dx)?;
        head.release(&mut self.weights);
        self.numbers.add_losses(self.device, &labels.losses)
    }

    fn embed_backward(&mut self, env: &Env<'a>, lane: &mut Lane<'_>) -> Result<(), StepError> {
        let weights = self.weights.resident().gather(BlockId::Embedding)?;
        let ready = self.ready(lane)?;
        let ctx = self.turn(env, lane, &ready, Visit::Backward)?;
        let dx = again(lane.dx.take(), &ctx)?;
        let tokens = &ready.inputs.tokens;
        embedding::backward(&ctx, &weights, tokens, &dx, &mut self.gradients)?;
        if self.keeps_looked_up() {
            let looked_up = &mut self.gradients.looked_up;
            looked_up.keep(self.device, lane.number, tokens.clone(), dx)?;
        } else if self.gradients.is_in_pieces(BlockId::Embedding, Role::TokenEmbedding) {
            (lane.dx, lane.ready) = (Some(Held::plain(dx)), Some(ready));
        }
        Ok(())
    }

    fn upload<'m>(&self, micro_batch: &MicroBatch<'m>) -> Result<Inputs<'m>, StepError> {
        let StepSettings { batch_size, sequence_length, document_end, .. } = self.settings;
        Inputs::upload(self.device, &self.spec, batch_size, sequence_length, document_end, micro_batch)
    }

    fn context<'c>(&self, inputs: &'c Inputs<'_>, spec: &'c ModelSpec, ropes: &'c RopeTables) -> Context<'c>
    where
        'a: 'c,
    {
        let StepSettings { precision, attention, mlp_chunk_tokens, .. } = self.settings;
        let ctx = inputs.context(self.device, spec, precision, ropes);
        Context { attention_kind: attention, mlp_chunk_tokens, ..ctx }
    }

    /// What a layer's forward pass needs to know, with nothing that takes away what is to stay.
    fn saving<'c>(&self, ctx: &Context<'c>, layer: u32) -> Context<'c> {
        let own = ctx.layer(layer);
        let kept = self.settings.kept_layers.activations;
        let away = own.away.filter(|_| !stays(BlockId::Layer(layer), kept, self.spec.num_layers));
        Context { away, ..own }
    }

    /// The first block, in the order of the forward pass, whose output for a micro-batch is not finite. Weights and
    /// gradients stay as they are. Every rank goes through all layers: others need its share of them.
    pub fn first_bad_output(&mut self, micro_batch: &MicroBatch<'_>) -> Result<Option<BlockId>, StepError> {
        let square = self.numbers.spare()?;
        let mut first = None;
        if self.settings.chunk_tokens().is_some() {
            let starts = self.starts_of_chunks(micro_batch);
            let seen = (starts.as_deref(), self.settings.attention);
            self.forward_in_chunks(micro_batch, seen, &mut |device, block, x| {
                if first.is_none() && !is_finite(device, x, &square)? {
                    first = Some(block);
                }
                Ok(())
            })?;
            self.settle_lanes()?;
            return Ok(first);
        }
        let (device, spec, ropes) = (self.device, Rc::clone(&self.spec), self.ropes.clone());
        let ropes = ropes.ok_or(NOTHING_LEFT)?;
        device.enter(Phase::Forward, None);
        let inputs = self.upload(micro_batch)?;
        let ctx = self.context(&inputs, &spec, &ropes);
        let table: Vec<Unit> = self.weights.embedding_pieces().map(|(unit, _)| unit).collect();
        let layers = Schedule::forward(0..spec.num_layers);
        self.weights.announce(table.into_iter().chain(layers.weights()))?;
        let mut x = embedding::forward(&ctx, &mut self.weights, (&inputs.tokens, inputs.ids))?;
        let finite = |x: &Tensor| is_finite(device, x, &square);
        if !finite(&x)? {
            first = Some(BlockId::Embedding);
        }
        for layer in 0..spec.num_layers {
            device.enter(Phase::Forward, Some(layer));
            let weights = self.weights.gather(BlockId::Layer(layer))?;
            x = block::forward(&self.saving(&ctx, layer), &weights, LayerPolicy::nothing(), x)?.0;
            drop(weights);
            self.weights.release(Unit::Layer(layer), false);
            if first.is_none() && !finite(&x)? {
                first = Some(BlockId::Layer(layer));
            }
        }
        Ok(first)
    }

    /// One sequence forward in chunks, for what comes out of each block; the lanes with the last layer's output.
    fn forward_in_chunks<'c>(
        &mut self,
        micro_batch: &MicroBatch<'c>,
        (starts, attention_kind): (Option<&'c [u32]>, AttentionKind),
        look: Look<'_>,
    ) -> Result<Vec<Lane<'c>>, StepError> {
        let (device, env) = (self.device, &self.env());
        device.enter(Phase::Forward, None);
        let mut lanes = self.lanes(std::slice::from_ref(micro_batch), 0, starts)?;
        for lane in &mut lanes {
            let ready = self.ready(lane)?;
            let ctx = self.turn(env, lane, &ready, Visit::Evaluate)?;
            let table: Vec<Unit> = self.weights.embedding_pieces().map(|(unit, _)| unit).collect();
            self.weights.announce(table)?;
            let x = embedding::forward(&ctx, &mut self.weights, (&ready.inputs.tokens, ready.inputs.ids))?;
            look(device, BlockId::Embedding, &x)?;
            lane.x = until_next(&ctx, x)?;
        }
        self.weights.announce(Schedule::forward(0..self.spec.num_layers).weights())?;
        for layer in 0..self.spec.num_layers {
            device.enter(Phase::Forward, Some(layer));
            let weights = self.weights.gather(BlockId::Layer(layer))?;
            for lane in &mut lanes {
                let ready = self.ready(lane)?;
                let ctx = self.turn(env, lane, &ready, Visit::Evaluate)?;
                let ctx = Context { dropout: None, attention_kind, ..ctx };
                let x = again(lane.x.take(), &ctx)?;
                let x = block::forward(&ctx.layer(layer), &weights, LayerPolicy::nothing(), x)?.0;
                look(device, BlockId::Layer(layer), &x)?;
                lane.x = until_next(&ctx, x)?;
            }
            drop(weights);
            self.weights.release(Unit::Layer(layer), false);
        }
        Ok(lanes)
    }

    /// The loss of one sequence of the step's length, in chunks.
    fn evaluate_in_chunks(&mut self, micro_batch: &MicroBatch<'_>) -> Result<(f64, u64), StepError> {
        let device = self.device;
        // A batch that is evaluated says itself where documents begin, and is seen as the model sees it.
        let seen = (micro_batch.document_starts, AttentionKind::Flash);
        let lanes = self.forward_in_chunks(micro_batch, seen, &mut |_, _, _| Ok(()))?;
        let (mut total, chunk_tokens, env) = (0.0, self.settings.loss_chunk_tokens, &self.env());
        device.enter(Phase::Loss, None);
        let (head, _) = Head::table(self.spec.tie_word_embeddings);
        for mut lane in lanes {
            let ready = self.ready(&lane)?;
            let ctx = self.turn(env, &lane, &ready, Visit::Evaluate)?;
            let pieces = self.loss_pieces.as_ref().map_or(1, Vec::len) as u32;
            self.weights.announce((0..pieces).map(|piece| Unit::Piece(head, piece)))?;
            let x = again(lane.x.take(), &ctx)?;
            head::loss_of(&ctx, &mut self.weights, &x, &ready.inputs.labels, chunk_tokens)?;
            total += sum(device, &ready.inputs.labels.losses)?;
        }
        self.settle_lanes()?;
        Ok((total, micro_batch.target_count()))
    }

    /// Whether a batch is one sequence of the step's length.
    fn fills_a_sequence(&self, batch_size: u64, micro_batch: &MicroBatch<'_>) -> bool {
        let tokens = micro_batch.tokens.len() as u64;
        batch_size == 1 && (tokens == self.settings.sequence_length || tokens == 0 && self.device.is_dry())
    }

    /// Sum of token losses, each by its weight, and number of targets of a batch of at most the step's shape, with the
    /// model's own attention over whole sequences, or documents where the batch says where they start; weights and
    /// gradients stay as they are.
    pub fn evaluate(
        &mut self,
        batch_size: u64,
        micro_batch: &MicroBatch<'_>,
    ) -> Result<(f64, u64), StepError> {
        let StepSettings { precision, loss_chunk_tokens, mlp_chunk_tokens, .. } = self.settings;
        let longest = self.settings.sequence_length;
        let settings = EvaluateSettings { precision, longest, loss_chunk_tokens };
        if self.settings.chunk_tokens().is_some() {
            if !self.fills_a_sequence(batch_size, micro_batch) {
                let got = micro_batch.tokens.len();
                return Err(StepError::BatchShape { got, batch_size: 1, sequence_length: longest });
            }
            return self.evaluate_in_chunks(micro_batch);
        }
        let (device, spec) = (self.device, &*self.spec);
        let ropes = self.ropes.as_deref().ok_or(NOTHING_LEFT)?;
        let pass = Evaluation { device, spec, ropes, settings, mlp_chunk_tokens };
        pass.run(&mut self.weights, batch_size, micro_batch)
    }
}

/// Whether every element of a tensor is finite. `square`: f32 `[1]`.
fn is_finite(device: &dyn Device, x: &Tensor, square: &Tensor) -> Result<bool, StepError> {
    device.run(Reduction::SumSquares { x, out: square, finite: None })?;
    Ok(device.read_f32(square)?.iter().all(|square| square.is_finite()))
}

/// A piece of the head's table among the weights that an action holds.
fn head_piece<'p>(
    tied: bool,
    pieces: Option<&'p [Range<u64>]>,
    unit: Unit,
    weights: &'p BlockWeights,
) -> Result<HeadPiece<'p>, StepError> {
    let (block, role) = Head::table(tied);
    let Unit::Piece(_, piece) = unit else { return Err(NOTHING_LEFT) };
    let rows = pieces.unwrap_or_default().get(piece as usize).ok_or(NOTHING_LEFT)?;
    Ok(HeadPiece { block, role, piece, rows, weight: weights.get(role)? })
}
