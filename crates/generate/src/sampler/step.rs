//! The steps of a sampler's chain.

use std::collections::HashMap;

use super::SamplerError;
use super::candidates::Candidates;
use super::history::History;

/// A step: it changes logits or drops candidates, and always leaves one.
#[derive(Clone, Debug, PartialEq)]
pub enum SamplerStep {
    /// Adds to tokens' logits; tokens that there are not are ignored. More than one of a token add up.
    LogitBias(Vec<(u32, f32)>),
    /// Makes tokens that were there less likely.
    Penalties {
        /// Divides logits above 0, multiplies others (Keskar et al. 2019, CTRL, section 4.1); 1 for none.
        repetition: f64,
        /// Taken once from the logit of a token that was there (OpenAI's API).
        presence: f64,
        /// Taken from a token's logit for every time that it was there (OpenAI's API).
        frequency: f64,
        /// The last tokens that count; `None` for all.
        last_n: Option<usize>,
    },
    /// Keeps this many of the likeliest tokens (Fan et al. 2018); 0 keeps all. Of equal ones the lower tokens stay.
    TopK(usize),
    /// Keeps the tokens whose information is nearest to the distribution's entropy, until they have this
    /// probability together (Meister et al. 2022, locally typical sampling); 1 keeps all.
    Typical(f64),
    /// Keeps the likeliest tokens until they have this probability together (Holtzman et al. 2020, nucleus
    /// sampling); 1 keeps all.
    TopP(f64),
    /// Keeps the tokens that have at least this share of the likeliest one's probability (Nguyen et al. 2024); 0
    /// keeps all.
    MinP(f64),
    /// Divides logits; 0 keeps the likeliest token alone.
    Temperature(f64),
}

impl SamplerStep {
    /// Whether the step changes nothing, whatever the logits.
    pub(super) fn does_nothing(&self) -> bool {
        match self {
            SamplerStep::LogitBias(bias) => bias.is_empty(),
            SamplerStep::Penalties { repetition, presence, frequency, last_n } => {
                (*repetition == 1.0 && *presence == 0.0 && *frequency == 0.0) || *last_n == Some(0)
            }
            SamplerStep::TopK(k) => *k == 0,
            SamplerStep::Typical(mass) | SamplerStep::TopP(mass) => *mass == 1.0,
            SamplerStep::MinP(share) => *share == 0.0,
            SamplerStep::Temperature(temperature) => *temperature == 1.0,
        }
    }

    /// Says which number is outside of its range.
    pub(super) fn check(&self) -> Result<(), SamplerError> {
        let within = |name, value: f64, range, is: bool| match is && value.is_finite() {
            true => Ok(()),
            false => Err(SamplerError { name, value, range }),
        };
        match self {
            SamplerStep::LogitBias(bias) => bias.iter().try_for_each(|(_, bias)| match bias.is_nan() {
                true => Err(SamplerError { name: "logit_bias", value: f64::NAN, range: "a number" }),
                false => Ok(()),
            }),
            SamplerStep::Penalties { repetition, presence, frequency, .. } => {
                within("repetition_penalty", *repetition, "above 0", *repetition > 0.0)?;
                within("presence_penalty", *presence, "a finite number", true)?;
                within("frequency_penalty", *frequency, "a finite number", true)
            }
            SamplerStep::TopK(_) => Ok(()),
            SamplerStep::Typical(mass) => within("typical_p", *mass, "above 0 and at most 1", is_mass(*mass)),
            SamplerStep::TopP(mass) => within("top_p", *mass, "above 0 and at most 1", is_mass(*mass)),
            SamplerStep::MinP(share) => within("min_p", *share, "from 0 to 1", (0.0..=1.0).contains(share)),
            SamplerStep::Temperature(t) => within("temperature", *t, "0 or more", *t >= 0.0),
        }
    }

    /// How many tokens of the past the step looks at; the inner `None` for all.
    pub(super) fn remembers(&self) -> Option<Option<usize>> {
        match self {
            SamplerStep::Penalties { last_n, .. } => Some(*last_n),
            _ => None,
        }
    }

    pub(super) fn apply(&self, candidates: &mut Candidates, history: &History) {
        match self {
            SamplerStep::LogitBias(bias) => {
                let mut sums: HashMap<u32, f64> = HashMap::with_capacity(bias.len());
                bias.iter().for_each(|(token, bias)| *sums.entry(*token).or_default() += f64::from(*bias));
                candidates.map(|c| c.logit + sums.get(&c.token).copied().unwrap_or(0.0));
            }
            SamplerStep::Penalties { repetition, presence, frequency, last_n } => {
                let counts = history.counts(*last_n);
                candidates.map(|c| match counts.get(&c.token) {
                    None => c.logit,
                    Some(count) => {
                        let scaled = if c.logit > 0.0 { c.logit / repetition } else { c.logit * repetition };
                        scaled - presence - frequency * f64::from(*count)
                    }
                });
            }
            SamplerStep::TopK(0) => {}
            SamplerStep::TopK(k) => candidates.keep_likeliest(*k),
            SamplerStep::Typical(1.0) | SamplerStep::TopP(1.0) => {}
            SamplerStep::Typical(mass) => {
                let information = |p: f64| if p > 0.0 { -p.ln() } else { f64::INFINITY };
                let terms =
                    candidates.probabilities().into_iter().filter(|p| *p > 0.0).map(|p| p * information(p));
                let entropy: f64 = terms.sum();
                candidates.keep_mass_by(*mass, |p| (information(p) - entropy).abs());
            }
            SamplerStep::TopP(mass) => candidates.keep_mass_by(*mass, |p| -p),
            SamplerStep::MinP(share) => {
                let Some(best) = candidates.best() else { return };
                // Logarithms of the probabilities differ as the logits do.
                let lowest = best.logit + share.ln();
                candidates.retain(|c| c.logit >= lowest);
            }
            SamplerStep::Temperature(temperature) if *temperature <= 0.0 => candidates.keep_best(),
            SamplerStep::Temperature(temperature) => candidates.map(|c| c.logit / temperature),
        }
    }
}

fn is_mass(mass: f64) -> bool {
    mass > 0.0 && mass <= 1.0
}
