//! What the allocator holds, as `torch.cuda.memory_snapshot` lists it.

use super::blocks::{Block, NONE, Slot, State};
use super::{CachingAllocator, Stream, TraceTag};

/// Whether a block is in use. The names in snapshots differ: [`BlockState::name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// Handed out.
    Allocated,
    /// Freed, but another stream uses it.
    PendingFree,
    /// Free.
    Inactive,
}

impl BlockState {
    /// PyTorch's name.
    pub const fn name(self) -> &'static str {
        match self {
            BlockState::Allocated => "active_allocated",
            BlockState::PendingFree => "active_pending_free",
            BlockState::Inactive => "inactive",
        }
    }
}

/// A block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBlock {
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes that were asked for; 0 where nobody uses it.
    pub requested: u64,
    /// Whether it is in use.
    pub state: BlockState,
    /// Doing what it was handed out; of no meaning where it is free.
    pub tag: TraceTag,
}

/// A segment, or a run of mapped pages of an expandable one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Whose it is.
    pub stream: Stream,
    /// Whether it belongs to the small pool.
    pub small: bool,
    /// Whether it is part of an expandable segment.
    pub expandable: bool,
    /// Doing what it was made.
    pub tag: TraceTag,
    /// Its blocks without gaps, by address.
    pub blocks: Vec<SegmentBlock>,
}

impl CachingAllocator {
    /// All segments, by address.
    pub fn segments(&self) -> Vec<Segment> {
        self.blocks.heads().into_iter().map(|head| self.segment(head)).collect()
    }

    fn segment(&self, head: Slot) -> Segment {
        let mut blocks = Vec::new();
        let mut slot = head;
        while slot != NONE && self.blocks[slot].state != State::Unmapped {
            let Block { address, size, requested, state, tag, next, .. } = self.blocks[slot];
            let (state, requested) = match state {
                State::Allocated => (BlockState::Allocated, requested),
                State::Pending => (BlockState::PendingFree, requested),
                State::Free | State::Unmapped => (BlockState::Inactive, 0),
            };
            blocks.push(SegmentBlock { address, size, requested, state, tag });
            slot = next;
        }
        let Block { address, stream, small, expandable, segment_tag, .. } = self.blocks[head];
        let size = blocks.iter().map(|block| block.size).sum();
        Segment { address, size, stream, small, expandable: expandable.is_some(), tag: segment_tag, blocks }
    }
}
