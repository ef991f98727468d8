//! What every communicator can do.

use crate::{CommunicationError, Communicator, rounds};

/// What every communicator can do.
pub trait Collectives: Communicator {
    /// Whether there is nobody else.
    fn is_alone(&self) -> bool {
        self.size() <= 1
    }

    /// For each round the rank that is sent to and the one that is received from.
    fn rounds(&self) -> impl Iterator<Item = (u32, u32)> + use<Self> {
        rounds(self.rank(), self.size())
    }

    /// The place of another rank among the others: where what it has sent lies in a buffer that holds one part of each.
    fn place_of(&self, other: u32) -> u64 {
        u64::from(if other < self.rank() { other } else { other.saturating_sub(1) })
    }

    /// What the first rank has, on every rank.
    ///
    /// # Errors
    /// A rank is gone.
    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>, CommunicationError> {
        let length = self.gather_numbers(&[bytes.len() as f64])?;
        let length =
            length.first().and_then(|of_first| of_first.first()).map_or(0, |length| *length as usize);
        if self.rank() == 0 {
            (1..self.size()).try_for_each(|to| self.send_bytes(to, &bytes))?;
            return Ok(bytes);
        }
        let mut received = vec![0; length];
        self.receive_bytes(0, &mut received)?;
        Ok(received)
    }

    /// Whether something is so on any rank.
    ///
    /// # Errors
    /// A rank is gone.
    fn any(&self, is_so: bool) -> Result<bool, CommunicationError> {
        Ok(self.sum(f64::from(u8::from(is_so)))? > 0.0)
    }

    /// The sum of a number of the host's over all ranks, in the order of the ranks.
    ///
    /// # Errors
    /// A rank is gone.
    fn sum(&self, value: f64) -> Result<f64, CommunicationError> {
        Ok(self.gather_numbers(&[value])?.iter().flatten().sum())
    }
}

impl<C: Communicator + ?Sized> Collectives for C {}
