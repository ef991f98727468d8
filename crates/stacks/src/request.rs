//! A request: what a user says about a run of another stack, in that stack's words. JSON, the contract of `estimate --request`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

/// Why a request cannot be answered.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RequestError {
    /// A key has a value that is none of its values.
    #[error("{key}: {value} is not known; it can be {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// What was written.
        value: String,
        /// What could be.
        expected: String,
    },
    /// Two keys contradict each other.
    #[error("{0}")]
    Contradiction(String),
    /// The model cannot be found or read.
    #[error("model: {0}")]
    Model(String),
    /// The text is no request.
    #[error("{}: {reason}", path.display())]
    Text {
        /// Where it comes from.
        path: PathBuf,
        /// What is wrong, with its place.
        reason: String,
    },
}

/// A low-rank adapter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// `r`
    pub rank: u64,
    /// Names of linear layers, or `all-linear`; empty: the stack's default for the family.
    #[serde(default, deserialize_with = "null_is_default")]
    pub target_modules: Vec<String>,
    /// `lora_dropout`
    #[serde(default, deserialize_with = "null_is_default")]
    pub dropout: f64,
    /// Type of the adapters, where a tool sets it: `f32`, `bf16`, `fp16`.
    #[serde(default)]
    pub dtype: Option<String>,
    /// `use_dora`
    #[serde(default, deserialize_with = "null_is_default")]
    pub use_dora: bool,
    /// `modules_to_save`: trained whole beside the adapters.
    #[serde(default, deserialize_with = "null_is_default")]
    pub modules_to_save: Vec<String>,
}

/// What is asked. What is absent or null is decided by the rules of the stack and its versions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// `hf`, `peft`, `torchtune`, `litgpt`, `deepspeed`, `fsdp`, `unsloth`.
    pub stack: String,
    /// `transformers: "4.44"` and others; `date: "2024-03"` for the versions of a month.
    #[serde(default, deserialize_with = "null_is_default")]
    pub versions: BTreeMap<String, String>,
    /// A name, a folder, or a `config.json`.
    pub model: String,
    /// Sequences of a micro-batch, on each device.
    pub batch_size: u64,
    /// Tokens of each; of a prompt in inference.
    pub sequence_length: u64,
    /// Tokens of the samples that are trained on, where they are known: they are shuffled into micro-batches, and cut at
    /// `sequence_length`.
    #[serde(default, deserialize_with = "null_is_default")]
    pub lengths: Vec<u64>,
    /// Tokens behind the prompt, each sequence.
    #[serde(default)]
    pub generated_tokens: Option<u64>,
    /// Whether sequences are padded to the longest of a batch, so that a mask exists.
    #[serde(default, deserialize_with = "null_is_default")]
    pub padded: bool,
    /// Sequences of a batch in evaluation on each device; without it the run does not evaluate.
    #[serde(default)]
    pub eval_batch_size: Option<u64>,
    /// Whether the run goes on from a checkpoint, with its optimizer's states.
    #[serde(default, deserialize_with = "null_is_default")]
    pub resume: bool,
    /// Whether adapters are merged into the weights at the end (`merge_and_unload`).
    #[serde(default, deserialize_with = "null_is_default")]
    pub merge: bool,
    /// `dataloader_num_workers`
    #[serde(default, deserialize_with = "null_is_default")]
    pub data_workers: u64,
    /// Micro-batches of a step.
    #[serde(default)]
    pub gradient_accumulation_steps: Option<u64>,
    /// `f32`, `bf16`, `fp16`: everything in it. `bf16-amp`, `fp16-amp`: autocast over f32 weights.
    pub precision: String,
    /// The type that weights are loaded in, where it is not the precision's: `f32`, `bf16`, `fp16`.
    #[serde(default)]
    pub dtype: Option<String>,
    /// As `TrainingArguments.optim` has it, or the class: `adamw_torch_fused`, `AdamW8bit`.
    #[serde(default)]
    pub optimizer: Option<String>,
    /// Whether the optimizer runs within the backward pass (torchtune).
    #[serde(default, deserialize_with = "null_is_default")]
    pub optimizer_in_backward: bool,
    /// Whether gradients are clipped.
    #[serde(default)]
    pub clip: Option<bool>,
    /// Whether layers are computed again.
    #[serde(default, deserialize_with = "null_is_default")]
    pub gradient_checkpointing: bool,
    /// Whether layer inputs that checkpointing keeps go to pinned host memory (torchtune's `enable_activation_offloading`).
    #[serde(default, deserialize_with = "null_is_default")]
    pub activation_offloading: bool,
    /// `gradient_checkpointing_kwargs.use_reentrant`
    #[serde(default)]
    pub use_reentrant: Option<bool>,
    /// `config.use_cache` in training.
    #[serde(default)]
    pub use_cache: Option<bool>,
    /// `eager`, `sdpa`, `flash_attention_2`.
    #[serde(default)]
    pub attention: Option<String>,
    /// `default`, `liger`, `cce`, `chunked`.
    #[serde(default)]
    pub loss: Option<String>,
    /// Chunks of torchtune's loss (`num_output_chunks`).
    #[serde(default)]
    pub loss_chunks: Option<u64>,
    /// How long a loop keeps what the model returned: `dropped`, `until_step`, `until_next_forward`.
    #[serde(default)]
    pub outputs: Option<String>,
    /// Liger's kernels in the layers.
    #[serde(default, deserialize_with = "null_is_default")]
    pub liger: bool,
    /// `torch.compile`
    #[serde(default, deserialize_with = "null_is_default")]
    pub compile: bool,
    /// LoRA.
    #[serde(default)]
    pub lora: Option<Lora>,
    /// `nf4`, `fp4`, `int8`.
    #[serde(default)]
    pub quantization: Option<String>,
    /// `bnb_4bit_use_double_quant`
    #[serde(default, deserialize_with = "null_is_default")]
    pub double_quantization: bool,
    /// `bnb_4bit_compute_dtype`
    #[serde(default)]
    pub compute_dtype: Option<String>,
    /// Devices.
    #[serde(default)]
    pub devices: Option<u64>,
    /// DeepSpeed's stage.
    #[serde(default)]
    pub zero_stage: Option<u8>,
    /// `full_shard`, `shard_grad_op`, `no_shard`.
    #[serde(default)]
    pub fsdp: Option<String>,
    /// 1: `FullyShardedDataParallel`; 2: `fully_shard`.
    #[serde(default)]
    pub fsdp_version: Option<u8>,
    /// Devices that share out among them in a hybrid of FSDP: those of a machine where nothing is said.
    #[serde(default)]
    pub shard_size: Option<u64>,
    /// DeepSpeed's `reduce_bucket_size`, in elements.
    #[serde(default)]
    pub reduce_bucket_size: Option<u64>,
    /// DeepSpeed's `overlap_comm`.
    #[serde(default)]
    pub overlap_comm: Option<bool>,
    /// `optimizer`, `parameters`, `all`.
    #[serde(default)]
    pub offload: Option<String>,
    /// A card of the catalogue, `rtx-4090`, or what a program calls one: `NVIDIA A100-SXM4-80GB`.
    #[serde(default)]
    pub hardware: Option<String>,
    /// `train`, `inference`, `load`.
    #[serde(default)]
    pub phase: Option<String>,
    /// `PYTORCH_CUDA_ALLOC_CONF`: `expandable_segments:True`.
    #[serde(default)]
    pub allocator: Option<String>,
}

/// A null as if the key were not there.
fn null_is_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl Request {
    /// Reads the JSON of a request; `path` is for errors.
    ///
    /// # Errors
    /// It is no JSON, or a key is missing, unknown, or of another type.
    pub fn parse(path: &std::path::Path, text: &str) -> Result<Request, RequestError> {
        serde_json::from_str(text)
            .map_err(|error| RequestError::Text { path: path.to_owned(), reason: error.to_string() })
    }
}
