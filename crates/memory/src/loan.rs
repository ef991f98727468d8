//! A buffer of a device in other hands: bytes that anybody can address, or memory that only the device reaches.

use std::any::Any;
use std::fmt;

use crate::Region;

/// The memory of a buffer that a device has lent.
#[derive(Debug)]
pub enum Loan {
    /// Host memory: the device's arena is there.
    Region(Region),
    /// Memory of a device that has its own.
    Far(Box<dyn FarMemory>),
}

/// Memory that only a device reaches: bytes are copied in and out. Both wait until the copy is done; whoever calls them does
/// so behind the computation.
pub trait FarMemory: Any + Send + fmt::Debug {
    /// Where it lies in the device's arena, which begins at a multiple of every alignment.
    fn start(&self) -> u64;

    /// Copies bytes to `offset` of it.
    ///
    /// # Errors
    /// The device failed, or the bytes do not lie within.
    fn copy_in(&mut self, offset: u64, from: &[u8]) -> Result<(), CopyError>;

    /// Copies the bytes from `offset` on out of it.
    ///
    /// # Errors
    /// As of [`copy_in`](Self::copy_in).
    fn copy_out(&mut self, offset: u64, to: &mut [u8]) -> Result<(), CopyError>;
}

/// A copy to or from a device's memory that failed.
#[derive(Debug, thiserror::Error)]
#[error("{bytes} bytes could not be copied from or to offset {offset} of a buffer on the device: {reason}")]
pub struct CopyError {
    /// Where in the buffer.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
    /// What the device says.
    pub reason: String,
}
