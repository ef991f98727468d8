//! Memory that the system is asked for, and gets back.
#![cfg(target_os = "linux")]

use std::fs;
use std::ops::Range;

use plimsoll_memory::{ByteSize, FileMap, Region, Reservation};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error, F64Deserializer, I64Deserializer, StrDeserializer, U64Deserializer};

/// Address ranges of this process: advice cuts a mapping in two that belong together.
fn maps() -> Vec<Range<usize>> {
    let address = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let line = |line: &str| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        address(start)..address(end)
    };
    let mut all: Vec<Range<usize>> = Vec::new();
    for range in fs::read_to_string("/proc/self/maps").unwrap().lines().map(line) {
        match all.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => all.push(range),
        }
    }
    all
}

#[test]
fn a_reservation_goes_back_whole() {
    // No other mapping is as large.
    const BYTES: usize = (3 << 40) + 5;
    let large = || maps().iter().filter(|range| range.len() >= BYTES).count();
    let reservation = Reservation::new(BYTES as u64).unwrap();
    assert_eq!((large(), reservation.len(), reservation.is_empty()), (1, BYTES, false));
    assert_eq!(reservation.as_ptr().addr() % (2 << 20), 0);
    let start = reservation.as_ptr().addr();
    // All of it lies in the mapping.
    assert!(maps().iter().any(|range| range.start <= start && start + BYTES <= range.end));
    drop(reservation);
    assert_eq!(large(), 0);
    let nothing = Reservation::new(0).unwrap();
    assert!(nothing.is_empty());
}

#[test]
fn an_impossible_reservation_says_how_much_was_asked_for() {
    for bytes in [u64::MAX, u64::MAX - (1 << 20), 1 << 60] {
        let error = Reservation::new(bytes).unwrap_err();
        assert_eq!(error.bytes, bytes);
        assert!(error.to_string().contains(&format!("refused {bytes} bytes")), "{error}");
    }
}

#[test]
fn regions_begin_where_they_say() {
    let region = Region::new(10_000).unwrap();
    assert_eq!((region.len(), region.is_empty(), region.skip_to(4096)), (10_000, false, 0));
    let (first, rest) = region.split_at(100);
    assert_eq!([first.len(), rest.len()], [100, 9900]);
    assert_eq!([rest.skip_to(4096), rest.skip_to(64), rest.skip_to(1), rest.skip_to(0)], [3996, 28, 0, 0]);
    // There is no such address in it.
    assert_eq!(first.skip_to(4096), 0);
    let (_, short) = first.split_at(1);
    assert_eq!(short.skip_to(4096), 99);
    let (_, none) = short.split_at(99);
    assert!(none.is_empty());
}

#[test]
fn regions_join_in_their_order_alone() {
    let (first, second) = Region::new(100).unwrap().split_at(40);
    let (second, first) = second.join(first).unwrap_err();
    let other = Region::new(100).unwrap().split_at(40).1;
    let (first, _) = first.join(other).unwrap_err();
    assert_eq!(first.join(second).unwrap().len(), 100);
}

/// Resident bytes of a file's map.
fn resident(path: &std::path::Path) -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn released_pages_are_no_longer_resident() {
    const BYTES: usize = 4 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, vec![1; BYTES]).unwrap();
    let map = FileMap::open(&path).unwrap();
    assert_eq!((map.path(), map.bytes().len()), (path.as_path(), BYTES));
    let touch = || map.bytes().iter().map(|byte| u64::from(*byte)).sum::<u64>();
    assert_eq!((touch(), resident(&path)), (BYTES as u64, BYTES as u64));
    // A quarter, and what the kernel brings along with its ends; it may drop more, as huge pages go whole.
    map.release(1 << 20..2 << 20);
    assert!(resident(&path) <= (3 << 20) - (128 << 10));
    touch();
    map.release(0..1);
    assert!(resident(&path) <= BYTES as u64 - (64 << 10));
    touch();
    map.release(BYTES - 1..usize::MAX);
    assert!(resident(&path) <= BYTES as u64 - (64 << 10));
    touch();
    map.release_all();
    assert_eq!(resident(&path), 0);
    assert_eq!(touch(), BYTES as u64);
}

#[test]
fn sizes_have_all_units() {
    let units = [
        ("b", 1),
        ("k", 1 << 10),
        ("KiB", 1 << 10),
        ("kB", 1000),
        ("m", 1 << 20),
        ("MiB", 1 << 20),
        ("MB", 1_000_000),
        ("G", 1 << 30),
        ("GiB", 1 << 30),
        ("GB", 1_000_000_000),
        ("T", 1 << 40),
        ("TiB", 1 << 40),
        ("TB", 1_000_000_000_000),
    ];
    for (unit, bytes) in units {
        assert_eq!(format!(" 3 {unit} ").parse(), Ok(ByteSize(3 * bytes)), "{unit}");
        assert_eq!(format!("0.5{unit}").parse(), Ok(ByteSize((bytes / 2).max(1))), "{unit}");
    }
    assert_eq!("18446744073709551615".parse(), Ok(ByteSize(u64::MAX)));
    for too_large in ["18446744073709551616", "16777216.0TiB", "18446744073709551615.0"] {
        assert_eq!(too_large.parse::<ByteSize>().unwrap_err().reason, "it is too large", "{too_large}");
    }
}

#[test]
fn sizes_are_printed_in_the_unit_that_fits() {
    let printed = [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 << 10, "10.0 KiB"),
        (10_239, "10.00 KiB"),
        (1_048_524, "1023.9 KiB"),
        (1_048_525, "1.00 MiB"),
        (3 << 30, "3.00 GiB"),
        (5 << 40, "5.00 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ];
    for (bytes, text) in printed {
        assert_eq!(ByteSize(bytes).to_string(), text);
    }
    assert_eq!(format!("{:>10}", ByteSize(1024)), "  1.00 KiB");
}

#[test]
fn sizes_are_read_from_numbers_and_texts() {
    let integer: U64Deserializer<Error> = 5u64.into_deserializer();
    let negative: I64Deserializer<Error> = (-5i64).into_deserializer();
    let positive: I64Deserializer<Error> = 7i64.into_deserializer();
    let float: F64Deserializer<Error> = 2048.0.into_deserializer();
    let text: StrDeserializer<'_, Error> = "2KiB".into_deserializer();
    assert_eq!(ByteSize::deserialize(integer), Ok(ByteSize(5)));
    assert_eq!(ByteSize::deserialize(positive), Ok(ByteSize(7)));
    assert_eq!(ByteSize::deserialize(float), Ok(ByteSize(2048)));
    assert_eq!(ByteSize::deserialize(text), Ok(ByteSize(2048)));
    assert!(ByteSize::deserialize(negative).unwrap_err().to_string().contains("negative"));
    let nothing = serde::de::value::UnitDeserializer::<Error>::new();
    let error = ByteSize::deserialize(nothing).unwrap_err().to_string();
    assert!(error.contains("a size such as 24GiB"), "{error}");
}
