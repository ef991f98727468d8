//! `memory`: the budgets, what may leave the device, and when to warn.

use std::path::PathBuf;

use plimsoll_memory::ByteSize;

use super::section::section;
use super::value::{Auto, choice};

section! {
    /// The load lines, what may leave the device, and when to warn.
    pub struct MemoryConfig at "memory" {
        /// Memory of the device that may be used: of the GPU, or the RAM working set on a CPU machine.
        device_budget: Auto<ByteSize> = Auto::Auto;
        /// RAM that may be used outside the device's working set.
        host_budget: Auto<ByteSize> = Auto::Auto;
        /// Bytes on disk that may be used for offloaded tensors.
        disk_budget: Auto<ByteSize> = Auto::Auto;
        /// The folder of those files.
        disk_path: PathBuf, "a folder in output.dir";
        /// The share of a budget that automatic choices may fill.
        target_utilization: f64 = 0.95, SHARE;
        /// The share of a budget in use from which a warning is given.
        warning_threshold: f64 = 0.9, SHARE;
        /// The share of a budget in use that is called critical.
        critical_threshold: f64 = 0.95, SHARE;
        /// The share of a budget in use at which the run saves itself.
        emergency_threshold: f64 = 0.98, SHARE;
        /// Whether the timeline of allocations of a step is written to the output folder.
        profile: bool = false;
        /// Whether messages about memory are left out of the progress.
        silent_mode: bool = false;
    }
    sections {
        /// Where each kind of tensor lives between its uses.
        offload: OffloadConfig;
    }
}

section! {
    /// Where each kind of tensor lives between its uses.
    pub struct OffloadConfig at "memory.offload" {
        /// Optimizer states and master weights.
        optimizer: Auto<OffloadTarget> = Auto::Auto;
        /// Weights.
        parameters: Auto<OffloadTarget> = Auto::Auto;
        /// Activations saved for the backward pass.
        activations: Auto<OffloadTarget> = Auto::Auto;
        /// Gradients of weights.
        gradients: Auto<OffloadTarget> = Auto::Auto;
    }
}

choice! {
    /// Where tensors live between their uses.
    pub enum OffloadTarget {
        /// Where they are used: not offloaded.
        Device = "device",
    }
}
