//! Parcels that live below the device, gathered and released by their keys: a pool of buffers, and what lies in each of them.

use std::hash::Hash;
use std::sync::Arc;

use plimsoll_device::{Device, Tensor};
use plimsoll_disk::LowerTiers;
use rustc_hash::FxHashMap;

use super::homes::Homes;
use super::parcel::Parcel;
use super::pool::Pool;
use super::transit::Transits;
use crate::StepError;

/// Parcels of tensors `T` under keys `K`.
pub(crate) type Parcels<'a, K, T> = Pool<'a, K, Homes<'a, K, T>>;

impl<'a, K: Copy + Eq + Hash, T: Copy> Parcels<'a, K, T> {
    /// Takes memory for `buffers` buffers, or for as many as there are parcels; `name` says what they hold.
    pub fn of(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        parcels: FxHashMap<K, Parcel<T>>,
        buffers: usize,
        name: &'static str,
    ) -> Result<Self, StepError> {
        let bytes = parcels.values().map(Parcel::bytes).max().unwrap_or(0);
        let buffers = buffers.min(parcels.len());
        let to_disk = parcels.values().any(Parcel::uses_disk);
        let homes = Homes { transits: Transits::new(device, tiers, to_disk)?, parcels };
        Pool::new(device, homes, name, bytes, buffers)
    }

    /// Whether there is a parcel under this key.
    pub fn has(&self, key: K) -> bool {
        self.get(key).is_some()
    }

    /// A parcel.
    pub fn get(&self, key: K) -> Option<&Parcel<T>> {
        self.carrier.parcels.get(&key)
    }

    /// A parcel, to say which of its bytes move.
    pub fn get_mut(&mut self, key: K) -> Option<&mut Parcel<T>> {
        self.carrier.parcels.get_mut(&key)
    }

    /// The tensors of a parcel, which is the next one that was announced or in use already; none under a key without a
    /// parcel.
    pub fn gather(&mut self, key: K) -> Result<Vec<(T, Tensor)>, StepError> {
        if !self.has(key) {
            return Ok(Vec::new());
        }
        let in_use = "every buffer of a pool is in use: a parcel was taken and not released";
        let buffer = self.take(key)?.ok_or(StepError::Invariant { what: in_use })?;
        let views = self.get(key).and_then(|parcel| parcel.views(&buffer));
        views.ok_or(StepError::Invariant { what: "a parcel is larger than its buffer" })
    }
}
