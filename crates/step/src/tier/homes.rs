//! The carrier of parcels: between buffers and their homes, on whichever tier and in whichever file these are. Moves happen on
//! a copy stream, in the order in which they are begun.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use plimsoll_device::Transferred;
use plimsoll_disk::{CopyStream, DiskError, Event, LowerTiers};
use plimsoll_memory::Region;

use super::parcel::Parcel;
use super::pool::{BufferMemory, Carrier};
use super::transit::{Direction, Transit};

/// A buffer's memory, behind its move, and what came of that.
type Arrived = (Region, Result<(), DiskError>);

/// Parcels under their keys, with where they live, and those that are on their way.
pub(super) struct Homes<K, T> {
    tiers: Arc<LowerTiers>,
    parcels: Rc<RefCell<HashMap<K, Parcel<T>>>>,
    /// `None` in a dry run.
    stream: Option<CopyStream>,
    under_way: HashMap<K, Event<Option<Arrived>>>,
    /// What came of a write-back whose buffer was used again before anybody asked.
    failed: Arc<Mutex<Option<DiskError>>>,
}

impl<K: Copy + Eq + Hash, T> Homes<K, T> {
    /// A carrier of these.
    pub fn new(
        tiers: &Arc<LowerTiers>,
        parcels: &Rc<RefCell<HashMap<K, Parcel<T>>>>,
    ) -> Result<Self, DiskError> {
        let (stream, failed) = (tiers.copy_stream()?, Arc::default());
        let (tiers, parcels) = (Arc::clone(tiers), Rc::clone(parcels));
        Ok(Homes { tiers, parcels, stream, under_way: HashMap::new(), failed })
    }
}

impl<K: Copy + Eq + Hash, T> Carrier<K> for Homes<K, T> {
    fn reserve(&mut self, key: K) -> Result<(), DiskError> {
        let mut parcels = self.parcels.borrow_mut();
        parcels.get_mut(&key).map_or(Ok(()), |parcel| parcel.prepare_write_back(&self.tiers))
    }

    fn count(&self, key: K, direction: Direction) -> Transferred {
        let parcels = self.parcels.borrow();
        parcels.get(&key).map(|parcel| Transit::count(&self.tiers, parcel, direction)).unwrap_or_default()
    }

    fn begin(&mut self, key: K, direction: Direction, memory: BufferMemory<K>) {
        let parcels = self.parcels.borrow();
        let (Some(parcel), Some(stream)) = (parcels.get(&key), &self.stream) else { return };
        let transit = Transit::of(parcel, direction);
        let (tiers, on_disk) = (Arc::clone(&self.tiers), transit.is_on_disk());
        let event = match memory {
            BufferMemory::Here(memory) => stream.begin(on_disk, move || Some(transit.run(&tiers, memory))),
            BufferMemory::Behind(before) => {
                let Some(before) = self.under_way.remove(&before) else { return };
                let failed = Arc::clone(&self.failed);
                stream.begin(on_disk, move || {
                    // It was begun earlier on this stream: it is done.
                    let (memory, outcome) = before.wait().ok().flatten()?;
                    if let Err(error) = outcome {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                    Some(transit.run(&tiers, memory))
                })
            }
        };
        self.under_way.insert(key, event);
    }

    fn finish(&mut self, key: K) -> Option<(Region, Result<(), DiskError>)> {
        self.under_way.remove(&key)?.wait().ok().flatten()
    }

    fn settle(&mut self) -> Result<(), DiskError> {
        if let Some(stream) = &self.stream {
            stream.begin(true, || ()).wait()?;
        }
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner).take();
        failed.map_or(Ok(()), Err)
    }
}
