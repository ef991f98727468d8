//! The disk engine: whole regions of files are read ahead of use and written behind it, past the page cache, by threads
//! in the background.
//!
//! Memory is handed over and back as [`Region`](plimsoll_memory::Region)s, so that a worker fills a buffer of the
//! caller's own, an arena's or a pool's, and nothing is copied. This crate knows no tensors: what the bytes mean is left
//! to those who ask for them.

#![forbid(unsafe_code)]

mod buffers;
mod engine;
mod error;
mod file;
mod made;
mod measure;
mod moves;
mod request;
mod spill;
mod staging;
mod statistics;
mod stream;
mod system;
mod tiers;

pub use buffers::BufferPool;
pub use engine::{DiskEngine, EngineSettings};
pub use error::DiskError;
pub use file::{DiskFile, IoMode};
pub use made::MadeFolders;
pub use measure::{DiskSpeed, measure};
pub use moves::{Arrived, BufferMemory, Direction, Moving, Stretch};
pub use request::{Finished, Ticket};
pub use spill::{SpillFile, SpillSettings, default_folder};
pub use statistics::{IoMeter, IoStatistics};
pub use system::is_in_memory;
pub use tiers::{Home, LowerTiers};

use std::ops::Range;

/// Direct I/O is in whole pages: of the file, of the memory, and in length.
pub const ALIGNMENT: u64 = 4096;

/// The whole pages of a file that hold `bytes`. A buffer that they are read into has to have as many from its first
/// aligned byte on; the bytes asked for then lie in it as they lie in the pages.
pub fn pages(bytes: &Range<u64>) -> Range<u64> {
    let start = bytes.start / ALIGNMENT * ALIGNMENT;
    start..bytes.end.max(start).saturating_add(ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
}
