//! Parcels and their homes, by hand: where bytes lie, what moves, and when.

use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::sync::Arc;

use plimsoll_device::{Cpu, CpuOptions, DType, Dry, Transferred};
use plimsoll_disk::{Direction, LowerTiers, SpillSettings};
use plimsoll_memory::{Region, Tag, Tier};
use plimsoll_model::{BlockId, Parameter, Role};
use rustc_hash::FxHashMap;

use super::transit::{stretches, transferred};
use super::*;

const PAGE: u64 = 4096;

fn table(rows: u64) -> Parameter {
    Parameter { name: "table".into(), block: BlockId::Head, role: Role::LmHead, shape: vec![rows, 8] }
}

/// Runs of 1024 rows: as many as fit with a further run less one row, which the last piece may have more than the others.
#[test]
fn pieces_of_bytes_are_whole_runs_that_fit_with_their_rest() {
    let rows = |bytes| {
        let cuts = Pieces::of_bytes(bytes, 32).of(&table(100 * 1024));
        cuts[0].end
    };
    assert_eq!(rows(0), 1024);
    assert_eq!(rows(32 * (3 * 1024 - 1)), 1024);
    assert_eq!(rows(32 * 3 * 1024), 2 * 1024);
    assert_eq!(rows(32 * (8 * 1024 - 1)), 6 * 1024);
    assert_eq!(rows(32 * 8 * 1024), 7 * 1024);
    assert_eq!(rows(32 * 8 * 1024 + 31), 7 * 1024);
}

#[test]
fn a_rest_of_a_few_rows_goes_with_the_piece_before() {
    let cut = |rows| {
        let pieces = Pieces::of_bytes(32 * 3 * 1024, 32).of(&table(rows));
        pieces.iter().map(|piece| (piece.start, piece.end)).collect::<Vec<_>>()
    };
    assert_eq!(cut(2048), [(0, 2048)]);
    assert_eq!(cut(3071), [(0, 3071)]);
    assert_eq!(cut(3072), [(0, 2048), (2048, 3072)]);
    assert_eq!(cut(5119), [(0, 2048), (2048, 5119)]);
    assert_eq!(cut(10), [(0, 10)]);
}

/// More than two parts of a MiB, from a page of the home on.
#[test]
fn homes_are_read_and_written_a_part_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let spill = SpillSettings { folder: folder.path().to_owned(), budget: None, direct: true };
    let device = Cpu::new(PAGE, CpuOptions { threads: Some(1), isa: None }).unwrap();
    let bytes = (2 << 20) + 5 * PAGE;
    for tier in [Tier::Host, Tier::Disk] {
        let tiers = LowerTiers::open(Region::new(8 << 20).unwrap(), 8 << 20, &spill).unwrap();
        let home = |size| Arc::new(tiers.take(tier, size, Tag::Weights, "test").unwrap());
        let (first, second) = (home(bytes + 2 * PAGE), home(PAGE));
        let parts = vec![
            HomePart { home: Arc::clone(&first), start: PAGE, bytes },
            HomePart { home: Arc::clone(&second), start: 0, bytes: PAGE },
        ];
        tiers.write_now(&first, 0, &vec![0xff; (bytes + 2 * PAGE) as usize]).unwrap();
        let contents = Contents::Homes(parts);
        // Every four bytes are a number of their own.
        let mut next = 0u32;
        let mut fill = |out: &mut [u8]| {
            for cell in out.as_chunks_mut::<4>().0 {
                (*cell, next) = (next.to_ne_bytes(), next + 1);
            }
        };
        contents.write(&device, &tiers, &mut fill).unwrap();
        assert_eq!(u64::from(next), (bytes + PAGE) / 4);
        let mut back = Vec::new();
        contents.read(&device, &tiers, &mut |part| back.extend_from_slice(part)).unwrap();
        let expected: Vec<u8> = (0..next).flat_map(u32::to_ne_bytes).collect();
        assert!(back == expected, "{tier:?}");
        let mut all = vec![0; (bytes + 2 * PAGE) as usize];
        tiers.read_now(&first, 0, &mut all).unwrap();
        let (page, bytes) = (PAGE as usize, bytes as usize);
        assert!(all[page..page + bytes] == expected[..bytes], "{tier:?}");
        assert!(all[..page].iter().chain(&all[page + bytes..]).all(|byte| *byte == 0xff), "{tier:?}");
    }
}

/// Offsets and bytes of a parcel of tensors that files hold in these bytes.
fn stored(places: &[(&str, u64, u64)]) -> (Vec<u64>, Vec<u64>, u64) {
    let tiers = LowerTiers::dry();
    let mut parcel = Parcel::new();
    parcel.add((), DType::F32, &[3]);
    for (path, start, end) in places {
        parcel.add_stored((), DType::U8, &[end - start], Path::new(path), *start..*end);
    }
    parcel.settle(&tiers, Tier::Disk, Tag::Weights, "test").unwrap();
    let offsets = parcel.tensors().iter().map(|placed| placed.offset).collect();
    let files = parcel.files().map(|(_, bytes)| bytes).collect();
    (offsets, files, parcel.bytes())
}

/// What lies in one file and in the same or neighbouring pages is read as one; behind a page of the parcel's own.
#[test]
fn neighbours_in_a_file_are_read_together() {
    // Bytes 100 to 200 and 300 to 5000 are in pages 0 and 1.
    let found = stored(&[("a", 100, 200), ("a", 300, 5000)]);
    assert_eq!(found, (vec![0, 4096 + 100, 4096 + 300], vec![8192], 3 * 4096));
    // Page 2 touches page 1.
    let found = stored(&[("a", 100, 5000), ("a", 8192, 8200)]);
    assert_eq!(found, (vec![0, 4096 + 100, 4096 + 8192], vec![12288], 4 * 4096));
    // A page lies between.
    let found = stored(&[("a", 100, 4000), ("a", 8200, 8300)]);
    assert_eq!(found, (vec![0, 4096 + 100, 2 * 4096 + 8], vec![4096, 4096], 3 * 4096));
    // Another file.
    let found = stored(&[("a", 100, 200), ("b", 200, 300)]);
    assert_eq!(found, (vec![0, 4096 + 100, 2 * 4096 + 200], vec![4096, 4096], 3 * 4096));
    // What comes before is no neighbour.
    let found = stored(&[("a", 5000, 5100), ("a", 4100, 4200)]);
    assert_eq!(found, (vec![0, 4096 + 904, 2 * 4096 + 4], vec![4096, 4096], 3 * 4096));
}

#[test]
fn a_parcel_is_empty_until_something_is_added() {
    let mut parcel = Parcel::new();
    assert!(parcel.is_empty());
    parcel.add((), DType::F32, &[0]);
    assert!(!parcel.is_empty());
}

/// Three floats in a home, and bytes of two pages of a file.
fn parcel(tiers: &LowerTiers, tier: Tier) -> Parcel<()> {
    let mut parcel = Parcel::new();
    parcel.add((), DType::F32, &[3]);
    parcel.add_stored((), DType::U8, &[200], Path::new("file"), 4000..4200);
    parcel.settle(tiers, tier, Tag::Weights, "test").unwrap();
    parcel
}

#[test]
fn what_a_move_moves_is_counted() {
    let nothing = Transferred::default();
    let tiers = LowerTiers::dry();
    for (tier, prefetched, written) in [
        (
            Tier::Host,
            Transferred { copied_in: PAGE, read: 2 * PAGE, ..nothing },
            Transferred { copied_out: PAGE, ..nothing },
        ),
        (Tier::Disk, Transferred { read: 3 * PAGE, ..nothing }, Transferred { written: PAGE, ..nothing }),
    ] {
        let parcel = parcel(&tiers, tier);
        let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
        let transits = Transits::new(&dry, &tiers, false).unwrap();
        let mut expected = nothing;
        for (direction, bytes) in [(Direction::Prefetch, prefetched), (Direction::WriteBack, written)] {
            assert_eq!(transferred(&parcel, direction, true), bytes, "{tier:?}");
            let buffer = buffer(&dry, parcel.bytes(), Tag::Staging, "test").unwrap();
            let transit = transits.begin(&parcel, direction, Source::Buffer(buffer)).unwrap();
            expected = expected.plus(bytes);
            assert_eq!(dry.moved(), expected);
            assert!(transits.wait(transit).unwrap().1.is_ok());
        }
    }
    // Bytes that do not matter stay.
    let mut parcel = Parcel::new();
    parcel.add((), DType::F32, &[3000]);
    parcel.settle(&tiers, Tier::Disk, Tag::KvCache, "test").unwrap();
    let extents =
        Extents { read: vec![100..300, 9000..9010], changed: std::iter::once(4000..5000).collect() };
    parcel.extents = Some(extents);
    assert_eq!(transferred(&parcel, Direction::Prefetch, true).read, 210);
    assert_eq!(transferred(&parcel, Direction::WriteBack, true).written, 1000);
}

#[test]
fn a_move_knows_whether_it_needs_a_disk() {
    let tiers = LowerTiers::dry();
    let is_on_disk = |tier, direction| {
        let stretches = stretches(&parcel(&tiers, tier), direction);
        stretches.iter().filter_map(|stretch| stretch.moves.as_ref()).any(|(home, _)| home.is_on_disk())
    };
    assert!(is_on_disk(Tier::Disk, Direction::Prefetch) && is_on_disk(Tier::Disk, Direction::WriteBack));
    // Its file is on a disk, its home is not.
    assert!(is_on_disk(Tier::Host, Direction::Prefetch) && !is_on_disk(Tier::Host, Direction::WriteBack));
}

/// Parcels of a page each under the keys 0 to 3, on a disk, and so many buffers for them.
fn parcels<'a>(dry: &'a Dry, tiers: &Arc<LowerTiers>, buffers: usize) -> Parcels<'a, u32, ()> {
    let mut all = FxHashMap::default();
    for key in 0..4 {
        let mut parcel = Parcel::new();
        parcel.add((), DType::U8, &[PAGE]);
        parcel.settle(tiers, Tier::Disk, Tag::Weights, "test").unwrap();
        all.insert(key, parcel);
    }
    Parcels::of(dry, tiers, all, buffers, "tests.staging").unwrap()
}

fn announce(parcels: &mut Parcels<'_, u32, ()>, keys: &[u32]) {
    parcels.announce(keys.iter().copied().map(Use::of)).unwrap();
}

/// One buffer: what was changed goes back as soon as it is done with, and what is next comes after that.
#[test]
fn a_buffer_is_written_back_and_free_again() {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let mut parcels = parcels(&dry, &tiers, 1);
    let pages = || {
        let Transferred { read, written, .. } = dry.moved();
        (read / PAGE, written / PAGE)
    };
    announce(&mut parcels, &[1, 2, 3]);
    assert_eq!(pages(), (1, 0));
    drop(parcels.gather(1).unwrap());
    parcels.release(1, true);
    assert_eq!(pages(), (1, 0));
    parcels.advance().unwrap();
    // What comes into the buffer follows behind what goes out of it.
    assert_eq!(pages(), (2, 1));
    drop(parcels.gather(2).unwrap());
    parcels.release(2, true);
    parcels.flush().unwrap();
    assert_eq!(pages(), (2, 2));
    parcels.advance().unwrap();
    assert_eq!(pages(), (3, 2));
}

/// A dry run takes two moments for alike whose numbers are.
#[test]
fn what_lies_in_the_buffers_has_a_number() {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let mut parcels = parcels(&dry, &tiers, 2);
    let number = |parcels: &Parcels<'_, u32, ()>| {
        let mut hasher = DefaultHasher::new();
        parcels.hash_buffers(&mut hasher);
        hasher.finish()
    };
    let mut numbers = vec![number(&parcels)];
    announce(&mut parcels, &[1, 2]);
    numbers.push(number(&parcels));
    assert_eq!(numbers[1], number(&parcels));
    drop(parcels.gather(1).unwrap());
    numbers.push(number(&parcels));
    parcels.release(1, true);
    numbers.push(number(&parcels));
    parcels.advance().unwrap();
    numbers.push(number(&parcels));
    parcels.flush().unwrap();
    numbers.push(number(&parcels));
    // The other key in the same place.
    announce(&mut parcels, &[3, 2]);
    numbers.push(number(&parcels));
    let mut different = numbers.clone();
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), numbers.len(), "{numbers:?}");
}

/// Of what is brought and written back, the bytes that were named.
#[test]
fn bytes_that_matter_can_be_named() {
    let (dry, tiers) = (Dry::new(), Arc::new(LowerTiers::dry()));
    let mut parcels = parcels(&dry, &tiers, 1);
    let (read, changed) = (std::iter::once(0..100).collect(), std::iter::once(100..107).collect());
    parcels.get_mut(2).unwrap().extents = Some(Extents { read, changed });
    assert!(parcels.get_mut(9).is_none());
    announce(&mut parcels, &[2]);
    drop(parcels.gather(2).unwrap());
    parcels.release(2, true);
    parcels.flush().unwrap();
    assert_eq!(dry.moved(), Transferred { read: 100, written: 7, ..Transferred::default() });
}
