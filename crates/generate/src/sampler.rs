//! From logits to a token: a chain of steps that change and drop candidates, then a draw.
//!
//! The order is llama.cpp's: bias, penalties, top-k, typical, top-p, min-p, temperature, draw. In
//! `transformers` the temperature comes before the steps that drop candidates; [`Sampler::of_steps`] takes
//! any order.

mod candidates;
mod error;
mod history;
mod setting;
mod step;
#[cfg(test)]
mod tests;

use candidates::Candidates;
pub(crate) use candidates::likeliest;
pub use error::SamplerError;
use history::History;
use plimsoll_memory::splitmix64;
pub use setting::SettingError;
pub use step::SamplerStep;

/// How tokens are drawn. The default takes the likeliest token.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerSettings {
    /// 0 takes the likeliest token; 1 draws from the model's own distribution; more flattens it.
    pub temperature: f64,
    /// Only this many of the likeliest tokens; 0 for all.
    pub top_k: usize,
    /// Only the likeliest tokens that together have this probability; 1 for all.
    pub top_p: f64,
    /// Only tokens with at least this share of the likeliest one's probability; 0 for all.
    pub min_p: f64,
    /// Only the tokens that are about as likely as is to be expected, together of this probability; 1 for all.
    pub typical_p: f64,
    /// Makes tokens that occurred less likely: logits above 0 are divided by this number, others multiplied; 1 for no
    /// penalty.
    pub repetition_penalty: f64,
    /// Subtracted from the logit of each token that occurred; 0 for no penalty.
    pub presence_penalty: f64,
    /// Subtracted from a token's logit for each time that the token occurred; 0 for no penalty.
    pub frequency_penalty: f64,
    /// The last tokens, of the prompt and drawn ones, that count for the penalties; `None` for all.
    pub penalty_last_n: Option<usize>,
    /// Added to tokens' logits; minus infinity forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for SamplerSettings {
    fn default() -> SamplerSettings {
        SamplerSettings {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: None,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplerSettings {
    /// The steps that do something, in order.
    pub fn steps(&self) -> Vec<SamplerStep> {
        let penalties = SamplerStep::Penalties {
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            last_n: self.penalty_last_n,
        };
        let all = [
            SamplerStep::LogitBias(self.logit_bias.clone()),
            penalties,
            SamplerStep::TopK(self.top_k),
            SamplerStep::Typical(self.typical_p),
            SamplerStep::TopP(self.top_p),
            SamplerStep::MinP(self.min_p),
            SamplerStep::Temperature(self.temperature),
        ];
        all.into_iter().filter(|step| !step.does_nothing()).collect()
    }
}

/// Draws tokens. The same seed and the same logits give the same tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    steps: Vec<SamplerStep>,
    history: History,
    seed: u64,
    draws: u64,
}

impl Sampler {
    /// A sampler at the beginning of its random numbers.
    ///
    /// # Errors
    /// A setting is outside of its range.
    pub fn new(settings: &SamplerSettings) -> Result<Sampler, SamplerError> {
        Sampler::of_steps(settings.steps(), settings.seed)
    }

    /// A sampler with steps in an order of one's own; without a temperature it draws from the model's distribution.
    ///
    /// # Errors
    /// A step's number is outside of its range.
    pub fn of_steps(steps: Vec<SamplerStep>, seed: u64) -> Result<Sampler, SamplerError> {
        steps.iter().try_for_each(SamplerStep::check)?;
        let history = History::new(steps.iter().filter_map(SamplerStep::remembers).reduce(longer));
        Ok(Sampler { steps, history, seed, draws: 0 })
    }

    /// Tells the sampler of tokens that count for penalties: the prompt, and tokens that were drawn and kept.
    pub fn observe(&mut self, tokens: &[u32]) {
        self.history.extend(tokens);
    }

    /// The next token for these logits, one a token; the first of the likeliest ones where several are equal
    /// and the temperature is 0. Logits that are no number count as minus infinity. `None` for no logits.
    pub fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        if let [SamplerStep::Temperature(0.0)] = self.steps[..] {
            return likeliest(logits);
        }
        let mut candidates = Candidates::new(logits);
        for step in &self.steps {
            step.apply(&mut candidates, &self.history);
        }
        if let Some(only) = candidates.only() {
            return Some(only);
        }
        let draw = self.uniform();
        candidates.draw(draw)
    }

    /// A number in [0, 1): SplitMix64 over seed and number of the draw.
    fn uniform(&mut self) -> f64 {
        let bits = splitmix64(self.seed, self.draws);
        self.draws = self.draws.wrapping_add(1);
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The longer of two memories; `None` for all that was ever there.
fn longer(left: Option<usize>, right: Option<usize>) -> Option<usize> {
    Some(left?.max(right?))
}
