//! Hugging Face folders whose files hold pieces of the layout's tensors: the codes of a matrix, its scales, what else a library keeps
//! beside them.

use std::io::{self, Write};
use std::path::Path;

use plimsoll_device::DType;
use serde_json::Value;

use super::Transcoder;
use crate::hf_config::{CONFIG_NAME, GENERATION_CONFIG_NAME, config_json, generation_config_json};
use crate::layout::StoredTensor;
use crate::safetensors::{INDEX_NAME, NewTensor, StoredDType, write_in_order};
use crate::save::{METADATA, SaveError, Staging, index, shard_names};
use crate::spec::ModelSpec;

/// The type of everything that is not packed.
pub(super) const REST: DType = DType::Bf16;

/// A tensor of a file and what is in it.
pub(super) struct Piece<'t, C> {
    pub tensor: NewTensor,
    pub of: &'t StoredTensor,
    pub content: C,
}

impl<'t, C> Piece<'t, C> {
    pub fn new(of: &'t StoredTensor, name: String, dtype: StoredDType, shape: Vec<u64>, content: C) -> Self {
        Piece { tensor: NewTensor { name, dtype, shape }, of, content }
    }

    pub fn bytes(&self) -> u64 {
        self.tensor.dtype.bytes_for(&self.tensor.shape).unwrap_or(0)
    }
}

/// What a folder is to be.
pub(super) struct Folder<'f> {
    pub path: &'f Path,
    pub spec: &'f ModelSpec,
    /// What it is called where it cannot be.
    pub target: &'static str,
    /// `quantization_config` in `config.json`.
    pub quantization: Value,
    /// The tensors of each file.
    pub shards: &'f [Vec<StoredTensor>],
}

impl Folder<'_> {
    /// That the model cannot be written so.
    pub fn refusal(spec: &ModelSpec, target: &'static str, reason: &str) -> SaveError {
        SaveError::Inexpressible { model: spec.name.clone(), target, reason: reason.to_owned() }
    }

    fn config(&self) -> Result<Value, SaveError> {
        let mut config: Value = serde_json::from_str(&config_json(self.spec, REST)?).map_err(|error| {
            Folder::refusal(self.spec, self.target, &format!("its configuration is no JSON: {error}"))
        })?;
        config["quantization_config"] = self.quantization.clone();
        Ok(config)
    }
}

impl Transcoder<'_> {
    /// Writes a folder; in each file the pieces of all tensors by their `place`, which keeps every tensor aligned, and else in order. Gives
    /// the bytes written.
    pub(super) fn write_pieces<C>(
        &mut self,
        folder: &Folder<'_>,
        pieces: impl for<'t> Fn(&'t StoredTensor) -> Vec<Piece<'t, C>>,
        place: impl Fn(&C) -> u8,
        mut write: impl FnMut(&mut Self, &Piece<'_, C>, &mut dyn Write) -> io::Result<()>,
    ) -> Result<u64, SaveError> {
        let config = folder.config()?;
        let staging = Staging::new(folder.path)?;
        staging.write_tokenizer(self.tokenizer)?;
        let mut written = staging.write(CONFIG_NAME, &format!("{config:#}\n"))?;
        written += staging.write(GENERATION_CONFIG_NAME, &generation_config_json(folder.spec))?;
        let names = shard_names(folder.shards.len());
        let mut listed = Vec::new();
        for (name, shard) in names.iter().zip(folder.shards) {
            let mut all: Vec<Piece<'_, C>> = shard.iter().flat_map(&pieces).collect();
            all.sort_by_key(|piece| place(&piece.content));
            let order: Vec<&NewTensor> = all.iter().map(|piece| &piece.tensor).collect();
            let mut next = all.iter();
            written += write_in_order(&staging.path(name), &METADATA, &order, |_, out| {
                next.next().map_or(Ok(()), |piece| write(self, piece, out))
            })?;
            listed.extend(all.into_iter().map(|piece| {
                let size = piece.bytes();
                (piece.tensor.name, name.as_str(), size)
            }));
        }
        if names.len() > 1 {
            let tensors = listed.iter().map(|(tensor, file, bytes)| (tensor.as_str(), *file, *bytes));
            written += staging.write(INDEX_NAME, &index(tensors))?;
        }
        staging.commit(folder.path, &names)?;
        Ok(written)
    }
}
