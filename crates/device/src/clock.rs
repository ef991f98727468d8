//! What would happen when, in a dry run: a time line of the computation, one of the disk and one of copies to and from the
//! host, with the places where the computation waits for the others.
//!
//! Operations follow each other. A move begins when it is asked for and those before it on its line are done, and goes on
//! behind the computation. Who needs what it brings waits until it is done.

use std::cell::Cell;
use std::fmt;

use crate::Tally;

/// How fast things happen.
pub trait Pace {
    /// Seconds that operations take.
    fn operations(&self, tally: &Tally) -> f64;

    /// Seconds that a move takes on the disk, and for its copies between device and host.
    fn transfer(&self, bytes: Transferred) -> Lines;
}

/// Bytes of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transferred {
    /// Read from a disk.
    pub read: u64,
    /// Written to it.
    pub written: u64,
    /// Copied between device and host.
    pub copied: u64,
}

impl Transferred {
    /// What is left without `other`, which must be a part of it.
    pub fn less(self, other: Transferred) -> Transferred {
        self.combine(other, u64::saturating_sub)
    }

    /// Both together.
    pub fn plus(self, other: Transferred) -> Transferred {
        self.combine(other, u64::saturating_add)
    }

    /// The same so many times.
    pub fn times(self, times: u64) -> Transferred {
        self.combine(self, |one, _| one.saturating_mul(times))
    }

    fn combine(self, other: Transferred, with: impl Fn(u64, u64) -> u64) -> Transferred {
        Transferred {
            read: with(self.read, other.read),
            written: with(self.written, other.written),
            copied: with(self.copied, other.copied),
        }
    }
}

/// Seconds on the lines beside that of the computation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lines {
    /// The disk's.
    pub disk: f64,
    /// Copies between device and host.
    pub copies: f64,
}

/// When something will be done, in seconds since the clock was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Due(f64);

/// Seconds so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// All of it: operations, and waiting.
    pub elapsed: f64,
    /// In which the disk and copies were busy, hidden or not.
    pub busy: Lines,
    /// In which the computation waited for them.
    pub waited: f64,
}

impl Times {
    /// What was added since `earlier`.
    pub fn since(self, earlier: Times) -> Times {
        let busy = Lines {
            disk: self.busy.disk - earlier.busy.disk,
            copies: self.busy.copies - earlier.busy.copies,
        };
        Times { elapsed: self.elapsed - earlier.elapsed, busy, waited: self.waited - earlier.waited }
    }

    /// These and `more`, so many times.
    pub fn plus(self, more: Times, times: f64) -> Times {
        let busy = Lines {
            disk: self.busy.disk + times * more.busy.disk,
            copies: self.busy.copies + times * more.busy.copies,
        };
        let elapsed = self.elapsed + times * more.elapsed;
        Times { elapsed, busy, waited: self.waited + times * more.waited }
    }
}

/// The time lines of a dry run.
pub struct Clock {
    pace: Box<dyn Pace>,
    times: Cell<Times>,
    /// When each line has done what it was asked for.
    lines: Cell<Lines>,
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock")
            .field("times", &self.times)
            .field("lines", &self.lines)
            .finish_non_exhaustive()
    }
}

impl Clock {
    /// One that begins now.
    pub fn new(pace: impl Pace + 'static) -> Clock {
        Clock { pace: Box::new(pace), times: Cell::default(), lines: Cell::default() }
    }

    /// Seconds so far.
    pub fn times(&self) -> Times {
        self.times.get()
    }

    /// Operations, one after the other.
    pub(crate) fn compute(&self, tally: &Tally) {
        let times = self.times.get();
        self.times.set(Times { elapsed: times.elapsed + self.pace.operations(tally), ..times });
    }

    /// Begins a move.
    pub fn transfer(&self, bytes: Transferred) -> Due {
        let (times, lines, own) = (self.times.get(), self.lines.get(), self.pace.transfer(bytes));
        let end = |line: f64, own: f64| if own > 0.0 { line.max(times.elapsed) + own } else { line };
        let lines = Lines { disk: end(lines.disk, own.disk), copies: end(lines.copies, own.copies) };
        self.lines.set(lines);
        let busy = Lines { disk: times.busy.disk + own.disk, copies: times.busy.copies + own.copies };
        self.times.set(Times { busy, ..times });
        let last = |line, own| if own > 0.0 { line } else { times.elapsed };
        Due(last(lines.disk, own.disk).max(last(lines.copies, own.copies)))
    }

    /// Waits until something is done.
    pub fn wait(&self, due: Due) {
        let times = self.times.get();
        let waited = (due.0 - times.elapsed).max(0.0);
        self.times.set(Times { elapsed: times.elapsed + waited, waited: times.waited + waited, ..times });
    }

    /// Goes on by `added`, so many times.
    pub(crate) fn repeat(&self, added: Times, rounds: u64) {
        let times = self.times.get();
        let further = added.elapsed * rounds as f64;
        self.times.set(times.plus(added, rounds as f64));
        let Lines { disk, copies } = self.lines.get();
        self.lines.set(Lines { disk: disk + further, copies: copies + further });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second for an operation, a byte read and a byte copied, two for a byte written.
    struct Seconds;

    impl Pace for Seconds {
        fn operations(&self, tally: &Tally) -> f64 {
            tally.operations as f64
        }

        fn transfer(&self, bytes: Transferred) -> Lines {
            Lines { disk: bytes.read as f64 + 2.0 * bytes.written as f64, copies: bytes.copied as f64 }
        }
    }

    fn read(read: u64) -> Transferred {
        Transferred { read, ..Transferred::default() }
    }

    fn operations(operations: u64) -> Tally {
        Tally { operations, ..Tally::default() }
    }

    #[test]
    fn what_happens_behind_the_computation_costs_what_is_waited_for() {
        let clock = Clock::new(Seconds);
        let first = clock.transfer(read(3));
        clock.compute(&operations(2));
        // One second is left of it.
        clock.wait(first);
        assert_eq!((clock.times().elapsed, clock.times().waited), (3.0, 1.0));
        let (second, written) =
            (clock.transfer(read(2)), clock.transfer(Transferred { written: 1, ..read(0) }));
        clock.compute(&operations(5));
        clock.wait(second);
        clock.wait(written);
        let busy = Lines { disk: 7.0, copies: 0.0 };
        assert_eq!(clock.times(), Times { elapsed: 8.0, busy, waited: 1.0 });
    }

    #[test]
    fn moves_on_a_line_follow_each_other_and_lines_go_beside_each_other() {
        let clock = Clock::new(Seconds);
        let first = clock.transfer(read(4));
        let second = clock.transfer(read(4));
        let copied = clock.transfer(Transferred { copied: 5, ..read(0) });
        clock.wait(copied);
        assert_eq!(clock.times().elapsed, 5.0);
        clock.wait(first);
        assert_eq!(clock.times().elapsed, 5.0);
        clock.wait(second);
        assert_eq!(clock.times().elapsed, 8.0);
    }

    #[test]
    fn what_is_counted_takes_its_time() {
        let clock = Clock::new(Seconds);
        clock.compute(&operations(1));
        let earlier = clock.times();
        let due = clock.transfer(read(2));
        clock.compute(&operations(1));
        clock.wait(due);
        clock.repeat(clock.times().since(earlier), 3);
        assert_eq!(
            clock.times(),
            Times { elapsed: 9.0, busy: Lines { disk: 8.0, copies: 0.0 }, waited: 4.0 }
        );
        // Nothing is under way.
        let due = clock.transfer(read(1));
        clock.wait(due);
        assert_eq!(clock.times().elapsed, 10.0);
    }
}
