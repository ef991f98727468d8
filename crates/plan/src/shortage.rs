//! Which resource a step needs more of than there is, by how much, and whose limit that is.

use serde::Serialize;

/// Something that a run takes and that there may be too little of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Memory under the load line.
    Memory,
    /// The device's arena, where `training.gradient_checkpointing: {auto: SIZE}` says what it may be.
    Arena,
    /// Memory of the host tier, under a budget of its own.
    Host,
    /// Memory of device and host tier together, under a limit that the system enforces.
    Process,
    /// Address space.
    AddressSpace,
    /// Disk for offloaded tensors.
    Disk,
}

impl Resource {
    /// What it is called.
    pub fn words(self) -> &'static str {
        match self {
            Resource::Memory => "memory",
            Resource::Arena => "arena",
            Resource::Host => "host memory",
            Resource::Process => "memory that the system allows",
            Resource::AddressSpace => "address space",
            Resource::Disk => "disk",
        }
    }
}

/// Too little of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shortage {
    /// Of what.
    pub resource: Resource,
    /// Bytes that the step needs, beside the overhead.
    pub needed_bytes: u64,
    /// Bytes that it may have, beside the overhead.
    pub allowed_bytes: u64,
}

impl Shortage {
    /// Bytes that are missing.
    pub fn bytes(&self) -> u64 {
        self.needed_bytes.saturating_sub(self.allowed_bytes)
    }
}
