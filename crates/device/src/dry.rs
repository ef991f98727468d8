//! The device of the plan: allocates from the same arena type with no memory behind it, checks every operation
//! and adds up what it would cost.

use std::cell::{Cell, RefCell};

use plimsoll_memory::{Arena, Region, Tier};

use crate::{Clock, Device, DeviceError, Due, Lent, Op, Tally, Tensor, Times, Transferred, Workspace};

/// A device without memory.
#[derive(Debug)]
pub struct Dry {
    arena: Arena,
    tally: RefCell<Tally>,
    workspace: Cell<Workspace>,
    clock: Option<Clock>,
    /// Whether the arena records every event.
    records: bool,
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
        let records = arena.is_recording();
        Dry { arena, tally: RefCell::default(), workspace: Cell::default(), clock: None, records }
    }

    /// The same, which finds out what would happen when.
    pub fn timed(self, clock: Clock) -> Dry {
        Dry { clock: Some(clock), ..self }
    }

    /// The time lines, if it has them.
    pub fn clock(&self) -> Option<&Clock> {
        self.clock.as_ref()
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

    /// Lets the arenas know how late it is, where there is a clock and events are recorded.
    fn tell_time(&self) {
        if let Some(clock) = self.clock.as_ref().filter(|_| self.records) {
            self.arena.tell_time(clock.times().elapsed);
        }
    }

    /// Adds what is not run.
    pub(crate) fn skip(&self, tally: Tally, added: Option<Times>, rounds: u64) {
        self.add(tally.times(rounds));
        if let (Some(clock), Some(added)) = (&self.clock, added) {
            clock.repeat(added, rounds);
        }
        self.tell_time();
    }

    fn add(&self, more: Tally) {
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
            self.tell_time();
        }
        Ok(())
    }

    fn is_dry(&self) -> bool {
        true
    }

    fn transfer(&self, bytes: Transferred, behind: Due) -> Due {
        self.clock.as_ref().map(|clock| clock.transfer(bytes, behind)).unwrap_or_default()
    }

    fn wait(&self, due: Due) {
        if let Some(clock) = &self.clock {
            clock.wait(due);
            self.tell_time();
        }
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
