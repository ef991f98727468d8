//! A model's files, whatever their format: its shape, and its weights read into the caller's memory.
//!
//! [`ModelFiles::open`] takes a Hugging Face folder, a single `.safetensors` file with its `config.json` beside it,
//! or a GGUF file. Everything that can be wrong with the files is found when they are opened; reading a parameter
//! afterwards converts it run by run from the memory map straight into the caller's bytes, and gives the file's
//! pages back to the system as it goes.

mod error;
mod inventory;
mod open;
mod packed;
mod read;
pub(crate) mod rows;
mod tokenizer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::four_bit::FourBit;
use plimsoll_memory::FileMap;

pub use error::{ModelError, NameList};

use crate::parameters::{BlockId, Parameter, ParameterKind, Role};
use crate::spec::ModelSpec;
use packed::Packed;

/// How a model is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One safetensors file or several, with a `config.json`.
    Safetensors,
    /// A GGUF file.
    Gguf,
}

/// The order of a stored matrix's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As the parameter has them.
    Natural,
    /// In every head of `head_dim` rows, row `2 i + a` holds the parameter's row `a * head_dim / 2 + i`.
    Interleaved {
        /// Rows of a head.
        head_dim: u64,
    },
    /// As columns `first..` of a matrix of `total` columns: `[in, out]` instead of `[out, in]`.
    Transposed {
        /// Columns of the stored matrix.
        total: u64,
        /// The column that is the parameter's first row.
        first: u64,
        /// Columns from a row to the next: more than 1 where parameters have columns by turns.
        step: u64,
    },
    /// Elements `first`, `first + of` and so on of a row: those of `of` parameters by turns.
    Alternating {
        /// How many have elements by turns.
        of: u64,
        /// The element that is the parameter's first.
        first: u64,
    },
}

impl RowOrder {
    /// Where the parameter's row is stored, as a row or as a column.
    pub fn stored_row(self, row: u64) -> u64 {
        match self {
            RowOrder::Natural | RowOrder::Alternating { .. } => row,
            RowOrder::Transposed { first, step, .. } => first + row * step,
            RowOrder::Interleaved { head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (within % half) + within / half
            }
        }
    }
}

/// A parameter as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct StoredView<'a> {
    /// Its bytes, little-endian, aligned to nothing.
    pub bytes: &'a [u8],
    /// Their type.
    pub dtype: DType,
    /// The order of its rows.
    pub rows: RowOrder,
    /// Whether 1 + the parameter is stored.
    pub plus_one: bool,
}

/// A parameter's bytes in a file, just as they are computed with.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredWeight {
    /// The file.
    pub path: PathBuf,
    /// Where in it.
    pub bytes: Range<u64>,
    /// Their type.
    pub dtype: DType,
}

/// What files hold of a model as it is computed with.
pub type StoredWeights = HashMap<(BlockId, Role), StoredWeight>;

/// Where rows of a parameter are stored: in one place all of them, but where each expert's matrix is a tensor of its own.
#[derive(Debug)]
struct StoredAt {
    file: usize,
    bytes: Range<usize>,
    dtype: DType,
    /// The parameter's row that is the first here.
    first: u64,
    count: u64,
    columns: u64,
    rows: RowOrder,
    /// Whether 1 + the parameter is stored.
    plus_one: bool,
    /// Where it is packed in several tensors: `bytes` are those of its codes.
    packed: Option<PackedRows>,
}

/// Rows of a packed matrix: every `step`-th, from `first` on.
#[derive(Clone, Debug)]
struct PackedRows {
    matrix: Arc<Packed>,
    first: usize,
    step: usize,
}

impl PackedRows {
    /// The runs of the matrix's rows that some of these are.
    fn runs(&self, rows: Range<u64>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (first, step) = (self.first, self.step.max(1));
        let (start, end) = (rows.start as usize, rows.end as usize);
        let each = if step == 1 { end.saturating_sub(start).max(1) } else { 1 };
        (start..end).step_by(each).map(move |row| {
            let at = first + row * step;
            at..at + each
        })
    }

    /// Gives the pages that some of these rows lie within back to the system, where rows are stored as they are.
    fn release(&self, files: &[FileMap], rows: Range<u64>) {
        let at = |row: u64| self.first + row as usize * self.step.max(1);
        if let Some(last) = rows.end.checked_sub(1) {
            self.matrix.release_rows(files, at(rows.start)..at(last) + 1);
        }
    }
}

impl StoredAt {
    fn elements(&self) -> u64 {
        self.count * self.columns
    }

    /// Its rows, by their numbers in the parameter.
    fn own_rows(&self) -> Range<u64> {
        self.first..self.first + self.count
    }

    /// Whether a packed matrix is this parameter's alone, so that it can be kept as it is.
    fn is_whole(&self, packed: &PackedRows) -> bool {
        packed.matrix.rows as u64 == self.count
    }

    /// Whether its bytes are those that are computed with.
    fn is_as_it_is(&self, dtype: DType) -> bool {
        self.dtype == dtype
            && self.packed.is_none()
            && self.rows == RowOrder::Natural
            && !self.plus_one
            && (dtype.is_block() || cfg!(target_endian = "little"))
    }
}

/// A parameter's places, in the order of its rows, which they have all of.
#[derive(Debug)]
struct Places {
    shape: Vec<u64>,
    parts: Vec<StoredAt>,
}

impl Places {
    /// Whether blocks of a part lie across its rows, so that only its values can be had.
    fn has_turned_blocks(&self) -> bool {
        let turned =
            |part: &StoredAt| matches!(part.rows, RowOrder::Transposed { .. }) && part.dtype.is_block();
        self.parts.iter().any(turned)
    }

    /// The type that holds all of it without loss, and that parts can be put together in: f32 where there is no other.
    fn dtype(&self) -> DType {
        let Some(first) = self.parts.first().filter(|_| !self.has_turned_blocks()) else { return DType::F32 };
        let dtype = first.dtype;
        let fits = |dtype: DType| {
            let run = dtype.run_elements();
            self.parts.iter().all(|part| part.elements().is_multiple_of(run))
        };
        match FourBit::of(dtype).map(|kind| kind.dtype(false)) {
            _ if self.parts.iter().any(|part| part.dtype != dtype) => DType::F32,
            _ if self.parts.len() == 1 || fits(dtype) => dtype,
            Some(single) if fits(single) => single,
            _ => DType::F32,
        }
    }

    /// The only place.
    fn single(&self) -> Option<&StoredAt> {
        match &self.parts[..] {
            [one] => Some(one),
            _ => None,
        }
    }

    /// The parts that some rows are in, each with those of the rows that it has.
    fn of_rows(&self, rows: Range<u64>) -> impl Iterator<Item = (&StoredAt, Range<u64>)> {
        let own = move |part: &StoredAt| rows.start.max(part.first)..rows.end.min(part.first + part.count);
        self.parts.iter().map(move |part| (part, own(part))).filter(|(_, rows)| rows.start < rows.end)
    }
}

/// The weights of a model that was opened: every parameter of its shape is there, in that parameter's shape.
#[derive(Debug)]
pub struct WeightSource {
    path: PathBuf,
    files: Vec<FileMap>,
    places: HashMap<String, Places>,
    offsets: rows::Offsets,
}

/// An opened model.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    format: Format,
    spec: ModelSpec,
    weights: WeightSource,
}

impl ModelFiles {
    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How the model is stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The weights.
    pub fn weights(&self) -> &WeightSource {
        &self.weights
    }
}

impl WeightSource {
    /// The files that have the weights.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(FileMap::path)
    }

    /// How a parameter is stored.
    pub fn stored_dtype(&self, parameter: &Parameter) -> Result<DType, ModelError> {
        Ok(self.place(parameter)?.dtype())
    }

    /// The type in which a parameter is best kept to be computed with and not changed: a matrix as it is stored, so that
    /// no copy of it is converted, unless `widest` takes less room, and in bf16 where only its values can be had of what is stored;
    /// everything else as `widest`.
    pub fn inference_dtype(&self, parameter: &Parameter, widest: DType) -> DType {
        let cut = |part: &StoredAt| {
            part.packed.as_ref().is_some_and(|packed| !part.is_whole(packed) && !packed.matrix.keeps_rows())
        };
        let of_values =
            |part: &StoredAt| part.packed.as_ref().is_some_and(|packed| packed.matrix.dtype() == DType::F32);
        let stored = self.place(parameter).map(|place| {
            let any = |what: &dyn Fn(&StoredAt) -> bool| place.parts.iter().any(what);
            match (any(&cut), any(&of_values) || place.has_turned_blocks()) {
                // Codes of 8 bits and less times a factor: bf16 is nearer to them than they are to what was quantised.
                (_, true) => DType::Bf16,
                (true, false) => widest,
                (false, false) => place.dtype(),
            }
        });
        match stored {
            Ok(stored)
                if parameter.shape.len() >= 2
                    && parameter.role.kind() != ParameterKind::Bias
                    && stored != DType::U32 =>
            {
                let bytes = |dtype: DType| dtype.bytes_for(parameter.elements());
                if bytes(stored) <= bytes(widest) { stored } else { widest }
            }
            _ => widest,
        }
    }

    /// Where a file holds a parameter just as it is computed with in this type, if one does: neither converted, nor in
    /// another order, nor packed, nor in several places, and aligned so that it can be used where whole pages of the file are
    /// read to.
    pub fn stored_as(&self, parameter: &Parameter, dtype: DType) -> Option<StoredWeight> {
        self.stored_rows_as(parameter, parameter.all_rows(), dtype)
    }

    /// The same of some rows, which may be those of one expert in a stack.
    pub fn stored_rows_as(
        &self,
        parameter: &Parameter,
        rows: Range<u64>,
        dtype: DType,
    ) -> Option<StoredWeight> {
        let place = self.place(parameter).ok()?;
        let (part, own) = place.of_rows(rows.clone()).next()?;
        if own != rows || !part.is_as_it_is(dtype) {
            return None;
        }
        // Rows can be had by themselves where they are whole runs, all of them in any case.
        let before = dtype.bytes_for((rows.start - part.first) * part.columns)?;
        let length = dtype.bytes_for((rows.end - rows.start) * part.columns)?;
        let whole = rows == part.own_rows();
        if !whole && !part.columns.is_multiple_of(dtype.run_elements()) {
            return None;
        }
        let start = part.bytes.start as u64 + before;
        let file = self.files.get(part.file).filter(|_| start.is_multiple_of(dtype.alignment()))?;
        Some(StoredWeight { path: file.path().to_owned(), bytes: start..start + length, dtype })
    }

    /// The folder or file that they are in.
    pub(crate) fn folder_or_file(&self) -> &Path {
        &self.path
    }

    /// Bytes of all parameters as stored.
    pub fn stored_bytes(&self) -> u64 {
        let bytes = |place: &StoredAt| match &place.packed {
            None => place.bytes.len() as u64,
            Some(packed) if packed.first == 0 => packed.matrix.stored_bytes(),
            Some(_) => 0,
        };
        self.places.values().flat_map(|places| &places.parts).map(bytes).sum()
    }

    /// A parameter as stored, if it is one tensor. Its pages stay in memory after they are read until [`WeightSource::release`].
    pub fn view(&self, parameter: &Parameter) -> Result<StoredView<'_>, ModelError> {
        let place = self.place(parameter)?;
        match place.single().filter(|place| place.packed.is_none()) {
            Some(part) => {
                let StoredAt { dtype, rows, plus_one, .. } = *part;
                Ok(StoredView { bytes: self.bytes(part), dtype, rows, plus_one })
            }
            None => Err(ModelError::Packed {
                path: self.path.clone(),
                tensor: parameter.name.clone(),
                reason: "is in several tensors and has no view; read it instead".to_owned(),
            }),
        }
    }

    /// Gives a parameter's pages in the file back to the system; they can be read again.
    pub fn release(&self, parameter: &Parameter) -> Result<(), ModelError> {
        self.place(parameter)?.parts.iter().for_each(|part| self.release_part(part));
        Ok(())
    }

    /// The same of one of its places.
    fn release_part(&self, part: &StoredAt) {
        match (&part.packed, self.files.get(part.file)) {
            (Some(packed), _) => packed.matrix.release(&self.files),
            (None, Some(file)) => file.release(part.bytes.clone()),
            (None, None) => {}
        }
    }

    /// Gives all pages of the files back to the system: a system that maps them in large pieces keeps more of what was
    /// read in memory than was asked for.
    pub fn release_all(&self) {
        self.files.iter().for_each(FileMap::release_all);
    }

    fn bytes(&self, place: &StoredAt) -> &[u8] {
        self.files.get(place.file).and_then(|file| file.bytes().get(place.bytes.clone())).unwrap_or_default()
    }

    /// Whether the files have a parameter of that name and shape.
    pub(crate) fn has(&self, parameter: &Parameter) -> bool {
        self.place(parameter).is_ok()
    }

    /// The parameter's places, if it is one of the opened model's.
    fn place(&self, parameter: &Parameter) -> Result<&Places, ModelError> {
        self.places.get(&parameter.name).filter(|place| place.shape == parameter.shape).ok_or_else(|| {
            ModelError::NoSuchParameter {
                path: self.path.clone(),
                tensor: parameter.name.clone(),
                shape: parameter.shape.clone(),
            }
        })
    }
}
