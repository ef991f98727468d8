//! A pass: micro-batches forward through all blocks, the loss, and backward again.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use plimsoll_device::{Device, Op, Tensor};
use plimsoll_memory::Phase;
use plimsoll_model::{BlockId, ModelSpec, Role};

use super::{Finish, Segment, Trainer};
use crate::StepError;
use crate::adapter::Dropout;
use crate::block::{self, Held, Saved};
use crate::context::Context;
use crate::embedding;
use crate::evaluate::Evaluation;
use crate::head::{self, Head, HeadPiece, PiecedLoss, rows};
use crate::inputs::Inputs;
use crate::policy::LayerPolicy;
use crate::rope::RopeTables;
use crate::settings::{MicroBatch, StepSettings, stays};
use crate::store::WeightStore;
use crate::tier::{Unit, is_matrix};

/// What comes after a micro-batch's part of a block's gradients.
#[derive(Clone, Copy)]
enum Then {
    /// The next micro-batch's, at once: they stay where they are.
    Further,
    /// Another block; more is added to them in a pass to come.
    Later,
    /// They are complete.
    Finish(Finish),
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Some micro-batches forward and backward, each block for all of them before the next block; returns the sum of
    /// their token losses. `first` is the number of the first of them in the step; `finish` is `None` where more
    /// micro-batches will add to the gradients.
    pub(super) fn forward_backward(
        &mut self,
        micro_batches: &[MicroBatch<'_>],
        first: u64,
        scale: f32,
        finish: Option<Finish>,
    ) -> Result<f64, StepError> {
        let (device, spec, ropes) = (self.device, Rc::clone(&self.spec), Rc::clone(&self.ropes));
        let mover = self.mover.clone();
        let arena = device.arena();
        arena.enter(Phase::Forward, None);
        let inputs = micro_batches.iter().map(|m| self.upload(m)).collect::<Result<Vec<_>, _>>()?;
        let contexts: Vec<Context<'_, D>> = (first..)
            .zip(&inputs)
            .map(|(i, inputs)| {
                let ctx = self.context(inputs, &spec, &ropes, self.dropout(i));
                Context { away: mover.as_deref(), ..ctx }
            })
            .collect();
        if let Some(mover) = &mover {
            mover.settle()?;
        }
        self.weights.announce(&self.order_of_pass(micro_batches.len()))?;
        self.gradients.announce(&self.order_of_gradients(micro_batches.len()))?;
        if let Some(Finish::Update(_)) = finish {
            self.optimizer.announce(self.order_of_updates(true))?;
        }
        let (mut xs, mut kept) = (Vec::new(), Vec::new());
        for (inputs, ctx) in inputs.iter().zip(&contexts) {
            xs.push(embedding::forward(ctx, &mut self.weights, &inputs.tokens)?);
        }
        let segments: Vec<Range<u32>> = self.policy.segments().collect();
        for blocks in segments {
            let (mut outs, mut of_all) = (Vec::new(), VecDeque::new());
            for (ctx, x) in contexts.iter().zip(xs) {
                let (out, segment) = self.forward_segment(ctx, blocks.clone(), x)?;
                outs.push(out);
                of_all.push_back(segment);
            }
            xs = outs;
            kept.push(of_all);
        }

        arena.enter(Phase::Loss, None);
        let (loss, dxs) = self.losses(&contexts, &inputs, xs, scale, finish)?;
        self.finish(BlockId::Head, finish)?;

        let last = micro_batches.len().saturating_sub(1);
        while let Some(mut of_all) = kept.pop() {
            for (i, (ctx, dx)) in contexts.iter().zip(&dxs).enumerate() {
                let Some(segment) = of_all.pop_front() else { break };
                // What the next segment needs is brought meanwhile.
                let next = of_all.front_mut().or_else(|| kept.last_mut().and_then(VecDeque::front_mut));
                if let Some(next) = next {
                    next.fetch(ctx)?;
                }
                let then = match finish {
                    _ if i < last => Then::Further,
                    None => Then::Later,
                    Some(finish) => Then::Finish(finish),
                };
                self.backward_segment(ctx, segment, dx, then)?;
            }
        }
        arena.enter(Phase::Backward, None);
        for (i, ((inputs, ctx), dx)) in inputs.iter().zip(&contexts).zip(dxs).enumerate() {
            self.embedding_backward(ctx, inputs, dx, finish.filter(|_| i == last))?;
        }
        self.finish(BlockId::Embedding, finish)?;
        mover.map_or(Ok(()), |mover| mover.settle())?;
        Ok(loss)
    }

    fn upload(&self, micro_batch: &MicroBatch<'_>) -> Result<Inputs, StepError> {
        let StepSettings { batch_size, sequence_length, document_end, .. } = self.settings;
        Inputs::upload(self.device, &self.spec, batch_size, sequence_length, document_end, micro_batch)
    }

    fn context<'c>(
        &self,
        inputs: &'c Inputs,
        spec: &'c ModelSpec,
        ropes: &'c RopeTables,
        dropout: Option<Dropout>,
    ) -> Context<'c, D>
    where
        'a: 'c,
    {
        let StepSettings { precision, attention, mlp_chunk_tokens, .. } = self.settings;
        inputs.context(self.device, spec, precision, ropes, attention, mlp_chunk_tokens, dropout)
    }

    /// The blocks that a pass gathers, in order.
    fn order_of_pass(&self, micro_batches: usize) -> Vec<BlockId> {
        let repeated = |blocks: Vec<u32>| {
            let blocks = std::iter::repeat_n(blocks, micro_batches).flatten();
            blocks.map(BlockId::Layer).collect::<Vec<_>>()
        };
        let segments: Vec<Range<u32>> = self.policy.segments().collect();
        let mut order: Vec<BlockId> =
            segments.iter().flat_map(|blocks| repeated(blocks.clone().collect())).collect();
        let (head, _) = Head::table(self.spec.tie_word_embeddings);
        // The loss takes the head twice where it takes it in pieces.
        order.extend([head, head]);
        for blocks in segments.into_iter().rev() {
            let again = blocks.start..blocks.end.saturating_sub(1);
            order.extend(repeated(again.chain(blocks.rev()).collect()));
        }
        order.push(BlockId::Layer(0));
        order
    }

    /// The units whose gradients a pass adds to, in order.
    fn order_of_gradients(&self, micro_batches: usize) -> Vec<Unit> {
        let pieces = |block: BlockId| {
            let own = self.trained.iter().find(|p| p.block == block && is_matrix(p));
            let count = own.map_or(0, |p| self.cut.of(p).len() as u32);
            (0..count).map(move |piece| Unit { block, piece })
        };
        let (head, _) = Head::table(self.spec.tie_word_embeddings);
        let mut order: Vec<Unit> = pieces(head).collect();
        let segments: Vec<Range<u32>> = self.policy.segments().collect();
        for blocks in segments.into_iter().rev() {
            for _ in 0..micro_batches {
                order.extend(blocks.clone().rev().map(|layer| Unit::whole(BlockId::Layer(layer))));
            }
        }
        (0..micro_batches).for_each(|_| order.extend(pieces(BlockId::Embedding)));
        order
    }

    /// The sum of the losses of all micro-batches, and the gradient of the last block's output for each.
    fn losses(
        &mut self,
        contexts: &[Context<'_, D>],
        inputs: &[Inputs],
        xs: Vec<Tensor>,
        scale: f32,
        finish: Option<Finish>,
    ) -> Result<(f64, Vec<Tensor>), StepError> {
        let tied = self.spec.tie_word_embeddings;
        let chunk_tokens = self.settings.loss_chunk_tokens;
        let table = Head::table(tied);
        let updates = matches!(finish, Some(Finish::Update(_)));
        let pieces =
            self.weights.pieces(table.0, table.1).or_else(|| self.gradients.pieces(table.0, table.1));
        if let Some(pieces) = pieces {
            return self.losses_in_pieces(contexts, inputs, xs, scale, (table, &pieces), finish);
        }
        let (mut sum, mut dxs) = (0.0, Vec::new());
        for ((ctx, inputs), x) in contexts.iter().zip(inputs).zip(xs) {
            let head = Head::gather(&mut self.weights, tied)?;
            let (labels, gradients) = (&inputs.labels, &mut self.gradients);
            dxs.push(head::loss_and_backward(ctx, &head, &x, labels, chunk_tokens, scale, gradients)?);
            head.release(&mut self.weights);
            let loss = inputs.sum_of_losses(self.device)?;
            if updates {
                // After this the weights change: what is wrong must be found before.
                self.check_finite(loss, 0.0)?;
            }
            sum += loss;
        }
        Ok((sum, dxs))
    }

    /// The same with the head's table a piece at a time. A table of its own is done with, piece by piece, as soon as its
    /// gradient is known.
    fn losses_in_pieces(
        &mut self,
        contexts: &[Context<'_, D>],
        inputs: &[Inputs],
        xs: Vec<Tensor>,
        scale: f32,
        ((block, role), pieces): ((BlockId, Role), &[Range<u64>]),
        finish: Option<Finish>,
    ) -> Result<(f64, Vec<Tensor>), StepError> {
        let chunk_tokens = self.settings.loss_chunk_tokens;
        let own = self.weights.gather(BlockId::Head)?;
        let mut losses = Vec::new();
        for ((ctx, inputs), x) in contexts.iter().zip(inputs).zip(&xs) {
            let norm = own.norm(Role::FinalNorm, Some(Role::FinalNormBias), &ctx.spec.norm)?;
            losses.push(PiecedLoss::begin(ctx, norm, x, &inputs.labels, chunk_tokens, pieces)?);
        }
        for (piece, rows) in (0..).zip(pieces) {
            let weight = &self.weight_rows(block, role, piece, rows)?;
            for (ctx, loss) in contexts.iter().zip(&losses) {
                loss.add(ctx, HeadPiece { block, role, piece, rows, weight })?;
            }
            self.weights.release_piece(block, piece, false);
        }
        let mut sum = 0.0;
        for ((ctx, loss), inputs) in contexts.iter().zip(&losses).zip(inputs) {
            loss.losses(ctx)?;
            sum += inputs.sum_of_losses(self.device)?;
        }
        if matches!(finish, Some(Finish::Update(_))) {
            self.check_finite(sum, 0.0)?;
        }
        let trained = self.trained.iter().find(|p| p.block == block && p.role == role).cloned();
        for (piece, rows) in (0..).zip(pieces) {
            let weight = self.weight_rows(block, role, piece, rows)?;
            for (i, (ctx, loss)) in contexts.iter().zip(&mut losses).enumerate() {
                let nth = i as u64 * loss.additions();
                let piece = HeadPiece { block, role, piece, rows, weight: &weight };
                loss.backward(ctx, &mut self.gradients, piece, scale, nth)?;
            }
            drop(weight);
            self.weights.release_piece(block, piece, false);
            match (&trained, finish) {
                (Some(p), Some(finish)) if block == BlockId::Head => {
                    self.finish_rows(p, piece, rows, finish)?;
                }
                (Some(_), _) => self.gradients.leave_rows(block, piece, false)?,
                (None, _) => {}
            }
        }
        if trained.is_some() {
            let times = losses.iter().map(PiecedLoss::additions).sum();
            self.gradients.count_rows(block, role, times);
        }
        let mut dxs = Vec::new();
        for (ctx, loss) in contexts.iter().zip(losses) {
            dxs.push(loss.finish(ctx, &mut self.gradients)?);
        }
        Ok((sum, dxs))
    }

    /// Rows of a table, whether it is there as a whole or comes in pieces.
    pub(super) fn weight_rows(
        &mut self,
        block: BlockId,
        role: Role,
        piece: u32,
        range: &Range<u64>,
    ) -> Result<Tensor, StepError> {
        if self.weights.pieces(block, role).is_some() {
            return self.weights.gather_piece(block, role, piece);
        }
        let weights = self.weights.gather(block)?;
        rows(weights.get(role)?, range.start, range.end)
    }

    /// The gradients of the embedding's tables and adapter. A table whose gradient comes in pieces is done with, piece by
    /// piece, as soon as that is known.
    fn embedding_backward(
        &mut self,
        ctx: &Context<'_, D>,
        inputs: &Inputs,
        dx: Tensor,
        finish: Option<Finish>,
    ) -> Result<(), StepError> {
        if !self.trained.iter().any(|p| p.block == BlockId::Embedding) {
            return Ok(());
        }
        let (block, role) = (BlockId::Embedding, Role::TokenEmbedding);
        let weights = self.weights.gather(block)?;
        embedding::backward(ctx, &weights, &inputs.tokens, &dx, &mut self.gradients)?;
        self.weights.release(block);
        let trained = self.trained.iter().find(|p| p.block == block && p.role == role).cloned();
        let (Some(trained), Some(pieces)) = (trained, self.gradients.pieces(block, role)) else {
            return Ok(());
        };
        if self.keeps_looked_up() {
            self.gradients.keep_looked_up(inputs.tokens.clone(), dx);
            for (piece, rows) in (0..).zip(&pieces) {
                let Some(finish) = finish else { break };
                self.gradients.gather_looked_up((block, role), piece, rows)?;
                self.finish_rows(&trained, piece, rows, finish)?;
            }
            return Ok(());
        }
        for (piece, rows) in (0..).zip(&pieces) {
            self.gradients.scatter_rows((block, role), piece, rows, (&inputs.tokens, &dx), 0)?;
            match finish {
                Some(finish) => self.finish_rows(&trained, piece, rows, finish)?,
                None => self.gradients.leave_rows(block, piece, false)?,
            }
        }
        self.gradients.count_rows(block, role, 1);
        Ok(())
    }

    /// Whether the embedding's gradient is kept as the rows that were looked up: of a table that is no head as well.
    pub(super) fn keeps_looked_up(&self) -> bool {
        let in_pieces = self.gradients.is_in_pieces(BlockId::Embedding, Role::TokenEmbedding);
        in_pieces && !self.spec.tie_word_embeddings
    }

    /// A segment of blocks forward: one block keeps what its policy says, several keep their input.
    fn forward_segment(
        &mut self,
        ctx: &Context<'_, D>,
        blocks: Range<u32>,
        mut x: Tensor,
    ) -> Result<(Tensor, Segment), StepError> {
        if blocks.len() == 1 {
            let policy = self.policy.layer(blocks.start);
            let (out, saved) = self.forward_block(ctx, Phase::Forward, blocks.start, policy, x)?;
            return Ok((out, Segment::Block(blocks.start, Box::new(saved))));
        }
        let input = x.clone();
        for layer in blocks.clone() {
            let policy = LayerPolicy::nothing();
            x = self.forward_block(ctx, Phase::Forward, layer, policy, x)?.0;
        }
        let save = self.policy.layer(blocks.start).input;
        let held = Held::new(&self.saving(ctx, blocks.start), save, input)?;
        Ok((x, Segment::Blocks(blocks, held)))
    }

    /// What a layer's forward pass needs to know, with nothing that takes away what is to stay.
    fn saving<'c>(&self, ctx: &Context<'c, D>, layer: u32) -> Context<'c, D> {
        let own = ctx.layer(layer);
        let kept = self.settings.kept_layers.activations;
        let away = own.away.filter(|_| !stays(BlockId::Layer(layer), kept, self.spec.num_layers));
        Context { away, ..own }
    }

    fn forward_block(
        &mut self,
        ctx: &Context<'_, D>,
        phase: Phase,
        layer: u32,
        policy: LayerPolicy,
        x: Tensor,
    ) -> Result<(Tensor, Saved), StepError> {
        ctx.device.arena().enter(phase, Some(layer));
        let weights = self.weights.gather(BlockId::Layer(layer))?;
        let out = block::forward(&self.saving(ctx, layer), &weights, policy, x);
        self.weights.release(BlockId::Layer(layer));
        out
    }

    /// A segment backward; a segment of several blocks runs forward again first, for the inputs of its blocks.
    fn backward_segment(
        &mut self,
        ctx: &Context<'_, D>,
        segment: Segment,
        dx: &Tensor,
        then: Then,
    ) -> Result<(), StepError> {
        let (blocks, input) = match segment {
            Segment::Block(layer, saved) => return self.backward_block(ctx, layer, *saved, dx, then),
            Segment::Blocks(blocks, input) => (blocks, input),
        };
        let missing =
            || Err(StepError::MissingWeight { block: BlockId::Layer(blocks.start), role: Role::QProj });
        let mut x = input.restore(ctx, missing)?;
        let mut inputs = vec![x.clone()];
        for layer in blocks.start..blocks.end.saturating_sub(1) {
            let policy = LayerPolicy::nothing();
            x = self.forward_block(ctx, Phase::Backward, layer, policy, x)?.0;
            inputs.push(x.clone());
        }
        drop(x);
        // Other blocks come before the next micro-batch.
        let then = if matches!(then, Then::Further) { Then::Later } else { then };
        for layer in blocks.rev() {
            if let Some(input) = inputs.pop() {
                self.backward_block(ctx, layer, Saved::only(input), dx, then)?;
            }
        }
        Ok(())
    }

    fn backward_block(
        &mut self,
        ctx: &Context<'_, D>,
        layer: u32,
        saved: Saved,
        dx: &Tensor,
        then: Then,
    ) -> Result<(), StepError> {
        let block = BlockId::Layer(layer);
        ctx.device.arena().enter(Phase::Backward, Some(layer));
        let weights = self.weights.gather(block)?;
        self.gradients.fetch(block)?;
        let done = block::backward(&ctx.layer(layer), &weights, saved, dx, &mut self.gradients);
        self.weights.release(block);
        drop(weights);
        done?;
        match then {
            Then::Further => Ok(()),
            Then::Later => self.finish(block, None),
            Then::Finish(finish) => self.finish(block, Some(finish)),
        }
    }

    /// The first block, in the order of the forward pass, whose output for a micro-batch is not finite. Weights and
    /// gradients stay as they are.
    pub fn first_bad_output(&mut self, micro_batch: &MicroBatch<'_>) -> Result<Option<BlockId>, StepError> {
        let (device, spec, ropes) = (self.device, Rc::clone(&self.spec), Rc::clone(&self.ropes));
        device.arena().enter(Phase::Forward, None);
        let inputs = self.upload(micro_batch)?;
        let ctx = self.context(&inputs, &spec, &ropes, None);
        self.weights.announce(&self.order_of_pass(1))?;
        let mut x = embedding::forward(&ctx, &mut self.weights, &inputs.tokens)?;
        let square = rows(&self.squared_norms, 0, 1)?;
        let finite = |x: &Tensor| -> Result<bool, StepError> {
            device.run(Op::SumSquares { x, out: &square })?;
            Ok(device.read_f32(&square)?.iter().all(|square| square.is_finite()))
        };
        if !finite(&x)? {
            return Ok(Some(BlockId::Embedding));
        }
        for layer in 0..spec.num_layers {
            let policy = LayerPolicy::nothing();
            x = self.forward_block(&ctx, Phase::Forward, layer, policy, x)?.0;
            if !finite(&x)? {
                return Ok(Some(BlockId::Layer(layer)));
            }
        }
        Ok(None)
    }

    /// Sum of token losses, each by its weight, and number of targets of a batch of at most the step's shape, with the
    /// model's own attention over whole sequences, or documents where the batch says where they start; weights and
    /// gradients stay as they are.
    pub fn evaluate(
        &mut self,
        batch_size: u64,
        micro_batch: &MicroBatch<'_>,
    ) -> Result<(f64, u64), StepError> {
        let StepSettings { loss_chunk_tokens, mlp_chunk_tokens, precision, sequence_length, .. } =
            self.settings;
        let store = &mut self.weights;
        let pass = Evaluation {
            device: self.device,
            spec: &self.spec,
            precision,
            ropes: &self.ropes,
            loss_chunk_tokens,
            mlp_chunk_tokens,
            longest: sequence_length,
        };
        pass.run(store, batch_size, micro_batch)
    }
}

impl Segment {
    /// Begins to bring what it keeps elsewhere.
    fn fetch<D: Device>(&mut self, ctx: &Context<'_, D>) -> Result<(), StepError> {
        match self {
            Segment::Block(_, saved) => saved.fetch(ctx),
            Segment::Blocks(_, input) => input.fetch(ctx),
        }
    }
}
