//! Where a configuration's model comes from: files, the catalogue of dimensions, or sizes of the user's own.

use std::path::{Path, PathBuf};

use plimsoll_model::catalogue;
use plimsoll_model::tokenizer::{Tokenizer, TokenizerError};
use plimsoll_model::{
    Activation, AttentionSpec, MlpSpec, ModelError, ModelFiles, ModelSpec, NormSpec, RopeSpec, SpecError,
    WeightSource,
};

use crate::config::{RawConfig, TokenizerSource};

/// A model that a plan can be made for.
#[derive(Debug)]
pub enum ModelOrigin {
    /// Files with weights.
    Files(Box<ModelFiles>),
    /// Dimensions alone, of a model that is not at hand.
    Catalogue(Box<ModelSpec>),
    /// A model to be trained from scratch, and its tokenizer.
    Scratch(Box<ModelSpec>, Box<Tokenizer>),
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
    #[error("{name} is neither a file or folder here nor a name of the catalogue{}", suggestion(.nearest))]
    Unknown {
        /// What was given.
        name: String,
        /// Names like it.
        nearest: Vec<String>,
    },
    /// A name of the catalogue where weights are needed.
    #[error(
        "{name} is in the catalogue by its dimensions only, which is enough to plan; to {purpose} it, set model.path to its folder or .gguf file"
    )]
    NoWeights {
        /// The model.
        name: String,
        /// What was wanted.
        purpose: &'static str,
    },
}

fn suggestion(nearest: &[String]) -> String {
    match nearest {
        [] => String::new(),
        names => format!("; did you mean {}?", names.join(" or ")),
    }
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
        let sizes = &config.model.from_scratch;
        if *sizes == Default::default() {
            return Err(OriginError::NoModel);
        }
        let need = |value: Option<u64>, key| value.ok_or(OriginError::MissingSize { key });
        let tokenizer = match sizes.tokenizer() {
            TokenizerSource::ByteLevel => Tokenizer::byte_level()?,
            TokenizerSource::Path(file) if file.is_file() => Tokenizer::from_gguf_file(&file)?,
            TokenizerSource::Path(folder) => Tokenizer::from_hf_dir(&folder)?,
        };
        let hidden_size = need(sizes.hidden_size, "hidden_size")?;
        let heads = need(sizes.num_attention_heads, "num_attention_heads")?;
        let layers = need(sizes.num_hidden_layers, "num_hidden_layers")?;
        let vocab_size = sizes.vocab_size.unwrap_or(tokenizer.vocab_size() as u64);
        if vocab_size < tokenizer.vocab_size() as u64 {
            let reason = format!("{vocab_size} is smaller than the tokenizer's {}", tokenizer.vocab_size());
            return Err(SpecError { key: "vocab_size", reason }.into());
        }
        if sizes.head_dim.is_none() && (heads == 0 || !hidden_size.is_multiple_of(heads)) {
            let reason = format!("{heads} does not divide hidden_size {hidden_size}; set head_dim");
            return Err(SpecError { key: "num_attention_heads", reason }.into());
        }
        let head_dim = sizes.head_dim.unwrap_or(hidden_size / heads.max(1));
        let spec = ModelSpec {
            name: "from scratch".to_owned(),
            architecture: sizes.architecture().name().to_owned(),
            vocab_size,
            hidden_size,
            num_layers: u32::try_from(layers).unwrap_or(u32::MAX),
            attention: AttentionSpec::plain(
                heads,
                sizes.num_key_value_heads.unwrap_or(heads),
                head_dim,
                RopeSpec::plain(head_dim, sizes.rope_theta()),
            ),
            mlp: MlpSpec {
                intermediate_size: need(sizes.intermediate_size, "intermediate_size")?,
                activation: Activation::Silu,
                gated: true,
                bias: false,
            },
            norm: NormSpec::rms(sizes.rms_norm_eps()),
            embedding_scale: None,
            logit_soft_cap: None,
            tie_word_embeddings: sizes.tie_word_embeddings(),
            max_position_embeddings: sizes.max_position_embeddings.unwrap_or(config.data.sequence_length()),
            initializer_range: sizes.initializer_range(),
            bos_token: tokenizer.bos_token(),
            eos_tokens: tokenizer.eos_token().into_iter().collect(),
        };
        spec.check()?;
        Ok(ModelOrigin::Scratch(Box::new(spec), Box::new(tokenizer)))
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
