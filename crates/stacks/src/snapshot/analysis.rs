//! What a snapshot shows of a device: its time line, the peak and what was live then, what the allocator holds unused.
//!
//! Live bytes are those that PyTorch's viewer draws: what was asked for, from `alloc` to `free_completed`; with them what was there
//! before the recording began: what it frees without having seen it allocated, and what is in use at its end.

use std::collections::HashMap;

use serde::Serialize;

use super::kinds::{GuessedKind, KINDS};
use super::leaks::{Growth, Leak, Pattern};
use super::records::{Entry, ReadState, Snapshot, StackId};
use crate::allocator::Action;

/// Moments of the time line, at most.
const COLUMNS: usize = 600;

/// A moment of the time line: the one with most in its stretch of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimelinePoint {
    /// The entry of the trace.
    pub entry: u64,
    /// When; 0 before version 2.2.
    pub time_us: u64,
    /// Live bytes.
    pub allocated_bytes: u64,
    /// Bytes of segments.
    pub reserved_bytes: u64,
    /// Live bytes of each kind, in the order of [`GuessedKind::ALL`].
    pub by_kind: [u64; KINDS],
}

/// What a stack had live at the peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Live {
    /// Live bytes.
    pub bytes: u64,
    /// Allocations.
    pub count: u64,
    /// What they are for.
    pub kind: GuessedKind,
    /// Whether they were there before the recording began.
    pub before_recording: bool,
    /// The line that a user can change.
    pub line: Option<String>,
    /// `file:line function`, innermost first. Of what was freed without having been seen allocated: the frees'.
    pub stack: Vec<String>,
}

/// The moment at which most was live.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Peak {
    /// When; 0 before version 2.2.
    pub time_us: u64,
    /// The entry of the trace.
    pub entry: u64,
    /// Live bytes.
    pub allocated_bytes: u64,
    /// Bytes of segments.
    pub reserved_bytes: u64,
    /// Live bytes by kind, the largest first.
    pub by_kind: Vec<(GuessedKind, u64)>,
    /// Live bytes by stack, the largest first.
    pub live: Vec<Live>,
}

/// What the allocator holds at the end, and what of it nobody uses.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Fragmentation {
    /// Bytes of segments.
    pub reserved_bytes: u64,
    /// Bytes of blocks in use.
    pub allocated_bytes: u64,
    /// Blocks that were freed and wait for other streams.
    pub pending_bytes: u64,
    /// Free blocks.
    pub unused_bytes: u64,
    /// Of these, whole segments: `torch.cuda.empty_cache()` gives them back.
    pub releasable_bytes: u64,
    /// Of these, the largest block: what can be asked for without a new segment.
    pub largest_free_bytes: u64,
    /// What blocks in use have beyond what was asked for.
    pub rounding_bytes: u64,
    /// Segments minus live bytes at the peak.
    pub unused_at_peak_bytes: u64,
    /// Free bytes in segments that are partly in use, of all bytes of segments.
    pub ratio: f64,
}

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OomEvent {
    /// When; 0 before version 2.2.
    pub time_us: u64,
    /// Bytes that were asked for, rounded.
    pub asked_bytes: u64,
    /// Free bytes of the device.
    pub device_free_bytes: u64,
    /// Live bytes then.
    pub allocated_bytes: u64,
    /// Bytes of segments then.
    pub reserved_bytes: u64,
    /// The line that a user can change.
    pub line: Option<String>,
}

/// A segment at the end.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SegmentUse {
    /// Where it begins.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// Of these, in use.
    pub allocated_bytes: u64,
    /// Its blocks.
    pub blocks: u64,
    /// Its free blocks.
    pub free_blocks: u64,
    /// A number for the stream.
    pub stream: u16,
    /// Whether it belongs to the large pool.
    pub large: bool,
    /// Whether it is part of an expandable segment.
    pub expandable: bool,
}

/// What a snapshot shows of a device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Analysis {
    /// Which device.
    pub device: usize,
    /// Entries of the trace.
    pub entries: u64,
    /// The peak.
    pub peak: Peak,
    /// At the end.
    pub fragmentation: Fragmentation,
    /// Requests that failed.
    pub out_of_memory: Vec<OomEvent>,
    /// Lines whose allocations only grow, the fastest first.
    pub leaks: Vec<Leak>,
    /// What such growth usually is.
    pub patterns: Vec<Pattern>,
    /// Live and reserved bytes over the trace.
    pub timeline: Vec<TimelinePoint>,
    /// Segments at the end, the largest first.
    pub segments: Vec<SegmentUse>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Origin {
    /// The trace allocates it.
    Seen,
    /// In use at the end, and allocated before the trace.
    AtEnd,
    /// The trace frees it, and its stack is that of the free.
    Freed,
}

#[derive(Clone, Copy)]
struct Allocation {
    size: u64,
    stack: StackId,
    origin: Origin,
}

impl Allocation {
    fn kind(&self, guesses: &[GuessedKind]) -> GuessedKind {
        match self.origin {
            Origin::Freed => GuessedKind::Unknown,
            Origin::Seen | Origin::AtEnd => guess(guesses, self.stack),
        }
    }
}

fn guess(guesses: &[GuessedKind], stack: StackId) -> GuessedKind {
    guesses.get(stack.0 as usize).copied().unwrap_or(GuessedKind::Unknown)
}

/// Bytes that were live, and of how many allocations, by stack.
type ByStack = HashMap<(StackId, Origin), (u64, u64)>;

/// Live and reserved bytes at a moment, counted from the beginning of the trace.
#[derive(Clone, Copy, Default)]
struct Level {
    live: i128,
    reserved: i128,
    by_kind: [i128; KINDS],
}

impl Level {
    fn at(self, base: Level) -> (u64, u64) {
        (bytes(base.live + self.live), bytes(base.reserved + self.reserved))
    }
}

fn bytes(sum: i128) -> u64 {
    u64::try_from(sum.max(0)).unwrap_or(u64::MAX)
}

impl Analysis {
    /// Analyses the trace and the segments of a device.
    pub fn of(snapshot: &Snapshot, device: usize) -> Analysis {
        let entries = snapshot.trace(device).count();
        let guesses: Vec<GuessedKind> =
            (0..snapshot.stacks()).map(|stack| snapshot.guess(StackId(stack as u32))).collect();
        let mut walk = Walk::default();
        let mut by_kind = [0; KINDS];
        let mut growth = Growth::new(snapshot.stacks(), entries);
        let (mut peak, mut highest) = (None, Level::default());
        let mut columns: Vec<(usize, u64, Level)> = Vec::new();
        let mut failed = Vec::new();
        for (at, entry) in snapshot.trace(device).enumerate() {
            walk.step(entry, |change| {
                by_kind[guess(&guesses, change.stack) as usize] += change.bytes;
                growth.change(at, change);
            });
            walk.level.by_kind = by_kind;
            if walk.level.live > highest.live {
                (peak, highest) = (Some(at), walk.level);
            }
            let column = at * COLUMNS / entries;
            match columns.last_mut() {
                Some(last) if last.0 * COLUMNS / entries == column => {
                    if walk.level.live > last.2.live {
                        *last = (at, entry.time_us, walk.level);
                    }
                }
                _ => columns.push((at, entry.time_us, walk.level)),
            }
            if entry.action == Some(Action::OutOfMemory) {
                failed.push((*entry, walk.level));
            }
        }
        let base = walk.base(snapshot, device, &guesses);
        let live = live_at(snapshot, device, peak, walk);
        let peak = peak_of(snapshot, device, peak, highest.at(base), live, &guesses);
        let out_of_memory =
            failed.into_iter().map(|(entry, level)| oom(snapshot, entry, level.at(base))).collect();
        let point = |(at, time_us, level): (usize, u64, Level)| {
            let (allocated_bytes, reserved_bytes) = level.at(base);
            let by_kind = std::array::from_fn(|kind| bytes(base.by_kind[kind] + level.by_kind[kind]));
            TimelinePoint { entry: at as u64, time_us, allocated_bytes, reserved_bytes, by_kind }
        };
        let leaks = growth.leaks(snapshot);
        Analysis {
            device,
            entries: entries as u64,
            fragmentation: fragmentation(snapshot, device, &peak),
            patterns: Pattern::of(snapshot, &leaks, &peak),
            leaks: leaks.into_iter().map(|grown| grown.leak).collect(),
            peak,
            out_of_memory,
            timeline: columns.into_iter().map(point).collect(),
            segments: segments(snapshot, device),
        }
    }

    /// The device with the highest peak.
    pub fn of_fullest(snapshot: &Snapshot) -> Option<Analysis> {
        let all = (0..snapshot.devices()).map(|device| Analysis::of(snapshot, device));
        all.reduce(
            |fullest, other| {
                if other.peak.allocated_bytes > fullest.peak.allocated_bytes { other } else { fullest }
            },
        )
    }
}

/// A change of live bytes: of which stack, and how many.
pub(super) struct Change {
    pub stack: StackId,
    pub bytes: i128,
}

/// The trace, entry by entry.
#[derive(Default)]
struct Walk {
    level: Level,
    live: HashMap<u64, Allocation>,
    /// Freed without having been seen allocated: they were there before.
    earlier: Vec<(u64, Allocation)>,
}

impl Walk {
    fn step(&mut self, entry: &Entry, mut changed: impl FnMut(Change)) {
        let bytes = i128::from(entry.size);
        match entry.action {
            Some(Action::Alloc) => {
                let allocation = Allocation { size: entry.size, stack: entry.stack, origin: Origin::Seen };
                // An address that is live already: the free was not recorded.
                if let Some(lost) = self.live.insert(entry.address, allocation) {
                    self.level.live -= i128::from(lost.size);
                    changed(Change { stack: lost.stack, bytes: -i128::from(lost.size) });
                }
                self.level.live += bytes;
                changed(Change { stack: entry.stack, bytes });
            }
            Some(Action::FreeCompleted) => match self.live.remove(&entry.address) {
                Some(allocation) => {
                    self.level.live -= i128::from(allocation.size);
                    changed(Change { stack: allocation.stack, bytes: -i128::from(allocation.size) });
                }
                None => {
                    self.level.live -= bytes;
                    changed(Change { stack: StackId::NONE, bytes: -bytes });
                    let allocation =
                        Allocation { size: entry.size, stack: entry.stack, origin: Origin::Freed };
                    self.earlier.push((entry.address, allocation));
                }
            },
            Some(Action::SegmentAlloc | Action::SegmentMap) => self.level.reserved += bytes,
            Some(Action::SegmentFree | Action::SegmentUnmap) => self.level.reserved -= bytes,
            Some(Action::FreeRequested | Action::OutOfMemory) | None => {}
        }
    }

    /// What was there when the trace began. The blocks that are in use at its end and were not seen allocated join `earlier`.
    fn base(&mut self, snapshot: &Snapshot, device: usize, guesses: &[GuessedKind]) -> Level {
        let mut reserved = 0;
        for segment in snapshot.segments(device) {
            reserved += i128::from(segment.size);
            for block in segment.blocks.iter().filter(|block| block.state == ReadState::Allocated) {
                if !self.live.contains_key(&block.address) {
                    let allocation =
                        Allocation { size: block.requested, stack: block.stack, origin: Origin::AtEnd };
                    self.earlier.push((block.address, allocation));
                }
            }
        }
        let mut by_kind = [0; KINDS];
        for (_, allocation) in &self.earlier {
            by_kind[allocation.kind(guesses) as usize] += i128::from(allocation.size);
        }
        // Of a trace whose beginning was overwritten, segments may be given back that were never seen.
        Level { live: by_kind.iter().sum(), reserved: (reserved - self.level.reserved).max(0), by_kind }
    }
}

/// What was live after entry `peak`, by stack.
fn live_at(snapshot: &Snapshot, device: usize, peak: Option<usize>, walked: Walk) -> ByStack {
    // What was there before and is freed up to the peak goes first: the earlier frees are in the order of the trace.
    let mut again = Walk::default();
    for entry in snapshot.trace(device).take(peak.map_or(0, |at| at + 1)) {
        again.step(entry, |_| {});
    }
    let rest = walked.earlier.into_iter().skip(again.earlier.len()).map(|(_, allocation)| allocation);
    let mut by_stack = ByStack::new();
    for allocation in again.live.into_values().chain(rest) {
        let (bytes, count) = by_stack.entry((allocation.stack, allocation.origin)).or_default();
        *bytes = bytes.saturating_add(allocation.size);
        *count += 1;
    }
    by_stack
}

fn peak_of(
    snapshot: &Snapshot,
    device: usize,
    at: Option<usize>,
    (allocated_bytes, reserved_bytes): (u64, u64),
    live: ByStack,
    guesses: &[GuessedKind],
) -> Peak {
    let mut kinds: HashMap<GuessedKind, u64> = HashMap::new();
    let mut stacks: Vec<(StackId, Live)> = Vec::with_capacity(live.len());
    for ((stack, origin), (bytes, count)) in live {
        let kind = Allocation { size: bytes, stack, origin }.kind(guesses);
        let before_recording = origin != Origin::Seen;
        let sum = kinds.entry(kind).or_default();
        *sum = sum.saturating_add(bytes);
        let frames = snapshot.stack(stack).map(|frame| snapshot.words(frame)).collect();
        let line = snapshot.user_line(stack);
        stacks.push((stack, Live { bytes, count, kind, before_recording, line, stack: frames }));
    }
    stacks.sort_by_key(|(stack, live)| (std::cmp::Reverse(live.bytes), *stack));
    let mut by_kind: Vec<_> = kinds.into_iter().collect();
    by_kind.sort_by_key(|(kind, bytes)| (std::cmp::Reverse(*bytes), *kind));
    let entry = at.and_then(|at| snapshot.trace(device).nth(at));
    Peak {
        time_us: entry.map_or(0, |entry| entry.time_us),
        entry: at.unwrap_or(0) as u64,
        allocated_bytes,
        reserved_bytes,
        by_kind,
        live: stacks.into_iter().map(|(_, live)| live).collect(),
    }
}

fn oom(snapshot: &Snapshot, entry: Entry, (allocated_bytes, reserved_bytes): (u64, u64)) -> OomEvent {
    OomEvent {
        time_us: entry.time_us,
        asked_bytes: entry.size,
        device_free_bytes: entry.address,
        allocated_bytes,
        reserved_bytes,
        line: snapshot.user_line(entry.stack),
    }
}

fn fragmentation(snapshot: &Snapshot, device: usize, peak: &Peak) -> Fragmentation {
    let mut all = Fragmentation {
        unused_at_peak_bytes: peak.reserved_bytes.saturating_sub(peak.allocated_bytes),
        ..Fragmentation::default()
    };
    for segment in snapshot.segments(device) {
        all.reserved_bytes = all.reserved_bytes.saturating_add(segment.size);
        let in_use = segment.blocks.iter().any(|block| block.state != ReadState::Inactive);
        for block in &segment.blocks {
            let sum = match block.state {
                ReadState::Allocated => &mut all.allocated_bytes,
                ReadState::Pending => &mut all.pending_bytes,
                ReadState::Inactive => &mut all.unused_bytes,
            };
            *sum = sum.saturating_add(block.size);
            match block.state {
                ReadState::Inactive => {
                    all.largest_free_bytes = all.largest_free_bytes.max(block.size);
                    if !in_use {
                        all.releasable_bytes = all.releasable_bytes.saturating_add(block.size);
                    }
                }
                _ => {
                    let rounding = block.size.saturating_sub(block.requested);
                    all.rounding_bytes = all.rounding_bytes.saturating_add(rounding);
                }
            }
        }
    }
    let scattered = all.unused_bytes.saturating_sub(all.releasable_bytes);
    all.ratio = if all.reserved_bytes == 0 { 0.0 } else { scattered as f64 / all.reserved_bytes as f64 };
    all
}

fn segments(snapshot: &Snapshot, device: usize) -> Vec<SegmentUse> {
    let of = |state: ReadState| move |block: &&super::ReadBlock| block.state == state;
    let mut all: Vec<SegmentUse> = snapshot
        .segments(device)
        .map(|segment| SegmentUse {
            address: segment.address,
            bytes: segment.size,
            allocated_bytes: segment
                .blocks
                .iter()
                .filter(of(ReadState::Allocated))
                .fold(0, |sum: u64, block| sum.saturating_add(block.size)),
            blocks: segment.blocks.len() as u64,
            free_blocks: segment.blocks.iter().filter(of(ReadState::Inactive)).count() as u64,
            stream: segment.stream,
            large: segment.large,
            expandable: segment.expandable,
        })
        .collect();
    all.sort_by_key(|segment| (std::cmp::Reverse(segment.bytes), segment.address));
    all
}
