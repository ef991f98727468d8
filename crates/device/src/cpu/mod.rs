//! The CPU device: SIMD kernels on RAM, the same bits whatever the number of threads.
//!
//! `mod.rs` turns operations on tensors into calls of kernels on slices. The kernels know no tensors.

mod dispatch;
pub mod isa;
mod kernels;
pub mod matmul;
mod optimizer;
pub mod pool;
pub mod quantize;
mod rates;
mod slices;

pub use dispatch::{Cpu, CpuOptions};
pub use isa::Isa;
pub use matmul::dequantize;
pub use pool::Pool;
pub use rates::MachineRates;
