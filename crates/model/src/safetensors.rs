//! The safetensors format: named tensors in a file, a JSON header before their bytes.
//!
//! [`SafetensorsFile`] reads one file through a memory map, [`SafetensorsSet`] a checkpoint of one or many,
//! [`write_tensors`] writes one by streaming. What the names mean is left to `source` and `save`.
//! Format: <https://huggingface.co/docs/safetensors>.

mod columns;
mod dtype;
mod error;
mod header;
mod pairs;
mod sharded;
mod write;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use plimsoll_memory::FileMap;

pub use dtype::StoredDType;
pub use error::{HeaderProblem, IndexProblem, SafetensorsError, TensorProblem};
pub use sharded::{INDEX_NAME, SINGLE_NAME, SafetensorsSet};
pub use write::{NewTensor, write_tensors};
pub(crate) use write::{Placed, Span, new_file_builder, sync_folder, write_in_order, write_placed};

/// A tensor in a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: StoredDType,
    /// Its sizes, the slowest first.
    pub shape: Vec<u64>,
    /// Its bytes in the file.
    pub bytes: Range<usize>,
}

/// One file, its header checked: every tensor lies inside the file, none overlaps another, and its bytes are just
/// what its type and shape need.
#[derive(Debug)]
pub struct SafetensorsFile {
    map: FileMap,
    metadata: Vec<(String, String)>,
    tensors: Vec<StoredTensor>,
    by_name: HashMap<String, usize>,
}

impl SafetensorsFile {
    /// Maps the file and checks its header.
    pub fn open(path: &Path) -> Result<SafetensorsFile, SafetensorsError> {
        let map =
            FileMap::open(path).map_err(|source| SafetensorsError::Io { path: path.to_owned(), source })?;
        let header = header::parse(path, map.bytes())?;
        map.release_all();
        let by_name = header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(SafetensorsFile { map, metadata: header.metadata, tensors: header.tensors, by_name })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// The header's free-form `__metadata__`.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// All tensors, in the order of their bytes.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(*self.by_name.get(name)?)
    }

    /// The bytes of that name's tensor: little-endian, not aligned to anything.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.map.bytes().get(self.tensor(name)?.bytes.clone())
    }

    /// Gives the memory of a tensor that was read back to the system; it can be read again.
    pub fn release(&self, tensor: &StoredTensor) {
        self.map.release(tensor.bytes.clone());
    }

    /// The file's map alone, for readers that keep their own list of tensors.
    pub(crate) fn into_map(self) -> FileMap {
        self.map
    }
}
