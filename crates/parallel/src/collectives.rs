//! What every communicator can do.

use crate::{CommunicationError, Communicator, rounds};

/// What every communicator can do.
pub trait Collectives: Communicator {
    /// Whether there is nobody else.
    fn is_alone(&self) -> bool {
        self.size() <= 1
    }

    /// For each round the rank that is sent to and the one that is received from.
    fn rounds(&self) -> impl Iterator<Item = (u32, u32)> + use<Self> {
        rounds(self.rank(), self.size())
    }

    /// The place of another rank among the others: where what it has sent lies in a buffer that holds one part of each.
    fn place_of(&self, other: u32) -> u64 {
        u64::from(if other < self.rank() { other } else { other.saturating_sub(1) })
    }

    /// What the first rank has, on every rank.
    ///
    /// # Errors
    /// A rank is gone.
    fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>, CommunicationError> {
        let length = self.gather_numbers(&[bytes.len() as f64])?;
        let length =
            length.first().and_then(|of_first| of_first.first()).map_or(0, |length| *length as usize);
        if self.rank() == 0 {
            (1..self.size()).try_for_each(|to| self.send_bytes(to, &bytes))?;
            return Ok(bytes);
        }
        let mut received = vec![0; length];
        self.receive_bytes(0, &mut received)?;
        Ok(received)
    }

    /// Waits until all ranks have come here.
    ///
    /// # Errors
    /// A rank is gone.
    fn barrier(&self) -> Result<(), CommunicationError> {
        // Each hears from every other one.
        self.gather_numbers(&[]).map(drop)
    }

    /// What every rank has, on the first one; nothing on the others.
    ///
    /// # Errors
    /// A rank is gone.
    fn gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommunicationError> {
        let lengths = self.gather_numbers(&[own.len() as f64])?;
        if self.rank() != 0 {
            self.send_bytes(0, own)?;
            return Ok(Vec::new());
        }
        let mut all = vec![own.to_vec()];
        for (from, length) in (0..self.size()).zip(&lengths).skip(1) {
            let mut received = vec![0; length.first().map_or(0, |length| *length as usize)];
            self.receive_bytes(from, &mut received)?;
            all.push(received);
        }
        Ok(all)
    }

    /// The first rank that has one of some numbers otherwise than rank `than`, and which of them. All ranks bring as many. They are
    /// compared as numbers: what cannot be one is told by a fingerprint of 52 bits.
    ///
    /// # Errors
    /// A rank is gone.
    fn first_unlike(&self, than: u32, own: &[f64]) -> Result<Option<(u32, usize)>, CommunicationError> {
        let all = self.gather_numbers(own)?;
        let Some(known) = all.get(than as usize) else { return Ok(None) };
        let unlike = |told: &Vec<f64>| told.iter().zip(known).position(|(told, known)| told != known);
        Ok((0..).zip(&all).find_map(|(rank, told)| Some((rank, unlike(told)?))))
    }

    /// Whether something is so on any rank.
    ///
    /// # Errors
    /// A rank is gone.
    fn any(&self, is_so: bool) -> Result<bool, CommunicationError> {
        Ok(self.sum(f64::from(u8::from(is_so)))? > 0.0)
    }

    /// The sum of a number of the host's over all ranks, in the order of the ranks.
    ///
    /// # Errors
    /// A rank is gone.
    fn sum(&self, value: f64) -> Result<f64, CommunicationError> {
        Ok(self.gather_numbers(&[value])?.iter().flatten().sum())
    }
}

impl<C: Communicator + ?Sized> Collectives for C {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ThreadRank, Wired, thread_ranks};

    /// What each of three ranks gets.
    fn on_three<R: Send>(work: impl Fn(&dyn Communicator) -> R + Sync) -> Vec<R> {
        let work = &work;
        std::thread::scope(|scope| {
            let start = |rank: ThreadRank| scope.spawn(move || work(&Wired::new(rank).unwrap()));
            let threads: Vec<_> = thread_ranks(3).into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_first_rank_that_is_unlike_another_is_known_to_all() {
        let told = |ranks: &dyn Communicator| [1.0, f64::from(ranks.rank() / 2)];
        let than = |than: u32| on_three(move |ranks| ranks.first_unlike(than, &told(ranks)).unwrap());
        assert_eq!(than(0), [Some((2, 1)); 3]);
        assert_eq!(than(2), [Some((0, 1)); 3]);
        assert_eq!(on_three(|ranks| ranks.first_unlike(0, &[7.0]).unwrap()), [None; 3]);
        assert_eq!(on_three(|ranks| ranks.first_unlike(0, &[]).unwrap()), [None; 3]);
    }

    #[test]
    fn bytes_of_all_come_to_the_first_rank() {
        let all = on_three(|ranks| ranks.gather_bytes(&vec![7; ranks.rank() as usize * 2]).unwrap());
        assert_eq!(all, [vec![vec![], vec![7; 2], vec![7; 4]], vec![], vec![]]);
    }
}
