//! What a ledger that records keeps beside its totals: every allocation and release with its place and time, and marks that
//! say which part of the work begins.

use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use crate::ledger::{Phase, Tag};

/// One allocation or release, as recorded. What is live at an offset is one allocation: the next release there ends it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryEvent {
    /// Its place among the events of all arenas that record together.
    pub number: u64,
    /// When it happens, in seconds; `None` where nobody tells the time.
    pub seconds: Option<f64>,
    /// Phase of the step.
    pub phase: Phase,
    /// Layer in whose scope it happened.
    pub layer: Option<u32>,
    /// Layer in whose scope the memory was taken: the one it belongs to.
    pub owner: Option<u32>,
    /// What the memory is for.
    pub tag: Tag,
    /// The allocation's own name, such as `q` or `mlp.gate`.
    pub name: &'static str,
    /// Where in the arena the memory is, in bytes from its start.
    pub offset: u64,
    /// Bytes taken (positive) or given back (negative).
    pub delta: i64,
    /// Bytes live after the event.
    pub live: u64,
    /// Whether the event raised the arena's high-water mark.
    pub raised_peak: bool,
}

/// The beginning of a part of the work.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mark {
    /// The part's name.
    pub name: &'static str,
    /// The number of its first event.
    pub event: u64,
    /// When it begins, in seconds.
    pub seconds: Option<f64>,
}

/// Iterations that were counted and not run: they are like those of these events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CountedEvents {
    /// The first of the events.
    pub first: u64,
    /// The first event after them.
    pub end: u64,
    /// How many times more they would happen.
    pub times: u64,
}

/// What the events of several arenas have in common: one numbering, and what time it is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moments(Arc<Mutex<Now>>);

#[derive(Clone, Copy, Debug, Default)]
struct Now {
    events: u64,
    seconds: Option<f64>,
}

impl Moments {
    fn with<T>(&self, change: impl FnOnce(&mut Now) -> T) -> T {
        // Two plain numbers: whole whatever happened to whoever held the lock.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn now(&self) -> Now {
        self.with(|now| *now)
    }
}

/// The record of one arena.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recording {
    pub(crate) moments: Moments,
    pub(crate) events: Vec<MemoryEvent>,
    pub(crate) marks: Vec<Mark>,
    pub(crate) counted: Vec<CountedEvents>,
}

/// Events of a step of a few layers, about.
const USUAL_EVENTS: usize = 4096;

impl Recording {
    /// An empty one, with room for the events of a usual step.
    pub(crate) fn new() -> Recording {
        Recording { events: Vec::with_capacity(USUAL_EVENTS), ..Recording::default() }
    }

    /// An empty one whose events are numbered together with this one's.
    pub(crate) fn beside(&self) -> Recording {
        Recording { moments: self.moments.clone(), ..Recording::default() }
    }

    /// Adds an event, which is made of its number and time.
    pub(crate) fn add(&mut self, event: impl FnOnce(u64, Option<f64>) -> MemoryEvent) {
        let Now { events, seconds } = self.moments.with(|now| {
            let before = *now;
            now.events += 1;
            before
        });
        self.events.push(event(events, seconds));
    }

    pub(crate) fn mark(&mut self, name: &'static str) {
        let Now { events, seconds } = self.moments.now();
        self.marks.push(Mark { name, event: events, seconds });
    }

    pub(crate) fn next_event(&self) -> u64 {
        self.moments.now().events
    }

    pub(crate) fn count_again(&mut self, first: u64, times: u64) {
        let end = self.next_event();
        // Iterations that allocate nothing are nothing to a timeline.
        if first < end {
            self.counted.push(CountedEvents { first, end, times });
        }
    }

    pub(crate) fn tell_time(&self, seconds: f64) {
        self.moments.with(|now| now.seconds = Some(seconds));
    }
}
