//! The tokens of one pass in device memory.

use plimsoll_device::{DType, Device, IGNORED_TARGET, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::ModelSpec;

use crate::StepError;
use crate::adapter::Dropout;
use crate::context::{Context, attention_shape};
use crate::linear::Multiply;
use crate::rope::RopeTables;
use crate::settings::{AttentionKind, MicroBatch, Precision};

/// One pass's tokens, u32 [N] each, and the place of its losses, f32 [N].
pub(crate) struct Inputs {
    pub tokens: Tensor,
    pub targets: Tensor,
    pub losses: Tensor,
    positions: Tensor,
    /// Where each token's document begins, if documents are told apart.
    documents: Option<Tensor>,
    batch_size: u64,
    sequence_length: u64,
}

impl Inputs {
    /// Copies a micro-batch of `batch_size` sequences of `sequence_length` tokens to the device. With `document_end`
    /// every document has positions of its own and is told apart from the others.
    pub fn upload<D: Device>(
        device: &D,
        spec: &ModelSpec,
        batch_size: u64,
        sequence_length: u64,
        document_end: Option<u32>,
        micro_batch: &MicroBatch<'_>,
    ) -> Result<Inputs, StepError> {
        let n = batch_size * sequence_length;
        for given in [micro_batch.tokens, micro_batch.targets] {
            if given.len() as u64 != n {
                return Err(StepError::BatchShape { got: given.len(), batch_size, sequence_length });
            }
        }
        check_tokens(spec, micro_batch.tokens)?;
        check_tokens(spec, micro_batch.targets)?;
        let alloc = |name| device.alloc(DType::U32, &[n], Tag::Data, name);
        let (tokens, targets) = (alloc("tokens")?, alloc("targets")?);
        device.write_u32(&tokens, micro_batch.tokens)?;
        device.write_u32(&targets, micro_batch.targets)?;
        let (positions, documents) = match document_end {
            None => (positions(device, batch_size, sequence_length, 0)?, None),
            Some(end) => {
                let (positions, documents) = (alloc("positions")?, alloc("documents")?);
                let starts = document_starts(micro_batch.tokens, sequence_length, end);
                let within: Vec<u32> =
                    (0..).zip(&starts).map(|(i, start)| (i % sequence_length) as u32 - start).collect();
                device.write_u32(&positions, &within)?;
                device.write_u32(&documents, &starts)?;
                (positions, Some(documents))
            }
        };
        let losses = device.alloc(DType::F32, &[n], Tag::Data, "losses")?;
        Ok(Inputs { tokens, targets, losses, positions, documents, batch_size, sequence_length })
    }

    /// The context of blocks that see these tokens and no others.
    pub fn context<'a, D: Device>(
        &'a self,
        device: &'a D,
        spec: &'a ModelSpec,
        precision: Precision,
        ropes: &'a RopeTables,
        attention_kind: AttentionKind,
        mlp_chunk_tokens: Option<u64>,
        dropout: Option<Dropout>,
    ) -> Context<'a, D> {
        let length = self.sequence_length;
        Context {
            device,
            spec,
            activations: precision.activations,
            compute: precision.compute(),
            linears: Multiply::of(precision),
            ropes,
            rope: ropes.of(false),
            positions: &self.positions,
            documents: self.documents.as_ref(),
            attention: attention_shape(spec, self.batch_size, length, 0, length),
            attention_kind,
            mlp_chunk_tokens,
            dropout,
        }
    }

    /// The sum of the token losses, in the order of the tokens.
    pub fn sum_of_losses<D: Device>(&self, device: &D) -> Result<f64, StepError> {
        Ok(device.read_f32(&self.losses)?.into_iter().map(f64::from).sum())
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
fn document_starts(tokens: &[u32], sequence_length: u64, end: u32) -> Vec<u32> {
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

/// Positions `past..past + length` for every sequence, u32 [batch * length].
pub(crate) fn positions<D: Device>(
    device: &D,
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
    use super::document_starts;

    #[test]
    fn documents_begin_after_an_end_and_with_a_sequence() {
        let starts = |tokens: &[u32]| document_starts(tokens, 5, 9);
        assert_eq!(starts(&[1, 9, 2, 3, 9, 4, 5, 9, 9, 6]), [0, 0, 2, 2, 2, 0, 0, 0, 3, 4]);
        assert_eq!(starts(&[1, 2, 3, 4, 5]), [0; 5]);
    }
}
