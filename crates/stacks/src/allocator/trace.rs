//! What happened, in order: the entries of `device_traces` in PyTorch's snapshots.

use std::collections::VecDeque;

use super::Stream;

/// What happened. The names are those of PyTorch's snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A block was handed out. The size is what was asked for.
    Alloc,
    /// The program freed a block.
    FreeRequested,
    /// The block can be handed out again.
    FreeCompleted,
    /// A segment was made with `cudaMalloc`.
    SegmentAlloc,
    /// A segment was given back with `cudaFree`.
    SegmentFree,
    /// Pages of an expandable segment were mapped.
    SegmentMap,
    /// Pages of an expandable segment were given back.
    SegmentUnmap,
    /// A request failed. The address is the free memory of the device.
    OutOfMemory,
}

impl Action {
    /// PyTorch's name.
    pub const fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::OutOfMemory => "oom",
        }
    }
}

/// What the caller was doing: a number of the caller's own, such as an index into its stacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TraceTag(pub u32);

/// An entry of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEntry {
    /// What happened.
    pub action: Action,
    /// Where, in the simulated address space.
    pub address: u64,
    /// Bytes: of blocks, those asked for; of segments, all.
    pub size: u64,
    /// On which stream.
    pub stream: Stream,
    /// Doing what.
    pub tag: TraceTag,
}

/// The latest entries.
#[derive(Debug)]
pub(super) struct Trace {
    entries: VecDeque<TraceEntry>,
    most: usize,
}

impl Trace {
    pub fn new(most: usize) -> Self {
        Trace { entries: VecDeque::new(), most }
    }

    pub fn push(&mut self, entry: TraceEntry) {
        if self.entries.len() == self.most {
            self.entries.pop_front();
        }
        if self.most > 0 {
            self.entries.push_back(entry);
        }
    }

    pub fn entries(&self) -> &VecDeque<TraceEntry> {
        &self.entries
    }
}
