//! The loop: prompt in, tokens out, until an end token or a limit.

use std::time::Instant;

use plimsoll_device::Device;
use plimsoll_step::{Decoder, StepError};

use crate::Sampler;

/// A generation that could not go on.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// There is nothing to continue.
    #[error("the prompt has no tokens; give at least one character")]
    EmptyPrompt,
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// New tokens, an end token not among them.
    pub tokens: Vec<u32>,
    /// Seconds from the first new token to the last one.
    pub decode_seconds: f64,
    /// Seconds that the prompt took.
    pub prompt_seconds: f64,
}

/// Continues `prompt` by at most `max_tokens` tokens. `each` sees every token as it comes and may end it by `false`.
pub fn generate<D: Device>(
    decoder: &mut Decoder<'_, D>,
    sampler: &mut Sampler,
    prompt: &[u32],
    max_tokens: usize,
    end_tokens: &[u32],
    mut each: impl FnMut(u32) -> bool,
) -> Result<Generated, GenerateError> {
    if prompt.is_empty() {
        return Err(GenerateError::EmptyPrompt);
    }
    let begun = Instant::now();
    sampler.observe(prompt);
    let mut logits = decoder.append(prompt)?;
    let prompt_seconds = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let mut tokens = Vec::new();
    while tokens.len() < max_tokens {
        let Some(token) = sampler.sample(&logits) else { break };
        if end_tokens.contains(&token) {
            break;
        }
        tokens.push(token);
        sampler.observe(&[token]);
        if !each(token) || tokens.len() == max_tokens {
            break;
        }
        logits = decoder.append(&[token])?;
    }
    Ok(Generated { tokens, decode_seconds: begun.elapsed().as_secs_f64(), prompt_seconds })
}
