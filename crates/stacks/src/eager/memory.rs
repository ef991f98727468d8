//! The memory behind tensors: storages on the caching allocator, what each is for, and the log of births and deaths.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::allocator::{BlockId, CachingAllocator, OutOfMemory, Settings, Statistics, Stream};
use crate::estimate::Kind;

/// Kinds, in the order of their numbers.
const KINDS: [Kind; 11] = [
    Kind::Weights,
    Kind::Adapters,
    Kind::WeightCopies,
    Kind::Gradients,
    Kind::OptimizerStates,
    Kind::SavedActivations,
    Kind::Temporary,
    Kind::Logits,
    Kind::KvCache,
    Kind::Communication,
    Kind::Workspace,
];

/// A birth or a death, as a tracer of PyTorch's operations sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The storage's number, in the order of birth.
    pub storage: u64,
    /// Bytes in units of 512, as the allocator rounds them; negative for a death.
    pub bytes: i64,
    /// The operation that made it.
    pub operation: &'static str,
    /// Made within a kernel: no tracer of operations sees it.
    pub hidden: bool,
}

/// The highest moment since the peaks were reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Highest {
    /// Bytes of blocks handed out.
    pub bytes: u64,
    /// In which operation of which module.
    pub moment: String,
    /// What they were for.
    pub by_kind: BTreeMap<Kind, u64>,
}

#[derive(Debug)]
struct State {
    allocator: CachingAllocator,
    refused: Option<OutOfMemory>,
    by_kind: [u64; KINDS.len()],
    total: u64,
    peak: u64,
    peak_by_kind: [u64; KINDS.len()],
    peak_moment: (Rc<str>, bool, &'static str),
    host: u64,
    host_peak: u64,
    next: u64,
    log: Option<Vec<Event>>,
}

/// The memory of one process with one device.
#[derive(Debug)]
pub struct Memory {
    state: RefCell<State>,
    /// The stream that is current: blocks are used again on their own stream alone.
    stream: Cell<Stream>,
}

/// Where an allocation happens, for the name of the peak's moment.
pub(super) struct Place {
    pub scope: Rc<str>,
    pub backward: bool,
    pub operation: &'static str,
}

impl Memory {
    /// Memory of a device where `capacity` bytes can become segments.
    pub fn new(settings: Settings, capacity: u64, logged: bool) -> Rc<Memory> {
        Rc::new(Memory {
            stream: Cell::new(0),
            state: RefCell::new(State {
                allocator: CachingAllocator::new(settings, capacity),
                refused: None,
                by_kind: [0; KINDS.len()],
                total: 0,
                peak: 0,
                peak_by_kind: [0; KINDS.len()],
                peak_moment: ("".into(), false, ""),
                host: 0,
                host_peak: 0,
                next: 0,
                log: logged.then(Vec::new),
            }),
        })
    }

    pub(super) fn allocate(
        self: &Rc<Memory>,
        bytes: u64,
        kind: Kind,
        hidden: bool,
        place: Place,
    ) -> Rc<Storage> {
        let mut state = self.state.borrow_mut();
        let id = state.next;
        state.next += 1;
        let (mut block, mut size) = (None, 0);
        // Behind a refusal nothing is asked for: the run has ended there.
        if bytes > 0 && state.refused.is_some() {
            size = bytes.next_multiple_of(512);
        } else if bytes > 0 {
            let before = state.allocator.statistics().allocated.current;
            match state.allocator.malloc(bytes, self.stream.get()) {
                Ok(made) => {
                    block = Some(made);
                    size = state.allocator.statistics().allocated.current - before;
                }
                Err(refusal) => {
                    size = bytes.next_multiple_of(512);
                    state.refused.get_or_insert(refusal);
                }
            }
        }
        state.by_kind[kind as usize] += size;
        state.total += size;
        if state.total > state.peak {
            state.peak = state.total;
            state.peak_by_kind = state.by_kind;
            state.peak_moment = (place.scope, place.backward, place.operation);
        }
        let rounded = bytes.next_multiple_of(512);
        if let Some(log) = state.log.as_mut().filter(|_| bytes > 0) {
            let bytes = rounded.cast_signed();
            log.push(Event { storage: id, bytes, operation: place.operation, hidden });
        }
        Rc::new(Storage {
            memory: Rc::clone(self),
            id,
            block: Cell::new(block),
            size,
            rounded,
            kind: Cell::new(kind),
            saved: Cell::new(0),
            hidden,
        })
    }

    /// `with torch.cuda.stream(stream)`
    pub(crate) fn on_stream<T>(&self, stream: Stream, work: impl FnOnce() -> T) -> T {
        let outer = self.stream.replace(stream);
        let out = work();
        self.stream.set(outer);
        out
    }

    /// `Tensor.record_stream`
    pub(crate) fn record_stream(&self, storage: &Storage, stream: Stream) {
        if let Some(block) = storage.block.get() {
            self.state.borrow_mut().allocator.record_stream(block, stream);
        }
    }

    /// The host has waited for all streams.
    pub(crate) fn synchronize(&self) {
        self.state.borrow_mut().allocator.synchronize();
    }

    /// `torch.cuda.empty_cache`
    pub fn empty_cache(&self) {
        self.state.borrow_mut().allocator.empty_cache();
    }

    /// What the allocator counted.
    pub fn statistics(&self) -> Statistics {
        *self.state.borrow().allocator.statistics()
    }

    /// The first refusal of the allocator; from then on its numbers are not those of a run.
    pub fn refused(&self) -> Option<OutOfMemory> {
        self.state.borrow().refused
    }

    /// Counts bytes of host memory, more or less.
    pub fn host(&self, bytes: i64) {
        let mut state = self.state.borrow_mut();
        state.host = state.host.saturating_add_signed(bytes);
        state.host_peak = state.host_peak.max(state.host);
    }

    /// The most host memory since the peaks were reset.
    pub fn host_peak(&self) -> u64 {
        self.state.borrow().host_peak
    }

    /// The highest moment since the peaks were reset.
    pub fn highest(&self) -> Highest {
        let state = self.state.borrow();
        let by_kind = KINDS.iter().zip(state.peak_by_kind).filter(|(_, bytes)| *bytes > 0);
        let (scope, backward, operation) = &state.peak_moment;
        let parts = [&**scope, operation, if *backward { "backward" } else { "" }];
        let moment = parts.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join(" ");
        Highest { bytes: state.peak, moment, by_kind: by_kind.map(|(kind, bytes)| (*kind, bytes)).collect() }
    }

    /// `torch.cuda.reset_peak_memory_stats`
    pub fn reset_peaks(&self) {
        let mut state = self.state.borrow_mut();
        state.allocator.reset_peaks();
        state.peak = state.total;
        state.peak_by_kind = state.by_kind;
        state.host_peak = state.host;
    }

    /// The log so far, taken away; empty where none is kept.
    pub fn take_log(&self) -> Vec<Event> {
        self.state.borrow_mut().log.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

/// Bytes on the device. The last handle frees them, as the last reference to a `StorageImpl` does.
#[derive(Debug)]
pub struct Storage {
    memory: Rc<Memory>,
    id: u64,
    block: Cell<Option<BlockId>>,
    /// Bytes of the block.
    size: u64,
    /// Bytes asked for, in units of 512.
    rounded: u64,
    kind: Cell<Kind>,
    /// How many nodes of the graph keep it.
    saved: Cell<u32>,
    hidden: bool,
}

impl Storage {
    /// Its number, in the order of birth.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Bytes of its block.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// What it counts as: a temporary that a node keeps is a saved activation.
    fn counts_as(&self) -> Kind {
        match self.kind.get() {
            Kind::Temporary if self.saved.get() > 0 => Kind::SavedActivations,
            kind => kind,
        }
    }

    fn change(&self, change: impl FnOnce()) {
        let before = self.counts_as();
        change();
        let mut state = self.memory.state.borrow_mut();
        state.by_kind[before as usize] -= self.size;
        state.by_kind[self.counts_as() as usize] += self.size;
    }

    /// Says what it is for from now on.
    pub fn set_kind(&self, kind: Kind) {
        self.change(|| self.kind.set(kind));
    }

    pub(super) fn keep(&self) {
        self.change(|| self.saved.set(self.saved.get() + 1));
    }

    pub(super) fn release(&self) {
        self.change(|| self.saved.set(self.saved.get() - 1));
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let kind = self.counts_as();
        let mut state = self.memory.state.borrow_mut();
        state.by_kind[kind as usize] -= self.size;
        state.total -= self.size;
        if let Some(block) = self.block.take() {
            state.allocator.free(block);
        }
        let (storage, bytes, hidden) = (self.id, -self.rounded.cast_signed(), self.hidden);
        if let Some(log) = state.log.as_mut().filter(|_| bytes < 0) {
            log.push(Event { storage, bytes, operation: "", hidden });
        }
    }
}
