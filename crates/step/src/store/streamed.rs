//! A store that holds a few buffers for weights which do not all fit in memory, and has blocks brought into them ahead of
//! their use.
//!
//! While the step works on one block the next is on its way into another buffer. Where blocks come from is the affair of a
//! [`WeightReader`]. The buffers are taken once, so that a dry run finds the memory of the real one; the weights that
//! come are those that a resident store would hold, bit for bit.

use std::collections::{HashMap, VecDeque};

use plimsoll_device::{DType, Device, Lent, Tensor};
use plimsoll_disk::ALIGNMENT;
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, ModelSpec, Parameter, Role, StagedBlock, WeightReader};

use super::{BlockWeights, ResidentStore, WeightStorage, WeightStore};
use crate::StepError;

/// Weights of which some may be staged.
pub struct StreamedStore<'a, D: Device> {
    device: &'a D,
    resident: ResidentStore,
    blocks: HashMap<BlockId, StagedBlock>,
    /// The table of which rows are brought, and its type.
    table: Option<(Parameter, DType)>,
    buffer_bytes: u64,
    buffers: Vec<Buffer>,
    /// Blocks that are to be gathered, the next one first.
    upcoming: VecDeque<BlockId>,
    reader: Option<Box<dyn WeightReader>>,
}

/// One staging buffer.
enum Buffer {
    Free(Tensor),
    /// The block is on its way; on a device without memory the tensor stays here.
    Coming(BlockId, Option<Tensor>),
    /// The block is there, and in use until it is released.
    There {
        block: BlockId,
        tensor: Tensor,
        released: bool,
    },
    /// It failed with its memory elsewhere.
    Lost,
}

impl Buffer {
    fn block(&self) -> Option<BlockId> {
        match self {
            Buffer::Coming(block, _) | Buffer::There { block, .. } => Some(*block),
            Buffer::Free(_) | Buffer::Lost => None,
        }
    }
}

impl<'a, D: Device> StreamedStore<'a, D> {
    /// Takes memory for the weights that stay, and for the buffers of those that do not.
    pub fn allocate(
        device: &'a D,
        spec: &ModelSpec,
        storage: WeightStorage<'_>,
        tag: Tag,
    ) -> Result<Self, StepError> {
        let resident = ResidentStore::allocate_typed(device, spec, storage, tag)?;
        let mut store = StreamedStore {
            device,
            resident,
            blocks: HashMap::new(),
            table: None,
            buffer_bytes: 0,
            buffers: Vec::new(),
            upcoming: VecDeque::new(),
            reader: None,
        };
        if let Some(staging) = storage.staging {
            device.arena().enter(Phase::Setup, None);
            // Memory of an arena may begin within a page.
            store.buffer_bytes = staging.buffer_bytes().saturating_add(ALIGNMENT);
            store.blocks = staging.blocks.iter().map(|staged| (staged.block, staged.clone())).collect();
            store.table = staging.tables.first().cloned();
            for _ in 0..staging.buffers {
                let buffer = store.new_buffer()?;
                store.buffers.push(Buffer::Free(buffer));
            }
        }
        Ok(store)
    }

    /// Sets every weight that is not staged; `fill` writes a parameter's values in the given type and is not called on a
    /// dry device.
    pub fn load<E: From<StepError>>(
        &self,
        fill: impl FnMut(&Parameter, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.resident.load(self.device, fill)
    }

    /// Takes staged weights from here from now on. Until then buffers hold whatever was there.
    pub fn stream_from(&mut self, reader: Box<dyn WeightReader>) {
        self.reader = Some(reader);
    }

    fn new_buffer(&self) -> Result<Tensor, StepError> {
        Ok(self.device.alloc(DType::U8, &[self.buffer_bytes], Tag::Staging, "staging")?)
    }

    /// Has as many of the upcoming blocks brought as there are buffers for.
    fn bring_ahead(&mut self) -> Result<(), StepError> {
        for place in 0..self.upcoming.len() {
            let Some(block) = self.upcoming.get(place).copied() else { return Ok(()) };
            if self.buffers.iter().any(|buffer| buffer.block() == Some(block)) {
                continue;
            }
            let Some(free) = self.free_buffer(place)? else { return Ok(()) };
            self.begin(free, block)?;
        }
        Ok(())
    }

    /// A buffer whose block is done with, and is not needed again by the first `soon` of the upcoming ones.
    fn free_buffer(&mut self, soon: usize) -> Result<Option<usize>, StepError> {
        let needed = |block: &BlockId| self.upcoming.iter().take(soon).any(|upcoming| upcoming == block);
        let usable = |buffer: &Buffer| match buffer {
            Buffer::Free(_) | Buffer::Lost => true,
            Buffer::There { block, tensor, released } => *released && tensor.is_alone() && !needed(block),
            Buffer::Coming(..) => false,
        };
        Ok(self.buffers.iter().position(usable))
    }

    /// Has a block brought into a buffer that is free.
    fn begin(&mut self, index: usize, block: BlockId) -> Result<(), StepError> {
        let Some(buffer) = self.buffers.get_mut(index) else { return Ok(()) };
        let tensor = match std::mem::replace(buffer, Buffer::Lost) {
            Buffer::Free(tensor) | Buffer::There { tensor, .. } | Buffer::Coming(_, Some(tensor)) => tensor,
            Buffer::Lost | Buffer::Coming(_, None) => self.new_buffer()?,
        };
        let kept = match &mut self.reader {
            None => Some(tensor),
            Some(reader) => match self.device.lend(tensor)? {
                Lent::Memory(memory) => {
                    reader.begin(block, memory);
                    None
                }
                Lent::Nothing(tensor) => Some(tensor),
            },
        };
        if let Some(buffer) = self.buffers.get_mut(index) {
            *buffer = Buffer::Coming(block, kept);
        }
        Ok(())
    }

    /// Waits until the block in a buffer is there.
    fn finish(&mut self, index: usize) -> Result<(), StepError> {
        let Some(buffer) = self.buffers.get_mut(index) else { return Ok(()) };
        let Buffer::Coming(block, kept) = buffer else { return Ok(()) };
        let block = *block;
        let (tensor, outcome) = match (kept.take(), &mut self.reader) {
            (Some(tensor), _) => (Some(tensor), Ok(())),
            (None, Some(reader)) => match reader.finish(block) {
                Some((memory, outcome)) => (Some(self.device.reclaim(memory)?), outcome),
                None => (None, Ok(())),
            },
            (None, None) => (None, Ok(())),
        };
        *buffer = match (tensor, &outcome) {
            (Some(tensor), Ok(())) => Buffer::There { block, tensor, released: false },
            (Some(tensor), Err(_)) => Buffer::Free(tensor),
            (None, _) => Buffer::Lost,
        };
        Ok(outcome?)
    }

    /// The staged weights of a block, brought now where they were not brought before.
    fn bring(&mut self, block: BlockId) -> Result<(), StepError> {
        let index = match self.buffers.iter().position(|buffer| buffer.block() == Some(block)) {
            Some(index) => index,
            None => {
                let index = match self.free_buffer(0)? {
                    Some(index) => Some(index),
                    // What was brought ahead is not what is needed.
                    None => self.buffers.iter().position(|buffer| matches!(buffer, Buffer::Coming(..))),
                };
                let missing = StepError::MissingWeight { block, role: Role::TokenEmbedding };
                let index = index.ok_or(missing)?;
                self.finish(index)?;
                self.begin(index, block)?;
                index
            }
        };
        // Before waiting, so that the disk goes on with the next one at once.
        self.bring_ahead()?;
        self.finish(index)?;
        if let Some(Buffer::There { released, .. }) = self.buffers.get_mut(index) {
            *released = false;
        }
        if let Some(place) = self.upcoming.iter().position(|upcoming| *upcoming == block) {
            self.upcoming.drain(..=place);
        }
        Ok(())
    }

    /// The weights in a buffer that holds a block.
    fn views(&self, staged: &StagedBlock) -> Result<Vec<(Role, Tensor)>, StepError> {
        let there = self.buffers.iter().find_map(|buffer| match buffer {
            Buffer::There { block, tensor, .. } if *block == staged.block => Some(tensor),
            _ => None,
        });
        let view = |role, view: Option<Tensor>| {
            view.ok_or(StepError::MissingWeight { block: staged.block, role }).map(|view| (role, view))
        };
        let tensors = staged.tensors.iter().map(|placed| {
            let found = there.and_then(|buffer| {
                let start = buffer.range().start;
                let first = start.next_multiple_of(ALIGNMENT) - start;
                buffer.view(first + placed.offset, placed.dtype, &placed.parameter.shape)
            });
            view(placed.parameter.role, found)
        });
        tensors.collect()
    }
}

impl<D: Device> WeightStore for StreamedStore<'_, D> {
    fn gather(&mut self, block: BlockId) -> Result<BlockWeights, StepError> {
        let mut weights = self.resident.gather(block)?;
        if self.blocks.contains_key(&block) {
            self.bring(block)?;
            if let Some(staged) = self.blocks.get(&block) {
                weights.tensors.extend(self.views(staged)?);
            }
        }
        Ok(weights)
    }

    fn release(&mut self, block: BlockId) {
        for buffer in &mut self.buffers {
            if let Buffer::There { block: held, released, .. } = buffer
                && *held == block
            {
                *released = true;
            }
        }
    }

    fn gather_embedding(&mut self, tokens: &Tensor) -> Result<(BlockWeights, Tensor), StepError> {
        let Some((table, dtype)) = &self.table else {
            return Ok((self.gather(BlockId::Embedding)?, tokens.clone()));
        };
        let mut weights = self.resident.gather(BlockId::Embedding)?;
        let (n, columns) = (tokens.elements(), table.shape.get(1).copied().unwrap_or(1));
        let device = self.device;
        let rows = device.alloc(*dtype, &[n, columns], Tag::Staging, "embed_rows")?;
        let places = device.alloc(DType::U32, &[n], Tag::Data, "embed_places")?;
        let mut wanted = Vec::new();
        device.read(tokens, &mut |bytes| {
            wanted = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect();
        })?;
        if let Some(reader) = &mut self.reader {
            let mut outcome = Ok(());
            device.write(&rows, &mut |out| outcome = reader.read_rows(table.role, &wanted, out))?;
            outcome?;
        }
        let in_order: Vec<u32> = (0..u32::try_from(n).unwrap_or(u32::MAX)).collect();
        device.write_u32(&places, &in_order)?;
        weights.tensors.push((table.role, rows));
        Ok((weights, places))
    }

    fn announce(&mut self, blocks: &[BlockId]) -> Result<(), StepError> {
        self.upcoming = blocks.iter().filter(|block| self.blocks.contains_key(block)).copied().collect();
        for buffer in &mut self.buffers {
            if let Buffer::There { released, .. } = buffer {
                *released = true;
            }
        }
        self.bring_ahead()
    }
}
