//! Ranks as threads whose messages lie nowhere: a rank goes on when the other one has taken what it sends. Who waits for somebody
//! who waits fails after a while.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use plimsoll_parallel::{Transport, TransportError};

/// As long as no message of a test takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is on offer, under sender and receiver.
type Offers = HashMap<(u32, u32), Vec<u8>>;

pub struct MeetingRank {
    rank: u32,
    size: u32,
    offers: Arc<(Mutex<Offers>, Condvar)>,
}

pub fn meeting_ranks(size: u32) -> Vec<MeetingRank> {
    let offers = Arc::<(Mutex<Offers>, Condvar)>::default();
    (0..size).map(|rank| MeetingRank { rank, size, offers: Arc::clone(&offers) }).collect()
}

impl Transport for MeetingRank {
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
        let (offers, changed) = &*self.offers;
        let until = Instant::now() + PATIENCE;
        let mut offers = offers.lock().unwrap();
        let mut untaken = send.map(|(to, bytes)| {
            // What was sent before was taken.
            assert!(offers.insert((self.rank, to), bytes.to_vec()).is_none());
            changed.notify_all();
            (self.rank, to)
        });
        let mut missing = receive.map(|(from, into)| ((from, self.rank), into));
        while untaken.is_some() || missing.is_some() {
            if let Some((key, into)) = missing.take() {
                match offers.remove(&key) {
                    Some(bytes) => {
                        into.copy_from_slice(&bytes);
                        changed.notify_all();
                    }
                    None => missing = Some((key, into)),
                }
            }
            untaken = untaken.filter(|key| offers.contains_key(key));
            if untaken.is_none() && missing.is_none() {
                break;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let rank =
                    untaken.map(|(_, to)| to).or(missing.map(|((from, _), _)| from)).unwrap_or(self.rank);
                return Err(TransportError::Ended { rank });
            }
            offers = changed.wait_timeout(offers, left).unwrap().0;
        }
        Ok(())
    }
}
