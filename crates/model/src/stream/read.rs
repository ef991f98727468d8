//! An open stream: blocks are read into memory that is handed over, and rows of a table into the caller's.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use plimsoll_disk::{
    ALIGNMENT, BufferPool, DiskEngine, DiskError, DiskFile, Finished, IoMeter, IoMode, SpillFile, Ticket,
    pages,
};
use plimsoll_memory::Region;

use super::{StagedKey, WeightReader};
use crate::parameters::Role;

/// Staged weights of a model, open to be read.
#[derive(Debug)]
pub struct WeightStream {
    engine: DiskEngine,
    files: Vec<Arc<DiskFile>>,
    spill: Option<SpillFile>,
    blocks: HashMap<StagedKey, OpenBlock>,
    table: Option<OpenTable>,
    /// For rows of the table.
    rows: BufferPool,
    under_way: HashMap<StagedKey, UnderWay>,
}

/// A block in its files.
#[derive(Debug)]
pub(super) struct OpenBlock {
    pub bytes: u64,
    pub parts: Vec<Part>,
}

/// Neighbouring bytes of a file.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub file: Arc<DiskFile>,
    pub bytes: Range<u64>,
}

/// A table in its file.
#[derive(Debug)]
pub(super) struct OpenTable {
    pub role: Role,
    pub part: Part,
    pub row_bytes: u64,
}

/// A block that is being read, and what is left of its memory before and behind it.
#[derive(Debug)]
struct UnderWay {
    before: Region,
    parts: Vec<Ticket>,
    after: Region,
    error: Option<DiskError>,
}

impl WeightStream {
    pub(super) fn new(
        engine: DiskEngine,
        files: Vec<Arc<DiskFile>>,
        spill: Option<SpillFile>,
        blocks: HashMap<StagedKey, OpenBlock>,
        table: Option<OpenTable>,
        rows: BufferPool,
    ) -> WeightStream {
        WeightStream { engine, files, spill, blocks, table, rows, under_way: HashMap::new() }
    }

    /// What was read so far, and how much of it was waited for; good for as long as anybody has it.
    pub fn meter(&self) -> IoMeter {
        self.engine.meter()
    }

    /// The first file that can only be read through the page cache, if there is one.
    pub fn buffered_file(&self) -> Option<&Path> {
        let spill = self.spill.iter().map(SpillFile::file);
        let buffered = |file: &&Arc<DiskFile>| file.mode() == IoMode::Buffered;
        self.files.iter().chain(spill).find(buffered).map(|file| file.path())
    }

    /// The spill file, if one was needed.
    pub fn spill(&self) -> Option<&SpillFile> {
        self.spill.as_ref()
    }

    /// Memory of its own, beside that which is handed to it.
    pub fn buffer_bytes(&self) -> u64 {
        self.rows.bytes()
    }
}

impl WeightReader for WeightStream {
    fn begin(&mut self, key: StagedKey, memory: Region) {
        let (before, rest) = {
            let skip = memory.skip_to(ALIGNMENT as usize);
            memory.split_at(skip)
        };
        let mut under_way =
            UnderWay { before, parts: Vec::new(), after: rest, error: Some(DiskError::Stopped) };
        if let Some(open) = self.blocks.get(&key) {
            under_way.error = None;
            let (has, needed) = (under_way.after.len() as u64, open.bytes);
            if has < needed {
                under_way.error = Some(DiskError::Buffer { has, needed });
            } else {
                for part in &open.parts {
                    let pages = pages(&part.bytes);
                    // The parts' pages together are the block's bytes, which the memory holds.
                    let (own, after) = under_way.after.split_at((pages.end - pages.start) as usize);
                    under_way.after = after;
                    under_way.parts.push(self.engine.prefetch(&part.file, part.bytes.clone(), own));
                }
            }
        }
        self.under_way.insert(key, under_way);
    }

    fn finish(&mut self, key: StagedKey) -> Option<(Region, Result<(), DiskError>)> {
        let UnderWay { before, parts, after, mut error } = self.under_way.remove(&key)?;
        let join = |whole: Region, part| whole.join(part).unwrap_or_else(|(whole, _)| whole);
        let mut whole = before;
        for ticket in parts {
            let Finished { region, outcome } = ticket.wait();
            whole = join(whole, region);
            if let Err(failed) = outcome {
                error.get_or_insert(failed);
            }
        }
        Some((join(whole, after), error.map_or(Ok(()), Err)))
    }

    fn read_rows(&mut self, table: Role, rows: &[u32], out: &mut [u8]) -> Result<(), DiskError> {
        let Some(OpenTable { part, row_bytes, .. }) = self.table.as_ref().filter(|t| t.role == table) else {
            return Err(DiskError::Stopped);
        };
        let place = |row: u32| {
            let start = part.bytes.start.saturating_add(u64::from(row).saturating_mul(*row_bytes));
            start..start.saturating_add(*row_bytes)
        };
        if let Some(row) = rows.iter().find(|row| place(**row).end > part.bytes.end) {
            let (path, length) = (part.file.path().to_owned(), part.bytes.end);
            let Range { start, end } = place(*row);
            return Err(DiskError::EndOfFile { path, length, start, end });
        }
        let out = out.chunks_exact_mut(usize::try_from(*row_bytes).unwrap_or(usize::MAX).max(1));
        let parts = rows.iter().zip(out).map(|(row, out)| (&part.file, place(*row), out));
        self.engine.read_each(&self.rows, parts)
    }
}
