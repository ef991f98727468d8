//! A decoder that knows which tokens are in its cache, so that a common prefix of two prompts is computed once; and guesses of what comes
//! next, which are computed with it.

use std::collections::VecDeque;

use plimsoll_step::{DecodeSettings, Decoder, ExpertTraffic};

use crate::generate::Drafted;
use crate::{Draft, GenerateError};

/// A decoder with a cache for one sequence at a time.
pub struct Session<'a> {
    decoder: Decoder<'a>,
    context: usize,
    pass_tokens: usize,
    /// The tokens in the cache, one a position.
    cached: Vec<u32>,
    /// What follows the prompt that was read last, as long as the prompt is in the cache.
    after_prompt: Option<AfterPrompt>,
    draft: Option<Box<dyn Draft + 'a>>,
    /// Tokens of a guess at most.
    drafted_tokens: usize,
    /// Guessed tokens at the end of the cache, with the logits of what would follow each of them.
    ahead: VecDeque<(u32, Vec<f32>)>,
    drafted: Drafted,
}

/// The logits that a prompt ended with: further samples of it begin with them.
struct AfterPrompt {
    length: usize,
    logits: Vec<f32>,
}

/// A prompt that is in the cache.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefill {
    /// Logits `[V]` of what follows it; `None` where reading it was interrupted.
    pub logits: Option<Vec<f32>>,
    /// How many of its tokens were in the cache already.
    pub reused: usize,
}

impl<'a> Session<'a> {
    /// A session with an empty cache, of a decoder that was made with these settings.
    pub fn new(mut decoder: Decoder<'a>, settings: &DecodeSettings) -> Session<'a> {
        decoder.truncate(0);
        let tokens = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Session {
            decoder,
            context: tokens(settings.context),
            pass_tokens: tokens(settings.prompt_chunk_tokens).max(1),
            cached: Vec::new(),
            after_prompt: None,
            draft: None,
            drafted_tokens: tokens(settings.drafted_tokens),
            ahead: VecDeque::new(),
            drafted: Drafted::default(),
        }
    }

    /// From here on `draft` guesses as many tokens as the decoder was made to verify at once.
    #[must_use]
    pub fn with_draft(self, draft: Box<dyn Draft + 'a>) -> Session<'a> {
        Session { draft: Some(draft), ..self }
    }

    /// What became of all guesses so far.
    pub fn drafted(&self) -> Drafted {
        self.drafted
    }

    /// From here on the other ranks, which have the other layers, [`follow`](Self::follow) this one, the first.
    pub fn lead(&mut self) {
        self.decoder.lead();
    }

    /// Computes what the first rank's session computes, until that one is [dismissed](Self::dismiss).
    ///
    /// # Errors
    /// The step fails, or the first rank is gone.
    pub fn follow(mut self) -> Result<(), GenerateError> {
        Ok(self.decoder.follow()?)
    }

    /// Lets the ranks go that follow this one.
    ///
    /// # Errors
    /// One of them is gone.
    pub fn dismiss(&mut self) -> Result<(), GenerateError> {
        Ok(self.decoder.dismiss()?)
    }

    /// How often experts that come by themselves were used, and read for it; `None` where they do not.
    pub fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.decoder.expert_traffic()
    }

    /// Tokens that prompt and answer may have together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The tokens in the cache.
    pub fn cached(&self) -> &[u32] {
        &self.cached
    }

    /// Puts a prompt into the cache. A prefix that the cache has already is not computed again. Between two passes
    /// `interrupted` is asked; what was computed until then stays in the cache.
    ///
    /// # Errors
    /// The prompt is empty or longer than the context, has a token that the model does not know, or the step fails.
    pub fn prefill(
        &mut self,
        prompt: &[u32],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Prefill, GenerateError> {
        self.forget_guesses()?;
        let (tokens, context) = (prompt.len(), self.context);
        let Some(before_last) = tokens.checked_sub(1) else { return Err(GenerateError::EmptyPrompt) };
        if tokens > context {
            return Err(GenerateError::PromptTooLong { tokens, context });
        }
        let common = prompt.iter().zip(&self.cached).take_while(|(new, old)| new == old).count();
        if common == tokens {
            self.go_back_to(tokens);
            if let Some(after) = self.after_prompt.as_ref().filter(|after| after.length == tokens) {
                return Ok(Prefill { logits: Some(after.logits.clone()), reused: tokens });
            }
        }
        // The last token is computed again where what follows it is not known any more.
        self.go_back_to(common.min(before_last));
        let reused = self.cached.len();
        let mut logits = Vec::new();
        for pass in prompt.get(reused..).unwrap_or_default().chunks(self.pass_tokens) {
            if interrupted() {
                return Ok(Prefill { logits: None, reused });
            }
            logits = self.append(pass)?;
        }
        self.after_prompt = Some(AfterPrompt { length: tokens, logits: logits.clone() });
        Ok(Prefill { logits: Some(logits), reused })
    }

    /// The logits `[V]` of what follows `token`, the next one of the answer: known already where it was guessed, else computed with
    /// up to `most` guesses of what comes behind it.
    ///
    /// # Errors
    /// As of [`append`](Self::append).
    pub(crate) fn next(&mut self, token: u32, most: usize) -> Result<Vec<f32>, GenerateError> {
        if self.ahead.front().is_some_and(|(guess, _)| *guess == token)
            && let Some((_, logits)) = self.ahead.pop_front()
        {
            self.drafted.accepted += 1;
            return Ok(logits);
        }
        self.forget_guesses()?;
        let room = self.context.saturating_sub(self.cached.len() + 1);
        let most = most.min(room).min(self.drafted_tokens);
        let Some(draft) = self.draft.as_mut().filter(|_| most > 0) else { return self.append(&[token]) };
        let mut tokens: Vec<u32> = self.cached.iter().copied().chain([token]).collect();
        let mut guess = draft.propose(&tokens, most)?;
        guess.truncate(most);
        let mut pass = tokens.split_off(self.cached.len());
        pass.extend_from_slice(&guess);
        if guess.is_empty() {
            return self.append(&pass);
        }
        let logits = match self.decoder.decode(&[(0, &pass)]) {
            Ok(logits) => logits,
            Err(error) => {
                self.go_back_to(self.cached.len());
                return Err(error.into());
            }
        };
        self.cached.extend_from_slice(&pass);
        self.drafted.tokens += guess.len() as u64;
        let mut rows = logits.chunks((logits.len() / pass.len()).max(1)).map(<[f32]>::to_vec);
        let first = rows.next().unwrap_or_default();
        self.ahead = guess.into_iter().zip(rows).collect();
        Ok(first)
    }

    /// Takes what was guessed and has not come true out of the cache.
    pub(crate) fn forget_guesses(&mut self) -> Result<(), GenerateError> {
        if self.ahead.is_empty() {
            return Ok(());
        }
        let certain = self.cached.len() - self.ahead.len();
        self.ahead.clear();
        let mut kept = self.cached.clone();
        kept.truncate(certain);
        self.go_back_to(certain);
        // A cache that could not be cut there was emptied.
        match kept.get(self.cached.len()..) {
            Some(lost) if !lost.is_empty() => self.append(lost).map(drop),
            _ => Ok(()),
        }
    }

    /// Appends tokens to the cache; the logits `[V]` of what follows them.
    ///
    /// # Errors
    /// The context is full, the model does not know a token, or the step fails; then the cache is as it was.
    pub fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, GenerateError> {
        match self.decoder.append(tokens) {
            Ok(logits) => {
                self.cached.extend_from_slice(tokens);
                Ok(logits)
            }
            Err(error) => {
                self.go_back_to(self.cached.len());
                Err(error.into())
            }
        }
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        self.ahead.clear();
        self.go_back_to(0);
    }

    /// Forgets all tokens but the first `length`, or more where the cache cannot go back that far.
    fn go_back_to(&mut self, length: usize) {
        self.decoder.truncate(length as u64);
        self.cached.truncate(usize::try_from(self.decoder.len()).unwrap_or(usize::MAX));
        self.after_prompt.take_if(|after| after.length > self.cached.len());
    }
}
