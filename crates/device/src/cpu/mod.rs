//! The CPU device: SIMD kernels on RAM, the same bits whatever the number of threads.
//!
//! `run` turns operations on tensors into calls of kernels on slices, a file for each family of them. The kernels know no
//! tensors.

mod at_once;
mod calibrate;
mod device;
pub mod isa;
mod kernels;
pub mod matmul;
pub mod pool;
pub mod quantize;
mod run;
mod slices;

pub use at_once::at_once;
pub use calibrate::{Calibration, Effort, Sample};
pub use device::{Cpu, CpuOptions};
pub use isa::Isa;
pub(crate) use kernels::update::state_maps;
pub use matmul::dequantize;
pub use pool::Pool;
