//! Tensors that travel together: one after the other in a buffer of the device, from its first whole page on.

use std::ops::Range;

use plimsoll_device::{DType, Device, Tensor};
use plimsoll_disk::{ALIGNMENT, pages};
use plimsoll_memory::Tag;

use crate::StepError;

/// Where tensors lie in a buffer, each under a key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Parcel<K> {
    bytes: u64,
    tensors: Vec<Placed<K>>,
}

/// A tensor in a parcel.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Placed<K> {
    pub key: K,
    pub dtype: DType,
    pub shape: Vec<u64>,
    /// In bytes from the buffer's first whole page.
    pub offset: u64,
}

impl<K> Parcel<K> {
    /// An empty one.
    pub fn new() -> Self {
        Parcel { bytes: 0, tensors: Vec::new() }
    }

    /// Tensors that lie as somebody else has placed them, in `bytes` bytes.
    pub fn placed(bytes: u64, tensors: Vec<Placed<K>>) -> Self {
        Parcel { bytes, tensors }
    }

    /// Adds a tensor behind the others, from a whole page on, so that it can be written by itself.
    pub fn add(&mut self, key: K, dtype: DType, shape: &[u64]) {
        let elements = shape.iter().product();
        let bytes = dtype.bytes_for(elements).unwrap_or(0).next_multiple_of(ALIGNMENT);
        self.tensors.push(Placed { key, dtype, shape: shape.to_vec(), offset: self.bytes });
        self.bytes += bytes;
    }

    /// Adds a tensor that a file holds in these bytes: it is brought with the whole pages that they lie in.
    pub fn add_stored(&mut self, key: K, dtype: DType, shape: &[u64], bytes: &Range<u64>) {
        let pages = pages(bytes);
        let offset = self.bytes + bytes.start - pages.start;
        self.tensors.push(Placed { key, dtype, shape: shape.to_vec(), offset });
        self.bytes += pages.end - pages.start;
    }

    /// Bytes of all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What is in it.
    pub fn tensors(&self) -> &[Placed<K>] {
        &self.tensors
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The tensors in a buffer that holds the parcel; `None` for one that is too small.
    pub fn views<'a>(&'a self, buffer: &'a Tensor) -> impl Iterator<Item = Option<(&'a K, Tensor)>> {
        self.tensors.iter().map(move |placed| {
            let view = aligned_view(buffer, placed.offset, placed.dtype, &placed.shape)?;
            Some((&placed.key, view))
        })
    }
}

/// Bytes of a buffer for a parcel: memory of an arena may begin within a page.
pub(crate) fn aligned_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT).saturating_add(ALIGNMENT)
}

/// Memory for a parcel of so many bytes.
pub(crate) fn buffer<D: Device>(
    device: &D,
    bytes: u64,
    tag: Tag,
    name: &'static str,
) -> Result<Tensor, StepError> {
    Ok(device.alloc(DType::U8, &[aligned_bytes(bytes)], tag, name)?)
}

/// A tensor in a buffer, `offset` bytes from its first whole page on.
pub(crate) fn aligned_view(buffer: &Tensor, offset: u64, dtype: DType, shape: &[u64]) -> Option<Tensor> {
    let start = buffer.range().start;
    buffer.view(start.next_multiple_of(ALIGNMENT) - start + offset, dtype, shape)
}
