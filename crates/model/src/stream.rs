//! Weights that stay on disk: which of a model's can be brought from its files as they are, and how they lie in a buffer.
//!
//! A matrix that the files hold just as the step computes with it is read from there. One that has to be converted,
//! quantised, transposed or reordered is written converted into a spill file first, and read from that. Vectors and
//! learned positions are small and stay in memory. Of a table that is only looked up, rows are read and no more.

mod plan;
mod read;
mod spill;

use std::ops::Range;

use plimsoll_device::DType;
use plimsoll_disk::DiskError;
use plimsoll_memory::Region;

use crate::parameters::{BlockId, Parameter, Role};

pub use plan::StreamPlan;
pub use read::WeightStream;

/// A weight in a buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct StagedTensor {
    /// The weight.
    pub parameter: Parameter,
    /// Its type.
    pub dtype: DType,
    /// Where it begins, in bytes from the buffer's first whole page.
    pub offset: u64,
}

/// The weights of a block that are brought together.
#[derive(Clone, Debug, PartialEq)]
pub struct StagedBlock {
    /// The block.
    pub block: BlockId,
    /// Which piece of it: a table of the vocabulary comes in several, others whole, as piece 0.
    pub piece: u32,
    /// The first of the table's rows that are in the piece.
    pub first_row: u64,
    /// Bytes of the buffer, in whole pages.
    pub bytes: u64,
    /// What is in it.
    pub tensors: Vec<StagedTensor>,
}

/// A block and the number of the piece.
pub type StagedKey = (BlockId, u32);

impl StagedBlock {
    /// What it is begun and finished by.
    pub fn key(&self) -> StagedKey {
        (self.block, self.piece)
    }
}

/// Which weights are brought when they are needed, and through how many buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct Staging {
    /// Blocks that are brought whole, in the order of the forward pass.
    pub blocks: Vec<StagedBlock>,
    /// Tables of which the rows that are looked up are brought, and their types.
    pub tables: Vec<(Parameter, DType)>,
    /// Buffers, of the largest block's size.
    pub buffers: usize,
}

impl Staging {
    /// Whether a weight is not in memory all the time.
    pub fn holds(&self, block: BlockId, role: Role) -> bool {
        let staged = |staged: &StagedBlock| {
            staged.block == block && staged.tensors.iter().any(|tensor| tensor.parameter.role == role)
        };
        self.blocks.iter().any(staged)
            || self.tables.iter().any(|(table, _)| table.block == block && table.role == role)
    }

    /// Bytes that a forward pass brings, with what lies between the weights.
    pub fn bytes_per_pass(&self) -> u64 {
        self.blocks.iter().map(|block| block.bytes).sum()
    }

    /// Bytes of one buffer, in whole pages.
    pub fn buffer_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.bytes).max().unwrap_or(0)
    }
}

/// Brings staged weights to where they are needed.
pub trait WeightReader {
    /// Begins to bring a block into memory that has room for it from its first whole page on.
    fn begin(&mut self, key: StagedKey, memory: Region);

    /// Waits until the block is there, and gives the memory back; `None` where it was never begun.
    fn finish(&mut self, key: StagedKey) -> Option<(Region, Result<(), DiskError>)>;

    /// Writes rows of a table into `out`, one after the other.
    fn read_rows(&mut self, table: Role, rows: &[u32], out: &mut [u8]) -> Result<(), DiskError>;
}

/// Bytes of a file, or of the spill file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    /// One of the model's files; the spill file where `None`.
    file: Option<usize>,
    bytes: Range<u64>,
}
