//! Homes on the host and on a disk, and what tiers take.

use plimsoll_memory::Loan;

use super::*;

fn settings(folder: &std::path::Path) -> SpillSettings {
    SpillSettings { folder: folder.to_owned(), budget: None, direct: true }
}

/// Moves a part of a home, and waits for it.
fn moved(
    tiers: &LowerTiers,
    direction: Direction,
    (home, part): (&Arc<Home>, Range<u64>),
    memory: Region,
) -> Result<Region, DiskError> {
    let bytes = (part.end - part.start).next_multiple_of(ALIGNMENT);
    let stretch = Stretch { bytes, moves: Some((Arc::clone(home), part)) };
    let memory = BufferMemory::Here(Loan::Region(memory));
    match tiers.begin(direction, vec![stretch], memory).unwrap().wait().unwrap() {
        (Loan::Region(memory), outcome) => outcome.map(|()| memory),
        (far, _) => panic!("{far:?}"),
    }
}

#[test]
fn what_was_sent_home_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let tiers = LowerTiers::open(Region::new(1 << 20).unwrap(), 1 << 20, &settings(folder.path())).unwrap();
    for tier in [Tier::Host, Tier::Disk] {
        let first = tiers.take(tier, 5000, Tag::Weights, "a").unwrap();
        let home = tiers.take(tier, 10_000, Tag::Weights, "b").unwrap();
        let mut region = Region::new(16_384).unwrap();
        (0..).zip(region.bytes_mut()).for_each(|(i, byte): (usize, _)| *byte = i as u8);
        let sent = region.bytes().to_vec();
        let home = Arc::new(home);
        moved(&tiers, Direction::WriteBack, (&home, 0..10_000), region).unwrap();
        tiers.write_now(&first, 0, &[7; 5000]).unwrap();
        let into = Region::new(16_384).unwrap();
        let other = moved(&tiers, Direction::Prefetch, (&home, 0..10_000), into).unwrap();
        assert_eq!(other.bytes()[..10_000], sent[..10_000]);
        let (mut row, mut second) = (vec![0; 100], vec![0; 3]);
        let mut parts = [(&*home, 4990, row.as_mut_slice()), (&first, 4997, second.as_mut_slice())];
        tiers.read_all_now(&mut parts).unwrap();
        assert_eq!(row, &sent[4990..5090]);
        assert_eq!(second, [7; 3]);
        assert!(tiers.take(tier, 2 << 20, Tag::Weights, "c").is_err());
    }
    assert_eq!([tiers.host().high_water(), tiers.disk().high_water()], [20_480; 2]);
    let dry = LowerTiers::dry();
    let home = dry.take(Tier::Disk, 5000, Tag::Weights, "a").unwrap();
    assert_eq!((dry.disk().high_water(), home.bytes()), (8192, 5000));
}

#[test]
fn a_part_that_a_buffer_has_no_room_for_is_refused_with_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let tiers = LowerTiers::open(Region::new(1 << 20).unwrap(), 0, &settings(folder.path())).unwrap();
    let home = Arc::new(tiers.take(Tier::Host, 40_000, Tag::Weights, "a").unwrap());
    for direction in [Direction::Prefetch, Direction::WriteBack] {
        let error = moved(&tiers, direction, (&home, 4096..40_000), Region::new(4096).unwrap()).unwrap_err();
        assert!(matches!(error, DiskError::Buffer { has: 4096..=8192, needed: 35_904 }), "{error}");
    }
}

/// The threads of the engine and of two streams, and sixteen parts with a page at each end.
#[test]
fn what_tiers_take_beside_what_is_handed_to_them() {
    let threads = EngineSettings::default().memory_bytes() + 2 * crate::stream::STACK_BYTES as u64;
    assert_eq!(LowerTiers::memory_bytes(0), threads + 16 * 2 * 4096);
    assert_eq!(LowerTiers::memory_bytes(100), threads + 16 * (2 * 4096 + 100));
}
