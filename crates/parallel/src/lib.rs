//! Ranks and what they say to each other.
//!
//! The step program speaks to a [`Communicator`] wherever ranks would have to agree, so that a program for one
//! rank is a program for many. This version runs one process: [`Solo`].

#![forbid(unsafe_code)]

use plimsoll_device::{DeviceError, Tensor};

/// A group of ranks that hold parts of one run.
pub trait Communicator {
    /// This rank's number, from 0.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn world_size(&self) -> u32;

    /// Every rank's `x` becomes the sum over all ranks, added in the order of the ranks.
    fn all_reduce(&self, x: &Tensor) -> Result<(), CommunicationError>;

    /// The sum of a host value over all ranks.
    fn sum(&self, value: f64) -> Result<f64, CommunicationError>;
}

/// A collective operation failed.
#[derive(Debug, thiserror::Error)]
pub enum CommunicationError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The only rank there is: sums over all ranks are what they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Communicator for Solo {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn all_reduce(&self, _: &Tensor) -> Result<(), CommunicationError> {
        Ok(())
    }

    fn sum(&self, value: f64) -> Result<f64, CommunicationError> {
        Ok(value)
    }
}
