//! `memory`: the budgets, what may leave the device, and when to warn.

use std::path::PathBuf;

use plimsoll_memory::{ByteSize, Tier};

use super::RawConfig;
use super::section::section;
use super::value::{Auto, choice};

/// The folder in `output.dir` where nothing else is said.
const SPILL_FOLDER: &str = "spill";

section! {
    /// The load lines, what may leave the device, and when to warn.
    pub struct MemoryConfig at "memory" {
        /// Memory of the device that may be used: of the GPU, or the RAM working set on a CPU machine.
        device_budget: Auto<ByteSize> = Auto::Auto;
        /// RAM that may be used outside the device's working set; on a CPU machine auto takes it from device_budget.
        host_budget: Auto<ByteSize> = Auto::Auto;
        /// Bytes on disk that may be used for offloaded tensors; auto: what is free.
        disk_budget: Auto<ByteSize> = Auto::Auto;
        /// The folder of their file, which has no name and is gone with the process.
        disk_path: PathBuf, "spill in output.dir";
        /// The share of a budget that automatic choices may fill.
        target_utilization: f64 = 0.95, SHARE;
        /// The share of a budget in use from which a warning is given.
        warning_threshold: f64 = 0.9, SHARE;
        /// The share of a budget in use that is called critical.
        critical_threshold: f64 = 0.95, SHARE;
        /// The share of a budget in use at which the run saves itself.
        emergency_threshold: f64 = 0.98, SHARE;
        /// Whether a run that memory is taken away from goes on with a plan that needs less, and back when there is room.
        ladder: bool = true;
        /// Whether every allocation of a step is written to the output folder, as memory_timeline.json for Perfetto and
        /// memory_timeline.svg; iterations that are alike are in it once.
        profile: bool = false;
        /// Whether messages about memory are left out of the progress.
        silent_mode: bool = false;
    }
    sections {
        /// Where each kind of tensor lives between its uses.
        offload: OffloadConfig;
        /// How many layers, from the last one, keep on the device what is offloaded of the others.
        kept_layers: KeptLayersConfig;
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

section! {
    /// How many layers, from the last one, keep on the device what is offloaded of the others.
    pub struct KeptLayersConfig at "memory.kept_layers" {
        /// Layers whose optimizer states and master weights stay; auto: as many as there is room for where offload.optimizer
        /// is auto too, else none.
        optimizer: Auto<u64> = Auto::Auto, LAYERS_OR_NONE;
        /// Layers whose weights stay.
        parameters: Auto<u64> = Auto::Auto, LAYERS_OR_NONE;
        /// Layers whose activations stay.
        activations: Auto<u64> = Auto::Auto, LAYERS_OR_NONE;
        /// Layers whose gradients stay.
        gradients: Auto<u64> = Auto::Auto, LAYERS_OR_NONE;
    }
}

choice! {
    /// Where tensors live between their uses.
    pub enum OffloadTarget {
        /// Where they are used: not offloaded.
        Device = "device",
        /// In RAM outside the device's working set.
        Host = "host" | "cpu",
        /// In a private file.
        Disk = "disk" | "nvme",
    }
}

impl From<OffloadTarget> for Tier {
    fn from(target: OffloadTarget) -> Tier {
        match target {
            OffloadTarget::Device => Tier::Device,
            OffloadTarget::Host => Tier::Host,
            OffloadTarget::Disk => Tier::Disk,
        }
    }
}

impl From<Tier> for OffloadTarget {
    fn from(tier: Tier) -> OffloadTarget {
        match tier {
            Tier::Device => OffloadTarget::Device,
            Tier::Host => OffloadTarget::Host,
            Tier::Disk => OffloadTarget::Disk,
        }
    }
}

impl RawConfig {
    /// The folder of the spill file.
    pub fn disk_path(&self) -> PathBuf {
        self.memory.disk_path.clone().unwrap_or_else(|| self.output.dir().join(SPILL_FOLDER))
    }
}
