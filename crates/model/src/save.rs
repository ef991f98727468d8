//! Saving a model as a Hugging Face folder that `transformers` loads as it is.
//!
//! Weights are streamed one parameter at a time from a callback, so memory does not grow with the model. All
//! files are written aside in a folder of their own and moved into place when all are complete and synced; after
//! an error until then nothing of them is left. A folder that is being replaced has no `config.json` while files are moved, so that
//! nobody takes it for a model.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_device::DType;
use serde_json::json;

use crate::hf_config::{CONFIG_NAME, GENERATION_CONFIG_NAME, config_json, generation_config_json};
use crate::layout::{Columns, StoredPart, StoredTensor, hf_block};
use crate::parameters::{BlockId, Parameter, Role};
use crate::safetensors::{
    INDEX_NAME, NewTensor, Placed, SINGLE_NAME, Span, StoredDType, sync_folder, write_placed,
};
pub use crate::save_error::SaveError;
use crate::spec::ModelSpec;
use crate::tokenizer::Tokenizer;

/// The size of a weights file above which a further one is begun.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// What `transformers` marks its own files with.
pub(crate) const METADATA: [(&str, &str); 1] = [("format", "pt")];

/// Writes a model's folder.
#[derive(Clone, Debug)]
pub struct SaveWriter<'a> {
    spec: &'a ModelSpec,
    dtype: DType,
    shard_bytes: u64,
    tokenizer: Option<&'a Tokenizer>,
}

impl<'a> SaveWriter<'a> {
    /// A writer of that model's weights as `dtype`: f32, bf16 or f16.
    pub fn new(spec: &'a ModelSpec, dtype: DType) -> SaveWriter<'a> {
        SaveWriter { spec, dtype, shard_bytes: DEFAULT_SHARD_BYTES, tokenizer: None }
    }

    /// Writes a tokenizer's files beside the model's.
    pub fn with_tokenizer(self, tokenizer: Option<&'a Tokenizer>) -> SaveWriter<'a> {
        SaveWriter { tokenizer, ..self }
    }

    /// Begins a further file where one would get more bytes of weights than this. A parameter is never cut, so
    /// that a larger one makes a larger file.
    pub fn shard_bytes(self, shard_bytes: u64) -> SaveWriter<'a> {
        SaveWriter { shard_bytes, ..self }
    }

    /// Writes `config.json`, `generation_config.json`, and the weights into `folder`, which is made if it is not
    /// there; files of these names are replaced. Returns the bytes written.
    ///
    /// `weights` is asked for every parameter once, block by block, and writes its little-endian values in the writer's type, or in
    /// that which its role is always [saved in](Role::saved_as), row by row. Where a family stores matrices transposed, one of them at a
    /// time is kept in memory, and of a stack one of its matrices.
    ///
    /// # Errors
    /// [`SaveError`]: the model cannot be expressed, or a file cannot be written. Until files are moved into the folder nothing is changed.
    pub fn write(
        &self,
        folder: &Path,
        mut weights: impl FnMut(&Parameter, &mut dyn Write) -> io::Result<()>,
    ) -> Result<u64, SaveError> {
        let config = config_json(self.spec, self.dtype)?;
        let staging = Staging::new(folder)?;
        staging.write_tokenizer(self.tokenizer)?;
        let mut bytes = staging.write(CONFIG_NAME, &config)?;
        bytes += staging.write(GENERATION_CONFIG_NAME, &generation_config_json(self.spec))?;

        let shards = self.shards(|tensor| self.tensor_bytes(tensor));
        let names = shard_names(shards.len());
        for (name, tensors) in names.iter().zip(&shards) {
            let headers = self.headers(tensors)?;
            let order: Vec<&NewTensor> = headers.iter().collect();
            bytes += write_placed(&staging.path(name), &METADATA, &order, |file| {
                self.write_shard(tensors, file, &mut weights)
            })?;
        }
        if names.len() > 1 {
            let files = names.iter().zip(&shards);
            let tensors = files.flat_map(|(name, shard)| {
                shard.iter().map(move |t| (t.name.as_str(), name.as_str(), self.tensor_bytes(t)))
            });
            bytes += staging.write(INDEX_NAME, &index(tensors))?;
        }
        staging.commit(folder, &names)?;
        Ok(bytes)
    }

    /// Writes tensors parameter by parameter: each into its parts of them.
    fn write_shard(
        &self,
        tensors: &[StoredTensor],
        file: &mut Placed<'_>,
        weights: &mut impl FnMut(&Parameter, &mut dyn Write) -> io::Result<()>,
    ) -> Result<(), SaveError> {
        let mut parts: HashMap<(BlockId, Role), Vec<(u64, Span)>> = HashMap::new();
        for (tensor, stored) in tensors.iter().enumerate() {
            let mut end = 0;
            for part in &stored.parts {
                let begin = end;
                end += part.elements() * part.role().saved_as(self.dtype).block_bytes();
                let key = (part.parameter.block, part.role());
                parts.entry(key).or_default().push((part.rows.start, Span { tensor, bytes: begin..end }));
            }
        }
        for (tensor, stored) in tensors.iter().enumerate() {
            if let Some(columns) = stored.columns_of_parts() {
                // Parameter by parameter, each in its columns of every matrix.
                let mut written: Vec<Role> = Vec::new();
                for part in &stored.parts {
                    if written.contains(&part.role()) {
                        continue;
                    }
                    written.push(part.role());
                    let own =
                        stored.parts.iter().zip(&columns).filter(|(other, _)| other.role() == part.role());
                    let own: Vec<Columns> = own.map(|(_, columns)| *columns).collect();
                    let size = part.role().saved_as(self.dtype).block_bytes();
                    file.fill_columns(tensor, &own, size, |out| weights(&part.parameter, out))?;
                }
                continue;
            }
            for part in &stored.parts {
                // With the first of its parts all others were written.
                let Some(mut own) = parts.remove(&(part.parameter.block, part.role())) else { continue };
                own.sort_by_key(|(first, _)| *first);
                let spans: Vec<Span> = own.into_iter().map(|(_, span)| span).collect();
                file.fill(&spans, |out| weights(&part.parameter, out))?;
            }
        }
        Ok(())
    }

    /// The tensors of each file. All parts of a parameter are in one file.
    pub(crate) fn shards(&self, bytes: impl Fn(&StoredTensor) -> u64) -> Vec<Vec<StoredTensor>> {
        let mut groups: Vec<Vec<StoredTensor>> = Vec::new();
        for tensor in self.spec.blocks().flat_map(|block| hf_block(self.spec, block)) {
            let key =
                |tensor: &StoredTensor| tensor.parts.first().map(|part| (part.parameter.block, part.role()));
            match groups.last_mut() {
                Some(group) if group.last().and_then(key) == key(&tensor) => group.push(tensor),
                _ => groups.push(vec![tensor]),
            }
        }
        let mut shards: Vec<Vec<StoredTensor>> = vec![Vec::new()];
        let mut filled = 0u64;
        for group in groups {
            let size = group.iter().map(&bytes).sum();
            if filled > 0 && filled.saturating_add(size) > self.shard_bytes {
                shards.push(Vec::new());
                filled = 0;
            }
            filled += size;
            if let Some(shard) = shards.last_mut() {
                shard.extend(group);
            }
        }
        shards
    }

    pub(crate) fn tensor_bytes(&self, tensor: &StoredTensor) -> u64 {
        let bytes = |part: &StoredPart| part.elements() * part.role().saved_as(self.dtype).block_bytes();
        tensor.parts.iter().map(bytes).sum()
    }

    fn headers(&self, tensors: &[StoredTensor]) -> Result<Vec<NewTensor>, SaveError> {
        let stored = |dtype| {
            StoredDType::from_device(dtype).ok_or_else(|| SaveError::Inexpressible {
                model: self.spec.name.clone(),
                target: "safetensors",
                reason: format!("weights cannot be stored as {dtype}"),
            })
        };
        let header = |tensor: &StoredTensor| {
            let role = tensor.parts.first().map(StoredPart::role);
            let dtype = stored(role.map_or(self.dtype, |role| role.saved_as(self.dtype)))?;
            Ok(NewTensor { name: tensor.name.clone(), dtype, shape: tensor.shape() })
        };
        tensors.iter().map(header).collect()
    }
}

/// The index of tensors: the name, the file and the bytes of each.
pub(crate) fn index<'t>(tensors: impl Iterator<Item = (&'t str, &'t str, u64)>) -> String {
    let mut total = 0;
    let mut weight_map: BTreeMap<&str, &str> = BTreeMap::new();
    for (tensor, file, bytes) in tensors {
        total += bytes;
        weight_map.insert(tensor, file);
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    format!("{index:#}\n")
}

/// `model.safetensors`, or `model-00001-of-00003.safetensors` and so on.
pub(crate) fn shard_names(count: usize) -> Vec<String> {
    match count {
        1 => vec![SINGLE_NAME.to_owned()],
        _ => (1..=count).map(|i| format!("model-{i:05}-of-{count:05}.safetensors")).collect(),
    }
}

/// Whether a file holds weights in one of the forms that [`SaveWriter`] writes.
fn is_weights(name: &str) -> bool {
    let shard = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    name == SINGLE_NAME || name == INDEX_NAME || shard.is_some_and(|shard| shard.contains("-of-"))
}

/// Files of a tokenizer, under all names that a model's folder may have them by.
const TOKENIZER_FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
];

/// Further templates of a tokenizer, a file each.
const TEMPLATES: &str = "additional_chat_templates";

/// A hidden folder that files are written to; it goes away with everything in it unless it is committed.
pub(crate) struct Staging {
    folder: tempfile::TempDir,
    /// Whether the folder that is being saved to is new and so can be had by one rename.
    replaces: bool,
    /// Held until the folder goes away.
    _lock: Option<std::fs::File>,
}

impl Staging {
    pub(crate) fn new(folder: &Path) -> Result<Staging, SaveError> {
        let replaces = !folder.exists();
        let place = if replaces {
            let parent = parent(folder);
            std::fs::create_dir_all(parent).map_err(|source| SaveError::io("create", parent, source))?;
            parent
        } else {
            folder
        };
        let mut builder = tempfile::Builder::new();
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        remove_left_over(place, STAGING);
        let staging = builder
            .prefix(STAGING)
            .tempdir_in(place)
            .map_err(|source| SaveError::io("create a folder in", place, source))?;
        // Whoever finds the lock free knows that nobody writes here any more. A file system without locks goes without.
        let lock = std::fs::File::open(staging.path()).ok().filter(|folder| folder.try_lock().is_ok());
        Ok(Staging { folder: staging, replaces, _lock: lock })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The files of a tokenizer, where there is one.
    pub(crate) fn write_tokenizer(&self, tokenizer: Option<&Tokenizer>) -> Result<(), SaveError> {
        let save = |tokenizer: &Tokenizer| tokenizer.save(self.folder.path());
        tokenizer.map_or(Ok(()), save).map_err(|error| SaveError::Tokenizer(Box::new(error)))
    }

    /// A small text file, synced. Returns its size.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<u64, SaveError> {
        let path = self.path(name);
        let write = || {
            let mut file = std::fs::File::create_new(&path)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        write().map_err(|source| SaveError::io("write", &path, source))?;
        Ok(text.len() as u64)
    }

    /// Moves everything into place: by one rename where the folder is new, else file by file.
    pub(crate) fn commit(self, folder: &Path, weights: &[String]) -> Result<(), SaveError> {
        let staged = self.folder.path();
        sync_folder(staged);
        if self.replaces {
            std::fs::rename(staged, folder)
                .map_err(|source| SaveError::io("rename a folder to", folder, source))?;
            sync_folder(parent(folder));
            return Ok(());
        }
        self.replace(folder, weights).map_err(|error| {
            // Under a name that nobody removes.
            let staging = self.folder.keep();
            let kept = staging.with_file_name(match staging.file_name().and_then(|name| name.to_str()) {
                Some(name) => name.replacen(STAGING, UNFINISHED, 1),
                None => UNFINISHED.to_owned(),
            });
            let staging = if std::fs::rename(&staging, &kept).is_ok() { kept } else { staging };
            SaveError::NotMoved { staging, folder: folder.to_owned(), source: Box::new(error) }
        })
    }

    /// Moves everything into a folder that is there, file by file.
    fn replace(&self, folder: &Path, weights: &[String]) -> Result<(), SaveError> {
        let staged = self.folder.path();
        let list = |path: &Path| -> io::Result<Vec<std::ffi::OsString>> {
            std::fs::read_dir(path)?.map(|entry| Ok(entry?.file_name())).collect()
        };
        let mut all = list(staged).map_err(|source| SaveError::io("list", staged, source))?;
        all.sort();
        // Who is killed from here on leaves a folder that is no model.
        remove(&folder.join(CONFIG_NAME))?;
        sync_folder(folder);
        let rename = |name: &std::ffi::OsString| {
            let target = folder.join(name);
            std::fs::rename(staged.join(name), &target)
                .map_err(|source| SaveError::io("rename a file to", &target, source))
        };
        let (last, others): (Vec<_>, Vec<_>) = all.iter().partition(|name| *name == CONFIG_NAME);
        others.into_iter().try_for_each(rename)?;
        // Weights of an earlier save in the other form would be loaded instead of these, and so would another tokenizer's files.
        let has_tokenizer = all.iter().any(|name| name == TOKENIZER_FILES[0]);
        if has_tokenizer {
            remove(&folder.join(TEMPLATES))?;
        }
        for name in list(folder).map_err(|source| SaveError::io("list", folder, source))? {
            let is_ours =
                |name: &str| weights.iter().any(|w| w == name) || (weights.len() > 1 && name == INDEX_NAME);
            if let Some(name) = name.to_str()
                && (is_weights(name) && !is_ours(name)
                    || has_tokenizer && TOKENIZER_FILES.contains(&name) && !all.iter().any(|own| own == name))
            {
                remove(&folder.join(name))?;
            }
        }
        sync_folder(folder);
        last.into_iter().try_for_each(rename)?;
        sync_folder(folder);
        Ok(())
    }
}

/// What folders are called that are being written.
const STAGING: &str = ".saving-";

/// What the names of folders begin with whose files could not all be moved to where they belong.
pub const UNFINISHED: &str = "unfinished-";

/// How old a file or folder is at least that counts as left over: a new one may not be locked yet.
const OLD: Duration = Duration::from_secs(60);

/// Removes the files and folders of killed writers: those with a working name that nobody has locked.
pub(crate) fn remove_left_over(folder: &Path, prefix: &str) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix));
        let path = entry.path();
        if !is_ours || path.is_symlink() {
            continue;
        }
        let Ok(opened) = std::fs::File::open(&path) else { continue };
        let age = opened.metadata().and_then(|found| found.modified()).ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age >= OLD) && opened.try_lock().is_ok() {
            // Where it cannot be removed it stays: it takes room, and is in nobody's way.
            let _ = remove(&path);
        }
    }
}

/// Removes a file or a folder, if it is there.
fn remove(path: &Path) -> Result<(), SaveError> {
    let removed = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(_) => return Ok(()),
    };
    removed.map_err(|source| SaveError::io("remove", path, source))
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
