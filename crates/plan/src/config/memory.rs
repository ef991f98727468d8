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
        /// Experts of a mixture that are on the device at a time where its weights are offloaded and its experts frozen: they come when
        /// a token is sent to them. 0: with their layers; auto: as many of a layer's as there is room for.
        expert_slots: Auto<u64> = Auto::Auto, LAYERS_OR_NONE;
        /// Whether offloaded weights, gradients and optimizer states are prefetched, and written back behind the computation. Without
        /// it there is one buffer for each of these kinds: that takes less memory, and the step waits. auto: true, and false where
        /// nothing that was tried fits with it.
        prefetch: Auto<bool> = Auto::Auto;
        /// How near to a budget a run may come: the four shares below, where they are not given.
        threshold_profile: ThresholdProfile = ThresholdProfile::Balanced;
        /// The share of a budget that automatic choices may fill.
        target_utilization: f64, "of threshold_profile: 0.92, 0.90 or 0.85", SHARE;
        /// The share of a budget in use from which a warning is given.
        warning_threshold: f64, "of threshold_profile: 0.94, 0.92 or 0.88", SHARE;
        /// The share of a budget in use that is called critical.
        critical_threshold: f64, "of threshold_profile: 0.96, 0.95 or 0.92", SHARE;
        /// The share of a budget in use at which the run saves itself.
        emergency_threshold: f64, "of threshold_profile: 0.98, 0.97 or 0.95", SHARE;
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

choice! {
    /// How near to a budget a run may come.
    pub enum ThresholdProfile {
        /// Near: for a machine that nobody else uses.
        Aggressive = "aggressive",
        /// The default.
        Balanced = "balanced",
        /// Far: for a machine whose other users come and go.
        Conservative = "conservative",
    }
}

impl ThresholdProfile {
    /// Shares of a budget: target, warning, critical, emergency. They are those of the Ava MoE++ framework, whose users know the
    /// names.
    pub fn shares(self) -> [f64; 4] {
        match self {
            ThresholdProfile::Aggressive => [0.92, 0.94, 0.96, 0.98],
            ThresholdProfile::Balanced => [0.90, 0.92, 0.95, 0.97],
            ThresholdProfile::Conservative => [0.85, 0.88, 0.92, 0.95],
        }
    }
}

impl MemoryConfig {
    /// The shares that count: target, warning, critical, emergency, each as it was set or as the profile has it.
    pub fn shares(&self) -> [f64; 4] {
        let [target, warning, critical, emergency] = self.threshold_profile().shares();
        [
            self.target_utilization.unwrap_or(target),
            self.warning_threshold.unwrap_or(warning),
            self.critical_threshold.unwrap_or(critical),
            self.emergency_threshold.unwrap_or(emergency),
        ]
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
