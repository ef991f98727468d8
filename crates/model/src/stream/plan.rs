//! From a model's files and the types of its weights to what can be streamed, and how it lies in a buffer.

use std::path::{Path, PathBuf};

use plimsoll_device::{DType, PIECE_ROWS};
use plimsoll_disk::{ALIGNMENT, EngineSettings, pages};

use super::spill::ROW_BUFFERS;
use super::{Source, StagedBlock, StagedTensor, Staging};
use crate::parameters::{BlockId, Parameter, Role};
use crate::source::WeightSource;
use crate::spec::ModelSpec;

/// What lies between two weights of a block and is not longer than this is read with them.
const GAP: u64 = 64 << 10;

/// Everything of a model that can be streamed.
#[derive(Clone, Debug)]
pub struct StreamPlan {
    pub(super) files: Vec<PathBuf>,
    pub(super) blocks: Vec<PlannedBlock>,
    /// The token embedding, of which rows are read.
    pub(super) table: Option<PlannedTable>,
    tied: bool,
    layers: u32,
}

/// A block and where its parts come from.
#[derive(Clone, Debug)]
pub(super) struct PlannedBlock {
    pub staged: StagedBlock,
    /// In the order of the buffer, each in pages of its own. Of the spill file the bytes are those of the block's own
    /// part of it.
    pub parts: Vec<Source>,
    /// What is written into the spill file, and where in the block's own part.
    pub spilled: Vec<(Parameter, DType, u64)>,
    pub spilled_bytes: u64,
}

/// A table and where it is.
#[derive(Clone, Debug)]
pub(super) struct PlannedTable {
    pub parameter: Parameter,
    pub dtype: DType,
    /// `None` where it is to be spilled.
    pub source: Option<Source>,
}

impl StreamPlan {
    /// What can be streamed of a model whose weights have the types that `types` says. `changed` are weights that are
    /// not what the files say.
    pub fn new(
        spec: &ModelSpec,
        weights: &WeightSource,
        types: &dyn Fn(&Parameter) -> DType,
        changed: &dyn Fn(&Parameter) -> bool,
    ) -> StreamPlan {
        let mut files: Vec<PathBuf> = Vec::new();
        let mut stored = |p: &Parameter, dtype: DType| {
            let (path, bytes) = weights.stored_as(p, dtype).filter(|_| !changed(p))?;
            let aligned = bytes.start.is_multiple_of(dtype.alignment());
            aligned.then(|| Source { file: Some(index_of(&mut files, path)), bytes })
        };
        let mut blocks = Vec::new();
        let mut table = None;
        for block in spec.blocks() {
            let mut matrices: Vec<(Parameter, DType, Option<Source>)> = Vec::new();
            for p in spec.block_parameters(block) {
                if p.shape.len() == 2 && p.role != Role::PositionEmbedding {
                    let dtype = types(&p);
                    let source = stored(&p, dtype);
                    matrices.push((p, dtype, source));
                }
            }
            if block == BlockId::Embedding {
                let rows = |p: &Parameter, dtype: DType| {
                    let columns = p.columns();
                    dtype.has_rows() && columns.is_multiple_of(dtype.block_elements())
                };
                let found = matrices.iter().find(|(p, dtype, _)| rows(p, *dtype)).cloned();
                table = found.map(|(parameter, dtype, source)| PlannedTable { parameter, dtype, source });
                if !spec.tie_word_embeddings || table.is_none() {
                    continue;
                }
            }
            if !matrices.is_empty() {
                blocks.push(PlannedBlock::new(block, matrices));
            }
        }
        let layer = |planned: &&PlannedBlock| matches!(planned.staged.block, BlockId::Layer(_));
        let largest = blocks.iter().filter(layer).map(|planned| planned.staged.bytes).max().unwrap_or(0);
        let blocks = blocks.into_iter().flat_map(|planned| planned.in_pieces(largest)).collect();
        StreamPlan { files, blocks, table, tied: spec.tie_word_embeddings, layers: spec.num_layers }
    }

    /// The staging in which `resident` layers, spread evenly, and perhaps the head, stay in memory.
    pub fn staging(&self, resident: u32, resident_head: bool, buffers: usize) -> Staging {
        let layers = u64::from(self.layers.max(1));
        let kept = u64::from(resident.min(self.layers));
        // Layer i stays where the line of slope kept / layers reaches a further whole number.
        let stays = |layer: u32| (u64::from(layer) + 1) * kept / layers > u64::from(layer) * kept / layers;
        let streamed = |block: BlockId| match block {
            BlockId::Layer(layer) => !stays(layer),
            BlockId::Embedding | BlockId::Head => !resident_head,
        };
        let blocks: Vec<StagedBlock> =
            self.blocks.iter().map(|b| &b.staged).filter(|b| streamed(b.block)).cloned().collect();
        let buffers = buffers.min(blocks.len());
        // A tied table that stays in memory as the head is looked up there.
        let tables = self.table.iter().filter(|_| !(self.tied && resident_head));
        let tables = tables.map(|table| (table.parameter.clone(), table.dtype)).collect();
        Staging { blocks, tables, buffers }
    }

    /// Memory that streaming takes at most, beside the buffers of a staging.
    pub fn overhead_bytes(&self) -> u64 {
        let columns = |table: &PlannedTable| table.parameter.columns();
        let row = self.table.as_ref().and_then(|table| table.dtype.bytes_for(columns(table))).unwrap_or(0);
        let rows = row.saturating_add(2 * ALIGNMENT).saturating_mul(ROW_BUFFERS as u64);
        EngineSettings::default().memory_bytes().saturating_add(rows)
    }

    /// Layers of the model.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Bytes of the spill file that a staging needs.
    pub fn spill_bytes(&self, staging: &Staging) -> u64 {
        let blocks: u64 = self.chosen(staging).map(|block| block.spilled_bytes).sum();
        let table = match &self.table {
            Some(PlannedTable { parameter, dtype, source: None })
                if !self.tied && staging.holds(parameter.block, parameter.role) =>
            {
                dtype.bytes_for(parameter.elements()).unwrap_or(0).next_multiple_of(ALIGNMENT)
            }
            _ => 0,
        };
        blocks + table
    }

    /// The blocks of a staging.
    pub(super) fn chosen(&self, staging: &Staging) -> impl Iterator<Item = &PlannedBlock> {
        let streamed =
            |planned: &&PlannedBlock| staging.blocks.iter().any(|b| b.key() == planned.staged.key());
        self.blocks.iter().filter(streamed)
    }
}

impl PlannedBlock {
    /// A table that is in a file as it is needed, in pieces of about as many bytes: it is no larger a thing than a layer
    /// then. Everything else as it is.
    fn in_pieces(self, bytes: u64) -> Vec<PlannedBlock> {
        let (BlockId::Embedding | BlockId::Head, [part], [tensor]) =
            (self.staged.block, &self.parts[..], &self.staged.tensors[..])
        else {
            return vec![self];
        };
        let StagedTensor { parameter, dtype, .. } = tensor;
        let [rows, columns] = parameter.shape[..] else { return vec![self] };
        let Some(row) = dtype.bytes_for(columns).filter(|row| *row > 0) else { return vec![self] };
        let most = (bytes / row / PIECE_ROWS * PIECE_ROWS).max(PIECE_ROWS);
        let cut = part.file.is_some() && dtype.has_rows() && columns.is_multiple_of(dtype.block_elements());
        if !cut || rows <= most {
            return vec![self];
        }
        let piece = |(piece, first_row): (u32, u64)| {
            let end = rows.min(first_row + most);
            let start = part.bytes.start + first_row * row;
            let bytes = start..part.bytes.start + end * row;
            let pages = pages(&bytes);
            let parameter = Parameter { shape: vec![end - first_row, columns], ..parameter.clone() };
            let tensors = vec![StagedTensor { parameter, dtype: *dtype, offset: start - pages.start }];
            let block = self.staged.block;
            let bytes_in_pages = pages.end - pages.start;
            PlannedBlock {
                staged: StagedBlock { block, piece, first_row, bytes: bytes_in_pages, tensors },
                parts: vec![Source { file: part.file, bytes }],
                spilled: Vec::new(),
                spilled_bytes: 0,
            }
        };
        (0..).zip((0..rows).step_by(usize::try_from(most).unwrap_or(usize::MAX))).map(piece).collect()
    }

    fn new(block: BlockId, matrices: Vec<(Parameter, DType, Option<Source>)>) -> PlannedBlock {
        let mut direct: Vec<(Parameter, DType, Source)> = Vec::new();
        let (mut spilled, mut spilled_bytes) = (Vec::new(), 0);
        for (parameter, dtype, source) in matrices {
            match source {
                Some(source) => direct.push((parameter, dtype, source)),
                None => {
                    // Each begins on a page, so that it can be written by itself.
                    let bytes = dtype.bytes_for(parameter.elements()).unwrap_or(0);
                    spilled.push((parameter, dtype, spilled_bytes));
                    spilled_bytes += bytes.next_multiple_of(ALIGNMENT);
                }
            }
        }
        direct.sort_by_key(|(_, _, source)| (source.file, source.bytes.start));
        let mut parts: Vec<Source> = Vec::new();
        for (_, _, source) in &direct {
            match parts.last_mut() {
                Some(last) if last.file == source.file && source.bytes.start <= last.bytes.end + GAP => {
                    last.bytes.end = last.bytes.end.max(source.bytes.end);
                }
                _ => parts.push(source.clone()),
            }
        }
        if spilled_bytes > 0 {
            parts.push(Source { file: None, bytes: 0..spilled_bytes });
        }
        let mut starts = Vec::new();
        let mut bytes = 0;
        for part in &parts {
            starts.push(bytes);
            let pages = pages(&part.bytes);
            bytes += pages.end - pages.start;
        }
        let place = |file: Option<usize>, start: u64| {
            let holds = |part: &Source| part.file == file && part.bytes.contains(&start);
            let found = parts.iter().zip(&starts).find(|(part, _)| holds(part));
            found.map_or(0, |(part, at)| at + start - pages(&part.bytes).start)
        };
        let mut tensors: Vec<StagedTensor> = direct
            .into_iter()
            .map(|(parameter, dtype, source)| {
                let offset = place(source.file, source.bytes.start);
                StagedTensor { parameter, dtype, offset }
            })
            .collect();
        tensors.extend(spilled.iter().map(|(parameter, dtype, start)| {
            let offset = place(None, *start);
            StagedTensor { parameter: parameter.clone(), dtype: *dtype, offset }
        }));
        let staged = StagedBlock { block, piece: 0, first_row: 0, bytes, tensors };
        PlannedBlock { staged, parts, spilled, spilled_bytes }
    }
}

fn index_of(files: &mut Vec<PathBuf>, path: &Path) -> usize {
    files.iter().position(|file| file == path).unwrap_or_else(|| {
        files.push(path.to_owned());
        files.len() - 1
    })
}
