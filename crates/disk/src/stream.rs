//! A copy stream: work that is done behind the computation, one thing after the other, in the order in which it was begun. Each
//! gives an event, which is waited for where its outcome is needed and nowhere else.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use plimsoll_memory::run_on_all_cores;

use crate::DiskError;
use crate::request::lock;
use crate::statistics::IoClock;

/// The stack of a stream's thread, which waits and copies.
pub(crate) const STACK_BYTES: usize = 64 << 10;

type Work = Box<dyn FnOnce() + Send>;

/// Work in order, on a thread of its own. Dropping it leaves out what has not begun.
#[derive(Debug)]
pub(crate) struct CopyStream {
    queue: Option<Sender<Work>>,
    worker: Option<JoinHandle<()>>,
    closing: Arc<AtomicBool>,
    clock: Arc<Mutex<IoClock>>,
}

/// That something which was begun will be done.
#[derive(Debug)]
#[must_use = "what was begun has to be waited for"]
pub(crate) struct Event<T> {
    outcome: Receiver<T>,
    /// Where waiting for a disk is counted.
    clock: Option<Arc<Mutex<IoClock>>>,
}

impl<T> Event<T> {
    /// Waits until it is done.
    ///
    /// # Errors
    /// The stream ended before.
    pub fn wait(self) -> Result<T, DiskError> {
        if let Ok(done) = self.outcome.try_recv() {
            return Ok(done);
        }
        let began = Instant::now();
        let outcome = self.outcome.recv().map_err(|_| DiskError::Stopped);
        if let Some(clock) = self.clock {
            lock(&clock).waited(began.elapsed().as_secs_f64());
        }
        outcome
    }

    /// The same where nothing else waits meanwhile, so that it does not count as waiting; `None` where the stream ended.
    pub fn wait_behind(self) -> Option<T> {
        self.outcome.recv().ok()
    }
}

impl CopyStream {
    /// Starts its thread.
    ///
    /// # Errors
    /// The system starts no more.
    pub fn start(clock: Arc<Mutex<IoClock>>) -> Result<CopyStream, DiskError> {
        let (queue, moves) = channel::<Work>();
        let closing = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&closing);
        let work = move || {
            run_on_all_cores();
            for work in moves {
                // What is left out answers its event by being dropped.
                if !closed.load(Ordering::Relaxed) {
                    work();
                }
            }
        };
        let thread = std::thread::Builder::new().name("copy".into()).stack_size(STACK_BYTES);
        let worker = Some(thread.spawn(work).map_err(DiskError::Thread)?);
        Ok(CopyStream { queue: Some(queue), worker, closing, clock })
    }

    /// Has `work` done behind everything that was begun before. `on_disk`: waiting for it is waiting for a disk.
    pub fn begin<T: Send + 'static>(
        &self,
        on_disk: bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Event<T> {
        let (done, outcome) = sync_channel(1);
        let work = Box::new(move || {
            // Nobody may be waiting any more.
            let _ = done.send(work());
        });
        if let Some(queue) = &self.queue {
            // A thread that ended answers every event with an error.
            let _ = queue.send(work);
        }
        Event { outcome, clock: on_disk.then(|| Arc::clone(&self.clock)) }
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        self.queue = None;
        if let Some(worker) = self.worker.take() {
            // One that panicked has answered its event while it unwound.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_is_begun_is_done_in_order() {
        let clock = Arc::default();
        let stream = CopyStream::start(Arc::clone(&clock)).unwrap();
        let (go, gate) = mpsc::channel::<()>();
        let first = stream.begin(true, move || gate.recv().is_ok());
        let order = Arc::new(Mutex::new(Vec::new()));
        let events: Vec<_> = (0..3)
            .map(|number| {
                let order = Arc::clone(&order);
                stream.begin(false, move || lock(&order).push(number))
            })
            .collect();
        assert!(lock(&order).is_empty());
        go.send(()).unwrap();
        assert!(first.wait().unwrap());
        events.into_iter().for_each(|event| event.wait().unwrap());
        assert_eq!(*lock(&order), [0, 1, 2]);
    }

    #[test]
    fn what_has_not_begun_when_it_ends_is_answered() {
        let stream = CopyStream::start(Arc::default()).unwrap();
        let (begun, started) = mpsc::channel::<()>();
        let (go, gate) = mpsc::channel::<()>();
        let first = stream.begin(false, move || {
            begun.send(()).unwrap();
            gate.recv().is_ok()
        });
        let second = stream.begin(false, || 7);
        started.recv().unwrap();
        let closing = Arc::clone(&stream.closing);
        let ending = std::thread::spawn(move || drop(stream));
        while !closing.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        go.send(()).unwrap();
        assert!(first.wait().unwrap());
        assert!(matches!(second.wait(), Err(DiskError::Stopped)));
        ending.join().unwrap();
    }
}
