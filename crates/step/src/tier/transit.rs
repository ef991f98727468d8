//! How a parcel moves: the stretches of a buffer that go between memory and the parcel's homes, and those that stay.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::Transferred;
use plimsoll_disk::{ALIGNMENT, Direction, Home, LowerTiers, Stretch, pages};

use super::parcel::Parcel;

/// What it takes to move a parcel, in the order of the buffer, from its first whole page on.
pub(crate) fn stretches<T>(parcel: &Parcel<T>, direction: Direction) -> Vec<Stretch> {
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
    stretches
}

/// Counts what a move would move, in a dry run.
pub(crate) fn count<T>(tiers: &LowerTiers, parcel: &Parcel<T>, direction: Direction) -> Transferred {
    let mut all = Transferred::default();
    let mut add = |home: &Home, bytes| {
        tiers.count(home, bytes, direction == Direction::WriteBack);
        match (direction, home.is_on_disk()) {
            (Direction::Prefetch, true) => all.read += bytes,
            (Direction::Prefetch, false) => all.copied_in += bytes,
            (Direction::WriteBack, true) => all.written += bytes,
            (Direction::WriteBack, false) => all.copied_out += bytes,
        }
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

/// The bytes of a parcel's own home that move.
fn extents<T>(parcel: &Parcel<T>, home: &Home, direction: Direction) -> Vec<Range<u64>> {
    match (&parcel.extents, direction) {
        (Some(extents), Direction::Prefetch) => extents.read.clone(),
        (Some(extents), Direction::WriteBack) => extents.changed.clone(),
        (None, _) => std::iter::once(0..home.bytes()).collect(),
    }
}
