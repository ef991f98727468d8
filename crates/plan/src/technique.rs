//! What a step does to take less memory or time than the naive one would: each technique can be taken away from it.
//!
//! The naive step trains the same parameters on the same sequences with the same data parallel ranks. It is in f32, or in plain mixed
//! precision where the user has fixed a 16-bit type, its optimizer is AdamW, it takes all sequences as one micro-batch, and everything
//! is kept, written out, whole and on the device.

use std::sync::Arc;

use plimsoll_device::DType;
use plimsoll_memory::Tier;
use plimsoll_model::{Parameter, Role};
use plimsoll_parallel::Mesh;
use plimsoll_step::{
    Adapters, AttentionKind, Checkpointing, Compression, Linears, Precision, Ranks, Sharding, StepSettings,
    TrainingMethod, UpdateTiming, ZeroStage,
};

use crate::config::{GradientCheckpointing, MixedPrecision, Optimizer, RawConfig, TrainingConfig};
use crate::offload::TensorKind;
use crate::optimizer::optimizer_settings;
use crate::resolve::Choice;
use crate::runs::Wanted;

/// A technique.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Technique {
    Attention,
    LossChunks,
    MlpChunks,
    MicroBatches,
    Checkpointing,
    Compression,
    SixteenBits,
    Fp8,
    NoMasters,
    NarrowGradients,
    Optimizer,
    Quantization,
    InBackward,
    SequenceChunks,
    Zero,
    Tensor,
    Experts,
    Pipeline,
    Context,
    Offload(TensorKind),
    Together,
    Overlap,
}

impl Technique {
    /// All of them, in the order in which they are taken away.
    pub const ALL: [Technique; 25] = [
        Technique::Attention,
        Technique::NoMasters,
        Technique::NarrowGradients,
        Technique::Fp8,
        Technique::SixteenBits,
        Technique::Checkpointing,
        Technique::Compression,
        Technique::Optimizer,
        Technique::Quantization,
        Technique::InBackward,
        Technique::SequenceChunks,
        Technique::Zero,
        Technique::Tensor,
        Technique::Experts,
        Technique::Pipeline,
        Technique::Context,
        Technique::Offload(TensorKind::Optimizer),
        Technique::Offload(TensorKind::Gradients),
        Technique::Offload(TensorKind::Activations),
        Technique::Offload(TensorKind::Parameters),
        Technique::Together,
        Technique::Overlap,
        Technique::MlpChunks,
        Technique::LossChunks,
        Technique::MicroBatches,
    ];

    /// The keys of the configuration that say it.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Technique::Attention => &["training.attention"],
            Technique::LossChunks => &["training.loss_chunk_tokens"],
            Technique::MlpChunks => &["training.mlp_chunk_tokens"],
            Technique::MicroBatches => &["training.batch_size", "training.gradient_accumulation_steps"],
            Technique::Checkpointing => &["training.gradient_checkpointing"],
            Technique::Compression => &["training.activation_compression"],
            Technique::SixteenBits | Technique::Fp8 => &["training.mixed_precision"],
            Technique::NoMasters => &["training.master_weights"],
            Technique::NarrowGradients => &["training.gradient_dtype"],
            Technique::Optimizer => &["training.optimizer"],
            Technique::Quantization => &["training.method", "training.quantization"],
            Technique::InBackward => &["training.optimizer_in_backward", "training.in_backward_clipping"],
            Technique::SequenceChunks => &["training.sequence_chunk_tokens"],
            Technique::Zero => &["parallel.zero_stage", "parallel.sharding_strategy", "parallel.shard_size"],
            Technique::Tensor => &["parallel.tensor_parallel", "parallel.sequence_parallel"],
            Technique::Experts => &["parallel.expert_parallel"],
            Technique::Pipeline => &["parallel.pipeline_parallel", "parallel.pipeline_schedule"],
            Technique::Context => &["parallel.context_parallel"],
            Technique::Offload(TensorKind::Optimizer) => {
                &["memory.offload.optimizer", "memory.kept_layers.optimizer"]
            }
            Technique::Offload(TensorKind::Gradients) => {
                &["memory.offload.gradients", "memory.kept_layers.gradients"]
            }
            Technique::Offload(TensorKind::Activations) => {
                &["memory.offload.activations", "memory.kept_layers.activations"]
            }
            Technique::Offload(TensorKind::Parameters) => {
                &["memory.offload.parameters", "memory.kept_layers.parameters", "memory.expert_slots"]
            }
            Technique::Together => &["training.micro_batches_per_pass"],
            Technique::Overlap => &["parallel.overlap_communication"],
        }
    }
}

/// A step and the techniques that it has.
pub(crate) struct Techniques<'a> {
    /// The configuration with every `auto` decided.
    config: &'a RawConfig,
    step: Wanted,
    /// Whether the user has fixed a type of 16 bits, or a narrower one.
    narrow: bool,
}

impl<'a> Techniques<'a> {
    /// Of a chosen step. `asked` is what the user has said, `config` the same with every `auto` decided.
    pub fn of(asked: &RawConfig, config: &'a RawConfig, choice: &Choice) -> Techniques<'a> {
        let said = asked.training.mixed_precision().set();
        let narrow = said.is_some_and(|said| said != MixedPrecision::F32);
        Techniques { config, step: (choice.settings.clone(), choice.accumulation), narrow }
    }

    /// Those that the step has: without any of them it would be another step.
    pub fn all(&self) -> Vec<Technique> {
        Technique::ALL.into_iter().filter(|one| self.without(&[*one]) != self.step).collect()
    }

    /// The step without some of them.
    pub fn without(&self, missing: &[Technique]) -> Wanted {
        let mut step = self.step.clone();
        for one in Technique::ALL {
            if missing.contains(&one) {
                self.take_away(one, &mut step);
            }
        }
        step
    }

    fn take_away(&self, technique: Technique, (step, accumulation): &mut Wanted) {
        let tokens = |step: &StepSettings| {
            step.chunk_tokens().unwrap_or(step.batch_size.saturating_mul(step.sequence_length))
        };
        match technique {
            Technique::Attention => step.attention = AttentionKind::Standard,
            Technique::LossChunks if step.loss_chunk_tokens < tokens(step) => {
                step.loss_chunk_tokens = tokens(step);
            }
            Technique::LossChunks => {}
            Technique::MlpChunks => step.mlp_chunk_tokens = None,
            Technique::MicroBatches if *accumulation == 1 => {}
            Technique::MicroBatches => {
                let whole = step.loss_chunk_tokens >= tokens(step);
                step.batch_size = step.batch_size.saturating_mul(*accumulation);
                (*accumulation, step.micro_batches_per_pass) = (1, 1);
                if whole {
                    step.loss_chunk_tokens = tokens(step);
                }
            }
            Technique::Checkpointing => step.checkpointing = Checkpointing::None,
            Technique::Compression => step.compression = Compression::None,
            Technique::NoMasters => step.precision = with_masters(step),
            Technique::NarrowGradients => step.precision.gradients = DType::F32,
            Technique::Fp8 => step.precision = of_sixteen_bits(step),
            Technique::SixteenBits if self.narrow => {}
            Technique::SixteenBits => (step.precision, step.loss_scaling) = (Precision::F32, None),
            Technique::Optimizer => {
                let (optimizer, optimizer_options) = (Some(Optimizer::AdamW), Default::default());
                let training = self.config.training.clone();
                let adamw = TrainingConfig { optimizer, optimizer_options, ..training };
                if self.config.training.optimizer() != Optimizer::AdamW {
                    step.optimizer = optimizer_settings(&adamw);
                }
            }
            Technique::Quantization => step.method = unquantised(&step.method),
            Technique::InBackward => step.update = UpdateTiming::AfterBackward,
            Technique::SequenceChunks if step.chunk_tokens().is_none() => {}
            Technique::SequenceChunks => {
                let whole = step.loss_chunk_tokens >= tokens(step);
                step.sequence_chunk_tokens = None;
                if whole {
                    step.loss_chunk_tokens = tokens(step);
                }
            }
            Technique::Zero => {
                let (stage, among) = (ZeroStage::Nothing, None);
                step.sharding = Sharding { stage, among, ..step.sharding };
            }
            Technique::Tensor => step.ranks = alone(step.ranks, |mesh| mesh.tensor = 1),
            Technique::Experts => step.ranks = alone(step.ranks, |mesh| mesh.expert = 1),
            Technique::Pipeline => step.ranks = alone(step.ranks, |mesh| mesh.pipeline = 1),
            Technique::Context => step.ranks = alone(step.ranks, |mesh| mesh.context = 1),
            Technique::Offload(kind) => {
                *kind.tier_mut(&mut step.offload) = Tier::Device;
                *kind.kept_mut(&mut step.kept_layers) = 0;
                if kind == TensorKind::Parameters {
                    step.expert_slots = 0;
                }
            }
            Technique::Together => step.micro_batches_per_pass = 1,
            Technique::Overlap => step.overlap_communication = false,
        }
    }

    /// What a technique does, in words.
    pub fn words(&self, technique: Technique) -> String {
        let (step, accumulation) = &self.step;
        let mesh = step.ranks.mesh;
        match technique {
            Technique::Attention => match step.attention {
                AttentionKind::BlockSparse(_) => "block-sparse attention".to_owned(),
                AttentionKind::SlidingWindow(window) => format!("attention to {window} tokens"),
                AttentionKind::Flash | AttentionKind::Standard => "flash attention".to_owned(),
            },
            Technique::LossChunks => format!("logits of {} tokens at once", step.loss_chunk_tokens),
            Technique::MlpChunks => {
                format!("feed-forward parts of {} tokens at once", step.mlp_chunk_tokens.unwrap_or(0))
            }
            Technique::MicroBatches => {
                let sequences = if step.batch_size == 1 { "sequence" } else { "sequences" };
                format!("micro-batches of {} {sequences}, {accumulation} accumulated", step.batch_size)
            }
            Technique::Checkpointing => {
                format!("checkpointing {}", GradientCheckpointing::Form(step.checkpointing))
            }
            Technique::Compression => "saved activations in 8 bits".to_owned(),
            Technique::SixteenBits if step.precision.activations == DType::F16 => "fp16 for f32".to_owned(),
            Technique::SixteenBits => "bf16 for f32".to_owned(),
            Technique::Fp8 => "linear layers in 8-bit floats".to_owned(),
            Technique::NoMasters => "no f32 master weights".to_owned(),
            Technique::NarrowGradients => format!("gradients in {}", step.precision.gradients),
            Technique::Optimizer => format!("{} for AdamW", self.config.training.optimizer()),
            Technique::Quantization => match quantised_as(&step.method) {
                Some(dtype) => format!("frozen weights in {dtype}"),
                None => "frozen weights as the files have them".to_owned(),
            },
            Technique::InBackward => "updates in the backward pass".to_owned(),
            Technique::SequenceChunks => {
                format!("sequences in chunks of {}", step.sequence_chunk_tokens.unwrap_or(0))
            }
            Technique::Zero => format!("ZeRO stage {}", step.sharding.stage.number()),
            Technique::Tensor => format!("{} tensor parallel ranks for each", mesh.tensor),
            Technique::Experts => format!("experts divided among {} ranks", mesh.expert),
            Technique::Pipeline => format!("{} pipeline stages", mesh.pipeline),
            Technique::Context => format!("{} context parallel ranks for each", mesh.context),
            Technique::Offload(kind) => {
                let (tier, kept) = (kind.tier(step.offload), kind.kept(step.kept_layers));
                let but = if kept > 0 { format!(" but for {kept} layers") } else { String::new() };
                let come = match step.expert_slots {
                    slots if slots > 0 && kind == TensorKind::Parameters => {
                        format!(", {slots} experts in memory at a time")
                    }
                    _ => String::new(),
                };
                format!("{} on the {tier}{but}{come}", kind.words())
            }
            Technique::Together => format!("{} micro-batches in a pass", step.micro_batches_per_pass),
            Technique::Overlap => "exchanges behind the computation".to_owned(),
        }
    }

    /// The assignments that say it, as `--set` takes them.
    pub fn assignments(&self, technique: Technique) -> Vec<String> {
        let said = self.config.said();
        let of_key = |key: &&str| said.iter().find(|said| said.key == *key);
        let own = technique.keys().iter().filter_map(of_key);
        own.map(|said| format!("{}={}", said.key, said.value)).collect()
    }

    /// The naive step in words.
    pub fn naive_words(&self) -> String {
        let (step, _) = self.without(&Technique::ALL);
        let Precision { weights, master_weights, .. } = step.precision;
        let master = if master_weights { " with f32 master weights" } else { "" };
        let (batch, length) = (step.batch_size, step.sequence_length);
        format!(
            "the naive way: {weights}{master}, AdamW, all {batch} x {length} tokens at once, everything kept"
        )
    }
}

/// The precision of a step that updates f32 weights where anything narrower is trained.
fn with_masters(step: &StepSettings) -> Precision {
    let precision = step.precision;
    match precision.linears {
        _ if precision.weights == DType::F32 || !trains_narrow(&step.method) => precision,
        Linears::Fp8 => Precision { weights: DType::F32, ..precision },
        Linears::Plain | Linears::Int8 => Precision { master_weights: true, ..precision },
    }
}

/// The precision of a step without 8-bit floats.
fn of_sixteen_bits(step: &StepSettings) -> Precision {
    let precision = step.precision;
    match precision.linears {
        Linears::Plain | Linears::Int8 => precision,
        Linears::Fp8 => {
            let own_masters = precision.weights == DType::F32 && trains_narrow(&step.method);
            let master_weights = precision.master_weights || own_masters;
            Precision { weights: DType::Bf16, master_weights, linears: Linears::Plain, ..precision }
        }
    }
}

/// Whether anything is trained that is as narrow as the weights are: adapters are in f32.
fn trains_narrow(method: &TrainingMethod) -> bool {
    let narrow = |p: &Parameter| !matches!(p.role, Role::Lora(..));
    method.adapters().is_none_or(|adapters| adapters.layout.trained().any(narrow))
}

/// The method with frozen weights that are as wide as all others.
fn unquantised(method: &TrainingMethod) -> TrainingMethod {
    match method {
        TrainingMethod::Adapters(adapters) if !adapters.weight_types.is_empty() => {
            let (weight_types, in_files) = Default::default();
            TrainingMethod::Adapters(Arc::new(Adapters {
                weight_types,
                in_files,
                ..Adapters::clone(adapters)
            }))
        }
        other => other.clone(),
    }
}

/// The type of quantised weights, where all have the same.
fn quantised_as(method: &TrainingMethod) -> Option<DType> {
    let mut types = method.adapters()?.weight_types.values();
    let first = *types.next()?;
    types.all(|other| *other == first).then_some(first)
}

/// A rank of fewer: where it is along the ways that are left.
fn alone(ranks: Ranks, take_away: impl Fn(&mut Mesh)) -> Ranks {
    let (mut mesh, place) = (ranks.mesh, ranks.place());
    take_away(&mut mesh);
    if mesh == ranks.mesh {
        return ranks;
    }
    let along = |place: u32, ranks: u32| if ranks > 1 { place } else { 0 };
    let context = along(place.context, mesh.context);
    let replica = place.data / mesh.expert.max(1) * mesh.context.max(1) + context;
    let part = along(place.tensor, mesh.tensor).max(along(place.expert, mesh.expert));
    let rank = mesh.rank(along(place.stage, mesh.pipeline), replica, part);
    Ranks { rank, mesh }
}
