//! The command line, each flag in one place together with its help.

mod sampling;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use plimsoll_memory::ByteSize;

pub use sampling::SamplingArgs;

/// Train, fine-tune and run language models in the memory you have.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what a training run needs, what every byte is for, and how long a step takes
    Plan(PlanArgs),
    /// Train a model, or fine-tune one
    Train(TrainArgs),
    /// Measure a model's loss on a text
    Eval(EvalArgs),
    /// Continue a prompt
    Generate(GenerateArgs),
    /// Change a model's format or type: Hugging Face to GGUF and back, or quantise it
    Convert(ConvertArgs),
    /// Write a model with an adapter in its weights
    Merge(MergeArgs),
    /// Show what a model's files hold
    Inspect(InspectArgs),
    /// Show what this machine has and what of it may be used
    Doctor(DoctorArgs),
    /// List every key of the configuration with its default
    Config(ConfigArgs),
}

/// A configuration and what is changed of it.
#[derive(Debug, Args)]
pub struct ConfigSource {
    /// Configuration file (YAML)
    pub config: Option<PathBuf>,
    /// Change one key, for example training.batch_size=4 (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Model: a folder, a .gguf file, or a name such as smollm2-135m (model.path)
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Sequences of a micro-batch (training.batch_size)
    #[arg(long, value_name = "N")]
    pub batch_size: Option<String>,
    /// Tokens of a sequence (data.sequence_length)
    #[arg(long, value_name = "N")]
    pub sequence_length: Option<String>,
    /// Load line, for example 8GiB (memory.device_budget)
    #[arg(long, value_name = "SIZE")]
    pub budget: Option<String>,
    /// f32 or bf16 (training.mixed_precision)
    #[arg(long, value_name = "TYPE")]
    pub mixed_precision: Option<String>,
    /// none or full (training.gradient_checkpointing)
    #[arg(long, value_name = "FORM")]
    pub gradient_checkpointing: Option<String>,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub source: ConfigSource,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct TrainArgs {
    #[command(flatten)]
    pub source: ConfigSource,
    /// Continue the run in output.dir from its last checkpoint
    #[arg(long)]
    pub resume: bool,
    /// Threads; by default one a core that may be used. The results do not depend on it
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print the report as one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Model: a folder or a .gguf file
    #[arg(long)]
    pub model: String,
    /// Text file
    #[arg(long)]
    pub data: PathBuf,
    /// Tokens of a window; each is scored alone
    #[arg(long, default_value_t = 512)]
    pub sequence_length: u64,
    /// Type of activations, f32 or bf16; matrices stay as they are stored unless this takes less room
    #[arg(long, default_value = "f32")]
    pub dtype: String,
    /// Quantise the linears while loading: nf4, fp4, int8, q8_0, q5_0, q5_1, q4_0, q4_1, q4_k or q6_k
    #[arg(long, value_name = "TYPE")]
    pub quantize: Option<String>,
    /// Memory that may be used, for example 2GiB
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Threads; by default one a core that may be used. The results do not depend on it
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Model: a folder or a .gguf file
    #[arg(long)]
    pub model: String,
    /// Text to continue
    #[arg(long)]
    pub prompt: String,
    /// New tokens at most
    #[arg(long, default_value_t = 128)]
    pub max_tokens: usize,
    /// Take the prompt as what a user says, in the model's chat template, and stop where the answer ends
    #[arg(long)]
    pub chat: bool,
    /// What the system says first in the chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Stop before an end-of-sequence token instead of going on through it
    #[arg(long)]
    pub stop_at_eos: bool,
    /// Type of activations, f32 or bf16; matrices stay as they are stored unless this takes less room
    #[arg(long, default_value = "f32")]
    pub dtype: String,
    /// Type of the key-value cache, f32 or bf16; by default that of the activations
    #[arg(long, value_name = "TYPE")]
    pub kv_cache: Option<String>,
    /// Quantise the linears while loading: nf4, fp4, int8, q8_0, q5_0, q5_1, q4_0, q4_1, q4_k or q6_k
    #[arg(long, value_name = "TYPE")]
    pub quantize: Option<String>,
    /// Memory that may be used, for example 1GiB
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Threads; by default one a core that may be used. The results do not depend on it
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

/// How a model is written.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Where to: a name that ends with .gguf, or a folder in Hugging Face's format
    #[arg(long)]
    pub output: PathBuf,
    /// Type of the matrices: f32, bf16, f16; in a folder nf4, fp4 and int8 as bitsandbytes has them (nf4_f32 and fp4_f32
    /// without double quantisation); in a GGUF q8_0, q5_0, q5_1, q4_0, q4_1, q4_k and q6_k
    #[arg(long, default_value = "bf16")]
    pub dtype: String,
    /// Begin a further file of a folder where one would get larger, for example 5GB
    #[arg(long, value_name = "SIZE")]
    pub max_shard_size: Option<ByteSize>,
    /// Replace an output that is there
    #[arg(long)]
    pub force: bool,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Model: a folder, a .safetensors or a .gguf file
    #[arg(long)]
    pub model: String,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Base model: a folder, a .safetensors or a .gguf file
    #[arg(long)]
    pub model: String,
    /// Adapter's folder, as PEFT writes it
    #[arg(long, value_name = "DIR")]
    pub adapter: PathBuf,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A model's folder or file
    pub path: PathBuf,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
