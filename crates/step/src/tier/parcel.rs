//! A parcel: tensors that travel together, where they lie in a buffer of the device, and where their bytes live between
//! uses.
//!
//! In the buffer the parcel begins with the first whole page. First come the bytes of its own home, each tensor from a page
//! on; behind them whole pages of files, for what files hold as it is computed with.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::{DType, Device, Tensor};
use plimsoll_disk::{ALIGNMENT, DiskError, Home, LowerTiers, pages};
use plimsoll_memory::{Tag, Tier};

use crate::StepError;

/// Tensors, each under a key, and their homes.
#[derive(Debug)]
pub(crate) struct Parcel<T> {
    tensors: Vec<Placed<T>>,
    own_bytes: u64,
    lodging: Lodging,
    files: Vec<FilePages>,
    /// Of its own home, where not all bytes matter.
    pub extents: Option<Extents>,
    /// Whether it is of an expert that comes by itself.
    pub is_of_expert: bool,
}

/// A tensor in a parcel.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Placed<T> {
    pub key: T,
    pub dtype: DType,
    pub shape: Vec<u64>,
    /// In bytes from the buffer's first whole page.
    pub offset: u64,
}

/// The home of a parcel's own bytes.
#[derive(Debug)]
enum Lodging {
    None,
    /// Taken when the parcel is first written back: what is used up at once never needs one.
    AtFirstWriteBack {
        tier: Tier,
        tag: Tag,
        name: &'static str,
    },
    Home(Arc<Home>),
}

/// Bytes of a file. Tensors whose pages touch are read as one.
#[derive(Debug)]
struct FilePages {
    path: PathBuf,
    bytes: Range<u64>,
    home: Option<Arc<Home>>,
}

impl FilePages {
    fn page_bytes(&self) -> u64 {
        let pages = pages(&self.bytes);
        pages.end - pages.start
    }
}

/// Bytes of a parcel that are read, and those that are written back; in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents {
    pub read: Vec<Range<u64>>,
    pub changed: Vec<Range<u64>>,
}

impl<T> Parcel<T> {
    /// An empty one.
    pub fn new() -> Self {
        let (tensors, files) = (Vec::new(), Vec::new());
        let (own_bytes, lodging) = (0, Lodging::None);
        Parcel { tensors, own_bytes, lodging, files, extents: None, is_of_expert: false }
    }

    /// Adds a tensor that lives in the parcel's own home, before any that a file holds. Gives its place in that home.
    pub fn add(&mut self, key: T, dtype: DType, shape: &[u64]) -> u64 {
        let elements = shape.iter().product();
        let bytes = dtype.bytes_for(elements).unwrap_or(0).next_multiple_of(ALIGNMENT);
        let offset = self.own_bytes;
        self.tensors.push(Placed { key, dtype, shape: shape.to_vec(), offset });
        self.own_bytes += bytes;
        offset
    }

    /// Adds a tensor that a file holds in these bytes. Those of one file are added in its order.
    pub fn add_stored(&mut self, key: T, dtype: DType, shape: &[u64], path: &Path, bytes: Range<u64>) {
        let first = pages(&bytes).start;
        let touches = |last: &&mut FilePages| {
            last.path == path && last.bytes.start <= bytes.start && first <= pages(&last.bytes).end
        };
        match self.files.last_mut().filter(touches) {
            Some(last) => last.bytes.end = last.bytes.end.max(bytes.end),
            None => self.files.push(FilePages { path: path.to_owned(), bytes: bytes.clone(), home: None }),
        }
        let before: u64 = self.files.iter().rev().skip(1).map(FilePages::page_bytes).sum();
        let begin = self.files.last().map_or(0, |last| pages(&last.bytes).start);
        let offset = self.own_bytes + before + bytes.start - begin;
        self.tensors.push(Placed { key, dtype, shape: shape.to_vec(), offset });
    }

    /// Takes a home for the parcel's own bytes, if it has any, and opens its files.
    pub fn settle(
        &mut self,
        tiers: &LowerTiers,
        tier: Tier,
        tag: Tag,
        name: &'static str,
    ) -> Result<(), DiskError> {
        if self.own_bytes > 0 {
            self.lodging = Lodging::Home(Arc::new(tiers.take(tier, self.own_bytes, tag, name)?));
        }
        for file in &mut self.files {
            file.home = Some(Arc::new(tiers.adopt(&file.path, file.bytes.clone())?));
        }
        Ok(())
    }

    /// Has a home taken when the parcel is first written back.
    pub fn settle_later(&mut self, tier: Tier, tag: Tag, name: &'static str) {
        self.lodging = Lodging::AtFirstWriteBack { tier, tag, name };
    }

    /// Sees to it that the parcel has a home to be written back to.
    pub fn prepare_write_back(&mut self, tiers: &LowerTiers) -> Result<(), DiskError> {
        match self.lodging {
            Lodging::AtFirstWriteBack { tier, tag, name } => self.settle(tiers, tier, tag, name),
            Lodging::None | Lodging::Home(_) => Ok(()),
        }
    }

    /// The home of its own bytes.
    pub fn home(&self) -> Option<&Arc<Home>> {
        match &self.lodging {
            Lodging::Home(home) => Some(home),
            Lodging::None | Lodging::AtFirstWriteBack { .. } => None,
        }
    }

    /// Whether some of it lives on a disk, or will.
    pub fn uses_disk(&self) -> bool {
        let own = match &self.lodging {
            Lodging::None => false,
            Lodging::AtFirstWriteBack { tier, .. } => *tier == Tier::Disk,
            Lodging::Home(home) => home.is_on_disk(),
        };
        own || !self.files.is_empty()
    }

    /// The homes in files, with the bytes of the pages of each.
    pub fn files(&self) -> impl Iterator<Item = (&Arc<Home>, u64)> {
        self.files.iter().filter_map(|file| Some((file.home.as_ref()?, file.page_bytes())))
    }

    /// Bytes that it takes of a buffer.
    pub fn bytes(&self) -> u64 {
        self.own_bytes + self.files.iter().map(FilePages::page_bytes).sum::<u64>()
    }

    /// What is in it.
    pub fn tensors(&self) -> &[Placed<T>] {
        &self.tensors
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }
}

impl<T: Copy> Parcel<T> {
    /// The tensors in a buffer that holds the parcel; `None` where the buffer is too small for one.
    pub fn views(&self, buffer: &Tensor) -> Option<Vec<(T, Tensor)>> {
        let view = |placed: &Placed<T>| {
            Some((placed.key, aligned_view(buffer, placed.offset, placed.dtype, &placed.shape)?))
        };
        self.tensors.iter().map(view).collect()
    }
}

/// Bytes of a buffer for a parcel: memory of an arena may begin within a page.
pub(crate) fn aligned_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT).saturating_add(ALIGNMENT)
}

/// Memory for a parcel of so many bytes.
pub(crate) fn buffer(
    device: &dyn Device,
    bytes: u64,
    tag: Tag,
    name: &'static str,
) -> Result<Tensor, StepError> {
    Ok(device.alloc(DType::U8, &[aligned_bytes(bytes)], tag, name)?)
}

/// A tensor in a buffer, `offset` bytes from its first whole page on.
fn aligned_view(buffer: &Tensor, offset: u64, dtype: DType, shape: &[u64]) -> Option<Tensor> {
    let start = buffer.range().start;
    buffer.view(start.next_multiple_of(ALIGNMENT) - start + offset, dtype, shape)
}
