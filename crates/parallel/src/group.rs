//! Some of the ranks, as ranks of their own.

use crate::{Transport, TransportError};

/// A rank among some of the ranks of a transport, or among all: the n-th member is rank n.
pub(crate) struct Members<'t, T> {
    transport: &'t T,
    members: Option<&'t [u32]>,
}

impl<'t, T: Transport> Members<'t, T> {
    /// The members, of which the transport's own rank is one; all ranks where none are named.
    pub fn of(transport: &'t T, members: Option<&'t [u32]>) -> Self {
        Members { transport, members }
    }

    /// The number of a member among all ranks.
    pub fn member(&self, place: u32) -> Result<u32, TransportError> {
        let Some(members) = self.members else { return Ok(place) };
        members.get(place as usize).copied().ok_or(TransportError::NoSuchRank { rank: place })
    }
}

/// The numbers that members of a group have among all ranks; `group` has those of the group, where it is not all of them.
pub(crate) fn among_all(members: &[u32], group: Option<&[u32]>) -> Result<Vec<u32>, TransportError> {
    let Some(group) = group else { return Ok(members.to_vec()) };
    let number =
        |rank: &u32| group.get(*rank as usize).copied().ok_or(TransportError::NoSuchRank { rank: *rank });
    members.iter().map(number).collect()
}

/// Which member a rank is.
pub(crate) fn place_among(rank: u32, members: &[u32]) -> Result<u32, TransportError> {
    let place = members.iter().position(|member| *member == rank);
    place.map(|place| place as u32).ok_or(TransportError::NoSuchRank { rank })
}

impl<T: Transport> Transport for Members<'_, T> {
    fn rank(&self) -> u32 {
        let own = self.transport.rank();
        self.members.map_or(own, |members| place_among(own, members).unwrap_or(own))
    }

    fn size(&self) -> u32 {
        self.members.map_or_else(|| self.transport.size(), |members| members.len() as u32)
    }

    fn send_receive(
        &self,
        send: Option<(u32, &[u8])>,
        receive: Option<(u32, &mut [u8])>,
    ) -> Result<(), TransportError> {
        let send = match send {
            Some((to, bytes)) => Some((self.member(to)?, bytes)),
            None => None,
        };
        let receive = match receive {
            Some((from, into)) => Some((self.member(from)?, into)),
            None => None,
        };
        self.transport.send_receive(send, receive)
    }

    fn idle(&self) {
        self.transport.idle();
    }
}
