//! The largest batch, sequence, rank or model that fits, and the smallest device: by bisection over dry runs.

use std::str::FromStr;

use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_parallel::least_common_multiple;
use plimsoll_step::{AttentionKind, StepError};

use crate::catalogue::{Catalogue, Target};
use crate::config::{Auto, ConfigError, Method, RawConfig};
use crate::limits::Limits;
use crate::method::training_method;
use crate::origin::ModelOrigin;
use crate::resolve::lightest_of;
use crate::runs::DryRuns;
use crate::shortage::Shortage;
use crate::training_plan::{Machine, TrainingPlan};

/// A number that is looked for goes up to here.
const MOST: u64 = 1 << 24;

/// What is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sought {
    /// Sequences of a micro-batch.
    BatchSize,
    /// Tokens of a sequence.
    SequenceLength,
    /// The rank of adapters.
    Rank,
    /// A model of the catalogue.
    Model,
    /// A device of the catalogue.
    Hardware,
}

impl Sought {
    /// Everything that can be looked for.
    pub const ALL: [Sought; 5] =
        [Sought::BatchSize, Sought::SequenceLength, Sought::Rank, Sought::Model, Sought::Hardware];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Sought::BatchSize => "batch_size",
            Sought::SequenceLength => "sequence_length",
            Sought::Rank => "rank",
            Sought::Model => "model",
            Sought::Hardware => "hardware",
        }
    }

    /// The configuration's key for a number.
    fn key(self) -> Option<&'static str> {
        match self {
            Sought::BatchSize => Some("training.batch_size"),
            Sought::SequenceLength => Some("data.sequence_length"),
            Sought::Rank => Some("training.lora.rank"),
            Sought::Model | Sought::Hardware => None,
        }
    }
}

impl FromStr for Sought {
    type Err = String;

    fn from_str(text: &str) -> Result<Sought, String> {
        let known = Sought::ALL.into_iter().find(|sought| sought.name() == text);
        known.ok_or_else(|| format!("one of {}", Sought::ALL.map(Sought::name).join(", ")))
    }
}

/// Why nothing could be looked for.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The configuration cannot be with any such value.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A step cannot be run dry.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The configuration says nothing of what is sought.
    #[error("{0}")]
    Pointless(&'static str),
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The value: a number, or a name of the catalogue.
    pub value: String,
    /// The plan with it.
    pub plan: TrainingPlan,
    /// The next value, and what that would have too little of; `None` where there is none.
    pub next: Option<(String, Vec<Shortage>)>,
    /// Values that were tried.
    pub tried: u32,
}

/// What a search goes by.
#[derive(Clone, Copy, Debug)]
pub struct Finder<'a> {
    /// What the user has said.
    pub config: &'a RawConfig,
    /// The model.
    pub origin: &'a ModelOrigin,
    /// The machine.
    pub machine: &'a Machine,
}

impl Finder<'_> {
    /// The largest value of a number that fits, with everything else as the configuration says or leaves open.
    ///
    /// # Errors
    /// The configuration cannot be with any value, or the step cannot be run.
    pub fn largest(&self, sought: Sought) -> Result<Option<Found>, FindError> {
        if sought == Sought::Model {
            return self.largest_model();
        }
        let (Some(key), base, step) = (sought.key(), self.prepared(sought)?, self.step_of(sought)) else {
            return Err(FindError::Pointless("a device is looked for by plimsoll plan --find hardware"));
        };
        // Of a batch that is given in all, what divides it.
        let whole = self.whole_batch(sought);
        let shares: Option<Vec<u64>> =
            whole.map(|whole| (1..=whole.min(MOST)).filter(|share| whole.is_multiple_of(*share)).collect());
        let number = |place: u64| match &shares {
            Some(shares) => shares.get(place.saturating_sub(1) as usize).copied().unwrap_or(1),
            // A sequence has two tokens at least.
            None if sought == Sought::SequenceLength => (place * step).max(2),
            None => place * step,
        };
        let with = |place: u64| -> Result<RawConfig, FindError> {
            let mut config = base.clone();
            config.apply_set(&format!("{key}={}", number(place)))?;
            Ok(config)
        };
        let most = shares.as_ref().map_or(self.most_of(sought) / step, |shares| shares.len() as u64);
        let mut tried = 0;
        let mut shortages = |value: u64| -> Result<Vec<Shortage>, FindError> {
            tried += 1;
            let config = with(value)?;
            // What a number cannot be for another reason, it cannot be at all.
            config.validate()?;
            self.shortages(&config, self.origin.spec())
        };
        let Some(value) = largest(most, |value| Ok::<_, FindError>(shortages(value)?.is_empty()))? else {
            return Ok(None);
        };
        let next = (value < most).then(|| value + 1);
        let next =
            next.map(|next| Ok::<_, FindError>((number(next).to_string(), shortages(next)?))).transpose()?;
        let plan = TrainingPlan::for_model(&with(value)?, self.origin, self.machine)?;
        Ok(Some(Found { value: number(value).to_string(), plan, next, tried }))
    }

    /// The model of the catalogue with the most parameters that fits.
    fn largest_model(&self) -> Result<Option<Found>, FindError> {
        let mut models: Vec<ModelSpec> =
            catalogue::names().filter_map(|name| catalogue::find(name).ok()).collect();
        models.sort_by_key(|spec| std::cmp::Reverse(spec.parameter_count()));
        let (mut next, mut tried) = (None, 0);
        for spec in models {
            tried += 1;
            let mut config = self.config.clone();
            config.model.path = Some(spec.name.clone());
            // What goes with one model need not go with another.
            let Ok(shortages) = self.shortages(&config, &spec) else { continue };
            if !shortages.is_empty() {
                next = Some((spec.name.clone(), shortages));
                continue;
            }
            let origin = ModelOrigin::Catalogue(Box::new(spec.clone()));
            let plan = TrainingPlan::for_model(&config, &origin, self.machine)?;
            return Ok(Some(Found { value: spec.name, plan, next, tried }));
        }
        Ok(None)
    }

    /// What the lightest form of a step has too little of, in the division of the ranks that is nearest; nothing where it fits.
    fn shortages(&self, config: &RawConfig, spec: &ModelSpec) -> Result<Vec<Shortage>, FindError> {
        let stored = self.origin.weights().filter(|_| std::ptr::eq(spec, self.origin.spec()));
        let limits = Limits::of(config, self.machine);
        let method = training_method(config, spec, stored)?;
        let runs = DryRuns::new(spec, &self.machine.rates);
        let lightest = lightest_of(&config.divisions()?, &method, &runs, limits)?;
        Ok(limits.shortages(&lightest).collect())
    }

    /// The configuration without what would fix the value sought.
    fn prepared(&self, sought: Sought) -> Result<RawConfig, FindError> {
        let mut config = self.config.clone();
        match sought {
            Sought::BatchSize if self.whole_batch(sought).is_some() => {}
            Sought::BatchSize => {
                config.training.effective_batch_size = None;
                if config.training.gradient_accumulation_steps().set().is_none() {
                    config.training.gradient_accumulation_steps = Some(Auto::Set(1));
                }
            }
            Sought::Rank if !matches!(config.training.method(), Method::Lora | Method::Qlora) => {
                return Err(FindError::Pointless(
                    "a rank is that of adapters; set training.method to lora or qlora",
                ));
            }
            _ => {}
        }
        Ok(config)
    }

    /// A rank's part of a batch that is given in all: micro-batches are its divisors. `None` where the micro-batches of a step are
    /// given, or nothing is.
    fn whole_batch(&self, sought: Sought) -> Option<u64> {
        let training = &self.config.training;
        let whole = training.effective_batch_size.and_then(Auto::set).filter(|_| {
            sought == Sought::BatchSize && training.gradient_accumulation_steps().set().is_none()
        })?;
        let ranks = self.config.parallel.data_parallel().max(1);
        Some(if whole.is_multiple_of(ranks) { whole / ranks } else { whole })
    }

    /// What the value is a multiple of.
    fn step_of(&self, sought: Sought) -> u64 {
        if sought != Sought::SequenceLength {
            return 1;
        }
        let parallel = &self.config.parallel;
        let runs = match parallel.context_parallel() {
            0 | 1 => 1,
            ranks => 2 * ranks,
        };
        let block = match self.config.training.attention().set().map(|attention| attention.0) {
            Some(AttentionKind::BlockSparse(pattern)) => pattern.block.max(1),
            _ => 1,
        };
        least_common_multiple(runs, block)
    }

    /// The largest value that is tried.
    fn most_of(&self, sought: Sought) -> u64 {
        let spec = self.origin.spec();
        match (sought, self.origin) {
            (Sought::SequenceLength, ModelOrigin::Scratch(..)) if spec.attention.rope.is_some() => MOST,
            (Sought::SequenceLength, _) => spec.max_position_embeddings.clamp(2, MOST),
            (Sought::Rank, _) => spec.hidden_size.clamp(1, MOST),
            _ => MOST,
        }
    }
}

/// Devices of the catalogue that a step fits, one of each, from the least memory on; each with its plan in brief. The configuration's
/// budget does not count. Of the data pipeline, host memory holds so many bytes for each token.
///
/// # Errors
/// The step cannot be run.
pub fn fitting_devices(
    config: &RawConfig,
    origin: &ModelOrigin,
    host_bytes_per_token: u64,
) -> Result<Vec<(Target, TrainingPlan)>, FindError> {
    let mut config = config.clone();
    config.memory.device_budget = None;
    let known = Catalogue::known();
    let mut targets: Vec<Target> = Vec::new();
    for device in known.devices() {
        targets.extend(known.target_of(&device.name, config.ranks()));
    }
    targets.sort_by_key(|target| target.device.memory);
    let mut fitting = Vec::new();
    for target in targets {
        let machine = target.machine(host_bytes_per_token);
        let finder = Finder { machine: &machine, config: &config, origin };
        if finder.shortages(&config, origin.spec())?.is_empty() {
            let plan = TrainingPlan::in_brief(&config, origin, &machine)?;
            fitting.push((target, plan));
        }
    }
    Ok(fitting)
}

/// The largest number from 1 to `most` that fits, where what fits is all up to some number; `None` where 1 does not.
fn largest<E>(most: u64, mut fits: impl FnMut(u64) -> Result<bool, E>) -> Result<Option<u64>, E> {
    if most == 0 || !fits(1)? {
        return Ok(None);
    }
    let (mut low, mut high) = (1, None);
    while high.is_none() && low < most {
        let next = low.saturating_mul(2).min(most);
        match fits(next)? {
            true => low = next,
            false => high = Some(next),
        }
    }
    let mut high = high.unwrap_or(low + 1);
    while low + 1 < high {
        let middle = low.midpoint(high);
        match fits(middle)? {
            true => low = middle,
            false => high = middle,
        }
    }
    Ok(Some(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_is_found_by_halves() {
        for most in [1, 2, 7, 64, 1000] {
            for line in 0..=most {
                let mut asked = Vec::new();
                let found = largest(most, |value| {
                    asked.push(value);
                    Ok::<_, ()>(value <= line)
                });
                assert_eq!(found, Ok(Some(line).filter(|line| *line > 0)), "{most}");
                assert!(asked.len() <= 22, "{asked:?}");
            }
        }
        assert_eq!(largest(0, |_| Ok::<_, ()>(true)), Ok(None));
        assert_eq!(largest(9, |_| Err("no")), Err("no"));
    }

    #[test]
    fn what_is_sought_is_said_in_a_word() {
        for sought in Sought::ALL {
            assert_eq!(sought.name().parse(), Ok(sought));
        }
        assert!("speed".parse::<Sought>().unwrap_err().contains("batch_size, sequence_length"));
    }
}
