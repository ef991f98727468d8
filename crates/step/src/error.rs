//! What can go wrong in a step.

use plimsoll_device::{DType, DeviceError};
use plimsoll_disk::DiskError;
use plimsoll_model::convert::ConversionError;
use plimsoll_model::{AdapterError, BlockId, Role, SpecError};
use plimsoll_parallel::CommunicationError;

/// A step that could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Memory ran out, or tensors did not fit.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Weights could not be brought from their files.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// Values could not be had in another type.
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    /// Ranks could not agree.
    #[error(transparent)]
    Communication(#[from] CommunicationError),
    /// The model's shape is impossible.
    #[error("the model cannot be built: {0}")]
    Spec(#[from] SpecError),
    /// Adapters that the model cannot have.
    #[error("training.lora: {0}")]
    Adapter(#[from] Box<AdapterError>),
    /// A block was asked for a weight that it does not have: a programming error.
    #[error("block {block:?} has no {role:?}")]
    MissingWeight {
        /// The block.
        block: BlockId,
        /// The weight.
        role: Role,
    },
    /// Something that the step program never does: a defect of Plimsoll itself.
    #[error("a defect of Plimsoll, please report it: {what}")]
    Invariant {
        /// What happened.
        what: &'static str,
    },
    /// A parameter group that is empty.
    #[error(
        "training.parameter_groups: no parameter of the model has a name like '{pattern}'; `plimsoll inspect` lists the names, and * stands for any text"
    )]
    EmptyGroup {
        /// The group's pattern.
        pattern: String,
    },
    /// Ranks cannot divide the work of this model so.
    #[error("{key} does not go with this model or its adapters: {what}; {remedy}")]
    Mesh {
        /// The key of the configuration.
        key: &'static str,
        /// What stands in the way.
        what: &'static str,
        /// What would work.
        remedy: &'static str,
    },
    /// A key about experts, of a model without any.
    #[error("{key} is about experts, and the model has none; leave it out")]
    NoExperts {
        /// The key of the configuration.
        key: &'static str,
    },
    /// More slots than the model has experts.
    #[error(
        "memory.expert_slots is {slots}, and the model has {experts} experts in all its layers; set it to at most that"
    )]
    TooManyExpertSlots {
        /// What the configuration says.
        slots: u64,
        /// Experts of all layers.
        experts: u64,
    },
    /// Slots for experts that are trained: those stay where they are.
    #[error(
        "memory.expert_slots is of experts that are frozen; leave it out, or set training.method to lora or qlora"
    )]
    TrainedExperts,
    /// Slots for experts that cannot come by themselves.
    #[error(
        "memory.expert_slots is of experts that come by themselves, and {with} they come with their layers; leave one of the two out"
    )]
    ExpertsOfLayers {
        /// With what.
        with: &'static str,
    },
    /// The speed of a bias that no router of the model has.
    #[error(
        "training.router_bias_update_speed is about routers that have a bias for the choice of experts, and this model's have none; leave it out"
    )]
    NoRouterBias,
    /// A sequence is longer than the positions that a model has learned.
    #[error(
        "data.sequence_length is {tokens}, and the model has learned {positions} positions and none beyond; set it to {positions} or less"
    )]
    TooFewPositions {
        /// Tokens of a sequence.
        tokens: u64,
        /// Positions of the model.
        positions: u64,
    },
    /// Ranks that share products cannot have as much of each.
    #[error(
        "{what}, of which the model has {size}, are not divisible by {ranks} ranks; set parallel.tensor_parallel to a divisor"
    )]
    UnevenProducts {
        /// Ranks that share every product.
        ranks: u32,
        /// What is divided.
        what: &'static str,
        /// How many there are.
        size: u64,
    },
    /// Ranks with different experts do not come out even.
    #[error(
        "a layer's {size} experts are not divisible by {ranks} ranks; set parallel.expert_parallel to a divisor"
    )]
    UnevenExperts {
        /// Ranks with different experts.
        ranks: u32,
        /// Experts of a layer.
        size: u64,
    },
    /// A pipeline has more stages than there are layers.
    #[error(
        "{stages} stages are more than the model has layers, which are {layers}; set parallel.pipeline_parallel to {layers} or less"
    )]
    TooManyStages {
        /// Stages of the pipeline.
        stages: u32,
        /// Layers of the model.
        layers: u32,
    },
    /// There are too few layers for every run of interleaved stages.
    #[error(
        "{stages} stages of {rounds} runs of layers need {} layers, and the model has {layers}; {}",
        u64::from(*stages) * u64::from(*rounds),
        fewer_rounds(layers / stages)
    )]
    TooManyRounds {
        /// Stages of the pipeline.
        stages: u32,
        /// Runs of layers of each.
        rounds: u32,
        /// Layers of the model.
        layers: u32,
    },
    /// Micro-batches go through interleaved stages in groups.
    #[error(
        "{micro_batches} micro-batches of a step do not go through {stages} interleaved stages in groups of {stages}; set \
         training.gradient_accumulation_steps to a multiple of {stages}"
    )]
    UnevenGroups {
        /// Micro-batches of a rank's step.
        micro_batches: u64,
        /// Stages of the pipeline.
        stages: u32,
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
    /// A document that starts after its own token: a programming error.
    #[error("token {place} of a sequence is said to be of a document that starts at {start}, after it")]
    DocumentStart {
        /// The token's place in its sequence.
        place: u32,
        /// Where its document is said to start.
        start: u32,
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
        "the step gave loss {loss} and gradient norm {grad_norm}{}; the weights were not changed. A lower learning rate or gradient clipping may help",
        first_seen(*.block)
    )]
    NotFinite {
        /// Mean loss of the step.
        loss: f64,
        /// Global gradient norm.
        grad_norm: f64,
        /// The first block of the backward pass whose gradients were not finite, where the loss was.
        block: Option<BlockId>,
    },
    /// A gradient is not a number in a step that updates blocks within the backward pass.
    #[error(
        "the gradients of {block} are not finite, and the blocks after it are updated already: go on from the last checkpoint, with a lower learning rate or updates after the backward pass"
    )]
    NotFiniteWithin {
        /// The block.
        block: BlockId,
    },
    /// A type that keys and values are not cached in.
    #[error("keys and values cannot be cached as {dtype}; f32, bf16, f16, q8_0, q4_0 and q4_1 can hold them")]
    CacheType {
        /// The type asked for.
        dtype: DType,
    },
    /// The key-value cache is full.
    #[error("{wanted} tokens do not fit the context of {capacity}")]
    ContextFull {
        /// Tokens in all.
        wanted: u64,
        /// Size of the cache.
        capacity: u64,
    },
    /// All pages of the cache are in use.
    #[error("{wanted} tokens need {missing} more pages of the cache than are free")]
    PagesInUse {
        /// Tokens of a sequence in all.
        wanted: u64,
        /// Pages.
        missing: u64,
    },
    /// A pass names a sequence that the decoder does not have, or names one twice.
    #[error("sequence {sequence} is not one of {sequences}, or comes twice in a pass")]
    NoSuchSequence {
        /// Its number, from 0 on.
        sequence: u32,
        /// Sequences that there are.
        sequences: u64,
    },
}

fn first_seen(block: Option<BlockId>) -> String {
    block.map(|block| format!(", first in the gradients of {block}")).unwrap_or_default()
}

/// What would work where layers are too few for so many runs of each stage.
fn fewer_rounds(most: u32) -> String {
    match most {
        0 | 1 => "set parallel.pipeline_schedule to 1f1b".to_owned(),
        most => format!("set parallel.virtual_stages to {most} or less"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_block_that_was_first() {
        let not_finite = |block| StepError::NotFinite { loss: 1.5, grad_norm: f64::NAN, block }.to_string();
        let expected = |place: &str| {
            format!("the step gave loss 1.5 and gradient norm NaN{place}; the weights were not changed. ")
        };
        for (block, place) in [
            (None, ""),
            (Some(BlockId::Embedding), ", first in the gradients of the embedding"),
            (Some(BlockId::Layer(12)), ", first in the gradients of layer 12"),
            (Some(BlockId::Head), ", first in the gradients of the head"),
        ] {
            let message = not_finite(block);
            assert!(message.starts_with(&expected(place)), "{message}");
        }
        let within = StepError::NotFiniteWithin { block: BlockId::Layer(3) }.to_string();
        assert!(within.starts_with("the gradients of layer 3 are not finite, "), "{within}");
    }
}
