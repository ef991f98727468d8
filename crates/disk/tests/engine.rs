//! The engine against plain reads and writes, and against files that are not what they should be.

use std::path::Path;
use std::sync::Arc;

use plimsoll_disk::{
    ALIGNMENT, BufferPool, DiskEngine, DiskError, DiskFile, EngineSettings, IoMode, SpillFile, SpillSettings,
    pages,
};
use plimsoll_memory::Region;
use proptest::prelude::*;

fn engine() -> DiskEngine {
    DiskEngine::start(EngineSettings { queue_depth: 3, piece_bytes: 2 * ALIGNMENT }).unwrap()
}

/// Files of tests lie in the build folder, which is on a disk where temporary folders may be in memory.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn content(length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn file_of(folder: &Path, bytes: &[u8], direct: bool) -> Arc<DiskFile> {
    let path = folder.join("file");
    std::fs::write(&path, bytes).unwrap();
    Arc::new(DiskFile::open(&path, direct).unwrap())
}

fn spill(folder: &Path, direct: bool) -> SpillFile {
    SpillFile::create(&SpillSettings { folder: folder.to_owned(), budget: None, direct }).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any regions of a file of any length, several under way at once, in memory that begins anywhere.
    #[test]
    fn regions_are_what_plain_reads_give(
        length in 0usize..60_000,
        regions in prop::collection::vec((any::<u16>(), any::<u16>(), 0usize..200), 1..6),
        direct in any::<bool>(),
    ) {
        let (folder, engine, bytes) = (folder(), engine(), content(length));
        let file = file_of(folder.path(), &bytes, direct);
        let asked: Vec<_> = regions
            .into_iter()
            .map(|(a, b, skip)| {
                let (a, b) = (usize::from(a) % (length + 1), usize::from(b) % (length + 1));
                let range = a.min(b) as u64..a.max(b) as u64;
                let whole = pages(&range);
                let memory = Region::new(skip as u64 + whole.end - whole.start + ALIGNMENT).unwrap();
                let (_, memory) = memory.split_at(skip);
                (range.clone(), memory.len(), engine.prefetch(&file, range, memory))
            })
            .collect();
        for (range, memory, ticket) in asked {
            let finished = ticket.wait();
            prop_assert_eq!(finished.bytes().unwrap(), &bytes[range.start as usize..range.end as usize]);
            prop_assert_eq!(finished.region.len(), memory);
        }
    }

    /// What is written to a spill file is read again, whatever was written beside it.
    #[test]
    fn a_spill_file_keeps_what_is_written(
        sizes in prop::collection::vec(1usize..30_000, 1..6),
        direct in any::<bool>(),
    ) {
        let (folder, engine) = (folder(), engine());
        let spill = spill(folder.path(), direct);
        let pool = BufferPool::new(1, 30_000).unwrap();
        let mut places = Vec::new();
        for (i, size) in sizes.iter().enumerate() {
            let place = spill.allocate(*size as u64).unwrap();
            let mut buffer = pool.take().unwrap();
            let start = buffer.skip_to(ALIGNMENT as usize);
            buffer.bytes_mut()[start..start + size].fill(i as u8 + 1);
            let finished = engine.write_back(spill.file(), place.start, *size as u64, buffer).wait();
            prop_assert_eq!(finished.bytes().unwrap().len(), *size);
            pool.give_back(finished.region);
            places.push(place);
        }
        for (i, place) in places.into_iter().enumerate() {
            let size = (place.end - place.start) as usize;
            let finished = engine.prefetch(spill.file(), place, pool.take().unwrap()).wait();
            prop_assert_eq!(finished.bytes().unwrap(), vec![i as u8 + 1; size]);
            pool.give_back(finished.region);
        }
        let done = engine.meter().totals();
        prop_assert_eq!([done.bytes_read, done.bytes_written], [sizes.iter().sum::<usize>() as u64; 2]);
        prop_assert!(done.io_seconds > 0.0 && done.hidden_share().is_some());
    }
}

#[test]
fn what_lies_beyond_a_file_is_refused() {
    let (folder, engine) = (folder(), engine());
    let file = file_of(folder.path(), &content(5000), true);
    for range in [4000..5001, 5001..5001, u64::MAX..u64::MAX, 0..u64::MAX] {
        let finished = engine.prefetch(&file, range, Region::new(1 << 16).unwrap()).wait();
        assert!(matches!(finished.outcome, Err(DiskError::EndOfFile { length: 5000, .. })));
        assert_eq!(finished.region.len(), 1 << 16);
    }
    assert_eq!(engine.meter().totals().bytes_read, 0);
}

#[test]
fn a_file_that_was_cut_short_is_an_error_that_says_where() {
    for direct in [true, false] {
        let (folder, engine) = (folder(), engine());
        let file = file_of(folder.path(), &content(50_000), direct);
        std::fs::OpenOptions::new().write(true).open(file.path()).unwrap().set_len(10_000).unwrap();
        let finished = engine.prefetch(&file, 100..40_000, Region::new(1 << 16).unwrap()).wait();
        let error = finished.outcome.unwrap_err().to_string();
        assert!(error.contains("file ends after") && error.contains("cut short"), "{error}");
        // What is left of it can still be read.
        let finished = engine.prefetch(&file, 9000..10_000, finished.region).wait();
        assert_eq!(finished.bytes().unwrap(), &content(10_000)[9000..]);
    }
}

#[test]
fn a_buffer_that_is_too_small_comes_back_with_an_error() {
    let (folder, engine) = (folder(), engine());
    let file = file_of(folder.path(), &content(20_000), true);
    let (_, memory) = Region::new(3 * ALIGNMENT).unwrap().split_at(1);
    let finished = engine.prefetch(&file, 4095..8193, memory).wait();
    assert!(matches!(finished.outcome, Err(DiskError::Buffer { has: 8192, needed: 12288 })));
    let spill = spill(folder.path(), true);
    let finished = engine.write_back(spill.file(), 100, 10, finished.region).wait();
    assert!(matches!(finished.outcome, Err(DiskError::Buffer { .. })));
    assert_eq!(finished.region.len() as u64, 3 * ALIGNMENT - 1);
}

#[test]
fn an_engine_and_tickets_can_be_dropped_at_any_moment() {
    let folder = folder();
    let file = file_of(folder.path(), &content(1 << 20), true);
    let memory = || Region::new((1 << 20) + ALIGNMENT).unwrap();
    for _ in 0..20 {
        let engine = engine();
        drop(engine.prefetch(&file, 0..1 << 20, memory()));
        let kept = engine.prefetch(&file, 1..1 << 20, memory());
        let last = engine.prefetch(&file, 2..1 << 20, memory());
        assert_eq!(kept.wait().bytes().unwrap().len(), (1 << 20) - 1);
        drop(engine);
        // Done in time or not, it is answered, and the memory is there.
        let last = last.wait();
        assert!(matches!(last.outcome, Ok(_) | Err(DiskError::Stopped)));
        assert_eq!(last.region.len(), memory().len());
    }
}

#[test]
fn what_is_no_file_cannot_be_opened() {
    let folder = folder();
    for path in [folder.path().to_owned(), folder.path().join("missing"), "/dev/zero".into()] {
        assert!(matches!(DiskFile::open(&path, true), Err(DiskError::Open { .. })));
    }
}

#[test]
fn the_page_cache_is_only_used_where_it_has_to_be() {
    let folder = folder();
    let file = file_of(folder.path(), &content(10), false);
    assert_eq!((file.mode(), file.length()), (IoMode::Buffered, Some(10)));
    let direct = DiskFile::open(file.path(), true).unwrap();
    println!("direct I/O here: {}", direct.mode());
}
