//! The training step, top-down: `step -> pass -> forward_backward -> perform -> act -> block::forward ... block::backward ->
//! update`. What is done in which order is a [`Schedule`](schedule::Schedule).

mod complete;
mod corrections;
mod interleaved;
mod lanes;
mod look;
mod numbers;
mod parts;
mod pass;
mod passes;
mod perform;
mod pipeline;
mod ranks;
mod schedule;
mod state;

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use plimsoll_device::{Device, DeviceExt, KnownRounds};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{Phase, Tier, splitmix64};
use plimsoll_model::{ModelSpec, Parameter, Role};
use plimsoll_parallel::{Collectives, Communicator, Deal};

use crate::StepError;
use crate::adapter::Dropout;
use crate::block::{Keys, Mover, Ring};
use crate::gradients::{Gradients, LookedUp, OnTier};
use crate::head::Head;
use crate::loss_scale::LossScale;
use crate::optimizer::{Optimizer, OwnParts, StateStorage, Update};
use crate::policy::SavePolicy;
use crate::products::Products;
use crate::rope::RopeTables;
use crate::router_losses::LossFactors;
use crate::settings::{
    GradientClipping, MicroBatch, MicroBatches, NormSource, Ranks, StepSettings, UpdateTiming, stays,
};
use crate::stage::Stage;
use crate::store::{
    ExpertCounts, ExpertTraffic, Residency, Sharing, Training, WeightOffload, WeightStorage, WeightStore,
};
use crate::tier::Pieces;

pub use numbers::Numbers;
use numbers::{Found, NormRows};
pub(crate) use parts::{Part, Parts, Standing};
use passes::Passes;
use pipeline::Model;
pub(crate) use pipeline::{Flow, Stages};
use ranks::Exchanged;
pub use state::NamedTensor;

/// Sets the seeds of dropout apart from others.
const DROPOUT: u64 = 0xd309;

/// A model in training: weights, gradients, optimizer states, and the step that moves them.
pub struct Trainer<'a> {
    device: &'a dyn Device,
    spec: Rc<ModelSpec>,
    settings: StepSettings,
    policy: SavePolicy,
    /// What is trained here, in the order of the blocks.
    trained: Vec<Parameter>,
    /// The same of all stages, where there are several.
    trained_by_all: Option<Vec<Parameter>>,
    /// All ranks.
    communicator: &'a dyn Communicator,
    /// Those that hold the same weights, or shares of them.
    replicas: Rc<dyn Communicator + 'a>,
    /// Those of them that have shares of what is shared.
    sharers: Rc<dyn Communicator + 'a>,
    /// Those that have the other layers, where ranks have some of the layers each.
    stages: Option<Rc<Stages<'a>>>,
    /// Those that share every product.
    products: Option<Rc<Products<'a>>>,
    /// Those that have the whole model between them.
    model: Option<Model<'a>>,
    tiers: Arc<LowerTiers>,
    weights: WeightStore<'a>,
    gradients: Gradients<'a>,
    optimizer: Optimizer<'a>,
    /// Moves activations to the tier that they wait on.
    mover: Option<Rc<Mover<'a>>>,
    /// Keys and values of a sequence that is visited in chunks.
    keys: Option<Rc<Keys<'a>>>,
    /// The ranks that have the rest of the sequences, where they have parts of them.
    ring: Option<Rc<Ring<'a>>>,
    /// What is measured and updated at once.
    parts: Rc<Parts>,
    /// The rows of each piece of the head's table, where its weights or gradients come in pieces.
    loss_pieces: Option<Vec<Range<u64>>>,
    /// Of all tokens of a sequence that this rank has. Chunks have their own, and so have documents of shared sequences.
    ropes: Option<Rc<RopeTables>>,
    /// What the device finds out in a step.
    numbers: Numbers,
    /// What ranks exchange while the step computes.
    exchanged: Exchanged,
    progress: StepProgress,
    /// How the micro-batches of the present step were dealt to the ranks.
    deal: Deal,
    /// Of the losses of routers in the present step.
    loss_factors: LossFactors,
    /// What routers add to scores for their choice, by whatever stage: no gradient reaches it, but training may adjust it.
    corrections: Vec<Parameter>,
    /// What a dry run has found the passes of a step to repeat.
    known_passes: KnownRounds,
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

/// What becomes of gradients when they are complete.
#[derive(Clone, Copy, Debug)]
enum Completion {
    /// Their norms are taken, and they stay.
    Keep,
    /// Their norms are taken, and they are given back.
    Measure,
    /// Their norms are taken, the weights are updated, and they are given back.
    Update(Update),
}

/// What the host knows when the passes of a step are done.
#[derive(Clone, Copy, Debug)]
struct Passed {
    /// Target tokens of all ranks.
    targets: u64,
    /// Factor that makes a mean of the sum of losses.
    scale: f64,
    /// Whether weights were updated before all gradients had been seen.
    within: bool,
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

impl<'a> Trainer<'a> {
    /// Takes all persistent memory, on the device and on the tiers below it. Weights are uninitialised until [`Trainer::load`]; moments are zero.
    pub fn new(
        device: &'a dyn Device,
        tiers: Arc<LowerTiers>,
        spec: ModelSpec,
        settings: StepSettings,
        communicator: &'a dyn Communicator,
    ) -> Result<Self, StepError> {
        settings.check_chunks()?;
        settings.check_mesh(&spec)?;
        let (spec, settings) = settings.of_stage(&spec);
        let precision = settings.precision;
        let mesh = settings.ranks.mesh;
        if settings.ranks.rank != communicator.rank() || mesh.size() != communicator.size() {
            return Err(StepError::Invariant { what: "a step is taken by another rank than it is set for" });
        }
        let replicas: Rc<dyn Communicator + 'a> =
            Rc::from(communicator.group(mesh.replica_group(communicator.rank()))?);
        let sharers = {
            let (all, rank) = (mesh.replica_group(communicator.rank()), communicator.rank());
            let mut groups = all.chunks(settings.sharers() as usize);
            let own = groups.find(|group| group.contains(&rank)).unwrap_or(&all);
            Rc::<dyn Communicator + 'a>::from(communicator.group(own.to_vec())?)
        };
        let ranks = sharers.size();
        let (mut stages, mut products, mut model) = (None, None, None);
        if let Some(stage) = &settings.stage {
            let group = |members| communicator.group(members);
            if stage.count > 1 {
                let ranks = group(mesh.stage_group(communicator.rank()))?;
                stages = Some(Rc::new(Stages { ranks, stage: stage.clone() }));
            }
            if stage.tensors > 1 {
                let ranks = group(mesh.parts_group(communicator.rank()))?;
                products = Some(Rc::new(Products::new(ranks, spec.part.vocabulary, stage.sharing)));
            }
            let ranks = group(mesh.model_group(communicator.rank()))?;
            model = Some(Model { ranks });
        }
        let is_copy = |p: &Parameter| settings.stage.as_ref().is_some_and(|stage| stage.is_copy(p));
        let standing = |p: &Parameter| match &settings.stage {
            None => Standing::default(),
            Some(stage) => Standing {
                is_copy: stage.is_copy(p),
                is_measured_elsewhere: !stage.counts(p),
                is_partial: stage.is_partial(p),
            },
        };
        let shares_updates = ranks::shares_updates(&settings);
        let each_pass = settings.sharding.reduces_each_pass();
        let method = &settings.method;
        let types = |p: &Parameter| method.weight_type(p, precision.weights);
        let adapters = method.adapters().map(|adapters| &adapters.layout);
        let (offload, kept) = (settings.offload, settings.kept_layers);
        let below = WeightOffload {
            tier: offload.parameters,
            in_files: method.adapters().map(|adapters| &adapters.in_files),
            residency: Residency::Last {
                layers: kept.parameters,
                expert_slots: settings.slots_for_experts(&spec),
            },
            host_layers: 0,
        };
        let below = (offload.parameters != Tier::Device).then_some(below);
        let storage = WeightStorage { types: &types, adapters, trained: true, offload: below };
        // Every rank cuts tables alike, whatever part of a layer it has.
        let whole = settings.stage.as_ref().map_or(&spec, |stage| &stage.whole.0);
        let cut = Pieces::new(whole, &settings.optimizer.kind);
        let trained = method.trained(&spec);
        let parts = Parts::standing(&trained, cut, &settings.optimizer.kind, ranks, &standing);
        let parts = Rc::new(parts);
        let sharing = Sharing { communicator: &sharers, parts: &parts };
        let sharing = ranks::shares_weights(&settings).then_some(sharing);
        // Who gathers the next layer while one is in use has a buffer for its share of each.
        let gathers_ahead = sharing.is_some() && settings.overlap_communication;
        let buffers =
            if gathers_ahead { WeightStore::BUFFERS } else { offload.buffers(WeightStore::BUFFERS) };
        let training = Training { cut, sharing, buffers };
        let weights = WeightStore::new(device, &tiers, &spec, storage, Some(training))?;
        let weights = weights.sharing(products.clone());
        // Adapters are in f32 themselves.
        let needs_master = |p: &Parameter| precision.master_weights && !matches!(p.role, Role::Lora(..));
        let own_parts = |p: &Parameter| -> Vec<Part> {
            let share = |part: &Part| part.of_rows(part.share(sharers.rank(), ranks));
            parts.of_parameter(p).map(share).collect()
        };
        let shares: Option<OwnParts<'_>> = shares_updates.then_some(&own_parts);
        let states = StateStorage {
            tiers: &tiers,
            tier: offload.optimizer,
            buffers: offload.buffers(Optimizer::BUFFERS),
            cut,
            head_dim: spec.attention.head_dim,
            stays: &|p| stays(p.block, kept.optimizer, &spec),
            needs_master: &needs_master,
            seed: settings.seed,
            shares,
        };
        let updated: Vec<Parameter> = trained.iter().filter(|p| !is_copy(p)).cloned().collect();
        let optimizer = Optimizer::allocate(device, &updated, &settings.optimizer, states)?;
        let stays_there = |p: &Parameter| stays(p.block, kept.gradients, &spec);
        let totals: Option<OwnParts<'_>> = each_pass.then_some(&own_parts);
        let on_tier = OnTier { tiers: &tiers, tier: offload.gradients, stays: &stays_there, totals };
        let buffers = match (settings.update, settings.is_tied(&spec)) {
            // One in use, one on its way and one on its way back. The chunks of a sequence have pieces of tables in turn.
            (UpdateTiming::AfterBackward, _) => offload.buffers(3),
            _ if settings.chunk_tokens().is_some() => offload.buffers(3),
            // Nothing but the pieces of a tied table is kept.
            (UpdateTiming::InBackward(_), tied) => offload.buffers(1 + usize::from(tied)),
        };
        let (dtype, cut_in) = (precision.gradients, (cut, buffers));
        let mut gradients = Gradients::new(device, &trained, dtype, on_tier, cut_in)?;
        gradients.first_table_row = spec.part.vocabulary.map_or(0, |(start, _)| start);
        device.enter(Phase::Setup, None);
        let (length, chunk) = (settings.sequence_length, settings.chunk_tokens());
        let ring = match mesh.context {
            0 | 1 => None,
            _ => {
                let around = communicator.group(mesh.context_group(communicator.rank()))?;
                Some(Rc::new(Ring::new(around, mesh)))
            }
        };
        let has_documents = settings.document_end.is_some() || settings.document_starts;
        let ropes = match (chunk, &ring) {
            (Some(_), _) => None,
            (None, Some(_)) if has_documents => None,
            (None, Some(_)) => {
                let own = RopeTables::of_tokens(device, &spec, &settings.own_places(), None)?;
                Some(Rc::new(own))
            }
            (None, None) => Some(Rc::new(RopeTables::new(device, &spec, length)?)),
        };
        let norms = match &settings.stage {
            None => NormRows::alone(parts.count()),
            Some(stage) => NormRows::among(stage, parts.by_run(&spec)),
        };
        let numbers = Numbers::new(device, norms, ranks::shares_sums(&settings))?;
        let (block, role) = Head::table(spec.tie_word_embeddings);
        let table = spec.block_parameters(block).into_iter().find(|p| p.role == role);
        // Where ranks have some rows each, the loss comes from all of them.
        let table = table.filter(|_| spec.part.head && spec.part.vocabulary.is_some());
        let loss_pieces = weights.pieces(block, role).or_else(|| gradients.pieces(block, role));
        let loss_pieces = loss_pieces.or_else(|| table.map(|table| cut.of(&table)));
        let mover = match offload.activations {
            Tier::Device => None,
            tier => Some(Rc::new(Mover::new(device, &tiers, tier)?)),
        };
        let keys = match chunk {
            None => None,
            Some(chunk) => {
                let (tier, dtype) = (offload.activations, precision.activations);
                Some(Rc::new(Keys::new(device, &tiers, tier, &spec, dtype, (length, chunk))?))
            }
        };
        let loss_scale = settings.loss_scaling.map(LossScale::new);
        let progress = StepProgress { loss_scale, ..StepProgress::default() };
        let policy = SavePolicy::new(settings.checkpointing, settings.compression, spec.num_layers);
        let policy = policy.numbered(spec.runs());
        let trained_by_all = settings.stage.as_ref().map(Stage::trained);
        let corrections = {
            let whole = settings.stage.as_ref().map_or(&spec, |stage| &stage.whole.0);
            let corrects = whole.experts.as_ref().is_some_and(|experts| experts.router.correction);
            let all = if corrects { whole.parameters() } else { Vec::new() };
            all.into_iter().filter(|p| p.role == Role::RouterCorrection).collect()
        };
        Ok(Trainer {
            device,
            spec: Rc::new(spec),
            settings,
            policy,
            parts,
            loss_pieces,
            trained,
            trained_by_all,
            communicator,
            replicas,
            sharers,
            stages,
            products,
            model,
            tiers,
            weights,
            gradients,
            optimizer,
            mover,
            keys,
            ring,
            ropes,
            numbers,
            exchanged: Exchanged::default(),
            progress,
            deal: Deal::ALONE,
            loss_factors: LossFactors::default(),
            corrections,
            known_passes: KnownRounds::default(),
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

    /// What is trained, in the order of the blocks, by whatever rank.
    pub fn trained(&self) -> &[Parameter] {
        self.trained_by_all.as_deref().unwrap_or(&self.trained)
    }

    /// How many parts are measured and updated by themselves.
    pub fn parts(&self) -> u64 {
        self.parts.count()
    }

    /// How far training has come.
    pub fn progress(&self) -> StepProgress {
        self.progress
    }

    /// Continues from where an earlier part stood, with a state that was written into [`Trainer::state`]'s tensors.
    pub fn resume(&mut self, progress: StepProgress) {
        self.progress = progress;
    }

    /// One optimizer step over `micro_batches`, which together are one batch.
    pub fn step(&mut self, micro_batches: &[MicroBatch<'_>], lr: f64) -> Result<StepOutcome, StepError> {
        self.step_over(MicroBatches::These(micro_batches), lr)
    }

    /// The same over one micro-batch so many times, for a plan: a device without memory counts what repeats.
    pub fn step_alike(
        &mut self,
        micro_batch: &MicroBatch<'_>,
        times: u64,
        lr: f64,
    ) -> Result<StepOutcome, StepError> {
        self.step_over(MicroBatches::Alike(micro_batch, times), lr)
    }

    fn step_over(&mut self, micro_batches: MicroBatches<'_>, lr: f64) -> Result<StepOutcome, StepError> {
        let passed = match self.settings.update {
            UpdateTiming::AfterBackward => self.step_after_backward(micro_batches, lr),
            UpdateTiming::InBackward(source) => self.step_in_backward(micro_batches, lr, source),
        };
        self.gradients.clear();
        let passed = passed?;
        self.settle()?;
        if self.settings.update != UpdateTiming::AfterBackward {
            self.agree()?;
        }
        self.adjust_corrections()?;
        let found = self.numbers.read(self.device)?;
        self.conclude(passed, &found)
    }

    fn step_after_backward(&mut self, micro_batches: MicroBatches<'_>, lr: f64) -> Result<Passed, StepError> {
        self.numbers.begin(self.device, self.gradient_factor(None))?;
        let passed = self.pass(micro_batches, Completion::Keep)?;
        self.device.enter(Phase::Optimizer, None);
        self.agree()?;
        self.clip()?;
        self.update_all(self.next_update(lr))?;
        Ok(passed)
    }

    fn step_in_backward(
        &mut self,
        micro_batches: MicroBatches<'_>,
        lr: f64,
        source: NormSource,
    ) -> Result<Passed, StepError> {
        let before = match (self.settings.clipping, source) {
            (GradientClipping::None, _) => None,
            (GradientClipping::GlobalNorm(_), NormSource::SecondBackward) => None,
            (GradientClipping::GlobalNorm(_), NormSource::PreviousStep) => self.progress.grad_norm,
        };
        self.numbers.begin(self.device, self.gradient_factor(before))?;
        let measures_first = before.is_none() && self.settings.clipping != GradientClipping::None;
        if measures_first {
            self.pass(micro_batches, Completion::Measure)?;
            self.agree()?;
            self.clip()?;
            self.numbers.forget_loss(self.device)?;
        }
        let passed = self.pass(micro_batches, Completion::Update(self.next_update(lr)))?;
        Ok(Passed { within: !measures_first, ..passed })
    }

    /// Has every rank know the norms and the flag of all.
    fn agree(&self) -> Result<(), StepError> {
        self.numbers.agree(self.device, &*self.sharers, &*self.replicas)?;
        match &self.model {
            Some(model) => self.numbers.agree_in_model(self.device, model),
            None => Ok(()),
        }
    }

    /// The numbers of the next update.
    fn next_update(&self, lr: f64) -> Update {
        Update { lr, step: self.progress.steps + 1 }
    }

    /// The factor on gradients of this global norm, or of one that need not be known.
    fn gradient_factor(&self, grad_norm: Option<f64>) -> f32 {
        let clip = match (self.settings.clipping, grad_norm) {
            (GradientClipping::GlobalNorm(most), Some(norm)) => (most / (norm + 1e-6)).min(1.0),
            _ => 1.0,
        };
        (clip / self.loss_scale()) as f32
    }

    /// Has the device clip the gradients that were measured, if they are to be clipped.
    fn clip(&self) -> Result<(), StepError> {
        match self.settings.clipping {
            GradientClipping::None => Ok(()),
            GradientClipping::GlobalNorm(most) => self.numbers.clip(self.device, most, self.loss_scale()),
        }
    }

    /// The factor on the loss of the next step.
    fn loss_scale(&self) -> f64 {
        self.progress.loss_scale.map_or(1.0, |loss_scale| loss_scale.scale)
    }

    /// The gradients of the mean loss, scaled where it is, over all target tokens of `micro_batches`; returns that loss and their number.
    pub fn accumulate(&mut self, micro_batches: &[MicroBatch<'_>]) -> Result<(f64, u64), StepError> {
        self.numbers.begin(self.device, 1.0)?;
        let passed = self.pass(MicroBatches::These(micro_batches), Completion::Keep)?;
        let found = self.numbers.read(self.device)?;
        Ok((self.mean_loss(passed, &found)?, passed.targets))
    }

    /// The mean loss over the targets of all ranks.
    fn mean_loss(&self, passed: Passed, found: &Found) -> Result<f64, StepError> {
        // Ranks that share products have found the same.
        let own = if self.settings.ranks.place().tensor == 0 { found.loss } else { 0.0 };
        Ok(self.communicator.sum(own)? * passed.scale)
    }

    /// All micro-batches forward and backward, and what becomes of the gradients behind the last one.
    fn pass(&mut self, micro_batches: MicroBatches<'_>, completion: Completion) -> Result<Passed, StepError> {
        self.gradients.begin(splitmix64(self.settings.seed, self.progress.steps));
        self.weights.resident().forget_loads(self.device)?;
        let (Ranks { mesh, .. }, place) = (self.settings.ranks, self.settings.ranks.place());
        // Ranks that work on the same sequences count them once.
        let counted = |own: f64| if place.leads() { own } else { 0.0 };
        let targets = self.communicator.sum(counted(micro_batches.target_count() as f64))? as u64;
        let weight = self.communicator.sum(counted(micro_batches.target_weight()))?;
        let (own, together) = (micro_batches.len(), self.settings.micro_batches_per_pass.max(1));
        self.deal = Deal { rank: place.data, ranks: mesh.data, own, together };
        let scale = if weight > 0.0 { 1.0 / weight } else { 0.0 };
        let passed = Passed { targets, scale, within: false };
        let Some(before_last) = micro_batches.len().div_ceil(together).checked_sub(1) else {
            return Ok(passed);
        };
        let gradient_scale = (scale * self.loss_scale()) as f32;
        let micro_batches_of_all = own.saturating_mul(u64::from(mesh.data) * u64::from(mesh.context)).max(1);
        let share = weight / micro_batches_of_all as f64;
        self.loss_factors = LossFactors { share, gradients: f64::from(gradient_scale) };
        let (device, first) = (self.device, before_last * together);
        if self.keeps_looked_up() {
            let StepSettings { batch_size, precision, .. } = self.settings;
            let row = (precision.activations, self.spec.hidden_size);
            device.enter(Phase::Backward, None);
            let tokens = batch_size.saturating_mul(self.settings.own_tokens());
            self.gradients.looked_up = LookedUp::with_room(device, first, tokens, row)?;
        }
        if self.stages.is_some() {
            self.through_stage(micro_batches, gradient_scale, completion)?;
            return Ok(passed);
        }
        let passes = Passes { trainer: &mut *self, micro_batches, together, gradient_scale };
        device.repeat(before_last, passes)?;
        let last = micro_batches.group(first, together);
        self.forward_backward(&last, first, gradient_scale, Some(completion))?;
        Ok(passed)
    }

    /// How often each expert of each layer was chosen in the last step, of this rank's tokens; of a model without experts nothing.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn expert_loads(&self) -> Result<Vec<ExpertCounts>, StepError> {
        self.weights.resident().loads(self.device)
    }

    /// How often experts that come by themselves were used, and read for it, so far; `None` where they come with their layers.
    pub fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.weights.expert_traffic()
    }

    /// What adapters drop in a micro-batch of this step.
    fn dropout(&self, micro_batch: u64) -> Option<Dropout> {
        let probability = self.settings.method.adapters().map_or(0.0, |adapters| adapters.dropout);
        let seed = self.seed_of(DROPOUT, micro_batch);
        (probability > 0.0).then_some(Dropout { probability, seed, first_row: 0 })
    }

    /// The seed of what is drawn for a micro-batch of this step.
    fn seed_of(&self, purpose: u64, micro_batch: u64) -> u64 {
        let seed =
            splitmix64(splitmix64(splitmix64(self.settings.seed, purpose), self.progress.steps), micro_batch);
        // Other tokens of the same sequences have a choice of their own.
        match self.settings.ranks.place().context {
            0 => seed,
            context => splitmix64(seed, u64::from(context)),
        }
    }
}

#[cfg(test)]
mod tests;
