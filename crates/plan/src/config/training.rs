//! `training`: how long, with what batch, in which precision and by which optimizer.

use plimsoll_step::Compression;

use super::attention::Attention;
use super::dynamic_batching::DynamicBatching;
use super::lora::{LoraOptions, Quantization};
use super::optimizer::{Optimizer, OptimizerOptions, ParameterGroups};
use super::policies::{ActivationCompression, GradientCheckpointing};
use super::section::section;
use super::value::{Auto, choice};

section! {
    /// How the model is trained.
    pub struct TrainingConfig at "training" {
        /// Which weights are trained.
        method: Method = Method::Full;
        /// How the frozen linears beside adapters are stored.
        quantization: Auto<Quantization> = Auto::Auto;
        /// Optimizer steps. Excludes epochs.
        steps: u64, "none; epochs decide", AT_LEAST_ONE;
        /// Passes over the training data; fractions are allowed. Excludes steps.
        epochs: f64, "1, if steps are not given either", POSITIVE;
        /// Sequences in one forward and backward pass (the micro-batch).
        batch_size: Auto<u64> = Auto::Auto, COUNT;
        /// Passes whose gradients are summed before the optimizer steps.
        gradient_accumulation_steps: Auto<u64> = Auto::Auto, COUNT;
        /// Sequences in an optimizer step: batch_size x gradient_accumulation_steps. Any two give the third.
        effective_batch_size: Auto<u64>, "the product of the other two", COUNT;
        /// Sequences of a batch of validation data; auto: as many as take no more memory than a step.
        eval_batch_size: Auto<u64> = Auto::Auto, COUNT;
        /// The type that products are computed in and activations are kept in; auto: bf16 where the device is made for it.
        mixed_precision: Auto<MixedPrecision> = Auto::Auto;
        /// Whether f32 weights stand behind narrower ones; without them updates are rounded stochastically.
        master_weights: Auto<MasterWeights> = Auto::Auto;
        /// The type that gradients of weights are kept in.
        gradient_dtype: Auto<GradientDtype> = Auto::Auto;
        /// The optimizer.
        optimizer: Optimizer = Optimizer::AdamW;
        /// The peak learning rate.
        learning_rate: f64 = 5e-5, POSITIVE;
        /// How the learning rate, meant for reference_batch_size, follows the effective batch.
        learning_rate_scaling: LearningRateScaling = LearningRateScaling::None;
        /// The effective batch that the learning rate is meant for.
        reference_batch_size: u64, "none; required with learning_rate_scaling", COUNT;
        /// Parameters with numbers of their own, by patterns of their names; the first that matches counts.
        parameter_groups: ParameterGroups, "none";
        /// Decay of the first moment in the optimizers of the Adam family.
        adam_beta1: f64 = 0.9, BELOW_ONE;
        /// Decay of the second moment in the optimizers of the Adam family.
        adam_beta2: f64 = 0.999, BELOW_ONE;
        /// Added to the root of the second moment in the optimizers of the Adam family.
        adam_epsilon: f64, "1e-8; GaLore and APOLLO 1e-6", POSITIVE;
        /// Weight decay; decoupled, but for SGD.
        weight_decay: f64 = 0.01, NOT_NEGATIVE;
        /// Whether norms and biases decay too.
        decay_norms_and_biases: bool = false;
        /// How the learning rate goes on after the warm-up.
        lr_schedule: LrSchedule = LrSchedule::Linear;
        /// Steps over which the learning rate rises from 0 to its peak.
        warmup_steps: u64 = 0;
        /// The same as a share of all steps. Excludes warmup_steps.
        warmup_ratio: f64, "none; warmup_steps decide", FRACTION;
        /// Share of all steps over which the wsd schedule falls at the end.
        decay_ratio: f64 = 0.1, FRACTION;
        /// The learning rate at the end, as a share of the peak.
        min_lr_ratio: f64 = 0.0, FRACTION;
        /// Gradients are scaled so that their global norm is at most this; 0: they are not.
        max_gradient_norm: f64 = 1.0, NOT_NEGATIVE;
        /// Factor on the load-balancing loss of a mixture of experts, which is added to the loss; auto: the model's own where its
        /// routers are trained by ranks with all layers, else 0.
        router_aux_loss_coef: Auto<f64> = Auto::Auto, NOT_NEGATIVE;
        /// Factor on the router z-loss of a mixture of experts, the mean of logsumexp(logits)^2, which is added to the loss.
        router_z_loss_coef: f64 = 0.0, NOT_NEGATIVE;
        /// In training, each element of what routers see is multiplied with a random number that is at most so far from 1.
        router_jitter_noise: f64 = 0.0, FRACTION;
        /// In training, an expert takes at most so many even shares of the places of a micro-batch, and what comes later is dropped.
        expert_capacity_factor: f64, "none: nothing is dropped", POSITIVE;
        /// How much a router's bias for the choice of experts changes in a step, towards an even load; auto: 0.001 where a model with such a
        /// bias is trained from scratch, else 0.
        router_bias_update_speed: Auto<f64> = Auto::Auto, NOT_NEGATIVE;
        /// What happens when a step's loss or gradients are not finite.
        not_finite: NotFinite = NotFinite::Stop;
        /// What the backward pass computes again instead of keeping it.
        gradient_checkpointing: Auto<GradientCheckpointing> = Auto::Auto;
        /// How saved activations are compressed.
        activation_compression: ActivationCompression = ActivationCompression(Compression::None);
        /// How tokens attend to each other in training.
        attention: Auto<Attention> = Auto::Auto;
        /// Logits of at most this many tokens exist at once.
        loss_chunk_tokens: Auto<u64> = Auto::Auto, COUNT;
        /// The feed-forward parts take at most this many tokens at once, and compute them again in the backward pass.
        mlp_chunk_tokens: u64, "all tokens at once", COUNT;
        /// A sequence that is longer is visited in chunks of so many tokens: each layer takes one chunk after the other, and what
        /// they leave waits below the device, so that its memory does not grow with the sequence.
        sequence_chunk_tokens: u64, "whole sequences", COUNT;
        /// Micro-batches that go through a block before the next block's turn: what is offloaded is brought once for all of
        /// them, and the activations of all are kept.
        micro_batches_per_pass: Auto<u64> = Auto::Auto, MICRO_BATCHES;
        /// Whether a block is updated, and its gradients given back, as soon as they are known.
        optimizer_in_backward: bool = false;
        /// Where updates in the backward pass take the gradient norm from that they are clipped by.
        in_backward_clipping: InBackwardClipping, "none: set it, or max_gradient_norm to 0";
        /// Seed of everything that is drawn at random.
        seed: u64 = 42;
    }
    sections {
        /// What the optimizer has beyond Adam's numbers.
        optimizer_options: OptimizerOptions;
        /// The adapters of training.method lora and qlora.
        lora: LoraOptions;
        /// Micro-batches that grow and shrink with the memory that there is.
        dynamic_batching: DynamicBatching;
    }
}

choice! {
    /// Which weights are trained.
    pub enum Method {
        /// All of them.
        Full = "full",
        /// Low-rank adapters beside frozen weights (Hu et al. 2021).
        Lora = "lora",
        /// The same, the frozen weights in 4-bit NormalFloat unless quantization says otherwise (Dettmers et al. 2023).
        Qlora = "qlora",
    }
}

choice! {
    /// The type that products are computed in and activations are kept in.
    pub enum MixedPrecision {
        /// 32-bit floats throughout.
        F32 = "f32" | "fp32" | "float32",
        /// bfloat16 weights and activations.
        Bf16 = "bf16" | "bfloat16",
        /// 16-bit floats with f32 master weights and a loss that is scaled as gradients allow.
        Fp16 = "fp16" | "f16" | "float16" | "half",
        /// bf16, with the products of the blocks' linear layers in 8-bit floats that are scaled just in time.
        Fp8 = "fp8" | "float8",
    }
}

choice! {
    /// The weights that the optimizer updates, where products read narrower ones.
    pub enum MasterWeights {
        /// f32 ones: a copy, or with fp8, whose 8-bit weights are made when needed, the only ones.
        F32 = "f32" | "fp32" | "float32",
        /// The bf16 weights themselves, rounded stochastically.
        None = "none",
    }
}

choice! {
    /// The type that gradients of weights are kept in.
    pub enum GradientDtype {
        /// 32-bit floats.
        F32 = "f32" | "fp32" | "float32",
        /// bfloat16.
        Bf16 = "bf16" | "bfloat16",
    }
}

choice! {
    /// How the learning rate goes on after the warm-up.
    pub enum LrSchedule {
        /// It stays.
        Constant = "constant",
        /// It falls evenly.
        Linear = "linear",
        /// It falls as half a cosine.
        Cosine = "cosine",
        /// It falls with the root of the step.
        InverseSqrt = "inverse_sqrt",
        /// It stays, and falls evenly at the end (warmup-stable-decay).
        Wsd = "wsd" | "warmup_stable_decay",
    }
}

choice! {
    /// How the learning rate follows the effective batch.
    pub enum LearningRateScaling {
        /// Not at all.
        None = "none",
        /// In proportion (Goyal et al. 2017).
        Linear = "linear",
        /// With its root.
        Sqrt = "sqrt",
    }
}

impl LearningRateScaling {
    /// The factor on a learning rate that is meant for another batch.
    pub fn factor(self, batch: u64, reference: u64) -> f64 {
        let ratio = batch as f64 / reference.max(1) as f64;
        match self {
            LearningRateScaling::None => 1.0,
            LearningRateScaling::Linear => ratio,
            LearningRateScaling::Sqrt => ratio.sqrt(),
        }
    }
}

choice! {
    /// What happens when a step's loss or gradients are not finite.
    pub enum NotFinite {
        /// The run ends with an error and a diagnostic; checkpoints stay as they are.
        Stop = "stop",
        /// The step is left out, ten in a row at most.
        Skip = "skip",
    }
}

choice! {
    /// Where updates in the backward pass take the gradient norm from that they are clipped by.
    pub enum InBackwardClipping {
        /// From the step before; the first step takes a second backward pass.
        PreviousNorm = "previous_norm",
        /// From a backward pass of its own: exact, for twice the time.
        SecondBackward = "second_backward",
    }
}

/// How long to train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TrainingLength {
    /// Optimizer steps.
    Steps(u64),
    /// Passes over the training data.
    Epochs(f64),
}

impl TrainingConfig {
    /// How long to train: the steps or the epochs that were given, or one epoch.
    pub fn length(&self) -> TrainingLength {
        match (self.steps, self.epochs) {
            (Some(steps), _) => TrainingLength::Steps(steps),
            (None, Some(epochs)) => TrainingLength::Epochs(epochs),
            (None, None) => TrainingLength::Epochs(1.0),
        }
    }
}
