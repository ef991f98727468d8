//! What can go wrong in a step.

use plimsoll_device::DeviceError;
use plimsoll_model::{BlockId, Role, SpecError};
use plimsoll_parallel::CommunicationError;

/// A step that could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Memory ran out, or tensors did not fit.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Ranks could not agree.
    #[error(transparent)]
    Communication(#[from] CommunicationError),
    /// The model's shape is impossible.
    #[error("the model cannot be built: {0}")]
    Spec(#[from] SpecError),
    /// A block was asked for a weight that it does not have: a programming error.
    #[error("block {block:?} has no {role:?}")]
    MissingWeight {
        /// The block.
        block: BlockId,
        /// The weight.
        role: Role,
    },
    /// A parameter group that is empty.
    #[error(
        "training.parameter_groups: no parameter of the model has a name like '{pattern}'; `plimsoll inspect` lists the names, and * stands for any text"
    )]
    EmptyGroup {
        /// The group's pattern.
        pattern: String,
    },
    /// A batch of another shape than the step was made for.
    #[error("a micro-batch of {got} tokens was given to a step made for {batch_size} x {sequence_length}")]
    BatchShape {
        /// Tokens given.
        got: usize,
        /// Sequences expected.
        batch_size: u64,
        /// Their length.
        sequence_length: u64,
    },
    /// A token that the model does not know.
    #[error(
        "token {token} is outside the vocabulary of {vocab_size}; the tokenizer belongs to another model"
    )]
    TokenOutsideVocabulary {
        /// The token.
        token: u32,
        /// Rows of the embedding.
        vocab_size: u64,
    },
    /// The loss or the gradient is not a number; weights are as they were before the step.
    #[error(
        "the step gave loss {loss} and gradient norm {grad_norm}; the weights were not changed. A lower learning rate or gradient clipping may help"
    )]
    NotFinite {
        /// Mean loss of the step.
        loss: f64,
        /// Global gradient norm.
        grad_norm: f64,
    },
    /// The key-value cache is full.
    #[error("{wanted} tokens do not fit the context of {capacity}")]
    ContextFull {
        /// Tokens in all.
        wanted: u64,
        /// Size of the cache.
        capacity: u64,
    },
}
