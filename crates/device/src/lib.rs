//! Dtypes, tensors, the operations of a step, and the devices that carry them out.
//!
//! An operation is a value ([`Op`]): what it reads, what it writes, what it costs and whether its shapes fit
//! are said once, for every device. A [`Device`] carries it out: [`Dry`] counts it, [`Cpu`] computes it.
//! This crate knows no model and no training.

mod attention_shape;
mod check;
mod cost;
pub mod cpu;
mod device;
mod dry;
mod dtype;
mod op;
mod repeat;
mod tensor;
mod update;

pub use attention_shape::{AttentionShape, BlockSparse};
pub use cost::{Cost, Tally};
pub use cpu::{Cpu, CpuOptions};
pub use device::{Device, DeviceError, Lent};
pub use dry::Dry;
pub use dtype::DType;
pub use op::{Compute, Glu, IGNORED_TARGET, Op, PIECE_ROWS, Rounding};
pub use repeat::{Counted, Iterations};
pub use tensor::{Shape, Tensor};
pub use update::{
    Adafactor, Adam, Apollo, BLOCK_8BIT, Channels, Codes, Lion, Rule, SecondMoment, Sgd, Update,
};
