//! A few buffers through which parcels come and go: while the step works on one, the next is on its way into another and
//! the one before on its way back.
//!
//! The buffers are tensors of the arena, taken once, so that a dry run finds the memory of the real one.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use plimsoll_device::{Device, Tensor};
use plimsoll_disk::{Direction, DiskError};
use plimsoll_memory::Tag;

use super::parcel::buffer;
use super::transit::Source;
use crate::StepError;

/// Moves parcels between buffers and wherever they live: those of a direction in the order in which they are begun.
pub(crate) trait Carrier<K> {
    /// A buffer on its way.
    type Transit;

    /// Whether there is a parcel under this key.
    fn has(&self, key: K) -> bool;

    /// Sees to it that a parcel can be written back; in a dry run too.
    fn reserve(&mut self, _: K) -> Result<(), DiskError> {
        Ok(())
    }

    /// Begins to move a parcel between its homes and a buffer that has room for it from its first whole page on.
    fn begin(
        &mut self,
        key: K,
        direction: Direction,
        source: Source<Self::Transit>,
    ) -> Result<Self::Transit, StepError>;

    /// Waits until a move is done, and gives the buffer back with what came of the move.
    ///
    /// # Errors
    /// The buffer is lost.
    fn finish(&mut self, transit: Self::Transit) -> Result<(Tensor, Result<(), DiskError>), StepError>;

    /// Waits until every move is done. Fails with a write whose buffer was used again since.
    fn settle(&mut self) -> Result<(), DiskError>;
}

/// Buffers of one size.
pub(crate) struct Pool<'a, K, C: Carrier<K>> {
    device: &'a dyn Device,
    pub carrier: C,
    /// What the buffers hold, in the ledger.
    name: &'static str,
    buffer_bytes: u64,
    buffers: Vec<Buffer<K, C::Transit>>,
    /// What will be taken, the next one first.
    upcoming: VecDeque<Use<K>>,
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
enum Buffer<K, M> {
    Free(Tensor),
    /// It is on its way.
    Moving {
        key: K,
        direction: Direction,
        transit: M,
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

impl<K: Copy + Eq, M> Buffer<K, M> {
    fn key(&self) -> Option<K> {
        match self {
            Buffer::Moving { key, .. } | Buffer::There { key, .. } => Some(*key),
            Buffer::Free(_) | Buffer::Lost => None,
        }
    }
}

impl<'a, K: Copy + Eq, C: Carrier<K>> Pool<'a, K, C> {
    /// Takes memory for `count` buffers of parcels of up to `bytes` bytes, which the carrier moves.
    pub fn new(
        device: &'a dyn Device,
        carrier: C,
        name: &'static str,
        bytes: u64,
        count: usize,
    ) -> Result<Self, StepError> {
        let upcoming = VecDeque::new();
        let mut pool = Pool { device, carrier, name, buffer_bytes: bytes, buffers: Vec::new(), upcoming };
        for _ in 0..count {
            let free = pool.new_buffer()?;
            pool.buffers.push(Buffer::Free(free));
        }
        Ok(pool)
    }

    fn new_buffer(&self) -> Result<Tensor, StepError> {
        buffer(self.device, self.buffer_bytes, Tag::Staging, self.name)
    }

    /// What will be taken next, in order; keys without a parcel are left out. Nothing is in use any more.
    pub fn announce(&mut self, uses: impl IntoIterator<Item = Use<K>>) -> Result<(), StepError> {
        self.upcoming = uses.into_iter().filter(|used| self.carrier.has(used.key)).collect();
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
                false => self.start(index, key, Direction::Prefetch)?,
            }
        }
        Ok(())
    }

    /// The buffers that are free; last those that are still being written back, the one first that began first.
    fn free_buffers(&self, soon: usize) -> impl Iterator<Item = usize> {
        let moves = |buffer: &Buffer<K, C::Transit>| matches!(buffer, Buffer::Moving { .. });
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

    /// Takes what is in a buffer out of it.
    fn empty(&mut self, index: usize) -> Result<Source<C::Transit>, StepError> {
        match self.buffers.get_mut(index).map(|buffer| std::mem::replace(buffer, Buffer::Lost)) {
            Some(Buffer::Free(tensor) | Buffer::There { tensor, .. }) => Ok(Source::Buffer(tensor)),
            Some(Buffer::Moving { transit, .. }) => Ok(Source::Behind(transit)),
            Some(Buffer::Lost) | None => self.new_buffer().map(Source::Buffer),
        }
    }

    /// Begins to move a parcel with a buffer; into one that is being written back, behind that.
    fn start(&mut self, index: usize, key: K, direction: Direction) -> Result<(), StepError> {
        let source = self.empty(index)?;
        let transit = self.carrier.begin(key, direction, source)?;
        if let Some(buffer) = self.buffers.get_mut(index) {
            *buffer = Buffer::Moving { key, direction, transit };
        }
        Ok(())
    }

    /// Begins to write back the buffers whose parcels were changed and are done with.
    fn write_back(&mut self) -> Result<(), StepError> {
        let changed = |buffer: &Buffer<K, C::Transit>| match buffer {
            Buffer::There { tensor, released: true, changed: true, .. } => tensor.is_alone(),
            _ => false,
        };
        while let Some(index) = self.buffers.iter().position(changed) {
            let Some(key) = self.buffers.get(index).and_then(Buffer::key) else { return Ok(()) };
            self.carrier.reserve(key)?;
            self.start(index, key, Direction::WriteBack)?;
            // Behind the others: of those that are written back, the first is the one that began first.
            if let Some(later) = self.buffers.get_mut(index..) {
                later.rotate_left(1);
            }
        }
        Ok(())
    }

    /// Waits until what moves in a buffer has arrived.
    fn finish(&mut self, index: usize) -> Result<(), StepError> {
        let Some(buffer) = self.buffers.get_mut(index) else { return Ok(()) };
        let (key, direction, transit) = match std::mem::replace(buffer, Buffer::Lost) {
            Buffer::Moving { key, direction, transit } => (key, direction, transit),
            still => {
                *buffer = still;
                return Ok(());
            }
        };
        let (tensor, outcome) = self.carrier.finish(transit)?;
        let released = direction == Direction::WriteBack;
        *buffer = match outcome {
            Ok(()) => Buffer::There { key, tensor, taken: false, released, changed: false },
            Err(_) => Buffer::Free(tensor),
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
                    false => self.start(index, key, Direction::Prefetch)?,
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
        let Source::Buffer(tensor) = self.empty(index)? else { return Ok(()) };
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
        Ok(self.carrier.settle()?)
    }
}

#[cfg(test)]
mod tests;
