//! An answer as it grows: its tokens, drawn one by one, its text as far as that is certain, and what ends it. Where the logits come from
//! is somebody else's affair.

use plimsoll_model::tokenizer::{SpecialTokens, StreamDecoder, Tokenizer};

use crate::generate::Drafted;
use crate::stop::StopStream;
use crate::{GenerateError, Generated, Limits, Sampler, StopReason};

/// An answer that may go on.
pub(crate) struct Answer<'t> {
    /// What there is of it.
    pub out: Generated,
    limits: &'t Limits,
    /// Tokens that the context has room for.
    room: usize,
    /// Tokens that may be drawn.
    vocabulary: usize,
    characters: StreamDecoder<'t>,
    certain: StopStream<'t>,
}

impl<'t> Answer<'t> {
    /// An answer of no token, in a context that has room for so many.
    pub fn new(tokenizer: &'t Tokenizer, limits: &'t Limits, room: usize) -> Answer<'t> {
        let out = Generated {
            tokens: Vec::new(),
            text: String::new(),
            stop_reason: StopReason::Interrupted,
            reused_tokens: 0,
            drafted: Drafted::default(),
            prompt_seconds: 0.0,
            decode_seconds: 0.0,
        };
        let characters = tokenizer.stream_decoder(SpecialTokens::Skip);
        let (vocabulary, certain) = (tokenizer.vocab_size(), limits.stop_strings.stream());
        Answer { out, limits, room, vocabulary, characters, certain }
    }

    /// Tokens that it may still have.
    pub fn left(&self) -> usize {
        self.limits.max_tokens.min(self.room).saturating_sub(self.out.tokens.len())
    }

    /// Why it may have no more tokens, if so.
    pub fn is_full(&self) -> Option<StopReason> {
        match self.out.tokens.len() {
            tokens if tokens >= self.limits.max_tokens => Some(StopReason::MaxTokens),
            tokens if tokens >= self.room => Some(StopReason::Context),
            _ => None,
        }
    }

    /// Draws the next token: the text that becomes certain by it, and why the answer ends with it, if so.
    ///
    /// # Errors
    /// There are no logits, or the token has no text.
    pub fn take(
        &mut self,
        logits: &[f32],
        sampler: &mut Sampler,
    ) -> Result<(String, Option<StopReason>), GenerateError> {
        let known = logits.get(..self.vocabulary).unwrap_or(logits);
        let is_told =
            known.iter().any(|logit| logit.is_finite()) && !known.iter().any(|logit| logit.is_nan());
        if !is_told && !known.is_empty() {
            return Err(GenerateError::NotFinite { number: self.out.tokens.len() + 1 });
        }
        let token = sampler.sample(known).ok_or(GenerateError::NoLogits)?;
        if self.limits.stop_tokens.contains(&token) {
            return Ok((String::new(), Some(StopReason::StopToken(token))));
        }
        self.out.tokens.push(token);
        sampler.observe(&[token]);
        let piece = self.certain.push(&self.characters.push(token)?);
        self.out.text.push_str(&piece);
        Ok((piece, self.certain.found().map(|stop| StopReason::StopString(stop.to_owned()))))
    }

    /// Ends it: the rest of its text, and all of it.
    ///
    /// # Errors
    /// The last tokens have no text.
    pub fn finish(self, reason: StopReason) -> Result<(String, Generated), GenerateError> {
        let Answer { mut out, characters, mut certain, .. } = self;
        out.stop_reason = reason;
        // The rest may hold a stop string, too: some tokenizers give all of their text at the end.
        let mut piece = certain.push(&characters.finish()?);
        if let (Some(stop), false) = (certain.found(), matches!(out.stop_reason, StopReason::StopString(_))) {
            out.stop_reason = StopReason::StopString(stop.to_owned());
        }
        piece.push_str(&certain.finish());
        out.text.push_str(&piece);
        Ok((piece, out))
    }
}
