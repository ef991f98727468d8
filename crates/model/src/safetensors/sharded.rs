//! A checkpoint of one safetensors file, or of several with `model.safetensors.index.json`.

use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::header::without_place;
use super::pairs::Pairs;
use super::{IndexProblem, SafetensorsError, SafetensorsFile};

/// The weights of an unsharded checkpoint.
pub const SINGLE_NAME: &str = "model.safetensors";
/// The index of a sharded one.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// An index names each tensor once: this is room for hundreds of thousands.
const MAX_INDEX: u64 = 64 << 20;

/// The files of a checkpoint, every one opened and checked, and the index against them.
#[derive(Debug)]
pub struct SafetensorsSet {
    files: Vec<SafetensorsFile>,
}

impl SafetensorsSet {
    /// A checkpoint that is one file.
    pub fn single(path: &Path) -> Result<SafetensorsSet, SafetensorsError> {
        Ok(SafetensorsSet { files: vec![SafetensorsFile::open(path)?] })
    }

    /// A sharded checkpoint by its index, whose shards lie beside it.
    pub fn indexed(index: &Path) -> Result<SafetensorsSet, SafetensorsError> {
        let fail = |problem| SafetensorsError::Index { path: index.to_owned(), problem };
        let weight_map = read_index(index)?;
        let folder = index.parent().unwrap_or(Path::new(""));

        let mut listed: HashMap<&str, &str> = HashMap::new();
        let mut shards = BTreeSet::new();
        for (tensor, shard) in &weight_map {
            if !is_plain_file_name(shard) {
                let (tensor, shard) = (tensor.clone(), shard.clone());
                return Err(fail(IndexProblem::OutsideFolder { tensor, shard }));
            }
            if let Some(first) = listed.insert(tensor, shard) {
                let (first, second) = (first.to_owned(), shard.clone());
                return Err(fail(IndexProblem::ListedTwice { tensor: tensor.clone(), first, second }));
            }
            shards.insert(shard.as_str());
        }
        if shards.is_empty() {
            return Err(fail(IndexProblem::Empty));
        }
        let missing: Vec<String> =
            shards.iter().filter(|s| !folder.join(s).is_file()).map(|s| s.to_string()).collect();
        if !missing.is_empty() {
            return Err(fail(IndexProblem::MissingShards { missing, of: shards.len() }));
        }

        let mut files = Vec::with_capacity(shards.len());
        let mut found: HashMap<String, &str> = HashMap::new();
        for shard in shards {
            let file = SafetensorsFile::open(&folder.join(shard))?;
            for tensor in file.tensors() {
                if let Some(first) = found.insert(tensor.name.clone(), shard) {
                    let (tensor, first) = (tensor.name.clone(), first.to_owned());
                    return Err(fail(IndexProblem::InTwoShards { tensor, first, second: shard.to_owned() }));
                }
            }
            files.push(file);
        }
        for (tensor, shard) in &weight_map {
            if found.get(tensor).copied() != Some(shard.as_str()) {
                let (tensor, shard) = (tensor.clone(), shard.clone());
                return Err(fail(IndexProblem::NotInShard { tensor, shard }));
            }
        }
        Ok(SafetensorsSet { files })
    }

    /// The files.
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// The files, handed over.
    pub fn into_files(self) -> Vec<SafetensorsFile> {
        self.files
    }
}

/// Whether a name is just a file's, with no folder and no way out of one.
fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
        && !name.contains(['/', '\\', '\0'])
}

/// The index's tensors and their shards, in order, duplicates kept.
fn read_index(path: &Path) -> Result<Vec<(String, String)>, SafetensorsError> {
    let io = |source| SafetensorsError::Io { path: path.to_owned(), source };
    let len = std::fs::metadata(path).map_err(io)?.len();
    let fail = |problem| SafetensorsError::Index { path: PathBuf::from(path), problem };
    if len > MAX_INDEX {
        return Err(fail(IndexProblem::TooLong { len, limit: MAX_INDEX }));
    }
    let text = std::fs::read(path).map_err(io)?;
    let index: RawIndex = serde_json::from_slice(&text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        fail(IndexProblem::Json { line, column, reason: without_place(&error) })
    })?;
    Ok(index.weight_map.0)
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: Pairs,
}
