//! Opening a stream: the model's files, and a spill file with what they do not hold as it is computed with, written a
//! matrix at a time.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use plimsoll_device::DType;
use plimsoll_disk::{
    ALIGNMENT, BufferPool, DiskEngine, DiskError, DiskFile, EngineSettings, SpillFile, SpillSettings,
};
use plimsoll_memory::Region;

use super::plan::PlannedTable;
use super::read::{OpenBlock, OpenTable, Part, WeightStream};
use super::{Source, StagedKey, Staging, StreamPlan};
use crate::parameters::Parameter;

/// Rows of a table that are read at once.
pub(super) const ROW_BUFFERS: usize = 8;

impl WeightStream {
    /// Opens the files of a staging. What they do not hold as it is needed is written into a spill file as the settings
    /// say: `fill` writes the values of some rows of a parameter in the given type.
    ///
    /// # Errors
    /// A file cannot be opened, the disk or its budget is full, or `fill` fails.
    pub fn open<E: From<DiskError>>(
        plan: &StreamPlan,
        staging: &Staging,
        settings: &SpillSettings,
        mut fill: impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
    ) -> Result<WeightStream, E> {
        let engine = DiskEngine::start(EngineSettings::default())?;
        let open = |path: &PathBuf| DiskFile::open(path, settings.direct).map(Arc::new);
        let files = plan.files.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let mut spill = None;
        if plan.spill_bytes(staging) > 0 {
            spill = Some(SpillFile::create(settings)?);
        }
        let mut blocks = HashMap::new();
        for planned in plan.chosen(staging) {
            let own = match &spill {
                Some(spill) if planned.spilled_bytes > 0 => {
                    let own = spill.allocate(planned.spilled_bytes)?;
                    for (parameter, dtype, start) in &planned.spilled {
                        write(&engine, spill, own.start + start, parameter, *dtype, &mut fill)?;
                    }
                    own.start
                }
                _ => 0,
            };
            let parts = planned.parts.iter().filter_map(|source| match source.file {
                Some(file) => Some(Part { file: Arc::clone(files.get(file)?), bytes: source.bytes.clone() }),
                None => {
                    let bytes = own + source.bytes.start..own + source.bytes.end;
                    Some(Part { file: Arc::clone(spill.as_ref()?.file()), bytes })
                }
            });
            let block = OpenBlock { bytes: planned.staged.bytes, parts: parts.collect() };
            blocks.insert(planned.staged.key(), block);
        }
        let mut table = None;
        if let Some(PlannedTable { parameter, dtype, source }) = &plan.table
            && staging.holds(parameter.block, parameter.role)
        {
            let part = match source {
                Some(Source { file, bytes }) => file
                    .and_then(|file| files.get(file))
                    .map(|file| Part { file: Arc::clone(file), bytes: bytes.clone() }),
                None => table_in_spill(&engine, &spill, &blocks, plan, parameter, *dtype, &mut fill)?,
            };
            let columns = parameter.columns();
            let row_bytes = dtype.bytes_for(columns).unwrap_or(0);
            table = part.map(|part| OpenTable { role: parameter.role, part, row_bytes });
        }
        let rows = BufferPool::new(
            if table.is_some() { ROW_BUFFERS } else { 0 },
            table.as_ref().map_or(0, |table| table.row_bytes),
        )?;
        Ok(WeightStream::new(engine, files, spill, blocks, table, rows))
    }
}

/// The whole table in the spill file: with the block that it is staged in, or by itself.
fn table_in_spill<E: From<DiskError>>(
    engine: &DiskEngine,
    spill: &Option<SpillFile>,
    blocks: &HashMap<StagedKey, OpenBlock>,
    plan: &StreamPlan,
    parameter: &Parameter,
    dtype: DType,
    fill: &mut impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
) -> Result<Option<Part>, E> {
    let Some(spill) = spill else { return Ok(None) };
    let bytes = dtype.bytes_for(parameter.elements()).unwrap_or(0);
    let planned = plan.blocks.iter().find(|planned| planned.staged.block == parameter.block);
    let place = planned.and_then(|planned| {
        let (.., start) = planned.spilled.iter().find(|(p, ..)| p.role == parameter.role)?;
        let own = blocks.get(&(parameter.block, 0))?.parts.last()?;
        Some(own.bytes.start + start)
    });
    let start = match place {
        Some(start) => start,
        None => {
            let start = spill.allocate(bytes)?.start;
            write(engine, spill, start, parameter, dtype, fill)?;
            start
        }
    };
    Ok(Some(Part { file: Arc::clone(spill.file()), bytes: start..start + bytes }))
}

/// One matrix, or one part of a table after another, through memory that is given back at once: none of it is there when
/// the weights are used.
fn write<E: From<DiskError>>(
    engine: &DiskEngine,
    spill: &SpillFile,
    offset: u64,
    parameter: &Parameter,
    dtype: DType,
    fill: &mut impl FnMut(&Parameter, Range<u64>, DType, &mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut offset = offset;
    for rows in parameter.parts(dtype, ALIGNMENT) {
        let bytes = dtype.bytes_for((rows.end - rows.start) * parameter.columns()).unwrap_or(0);
        let mut memory = Region::new(bytes.next_multiple_of(ALIGNMENT)).map_err(DiskError::from)?;
        let start = memory.skip_to(ALIGNMENT as usize);
        let end = start.saturating_add(usize::try_from(bytes).unwrap_or(usize::MAX));
        let has = memory.len() as u64;
        let out = memory.bytes_mut().get_mut(start..end).ok_or(DiskError::Buffer { has, needed: bytes })?;
        fill(parameter, rows, dtype, out)?;
        engine.write_back(spill.file(), offset, bytes, memory).wait().outcome?;
        offset = offset.saturating_add(bytes);
    }
    Ok(())
}
