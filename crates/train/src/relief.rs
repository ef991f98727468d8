//! What a run gives back at once when memory gets so short that there may be none for the rest of a step: batches that were made ahead,
//! buffers that wait, free heap, and what the system keeps of files. That changes no result. Which plan the run goes on with is left to
//! [`Pressure`](crate::pressure::Pressure).

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use plimsoll_data::SpareBatches;
use plimsoll_memory::release_free_heap;
use plimsoll_monitor::{Status, Thresholds};

use crate::pressure::{MemoryReading, memory_of};

/// How often memory is looked at within a step.
const EVERY: Duration = Duration::from_millis(100);

/// The thread's stack: it parses small files.
const STACK: usize = 512 << 10;

/// What can be given back.
#[derive(Default)]
pub(crate) struct Relief(Mutex<State>);

#[derive(Default)]
struct State {
    spare: Option<SpareBatches>,
    /// Whether it has been given back and memory has been short since.
    is_given: bool,
    /// Bytes that were given back since somebody asked.
    bytes: Option<u64>,
}

impl Relief {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pipeline of the rung that the run is on now.
    pub fn of_pipeline(&self, spare: SpareBatches) {
        let state = &mut *self.lock();
        (state.spare, state.is_given) = (Some(spare), false);
    }

    /// Gives back at emergency, once, and takes again when memory is no longer critical.
    pub fn look(&self, status: Status) {
        let state = &mut *self.lock();
        if status == Status::Emergency && !state.is_given {
            let before = MemoryReading::now().own_bytes;
            let batches = state.spare.as_ref().map_or(0, SpareBatches::give_back);
            release_free_heap();
            let heap = before.saturating_sub(MemoryReading::now().own_bytes);
            state.is_given = true;
            state.bytes = Some(state.bytes.unwrap_or(0) + batches.max(heap));
        } else if status < Status::Critical && state.is_given {
            if let Some(spare) = &state.spare {
                spare.resume();
            }
            state.is_given = false;
        }
    }

    /// Bytes that were given back since the last call, if any were.
    pub fn told(&self) -> Option<u64> {
        self.lock().bytes.take()
    }
}

/// A thread that looks at memory while steps are taken.
pub(crate) struct Lookout {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Lookout {
    /// Looks for a run that needs so many bytes on its rung. Where no thread can be had, memory is looked at between steps alone.
    pub fn start(relief: Arc<Relief>, need: u64, load_line: u64, thresholds: Thresholds) -> Lookout {
        let (end, ended) = channel::<()>();
        let watch = move || {
            while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let memory = memory_of(need, load_line, thresholds, &MemoryReading::now());
                // Between steps it is said when there is room again.
                if memory.status == Status::Emergency {
                    relief.look(memory.status);
                }
            }
        };
        let thread = std::thread::Builder::new().name("lookout".to_owned()).stack_size(STACK).spawn(watch);
        Lookout { end: Some(end), thread: thread.ok() }
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_given_back_is_given_once_a_shortage() {
        let relief = Relief::default();
        relief.look(Status::Critical);
        assert_eq!(relief.told(), None);
        relief.look(Status::Emergency);
        assert!(relief.told().is_some());
        // It was given; nothing more comes of asking again before there has been room.
        relief.look(Status::Emergency);
        relief.look(Status::Critical);
        relief.look(Status::Emergency);
        assert_eq!(relief.told(), None);
        relief.look(Status::Normal);
        relief.look(Status::Emergency);
        assert!(relief.told().is_some());
    }
}
