//! Guessing what comes next: the flags that `generate` and `chat` share.

use clap::Args;

#[derive(Debug, Args)]
pub struct SpeculationArgs {
    /// Guess tokens and verify several in one pass, which changes none of them: lookup guesses that what followed the last
    /// tokens before follows them again
    #[arg(long, value_name = "HOW", value_parser = ["lookup"], conflicts_with = "draft_model")]
    pub speculative: Option<String>,
    /// Smaller model with the same vocabulary that guesses; it is kept in memory beside the model
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<String>,
    /// Tokens of a guess at most
    #[arg(long, value_name = "K", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=23))]
    pub draft_tokens: u64,
}

impl SpeculationArgs {
    /// Whether anybody guesses.
    pub fn is_wanted(&self) -> bool {
        self.speculative.is_some() || self.draft_model.is_some()
    }
}
