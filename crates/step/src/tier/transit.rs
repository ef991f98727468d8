//! Buffers on their way between the device and the homes of parcels: where every move is begun and waited for.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{Device, Due, Lent, Tensor, Transferred};
use plimsoll_disk::{
    ALIGNMENT, BufferMemory, Direction, DiskError, Home, LowerTiers, Moving, Stretch, pages,
};

use super::parcel::Parcel;
use crate::StepError;

/// A device and the tiers below it, between which buffers move.
pub(crate) struct Transits<'a> {
    pub device: &'a dyn Device,
    pub tiers: Arc<LowerTiers>,
}

/// A buffer on its way.
pub(crate) enum Transit {
    /// In the hands of the tiers.
    Under(Moving),
    /// On a device without memory it stays where it is; when it would have arrived, in a dry run that knows.
    Dry(Tensor, Due),
}

/// The buffer of a move.
pub(crate) enum Source<M> {
    Buffer(Tensor),
    /// That of a move which is still under way: the next one follows behind it.
    Behind(M),
}

impl<'a> Transits<'a> {
    /// `to_disk`: some of what moves has its home on a disk. Between that and a device with memory of its own are two hops, and
    /// the tiers take what these need of the host.
    pub fn new(device: &'a dyn Device, tiers: &Arc<LowerTiers>, to_disk: bool) -> Result<Self, StepError> {
        if to_disk && !device.traits().unified {
            tiers.stage()?;
        }
        Ok(Transits { device, tiers: Arc::clone(tiers) })
    }

    /// The bytes that a move of a parcel moves.
    pub fn moved<T>(&self, parcel: &Parcel<T>, direction: Direction) -> Transferred {
        transferred(parcel, direction, self.device.traits().unified)
    }

    /// Begins to move a parcel between its homes and a buffer; in a dry run counts what would move.
    pub fn begin<T>(
        &self,
        parcel: &Parcel<T>,
        direction: Direction,
        source: Source<Transit>,
    ) -> Result<Transit, StepError> {
        let count = |tensor, behind| {
            Ok(Transit::Dry(tensor, self.device.transfer(self.moved(parcel, direction), behind)))
        };
        let memory = match source {
            Source::Buffer(tensor) => match self.device.lend(tensor)? {
                Lent::Memory(memory) => BufferMemory::Here(memory),
                Lent::Nothing(tensor) => return count(tensor, Due::default()),
            },
            Source::Behind(Transit::Under(before)) => BufferMemory::Behind(before),
            Source::Behind(Transit::Dry(tensor, due)) => return count(tensor, due),
        };
        let moving = self.tiers.begin(direction, stretches(parcel, direction), memory);
        moving.map(Transit::Under).ok_or(StepError::Invariant { what: "a device with memory has dry tiers" })
    }

    /// Waits until a move is done, and gives the buffer back with what came of the move.
    ///
    /// # Errors
    /// The buffer is lost.
    pub fn wait(&self, transit: Transit) -> Result<(Tensor, Result<(), DiskError>), StepError> {
        match transit {
            Transit::Dry(tensor, due) => {
                self.device.wait(due);
                Ok((tensor, Ok(())))
            }
            Transit::Under(moving) => {
                let (memory, outcome) = moving.wait().ok_or(DiskError::Stopped)?;
                Ok((self.device.reclaim(memory)?, outcome))
            }
        }
    }
}

/// The stretches of a buffer, in order from its first whole page: those that go between memory and the parcel's homes, and
/// those that stay.
pub(super) fn stretches<T>(parcel: &Parcel<T>, direction: Direction) -> Vec<Stretch> {
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

/// The bytes that a move moves, on each hop. Where the device's memory is the host's, a disk is one hop away.
pub(super) fn transferred<T>(parcel: &Parcel<T>, direction: Direction, unified: bool) -> Transferred {
    let mut all = Transferred::default();
    let mut add = |home: &Home, bytes| {
        let (on_disk, copied) = match direction {
            Direction::Prefetch => (&mut all.read, &mut all.copied_in),
            Direction::WriteBack => (&mut all.written, &mut all.copied_out),
        };
        if home.is_on_disk() {
            *on_disk += bytes;
        }
        if !(home.is_on_disk() && unified) {
            *copied += bytes;
        }
    };
    if let Some(home) = parcel.home() {
        let bytes = extents(parcel, home, direction).iter().map(|extent| extent.end - extent.start).sum();
        add(home, bytes);
    }
    if direction == Direction::Prefetch {
        parcel.files().for_each(|(home, page_bytes)| add(home, page_bytes));
    }
    if parcel.is_of_expert {
        all.experts = all.read.max(all.copied_in);
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
