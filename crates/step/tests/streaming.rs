//! Weights that are brought when they are needed give the bits of those that are always there, in the memory that a dry
//! run finds, each block once in a pass and ahead of its use.

mod common;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use common::*;
use plimsoll_device::{Cpu, CpuOptions, DType, Device, Dry};
use plimsoll_disk::{ALIGNMENT, DiskError};
use plimsoll_memory::{Region, Tag, Tier};
use plimsoll_model::{
    BlockId, ModelSpec, Parameter, Role, StagedBlock, StagedKey, StagedTensor, Staging, WeightReader,
};
use plimsoll_step::{DecodeSettings, Decoder, Evaluator, MicroBatch, Precision, StepError, WeightStorage};

const TYPES: &dyn Fn(&Parameter) -> DType = &|_| DType::F32;

/// The matrices of all blocks that `staged` names, one after the other; of an untied embedding rows are looked up.
fn staging(spec: &ModelSpec, buffers: usize, staged: impl Fn(BlockId) -> bool) -> Staging {
    let mut found = Staging { blocks: Vec::new(), tables: Vec::new(), buffers };
    for block in spec.blocks().filter(|block| staged(*block)) {
        let (mut tensors, mut offset) = (Vec::new(), 0);
        for parameter in spec.block_parameters(block) {
            if parameter.shape.len() == 2 && parameter.role != Role::PositionEmbedding {
                if block == BlockId::Embedding {
                    found.tables.push((parameter.clone(), DType::F32));
                }
                let bytes = 4 * parameter.elements();
                tensors.push(StagedTensor { parameter, dtype: DType::F32, offset });
                offset += bytes + 20;
            }
        }
        if !tensors.is_empty() && (block != BlockId::Embedding || spec.tie_word_embeddings) {
            let bytes = offset.next_multiple_of(ALIGNMENT);
            found.blocks.push(StagedBlock { block, piece: 0, first_row: 0, bytes, tensors });
        }
    }
    found
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Begin(BlockId),
    Finish(BlockId),
}

/// Brings the values at the last moment, so that what is used too early is wrong.
struct Reader {
    staging: Staging,
    under_way: HashMap<BlockId, Region>,
    events: Rc<RefCell<Vec<Event>>>,
    failures: Rc<RefCell<u32>>,
}

impl WeightReader for Reader {
    fn begin(&mut self, (block, _): StagedKey, mut memory: Region) {
        memory.bytes_mut().fill(0xff);
        self.events.borrow_mut().push(Event::Begin(block));
        assert!(self.under_way.insert(block, memory).is_none());
    }

    fn finish(&mut self, (block, _): StagedKey) -> Option<(Region, Result<(), DiskError>)> {
        let mut memory = self.under_way.remove(&block)?;
        self.events.borrow_mut().push(Event::Finish(block));
        if *self.failures.borrow() > 0 {
            *self.failures.borrow_mut() -= 1;
            return Some((memory, Err(DiskError::Stopped)));
        }
        let first = memory.skip_to(ALIGNMENT as usize);
        let staged = self.staging.blocks.iter().find(|staged| staged.block == block).unwrap();
        for tensor in &staged.tensors {
            let start = first + tensor.offset as usize;
            let out = &mut memory.bytes_mut()[start..start + 4 * tensor.parameter.elements() as usize];
            write_values(&values(&tensor.parameter), DType::F32, out);
        }
        Some((memory, Ok(())))
    }

    fn read_rows(&mut self, table: Role, rows: &[u32], out: &mut [u8]) -> Result<(), DiskError> {
        let (table, _) = self.staging.tables.iter().find(|(p, _)| p.role == table).unwrap();
        let (values, columns) = (values(table), table.shape[1] as usize);
        for (row, out) in rows.iter().zip(out.chunks_mut(4 * columns)) {
            write_values(&values[*row as usize * columns..][..columns], DType::F32, out);
        }
        Ok(())
    }
}

struct Watched {
    reader: Box<Reader>,
    events: Rc<RefCell<Vec<Event>>>,
    failures: Rc<RefCell<u32>>,
}

fn reader(staging: &Staging) -> Watched {
    let (events, failures) = (Rc::<RefCell<Vec<Event>>>::default(), Rc::<RefCell<u32>>::default());
    let reader = Box::new(Reader {
        staging: staging.clone(),
        under_way: HashMap::new(),
        events: Rc::clone(&events),
        failures: Rc::clone(&failures),
    });
    Watched { reader, events, failures }
}

fn settings() -> DecodeSettings {
    DecodeSettings {
        precision: Precision::F32,
        cache: DType::F32,
        cache_tier: Tier::Device,
        context: 20,
        prompt_chunk_tokens: 5,
    }
}

fn cpu(bytes: u64) -> Cpu {
    Cpu::new(bytes, CpuOptions { threads: Some(2), isa: None }).unwrap()
}

/// A prompt of several passes, and tokens one by one.
fn logits<D: Device>(decoder: &mut Decoder<'_, D>) -> Vec<Vec<f32>> {
    let (tokens, _) = tokens(4, 1, 16);
    let prompts = [&tokens[..12], &tokens[12..13], &tokens[13..14], &tokens[14..]];
    prompts.map(|tokens| decoder.append(tokens).unwrap()).to_vec()
}

/// The planned peak and the logits of a decoder in just as much memory.
fn decoded(spec: &ModelSpec, staging: Option<&Staging>) -> (u64, Vec<Vec<f32>>) {
    let storage = WeightStorage { staging, ..WeightStorage::new(TYPES) };
    let dry = Dry::new();
    logits(&mut Decoder::with_storage(&dry, spec.clone(), settings(), storage).unwrap());
    let planned = dry.arena().high_water();
    let device = cpu(planned);
    let mut decoder = Decoder::with_storage(&device, spec.clone(), settings(), storage).unwrap();
    decoder.load(fill).unwrap();
    if let Some(staging) = staging {
        decoder.stream_from(reader(staging).reader);
    }
    let logits = logits(&mut decoder);
    assert_eq!(device.arena().high_water(), planned);
    (planned, logits)
}

fn losses<D: Device>(evaluator: &mut Evaluator<'_, D>) -> Vec<f64> {
    [(3, 2), (5, 1)]
        .map(|(seed, batch)| {
            let (tokens, targets) = tokens(seed, batch, 9);
            evaluator.losses(batch, &MicroBatch::new(&tokens, &targets)).unwrap().0
        })
        .to_vec()
}

fn evaluated(spec: &ModelSpec, staging: Option<&Staging>) -> (u64, Vec<f64>) {
    let storage = WeightStorage { staging, ..WeightStorage::new(TYPES) };
    let (precision, spec) = (Precision::F32, spec.clone());
    let dry = Dry::new();
    losses(&mut Evaluator::with_storage(&dry, spec.clone(), precision, storage, 9, 4).unwrap());
    let planned = dry.arena().high_water();
    let device = cpu(planned);
    let mut evaluator = Evaluator::with_storage(&device, spec, precision, storage, 9, 4).unwrap();
    evaluator.load(fill).unwrap();
    if let Some(staging) = staging {
        evaluator.stream_from(reader(staging).reader);
    }
    let losses = losses(&mut evaluator);
    assert_eq!(device.arena().high_water(), planned);
    (planned, losses)
}

#[test]
fn streamed_weights_give_the_same_bits_in_the_planned_memory() {
    for spec in families() {
        let (resident, exact) = (decoded(&spec, None), evaluated(&spec, None));
        for buffers in 1..=3 {
            let chosen: [&dyn Fn(BlockId) -> bool; 4] = [
                &|_| true,
                &|block| block == BlockId::Layer(1),
                &|block| matches!(block, BlockId::Layer(0 | 2)),
                &|block| matches!(block, BlockId::Embedding | BlockId::Head),
            ];
            for staged in chosen {
                let staging = staging(&spec, buffers, staged);
                assert_eq!(decoded(&spec, Some(&staging)).1, resident.1, "{buffers}");
                assert_eq!(evaluated(&spec, Some(&staging)).1, exact.1, "{buffers}");
            }
        }
    }
}

#[test]
fn less_memory_is_planned_the_more_is_streamed() {
    let spec = ModelSpec { num_layers: 12, ..llama() };
    let peak = |streamed: u32| {
        let staging = staging(&spec, 2, |block| matches!(block, BlockId::Layer(i) if i < streamed));
        decoded(&spec, Some(&staging)).0
    };
    assert!(peak(12) < peak(8) && peak(8) < peak(5), "{} {} {}", peak(12), peak(8), peak(5));
    let dry = Dry::new();
    let all = staging(&spec, 2, |_| true);
    let storage = WeightStorage { staging: Some(&all), ..WeightStorage::new(TYPES) };
    let _decoder = Decoder::with_storage(&dry, spec.clone(), settings(), storage).unwrap();
    let live = dry.arena().ledger().live();
    assert_eq!(live.get(Tag::Staging), 2 * (all.buffer_bytes() + ALIGNMENT));
    // Norms are all that stays.
    assert_eq!(live.get(Tag::Weights), (2 * 12 + 1) * 128);
}

#[test]
fn every_block_comes_once_in_a_pass_and_ahead_of_its_use() {
    use Event::{Begin, Finish};
    let spec = llama();
    let staging = staging(&spec, 2, |_| true);
    let storage = WeightStorage { staging: Some(&staging), ..WeightStorage::new(TYPES) };
    let device = cpu(1 << 20);
    let mut decoder = Decoder::with_storage(&device, spec, settings(), storage).unwrap();
    decoder.load(fill).unwrap();
    let Watched { reader, events, .. } = reader(&staging);
    decoder.stream_from(reader);
    let layer = BlockId::Layer;
    let head = BlockId::Embedding;
    for first in [true, false] {
        decoder.append(&[1]).unwrap();
        let mut expected = vec![
            // The buffer of the head is free when the next pass begins.
            Begin(layer(1)),
            Finish(layer(0)),
            Begin(layer(2)),
            Finish(layer(1)),
            Begin(head),
            Finish(layer(2)),
            Begin(layer(0)),
            Finish(head),
        ];
        if first {
            expected.insert(0, Begin(layer(0)));
        }
        assert_eq!(events.take(), expected);
    }
}

#[test]
fn a_disk_that_fails_once_is_an_error_once() {
    let spec = biased();
    let staging = staging(&spec, 2, |_| true);
    let storage = WeightStorage { staging: Some(&staging), ..WeightStorage::new(TYPES) };
    let exact = decoded(&spec, None).1;
    let device = cpu(1 << 20);
    let mut decoder = Decoder::with_storage(&device, spec, settings(), storage).unwrap();
    decoder.load(fill).unwrap();
    let Watched { reader, failures, .. } = reader(&staging);
    decoder.stream_from(reader);
    let live = device.arena().ledger().live().total();
    for _ in 0..3 {
        *failures.borrow_mut() = 1;
        let error = decoder.append(&[1, 2]).unwrap_err();
        assert!(matches!(error, StepError::Disk(DiskError::Stopped)), "{error}");
        decoder.truncate(0);
    }
    assert_eq!(logits(&mut decoder), exact);
    assert_eq!(device.arena().ledger().live().total(), live);
}
