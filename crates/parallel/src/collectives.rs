//! Collective operations, made of messages between pairs. In round `i` a rank sends to the `i`-th rank after it and receives from
//! the `i`-th before it: everybody sends and receives at once, and nobody waits for somebody who waits.

use plimsoll_device::{Collective, Device, Tensor};

use crate::{CommunicationError, Communicator};

/// What every communicator can do.
pub trait Collectives: Communicator {
    /// Whether there is nobody else.
    fn is_alone(&self) -> bool {
        self.size() <= 1
    }

    /// For each round the rank that is sent to and the one that is received from.
    fn rounds(&self) -> impl Iterator<Item = (u32, u32)> + use<Self> {
        let (rank, size) = (self.rank(), self.size());
        (1..size).map(move |round| ((rank + round) % size, (rank + size - round) % size))
    }

    /// Every rank's part to every rank: `parts` are views of where they belong, in the order of the ranks, `None` for an empty
    /// one. This rank's is sent, the others' are received.
    ///
    /// # Errors
    /// A rank is gone.
    fn all_gather(
        &self,
        device: &dyn Device,
        within: Collective,
        parts: &[Option<Tensor>],
    ) -> Result<(), CommunicationError> {
        let part = |rank: u32| parts.get(rank as usize).and_then(Option::as_ref);
        for (to, from) in self.rounds() {
            let send = part(self.rank()).map(|part| (to, part));
            self.send_receive(device, within, send, part(from).map(|part| (from, part)))?;
        }
        Ok(())
    }

    /// To every rank its own part: `parts[r]` goes to rank `r`, and what rank `r` has for this one comes into `received[r]`.
    ///
    /// # Errors
    /// A rank is gone.
    fn all_to_all(
        &self,
        device: &dyn Device,
        within: Collective,
        parts: &[Option<Tensor>],
        received: &[Option<Tensor>],
    ) -> Result<(), CommunicationError> {
        for (to, from) in self.rounds() {
            let of = |all: &[Option<Tensor>], rank: u32| all.get(rank as usize).cloned().flatten();
            let (send, receive) = (of(parts, to), of(received, from));
            let send = send.as_ref().map(|part| (to, part));
            self.send_receive(device, within, send, receive.as_ref().map(|part| (from, part)))?;
        }
        Ok(())
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

    /// The sum of a number of the host's over all ranks, in the order of the ranks.
    ///
    /// # Errors
    /// A rank is gone.
    fn sum(&self, value: f64) -> Result<f64, CommunicationError> {
        Ok(self.gather_numbers(&[value])?.iter().flatten().sum())
    }
}

impl<C: Communicator + ?Sized> Collectives for C {}
