//! A few buffers through which parcels come and go: while the step works on one, the next is on its way into another and
//! the one before on its way back.
//!
//! The buffers are tensors of the arena, taken once, so that a dry run finds the memory of the real one.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use plimsoll_device::{Device, Due, Lent, Tensor, Transferred};
use plimsoll_disk::{Arrived, BufferMemory, Direction, DiskError};
use plimsoll_memory::Tag;

use super::parcel::buffer;
use crate::StepError;

/// Moves parcels between buffers and wherever they live: those of a direction in the order in which they are begun.
pub(crate) trait Carrier<K> {
    /// Sees to it that a parcel can be written back; in a dry run too.
    fn reserve(&mut self, _: K) -> Result<(), DiskError> {
        Ok(())
    }

    /// Counts what a move would move, in a dry run.
    fn count(&self, _: K, _: Direction) -> Transferred {
        Transferred::default()
    }

    /// Begins to move a parcel between its homes and memory that has room for it from its first whole page on: a buffer's, or
    /// that of a parcel which is written back before.
    fn begin(&mut self, key: K, direction: Direction, memory: BufferMemory<K>);

    /// Waits until a parcel's move is done, and gives the memory back; `None` where nothing was begun, or all has ended.
    fn finish(&mut self, key: K) -> Option<Arrived>;

    /// Waits until every move is done. Fails with a write whose buffer was used again since.
    fn settle(&mut self) -> Result<(), DiskError>;
}

/// Buffers of one size.
pub(crate) struct Pool<'a, K> {
    device: &'a dyn Device,
    /// What the buffers hold, in the ledger.
    name: &'static str,
    buffer_bytes: u64,
    buffers: Vec<Buffer<K>>,
    /// What will be taken, the next one first.
    upcoming: VecDeque<Use<K>>,
    carrier: Option<Box<dyn Carrier<K> + 'a>>,
}

/// That a parcel will be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use<K> {
    pub key: K,
    /// Whether it is written anew, so that there is nothing to bring.
    pub fresh: bool,
}

impl<K> Use<K> {
    /// Of a parcel with what it holds.
    pub fn of(key: K) -> Use<K> {
        Use { key, fresh: false }
    }
}

/// One buffer.
enum Buffer<K> {
    Free(Tensor),
    /// It is on its way; on a device without memory the tensor stays here.
    Moving {
        key: K,
        tensor: Option<Tensor>,
        direction: Direction,
        /// When it will have arrived, in a dry run that knows.
        due: Due,
    },
    /// It is there, and in use from when it is taken until it is released.
    There {
        key: K,
        tensor: Tensor,
        taken: bool,
        released: bool,
        changed: bool,
    },
    /// It failed with its memory elsewhere.
    Lost,
}

impl<K: Copy + Eq> Buffer<K> {
    fn key(&self) -> Option<K> {
        match self {
            Buffer::Moving { key, .. } | Buffer::There { key, .. } => Some(*key),
            Buffer::Free(_) | Buffer::Lost => None,
        }
    }
}

impl<'a, K: Copy + Eq> Pool<'a, K> {
    /// Takes memory for `count` buffers of parcels of up to `bytes` bytes.
    pub fn new(
        device: &'a dyn Device,
        name: &'static str,
        bytes: u64,
        count: usize,
    ) -> Result<Self, StepError> {
        let mut pool = Pool {
            device,
            name,
            buffer_bytes: bytes,
            buffers: Vec::new(),
            upcoming: VecDeque::new(),
            carrier: None,
        };
        for _ in 0..count {
            let free = pool.new_buffer()?;
            pool.buffers.push(Buffer::Free(free));
        }
        Ok(pool)
    }

    /// Takes parcels from here from now on. Until then buffers hold whatever was there.
    pub fn carry_with(&mut self, carrier: Box<dyn Carrier<K> + 'a>) {
        self.carrier = Some(carrier);
    }

    fn new_buffer(&self) -> Result<Tensor, StepError> {
        buffer(self.device, self.buffer_bytes, Tag::Staging, self.name)
    }

    /// What will be taken next, in order. Nothing is in use any more.
    pub fn announce(&mut self, uses: impl IntoIterator<Item = Use<K>>) -> Result<(), StepError> {
        self.upcoming = uses.into_iter().collect();
        for buffer in &mut self.buffers {
            if let Buffer::There { released, .. } = buffer {
                *released = true;
            }
        }
        self.advance()
    }

    /// Begins to write back what was changed and is done with, and to prefetch as much as there are buffers for. Waits for
    /// nothing: what comes into a buffer follows behind what goes out of it.
    pub fn advance(&mut self) -> Result<(), StepError> {
        self.write_back()?;
        // What will be written anew needs a buffer when its turn comes, and nothing from elsewhere before.
        let mut fresh: Vec<K> = Vec::new();
        for place in 0..self.upcoming.len() {
            let Some(Use { key, fresh: anew }) = self.upcoming.get(place).copied() else { return Ok(()) };
            if self.position(key).is_some() || fresh.contains(&key) {
                continue;
            }
            let Some(index) = self.free_buffers(place).nth(fresh.len()) else { return Ok(()) };
            match anew {
                true => fresh.push(key),
                false => self.prefetch(index, key)?,
            }
        }
        Ok(())
    }

    /// The buffers that are free; last those that are still being written back, the one first that began first.
    fn free_buffers(&self, soon: usize) -> impl Iterator<Item = usize> {
        let moves = |buffer: &Buffer<K>| matches!(buffer, Buffer::Moving { .. });
        let of = move |moving| {
            let buffers = (0..).zip(&self.buffers).filter(move |(_, buffer)| moves(buffer) == moving);
            buffers.map(|(index, _)| index).filter(move |index| self.is_free(*index, soon))
        };
        of(false).chain(of(true))
    }

    /// Whether a buffer's parcel is done with, and is not needed again by the first `soon` of the upcoming ones.
    fn is_free(&self, index: usize, soon: usize) -> bool {
        let needed = |key: &K| self.upcoming.iter().take(soon).any(|upcoming| upcoming.key == *key);
        match self.buffers.get(index) {
            Some(Buffer::Free(_) | Buffer::Lost) => true,
            Some(Buffer::There { key, tensor, released, changed, .. }) => {
                *released && !*changed && tensor.is_alone() && !needed(key)
            }
            Some(Buffer::Moving { key, direction, .. }) => *direction == Direction::WriteBack && !needed(key),
            None => false,
        }
    }

    /// Takes the tensor out of a buffer that is not moving.
    fn empty(&mut self, index: usize) -> Result<Option<Tensor>, StepError> {
        let Some(buffer) = self.buffers.get_mut(index) else { return Ok(None) };
        match std::mem::replace(buffer, Buffer::Lost) {
            Buffer::Free(tensor) | Buffer::There { tensor, .. } => Ok(Some(tensor)),
            Buffer::Moving { tensor: Some(tensor), .. } => Ok(Some(tensor)),
            Buffer::Lost | Buffer::Moving { tensor: None, .. } => self.new_buffer().map(Some),
        }
    }

    /// Begins to prefetch a parcel into a buffer that is free, behind what is written back from it.
    fn prefetch(&mut self, index: usize, key: K) -> Result<(), StepError> {
        let Some(buffer) = self.buffers.get_mut(index) else { return Ok(()) };
        let due = match (buffer, &mut self.carrier) {
            (Buffer::Moving { key: held, tensor: None, direction, .. }, Some(carrier)) => {
                carrier.begin(key, Direction::Prefetch, BufferMemory::Behind(*held));
                (*held, *direction) = (key, Direction::Prefetch);
                return Ok(());
            }
            (Buffer::Moving { due, .. }, _) => *due,
            _ => Due::default(),
        };
        let Some(tensor) = self.empty(index)? else { return Ok(()) };
        self.start(index, key, tensor, Direction::Prefetch, due)
    }

    /// Begins to write back the buffers whose parcels were changed and are done with.
    fn write_back(&mut self) -> Result<(), StepError> {
        let changed = |buffer: &Buffer<K>| match buffer {
            Buffer::There { tensor, released: true, changed: true, .. } => tensor.is_alone(),
            _ => false,
        };
        while let Some(index) = self.buffers.iter().position(changed) {
            let Some(key) = self.buffers.get(index).and_then(Buffer::key) else { return Ok(()) };
            if let Some(carrier) = &mut self.carrier {
                carrier.reserve(key)?;
            }
            let Some(tensor) = self.empty(index)? else { return Ok(()) };
            self.start(index, key, tensor, Direction::WriteBack, Due::default())?;
            // Behind the others: of those that are written back, the first is the one that began first.
            if let Some(later) = self.buffers.get_mut(index..) {
                later.rotate_left(1);
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        index: usize,
        key: K,
        tensor: Tensor,
        direction: Direction,
        behind: Due,
    ) -> Result<(), StepError> {
        let mut due = Due::default();
        let kept = match &mut self.carrier {
            None => Some(tensor),
            Some(carrier) => match self.device.lend(tensor)? {
                Lent::Memory(memory) => {
                    carrier.begin(key, direction, BufferMemory::Here(memory));
                    None
                }
                Lent::Nothing(tensor) => {
                    due = self.device.transfer(carrier.count(key, direction), behind);
                    Some(tensor)
                }
            },
        };
        if let Some(buffer) = self.buffers.get_mut(index) {
            *buffer = Buffer::Moving { key, tensor: kept, direction, due };
        }
        Ok(())
    }

    /// Waits until what moves in a buffer has arrived.
    fn finish(&mut self, index: usize) -> Result<(), StepError> {
        let Some(buffer) = self.buffers.get_mut(index) else { return Ok(()) };
        let Buffer::Moving { key, tensor, direction, due } = buffer else { return Ok(()) };
        self.device.wait(*due);
        let (key, released) = (*key, *direction == Direction::WriteBack);
        let (tensor, outcome) = match (tensor.take(), &mut self.carrier) {
            (Some(tensor), _) => (Some(tensor), Ok(())),
            (None, Some(carrier)) => match carrier.finish(key) {
                Some((memory, outcome)) => (Some(self.device.reclaim(memory)?), outcome),
                None => (None, Err(DiskError::Stopped)),
            },
            (None, None) => (None, Ok(())),
        };
        *buffer = match (tensor, &outcome) {
            (Some(tensor), Ok(())) => Buffer::There { key, tensor, taken: false, released, changed: false },
            (Some(tensor), Err(_)) => Buffer::Free(tensor),
            (None, _) => Buffer::Lost,
        };
        Ok(outcome?)
    }

    /// A buffer to put a parcel in; where none is free, one whose prefetch is given up.
    fn wait_for_buffer(&mut self) -> Result<Option<usize>, StepError> {
        self.write_back()?;
        let free = self.free_buffers(0).next();
        if free.is_some() {
            return Ok(free);
        }
        let Some(index) = self.buffers.iter().position(|buffer| matches!(buffer, Buffer::Moving { .. }))
        else {
            return Ok(None);
        };
        self.finish(index)?;
        Ok(Some(index))
    }

    fn position(&self, key: K) -> Option<usize> {
        self.buffers.iter().position(|buffer| buffer.key() == Some(key))
    }

    /// The buffer with a parcel in it, which is the next one that was announced, or one that is in use already; `None` where
    /// there is no buffer. One that is written anew holds whatever was in its buffer before.
    pub fn take(&mut self, key: K) -> Result<Option<Tensor>, StepError> {
        // To take again what is in use is no further use of it.
        if let Some(index) = self.position(key)
            && let Some(Buffer::There { tensor, taken: true, released: false, .. }) = self.buffers.get(index)
        {
            return Ok(Some(tensor.clone()));
        }
        let Some(Use { fresh, .. }) = self.upcoming.front().copied().filter(|next| next.key == key) else {
            return Err(StepError::Invariant {
                what: "a parcel was taken out of the order that was announced",
            });
        };
        self.upcoming.pop_front();
        let index = match self.position(key) {
            Some(index) => {
                if let Some(Buffer::Moving { direction: Direction::WriteBack, .. }) = self.buffers.get(index)
                {
                    self.finish(index)?;
                }
                index
            }
            None => {
                let Some(index) = self.wait_for_buffer()? else { return Ok(None) };
                match fresh {
                    true => self.begin_anew(index, key)?,
                    false => self.prefetch(index, key)?,
                }
                index
            }
        };
        // Not for somebody else from now on: nothing else is brought into its buffer.
        if let Some(Buffer::There { taken, released, .. }) = self.buffers.get_mut(index) {
            (*taken, *released) = (true, false);
        }
        // Before waiting, so that the disk goes on with the next one at once.
        self.advance()?;
        let Some(index) = self.position(key) else { return Ok(None) };
        self.finish(index)?;
        match self.buffers.get_mut(index) {
            Some(Buffer::There { key: held, tensor, taken, released, .. }) if *held == key => {
                (*taken, *released) = (true, false);
                Ok(Some(tensor.clone()))
            }
            _ => Ok(None),
        }
    }

    /// Has a buffer that is free stand for a parcel that is written anew.
    fn begin_anew(&mut self, index: usize, key: K) -> Result<(), StepError> {
        self.finish(index)?;
        let Some(tensor) = self.empty(index)? else { return Ok(()) };
        if let Some(buffer) = self.buffers.get_mut(index) {
            *buffer = Buffer::There { key, tensor, taken: true, released: false, changed: false };
        }
        Ok(())
    }

    /// The step is done with a parcel for now; `changed`: it is sent back when all views of it are gone.
    pub fn release(&mut self, key: K, changed: bool) {
        for buffer in &mut self.buffers {
            if let Buffer::There { key: held, released, changed: was, .. } = buffer
                && *held == key
            {
                *released = true;
                *was |= changed;
            }
        }
    }

    /// Forgets a parcel that nobody needs any more, wherever it lives.
    pub fn forget(&mut self, key: K) {
        for buffer in &mut self.buffers {
            if let Buffer::There { key: held, .. } = buffer
                && *held == key
                && let Buffer::There { tensor, .. } = std::mem::replace(buffer, Buffer::Lost)
            {
                *buffer = Buffer::Free(tensor);
            }
        }
    }

    /// Feeds what lies in the buffers to a hasher: with what is announced, it decides all that moves.
    pub fn hash_buffers(&self, hasher: &mut impl Hasher)
    where
        K: Hash,
    {
        for buffer in &self.buffers {
            std::mem::discriminant(buffer).hash(hasher);
            buffer.key().hash(hasher);
            match buffer {
                Buffer::Moving { direction, .. } => (*direction == Direction::WriteBack).hash(hasher),
                Buffer::There { released, changed, .. } => (released, changed).hash(hasher),
                Buffer::Free(_) | Buffer::Lost => {}
            }
        }
    }

    /// Waits until everything that was changed is where it lives.
    pub fn flush(&mut self) -> Result<(), StepError> {
        self.write_back()?;
        for index in 0..self.buffers.len() {
            if let Some(Buffer::Moving { direction: Direction::WriteBack, .. }) = self.buffers.get(index) {
                self.finish(index)?;
            }
        }
        self.carrier.as_mut().map_or(Ok(()), |carrier| Ok(carrier.settle()?))
    }
}

#[cfg(test)]
mod tests;
