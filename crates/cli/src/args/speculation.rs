//! Guessing what comes next: the flags that `generate` and `chat` share.

use clap::Args;

use crate::failure::Failure;

/// Tokens of a guess where nobody says how many.
const USUAL_DRAFT_TOKENS: u64 = 4;

#[derive(Debug, Args)]
pub struct SpeculationArgs {
    /// Guess tokens and verify several in one pass, which changes none of them: lookup guesses that what followed the last
    /// tokens before follows them again
    #[arg(long, value_name = "HOW", value_parser = ["lookup"], conflicts_with = "draft_model")]
    pub speculative: Option<String>,
    /// Smaller model with the same vocabulary that guesses; it is kept in memory beside the model
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<String>,
    /// Tokens of a guess at most [default: 4]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..=23))]
    pub draft_tokens: Option<u64>,
}

impl SpeculationArgs {
    /// Whether anybody guesses.
    pub fn is_wanted(&self) -> bool {
        self.speculative.is_some() || self.draft_model.is_some()
    }

    /// Tokens of a guess, at most.
    pub fn draft_tokens(&self) -> u64 {
        self.draft_tokens.unwrap_or(USUAL_DRAFT_TOKENS)
    }

    /// Refuses the length of a guess where nobody guesses.
    pub fn check(&self) -> Result<(), Failure> {
        match self.draft_tokens {
            Some(_) if !self.is_wanted() => Err(Failure::usage(
                "--draft-tokens is the length of a guess, and nobody guesses; give --speculative lookup or --draft-model too",
            )),
            _ => Ok(()),
        }
    }
}
