//! From a request to an answer: the run's estimate, with what the device shows beside the caching allocator.

use plimsoll_plan::Target;

use crate::estimate::{Estimate, Uncertain};
use crate::program::{EstimateError, Outside, estimate_beside};
use crate::request::{Request, RequestError};
use crate::resolve::Resolved;
use crate::run::Versions;

/// Kernels that a process had on its device before CUDA 11.7 loaded them one by one: "> 1000 MB" with PyTorch's maintainers (pytorch
/// issues 107667 and 109888).
const ALL_KERNELS: u64 = 1000 << 20;

/// The first PyTorch whose kernels are loaded one by one.
const LAZY_KERNELS: (u32, u32) = (1, 13);

/// Communicators: 1.06 GiB were seen before the first exchange of eight cards, 4.34 GiB behind an all-to-all (nccl issue 1685).
const COMMUNICATOR_SPREAD: u64 = 1 << 30;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The request says something that cannot be.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Nothing is known of such a run.
    #[error("{0}")]
    Estimate(#[from] EstimateError),
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What was asked, with every default decided.
    pub resolved: Resolved,
    /// What comes of it.
    pub estimate: Estimate,
}

impl Request {
    /// Runs it dry.
    ///
    /// # Errors
    /// The request cannot be resolved, or nothing is known of such a run.
    pub fn answer(&self) -> Result<Answer, AnswerError> {
        let resolved = self.resolve()?;
        let devices = resolved.run.devices;
        let outside_of = |devices| outside_bytes(&resolved.target, devices, &resolved.run.versions);
        let outside = Outside { bytes: outside_of(devices), least: outside_of(1) };
        let mut estimate = estimate_beside(&resolved.run, outside)?;
        if devices > 1 {
            estimate.uncertain.push(Uncertain {
                what: "buffers of NCCL, which grow with channels and communicators".to_owned(),
                bytes: COMMUNICATOR_SPREAD,
            });
        }
        if self.compile {
            estimate.uncertain.push(Uncertain {
                what: "torch.compile: the step is taken as eager; the compiled one keeps less".to_owned(),
                bytes: estimate.allocated_peak_bytes / 4,
            });
        }
        Ok(Answer { resolved, estimate })
    }
}

impl Answer {
    /// Whether the device has room for what `nvidia-smi` will show.
    pub fn fits(&self) -> bool {
        self.estimate.device_used_bytes <= self.resolved.target.device.memory.0
    }

    /// Whether there is room once the caching allocator has given back what it only keeps: slow, and sometimes out of memory all the same.
    pub fn fits_without_cache(&self) -> bool {
        let Estimate { allocated_peak_bytes, reserved_peak_bytes, device_used_bytes, .. } = self.estimate;
        let cached = reserved_peak_bytes.saturating_sub(allocated_peak_bytes);
        device_used_bytes.saturating_sub(cached) <= self.resolved.target.device.memory.0
    }

    /// What another machine's device would show of the same run.
    pub fn used_bytes_on(&self, target: &Target) -> u64 {
        let outside = outside_bytes(target, self.resolved.run.devices, &self.resolved.run.versions);
        self.estimate.reserved_peak_bytes.saturating_add(outside)
    }
}

/// What a process has on a device outside the caching allocator.
fn outside_bytes(target: &Target, devices: u64, versions: &Versions) -> u64 {
    let kernels = if versions.torch < LAZY_KERNELS { ALL_KERNELS } else { 0 };
    target.device.overhead_bytes(devices).saturating_add(kernels)
}
