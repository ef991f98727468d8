//! Ranks that are processes, over the system's MPI.

use mpi::environment::Universe;
use mpi::point_to_point::{self, Status};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Equivalence, Source};
use mpi::{Count, Threading};

use crate::{Transport, TransportError};

/// Bytes of a message at most: MPI counts in 32 bits.
const MESSAGE: usize = 1 << 30;

/// A rank that is a process of its own. MPI ends when it is dropped.
pub struct Mpi {
    world: SimpleCommunicator,
    _universe: Universe,
}

impl Mpi {
    /// Joins the ranks that were started together; `None` where MPI was started before.
    pub fn start() -> Option<Mpi> {
        let (universe, _) = mpi::initialize_with_threading(Threading::Funneled)?;
        Some(Mpi { world: universe.world(), _universe: universe })
    }

    /// Ends all ranks at once.
    pub fn abort(&self, code: i32) -> ! {
        self.world.abort(code)
    }
}

impl Transport for Mpi {
    fn rank(&self) -> u32 {
        self.world.rank().unsigned_abs()
    }

    fn size(&self) -> u32 {
        self.world.size().unsigned_abs()
    }

    fn send_receive(
        &self,
        send: Option<(u32, &[u8])>,
        receive: Option<(u32, &mut [u8])>,
    ) -> Result<(), TransportError> {
        let process = |rank: u32| {
            let known = rank < self.size() && rank != self.rank();
            let rank_here = i32::try_from(rank).ok().filter(|_| known);
            rank_here.map(|rank| self.world.process_at_rank(rank)).ok_or(TransportError::NoSuchRank { rank })
        };
        let (to, mut rest) = match send {
            Some((to, bytes)) => (Some(process(to)?), bytes),
            None => (None, &[][..]),
        };
        let (from, mut room) = match receive {
            Some((from, into)) => (Some((from, process(from)?)), into),
            None => (None, &mut [][..]),
        };
        // An empty message is one too.
        let (mut sends, mut receives) = (to.is_some(), from.is_some());
        while sends || receives {
            let (part, later) = rest.split_at(rest.len().min(MESSAGE));
            let (into, further) = room.split_at_mut(room.len().min(MESSAGE));
            let status = match (to.filter(|_| sends), from.filter(|_| receives)) {
                (Some(to), Some((_, from))) => {
                    Some(point_to_point::send_receive_into(part, &to, into, &from))
                }
                (Some(to), None) => {
                    to.send(part);
                    None
                }
                (None, Some((_, from))) => Some(from.receive_into(into)),
                (None, None) => None,
            };
            if let (Some(status), Some((rank, _))) = (status, from) {
                check(rank, &status, into.len())?;
            }
            (rest, room) = (later, further);
            (sends, receives) = (sends && !rest.is_empty(), receives && !room.is_empty());
        }
        Ok(())
    }
}

fn check(rank: u32, status: &Status, expected: usize) -> Result<(), TransportError> {
    let sent = status.count(u8::equivalent_datatype());
    match Count::try_from(expected) {
        Ok(expected) if expected == sent => Ok(()),
        _ => Err(TransportError::Size {
            rank,
            sent: u64::from(sent.unsigned_abs()),
            expected: expected as u64,
        }),
    }
}
