//! Ranks that are processes, over the system's MPI: a [`Transport`](plimsoll_parallel::Transport) of
//! [`Wired`](plimsoll_parallel::Wired) ranks. Everything is behind the feature `mpi`.
//!
//! A crate of its own, so that nothing but the program is built again for the feature.

#![forbid(unsafe_code)]

#[cfg(feature = "mpi")]
mod processes;

#[cfg(feature = "mpi")]
pub use processes::{Mpi, MpiError, MpiRanks};
