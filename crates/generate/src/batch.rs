//! Many prompts, some of them at once: their tokens share passes, and a prompt takes the place of one whose answer has ended
//! ("continuous batching": Yu et al. 2022).
//!
//! An answer has the tokens that it has alone. A prompt is read in passes of its own, as it is alone, and the passes that sequences
//! share have the same bits for each ([`Decoder::decode`]). Where the cache's pages run out, the sequence that came last waits and
//! gives its pages back. When there is room again, its prompt is read anew and its tokens are appended again: that draws nothing.

use std::collections::VecDeque;
use std::time::Instant;

use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_step::{DecodeSettings, Decoder, ExpertTraffic};

use crate::answer::Answer;
use crate::{GenerateError, Generated, Limits, Sampler};

/// What is to be answered.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// Draws this answer's tokens and no other's.
    pub sampler: Sampler,
}

/// A decoder that answers several prompts at a time.
pub struct Batch<'a> {
    decoder: Decoder<'a>,
    context: usize,
    sequences: usize,
    /// Tokens of a sequence in a pass at most.
    pass_tokens: usize,
    vocabulary: usize,
}

/// What answering all of them took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchSummary {
    /// New tokens of all answers.
    pub tokens: u64,
    /// Passes in which they were computed, those over prompts left out.
    pub passes: u64,
    /// How often a sequence gave back its pages and waited.
    pub waits: u64,
    /// Most sequences at a time.
    pub at_once: usize,
    /// From the first prompt to the last token.
    pub seconds: f64,
}

impl BatchSummary {
    /// New tokens a second, prompts counted in.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// A request that has no place, with what it has of an answer.
struct Waiting<'t> {
    number: usize,
    request: Request,
    answer: Answer<'t>,
    /// When its first token came.
    first_token: Option<Instant>,
}

impl Waiting<'_> {
    /// Tokens in the cache once it has a place: all but the last of the answer.
    fn cached(&self) -> usize {
        self.request.prompt.len() + self.answer.out.tokens.len().saturating_sub(1)
    }
}

/// A request that has one.
struct Running<'t> {
    place: u32,
    /// The last token of the answer, which is not in the cache.
    last: u32,
    own: Waiting<'t>,
}

impl<'a> Batch<'a> {
    /// As many sequences at a time as the decoder was made for with these settings. The model's head has `vocabulary` rows.
    pub fn new(decoder: Decoder<'a>, settings: &DecodeSettings, vocabulary: u64) -> Batch<'a> {
        let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Batch {
            decoder,
            context: number(settings.context),
            sequences: number(settings.sequences.max(1)),
            pass_tokens: number(settings.prompt_chunk_tokens.max(1)),
            vocabulary: number(vocabulary).max(1),
        }
    }

    /// How often experts that come by themselves were used, and read for it; `None` where they do not.
    pub fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.decoder.expert_traffic()
    }

    /// Answers all requests. `on_end` gets each answer with its request's number when it ends.
    ///
    /// # Errors
    /// A prompt is empty or longer than the context, or has a token that the model does not know; the step fails; or those of
    /// `on_end`.
    pub fn run<E: From<GenerateError>>(
        &mut self,
        tokenizer: &Tokenizer,
        requests: Vec<Request>,
        limits: &Limits,
        mut on_end: impl FnMut(usize, Generated) -> Result<(), E>,
    ) -> Result<BatchSummary, E> {
        let begun = Instant::now();
        let mut queue = VecDeque::with_capacity(requests.len());
        for (number, mut request) in requests.into_iter().enumerate() {
            let (tokens, context) = (request.prompt.len(), self.context);
            if tokens == 0 {
                return Err(GenerateError::EmptyPrompt.into());
            }
            if tokens > context {
                return Err(GenerateError::PromptTooLong { tokens, context }.into());
            }
            request.sampler.observe(&request.prompt);
            let answer = Answer::new(tokenizer, limits, context - tokens);
            queue.push_back(Waiting { number, request, answer, first_token: None });
        }
        let mut summary = BatchSummary::default();
        let mut end = |own: Waiting<'_>, reason, summary: &mut BatchSummary| -> Result<(), E> {
            let decode_seconds = own.first_token.map_or(0.0, |first| first.elapsed().as_secs_f64());
            let (_, out) = own.answer.finish(reason)?;
            summary.tokens += out.tokens.len() as u64;
            on_end(own.number, Generated { decode_seconds, ..out })
        };
        // The place of each is free or taken; who came last is last.
        let mut running: Vec<Running<'_>> = Vec::new();
        loop {
            while queue.front().is_some_and(|next| self.has_room_for(next, &running)) {
                let place = free_place(&running);
                let Some(next) = queue.pop_front() else { break };
                // With the one whose prompt is read, which may end with its first token.
                summary.at_once = summary.at_once.max(running.len() + 1);
                match self.begin(place, next)? {
                    Begun::Goes(own) => running.push(own),
                    Begun::Ended(own, reason) => {
                        self.decoder.truncate_one(place, 0);
                        end(own, reason, &mut summary)?;
                    }
                }
            }
            if running.is_empty() {
                break;
            }
            while running.len() > 1 && !self.has_pages_for(&running) {
                if let Some(last) = running.pop() {
                    self.decoder.truncate_one(last.place, 0);
                    queue.push_front(last.own);
                    summary.waits += 1;
                }
            }
            let tokens: Vec<(u32, &[u32])> =
                running.iter().map(|own| (own.place, std::slice::from_ref(&own.last))).collect();
            let logits = self.decoder.decode(&tokens).map_err(GenerateError::from)?;
            summary.passes += 1;
            let mut going = Vec::with_capacity(running.len());
            for (mut own, logits) in running.into_iter().zip(logits.chunks(self.vocabulary)) {
                let (_, ended) = own.own.answer.take(logits, &mut own.own.request.sampler)?;
                match ended.or_else(|| own.own.answer.is_full()) {
                    None => {
                        own.last = own.own.answer.out.tokens.last().copied().unwrap_or(own.last);
                        going.push(own);
                    }
                    Some(reason) => {
                        self.decoder.truncate_one(own.place, 0);
                        end(own.own, reason, &mut summary)?;
                    }
                }
            }
            running = going;
        }
        summary.seconds = begun.elapsed().as_secs_f64();
        Ok(summary)
    }

    /// Whether a request may begin: there is a place, and pages for its tokens and another one of each sequence.
    fn has_room_for(&self, next: &Waiting<'_>, running: &[Running<'_>]) -> bool {
        if running.is_empty() {
            return true;
        }
        let own = (free_place(running), next.cached() as u64 + 1);
        let more: Vec<(u32, u64)> = running.iter().map(|own| (own.place, 1)).chain([own]).collect();
        running.len() < self.sequences && self.decoder.has_pages_for(&more)
    }

    /// Whether every sequence may have another token.
    fn has_pages_for(&self, running: &[Running<'_>]) -> bool {
        let more: Vec<(u32, u64)> = running.iter().map(|own| (own.place, 1)).collect();
        self.decoder.has_pages_for(&more)
    }

    /// Reads a prompt, and appends what there is of the answer.
    fn begin<'t>(&mut self, place: u32, mut own: Waiting<'t>) -> Result<Begun<'t>, GenerateError> {
        let begun = Instant::now();
        let logits = self.decoder.append_to(place, &own.request.prompt)?;
        own.answer.out.prompt_seconds += begun.elapsed().as_secs_f64();
        if own.answer.out.tokens.is_empty() {
            own.first_token = Some(Instant::now());
            if let Some(full) = own.answer.is_full() {
                return Ok(Begun::Ended(own, full));
            }
            let (_, ended) = own.answer.take(&logits, &mut own.request.sampler)?;
            if let Some(reason) = ended.or_else(|| own.answer.is_full()) {
                return Ok(Begun::Ended(own, reason));
            }
        }
        let tokens = &own.answer.out.tokens;
        let Some((last, before)) = tokens.split_last() else { return Err(GenerateError::NoLogits) };
        // A pass has no more rows than was planned, nor more tokens of a sequence than its windows have room for.
        for pass in before.chunks(self.sequences.min(self.pass_tokens)) {
            self.decoder.decode(&[(place, pass)])?;
        }
        let last = *last;
        Ok(Begun::Goes(Running { place, last, own }))
    }
}

/// The first place that nobody has.
fn free_place(running: &[Running<'_>]) -> u32 {
    (0..).find(|place| running.iter().all(|other| other.place != *place)).unwrap_or(0)
}

/// What becomes of a request that has a place.
enum Begun<'t> {
    Goes(Running<'t>),
    /// Its first token ended it.
    Ended(Waiting<'t>, crate::StopReason),
}
