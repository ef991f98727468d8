//! A rank whose bytes go by a transport, on a thread of their own: see `exchange`.

use std::cell::{Cell, OnceCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use plimsoll_device::cuda::{CardLink, FarMessage, FarSpan};
use plimsoll_device::{Collective, Communicated, Device, DeviceError, Tensor};
use plimsoll_memory::{FarMemory, Worker};

use crate::exchange::{Carried, Outgoing};
use crate::group::{Members, among_all, place_among};
use crate::{CommunicationError, Communicator, Exchange, Ticket, Transport, TransportError, rounds};

/// A rank that reaches the others, or some of them.
#[derive(Debug)]
pub struct Wired<T> {
    /// The thread that speaks to the others, together with that of its groups.
    line: Rc<Worker<T>>,
    /// The same transport, where any thread may speak by it.
    direct: Option<Rc<T>>,
    /// Exchanges that were begun on the line and are not done, of its groups too.
    under_way: Arc<AtomicUsize>,
    rank: u32,
    size: u32,
    /// The numbers of a group's ranks among all.
    members: Option<Vec<u32>>,
    /// Together with those of its groups.
    sent: Rc<Cell<Communicated>>,
    /// What goes from card to card, once the cards have joined; of its groups too.
    link: Rc<OnceCell<Arc<CardLink>>>,
}

impl<T: Transport + Send + Sync + 'static> Wired<Arc<T>> {
    /// The rank that the transport is of. Any thread may speak by it: what nothing is under way before goes without the other thread.
    ///
    /// # Errors
    /// The system starts no more threads.
    pub fn new(transport: T) -> Result<Wired<Arc<T>>, TransportError> {
        let transport = Arc::new(transport);
        let direct = Some(Rc::new(Arc::clone(&transport)));
        Wired::start(|| Ok(transport)).map(|wired| Wired { direct, ..wired })
    }
}

impl<T: Transport + 'static> Wired<T> {
    /// A rank whose transport is made on the thread that speaks to the others, and never leaves that thread.
    ///
    /// # Errors
    /// There is no transport, or no thread.
    pub fn start<E>(make: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<Wired<T>, E>
    where
        E: From<std::io::Error> + From<TransportError> + Send + 'static,
    {
        let line = Worker::start(Builder::new().name("ranks".into()), make)?;
        let place = line.run(|transport| (transport.rank(), transport.size()));
        let (rank, size) = place.ok_or(TransportError::Stopped)?;
        let (line, under_way) = (Rc::new(line), Arc::default());
        let (sent, link) = (Rc::default(), Rc::default());
        Ok(Wired { line, direct: None, under_way, rank, size, members: None, sent, link })
    }

    /// Does something on the thread that speaks to the others, behind everything that was begun before, and waits for it. Where any
    /// thread may speak, and nothing is under way, this one does it.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn on_line<R: Send>(&self, work: impl FnOnce(&T) -> R + Send) -> Result<R, TransportError> {
        match &self.direct {
            Some(transport) if self.under_way.load(Ordering::Acquire) == 0 => Ok(work(transport)),
            _ => self.line.run(work).ok_or(TransportError::Stopped),
        }
    }

    /// Sends and receives, and waits for both.
    fn send_receive_now(
        &self,
        send: Option<(u32, &[u8])>,
        receive: Option<(u32, &mut [u8])>,
    ) -> Result<(), TransportError> {
        let members = self.members.as_deref();
        self.on_line(|transport| Members::of(transport, members).send_receive(send, receive))?
    }

    /// The same of tensors on cards, without the host. The other rank does so too, so there is no other way.
    fn by_link(
        &self,
        device: &dyn Device,
        link: &Arc<CardLink>,
        send: Option<(u32, &Tensor)>,
        receive: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError> {
        let unreached = || DeviceError::Mismatch {
            op: "send_receive",
            reason: "cards are linked, and this device has no card's memory".to_owned(),
        };
        let reach = |(rank, tensor): (u32, &Tensor)| {
            let far = device.reach(tensor)?.ok_or_else(unreached)?;
            Ok::<_, DeviceError>((rank, far, 0..tensor.bytes()))
        };
        let (send, receive) = (send.map(reach).transpose()?, receive.map(reach).transpose()?);
        let members = self.members.as_deref();
        self.on_line(move |transport| {
            let ranks = Members::of(transport, members);
            let message =
                FarMessage { send: among_all_far(&ranks, &send)?, receive: among_all_far(&ranks, &receive)? };
            Ok(link.exchange(&[message], &mut || ranks.idle()).map_err(DeviceError::from)?)
        })?
    }

    fn count(&self, sent: Communicated) {
        self.sent.set(self.sent.get().plus(sent));
    }
}

/// A side of a message on a card: the other rank, and the bytes.
type Side = Option<(u32, Box<dyn FarMemory>, Range<u64>)>;

/// The same with the rank's number among all.
fn among_all_far<'s, T: Transport>(
    ranks: &Members<'_, T>,
    side: &'s Side,
) -> Result<Option<(u32, FarSpan<'s>)>, TransportError> {
    let Some((rank, far, bytes)) = side else { return Ok(None) };
    Ok(Some((ranks.member(*rank)?, (far.as_ref(), bytes.clone()))))
}

impl<T: Transport + 'static> Communicator for Wired<T> {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn sent(&self) -> Communicated {
        self.sent.get()
    }

    fn group(&self, members: Vec<u32>) -> Result<Box<dyn Communicator + '_>, CommunicationError> {
        let rank = place_among(self.rank, &members)?;
        let size = members.len() as u32;
        let members = Some(among_all(&members, self.members.as_deref())?);
        Ok(Box::new(Wired {
            line: Rc::clone(&self.line),
            direct: self.direct.clone(),
            under_way: Arc::clone(&self.under_way),
            rank,
            size,
            members,
            sent: Rc::clone(&self.sent),
            link: Rc::clone(&self.link),
        }))
    }

    fn begin(&self, device: &dyn Device, exchange: Exchange<'_>) -> Result<Ticket, CommunicationError> {
        let within = exchange.within;
        let outgoing = match Outgoing::lend(device, exchange, rounds(self.rank, self.size))? {
            Ok(outgoing) => outgoing,
            Err(ticket) => return Ok(ticket),
        };
        for (_, span) in outgoing.messages().iter().filter_map(|message| message.send.as_ref()) {
            self.count(Communicated::of(within, span.bytes.end - span.bytes.start));
        }
        let (members, link) = (self.members.clone(), self.link.get().cloned());
        let under_way = Arc::clone(&self.under_way);
        let carry_out = move |carried: Carried| {
            under_way.fetch_add(1, Ordering::Relaxed);
            self.line.begin(move |transport| {
                let outcome = carried.carry_out(&Members::of(transport, members.as_deref()), link.as_deref());
                under_way.fetch_sub(1, Ordering::Release);
                outcome
            })
        };
        Ok(outgoing.begin(carry_out))
    }

    fn send_receive(
        &self,
        device: &dyn Device,
        within: Collective,
        send: Option<(u32, &Tensor)>,
        receive: Option<(u32, &Tensor)>,
    ) -> Result<(), CommunicationError> {
        let bytes = send.map_or(0, |(_, x)| x.bytes());
        let mut outcome = Ok(());
        match (send, receive, self.link.get()) {
            (send, receive, Some(link)) => self.by_link(device, link, send, receive)?,
            (Some((to, x)), Some((from, out)), None) => device.read_and_write(x, out, &mut |x, out| {
                outcome = self.send_receive_now(Some((to, x)), Some((from, out)));
            })?,
            (Some((to, x)), None, None) => {
                device.read(x, &mut |x| outcome = self.send_receive_now(Some((to, x)), None))?;
            }
            (None, Some((from, out)), None) => {
                device.write(out, &mut |out| outcome = self.send_receive_now(None, Some((from, out))))?;
            }
            (None, None, None) => {}
        }
        self.count(Communicated::of(within, bytes));
        Ok(outcome?)
    }

    fn link_cards(&self, link: Arc<CardLink>) {
        // Cards join once.
        let _ = self.link.set(link);
    }

    fn send_bytes(&self, to: u32, bytes: &[u8]) -> Result<(), CommunicationError> {
        Ok(self.send_receive_now(Some((to, bytes)), None)?)
    }

    fn receive_bytes(&self, from: u32, into: &mut [u8]) -> Result<(), CommunicationError> {
        Ok(self.send_receive_now(None, Some((from, into)))?)
    }

    fn gather_numbers(&self, own: &[f64]) -> Result<Vec<Vec<f64>>, CommunicationError> {
        let (rank, size) = (self.rank, self.size);
        let mut all = vec![vec![0.0; own.len()]; size as usize];
        if let Some(place) = all.get_mut(rank as usize) {
            place.copy_from_slice(own);
        }
        for (to, from) in rounds(rank, size) {
            let Some(place) = all.get_mut(from as usize) else { continue };
            let (send, receive) = (bytemuck::cast_slice(own), bytemuck::cast_slice_mut(place));
            self.send_receive_now(Some((to, send)), Some((from, receive)))?;
        }
        Ok(all)
    }
}
