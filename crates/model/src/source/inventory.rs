//! The tensors of a model's files, matched with the parameters of its shape.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_device::DType;
use plimsoll_memory::FileMap;

use super::packed::Packed;
use super::rows::Offsets;
use super::{ModelError, NameList, PackedRows, Places, RowOrder, StoredAt, WeightSource};
use crate::layout::{StoredPart, StoredTensor};
use crate::parameters::{BlockId, Parameter};
use crate::spec::ModelSpec;

/// Tensors that are missing, after which no more are looked for.
const ENOUGH_MISSING: u64 = 1 << 20;

/// A tensor that may hold parameters.
pub(super) struct Candidate {
    /// Its name in its file.
    pub tensor: String,
    pub file: usize,
    pub bytes: Range<usize>,
    /// Its type, or the name of one that no weight can have.
    pub dtype: Result<DType, &'static str>,
    pub shape: Vec<u64>,
    /// Where it is packed in several tensors, how; file and bytes are then those of one of them.
    pub packed: Option<Packed>,
}

/// The tensors, by the name that the layout gives them.
pub(super) struct Inventory {
    path: PathBuf,
    shape_from: String,
    candidates: HashMap<String, Candidate>,
}

impl Inventory {
    /// Of the model at `path`; `shape_from` says where its shape was told.
    pub(super) fn new(path: &Path, shape_from: String) -> Inventory {
        Inventory { path: path.to_owned(), shape_from, candidates: HashMap::new() }
    }

    pub(super) fn add(&mut self, name: String, candidate: Candidate) {
        self.candidates.insert(name, candidate);
    }

    /// All parameters' places, once none is missing, none is left over, and all have the right shape and type.
    /// `layout` says what the files store of a block.
    ///
    /// The shape may claim more layers than the files have tensors, so nothing here grows with it.
    pub(super) fn match_with(
        mut self,
        spec: &ModelSpec,
        layout: fn(&ModelSpec, BlockId) -> Vec<StoredTensor>,
        files: Vec<FileMap>,
    ) -> Result<WeightSource, ModelError> {
        let mut places: HashMap<String, Places> = HashMap::new();
        let mut missing = NameList::default();
        for stored in spec.blocks().flat_map(|block| layout(spec, block)) {
            if missing.count > ENOUGH_MISSING {
                break;
            }
            let Some(candidate) = self.candidates.remove(&stored.name) else {
                missing.push(stored.name);
                continue;
            };
            let Candidate { tensor, file, bytes, dtype, shape, packed } = candidate;
            let path = || files.get(file).map_or(&*self.path, FileMap::path).to_owned();
            if shape != stored.shape() {
                let (found, expected) = (shape, stored.shape());
                let shape_from = self.shape_from;
                return Err(ModelError::Shape { path: path(), tensor, found, expected, shape_from });
            }
            let packed = packed.map(Arc::new);
            let is_turned = matches!(stored.rows, RowOrder::Transposed { .. });
            let fits = |packed: &Packed| match packed.keeps_rows() {
                true => is_turned,
                false => stored.rows == RowOrder::Natural,
            };
            if packed.as_deref().is_some_and(|packed| !fits(packed)) {
                let (path, reason) =
                    (path(), "is packed, which is not supported where matrices are transposed".into());
                return Err(ModelError::Packed { path, tensor, reason });
            }
            let dtype = dtype.map_err(|stored| ModelError::StoredType { path: path(), tensor, stored })?;
            for (parameter, place) in parts(stored, file, bytes, dtype, packed) {
                let new = || Places { shape: parameter.shape, parts: Vec::new() };
                places.entry(parameter.name).or_insert_with(new).parts.push(place);
            }
        }
        let mut left_over: Vec<String> = self.candidates.into_values().map(|c| c.tensor).collect();
        left_over.sort_unstable();
        let mut unexpected = NameList::default();
        left_over.into_iter().for_each(|name| unexpected.push(name));

        let (path, shape_from) = (self.path, self.shape_from);
        if missing.count > 0 {
            return Err(ModelError::MissingTensors { path, tensors: missing, shape_from });
        }
        if unexpected.count > 0 {
            return Err(ModelError::UnexpectedTensors { path, tensors: unexpected, shape_from });
        }
        for place in places.values_mut() {
            place.parts.sort_by_key(|part| part.first);
        }
        Ok(WeightSource { path, files, places, offsets: Offsets::default() })
    }
}

/// The place of every part of a stored tensor.
fn parts(
    stored: StoredTensor,
    file: usize,
    bytes: Range<usize>,
    dtype: DType,
    packed: Option<Arc<Packed>>,
) -> impl Iterator<Item = (Parameter, StoredAt)> {
    let row_bytes = bytes.len() / stored.total_rows().max(1) as usize;
    let mut in_columns = stored.columns_of_parts().unwrap_or_default().into_iter();
    let StoredTensor { parts, rows, plus_one, .. } = stored;
    let mut before = 0;
    parts.into_iter().map(move |StoredPart { parameter, rows: own }| {
        let (first, count, columns) = (own.start, own.end - own.start, parameter.columns());
        let in_columns = in_columns.next();
        let packed = packed.clone().map(|matrix| match in_columns {
            // Packed the other way round: columns are rows.
            Some(own) => {
                let first = own.matrix * own.total + own.first;
                PackedRows { matrix, first: first as usize, step: own.step as usize }
            }
            None => PackedRows { matrix, first: before as usize, step: 1 },
        });
        let (bytes, rows) = match (in_columns, rows) {
            _ if packed.is_some() => (bytes.clone(), RowOrder::Natural),
            // Columns lie all over their matrix.
            (Some(own), rows) => {
                let length = dtype.bytes_for(own.matrix_elements()).unwrap_or(0) as usize;
                let start = bytes.start + own.matrix as usize * length;
                let rows = match rows {
                    RowOrder::Alternating { of, .. } => RowOrder::Alternating { of, first: own.first },
                    _ => RowOrder::Transposed { total: own.total, first: own.first, step: own.step },
                };
                (start..start + length, rows)
            }
            (None, other) => {
                let start = bytes.start + before as usize * row_bytes;
                (start..start + count as usize * row_bytes, other)
            }
        };
        before += count;
        (parameter, StoredAt { file, bytes, dtype, first, count, columns, rows, plus_one, packed })
    })
}
