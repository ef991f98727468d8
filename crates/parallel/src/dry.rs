//! A rank of a plan: many ranks, and no wires.

use std::rc::Rc;

use plimsoll_device::{Collective, Communicated, Device, Due, Tensor, Transferred};

use crate::group::{among_all, place_among};
use crate::{CommunicationError, Communicator, Exchange, Ticket};

/// One of so many ranks, with nobody behind the others. The dry device counts what the rank would send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DryRanks {
    rank: u32,
    size: u32,
    machines: Option<Machines>,
}

/// Which ranks are on which machine.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Machines {
    /// Ranks of each, neighbours.
    of_each: u32,
    /// The number that each rank has among all.
    numbers: Rc<[u32]>,
    /// How many are on other machines than this rank.
    far: u64,
}

impl Machines {
    fn new(rank: u32, of_each: u32, numbers: Rc<[u32]>) -> Machines {
        let machines = Machines { of_each, numbers, far: 0 };
        let own = machines.of(rank);
        let far = machines.numbers.iter().filter(|number| Some(**number / of_each) != own).count() as u64;
        Machines { far, ..machines }
    }

    /// The machine of a rank.
    fn of(&self, rank: u32) -> Option<u32> {
        Some(self.numbers.get(rank as usize)? / self.of_each)
    }
}

impl DryRanks {
    /// Rank number `rank` of `size`, on one machine.
    pub fn new(rank: u32, size: u32) -> DryRanks {
        DryRanks { rank, size, machines: None }
    }

    /// The same on machines with so many neighbours each.
    pub fn on_machines(rank: u32, size: u32, of_each: u32) -> DryRanks {
        let machines = (of_each < size).then(|| Machines::new(rank, of_each.max(1), (0..size).collect()));
        DryRanks { rank, size, machines }
    }

    /// What is sent to all others alike.
    fn to_all(&self, sent: Communicated) -> Communicated {
        let others = u64::from(self.size.saturating_sub(1));
        self.machines.as_ref().map_or(sent, |machines| sent.to_other_machines(machines.far, others))
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
        let (rank, size) = (place_among(self.rank, &members)?, members.len() as u32);
        let machines = match &self.machines {
            Some(Machines { of_each, numbers, .. }) => {
                let numbers = among_all(&members, Some(numbers))?;
                Some(Machines::new(rank, *of_each, numbers.into()))
            }
            None => None,
        };
        Ok(Box::new(DryRanks { rank, size, machines }))
    }

    fn begin(&self, device: &dyn Device, exchange: Exchange<'_>) -> Result<Ticket, CommunicationError> {
        let sent = self.to_all(exchange.sent);
        Ok(Ticket::here(device, Exchange { sent, ..exchange }))
    }

    fn send_receive(
        &self,
        device: &dyn Device,
        within: Collective,
        send: Option<(u32, &Tensor)>,
        _: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError> {
        if let Some((to, x)) = send {
            let is_far = |machines: &Machines| machines.of(to) != machines.of(self.rank);
            let far = u64::from(self.machines.as_ref().is_some_and(is_far));
            count(device, Communicated::of(within, x.bytes()).to_other_machines(far, 1));
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
            let sent = Communicated::of_many(within, own.bytes().saturating_mul(others), others);
            count(device, self.to_all(sent));
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
        count(device, self.to_all(sent));
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

#[cfg(test)]
mod tests {
    use plimsoll_device::{DType, Dry};
    use plimsoll_memory::Tag;

    use super::*;

    /// Four ranks on two machines.
    #[test]
    fn what_goes_to_other_machines_is_told_apart() {
        let dry = Dry::new();
        let x = dry.alloc(DType::U8, &[12], Tag::Data, "x").unwrap();
        let far = |send: &dyn Fn()| {
            let before = dry.moved().sent;
            send();
            let sent = dry.moved().sent.less(before);
            (sent.total_bytes(), sent.between_machines())
        };
        let ranks = DryRanks::on_machines(0, 4, 2);
        let to = |ranks: &dyn Communicator, to| {
            far(&|| ranks.send_receive(&dry, Collective::Send, Some((to, &x)), None).unwrap())
        };
        let gather = |ranks: &dyn Communicator| {
            far(&|| ranks.all_gather(&dry, Collective::AllGather, &|_| Some(x.clone())).unwrap())
        };
        assert_eq!([1, 2, 3].map(|rank| to(&ranks, rank)), [(12, 0), (12, 12), (12, 12)]);
        assert_eq!(gather(&ranks), (36, 24));
        let neighbours = ranks.group(vec![0, 1]).unwrap();
        assert_eq!((gather(&*neighbours), to(&*neighbours, 1)), ((12, 0), (12, 0)));
        let apart = ranks.group(vec![0, 2]).unwrap();
        assert_eq!((gather(&*apart), to(&*apart, 1)), ((12, 12), (12, 12)));
        assert_eq!(gather(&DryRanks::new(0, 4)), (36, 0));
        assert_eq!(gather(&DryRanks::on_machines(0, 4, 8)), (36, 0));
    }
}
