//! What a step is asked to do: precision, batch, policies and numbers. All of it decided; nothing is `auto` here.

use plimsoll_device::{Compute, DType};

use crate::{Checkpointing, OptimizerSettings};

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
}

impl Precision {
    /// Everything in f32.
    pub const F32: Precision = Precision {
        weights: DType::F32,
        activations: DType::F32,
        gradients: DType::F32,
        master_weights: false,
    };

    /// The precision of matrix products.
    pub fn compute(&self) -> Compute {
        if self.activations == DType::F32 { Compute::F32 } else { Compute::Bf16 }
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
    /// Logits of at most this many tokens exist at once.
    pub loss_chunk_tokens: u64,
    /// The optimizer.
    pub optimizer: OptimizerSettings,
    /// Clipping.
    pub clipping: GradientClipping,
    /// Seed of stochastic rounding.
    pub seed: u64,
}

/// One forward and backward pass's worth of tokens, sequence after sequence.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    /// Token ids, `batch_size * sequence_length`.
    pub tokens: &'a [u32],
    /// What each position predicts; [`IGNORED_TARGET`](plimsoll_device::IGNORED_TARGET) where nothing.
    pub targets: &'a [u32],
}

impl MicroBatch<'_> {
    /// Positions that count in the loss.
    pub fn target_count(&self) -> u64 {
        self.targets.iter().filter(|t| **t != plimsoll_device::IGNORED_TARGET).count() as u64
    }
}
