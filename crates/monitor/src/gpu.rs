//! Memory of GPUs at a moment. Where it comes from is a trait, so that judgement is tested without a GPU.

use plimsoll_memory::{Nvml, NvmlError};
use serde::Serialize;

/// A GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GpuSample {
    /// Its number, as the driver counts.
    pub index: u32,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// Its processes, where the driver says.
    pub processes: Vec<GpuProcessSample>,
}

/// A process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuProcessSample {
    /// Its id, as the driver sees it.
    pub pid: u32,
    /// Bytes that it holds; `None` where the driver does not say.
    pub bytes: Option<u64>,
}

/// Where samples of GPUs come from.
pub trait Gpus {
    /// A GPU now.
    ///
    /// # Errors
    /// [`NvmlError`] with the driver's words.
    fn sample(&mut self, index: u32) -> Result<GpuSample, NvmlError>;
}

impl Gpus for Nvml {
    fn sample(&mut self, index: u32) -> Result<GpuSample, NvmlError> {
        let memory = self.memory(index)?;
        // Some drivers, in containers for example, do not show processes.
        let processes = self.processes(index).unwrap_or_default();
        let processes = processes.into_iter().map(|p| GpuProcessSample { pid: p.pid, bytes: p.bytes });
        Ok(GpuSample {
            index,
            used_bytes: memory.used,
            total_bytes: memory.total,
            processes: processes.collect(),
        })
    }
}
