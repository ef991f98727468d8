//! The carrier of parcels: between buffers and their homes, on whichever tier and in whichever file these are.

use std::hash::Hash;

use plimsoll_device::Tensor;
use plimsoll_disk::{Direction, DiskError};
use rustc_hash::FxHashMap;

use super::parcel::Parcel;
use super::pool::Carrier;
use super::transit::{Source, Transit, Transits};
use crate::StepError;

/// Parcels under their keys, with where they live.
pub(crate) struct Homes<'a, K, T> {
    pub transits: Transits<'a>,
    pub parcels: FxHashMap<K, Parcel<T>>,
}

impl<K: Eq + Hash, T> Carrier<K> for Homes<'_, K, T> {
    type Transit = Transit;

    fn has(&self, key: K) -> bool {
        self.parcels.contains_key(&key)
    }

    fn reserve(&mut self, key: K) -> Result<(), DiskError> {
        let tiers = &self.transits.tiers;
        self.parcels.get_mut(&key).map_or(Ok(()), |parcel| parcel.prepare_write_back(tiers))
    }

    fn begin(&mut self, key: K, direction: Direction, source: Source<Transit>) -> Result<Transit, StepError> {
        let what = "a parcel moves that a pool does not have";
        let parcel = self.parcels.get(&key).ok_or(StepError::Invariant { what })?;
        self.transits.begin(parcel, direction, source)
    }

    fn finish(&mut self, transit: Transit) -> Result<(Tensor, Result<(), DiskError>), StepError> {
        self.transits.wait(transit)
    }

    fn settle(&mut self) -> Result<(), DiskError> {
        self.transits.tiers.settle()
    }
}
