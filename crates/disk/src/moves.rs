//! Moves between buffers and homes, on two streams: one for copies in, one for copies out. A move is waited for where what it
//! brings, or the buffer that it leaves, is needed and nowhere else.
//!
//! On a stream moves begin in the order in which they were asked for, and a move on a disk is not waited for before the next
//! one begins: the disk always has its queue full. A move whose memory is that of another one begins when that is done. So
//! what comes into a buffer follows behind what goes out of it; and so does everything that is to come in after that,
//! though it be what has just gone out.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use plimsoll_memory::Region;

use crate::request::{Finished, Ticket, lock};
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
    Here(Region),
    /// That of a move out of it, behind which the next one begins.
    Behind(Moving),
}

/// A move that was asked for. Dropped, it is waited for: nothing stays under way behind who has asked.
#[derive(Debug)]
#[must_use = "what is on its way has to be waited for"]
pub struct Moving(Option<Event<Option<UnderWay>>>);

/// A buffer's memory, behind its move, and what came of that.
pub type Arrived = (Region, Result<(), DiskError>);

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

/// A move that has begun: a buffer's memory, in order.
#[derive(Debug)]
struct UnderWay {
    before: Region,
    parts: Vec<Part>,
    rest: Region,
}

#[derive(Debug)]
enum Part {
    Stays(Region),
    /// From or to this home, which is nobody else's before it is done.
    Moves(Arc<Home>, Ticket),
}

impl UnderWay {
    /// Begins a move. `memory` has room for the stretches from its first whole page on.
    fn begin(engine: &DiskEngine, direction: Direction, stretches: Vec<Stretch>, memory: Region) -> UnderWay {
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
        UnderWay { before, parts, rest }
    }

    /// Waits until all of it is done.
    fn finish(self, wait: impl Fn(Ticket) -> Finished) -> Arrived {
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
        let regions: Vec<Region> = self.parts.into_iter().map(&mut arrive).chain([self.rest]).collect();
        let join = |whole: Region, part| whole.join(part).unwrap_or_else(|(whole, _)| whole);
        (regions.into_iter().fold(self.before, join), outcome)
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
    pub fn begin(&self, direction: Direction, stretches: Vec<Stretch>, memory: BufferMemory) -> Moving {
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
            Some(UnderWay::begin(&engine, direction, stretches, memory))
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
mod tests {
    use std::sync::mpsc::channel;

    use plimsoll_memory::{Tag, Tier};

    use super::*;
    use crate::{EngineSettings, LowerTiers, SpillSettings};

    /// Several pieces of the engine's, and a rest.
    const BYTES: u64 = (3 << 20) + 5000;

    fn tiers() -> (tempfile::TempDir, LowerTiers) {
        let folder = tempfile::tempdir().unwrap();
        let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
        let tiers = LowerTiers::open(16 << 20, 16 << 20, &spill).unwrap();
        (folder, tiers)
    }

    /// Homes that hold these bytes everywhere.
    fn homes<const N: usize>(tiers: &LowerTiers, tier: Tier, values: [u8; N]) -> [Arc<Home>; N] {
        values.map(|value| {
            let home = tiers.take(tier, BYTES, Tag::Weights, "home").unwrap();
            tiers.write_now(&home, 0, &vec![value; BYTES as usize]).unwrap();
            Arc::new(home)
        })
    }

    /// All of a home.
    fn all(home: &Arc<Home>) -> Vec<Stretch> {
        let bytes = BYTES.next_multiple_of(ALIGNMENT);
        vec![Stretch { bytes, moves: Some((Arc::clone(home), 0..BYTES)) }]
    }

    /// A buffer that holds this byte everywhere.
    fn buffer(value: u8) -> Region {
        let mut region = Region::new(BYTES.next_multiple_of(ALIGNMENT)).unwrap();
        region.bytes_mut().fill(value);
        region
    }

    fn holds(bytes: &[u8], value: u8) -> bool {
        bytes[..BYTES as usize].iter().all(|&byte| byte == value)
    }

    fn lies_in(tiers: &LowerTiers, home: &Home, value: u8) -> bool {
        let mut out = vec![0; BYTES as usize];
        tiers.read_now(home, 0, &mut out).unwrap();
        holds(&out, value)
    }

    #[test]
    fn what_is_being_written_is_read_when_it_is_written() {
        let (_folder, tiers) = tiers();
        for tier in [Tier::Host, Tier::Disk] {
            let [a, b] = homes(&tiers, tier, [1, 2]);
            for value in 10..20 {
                let begin = |direction, home, memory| tiers.begin(direction, all(home), memory).unwrap();
                let out = begin(Direction::WriteBack, &a, BufferMemory::Here(buffer(value)));
                let refilled = begin(Direction::Prefetch, &b, BufferMemory::Behind(out));
                let again = begin(Direction::Prefetch, &a, BufferMemory::Here(buffer(0)));
                let (memory, outcome) = again.wait().unwrap();
                assert!(outcome.is_ok() && holds(memory.bytes(), value), "{tier} {value}");
                let (memory, outcome) = refilled.wait().unwrap();
                assert!(outcome.is_ok() && holds(memory.bytes(), 2), "{tier} {value}");
                assert!(lies_in(&tiers, &a, value) && lies_in(&tiers, &b, 2));
            }
        }
        tiers.settle().unwrap();
    }

    #[test]
    fn copies_in_wait_for_copies_out_of_their_own_buffers_alone() {
        let (_folder, tiers) = tiers();
        let engine = Arc::new(DiskEngine::start(EngineSettings::default()).unwrap());
        let streams = Streams::start(&engine).unwrap();
        let [a, b] = homes(&tiers, Tier::Disk, [1, 2]);
        let (go, gate) = channel::<()>();
        let held = streams.copies_out.begin(false, move || gate.recv().is_ok());
        let out = streams.begin(Direction::WriteBack, all(&a), BufferMemory::Here(buffer(7)));
        let other = streams.begin(Direction::Prefetch, all(&b), BufferMemory::Here(buffer(0)));
        // Nothing has gone out yet.
        assert!(holds(other.wait().unwrap().0.bytes(), 2));
        let refilled = streams.begin(Direction::Prefetch, all(&b), BufferMemory::Behind(out));
        assert!(lies_in(&tiers, &a, 1));
        go.send(()).unwrap();
        assert!(held.wait().unwrap());
        assert!(holds(refilled.wait().unwrap().0.bytes(), 2));
        assert!(lies_in(&tiers, &a, 7));
    }

    #[test]
    fn a_move_out_that_failed_is_told_once_and_costs_no_buffer() {
        let (folder, tiers) = tiers();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![5; BYTES as usize]).unwrap();
        let read_only = Arc::new(tiers.adopt(&path, 0..BYTES).unwrap());
        let begin = |direction, memory| tiers.begin(direction, all(&read_only), memory).unwrap();
        let out = begin(Direction::WriteBack, BufferMemory::Here(buffer(1)));
        let refilled = begin(Direction::Prefetch, BufferMemory::Behind(out));
        assert!(matches!(tiers.settle(), Err(DiskError::Stopped)));
        assert!(tiers.settle().is_ok());
        let (memory, outcome) = refilled.wait().unwrap();
        assert!(outcome.is_ok() && holds(memory.bytes(), 5));
        let (memory, outcome) = begin(Direction::WriteBack, BufferMemory::Here(memory)).wait().unwrap();
        assert!(outcome.is_err() && holds(memory.bytes(), 5));
    }

    #[test]
    fn what_nobody_waits_for_is_done_all_the_same() {
        let (_folder, tiers) = tiers();
        for tier in [Tier::Host, Tier::Disk] {
            let [home] = homes(&tiers, tier, [1]);
            drop(tiers.begin(Direction::WriteBack, all(&home), BufferMemory::Here(buffer(9))));
            assert!(lies_in(&tiers, &home, 9));
        }
        assert!(
            LowerTiers::dry().begin(Direction::Prefetch, Vec::new(), BufferMemory::Here(buffer(0))).is_none()
        );
        LowerTiers::dry().settle().unwrap();
    }
}
