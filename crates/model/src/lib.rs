//! Architectures as data, the parameter inventory, file formats, tokenizers.
//!
//! This crate knows what a model is and how it is stored. It does not know how a step runs.

#![forbid(unsafe_code)]

pub mod adapter;
pub mod catalogue;
pub mod chat_template;
pub mod convert;
mod counting;
pub mod gguf;
pub mod hf_config;
pub mod init;
mod layout;
mod naming;
pub mod parameters;
mod rope;
pub mod safetensors;
pub mod save;
mod save_error;
mod shown;
pub mod source;
pub mod spec;
pub mod tokenizer;
pub mod transcode;
pub mod types_by_group;
pub mod upcycle;

pub use adapter::{AdaptedModule, Adapter, AdapterConfig, AdapterError, AdapterLayout};
pub use parameters::{
    Adapted, BlockId, FeedForwardRoles, Initialisation, LinearRoles, LoraPart, Parameter, ParameterGroup,
    ParameterKind, Role,
};
pub use safetensors::{NewTensor, SafetensorsError, SafetensorsFile, StoredDType, write_tensors};
pub use save::{SaveError, SaveWriter};
pub use source::{
    Format, ModelError, ModelFiles, RowOrder, StoredView, StoredWeight, StoredWeights, WeightSource,
};
pub use spec::{
    Activation, AttentionSpec, ExpertGroups, ExpertsSpec, LatentAttention, LayerKind, MlpSpec, ModelPart,
    ModelSpec, NormKind, NormPlacement, NormSpec, QkNorm, RopeScaling, RopeSpec, RouterSpec, Scoring,
    SharedExpert, SlidingWindow, SpecError, ZeroComputationSpec,
};
pub use transcode::{RowSource, Substitute, Target, Transcoder};
pub use types_by_group::{TypesByGroup, WeightGroup};
pub use upcycle::{UpcycleError, Upcycled};
