//! The device of the plan: allocates from the same arena type with no memory behind it, checks every operation
//! and adds up what it would cost.

use std::cell::RefCell;

use plimsoll_memory::{Arena, Region, Tier};

use crate::repeat::count;
use crate::{Counted, Device, DeviceError, Iterations, Lent, Op, Tally, Tensor};

/// A device without memory.
#[derive(Debug)]
pub struct Dry {
    arena: Arena,
    tally: RefCell<Tally>,
}

impl Dry {
    /// A dry device with an arena that has no end.
    pub fn new() -> Dry {
        Dry { arena: Arena::unbounded(Tier::Device), tally: RefCell::default() }
    }

    /// The same with an arena that records every event.
    pub fn recording() -> Dry {
        Dry { arena: Arena::recording(Tier::Device), tally: RefCell::default() }
    }

    /// What the operations so far would cost.
    pub fn tally(&self) -> Tally {
        *self.tally.borrow()
    }

    /// The tally so far, and a fresh one from here on.
    pub fn take_tally(&self) -> Tally {
        self.tally.take()
    }

    pub(crate) fn add(&self, more: Tally) {
        let mut tally = self.tally.borrow_mut();
        *tally = tally.plus(more);
    }
}

impl Default for Dry {
    fn default() -> Self {
        Dry::new()
    }
}

impl Device for Dry {
    fn arena(&self) -> &Arena {
        &self.arena
    }

    fn run(&self, op: Op<'_>) -> Result<(), DeviceError> {
        op.check(&self.arena)?;
        self.tally.borrow_mut().add(op.cost());
        Ok(())
    }

    fn is_dry(&self) -> bool {
        true
    }

    fn repeat<I: Iterations>(&self, times: u64, iterations: I) -> Result<Counted, I::Error> {
        count(self, times, iterations)
    }

    fn write(&self, _: &Tensor, _: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        Ok(())
    }

    fn read(&self, _: &Tensor, _: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        Ok(())
    }

    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError> {
        tensor.check_lendable(&self.arena)?;
        Ok(Lent::Nothing(tensor))
    }

    fn reclaim(&self, memory: Region) -> Result<Tensor, DeviceError> {
        let reason = format!("{} bytes come from a device with memory", memory.len());
        Err(DeviceError::Mismatch { op: "reclaim", reason })
    }
}
