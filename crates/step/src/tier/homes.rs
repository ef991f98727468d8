//! Parcels that live on a tier below the device, each in a home of its own.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use plimsoll_disk::{DiskError, Finished, Home, LowerTiers, Transfer};
use plimsoll_memory::{Region, Tag, Tier};

use super::pool::Carrier;
use crate::StepError;

/// A home to be.
#[derive(Clone, Copy, Debug)]
struct Expected {
    tier: Tier,
    bytes: u64,
    tag: Tag,
    name: &'static str,
}

/// Where parcels live.
#[derive(Debug)]
pub(crate) struct Homes<K> {
    tiers: Arc<LowerTiers>,
    homes: HashMap<K, Arc<Home>>,
    /// Homes that are taken when something is first sent there.
    expected: HashMap<K, Expected>,
    under_way: HashMap<K, Transfer>,
}

impl<K: Copy + Eq + Hash> Homes<K> {
    /// No homes yet.
    pub fn new(tiers: &Arc<LowerTiers>) -> Self {
        Homes {
            tiers: Arc::clone(tiers),
            homes: HashMap::new(),
            expected: HashMap::new(),
            under_way: HashMap::new(),
        }
    }

    /// Takes a home for a parcel.
    pub fn take(
        &mut self,
        key: K,
        tier: Tier,
        bytes: u64,
        tag: Tag,
        name: &'static str,
    ) -> Result<(), StepError> {
        let home = self.tiers.take(tier, bytes, tag, name)?;
        self.homes.insert(key, Arc::new(home));
        Ok(())
    }

    /// Has a home taken for a parcel when it is first sent there.
    pub fn expect(&mut self, key: K, tier: Tier, bytes: u64, tag: Tag, name: &'static str) {
        self.expected.insert(key, Expected { tier, bytes, tag, name });
    }

    /// A parcel's home.
    pub fn get(&self, key: K) -> Option<&Arc<Home>> {
        self.homes.get(&key)
    }

    /// All homes, to be used beside the carrier.
    pub fn all(&self) -> HashMap<K, Arc<Home>> {
        self.homes.clone()
    }
}

impl<K: Copy + Eq + Hash> Carrier<K> for Homes<K> {
    fn reserve(&mut self, key: K) -> Result<(), DiskError> {
        if let Some(Expected { tier, bytes, tag, name }) = self.expected.remove(&key) {
            let home = self.tiers.take(tier, bytes, tag, name)?;
            self.homes.insert(key, Arc::new(home));
        }
        Ok(())
    }

    fn begin_read(&mut self, key: K, memory: Region) {
        if let Some(home) = self.homes.get(&key) {
            self.under_way.insert(key, self.tiers.bring(home, memory));
        }
    }

    fn begin_write(&mut self, key: K, memory: Region) {
        if let Some(home) = self.homes.get(&key) {
            self.under_way.insert(key, self.tiers.send(home, memory));
        }
    }

    fn is_done(&self, key: K) -> bool {
        self.under_way.get(&key).is_none_or(Transfer::is_done)
    }

    fn finish(&mut self, key: K) -> Option<(Region, Result<(), DiskError>)> {
        let Finished { region, outcome } = self.under_way.remove(&key)?.wait();
        Some((region, outcome.map(|_| ())))
    }
}
