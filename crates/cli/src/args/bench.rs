//! The flags of `plimsoll bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use plimsoll_memory::ByteSize;

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub bench: Bench,
}

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Train a few steps with each memory technique, and compare: one after the other, and each alone
    ///
    /// Every setting is trained by a process of its own, one at a time, so that the resident set is that setting's.
    /// docs/techniques.md explains the techniques and the JSON document.
    Memory(BenchMemoryArgs),
    /// Train a few steps and show where the time goes: by operation, beside what the machine can do at most
    ///
    /// docs/measuring.md explains the table and the JSON document.
    Step(BenchStepArgs),
    /// Write and read a disk one after the other, directly and through the page cache, in blocks and queues of several sizes
    ///
    /// docs/disk.md explains the table and the JSON document.
    Disk(BenchDiskArgs),
}

#[derive(Debug, Args)]
pub struct BenchDiskArgs {
    /// Folder on the disk; by default the system's for large temporary files
    #[arg(long, value_name = "DIR")]
    pub path: Option<PathBuf>,
    /// Bytes to write and read each way
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub size: ByteSize,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

/// What is trained in a benchmark.
#[derive(Debug, Args)]
pub struct BenchRunArgs {
    /// Configuration file (YAML) for what no flag here says
    pub config: Option<PathBuf>,
    /// Change one key of what is trained (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Model; by default models/SmolLM2-135M-Instruct.Q4_1.gguf, which examples/get-smollm2 fetches
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Text to train on; by default examples/data/shakespeare.txt
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Optimizer steps of each setting
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Threads; by default one a core that may be used. The results do not depend on it
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct BenchMemoryArgs {
    #[command(flatten)]
    pub run: BenchRunArgs,
    /// Sequences of a step; by default the configuration's, and 4 without one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub batch_size: Option<u64>,
    /// Tokens of a sequence; by default the configuration's, and 512 without one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=16_777_216))]
    pub sequence_length: Option<u64>,
    /// These techniques alone, by their names in the table
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Plan and train nothing
    #[arg(long)]
    pub plan_only: bool,
    /// Write memory.json, memory.md and the pictures memory-ladder.svg and checkpointing.svg into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct BenchStepArgs {
    #[command(flatten)]
    pub run: BenchRunArgs,
    /// Sequences of a step; by default the configuration's, and 4 without one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub batch_size: Option<u64>,
    /// Tokens of a sequence; by default the configuration's, and 512 without one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=16_777_216))]
    pub sequence_length: Option<u64>,
    /// Take the machine's speeds as they were measured before, instead of measuring them now
    #[arg(long)]
    pub kept_speeds: bool,
}
