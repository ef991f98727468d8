//! What is not on the device all the time: parcels of tensors with their homes, and the buffers through which they come
//! and go. Weights, gradients, optimizer states and key-value caches share a pool's buffers, in training and in inference.
//! Activations take a buffer when there is one to send or to bring (`block::Mover`). All of them move in the same way
//! ([`Transits`]).
//!
//! # How a weight that lives below the device comes and goes
//!
//! 1. `WeightStore::new` puts the matrices of a layer into one [`Parcel`], or a piece of a table by itself
//!    ([`Pieces`]). A matrix that a file of the model's holds as it is computed with has its home there; the others share a
//!    home of their own, which [`Parcel::settle`] takes of the host's arena or of the spill file's. In a dry run the same
//!    homes are taken of arenas with nothing behind them.
//! 2. `WeightStore::load` fills the homes of their own a part at a time ([`Contents::load`]).
//! 3. A schedule announces what it will take ([`Parcels::announce`]), in order, and nothing else is taken. The pool lends a
//!    free buffer of the arena to the tiers (`Device::lend`): nobody has a view of it from here on. `transit` says which
//!    stretches of it move from which home, and the tiers move them behind the computation (`LowerTiers::begin`), on the stream
//!    of copies in: the disk's threads read into the buffer, straight from the file. Where the device has memory of its own
//!    (`DeviceTraits::unified` says no), they read into pieces of host memory, which the stream copies on to the device.
//! 4. `gather` takes the parcel ([`Parcels::gather`]): the pool first sees to it that the next one is on its way, then waits for
//!    this one's event, gets its buffer back (`Device::reclaim`), and gives views of the tensors in it.
//! 5. `release` says that the step is done with it. When the last view is gone, a buffer that was changed is lent again and
//!    written back to the parcel's own home, on the stream of copies out; what comes into the same buffer next begins when the
//!    write is done. A buffer that was not changed is free at once.
//! 6. `flush`, at the end of a step, waits until everything that was changed has arrived.
//!
//! Buffers are taken once, the pieces of host memory too, and where somebody waits is fixed by the schedule, so that neither
//! memory nor order depends on how fast a disk is. On the dry device a buffer stays where it is and the bytes that would move
//! are counted, on every hop.

mod contents;
mod homes;
mod parcel;
mod parcels;
mod pieces;
mod pool;
mod transit;

pub(crate) use contents::{Contents, HomePart, Values, clear};
pub(crate) use parcel::{Extents, Parcel, buffer};
pub(crate) use parcels::Parcels;
pub(crate) use pieces::{Pieces, Unit, is_matrix};
pub(crate) use pool::Use;
pub(crate) use transit::{Source, Transit, Transits};

#[cfg(test)]
mod tests;
