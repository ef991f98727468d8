//! The answer: peaks by phase, what is live at the highest, and what is not known.

use std::collections::BTreeMap;

use serde::Serialize;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Parameters and buffers of the model, quantised ones with their scales.
    Weights,
    /// Adapters and what else is trained beside frozen weights.
    Adapters,
    /// Copies of weights in another type: the cast cache, dequantised ones, gathered ones.
    WeightCopies,
    /// Gradients of parameters.
    Gradients,
    /// States of the optimizer, master weights.
    OptimizerStates,
    /// What autograd keeps for the backward pass, and layer inputs kept by checkpointing.
    SavedActivations,
    /// Results on their way, gradients of activations, temporaries of an operation.
    Temporary,
    /// Logits and what the loss makes of them.
    Logits,
    /// Keys and values of earlier tokens.
    KvCache,
    /// Flat buffers, buckets and gathered shards of DeepSpeed or FSDP.
    Communication,
    /// cuBLAS and the like, inside the caching allocator.
    Workspace,
}

/// A peak of one phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PhasePeak {
    /// `load`, `resume`, `forward`, `backward`, `optimizer`, `evaluate`, `save`, `merge`, `prefill`, `decode`.
    pub phase: String,
    /// `max_memory_allocated`
    pub allocated_bytes: u64,
    /// `max_memory_reserved`
    pub reserved_bytes: u64,
    /// The host's, in the processes of this machine.
    pub host_bytes: u64,
}

/// The moment at which most was allocated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Peak {
    /// As in [`PhasePeak`].
    pub phase: String,
    /// Where: `layers.3.mlp.down_proj backward`, `loss`.
    pub moment: String,
    /// What was live, by kind; the sum is the peak.
    pub at_peak: BTreeMap<Kind, u64>,
}

/// What is not known, and by how much it may change the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Uncertain {
    /// In words, with the source.
    pub what: String,
    /// Bytes, up or down.
    pub bytes: u64,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// `max_memory_allocated` of the device with the most.
    pub allocated_peak_bytes: u64,
    /// `max_memory_reserved`
    pub reserved_peak_bytes: u64,
    /// What `nvidia-smi` shows: reserved, the context, libraries, memory outside the caching allocator.
    pub device_used_bytes: u64,
    /// The highest moment.
    pub peak: Peak,
    /// Every phase.
    pub phases: Vec<PhasePeak>,
    /// What is not known.
    pub uncertain: Vec<Uncertain>,
}
