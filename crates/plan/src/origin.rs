//! Where a configuration's model comes from: files, the catalogue of dimensions, or sizes of the user's own.

use std::path::{Path, PathBuf};

use plimsoll_model::catalogue;
use plimsoll_model::hf_config::ConfigError;
use plimsoll_model::tokenizer::TokenizerError;
use plimsoll_model::{ModelError, ModelFiles, ModelSpec, SpecError, WeightSource};

use crate::config::RawConfig;
use crate::scratch::{self, ScratchTokenizer};

/// A model that a plan can be made for.
#[derive(Debug)]
pub enum ModelOrigin {
    /// Files with weights.
    Files(Box<ModelFiles>),
    /// Dimensions alone, of a model that is not at hand.
    Catalogue(Box<ModelSpec>),
    /// A model to be trained from scratch, and its tokenizer.
    Scratch(Box<ModelSpec>, ScratchTokenizer),
}

/// A model that could not be found or opened.
#[derive(Debug, thiserror::Error)]
pub enum OriginError {
    /// The files are wrong.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer is wrong.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The sizes are wrong.
    #[error("model.from_scratch.{0}")]
    Spec(#[from] SpecError),
    /// The sizes are none that the family can have.
    #[error(transparent)]
    Family(#[from] ConfigError),
    /// A size is missing.
    #[error("model.from_scratch.{key} is missing; it has no default")]
    MissingSize {
        /// The key.
        key: &'static str,
    },
    /// Neither a file nor a name.
    #[error(
        "no model: set model.path to a folder, a .gguf file or a name of the catalogue, or model.from_scratch to its sizes"
    )]
    NoModel,
    /// A name that nothing has.
    #[error("{name} is neither a file or folder here nor a name of the catalogue{}", catalogue::not_there(name, .nearest))]
    Unknown {
        /// What was given.
        name: String,
        /// Names like it.
        nearest: Vec<String>,
    },
    /// A name of the catalogue where weights are needed.
    #[error(
        "{name} is in the catalogue by its dimensions only, which is enough to plan; to {purpose} it, name its folder or .gguf file instead (--model, model.path)"
    )]
    NoWeights {
        /// The model.
        name: String,
        /// What was wanted.
        purpose: &'static str,
    },
}

impl ModelOrigin {
    /// Finds the model that `config` names.
    pub fn find(config: &RawConfig) -> Result<ModelOrigin, OriginError> {
        match &config.model.path {
            Some(path) => ModelOrigin::from_path_or_name(path),
            None => ModelOrigin::from_scratch(config),
        }
    }

    /// The weights, where files have them.
    pub fn weights(&self) -> Option<&WeightSource> {
        match self {
            ModelOrigin::Files(files) => Some(files.weights()),
            ModelOrigin::Catalogue(_) | ModelOrigin::Scratch(..) => None,
        }
    }

    /// A folder or file, or a name of the catalogue.
    pub fn from_path_or_name(path: &str) -> Result<ModelOrigin, OriginError> {
        if Path::new(path).exists() {
            return Ok(ModelOrigin::Files(Box::new(ModelFiles::open(Path::new(path))?)));
        }
        match catalogue::find(path) {
            Ok(spec) => Ok(ModelOrigin::Catalogue(Box::new(spec))),
            Err(nearest) => Err(OriginError::Unknown { name: path.to_owned(), nearest }),
        }
    }

    fn from_scratch(config: &RawConfig) -> Result<ModelOrigin, OriginError> {
        if config.model.from_scratch == Default::default() {
            return Err(OriginError::NoModel);
        }
        let (spec, tokenizer) = scratch::model(config)?;
        Ok(ModelOrigin::Scratch(Box::new(spec), tokenizer))
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        match self {
            ModelOrigin::Files(files) => files.spec(),
            ModelOrigin::Catalogue(spec) | ModelOrigin::Scratch(spec, _) => spec,
        }
    }

    /// The files of the model, if it has any.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            ModelOrigin::Files(files) => Some(files.path().to_owned()),
            ModelOrigin::Catalogue(_) | ModelOrigin::Scratch(..) => None,
        }
    }
}
