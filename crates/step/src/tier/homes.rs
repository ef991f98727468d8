//! Parcels that live on a tier below the device, each in a home of its own.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
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

/// The parts of a buffer, in order, and what is left of it behind them.
#[derive(Debug)]
struct UnderWay {
    parts: Vec<Part>,
    after: Option<Region>,
}

#[derive(Debug)]
enum Part {
    Still(Region),
    Moving(Transfer),
}

/// Bytes of a parcel that have to be brought, and those that were changed; in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents {
    pub read: Vec<Range<u64>>,
    pub changed: Vec<Range<u64>>,
}

/// Where parcels live.
#[derive(Debug)]
pub(crate) struct Homes<K> {
    tiers: Arc<LowerTiers>,
    homes: HashMap<K, Arc<Home>>,
    /// What follows in the buffer behind the home's pages: homes in files, and the pages of each.
    stored: HashMap<K, Vec<(Arc<Home>, u64)>>,
    /// Parcels of which not all bytes matter.
    extents: Rc<RefCell<HashMap<K, Extents>>>,
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
            extents: Rc::default(),
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

    /// Where to say which bytes of parcels matter; all of those that are not named do.
    pub fn extents_of(&self) -> Rc<RefCell<HashMap<K, Extents>>> {
        Rc::clone(&self.extents)
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

    fn count(&self, key: K, back: bool) {
        let Some(home) = self.homes.get(&key).filter(|_| back || !self.stored.contains_key(&key)) else {
            let stored = self.stored.get(&key).into_iter().flatten().filter(|_| !back);
            stored.for_each(|(home, pages)| self.tiers.count(home, *pages, false));
            return;
        };
        let bytes = match self.extents.borrow().get(&key) {
            Some(extents) => {
                let ranges = if back { &extents.changed } else { &extents.read };
                ranges.iter().map(|range| range.end - range.start).sum()
            }
            None => home.bytes(),
        };
        self.tiers.count(home, bytes, back);
    }

    fn begin_read(&mut self, key: K, memory: Region) {
        let mut under_way = UnderWay::new(memory);
        if let Some(home) = self.homes.get(&key) {
            let extents = self.extents.borrow().get(&key).map(|extents| extents.read.clone());
            self.begin(&mut under_way, home, extents, false);
        }
        for (home, pages) in self.stored.get(&key).into_iter().flatten() {
            under_way.moving(*pages, |part| self.tiers.bring(home, part));
        }
        self.under_way.insert(key, under_way);
    }

    fn begin_write(&mut self, key: K, memory: Region) {
        let Some(home) = self.homes.get(&key) else { return };
        let mut under_way = UnderWay::new(memory);
        let extents = self.extents.borrow().get(&key).map(|extents| extents.changed.clone());
        self.begin(&mut under_way, home, extents, true);
        self.under_way.insert(key, under_way);
    }

    fn is_done(&self, key: K) -> bool {
        let done = |part: &Part| match part {
            Part::Still(_) => true,
            Part::Moving(transfer) => transfer.is_done(),
        };
        self.under_way.get(&key).is_none_or(|under_way| under_way.parts.iter().all(done))
    }

    fn finish(&mut self, key: K) -> Option<(Region, Result<(), DiskError>)> {
        let UnderWay { parts, after } = self.under_way.remove(&key)?;
        let mut failed = None;
        let regions = parts.into_iter().map(|part| match part {
            Part::Still(region) => region,
            Part::Moving(transfer) => {
                let Finished { region, outcome } = transfer.wait();
                if let Err(error) = outcome {
                    failed.get_or_insert(error);
                }
                region
            }
        });
        let join = |whole: Region, part| whole.join(part).unwrap_or_else(|(whole, _)| whole);
        let whole = regions.collect::<Vec<_>>().into_iter().chain(after).reduce(join)?;
        Some((whole, failed.map_or(Ok(()), Err)))
    }
}

impl<K: Copy + Eq + Hash> Homes<K> {
    /// Moves a home's pages, or those of them that `extents` names, in order.
    fn begin(
        &self,
        under_way: &mut UnderWay,
        home: &Home,
        extents: Option<Vec<Range<u64>>>,
        home_wards: bool,
    ) {
        let all = home.bytes().next_multiple_of(ALIGNMENT);
        let mut at = 0;
        let whole = std::iter::once(0..home.bytes()).collect();
        for extent in extents.unwrap_or(whole) {
            let pages = pages(&extent);
            // Neighbours may share a page.
            let pages = pages.start.max(at)..pages.end.min(all);
            if pages.is_empty() {
                continue;
            }
            under_way.still(pages.start - at);
            at = pages.end;
            under_way.moving(pages.end - pages.start, |region| match home_wards {
                true => self.tiers.send_part(home, pages, region),
                false => self.tiers.bring_part(home, pages.start..pages.end.min(home.bytes()), region),
            });
        }
        under_way.still(all - at);
    }
}

impl UnderWay {
    fn new(memory: Region) -> UnderWay {
        let skip = memory.skip_to(ALIGNMENT as usize) as u64;
        let mut under_way = UnderWay { parts: Vec::new(), after: Some(memory) };
        under_way.still(skip);
        under_way
    }

    /// The next bytes of the buffer.
    fn split(&mut self, bytes: u64) -> Option<Region> {
        let (part, rest) = self.after.take()?.split_at(usize::try_from(bytes).unwrap_or(usize::MAX));
        self.after = Some(rest);
        Some(part)
    }

    /// Bytes that stay.
    fn still(&mut self, bytes: u64) {
        let part = self.split(bytes).map(Part::Still);
        self.parts.extend(part);
    }

    /// Bytes that move.
    fn moving(&mut self, bytes: u64, begin: impl FnOnce(Region) -> Transfer) {
        let part = self.split(bytes).map(|region| Part::Moving(begin(region)));
        self.parts.extend(part);
    }
}
