//! Dtypes, tensors, the operations of a step, and the devices that carry them out.
//!
//! An operation is a value ([`Op`]) of a family ([`Norm`], [`Product`] and so on): what it reads, what it writes, what it
//! costs and whether its shapes fit are said once, for every device. A [`Device`] carries it out: [`Dry`] counts it,
//! [`Cpu`] computes it. This crate knows no model and no training.

mod attention_shape;
mod check;
mod clock;
mod cost;
pub mod cpu;
pub mod cuda;
mod device;
mod dry;
mod dtype;
mod exact;
mod links;
mod op;
mod repeat;
mod tensor;
mod timed;
mod trace;

pub use attention_shape::{AttentionShape, BlockSparse};
pub use clock::{Clock, Due, Lines, Pace, Times, Transferred};
pub use cost::{Arithmetic, Cost, Multiplied, THIN, Tally};
pub use cpu::{Cpu, CpuOptions};
pub use cuda::{Cuda, CudaError};
pub use device::{Device, DeviceError, DeviceExt, DeviceTraits, Lent, TRANSFER_BYTES};
pub use dry::Dry;
pub use dtype::DType;
pub use exact::ExactSum;
pub use links::{Collective, Communicated};
pub use op::{
    Activation, Adafactor, Adam, Apollo, Attention, BLOCK_8BIT, Capacity, Channels, Codes, Compute,
    Elementwise, Embedding, FEW_ROWS, Glu, GroupedProduct, HeadColumns, Heads, IGNORED_TARGET, KeyPiece,
    Lion, LoadRatio, Loss, MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, MAX_HEAD_DIM, Magnitude, NOWHERE, Norm, Op,
    PIECE_ROWS, PagedRun, PiecedAttention, Position, Product, Quantization, Reduction, RotatedHeads,
    Rounding, Router, RouterGroups, Routing, Rule, Running, SecondMoment, Sgd, Sink, Subspace, Update,
    WeightedBias, Workspace, ZeroComputation, ZeroExperts, page_positions,
};
pub use repeat::{Iterations, KnownRounds};
pub use tensor::{Shape, Tensor};
pub use timed::{Spent, Timed, TimedOperation, Timings};
pub use trace::{Repeat, Scope, Trace};
