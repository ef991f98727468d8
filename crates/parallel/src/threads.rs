//! Ranks that are threads of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::{Transport, TransportError};

/// A rank that is a thread. When it is dropped, the others that wait for it fail.
#[derive(Debug)]
pub struct ThreadRank {
    rank: u32,
    size: u32,
    hub: Arc<Hub>,
}

/// Where the messages of all ranks lie until they are received.
#[derive(Debug, Default)]
struct Hub {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Under sender and receiver.
    messages: HashMap<(u32, u32), VecDeque<Vec<u8>>>,
    ended: Vec<bool>,
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is a single one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ranks of a group of `size`, one for each thread.
pub fn thread_ranks(size: u32) -> Vec<ThreadRank> {
    let hub = Arc::new(Hub::default());
    hub.state().ended = vec![false; size as usize];
    (0..size).map(|rank| ThreadRank { rank, size, hub: Arc::clone(&hub) }).collect()
}

impl Transport for ThreadRank {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn send_receive(
        &self,
        send: Option<(u32, &[u8])>,
        receive: Option<(u32, &mut [u8])>,
    ) -> Result<(), TransportError> {
        let check = |rank| match rank < self.size && rank != self.rank {
            true => Ok(()),
            false => Err(TransportError::NoSuchRank { rank }),
        };
        if let Some((to, bytes)) = send {
            check(to)?;
            let bytes = bytes.to_vec();
            let mut state = self.hub.state();
            state.messages.entry((self.rank, to)).or_default().push_back(bytes);
            self.hub.changed.notify_all();
        }
        let Some((from, into)) = receive else { return Ok(()) };
        check(from)?;
        let mut state = self.hub.state();
        let message = loop {
            if let Some(message) = state.messages.get_mut(&(from, self.rank)).and_then(VecDeque::pop_front) {
                break message;
            }
            if state.ended.get(from as usize).copied().unwrap_or(true) {
                return Err(TransportError::Ended { rank: from });
            }
            state = self.hub.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
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
        if let Some(ended) = self.hub.state().ended.get_mut(self.rank as usize) {
            *ended = true;
        }
        self.hub.changed.notify_all();
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
