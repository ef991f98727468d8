//! The step program: one transformer step with explicit forward and backward functions, block by block.
//!
//! It is written once, for any [`Device`](plimsoll_device::Device): run on the dry device it is the plan,
//! on the CPU it is the training. Read it from [`Trainer::step`] down. It knows no files and no command line.

#![forbid(unsafe_code)]

mod adapter;
mod block;
mod context;
mod decode;
mod embedding;
mod error;
mod evaluate;
mod gradients;
mod head;
mod inputs;
mod linear;
mod loss_scale;
mod matrices;
mod norm;
mod optimizer;
mod policy;
mod products;
mod rope;
mod router_losses;
mod routes;
mod settings;
mod stage;
mod store;
mod tier;
mod trainer;

// What the tests in `tests/` share names this crate as they do.
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
#[cfg(test)]
extern crate self as plimsoll_step;

pub use plimsoll_device::BlockSparse;

pub use decode::{DecodeSettings, Decoder};
pub use error::StepError;
pub use evaluate::{EvaluateSettings, Evaluator};
pub use loss_scale::LossScale;
pub use optimizer::{
    AdafactorSettings, AdamSettings, ApolloChannels, EightBit, LionSettings, LowRankSettings, OptimizerKind,
    OptimizerSettings, OptimizerState, ParameterGroup, SgdSettings, StateKind,
};
pub use policy::{Checkpointing, Compression, Group, Groups, LayerPolicy, Save, SavePolicy};
pub use settings::{
    Adapters, AttentionKind, GradientClipping, KeptLayers, Linears, LossScaling, MOST_CHUNKS, MicroBatch,
    NormSource, Offload, Precision, Ranks, RouterTraining, Sharding, StepSettings, TrainingMethod,
    UpdateTiming, ZeroStage,
};
pub use stage::{MOST_AT_ONCE, MOST_INTERLEAVED, PipelineSchedule, Stage};
pub use store::{ExpertCounts, ExpertTraffic, Residency, WeightOffload, WeightStorage};
pub use trainer::{NamedTensor, Numbers, StepOutcome, StepProgress, Trainer};
