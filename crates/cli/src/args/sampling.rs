//! How tokens are drawn: the flags of the sampler's steps, in their order.

use clap::Args;
use plimsoll_generate::SamplerSettings;

use crate::failure::Failure;

#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Add a number to a token's logit; may be given more than once
    #[arg(long, value_name = "ID=NUMBER", value_parser = logit_bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Make tokens that occurred less likely; 1 for no penalty
    #[arg(long, value_name = "NUMBER", default_value_t = 1.0)]
    pub repetition_penalty: f64,
    /// Subtracted from the logit of tokens that occurred; 0 for no penalty
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0, allow_hyphen_values = true)]
    pub presence_penalty: f64,
    /// Subtracted from a token's logit for each time that the token occurred; 0 for no penalty
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0, allow_hyphen_values = true)]
    pub frequency_penalty: f64,
    /// The last tokens that count for the penalties; by default all
    #[arg(long, value_name = "N")]
    pub penalty_last_n: Option<usize>,
    /// Draw among this many of the likeliest tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub top_k: usize,
    /// Draw among the most typical tokens that together have this probability
    #[arg(long, value_name = "NUMBER", default_value_t = 1.0)]
    pub typical_p: f64,
    /// Draw among the likeliest tokens that together have this probability
    #[arg(long, value_name = "NUMBER", default_value_t = 1.0)]
    pub top_p: f64,
    /// Draw among tokens with at least this share of the likeliest one's probability
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0)]
    pub min_p: f64,
    /// 0 takes the likeliest token; 1 draws from the model's distribution
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0)]
    pub temperature: f64,
    /// Seed of the draws
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

impl SamplingArgs {
    pub fn settings(&self) -> SamplerSettings {
        SamplerSettings {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_last_n: self.penalty_last_n,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
        }
    }

    /// Refuses tokens that a vocabulary of so many does not have.
    pub fn check_tokens(&self, vocabulary: u64) -> Result<(), Failure> {
        match self.logit_bias.iter().find(|(token, _)| u64::from(*token) >= vocabulary) {
            Some((token, _)) => Err(Failure::usage(format!(
                "--logit-bias: the model has {vocabulary} tokens, from 0 on, and none of them is {token}"
            ))),
            None => Ok(()),
        }
    }
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let parts = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parts.ok_or_else(|| "give a token's id and a number, as 42=-1.5 or 42=-inf".to_owned())
}
