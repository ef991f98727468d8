//! What is not on the device all the time: how it lies in buffers, how it comes and goes, and where it lives.

mod homes;
mod parcel;
mod pieces;
mod pool;

pub(crate) use homes::{Extents, Homes};
pub(crate) use parcel::{Parcel, Placed, aligned_view, buffer};
pub(crate) use pieces::{Pieces, Unit, is_matrix};
pub(crate) use pool::{Carrier, Pool};
