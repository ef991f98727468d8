//! A processor that counts what the host reads of it, and what is copied in and out where it stands for a device apart.

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use plimsoll_device::{Cpu, Device, DeviceError, DeviceTraits, Lent, Op, Tensor};
use plimsoll_memory::{Arena, CopyError, FarMemory, Loan};

pub struct Watched {
    cpu: Cpu,
    /// How often the host has read what was found.
    pub reads: Cell<u64>,
    /// The most bytes that were written or read at once.
    pub most: Cell<u64>,
    /// Bytes copied in and out.
    pub copied: Arc<[AtomicU64; 2]>,
}

impl Watched {
    pub fn new(cpu: Cpu) -> Watched {
        Watched { cpu, reads: Cell::new(0), most: Cell::new(0), copied: Arc::default() }
    }
}

#[derive(Debug)]
struct Counted {
    memory: Box<dyn FarMemory>,
    copied: Arc<[AtomicU64; 2]>,
}

impl FarMemory for Counted {
    fn start(&self) -> u64 {
        self.memory.start()
    }

    fn copy_in(&mut self, offset: u64, from: &[u8]) -> Result<(), CopyError> {
        self.copied[0].fetch_add(from.len() as u64, Ordering::Relaxed);
        self.memory.copy_in(offset, from)
    }

    fn copy_out(&mut self, offset: u64, to: &mut [u8]) -> Result<(), CopyError> {
        self.copied[1].fetch_add(to.len() as u64, Ordering::Relaxed);
        self.memory.copy_out(offset, to)
    }
}

impl Device for Watched {
    fn traits(&self) -> DeviceTraits {
        self.cpu.traits()
    }

    fn arena(&self) -> &Arena {
        self.cpu.arena()
    }

    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError> {
        self.cpu.execute(op, unless_zero)
    }

    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        self.most.set(self.most.get().max(out.bytes()));
        self.cpu.write(out, fill)
    }

    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        self.reads.set(self.reads.get() + 1);
        self.most.set(self.most.get().max(x.bytes()));
        self.cpu.read(x, look)
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        match self.cpu.lend(tensor)? {
            Lent::Memory(Loan::Far(memory)) if !self.traits().unified => {
                let copied = Arc::clone(&self.copied);
                Ok(Lent::Memory(Loan::Far(Box::new(Counted { memory, copied }))))
            }
            Lent::Memory(region @ Loan::Region(_)) if self.traits().unified => Ok(Lent::Memory(region)),
            other => panic!("{other:?}"),
        }
    }

    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError> {
        self.cpu.reclaim(match memory {
            Loan::Far(far) => Loan::Far((far as Box<dyn Any>).downcast::<Counted>().unwrap().memory),
            region => region,
        })
    }
}
