//! The carrier of parcels: between buffers and their homes, on whichever tier and in whichever file these are.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;
use std::sync::Arc;

use plimsoll_device::Transferred;
use plimsoll_disk::{Arrived, BufferMemory, Direction, DiskError, LowerTiers, Moving};

use super::parcel::Parcel;
use super::pool::Carrier;
use super::transit::{count, stretches};

/// Parcels under their keys, with where they live, and those that are on their way.
pub(super) struct Homes<K, T> {
    tiers: Arc<LowerTiers>,
    parcels: Rc<RefCell<HashMap<K, Parcel<T>>>>,
    under_way: HashMap<K, Moving>,
}

impl<K: Copy + Eq + Hash, T> Homes<K, T> {
    /// A carrier of these.
    pub fn new(tiers: &Arc<LowerTiers>, parcels: &Rc<RefCell<HashMap<K, Parcel<T>>>>) -> Self {
        Homes { tiers: Arc::clone(tiers), parcels: Rc::clone(parcels), under_way: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash, T> Carrier<K> for Homes<K, T> {
    fn reserve(&mut self, key: K) -> Result<(), DiskError> {
        let mut parcels = self.parcels.borrow_mut();
        parcels.get_mut(&key).map_or(Ok(()), |parcel| parcel.prepare_write_back(&self.tiers))
    }

    fn count(&self, key: K, direction: Direction) -> Transferred {
        let parcels = self.parcels.borrow();
        parcels.get(&key).map(|parcel| count(&self.tiers, parcel, direction)).unwrap_or_default()
    }

    fn begin(&mut self, key: K, direction: Direction, memory: BufferMemory<K>) {
        let memory = match memory {
            BufferMemory::Here(memory) => BufferMemory::Here(memory),
            BufferMemory::Behind(before) => match self.under_way.remove(&before) {
                Some(before) => BufferMemory::Behind(before),
                None => return,
            },
        };
        if let Some(parcel) = self.parcels.borrow().get(&key) {
            let moving = self.tiers.begin(direction, stretches(parcel, direction), memory);
            self.under_way.extend(moving.map(|moving| (key, moving)));
        }
    }

    fn finish(&mut self, key: K) -> Option<Arrived> {
        self.under_way.remove(&key)?.wait()
    }

    fn settle(&mut self) -> Result<(), DiskError> {
        self.tiers.settle()
    }
}
