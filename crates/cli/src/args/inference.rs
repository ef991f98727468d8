//! Which model answers, and within what: the flags that `generate`, `chat` and `eval` share.

use std::path::PathBuf;

use clap::Args;
use plimsoll_memory::ByteSize;

use crate::card::DeviceArgs;

/// More tokens than any model's context.
const MOST_TOKENS: usize = 1 << 24;

/// Which weights are computed with, and as what.
#[derive(Debug, Args)]
pub struct WeightArgs {
    /// Model: a folder, a .gguf file, or a hub id: org/name, org/name:file.gguf, org/name@revision
    #[arg(long)]
    pub model: String,
    /// Type of activations, f32 or bf16; matrices stay as they are stored unless this takes less room
    #[arg(long, default_value = "f32")]
    pub dtype: String,
    /// Round the inputs of linears to 8-bit integers, 32 with a scale, where they meet weights of integer types, as llama.cpp
    /// does: answers come faster, with AVX-512 VNNI prompts too, and now and then a token is another
    #[arg(long)]
    pub quantize_activations: bool,
    /// Adapter to use: a PEFT folder, or DIR=WEIGHT; several are added up
    #[arg(long, value_name = "DIR")]
    pub adapter: Vec<String>,
    /// Quantise the linears while loading: nf4, fp4, int8, q8_0, q5_0, q5_1, q4_0, q4_1, q4_k or q6_k;
    /// or groups of them: experts=q4_k,attention=q8_0
    #[arg(long, value_name = "TYPE")]
    pub quantize: Option<String>,
}

#[derive(Debug, Args)]
pub struct InferenceArgs {
    #[command(flatten)]
    pub weights: WeightArgs,
    /// Tokens that prompt and answers may have together; by default what the model was made for
    #[arg(long, value_name = "N", value_parser = tokens)]
    pub context: Option<usize>,
    /// Type of the key-value cache: f32, bf16, f16, int8 or int4. By default f32 for up to 32 MiB of cache, f16 beyond,
    /// and int8 where only that fits
    #[arg(long, value_name = "TYPE")]
    pub kv_cache: Option<String>,
    /// Memory that the process may use, for example 1GiB: weights, cache and workspace are planned to keep to it. Weights
    /// that do not fit are streamed from disk. The context is as large as fits unless --context is given
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    #[command(flatten)]
    pub disk: DiskArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Threads; by default one a core that may be used. The results do not depend on it
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// The disk for weights that do not fit in memory and cannot be read from the model's files as they are.
#[derive(Clone, Debug, Args)]
pub struct DiskArgs {
    /// Folder for weights that do not fit in memory and have to be converted first; by default the system's for large
    /// temporary files. Nothing is left there
    #[arg(long, value_name = "DIR")]
    pub disk_path: Option<PathBuf>,
    /// Disk that these weights may use; by default all that is free
    #[arg(long, value_name = "SIZE")]
    pub disk_budget: Option<ByteSize>,
}

/// A number of tokens.
pub fn tokens(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(tokens) if tokens <= MOST_TOKENS => Ok(tokens),
        _ => Err(format!("give a number of tokens, at most {MOST_TOKENS}")),
    }
}
