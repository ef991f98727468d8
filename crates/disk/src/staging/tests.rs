//! Moves of more pieces than there are at once, into memory whose first page begins within it.

use std::sync::Arc;

use plimsoll_memory::{CopyError, Loan, Tag, Tier};

use super::*;
use crate::{BufferMemory, LowerTiers, SpillSettings};

const BYTES: u64 = 3 * PIECE + 5000;

/// Where the buffer begins in the device's arena, and where its first page does in the buffer.
const START: u64 = 100;
const FIRST: usize = 3996;

/// Memory of a device that fails to copy bytes from `broken` on.
#[derive(Debug)]
struct Far {
    bytes: Vec<u8>,
    broken: u64,
}

impl Far {
    fn copies(&self, offset: u64, bytes: usize) -> Result<Range<usize>, CopyError> {
        let fail = CopyError { offset, bytes: bytes as u64, reason: "broken".into() };
        if offset + bytes as u64 > self.broken {
            Err(fail)
        } else {
            Ok(offset as usize..offset as usize + bytes)
        }
    }
}

impl FarMemory for Far {
    fn start(&self) -> u64 {
        START
    }

    fn copy_in(&mut self, offset: u64, from: &[u8]) -> Result<(), CopyError> {
        let place = self.copies(offset, from.len())?;
        self.bytes[place].copy_from_slice(from);
        Ok(())
    }

    fn copy_out(&mut self, offset: u64, to: &mut [u8]) -> Result<(), CopyError> {
        to.copy_from_slice(&self.bytes[self.copies(offset, to.len())?]);
        Ok(())
    }
}

fn content(seed: u64) -> Vec<u8> {
    let bytes = BYTES.next_multiple_of(ALIGNMENT) + 2 * ALIGNMENT;
    (0..bytes).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn tiers() -> (tempfile::TempDir, LowerTiers) {
    let folder = tempfile::tempdir().unwrap();
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let host = Region::new(Staging::BYTES + 2 * PIECE * 3).unwrap();
    (folder, LowerTiers::open(host, 2 * PIECE * 4, &spill).unwrap())
}

/// Bytes, and the part of a home that they move from or to.
type Place<'h> = (u64, Option<(&'h Arc<Home>, Range<u64>)>);

/// Moves stretches, of which those without a place stay where they are.
fn moved(
    tiers: &LowerTiers,
    direction: Direction,
    stretches: &[Place<'_>],
    (bytes, broken): (Vec<u8>, u64),
) -> (Vec<u8>, Result<(), DiskError>) {
    let stretch = |(bytes, moves): &Place<'_>| {
        let moves = moves.clone().map(|(home, part)| (Arc::clone(home), part));
        Stretch { bytes: *bytes, moves }
    };
    let memory = BufferMemory::Here(Loan::Far(Box::new(Far { bytes, broken })));
    let moving = tiers.begin(direction, stretches.iter().map(stretch).collect(), memory).unwrap();
    let (Loan::Far(far), outcome) = moving.wait().unwrap() else { panic!("another memory came back") };
    let far = (far as Box<dyn std::any::Any>).downcast::<Far>().unwrap();
    (far.bytes, outcome)
}

#[test]
fn bytes_come_and_go_in_pieces_and_in_place() {
    let (_folder, tiers) = tiers();
    tiers.stage().unwrap();
    for tier in [Tier::Host, Tier::Disk] {
        let home = Arc::new(tiers.take(tier, BYTES, Tag::Weights, "home").unwrap());
        let sent = content(1);
        let all = BYTES.next_multiple_of(ALIGNMENT);
        let whole = |bytes| [(all, Some((&home, 0..bytes)))];
        let (kept, outcome) = moved(&tiers, Direction::WriteBack, &whole(all), (sent.clone(), u64::MAX));
        outcome.unwrap();
        assert!(kept == sent);
        let mut lies = vec![0; BYTES as usize];
        tiers.read_now(&home, 0, &mut lies).unwrap();
        assert!(lies == sent[FIRST..][..BYTES as usize], "{tier}");
        // All but two pages of it, which stay.
        let (middle, end) = (PIECE + 8192, BYTES);
        let stretches =
            [(PIECE, Some((&home, 0..PIECE))), (8192, None), (all - middle, Some((&home, middle..end)))];
        let before = content(2);
        let (came, outcome) = moved(&tiers, Direction::Prefetch, &stretches, (before.clone(), u64::MAX));
        outcome.unwrap();
        let mut expected = before;
        for part in [0..PIECE as usize, middle as usize..end as usize] {
            expected[FIRST..][part.clone()].copy_from_slice(&sent[FIRST..][part]);
        }
        assert!(came == expected, "{tier}");
    }
}

/// It lies in the buffer as in its pages.
#[test]
fn bytes_of_a_file_that_begin_within_a_page_come_with_their_pages_places() {
    let (folder, tiers) = tiers();
    tiers.stage().unwrap();
    let (path, bytes) = (folder.path().join("model"), content(3));
    std::fs::write(&path, &bytes).unwrap();
    let (start, end) = (5000, 5000 + 2 * PIECE);
    let home = Arc::new(tiers.adopt(&path, start..end).unwrap());
    let whole = pages(&(start..end));
    let stretches = [(whole.end - whole.start, Some((&home, 0..end - start)))];
    let (came, outcome) = moved(&tiers, Direction::Prefetch, &stretches, (content(4), u64::MAX));
    outcome.unwrap();
    let mut expected = content(4);
    expected[FIRST + 904..][..2 * PIECE as usize].copy_from_slice(&bytes[5000..end as usize]);
    assert!(came == expected);
    let (_, outcome) = moved(&tiers, Direction::WriteBack, &stretches, (content(5), u64::MAX));
    assert!(matches!(outcome, Err(DiskError::Stopped)));
}

#[test]
fn a_copy_that_fails_is_an_error_and_costs_no_piece() {
    let (_folder, tiers) = tiers();
    let all = BYTES.next_multiple_of(ALIGNMENT);
    let [host, disk] =
        [Tier::Host, Tier::Disk].map(|tier| Arc::new(tiers.take(tier, BYTES, Tag::Weights, "home").unwrap()));
    for direction in [Direction::WriteBack, Direction::Prefetch] {
        // Without staging a disk cannot be reached; the host can.
        let outcome =
            |home, broken| moved(&tiers, direction, &[(all, Some((home, 0..BYTES)))], (content(6), broken)).1;
        if direction == Direction::WriteBack {
            assert!(matches!(outcome(&disk, u64::MAX), Err(DiskError::Buffer { has: 0, .. })));
            outcome(&host, u64::MAX).unwrap();
            tiers.stage().unwrap();
            tiers.stage().unwrap();
        }
        for broken in [10, PIECE, 2 * PIECE, 3 * PIECE] {
            for home in [&host, &disk] {
                assert!(matches!(outcome(home, broken), Err(DiskError::Copy(_))), "{broken}");
            }
        }
        outcome(&disk, u64::MAX).unwrap();
    }
    assert_eq!(tiers.host().ledger().live().get(Tag::Staging), Staging::BYTES);
}
