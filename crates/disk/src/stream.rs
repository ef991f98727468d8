//! A copy stream: work that is done behind the computation, one thing after the other, in the order in which it was begun. Each
//! gives an event, which is waited for where its outcome is needed and nowhere else.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use plimsoll_memory::{Worker, run_on_all_cores};

use crate::DiskError;
use crate::request::lock;
use crate::statistics::IoClock;

/// The stack of a stream's thread, which waits and copies.
pub(crate) const STACK_BYTES: usize = 64 << 10;

/// Work in order, on a thread of its own. Dropping it leaves out what has not begun.
#[derive(Debug)]
pub(crate) struct CopyStream {
    worker: Worker<()>,
    clock: Arc<Mutex<IoClock>>,
}

/// That something which was begun will be done.
#[derive(Debug)]
#[must_use = "what was begun has to be waited for"]
pub(crate) struct Event<T> {
    event: plimsoll_memory::Event<T>,
    /// Where waiting for a disk is counted.
    clock: Option<Arc<Mutex<IoClock>>>,
}

impl<T> Event<T> {
    /// Waits until it is done.
    ///
    /// # Errors
    /// The stream ended before.
    pub fn wait(self) -> Result<T, DiskError> {
        let event = match self.event.done() {
            Ok(done) => return Ok(done),
            Err(event) => event,
        };
        let began = Instant::now();
        let outcome = event.wait().ok_or(DiskError::Stopped);
        if let Some(clock) = self.clock {
            lock(&clock).waited(began.elapsed().as_secs_f64());
        }
        outcome
    }

    /// The same where nothing else waits meanwhile, so that it does not count as waiting; `None` where the stream ended.
    pub fn wait_behind(self) -> Option<T> {
        self.event.wait()
    }
}

impl CopyStream {
    /// Starts its thread.
    ///
    /// # Errors
    /// The system starts no more.
    pub fn start(clock: Arc<Mutex<IoClock>>) -> Result<CopyStream, DiskError> {
        let thread = std::thread::Builder::new().name("copy".into()).stack_size(STACK_BYTES);
        let work_on_all = || {
            run_on_all_cores();
            Ok::<(), std::io::Error>(())
        };
        let worker = Worker::start(thread, work_on_all).map_err(DiskError::Thread)?;
        Ok(CopyStream { worker, clock })
    }

    /// Has `work` done behind everything that was begun before. `on_disk`: waiting for it is waiting for a disk.
    pub fn begin<T: Send + 'static>(
        &self,
        on_disk: bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Event<T> {
        let event = self.worker.begin(move |()| work());
        Event { event, clock: on_disk.then(|| Arc::clone(&self.clock)) }
    }
}
