//! The training step, top-down: `step -> forward_backward -> block::forward ... block::backward -> update`.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use plimsoll_device::{DType, Device, Op, Rounding, Tensor};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, ModelSpec, Parameter, Role};
use plimsoll_parallel::Communicator;

use crate::StepError;
use crate::adapter::Dropout;
use crate::block::{self, Held, Saved};
use crate::context::Context;
use crate::embedding;
use crate::evaluate::Evaluation;
use crate::gradients::Gradients;
use crate::head::{self, Head, rows};
use crate::inputs::Inputs;
use crate::optimizer::{Optimizer, StateKind, Update};
use crate::policy::{LayerPolicy, Save, SavePolicy};
use crate::rope::RopeTables;
use crate::seed::mix;
use crate::settings::{GradientClipping, LossScaling, MicroBatch, NormSource, StepSettings, UpdateTiming};
use crate::store::{BlockWeights, ResidentStore, WeightStorage, WeightStore};

/// Sets the seeds of dropout apart from others.
const DROPOUT: u64 = 0xd309;

/// A model in training: weights, gradients, optimizer states, and the step that moves them.
pub struct Trainer<'a, D: Device> {
    device: &'a D,
    spec: Rc<ModelSpec>,
    settings: StepSettings,
    policy: SavePolicy,
    /// What is trained, in the order of the blocks.
    trained: Vec<Parameter>,
    communicator: &'a dyn Communicator,
    tiers: Arc<LowerTiers>,
    weights: ResidentStore,
    gradients: Gradients,
    optimizer: Optimizer,
    ropes: Rc<RopeTables>,
    /// f32 `[parameters, 1]`: where the squared norms of the gradients meet, and the row of each.
    norm_rows: HashMap<(BlockId, Role), u64>,
    squared_norms: Tensor,
    progress: StepProgress,
}

/// How far training has come, as far as the step itself needs to know.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepProgress {
    /// Optimizer steps taken.
    pub steps: u64,
    /// The global gradient norm of the last one.
    pub grad_norm: Option<f64>,
    /// How the loss is scaled, if it is.
    pub loss_scale: Option<LossScale>,
}

/// The state of a dynamic loss scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The factor on the loss.
    pub scale: f64,
    /// Good steps since it last changed.
    pub good_steps: u64,
    /// Steps skipped in all because their gradients overflowed.
    pub skipped_steps: u64,
}

impl LossScale {
    /// The smallest scale: gradients that overflow unscaled are not the scale's fault.
    const SMALLEST: f64 = 1.0;

    fn new(scaling: LossScaling) -> LossScale {
        LossScale { scale: scaling.initial, good_steps: 0, skipped_steps: 0 }
    }

    /// After a step whose gradients were finite.
    fn grow(&mut self, scaling: LossScaling) {
        self.good_steps += 1;
        if self.good_steps >= scaling.growth_interval {
            *self = LossScale { scale: self.scale * scaling.growth, good_steps: 0, ..*self };
        }
    }

    /// After a step whose gradients overflowed; `false` where the scale cannot get smaller.
    fn back_off(&mut self, scaling: LossScaling) -> bool {
        let smaller = self.scale * scaling.backoff;
        let possible = self.scale > Self::SMALLEST;
        let skipped_steps = self.skipped_steps + u64::from(possible);
        *self = LossScale { scale: smaller.max(Self::SMALLEST), good_steps: 0, skipped_steps };
        possible
    }
}

/// What happens to the gradients of a block when they are complete.
#[derive(Clone, Copy)]
enum Finish {
    /// They stay.
    Keep,
    /// Their norms are taken, and they are given back.
    Measure,
    /// Their norms are taken, the block is updated, and they are given back.
    Update(Update),
}

/// What a pass left of a segment of blocks.
enum Segment {
    /// The activations of this one.
    Block(u32, Box<Saved>),
    /// The input of the first of these blocks.
    Blocks(Range<u32>, Held<Tensor>),
}

/// What a step gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss over all target tokens of the step, before the update.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Target tokens.
    pub targets: u64,
    /// Whether the update was left out because the scaled gradients overflowed.
    pub skipped: bool,
}

/// One tensor of the training state.
#[derive(Clone, Debug)]
pub struct NamedTensor {
    /// The parameter's name.
    pub name: String,
    /// What the tensor is to the parameter.
    pub kind: StateKind,
    /// The values.
    pub tensor: Tensor,
}

impl<'a, D: Device> Trainer<'a, D> {
    /// As [`Trainer::with_tiers`], for settings that offload nothing.
    pub fn new(
        device: &'a D,
        spec: ModelSpec,
        settings: StepSettings,
        communicator: &'a dyn Communicator,
    ) -> Result<Self, StepError> {
        Trainer::with_tiers(device, Arc::new(LowerTiers::none()), spec, settings, communicator)
    }

    /// Takes all persistent memory, on the device and on the tiers below it. Weights are uninitialised until [`Trainer::load`]; moments are zero.
    pub fn with_tiers(
        device: &'a D,
        tiers: Arc<LowerTiers>,
        spec: ModelSpec,
        settings: StepSettings,
        communicator: &'a dyn Communicator,
    ) -> Result<Self, StepError> {
        let precision = settings.precision;
        let method = &settings.method;
        let types = |p: &Parameter| method.weight_type(p, precision.weights);
        let adapters = method.adapters().map(|adapters| &adapters.layout);
        let storage = WeightStorage { types: &types, adapters, trained: true, staging: None };
        let weights = ResidentStore::allocate_typed(device, &spec, storage, Tag::Weights)?;
        let trained = method.trained(&spec);
        // Adapters are in f32 themselves.
        let needs_master = |p: &Parameter| precision.master_weights && !matches!(p.role, Role::Lora(..));
        let optimizer = Optimizer::allocate(
            device,
            &trained,
            spec.attention.head_dim,
            &settings.optimizer,
            &needs_master,
            settings.seed,
        )?;
        let gradients = Gradients::new(&trained, precision.gradients);
        device.arena().enter(Phase::Setup, None);
        let ropes = Rc::new(RopeTables::new(device, &spec, settings.sequence_length)?);
        let squared_norms =
            device.alloc(DType::F32, &[trained.len().max(1) as u64, 1], Tag::Workspace, "grad_norm")?;
        let loss_scale = settings.loss_scaling.map(LossScale::new);
        let progress = StepProgress { loss_scale, ..StepProgress::default() };
        let norm_rows = trained.iter().map(|p| (p.block, p.role)).zip(0..).collect();
        let policy = SavePolicy::new(settings.checkpointing, settings.compression, spec.num_layers);
        Ok(Trainer {
            device,
            spec: Rc::new(spec),
            settings,
            policy,
            norm_rows,
            trained,
            communicator,
            tiers,
            weights,
            gradients,
            optimizer,
            ropes,
            squared_norms,
            progress,
        })
    }

    /// The tiers below the device.
    pub fn tiers(&self) -> &LowerTiers {
        &self.tiers
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The step's settings.
    pub fn settings(&self) -> &StepSettings {
        &self.settings
    }

    /// What is trained, in the order of the blocks.
    pub fn trained(&self) -> &[Parameter] {
        &self.trained
    }

    /// How far training has come.
    pub fn progress(&self) -> StepProgress {
        self.progress
    }

    /// Continues from where an earlier part stood, with a state that was written into [`Trainer::state`]'s tensors.
    pub fn resume(&mut self, progress: StepProgress) {
        self.progress = progress;
    }

    /// Sets every weight, those of adapters too. `fill` writes a parameter's values in the given type; it is not called on a dry device.
    /// With master weights it fills the master, and the weight is that, rounded.
    pub fn load<E: From<StepError>>(
        &mut self,
        mut fill: impl FnMut(&Parameter, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for p in self.weights.parameters() {
            let weight = self.weights.tensor(p)?;
            let master = self.optimizer.find(p.block, p.role).and_then(|state| state.master());
            let target = master.unwrap_or(weight);
            let mut outcome = Ok(());
            self.device
                .write(target, &mut |bytes| outcome = fill(p, target.dtype(), bytes))
                .map_err(StepError::from)?;
            outcome?;
            if let Some(x) = master {
                let cast = Op::Cast { x, out: weight, rounding: Rounding::Nearest };
                self.device.run(cast).map_err(StepError::from)?;
            }
        }
        Ok(self.weights.prepare(self.device)?)
    }

    /// Sets the lengths of rows, where adapters have them (DoRA), to those that the loaded weights have: once, before
    /// the first step.
    pub fn reset_magnitudes(&mut self) -> Result<(), StepError> {
        self.weights.reset_magnitudes(self.device)
    }

    /// Every tensor that a run must keep to continue to the same bits.
    pub fn state(&self) -> Result<Vec<NamedTensor>, StepError> {
        let mut all = Vec::new();
        for p in &self.trained {
            let state = self.optimizer.state(p.block, p.role)?;
            let mut add = |kind, tensor: &Tensor| {
                all.push(NamedTensor { name: p.name.clone(), kind, tensor: tensor.clone() });
            };
            add(StateKind::Weight, self.weights.tensor(p)?);
            state.tensors().iter().for_each(|(kind, tensor)| add(*kind, tensor));
        }
        Ok(all)
    }

    /// A weight.
    pub fn weight(&self, parameter: &Parameter) -> Result<&Tensor, StepError> {
        self.weights.tensor(parameter)
    }

    /// A parameter's f32 master, or the weight itself where there is none.
    pub fn master_or_weight(&self, parameter: &Parameter) -> Result<&Tensor, StepError> {
        let state = self.optimizer.find(parameter.block, parameter.role);
        match state.and_then(|state| state.master()) {
            Some(master) => Ok(master),
            None => self.weights.tensor(parameter),
        }
    }

    /// A gradient, as the last [`Trainer::accumulate`] left it.
    pub fn gradient(&self, parameter: &Parameter) -> Result<&Tensor, StepError> {
        self.gradients.get(parameter.block, parameter.role)
    }

    /// One optimizer step over `micro_batches`, which together are one batch.
    pub fn step(&mut self, micro_batches: &[MicroBatch<'_>], lr: f64) -> Result<StepOutcome, StepError> {
        let outcome = match self.settings.update {
            UpdateTiming::AfterBackward => self.step_after_backward(micro_batches, lr),
            UpdateTiming::InBackward(source) => self.step_in_backward(micro_batches, lr, source),
        };
        self.gradients.clear();
        let outcome = outcome?;
        if !outcome.skipped {
            self.progress.steps += 1;
            self.progress.grad_norm = Some(outcome.grad_norm);
        }
        Ok(outcome)
    }

    fn step_after_backward(
        &mut self,
        micro_batches: &[MicroBatch<'_>],
        lr: f64,
    ) -> Result<StepOutcome, StepError> {
        let (loss, targets) = self.accumulate(micro_batches)?;
        self.device.arena().enter(Phase::Optimizer, None);
        for p in &self.trained {
            self.measure(p)?;
        }
        let grad_norm = self.global_norm()?;
        if let (Some(scaling), Some(scale)) = (self.settings.loss_scaling, &mut self.progress.loss_scale)
            && !grad_norm.is_finite()
            && scale.back_off(scaling)
        {
            return Ok(StepOutcome { loss, grad_norm, targets, skipped: true });
        }
        self.check_finite(loss, grad_norm)?;
        let update = self.next_update(lr, Some(grad_norm));
        for block in self.spec.blocks() {
            self.update(block, update)?;
        }
        if let (Some(scaling), Some(scale)) = (self.settings.loss_scaling, &mut self.progress.loss_scale) {
            scale.grow(scaling);
        }
        Ok(StepOutcome { loss, grad_norm, targets, skipped: false })
    }

    fn step_in_backward(
        &mut self,
        micro_batches: &[MicroBatch<'_>],
        lr: f64,
        source: NormSource,
    ) -> Result<StepOutcome, StepError> {
        let before = match (self.settings.clipping, source, self.progress.grad_norm) {
            (GradientClipping::None, ..) => None,
            (_, NormSource::PreviousStep, Some(norm)) => Some(norm),
            (_, NormSource::SecondBackward, _) | (_, NormSource::PreviousStep, None) => {
                let (loss, _) = self.pass(micro_batches, Finish::Measure)?;
                let norm = self.global_norm()?;
                self.check_finite(loss, norm)?;
                Some(norm)
            }
        };
        let update = self.next_update(lr, before);
        let (loss, targets) = self.pass(micro_batches, Finish::Update(update))?;
        Ok(StepOutcome { loss, grad_norm: self.global_norm()?, targets, skipped: false })
    }

    /// The numbers of the next update, clipped by a gradient norm where there is one.
    fn next_update(&self, lr: f64, grad_norm: Option<f64>) -> Update {
        let clip = match (self.settings.clipping, grad_norm) {
            (GradientClipping::GlobalNorm(most), Some(norm)) => (most / (norm + 1e-6)).min(1.0),
            _ => 1.0,
        };
        Update { lr, grad_scale: clip / self.loss_scale(), step: self.progress.steps + 1 }
    }

    /// The factor on the loss of the next step.
    fn loss_scale(&self) -> f64 {
        self.progress.loss_scale.map_or(1.0, |loss_scale| loss_scale.scale)
    }

    /// The gradients of the mean loss, scaled where it is, over all target tokens of `micro_batches`; returns that loss and their number.
    pub fn accumulate(&mut self, micro_batches: &[MicroBatch<'_>]) -> Result<(f64, u64), StepError> {
        self.pass(micro_batches, Finish::Keep)
    }

    /// All micro-batches forward and backward; `finish` is what the last one does with complete gradients.
    fn pass(&mut self, micro_batches: &[MicroBatch<'_>], finish: Finish) -> Result<(f64, u64), StepError> {
        self.gradients.begin(mix(self.settings.seed, self.progress.steps));
        let own: u64 = micro_batches.iter().map(MicroBatch::target_count).sum();
        let targets = self.communicator.sum(own as f64)?;
        let weight = self.communicator.sum(micro_batches.iter().map(MicroBatch::target_weight).sum())?;
        let scale = if weight > 0.0 { 1.0 / weight } else { 0.0 };
        let mut sum = 0.0;
        for (i, micro_batch) in micro_batches.iter().enumerate() {
            let last = i + 1 == micro_batches.len();
            let gradient_scale = (scale * self.loss_scale()) as f32;
            let dropout = self.dropout(i as u64);
            sum += self.forward_backward(micro_batch, gradient_scale, dropout, last.then_some(finish))?;
        }
        Ok((self.communicator.sum(sum)? * scale, targets as u64))
    }

    /// What adapters drop in a micro-batch of this step.
    fn dropout(&self, micro_batch: u64) -> Option<Dropout> {
        let probability = self.settings.method.adapters().map_or(0.0, |adapters| adapters.dropout);
        let seed = mix(mix(mix(self.settings.seed, DROPOUT), self.progress.steps), micro_batch);
        (probability > 0.0).then_some(Dropout { probability, seed, first_row: 0 })
    }

    /// One micro-batch forward and backward; returns the sum of its token losses. `finish` is `None` where more
    /// micro-batches will add to the gradients.
    fn forward_backward(
        &mut self,
        micro_batch: &MicroBatch<'_>,
        scale: f32,
        dropout: Option<Dropout>,
        finish: Option<Finish>,
    ) -> Result<f64, StepError> {
        let StepSettings {
            batch_size,
            sequence_length,
            loss_chunk_tokens,
            mlp_chunk_tokens,
            precision,
            attention,
            document_end,
            ..
        } = self.settings;
        let (device, spec, ropes) = (self.device, Rc::clone(&self.spec), Rc::clone(&self.ropes));
        let arena = device.arena();
        arena.enter(Phase::Forward, None);
        let inputs = Inputs::upload(device, &spec, batch_size, sequence_length, document_end, micro_batch)?;
        let ctx = inputs.context(device, &spec, precision, &ropes, attention, mlp_chunk_tokens, dropout);
        let mut x = embedding::forward(&ctx, &mut self.weights, &inputs.tokens)?;
        let mut kept = Vec::new();
        let segments: Vec<Range<u32>> = self.policy.segments().collect();
        for blocks in segments {
            let (out, segment) = self.forward_segment(&ctx, blocks, x)?;
            kept.push(segment);
            x = out;
        }

        arena.enter(Phase::Loss, None);
        let head = Head::gather(&mut self.weights, spec.tie_word_embeddings)?;
        let dx = head::loss_and_backward(
            &ctx,
            &head,
            &x,
            &inputs.labels,
            loss_chunk_tokens,
            scale,
            &mut self.gradients,
        )?;
        head.release(&mut self.weights);
        drop(x);
        let loss = inputs.sum_of_losses(device)?;
        if matches!(finish, Some(Finish::Update(_))) {
            // After this the weights change: what is wrong must be found before.
            self.check_finite(loss, 0.0)?;
        }
        self.finish(BlockId::Head, finish)?;

        while let Some(segment) = kept.pop() {
            self.backward_segment(&ctx, segment, &dx, finish)?;
        }
        arena.enter(Phase::Backward, None);
        if self.trained.iter().any(|p| p.block == BlockId::Embedding) {
            let weights = self.weights.gather(BlockId::Embedding)?;
            embedding::backward(&ctx, &weights, &inputs.tokens, &dx, &mut self.gradients)?;
            self.weights.release(BlockId::Embedding);
        }
        drop(dx);
        self.finish(BlockId::Embedding, finish)?;
        Ok(loss)
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
            let policy = LayerPolicy::all(Save::Recompute);
            x = self.forward_block(ctx, Phase::Forward, layer, policy, x)?.0;
        }
        let save = self.policy.layer(blocks.start).input;
        Ok((x, Segment::Blocks(blocks, Held::new(ctx, save, input)?)))
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
        let out = block::forward(&ctx.layer(layer), &weights, policy, x);
        self.weights.release(BlockId::Layer(layer));
        out
    }

    /// A segment backward; a segment of several blocks runs forward again first, for the inputs of its blocks.
    fn backward_segment(
        &mut self,
        ctx: &Context<'_, D>,
        segment: Segment,
        dx: &Tensor,
        finish: Option<Finish>,
    ) -> Result<(), StepError> {
        let (blocks, input) = match segment {
            Segment::Block(layer, saved) => return self.backward_block(ctx, layer, *saved, dx, finish),
            Segment::Blocks(blocks, input) => (blocks, input),
        };
        let missing =
            || Err(StepError::MissingWeight { block: BlockId::Layer(blocks.start), role: Role::QProj });
        let mut x = input.restore(ctx, missing)?;
        let mut inputs = vec![x.clone()];
        for layer in blocks.start..blocks.end.saturating_sub(1) {
            let policy = LayerPolicy::all(Save::Recompute);
            x = self.forward_block(ctx, Phase::Backward, layer, policy, x)?.0;
            inputs.push(x.clone());
        }
        drop(x);
        for layer in blocks.rev() {
            if let Some(input) = inputs.pop() {
                self.backward_block(ctx, layer, Saved::only(input), dx, finish)?;
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
        finish: Option<Finish>,
    ) -> Result<(), StepError> {
        let block = BlockId::Layer(layer);
        ctx.device.arena().enter(Phase::Backward, Some(layer));
        let weights = self.weights.gather(block)?;
        let done = block::backward(&ctx.layer(layer), &weights, saved, dx, &mut self.gradients);
        self.weights.release(block);
        done?;
        self.finish(block, finish)
    }

    /// Does with the complete gradients of a block what is to be done.
    fn finish(&mut self, block: BlockId, finish: Option<Finish>) -> Result<(), StepError> {
        let Some(finish) = finish else { return Ok(()) };
        let parameters = self.trained_of(block);
        for p in &parameters {
            self.communicator.all_reduce(self.gradients.get(p.block, p.role)?)?;
        }
        if let Finish::Keep = finish {
            return Ok(());
        }
        for p in &parameters {
            self.measure(p)?;
        }
        if let Finish::Update(update) = finish {
            if self.first_bad_gradient(&[block])?.is_some() {
                return Err(StepError::NotFiniteWithin { block });
            }
            self.update(block, update)?;
        }
        for p in &parameters {
            self.gradients.release(p.block, p.role);
        }
        Ok(())
    }

    /// Sum of token losses, each by its weight, and number of targets of a batch of at most the step's shape, with the
    /// model's own attention over whole sequences, or documents where the batch says where they start; weights and
    /// gradients stay as they are.
    pub fn evaluate(
        &mut self,
        batch_size: u64,
        micro_batch: &MicroBatch<'_>,
    ) -> Result<(f64, u64), StepError> {
        let StepSettings { loss_chunk_tokens, mlp_chunk_tokens, precision, .. } = self.settings;
        let store = &mut self.weights;
        let pass = Evaluation {
            device: self.device,
            spec: &self.spec,
            precision,
            ropes: &self.ropes,
            loss_chunk_tokens,
            mlp_chunk_tokens,
        };
        pass.run(store, batch_size, micro_batch)
    }

    /// Takes the squared norm of a parameter's gradient.
    fn measure(&self, parameter: &Parameter) -> Result<(), StepError> {
        let (block, role) = (parameter.block, parameter.role);
        let row = *self.norm_rows.get(&(block, role)).ok_or(StepError::MissingWeight { block, role })?;
        let out = rows(&self.squared_norms, row, row + 1)?;
        let x = self.gradients.get(block, role)?;
        Ok(self.device.run(Op::SumSquares { x, out: &out })?)
    }

    /// The norm of all unscaled gradients together, of which the squared norms have been taken.
    fn global_norm(&self) -> Result<f64, StepError> {
        let squares = self.device.read_f32(&self.squared_norms)?;
        Ok(squares.into_iter().map(f64::from).sum::<f64>().sqrt() / self.loss_scale())
    }

    /// The first of `blocks` whose gradients have a squared norm that is not finite.
    fn first_bad_gradient(&self, blocks: &[BlockId]) -> Result<Option<BlockId>, StepError> {
        let squares = self.device.read_f32(&self.squared_norms)?;
        let bad = |block: &&BlockId| {
            let mut own = self.norm_rows.iter().filter(|((b, _), _)| b == *block);
            own.any(|(_, row)| squares.get(*row as usize).is_some_and(|x| !x.is_finite()))
        };
        Ok(blocks.iter().find(bad).copied())
    }

    /// Refuses numbers that no update may be made of.
    fn check_finite(&self, loss: f64, grad_norm: f64) -> Result<(), StepError> {
        if loss.is_finite() && grad_norm.is_finite() {
            return Ok(());
        }
        // In the order of the backward pass: the first one had it from the loss or made it itself.
        let layers = (0..self.spec.num_layers).rev().map(BlockId::Layer);
        let order: Vec<BlockId> =
            [BlockId::Head].into_iter().chain(layers).chain([BlockId::Embedding]).collect();
        let block = if loss.is_finite() { self.first_bad_gradient(&order)? } else { None };
        Err(StepError::NotFinite { loss, grad_norm, block })
    }

    /// The first block, in the order of the forward pass, whose output for a micro-batch is not finite. Weights and
    /// gradients stay as they are.
    pub fn first_bad_output(&mut self, micro_batch: &MicroBatch<'_>) -> Result<Option<BlockId>, StepError> {
        let StepSettings {
            batch_size,
            sequence_length,
            mlp_chunk_tokens,
            precision,
            attention,
            document_end,
            ..
        } = self.settings;
        let (device, spec, ropes) = (self.device, Rc::clone(&self.spec), Rc::clone(&self.ropes));
        device.arena().enter(Phase::Forward, None);
        let inputs = Inputs::upload(device, &spec, batch_size, sequence_length, document_end, micro_batch)?;
        let ctx = inputs.context(device, &spec, precision, &ropes, attention, mlp_chunk_tokens, None);
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
            let policy = LayerPolicy::all(Save::Recompute);
            x = self.forward_block(&ctx, Phase::Forward, layer, policy, x)?.0;
            if !finite(&x)? {
                return Ok(Some(BlockId::Layer(layer)));
            }
        }
        Ok(None)
    }

    /// What is trained of a block.
    fn trained_of(&self, block: BlockId) -> Vec<Parameter> {
        self.trained.iter().filter(|p| p.block == block).cloned().collect()
    }

    /// Updates a block's weights from its gradients.
    fn update(&mut self, block: BlockId, update: Update) -> Result<(), StepError> {
        let weights: BlockWeights = self.weights.gather(block)?;
        let parameters = self.trained_of(block);
        let done = self.optimizer.update_block(self.device, &weights, &parameters, &self.gradients, update);
        self.weights.release(block);
        done
    }
}
