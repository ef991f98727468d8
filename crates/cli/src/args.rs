//! The command line, each flag in one place together with its help.

mod bench;
mod chat;
mod estimate;
mod inference;
mod monitor;
mod plan_inference;
mod sampling;
mod snapshot;
mod speculation;
mod stopping;
mod watch;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand};
use plimsoll_memory::ByteSize;
use plimsoll_plan::{ExportFormat, MOST_DOLLARS, Sought};

use crate::card::DeviceArgs;

pub use bench::{Bench, BenchArgs, BenchDiskArgs, BenchMemoryArgs, BenchRunArgs, BenchStepArgs};
pub use chat::ChatArgs;
pub use estimate::EstimateArgs;
pub use inference::{DiskArgs, InferenceArgs, WeightArgs};
pub use monitor::MonitorArgs;
pub use plan_inference::PlanInferenceArgs;
pub use sampling::SamplingArgs;
pub use snapshot::SnapshotArgs;
pub use speculation::SpeculationArgs;
pub use stopping::StoppingArgs;
pub use watch::WatchArgs;

/// The arguments with every value that begins with a sign and a digit joined to its flag: `--memory -5GiB` is
/// `--memory=-5GiB`, a value that is wrong, and not a flag called `-5`, of which there is none.
pub fn with_signs(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut joined: Vec<OsString> = Vec::new();
    let mut only_values = false;
    for argument in arguments {
        let bytes = argument.as_encoded_bytes();
        let signed = bytes.first() == Some(&b'-')
            && (matches!(bytes.get(1), Some(b'0'..=b'9' | b'.'))
                || matches!(
                    bytes.get(1..).map(<[u8]>::to_ascii_lowercase).as_deref(),
                    Some(b"inf" | b"nan")
                ));
        only_values |= bytes == b"--";
        match joined.last_mut() {
            Some(flag) if signed && !only_values && is_flag(flag) => {
                flag.push("=");
                flag.push(argument);
            }
            _ => joined.push(argument),
        }
    }
    joined
}

/// `plan --stack hf ...` asks what `estimate --stack hf ...` asks: a stack is somebody else's, and its flags are `estimate`'s.
pub fn with_stacks_estimated(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let is_stack = |argument: &OsString| {
        let bytes = argument.as_encoded_bytes();
        bytes == b"--stack" || bytes.starts_with(b"--stack=")
    };
    let given = arguments.iter().take_while(|argument| *argument != "--");
    if given.skip(2).any(is_stack)
        && let Some(command) = arguments.get_mut(1).filter(|command| *command == "plan")
    {
        *command = "estimate".into();
    }
    arguments
}

/// Whether an argument is a long flag without its value.
fn is_flag(argument: &OsString) -> bool {
    let bytes = argument.as_encoded_bytes();
    bytes.starts_with(b"--") && bytes.len() > 2 && !bytes.contains(&b'=')
}

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
    /// Say what a run of PyTorch's stacks would take: Hugging Face, PEFT, torchtune, litgpt, DeepSpeed, FSDP, Unsloth
    Estimate(EstimateArgs),
    /// Write what was planned as a configuration of another program: deepspeed, accelerate, transformers, peft, bitsandbytes, axolotl,
    /// llama-factory, torchtune or torchtitan
    Export(ExportArgs),
    /// Write a plan or a run as one page for a browser: memory at the peak and through the step, planned and measured, loss and speed
    Report(ReportArgs),
    /// Show what PyTorch recorded of its memory: the peak and what was live then, fragmentation, what only grows
    Snapshot(SnapshotArgs),
    /// Show what a model will read of chats and instructions, and which tokens of it are trained
    Preview(PreviewArgs),
    /// Train a model, or fine-tune one
    Train(TrainArgs),
    /// Measure a model's loss on a text
    Eval(EvalArgs),
    /// Continue a prompt, or many
    Generate(GenerateArgs),
    /// Talk with a model
    Chat(ChatArgs),
    /// Measure what techniques save and what they cost
    Bench(BenchArgs),
    /// Change a model's format or type: Hugging Face to GGUF and back, or quantise it
    Convert(ConvertArgs),
    /// Write a model with adapters in its weights
    Merge(MergeArgs),
    /// Show what a model's files hold
    Inspect(InspectArgs),
    /// List the devices and machines that plans can be made for
    Hardware(HardwareArgs),
    /// Measure this machine: products by type and shape, attention, memory, disk. Plans use what was found from then on
    Calibrate(CalibrateArgs),
    /// Watch the memory of a process, a control group, GPUs or a command, ours or not; or say what ended a run (--post-mortem)
    Monitor(MonitorArgs),
    /// Show runs while they go on, or afterwards: on the terminal, in a browser (--serve), or as lines
    Watch(WatchArgs),
    /// Show what this machine has and what of it may be used; or say what a log of memory that ran out means
    Doctor(DoctorArgs),
    /// List every key of the configuration with its default
    Config(ConfigArgs),
    /// Run a command that ends where the process ends that has started this one
    #[command(hide = true)]
    EndWithParent {
        /// The process's number
        parent: u32,
        /// The command
        #[arg(last = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
}

/// A configuration and what is changed of it.
#[derive(Clone, Debug, Default, Args)]
pub struct ConfigSource {
    /// Configuration file (YAML)
    pub config: Option<PathBuf>,
    /// Change one key, for example training.batch_size=4 (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Model: a folder, a .gguf file, a hub id such as org/name, or a name such as smollm2-135m (model.path)
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Sequences of a micro-batch (training.batch_size)
    #[arg(long, value_name = "N")]
    pub batch_size: Option<String>,
    /// Tokens of a sequence (data.sequence_length)
    #[arg(long, value_name = "N")]
    pub sequence_length: Option<String>,
    /// Load line: memory that the run may take, for example 8GiB; auto: what is free, less a margin. Never more than the
    /// container and `ulimit` allow (memory.device_budget)
    #[arg(long, alias = "budget", value_name = "SIZE")]
    pub memory: Option<String>,
    /// f32, bf16, fp16 or fp8 (training.mixed_precision)
    #[arg(long, value_name = "TYPE")]
    pub mixed_precision: Option<String>,
    /// none, full, sqrt or another form (training.gradient_checkpointing)
    #[arg(long, value_name = "FORM")]
    pub gradient_checkpointing: Option<String>,
}

impl ConfigSource {
    /// Whether a flag goes over the file.
    pub fn changes_anything(&self) -> bool {
        self.model.is_some() || self.changes_more_than_the_model()
    }

    /// Whether a flag goes over the file that is not the model's.
    pub fn changes_more_than_the_model(&self) -> bool {
        let ConfigSource {
            config: _,
            set,
            model: _,
            batch_size,
            sequence_length,
            memory,
            mixed_precision,
            gradient_checkpointing,
        } = self;
        let flags = [batch_size, sequence_length, memory, mixed_precision, gradient_checkpointing];
        !set.is_empty() || flags.iter().any(|flag| flag.is_some())
    }
}

/// The machine that a plan is for, where it is not this one, and its ranks.
#[derive(Debug, Default, Args)]
pub struct MachineArgs {
    /// Plan for a machine that is not here: rtx-4090, 8xh100, 16x8xh100 or a .yaml file (plimsoll hardware lists what is known)
    #[arg(long, value_name = "NAME|FILE")]
    pub hardware: Option<String>,
    /// Host memory of each such machine, instead of what is common
    #[arg(long, value_name = "SIZE")]
    pub host_memory: Option<ByteSize>,
    /// Plan for so many ranks, as `train --ranks` starts them; how they divide the work is in parallel.* (docs/ranks.md)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub source: ConfigSource,
    /// Plan what a file of another program says: DeepSpeed's JSON, TrainingArguments, axolotl, LLaMA-Factory, torchtune, accelerate, PEFT's
    /// adapter_config, or a training script. Flags go over it
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub import: Option<PathBuf>,
    /// Plan a run of another stack: hf, peft, torchtune, litgpt, deepspeed, fsdp or unsloth. The other flags are then those of `estimate`
    #[arg(long, value_name = "STACK", conflicts_with_all = ["config", "import", "elsewhere"])]
    pub stack: Option<String>,
    /// Plan for another machine: only the given budgets count, not the limits of this machine; a memory budget is needed
    #[arg(long, conflicts_with = "hardware")]
    pub elsewhere: bool,
    #[command(flatten)]
    pub machine: MachineArgs,
    #[command(flatten)]
    pub inference: PlanInferenceArgs,
    /// Show the same step on several machines side by side, for example rtx-4090,a100-80,8xh100
    #[arg(long, value_name = "NAMES", value_delimiter = ',', conflicts_with_all = ["hardware", "elsewhere", "find", "timeline", "zero_table"])]
    pub compare: Vec<String>,
    /// Find the largest batch_size, sequence_length, rank or model that fits, or the devices that it fits (hardware)
    #[arg(long, value_name = "WHAT", conflicts_with_all = ["timeline", "zero_table"])]
    pub find: Option<Sought>,
    /// Search everything that the configuration leaves open for what is best: fastest, least_memory, longest_sequence, largest_batch,
    /// smallest_device or cheapest (planning.goal)
    #[arg(long, value_name = "GOAL", conflicts_with = "find")]
    pub goal: Option<String>,
    /// What a search may choose: lossless (no bit changes but by the order of sums), proven (besides, what is published to train as
    /// well) or anything (planning.quality)
    #[arg(long, value_name = "CLASS", conflicts_with = "find")]
    pub quality: Option<String>,
    /// Draw what a search has found between memory and time: an .svg picture
    #[arg(long, value_name = "FILE", conflicts_with_all = ["find", "compare"])]
    pub pareto: Option<PathBuf>,
    /// Tokens that the run trains on, for its hours and its price: 300M, 15B or a number
    #[arg(long, value_name = "N", value_parser = tokens_of_a_run)]
    pub tokens: Option<u64>,
    /// US dollars an hour for each device, instead of the catalogue's
    #[arg(long, value_name = "DOLLARS", value_parser = dollars)]
    pub price: Option<f64>,
    /// Write every allocation of the step with its birth and death: a .json file for Perfetto or chrome://tracing, or an .svg
    /// picture
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    /// Show what a rank holds by stage of ZeRO and number of ranks, beside the paper's formula
    #[arg(long)]
    pub zero_table: bool,
    /// Show what each technique of the plan saves and costs, from the naive step to the planned one, and what would come next
    #[arg(long, conflicts_with = "compare")]
    pub waterfall: bool,
    /// Show what is allocated, reserved, free and lost in gaps, by phase, and what each technique that is on saves: the step is run dry
    /// without it
    #[arg(long, conflicts_with = "compare")]
    pub breakdown: bool,
    /// Show what activations take for these shapes, with and without checkpointing and flash attention: 8x2048,16x512
    #[arg(long, value_name = "BATCHxTOKENS", value_delimiter = ',', conflicts_with = "compare")]
    pub activations: Vec<String>,
    /// Say why a key of the configuration has its value in the plan, and what other values would do: training.batch_size,
    /// memory.offload.optimizer
    #[arg(long, value_name = "KEY", conflicts_with_all = ["compare", "waterfall", "zero_table"])]
    pub explain: Option<String>,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// deepspeed, accelerate, transformers, peft, bitsandbytes, axolotl, llama-factory, torchtune or torchtitan
    pub format: ExportFormat,
    #[command(flatten)]
    pub source: ConfigSource,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Write to this file; of JSON, what could not be carried over goes to FILE.notes.txt. Without it, to standard output
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(mut_arg("config", |own| own.value_name("RUN_OR_PLAN").help(
    "Folder of a run, configuration file (YAML), or document that plan --json wrote",
)))]
pub struct ReportArgs {
    #[command(flatten)]
    pub source: ConfigSource,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Write the page to this file, for example report.html
    #[arg(long, short, value_name = "FILE", required_unless_present = "json")]
    pub output: Option<PathBuf>,
    /// Print what the page says as one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

/// A number of tokens: `300M`, `15B`, `1e9`.
fn tokens_of_a_run(text: &str) -> Result<u64, String> {
    let wrong = || "write for example 300M, 15B or a number of tokens, at least 1".to_owned();
    let lower = text.trim().to_ascii_lowercase();
    let units = [("k", 1e3), ("m", 1e6), ("b", 1e9), ("t", 1e12)];
    let (number, unit) = units
        .into_iter()
        .find_map(|(unit, times)| Some((lower.strip_suffix(unit)?, times)))
        .unwrap_or((&lower, 1.0));
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    let tokens = number * unit;
    if tokens.is_finite() && (1.0..=1e18).contains(&tokens) { Ok(tokens as u64) } else { Err(wrong()) }
}

/// A price.
fn dollars(text: &str) -> Result<f64, String> {
    let price = text.trim().trim_start_matches('$').parse::<f64>().ok();
    let price = price.filter(|price| (0.0..=MOST_DOLLARS).contains(price));
    price.ok_or_else(|| format!("write dollars an hour, from 0 to {MOST_DOLLARS} a device, for example 0.45"))
}

#[derive(Debug, Args)]
pub struct HardwareArgs {
    /// A device or a machine: rtx-4090, 8xh100, or a .yaml file
    pub name: Option<String>,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Write this machine's description to a file, for plan --hardware FILE on any machine
    #[arg(long, short, value_name = "FILE.yaml")]
    pub output: Option<PathBuf>,
    /// Measure the disk of this folder too
    #[arg(long, value_name = "FOLDER")]
    pub disk: Option<PathBuf>,
    /// Threads that compute; all cores that this process may use by default
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PreviewArgs {
    #[command(flatten)]
    pub source: ConfigSource,
    /// File of samples (data.train)
    #[arg(long, value_name = "FILE")]
    pub data: Option<String>,
    /// chat or instruction (data.format)
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Samples to show; all are counted
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub samples: u64,
    /// Print one JSON document and nothing else, with the ids and weights of all tokens of the samples shown
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
    /// Train on so many ranks of this machine, each a process with its own share of the batch (docs/ranks.md)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
    /// This rank was started by `--ranks` of another process
    #[arg(long, hide = true)]
    pub launched: bool,
    /// Threads of a rank; by default one a core that may be used. The results do not depend on it
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Show the run on the whole terminal: curves, memory against the load line, the step, tiers, events. Lines where there is no
    /// terminal
    #[arg(long, conflicts_with = "json")]
    pub dashboard: bool,
    /// Print the report as one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    pub weights: WeightArgs,
    /// Text file, or file of samples
    #[arg(long)]
    pub data: PathBuf,
    /// text, chat or instruction (data.format). Of chats and instructions, the tokens that training would train are
    /// scored, in the windows of its validation
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Change how samples are read, for example data.chat_template=alpaca or data.train_on=all (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Tokens of a window, each scored alone; by default 512, or as many positions as the model has learned
    #[arg(long)]
    pub sequence_length: Option<u64>,
    /// Score every window as generation would see it: through a key-value cache of this type (f32, bf16, f16, int8 or
    /// int4)
    #[arg(long, value_name = "TYPE")]
    pub kv_cache: Option<String>,
    /// Memory that the process may use, for example 2GiB. Weights that do not fit are streamed from disk
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    #[command(flatten)]
    pub disk: DiskArgs,
    /// Divide the model's layers among so many ranks of this machine, each a process with its own memory (docs/ranks.md)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Threads; by default one a core that may be used. The results do not depend on it
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").required(true).args(["prompt", "prompts"])))]
pub struct GenerateArgs {
    #[command(flatten)]
    pub inference: InferenceArgs,
    /// Divide the model's layers among so many ranks of this machine, each a process with its own memory (docs/ranks.md)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
    /// Text to continue; - reads it from standard input, without its last line break
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// File of prompts: one a line, or with the ending .jsonl an object a line with a text called prompt. Empty lines
    /// are left out. Several are answered at once. Off a terminal it prints an object a line, as --json does for one prompt
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Prompts of a file that are answered at once; by default as many as memory allows, up to 16
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024), conflicts_with = "prompt")]
    pub parallel: Option<u64>,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    /// New tokens at most
    #[arg(long, visible_alias = "max-new-tokens", value_name = "N", default_value_t = 128)]
    #[arg(value_parser = inference::tokens)]
    pub max_tokens: usize,
    /// Answers to a prompt: the first with the given seed, each further one with the next seed
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub samples: u64,
    /// Take the prompt as what a user says, in the model's chat template, and stop where the answer ends
    #[arg(long)]
    pub chat: bool,
    /// What the system says first in the chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Chat template to use instead of the model's: a Jinja file, or plain for `User:` and `Assistant:` before lines
    #[arg(long, value_name = "FILE", requires = "chat")]
    pub chat_template: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub stopping: StoppingArgs,
    /// Stop before an end-of-sequence token instead of going on through it
    #[arg(long)]
    pub stop_at_eos: bool,
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
    /// without double quantisation), and mxfp4 for experts of gpt-oss; in a GGUF q8_0, q5_0, q5_1, q4_0, q4_1, q4_k, q6_k and mxfp4.
    /// Groups of weights may differ: experts=q4_k,attention=q8_0,bf16
    #[arg(long, default_value = "bf16")]
    pub dtype: String,
    /// Largest file of a folder's weights, for example 5GB; what goes beyond begins a new file
    #[arg(long, value_name = "SIZE")]
    pub max_shard_size: Option<ByteSize>,
    /// Replace an existing output
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
    /// Make a mixture of experts of a dense model: N copies of each feed-forward part, of which a token goes to two by a random router
    #[arg(long, value_name = "N")]
    pub upcycle: Option<u64>,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Base model: a folder, a .safetensors or a .gguf file
    #[arg(long)]
    pub model: String,
    /// Adapter to merge: a PEFT folder, or DIR=WEIGHT; several are added up
    #[arg(long, value_name = "DIR", required = true)]
    pub adapter: Vec<String>,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A folder or file of a model, an adapter, a tokenizer, a checkpoint or a run; a hub id; or a name of the catalogue
    pub path: String,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Show chat templates as a whole
    #[arg(long)]
    pub template: bool,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// A log or a message of memory that ran out, of any program; - is standard input. Without it, this machine is shown
    pub log: Option<PathBuf>,
    /// The configuration of that run (YAML), to plan what would fit
    #[arg(long, value_name = "FILE", requires = "log")]
    pub config: Option<PathBuf>,
    /// The model of that run
    #[arg(long, value_name = "MODEL", requires = "log")]
    pub model: Option<String>,
    /// A file of that run's stack, as estimate takes it (may be repeated): the run is explained by its phases, run dry
    #[arg(long = "estimate", value_name = "FILE", requires = "log", conflicts_with_all = ["config", "set"])]
    pub estimate: Vec<PathBuf>,
    /// One key of its configuration, for example training.batch_size=4 (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "log")]
    pub set: Vec<String>,
    /// The device of that run, as in plan --hardware; without it, one of the memory that the message names
    #[arg(long, value_name = "NAME|FILE", requires = "log")]
    pub hardware: Option<String>,
    /// Measure this machine anew instead of showing what was measured before; disks are measured anew when plans next use
    /// them
    #[arg(long, conflicts_with = "log")]
    pub measure: bool,
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
    fn signs_belong_to_values() {
        let joined = |arguments: &[&str]| with_signs(arguments.iter().map(OsString::from));
        assert_eq!(joined(&["p", "--memory", "-5GiB"]), ["p", "--memory=-5GiB"]);
        assert_eq!(
            joined(&["p", "--top-p", "-.5", "--temperature", "-inf"]),
            ["p", "--top-p=-.5", "--temperature=-inf"]
        );
        for same in
            [vec!["p", "--set", "a=-1", "-h"], vec!["p", "--stop=x", "-1"], vec!["--", "--memory", "-5"]]
        {
            assert_eq!(joined(&same), same);
        }
    }

    #[test]
    fn a_plan_of_another_stack_is_an_estimate() {
        let made = |arguments: &[&str]| with_stacks_estimated(arguments.iter().map(OsString::from).collect());
        assert_eq!(made(&["p", "plan", "--stack", "hf"]), ["p", "estimate", "--stack", "hf"]);
        assert_eq!(made(&["p", "plan", "--model=x", "--stack=peft"])[1], "estimate");
        for same in [
            vec!["p", "plan", "--model", "x"],
            vec!["p", "plan", "--", "--stack"],
            vec!["p", "train", "--stack"],
        ] {
            assert_eq!(made(&same), same);
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
