//! A rank of a plan: many ranks, and no wires.

use plimsoll_device::{Collective, Communicated, Device, Due, Tensor, Transferred};

use crate::group::place_among;
use crate::{CommunicationError, Communicator, Exchange, Ticket};

/// One of so many ranks, with nobody behind the others. The dry device counts what the rank would send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DryRanks {
    rank: u32,
    size: u32,
}

impl DryRanks {
    /// Rank number `rank` of `size`.
    pub fn new(rank: u32, size: u32) -> DryRanks {
        DryRanks { rank, size }
    }
}

impl Communicator for DryRanks {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn sent(&self) -> Communicated {
        Communicated::default()
    }

    fn group(&self, members: Vec<u32>) -> Result<Box<dyn Communicator + '_>, CommunicationError> {
        let rank = place_among(self.rank, &members)?;
        Ok(Box::new(DryRanks { rank, size: members.len() as u32 }))
    }

    fn begin(&self, device: &dyn Device, exchange: Exchange<'_>) -> Result<Ticket, CommunicationError> {
        Ok(Ticket::here(device, exchange))
    }

    fn send_receive(
        &self,
        device: &dyn Device,
        within: Collective,
        send: Option<(u32, &Tensor)>,
        _: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError> {
        if let Some((_, x)) = send {
            count(device, Communicated::of(within, x.bytes()));
        }
        Ok(())
    }

    fn all_gather(
        &self,
        device: &dyn Device,
        within: Collective,
        part: &dyn Fn(u32) -> Option<Tensor>,
    ) -> Result<(), CommunicationError> {
        let others = u64::from(self.size.saturating_sub(1));
        if let Some(own) = part(self.rank) {
            count(device, Communicated::of_many(within, own.bytes().saturating_mul(others), others));
        }
        Ok(())
    }

    fn all_to_all(
        &self,
        device: &dyn Device,
        _: Collective,
        sent: Communicated,
        _: &dyn Fn(u32) -> Option<Tensor>,
        _: &dyn Fn(u32) -> Option<Tensor>,
    ) -> Result<(), CommunicationError> {
        count(device, sent);
        Ok(())
    }

    fn send_bytes(&self, _: u32, _: &[u8]) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn receive_bytes(&self, _: u32, _: &mut [u8]) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn gather_numbers(&self, own: &[f64]) -> Result<Vec<Vec<f64>>, CommunicationError> {
        Ok(vec![own.to_vec(); self.size as usize])
    }
}

/// Has the device count what is sent.
fn count(device: &dyn Device, sent: Communicated) {
    device.wait(device.transfer(Transferred { sent, ..Transferred::default() }, Due::default()));
}
