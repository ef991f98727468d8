//! From a configuration to the settings of a step, and back to a configuration in which nothing is open.

use plimsoll_device::DType;
use plimsoll_model::ModelSpec;
use plimsoll_step::{
    AttentionKind, Checkpointing, GradientClipping, Linears, LossScaling, NormSource, Offload, Precision,
    Ranks, RouterTraining, StepError, StepSettings, TrainingMethod, UpdateTiming, ZeroStage,
};

use super::choice::sequences;
use super::{Choice, at_home, batches, checkpointings, precisions};
use crate::config::{
    Attention, Auto, GradientCheckpointing, GradientDtype, InBackwardClipping, MasterWeights, Method,
    MixedPrecision, RawConfig,
};
use crate::expert_slots;
use crate::offload::{self, as_said, kept_as_said};
use crate::optimizer::optimizer_settings;
use crate::runs::Wanted;

/// Logits of a chunk take about this much where the user does not say.
const LOGITS_BYTES: u64 = 32 << 20;

pub(crate) fn step_settings(
    config: &RawConfig,
    spec: &ModelSpec,
    method: &TrainingMethod,
    precision: Precision,
    checkpointing: Checkpointing,
    batch_size: u64,
) -> StepSettings {
    let training = &config.training;
    let sequence_length = config.data.sequence_length();
    let clip = training.max_gradient_norm();
    StepSettings {
        batch_size,
        sequence_length,
        precision,
        checkpointing,
        compression: training.activation_compression().0,
        attention: training.attention().set().map_or(AttentionKind::Flash, |attention| attention.0),
        // Which token it is says the tokenizer, when there is one; the plan is the same for each.
        document_end: (config.data.document_mask() && !config.data.has_samples())
            .then(|| spec.eos_tokens.first().copied().unwrap_or(0)),
        document_starts: config.data.has_samples() && config.data.packing(),
        target_weights: config.data.has_samples(),
        mlp_chunk_tokens: training.mlp_chunk_tokens,
        loss_chunk_tokens: training.loss_chunk_tokens().set().unwrap_or_else(|| {
            let tokens = config.sequence_chunk().unwrap_or(batch_size * sequence_length);
            loss_chunk_tokens(spec.vocab_size, tokens)
        }),
        optimizer: optimizer_settings(training),
        clipping: if clip > 0.0 { GradientClipping::GlobalNorm(clip) } else { GradientClipping::None },
        loss_scaling: (precision.activations == DType::F16).then(LossScaling::default),
        update: match (training.optimizer_in_backward(), training.in_backward_clipping) {
            (false, _) => UpdateTiming::AfterBackward,
            (true, Some(InBackwardClipping::PreviousNorm)) => {
                UpdateTiming::InBackward(NormSource::PreviousStep)
            }
            // Without clipping the norm is only reported: `validate` has seen to the rest.
            (true, Some(InBackwardClipping::SecondBackward) | None) => {
                UpdateTiming::InBackward(NormSource::SecondBackward)
            }
        },
        method: method.clone(),
        offload: Offload::NONE,
        kept_layers: kept_as_said(&config.memory.kept_layers),
        expert_slots: 0,
        micro_batches_per_pass: training.micro_batches_per_pass().set().unwrap_or(1),
        ranks: Ranks { rank: config.rank, mesh: config.parallel.mesh() },
        sharding: config.parallel.sharding(),
        overlap_communication: config.parallel.overlap_communication().set().unwrap_or(false),
        sequence_chunk_tokens: None,
        pipeline_schedule: config.parallel.schedule(),
        sequence_parallel: config.parallel.sequence_parallel(),
        evaluation_batch_size: evaluation_batch_size(config),
        balance_loss: balance_loss(config, spec, method),
        routers: router_training(config, spec, method),
        stage: None,
        seed: training.seed(),
    }
}

/// Sequences of a batch that is evaluated between steps, as far as it is said: none without validation data.
pub(crate) fn evaluation_batch_size(config: &RawConfig) -> Option<u64> {
    match config.data.validation {
        Some(_) => config.training.eval_batch_size().set(),
        None => Some(0),
    }
}

/// Factor on the load-balancing loss of experts.
fn balance_loss(config: &RawConfig, spec: &ModelSpec, method: &TrainingMethod) -> f64 {
    let Some(experts) = &spec.experts else { return 0.0 };
    let usual = match method {
        // No stage of a pipeline sees all layers.
        TrainingMethod::Full if config.parallel.mesh().pipeline <= 1 => experts.router.balance_loss,
        _ => 0.0,
    };
    config.training.router_aux_loss_coef().set().unwrap_or(usual)
}

/// How fast the bias of a router changes that is balanced by it (DeepSeek-V3).
const BIAS_UPDATE_SPEED: f64 = 1e-3;

/// What else is done with routers.
fn router_training(config: &RawConfig, spec: &ModelSpec, method: &TrainingMethod) -> RouterTraining {
    let Some(experts) = &spec.experts else { return RouterTraining::default() };
    let training = &config.training;
    let from_scratch = config.model.path.is_none() && *method == TrainingMethod::Full;
    let speed = if from_scratch { BIAS_UPDATE_SPEED } else { 0.0 };
    let speed = training.router_bias_update_speed().set().unwrap_or(speed);
    RouterTraining {
        z_loss: training.router_z_loss_coef(),
        jitter: training.router_jitter_noise() as f32,
        capacity: training.expert_capacity_factor,
        correction_speed: if experts.router.correction { speed } else { 0.0 },
    }
}

/// Refuses sequences that are longer than a model's learned positions, and what is said of experts or of their routers' biases where
/// the model has none: nobody would see that it does nothing.
///
/// # Errors
/// The first key that is set to something.
pub(crate) fn check_model(config: &RawConfig, spec: &ModelSpec) -> Result<(), StepError> {
    let (tokens, positions) = (config.data.sequence_length(), spec.max_position_embeddings);
    if spec.attention.rope.is_none() && tokens > positions {
        return Err(StepError::TooFewPositions { tokens, positions });
    }
    let training = &config.training;
    let is_set = |value: Option<f64>| value.is_some_and(|value| value > 0.0);
    let keys = [
        ("training.router_aux_loss_coef", is_set(training.router_aux_loss_coef().set())),
        ("training.router_z_loss_coef", is_set(Some(training.router_z_loss_coef()))),
        ("training.router_jitter_noise", is_set(Some(training.router_jitter_noise()))),
        ("training.expert_capacity_factor", training.expert_capacity_factor.is_some()),
        ("training.router_bias_update_speed", is_set(training.router_bias_update_speed().set())),
        ("memory.expert_slots", config.memory.expert_slots().set().is_some_and(|slots| slots > 0)),
    ];
    if let Some((key, _)) = keys.into_iter().find(|(_, is_set)| *is_set && spec.experts.is_none()) {
        return Err(StepError::NoExperts { key });
    }
    let slots = config.memory.expert_slots().set().filter(|slots| *slots > 0);
    let experts = expert_slots::of_use(spec).map_or(0, |slots| u64::from(*slots.end()));
    match slots {
        Some(_) if training.method() == Method::Full => return Err(StepError::TrainedExperts),
        Some(slots) if slots > experts => return Err(StepError::TooManyExpertSlots { slots, experts }),
        Some(_) => {
            let (parallel, mesh) = (&config.parallel, config.parallel.mesh());
            let with = [
                ("training.lora.use_dora", training.lora.use_dora()),
                ("parallel.zero_stage=3", parallel.sharding().stage >= ZeroStage::Weights),
                ("parallel.tensor_parallel", mesh.tensor > 1),
                ("parallel.expert_parallel", mesh.expert > 1),
            ];
            if let Some((with, _)) = with.into_iter().find(|(_, is_so)| *is_so) {
                return Err(StepError::ExpertsOfLayers { with });
            }
        }
        None => {}
    }
    let has_bias = spec.experts.as_ref().is_some_and(|experts| experts.router.correction);
    if is_set(training.router_bias_update_speed().set()) && !has_bias {
        return Err(StepError::NoRouterBias);
    }
    Ok(())
}

/// The step of a configuration of which nothing is left open, or the first of its candidates.
pub(crate) fn settled(config: &RawConfig, spec: &ModelSpec, method: &TrainingMethod) -> Option<Wanted> {
    let precision = precisions(&config.training, method, None).first().copied()?;
    let form = checkpointings(&config.training).first().copied()?;
    let (batch_size, accumulation) = batches(config).first()?.first().copied()?;
    let settings = step_settings(config, spec, method, precision, form, batch_size);
    Some((at_home(config, spec, settings, as_said(&config.memory)), accumulation))
}

/// Tokens of a chunk whose logits take about 32 MiB: a power of two, so that products stay on whole tiles.
pub fn loss_chunk_tokens(vocab_size: u64, tokens: u64) -> u64 {
    chunk_within(LOGITS_BYTES, vocab_size, tokens)
}

/// The same for so many bytes.
pub(crate) fn chunk_within(bytes: u64, vocab_size: u64, tokens: u64) -> u64 {
    let most = (bytes / (4 * vocab_size.max(1))).max(16);
    let power = 1 << (63 - most.leading_zeros());
    tokens.min(power).max(1)
}

/// The configuration with every `auto` of the step replaced by what was chosen: it can be run again.
pub fn resolved_config(config: &RawConfig, choice: &Choice) -> RawConfig {
    resolved_with(config, &choice.settings, choice.accumulation)
}

/// The same of a step that need not have been run.
pub(crate) fn resolved_with(config: &RawConfig, settings: &StepSettings, accumulation: u64) -> RawConfig {
    let mut resolved = config.clone();
    // What was looked for has been found.
    resolved.planning = Default::default();
    let Precision { weights, gradients, master_weights, linears, .. } = settings.precision;
    let fp8 = linears == Linears::Fp8;
    let narrow = fp8 || weights != DType::F32;
    resolved.memory.offload = offload::resolved(settings.offload);
    resolved.memory.kept_layers = offload::kept_resolved(settings.kept_layers);
    if !settings.offload.is_none() {
        resolved.memory.prefetch = Some(Auto::Set(settings.offload.prefetch));
    }
    if settings.expert_slots > 0 {
        resolved.memory.expert_slots = Some(Auto::Set(u64::from(settings.expert_slots)));
    }
    if settings.can_overlap() {
        resolved.parallel.overlap_communication = Some(Auto::Set(settings.overlap_communication));
    }
    let training = &mut resolved.training;
    training.batch_size = Some(Auto::Set(settings.batch_size));
    training.gradient_accumulation_steps = Some(Auto::Set(accumulation));
    training.effective_batch_size = Some(Auto::Set(sequences(settings, accumulation)));
    training.mixed_precision = Some(Auto::Set(match weights {
        _ if fp8 => MixedPrecision::Fp8,
        DType::Bf16 => MixedPrecision::Bf16,
        DType::F16 => MixedPrecision::Fp16,
        _ => MixedPrecision::F32,
    }));
    training.master_weights = narrow.then_some(Auto::Set(match master_weights || weights == DType::F32 {
        true => MasterWeights::F32,
        false => MasterWeights::None,
    }));
    training.gradient_dtype = Some(Auto::Set(match gradients {
        DType::Bf16 => GradientDtype::Bf16,
        _ => GradientDtype::F32,
    }));
    training.gradient_checkpointing = Some(Auto::Set(GradientCheckpointing::Form(settings.checkpointing)));
    training.loss_chunk_tokens = Some(Auto::Set(settings.loss_chunk_tokens));
    training.micro_batches_per_pass = Some(Auto::Set(settings.micro_batches_per_pass));
    training.attention = Some(Auto::Set(Attention(settings.attention)));
    training.sequence_chunk_tokens = settings.sequence_chunk_tokens.or(training.sequence_chunk_tokens);
    if settings.balance_loss > 0.0 {
        training.router_aux_loss_coef = Some(Auto::Set(settings.balance_loss));
    }
    if settings.routers.correction_speed > 0.0 {
        training.router_bias_update_speed = Some(Auto::Set(settings.routers.correction_speed));
    }
    if config.data.validation.is_some() {
        training.eval_batch_size = Some(Auto::Set(settings.evaluated()));
    }
    resolved
}
