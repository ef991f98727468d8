//! The CPU as a device: an arena in RAM, and where operations get their slices of it. What kernels make of them is said
//! in `run`.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::num::NonZero;
use std::sync::Arc;

use plimsoll_memory::{Arena, CopyError, FarMemory, Loan, Region, Reservation, Tier};

use super::kernels::{Exec, Simd, attention};
use super::pool::WithCaller;
use super::run::{KernelCall, run};
use super::slices::Slices;
use super::{Isa, Pool};
use crate::{Device, DeviceError, DeviceTraits, Lent, Op, Tensor, Workspace};

/// How a [`Cpu`] is to work. The default is all cores and the best instructions.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads, the caller's included; all cores where `None`.
    pub threads: Option<usize>,
    /// Instruction set; the best there is where `None`, or where the machine lacks the one given.
    pub isa: Option<Isa>,
}

/// The CPU as a device: an arena in RAM and threads to compute.
///
/// One thread at a time may use it: it is not `Sync`.
pub struct Cpu {
    arena: Arena,
    traits: DeviceTraits,
    memory: RefCell<Memory>,
    /// What operations have needed of it, at most.
    workspace: Cell<Workspace>,
    pool: WithCaller,
    simd: Simd,
}

/// Borrowed to read by [`Device::read`], to write by all else, so that no slice lent out is written beside.
struct Memory {
    /// Behind the arena. Regions of it may be lent to other threads; no tensor is a view of them then.
    arena: Arc<Reservation>,
    /// For partial sums and sort keys: what kernels need beside the arena and the threads' scratch.
    workspace: Reservation,
}

impl Cpu {
    /// A device with an arena of `arena_bytes` and threads of its own, which the system places.
    pub fn new(arena_bytes: u64, options: CpuOptions) -> Result<Cpu, DeviceError> {
        let cores = || std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = options.threads.unwrap_or_else(cores);
        let pool = Pool::new(threads, Cpu::SCRATCH_BYTES)?;
        Cpu::with_pool(Arc::new(pool), options.isa.unwrap_or_else(Isa::detect), arena_bytes)
    }

    /// A device that shares its threads with others. The pool's scratch must be of [`Cpu::SCRATCH_BYTES`] at least. Where the pool
    /// has a core for each thread, the calling thread keeps to one while the device lives.
    pub fn with_pool(pool: Arc<Pool>, isa: Isa, arena_bytes: u64) -> Result<Cpu, DeviceError> {
        let memory = Memory {
            arena: Arc::new(Reservation::new(arena_bytes)?),
            workspace: Reservation::new(Workspace::MOST.shared)?,
        };
        let arena = Arena::new(Tier::Device, arena_bytes);
        Ok(Cpu {
            arena,
            traits: DeviceTraits::CPU,
            memory: RefCell::new(memory),
            workspace: Cell::default(),
            pool: WithCaller::new(pool),
            simd: Simd::new(isa),
        })
    }

    /// The same, which behaves as a device of other traits does: for tests of what moves between tiers; for a new one.
    pub fn standing_for(self, traits: DeviceTraits) -> Cpu {
        self.arena.align_to(traits.alignment);
        Cpu { traits, ..self }
    }

    /// Scratch that each thread of a shared pool needs, in bytes.
    pub const SCRATCH_BYTES: usize = attention::SCRATCH_BYTES;

    /// Number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.simd.isa()
    }

    /// The pool, to share with another device.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The most that an operation has needed beside the arena.
    pub fn workspace(&self) -> Workspace {
        self.workspace.get()
    }

    /// The tensor's place in memory, or an error where it belongs to another arena.
    fn place(
        &self,
        tensor: &Tensor,
        op: &'static str,
        memory: &Memory,
    ) -> Result<(*mut u8, usize), DeviceError> {
        if !tensor.is_in(&self.arena) {
            return Err(DeviceError::Mismatch { op, reason: format!("{tensor:?} belongs to another arena") });
        }
        let range = tensor.range();
        Ok((memory.arena.as_ptr().wrapping_add(range.start as usize), (range.end - range.start) as usize))
    }
}

/// Memory of a CPU that stands for a device apart: bytes are copied in and out.
#[derive(Debug)]
struct Apart {
    region: Region,
    start: u64,
}

impl Apart {
    fn bytes(&mut self, offset: u64, bytes: usize) -> Result<&mut [u8], CopyError> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let own = self.region.len();
        let within = self.region.bytes_mut().get_mut(start..start.saturating_add(bytes));
        let outside = || CopyError { offset, bytes: bytes as u64, reason: format!("it has {own} bytes") };
        within.ok_or_else(outside)
    }
}

impl FarMemory for Apart {
    fn start(&self) -> u64 {
        self.start
    }

    fn copy_in(&mut self, offset: u64, from: &[u8]) -> Result<(), CopyError> {
        self.bytes(offset, from.len())?.copy_from_slice(from);
        Ok(())
    }

    fn copy_out(&mut self, offset: u64, to: &mut [u8]) -> Result<(), CopyError> {
        to.copy_from_slice(self.bytes(offset, to.len())?);
        Ok(())
    }
}

/// The device's memory is lent to a closure that asks for more of it.
fn lent(op: &'static str) -> DeviceError {
    DeviceError::Mismatch { op, reason: "called from inside this device's `read` or `write`".to_owned() }
}

impl Device for Cpu {
    fn traits(&self) -> DeviceTraits {
        self.traits
    }

    fn arena(&self) -> &Arena {
        &self.arena
    }

    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError> {
        let needed = op.check(&self.arena, unless_zero)?;
        let mut memory = self.memory.try_borrow_mut().map_err(|_| lent(op.name()))?;
        let memory = &mut *memory;
        self.workspace.set(self.workspace.get().or(needed));
        // SAFETY: the reservation is as large as the arena, aligned to 2 MiB, and borrowed until the end of this
        // function; what is lent of it belongs to no tensor. `check` has found every tensor in the arena and no output overlapping another tensor, but for
        // what may be in place: there the kernel is given the output alone, by `Slices::input` or as its only operand.
        let slices = unsafe { Slices::new(memory.arena.as_ptr()) };
        if unless_zero.is_some_and(|flag| slices.f32s(flag).contains(&0.0)) {
            return Ok(());
        }
        let words = needed.shared.min(Workspace::MOST.shared).div_ceil(size_of::<u64>() as u64) as usize;
        // SAFETY: the workspace is that long at least, aligned to 2 MiB, borrowed as above and used by nothing else.
        let workspace: &mut [u64] =
            unsafe { std::slice::from_raw_parts_mut(memory.workspace.as_ptr().cast(), words) };
        let exec = Exec { pool: &self.pool, simd: self.simd };
        run(op, KernelCall { exec, t: slices, workspace })
            .map_err(|reason| DeviceError::Mismatch { op: op.name(), reason })
    }

    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        let memory = self.memory.try_borrow_mut().map_err(|_| lent("write"))?;
        let (start, bytes) = self.place(out, "write", &memory)?;
        // SAFETY: the tensor lies in the arena behind which the reservation stands, and the mutable borrow keeps
        // every other use of it away.
        fill(unsafe { std::slice::from_raw_parts_mut(start, bytes) });
        Ok(())
    }

    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        let memory = self.memory.try_borrow().map_err(|_| lent("read"))?;
        let (start, bytes) = self.place(x, "read", &memory)?;
        // SAFETY: as in `write`; the borrow keeps writers away.
        look(unsafe { std::slice::from_raw_parts(start, bytes) });
        Ok(())
    }

    fn read_and_write(
        &self,
        x: &Tensor,
        out: &Tensor,
        exchange: &mut dyn FnMut(&[u8], &mut [u8]),
    ) -> Result<(), DeviceError> {
        if x.overlaps(out) {
            let reason = format!("{out:?} overlaps {x:?}");
            return Err(DeviceError::Mismatch { op: "read_and_write", reason });
        }
        let memory = self.memory.try_borrow_mut().map_err(|_| lent("read_and_write"))?;
        let (from, from_bytes) = self.place(x, "read_and_write", &memory)?;
        let (to, to_bytes) = self.place(out, "read_and_write", &memory)?;
        // SAFETY: as in `write`, and the two are apart.
        let slices = unsafe {
            (std::slice::from_raw_parts(from, from_bytes), std::slice::from_raw_parts_mut(to, to_bytes))
        };
        exchange(slices.0, slices.1);
        Ok(())
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        let refuse = |reason: String| DeviceError::Mismatch { op: "lend", reason };
        let block = tensor.into_lent_block(&self.arena)?;
        let start = block.offset();
        // A borrow that is out keeps pointers into the arena alive, though not to this tensor, which is moved in here.
        let memory = self.memory.try_borrow_mut().map_err(|_| lent("lend"))?;
        // SAFETY: the block is of the arena that the reservation stands behind. No tensor is a view of it, as this
        // handle of it is the only one, so that no operation can be asked to access its bytes until it is reclaimed.
        let region = unsafe { Region::of_block(Arc::clone(&memory.arena), block) };
        let region = region.ok_or_else(|| refuse("the block lies outside the arena's memory".to_owned()))?;
        Ok(Lent::Memory(match self.traits.unified {
            true => Loan::Region(region),
            false => Loan::Far(Box::new(Apart { region, start })),
        }))
    }

    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError> {
        let refuse = |reason: &str| DeviceError::Mismatch { op: "reclaim", reason: reason.to_owned() };
        let region = match memory {
            Loan::Region(region) => Some(region),
            Loan::Far(far) => (far as Box<dyn Any>).downcast::<Apart>().ok().map(|apart| apart.region),
        };
        let block = region.and_then(|region| region.into_block(&self.arena).ok()).ok_or_else(|| {
            refuse("the memory is not of this device's arena, or parts of it are still elsewhere")
        })?;
        Tensor::of_block(block).ok_or_else(|| refuse("a block of that size cannot be"))
    }
}
