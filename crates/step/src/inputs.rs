//! The tokens of one pass in device memory.

use std::borrow::Cow;

use plimsoll_device::{DType, Device, IGNORED_TARGET, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::ModelSpec;

use crate::StepError;
use crate::context::{Context, attention_shape};
use crate::rope::RopeTables;
use crate::settings::{MicroBatch, Precision};

/// What the loss of N tokens is computed against, and its place.
#[derive(Clone)]
pub(crate) struct Labels {
    /// u32 [N]
    pub targets: Tensor,
    /// f32 [N]
    pub losses: Tensor,
    /// f32 [N], if targets do not count alike.
    pub weights: Option<Tensor>,
}

/// One pass's tokens, u32 [N].
pub(crate) struct Inputs<'m> {
    pub tokens: Tensor,
    /// The same on the host; none in a dry run.
    pub ids: &'m [u32],
    pub labels: Labels,
    positions: Tensor,
    /// Where each token's document begins, if documents are told apart.
    documents: Option<Tensor>,
    batch_size: u64,
    sequence_length: u64,
    /// Tokens of the sequence before these.
    past: u64,
}

impl<'m> Inputs<'m> {
    /// Copies a micro-batch of `batch_size` sequences of `sequence_length` tokens to the device. With `document_end`, or
    /// where the micro-batch says itself where they start, every document has positions of its own and is told apart
    /// from the others.
    pub fn upload(
        device: &dyn Device,
        spec: &ModelSpec,
        batch_size: u64,
        sequence_length: u64,
        document_end: Option<u32>,
        micro_batch: &MicroBatch<'m>,
    ) -> Result<Inputs<'m>, StepError> {
        Inputs::upload_behind(device, spec, batch_size, (0, sequence_length), document_end, micro_batch)
    }

    /// The same with tokens that come behind `past` others of their sequence. Places in it are counted from its beginning.
    pub fn upload_behind(
        device: &dyn Device,
        spec: &ModelSpec,
        batch_size: u64,
        (past, sequence_length): (u64, u64),
        document_end: Option<u32>,
        micro_batch: &MicroBatch<'m>,
    ) -> Result<Inputs<'m>, StepError> {
        let n = batch_size * sequence_length;
        let MicroBatch { tokens: ids, targets: wanted, weights: factors, document_starts } = *micro_batch;
        let lengths = [ids, wanted].into_iter().chain(document_starts).map(<[u32]>::len);
        for got in lengths.chain(factors.map(<[f32]>::len)) {
            if got as u64 != n && !(got == 0 && device.is_dry()) {
                return Err(StepError::BatchShape { got, batch_size, sequence_length });
            }
        }
        check_tokens(spec, ids)?;
        check_tokens(spec, wanted)?;
        let alloc = |name| device.alloc(DType::U32, &[n], Tag::Data, name);
        let (tokens, targets) = (alloc("tokens")?, alloc("targets")?);
        write_u32(device, &tokens, ids)?;
        write_u32(device, &targets, wanted)?;
        let starts: Option<Cow<'_, [u32]>> = match (document_starts, document_end) {
            (Some(starts), _) => Some(starts.into()),
            (None, Some(end)) => Some(starts_after(ids, sequence_length, end).into()),
            (None, None) => None,
        };
        let (positions, documents) = match starts {
            None => (positions(device, batch_size, sequence_length, past)?, None),
            Some(starts) => {
                let (positions, documents) = (alloc("positions")?, alloc("documents")?);
                write_u32(device, &positions, &positions_within(&starts, (past, sequence_length))?)?;
                write_u32(device, &documents, &starts)?;
                (positions, Some(documents))
            }
        };
        let losses = device.alloc(DType::F32, &[n], Tag::Data, "losses")?;
        let weights = match factors {
            None => None,
            Some(factors) => {
                let weights = device.alloc(DType::F32, &[n], Tag::Data, "target_weights")?;
                if !(device.is_dry() && factors.is_empty()) {
                    device.write_f32(&weights, factors)?;
                }
                Some(weights)
            }
        };
        let labels = Labels { targets, losses, weights };
        Ok(Inputs { tokens, ids, labels, positions, documents, batch_size, sequence_length, past })
    }

    /// The context of blocks that see these tokens and no others.
    pub fn context<'a>(
        &'a self,
        device: &'a dyn Device,
        spec: &'a ModelSpec,
        precision: Precision,
        ropes: &'a RopeTables,
    ) -> Context<'a> {
        let length = self.sequence_length;
        let shape = attention_shape(spec, self.batch_size, length, self.past, length);
        let ctx = Context::new(device, spec, precision, ropes, &self.positions, shape);
        Context { documents: self.documents.as_ref(), ..ctx }
    }
}

/// The sum of an f32 tensor in the order of its elements; 0 on a device without memory.
pub(crate) fn sum(device: &dyn Device, x: &Tensor) -> Result<f64, StepError> {
    let mut sum = 0.0;
    device.read(x, &mut |bytes| {
        let values = bytes.as_chunks::<4>().0.iter().map(|value| f32::from_ne_bytes(*value));
        sum = values.map(f64::from).sum();
    })?;
    Ok(sum)
}

/// Copies ids in; a device without memory takes none.
fn write_u32(device: &dyn Device, out: &Tensor, values: &[u32]) -> Result<(), StepError> {
    match device.is_dry() && values.is_empty() {
        true => Ok(()),
        false => Ok(device.write_u32(out, values)?),
    }
}

/// Refuses tokens that the embedding has no row for.
pub(crate) fn check_tokens(spec: &ModelSpec, tokens: &[u32]) -> Result<(), StepError> {
    let outside = |t: &&u32| u64::from(**t) >= spec.vocab_size && **t != IGNORED_TARGET;
    match tokens.iter().find(outside) {
        Some(token) => Err(StepError::TokenOutsideVocabulary { token: *token, vocab_size: spec.vocab_size }),
        None => Ok(()),
    }
}

/// For every token of the sequences, the place in its sequence where its document begins: `end` is a document's last
/// token, and a sequence begins one of its own.
pub(crate) fn starts_after(tokens: &[u32], sequence_length: u64, end: u32) -> Vec<u32> {
    let mut starts = Vec::with_capacity(tokens.len());
    for sequence in tokens.chunks(sequence_length.max(1) as usize) {
        let mut start = 0;
        for (i, token) in (1..).zip(sequence) {
            starts.push(start);
            if *token == end {
                start = i;
            }
        }
    }
    starts
}

/// The position of every token in its document.
pub(crate) fn positions_within(
    starts: &[u32],
    (past, sequence_length): (u64, u64),
) -> Result<Vec<u32>, StepError> {
    let within = |(i, start): (u64, &u32)| {
        let place = (past + i % sequence_length.max(1)) as u32;
        place.checked_sub(*start).ok_or(StepError::DocumentStart { place, start: *start })
    };
    (0..).zip(starts).map(within).collect()
}

/// Positions `past..past + length` for every sequence, u32 [batch * length].
pub(crate) fn positions(
    device: &dyn Device,
    batch: u64,
    length: u64,
    past: u64,
) -> Result<Tensor, StepError> {
    let positions = device.alloc(DType::U32, &[batch * length], Tag::Data, "positions")?;
    device.write(&positions, &mut |bytes| {
        for (i, cell) in (0..).zip(bytes.chunks_exact_mut(4)) {
            let position: u64 = past + i % length;
            cell.copy_from_slice(&(position as u32).to_ne_bytes());
        }
    })?;
    Ok(positions)
}

#[cfg(test)]
mod tests {
    use plimsoll_device::{Cpu, CpuOptions, Dry};

    use super::*;

    /// Nothing stands for any number of tokens, in a dry run alone.
    #[test]
    fn micro_batches_of_another_length_are_refused() {
        let spec = crate::common::llama();
        let length = [1; 6];
        fn refused(device: &dyn Device, spec: &ModelSpec, tokens: &[u32]) -> Option<String> {
            let micro_batch = MicroBatch::new(tokens, tokens);
            Inputs::upload(device, spec, 2, 3, None, &micro_batch).err().map(|error| error.to_string())
        }
        let error = |got| format!("a micro-batch of {got} tokens was given to a step made for 2 x 3");
        let cpu = Cpu::new(1 << 16, CpuOptions { threads: Some(1), isa: None }).unwrap();
        let of = |count: usize| {
            [refused(&cpu, &spec, &length[..count]), refused(&Dry::new(), &spec, &length[..count])]
        };
        assert_eq!(of(6), [None, None]);
        assert_eq!(of(5), [Some(error(5)), Some(error(5))]);
        assert_eq!(of(0), [Some(error(0)), None]);
    }

    #[test]
    fn documents_begin_after_an_end_and_with_a_sequence() {
        let starts = |tokens: &[u32]| starts_after(tokens, 5, 9);
        assert_eq!(starts(&[1, 9, 2, 3, 9, 4, 5, 9, 9, 6]), [0, 0, 2, 2, 2, 0, 0, 0, 3, 4]);
        assert_eq!(starts(&[1, 2, 3, 4, 5]), [0; 5]);
        assert_eq!(positions_within(&[0, 0, 2, 2, 4, 0], (0, 5)).unwrap(), [0, 1, 0, 1, 0, 0]);
        assert!(positions_within(&[0, 2], (0, 5)).unwrap_err().to_string().contains("token 1"));
    }
}
