//! The tokens of one pass in device memory.

use std::borrow::Cow;
use std::ops::Range;

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

/// Which tokens of some sequences go through the model together: the same places of each sequence. What they become has a row for
/// each, run after run, and within a run sequence after sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    pub batch_size: u64,
    /// Tokens of a whole sequence.
    pub length: u64,
    /// The places in it, in order.
    pub runs: Vec<Range<u64>>,
}

impl Places {
    /// All of them.
    pub fn whole(batch_size: u64, length: u64) -> Places {
        let all = 0..length;
        Places { batch_size, length, runs: vec![all] }
    }

    /// Tokens of each sequence.
    pub fn tokens(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// Tokens of all sequences.
    pub fn rows(&self) -> u64 {
        self.batch_size * self.tokens()
    }

    /// The place of each row's token in its sequence.
    pub fn of_rows(&self) -> impl Iterator<Item = u64> {
        self.runs.iter().flat_map(|run| (0..self.batch_size).flat_map(|_| run.clone()))
    }

    /// That of one row's.
    pub fn of_row(&self, row: u64) -> u64 {
        let mut row = row;
        for run in &self.runs {
            let (tokens, rows) = (run.end - run.start, self.batch_size * (run.end - run.start));
            if row < rows {
                return run.start + row % tokens;
            }
            row -= rows;
        }
        0
    }

    /// What belongs to these tokens of what belongs to each token of the sequences.
    pub fn of<'t, T: Copy>(&self, all: &'t [T]) -> Cow<'t, [T]> {
        let part = |sequence: u64, run: &Range<u64>| {
            let first = sequence * self.length;
            all.get((first + run.start) as usize..(first + run.end) as usize).unwrap_or_default()
        };
        match &self.runs[..] {
            [all_of_it] if *all_of_it == (0..self.length) => all.into(),
            [run] if self.batch_size == 1 => part(0, run).into(),
            runs => {
                let parts =
                    runs.iter().flat_map(|run| (0..self.batch_size).map(move |sequence| part(sequence, run)));
                parts.flatten().copied().collect::<Vec<_>>().into()
            }
        }
    }
}

/// One pass's tokens, u32 [N].
pub(crate) struct Inputs<'m> {
    pub tokens: Tensor,
    /// The same on the host; none in a dry run.
    pub ids: Cow<'m, [u32]>,
    pub labels: Labels,
    positions: Tensor,
    /// The same on the host, where they are not the places in the sequence.
    within: Option<Vec<u32>>,
    /// Where each token's document begins, if documents are told apart.
    documents: Option<Tensor>,
    batch_size: u64,
    /// Tokens of each sequence.
    tokens_of_each: u64,
    /// The place behind the last one.
    end: u64,
}

impl<'m> Inputs<'m> {
    /// Copies tokens of a micro-batch to the device. With `document_end`, or where the micro-batch says itself where they start,
    /// every document has positions of its own and is told apart from the others.
    pub fn upload(
        device: &dyn Device,
        spec: &ModelSpec,
        places: &Places,
        document_end: Option<u32>,
        micro_batch: &MicroBatch<'m>,
    ) -> Result<Inputs<'m>, StepError> {
        let (batch_size, sequence_length) = (places.batch_size, places.length);
        let (all, n) = (batch_size * sequence_length, places.rows());
        let MicroBatch { tokens: ids, targets: wanted, weights: factors, document_starts } = *micro_batch;
        let lengths = [ids, wanted].into_iter().chain(document_starts).map(<[u32]>::len);
        for got in lengths.chain(factors.map(<[f32]>::len)) {
            if got as u64 != all && !(got == 0 && device.is_dry()) {
                return Err(StepError::BatchShape { got, batch_size, sequence_length });
            }
        }
        let starts: Option<Cow<'_, [u32]>> = match (document_starts, document_end) {
            (Some(starts), _) => Some(places.of(starts)),
            (None, Some(end)) => {
                Some(places.of(&starts_after(ids, sequence_length, end)).into_owned().into())
            }
            (None, None) => None,
        };
        let (ids, wanted) = (places.of(ids), places.of(wanted));
        check_tokens(spec, &ids)?;
        check_tokens(spec, &wanted)?;
        let alloc = |name| device.alloc(DType::U32, &[n], Tag::Data, name);
        let (tokens, targets) = (alloc("tokens")?, alloc("targets")?);
        write_u32(device, &tokens, &ids)?;
        write_u32(device, &targets, &wanted)?;
        let (positions, within, documents) = match starts {
            None => (positions(device, n, places.of_rows())?, None, None),
            Some(starts) => {
                let (positions, documents) = (alloc("positions")?, alloc("documents")?);
                let within = positions_within(&starts, places.of_rows())?;
                write_u32(device, &positions, &within)?;
                write_u32(device, &documents, &starts)?;
                (positions, Some(within), Some(documents))
            }
        };
        let losses = device.alloc(DType::F32, &[n], Tag::Data, "losses")?;
        let weights = match factors {
            None => None,
            Some(factors) => {
                let weights = device.alloc(DType::F32, &[n], Tag::Data, "target_weights")?;
                if !(device.is_dry() && factors.is_empty()) {
                    device.write_f32(&weights, &places.of(factors))?;
                }
                Some(weights)
            }
        };
        let labels = Labels { targets, losses, weights };
        let (tokens_of_each, end) = (places.tokens(), places.runs.last().map_or(0, |run| run.end));
        Ok(Inputs { tokens, ids, labels, positions, within, documents, batch_size, tokens_of_each, end })
    }

    /// The rotations of these tokens, and no others.
    pub fn ropes(
        &self,
        device: &dyn Device,
        spec: &ModelSpec,
        places: &Places,
    ) -> Result<RopeTables, StepError> {
        RopeTables::of_tokens(device, spec, places, self.within.as_deref())
    }

    /// The context of blocks that see these tokens and no others.
    pub fn context<'a>(
        &'a self,
        device: &'a dyn Device,
        spec: &'a ModelSpec,
        precision: Precision,
        ropes: &'a RopeTables,
    ) -> Context<'a> {
        let tokens = self.tokens_of_each;
        let shape = attention_shape(spec, self.batch_size, tokens, self.end.saturating_sub(tokens), tokens);
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

/// The position of every token in its document, from its place in the sequence.
pub(crate) fn positions_within(
    starts: &[u32],
    places: impl Iterator<Item = u64>,
) -> Result<Vec<u32>, StepError> {
    let within = |(place, start): (u64, &u32)| {
        let place = place as u32;
        place.checked_sub(*start).ok_or(StepError::DocumentStart { place, start: *start })
    };
    places.zip(starts).map(within).collect()
}

/// The positions of so many tokens, u32 `[count]`.
pub(crate) fn positions(
    device: &dyn Device,
    count: u64,
    places: impl IntoIterator<Item = u64>,
) -> Result<Tensor, StepError> {
    numbers(device, count, places, "positions")
}

/// So many numbers below 2^32, u32 `[count]`.
pub(crate) fn numbers(
    device: &dyn Device,
    count: u64,
    values: impl IntoIterator<Item = u64>,
    name: &'static str,
) -> Result<Tensor, StepError> {
    let numbers = device.alloc(DType::U32, &[count], Tag::Data, name)?;
    let mut values = values.into_iter();
    device.write(&numbers, &mut |bytes| {
        for (cell, value) in bytes.chunks_exact_mut(4).zip(&mut values) {
            cell.copy_from_slice(&(value as u32).to_ne_bytes());
        }
    })?;
    Ok(numbers)
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
            Inputs::upload(device, spec, &Places::whole(2, 3), None, &micro_batch)
                .err()
                .map(|error| error.to_string())
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
        let places = || (0..5).chain(0..5);
        assert_eq!(positions_within(&[0, 0, 2, 2, 4, 0], places()).unwrap(), [0, 1, 0, 1, 0, 0]);
        assert!(positions_within(&[0, 2], places()).unwrap_err().to_string().contains("token 1"));
    }

    #[test]
    fn rows_come_run_after_run() {
        let all: Vec<u32> = (0..12).collect();
        let places = |batch_size, runs| Places { batch_size, length: 12 / batch_size, runs };
        let both = places(2, vec![1..2, 3..5]);
        assert_eq!(*both.of(&all), [1, 7, 3, 4, 9, 10]);
        assert_eq!(both.of_rows().collect::<Vec<_>>(), [1, 1, 3, 4, 3, 4]);
        assert_eq!((both.tokens(), both.rows()), (3, 6));
        assert_eq!(*places(1, vec![4..6, 8..9]).of(&all), [4, 5, 8]);
        let one = 4..9;
        assert!(matches!(places(1, vec![one]).of(&all), Cow::Borrowed([4, 5, 6, 7, 8])));
        assert!(matches!(Places::whole(3, 4).of(&all), Cow::Borrowed(own) if own == all));
    }
}
