//! A device that measures how long each operation of another device takes. It changes nothing that is computed.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Instant;

use plimsoll_memory::{Arena, FarMemory, Loan, Phase, Region};

use crate::{Cost, Device, DeviceError, DeviceTraits, Dry, Due, Lent, Op, Tally, Tensor, Transferred};

/// Operations that are counted together: those of a name in a phase, and of products those of one shape.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimedOperation {
    /// The phase of the work.
    pub phase: Phase,
    /// The operation's name; `write`, `read` and `exchange` are what the host does with tensors.
    pub name: &'static str,
    /// Rows, inner length and columns of a product.
    pub sides: Option<[u64; 3]>,
}

/// What operations took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// Wall time, until the operation was done.
    pub seconds: f64,
    /// How many they were, and what they cost.
    pub tally: Tally,
}

/// What was spent so far.
#[derive(Debug, Default)]
pub struct Timings(RefCell<BTreeMap<TimedOperation, Spent>>);

impl Timings {
    /// Nothing was spent yet.
    pub fn new() -> Timings {
        Timings::default()
    }

    /// What was spent since this was asked for the last time.
    pub fn take(&self) -> BTreeMap<TimedOperation, Spent> {
        self.0.take()
    }

    fn add(&self, operation: TimedOperation, seconds: f64, cost: Cost) {
        let mut all = self.0.borrow_mut();
        let spent = all.entry(operation).or_default();
        spent.seconds += seconds;
        spent.tally.add(cost);
    }
}

/// The device.
pub struct Timed<'d> {
    device: Box<dyn Device + 'd>,
    timings: &'d Timings,
    phase: Cell<Phase>,
}

impl<'d> Timed<'d> {
    /// Measures a device whose operations are done when [`Device::execute`] returns, as the CPU's are.
    pub fn new(device: Box<dyn Device + 'd>, timings: &'d Timings) -> Timed<'d> {
        Timed { device, timings, phase: Cell::default() }
    }

    /// Measures what the host does with a tensor's bytes.
    fn by_host<T>(
        &self,
        name: &'static str,
        bytes: u64,
        work: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let begun = Instant::now();
        let done = work()?;
        let operation = TimedOperation { phase: self.phase.get(), name, sides: None };
        self.timings.add(operation, begun.elapsed().as_secs_f64(), Cost { bytes, ..Cost::default() });
        Ok(done)
    }
}

impl Device for Timed<'_> {
    fn traits(&self) -> DeviceTraits {
        self.device.traits()
    }

    fn host_memory(&self, bytes: u64) -> Result<Region, DeviceError> {
        self.device.host_memory(bytes)
    }

    fn arena(&self) -> &Arena {
        self.device.arena()
    }

    fn enter(&self, phase: Phase, layer: Option<u32>) {
        self.phase.set(phase);
        self.device.enter(phase, layer);
    }

    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError> {
        let begun = Instant::now();
        self.device.execute(op, unless_zero)?;
        let seconds = begun.elapsed().as_secs_f64();
        let sides = if let Op::Product(product) = &op { product.sides() } else { None };
        let operation = TimedOperation { phase: self.phase.get(), name: op.name(), sides };
        self.timings.add(operation, seconds, op.cost());
        Ok(())
    }

    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        self.by_host("write", out.bytes(), || self.device.write(out, fill))
    }

    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        self.by_host("read", x.bytes(), || self.device.read(x, look))
    }

    fn read_and_write(
        &self,
        x: &Tensor,
        out: &Tensor,
        exchange: &mut dyn FnMut(&[u8], &mut [u8]),
    ) -> Result<(), DeviceError> {
        let bytes = x.bytes().saturating_add(out.bytes());
        self.by_host("exchange", bytes, || self.device.read_and_write(x, out, exchange))
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        self.device.lend(tensor)
    }

    fn reach(&self, tensor: &Tensor) -> Result<Option<Box<dyn FarMemory>>, DeviceError> {
        self.device.reach(tensor)
    }

    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError> {
        self.device.reclaim(memory)
    }

    fn transfer(&self, moved: Transferred, behind: Due) -> Due {
        self.device.transfer(moved, behind)
    }

    fn wait(&self, due: Due) {
        self.device.wait(due);
    }

    fn is_dry(&self) -> bool {
        self.device.is_dry()
    }

    fn counts_repeats(&self) -> Option<&Dry> {
        self.device.counts_repeats()
    }
}
