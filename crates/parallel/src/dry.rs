//! A rank of a plan: many ranks, and no wires.

use plimsoll_device::{Collective, Communicated, Device, Due, Tensor, Transferred};

use crate::{CommunicationError, Communicator};

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

    fn send_receive(
        &self,
        device: &dyn Device,
        within: Collective,
        send: Option<(u32, &Tensor)>,
        _: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError> {
        let sent = Communicated::of(within, send.map_or(0, |(_, x)| x.bytes()));
        device.wait(device.transfer(Transferred { sent, ..Transferred::default() }, Due::default()));
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
