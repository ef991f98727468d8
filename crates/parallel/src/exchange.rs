//! Exchanges behind the computation: begun where what is sent is there, and waited for where what is received is needed.
//!
//! This is how disk copies work, too. An exchange takes whole buffers out of the device's hands (`Device::lend`), so that no
//! operation reads or writes them meanwhile, and says which bytes of them go to whom and come from whom. [`Ticket::wait`] gives the
//! buffers back.
//!
//! A rank has one thread that speaks to the others. It carries out what was begun in that order, and calls that wait are begun and
//! waited for on the same thread. All ranks begin the same exchanges in the same order, as they run the same schedule. So each
//! message finds its counterpart, and nobody waits for ever: a thread waits for a rank only where that rank has yet to come to the
//! same exchange, and the rank that is furthest behind waits for nobody.
//!
//! On a dry device the buffers stay where they are, and the exchange goes on the time line of the links: it begins when it was begun
//! and the link is free, and the computation waits only where it is waited for.

use std::ops::Range;

use plimsoll_device::cuda::{CardLink, FarMessage};
use plimsoll_device::{
    Collective, Communicated, DType, Device, DeviceError, Due, Lent, Shape, Tensor, Transferred,
};
use plimsoll_memory::{Event, Loan};

use crate::group::Members;
use crate::{CommunicationError, Transport, TransportError};

/// Some bytes of one of the buffers of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which buffer, from 0.
    pub buffer: usize,
    /// The bytes, from the beginning of the buffer's tensor.
    pub bytes: Range<u64>,
}

/// What one rank exchanges with all others, in rounds: in round `i` it sends to the `i`-th rank after it and receives from the
/// `i`-th before it.
pub struct Exchange<'e> {
    /// Why.
    pub within: Collective,
    /// What this rank sends in all.
    pub sent: Communicated,
    /// Whole tensors of the device, of which nobody else has views.
    pub buffers: Vec<Tensor>,
    /// What goes to a rank, if anything does.
    pub send: &'e dyn Fn(u32) -> Option<Span>,
    /// Where what a rank sends goes, if it sends anything. What is sent to and received from others in a round overlaps nowhere.
    pub receive: &'e dyn Fn(u32) -> Option<Span>,
}

/// An exchange under way.
#[must_use = "what was begun has to be waited for"]
pub struct Ticket {
    /// How the tensors of the buffers look.
    forms: Vec<(DType, Shape)>,
    under_way: UnderWay,
}

enum UnderWay {
    /// On a device without memory, or of a rank that is alone, the buffers stay where they are; until when, in a dry run that knows.
    Here(Vec<Tensor>, Due),
    /// In the hands of the thread that speaks to the other ranks.
    Away(Event<Arrived>),
}

/// The buffers behind an exchange, and what came of that.
type Arrived = (Vec<Loan>, Result<(), CommunicationError>);

impl Ticket {
    /// One whose buffers stay where they are; on a dry device the messages are counted.
    pub(crate) fn here(device: &dyn Device, exchange: Exchange<'_>) -> Ticket {
        let moved = Transferred { sent: exchange.sent, ..Transferred::default() };
        let due = device.transfer(moved, Due::default());
        let forms = forms(&exchange.buffers);
        Ticket { forms, under_way: UnderWay::Here(exchange.buffers, due) }
    }

    /// Waits until the exchange is done, and gives its buffers back as they were given.
    ///
    /// # Errors
    /// A rank is gone, or sends something else; the buffers are given up.
    pub fn wait(self, device: &dyn Device) -> Result<Vec<Tensor>, CommunicationError> {
        let arrived = match self.under_way {
            UnderWay::Here(buffers, due) => {
                device.wait(due);
                return Ok(buffers);
            }
            UnderWay::Away(event) => event.wait(),
        };
        let (loans, outcome) = arrived.ok_or(TransportError::Stopped)?;
        outcome?;
        let back = |(loan, (dtype, shape)): (Loan, (DType, Shape))| {
            let whole = device.reclaim(loan)?;
            let other = || mismatch("a buffer came back that is no tensor of its type");
            whole.view(0, dtype, shape.dims()).ok_or_else(other)
        };
        loans.into_iter().zip(self.forms).map(back).collect()
    }
}

fn forms(buffers: &[Tensor]) -> Vec<(DType, Shape)> {
    buffers.iter().map(|buffer| (buffer.dtype(), buffer.shape())).collect()
}

fn mismatch(reason: &str) -> CommunicationError {
    DeviceError::Mismatch { op: "exchange", reason: reason.to_owned() }.into()
}

/// What goes on between a rank and the others in a round.
pub(crate) struct Message {
    pub send: Option<(u32, Span)>,
    pub receive: Option<(u32, Span)>,
}

/// An exchange that is about to begin: its buffers are lent.
pub(crate) struct Outgoing {
    loans: Vec<Loan>,
    messages: Vec<Message>,
    forms: Vec<(DType, Shape)>,
}

impl Outgoing {
    /// Takes the buffers out of the device's hands; on a device without memory, the ticket of the exchange.
    pub fn lend(
        device: &dyn Device,
        exchange: Exchange<'_>,
        rounds: impl Iterator<Item = (u32, u32)>,
    ) -> Result<Result<Outgoing, Ticket>, CommunicationError> {
        if device.is_dry() {
            return Ok(Err(Ticket::here(device, exchange)));
        }
        let Exchange { buffers, send, receive, .. } = exchange;
        let forms = forms(&buffers);
        let message = |(to, from)| Message {
            send: send(to).map(|span| (to, span)),
            receive: receive(from).map(|span| (from, span)),
        };
        let messages: Vec<Message> = rounds.map(message).collect();
        for Message { send, receive } in &messages {
            let spans = [send, receive].map(|side| side.as_ref().map(|(_, span)| span));
            check(&buffers, spans)?;
        }
        let lend = |buffer| match device.lend(buffer)? {
            Lent::Memory(loan) => Ok(loan),
            Lent::Nothing(_) => Err(mismatch("a device with memory lent none")),
        };
        let loans = buffers.into_iter().map(lend).collect::<Result<Vec<_>, _>>()?;
        Ok(Ok(Outgoing { loans, messages, forms }))
    }

    /// The messages.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Hands it to the thread that speaks to the others.
    pub fn begin(self, begin: impl FnOnce(Carried) -> Event<Arrived>) -> Ticket {
        let Outgoing { loans, messages, forms } = self;
        Ticket { forms, under_way: UnderWay::Away(begin(Carried { loans, messages })) }
    }
}

/// Refuses spans that lie outside of their buffers, or overlap.
fn check(buffers: &[Tensor], spans: [Option<&Span>; 2]) -> Result<(), CommunicationError> {
    for Span { buffer, bytes } in spans.into_iter().flatten() {
        let inside = |buffer: &Tensor| bytes.start <= bytes.end && bytes.end <= buffer.bytes();
        if !buffers.get(*buffer).is_some_and(inside) {
            return Err(mismatch("a message lies outside of its buffer"));
        }
    }
    if let [Some(a), Some(b)] = spans
        && a.buffer == b.buffer
        && a.bytes.start < b.bytes.end
        && b.bytes.start < a.bytes.end
    {
        return Err(mismatch("what is sent overlaps what is received"));
    }
    Ok(())
}

/// An exchange in the hands of the thread that carries it out.
pub(crate) struct Carried {
    loans: Vec<Loan>,
    messages: Vec<Message>,
}

impl Carried {
    /// Sends and receives, round after round; by a link of cards, all rounds at once.
    pub fn carry_out<T: Transport>(mut self, ranks: &Members<'_, T>, link: Option<&CardLink>) -> Arrived {
        let is_far = |loan: &Loan| matches!(loan, Loan::Far(_));
        let outcome = match link.filter(|_| self.loans.iter().all(is_far)) {
            Some(link) => by_link(&self.loans, &self.messages, ranks, link),
            None => self.messages.iter().try_for_each(|message| one(&mut self.loans, message, ranks)),
        };
        (self.loans, outcome)
    }
}

/// What lies on cards goes from card to card.
fn by_link<T: Transport>(
    loans: &[Loan],
    messages: &[Message],
    ranks: &Members<'_, T>,
    link: &CardLink,
) -> Result<(), CommunicationError> {
    let side = |side: &Option<(u32, Span)>| {
        let Some((rank, Span { buffer, bytes })) = side else { return Ok(None) };
        let far = match loans.get(*buffer) {
            Some(Loan::Far(far)) => far.as_ref(),
            _ => return Err(mismatch("a buffer is not on the device")),
        };
        Ok(Some((ranks.member(*rank)?, (far, bytes.clone()))))
    };
    let messages = messages
        .iter()
        .map(|message| Ok(FarMessage { send: side(&message.send)?, receive: side(&message.receive)? }));
    let messages = messages.collect::<Result<Vec<_>, CommunicationError>>()?;
    Ok(link.exchange(&messages, &mut || ranks.idle()).map_err(DeviceError::from)?)
}

fn one(loans: &mut [Loan], message: &Message, transport: &impl Transport) -> Result<(), CommunicationError> {
    let outside = || mismatch("a message lies outside of its buffer");
    let place = |span: &Span| {
        let within = usize::try_from(span.bytes.start).ok()?..usize::try_from(span.bytes.end).ok()?;
        Some((span.buffer, within))
    };
    let Message { send, receive } = message;
    let from = send.as_ref().map(|(_, span)| place(span).ok_or_else(outside)).transpose()?;
    let into = receive.as_ref().map(|(_, span)| place(span).ok_or_else(outside)).transpose()?;
    let (to, sender) = (send.as_ref().map(|(to, _)| *to), receive.as_ref().map(|(from, _)| *from));
    // Memory that only a device reaches is copied out and in.
    if loans.iter().any(|loan| matches!(loan, Loan::Far(_))) {
        let mut sent = vec![0; from.as_ref().map_or(0, |(_, bytes)| bytes.len())];
        let mut received = vec![0; into.as_ref().map_or(0, |(_, bytes)| bytes.len())];
        if let Some((buffer, bytes)) = &from {
            far(loans, *buffer)?.copy_out(bytes.start as u64, &mut sent)?;
        }
        transport.send_receive(to.map(|to| (to, &sent[..])), sender.map(|from| (from, &mut received[..])))?;
        if let Some((buffer, bytes)) = &into {
            far(loans, *buffer)?.copy_in(bytes.start as u64, &received)?;
        }
        return Ok(());
    }
    let (sent, received): (Option<&[u8]>, Option<&mut [u8]>) = match (from, into) {
        (Some((a, from)), Some((b, into))) if a == b => {
            let [sent, received] = here(loans, a)?.get_disjoint_mut([from, into]).map_err(|_| outside())?;
            (Some(sent), Some(received))
        }
        (Some((a, from)), Some((b, into))) => {
            let [sent, received] = loans.get_disjoint_mut([a, b]).map_err(|_| outside())?;
            let sent = bytes_of(sent)?.get(from).ok_or_else(outside)?;
            (Some(sent), Some(bytes_of(received)?.get_mut(into).ok_or_else(outside)?))
        }
        (Some((a, from)), None) => (Some(here(loans, a)?.get(from).ok_or_else(outside)?), None),
        (None, Some((b, into))) => (None, Some(here(loans, b)?.get_mut(into).ok_or_else(outside)?)),
        (None, None) => (None, None),
    };
    Ok(transport.send_receive(to.zip(sent), sender.zip(received))?)
}

/// The bytes of a buffer in host memory.
fn here(loans: &mut [Loan], buffer: usize) -> Result<&mut [u8], CommunicationError> {
    bytes_of(loans.get_mut(buffer).ok_or_else(|| mismatch("a message has no buffer"))?)
}

fn bytes_of(loan: &mut Loan) -> Result<&mut [u8], CommunicationError> {
    match loan {
        Loan::Region(region) => Ok(region.bytes_mut()),
        Loan::Far(_) => Err(mismatch("a buffer is not in host memory")),
    }
}

fn far(loans: &mut [Loan], buffer: usize) -> Result<&mut dyn plimsoll_memory::FarMemory, CommunicationError> {
    match loans.get_mut(buffer) {
        Some(Loan::Far(far)) => Ok(far.as_mut()),
        _ => Err(mismatch("a buffer is not on the device")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use plimsoll_device::{Cpu, CpuOptions, DeviceExt, DeviceTraits, Elementwise};
    use plimsoll_memory::Tag;

    use super::*;
    use crate::{Communicator, ThreadRank, Wired, thread_ranks};

    fn device(unified: bool) -> Cpu {
        let cpu = Cpu::new(1 << 20, CpuOptions { threads: Some(1), isa: None }).unwrap();
        cpu.standing_for(DeviceTraits { unified, alignment: 256, cuda: false })
    }

    fn buffer(device: &Cpu, elements: u64) -> Tensor {
        device.alloc(DType::F32, &[elements], Tag::Communication, "buffer").unwrap()
    }

    fn span(buffer: usize, elements: Range<u64>) -> Option<Span> {
        Some(Span { buffer, bytes: elements.start * 4..elements.end * 4 })
    }

    /// Each rank's element of a buffer to all.
    fn gather(ranks: &Wired<Arc<ThreadRank>>, device: &Cpu, value: f32) -> Ticket {
        let whole = buffer(device, u64::from(ranks.size()));
        let mut values = vec![0.0; ranks.size() as usize];
        values[ranks.rank() as usize] = value;
        device.write_f32(&whole, &values).unwrap();
        let own = u64::from(ranks.rank());
        let exchange = Exchange {
            within: Collective::AllGather,
            sent: Communicated::default(),
            buffers: vec![whole],
            send: &|_| span(0, own..own + 1),
            receive: &|from| span(0, u64::from(from)..u64::from(from) + 1),
        };
        ranks.begin(device, exchange).unwrap()
    }

    #[test]
    fn exchanges_are_under_way_together_and_calls_that_wait_come_behind_them() {
        for unified in [true, false] {
            std::thread::scope(|scope| {
                for rank in thread_ranks(3) {
                    scope.spawn(move || {
                        let (ranks, device) = (Wired::new(rank).unwrap(), device(unified));
                        let own = ranks.rank() as f32;
                        let first = gather(&ranks, &device, own);
                        // The third of three buffers, from one to another.
                        let (from, into) = (buffer(&device, 3), buffer(&device, 3));
                        device.write_f32(&from, &[own, own + 10.0, own + 20.0]).unwrap();
                        let second = Exchange {
                            within: Collective::ReduceScatter,
                            sent: Communicated::default(),
                            buffers: vec![from, into],
                            send: &|to| span(0, u64::from(to)..u64::from(to) + 1),
                            receive: &|from| span(1, u64::from(from)..u64::from(from) + 1),
                        };
                        let second = ranks.begin(&device, second).unwrap();
                        let x = buffer(&device, 4);
                        device.run(Elementwise::Fill { out: &x, value: 1.0 }).unwrap();
                        let numbers = ranks.gather_numbers(&[f64::from(own)]).unwrap();
                        assert_eq!(numbers, [[0.0], [1.0], [2.0]]);
                        let whole = first.wait(&device).unwrap();
                        assert_eq!(device.read_f32(&whole[0]).unwrap(), [0.0, 1.0, 2.0]);
                        let back = second.wait(&device).unwrap();
                        let mut terms: Vec<f32> = (0..3).map(|from| from as f32 + 10.0 * own).collect();
                        // Nobody sends to itself.
                        let received = device.read_f32(&back[1]).unwrap();
                        terms[own as usize] = received[own as usize];
                        assert_eq!(received, terms);
                        let sent = ranks.sent();
                        assert_eq!(sent.bytes(Collective::AllGather), 8);
                        assert_eq!(sent.messages(Collective::ReduceScatter), 2);
                    });
                }
            });
        }
    }

    #[test]
    fn a_rank_that_has_ended_is_an_error_where_it_is_waited_for() {
        let mut ranks = thread_ranks(2);
        drop(ranks.pop());
        let (ranks, device) = (Wired::new(ranks.pop().unwrap()).unwrap(), device(true));
        let error = gather(&ranks, &device, 1.0).wait(&device).err().unwrap();
        assert!(error.to_string().starts_with("rank 1 has ended"), "{error}");
    }

    #[test]
    fn messages_outside_of_their_buffers_are_refused() {
        let mut ranks = thread_ranks(2);
        let (ranks, device) = (Wired::new(ranks.remove(0)).unwrap(), device(true));
        let begin = |buffers, send: [u64; 2], receive: [u64; 2]| {
            let exchange = Exchange {
                within: Collective::AllGather,
                sent: Communicated::default(),
                buffers,
                send: &|_| span(0, send[0]..send[1]),
                receive: &|_| span(0, receive[0]..receive[1]),
            };
            ranks.begin(&device, exchange).err().map(|error| error.to_string())
        };
        let tensor = || vec![buffer(&device, 4)];
        assert!(begin(vec![], [0, 0], [0, 0]).unwrap().contains("outside"));
        assert!(begin(tensor(), [0, 5], [0, 0]).unwrap().contains("outside"));
        assert!(begin(tensor(), [0, 2], [1, 3]).unwrap().contains("overlaps"));
        let whole = tensor();
        let viewed = begin(whole.clone(), [0, 1], [1, 2]).unwrap();
        assert!(viewed.contains("others have views"), "{viewed}");
    }
}
