//! Batches of windows, made ahead of their use by background threads, in one order whatever the number of threads.

mod shelf;

use std::sync::Arc;
use std::thread::JoinHandle;

use plimsoll_memory::run_on_all_cores;
use plimsoll_parallel::Deal;

use self::shelf::Shelf;
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

impl Batch {
    /// Bytes of its memory, filled or not.
    pub fn bytes(&self) -> u64 {
        let words = self.tokens.capacity() + self.targets.capacity();
        let weights = self.weights.as_ref().map_or(0, Vec::capacity);
        let starts = self.document_starts.as_ref().map_or(0, Vec::capacity);
        4 * (words + weights + starts) as u64
    }

    /// Forgets its windows, and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.targets.clear();
        self.weights.iter_mut().for_each(Vec::clear);
        self.document_starts.iter_mut().for_each(Vec::clear);
    }
}

/// The targets of windows of `length` tokens each.
pub fn targets(tokens: &[u32], length: usize) -> Vec<u32> {
    let mut targets = Vec::with_capacity(tokens.len());
    add_targets(tokens, length, &mut targets);
    targets
}

/// The same, added to others.
pub(crate) fn add_targets(tokens: &[u32], length: usize, targets: &mut Vec<u32>) {
    for window in tokens.chunks(length.max(1)) {
        targets.extend_from_slice(&window[1..]);
        targets.push(IGNORED_TARGET);
    }
}

/// How many threads make batches ahead of their use, and how far ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workers {
    /// Threads; with none, whoever asks for a batch makes it.
    pub count: u64,
    /// Batches that are made ahead for each of them.
    pub prefetch_factor: u64,
    /// Whether they live on from one epoch to the next.
    pub persistent: bool,
}

impl Workers {
    /// Nothing is made ahead.
    pub const NONE: Workers = Workers { count: 0, prefetch_factor: 0, persistent: true };

    /// Bytes that a worker takes beside its batches: its stack. It reads in pieces that lie there.
    pub const STACK_BYTES: u64 = 256 << 10;

    /// Batches that are made before they are asked for.
    pub fn ahead(self) -> u64 {
        self.count.saturating_mul(self.prefetch_factor)
    }

    /// Bytes of all their stacks.
    pub fn bytes(self) -> u64 {
        self.count.saturating_mul(Workers::STACK_BYTES)
    }
}

/// An endless row of batches, the same whatever the number of workers.
///
/// Its memory is taken at the beginning and does not grow: buffers for the batches that are made ahead, and for those of one step, which
/// come back with [`reuse`](Batches::reuse).
pub struct Batches {
    maker: Arc<Maker>,
    workers: Workers,
    shelf: Arc<Shelf>,
    threads: Vec<JoinHandle<()>>,
    /// Batches handed out so far.
    handed: u64,
}

/// Makes a batch by its number, on any thread.
pub(crate) struct Maker {
    dataset: Arc<Dataset>,
    batch_size: u64,
    /// Windows before the first step.
    position: u64,
    deal: Deal,
}

impl Batches {
    /// Batches of `batch_size` windows, the first `position` windows left out.
    pub fn start(
        dataset: impl Into<Arc<Dataset>>,
        batch_size: u64,
        workers: Workers,
        position: u64,
    ) -> Result<Batches, DataError> {
        Batches::dealt(dataset, batch_size, workers, position, Deal::ALONE)
    }

    /// The same for one of several ranks: of each step's batches, those that are dealt to it.
    pub fn dealt(
        dataset: impl Into<Arc<Dataset>>,
        batch_size: u64,
        workers: Workers,
        position: u64,
        deal: Deal,
    ) -> Result<Batches, DataError> {
        let maker = Arc::new(Maker { dataset: dataset.into(), batch_size, position, deal });
        let buffers = workers.ahead().saturating_add(deal.own.max(1));
        let shelf = Arc::new(Shelf::new(workers.ahead(), buffers));
        let mut batches = Batches { maker, workers, shelf, threads: Vec::new(), handed: 0 };
        batches.set_to_work()?;
        Ok(batches)
    }

    /// Takes the buffers, and starts the workers where the next batch begins.
    fn set_to_work(&mut self) -> Result<(), DataError> {
        let end = match self.workers.persistent {
            true => u64::MAX,
            false => self.maker.end_of_epoch(self.handed),
        };
        self.shelf.open(self.handed, end, || self.maker.empty());
        for _ in 0..self.workers.count {
            let (maker, shelf) = (Arc::clone(&self.maker), Arc::clone(&self.shelf));
            let thread = std::thread::Builder::new()
                .name("plimsoll-data".to_owned())
                .stack_size(Workers::STACK_BYTES as usize)
                .spawn(move || {
                    run_on_all_cores();
                    shelf.work(&maker);
                })
                .map_err(DataError::io("start a thread for", std::path::Path::new("data")))?;
            self.threads.push(thread);
        }
        Ok(())
    }

    /// The next batch.
    pub fn next_batch(&mut self) -> Result<Batch, DataError> {
        if self.handed > 0 && self.shelf.has_ended(self.handed) {
            self.send_home();
            self.set_to_work()?;
        }
        let batch = match self.threads.is_empty() {
            false => self.shelf.take(self.handed)?,
            true => {
                let mut batch = self.shelf.buffer(|| self.maker.empty());
                self.maker.make(self.handed, &mut batch)?;
                batch
            }
        };
        self.handed += 1;
        Ok(batch)
    }

    /// Takes a batch back that is no longer needed: later ones are made in its memory.
    pub fn reuse(&mut self, batch: Batch) {
        self.shelf.put_back(batch);
    }

    /// The most that its batches have taken at once, whoever had them, in bytes, and the stacks of its workers.
    pub fn most_bytes(&self) -> u64 {
        self.shelf.most_bytes().saturating_add(self.workers.bytes())
    }

    /// What can be given back of it while memory is short, from any thread.
    pub fn spare(&self) -> SpareBatches {
        SpareBatches { shelf: Arc::clone(&self.shelf), maker: Arc::clone(&self.maker) }
    }

    /// Ends the workers.
    fn send_home(&mut self) {
        self.shelf.close();
        for thread in self.threads.drain(..) {
            // Its panic, if any, was already seen as `WorkerGone`.
            let _ = thread.join();
        }
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        self.send_home();
    }
}

/// The part of a pipeline's memory that it can do without: batches made ahead, buffers of batches that came back, and what the system
/// keeps of the tokens' file.
#[derive(Clone)]
pub struct SpareBatches {
    shelf: Arc<Shelf>,
    maker: Arc<Maker>,
}

impl SpareBatches {
    /// Gives it back; until [`resume`](SpareBatches::resume) no batch is made before it is asked for. The batches that come
    /// are the same. The bytes of batches that were given back.
    pub fn give_back(&self) -> u64 {
        let bytes = self.shelf.pause();
        self.maker.dataset.release_cache();
        bytes
    }

    /// Works ahead again.
    pub fn resume(&self) {
        self.shelf.resume();
    }
}

impl Maker {
    /// The place of a batch in the row of all ranks.
    fn number(&self, made: u64) -> u64 {
        let own = self.deal.own.max(1);
        let (step, within) = (made / own, made % own);
        step * self.deal.all() + self.deal.place(within)
    }

    fn first_window(&self, made: u64) -> u64 {
        self.position + self.number(made) * self.batch_size
    }

    /// The first batch of a later epoch than that of batch `made`.
    fn end_of_epoch(&self, made: u64) -> u64 {
        let windows = self.dataset.windows().max(1);
        let epoch = |made| self.first_window(made) / windows;
        let now = epoch(made);
        // Batches of a step are not dealt in order, so that steps are looked at.
        let own = self.deal.own.max(1);
        let mut step = made / own + 1;
        while epoch(step * own) <= now {
            let left = (now + 1) * windows - self.first_window(step * own);
            step += (left / (self.deal.all().max(1) * self.batch_size.max(1))).max(1);
        }
        step * own
    }

    fn empty(&self) -> Batch {
        self.dataset.buffer(self.batch_size)
    }

    pub(crate) fn make(&self, made: u64, batch: &mut Batch) -> Result<(), DataError> {
        self.dataset.fill(self.first_window(made), self.batch_size, batch)
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
            key: "data.train",
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

    fn workers(count: u64, prefetch_factor: u64) -> Workers {
        Workers { count, prefetch_factor, persistent: true }
    }

    fn first(dataset: Dataset, batch_size: u64, workers: Workers, position: u64, count: usize) -> Vec<Batch> {
        let mut batches = Batches::start(dataset, batch_size, workers, position).unwrap();
        (0..count).map(|_| batches.next_batch().unwrap()).collect()
    }

    #[test]
    fn windows_come_in_order_wrap_around_and_leave_out_the_tail() {
        let text = |batch: &Batch| batch.tokens.iter().map(|t| *t as u8 as char).collect::<String>();
        let batches = first(dataset("abcdefghij", 3, None).unwrap(), 2, Workers::NONE, 0, 3);
        assert_eq!(batches.iter().map(text).collect::<Vec<_>>(), ["abcdef", "ghiabc", "defghi"]);
        let last = IGNORED_TARGET;
        assert_eq!(batches[0].targets, [98, 99, last, 101, 102, last]);
    }

    #[test]
    fn ahead_or_not_from_the_start_or_later_batches_are_the_same() {
        let text: String = (0..200).map(|i| char::from(b'a' + i % 26)).collect();
        for shuffle in [None, Some(5)] {
            let make = || dataset(&text, 7, shuffle).unwrap();
            let all = first(make(), 3, Workers::NONE, 0, 30);
            for workers in [workers(1, 2), workers(1, 1), workers(3, 1), workers(8, 2), workers(8, 0)] {
                assert_eq!(first(make(), 3, workers, 0, 30), all, "{workers:?}");
                assert_eq!(first(make(), 3, workers, 3 * 11, 19), all[11..], "{workers:?}");
                let short_lived = Workers { persistent: false, ..workers };
                assert_eq!(first(make(), 3, short_lived, 3 * 5, 25), all[5..], "{short_lived:?}");
            }
        }
    }

    #[test]
    fn ranks_take_the_batches_of_one_without_overlap() {
        let text: String = (0..400u32).map(|i| char::from(b'a' + (i % 26) as u8)).collect();
        let make = || dataset(&text, 7, Some(5)).unwrap();
        let all = first(make(), 2, Workers::NONE, 6, 24);
        for (ranks, own, together) in [(2, 3, 1), (3, 2, 2), (4, 1, 1)] {
            for rank in 0..ranks {
                let deal = Deal { rank, ranks, own, together };
                let mut batches = Batches::dealt(make(), 2, workers(2, 1), 6, deal).unwrap();
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
            key: "data.train",
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
        let batch = &first(dataset, 1, Workers::NONE, 0, 1)[0];
        assert_eq!(batch.tokens, [97, 98, 256, 99, 256]);
        assert_eq!(batch.targets, [98, 256, 99, 256, IGNORED_TARGET]);
    }

    #[test]
    fn the_end_of_a_document_that_is_told_apart_predicts_nothing() {
        let (joined, apart) = (two_documents(false), two_documents(true));
        assert_ne!(joined.identity(), apart.identity());
        assert_eq!(apart.document_end(), Some(256));
        let batch = &first(apart, 1, Workers::NONE, 0, 1)[0];
        assert_eq!(batch.tokens, [97, 98, 256, 99, 256]);
        assert_eq!(batch.targets, [98, 256, IGNORED_TARGET, 256, IGNORED_TARGET]);
    }

    #[test]
    fn too_little_text_is_an_error_that_says_how_much_there_is() {
        let error = dataset("abc", 4, None).unwrap_err().to_string();
        assert!(
            error.starts_with("data.train: ") && error.contains("data.txt: 3 tokens, fewer than"),
            "{error}"
        );
        assert!(error.ends_with("sequence of 4; add text, or set data.sequence_length=3 or less"), "{error}");
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

    /// A batch of two windows of seven tokens has 28 words. There are buffers for all that is made ahead, and for a step's.
    #[test]
    fn the_memory_of_a_pipeline_is_taken_once() {
        let text: String = (0..400u32).map(|i| char::from(b'a' + (i % 26) as u8)).collect();
        for (workers, own) in [(Workers::NONE, 3), (workers(1, 2), 1), (workers(8, 2), 4)] {
            let deal = Deal { own, ..Deal::ALONE };
            let dataset = dataset(&text, 7, None).unwrap();
            let mut batches = Batches::dealt(dataset, 2, workers, 0, deal).unwrap();
            let planned = 4 * 28 * (workers.ahead() + own) + workers.count * (256 << 10);
            for _ in 0..30 {
                assert_eq!(batches.most_bytes(), planned, "{workers:?}");
                let step: Vec<Batch> = (0..own).map(|_| batches.next_batch().unwrap()).collect();
                step.into_iter().for_each(|batch| batches.reuse(batch));
            }
            assert_eq!(batches.most_bytes(), planned, "{workers:?}");
        }
    }

    /// Batches that were made ahead are made again where they were given back.
    #[test]
    fn what_is_given_back_changes_no_batch() {
        let text: String = (0..400u32).map(|i| char::from(b'a' + (i % 26) as u8)).collect();
        let make = || dataset(&text, 7, Some(5)).unwrap();
        let all = first(make(), 2, Workers::NONE, 0, 60);
        let batch = 4 * 28;
        for workers in [Workers::NONE, workers(1, 3), workers(4, 2)] {
            let mut batches = Batches::start(make(), 2, workers, 0).unwrap();
            let spare = batches.spare();
            for (number, expected) in all.iter().enumerate() {
                let given_back = if number % 7 == 3 { spare.give_back() } else { 0 };
                // What workers are about to make comes back when it is made.
                assert!(given_back <= batch * (workers.ahead() + 1), "{given_back}");
                if number % 7 == 5 {
                    spare.resume();
                }
                let next = batches.next_batch().unwrap();
                assert_eq!(next, *expected, "{number} {workers:?}");
                batches.reuse(next);
            }
        }
        let mut alone = Batches::start(make(), 2, workers(0, 0), 0).unwrap();
        let (spare, first) = (alone.spare(), alone.next_batch().unwrap());
        assert_eq!((spare.give_back(), alone.shelf.bytes()), (0, batch));
        alone.reuse(first);
        // It was not kept.
        assert_eq!((spare.give_back(), alone.shelf.bytes()), (0, 0));
    }
}
