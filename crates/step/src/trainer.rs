//! The training step, top-down: `step -> forward_backward -> block::forward ... block::backward -> update`.

use plimsoll_device::{DType, Device, Op, Rounding, Tensor};
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, ModelSpec, Parameter};
use plimsoll_parallel::Communicator;

use crate::StepError;
use crate::block;
use crate::embedding;
use crate::evaluate::Evaluation;
use crate::gradients::Gradients;
use crate::head::{self, Head, rows};
use crate::inputs::Inputs;
use crate::optimizer::{Optimizer, StateKind, Update};
use crate::policy::SavePolicy;
use crate::rope::RopeTables;
use crate::settings::{GradientClipping, MicroBatch, StepSettings};
use crate::store::{BlockWeights, ResidentStore, WeightStore};

/// A model in training: weights, gradients, optimizer states, and the step that moves them.
pub struct Trainer<'a, D: Device> {
    device: &'a D,
    spec: ModelSpec,
    settings: StepSettings,
    policy: SavePolicy,
    parameters: Vec<Parameter>,
    communicator: &'a dyn Communicator,
    weights: ResidentStore,
    gradients: Gradients,
    optimizer: Optimizer,
    ropes: RopeTables,
    /// f32 [parameters, 1]: where the squared norms of the gradients meet.
    squared_norms: Tensor,
    steps_done: u64,
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
    /// Takes all persistent memory. Weights are uninitialised until [`Trainer::load`]; moments are zero.
    pub fn new(
        device: &'a D,
        spec: ModelSpec,
        settings: StepSettings,
        communicator: &'a dyn Communicator,
    ) -> Result<Self, StepError> {
        let precision = settings.precision;
        let weights = ResidentStore::allocate(device, &spec, precision.weights, Tag::Weights)?;
        let optimizer =
            Optimizer::allocate(device, &spec, &settings.optimizer, precision.master_weights, settings.seed)?;
        let gradients = Gradients::allocate(device, &spec, precision)?;
        device.arena().enter(Phase::Setup, None);
        let parameters = spec.parameters();
        let ropes = RopeTables::new(device, &spec, settings.sequence_length)?;
        let squared_norms =
            device.alloc(DType::F32, &[parameters.len() as u64, 1], Tag::Workspace, "grad_norm")?;
        let policy = SavePolicy::new(settings.checkpointing, spec.num_layers);
        Ok(Trainer {
            device,
            spec,
            settings,
            policy,
            parameters,
            communicator,
            weights,
            gradients,
            optimizer,
            ropes,
            squared_norms,
            steps_done: 0,
        })
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The step's settings.
    pub fn settings(&self) -> &StepSettings {
        &self.settings
    }

    /// Optimizer steps taken.
    pub fn steps_done(&self) -> u64 {
        self.steps_done
    }

    /// Continues after this many steps, with a state that was written into [`Trainer::state`]'s tensors.
    pub fn set_steps_done(&mut self, steps: u64) {
        self.steps_done = steps;
    }

    /// Sets every weight. `fill` writes a parameter's values in the given type; it is not called on a dry device.
    /// With master weights it fills the master, and the weight is that, rounded.
    pub fn load<E: From<StepError>>(
        &mut self,
        mut fill: impl FnMut(&Parameter, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for p in &self.parameters {
            let weight = self.weights.tensor(p)?;
            let master = self.optimizer.state(p.block, p.role)?.master();
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
        Ok(())
    }

    /// Every tensor that a run must keep to continue to the same bits.
    pub fn state(&self) -> Result<Vec<NamedTensor>, StepError> {
        let mut all = Vec::new();
        for p in &self.parameters {
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

    /// A gradient, as the last [`Trainer::accumulate`] or [`Trainer::step`] left it.
    pub fn gradient(&self, parameter: &Parameter) -> Result<&Tensor, StepError> {
        self.gradients.get(parameter.block, parameter.role)
    }

    /// One optimizer step over `micro_batches`, which together are one batch.
    pub fn step(&mut self, micro_batches: &[MicroBatch<'_>], lr: f64) -> Result<StepOutcome, StepError> {
        let (loss, targets) = self.accumulate(micro_batches)?;
        self.device.arena().enter(Phase::Optimizer, None);
        let grad_norm = self.global_norm()?;
        if !(loss.is_finite() && grad_norm.is_finite()) {
            return Err(StepError::NotFinite { loss, grad_norm });
        }
        let grad_scale = match self.settings.clipping {
            GradientClipping::None => 1.0,
            GradientClipping::GlobalNorm(most) => (most / (grad_norm + 1e-6)).min(1.0),
        };
        self.update(Update { lr, grad_scale, step: self.steps_done + 1 })?;
        self.steps_done += 1;
        Ok(StepOutcome { loss, grad_norm, targets })
    }

    /// The gradients of the mean loss over all target tokens of `micro_batches`; returns that loss and their number.
    pub fn accumulate(&mut self, micro_batches: &[MicroBatch<'_>]) -> Result<(f64, u64), StepError> {
        self.gradients.begin();
        let own: u64 = micro_batches.iter().map(MicroBatch::target_count).sum();
        let targets = self.communicator.sum(own as f64)?;
        let scale = if targets > 0.0 { 1.0 / targets } else { 0.0 };
        let mut sum = 0.0;
        for micro_batch in micro_batches {
            sum += self.forward_backward(micro_batch, scale as f32)?;
        }
        for p in &self.parameters {
            self.communicator.all_reduce(self.gradients.get(p.block, p.role)?)?;
        }
        Ok((self.communicator.sum(sum)? * scale, targets as u64))
    }

    /// One micro-batch forward and backward; returns the sum of its token losses.
    fn forward_backward(&mut self, micro_batch: &MicroBatch<'_>, scale: f32) -> Result<f64, StepError> {
        let StepSettings { batch_size, sequence_length, loss_chunk_tokens, precision, .. } = self.settings;
        let (device, spec) = (self.device, &self.spec);
        let arena = device.arena();
        arena.enter(Phase::Forward, None);
        let inputs = Inputs::upload(device, spec, batch_size, sequence_length, micro_batch)?;
        let ctx = inputs.context(device, spec, precision, &self.ropes);
        let mut x = embedding::forward(&ctx, &mut self.weights, &inputs.tokens)?;
        let mut kept = Vec::with_capacity(spec.num_layers as usize);
        for layer in 0..spec.num_layers {
            arena.enter(Phase::Forward, Some(layer));
            let weights = self.weights.gather(BlockId::Layer(layer))?;
            let (out, saved) = block::forward(&ctx.layer(layer), &weights, self.policy.layer(layer), x)?;
            self.weights.release(BlockId::Layer(layer));
            kept.push(saved);
            x = out;
        }

        arena.enter(Phase::Loss, None);
        let head = Head::gather(&mut self.weights, spec.tie_word_embeddings)?;
        let Inputs { targets, losses, .. } = &inputs;
        let dx = head::loss_and_backward(
            &ctx,
            &head,
            &x,
            targets,
            losses,
            loss_chunk_tokens,
            scale,
            &mut self.gradients,
        )?;
        head.release(&mut self.weights);
        drop(x);

        while let Some(saved) = kept.pop() {
            let layer = kept.len() as u32;
            arena.enter(Phase::Backward, Some(layer));
            let weights = self.weights.gather(BlockId::Layer(layer))?;
            block::backward(&ctx.layer(layer), &weights, saved, &dx, &mut self.gradients)?;
            self.weights.release(BlockId::Layer(layer));
        }
        arena.enter(Phase::Backward, None);
        embedding::backward(&ctx, &inputs.tokens, &dx, &mut self.gradients)?;
        inputs.sum_of_losses(device)
    }

    /// Sum of token losses and number of targets of a batch of at most the step's shape; weights and gradients stay
    /// as they are.
    pub fn evaluate(
        &mut self,
        batch_size: u64,
        micro_batch: &MicroBatch<'_>,
    ) -> Result<(f64, u64), StepError> {
        let StepSettings { loss_chunk_tokens, precision, .. } = self.settings;
        let store = &mut self.weights;
        let pass = Evaluation {
            device: self.device,
            spec: &self.spec,
            precision,
            ropes: &self.ropes,
            loss_chunk_tokens,
        };
        pass.run(store, batch_size, micro_batch)
    }

    /// The norm of all gradients together.
    fn global_norm(&self) -> Result<f64, StepError> {
        for (i, p) in (0..).zip(&self.parameters) {
            let out = rows(&self.squared_norms, i, i + 1)?;
            self.device.run(Op::SumSquares { x: self.gradients.get(p.block, p.role)?, out: &out })?;
        }
        let squares = self.device.read_f32(&self.squared_norms)?;
        Ok(squares.into_iter().map(f64::from).sum::<f64>().sqrt())
    }

    fn update(&mut self, update: Update) -> Result<(), StepError> {
        for block in self.spec.blocks() {
            let weights: BlockWeights = self.weights.gather(block)?;
            let parameters = self.spec.block_parameters(block);
            self.optimizer.update_block(self.device, &weights, &parameters, &self.gradients, update)?;
            self.weights.release(block);
        }
        Ok(())
    }
}
