//! The tiers below the device: host memory and a private file on disk, each with an arena that says what lives where.
//!
//! A tensor that is not on the device has a [`Home`] in one of them. In a dry run there is nothing behind the homes, but
//! the arenas are the same: what a plan finds is what a run takes, on every tier.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use plimsoll_memory::{Arena, Block, HostPool, Phase, Region, Tag, Tier};

use crate::moves::Streams;
use crate::request::{Ticket, lock};
use crate::staging::Staging;
use crate::{
    ALIGNMENT, BufferMemory, BufferPool, Direction, DiskEngine, DiskError, DiskFile, EngineSettings, IoMeter,
    IoMode, Moving, SpillFile, SpillSettings, Stretch,
};

/// Host memory and disk, as far as a job may use them.
#[derive(Debug)]
pub struct LowerTiers {
    host: Arena,
    disk: Arena,
    /// `None` in a dry run.
    backing: Option<Backing>,
    /// What a device with memory of its own needs between that and a disk.
    staging: Mutex<Option<Arc<Staging>>>,
}

#[derive(Debug)]
struct Backing {
    host: HostPool,
    streams: Streams,
    engine: Arc<DiskEngine>,
    spill: Option<SpillFile>,
    /// Files that are only read.
    files: Mutex<Vec<Arc<DiskFile>>>,
}

/// Where a tensor lives between its uses: whole pages of a lower tier, given back on drop.
#[derive(Debug)]
pub struct Home {
    place: HomeKind,
    tier: Tier,
    bytes: u64,
}

#[derive(Debug)]
enum HomeKind {
    /// Bytes of a file from a place on, `None` in a dry run of either tier; and what they take of the tier, unless the file is
    /// only read.
    Disk { file: Option<Arc<DiskFile>>, start: u64, taken: Option<Block> },
    /// The memory itself.
    Host(Mutex<Region>),
}

impl Home {
    /// Bytes that it was taken for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is in a file that is only read.
    pub fn is_in_file(&self) -> bool {
        matches!(self.place, HomeKind::Disk { taken: None, .. })
    }

    /// Whether it is on a disk.
    pub fn is_on_disk(&self) -> bool {
        self.tier == Tier::Disk
    }

    /// The file that it is in, and where in it.
    pub(crate) fn on_disk(&self) -> Option<(&Arc<DiskFile>, u64)> {
        match &self.place {
            HomeKind::Disk { file, start, .. } => Some((file.as_ref()?, *start)),
            HomeKind::Host(_) => None,
        }
    }

    /// Its memory on the host.
    pub(crate) fn on_host(&self) -> Option<&Mutex<Region>> {
        match &self.place {
            HomeKind::Host(memory) => Some(memory),
            HomeKind::Disk { .. } => None,
        }
    }

    /// Begins to move a part that begins with a page.
    pub(crate) fn begin(
        &self,
        engine: &DiskEngine,
        direction: Direction,
        part: Range<u64>,
        mut region: Region,
    ) -> Ticket {
        let bytes = part.end.saturating_sub(part.start);
        if let Some(memory) = self.on_host() {
            let mut memory = lock(memory);
            let start = region.skip_to(ALIGNMENT as usize);
            let outcome = copy(&mut memory, part, (&mut region, start), direction);
            return Ticket::answered(engine.clock(), region, outcome);
        }
        match (direction, self.on_disk()) {
            (Direction::WriteBack, Some((file, start))) if !self.is_in_file() => {
                engine.write_back(file, start + part.start, bytes, region)
            }
            (Direction::Prefetch, Some((file, start))) => {
                engine.prefetch(file, start + part.start..start + part.end, region)
            }
            _ => Ticket::answered(engine.clock(), region, Err(DiskError::Stopped)),
        }
    }
}

impl Default for LowerTiers {
    /// Tiers of no size.
    fn default() -> LowerTiers {
        LowerTiers::with(Arena::new(Tier::Host, 0), Arena::new(Tier::Disk, 0), None)
    }
}

impl LowerTiers {
    /// Tiers without an end and with nothing behind them.
    pub fn dry() -> LowerTiers {
        let arena = Arena::unbounded;
        LowerTiers::with(arena(Tier::Host), arena(Tier::Disk), None)
    }

    /// The same for a dry run on a device with this arena: they record where it does.
    pub fn dry_beside(device: &Arena) -> LowerTiers {
        LowerTiers::with(device.beside(Tier::Host), device.beside(Tier::Disk), None)
    }

    fn with(host: Arena, disk: Arena, backing: Option<Backing>) -> LowerTiers {
        LowerTiers { host, disk, backing, staging: Mutex::default() }
    }

    /// A host tier of this memory, and a disk of this size. The room on disk is taken at once, so that a disk that is too full
    /// is found before anything is computed.
    ///
    /// # Errors
    /// The folder cannot be used, its disk is too full, or the budget is too small.
    pub fn open(host: Region, disk_bytes: u64, settings: &SpillSettings) -> Result<LowerTiers, DiskError> {
        let mut spill = None;
        if disk_bytes > 0 {
            let file = SpillFile::create(settings)?;
            file.allocate(disk_bytes)?;
            spill = Some(file);
        }
        let engine = Arc::new(DiskEngine::start(EngineSettings::default())?);
        let streams = Streams::start(&engine)?;
        let (host, disk) = (HostPool::new(host), Arena::new(Tier::Disk, disk_bytes));
        let arena = host.arena().clone();
        let backing = Backing { host, streams, engine, spill, files: Mutex::default() };
        Ok(LowerTiers::with(arena, disk, Some(backing)))
    }

    /// Memory that tiers on a disk take at most, beside what is handed to them; `row_bytes` are those of the parts that
    /// [`read_all_now`](Self::read_all_now) is asked for.
    pub fn memory_bytes(row_bytes: u64) -> u64 {
        let rows = row_bytes.saturating_add(2 * ALIGNMENT).saturating_mul(AT_ONCE as u64);
        EngineSettings::default().memory_bytes().saturating_add(Streams::STACK_BYTES).saturating_add(rows)
    }

    /// Whether nothing is behind the homes.
    pub fn is_dry(&self) -> bool {
        self.backing.is_none()
    }

    /// Takes what staging needs of the host, once: what moves between a disk and a device with memory of its own goes through
    /// there.
    ///
    /// # Errors
    /// The host has no room.
    pub fn stage(&self) -> Result<(), DiskError> {
        let mut staging = lock(&self.staging);
        if staging.is_none() {
            let (bytes, tag, name) = (Staging::BYTES, Tag::Staging, "disk.staging");
            *staging = Some(Arc::new(match &self.backing {
                Some(backing) => Staging::of(backing.host.take(bytes, tag, name)?),
                None => Staging::dry(self.host.alloc(bytes, tag, name)?),
            }));
        }
        Ok(())
    }

    /// Begins to move the bytes of a buffer between these tiers and the device, behind the moves that were asked for before
    /// in this direction. The stretches are in the order of the buffer, from its first whole page on. `None` where nothing is
    /// behind the homes.
    pub fn begin(
        &self,
        direction: Direction,
        stretches: Vec<Stretch>,
        memory: BufferMemory,
    ) -> Option<Moving> {
        let staging = lock(&self.staging).clone();
        self.backing.as_ref().map(|backing| backing.streams.begin(staging, direction, stretches, memory))
    }

    /// Waits until every move out of a buffer that is used again since is done.
    ///
    /// # Errors
    /// One of them failed.
    pub fn settle(&self) -> Result<(), DiskError> {
        self.backing.as_ref().map_or(Ok(()), |backing| backing.streams.settle())
    }

    /// Labels what is taken from now on with a phase and a layer.
    pub fn enter(&self, phase: Phase, layer: Option<u32>) {
        self.host.enter(phase, layer);
        self.disk.enter(phase, layer);
    }

    /// What lives on the host.
    pub fn host(&self) -> &Arena {
        &self.host
    }

    /// What lives on disk.
    pub fn disk(&self) -> &Arena {
        &self.disk
    }

    /// What was read and written so far, and how much of it was waited for.
    pub fn meter(&self) -> Option<IoMeter> {
        self.backing.as_ref().map(|backing| backing.engine.meter())
    }

    /// The first file, the spill file or one that is only read, that can only be used through the page cache.
    pub fn buffered_file(&self) -> Option<Arc<DiskFile>> {
        let Backing { spill, files, .. } = self.backing.as_ref()?;
        let files = lock(files);
        let mut all = spill.iter().map(SpillFile::file).chain(files.iter());
        all.find(|file| file.mode() == IoMode::Buffered).cloned()
    }

    /// A home of `bytes` bytes on a tier that is not the device.
    ///
    /// # Errors
    /// The tier is full.
    pub fn take(&self, tier: Tier, bytes: u64, tag: Tag, name: &'static str) -> Result<Home, DiskError> {
        let pages = bytes.max(1).checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        let place = match (tier, &self.backing) {
            (Tier::Host, Some(backing)) => HomeKind::Host(Mutex::new(backing.host.take(pages, tag, name)?)),
            (_, backing) => {
                let arena = if tier == Tier::Host { &self.host } else { &self.disk };
                let block = arena.alloc(pages, tag, name)?;
                let spill = backing.as_ref().and_then(|backing| backing.spill.as_ref());
                let file = spill.map(|spill| Arc::clone(spill.file()));
                HomeKind::Disk { file, start: block.offset(), taken: Some(block) }
            }
        };
        Ok(Home { place, tier, bytes })
    }

    /// A home that is there already: bytes of a file that is only read.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn adopt(&self, path: &Path, bytes: Range<u64>) -> Result<Home, DiskError> {
        let file = match &self.backing {
            None => None,
            Some(Backing { files, .. }) => {
                let mut files = lock(files);
                Some(match files.iter().find(|file| file.path() == path) {
                    Some(file) => Arc::clone(file),
                    None => {
                        let file = Arc::new(DiskFile::open(path, true)?);
                        files.push(Arc::clone(&file));
                        file
                    }
                })
            }
        };
        let length = bytes.end.saturating_sub(bytes.start);
        let place = HomeKind::Disk { file, start: bytes.start, taken: None };
        Ok(Home { tier: Tier::Disk, bytes: length, place })
    }

    /// Bytes `start..start + out.len()` of a home, now.
    pub fn read_now(&self, home: &Home, start: u64, out: &mut [u8]) -> Result<(), DiskError> {
        let mut pieces = [(home, start, out)];
        self.read_all_now(&mut pieces)
    }

    /// Parts of homes, now, several at once where they are on disk.
    pub fn read_all_now(&self, parts: &mut [(&Home, u64, &mut [u8])]) -> Result<(), DiskError> {
        let Some(Backing { engine, .. }) = &self.backing else { return Err(DiskError::Stopped) };
        let longest = parts.iter().map(|(.., out)| out.len()).max().unwrap_or(0);
        let mut on_disk = Vec::new();
        for (home, start, out) in parts {
            if let Some(memory) = home.on_host() {
                let memory = lock(memory);
                let begin = usize::try_from(*start).unwrap_or(usize::MAX);
                match memory.bytes().get(begin..begin.saturating_add(out.len())) {
                    Some(bytes) => out.copy_from_slice(bytes),
                    None => return Err(DiskError::Buffer { has: home.bytes, needed: *start }),
                }
                continue;
            }
            let Some((file, first)) = home.on_disk() else { return Err(DiskError::Stopped) };
            let from = first.saturating_add(*start);
            on_disk.push((file, from..from.saturating_add(out.len() as u64), &mut **out));
        }
        let buffers = BufferPool::new(AT_ONCE.min(on_disk.len()), longest as u64)?;
        engine.read_each(&buffers, on_disk)
    }

    /// Replaces bytes from `start`, a whole page's, on of a home, now.
    pub fn write_now(&self, home: &Home, start: u64, bytes: &[u8]) -> Result<(), DiskError> {
        if let Some(memory) = home.on_host() {
            let mut memory = lock(memory);
            let begin = usize::try_from(start).unwrap_or(usize::MAX);
            let needed = start.saturating_add(bytes.len() as u64);
            let has = home.bytes;
            let out = memory.bytes_mut().get_mut(begin..begin.saturating_add(bytes.len()));
            out.ok_or(DiskError::Buffer { has, needed })?.copy_from_slice(bytes);
            return Ok(());
        }
        let place = home.on_disk().filter(|_| !home.is_in_file());
        let (Some(Backing { engine, .. }), Some((file, first))) = (&self.backing, place) else {
            return Err(DiskError::Stopped);
        };
        let mut region = Region::new((bytes.len() as u64).next_multiple_of(ALIGNMENT))?;
        if let Some(out) = region.bytes_mut().get_mut(..bytes.len()) {
            out.copy_from_slice(bytes);
        }
        let offset = first.saturating_add(start);
        engine.write_back(file, offset, bytes.len() as u64, region).wait().outcome?;
        Ok(())
    }
}

/// Small reads under way at once.
const AT_ONCE: usize = 16;

/// Between a part of a home on the host and a buffer's bytes from a place on.
fn copy(
    memory: &mut Region,
    part: Range<u64>,
    (region, start): (&mut Region, usize),
    direction: Direction,
) -> Result<Range<usize>, DiskError> {
    let [first, last] = [part.start, part.end].map(|at| usize::try_from(at).unwrap_or(usize::MAX));
    let has = region.len().saturating_sub(start) as u64;
    let too_small = || DiskError::Buffer { has, needed: part.end - part.start };
    let end = start.saturating_add(last.saturating_sub(first));
    if direction == Direction::WriteBack {
        let from = region.bytes().get(start..end).ok_or_else(too_small)?;
        memory.bytes_mut().get_mut(first..last).ok_or_else(too_small)?.copy_from_slice(from);
    } else {
        let from = memory.bytes().get(first..last).ok_or_else(too_small)?;
        region.bytes_mut().get_mut(start..end).ok_or_else(too_small)?.copy_from_slice(from);
    }
    Ok(start..end)
}

#[cfg(test)]
mod tests;
