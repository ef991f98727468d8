//! Columns of heads, from one layout to another: keys and values that are made of a latent vector (DeepSeek-V2) lie side by side in each
//! head, a part of the keys is the same for all heads, and values are narrower than keys.

use super::Family;
use crate::check::Description;
use crate::{Cost, Tensor};

/// Columns of a tensor `[N, ..]`: head h has those from `first + h * stride` on.
#[derive(Clone, Copy, Debug)]
pub struct HeadColumns<'a> {
    /// The tensor.
    pub tensor: &'a Tensor,
    /// The first column of the first head.
    pub first: u64,
    /// Columns from one head to the next; 0 where all heads have the same.
    pub stride: u64,
}

impl<'a> HeadColumns<'a> {
    /// The first columns of heads of this width.
    pub fn new(tensor: &'a Tensor, stride: u64) -> HeadColumns<'a> {
        HeadColumns { tensor, first: 0, stride }
    }

    /// The same from another column on.
    #[must_use]
    pub fn from(self, first: u64) -> HeadColumns<'a> {
        HeadColumns { first, ..self }
    }

    /// The column behind the last of `heads` heads that have `width` columns each.
    fn end(&self, heads: u64, width: u64) -> u64 {
        let last = heads.saturating_sub(1).saturating_mul(self.stride);
        self.first.saturating_add(last).saturating_add(width)
    }
}

/// What is done with columns of heads. Columns of `to` that are no head's stay as they are.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Heads<'a> {
    /// `to[n, h, i] = from[n, h, i]` for i below `width`, converted.
    Copy { from: HeadColumns<'a>, to: HeadColumns<'a>, heads: u64, width: u64 },
    /// `to[n, i]` = the sum over the heads of `from[n, h, i]`, in their order, in f32: the backward pass of a copy from columns that
    /// all heads share. `to` has one head.
    Sum { from: HeadColumns<'a>, to: HeadColumns<'a>, heads: u64, width: u64 },
}

impl<'a> Family<'a> for Heads<'a> {
    fn describe(&self) -> Description<'a> {
        let (name, from, to, heads, width, written) = match *self {
            Heads::Copy { from, to, heads, width } => ("copy_heads", from, to, heads, width, heads),
            Heads::Sum { from, to, heads, width } => ("sum_heads", from, to, heads, width, 1),
        };
        let within = |columns: HeadColumns<'_>, heads| columns.end(heads, width) <= columns.tensor.columns();
        let apart = written <= 1 || to.stride >= width;
        Description::new(name, [from.tensor], [])
            .changing([to.tensor])
            .floats([from.tensor, to.tensor])
            .that(heads > 0 && width > 0, || format!("{heads} heads of {width} are nothing"))
            .that(from.tensor.rows() == to.tensor.rows(), || {
                format!("{:?} and {:?} differ in rows", from.tensor, to.tensor)
            })
            .that(within(from, heads), || format!("{:?} has no {heads} heads of {width}", from.tensor))
            .that(within(to, written), || format!("{:?} has no {written} heads of {width}", to.tensor))
            .that(apart, || format!("heads of {width} overlap in {:?}", to.tensor))
    }

    fn cost(&self, once: Cost) -> Cost {
        let (from, to, width, read, written) = match *self {
            Heads::Copy { from, to, heads, width } => (from, to, width, heads, heads),
            Heads::Sum { from, to, heads, width } => (from, to, width, heads, 1),
        };
        let of = |columns: HeadColumns<'_>, heads: u64| {
            let tensor = columns.tensor;
            let elements = tensor.rows() * width * if columns.stride == 0 { 1 } else { heads };
            tensor.dtype().bytes_for(elements).unwrap_or(0)
        };
        Cost { bytes: of(from, read) + of(to, written), conversions: 0, ..once }
    }
}
