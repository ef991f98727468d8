//! The GGUF format, versions 2 and 3, through a memory map: metadata and tensor infos, all bounds checked.
//!
//! [`GgufFile`] knows the container alone; `families` and `layout` give metadata and tensor names their meaning, `tokenizer`
//! hands out the vocabulary. Decoding block types is left to `convert`.
//! Format: ggml's `docs/gguf.md`.

mod cursor;
mod describe;
mod error;
mod experts;
pub(crate) mod families;
mod layout;
mod metadata;
mod tensors;
mod write;

use std::collections::HashMap;
use std::path::Path;

use plimsoll_memory::FileMap;

pub(crate) use describe::{Description, describe, describe_tokenizer};
pub use error::{GgufError, GgufTensorProblem};
pub(crate) use layout::{KV_UP_HALVES, SHARED_ROUTER, WHOLE_KV_UP, gguf_block, gguf_block_with_whole_kv_up};
pub use metadata::{Metadata, MetadataEntry, Value, ValueType};
pub use tensors::GgufTensor;
pub use write::{GgufValue, NewGgufTensor, ggml_type, write_gguf};

use cursor::{Cursor, Reading};

const MAGIC: [u8; 4] = *b"GGUF";

/// A GGUF file, its header checked: every string and array lies inside the file, and so does every tensor, with
/// none overlapping another.
#[derive(Debug)]
pub struct GgufFile {
    map: FileMap,
    version: u32,
    entries: Vec<MetadataEntry>,
    by_key: HashMap<String, usize>,
    tensors: Vec<GgufTensor>,
    tensor_by_name: HashMap<String, usize>,
}

impl GgufFile {
    /// Maps the file and checks its header.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        let map = FileMap::open(path).map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
        let mut cursor = Cursor::new(path, map.bytes());
        let version = read_version(&mut cursor)?;
        let tensor_count = cursor.u64(Reading::Header("tensor_count"))?;
        let entry_count = cursor.u64(Reading::Header("metadata_kv_count"))?;
        let (entries, by_key) = metadata::read(&mut cursor, entry_count)?;
        let alignment = Metadata::new(path, map.bytes(), &entries, &by_key).alignment()?;
        let tensors = tensors::read(&mut cursor, tensor_count, alignment)?;
        let tensor_by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        map.release_all();
        Ok(GgufFile { map, version, entries, by_key, tensors, tensor_by_name })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata, to be asked by key and type.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata::new(self.path(), self.map.bytes(), &self.entries, &self.by_key)
    }

    /// All tensors, in the header's order.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.get(*self.tensor_by_name.get(name)?)
    }

    /// A tensor's bytes as stored.
    pub fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        self.map.bytes().get(tensor.bytes.clone()).unwrap_or_default()
    }

    /// Gives all memory of the file that was read so far back to the system; it can be read again.
    pub fn release(&self) {
        self.map.release_all();
    }

    /// The file's map alone, for readers that keep their own list of tensors.
    pub(crate) fn into_map(self) -> FileMap {
        self.map
    }
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, GgufError> {
    let path = cursor.path().to_owned();
    let magic = cursor.array::<4>(Reading::Header("magic"))?;
    if magic != MAGIC {
        return Err(GgufError::NotGguf { path, found: magic });
    }
    match cursor.u32(Reading::Header("version"))? {
        version @ (2 | 3) => Ok(version),
        version => Err(GgufError::Version { path, version }),
    }
}
