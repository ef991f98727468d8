//! A buffer on its way: the stretches of it that move between memory and a parcel's homes, and those that stay.

use std::ops::Range;

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

/// A buffer's memory, in stretches, in order.
#[derive(Debug)]
pub(crate) struct Transit {
    stretches: Vec<Stretch>,
    rest: Option<Region>,
}

#[derive(Debug)]
enum Stretch {
    Still(Region),
    Moving(Transfer),
}

impl Transit {
    /// Begins to move a parcel. `memory` has room for it from its first whole page on.
    pub fn begin<T>(tiers: &LowerTiers, parcel: &Parcel<T>, direction: Direction, memory: Region) -> Transit {
        let skip = memory.skip_to(ALIGNMENT as usize) as u64;
        let mut transit = Transit { stretches: Vec::new(), rest: Some(memory) };
        transit.still(skip);
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
                transit.still(pages.start - at);
                at = pages.end;
                transit.moving(pages.end - pages.start, |region| match direction {
                    Direction::WriteBack => tiers.send_part(home, pages, region),
                    Direction::Prefetch => {
                        tiers.bring_part(home, pages.start..pages.end.min(home.bytes()), region)
                    }
                });
            }
            transit.still(all - at);
        }
        if direction == Direction::Prefetch {
            for (home, page_bytes) in parcel.files() {
                transit.moving(page_bytes, |region| tiers.bring(home, region));
            }
        }
        transit
    }

    /// Counts what a move would move, in a dry run.
    pub fn count<T>(tiers: &LowerTiers, parcel: &Parcel<T>, direction: Direction) {
        if let Some(home) = parcel.home() {
            let bytes = extents(parcel, home, direction).iter().map(|extent| extent.end - extent.start).sum();
            tiers.count(home, bytes, direction == Direction::WriteBack);
        }
        if direction == Direction::Prefetch {
            parcel.files().for_each(|(home, page_bytes)| tiers.count(home, page_bytes, false));
        }
    }

    /// Whether [`finish`](Self::finish) would return at once.
    pub fn is_done(&self) -> bool {
        self.stretches.iter().all(|stretch| match stretch {
            Stretch::Still(_) => true,
            Stretch::Moving(transfer) => transfer.is_done(),
        })
    }

    /// Waits until everything has arrived and gives the memory back; `None` only if it was of no bytes.
    pub fn finish(self) -> (Option<Region>, Result<(), DiskError>) {
        let mut outcome = Ok(());
        let mut region = |stretch| match stretch {
            Stretch::Still(region) => region,
            Stretch::Moving(transfer) => {
                let Finished { region, outcome: own } = transfer.wait();
                if let (Ok(()), Err(error)) = (&outcome, own) {
                    outcome = Err(error);
                }
                region
            }
        };
        let regions: Vec<Region> = self.stretches.into_iter().map(&mut region).collect();
        let join = |whole: Region, part| whole.join(part).unwrap_or_else(|(whole, _)| whole);
        (regions.into_iter().chain(self.rest).reduce(join), outcome)
    }

    /// The next bytes of the buffer.
    fn split(&mut self, bytes: u64) -> Option<Region> {
        let (part, rest) = self.rest.take()?.split_at(usize::try_from(bytes).unwrap_or(usize::MAX));
        self.rest = Some(rest);
        Some(part)
    }

    /// Bytes that stay.
    fn still(&mut self, bytes: u64) {
        let part = self.split(bytes).map(Stretch::Still);
        self.stretches.extend(part);
    }

    /// Bytes that move.
    fn moving(&mut self, bytes: u64, begin: impl FnOnce(Region) -> Transfer) {
        let part = self.split(bytes).map(|region| Stretch::Moving(begin(region)));
        self.stretches.extend(part);
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
