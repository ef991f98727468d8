//! Forward passes that change nothing: the loss of a batch that is evaluated, and the first block whose output is no number.

use plimsoll_device::{Device, DeviceExt, Reduction, Tensor};
use plimsoll_memory::Phase;
use plimsoll_model::BlockId;

use super::lanes::{Lane, NOTHING_LEFT, again, until_next};
use super::schedule::Schedule;
use super::{Flow, Trainer};
use crate::StepError;
use crate::block::{self, Visit};
use crate::context::Context;
use crate::embedding;
use crate::evaluate::{EvaluateSettings, Evaluation};
use crate::head::{self, Head};
use crate::inputs::sum;
use crate::policy::LayerPolicy;
use crate::settings::{AttentionKind, MicroBatch, StepSettings};
use crate::tier::Unit;

/// Sees what comes out of each block.
type Look<'l> = &'l mut dyn FnMut(&dyn Device, BlockId, &Tensor) -> Result<(), StepError>;

impl<'a> Trainer<'a> {
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
        let (device, env, runs) = (self.device, &self.env(), self.spec.runs());
        device.enter(Phase::Forward, None);
        let lanes = self.lanes(std::slice::from_ref(micro_batch), 0, None, Visit::Evaluate)?;
        let lane = lanes.first().ok_or(NOTHING_LEFT)?;
        let ready = self.ready(lane)?;
        let ctx = Context { dropout: None, away: None, ..self.turn(env, lane, &ready, Visit::Evaluate)? };
        let inputs = &ready.inputs;
        let table: Vec<Unit> = self.weights.embedding_pieces().map(|(unit, _)| unit).collect();
        let layers = Schedule::forward(self.spec.layers());
        self.weights.announce(table.into_iter().chain(layers.weights()))?;
        let stages = self.stages.clone();
        let (flow, tokens) = (Flow::through(stages.as_deref()), (&inputs.tokens, &*inputs.ids));
        let finite = |x: &Tensor| is_finite(device, x, &square);
        for (round, layers) in (0..).zip(runs) {
            let weights = &mut self.weights;
            let mut x = flow.enter(&ctx, round, tokens.0, || embedding::forward(&ctx, weights, tokens))?;
            if self.spec.part.embedding && round == 0 && !finite(&x)? {
                first = Some(BlockId::Embedding);
            }
            for layer in layers {
                device.enter(Phase::Forward, Some(layer));
                let weights = self.weights.gather(BlockId::Layer(layer))?;
                x = block::forward(&ctx.layer(layer), &weights, LayerPolicy::nothing(), x)?.0;
                drop(weights);
                self.weights.release(Unit::Layer(layer), false);
                if first.is_none() && !finite(&x)? {
                    first = Some(BlockId::Layer(layer));
                }
            }
            flow.leave(&ctx, round, x)?;
        }
        self.first_of_stages(first)
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
        let mut lanes = self.lanes(std::slice::from_ref(micro_batch), 0, starts, Visit::Evaluate)?;
        for lane in &mut lanes {
            let ready = self.ready(lane)?;
            let ctx = self.turn(env, lane, &ready, Visit::Evaluate)?;
            let table: Vec<Unit> = self.weights.embedding_pieces().map(|(unit, _)| unit).collect();
            self.weights.announce(table)?;
            let x = embedding::forward(&ctx, &mut self.weights, (&ready.inputs.tokens, &ready.inputs.ids))?;
            look(device, BlockId::Embedding, &x)?;
            lane.x = until_next(&ctx, x)?;
        }
        self.weights.announce(Schedule::forward(self.spec.layers()).weights())?;
        for layer in self.spec.layers() {
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

    /// Sum of token losses, each by its weight, and number of targets of a batch of sequences of the step's length, with the
    /// model's own attention over whole sequences, or documents where the batch says where they start; weights and
    /// gradients stay as they are. Where ranks share sequences, the losses are those of this rank's tokens; of a pipeline, the last
    /// stage has them.
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
        let ring = self.ring.as_deref();
        // Of shared sequences, those at hand are of the step's batches.
        let ropes = self.ropes.as_deref().filter(|_| ring.is_none());
        let stages = self.stages.clone();
        let flow = Flow::through(stages.as_deref());
        let products = self.products.clone();
        let products = products.as_deref();
        let pass = Evaluation { device, spec, ropes, ring, flow, products, settings, mlp_chunk_tokens };
        pass.run(&mut self.weights, batch_size, micro_batch)
    }
}

/// Whether every element of a tensor is finite. `square`: f32 `[1]`.
fn is_finite(device: &dyn Device, x: &Tensor, square: &Tensor) -> Result<bool, StepError> {
    device.run(Reduction::SumSquares { x, out: square, finite: None })?;
    Ok(device.read_f32(square)?.iter().all(|square| square.is_finite()))
}
