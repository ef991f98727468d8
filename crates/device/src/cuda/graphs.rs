//! CUDA graphs: kernels that come again in the same order are begun by one call.
//!
//! A device puts kernels on a list, and begins the list where it is long enough or something else has to come behind it: a copy, a wait.
//! Lists are known by their number since something was written to the device, and by the kernels in them with their blocks. A step that repeats
//! gives the same lists. The first time the kernels of a list are launched one by one; when the list comes again it is made a graph; from
//! then on the graph is launched, after what differs was set in it: learning rates, seeds, positions. So neither the step nor the plan
//! knows of graphs, and no result depends on them.
//!
//! Graphs take memory of a card that no arena has. It is measured, and no more are made once that has come to a bound.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

use smallvec::SmallVec;

use super::CudaError;
use super::context::Context;
use super::device::OpenCard;
use super::driver::{Handle, KernelNode};

/// Kernels of a list, at most: a card has something to do before the next list is there.
pub(super) const MOST_KERNELS: usize = 128;
/// Fewer are launched one by one.
const LEAST_KERNELS: usize = 8;
/// Kernels of all graphs, at most.
const MOST_NODES: usize = 8192;
/// Bytes of the host that these take at most: what the driver has of them, and their parameters.
pub const GRAPH_HOST_BYTES: u64 = 32 << 20;
/// Lists that are remembered without a graph, at most.
const MOST_SEEN: usize = 4096;
/// Bytes of a card that graphs may take: of those that are left for kernels, which need half.
const GRAPH_BYTES: u64 = 8 << 20;

/// What graphs of all devices on a card have taken of it.
#[derive(Debug, Default)]
pub(super) struct GraphRoom {
    nodes: AtomicUsize,
    bytes: AtomicU64,
    /// The most that one took: the next one may take as much.
    most: AtomicU64,
    /// Whether no more are made.
    full: AtomicBool,
}

impl GraphRoom {
    /// Whether there is room for a graph of so many kernels.
    fn has(&self, kernels: usize) -> bool {
        let next = self.bytes.load(Relaxed).saturating_add(self.most.load(Relaxed));
        !self.full.load(Relaxed) && self.nodes.load(Relaxed) + kernels <= MOST_NODES && next <= GRAPH_BYTES
    }

    fn take(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
        self.most.fetch_max(bytes, Relaxed);
    }

    /// From here on no more are made.
    pub fn give_up(&self) {
        self.full.store(true, Relaxed);
    }
}

/// A kernel with all that the driver needs to begin it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ready {
    pub function: usize,
    pub blocks: [u32; 2],
    pub threads: u32,
    pub shared_bytes: u32,
    pub parameters: Vec<u8>,
    /// Where each parameter begins there.
    pub starts: SmallVec<[u32; 24]>,
}

impl Ready {
    /// Where the parameters are. The driver knows how many there are; without a GPU, the end is looked for.
    pub fn places(&self) -> SmallVec<[*mut c_void; 25]> {
        let at = |start: &u32| self.parameters.get(*start as usize..).unwrap_or_default().as_ptr();
        let starts = self.starts.iter().map(|start| at(start).cast_mut().cast());
        starts.chain([null_mut()]).collect()
    }

    /// Calls with what the driver's functions for nodes take.
    fn as_node<T>(&self, call: impl FnOnce(&KernelNode) -> T) -> T {
        let mut places = self.places();
        let [across, down] = self.blocks;
        call(&KernelNode {
            function: self.function as Handle,
            blocks: [across, down, 1],
            threads: [self.threads, 1, 1],
            shared_bytes: self.shared_bytes,
            parameters: places.as_mut_ptr(),
            extra: null_mut(),
            kernel: null_mut(),
            context: null_mut(),
        })
    }

    /// Whether it is the same kernel over the same blocks, whatever its parameters are.
    fn is_like(&self, other: &Ready) -> bool {
        self.function == other.function
            && self.blocks == other.blocks
            && self.threads == other.threads
            && self.shared_bytes == other.shared_bytes
            && self.starts == other.starts
            && self.parameters.len() == other.parameters.len()
    }
}

/// What became of lists so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replays {
    /// Graphs that there are.
    pub graphs: u64,
    /// How often one was launched.
    pub launched: u64,
    /// Kernels that were set anew before that.
    pub changed: u64,
    /// Kernels that were launched one by one.
    pub one_by_one: u64,
}

/// What a list is known by: its number, and which kernels are in it.
type Name = (u32, u64);

/// The kernels of a list with their blocks, whatever their parameters are, as a number.
fn kinds_of(list: &[Ready]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for Ready { function, blocks, threads, shared_bytes, starts, .. } in list {
        (function, blocks, threads, shared_bytes, starts).hash(&mut hasher);
    }
    hasher.finish()
}

/// The graphs of a device.
#[derive(Default)]
pub(super) struct Graphs {
    known: HashMap<Name, Graph>,
    /// Lists that came once.
    seen: HashSet<Name>,
    /// Lists since something was written to the device.
    number: u32,
    replays: Replays,
}

impl Graphs {
    /// What became of lists so far.
    pub fn replays(&self) -> Replays {
        Replays { graphs: self.known.len() as u64, ..self.replays }
    }

    /// The next list is the first of a pass.
    pub fn begin_anew(&mut self) {
        self.number = 0;
    }

    /// Begins a list.
    ///
    /// # Safety
    /// The addresses among the parameters are of memory that is not given back before the stream has come so far.
    pub unsafe fn begin(&mut self, list: &[Ready], card: &OpenCard) -> Result<(), CudaError> {
        let name = (self.number, kinds_of(list));
        self.number = self.number.saturating_add(1);
        // SAFETY: as the caller says.
        let is_begun = list.len() >= LEAST_KERNELS && unsafe { self.begin_graph(name, list, card)? };
        if !is_begun {
            self.replays.one_by_one += list.len() as u64;
            for ready in list {
                // SAFETY: as above.
                unsafe { card.compute.launch(ready)? };
            }
        }
        Ok(())
    }

    /// Launches the graph of a list, which is made if the list came before; not without one.
    ///
    /// # Safety
    /// As of `begin`.
    unsafe fn begin_graph(&mut self, name: Name, list: &[Ready], card: &OpenCard) -> Result<bool, CudaError> {
        let Some(graph) = self.known.get_mut(&name) else {
            if self.seen.contains(&name) {
                // SAFETY: as the caller says.
                return unsafe { self.make(name, list, card) };
            }
            if self.seen.len() >= MOST_SEEN {
                self.seen.clear();
            }
            self.seen.insert(name);
            return Ok(false);
        };
        if !graph.is_of(list) {
            return Ok(false);
        }
        match graph.set(list) {
            Ok(changed) => self.replays.changed += changed,
            Err(error @ CudaError::Lost { .. }) => return Err(error),
            Err(_) => {
                // It is half of this list and half of the one before.
                self.known.remove(&name);
                card.room.give_up();
                return Ok(false);
            }
        }
        // SAFETY: as the caller says.
        unsafe { card.compute.launch_graph(graph.executable)? };
        self.replays.launched += 1;
        Ok(true)
    }

    /// Makes a graph of a list and launches it, if there is room for one more.
    ///
    /// # Safety
    /// As of `begin`.
    unsafe fn make(&mut self, name: Name, list: &[Ready], card: &OpenCard) -> Result<bool, CudaError> {
        if !card.room.has(list.len()) {
            return Ok(false);
        }
        let (before, _) = card.context.memory()?;
        let launched = Graph::new(card, list).and_then(|graph| {
            // The first launch may take memory, too.
            // SAFETY: as the caller says.
            unsafe { card.compute.launch_graph(graph.executable) }.map(|()| graph)
        });
        let graph = match launched {
            Ok(graph) => graph,
            Err(error @ CudaError::Lost { .. }) => return Err(error),
            // A driver without graphs, or one that has no room for this one: nothing of it was begun.
            Err(_) => {
                card.room.give_up();
                return Ok(false);
            }
        };
        self.replays.launched += 1;
        // Who does not know what it took makes no other.
        match card.context.memory() {
            Ok((after, _)) => card.room.take(before.saturating_sub(after)),
            Err(_) => card.room.give_up(),
        }
        self.known.insert(name, graph);
        Ok(true)
    }
}

/// A graph of the kernels of a list, one behind the other.
struct Graph {
    context: Arc<Context>,
    /// Where its kernels count as long as it is there.
    room: Arc<GraphRoom>,
    handle: Handle,
    executable: Handle,
    nodes: Vec<Handle>,
    /// What was set last.
    list: Vec<Ready>,
}

impl Graph {
    fn new(card: &OpenCard, list: &[Ready]) -> Result<Graph, CudaError> {
        let (context, driver) = (Arc::clone(&card.context), &card.context.driver);
        let functions = driver.graphs()?;
        let mut handle = null_mut();
        context.enter()?;
        // SAFETY: writes one handle; flags have to be 0.
        driver.check("cuGraphCreate", unsafe { (functions.create)(&mut handle, 0) })?;
        let room = Arc::clone(&card.room);
        room.nodes.fetch_add(list.len(), Relaxed);
        let (executable, nodes, list_set) = (null_mut(), Vec::new(), list.to_vec());
        let mut graph = Graph { context, room, handle, executable, nodes, list: list_set };
        for ready in list {
            let (mut node, before) = (null_mut(), graph.nodes.last().copied());
            let before: &[Handle] = before.as_slice();
            // SAFETY: writes one handle; the driver copies what the node is of.
            let code = ready.as_node(|of| unsafe {
                (functions.add)(&mut node, handle, before.as_ptr(), before.len(), of)
            });
            driver.check("cuGraphAddKernelNode", code)?;
            graph.nodes.push(node);
        }
        // SAFETY: writes one handle; no flags.
        let code = unsafe { (functions.instantiate)(&mut graph.executable, handle, 0) };
        driver.check("cuGraphInstantiate", code)?;
        Ok(graph)
    }

    /// Whether a list has the same kernels over the same blocks.
    fn is_of(&self, list: &[Ready]) -> bool {
        self.list.len() == list.len() && self.list.iter().zip(list).all(|(own, other)| own.is_like(other))
    }

    /// Sets what differs in a list. Gives how many kernels that were.
    fn set(&mut self, list: &[Ready]) -> Result<u64, CudaError> {
        let driver = &self.context.driver;
        let functions = driver.graphs()?;
        self.context.enter()?;
        let mut changed = 0;
        for ((own, ready), node) in self.list.iter_mut().zip(list).zip(&self.nodes) {
            if own.parameters == ready.parameters {
                continue;
            }
            // SAFETY: the node is of the graph that this is an executable of; the driver copies what it is of.
            let code = ready.as_node(|of| unsafe { (functions.set)(self.executable, *node, of) });
            driver.check("cuGraphExecKernelNodeSetParams", code)?;
            own.parameters.clone_from(&ready.parameters);
            changed += 1;
        }
        Ok(changed)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.room.nodes.fetch_sub(self.list.len(), Relaxed);
        let Ok(functions) = self.context.driver.graphs() else { return };
        // Where the context cannot be entered, giving back is tried all the same.
        let _ = self.context.enter();
        if !self.executable.is_null() {
            // SAFETY: it was made once. What was launched of it is done all the same.
            unsafe { (functions.destroy_executable)(self.executable) };
        }
        // SAFETY: as above.
        unsafe { (functions.destroy)(self.handle) };
    }
}
