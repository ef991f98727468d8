//! Parcels that live on a tier below the device, each in a home of its own.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use plimsoll_disk::{ALIGNMENT, DiskError, Finished, Home, LowerTiers, Transfer, pages};
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

/// Parts of a buffer on their way, and what is left of it before and behind them.
#[derive(Debug)]
struct UnderWay {
    before: Region,
    parts: Vec<Transfer>,
    after: Region,
}

/// Where parcels live.
#[derive(Debug)]
pub(crate) struct Homes<K> {
    tiers: Arc<LowerTiers>,
    homes: HashMap<K, Arc<Home>>,
    /// What follows in the buffer behind the home's pages: homes in files, and the pages of each.
    stored: HashMap<K, Vec<(Arc<Home>, u64)>>,
    /// Homes that are taken when something is first sent there.
    expected: HashMap<K, Expected>,
    under_way: HashMap<K, UnderWay>,
}

impl<K: Copy + Eq + Hash> Homes<K> {
    /// No homes yet.
    pub fn new(tiers: &Arc<LowerTiers>) -> Self {
        Homes {
            tiers: Arc::clone(tiers),
            homes: HashMap::new(),
            stored: HashMap::new(),
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

    /// Has a part of a parcel, behind what is there of it already, brought from a file.
    pub fn add_stored(&mut self, key: K, path: &Path, bytes: Range<u64>) -> Result<Arc<Home>, StepError> {
        let whole = pages(&bytes);
        let home = Arc::new(self.tiers.adopt(path, bytes)?);
        self.stored.entry(key).or_default().push((Arc::clone(&home), whole.end - whole.start));
        Ok(home)
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
        let skip = memory.skip_to(ALIGNMENT as usize);
        let (before, mut after) = memory.split_at(skip);
        let own = self.homes.get(&key).map(|home| (home, home.bytes().next_multiple_of(ALIGNMENT)));
        let stored = self.stored.get(&key).into_iter().flatten().map(|(home, pages)| (home, *pages));
        let mut parts = Vec::new();
        for (home, pages) in own.into_iter().chain(stored) {
            let (part, rest) = after.split_at(usize::try_from(pages).unwrap_or(usize::MAX));
            parts.push(self.tiers.bring(home, part));
            after = rest;
        }
        self.under_way.insert(key, UnderWay { before, parts, after });
    }

    fn begin_write(&mut self, key: K, memory: Region) {
        let Some(home) = self.homes.get(&key) else { return };
        let skip = memory.skip_to(ALIGNMENT as usize);
        let (before, rest) = memory.split_at(skip);
        let pages = home.bytes().next_multiple_of(ALIGNMENT);
        let (part, after) = rest.split_at(usize::try_from(pages).unwrap_or(usize::MAX));
        let parts = vec![self.tiers.send(home, part)];
        self.under_way.insert(key, UnderWay { before, parts, after });
    }

    fn is_done(&self, key: K) -> bool {
        self.under_way.get(&key).is_none_or(|under_way| under_way.parts.iter().all(Transfer::is_done))
    }

    fn finish(&mut self, key: K) -> Option<(Region, Result<(), DiskError>)> {
        let UnderWay { before, parts, after } = self.under_way.remove(&key)?;
        let (mut whole, mut failed) = (before, None);
        let join = |whole: Region, part| whole.join(part).unwrap_or_else(|(whole, _)| whole);
        for part in parts {
            let Finished { region, outcome } = part.wait();
            whole = join(whole, region);
            if let Err(error) = outcome {
                failed.get_or_insert(error);
            }
        }
        Some((join(whole, after), failed.map_or(Ok(()), Err)))
    }
}
