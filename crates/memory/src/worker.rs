//! Work that is done behind the computation: one thing after the other, in the order in which it was begun, on a thread of its own.
//! Each gives an event, which is waited for where its outcome is needed and nowhere else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

/// A thread with what it works on, which never leaves that thread. Dropping it leaves out what has not begun.
#[derive(Debug)]
pub struct Worker<T> {
    queue: Option<Sender<Work<'static, T>>>,
    thread: Option<JoinHandle<()>>,
    closing: Arc<AtomicBool>,
}

type Work<'w, T> = Box<dyn FnOnce(&T) + Send + 'w>;

/// That something which was begun will be done.
#[derive(Debug)]
#[must_use = "what was begun has to be waited for"]
pub struct Event<R>(Receiver<R>);

impl<R> Event<R> {
    /// What came of it, if it is done; else the event again.
    ///
    /// # Errors
    /// It is not done.
    pub fn done(self) -> Result<R, Event<R>> {
        self.0.try_recv().map_err(|_| self)
    }

    /// Waits until it is done; `None` where the thread has ended before.
    pub fn wait(self) -> Option<R> {
        self.0.recv().ok()
    }
}

/// Work and who waits for it. When the work is dropped, everything that it borrows is let go before the waiting ends.
struct Awaited<W, R> {
    work: W,
    done: SyncSender<R>,
}

impl<W, R> Awaited<W, R> {
    fn run<T>(self, on: &T)
    where
        W: FnOnce(&T) -> R,
    {
        let Awaited { work, done } = self;
        // Nobody may be waiting any more.
        let _ = done.send(work(on));
    }
}

impl<T: 'static> Worker<T> {
    /// Starts a thread, which makes what it works on.
    ///
    /// # Errors
    /// The system starts no more threads, or there is nothing to work on: then the thread has ended.
    pub fn start<E: From<std::io::Error> + Send + 'static>(
        thread: std::thread::Builder,
        make: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<Worker<T>, E> {
        let (queue, begun) = channel::<Work<'static, T>>();
        let closing = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&closing);
        let (made, outcome) = sync_channel(1);
        let work = move || {
            let on = match make() {
                Ok(on) => on,
                Err(error) => {
                    let _ = made.send(Err(error));
                    return;
                }
            };
            let _ = made.send(Ok(()));
            for work in begun {
                // What is left out answers its event by being dropped.
                if !closed.load(Ordering::Relaxed) {
                    work(&on);
                }
            }
        };
        let thread = thread.spawn(work)?;
        match outcome.recv() {
            Ok(Err(error)) => Err(error),
            // One that panicked while it made something answers every event by having ended.
            Ok(Ok(())) | Err(_) => Ok(Worker { queue: Some(queue), thread: Some(thread), closing }),
        }
    }

    /// Has `work` done behind everything that was begun before.
    pub fn begin<R: Send + 'static>(&self, work: impl FnOnce(&T) -> R + Send + 'static) -> Event<R> {
        let (done, outcome) = sync_channel(1);
        let awaited = Awaited { work, done };
        self.send(Box::new(move |on| awaited.run(on)));
        Event(outcome)
    }

    /// Has `work` done behind everything that was begun before, and waits for it; `None` where the thread has ended.
    pub fn run<R: Send>(&self, work: impl FnOnce(&T) -> R + Send) -> Option<R> {
        let (done, outcome) = sync_channel(1);
        let awaited = Awaited { work, done };
        let work: Work<'_, T> = Box::new(move |on| awaited.run(on));
        // SAFETY: what the work borrows outlives this call, which ends when the sender of `done` has sent or is gone. It sends when
        // `work` has returned, and is gone when the work has unwound or was dropped without having been run: in each case
        // `work`, with what it borrows, is gone before, as `Awaited` drops its fields in their order.
        let work = unsafe { std::mem::transmute::<Work<'_, T>, Work<'static, T>>(work) };
        self.send(work);
        outcome.recv().ok()
    }

    fn send(&self, work: Work<'static, T>) {
        if let Some(queue) = &self.queue {
            // A thread that has ended answers every event with an error.
            let _ = queue.send(work);
        }
    }
}

impl<T> Worker<T> {
    /// Whether it is ending, so that what has not begun is left out.
    pub fn closing(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.closing)
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // One that panicked has answered its event while it unwound.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError, mpsc};
    use std::thread::Builder;

    use super::*;

    fn worker() -> Worker<u32> {
        Worker::start::<std::io::Error>(Builder::new(), || Ok(7)).unwrap()
    }

    #[test]
    fn what_is_begun_is_done_in_order() {
        let worker = worker();
        let (go, gate) = mpsc::channel::<()>();
        let first = worker.begin(move |_| gate.recv().is_ok());
        let order = Arc::new(Mutex::new(Vec::new()));
        let push = |order: &Mutex<Vec<u32>>, number| {
            order.lock().unwrap_or_else(PoisonError::into_inner).push(number);
        };
        let events: Vec<_> = (0..3)
            .map(|number| {
                let order = Arc::clone(&order);
                worker.begin(move |_| push(&order, number))
            })
            .collect();
        let first = first.done().unwrap_err();
        go.send(()).unwrap();
        assert!(first.wait().unwrap());
        // Work that borrows comes behind them.
        let number = 3;
        worker.run(|on| push(&order, number + on)).unwrap();
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 10]);
        events.into_iter().for_each(|event| event.wait().unwrap());
    }

    #[test]
    fn what_has_not_begun_when_it_ends_is_answered() {
        let worker = worker();
        let (begun, started) = mpsc::channel::<()>();
        let (go, gate) = mpsc::channel::<()>();
        let first = worker.begin(move |_| {
            begun.send(()).unwrap();
            gate.recv().is_ok()
        });
        let second = worker.begin(|on| *on);
        started.recv().unwrap();
        let closing = worker.closing();
        let ending = std::thread::spawn(move || drop(worker));
        while !closing.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        go.send(()).unwrap();
        assert!(first.wait().unwrap());
        assert_eq!(second.wait(), None);
        ending.join().unwrap();
    }

    #[test]
    fn a_thread_that_panicked_answers_everybody() {
        let worker = worker();
        let mut changed = false;
        let outcome = worker.run(|_| {
            changed = true;
            if changed {
                std::panic::resume_unwind(Box::new(()));
            }
        });
        assert_eq!((outcome, changed), (None, true));
        assert_eq!(worker.run(|on| *on), None);
        assert_eq!(worker.begin(|on| *on).wait(), None);
        let failed = Worker::<u32>::start(Builder::new(), || Err(std::io::Error::other("nothing")));
        assert_eq!(failed.unwrap_err().to_string(), "nothing");
    }
}
