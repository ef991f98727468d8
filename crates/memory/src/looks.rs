//! How a thread waits for what tells nobody that it is done.

use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

/// For how long it is looked again at once: most of what is small is done by then.
const AT_ONCE: Duration = Duration::from_micros(100);
/// How long the thread sleeps between two looks after that.
const PAUSE: Duration = Duration::from_micros(50);

/// Looks, one after the other: at once at first, then with pauses that leave the core to the computation.
#[derive(Clone, Copy, Debug)]
pub struct Looks {
    began: Instant,
}

impl Looks {
    /// Before the first look.
    pub fn begin() -> Looks {
        Looks { began: Instant::now() }
    }

    /// Between two looks.
    pub fn pause(&self) {
        if self.began.elapsed() < AT_ONCE { yield_now() } else { sleep(PAUSE) }
    }
}
