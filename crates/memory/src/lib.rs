//! Bytes, tiers, budgets, arenas and the ledger.
//!
//! This crate knows how much memory there is, who holds it and what for. It does not know what a
//! tensor is, nor what a model is.

mod arena;
mod bytes;
mod cores;
mod file_map;
mod heap;
mod layout;
mod ledger;
mod library;
mod loan;
mod looks;
mod nvml;
mod recording;
mod region;
mod reservation;
mod splitmix;
mod worker;

pub use arena::{ALIGNMENT, Arena, Block, OutOfMemory, Piece, Replay};
pub use bytes::{ByteSize, ParseByteSizeError};
pub use cores::{
    allowed_cores, cores_of_process, current_core, keep_process_to, keep_to, run_beside, run_on_all_cores,
    usable_cores,
};
pub use file_map::FileMap;
pub use heap::release_free_heap;
pub use layout::{Layout, Traffic};
pub use ledger::{AtPeak, Ledger, Phase, Tag, TagBytes};
pub use library::{Library, LibraryError};
pub use loan::{CopyError, FarMemory, Loan};
pub use looks::Looks;
pub use nvml::{GpuMemory, GpuProcess, Nvml, NvmlError};
pub use recording::{CountedEvents, Mark, MemoryEvent};
pub use region::{HostPool, Keeper, Region};
pub use reservation::{Reservation, ReservationError};
pub use splitmix::splitmix64;
pub use worker::{Event, Worker};

/// Where memory lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// GPU memory, or the RAM working set on a CPU machine.
    Device,
    /// RAM outside the working set (pinned for a GPU).
    Host,
    /// Files.
    Disk,
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
        })
    }
}
