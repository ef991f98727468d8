//! A card as a device: an arena in its memory, kernels for operations, copies for everything else.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_memory::{Arena, Block, CopyError, FarMemory, Loan, Region, Tier};

use super::context::{Allocation, Context, Stream};
use super::driver::Driver;
use super::graphs::{GraphRoom, Graphs, MOST_KERNELS, Ready, Replays};
use super::lower::{self, Check, Launch, PART_BYTES, Places, WORKSPACE_BYTES};
use super::programs::{Kernels, Program};
use super::{
    Card, CudaError, PTX, PTX_80, PTX_90, TENSOR_CORES, WHOLE_TILES, WHOLE_TILES_DRIVER, host, tables,
};
use crate::{Device, DeviceError, DeviceTraits, Lent, Op, TRANSFER_BYTES, Tensor, Workspace};

/// Bytes of the word where faults are left, behind the workspace, with what aligns it.
const FAULT_BYTES: u64 = 256;
/// Bits of a place in a fault; the number of the check lies above them.
const PLACE_BITS: u32 = 40;
/// What the word holds while there is no fault.
const NO_FAULT: u64 = u64::MAX;
/// Checks after which a fault is looked for, so that their descriptions do not pile up.
const MOST_CHECKS: usize = 4096;

/// A card with its context, kernels and workspace: all that a process takes of it beside an arena.
#[derive(Debug)]
pub struct OpenCard {
    pub(super) context: Arc<Context>,
    kernels: Kernels,
    /// Whether there are the kernels that multiply whole tiles.
    whole_tiles: bool,
    beside: Allocation,
    /// What devices on this card compute by, one operation of any of them behind the other: they have one workspace, so one thread has
    /// them all.
    pub(super) compute: Stream,
    /// What was checked since somebody looked for faults: there is one word for all devices.
    checks: Mutex<Vec<Check>>,
    /// What graphs of all devices may still take.
    pub(super) room: Arc<GraphRoom>,
    /// Bytes of the workspace, and those that operands are rounded in for whole tiles.
    workspace_bytes: u64,
    part_bytes: u64,
}

impl OpenCard {
    /// Opens a card: makes the context and takes the workspace. Kernels are compiled when they are first launched.
    ///
    /// # Errors
    /// There is no such card, it is too old, or the driver refuses.
    pub fn new(driver: &Driver, index: u32) -> Result<Arc<OpenCard>, CudaError> {
        OpenCard::with_part_bytes(driver, index, PART_BYTES)
    }

    /// The same where a card that multiplies whole tiles has so many bytes to round operands in, part by part: 64 MiB is good. Parts have
    /// the bits of the whole.
    ///
    /// # Errors
    /// As of `new`.
    pub fn with_part_bytes(driver: &Driver, index: u32, part_bytes: u64) -> Result<Arc<OpenCard>, CudaError> {
        let context = Context::new(driver, index)?;
        let capability = context.card.capability;
        let whole_tiles = capability == WHOLE_TILES
            && driver.version() >= WHOLE_TILES_DRIVER
            && driver.encode_tiled().is_some();
        let mut programs = vec![Program { ptx: PTX, kernels: &lower::KERNELS, much_shared: false }];
        if capability >= TENSOR_CORES {
            programs.push(Program { ptx: PTX_80, kernels: &lower::KERNELS_80, much_shared: false });
        }
        if whole_tiles {
            programs.push(Program { ptx: PTX_90, kernels: &lower::KERNELS_90, much_shared: true });
        }
        let kernels = Kernels::new(&context, &programs, tables::bytes());
        let part_bytes = if whole_tiles { part_bytes } else { 0 };
        let workspace_bytes = WORKSPACE_BYTES.max(part_bytes).next_multiple_of(FAULT_BYTES);
        let beside = Allocation::new(&context, workspace_bytes + FAULT_BYTES)?;
        let (no_fault, compute) = (NO_FAULT.to_ne_bytes(), Stream::new(&context)?);
        // SAFETY: nobody writes it before the stream is done.
        unsafe { compute.copy_in(beside.address + workspace_bytes, &no_fault)? };
        compute.finish()?;
        let (checks, room) = (Mutex::default(), Arc::default());
        Ok(Arc::new(OpenCard {
            context,
            kernels,
            whole_tiles,
            beside,
            compute,
            checks,
            room,
            workspace_bytes,
            part_bytes,
        }))
    }

    /// The card.
    pub fn card(&self) -> &Card {
        &self.context.card
    }

    /// Bytes that are free now.
    ///
    /// # Errors
    /// The driver does not say.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        Ok(self.context.memory()?.0)
    }

    /// Bytes that are taken now, by this process and by others, and those of kernels that are not there yet: before there is an arena, the
    /// least that a budget has to leave.
    ///
    /// # Errors
    /// The driver does not say.
    pub fn taken_bytes(&self) -> Result<u64, CudaError> {
        let (free, total) = self.context.memory()?;
        Ok(total.saturating_sub(free) + self.kernels.bytes_to_come())
    }

    /// From here on each kernel is launched by itself.
    pub fn make_no_graphs(&self) {
        self.room.give_up();
    }

    /// What decides which kernels are launched and how they are compiled: results of cards that have it alike are alike.
    pub fn kind(&self) -> (u32, u32, u32, bool) {
        let Card { capability, multiprocessors, .. } = self.context.card;
        (capability, multiprocessors, self.context.driver.version(), self.whole_tiles)
    }

    fn checks(&self) -> MutexGuard<'_, Vec<Check>> {
        // Every change is a single one.
        self.checks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory that is there before any arena, with how many bytes it has: nobody may compute on it meanwhile.
    pub(super) fn workspace(&self) -> (u64, u64) {
        (self.beside.address, self.workspace_bytes)
    }

    fn fault_address(&self) -> u64 {
        self.beside.address + self.workspace_bytes
    }
}

/// An NVIDIA GPU. Operations are begun and not waited for; reading waits.
///
/// One thread at a time may use it: it is not `Sync`.
pub struct Cuda {
    /// Kernels that are to begin, in their order, and what begins them. Graphs go before what they are of.
    list: RefCell<Vec<Ready>>,
    graphs: RefCell<Graphs>,
    arena: Arena,
    card: Arc<OpenCard>,
    memory: Arc<Allocation>,
    /// For what is lent.
    copies: Arc<Copies>,
    bounce: RefCell<Bounce>,
    workspace: Cell<Workspace>,
}

/// Page-locked memory that tensors are written from and read into: [`TRANSFER_BYTES`], or as many as the largest that was written or read
/// as a whole.
struct Bounce {
    memory: Region,
    /// Whether a copy from it may be on its way.
    busy: bool,
}

impl Cuda {
    /// A device with an arena of just `arena_bytes` bytes, in one allocation.
    ///
    /// # Errors
    /// The card has not so much left, or the driver refuses.
    pub fn new(card: &Arc<OpenCard>, arena_bytes: u64) -> Result<Cuda, DeviceError> {
        let context = &card.context;
        let arena = Arena::new(Tier::Device, arena_bytes);
        arena.align_to(DeviceTraits::CUDA.alignment);
        Ok(Cuda {
            arena,
            memory: Arc::new(Allocation::new(context, arena_bytes)?),
            copies: Arc::new(Copies {
                inward: Stream::new(context)?,
                outward: Stream::new(context)?,
                between: Stream::new(context)?,
            }),
            list: RefCell::default(),
            graphs: RefCell::default(),
            bounce: RefCell::new(Bounce { memory: host::pinned(context, TRANSFER_BYTES)?, busy: false }),
            workspace: Cell::default(),
            card: Arc::clone(card),
        })
    }

    /// The card.
    pub fn card(&self) -> &Card {
        self.card.card()
    }

    /// The most that an operation has needed beside the arena, as it says itself.
    pub fn workspace(&self) -> Workspace {
        self.workspace.get()
    }

    /// Waits until all operations are done, and says what they found.
    ///
    /// # Errors
    /// A number was no place in its table, or the card failed.
    pub fn finish(&self) -> Result<(), DeviceError> {
        self.begin()?;
        self.card.compute.finish()?;
        self.look_for_faults()
    }

    /// What became of kernels so far: how many were begun together.
    pub fn replays(&self) -> Replays {
        self.graphs.borrow().replays()
    }

    /// Begins the kernels that are on the list: before anything that has to come behind them.
    fn begin(&self) -> Result<(), DeviceError> {
        let mut list = self.list.borrow_mut();
        if list.is_empty() {
            return Ok(());
        }
        // SAFETY: checks have found all tensors in the arena, which is given back after the stream is done, and so is the workspace; a
        // block of the arena that is taken anew is used on this stream only after what used it before, and lent after the list was begun.
        let begun = unsafe { self.graphs.borrow_mut().begin(&list, &self.card) };
        list.clear();
        Ok(begun?)
    }

    fn on_card(&self, block: Arc<Block>, range: Range<u64>) -> OnCard {
        OnCard { block, range, memory: Arc::clone(&self.memory), streams: Arc::clone(&self.copies) }
    }

    /// Where a tensor lies on the card.
    fn address(&self, tensor: &Tensor, op: &'static str) -> Result<u64, DeviceError> {
        if !tensor.is_in(&self.arena) {
            return Err(DeviceError::Mismatch { op, reason: format!("{tensor:?} belongs to another arena") });
        }
        Ok(self.memory.address + tensor.range().start)
    }

    /// Room for so many bytes on the way to the card or from it.
    fn with_bounce<T>(
        &self,
        op: &'static str,
        bytes: u64,
        work: impl FnOnce(&mut [u8]) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let inside = |_| DeviceError::Mismatch {
            op,
            reason: "called from inside this device's `read` or `write`".to_owned(),
        };
        let mut bounce = self.bounce.try_borrow_mut().map_err(inside)?;
        if bounce.busy {
            self.card.compute.finish()?;
            bounce.busy = false;
        }
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        if bounce.memory.len() < size {
            // The old one first: there may be no room for both.
            bounce.memory = Region::new(0)?;
            bounce.memory = host::pinned(&self.card.context, bytes)?;
        }
        // Whatever happens, a copy may have begun.
        bounce.busy = true;
        work(bounce.memory.bytes_mut().get_mut(..size).unwrap_or_default())
    }

    /// Reads the word where faults are left; all that was begun has been done.
    fn look_for_faults(&self) -> Result<(), DeviceError> {
        let checks = std::mem::take(&mut *self.card.checks());
        if checks.is_empty() {
            return Ok(());
        }
        let (address, mut word) = (self.card.fault_address(), [0; 8]);
        // SAFETY: the stream is waited for right after.
        unsafe { self.card.compute.copy_out(&mut word, address)? };
        self.card.compute.finish()?;
        let fault = u64::from_ne_bytes(word);
        if fault == NO_FAULT {
            return Ok(());
        }
        let none = NO_FAULT.to_ne_bytes();
        // SAFETY: as above.
        unsafe { self.card.compute.copy_in(address, &none)? };
        self.card.compute.finish()?;
        let (number, place) = ((fault >> PLACE_BITS) as usize, fault & ((1 << PLACE_BITS) - 1));
        let (op, reason) = match checks.into_iter().nth(number) {
            Some(Check { op, what, table }) => (op, format!("the {what} at {place} is outside {table}")),
            None => ("check_places", format!("a number at {place} is outside its table")),
        };
        Err(DeviceError::Mismatch { op, reason })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Nothing is to use the memory after it was given back. Whoever needed to know of an error has read something.
        let _ = self.card.compute.finish();
    }
}

impl Device for Cuda {
    fn traits(&self) -> DeviceTraits {
        DeviceTraits::CUDA
    }

    fn host_memory(&self, bytes: u64) -> Result<Region, DeviceError> {
        host::pinned(&self.card.context, bytes)
    }

    fn arena(&self) -> &Arena {
        &self.arena
    }

    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError> {
        let needed = op.check(&self.arena, unless_zero)?;
        self.workspace.set(self.workspace.get().or(needed));
        if self.card.checks().len() >= MOST_CHECKS {
            self.finish()?;
        }
        let flag = unless_zero.map(|flag| self.address(flag, op.name())).transpose()?.unwrap_or(0);
        let places = Places {
            arena: self.memory.address,
            workspace: self.card.beside.address,
            flag,
            fault: self.card.fault_address(),
            key: (self.card.checks().len() as u64) << PLACE_BITS,
            capability: self.card().capability,
            whole_tiles: self.card.whole_tiles,
            part_bytes: self.card.part_bytes,
            multiprocessors: self.card().multiprocessors,
        };
        lower::lower(op, places, &mut |mut launch| {
            for (at, matrix) in std::mem::take(&mut launch.matrices) {
                let map = self.card.context.encode(matrix)?;
                if let Some(room) = launch.parameters.get_mut(at..at + map.0.len()) {
                    room.copy_from_slice(&map.0);
                }
            }
            let Launch { kernel, blocks, threads, shared_bytes, parameters, starts, check, .. } = launch;
            let function = self.card.kernels.function(kernel)? as usize;
            let ready = Ready { function, blocks, threads, shared_bytes, parameters, starts };
            self.list.borrow_mut().push(ready);
            self.card.checks().extend(check);
            Ok(())
        })?;
        if self.list.borrow().len() >= MOST_KERNELS {
            self.begin()?;
        }
        Ok(())
    }

    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        let address = self.address(out, "write")?;
        self.with_bounce("write", out.bytes(), |bytes| {
            fill(bytes);
            self.begin()?;
            // What is written are tokens, as a rule, and passes begin with them.
            self.graphs.borrow_mut().begin_anew();
            // SAFETY: the buffer is waited for before anybody has it again.
            unsafe { self.card.compute.copy_in(address, bytes)? };
            Ok(())
        })
    }

    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        let address = self.address(x, "read")?;
        self.with_bounce("read", x.bytes(), |bytes| {
            self.begin()?;
            // SAFETY: the stream is waited for right after.
            unsafe { self.card.compute.copy_out(bytes, address)? };
            self.finish()?;
            look(bytes);
            Ok(())
        })
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        let block = tensor.into_lent_block(&self.arena)?;
        // What was begun with the memory comes first.
        self.begin()?;
        for stream in self.copies.all() {
            stream.wait_for(&self.card.compute)?;
        }
        let start = block.offset();
        let range = start..start + block.size();
        Ok(Lent::Memory(Loan::Far(Box::new(self.on_card(block, range)))))
    }

    fn reach(&self, tensor: &Tensor) -> Result<Option<Box<dyn FarMemory>>, DeviceError> {
        self.address(tensor, "reach")?;
        // Whoever is to have it waits anyway, and nothing is sent that a fault was found in.
        self.finish()?;
        Ok(Some(Box::new(self.on_card(tensor.block(), tensor.range()))))
    }

    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError> {
        let refuse = |reason: &str| DeviceError::Mismatch { op: "reclaim", reason: reason.to_owned() };
        let block = match memory {
            Loan::Far(far) => (far as Box<dyn Any>).downcast::<OnCard>().ok().map(|far| far.block),
            Loan::Region(_) => None,
        };
        let block = block.filter(|block| block.is_in(&self.arena)).ok_or_else(|| {
            refuse("the memory is not of this device's arena, or parts of it are still elsewhere")
        })?;
        Tensor::of_block(block).ok_or_else(|| refuse("a block of that size cannot be"))
    }
}

/// What copies of lent memory go by, beside the computation.
#[derive(Debug)]
pub(super) struct Copies {
    /// From the host.
    inward: Stream,
    /// To the host.
    outward: Stream,
    /// To other cards and from them.
    pub between: Stream,
}

impl Copies {
    fn all(&self) -> [&Stream; 3] {
        [&self.inward, &self.outward, &self.between]
    }
}

/// Memory of the card in the hands of whoever copies it.
#[derive(Debug)]
pub(super) struct OnCard {
    block: Arc<Block>,
    /// Where it lies in the arena.
    range: Range<u64>,
    memory: Arc<Allocation>,
    pub streams: Arc<Copies>,
}

impl OnCard {
    /// The address of some bytes of it.
    pub fn address(&self, offset: u64, bytes: u64) -> Result<u64, CopyError> {
        let own = self.range.end - self.range.start;
        let within = offset.checked_add(bytes).is_some_and(|end| end <= own);
        let outside = || CopyError { offset, bytes, reason: format!("it has {own} bytes") };
        within.then(|| self.memory.address + self.range.start + offset).ok_or_else(outside)
    }
}

impl FarMemory for OnCard {
    fn start(&self) -> u64 {
        self.range.start
    }

    fn copy_in(&mut self, offset: u64, from: &[u8]) -> Result<(), CopyError> {
        let (address, stream) = (self.address(offset, from.len() as u64)?, &self.streams.inward);
        // SAFETY: the stream is waited for right after.
        let copied = unsafe { stream.copy_in(address, from) }.and_then(|()| stream.finish());
        copied.map_err(|error| CopyError { offset, bytes: from.len() as u64, reason: error.to_string() })
    }

    fn copy_out(&mut self, offset: u64, to: &mut [u8]) -> Result<(), CopyError> {
        let (address, stream) = (self.address(offset, to.len() as u64)?, &self.streams.outward);
        // SAFETY: as above.
        let copied = unsafe { stream.copy_out(to, address) }.and_then(|()| stream.finish());
        copied.map_err(|error| CopyError { offset, bytes: to.len() as u64, reason: error.to_string() })
    }
}
