//! What would happen when, in a dry run: time lines of the computation, the disk, copies from and to the host, and messages to other
//! ranks, with the places where the computation waits for the others.
//!
//! Operations follow each other. A move begins when it is asked for and those before it on its line are done, and goes on
//! behind the computation. Who needs what it brings waits until it is done. Copies in and copies out go on at once; reads and
//! writes share a disk, which does no more of both at once than of one after the other. Where the cores that compute copy, too, the
//! computation stands still meanwhile. A move of two hops is on two lines at once: one piece of it is copied while another is read or
//! written. Messages follow each other on the line of the links.

use std::cell::Cell;
use std::fmt;

use crate::{Communicated, Tally};

/// How fast things happen.
pub trait Pace {
    /// Seconds that operations take.
    fn operations(&self, tally: &Tally) -> f64;

    /// Seconds that a move takes on the disk, for its copies between device and host, and on the links.
    fn transfer(&self, bytes: Transferred) -> Lines;

    /// Seconds for which a move that takes so long holds the computation up: none where others than its cores move.
    fn held_up(&self, _moved: Lines) -> f64 {
        0.0
    }
}

/// Bytes of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transferred {
    /// Read from a disk.
    pub read: u64,
    /// Written to it.
    pub written: u64,
    /// Copied from the host to the device.
    pub copied_in: u64,
    /// Copied from the device to the host.
    pub copied_out: u64,
    /// What comes of either in experts that come by themselves: bytes among these, on their last way.
    pub experts: u64,
    /// Sent to other ranks.
    pub sent: Communicated,
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

    fn combine(self, other: Transferred, with: impl Fn(u64, u64) -> u64 + Copy) -> Transferred {
        Transferred {
            read: with(self.read, other.read),
            written: with(self.written, other.written),
            copied_in: with(self.copied_in, other.copied_in),
            copied_out: with(self.copied_out, other.copied_out),
            experts: with(self.experts, other.experts),
            sent: self.sent.combine(other.sent, with),
        }
    }
}

/// Seconds on the lines beside that of the computation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lines {
    /// The disk's.
    pub disk: f64,
    /// Copies from the host to the device.
    pub copies_in: f64,
    /// Copies from the device to the host.
    pub copies_out: f64,
    /// Messages to other ranks.
    pub links: f64,
}

impl Lines {
    /// Each line with the same one of others.
    fn with(self, other: Lines, of: impl Fn(f64, f64) -> f64) -> Lines {
        Lines {
            disk: of(self.disk, other.disk),
            copies_in: of(self.copies_in, other.copies_in),
            copies_out: of(self.copies_out, other.copies_out),
            links: of(self.links, other.links),
        }
    }
}

/// When something will be done, in seconds since the clock was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Due(f64);

/// Seconds so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// All of it: operations, and waiting.
    pub elapsed: f64,
    /// In which the disk, copies and links were busy, hidden or not.
    pub busy: Lines,
    /// In which the computation waited for them, or stood still for copies.
    pub waited: f64,
}

impl Times {
    /// What was added since `earlier`.
    pub fn since(self, earlier: Times) -> Times {
        let busy = self.busy.with(earlier.busy, |now, earlier| now - earlier);
        Times { elapsed: self.elapsed - earlier.elapsed, busy, waited: self.waited - earlier.waited }
    }

    /// These and `more`, so many times.
    pub fn plus(self, more: Times, times: f64) -> Times {
        let busy = self.busy.with(more.busy, |so_far, more| so_far + times * more);
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

    /// Begins a move, when what it follows `behind` is done.
    pub fn transfer(&self, bytes: Transferred, behind: Due) -> Due {
        let (times, own) = (self.times.get(), self.pace.transfer(bytes));
        let begin = times.elapsed.max(behind.0);
        let takes_part = |own| own > 0.0;
        let end = |line: f64, own| if takes_part(own) { line.max(begin) + own } else { line };
        let lines = self.lines.get().with(own, end);
        self.lines.set(lines);
        let (held, busy) = (self.pace.held_up(own), times.busy.with(own, |so_far, own| so_far + own));
        self.times.set(Times { elapsed: times.elapsed + held, busy, waited: times.waited + held });
        let due = lines.with(own, |line, own| if takes_part(own) { line } else { times.elapsed });
        Due(due.disk.max(due.copies_in).max(due.copies_out).max(due.links))
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
        let lines = self.lines.get();
        self.lines.set(lines.with(lines, |line, _| line + further));
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
            let disk = bytes.read as f64 + 2.0 * bytes.written as f64;
            let links = bytes.sent.total_bytes() as f64;
            Lines { disk, copies_in: bytes.copied_in as f64, copies_out: bytes.copied_out as f64, links }
        }
    }

    fn read(read: u64) -> Transferred {
        Transferred { read, ..Transferred::default() }
    }

    fn begin(clock: &Clock, bytes: Transferred) -> Due {
        clock.transfer(bytes, Due::default())
    }

    fn operations(operations: u64) -> Tally {
        Tally { operations, ..Tally::default() }
    }

    #[test]
    fn what_happens_behind_the_computation_costs_what_is_waited_for() {
        let clock = Clock::new(Seconds);
        let first = begin(&clock, read(3));
        clock.compute(&operations(2));
        // One second is left of it.
        clock.wait(first);
        assert_eq!((clock.times().elapsed, clock.times().waited), (3.0, 1.0));
        let (second, written) =
            (begin(&clock, read(2)), begin(&clock, Transferred { written: 1, ..read(0) }));
        clock.compute(&operations(5));
        clock.wait(second);
        clock.wait(written);
        let busy = Lines { disk: 7.0, ..Lines::default() };
        assert_eq!(clock.times(), Times { elapsed: 8.0, busy, waited: 1.0 });
    }

    #[test]
    fn moves_on_a_line_follow_each_other_and_lines_go_beside_each_other() {
        let clock = Clock::new(Seconds);
        let first = begin(&clock, read(4));
        let second = begin(&clock, read(4));
        let copied = begin(&clock, Transferred { copied_in: 5, ..read(0) });
        clock.wait(copied);
        assert_eq!(clock.times().elapsed, 5.0);
        clock.wait(first);
        assert_eq!(clock.times().elapsed, 5.0);
        clock.wait(second);
        assert_eq!(clock.times().elapsed, 8.0);
    }

    #[test]
    fn copies_in_and_out_go_beside_each_other_but_for_what_follows_behind() {
        let clock = Clock::new(Seconds);
        let out = begin(&clock, Transferred { copied_out: 4, ..read(0) });
        let beside = begin(&clock, Transferred { copied_in: 3, ..read(0) });
        clock.wait(beside);
        assert_eq!(clock.times().elapsed, 3.0);
        // Into the buffer that goes out until 4; the next one waits for its turn.
        let behind = clock.transfer(Transferred { copied_in: 2, ..read(0) }, out);
        let next = begin(&clock, Transferred { copied_in: 1, ..read(0) });
        clock.wait(behind);
        assert_eq!(clock.times().elapsed, 6.0);
        clock.wait(next);
        let busy = Lines { copies_in: 6.0, copies_out: 4.0, ..Lines::default() };
        assert_eq!(clock.times(), Times { elapsed: 7.0, busy, waited: 7.0 });
    }

    #[test]
    fn messages_go_behind_the_computation_one_after_the_other() {
        let clock = Clock::new(Seconds);
        let send = |bytes| {
            let sent = crate::Communicated::of(crate::Collective::AllGather, bytes);
            begin(&clock, Transferred { sent, ..read(0) })
        };
        let (first, second) = (send(3), send(4));
        clock.compute(&operations(5));
        clock.wait(first);
        assert_eq!((clock.times().elapsed, clock.times().waited), (5.0, 0.0));
        // A call that waits comes behind what was begun before.
        clock.wait(send(1));
        clock.wait(second);
        let busy = Lines { links: 8.0, ..Lines::default() };
        assert_eq!(clock.times(), Times { elapsed: 8.0, busy, waited: 3.0 });
    }

    #[test]
    fn copies_that_take_the_cores_hold_the_computation_up() {
        struct Shared;
        impl Pace for Shared {
            fn operations(&self, tally: &Tally) -> f64 {
                Seconds.operations(tally)
            }
            fn transfer(&self, bytes: Transferred) -> Lines {
                Seconds.transfer(bytes)
            }
            fn held_up(&self, moved: Lines) -> f64 {
                moved.copies_in
            }
        }
        let clock = Clock::new(Shared);
        let copied = Transferred { copied_in: 3, ..read(0) };
        let due = begin(&clock, copied);
        clock.compute(&operations(2));
        // It was done before the computation went on.
        clock.wait(due);
        assert_eq!((clock.times().elapsed, clock.times().waited), (5.0, 3.0));
        // Meanwhile a disk reads.
        let due = begin(&clock, Transferred { read: 4, ..copied });
        clock.wait(due);
        assert_eq!((clock.times().elapsed, clock.times().waited), (9.0, 7.0));
    }

    #[test]
    fn what_is_counted_takes_its_time() {
        let clock = Clock::new(Seconds);
        clock.compute(&operations(1));
        let earlier = clock.times();
        let due = begin(&clock, read(2));
        clock.compute(&operations(1));
        clock.wait(due);
        clock.repeat(clock.times().since(earlier), 3);
        assert_eq!(
            clock.times(),
            Times { elapsed: 9.0, busy: Lines { disk: 8.0, ..Lines::default() }, waited: 4.0 }
        );
        // Nothing is under way.
        let due = begin(&clock, read(1));
        clock.wait(due);
        assert_eq!(clock.times().elapsed, 10.0);
    }
}
