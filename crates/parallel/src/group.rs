//! Some of the ranks, as ranks of their own.

use crate::{Transport, TransportError};

/// A rank among some of the ranks of a transport: the n-th member is rank n.
pub(crate) struct Members<'t> {
    transport: &'t dyn Transport,
    members: Vec<u32>,
    place: u32,
}

impl<'t> Members<'t> {
    /// The members among all ranks of a transport, of which its own is one.
    pub fn new(transport: &'t dyn Transport, members: Vec<u32>) -> Result<Self, TransportError> {
        let place = place_among(transport.rank(), &members)?;
        Ok(Members { transport, members, place })
    }

    fn member(&self, place: u32) -> Result<u32, TransportError> {
        self.members.get(place as usize).copied().ok_or(TransportError::NoSuchRank { rank: place })
    }
}

/// Which member a rank is.
pub(crate) fn place_among(rank: u32, members: &[u32]) -> Result<u32, TransportError> {
    let place = members.iter().position(|member| *member == rank);
    place.map(|place| place as u32).ok_or(TransportError::NoSuchRank { rank })
}

impl Transport for Members<'_> {
    fn rank(&self) -> u32 {
        self.place
    }

    fn size(&self) -> u32 {
        self.members.len() as u32
    }

    fn send_receive(
        &self,
        send: Option<(u32, &[u8])>,
        receive: Option<(u32, &mut [u8])>,
    ) -> Result<(), TransportError> {
        let send = send.map(|(to, bytes)| Ok((self.member(to)?, bytes))).transpose()?;
        let receive = receive.map(|(from, into)| Ok((self.member(from)?, into))).transpose()?;
        self.transport.send_receive(send, receive)
    }
}
