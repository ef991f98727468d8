//! Where workers put batches for whoever takes them, in their order, and where buffers wait to be filled again. What is in a batch
//! is left to its maker.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::Maker;
use crate::{Batch, DataError};

/// The place between workers and whoever takes their batches.
pub(super) struct Shelf {
    state: Mutex<State>,
    /// A batch has been made, or a worker is gone.
    made: Condvar,
    /// A batch is wanted, or work has ended.
    wanted: Condvar,
    /// Batches that are made before they are asked for.
    ahead: u64,
    /// Buffers that there are at most.
    most_buffers: u64,
}

#[derive(Default)]
struct State {
    ready: BTreeMap<u64, Result<Batch, DataError>>,
    /// The next batch that nobody has begun.
    next: u64,
    /// Batches before it that were given back and have to be made again.
    again: BTreeSet<u64>,
    /// Batches that were handed out.
    handed: u64,
    /// The batch that somebody waits for.
    waits_for: Option<u64>,
    /// No batch from here on is made.
    end: u64,
    spares: Vec<Batch>,
    /// Buffers in all, whoever has them, and their bytes.
    buffers: u64,
    bytes: u64,
    most_bytes: u64,
    paused: bool,
    closed: bool,
    /// A worker has panicked.
    lost: bool,
}

impl State {
    /// The batch to make next, if there is one now.
    fn take_number(&mut self, ahead: u64) -> Option<u64> {
        let number = self.again.first().copied().unwrap_or(self.next);
        let ahead = if self.paused { 0 } else { ahead };
        let is_asked_for = self.waits_for == Some(number);
        if number >= self.end || !(is_asked_for || number < self.handed.saturating_add(ahead)) {
            return None;
        }
        if !self.again.remove(&number) {
            self.next += 1;
        }
        Some(number)
    }

    /// A buffer that waits, or a new one where all were given back.
    fn buffer(&mut self, empty: impl FnOnce() -> Batch) -> Batch {
        self.spares.pop().unwrap_or_else(|| {
            let buffer = empty();
            self.took(&buffer);
            buffer
        })
    }

    fn took(&mut self, buffer: &Batch) {
        self.buffers += 1;
        self.bytes += buffer.bytes();
        self.most_bytes = self.most_bytes.max(self.bytes);
    }

    fn gave_back(&mut self, buffer: &Batch) {
        self.buffers = self.buffers.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(buffer.bytes());
    }
}

/// Says that a worker is gone when it panics.
struct Watched<'s>(&'s Shelf);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().lost = true;
            self.0.made.notify_all();
        }
    }
}

impl Shelf {
    pub fn new(ahead: u64, most_buffers: u64) -> Shelf {
        let (state, made, wanted) = (Mutex::default(), Condvar::new(), Condvar::new());
        Shelf { state, made, wanted, ahead, most_buffers }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all buffers, for batches from `first` to before `end`.
    pub fn open(&self, first: u64, end: u64, empty: impl Fn() -> Batch) {
        let state = &mut *self.lock();
        (state.next, state.handed, state.end, state.closed) = (first, first, end, false);
        while !state.paused && state.buffers < self.most_buffers {
            let buffer = empty();
            state.took(&buffer);
            state.spares.push(buffer);
        }
    }

    /// Ends the work, and gives back what nobody has taken.
    pub fn close(&self) {
        let state = &mut *self.lock();
        state.closed = true;
        self.wanted.notify_all();
        give_back_all(state);
        state.again.clear();
    }

    /// Whether a batch is beyond those that are made.
    pub fn has_ended(&self, number: u64) -> bool {
        number >= self.lock().end
    }

    /// Makes batches until the work ends.
    pub fn work(&self, maker: &Maker) {
        let _watched = Watched(self);
        loop {
            let mut state = self.lock();
            let number = loop {
                if state.closed {
                    return;
                }
                if let Some(number) = state.take_number(self.ahead) {
                    break number;
                }
                state = self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            let mut buffer = state.buffer(|| maker.empty());
            drop(state);
            let made = maker.make(number, &mut buffer);
            let state = &mut *self.lock();
            if state.closed {
                state.gave_back(&buffer);
                return;
            }
            match made {
                Ok(()) => drop(state.ready.insert(number, Ok(buffer))),
                Err(error) => {
                    state.gave_back(&buffer);
                    state.ready.insert(number, Err(error));
                }
            }
            self.made.notify_all();
        }
    }

    /// Waits for a batch, which is the next one.
    pub fn take(&self, number: u64) -> Result<Batch, DataError> {
        let mut state = self.lock();
        loop {
            if let Some(batch) = state.ready.remove(&number) {
                (state.handed, state.waits_for) = (number + 1, None);
                self.wanted.notify_all();
                return batch;
            }
            if state.lost {
                return Err(DataError::WorkerGone);
            }
            state.waits_for = Some(number);
            self.wanted.notify_all();
            state = self.made.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A buffer to be filled.
    pub fn buffer(&self, empty: impl FnOnce() -> Batch) -> Batch {
        self.lock().buffer(empty)
    }

    /// Takes a buffer back, or gives its memory back where none is kept.
    pub fn put_back(&self, mut buffer: Batch) {
        let state = &mut *self.lock();
        if state.paused || state.buffers > self.most_buffers {
            state.gave_back(&buffer);
        } else {
            buffer.clear();
            state.spares.push(buffer);
        }
    }

    /// Gives back what was made ahead and what waits to be filled, and makes nothing ahead from now on; how many bytes that was.
    pub fn pause(&self) -> u64 {
        let state = &mut *self.lock();
        state.paused = true;
        let before = state.bytes;
        give_back_all(state);
        before - state.bytes
    }

    /// Makes batches ahead again.
    pub fn resume(&self) {
        self.lock().paused = false;
        self.wanted.notify_all();
    }

    pub fn most_bytes(&self) -> u64 {
        self.lock().most_bytes
    }

    /// What its batches take now.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }
}

/// Gives back every buffer that nobody is at work with. A batch that could not be made stays an error.
fn give_back_all(state: &mut State) {
    for buffer in std::mem::take(&mut state.spares) {
        state.gave_back(&buffer);
    }
    for (number, made) in std::mem::take(&mut state.ready) {
        match made {
            Ok(batch) if state.waits_for != Some(number) => {
                state.gave_back(&batch);
                state.again.insert(number);
            }
            kept => drop(state.ready.insert(number, kept)),
        }
    }
}
