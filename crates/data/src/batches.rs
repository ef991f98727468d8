//! Batches of windows, made ahead of their use by a background thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use plimsoll_memory::run_on_all_cores;
use plimsoll_parallel::Deal;

use crate::{DataError, Dataset};

/// The target of a position that predicts nothing.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// Some windows, one after the other: position i of a window predicts its token i + 1, the last one nothing; nor does the
/// end of a document where documents are told apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// What each position predicts.
    pub targets: Vec<u32>,
    /// Weight of each target in the loss; `None` where all have the same.
    pub weights: Option<Vec<f32>>,
    /// The place in its window where each token's sample begins, where samples share windows.
    pub document_starts: Option<Vec<u32>>,
}

/// The targets of windows of `length` tokens each.
pub fn targets(tokens: &[u32], length: usize) -> Vec<u32> {
    let mut targets = Vec::with_capacity(tokens.len());
    for window in tokens.chunks(length.max(1)) {
        targets.extend_from_slice(&window[1..]);
        targets.push(IGNORED_TARGET);
    }
    targets
}

/// An endless row of batches.
pub struct Batches {
    source: Source,
}

enum Source {
    /// Made when asked for.
    Direct(Maker),
    /// Made ahead. The receiver goes first, which ends the thread, which is then joined.
    Ahead { batches: Option<Receiver<Result<Batch, DataError>>>, thread: Option<JoinHandle<()>> },
}

struct Maker {
    dataset: Arc<Dataset>,
    batch_size: u64,
    /// Windows before the first step.
    position: u64,
    /// Batches made so far.
    made: u64,
    deal: Deal,
}

impl Batches {
    /// Batches of `batch_size` windows, the first `position` windows left out. Up to `ahead` batches are made before they
    /// are asked for, by a thread of its own; with 0 the caller's thread makes them.
    pub fn start(
        dataset: impl Into<Arc<Dataset>>,
        batch_size: u64,
        ahead: usize,
        position: u64,
    ) -> Result<Batches, DataError> {
        Batches::dealt(dataset, batch_size, ahead, position, Deal::ALONE)
    }

    /// The same for one of several ranks: of each step's batches, those that are dealt to it.
    pub fn dealt(
        dataset: impl Into<Arc<Dataset>>,
        batch_size: u64,
        ahead: usize,
        position: u64,
        deal: Deal,
    ) -> Result<Batches, DataError> {
        let mut maker = Maker { dataset: dataset.into(), batch_size, position, made: 0, deal };
        if ahead == 0 {
            return Ok(Batches { source: Source::Direct(maker) });
        }
        let (sender, batches) = sync_channel(ahead);
        let thread = std::thread::Builder::new()
            .name("plimsoll-data".to_owned())
            .spawn(move || {
                run_on_all_cores();
                loop {
                    let batch = maker.next();
                    let failed = batch.is_err();
                    // Nobody listens any more, or there is nothing more to say.
                    if sender.send(batch).is_err() || failed {
                        return;
                    }
                }
            })
            .map_err(DataError::io("start a thread for", std::path::Path::new("data")))?;
        Ok(Batches { source: Source::Ahead { batches: Some(batches), thread: Some(thread) } })
    }

    /// The next batch.
    pub fn next_batch(&mut self) -> Result<Batch, DataError> {
        match &mut self.source {
            Source::Direct(maker) => maker.next(),
            Source::Ahead { batches, .. } => match batches {
                Some(batches) => batches.recv().unwrap_or(Err(DataError::WorkerGone)),
                None => Err(DataError::WorkerGone),
            },
        }
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        if let Source::Ahead { batches, thread } = &mut self.source {
            drop(batches.take());
            if let Some(thread) = thread.take() {
                // Its panic, if any, was already seen as `WorkerGone`.
                let _ = thread.join();
            }
        }
    }
}

impl Maker {
    fn next(&mut self) -> Result<Batch, DataError> {
        let own = self.deal.own.max(1);
        let (step, within) = (self.made / own, self.made % own);
        let number = step * self.deal.all() + self.deal.place(within);
        let batch = self.dataset.batch(self.position + number * self.batch_size, self.batch_size)?;
        self.made += 1;
        Ok(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DatasetOptions;
    use plimsoll_model::tokenizer::Tokenizer;

    fn dataset(text: &str, sequence_length: u64, shuffle: Option<u64>) -> Result<Dataset, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.txt");
        std::fs::write(&path, text).unwrap();
        let options = DatasetOptions {
            patterns: vec![path.to_str().unwrap().to_owned()],
            max_invalid_share: 0.0,
            text_field: "text".to_owned(),
            append_eos: false,
            buffer_bytes: 64,
            sequence_length,
            shuffle,
            document_mask: false,
        };
        Dataset::open(&options, &Tokenizer::byte_level().unwrap(), folder.path())
    }

    fn first(dataset: Dataset, batch_size: u64, ahead: usize, position: u64, count: usize) -> Vec<Batch> {
        let mut batches = Batches::start(dataset, batch_size, ahead, position).unwrap();
        (0..count).map(|_| batches.next_batch().unwrap()).collect()
    }

    #[test]
    fn windows_come_in_order_wrap_around_and_leave_out_the_tail() {
        let text = |batch: &Batch| batch.tokens.iter().map(|t| *t as u8 as char).collect::<String>();
        let batches = first(dataset("abcdefghij", 3, None).unwrap(), 2, 0, 0, 3);
        assert_eq!(batches.iter().map(text).collect::<Vec<_>>(), ["abcdef", "ghiabc", "defghi"]);
        let last = IGNORED_TARGET;
        assert_eq!(batches[0].targets, [98, 99, last, 101, 102, last]);
    }

    #[test]
    fn ahead_or_not_from_the_start_or_later_batches_are_the_same() {
        let text: String = (0..200).map(|i| char::from(b'a' + i % 26)).collect();
        for shuffle in [None, Some(5)] {
            let make = || dataset(&text, 7, shuffle).unwrap();
            let all = first(make(), 3, 0, 0, 30);
            assert_eq!(first(make(), 3, 2, 0, 30), all);
            assert_eq!(first(make(), 3, 2, 3 * 11, 19), all[11..]);
        }
    }

    #[test]
    fn ranks_take_the_batches_of_one_without_overlap() {
        let text: String = (0..400u32).map(|i| char::from(b'a' + (i % 26) as u8)).collect();
        let make = || dataset(&text, 7, Some(5)).unwrap();
        let all = first(make(), 2, 0, 6, 24);
        for (ranks, own, together) in [(2, 3, 1), (3, 2, 2), (4, 1, 1)] {
            for rank in 0..ranks {
                let deal = Deal { rank, ranks, own, together };
                let mut batches = Batches::dealt(make(), 2, 1, 6, deal).unwrap();
                for step in 0..24 / deal.all() {
                    for within in 0..own {
                        let place = step * deal.all() + deal.place(within);
                        assert_eq!(batches.next_batch().unwrap(), all[place as usize]);
                    }
                }
            }
        }
    }

    fn two_documents(document_mask: bool) -> Dataset {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        std::fs::write(&path, "{\"text\":\"ab\"}\n{\"text\":\"c\"}\n").unwrap();
        let options = DatasetOptions {
            patterns: vec![path.to_str().unwrap().to_owned()],
            max_invalid_share: 0.0,
            text_field: "text".to_owned(),
            append_eos: true,
            buffer_bytes: 64,
            sequence_length: 5,
            shuffle: None,
            document_mask,
        };
        Dataset::open(&options, &Tokenizer::byte_level().unwrap(), folder.path()).unwrap()
    }

    #[test]
    fn documents_are_joined_by_the_end_of_text_token() {
        let dataset = two_documents(false);
        assert_eq!((dataset.tokens(), dataset.windows(), dataset.document_end()), (5, 1, None));
        let batch = &first(dataset, 1, 0, 0, 1)[0];
        assert_eq!(batch.tokens, [97, 98, 256, 99, 256]);
        assert_eq!(batch.targets, [98, 256, 99, 256, IGNORED_TARGET]);
    }

    #[test]
    fn the_end_of_a_document_that_is_told_apart_predicts_nothing() {
        let (joined, apart) = (two_documents(false), two_documents(true));
        assert_ne!(joined.identity(), apart.identity());
        assert_eq!(apart.document_end(), Some(256));
        let batch = &first(apart, 1, 0, 0, 1)[0];
        assert_eq!(batch.tokens, [97, 98, 256, 99, 256]);
        assert_eq!(batch.targets, [98, 256, IGNORED_TARGET, 256, IGNORED_TARGET]);
    }

    #[test]
    fn too_little_text_is_an_error_that_says_how_much_there_is() {
        let error = dataset("abc", 4, None).unwrap_err().to_string();
        assert_eq!(
            error,
            "the data has 3 tokens, fewer than one sequence of 4; add text or set data.sequence_length=3 or less"
        );
        assert!(matches!(dataset("", 4, None), Err(DataError::Empty { .. })));
    }

    #[test]
    fn other_data_has_another_identity() {
        let identity = |text, length, shuffle| dataset(text, length, shuffle).unwrap().identity();
        let base = identity("abcdef", 3, None);
        assert_eq!(base, identity("abcdef", 3, None));
        for other in
            [identity("abcdeg", 3, None), identity("abcdef", 2, None), identity("abcdef", 3, Some(1))]
        {
            assert_ne!(base, other);
        }
    }
}
