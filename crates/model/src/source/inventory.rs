//! The tensors of a model's files, matched with the parameters of its shape.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use plimsoll_device::DType;
use plimsoll_memory::FileMap;

use super::{ModelError, NameList, Place, RowOrder, WeightSource};
use crate::spec::ModelSpec;

/// A tensor that may be a parameter.
pub(super) struct Candidate {
    /// Its name in its file.
    pub tensor: String,
    pub file: usize,
    pub bytes: Range<usize>,
    /// Its type, or the name of one that no weight can have.
    pub dtype: Result<DType, &'static str>,
    pub shape: Vec<u64>,
    pub rows: RowOrder,
}

/// The tensors, by the name of the parameter that each would be.
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

    pub(super) fn add(&mut self, parameter: String, candidate: Candidate) {
        self.candidates.insert(parameter, candidate);
    }

    /// All parameters' places, once none is missing, none is left over, and all have the right shape and type.
    ///
    /// The shape may claim more layers than the files have tensors, so nothing here grows with it.
    pub(super) fn match_with(
        mut self,
        spec: &ModelSpec,
        files: Vec<FileMap>,
    ) -> Result<WeightSource, ModelError> {
        let mut places = HashMap::new();
        let mut missing = NameList::default();
        for parameter in spec.blocks().flat_map(|block| spec.block_parameters(block)) {
            let Some(candidate) = self.candidates.remove(&parameter.name) else {
                missing.push(parameter.name);
                continue;
            };
            let Candidate { tensor, file, bytes, dtype, shape, rows } = candidate;
            let path = || files.get(file).map_or(&*self.path, FileMap::path).to_owned();
            if shape != parameter.shape {
                let (found, expected) = (shape, parameter.shape);
                let shape_from = self.shape_from;
                return Err(ModelError::Shape { path: path(), tensor, found, expected, shape_from });
            }
            let dtype = dtype.map_err(|stored| ModelError::StoredType { path: path(), tensor, stored })?;
            places.insert(parameter.name, Place { file, bytes, dtype, shape, rows });
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
        Ok(WeightSource { path, files, places })
    }
}
