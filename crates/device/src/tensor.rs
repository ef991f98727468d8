//! A tensor: a typed, shaped, contiguous view of a block of an arena. It owns no device and computes nothing.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use plimsoll_memory::{Arena, Block};

use crate::{DType, DeviceError};

/// Sizes from the slowest dimension to the fastest; at most four.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [u64; 4],
    rank: u8,
}

impl Shape {
    /// A shape from its sizes; `None` for more than four or when the number of elements overflows.
    pub fn new(sizes: &[u64]) -> Option<Shape> {
        if sizes.len() > 4 {
            return None;
        }
        sizes.iter().try_fold(1u64, |product, n| product.checked_mul(*n))?;
        let mut dims = [1; 4];
        dims[..sizes.len()].copy_from_slice(sizes);
        Some(Shape { dims, rank: sizes.len() as u8 })
    }

    /// The sizes.
    pub fn dims(&self) -> &[u64] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.dims().iter().product()
    }

    /// The last size: the width of a row. 1 for a scalar.
    pub fn columns(&self) -> u64 {
        self.dims().last().copied().unwrap_or(1)
    }

    /// The product of all sizes but the last.
    pub fn rows(&self) -> u64 {
        self.dims().split_last().map_or(1, |(_, rest)| rest.iter().product())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// A view of arena memory. Clones share the block; the last one to go gives it back.
#[derive(Clone)]
pub struct Tensor {
    block: Arc<Block>,
    /// Where the view starts, in bytes from the block's start.
    start: u64,
    shape: Shape,
    dtype: DType,
    /// Size of the view.
    bytes: u64,
}

impl Tensor {
    /// The whole of `block` as a tensor. `None` where the block is too small for the shape.
    pub fn new(block: Block, dtype: DType, shape: Shape) -> Option<Tensor> {
        let needed = dtype.bytes_for(shape.elements())?;
        (needed <= block.size()).then(|| Tensor {
            block: Arc::new(block),
            start: 0,
            shape,
            dtype,
            bytes: needed,
        })
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.elements()
    }

    /// Width of a row.
    pub fn columns(&self) -> u64 {
        self.shape.columns()
    }

    /// Number of rows: the product of all sizes but the last.
    pub fn rows(&self) -> u64 {
        self.shape.rows()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Rows `range` of this tensor, as `[range.len(), columns]`. `None` outside the tensor, and where no row can be had
    /// by itself ([`DType::has_rows`]) or rows are not whole blocks.
    pub fn slice_rows(&self, range: Range<u64>) -> Option<Tensor> {
        if range.start > range.end || range.end > self.rows() {
            return None;
        }
        if !self.dtype.has_rows() || !self.columns().is_multiple_of(self.dtype.block_elements()) {
            return None;
        }
        let row = self.dtype.bytes_for(self.columns())?;
        let shape = Shape::new(&[range.end - range.start, self.columns()])?;
        let bytes = self.dtype.bytes_for(shape.elements())?;
        Some(Tensor { start: self.start + range.start * row, shape, bytes, ..self.clone() })
    }

    /// The same elements under another shape. `None` where the number of elements differs.
    pub fn reshape(&self, sizes: &[u64]) -> Option<Tensor> {
        let shape = Shape::new(sizes)?;
        (shape.elements() == self.elements()).then(|| Tensor { shape, ..self.clone() })
    }

    /// The bytes from `start` on of a tensor of [`DType::U8`] as another tensor. `None` where they are too few, or where
    /// the type cannot begin there ([`DType::alignment`]; arenas begin at multiples of all).
    pub fn view(&self, start: u64, dtype: DType, sizes: &[u64]) -> Option<Tensor> {
        let shape = Shape::new(sizes)?;
        let bytes = dtype.bytes_for(shape.elements())?;
        let end = start.checked_add(bytes)?;
        let at = self.range().start + start;
        let possible = self.dtype == DType::U8 && end <= self.bytes() && at.is_multiple_of(dtype.alignment());
        possible.then(|| Tensor { start: self.start + start, shape, dtype, bytes, ..self.clone() })
    }

    /// Some of its bytes, as they lie in memory. `None` outside the tensor.
    pub fn bytes_from(&self, range: Range<u64>) -> Option<Tensor> {
        let bytes = range.end.checked_sub(range.start).filter(|_| range.end <= self.bytes())?;
        let (start, shape) = (self.start + range.start, Shape::new(&[bytes])?);
        Some(Tensor { start, shape, dtype: DType::U8, bytes, ..self.clone() })
    }

    /// Whether no other tensor is a view of the same block.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.block) == 1
    }

    /// The block, to be lent by the device with this arena.
    ///
    /// # Errors
    /// It belongs to another device, or other tensors are views of it.
    pub(crate) fn into_lent_block(self, arena: &Arena) -> Result<Arc<Block>, DeviceError> {
        self.check_lendable(arena)?;
        Ok(self.block)
    }

    /// The block that it lies in, held as long as somebody has this.
    pub(crate) fn block(&self) -> Arc<Block> {
        Arc::clone(&self.block)
    }

    /// Refuses a tensor that no device may lend.
    pub(crate) fn check_lendable(&self, arena: &Arena) -> Result<(), DeviceError> {
        let refuse = |reason| Err(DeviceError::Mismatch { op: "lend", reason });
        if !self.is_in(arena) {
            return refuse(format!("{self:?} belongs to another arena"));
        }
        if !self.is_alone() {
            return refuse(format!("others have views of {self:?}"));
        }
        Ok(())
    }

    /// The whole of a block, as bytes.
    pub(crate) fn of_block(block: Arc<Block>) -> Option<Tensor> {
        let shape = Shape::new(&[block.size()])?;
        let bytes = block.size();
        Some(Tensor { block, start: 0, shape, dtype: DType::U8, bytes })
    }

    /// Byte range in the arena.
    pub fn range(&self) -> Range<u64> {
        let start = self.block.offset() + self.start;
        start..start + self.bytes()
    }

    /// Whether this tensor lives in `arena`.
    pub fn is_in(&self, arena: &Arena) -> bool {
        self.block.is_in(arena)
    }

    /// Whether the two share any byte.
    pub fn overlaps(&self, other: &Tensor) -> bool {
        let (a, b) = (self.range(), other.range());
        a.start < b.end && b.start < a.end
    }

    /// Whether the two are the same bytes.
    pub fn same_memory(&self, other: &Tensor) -> bool {
        self.range() == other.range()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{:?}", self.block.name(), self.dtype, self.shape)
    }
}
