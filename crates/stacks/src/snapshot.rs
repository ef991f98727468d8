//! PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot`): written from a simulated allocator, read from anybody, and analysed.
//!
//! Reading executes nothing: a pickle's opcodes that would call or import anything are errors. All versions since 2.0 are read, and
//! what their C++ writer makes.

mod analysis;
mod kinds;
mod leaks;
mod pickle;
mod read;
mod records;
mod values;
mod write;

#[cfg(test)]
mod tests;

pub use analysis::{Analysis, Fragmentation, Live, OomEvent, Peak, SegmentUse, TimelinePoint};
pub use kinds::{GuessedKind, KINDS};
pub use leaks::{Leak, Pattern};
pub use pickle::{PickleError, Problem};
pub use read::{Limits, read_snapshot};
pub use records::{Entry, Frame, ReadBlock, ReadSegment, ReadState, Snapshot, StackId};
pub use write::{Format, StackFrame, TorchVersion, write_snapshot};
