//! Moves between homes and memory that only a device reaches. From and to the host a move is one copy. From and to a disk it
//! takes two hops, through pieces of host memory: the disk works on one of them while another is copied.

use std::collections::VecDeque;
use std::ops::Range;

use plimsoll_memory::{Block, FarMemory, Region};

use crate::request::{Finished, Ticket, lock};
use crate::{ALIGNMENT, BufferPool, Direction, DiskEngine, DiskError, Home, Stretch, pages};

/// Bytes of a piece: several requests to a disk.
const PIECE: u64 = 4 << 20;

/// Pieces in each direction.
const PIECES: usize = 2;

/// The pieces of both directions.
#[derive(Debug)]
pub(crate) struct Staging {
    coming: BufferPool,
    leaving: BufferPool,
    /// What they would take, in a dry run.
    _planned: Option<Block>,
}

impl Staging {
    /// What all pieces take.
    pub const BYTES: u64 = 2 * PIECES as u64 * PIECE;

    /// Pieces of so much memory.
    pub fn of(memory: Region) -> Staging {
        let (coming, leaving) = memory.split_at(PIECES * PIECE as usize);
        Staging {
            coming: BufferPool::cut(coming, PIECES, PIECE),
            leaving: BufferPool::cut(leaving, PIECES, PIECE),
            _planned: None,
        }
    }

    /// No pieces.
    pub fn dry(planned: Block) -> Staging {
        Staging { coming: BufferPool::none(), leaving: BufferPool::none(), _planned: Some(planned) }
    }
}

/// Moves the stretches of a device's buffer, and waits until all of them are done.
///
/// # Errors
/// The first that there was; what comes after it is not moved. Without staging nothing moves to or from a disk.
pub(crate) fn move_far(
    engine: &DiskEngine,
    staging: Option<&Staging>,
    direction: Direction,
    stretches: &[Stretch],
    far: &mut dyn FarMemory,
) -> Result<(), DiskError> {
    let pieces = staging.map(|staging| match direction {
        Direction::Prefetch => &staging.coming,
        Direction::WriteBack => &staging.leaving,
    });
    let mut at = far.start().next_multiple_of(ALIGNMENT) - far.start();
    let mut hops = Hops { engine, pieces, direction, far, under_way: VecDeque::new() };
    let mut outcome = Ok(());
    for Stretch { bytes, moves } in stretches {
        if let (Ok(()), Some((home, part))) = (&outcome, moves) {
            outcome = hops.move_part(home, part.clone(), at);
        }
        at += bytes;
    }
    // Pieces come back whatever happened.
    while let Some(arrived) = hops.arrive() {
        outcome = outcome.and(arrived);
    }
    outcome
}

/// A move with what the disk works on, and where in the buffer each piece belongs.
struct Hops<'m> {
    engine: &'m DiskEngine,
    pieces: Option<&'m BufferPool>,
    direction: Direction,
    far: &'m mut dyn FarMemory,
    under_way: VecDeque<(Ticket, u64)>,
}

impl Hops<'_> {
    /// Moves a part of a home from or to a place of the buffer, but for what is under way afterwards.
    fn move_part(&mut self, home: &Home, part: Range<u64>, at: u64) -> Result<(), DiskError> {
        let Some((_, first)) = home.on_disk() else { return self.copy(home, part, at) };
        let bytes = first + part.start..first + part.end;
        let whole = pages(&bytes);
        for start in (whole.start..whole.end).step_by(PIECE as usize) {
            let piece = bytes.start.max(start)..bytes.end.min(start + PIECE);
            let place = at + (piece.start - whole.start);
            let (part, mut memory) = (piece.start - first..piece.end - first, self.free_piece()?);
            if self.direction == Direction::WriteBack {
                let out = memory.bytes_mut().get_mut(..(piece.end - piece.start) as usize);
                if let Err(error) = self.far.copy_out(place, out.unwrap_or_default()) {
                    self.give_back(memory);
                    return Err(error.into());
                }
            }
            self.under_way.push_back((home.begin(self.engine, self.direction, part, memory), place));
        }
        Ok(())
    }

    /// The one hop from or to a home on the host.
    fn copy(&mut self, home: &Home, part: Range<u64>, at: u64) -> Result<(), DiskError> {
        let memory = home.on_host().ok_or(DiskError::Stopped)?;
        let mut memory = lock(memory);
        let (has, needed) = (memory.len() as u64, part.end);
        let bytes = memory.bytes_mut().get_mut(part.start as usize..part.end as usize);
        let bytes = bytes.ok_or(DiskError::Buffer { has, needed })?;
        match self.direction {
            Direction::Prefetch => self.far.copy_in(at, bytes)?,
            Direction::WriteBack => self.far.copy_out(at, bytes)?,
        }
        Ok(())
    }

    /// A piece that nobody works on, behind the oldest that is under way where there is no other.
    fn free_piece(&mut self) -> Result<Region, DiskError> {
        loop {
            if let Some(piece) = self.pieces.and_then(BufferPool::take) {
                return Ok(piece);
            }
            self.arrive().ok_or(DiskError::Buffer { has: 0, needed: PIECE })??;
        }
    }

    /// Waits for the oldest that is under way, and takes what was read on to the device.
    fn arrive(&mut self) -> Option<Result<(), DiskError>> {
        let (ticket, place) = self.under_way.pop_front()?;
        let Finished { region, outcome } = ticket.wait_behind();
        let outcome = outcome.and_then(|within| match self.direction {
            Direction::Prefetch => {
                Ok(self.far.copy_in(place, region.bytes().get(within).unwrap_or_default())?)
            }
            Direction::WriteBack => Ok(()),
        });
        self.give_back(region);
        Some(outcome)
    }

    fn give_back(&self, piece: Region) {
        if let Some(pieces) = self.pieces {
            pieces.give_back(piece);
        }
    }
}

#[cfg(test)]
mod tests;
