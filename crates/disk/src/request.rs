//! A request under way: its pieces, which workers do in any order, and the ticket by which it is waited for.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plimsoll_memory::Region;

use crate::DiskError;
use crate::file::DiskFile;
use crate::statistics::IoClock;

/// A read or a write that was asked for. Dropped, what has not begun of it is left out, and the memory is given up when
/// what has begun is done.
#[must_use = "a request whose ticket is dropped is left out"]
#[derive(Debug)]
pub struct Ticket {
    watched: Watched,
    /// What was handed over before and behind the whole pages.
    before: Region,
    after: Region,
}

/// A request that is left out when nobody watches it any more.
#[derive(Debug)]
struct Watched(Arc<Request>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.cancelled.store(true, Ordering::Relaxed);
    }
}

/// What came of a request.
#[derive(Debug)]
pub struct Finished {
    /// The memory that was handed over, all of it.
    pub region: Region,
    /// Where in it the bytes are, or why not.
    pub outcome: Result<Range<usize>, DiskError>,
}

impl Finished {
    /// The bytes that were read or written.
    pub fn bytes(&self) -> Result<&[u8], &DiskError> {
        let range = self.outcome.as_ref()?;
        Ok(self.region.bytes().get(range.clone()).unwrap_or_default())
    }
}

impl Ticket {
    pub(crate) fn new(request: Arc<Request>, before: Region, after: Region) -> Ticket {
        Ticket { watched: Watched(request), before, after }
    }

    /// That of a request which is done, or could not be begun.
    pub(crate) fn answered(
        clock: Arc<Mutex<IoClock>>,
        region: Region,
        outcome: Result<Range<usize>, DiskError>,
    ) -> Ticket {
        let (bytes, error) = outcome.map_or_else(|error| (0..0, Some(error)), |bytes| (bytes, None));
        let request = Request::begin(clock, 0, bytes, false);
        request.state().error = error;
        let (before, after) = region.split_at(0);
        Ticket::new(request, before, after)
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.watched.0.state().pending == 0
    }

    /// Waits until the request is done and gives its memory back.
    pub fn wait(self) -> Finished {
        let began = (!self.is_done()).then(Instant::now);
        let clock = Arc::clone(&self.watched.0.clock);
        let finished = self.wait_behind();
        if let Some(began) = began {
            lock(&clock).waited(began.elapsed().as_secs_f64());
        }
        finished
    }

    /// The same where nothing else waits meanwhile, so that it does not count as waiting.
    pub(crate) fn wait_behind(self) -> Finished {
        let request = &self.watched.0;
        let mut state = request.state();
        while state.pending > 0 {
            state = request.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let parts = std::mem::take(&mut state.parts);
        let outcome = match state.error.take() {
            Some(error) => Err(error),
            None => Ok(request.bytes.clone()),
        };
        drop(state);
        // The pieces are neighbours, in order, and all came back.
        let all = parts.into_iter().flatten().chain([self.after]);
        let region = all.fold(self.before, |whole, part| whole.join(part).unwrap_or_else(|(whole, _)| whole));
        Finished { region, outcome }
    }
}

/// What workers and the ticket share.
#[derive(Debug)]
pub(crate) struct Request {
    state: Mutex<State>,
    done: Condvar,
    cancelled: AtomicBool,
    clock: Arc<Mutex<IoClock>>,
    /// Where the bytes asked for lie in the memory.
    bytes: Range<usize>,
    write: bool,
}

#[derive(Debug)]
struct State {
    pending: usize,
    parts: Vec<Option<Region>>,
    error: Option<DiskError>,
}

impl Request {
    /// A request of `parts` pieces.
    pub fn begin(clock: Arc<Mutex<IoClock>>, parts: usize, bytes: Range<usize>, write: bool) -> Arc<Request> {
        if parts > 0 {
            lock(&clock).began();
        }
        let mut places = Vec::new();
        places.resize_with(parts, || None);
        let state = State { pending: parts, parts: places, error: None };
        let cancelled = AtomicBool::new(false);
        Arc::new(Request { state: Mutex::new(state), done: Condvar::new(), cancelled, clock, bytes, write })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// A piece is done with.
    fn finish(&self, part: usize, region: Region, outcome: Result<(), DiskError>) {
        let mut state = self.state();
        if let Some(place) = state.parts.get_mut(part) {
            *place = Some(region);
        }
        if let Err(error) = outcome {
            state.error.get_or_insert(error);
        }
        state.pending = state.pending.saturating_sub(1);
        if state.pending == 0 {
            let moved = if state.error.is_none() { self.bytes.len() as u64 } else { 0 };
            lock(&self.clock).ended(moved, self.write);
            self.done.notify_all();
        }
    }
}

/// A piece of a request: whole pages of a file, and memory for them.
#[derive(Debug)]
pub(crate) struct Piece {
    pub file: Arc<DiskFile>,
    pub request: Arc<Request>,
    pub part: usize,
    pub offset: u64,
    /// Bytes that have to be there, from `offset` on.
    pub needed: usize,
    /// `None` once it was given back.
    pub region: Option<Region>,
}

impl Piece {
    /// Does it, unless nobody waits for it any more.
    pub fn run(mut self) {
        let request = Arc::clone(&self.request);
        let outcome = match &mut self.region {
            _ if request.cancelled.load(Ordering::Relaxed) => Err(DiskError::Stopped),
            Some(region) if request.write => self.file.write_pages(self.offset, region.bytes()),
            Some(region) => self.file.read_pages(self.offset, region.bytes_mut(), self.needed),
            None => Ok(()),
        };
        self.give_back(outcome);
    }

    fn give_back(&mut self, outcome: Result<(), DiskError>) {
        if let Some(region) = self.region.take() {
            self.request.finish(self.part, region, outcome);
        }
    }
}

impl Drop for Piece {
    /// One that was never done is answered too, so that nobody waits for it for ever.
    fn drop(&mut self) {
        self.give_back(Err(DiskError::Stopped));
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whatever is locked is changed in steps that cannot panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
