//! Ranks and what they say to each other.
//!
//! The step program speaks to a [`Communicator`] wherever ranks have to agree, so that a program for one rank is a program for
//! many. No communicator adds anything up: bytes go from rank to rank, and whoever owns a sum adds its terms on the device in an
//! order that does not depend on who is faster. So every transport gives the same bits. Exchanges may go on behind the
//! computation: `exchange` says how they are begun and waited for.
//!
//! - [`Solo`]: the only rank there is.
//! - [`DryRanks`]: a rank of many, without wires. What it would send is counted by the dry device.
//! - [`Wired`]: a rank whose bytes go by a [`Transport`]; what lies on cards goes by NCCL, where there is a [`CardLink`].
//!   [`ThreadRank`] joins threads of one process, for tests; `Mpi`, of a crate of its own, joins processes over the system's MPI.

#![forbid(unsafe_code)]

mod collectives;
mod deal;
mod dry;
mod exchange;
mod group;
mod mesh;
mod shares;
mod threads;
mod transport;
mod wired;

use std::sync::Arc;

use group::place_among;
use plimsoll_device::cuda::CardLink;
use plimsoll_device::{Collective, Communicated, Device, DeviceError, Tensor};
use plimsoll_memory::CopyError;

pub use collectives::Collectives;
pub use deal::Deal;
pub use dry::DryRanks;
pub use exchange::{Exchange, Span, Ticket};
pub use mesh::{Mesh, MeshPlace};
pub use shares::{Shares, least_common_multiple};
pub use threads::{ThreadRank, thread_ranks};
pub use transport::{Transport, TransportError};
pub use wired::Wired;

/// A rank among others that hold parts of one run.
pub trait Communicator {
    /// This rank's number, from 0.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// What this rank has sent so far. On a dry device the device counts.
    fn sent(&self) -> Communicated;

    /// Some of the ranks, as ranks of their own: the n-th member is rank n. This rank is one of them. What it sends to members counts
    /// as sent here.
    ///
    /// # Errors
    /// This rank is no member.
    fn group(&self, members: Vec<u32>) -> Result<Box<dyn Communicator + '_>, CommunicationError>;

    /// Begins an exchange with all other ranks, behind those that were begun before; it goes on while the device computes. All ranks
    /// begin the same exchanges in the same order.
    ///
    /// # Errors
    /// A buffer cannot be lent, or a message lies outside of it. What becomes of the messages is said where they are waited for.
    fn begin(&self, device: &dyn Device, exchange: Exchange<'_>) -> Result<Ticket, CommunicationError>;

    /// Sends a tensor to a rank and receives one from a rank, both at once; either may be left out. The two overlap nowhere.
    ///
    /// # Errors
    /// The other rank is gone, or what it sends has another size.
    fn send_receive(
        &self,
        device: &dyn Device,
        within: Collective,
        send: Option<(u32, &Tensor)>,
        receive: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError>;

    /// Every rank's part to every rank: `part` is a view of where a rank's belongs, `None` for an empty one. This rank's is sent,
    /// the others' are received. In round `i` a rank sends to the `i`-th rank after it and receives from the `i`-th before it:
    /// everybody sends and receives at once, and nobody waits for somebody who waits.
    ///
    /// # Errors
    /// As of [`send_receive`](Self::send_receive).
    fn all_gather(
        &self,
        device: &dyn Device,
        within: Collective,
        part: &dyn Fn(u32) -> Option<Tensor>,
    ) -> Result<(), CommunicationError> {
        let own = part(self.rank());
        for (to, from) in rounds(self.rank(), self.size()) {
            let (send, receive) = (own.as_ref().map(|own| (to, own)), part(from));
            self.send_receive(device, within, send, receive.as_ref().map(|part| (from, part)))?;
        }
        Ok(())
    }

    /// To every rank its own part, in the same rounds: `part(r)` goes to rank `r`, and what rank `r` has for this one comes into
    /// `received(r)`. `sent` is what this rank sends in all.
    ///
    /// # Errors
    /// As of [`send_receive`](Self::send_receive).
    fn all_to_all(
        &self,
        device: &dyn Device,
        within: Collective,
        _sent: Communicated,
        part: &dyn Fn(u32) -> Option<Tensor>,
        received: &dyn Fn(u32) -> Option<Tensor>,
    ) -> Result<(), CommunicationError> {
        for (to, from) in rounds(self.rank(), self.size()) {
            let (send, receive) = (part(to), received(from));
            let send = send.as_ref().map(|part| (to, part));
            self.send_receive(device, within, send, receive.as_ref().map(|part| (from, part)))?;
        }
        Ok(())
    }

    /// From here on what lies on cards goes from card to card. Ranks that are processes have such a link, once they have joined.
    fn link_cards(&self, _: Arc<CardLink>) {}

    /// Sends bytes of the host's to a rank.
    ///
    /// # Errors
    /// As of [`send_receive`](Self::send_receive).
    fn send_bytes(&self, to: u32, bytes: &[u8]) -> Result<(), CommunicationError>;

    /// Receives bytes of the host's from a rank, as many as there is room for.
    ///
    /// # Errors
    /// As of [`send_receive`](Self::send_receive).
    fn receive_bytes(&self, from: u32, into: &mut [u8]) -> Result<(), CommunicationError>;

    /// A few numbers of the host's from every rank, in the order of the ranks; all bring as many.
    ///
    /// # Errors
    /// As of [`send_receive`](Self::send_receive).
    fn gather_numbers(&self, own: &[f64]) -> Result<Vec<Vec<f64>>, CommunicationError>;
}

/// For each round of a rank among `size` the rank that is sent to and the one that is received from.
fn rounds(rank: u32, size: u32) -> impl Iterator<Item = (u32, u32)> {
    (1..size).map(move |round| ((rank + round) % size, (rank + size - round) % size))
}

/// Ranks did not come together.
#[derive(Debug, thiserror::Error)]
pub enum CommunicationError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A copy from or to the memory of a device that has its own failed.
    #[error(transparent)]
    Copy(#[from] CopyError),
}

/// The only rank there is: sums over all ranks are what they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Communicator for Solo {
    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn sent(&self) -> Communicated {
        Communicated::default()
    }

    fn group(&self, members: Vec<u32>) -> Result<Box<dyn Communicator + '_>, CommunicationError> {
        place_among(0, &members)?;
        Ok(Box::new(Solo))
    }

    fn begin(&self, device: &dyn Device, exchange: Exchange<'_>) -> Result<Ticket, CommunicationError> {
        Ok(Ticket::here(device, exchange))
    }

    fn send_receive(
        &self,
        _: &dyn Device,
        _: Collective,
        _: Option<(u32, &Tensor)>,
        _: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn send_bytes(&self, _: u32, _: &[u8]) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn receive_bytes(&self, _: u32, _: &mut [u8]) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn gather_numbers(&self, own: &[f64]) -> Result<Vec<Vec<f64>>, CommunicationError> {
        Ok(vec![own.to_vec()])
    }
}
