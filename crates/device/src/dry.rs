//! The device of the plan: allocates from the same arena type with no memory behind it, checks every operation
//! and adds up what it would cost.

use std::cell::{Cell, RefCell};

use plimsoll_memory::{Arena, Region, Tier};

use crate::{Clock, Device, DeviceError, Lent, Op, Tally, Tensor, Workspace};

/// A device without memory.
#[derive(Debug)]
pub struct Dry {
    arena: Arena,
    tally: RefCell<Tally>,
    workspace: Cell<Workspace>,
    clock: Option<Clock>,
}

impl Dry {
    /// A dry device with an arena that has no end.
    pub fn new() -> Dry {
        Dry::within(Arena::unbounded(Tier::Device))
    }

    /// The same with an arena that records every event.
    pub fn recording() -> Dry {
        Dry::within(Arena::recording(Tier::Device))
    }

    fn within(arena: Arena) -> Dry {
        Dry { arena, tally: RefCell::default(), workspace: Cell::default(), clock: None }
    }

    /// The same, which finds out what would happen when.
    pub fn timed(self, clock: Clock) -> Dry {
        Dry { clock: Some(clock), ..self }
    }

    /// What the operations so far would cost.
    pub fn tally(&self) -> Tally {
        *self.tally.borrow()
    }

    /// The tally so far, and a fresh one from here on.
    pub fn take_tally(&self) -> Tally {
        self.tally.take()
    }

    /// The most that an operation so far would need beside the arena.
    pub fn workspace(&self) -> Workspace {
        self.workspace.get()
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

    fn execute(&self, op: Op<'_>) -> Result<(), DeviceError> {
        let (needed, cost) = op.check_and_cost(&self.arena)?;
        self.workspace.set(self.workspace.get().or(needed));
        self.tally.borrow_mut().add(cost);
        if let Some(clock) = &self.clock {
            let mut own = Tally::default();
            own.add(cost);
            clock.compute(&own);
        }
        Ok(())
    }

    fn is_dry(&self) -> bool {
        true
    }

    fn clock(&self) -> Option<&Clock> {
        self.clock.as_ref()
    }

    fn counts_repeats(&self) -> Option<&Dry> {
        Some(self)
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
