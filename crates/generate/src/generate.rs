//! The loop: prompt in, text out, until something ends it.

use std::time::Instant;

use plimsoll_model::tokenizer::{Tokenizer, TokenizerError};
use plimsoll_step::StepError;

use crate::answer::Answer;
use crate::{Sampler, Session, StopStrings};

/// A generation that could not go on.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Tokens have no text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// There is nothing to continue.
    #[error("the prompt has no tokens; give at least one character")]
    EmptyPrompt,
    /// More than the cache holds.
    #[error(
        "the prompt has {tokens} tokens and the context holds {context}; shorten the prompt or enlarge the context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that the context holds.
        context: usize,
    },
    /// A model whose vocabulary is empty.
    #[error("the model gave no logits; its vocabulary is empty")]
    NoLogits,
    /// The model has said nothing that a token could be chosen by.
    #[error(
        "token {number} of the answer has no finite logits: some weights or activations are not finite; look for the adapter or the conversion that they come from, or try --dtype f32"
    )]
    NotFinite {
        /// Which token of the answer was to be chosen, from 1.
        number: usize,
    },
}

/// What ends an answer, besides the end of the context.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    /// New tokens at most.
    pub max_tokens: usize,
    /// Tokens before which the answer ends.
    pub stop_tokens: Vec<u32>,
    /// Texts before which it ends.
    pub stop_strings: StopStrings,
}

/// What ended an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// This stop token came.
    StopToken(u32),
    /// This stop string came.
    StopString(String),
    /// It has as many tokens as it may have.
    MaxTokens,
    /// Prompt and answer fill the context.
    Context,
    /// Somebody wanted it to end.
    Interrupted,
}

impl StopReason {
    /// A word for it: `stop_token`, `stop_string`, `max_tokens`, `context`, `interrupted`.
    pub fn name(&self) -> &'static str {
        match self {
            StopReason::StopToken(_) => "stop_token",
            StopReason::StopString(_) => "stop_string",
            StopReason::MaxTokens => "max_tokens",
            StopReason::Context => "context",
            StopReason::Interrupted => "interrupted",
        }
    }
}

/// What became of guesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafted {
    /// Tokens that were guessed and verified.
    pub tokens: u64,
    /// Those that were the answer's next ones.
    pub accepted: u64,
}

impl Drafted {
    /// What has been added to an earlier count.
    pub(crate) fn since(self, before: Drafted) -> Drafted {
        Drafted { tokens: self.tokens - before.tokens, accepted: self.accepted - before.accepted }
    }

    /// The share that came true; `None` where nothing was guessed.
    pub fn acceptance_rate(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.accepted as f64 / self.tokens as f64)
    }
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// New tokens: without a stop token, with the tokens of a stop string.
    pub tokens: Vec<u32>,
    /// Their text up to the stop string, special tokens left out.
    pub text: String,
    /// Why there are no more.
    pub stop_reason: StopReason,
    /// How many of the prompt's tokens were in the cache already.
    pub reused_tokens: usize,
    /// Tokens that a [`Draft`](crate::Draft) guessed, and how many of them came true.
    pub drafted: Drafted,
    /// Seconds that the prompt took.
    pub prompt_seconds: f64,
    /// Seconds from the first new token to the last one.
    pub decode_seconds: f64,
}

impl Generated {
    /// Speed after the first token, which is the prompt's.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens.len().saturating_sub(1) as f64 / self.decode_seconds.max(f64::MIN_POSITIVE)
    }
}

impl Session<'_> {
    /// Continues `prompt`. `on_text` sees the text as it comes, never a part of a character or of a stop string;
    /// `interrupted` is asked after every token and between the passes of a long prompt. Rows of the head beyond the
    /// tokenizer's vocabulary, which many models have to fill up a round number, are never drawn.
    ///
    /// # Errors
    /// As of [`Session::prefill`]; or those of `on_text`.
    pub fn generate<E: From<GenerateError>>(
        &mut self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        sampler: &mut Sampler,
        limits: &Limits,
        interrupted: &dyn Fn() -> bool,
        mut on_text: impl FnMut(&str) -> Result<(), E>,
    ) -> Result<Generated, E> {
        let (begun, drafted) = (Instant::now(), self.drafted());
        let prefill = self.prefill(prompt, interrupted)?;
        let room = self.context().saturating_sub(prompt.len());
        let mut answer = Answer::new(tokenizer, limits, room);
        answer.out.reused_tokens = prefill.reused;
        answer.out.prompt_seconds = begun.elapsed().as_secs_f64();
        let Some(mut logits) = prefill.logits else { return Ok(answer.out) };
        sampler.observe(prompt);
        let mut show = |piece: String| if piece.is_empty() { Ok(()) } else { on_text(&piece) };
        let begun = Instant::now();
        let reason = loop {
            if let Some(full) = answer.is_full() {
                break full;
            }
            if interrupted() {
                break StopReason::Interrupted;
            }
            if let Some(last) = answer.out.tokens.last() {
                logits = self.next(*last, answer.left().saturating_sub(1))?;
            }
            let (piece, end) = answer.take(&logits, sampler)?;
            show(piece)?;
            if let Some(end) = end {
                break end;
            }
        };
        self.forget_guesses()?;
        answer.out.decode_seconds = begun.elapsed().as_secs_f64();
        answer.out.drafted = self.drafted().since(drafted);
        let (rest, out) = answer.finish(reason)?;
        show(rest)?;
        Ok(out)
    }
}
