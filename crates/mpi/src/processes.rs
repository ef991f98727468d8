//! Ranks that are processes, over the system's MPI.
//!
//! The thread that speaks to the other ranks starts MPI, makes every call and ends MPI: MPI is asked for `MPI_THREAD_FUNNELED`, which
//! is for one thread that calls among several. That thread looks whether its messages have arrived and sleeps between two
//! looks, so that it leaves its core to the computation.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use mpi::environment::Universe;
use mpi::point_to_point::Status;
use mpi::request::{Request, Scope, scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Equivalence, Source};
use mpi::{Count, Threading};
use plimsoll_memory::Looks;
use plimsoll_parallel::{Transport, TransportError, Wired};

/// Bytes of a message at most: MPI counts in 32 bits.
const MESSAGE: usize = 1 << 30;

/// A rank that is a process of its own, on the thread that speaks to the others. MPI ends when it is dropped.
pub struct Mpi {
    world: SimpleCommunicator,
    /// The exit code with which all ranks are to end at once; 0 while they are not.
    ending: Arc<AtomicI32>,
    _universe: Universe,
}

/// The processes that were started together, of which this one is a rank.
pub struct MpiRanks {
    ranks: Wired<Mpi>,
    ending: Arc<AtomicI32>,
}

/// MPI could not be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MpiError {
    /// It was started before, by somebody else in this process.
    #[error("MPI was started before in this process")]
    Started,
    /// It is for programs of one thread.
    #[error(
        "this MPI is for programs of one thread (MPI_THREAD_SINGLE), and ranks compute while one thread of theirs sends (MPI_THREAD_FUNNELED); install one that was built with threads"
    )]
    NoThreads,
    /// The thread that speaks to the others cannot be started.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

impl From<std::io::Error> for MpiError {
    fn from(error: std::io::Error) -> Self {
        MpiError::Transport(error.into())
    }
}

impl MpiRanks {
    /// Joins the ranks that were started together.
    ///
    /// # Errors
    /// MPI was started before, or cannot work beside other threads.
    pub fn join() -> Result<MpiRanks, MpiError> {
        let ending = Arc::new(AtomicI32::new(0));
        let end = Arc::clone(&ending);
        let ranks = Wired::start(move || Mpi::start(end))?;
        Ok(MpiRanks { ranks, ending })
    }

    /// This rank.
    pub fn communicator(&self) -> &Wired<Mpi> {
        &self.ranks
    }

    /// Ends all ranks at once with an exit code, though they wait for messages.
    pub fn abort(&self, code: i32) -> ! {
        // Whatever it waits for, the thread that speaks to the others sees this; one that waits for nothing is told.
        self.ending.store(code.max(1), Ordering::Relaxed);
        let _ = self.ranks.on_line(Mpi::end_if_asked);
        std::process::exit(code)
    }
}

impl Mpi {
    fn start(ending: Arc<AtomicI32>) -> Result<Mpi, MpiError> {
        let (universe, given) =
            mpi::initialize_with_threading(Threading::Funneled).ok_or(MpiError::Started)?;
        if given < Threading::Funneled {
            return Err(MpiError::NoThreads);
        }
        Ok(Mpi { world: universe.world(), ending, _universe: universe })
    }

    /// Ends all ranks, where this one was asked to.
    fn end_if_asked(&self) {
        match self.ending.load(Ordering::Relaxed) {
            0 => {}
            code => self.world.abort(code),
        }
    }

    /// Waits until two messages have arrived. Gives what is known of the second.
    fn wait<'m, S: Scope<'m>>(
        &self,
        mut send: Option<Request<'m, [u8], S>>,
        mut receive: Option<Request<'m, [u8], S>>,
    ) -> Option<Status> {
        let (looks, mut received) = (Looks::begin(), None);
        loop {
            send = send.and_then(|send| send.test().err());
            receive = receive.and_then(|receive| receive.test().map(|status| received = Some(status)).err());
            if send.is_none() && receive.is_none() {
                return received;
            }
            self.end_if_asked();
            looks.pause();
        }
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
            let expected = into.len();
            let status = scope(|scope| {
                let receive = from.as_ref().filter(|_| receives);
                let receive = receive.map(|(_, from)| from.immediate_receive_into(scope, into));
                let send = to.as_ref().filter(|_| sends).map(|to| to.immediate_send(scope, part));
                self.wait(send, receive)
            });
            if let (Some(status), Some((rank, _))) = (status, &from) {
                check(*rank, &status, expected)?;
            }
            (rest, room) = (later, further);
            (sends, receives) = (sends && !rest.is_empty(), receives && !room.is_empty());
        }
        Ok(())
    }

    fn idle(&self) {
        self.end_if_asked();
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
