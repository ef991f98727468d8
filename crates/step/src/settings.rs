//! What a step is asked to do: precision, batch, policies and numbers. All of it decided; nothing is `auto` here.

mod checks;
mod micro_batches;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{BlockSparse, Compute, DType};
use plimsoll_memory::Tier;
use plimsoll_model::{AdapterLayout, BlockId, ModelSpec, Parameter, Role, StoredWeights};
use plimsoll_parallel::{Mesh, MeshPlace};

pub use self::micro_batches::MicroBatch;
pub(crate) use self::micro_batches::MicroBatches;
use crate::inputs::Places;
use crate::store::experts_can_come;
use crate::{Checkpointing, Compression, OptimizerSettings, PipelineSchedule, Stage};

/// Storage types of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Weights that the products read.
    pub weights: DType,
    /// The residual stream and everything saved for the backward pass.
    pub activations: DType,
    /// Gradients of weights.
    pub gradients: DType,
    /// Whether f32 master weights stand behind the weights.
    pub master_weights: bool,
    /// How the linear layers of the blocks multiply.
    pub linears: Linears,
}

/// How the linear layers of the blocks multiply. Sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linears {
    /// As everything else does.
    Plain,
    /// In 8-bit floats, each operand scaled as a whole, just in time: inputs and weights in E4M3, gradients of outputs in
    /// E5M2 (Micikevicius et al. 2022). What is kept only as an input of theirs is kept in E4M3.
    Fp8,
    /// For inference: inputs in 8-bit integers, each 32 with a scale, where the weight is of integer codes and the CPU gains by it
    /// ([`Compute::Int8`]). So is the head's, and so are experts.
    Int8,
}

impl Precision {
    /// Everything in f32.
    pub const F32: Precision = Precision {
        weights: DType::F32,
        activations: DType::F32,
        gradients: DType::F32,
        master_weights: false,
        linears: Linears::Plain,
    };

    /// 8-bit floats in the linear layers, bf16 beside them. The weights are f32 and masters of themselves: the 8-bit
    /// ones are made of them when they are needed.
    pub const FP8: Precision = Precision {
        weights: DType::F32,
        activations: DType::Bf16,
        gradients: DType::F32,
        master_weights: false,
        linears: Linears::Fp8,
    };

    /// f16 weights and activations behind f32 master weights; for use with a [`LossScaling`].
    pub const F16: Precision = Precision {
        weights: DType::F16,
        activations: DType::F16,
        gradients: DType::F32,
        master_weights: true,
        linears: Linears::Plain,
    };

    /// The precision of matrix products but those of [`linears`](Precision::linears); f16 operands are multiplied as they are, in f32.
    pub fn compute(&self) -> Compute {
        if self.activations == DType::Bf16 { Compute::Bf16 } else { Compute::F32 }
    }
}

/// How gradients are kept small.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GradientClipping {
    /// They are not.
    None,
    /// Scaled so that their global norm is at most this.
    GlobalNorm(f64),
}

/// When weights are updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateTiming {
    /// When all gradients are known.
    AfterBackward,
    /// Block by block within the backward pass, as soon as the block's gradients are known; then they are given back.
    /// Where gradients are clipped their norm has to come from elsewhere.
    InBackward(NormSource),
}

/// Where an update within the backward pass takes the global gradient norm from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormSource {
    /// The step before; the first step takes a second backward pass.
    PreviousStep,
    /// A backward pass of its own, before the one that updates: the same bits as updating after the backward pass.
    SecondBackward,
}

/// Dynamic scaling of the loss, so that small gradients do not vanish in f16 (Micikevicius et al. 2018), with the
/// defaults of PyTorch's `GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// The scale of the first step.
    pub initial: f64,
    /// The scale is multiplied by this after `growth_interval` good steps in a row.
    pub growth: f64,
    /// See `growth`.
    pub growth_interval: u64,
    /// The scale is multiplied by this after a step whose gradients overflowed, which is skipped.
    pub backoff: f64,
}

impl Default for LossScaling {
    fn default() -> Self {
        LossScaling { initial: 65_536.0, growth: 2.0, growth_interval: 2000, backoff: 0.5 }
    }
}

/// How a training step attends. A model's own windows stay under each of them: the narrower one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// In tiles, whose scores are computed again in the backward pass: memory grows with the sequence.
    Flash,
    /// All scores written out; their softmax is kept as the checkpointing policy says, in f32: memory grows with the
    /// square of the sequence.
    Standard,
    /// As `Flash`; a token sees this many at most, itself included.
    SlidingWindow(u64),
    /// As `Flash`; a token sees the blocks of a pattern.
    BlockSparse(BlockSparse),
}

/// Where each kind of tensor lives between its uses. Whatever is said here changes no bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offload {
    /// Weights: the matrices of the layers, the embedding and the head.
    pub parameters: Tier,
    /// Gradients of these weights.
    pub gradients: Tier,
    /// Optimizer states and master weights of these weights.
    pub optimizer: Tier,
    /// What the forward pass keeps for the backward pass.
    pub activations: Tier,
    /// Whether what comes is prefetched, and what goes is written back, behind the computation. That takes buffers for two or three
    /// layers; without it there is one for each kind but activations, and the computation waits.
    pub prefetch: bool,
}

impl Offload {
    /// Everything stays on the device.
    pub const NONE: Offload = Offload::all_on(Tier::Device);

    /// Everything lives on one tier, and is prefetched.
    pub const fn all_on(tier: Tier) -> Offload {
        Offload { parameters: tier, gradients: tier, optimizer: tier, activations: tier, prefetch: true }
    }

    /// Whether everything stays on the device.
    pub fn is_none(&self) -> bool {
        !self.uses(Tier::Host) && !self.uses(Tier::Disk)
    }

    /// Buffers of a kind of tensor that lives below the device: `several` where they are prefetched.
    pub(crate) fn buffers(&self, several: usize) -> usize {
        if self.prefetch { several } else { 1 }
    }

    /// Whether any kind of tensor lives on a tier.
    pub fn uses(&self, tier: Tier) -> bool {
        [self.parameters, self.gradients, self.optimizer, self.activations].contains(&tier)
    }
}

/// How many layers, counted from the last one, keep their tensors of a kind on the device although the kind lives
/// elsewhere: where there is room for some of them and not for all. Changes no bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptLayers {
    /// Of weights.
    pub parameters: u32,
    /// Of gradients.
    pub gradients: u32,
    /// Of optimizer states and master weights.
    pub optimizer: u32,
    /// Of what the forward pass keeps for the backward pass.
    pub activations: u32,
}

impl KeptLayers {
    /// What is offloaded is offloaded whole.
    pub const NONE: KeptLayers = KeptLayers { parameters: 0, gradients: 0, optimizer: 0, activations: 0 };
}

/// Whether a block is among the last `kept` layers of a model.
pub(crate) fn stays(block: BlockId, kept: u32, spec: &ModelSpec) -> bool {
    let place = block.layer().and_then(|layer| spec.place_of(layer));
    place.is_some_and(|place| place >= spec.num_layers.saturating_sub(kept))
}

/// What the ranks of a step share out between them (ZeRO, Rajbhandari et al. 2020). Each rank takes its own micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharding {
    /// What each rank has its own share of.
    pub stage: ZeroStage,
    /// Whether gradients are added up in the order of the whole batch, so that the number of ranks changes no bit. Stages that
    /// shard gradients always do.
    pub reproducible: bool,
    /// How many neighbours share it, where not all ranks that hold the same weights do: those of a machine, say (FSDP's hybrid
    /// sharding; MiCS, Zhang et al. 2022). It divides their number.
    pub among: Option<u32>,
}

/// Which of how many ranks takes the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// The number of this one, from 0.
    pub rank: u32,
    /// How all of them divide the work.
    pub mesh: Mesh,
}

impl Ranks {
    /// One of several that each take their own micro-batches.
    pub fn of_data(rank: u32, count: u32) -> Ranks {
        Ranks { rank, mesh: Mesh::of_data(count) }
    }

    /// All of them.
    pub fn count(self) -> u32 {
        self.mesh.size()
    }

    /// Where this one is among them.
    pub fn place(self) -> MeshPlace {
        self.mesh.place(self.rank)
    }
}

impl Default for Ranks {
    /// The only one.
    fn default() -> Self {
        Ranks { rank: 0, mesh: Mesh::ALONE }
    }
}

/// What each rank has its own share of; what is not listed, each rank has all of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// Nothing: gradients are summed over all ranks, and each rank makes the same update.
    #[default]
    Nothing,
    /// Optimizer states and master weights.
    States,
    /// Gradients too.
    Gradients,
    /// Weights too, but for vectors: a layer, or a piece of a table, is gathered for as long as it is used.
    Weights,
}

impl ZeroStage {
    /// As the paper counts them.
    pub fn number(self) -> u32 {
        self as u32
    }
}

impl Sharding {
    /// Whether every pass adds its gradients to those of the passes before, over all ranks and in the order of the whole batch.
    pub fn reduces_each_pass(self) -> bool {
        self.reproducible || self.stage >= ZeroStage::Gradients
    }
}

/// Chunks of a sequence at most: every one of them sees all before it, which a plan counts one by one.
pub const MOST_CHUNKS: u64 = 1024;

/// Everything that shapes a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSettings {
    /// Sequences of a micro-batch.
    pub batch_size: u64,
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// Storage types.
    pub precision: Precision,
    /// What the backward pass recomputes.
    pub checkpointing: Checkpointing,
    /// How what is kept for the backward pass is compressed.
    pub compression: Compression,
    /// How tokens attend to each other in training; evaluation and decoding know the model's own attention alone.
    pub attention: AttentionKind,
    /// The token that ends a document, where documents of a sequence must not attend to each other: the token after it
    /// is at position 0 and sees nothing before itself. `None` takes a sequence as one document.
    pub document_end: Option<u32>,
    /// Whether micro-batches say where documents start ([`MicroBatch::document_starts`]); what a plan counts with.
    pub document_starts: bool,
    /// Whether micro-batches weigh their targets ([`MicroBatch::weights`]); what a plan counts with.
    pub target_weights: bool,
    /// The feed-forward parts take at most this many tokens at once and keep nothing; all at once where `None`.
    pub mlp_chunk_tokens: Option<u64>,
    /// Logits of at most this many tokens exist at once.
    pub loss_chunk_tokens: u64,
    /// The optimizer.
    pub optimizer: OptimizerSettings,
    /// Clipping.
    pub clipping: GradientClipping,
    /// When weights are updated.
    pub update: UpdateTiming,
    /// Scaling of the loss, for f16. Updates come after the backward pass then.
    pub loss_scaling: Option<LossScaling>,
    /// What is trained.
    pub method: TrainingMethod,
    /// Where tensors live between their uses.
    pub offload: Offload,
    /// The layers that are left out of it.
    pub kept_layers: KeptLayers,
    /// Experts that are on the device at a time where weights live below it and experts are frozen: they come by themselves, when a
    /// token is sent to them. With 0 they come with their layers. Changes no bit.
    pub expert_slots: u32,
    /// Micro-batches that go through a block before the next block's turn. More than one bring what is offloaded fewer
    /// times and hold the activations of all; the gradient of a tied embedding is then summed in another order.
    pub micro_batches_per_pass: u64,
    /// Which of how many ranks takes the step.
    pub ranks: Ranks,
    /// What ranks share out between them, where there are several.
    pub sharding: Sharding,
    /// Whether what ranks with the same weights exchange is under way while the step computes (DeepSpeed's `overlap_comm`). It
    /// changes no bit, and takes the memory of what is under way. All ranks say the same.
    pub overlap_communication: bool,
    /// A sequence that is longer is visited in chunks of so many tokens: each layer takes one chunk after the other, and what a
    /// chunk leaves waits where activations do, below the device. The memory of the device does not grow with the sequence.
    pub sequence_chunk_tokens: Option<u64>,
    /// When the stages of a pipeline take micro-batches back, where ranks have some of the layers each.
    pub pipeline_schedule: PipelineSchedule,
    /// Whether ranks that share every product divide the residual stream between the halves of layers: each normalises and keeps some
    /// of its rows (sequence parallelism, Korthikanti et al. 2022).
    pub sequence_parallel: bool,
    /// Sequences of a batch that is evaluated between steps; `None`: as many as of a micro-batch; 0: nothing is evaluated.
    pub evaluation_batch_size: Option<u64>,
    /// Factor on the load-balancing loss of experts, which is added to the loss; 0 for none.
    pub balance_loss: f64,
    /// What else training does with the routers of experts.
    pub routers: RouterTraining,
    /// The stage that these settings are of, where they say what they say of its layers alone
    /// ([`of_stage`](StepSettings::of_stage)).
    pub stage: Option<Stage>,
    /// Seed of stochastic rounding and dropout.
    pub seed: u64,
}

/// What training does with the routers of experts beside balancing them by a loss. By default nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterTraining {
    /// Factor on the router z-loss (Zoph et al. 2022), which is added to the loss; 0 for none.
    pub z_loss: f64,
    /// Each element of a router's input is multiplied with a number that is at most so far from 1 (Fedus et al. 2021); 0 for none.
    pub jitter: f32,
    /// An expert takes at most so many even shares of the places of a micro-batch, or of a chunk of a sequence, rounded up; the first
    /// in the order of tokens, and none of the others. `None`: as many as there are.
    pub capacity: Option<f64>,
    /// How much a router's correction of an expert's score changes in a step (DeepSeek-V3); 0: it stays as it is.
    pub correction_speed: f64,
}

/// Which weights a step trains.
#[derive(Clone, Debug, PartialEq)]
pub enum TrainingMethod {
    /// All of the model's.
    Full,
    /// Low-rank adapters (LoRA), in f32; the model's own weights are frozen.
    Adapters(Arc<Adapters>),
}

/// Adapters in training, and the frozen weights beside them.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapters {
    /// Which tensors have one, and what else is trained.
    pub layout: AdapterLayout,
    /// Probability with which an element of an adapter's input is dropped.
    pub dropout: f32,
    /// Storage of weights that is not the precision's: blocks of quantised types.
    pub weight_types: HashMap<(BlockId, Role), DType>,
    /// Where files hold frozen weights: what is as it is computed with is brought from there where weights live on disk.
    pub in_files: StoredWeights,
}

impl TrainingMethod {
    /// The adapters, if they are what is trained.
    pub fn adapters(&self) -> Option<&Adapters> {
        match self {
            TrainingMethod::Full => None,
            TrainingMethod::Adapters(adapters) => Some(adapters),
        }
    }

    /// Everything that is trained, in the order of the blocks.
    pub fn trained(&self, spec: &ModelSpec) -> Vec<Parameter> {
        let all = spec.parameters().into_iter().filter(|p| p.role.has_gradient());
        let Some(adapters) = self.adapters() else { return all.collect() };
        let layout = &adapters.layout;
        let base = all.filter(|p| layout.trains_base(p.block, p.role));
        let mut trained: Vec<Parameter> = base.chain(layout.parameters().iter().cloned()).collect();
        trained.sort_by_key(|p| p.block);
        trained
    }

    /// The type that a weight of the model is stored in.
    pub fn weight_type(&self, parameter: &Parameter, usual: DType) -> DType {
        let usual = parameter.role.saved_as(usual);
        let own = self.adapters().and_then(|a| a.weight_types.get(&(parameter.block, parameter.role)));
        own.copied().unwrap_or(usual)
    }
}

impl StepSettings {
    /// A plain step in f32: nothing is recomputed, compressed, clipped or scaled, and all logits exist at once.
    pub fn new(batch_size: u64, sequence_length: u64) -> StepSettings {
        StepSettings {
            batch_size,
            sequence_length,
            precision: Precision::F32,
            checkpointing: Checkpointing::None,
            compression: Compression::None,
            attention: AttentionKind::Flash,
            document_end: None,
            document_starts: false,
            target_weights: false,
            mlp_chunk_tokens: None,
            loss_chunk_tokens: batch_size * sequence_length,
            optimizer: OptimizerSettings::default(),
            clipping: GradientClipping::None,
            update: UpdateTiming::AfterBackward,
            loss_scaling: None,
            method: TrainingMethod::Full,
            offload: Offload::NONE,
            kept_layers: KeptLayers::NONE,
            expert_slots: 0,
            micro_batches_per_pass: 1,
            ranks: Ranks::default(),
            sharding: Sharding::default(),
            overlap_communication: false,
            sequence_chunk_tokens: None,
            pipeline_schedule: PipelineSchedule::default(),
            sequence_parallel: false,
            evaluation_batch_size: None,
            balance_loss: 0.0,
            routers: RouterTraining::default(),
            stage: None,
            seed: 0,
        }
    }

    /// Whether ranks exchange anything that can be under way while the step computes.
    pub fn can_overlap(&self) -> bool {
        let shares = self.sharding.reduces_each_pass() || self.sharding.stage >= ZeroStage::States;
        self.ranks.mesh.replicas() > 1 && shares
    }

    /// Whether experts of the model can come by themselves: they are frozen, live below the device, are not divided among ranks, and
    /// nothing but their products needs them.
    pub fn experts_can_come(&self, spec: &ModelSpec) -> bool {
        let Some(adapters) = self.method.adapters() else { return false };
        let types = |p: &Parameter| self.method.weight_type(p, self.precision.weights);
        let trains = |p: &Parameter| adapters.layout.trains_base(p.block, p.role);
        let alone = self.sharding.stage < ZeroStage::Weights && self.ranks.mesh.parts() <= 1;
        let layout = Some(&adapters.layout);
        self.offload.parameters != Tier::Device && alone && experts_can_come(spec, layout, &types, &trains)
    }

    /// Slots for experts that come by themselves; 0 where they do not.
    pub(crate) fn slots_for_experts(&self, spec: &ModelSpec) -> u32 {
        if self.experts_can_come(spec) { self.expert_slots } else { 0 }
    }

    /// Bytes of what goes into a layer, for all micro-batches of a pass: what checkpointing may keep or spare of each layer.
    pub fn layer_input_bytes(&self, spec: &ModelSpec) -> u64 {
        let tokens = self.stream_rows() * self.micro_batches_per_pass;
        self.precision.activations.bytes_for(tokens * spec.hidden_size).unwrap_or(u64::MAX)
    }

    /// The places in a sequence of `length` tokens that this rank has.
    pub(crate) fn own_runs(&self, length: u64) -> Vec<Range<u64>> {
        self.ranks.mesh.runs(self.ranks.place().context, length)
    }

    /// The tokens of a micro-batch that this rank has.
    pub(crate) fn own_places(&self) -> Places {
        let (batch_size, length) = (self.batch_size, self.sequence_length);
        Places { batch_size, length, runs: self.own_runs(length) }
    }

    /// Tokens of each sequence that this rank has.
    pub fn own_tokens(&self) -> u64 {
        self.own_runs(self.sequence_length).iter().map(|run| run.end - run.start).sum()
    }

    /// Rows of the residual stream of a micro-batch that this rank has.
    pub fn stream_rows(&self) -> u64 {
        let tokens = self.batch_size * self.own_tokens();
        if self.shares_rows() { tokens / u64::from(self.ranks.mesh.tensor) } else { tokens }
    }

    /// Whether ranks that share every product have some rows of the residual stream each.
    pub fn shares_rows(&self) -> bool {
        let (tokens, ranks) = (self.batch_size * self.own_tokens(), u64::from(self.ranks.mesh.tensor));
        // 8-bit floats have one factor for a tensor, which rows of several ranks do not share.
        let has_rows = self.precision.linears != Linears::Fp8;
        self.sequence_parallel && has_rows && ranks > 1 && tokens.is_multiple_of(ranks)
    }

    /// Ranks that have shares of the same states, gradients or weights.
    pub fn sharers(&self) -> u32 {
        let replicas = self.ranks.mesh.replicas();
        match self.sharding.stage {
            ZeroStage::Nothing => replicas,
            _ => self.sharding.among.unwrap_or(replicas).clamp(1, replicas),
        }
    }

    /// Whether the head's table is the embedding's, here or of the whole model.
    pub(crate) fn is_tied(&self, spec: &ModelSpec) -> bool {
        self.stage.as_ref().map_or(spec.tie_word_embeddings, Stage::is_tied)
    }

    /// Tokens of a chunk, where a sequence is visited in several.
    pub fn chunk_tokens(&self) -> Option<u64> {
        self.sequence_chunk_tokens.filter(|chunk| *chunk < self.sequence_length)
    }

    /// Sequences of a batch that is evaluated; 0 where none is.
    pub fn evaluated(&self) -> u64 {
        self.evaluation_batch_size.unwrap_or(self.batch_size)
    }

    /// Bytes that a token of a [`MicroBatch`] takes on the host.
    pub fn host_bytes_per_token(&self) -> u64 {
        let further = u64::from(self.target_weights) + u64::from(self.document_starts);
        4 * (2 + further)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token and a target of four bytes each; a weight and a beginning where there are any.
    #[test]
    fn a_token_takes_what_is_said_of_it() {
        let bytes = |target_weights, document_starts| {
            StepSettings { target_weights, document_starts, ..StepSettings::new(1, 1) }.host_bytes_per_token()
        };
        let all = [bytes(false, false), bytes(true, false), bytes(false, true), bytes(true, true)];
        assert_eq!(all, [8, 12, 12, 16]);
    }

    #[test]
    fn micro_batches_that_are_alike_count_each() {
        let (targets, weights) = ([2, plimsoll_device::IGNORED_TARGET, 1], [0.5, 4.0, 2.0]);
        let one = MicroBatch { weights: Some(&weights), ..MicroBatch::new(&[1, 2, 3], &targets) };
        let (alike, these) = (MicroBatches::Alike(&one, 3), [one; 3]);
        for all in [alike, MicroBatches::These(&these)] {
            assert_eq!((all.len(), all.target_count(), all.target_weight()), (3, 6, 7.5));
            assert_eq!([all.group(0, 2).len(), all.group(2, 2).len(), all.group(3, 2).len()], [2, 1, 0]);
        }
    }
}
