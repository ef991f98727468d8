//! The engine: requests cut into pieces, and the threads that do them.
//!
//! As many pieces are under way as there are threads, which is the depth of the disk's queue. Threads with plain reads and
//! writes reach what asynchronous interfaces do here, and are allowed in every container.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use plimsoll_memory::{Region, run_on_all_cores};

use crate::file::DiskFile;
use crate::request::{Piece, Request, Ticket, lock};
use crate::statistics::{IoClock, IoMeter};
use crate::{ALIGNMENT, BufferPool, DiskError, pages};

/// A worker's stack: system calls and the text of an error.
const STACK_BYTES: usize = 128 << 10;

/// How requests are cut and how many pieces are under way at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Pieces under way at once; 1 at least.
    pub queue_depth: usize,
    /// Bytes of a piece at most, in whole pages.
    pub piece_bytes: u64,
}

impl Default for EngineSettings {
    fn default() -> Self {
        EngineSettings { queue_depth: 4, piece_bytes: 1 << 20 }
    }
}

impl EngineSettings {
    /// Memory that an engine takes at most, beside what is handed to it.
    pub fn memory_bytes(&self) -> u64 {
        (self.queue_depth.max(1) as u64).saturating_mul(STACK_BYTES as u64)
    }
}

/// Reads and writes of regions of files, in the background. Dropping it ends its threads; what they have not begun is
/// answered with [`DiskError::Stopped`].
#[derive(Debug)]
pub struct DiskEngine {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    piece_bytes: usize,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    clock: Arc<Mutex<IoClock>>,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Piece>,
    closing: bool,
}

impl DiskEngine {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system starts no more.
    pub fn start(settings: EngineSettings) -> Result<DiskEngine, DiskError> {
        let piece_bytes = usize::try_from(settings.piece_bytes / ALIGNMENT * ALIGNMENT).unwrap_or(usize::MAX);
        let shared = Arc::new(Shared::default());
        let piece_bytes = piece_bytes.max(ALIGNMENT as usize);
        // The engine exists before its threads, so that those that did start are ended where one does not.
        let mut engine = DiskEngine { shared, workers: Vec::new(), piece_bytes };
        for index in 0..settings.queue_depth.max(1) {
            let shared = Arc::clone(&engine.shared);
            let thread = std::thread::Builder::new().name(format!("disk-{index}")).stack_size(STACK_BYTES);
            let work = move || {
                run_on_all_cores();
                shared.work();
            };
            engine.workers.push(thread.spawn(work).map_err(DiskError::Thread)?);
        }
        Ok(engine)
    }

    /// Begins to read `bytes` of a file, wherever they begin and end, into memory that has room for their whole
    /// [`pages`]. The ticket tells where in it they lie.
    pub fn prefetch(&self, file: &Arc<DiskFile>, bytes: Range<u64>, into: Region) -> Ticket {
        let within = bytes.start <= bytes.end && file.length().is_none_or(|length| bytes.end <= length);
        if !within {
            let (path, length) = (file.path().to_owned(), file.length().unwrap_or(0));
            let error = DiskError::EndOfFile { path, length, start: bytes.start, end: bytes.end };
            return self.refuse(into, error);
        }
        self.submit(file, bytes, into, false)
    }

    /// Begins to write the first `bytes` aligned bytes of a buffer to `offset`, a multiple of [`ALIGNMENT`]. What follows
    /// them in the buffer up to a whole page is written too.
    pub fn write_back(&self, file: &Arc<DiskFile>, offset: u64, bytes: u64, from: Region) -> Ticket {
        if !offset.is_multiple_of(ALIGNMENT) || offset.checked_add(bytes).is_none() {
            return self.refuse(from, DiskError::Buffer { has: 0, needed: bytes });
        }
        self.submit(file, offset..offset + bytes, from, true)
    }

    /// Reads parts of files into memory of the caller's, now, as many at once as there are buffers for.
    ///
    /// # Errors
    /// The first that failed; what comes after it is not read.
    pub fn read_each<'f, 'o>(
        &self,
        buffers: &BufferPool,
        parts: impl IntoIterator<Item = (&'f Arc<DiskFile>, Range<u64>, &'o mut [u8])>,
    ) -> Result<(), DiskError> {
        let mut reading: VecDeque<(Ticket, &mut [u8])> = VecDeque::new();
        let arrive = |(ticket, out): (Ticket, &mut [u8])| {
            let finished = ticket.wait();
            let outcome = match finished.bytes() {
                Ok(bytes) if bytes.len() == out.len() => {
                    out.copy_from_slice(bytes);
                    Ok(())
                }
                _ => finished.outcome.map(|_| ()),
            };
            buffers.give_back(finished.region);
            outcome
        };
        let mut outcome = Ok(());
        for (file, bytes, out) in parts {
            let mut buffer = buffers.take();
            if buffer.is_none()
                && let Some(oldest) = reading.pop_front()
            {
                outcome = arrive(oldest);
                buffer = buffers.take();
            }
            match (&outcome, buffer) {
                (Ok(()), Some(buffer)) => reading.push_back((self.prefetch(file, bytes, buffer), out)),
                (Ok(()), None) => outcome = Err(DiskError::Buffer { has: 0, needed: out.len() as u64 }),
                (Err(_), buffer) => buffer.into_iter().for_each(|buffer| buffers.give_back(buffer)),
            }
            if outcome.is_err() {
                break;
            }
        }
        // Buffers come back whatever happened.
        reading.into_iter().map(arrive).fold(outcome, |before, now| before.and(now))
    }

    /// What keeps the totals.
    pub(crate) fn clock(&self) -> Arc<Mutex<IoClock>> {
        Arc::clone(&self.shared.clock)
    }

    /// The totals since the start, to look at even when the engine is in other hands.
    pub fn meter(&self) -> IoMeter {
        IoMeter(self.clock())
    }

    fn refuse(&self, region: Region, error: DiskError) -> Ticket {
        Ticket::answered(self.clock(), region, Err(error))
    }

    fn submit(&self, file: &Arc<DiskFile>, bytes: Range<u64>, region: Region, write: bool) -> Ticket {
        let pages = pages(&bytes);
        let skip = region.skip_to(ALIGNMENT as usize);
        let (has, needed) = ((region.len() - skip) as u64, pages.end - pages.start);
        if has < needed {
            return self.refuse(region, DiskError::Buffer { has, needed });
        }
        // All of these are lengths within the region from here on.
        let first = skip + (bytes.start - pages.start) as usize;
        let within = first..first + (bytes.end - bytes.start) as usize;
        let (before, rest) = region.split_at(skip);
        let (mut rest, after) = rest.split_at(needed as usize);
        let parts = (needed as usize).div_ceil(self.piece_bytes);
        let request = Request::begin(Arc::clone(&self.shared.clock), parts, within, write);
        let mut jobs = Vec::with_capacity(parts);
        let mut offset = pages.start;
        for part in 0..parts {
            let (region, later) = rest.split_at(self.piece_bytes);
            rest = later;
            let length = region.len() as u64;
            let needed = (bytes.end - offset).min(length) as usize;
            let (file, request) = (Arc::clone(file), Arc::clone(&request));
            jobs.push(Piece { file, request, part, offset, needed, region: Some(region) });
            offset += length;
        }
        lock(&self.shared.queue).jobs.extend(jobs);
        self.shared.changed.notify_all();
        Ticket::new(request, before, after)
    }
}

impl Shared {
    /// A worker's life.
    fn work(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let job = loop {
                if queue.closing {
                    return;
                }
                match queue.jobs.pop_front() {
                    Some(job) => break job,
                    None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            job.run();
        }
    }
}

impl Drop for DiskEngine {
    fn drop(&mut self) {
        let left = {
            let mut queue = lock(&self.shared.queue);
            queue.closing = true;
            std::mem::take(&mut queue.jobs)
        };
        self.shared.changed.notify_all();
        drop(left);
        for worker in self.workers.drain(..) {
            // A worker that panicked has answered its request while it unwound.
            let _ = worker.join();
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::fs::File;
    use std::path::Path;

    /// The kernel's own full disk.
    #[test]
    fn a_full_disk_is_an_error_of_its_own() {
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let file = Arc::new(DiskFile::owned(Path::new("spill"), full, false));
        let engine = DiskEngine::start(EngineSettings::default()).unwrap();
        let finished = engine.write_back(&file, 0, 5000, Region::new(3 * ALIGNMENT).unwrap()).wait();
        let error = finished.outcome.unwrap_err();
        assert!(matches!(error, DiskError::Full { bytes: 8192, .. }), "{error}");
        assert!(error.to_string().starts_with("the disk of spill has no room for 8.00 KiB more"), "{error}");
        assert_eq!(engine.meter().totals().bytes_written, 0);
    }
}
