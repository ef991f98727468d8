//! The device of the plan: allocates from the same arena type with no memory behind it, checks every operation
//! and adds up what it would cost.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use plimsoll_memory::{Arena, Loan, Phase, Tier};

use crate::trace::{Counted, Repeat, Trace};
use crate::{
    Clock, Device, DeviceError, DeviceTraits, Due, Lent, Op, Tally, Tensor, Times, Transferred, Workspace,
};

/// A device without memory.
#[derive(Debug)]
pub struct Dry {
    arena: Arena,
    traits: DeviceTraits,
    tally: RefCell<Tally>,
    workspace: Cell<Workspace>,
    moved: Cell<Transferred>,
    clock: Option<Clock>,
    /// The times of updates so far, and when one began that goes on, where there is a clock.
    updates: Cell<(Times, Option<Times>)>,
    /// Whether every event is recorded with its time.
    records: bool,
    /// What was done so far and what had been counted when its last scope began, where that is recorded.
    trace: Option<RefCell<(Trace, Counted)>>,
}

impl Dry {
    /// A dry device with an arena that has no end. It stands for the CPU.
    pub fn new() -> Dry {
        Dry::within(Arena::unbounded(Tier::Device))
    }

    /// The same with an arena that records every event.
    pub fn recording() -> Dry {
        Dry::within(Arena::recording(Tier::Device))
    }

    /// The same, which also records what was done in which scope.
    pub fn tracing() -> Dry {
        // When each event happens is for timelines alone.
        Dry { trace: Some(RefCell::default()), records: false, ..Dry::recording() }
    }

    fn within(arena: Arena) -> Dry {
        let records = arena.is_recording();
        let (tally, workspace, moved) = (RefCell::default(), Cell::default(), Cell::default());
        let traits = DeviceTraits::CPU;
        let updates = Cell::default();
        Dry { arena, traits, tally, workspace, moved, clock: None, updates, records, trace: None }
    }

    /// The same, which stands for a device of these traits; for a new one.
    pub fn standing_for(self, traits: DeviceTraits) -> Dry {
        self.arena.align_to(traits.alignment);
        Dry { traits, ..self }
    }

    /// The same, which finds out what would happen when.
    pub fn timed(self, clock: Clock) -> Dry {
        Dry { clock: Some(clock), ..self }
    }

    /// The time lines, if it has them.
    pub fn clock(&self) -> Option<&Clock> {
        self.clock.as_ref()
    }

    /// The times so far that belong to no pass: of norms and updates in the optimizer's phase. None without a clock.
    pub fn update_times(&self) -> Times {
        let (before, since) = self.updates.get();
        let now = self.clock.as_ref().map(Clock::times).unwrap_or_default();
        since.map_or(before, |since| before.plus(now.since(since), 1.0))
    }

    /// What was done so far, where that is recorded; a new trace begins.
    pub fn take_trace(&self) -> Option<Trace> {
        let (mut trace, since) = self.trace.as_ref()?.take();
        trace.end(self.counted().since(since));
        Some(trace)
    }

    /// How many scopes there were so far, where they are recorded.
    pub fn scopes(&self) -> usize {
        self.trace.as_ref().map_or(0, |trace| trace.borrow().0.scopes.len())
    }

    /// Whether events of earlier loops may stand for those of later ones: in a timeline they do not.
    pub(crate) fn joins_loops(&self) -> bool {
        !self.records
    }

    /// Everything that was counted.
    pub(crate) fn counted(&self) -> Counted {
        let times = self.clock.as_ref().map(Clock::times).unwrap_or_default();
        Counted { tally: self.tally(), moved: self.moved.get(), times }
    }

    /// What the operations so far would cost.
    pub fn tally(&self) -> Tally {
        *self.tally.borrow()
    }

    /// The tally so far, and a fresh one from here on.
    pub fn take_tally(&self) -> Tally {
        self.tally.take()
    }

    /// What would have moved so far between the tiers.
    pub fn moved(&self) -> Transferred {
        self.moved.get()
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

    /// Adds so many rounds that are not run: each adds as much as the events `round`, and begins with the memory that there was
    /// before `like_event`.
    pub(crate) fn skip(&self, added: Counted, times: u64, like_event: u64, round: Range<u64>) {
        let Counted { tally, moved, times: seconds } = added;
        self.arena.count_again(round.start, times);
        if let Some(trace) = &self.trace {
            let (trace, _) = &mut *trace.borrow_mut();
            let (event, scope) = (self.arena.next_event(), trace.scopes.len().saturating_sub(1));
            trace.repeats.push(Repeat { like_event, round, times, event, scope });
        }
        let more = self.tally.borrow().plus(tally.times(times));
        self.tally.replace(more);
        self.moved.set(self.moved.get().plus(moved.times(times)));
        if let Some(clock) = &self.clock {
            clock.repeat(seconds, times);
        }
        self.tell_time();
    }
}

impl Default for Dry {
    fn default() -> Self {
        Dry::new()
    }
}

impl Device for Dry {
    fn traits(&self) -> DeviceTraits {
        self.traits
    }

    fn arena(&self) -> &Arena {
        &self.arena
    }

    fn enter(&self, phase: Phase, layer: Option<u32>) {
        self.arena.enter(phase, layer);
        if let Some(clock) = &self.clock {
            let since = (phase == Phase::Optimizer).then(|| clock.times());
            self.updates.set((self.update_times(), since));
        }
        if let Some(trace) = &self.trace {
            let (trace, since) = &mut *trace.borrow_mut();
            let now = self.counted();
            trace.enter((phase, layer), self.arena.next_event(), now.since(*since));
            *since = now;
        }
    }

    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError> {
        let (needed, cost) = op.check_and_cost(&self.arena, unless_zero)?;
        if self.traits.cuda {
            crate::cuda::missing(op).map_or(Ok(()), Err)?;
        }
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
        self.moved.set(self.moved.get().plus(bytes));
        let due = self.clock.as_ref().map(|clock| clock.transfer(bytes, behind)).unwrap_or_default();
        self.tell_time();
        due
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

    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError> {
        let reason = format!("{memory:?} comes from a device with memory");
        Err(DeviceError::Mismatch { op: "reclaim", reason })
    }
}
