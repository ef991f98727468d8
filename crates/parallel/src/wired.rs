//! A rank whose bytes go by a transport.

use std::cell::Cell;
use std::rc::Rc;

use plimsoll_device::{Collective, Communicated, Device, Tensor};

use crate::group::Members;
use crate::{CommunicationError, Communicator, Transport, rounds};

/// A rank that reaches the others.
#[derive(Debug)]
pub struct Wired<T> {
    transport: T,
    /// Together with those of its groups.
    sent: Rc<Cell<Communicated>>,
}

impl<T: Transport> Wired<T> {
    /// The rank that the transport is of.
    pub fn new(transport: T) -> Wired<T> {
        Wired { transport, sent: Rc::default() }
    }

    /// What carries its bytes.
    pub fn transport(&self) -> &T {
        &self.transport
    }
}

impl<T: Transport> Communicator for Wired<T> {
    fn rank(&self) -> u32 {
        self.transport.rank()
    }

    fn size(&self) -> u32 {
        self.transport.size()
    }

    fn sent(&self) -> Communicated {
        self.sent.get()
    }

    fn group(&self, members: Vec<u32>) -> Result<Box<dyn Communicator + '_>, CommunicationError> {
        let transport = Members::new(&self.transport, members)?;
        Ok(Box::new(Wired { transport, sent: Rc::clone(&self.sent) }))
    }

    fn send_receive(
        &self,
        device: &dyn Device,
        within: Collective,
        send: Option<(u32, &Tensor)>,
        receive: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError> {
        let transport = &self.transport;
        let mut outcome = Ok(());
        match (send, receive) {
            (Some((to, x)), Some((from, out))) => device.read_and_write(x, out, &mut |x, out| {
                outcome = transport.send_receive(Some((to, x)), Some((from, out)));
            })?,
            (Some((to, x)), None) => {
                device.read(x, &mut |x| outcome = transport.send_receive(Some((to, x)), None))?;
            }
            (None, Some((from, out))) => {
                device.write(out, &mut |out| outcome = transport.send_receive(None, Some((from, out))))?;
            }
            (None, None) => {}
        }
        let bytes = send.map_or(0, |(_, x)| x.bytes());
        self.sent.set(self.sent.get().plus(Communicated::of(within, bytes)));
        Ok(outcome?)
    }

    fn send_bytes(&self, to: u32, bytes: &[u8]) -> Result<(), CommunicationError> {
        Ok(self.transport.send_receive(Some((to, bytes)), None)?)
    }

    fn receive_bytes(&self, from: u32, into: &mut [u8]) -> Result<(), CommunicationError> {
        Ok(self.transport.send_receive(None, Some((from, into)))?)
    }

    fn gather_numbers(&self, own: &[f64]) -> Result<Vec<Vec<f64>>, CommunicationError> {
        let (rank, size) = (self.rank(), self.size());
        let mut all = vec![vec![0.0; own.len()]; size as usize];
        if let Some(place) = all.get_mut(rank as usize) {
            place.copy_from_slice(own);
        }
        for (to, from) in rounds(rank, size) {
            let Some(place) = all.get_mut(from as usize) else { continue };
            let (send, receive) = (bytemuck::cast_slice(own), bytemuck::cast_slice_mut(place));
            self.transport.send_receive(Some((to, send)), Some((from, receive)))?;
        }
        Ok(all)
    }
}
