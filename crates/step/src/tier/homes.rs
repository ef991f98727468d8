//! The carrier of parcels: it moves them between buffers and their homes, on whichever tier and in whichever file these are.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;
use std::sync::Arc;

use plimsoll_disk::{DiskError, LowerTiers};
use plimsoll_memory::Region;

use super::parcel::Parcel;
use super::pool::Carrier;
use super::transit::{Direction, Transit};

/// Parcels under their keys, with where they live, and those that are on their way.
pub(super) struct Homes<K, T> {
    tiers: Arc<LowerTiers>,
    parcels: Rc<RefCell<HashMap<K, Parcel<T>>>>,
    under_way: HashMap<K, Transit>,
}

impl<K: Copy + Eq + Hash, T> Homes<K, T> {
    /// A carrier of these.
    pub fn new(tiers: &Arc<LowerTiers>, parcels: &Rc<RefCell<HashMap<K, Parcel<T>>>>) -> Self {
        Homes { tiers: Arc::clone(tiers), parcels: Rc::clone(parcels), under_way: HashMap::new() }
    }

    fn begin(&mut self, key: K, direction: Direction, memory: Region) {
        if let Some(parcel) = self.parcels.borrow().get(&key) {
            self.under_way.insert(key, Transit::begin(&self.tiers, parcel, direction, memory));
        }
    }
}

impl<K: Copy + Eq + Hash, T> Carrier<K> for Homes<K, T> {
    fn reserve(&mut self, key: K) -> Result<(), DiskError> {
        let mut parcels = self.parcels.borrow_mut();
        parcels.get_mut(&key).map_or(Ok(()), |parcel| parcel.prepare_write_back(&self.tiers))
    }

    fn count(&self, key: K, back: bool) {
        if let Some(parcel) = self.parcels.borrow().get(&key) {
            Transit::count(
                &self.tiers,
                parcel,
                if back { Direction::WriteBack } else { Direction::Prefetch },
            );
        }
    }

    fn begin_read(&mut self, key: K, memory: Region) {
        self.begin(key, Direction::Prefetch, memory);
    }

    fn begin_write(&mut self, key: K, memory: Region) {
        self.begin(key, Direction::WriteBack, memory);
    }

    fn is_done(&self, key: K) -> bool {
        self.under_way.get(&key).is_none_or(Transit::is_done)
    }

    fn finish(&mut self, key: K) -> Option<(Region, Result<(), DiskError>)> {
        let (memory, outcome) = self.under_way.remove(&key)?.finish();
        Some((memory?, outcome))
    }
}
