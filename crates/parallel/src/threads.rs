//! Ranks that are threads of one process.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::{Transport, TransportError};

/// A rank that is a thread. When it is dropped, the others that wait for it fail.
#[derive(Debug)]
pub struct ThreadRank {
    rank: u32,
    /// Of each rank.
    mailboxes: Arc<[Mailbox]>,
}

/// Where the messages to a rank lie until it receives them: only its own threads wait there.
#[derive(Debug, Default)]
struct Mailbox {
    mail: Mutex<Mail>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Mail {
    /// Of each sender.
    messages: Vec<VecDeque<Vec<u8>>>,
    /// Senders that have ended.
    ended: Vec<bool>,
}

impl Mailbox {
    fn mail(&self) -> MutexGuard<'_, Mail> {
        // Every change is a single one.
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ranks of a group of `size`, one for each thread.
pub fn thread_ranks(size: u32) -> Vec<ThreadRank> {
    let all = size as usize;
    let mail = || Mail { messages: vec![VecDeque::new(); all], ended: vec![false; all] };
    let mailbox = |_| Mailbox { mail: Mutex::new(mail()), changed: Condvar::new() };
    let mailboxes: Arc<[Mailbox]> = (0..size).map(mailbox).collect();
    (0..size).map(|rank| ThreadRank { rank, mailboxes: Arc::clone(&mailboxes) }).collect()
}

impl ThreadRank {
    /// The mailbox of a rank.
    fn mailbox(&self, rank: u32) -> Result<&Mailbox, TransportError> {
        self.mailboxes.get(rank as usize).ok_or(TransportError::NoSuchRank { rank })
    }

    /// That of another one.
    fn other(&self, rank: u32) -> Result<&Mailbox, TransportError> {
        match rank != self.rank {
            true => self.mailbox(rank),
            false => Err(TransportError::NoSuchRank { rank }),
        }
    }
}

impl Transport for ThreadRank {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.mailboxes.len() as u32
    }

    fn send_receive(
        &self,
        send: Option<(u32, &[u8])>,
        receive: Option<(u32, &mut [u8])>,
    ) -> Result<(), TransportError> {
        if let Some((to, bytes)) = send {
            let (mailbox, bytes) = (self.other(to)?, bytes.to_vec());
            if let Some(messages) = mailbox.mail().messages.get_mut(self.rank as usize) {
                messages.push_back(bytes);
            }
            mailbox.changed.notify_all();
        }
        let Some((from, into)) = receive else { return Ok(()) };
        self.other(from)?;
        let own = self.mailbox(self.rank)?;
        let mut mail = own.mail();
        let message = loop {
            if let Some(message) = mail.messages.get_mut(from as usize).and_then(VecDeque::pop_front) {
                break message;
            }
            if mail.ended.get(from as usize).copied().unwrap_or(true) {
                return Err(TransportError::Ended { rank: from });
            }
            mail = own.changed.wait(mail).unwrap_or_else(PoisonError::into_inner);
        };
        drop(mail);
        if message.len() != into.len() {
            let (sent, expected) = (message.len() as u64, into.len() as u64);
            return Err(TransportError::Size { rank: from, sent, expected });
        }
        into.copy_from_slice(&message);
        Ok(())
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        for mailbox in self.mailboxes.iter() {
            if let Some(ended) = mailbox.mail().ended.get_mut(self.rank as usize) {
                *ended = true;
            }
            mailbox.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_in_order_while_others_are_sent() {
        let ranks = thread_ranks(3);
        std::thread::scope(|scope| {
            for rank in &ranks {
                scope.spawn(move || {
                    let (right, left) = ((rank.rank() + 1) % 3, (rank.rank() + 2) % 3);
                    for round in 0..50u8 {
                        let mut received = [0; 2];
                        let own = [rank.rank() as u8, round];
                        rank.send_receive(Some((right, &own)), Some((left, &mut received))).unwrap();
                        assert_eq!(received, [left as u8, round]);
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_has_ended_is_an_error_for_those_who_wait_for_it() {
        let mut ranks = thread_ranks(2);
        let (last, first) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        last.send_receive(Some((0, &[7])), None).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(last));
            // What was sent before still arrives.
            let mut byte = [0];
            first.send_receive(None, Some((1, &mut byte))).unwrap();
            assert_eq!(byte, [7]);
            let error = first.send_receive(None, Some((1, &mut byte))).unwrap_err();
            assert_eq!(error, TransportError::Ended { rank: 1 });
        });
    }

    #[test]
    fn ranks_that_do_not_do_the_same_are_told() {
        let ranks = thread_ranks(2);
        ranks[0].send_receive(Some((1, &[1, 2, 3])), None).unwrap();
        let error = ranks[1].send_receive(None, Some((0, &mut [0; 2]))).unwrap_err();
        assert_eq!(error, TransportError::Size { rank: 0, sent: 3, expected: 2 });
        for rank in [0, 2] {
            let nobody = TransportError::NoSuchRank { rank };
            assert_eq!(ranks[0].send_receive(Some((rank, &[1])), None), Err(nobody.clone()));
            assert_eq!(ranks[0].send_receive(None, Some((rank, &mut [1]))), Err(nobody));
        }
    }
}
