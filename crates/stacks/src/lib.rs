//! What other people's stacks take: the steps of PyTorch programs (Hugging Face, PEFT, bitsandbytes, torchtune, litgpt, DeepSpeed, FSDP),
//! written with the tensors that those libraries make and keep, and run dry on a simulated caching allocator.
//!
//! A [`Request`] is what a user says. A [`Run`] is what it means, with every default decided. An [`Estimate`] is the answer.
//! Nothing here knows our own step or its kernels.

pub mod allocator;
mod answer;
mod changes;
pub mod eager;
mod estimate;
pub mod host_allocator;
mod imported;
mod lengths;
mod model;
mod optimizer;
mod program;
mod request;
mod resolve;
mod run;
mod sharded;
pub mod snapshot;

pub use answer::{Answer, AnswerError};
pub use changes::Change;
pub use estimate::{Estimate, Kind, Peak, PhasePeak, Uncertain};
pub use imported::{Imported, lay_over};
pub use program::{EstimateError, Trace, estimate, trace};
pub use request::{Lora, Request, RequestError};
pub use resolve::{Decision, Resolved};
pub use run::{
    Adapter, Attention, Autocast, Card, Checkpointing, Loss, Offload, Optimizer, Outputs, Phase,
    Quantization, Run, Sharding, Stack, TorchType, Versions,
};
