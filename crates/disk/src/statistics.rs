//! How much went to and from disks, how long that took, and how much of it somebody waited for.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::request::lock;

/// Totals of an engine since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct IoStatistics {
    /// Bytes read that were asked for.
    pub bytes_read: u64,
    /// Bytes written that were asked for.
    pub bytes_written: u64,
    /// Seconds in which any request was under way.
    pub io_seconds: f64,
    /// Seconds for which callers waited for one.
    pub waited_seconds: f64,
}

impl IoStatistics {
    /// The share of the I/O's time in which nobody waited for it; `None` where there was no I/O.
    pub fn hidden_share(&self) -> Option<f64> {
        (self.io_seconds > 0.0).then(|| (1.0 - self.waited_seconds / self.io_seconds).clamp(0.0, 1.0))
    }

    /// What was added since `earlier`.
    pub fn since(&self, earlier: &IoStatistics) -> IoStatistics {
        IoStatistics {
            bytes_read: self.bytes_read.saturating_sub(earlier.bytes_read),
            bytes_written: self.bytes_written.saturating_sub(earlier.bytes_written),
            io_seconds: (self.io_seconds - earlier.io_seconds).max(0.0),
            waited_seconds: (self.waited_seconds - earlier.waited_seconds).max(0.0),
        }
    }
}

/// An engine's totals, to look at from anywhere.
#[derive(Clone, Debug)]
pub struct IoMeter(pub(crate) Arc<Mutex<IoClock>>);

impl IoMeter {
    /// What they are now.
    pub fn totals(&self) -> IoStatistics {
        lock(&self.0).totals()
    }
}

/// Keeps the totals: time counts while anything is under way, however much at once.
#[derive(Debug, Default)]
pub(crate) struct IoClock {
    totals: IoStatistics,
    under_way: usize,
    /// Since when anything is.
    since: Option<Instant>,
}

impl IoClock {
    pub fn began(&mut self) {
        if self.under_way == 0 {
            self.since = Some(Instant::now());
        }
        self.under_way += 1;
    }

    /// A request ended that moved bytes.
    pub fn ended(&mut self, bytes: u64, write: bool) {
        self.under_way = self.under_way.saturating_sub(1);
        if self.under_way == 0
            && let Some(since) = self.since.take()
        {
            self.totals.io_seconds += since.elapsed().as_secs_f64();
        }
        match write {
            true => self.totals.bytes_written += bytes,
            false => self.totals.bytes_read += bytes,
        }
    }

    pub fn waited(&mut self, seconds: f64) {
        self.totals.waited_seconds += seconds;
    }

    pub fn totals(&self) -> IoStatistics {
        let now = self.since.map_or(0.0, |since| since.elapsed().as_secs_f64());
        IoStatistics { io_seconds: self.totals.io_seconds + now, ..self.totals }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_time_of_the_io() {
        let totals =
            |io_seconds, waited_seconds| IoStatistics { io_seconds, waited_seconds, ..Default::default() };
        assert_eq!(totals(2.0, 0.5).hidden_share(), Some(0.75));
        assert_eq!(totals(1.0, 3.0).hidden_share(), Some(0.0));
        assert_eq!(totals(0.0, 0.0).hidden_share(), None);
        assert_eq!(totals(2.0, 0.5).since(&totals(1.5, 0.5)), totals(0.5, 0.0));
    }

    #[test]
    fn requests_under_way_together_count_once() {
        let mut clock = IoClock::default();
        clock.began();
        clock.began();
        clock.ended(10, false);
        let while_running = clock.totals();
        clock.ended(5, true);
        let done = clock.totals();
        assert_eq!([done.bytes_read, done.bytes_written], [10, 5]);
        assert!(done.io_seconds >= while_running.io_seconds);
        assert_eq!(clock.totals(), done);
    }
    #[test]
    fn time_counts_from_the_first_beginning_to_the_last_end() {
        let mut clock = IoClock::default();
        clock.totals.io_seconds = 5.0;
        clock.began();
        clock.began();
        clock.ended(1, true);
        assert_eq!((clock.under_way, clock.since.is_some()), (1, true));
        // It goes on while anything is under way.
        while clock.totals().io_seconds <= 5.0 {
            std::thread::yield_now();
        }
        clock.ended(1, false);
        let done = clock.totals();
        assert!(clock.since.is_none() && done.io_seconds > 5.0 && clock.totals() == done);
        clock.waited(2.0);
        clock.waited(0.5);
        assert_eq!(clock.totals().waited_seconds, 2.5);
    }
}
