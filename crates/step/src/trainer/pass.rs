//! A pass: micro-batches forward through all blocks, the loss, and backward again, as its schedule says.

use std::ops::Range;
use std::rc::Rc;

use plimsoll_device::{DeviceExt, Reduction, Tensor};
use plimsoll_memory::Phase;
use plimsoll_model::{BlockId, ModelSpec, Role};

use super::schedule::{Action, EmbeddingGradient, LossForm, PassShape, Schedule};
use super::{Completion, Trainer};
use crate::StepError;
use crate::block::{self, Held, Saved};
use crate::context::Context;
use crate::embedding;
use crate::evaluate::{EvaluateSettings, Evaluation};
use crate::head::{self, Head, HeadPiece, PiecedLoss};
use crate::inputs::Inputs;
use crate::policy::LayerPolicy;
use crate::rope::RopeTables;
use crate::settings::{MicroBatch, StepSettings, stays};
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

/// One micro-batch on its way.
struct Lane<'c> {
    /// Which micro-batch of the step it is.
    number: u64,
    ctx: Context<'c>,
    inputs: &'c Inputs<'c>,
    /// The residual stream.
    x: Option<Tensor>,
    /// What enters the segment that it goes through.
    entered: Option<Tensor>,
    /// What the forward pass left of each segment.
    kept: Vec<Option<Kept>>,
    /// The inputs of the layers of a segment, computed again.
    again: Vec<Tensor>,
    /// The loss, where the head comes in pieces.
    loss: Option<PiecedLoss<'c>>,
    /// The gradient of the residual stream.
    dx: Option<Tensor>,
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
    fn prefetch(&mut self, ctx: &Context<'_>) -> Result<(), StepError> {
        match self {
            Kept::Layer(saved) => saved.fetch(ctx),
            Kept::Input(input) => input.fetch(ctx),
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

    fn segment(&self, segment: usize) -> Range<u32> {
        self.segments.get(segment).cloned().unwrap_or_default()
    }
}

impl Lane<'_> {
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
        let (device, spec, ropes) = (self.device, Rc::clone(&self.spec), Rc::clone(&self.ropes));
        let mover = self.mover.clone();
        let group = first / self.settings.micro_batches_per_pass.max(1);
        if self.settings.sharding.reduces_each_pass() {
            let ranks = self.communicator;
            self.gradients.begin_pass(group * u64::from(ranks.size()) + u64::from(ranks.rank()));
        }
        device.enter(Phase::Forward, None);
        let inputs = micro_batches.iter().map(|m| self.upload(m)).collect::<Result<Vec<_>, _>>()?;
        if let Some(mover) = &mover {
            mover.settle()?;
        }
        let segments: Vec<Range<u32>> = self.policy.segments().collect();
        let schedule = Schedule::pass(&self.shape(&segments, micro_batches.len()), completion);
        let head = self.weights.resident().gather(BlockId::Head)?;
        let lane = |(number, inputs)| {
            let (dropout, away) = (self.dropout(self.deal.place(number)), mover.as_deref());
            Lane {
                number,
                ctx: Context { dropout, away, ..self.context(inputs, &spec, &ropes) },
                inputs,
                x: None,
                entered: None,
                kept: Vec::new(),
                again: Vec::new(),
                loss: None,
                dx: None,
            }
        };
        let lanes = (first..).zip(&inputs).map(lane).collect();
        let mut pass = Pass { lanes, head: Some(&head), segments, scale, group };
        self.perform(&schedule, &mut pass)?;
        drop(pass);
        mover.map_or(Ok(()), |mover| mover.settle())
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
        in_pieces && !self.spec.tie_word_embeddings
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
        match action {
            Action::Embed { micro_batch } => {
                enter(Phase::Forward, None);
                let lane = pass.lane(micro_batch)?;
                lane.x = Some(embedding::forward(
                    &lane.ctx,
                    &mut self.weights,
                    (&lane.inputs.tokens, lane.inputs.ids),
                )?);
            }
            Action::EmbedPiece { unit, last } => {
                enter(Phase::Forward, None);
                let piece = self.weights.embedding_pieces().find(|(piece, _)| *piece == unit);
                let (_, rows) = piece.ok_or(NOTHING_LEFT)?;
                for lane in &mut pass.lanes {
                    let tokens = &lane.inputs.tokens;
                    let x = match lane.x.take() {
                        Some(x) => x,
                        None => embedding::residual(&lane.ctx, tokens)?,
                    };
                    embedding::look_up_piece(&lane.ctx, weights()?, tokens, rows.start, &x)?;
                    lane.x = Some(x);
                }
                if last {
                    let own = self.weights.resident().gather(BlockId::Embedding)?;
                    for lane in &pass.lanes {
                        let x = lane.x.as_ref().ok_or(NOTHING_LEFT)?;
                        embedding::finish(&lane.ctx, &own, &lane.inputs.tokens, x)?;
                    }
                }
            }
            Action::Forward { layer, segment, micro_batch } => {
                enter(Phase::Forward, Some(layer));
                let layers = pass.segment(segment);
                self.forward(pass.lane(micro_batch)?, weights()?, layer, &layers)?;
            }
            Action::Loss { micro_batch } => {
                enter(Phase::Loss, None);
                self.loss(pass, micro_batch)?;
            }
            Action::LossBegin { micro_batch } => {
                enter(Phase::Loss, None);
                let (head, chunk_tokens) = (pass.head, self.settings.loss_chunk_tokens);
                let lane = pass.lane(micro_batch)?;
                let (own, x) = (head.ok_or(NOTHING_LEFT)?, lane.x.take().ok_or(NOTHING_LEFT)?);
                let norm = own.norm(Role::FinalNorm, Some(Role::FinalNormBias), &lane.ctx.spec.norm)?;
                let (labels, pieces) = (&lane.inputs.labels, self.loss_pieces.as_deref().unwrap_or_default());
                lane.loss = Some(PiecedLoss::begin(&lane.ctx, norm, x, labels, chunk_tokens, pieces)?);
            }
            Action::LossPiece { unit } => {
                let pieces = self.loss_pieces.as_deref();
                let piece = head_piece(self.spec.tie_word_embeddings, pieces, unit, weights()?)?;
                for lane in &pass.lanes {
                    lane.loss.as_ref().ok_or(NOTHING_LEFT)?.add(&lane.ctx, piece)?;
                }
            }
            Action::LossTotal => {
                for lane in &pass.lanes {
                    lane.loss.as_ref().ok_or(NOTHING_LEFT)?.losses(&lane.ctx)?;
                    self.numbers.add_losses(device, &lane.inputs.labels.losses)?;
                }
            }
            Action::LossBackward { unit, last } => {
                let (gradients, mut additions) = (&mut self.gradients, 0);
                let pieces = self.loss_pieces.as_deref();
                let piece = head_piece(self.spec.tie_word_embeddings, pieces, unit, weights()?)?;
                for lane in &mut pass.lanes {
                    let loss = lane.loss.as_mut().ok_or(NOTHING_LEFT)?;
                    loss.backward(&lane.ctx, gradients, piece, pass.scale, additions)?;
                    additions += loss.additions();
                }
                if last && gradients.wants(piece.block, piece.role) {
                    gradients.count_rows(piece.block, piece.role, additions);
                }
            }
            Action::LossEnd { micro_batch } => {
                let lane = pass.lane(micro_batch)?;
                let loss = lane.loss.take().ok_or(NOTHING_LEFT)?;
                lane.dx = Some(loss.finish(&lane.ctx, &mut self.gradients)?);
            }
            Action::PrefetchKept { segment, micro_batch } => {
                let lane = pass.lane(micro_batch)?;
                let kept = lane.kept.get_mut(segment).and_then(Option::as_mut).ok_or(NOTHING_LEFT)?;
                kept.prefetch(&lane.ctx)?;
            }
            Action::Recompute { layer, segment, micro_batch } => {
                enter(Phase::Backward, Some(layer));
                self.recompute(pass.lane(micro_batch)?, weights()?, layer, segment)?;
            }
            Action::Backward { layer, segment, micro_batch } => {
                enter(Phase::Backward, Some(layer));
                let alone = pass.segment(segment).len() == 1;
                let lane = pass.lane(micro_batch)?;
                let saved = match alone {
                    true => match lane.take_kept(segment)? {
                        Kept::Layer(saved) => *saved,
                        Kept::Input(_) => return Err(NOTHING_LEFT),
                    },
                    false => Saved::only(lane.again.pop().ok_or(NOTHING_LEFT)?),
                };
                let dx = lane.dx.as_ref().ok_or(NOTHING_LEFT)?;
                block::backward(&lane.ctx.layer(layer), weights()?, saved, dx, &mut self.gradients)?;
            }
            Action::EmbedBackward { micro_batch } => {
                enter(Phase::Backward, None);
                self.embed_backward(pass.lane(micro_batch)?)?;
            }
            Action::Scatter { unit, micro_batch, last } => {
                let part = self.parts.of(unit).first().cloned().ok_or(NOTHING_LEFT)?;
                let lane = pass.lane(micro_batch)?;
                let dx = lane.dx.as_ref().ok_or(NOTHING_LEFT)?;
                self.gradients.scatter_rows(&part, &lane.inputs.tokens, dx, 0)?;
                if last {
                    self.gradients.count_rows(part.parameter.block, part.parameter.role, 1);
                    lane.dx = None;
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
        lane: &mut Lane<'_>,
        weights: &BlockWeights,
        layer: u32,
        layers: &Range<u32>,
    ) -> Result<(), StepError> {
        let x = lane.x.take().ok_or(NOTHING_LEFT)?;
        let alone = layers.len() == 1;
        if !alone && layer == layers.start {
            lane.entered = Some(x.clone());
        }
        let policy = if alone { self.policy.layer(layer) } else { LayerPolicy::nothing() };
        let (x, saved) = block::forward(&self.saving(&lane.ctx, layer), weights, policy, x)?;
        lane.x = Some(x);
        if alone {
            lane.kept.push(Some(Kept::Layer(Box::new(saved))));
        } else if layer + 1 == layers.end {
            let input = lane.entered.take().ok_or(NOTHING_LEFT)?;
            let save = self.policy.layer(layers.start).input;
            let held = Held::new(&self.saving(&lane.ctx, layers.start), save, input)?;
            lane.kept.push(Some(Kept::Input(held)));
        }
        Ok(())
    }

    fn recompute(
        &mut self,
        lane: &mut Lane<'_>,
        weights: &BlockWeights,
        layer: u32,
        segment: usize,
    ) -> Result<(), StepError> {
        if lane.again.is_empty() {
            let Kept::Input(input) = lane.take_kept(segment)? else { return Err(NOTHING_LEFT) };
            lane.again.push(input.restore(&lane.ctx, || Err(NOTHING_LEFT))?);
        }
        let x = lane.again.last().cloned().ok_or(NOTHING_LEFT)?;
        let ctx = &self.saving(&lane.ctx, layer);
        lane.again.push(block::forward(ctx, weights, LayerPolicy::nothing(), x)?.0);
        Ok(())
    }

    /// The loss and the gradient of the last layer's output, with a head that is there as a whole.
    fn loss(&mut self, pass: &mut Pass<'_>, micro_batch: usize) -> Result<(), StepError> {
        let (scale, chunk_tokens) = (pass.scale, self.settings.loss_chunk_tokens);
        let head = Head::gather(&mut self.weights, self.spec.tie_word_embeddings)?;
        let lane = pass.lane(micro_batch)?;
        let x = lane.x.take().ok_or(NOTHING_LEFT)?;
        let (labels, gradients) = (&lane.inputs.labels, &mut self.gradients);
        lane.dx =
            Some(head::loss_and_backward(&lane.ctx, &head, &x, labels, chunk_tokens, scale, gradients)?);
        head.release(&mut self.weights);
        self.numbers.add_losses(self.device, &lane.inputs.labels.losses)
    }

    fn embed_backward(&mut self, lane: &mut Lane<'_>) -> Result<(), StepError> {
        let weights = self.weights.resident().gather(BlockId::Embedding)?;
        let dx = lane.dx.take().ok_or(NOTHING_LEFT)?;
        embedding::backward(&lane.ctx, &weights, &lane.inputs.tokens, &dx, &mut self.gradients)?;
        if self.keeps_looked_up() {
            let looked_up = &mut self.gradients.looked_up;
            looked_up.keep(self.device, lane.number, lane.inputs.tokens.clone(), dx)?;
        } else if self.gradients.is_in_pieces(BlockId::Embedding, Role::TokenEmbedding) {
            lane.dx = Some(dx);
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
        let (device, spec, ropes) = (self.device, Rc::clone(&self.spec), Rc::clone(&self.ropes));
        device.enter(Phase::Forward, None);
        let inputs = self.upload(micro_batch)?;
        let ctx = self.context(&inputs, &spec, &ropes);
        let table: Vec<Unit> = self.weights.embedding_pieces().map(|(unit, _)| unit).collect();
        let layers = Schedule::forward(0..spec.num_layers);
        self.weights.announce(table.into_iter().chain(layers.weights()))?;
        let mut x = embedding::forward(&ctx, &mut self.weights, (&inputs.tokens, inputs.ids))?;
        let square = self.numbers.spare()?;
        let finite = |x: &Tensor| -> Result<bool, StepError> {
            device.run(Reduction::SumSquares { x, out: &square, finite: None })?;
            Ok(device.read_f32(&square)?.iter().all(|square| square.is_finite()))
        };
        let mut first = if finite(&x)? { None } else { Some(BlockId::Embedding) };
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
        let (device, spec, ropes) = (self.device, &*self.spec, &*self.ropes);
        let pass = Evaluation { device, spec, ropes, settings, mlp_chunk_tokens };
        pass.run(&mut self.weights, batch_size, micro_batch)
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
