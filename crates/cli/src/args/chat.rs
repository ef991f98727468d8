//! The flags of `plimsoll chat`.

use clap::Args;

use super::{InferenceArgs, SamplingArgs, SpeculationArgs, StoppingArgs, inference};

#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub inference: InferenceArgs,
    /// Divide the model's layers among so many ranks of this machine, each a process with its own memory (docs/ranks.md)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
    /// The lines come from somebody who types them, although through the program that started the ranks
    #[arg(long, hide = true)]
    pub typed: bool,
    /// What the system says first
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Chat template to use instead of the model's: a Jinja file, or plain for `User:` and `Assistant:` before lines
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<String>,
    /// New tokens of an answer at most; by default what the context has room for
    #[arg(long, value_name = "N", value_parser = inference::tokens)]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub stopping: StoppingArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    /// Keep no file of the lines that were typed (else plimsoll/chat_history in XDG_STATE_HOME or ~/.local/state)
    #[arg(long)]
    pub no_history: bool,
    /// Print a JSON object for every turn, one a line
    #[arg(long)]
    pub json: bool,
}
