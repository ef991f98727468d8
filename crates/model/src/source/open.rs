//! Opening a model: which format a path has, its shape, and the shape checked against the weights.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use plimsoll_memory::FileMap;

use super::inventory::{Candidate, Inventory};
use super::packed::{self, Found, Span};
use super::{Format, ModelError, ModelFiles};
use crate::gguf::{
    GgufFile, KV_UP_HALVES, SHARED_ROUTER, WHOLE_KV_UP, families, gguf_block, gguf_block_with_whole_kv_up,
};
use crate::hf_config::{self, CONFIG_NAME};
use crate::layout::{hf_block, hf_prefix};
use crate::safetensors::{INDEX_NAME, SINGLE_NAME, SafetensorsSet};
use crate::spec::ModelSpec;

/// Weights in Python's pickle format, which runs code when it is read.
const PICKLES: [&str; 4] =
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt"];

impl ModelFiles {
    /// Opens a Hugging Face folder, a `.safetensors` file with `config.json` beside it, or a GGUF file, and checks
    /// that shape and weights belong together.
    pub fn open(path: &Path) -> Result<ModelFiles, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let fail = |reason: &str| ModelError::NotAModel { path: path.to_owned(), reason: reason.to_owned() };
        if std::fs::metadata(path).map_err(io)?.is_dir() {
            return open_folder(path);
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("gguf") => open_gguf(path),
            Some("safetensors") => open_safetensors(path, parent(path), SafetensorsSet::single(path)?),
            Some("json") => Err(fail("is one file of a model; give the folder that it is in")),
            Some("bin" | "pt" | "pth" | "ckpt") => Err(fail(PICKLE_REASON)),
            // A file of another name is told by its first bytes.
            _ if starts_with(path, b"GGUF").map_err(io)? => open_gguf(path),
            _ => Err(fail("is no model: give a Hugging Face folder, a .safetensors file or a .gguf file")),
        }
    }
}

const PICKLE_REASON: &str = "the weights are in PyTorch's pickle format, which can run code when it is read, so that \
     it is not; convert them: load the model with transformers and save_pretrained() it as safetensors";

fn open_folder(folder: &Path) -> Result<ModelFiles, ModelError> {
    let fail = |reason: String| ModelError::NotAModel { path: folder.to_owned(), reason };
    let (index, single) = (folder.join(INDEX_NAME), folder.join(SINGLE_NAME));
    let (file, indexed) = if single.is_file() {
        (single, false)
    } else if index.is_file() {
        (index, true)
    } else if let Some(pickle) = PICKLES.iter().find(|name| folder.join(name).exists()) {
        return Err(fail(format!("has no {SINGLE_NAME}, only {pickle}: {PICKLE_REASON}")));
    } else if let Some(gguf) = first_gguf(folder) {
        return Err(fail(format!("has no {SINGLE_NAME}; give the GGUF file itself: {}", gguf.display())));
    } else {
        return Err(fail(format!("is no model's folder: it has neither {SINGLE_NAME} nor {INDEX_NAME}")));
    };
    let set = if indexed { SafetensorsSet::indexed(&file)? } else { SafetensorsSet::single(&file)? };
    open_safetensors(folder, folder, set)
}

fn open_safetensors(path: &Path, folder: &Path, set: SafetensorsSet) -> Result<ModelFiles, ModelError> {
    let config = folder.join(CONFIG_NAME);
    if !config.is_file() {
        return Err(ModelError::NotAModel {
            path: path.to_owned(),
            reason: format!("there is no {CONFIG_NAME} beside the weights, which tells the model's shape"),
        });
    }
    let mut spec = hf_config::read_config(folder, name_of(path))?;
    if let Some(experts) = &mut spec.experts {
        let mut all = set.files().iter().flat_map(|file| file.tensors());
        experts.stacked_files = spec.architecture == "gpt_oss"
            || all.any(|tensor| tensor.name.ends_with(".mlp.experts.gate_up_proj"));
    }
    // A checkpoint of the bare model, without a head, has no prefix.
    let prefix = hf_prefix(&spec);
    let prefixed = set.files().iter().any(|file| file.tensors().iter().any(|t| t.name.starts_with(prefix)));
    let mut inventory = Inventory::new(path, config.display().to_string());
    let named = |tensor: &str| if prefixed { tensor.to_owned() } else { format!("{prefix}{tensor}") };
    let (packed, taken) = match hf_config::read_quantization(folder)? {
        Some(quantization) => packed::find(set.files(), &quantization)?,
        None => Default::default(),
    };
    let taken: HashSet<String> = taken.into_iter().collect();
    for Found { name, packed } in packed {
        if is_no_parameter(&name, &spec) {
            continue;
        }
        let shape = packed.shape();
        let (dtype, Span { file, bytes, .. }) = (Ok(packed.dtype()), packed.codes().clone());
        let packed = Some(packed);
        inventory.add(named(&name), Candidate { tensor: name, file, bytes, dtype, shape, packed });
    }
    for (file, opened) in set.files().iter().enumerate() {
        for tensor in opened.tensors() {
            if is_no_parameter(&tensor.name, &spec) || taken.contains(&tensor.name) {
                continue;
            }
            let dtype = tensor.dtype.device().filter(|dtype| dtype.is_float());
            inventory.add(
                named(&tensor.name),
                Candidate {
                    tensor: tensor.name.clone(),
                    file,
                    bytes: tensor.bytes.clone(),
                    dtype: dtype.ok_or(tensor.dtype.name()),
                    shape: tensor.shape.clone(),
                    packed: None,
                },
            );
        }
    }
    let files = set.into_files().into_iter().map(|file| file.into_map()).collect();
    let weights = inventory.match_with(&spec, hf_block, files)?;
    Ok(ModelFiles { path: path.to_owned(), format: Format::Safetensors, spec, weights })
}

fn open_gguf(path: &Path) -> Result<ModelFiles, ModelError> {
    let file = GgufFile::open(path)?;
    let spec = families::model_spec(&file, name_of(path))?;
    let mut inventory = Inventory::new(path, "the file's metadata".to_owned());
    // Some files have the halves of that matrix beside it.
    let is_whole = file.tensors().iter().any(|tensor| tensor.name.ends_with(WHOLE_KV_UP));
    for tensor in file.tensors() {
        let is_half = is_whole && KV_UP_HALVES.iter().any(|half| tensor.name.ends_with(half));
        if is_half || families::is_no_parameter(&tensor.name, &spec) {
            continue;
        }
        families::check_bias(&file, tensor)?;
        let mut shape = tensor.shape.clone();
        // What weighs a shared expert is a matrix of one row, which converters write as a vector.
        if tensor.name.ends_with(SHARED_ROUTER) && shape.len() == 1 {
            shape.insert(0, 1);
        }
        inventory.add(
            tensor.name.clone(),
            Candidate {
                tensor: tensor.name.clone(),
                file: 0,
                bytes: tensor.bytes.clone(),
                dtype: Ok(tensor.dtype),
                shape,
                packed: None,
            },
        );
    }
    file.release();
    let layout = if is_whole { gguf_block_with_whole_kv_up } else { gguf_block };
    let weights = inventory.match_with(&spec, layout, vec![file.into_map()])?;
    Ok(ModelFiles { path: path.to_owned(), format: Format::Gguf, spec, weights })
}

/// Buffers that old versions of transformers saved, the copy of a tied head, and the layers behind the last that predict further
/// tokens (GLM 4.5 and 4.7, DeepSeek-V3).
fn is_no_parameter(tensor: &str, spec: &ModelSpec) -> bool {
    if let Some(layer) = tensor.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next())
        && layer.parse().is_ok_and(|layer| spec.is_behind_the_last(layer))
    {
        return true;
    }
    let mask = tensor.ends_with(".attn.bias") || tensor.ends_with(".attn.masked_bias");
    if spec.architecture == "gpt2" && mask {
        return true;
    }
    tensor.ends_with("rotary_emb.inv_freq") || (spec.tie_word_embeddings && tensor == "lm_head.weight")
}

pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The folder's name, or the file's without its extension; of a folder in the hub's cache the model's.
fn name_of(path: &Path) -> String {
    let full = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if path.is_dir()
        && let Some(name) = hub_name(&full)
    {
        return name.to_owned();
    }
    let name = if path.is_dir() { full.file_name() } else { full.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// `name` in `models--org--name/snapshots/COMMIT`.
fn hub_name(snapshot: &Path) -> Option<&str> {
    let snapshots = snapshot.parent().filter(|folder| folder.ends_with("snapshots"))?;
    let repo = snapshots.parent()?.file_name()?.to_str()?;
    repo.strip_prefix("models--").map(|id| id.rsplit_once("--").map_or(id, |(_, name)| name))
}

fn starts_with(path: &Path, magic: &[u8; 4]) -> std::io::Result<bool> {
    let file = FileMap::open(path)?;
    Ok(file.bytes().starts_with(magic))
}

fn first_gguf(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "gguf")).min()
}
