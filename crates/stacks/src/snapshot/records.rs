//! What a snapshot says, in few bytes: frames and stacks once each, 40 bytes for an entry of the trace.

use std::collections::HashMap;

use crate::allocator::Action;

/// A stack: an index into [`Snapshot::stack`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(pub u32);

impl StackId {
    /// No frames were recorded.
    pub const NONE: StackId = StackId(0);
}

/// A line of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    pub(super) name: u32,
    pub(super) filename: u32,
    pub(super) line: u32,
}

/// An entry of a device's trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// Where; of an `oom` the free bytes of the device.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Microseconds since 1970; 0 before version 2.2, which recorded none.
    pub time_us: u64,
    /// Doing what.
    pub stack: StackId,
    /// A number for the stream, in the order in which streams appear.
    pub stream: u16,
    /// What happened; `None` for what has no bytes: `snapshot`, `user_defined`.
    pub action: Option<Action>,
}

/// Whether a block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadState {
    /// `active_allocated`
    Allocated,
    /// `active_pending_free`, `active_awaiting_free`: freed, but another stream uses it.
    Pending,
    /// `inactive`, or anything else.
    Inactive,
}

/// A block of a segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadBlock {
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes that were asked for.
    pub requested: u64,
    /// Whether it is in use.
    pub state: ReadState,
    /// Doing what it was handed out.
    pub stack: StackId,
}

/// A segment.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadSegment {
    /// Of which device.
    pub device: u32,
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// A number for the stream.
    pub stream: u16,
    /// Whether it belongs to the large pool.
    pub large: bool,
    /// Whether it is part of an expandable segment.
    pub expandable: bool,
    /// Its blocks, by address.
    pub blocks: Vec<ReadBlock>,
}

/// A snapshot as it was read.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) strings: Vec<Box<str>>,
    pub(super) frames: Vec<Frame>,
    pub(super) stacks: Vec<Box<[u32]>>,
    pub(super) entries: Vec<Entry>,
    pub(super) devices: Vec<Vec<u32>>,
    pub(super) segments: Vec<ReadSegment>,
    /// Bytes of the file.
    pub(super) file_bytes: u64,
}

impl Snapshot {
    /// How many devices have a trace or a segment.
    pub fn devices(&self) -> usize {
        let of_segments = self.segments.iter().map(|segment| segment.device as usize + 1).max();
        self.devices.len().max(of_segments.unwrap_or(0))
    }

    /// The trace of a device, oldest first.
    pub fn trace(&self, device: usize) -> impl Iterator<Item = &Entry> {
        self.devices.get(device).into_iter().flatten().filter_map(|&at| self.entries.get(at as usize))
    }

    /// The segments of a device.
    pub fn segments(&self, device: usize) -> impl Iterator<Item = &ReadSegment> {
        self.segments.iter().filter(move |segment| segment.device as usize == device)
    }

    /// Bytes of the file that it came from.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The frames of a stack, innermost first.
    pub fn stack(&self, stack: StackId) -> impl Iterator<Item = &Frame> {
        self.stacks
            .get(stack.0 as usize)
            .into_iter()
            .flat_map(|frames| frames.iter())
            .filter_map(|&at| self.frames.get(at as usize))
    }

    /// How many stacks there are; each [`StackId`] is below.
    pub fn stacks(&self) -> usize {
        self.stacks.len()
    }

    /// The function of a frame.
    pub fn name(&self, frame: &Frame) -> &str {
        &self.strings[frame.name as usize]
    }

    /// The file of a frame.
    pub fn filename(&self, frame: &Frame) -> &str {
        &self.strings[frame.filename as usize]
    }

    /// `file:line function`
    pub fn words(&self, frame: &Frame) -> String {
        format!("{}:{} {}", self.filename(frame), frame.line, self.name(frame))
    }
}

/// Things that are kept once each.
#[derive(Debug)]
pub(super) struct Interned<T: ?Sized + std::hash::Hash + Eq> {
    ids: HashMap<Box<T>, u32>,
}

impl<T: ?Sized + std::hash::Hash + Eq> Interned<T> {
    pub fn new() -> Self {
        Interned { ids: HashMap::new() }
    }

    pub fn get(&self, value: &T) -> Option<u32> {
        self.ids.get(value).copied()
    }

    pub fn insert(&mut self, value: Box<T>) -> u32 {
        let next = self.ids.len() as u32;
        *self.ids.entry(value).or_insert(next)
    }

    pub fn into_vec(self) -> Vec<Box<T>> {
        let mut all: Vec<(Box<T>, u32)> = self.ids.into_iter().collect();
        all.sort_by_key(|(_, id)| *id);
        all.into_iter().map(|(value, _)| value).collect()
    }
}
