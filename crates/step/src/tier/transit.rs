//! How a parcel moves: the stretches of a buffer that go between memory and the parcel's homes, and those that stay.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::Transferred;
use plimsoll_disk::{ALIGNMENT, DiskError, Finished, Home, LowerTiers, Transfer, pages};
use plimsoll_memory::Region;

use super::parcel::Parcel;

/// In which direction a parcel moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Into the buffer, ahead of its use.
    Prefetch,
    /// To its own home. What files hold stays as it is.
    WriteBack,
}

/// A move of a parcel, to be made by whoever has its buffer.
#[derive(Debug)]
pub(crate) struct Transit {
    direction: Direction,
    /// In the order of the buffer, from its first whole page on.
    stretches: Vec<Stretch>,
}

/// Some bytes of a buffer, in whole pages but for the end of a home, and the part of a home that they move from or to; none
/// for bytes that stay.
#[derive(Debug)]
struct Stretch {
    bytes: u64,
    moves: Option<(Arc<Home>, Range<u64>)>,
}

impl Transit {
    /// What it takes to move a parcel.
    pub fn of<T>(parcel: &Parcel<T>, direction: Direction) -> Transit {
        let mut stretches = Vec::new();
        let mut stretch = |bytes, moves| {
            if bytes > 0 {
                stretches.push(Stretch { bytes, moves });
            }
        };
        if let Some(home) = parcel.home() {
            let all = home.bytes().next_multiple_of(ALIGNMENT);
            let mut at = 0;
            for extent in extents(parcel, home, direction) {
                let pages = pages(&extent);
                // Neighbours may share a page.
                let pages = pages.start.max(at)..pages.end.min(all);
                if pages.is_empty() {
                    continue;
                }
                stretch(pages.start - at, None);
                at = pages.end;
                let part = match direction {
                    Direction::WriteBack => pages.clone(),
                    Direction::Prefetch => pages.start..pages.end.min(home.bytes()),
                };
                stretch(pages.end - pages.start, Some((Arc::clone(home), part)));
            }
            stretch(all - at, None);
        }
        if direction == Direction::Prefetch {
            for (home, page_bytes) in parcel.files() {
                stretch(page_bytes, Some((Arc::clone(home), 0..home.bytes())));
            }
        }
        Transit { direction, stretches }
    }

    /// Whether any of it is on a disk.
    pub fn is_on_disk(&self) -> bool {
        self.stretches.iter().filter_map(|stretch| stretch.moves.as_ref()).any(|(home, _)| home.is_on_disk())
    }

    /// Counts what a move would move, in a dry run.
    pub fn count<T>(tiers: &LowerTiers, parcel: &Parcel<T>, direction: Direction) -> Transferred {
        let mut all = Transferred::default();
        let mut add = |home: &Home, bytes| {
            let more = count(tiers, home, bytes, direction);
            all.read += more.read;
            all.written += more.written;
            all.copied += more.copied;
        };
        if let Some(home) = parcel.home() {
            let bytes = extents(parcel, home, direction).iter().map(|extent| extent.end - extent.start).sum();
            add(home, bytes);
        }
        if direction == Direction::Prefetch {
            parcel.files().for_each(|(home, page_bytes)| add(home, page_bytes));
        }
        all
    }

    /// Makes the move, now. `memory` has room for the parcel from its first whole page on; all of it is given back.
    pub fn run(self, tiers: &LowerTiers, memory: Region) -> (Region, Result<(), DiskError>) {
        let skip = memory.skip_to(ALIGNMENT as usize);
        let (before, mut rest) = memory.split_at(skip);
        let mut under_way: Vec<Result<Transfer, Region>> = Vec::new();
        for Stretch { bytes, moves } in self.stretches {
            let (region, after) = rest.split_at(usize::try_from(bytes).unwrap_or(usize::MAX));
            rest = after;
            under_way.push(match (moves, self.direction) {
                (None, _) => Err(region),
                (Some((home, part)), Direction::WriteBack) => Ok(tiers.send_part(&home, part, region)),
                (Some((home, part)), Direction::Prefetch) => Ok(tiers.bring_part(&home, part, region)),
            });
        }
        let mut outcome = Ok(());
        let mut arrive = |stretch| match stretch {
            Err(region) => region,
            Ok(transfer) => {
                let Finished { region, outcome: own } = Transfer::wait_on_stream(transfer);
                if let (Ok(()), Err(error)) = (&outcome, own) {
                    outcome = Err(error);
                }
                region
            }
        };
        let regions: Vec<Region> = under_way.into_iter().map(&mut arrive).chain([rest]).collect();
        let join = |whole: Region, part| whole.join(part).unwrap_or_else(|(whole, _)| whole);
        (regions.into_iter().fold(before, join), outcome)
    }
}

/// Counts bytes that a dry run would move between the device and a home.
pub(crate) fn count(tiers: &LowerTiers, home: &Home, bytes: u64, direction: Direction) -> Transferred {
    tiers.count(home, bytes, direction == Direction::WriteBack);
    let none = Transferred::default();
    match direction {
        _ if !home.is_on_disk() => Transferred { copied: bytes, ..none },
        Direction::Prefetch => Transferred { read: bytes, ..none },
        Direction::WriteBack => Transferred { written: bytes, ..none },
    }
}

/// The bytes of a parcel's own home that move.
fn extents<T>(parcel: &Parcel<T>, home: &Home, direction: Direction) -> Vec<Range<u64>> {
    match (&parcel.extents, direction) {
        (Some(extents), Direction::Prefetch) => extents.read.clone(),
        (Some(extents), Direction::WriteBack) => extents.changed.clone(),
        (None, _) => std::iter::once(0..home.bytes()).collect(),
    }
}
