//! The engine and the tiers at their edges: files that end within a piece, pieces that end within a page, buffers that are
//! used again, homes that are full.

use std::fs::OpenOptions;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use plimsoll_disk::{
    ALIGNMENT, BufferMemory, BufferPool, Direction, DiskEngine, DiskError, DiskFile, EngineSettings, Home,
    IoMode, LowerTiers, SpillFile, SpillSettings, Stretch, pages,
};
use plimsoll_memory::{Loan, Phase, Region, Tag, Tier};

/// Pieces of two pages.
const PIECE: u64 = 2 * ALIGNMENT;

fn engine(queue_depth: usize) -> DiskEngine {
    DiskEngine::start(EngineSettings { queue_depth, piece_bytes: PIECE }).unwrap()
}

/// Files of tests lie in the build folder, which is on a disk where temporary folders may be in memory.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn content(length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn settings(folder: &Path, direct: bool) -> SpillSettings {
    SpillSettings { folder: folder.to_owned(), budget: None, direct }
}

/// Cut at every place that means something: a page's begin and end, a piece's, and within both.
#[test]
fn a_file_that_was_cut_short_gives_what_is_left_and_no_byte_more() {
    let bytes = content(50_000);
    for direct in [true, false] {
        let (folder, engine) = (folder(), engine(2));
        let path = folder.path().join("file");
        for length in [0, 1, 4095, 4096, 4097, 8192, 8193, 10_000, 12_287, 12_288, 12_289, 16_384, 49_999] {
            std::fs::write(&path, &bytes).unwrap();
            let file = Arc::new(DiskFile::open(&path, direct).unwrap());
            OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
            for end in [length.saturating_sub(1), length, length + 1, length + 5000] {
                let end = end.min(50_000);
                let start = end.min(100);
                let finished = engine.prefetch(&file, start..end, Region::new(1 << 16).unwrap()).wait();
                assert_eq!(finished.region.len(), 1 << 16);
                match finished.bytes() {
                    Ok(got) => {
                        assert!(end <= length || start == end, "{length} {start}..{end}");
                        assert!(got == &bytes[start as usize..end as usize]);
                    }
                    Err(DiskError::EndOfFile { length: at, end: needed, .. }) => {
                        assert!(end > length, "{length} {start}..{end}");
                        assert!(*at <= length.max(*at / ALIGNMENT * ALIGNMENT) && *needed <= end);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

/// Every number of pages from less than a piece to three pieces and a half, with bytes that end within the last one.
#[test]
fn requests_of_any_length_fall_into_pieces() {
    let bytes = content(40_000);
    let (folder, engine) = (folder(), engine(3));
    let path = folder.path().join("file");
    std::fs::write(&path, &bytes).unwrap();
    for direct in [true, false] {
        let file = Arc::new(DiskFile::open(&path, direct).unwrap());
        for start in [0, 1, 4096, 8191] {
            for length in [0, 1, 4095, 4096, 4097, 8192, 8193, 12_288, 20_000, 28_672, 28_673] {
                let range = start..start + length;
                let whole = pages(&range);
                let region = Region::new(whole.end - whole.start).unwrap();
                let finished = engine.prefetch(&file, range.clone(), region).wait();
                let expected = &bytes[range.start as usize..range.end as usize];
                assert!(finished.bytes().unwrap() == expected, "{range:?}");
                // Where in the memory they lie is told too.
                assert_eq!(finished.outcome.unwrap().start as u64, start - whole.start);
            }
        }
        // One page less than it needs.
        let finished = engine.prefetch(&file, 4095..8193, Region::new(2 * ALIGNMENT).unwrap()).wait();
        assert!(matches!(finished.outcome, Err(DiskError::Buffer { has: 8192, needed: 12_288 })));
    }
}

#[test]
fn writes_reach_their_pages_and_no_other() {
    for direct in [true, false] {
        let (folder, engine) = (folder(), engine(2));
        let spill = SpillFile::create(&settings(folder.path(), direct)).unwrap();
        let place = spill.allocate(10 * ALIGNMENT).unwrap();
        let write = |page: u64, bytes: u64, value: u8| {
            let mut region = Region::new(pages(&(0..bytes)).end).unwrap();
            region.bytes_mut().fill(value);
            engine.write_back(spill.file(), page * ALIGNMENT, bytes, region).wait().outcome
        };
        assert_eq!(write(0, 10 * ALIGNMENT, 1).unwrap(), 0..40_960);
        assert_eq!(write(3, 2 * ALIGNMENT + 1, 2).unwrap(), 0..8193);
        assert_eq!(write(9, 1, 3).unwrap(), 0..1);
        let region = Region::new(10 * ALIGNMENT).unwrap();
        let finished = engine.prefetch(spill.file(), place, region).wait();
        let firsts: Vec<u8> =
            finished.bytes().unwrap().chunks(ALIGNMENT as usize).map(|page| page[0]).collect();
        // The rest of the last page goes with its first byte.
        assert_eq!(firsts, [1, 1, 1, 2, 2, 2, 1, 1, 1, 3]);
        for chunk in finished.bytes().unwrap().chunks(ALIGNMENT as usize) {
            assert!(chunk.iter().all(|byte| *byte == chunk[0]));
        }
        let moved = engine.meter().totals();
        assert_eq!([moved.bytes_written, moved.bytes_read], [40_960 + 8193 + 1, 40_960]);
        assert!(matches!(write(u64::MAX / ALIGNMENT, 5000, 0), Err(DiskError::Buffer { .. })));
    }
}

/// A few buffers, many requests: each is filled again as soon as it comes back, while others are under way.
#[test]
fn buffers_serve_again_and_again() {
    let bytes = content(200_000);
    let (folder, engine) = (folder(), engine(2));
    let path = folder.path().join("file");
    std::fs::write(&path, &bytes).unwrap();
    let file = Arc::new(DiskFile::open(&path, true).unwrap());
    let buffers = BufferPool::new(3, 9000).unwrap();
    let mut outs: Vec<Vec<u8>> = (0..60).map(|i| vec![0; (i * 997) % 9001]).collect();
    let place = |i: usize, length: usize| {
        let start = (i * 7919) as u64 % (200_000 - 9000);
        start..start + length as u64
    };
    let parts = outs.iter_mut().enumerate().map(|(i, out)| (&file, place(i, out.len()), out.as_mut_slice()));
    engine.read_each(&buffers, parts).unwrap();
    for (i, out) in outs.iter().enumerate() {
        let range = place(i, out.len());
        assert!(out == &bytes[range.start as usize..range.end as usize], "{i}");
    }
    // All came back.
    assert_eq!(std::iter::from_fn(|| buffers.take()).count(), 3);
    // After one that fails nothing more is read, and its buffer comes back too.
    let buffers = BufferPool::new(2, 9000).unwrap();
    let (mut a, mut b, mut c) = ([0; 10], [0; 10], [0; 10]);
    let parts =
        [(&file, 0..10, &mut a[..]), (&file, 199_995..200_005, &mut b[..]), (&file, 5..15, &mut c[..])];
    assert!(matches!(engine.read_each(&buffers, parts), Err(DiskError::EndOfFile { .. })));
    assert_eq!(std::iter::from_fn(|| buffers.take()).count(), 2);
    // Without a buffer there is nothing to read into.
    let none = BufferPool::new(0, 100).unwrap();
    assert!(matches!(engine.read_each(&none, [(&file, 0..10, &mut a[..])]), Err(DiskError::Buffer { .. })));
    // One that is too small for its part is an error of its own.
    let small = BufferPool::new(1, 100).unwrap();
    let mut large = vec![0; 20_000];
    let outcome = engine.read_each(&small, [(&file, 0..20_000, large.as_mut_slice())]);
    assert!(matches!(outcome, Err(DiskError::Buffer { needed: 20_480, .. })), "{outcome:?}");
}

/// Moves a part of a home, and waits for it.
fn moved(
    tiers: &LowerTiers,
    direction: Direction,
    (home, part): (&Arc<Home>, Range<u64>),
    memory: Region,
) -> (Region, Result<(), DiskError>) {
    let stretch = Stretch { bytes: memory.len() as u64, moves: Some((Arc::clone(home), part)) };
    let memory = BufferMemory::Here(Loan::Region(memory));
    match tiers.begin(direction, vec![stretch], memory).unwrap().wait().unwrap() {
        (Loan::Region(memory), outcome) => (memory, outcome),
        (far, _) => panic!("{far:?}"),
    }
}

#[test]
fn parts_of_homes_move_by_themselves() {
    let folder = folder();
    let tiers =
        LowerTiers::open(Region::new(1 << 20).unwrap(), 1 << 20, &settings(folder.path(), true)).unwrap();
    for tier in [Tier::Host, Tier::Disk] {
        let before = tiers.take(tier, 100, Tag::Weights, "before").unwrap();
        let home = tiers.take(tier, 20_000, Tag::Weights, "home").unwrap();
        let after = tiers.take(tier, 100, Tag::Weights, "after").unwrap();
        for home in [&before, &after] {
            tiers.write_now(home, 0, &[9; 100]).unwrap();
        }
        let mut region = Region::new(20_480).unwrap();
        region.bytes_mut().fill(1);
        let home = Arc::new(home);
        moved(&tiers, Direction::WriteBack, (&home, 0..20_000), region).1.unwrap();
        let mut region = Region::new(8192).unwrap();
        region.bytes_mut().fill(2);
        moved(&tiers, Direction::WriteBack, (&home, 4096..12_288), region).1.unwrap();
        tiers.write_now(&home, 16_384, &[3; 3616]).unwrap();
        let into = Region::new(12_288).unwrap();
        let (part, outcome) = moved(&tiers, Direction::Prefetch, (&home, 8192..20_000), into);
        outcome.unwrap();
        let expected = [vec![2; 4096], vec![1; 4096], vec![3; 3616]].concat();
        assert!(part.bytes()[..11_808] == expected);
        for home in [&before, &after] {
            let mut out = [0; 100];
            tiers.read_now(home, 0, &mut out).unwrap();
            assert_eq!(out, [9; 100]);
        }
        // What does not fit is refused.
        let into = Region::new(16_384).unwrap();
        let (small, outcome) = moved(&tiers, Direction::Prefetch, (&home, 0..20_000), into);
        assert!(matches!(outcome, Err(DiskError::Buffer { .. })), "{tier}");
        assert_eq!(small.len(), 16_384);
        if tier == Tier::Host {
            let mut out = [0; 10];
            assert!(matches!(
                tiers.read_now(&home, 20_475, &mut out),
                Err(DiskError::Buffer { has: 20_000, needed: 20_475 })
            ));
            assert!(matches!(
                tiers.write_now(&home, 20_480, &[0; 10]),
                Err(DiskError::Buffer { has: 20_000, needed: 20_490 })
            ));
        }
        assert_eq!((home.bytes(), home.is_in_file()), (20_000, false));
        // Whole pages are taken, and given back.
        let arena = if tier == Tier::Host { tiers.host() } else { tiers.disk() };
        assert_eq!(arena.ledger().live().get(Tag::Weights), 4096 + 20_480 + 4096);
        drop((before, home, after));
        assert_eq!((arena.ledger().live().total(), arena.high_water()), (0, 28_672));
        let error = tiers.take(tier, (1 << 20) + 1, Tag::Gradients, "too much").unwrap_err();
        assert!(matches!(error, DiskError::Tier(_)), "{error}");
    }
    let moved = tiers.meter().unwrap().totals();
    assert!(moved.bytes_written >= 20_000 + 8192 + 100 && moved.bytes_read >= 11_808);
}

#[test]
fn homes_in_files_are_read_and_never_written() {
    let folder = folder();
    let path = folder.path().join("model");
    let bytes = content(30_000);
    std::fs::write(&path, &bytes).unwrap();
    // Without a spill file too.
    let tiers = LowerTiers::open(Region::new(0).unwrap(), 0, &settings(folder.path(), false)).unwrap();
    let home = tiers.adopt(&path, 5000..17_000).unwrap();
    assert_eq!((home.bytes(), home.is_in_file(), tiers.is_dry()), (12_000, true, false));
    let home = Arc::new(home);
    let into = || Region::new(16_384).unwrap();
    let (brought, outcome) = moved(&tiers, Direction::Prefetch, (&home, 0..12_000), into());
    outcome.unwrap();
    // As it lies in its pages.
    assert!(brought.bytes()[904..12_904] == bytes[5000..17_000]);
    let mut out = [0; 50];
    tiers.read_now(&home, 100, &mut out).unwrap();
    assert_eq!(out, bytes[5100..5150]);
    let sent = moved(&tiers, Direction::WriteBack, (&home, 0..12_000), into());
    assert!(matches!(sent.1, Err(DiskError::Stopped)));
    assert!(matches!(tiers.write_now(&home, 0, &[1; 10]), Err(DiskError::Stopped)));
    assert!(std::fs::read(&path).unwrap() == bytes);
    assert!(tiers.adopt(&folder.path().join("missing"), 0..10).is_err());
    // The same file is opened once.
    let again = tiers.adopt(&path, 0..10).unwrap();
    tiers.read_now(&again, 0, &mut out[..10]).unwrap();
    assert_eq!(out[..10], bytes[..10]);
    assert!(matches!(tiers.take(Tier::Disk, 1, Tag::Weights, "x"), Err(DiskError::Tier(_))));
    assert_eq!(
        tiers.buffered_file().is_some(),
        tiers.buffered_file().is_some_and(|file| file.path() == path)
    );
}

#[test]
fn dry_tiers_have_homes_and_move_nothing() {
    let tiers = LowerTiers::dry();
    let disk = tiers.take(Tier::Disk, 5000, Tag::Weights, "a").unwrap();
    let host = tiers.take(Tier::Host, 7000, Tag::Weights, "b").unwrap();
    let file = tiers.adopt(Path::new("/nowhere"), 10..30).unwrap();
    assert_eq!((tiers.is_dry(), file.bytes(), tiers.meter().is_none()), (true, 20, true));
    assert_eq!([&disk, &host, &file].map(Home::is_on_disk), [true, false, true]);
    assert_eq!([tiers.host().high_water(), tiers.disk().high_water()], [8192, 8192]);
    let memory = BufferMemory::Here(Loan::Region(Region::new(8192).unwrap()));
    assert!(tiers.begin(Direction::Prefetch, Vec::new(), memory).is_none());
    assert!(matches!(tiers.read_now(&disk, 0, &mut [0; 10]), Err(DiskError::Stopped)));
    assert!(matches!(tiers.write_now(&disk, 0, &[0; 10]), Err(DiskError::Stopped)));
    assert!(tiers.buffered_file().is_none());
    let none = LowerTiers::default();
    assert!(
        none.take(Tier::Host, 1, Tag::Weights, "x").is_err()
            && none.take(Tier::Disk, 1, Tag::Weights, "x").is_err()
    );
}

#[test]
fn whole_pages_hold_what_is_asked_for() {
    for (bytes, whole) in [
        (0..0, 0..0),
        (0..1, 0..4096),
        (4095..4096, 0..4096),
        (4095..4097, 0..8192),
        (4096..4096, 4096..4096),
        (5000..5000, 4096..8192),
        (8192..12_288, 8192..12_288),
    ] {
        assert_eq!(pages(&bytes), whole, "{bytes:?}");
    }
    assert_eq!(EngineSettings { queue_depth: 3, piece_bytes: 1 }.memory_bytes(), 3 * (128 << 10));
    assert_eq!(EngineSettings { queue_depth: 0, piece_bytes: 1 }.memory_bytes(), 128 << 10);
}

#[test]
fn speeds_are_bytes_over_seconds() {
    let (mode, block_bytes, queue_depth) = (plimsoll_disk::IoMode::Direct, 4096, 1);
    let speed = |write_seconds, read_seconds| plimsoll_disk::DiskSpeed {
        mode,
        block_bytes,
        queue_depth,
        bytes: 100,
        write_seconds,
        read_seconds,
    };
    assert_eq!([speed(4.0, 0.5).write_rate(), speed(4.0, 0.5).read_rate()], [25.0, 200.0]);
    // What took no time that a clock could see is no division by nothing.
    assert!(speed(0.0, 1.0).write_rate() > 1e300 && speed(1.0, 0.0).read_rate() > 1e300);
}

/// With one thread, what comes behind a long request has not begun when its ticket is dropped, unless this thread had to
/// wait for its core just then: it is tried a few times.
#[test]
fn tickets_know_when_they_are_done_and_what_is_dropped_is_left_out() {
    let folder = folder();
    let path = folder.path().join("file");
    std::fs::write(&path, content(4 << 20)).unwrap();
    let file = Arc::new(DiskFile::open(&path, false).unwrap());
    let (mut was_pending, mut was_left_out) = (false, false);
    for _ in 0..100 {
        let engine = engine(1);
        let long = engine.prefetch(&file, 0..4 << 20, Region::new(4 << 20).unwrap());
        was_pending |= !long.is_done();
        drop(engine.prefetch(&file, 0..100, Region::new(4096).unwrap()));
        let last = engine.prefetch(&file, 0..10, Region::new(4096).unwrap());
        assert_eq!(last.wait().bytes().unwrap().len(), 10);
        // The requests before it are done too, as there is one thread.
        assert!(long.is_done());
        long.wait().outcome.unwrap();
        let read = engine.meter().totals().bytes_read;
        assert!([(4 << 20) + 10, (4 << 20) + 110].contains(&read), "{read}");
        was_left_out |= read == (4 << 20) + 10;
        if was_pending && was_left_out {
            return;
        }
    }
    panic!("pending: {was_pending}, left out: {was_left_out}");
}

#[test]
fn nobody_waits_for_what_is_done_and_nothing_takes_no_time() {
    let folder = folder();
    let path = folder.path().join("file");
    std::fs::write(&path, content(20_000)).unwrap();
    let file = Arc::new(DiskFile::open(&path, true).unwrap());
    let engine = engine(1);
    let memory = || Region::new(1 << 15).unwrap();
    // Nothing, and what is refused, is never under way.
    assert_eq!(engine.prefetch(&file, 0..0, memory()).wait().bytes().unwrap(), b"");
    assert!(engine.prefetch(&file, 0..20_001, memory()).wait().outcome.is_err());
    assert_eq!(engine.meter().totals(), plimsoll_disk::IoStatistics::default());
    let ticket = engine.prefetch(&file, 0..20_000, memory());
    while !ticket.is_done() {
        std::thread::yield_now();
    }
    ticket.wait().outcome.unwrap();
    let done = engine.meter().totals();
    assert_eq!((done.bytes_read, done.waited_seconds, done.hidden_share()), (20_000, 0.0, Some(1.0)));
    // The clock stands still while nothing is under way.
    assert_eq!(engine.meter().totals(), done);
}

#[test]
fn tiers_say_what_they_hold_for_whom_and_how_their_files_are_reached() {
    let folder = folder();
    for direct in [true, false] {
        let tiers =
            LowerTiers::open(Region::new(1 << 16).unwrap(), 8 << 20, &settings(folder.path(), direct))
                .unwrap();
        tiers.enter(Phase::Backward, Some(3));
        let home = tiers.take(Tier::Disk, 4 << 20, Tag::Weights, "x").unwrap();
        let _host = tiers.take(Tier::Host, 100, Tag::Weights, "x").unwrap();
        for arena in [tiers.disk(), tiers.host()] {
            let peak = arena.ledger().at_peak().clone();
            assert_eq!((peak.phase, peak.layer), (Phase::Backward, Some(3)));
        }
        match tiers.buffered_file() {
            Some(file) => assert_eq!((file.path(), file.mode()), (folder.path(), IoMode::Buffered)),
            None => assert!(direct),
        }
        let (home, region) = (Arc::new(home), Region::new(4 << 20).unwrap());
        moved(&tiers, Direction::WriteBack, (&home, 0..4 << 20), region).1.unwrap();
    }
}

#[test]
fn spill_files_go_where_a_disk_is() {
    let folder = plimsoll_disk::default_folder();
    assert!(folder.is_dir());
    let usual = Path::new("/var/tmp");
    assert!(folder == Path::new(".") || !plimsoll_disk::is_in_memory(&folder));
    assert!(folder == usual || !usual.is_dir() || plimsoll_disk::is_in_memory(usual));
}

/// As far as this machine has such folders.
#[cfg(target_os = "linux")]
#[test]
fn folders_in_memory_are_known() {
    assert!(!plimsoll_disk::is_in_memory(Path::new("/proc")));
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let mounted: Vec<(&str, &str)> = mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            Some((words.next()?, words.next()?))
        })
        .collect();
    // What is mounted last on a folder is what is seen there.
    let last = |folder: &str| mounted.iter().rfind(|(other, _)| *other == folder).map(|(_, kind)| *kind);
    match last("/dev/shm") {
        Some("tmpfs") => assert!(plimsoll_disk::is_in_memory(Path::new("/dev/shm"))),
        _ => println!("skipped: /dev/shm is no tmpfs here"),
    }
}
