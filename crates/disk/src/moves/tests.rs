//! Moves between buffers in host memory and homes, on both streams.

use std::sync::mpsc::channel;

use plimsoll_memory::{Tag, Tier};

use super::*;
use crate::{EngineSettings, LowerTiers, SpillSettings};

/// Several pieces of the engine's, and a rest.
const BYTES: u64 = (3 << 20) + 5000;

fn tiers() -> (tempfile::TempDir, LowerTiers) {
    let folder = tempfile::tempdir().unwrap();
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let tiers = LowerTiers::open(Region::new(16 << 20).unwrap(), 16 << 20, &spill).unwrap();
    (folder, tiers)
}

/// Homes that hold these bytes everywhere.
fn homes<const N: usize>(tiers: &LowerTiers, tier: Tier, values: [u8; N]) -> [Arc<Home>; N] {
    values.map(|value| {
        let home = tiers.take(tier, BYTES, Tag::Weights, "home").unwrap();
        tiers.write_now(&home, 0, &vec![value; BYTES as usize]).unwrap();
        Arc::new(home)
    })
}

/// All of a home.
fn all(home: &Arc<Home>) -> Vec<Stretch> {
    let bytes = BYTES.next_multiple_of(ALIGNMENT);
    vec![Stretch { bytes, moves: Some((Arc::clone(home), 0..BYTES)) }]
}

/// A buffer that holds this byte everywhere.
fn buffer(value: u8) -> Loan {
    let mut region = Region::new(BYTES.next_multiple_of(ALIGNMENT)).unwrap();
    region.bytes_mut().fill(value);
    Loan::Region(region)
}

fn holds(bytes: &[u8], value: u8) -> bool {
    bytes[..BYTES as usize].iter().all(|&byte| byte == value)
}

fn arrived(memory: &Loan, value: u8) -> bool {
    matches!(memory, Loan::Region(region) if holds(region.bytes(), value))
}

fn lies_in(tiers: &LowerTiers, home: &Home, value: u8) -> bool {
    let mut out = vec![0; BYTES as usize];
    tiers.read_now(home, 0, &mut out).unwrap();
    holds(&out, value)
}

#[test]
fn what_is_being_written_is_read_when_it_is_written() {
    let (_folder, tiers) = tiers();
    for tier in [Tier::Host, Tier::Disk] {
        let [a, b] = homes(&tiers, tier, [1, 2]);
        for value in 10..20 {
            let begin = |direction, home, memory| tiers.begin(direction, all(home), memory).unwrap();
            let out = begin(Direction::WriteBack, &a, BufferMemory::Here(buffer(value)));
            let refilled = begin(Direction::Prefetch, &b, BufferMemory::Behind(out));
            let again = begin(Direction::Prefetch, &a, BufferMemory::Here(buffer(0)));
            let (memory, outcome) = again.wait().unwrap();
            assert!(outcome.is_ok() && arrived(&memory, value), "{tier} {value}");
            let (memory, outcome) = refilled.wait().unwrap();
            assert!(outcome.is_ok() && arrived(&memory, 2), "{tier} {value}");
            assert!(lies_in(&tiers, &a, value) && lies_in(&tiers, &b, 2));
        }
    }
    tiers.settle().unwrap();
}

#[test]
fn copies_in_wait_for_copies_out_of_their_own_buffers_alone() {
    let (_folder, tiers) = tiers();
    let engine = Arc::new(DiskEngine::start(EngineSettings::default()).unwrap());
    let streams = Streams::start(&engine).unwrap();
    let [a, b] = homes(&tiers, Tier::Disk, [1, 2]);
    let (go, gate) = channel::<()>();
    let held = streams.copies_out.begin(false, move || gate.recv().is_ok());
    let out = streams.begin(None, Direction::WriteBack, all(&a), BufferMemory::Here(buffer(7)));
    let other = streams.begin(None, Direction::Prefetch, all(&b), BufferMemory::Here(buffer(0)));
    // Nothing has gone out yet.
    assert!(arrived(&other.wait().unwrap().0, 2));
    let refilled = streams.begin(None, Direction::Prefetch, all(&b), BufferMemory::Behind(out));
    assert!(lies_in(&tiers, &a, 1));
    go.send(()).unwrap();
    assert!(held.wait().unwrap());
    assert!(arrived(&refilled.wait().unwrap().0, 2));
    assert!(lies_in(&tiers, &a, 7));
}

#[test]
fn a_move_out_that_failed_is_told_once_and_costs_no_buffer() {
    let (folder, tiers) = tiers();
    let path = folder.path().join("file");
    std::fs::write(&path, vec![5; BYTES as usize]).unwrap();
    let read_only = Arc::new(tiers.adopt(&path, 0..BYTES).unwrap());
    let begin = |direction, memory| tiers.begin(direction, all(&read_only), memory).unwrap();
    let out = begin(Direction::WriteBack, BufferMemory::Here(buffer(1)));
    let refilled = begin(Direction::Prefetch, BufferMemory::Behind(out));
    assert!(matches!(tiers.settle(), Err(DiskError::Stopped)));
    assert!(tiers.settle().is_ok());
    let (memory, outcome) = refilled.wait().unwrap();
    assert!(outcome.is_ok() && arrived(&memory, 5));
    let (memory, outcome) = begin(Direction::WriteBack, BufferMemory::Here(memory)).wait().unwrap();
    assert!(outcome.is_err() && arrived(&memory, 5));
}

#[test]
fn what_nobody_waits_for_is_done_all_the_same() {
    let (_folder, tiers) = tiers();
    for tier in [Tier::Host, Tier::Disk] {
        let [home] = homes(&tiers, tier, [1]);
        drop(tiers.begin(Direction::WriteBack, all(&home), BufferMemory::Here(buffer(9))));
        assert!(lies_in(&tiers, &home, 9));
    }
    assert!(
        LowerTiers::dry().begin(Direction::Prefetch, Vec::new(), BufferMemory::Here(buffer(0))).is_none()
    );
    LowerTiers::dry().settle().unwrap();
}
