//! What can be wrong with a model's files as a whole.

use std::fmt;
use std::io;
use std::path::PathBuf;

use plimsoll_device::DType;

use crate::convert::ConversionError;
use crate::gguf::GgufError;
use crate::hf_config::ConfigError;
use crate::safetensors::SafetensorsError;
use crate::shown::Shown;
use crate::tokenizer::TokenizerError;

/// A model that cannot be opened or read. Names the file and the tensor, key or place.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// The `config.json` is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A safetensors file or its index is wrong.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// The GGUF file is wrong.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The tokenizer is missing or unusable.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The path holds no model.
    #[error("{}: {reason}", path.display())]
    NotAModel {
        /// The file or folder.
        path: PathBuf,
        /// What was looked for, and what to do.
        reason: String,
    },
    /// Parameters that the shape has are not in the files.
    #[error(
        "{}: the weights lack {tensors}, which {shape_from} asks for; they are of another family or size, or not \
         whole: take the configuration that came with them", path.display()
    )]
    MissingTensors {
        /// The weights.
        path: PathBuf,
        /// Which.
        tensors: NameList,
        /// The file that asks for them.
        shape_from: String,
    },
    /// Tensors that the shape does not have are in the files; to leave them out would change what the model says.
    #[error(
        "{}: the weights have {tensors}, which {shape_from} does not account for; they are of another family or \
         size: take the configuration that came with them", path.display()
    )]
    UnexpectedTensors {
        /// The weights.
        path: PathBuf,
        /// Which.
        tensors: NameList,
        /// The file that does not.
        shape_from: String,
    },
    /// The shape and the weights contradict each other.
    #[error(
        "{}: tensor {} has shape {found:?}, but {shape_from} makes it {expected:?}; \
         the two do not belong together", path.display(), Shown(tensor)
    )]
    Shape {
        /// The file with the tensor.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape in the file.
        found: Vec<u64>,
        /// Its shape by the model's sizes.
        expected: Vec<u64>,
        /// The file with the sizes.
        shape_from: String,
    },
    /// A parameter is stored in a type that is no weight's.
    #[error(
        "{}: tensor {} is stored as {stored}, which is not supported for weights; \
         supported: F32, BF16, F16", path.display(), Shown(tensor)
    )]
    StoredType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        stored: &'static str,
    },
    /// The tensors of a matrix that a quantising library packed do not make one.
    #[error("{}: tensor {}: {reason}", path.display(), Shown(tensor))]
    Packed {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A parameter of another model was asked for: a programming error.
    #[error("{}: holds no parameter {tensor:?} of shape {shape:?}", path.display())]
    NoSuchParameter {
        /// The model.
        path: PathBuf,
        /// The parameter.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The bytes to fill are not the parameter's, or their type is not computed on: a programming error.
    #[error("{}: parameter {tensor:?} as {dtype}: {source}", path.display())]
    Conversion {
        /// The model.
        path: PathBuf,
        /// The parameter.
        tensor: String,
        /// The type asked for.
        dtype: DType,
        /// What does not fit.
        source: ConversionError,
    },
}

impl ModelError {
    /// Whether it says that a model comes without a tokenizer: no `tokenizer.json` beside it, no tokenizer in its GGUF.
    pub fn is_missing_tokenizer(&self) -> bool {
        match self {
            ModelError::Tokenizer(TokenizerError::Io { path, source }) => {
                source.kind() == io::ErrorKind::NotFound && path.ends_with("tokenizer.json")
            }
            ModelError::Gguf(GgufError::MissingKey { key, .. }) => key == "tokenizer.ggml.model",
            _ => false,
        }
    }
}

/// A list of names of which the first few are kept, and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameList {
    /// The first few.
    pub first: Vec<String>,
    /// All of them.
    pub count: u64,
}

impl NameList {
    const KEPT: usize = 6;

    /// Adds a name, or just counts it.
    pub(super) fn push(&mut self, name: String) {
        if self.first.len() < NameList::KEPT {
            self.first.push(name);
        }
        self.count += 1;
    }
}

impl fmt::Display for NameList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tensor{}: ", self.count, if self.count == 1 { "" } else { "s" })?;
        for (i, name) in self.first.iter().enumerate() {
            write!(f, "{}{:#}", if i == 0 { "" } else { ", " }, Shown(name))?;
        }
        if self.count > self.first.len() as u64 { f.write_str(", ...") } else { Ok(()) }
    }
}
