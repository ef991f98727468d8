//! A pass: micro-batches forward through all blocks, the loss, and backward again, as its schedule says.

use std::ops::Range;
use std::rc::Rc;

use plimsoll_device::Tensor;
use plimsoll_memory::Phase;
use plimsoll_model::{BlockId, Role};

use super::lanes::{Env, Kept, Lane, NOTHING_LEFT, again, until_next};
use super::schedule::{Action, EmbeddingGradient, Lanes, LossForm, PassShape, Schedule};
use super::{Completion, Trainer};
use crate::StepError;
use crate::block::{self, Held, Saved, Visit};
use crate::context::Context;
use crate::embedding;
use crate::head::{self, Head, HeadPiece, PiecedLoss};
use crate::inputs::Inputs;
use crate::policy::LayerPolicy;
use crate::settings::{MicroBatch, stays};
use crate::store::BlockWeights;
use crate::tier::Unit;

/// What a pass carries from action to action.
pub(super) struct Pass<'c> {
    pub lanes: Vec<Lane<'c>>,
    /// What the head has beside a table that comes in pieces.
    pub head: Option<&'c BlockWeights>,
    /// The layers of each segment.
    pub segments: Vec<Range<u32>>,
    /// Factor on the gradients.
    pub scale: f32,
    /// Which of the step's passes it is.
    pub group: u64,
    /// The residual stream that has come from an earlier stage, of the micro-batch that enters next.
    pub incoming: Option<Tensor>,
}

impl<'c> Pass<'c> {
    /// One without micro-batches, for updates alone.
    pub fn empty() -> Self {
        let (lanes, segments) = (Vec::new(), Vec::new());
        Pass { lanes, head: None, segments, scale: 1.0, group: 0, incoming: None }
    }

    /// Whether it has no micro-batches.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    pub fn lane(&mut self, micro_batch: usize) -> Result<&mut Lane<'c>, StepError> {
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
            self.begin_pass(group);
        }
        device.enter(Phase::Forward, None);
        let starts = micro_batches.first().and_then(|m| self.starts_of_chunks(m));
        let lanes = self.lanes(micro_batches, first, starts.as_deref(), Visit::Forward)?;
        if let Some(mover) = &self.mover {
            mover.settle()?;
        }
        let segments: Vec<Range<u32>> = self.policy.segments().collect();
        let schedule = Schedule::pass(&self.shape(&segments, lanes.len()), completion);
        let head = self.weights.resident().gather(BlockId::Head)?;
        let mut pass = Pass { lanes, head: Some(&head), segments, scale, group, incoming: None };
        self.perform(&schedule, &mut pass)?;
        drop(pass);
        self.settle_lanes()
    }

    /// Begins what a pass adds to gradients, where each has gradients of its own.
    pub(super) fn begin_pass(&mut self, group: u64) {
        let (rank, count) = (self.replicas.rank(), self.replicas.size());
        self.gradients.begin_pass(group * u64::from(count) + u64::from(rank));
    }

    /// What decides the order of a pass.
    pub(super) fn shape<'s>(&'s self, segments: &'s [Range<u32>], micro_batches: usize) -> PassShape<'s> {
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
            part: &self.spec.part,
            tied: self.tied_block(),
        }
    }

    /// Whether the embedding's gradient is kept as the rows that were looked up: of a table that is no head as well.
    pub(super) fn keeps_looked_up(&self) -> bool {
        let in_pieces = self.gradients.is_in_pieces(BlockId::Embedding, Role::TokenEmbedding);
        // What all chunks of a sequence look up is as long as the sequence.
        in_pieces && !self.settings.is_tied(&self.spec) && self.settings.chunk_tokens().is_none()
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
                        None => embedding::begin(&ctx, tokens)?,
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
                        let x = embedding::finish(&ctx, &own, &ready.inputs.tokens, x)?;
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
                    self.add_router_losses(lane)?;
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
            Action::Enter { micro_batch } => {
                let x = pass.incoming.take().ok_or(NOTHING_LEFT)?;
                pass.lane(micro_batch)?.x = Some(Held::plain(x));
            }
            Action::Number { number } => {
                pass.group = number;
                if self.settings.sharding.reduces_each_pass() {
                    self.begin_pass(number);
                }
            }
            Action::Exchange(exchange) => {
                enter(Phase::Forward, None);
                self.exchange_lanes(pass, exchange)?;
            }
            Action::Leave { micro_batch } => {
                let lane = pass.lane(micro_batch)?;
                (lane.ready, lane.x, lane.dx) = (None, None, None);
                lane.kept.clear();
            }
            Action::GatherLookedUp { .. }
            | Action::AddTerms { .. }
            | Action::Tie { .. }
            | Action::Follow { .. }
            | Action::Reduce { .. }
            | Action::BeginReduce { .. }
            | Action::EndReduce { .. }
            | Action::Sum { .. }
            | Action::Measure { .. }
            | Action::Update { .. }
            | Action::AllGather { .. }
            | Action::BeginAllGather { .. }
            | Action::EndAllGather
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
        self.numbers.add_losses(self.device, &labels.losses)?;
        self.add_router_losses(lane)
    }

    /// Adds the losses of a micro-batch's routers, where it has any, when all of its layers have been visited.
    fn add_router_losses(&self, lane: &Lane<'_>) -> Result<(), StepError> {
        let losses = lane.routes.training().and_then(|training| training.losses.as_ref());
        let Some(losses) = losses.filter(|_| lane.chunk.is_none_or(|chunk| chunk == 0)) else {
            return Ok(());
        };
        let losses = losses.losses(self.device)?;
        losses.iter().try_for_each(|loss| self.numbers.add_losses(self.device, loss))
    }

    fn embed_backward(&mut self, env: &Env<'a>, lane: &mut Lane<'_>) -> Result<(), StepError> {
        let weights = self.weights.resident().gather(BlockId::Embedding)?;
        let ready = self.ready(lane)?;
        let ctx = self.turn(env, lane, &ready, Visit::Backward)?;
        let dx = ctx.of_all_rows(&again(lane.dx.take(), &ctx)?)?;
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

    /// What a layer's forward pass needs to know, with nothing that takes away what is to stay.
    pub(super) fn saving<'c>(&self, ctx: &Context<'c>, layer: u32) -> Context<'c> {
        let own = ctx.layer(layer);
        let kept = self.settings.kept_layers.activations;
        let away = own.away.filter(|_| !stays(BlockId::Layer(layer), kept, &self.spec));
        Context { away, ..own }
    }
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
