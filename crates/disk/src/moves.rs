//! Moves between buffers and homes, on two streams: one for copies in, one for copies out. A move is waited for where what it
//! brings, or the buffer that it leaves, is needed and nowhere else.
//!
//! On a stream moves begin in the order in which they were asked for, and a move on a disk is not waited for before the next
//! one begins: the disk always has its queue full. A move whose memory is that of another one begins when that is done. So
//! what comes into a buffer follows behind what goes out of it; and so does everything that is to come in after that,
//! though it be what has just gone out.
//!
//! Memory that only a device reaches is copied by the streams themselves, a move at a time (`staging`).

use std::ops::Range;
use std::sync::{Arc, Mutex};

use plimsoll_memory::{Loan, Region};

use crate::request::{Finished, Ticket, lock};
use crate::staging::{Staging, move_far};
use crate::stream::{CopyStream, Event};
use crate::{ALIGNMENT, DiskEngine, DiskError, Home};

/// In which direction bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Into a buffer, ahead of its use.
    Prefetch,
    /// To where they live. What is only read stays as it is.
    WriteBack,
}

/// Some bytes of a buffer, in whole pages but for the end of a home, and the part of a home that they move from or to; none
/// for bytes that stay.
#[derive(Debug)]
pub struct Stretch {
    /// How many.
    pub bytes: u64,
    /// The home, and the bytes of it, from a whole page on.
    pub moves: Option<(Arc<Home>, Range<u64>)>,
}

/// The memory of a buffer.
#[derive(Debug)]
pub enum BufferMemory {
    /// The memory itself.
    Here(Loan),
    /// That of a move out of it, behind which the next one begins.
    Behind(Moving),
}

/// A move that was asked for. Dropped, it is waited for: nothing stays under way behind who has asked.
#[derive(Debug)]
#[must_use = "what is on its way has to be waited for"]
pub struct Moving(Option<Event<Option<UnderWay>>>);

/// A buffer's memory, behind its move, and what came of that.
pub type Arrived = (Loan, Result<(), DiskError>);

impl Moving {
    /// Waits until it is done, and gives the buffer's memory back; `None` where the tiers ended before it began.
    pub fn wait(mut self) -> Option<Arrived> {
        Some(self.0.take()?.wait().ok()??.finish(Ticket::wait))
    }

    /// The same where nothing else waits meanwhile.
    fn wait_behind(&mut self) -> Option<Arrived> {
        Some(self.0.take()?.wait_behind()??.finish(Ticket::wait_behind))
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.wait_behind();
    }
}

/// A move that has begun.
#[derive(Debug)]
enum UnderWay {
    /// A buffer's memory, in order.
    Parts { before: Region, parts: Vec<Part>, rest: Region },
    /// One that is done.
    Done(Arrived),
}

#[derive(Debug)]
enum Part {
    Stays(Region),
    /// From or to this home, which is nobody else's before it is done.
    Moves(Arc<Home>, Ticket),
}

impl UnderWay {
    /// Begins a move. `memory` has room for the stretches from its first whole page on.
    fn begin(
        engine: &DiskEngine,
        staging: Option<&Staging>,
        direction: Direction,
        stretches: Vec<Stretch>,
        memory: Loan,
    ) -> UnderWay {
        let memory = match memory {
            Loan::Region(memory) => memory,
            Loan::Far(mut far) => {
                let outcome = move_far(engine, staging, direction, &stretches, far.as_mut());
                return UnderWay::Done((Loan::Far(far), outcome));
            }
        };
        let skip = memory.skip_to(ALIGNMENT as usize);
        let (before, mut rest) = memory.split_at(skip);
        let mut parts = Vec::with_capacity(stretches.len());
        for Stretch { bytes, moves } in stretches {
            let (region, after) = rest.split_at(usize::try_from(bytes).unwrap_or(usize::MAX));
            rest = after;
            parts.push(match moves {
                None => Part::Stays(region),
                Some((home, part)) => {
                    let ticket = home.begin(engine, direction, part, region);
                    Part::Moves(home, ticket)
                }
            });
        }
        UnderWay::Parts { before, parts, rest }
    }

    /// Waits until all of it is done.
    fn finish(self, wait: impl Fn(Ticket) -> Finished) -> Arrived {
        let (before, parts, rest) = match self {
            UnderWay::Parts { before, parts, rest } => (before, parts, rest),
            UnderWay::Done(arrived) => return arrived,
        };
        let mut outcome = Ok(());
        let mut arrive = |part| match part {
            Part::Stays(region) => region,
            Part::Moves(_home, ticket) => {
                let Finished { region, outcome: own } = wait(ticket);
                if let (Ok(()), Err(error)) = (&outcome, own) {
                    outcome = Err(error);
                }
                region
            }
        };
        let regions: Vec<Region> = parts.into_iter().map(&mut arrive).chain([rest]).collect();
        let join = |whole: Region, part| whole.join(part).unwrap_or_else(|(whole, _)| whole);
        (Loan::Region(regions.into_iter().fold(before, join)), outcome)
    }
}

/// The streams of copies in and out.
#[derive(Debug)]
pub(crate) struct Streams {
    /// They end before the engine.
    copies_in: CopyStream,
    copies_out: CopyStream,
    engine: Arc<DiskEngine>,
    /// What came of a write-back whose buffer was used again before anybody asked.
    failed: Arc<Mutex<Option<DiskError>>>,
}

impl Streams {
    /// Memory that they take, beside the engine's.
    pub const STACK_BYTES: u64 = 2 * crate::stream::STACK_BYTES as u64;

    /// Starts their threads.
    ///
    /// # Errors
    /// The system starts no more.
    pub fn start(engine: &Arc<DiskEngine>) -> Result<Streams, DiskError> {
        let [copies_in, copies_out] =
            [CopyStream::start(engine.clock())?, CopyStream::start(engine.clock())?];
        Ok(Streams { copies_in, copies_out, engine: Arc::clone(engine), failed: Arc::default() })
    }

    /// Begins a move behind those that were asked for before in its direction.
    pub fn begin(
        &self,
        staging: Option<Arc<Staging>>,
        direction: Direction,
        stretches: Vec<Stretch>,
        memory: BufferMemory,
    ) -> Moving {
        let homes = || stretches.iter().filter_map(|stretch| stretch.moves.as_ref());
        let on_disk = homes().any(|(home, _)| home.is_on_disk());
        let (engine, failed) = (Arc::clone(&self.engine), Arc::clone(&self.failed));
        let stream = match direction {
            Direction::Prefetch => &self.copies_in,
            Direction::WriteBack => &self.copies_out,
        };
        Moving(Some(stream.begin(on_disk, move || {
            let memory = match memory {
                BufferMemory::Here(memory) => memory,
                BufferMemory::Behind(mut before) => {
                    let (memory, outcome) = before.wait_behind()?;
                    if let Err(error) = outcome {
                        lock(&failed).get_or_insert(error);
                    }
                    memory
                }
            };
            Some(UnderWay::begin(&engine, staging.as_deref(), direction, stretches, memory))
        })))
    }

    /// Waits until every move out of a buffer that is used again is done.
    ///
    /// # Errors
    /// One of them failed.
    pub fn settle(&self) -> Result<(), DiskError> {
        self.copies_in.begin(true, || ()).wait()?;
        lock(&self.failed).take().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests;
