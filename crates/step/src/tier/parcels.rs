//! Parcels that live below the device, taken and released by their keys: a pool of buffers, and what lies in each of them.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use plimsoll_device::{Device, Tensor};
use plimsoll_disk::LowerTiers;

use super::homes::Homes;
use super::parcel::Parcel;
use super::pool::{Pool, Use};
use super::transit::Transits;
use crate::StepError;

/// Parcels of tensors `T` under keys `K`.
pub(crate) struct Parcels<'a, K: Eq + Hash, T> {
    pool: Pool<'a, K, Homes<'a, K, T>>,
}

impl<'a, K: Copy + Eq + Hash + 'a, T: Copy + 'a> Parcels<'a, K, T> {
    /// Takes memory for `buffers` buffers, or for as many as there are parcels; `name` says what they hold.
    pub fn new(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        parcels: HashMap<K, Parcel<T>>,
        buffers: usize,
        name: &'static str,
    ) -> Result<Self, StepError> {
        let bytes = parcels.values().map(Parcel::bytes).max().unwrap_or(0);
        let buffers = buffers.min(parcels.len());
        let homes = Homes { transits: Transits::new(device, tiers), parcels };
        Ok(Parcels { pool: Pool::new(device, homes, name, bytes, buffers)? })
    }

    /// Whether there is a parcel under this key.
    pub fn has(&self, key: K) -> bool {
        self.get(key).is_some()
    }

    /// A parcel.
    pub fn get(&self, key: K) -> Option<&Parcel<T>> {
        self.pool.carrier.parcels.get(&key)
    }

    /// A parcel, to say which of its bytes move.
    pub fn get_mut(&mut self, key: K) -> Option<&mut Parcel<T>> {
        self.pool.carrier.parcels.get_mut(&key)
    }

    /// What will be taken next, in order; keys without a parcel are left out. Nothing is in use any more.
    pub fn announce(&mut self, uses: impl IntoIterator<Item = Use<K>>) -> Result<(), StepError> {
        let known: Vec<Use<K>> = uses.into_iter().filter(|used| self.has(used.key)).collect();
        self.pool.announce(known)
    }

    /// The tensors of a parcel, which is the next one that was announced or in use already; none under a key without a
    /// parcel.
    pub fn take(&mut self, key: K) -> Result<Vec<(T, Tensor)>, StepError> {
        if !self.has(key) {
            return Ok(Vec::new());
        }
        let buffer = self.pool.take(key)?;
        self.views(key, buffer)
    }

    fn views(&self, key: K, buffer: Option<Tensor>) -> Result<Vec<(T, Tensor)>, StepError> {
        let in_use = "every buffer of a pool is in use: a parcel was taken and not released";
        let buffer = buffer.ok_or(StepError::Invariant { what: in_use })?;
        let views = self.get(key).and_then(|parcel| parcel.views(&buffer));
        views.ok_or(StepError::Invariant { what: "a parcel is larger than its buffer" })
    }

    /// The step is done with a parcel for now; `changed`: it is written back when all views of it are gone.
    pub fn release(&mut self, key: K, changed: bool) {
        self.pool.release(key, changed);
    }

    /// Forgets a parcel that nobody needs any more, wherever it lives.
    pub fn forget(&mut self, key: K) {
        self.pool.forget(key);
    }

    /// Moves on what is under way, without waiting.
    pub fn advance(&mut self) -> Result<(), StepError> {
        self.pool.advance()
    }

    /// Waits until everything that was changed is where it lives.
    pub fn flush(&mut self) -> Result<(), StepError> {
        self.pool.flush()
    }

    /// Feeds what lies in the buffers to a hasher: with what is announced, it decides all that moves.
    pub fn hash_buffers(&self, hasher: &mut impl Hasher) {
        self.pool.hash_buffers(hasher);
    }
}
