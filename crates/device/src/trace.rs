//! What a dry run did, scope by scope: which layer it was in, and what was added there. With the events of its arenas that is
//! enough to work out what a run through more layers of the kind would do.

use std::ops::Range;

use plimsoll_memory::Phase;

use crate::{Tally, Times, Transferred};

/// What happened between two calls of [`Device::enter`](crate::Device::enter).
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// The phase of the work.
    pub phase: Phase,
    /// The layer; `None` for what belongs to none.
    pub layer: Option<u32>,
    /// The number of its first event.
    pub first_event: u64,
    /// Its operations.
    pub tally: Tally,
    /// What it moved.
    pub moved: Transferred,
    /// Its time; nothing where there was no clock.
    pub times: Times,
}

/// Iterations of a loop that were counted and not run.
#[derive(Clone, Debug)]
pub struct Repeat {
    /// The event before which memory was as it was when they were counted.
    pub like_event: u64,
    /// The events of the iterations that they are like.
    pub round: Range<u64>,
    /// How many times more these would happen.
    pub times: u64,
    /// The event before which they were counted.
    pub event: u64,
    /// The place of the scope in which they were.
    pub scope: usize,
}

/// The scopes of a dry run, in order, and its repeats, which nothing else shows.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// What happened, scope by scope.
    pub scopes: Vec<Scope>,
    /// In the order in which they were counted.
    pub repeats: Vec<Repeat>,
}

/// What a dry device has counted until some moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    pub tally: Tally,
    pub moved: Transferred,
    pub times: Times,
}

impl Counted {
    /// What came since `earlier`.
    pub fn since(self, earlier: Counted) -> Counted {
        Counted {
            tally: self.tally.less(earlier.tally),
            moved: self.moved.less(earlier.moved),
            times: self.times.since(earlier.times),
        }
    }
}

impl Trace {
    /// Ends the last scope and begins another.
    pub(crate) fn enter(&mut self, scope: (Phase, Option<u32>), first_event: u64, since: Counted) {
        self.end(since);
        let Counted { tally, moved, times } = Counted::default();
        self.scopes.push(Scope { phase: scope.0, layer: scope.1, first_event, tally, moved, times });
    }

    /// Adds to the last scope what came since it was entered.
    pub(crate) fn end(&mut self, Counted { tally, moved, times }: Counted) {
        if let Some(last) = self.scopes.last_mut() {
            (last.tally, last.moved, last.times) = (tally, moved, times);
        }
    }
}
