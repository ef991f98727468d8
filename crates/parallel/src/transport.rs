//! What carries bytes between ranks.

/// Carries bytes between ranks, each of which has one.
pub trait Transport {
    /// This rank's number, from 0.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// Sends bytes to a rank, and receives as many as there is room for from a rank; both are under way at once, and what a rank
    /// sends to another arrives in order. Nothing goes to or comes from this rank itself.
    ///
    /// # Errors
    /// The other rank has ended, or what it sends has another size.
    fn send_receive(
        &self,
        send: Option<(u32, &[u8])>,
        receive: Option<(u32, &mut [u8])>,
    ) -> Result<(), TransportError>;

    /// Called again and again while this thread waits for something else: a place to end at once, where all ranks are to end.
    fn idle(&self) {}
}

impl<T: Transport> Transport for std::sync::Arc<T> {
    fn rank(&self) -> u32 {
        T::rank(self)
    }

    fn size(&self) -> u32 {
        T::size(self)
    }

    fn send_receive(
        &self,
        send: Option<(u32, &[u8])>,
        receive: Option<(u32, &mut [u8])>,
    ) -> Result<(), TransportError> {
        T::send_receive(self, send, receive)
    }

    fn idle(&self) {
        T::idle(self);
    }
}

/// Bytes did not arrive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The other side is no more.
    #[error("rank {rank} has ended; the run can be resumed from its last checkpoint")]
    Ended {
        /// Which one.
        rank: u32,
    },
    /// Two ranks do not do the same.
    #[error(
        "rank {rank} sent {sent} bytes where {expected} were expected: the ranks do not run the same step"
    )]
    Size {
        /// Who sent.
        rank: u32,
        /// How much.
        sent: u64,
        /// How much there is room for.
        expected: u64,
    },
    /// There is no such rank, or it is this one.
    #[error("rank {rank} cannot be reached")]
    NoSuchRank {
        /// Its number.
        rank: u32,
    },
    /// The thread that speaks to the others is no more.
    #[error(
        "the thread that speaks to the other ranks has ended; the run can be resumed from its last checkpoint"
    )]
    Stopped,
    /// The system started no thread for it.
    #[error("the thread that speaks to the other ranks cannot be started: {reason}")]
    Thread {
        /// What the system says.
        reason: String,
    },
}

impl From<std::io::Error> for TransportError {
    fn from(error: std::io::Error) -> Self {
        TransportError::Thread { reason: error.to_string() }
    }
}
