//! Goals beside the fastest step and the least memory: first what is the largest or the smallest, by what takes least in the class, then
//! the best step there.

use super::searched;
use crate::catalogue::{Catalogue, Target};
use crate::config::{Goal, RawConfig};
use crate::find::{FindError, Finder, Found, Sought, fitting_devices};
use crate::origin::ModelOrigin;
use crate::training_plan::{Machine, TrainingPlan};

/// Of the devices on which a token costs least without a search, so many are searched.
const CHEAPEST: usize = 3;

impl Finder<'_> {
    /// The longest sequence or the largest batch that fits by what the configuration's class allows, and the fastest step with it.
    /// `None` where not even the least fits.
    ///
    /// # Errors
    /// As [`largest`](Finder::largest).
    pub fn for_goal(&self, goal: Goal) -> Result<Option<Found>, FindError> {
        let sought = if goal == Goal::LargestBatch { Sought::BatchSize } else { Sought::SequenceLength };
        let config = lightest(self.config, self.origin, self.machine)?;
        let Some(found) = (Finder { config: &config, ..*self }).largest(sought)? else { return Ok(None) };
        let mut config = self.config.clone();
        match (sought, found.value.parse()) {
            (Sought::BatchSize, Ok(value)) => {
                config.training.batch_size = Some(crate::config::Auto::Set(value));
                config.training.gradient_accumulation_steps =
                    found.plan.config.training.gradient_accumulation_steps;
                config.training.effective_batch_size = None;
            }
            (_, Ok(value)) => config.data.sequence_length = Some(value),
            (_, Err(_)) => {}
        }
        let plan = best(&config, self.origin, self.machine, goal, found.plan)?;
        Ok(Some(Found { plan, ..found }))
    }
}

/// The device of the catalogue with the least memory that a step fits, or the one on which a token costs least; one of it, with the
/// fastest step there. `None` where it fits none. Of the data pipeline, host memory holds `of_token` bytes for each token.
///
/// # Errors
/// The step cannot be run.
pub fn device_for_goal(
    config: &RawConfig,
    origin: &ModelOrigin,
    of_token: u64,
    goal: Goal,
) -> Result<Option<(Target, TrainingPlan)>, FindError> {
    let mut own = config.clone();
    own.memory.device_budget = None;
    // What takes least is the same on any device.
    let known = Catalogue::known();
    let any = known.devices().last().and_then(|device| known.target_of(&device.name, config.ranks()).ok());
    let Some(any) = any else { return Ok(None) };
    let lightest = lightest(&own, origin, &any.machine(of_token))?;
    let mut fitting = fitting_devices(&lightest, origin, of_token)?;
    let price = |target: &Target, plan: &TrainingPlan| {
        let [least, _] = target.dollars_an_hour()?;
        Some(least * plan.choice.time.step_seconds / plan.choice.sequences().max(1) as f64)
    };
    if goal == Goal::Cheapest {
        fitting.retain(|(target, plan)| price(target, plan).is_some());
        fitting.sort_by(|(a, one), (b, other)| {
            let of = |target, plan| price(target, plan).unwrap_or(f64::INFINITY);
            of(a, one).total_cmp(&of(b, other))
        });
        fitting.truncate(CHEAPEST);
    } else {
        fitting.truncate(1);
    }
    let mut found: Vec<(Target, TrainingPlan)> = Vec::new();
    for (target, _) in fitting {
        let machine = target.machine(of_token);
        // What is known to fit was planned in brief.
        let known = TrainingPlan::for_model(&lightest, origin, &machine)?;
        found.push((target, best(&own, origin, &machine, goal, known)?));
    }
    let price = |(target, plan): &(Target, TrainingPlan)| price(target, plan).unwrap_or(f64::INFINITY);
    Ok(found.into_iter().min_by(|a, b| match goal {
        Goal::Cheapest => price(a).total_cmp(&price(b)),
        _ => std::cmp::Ordering::Equal,
    }))
}

/// The fastest step of a configuration; what is known to fit where a search finds nothing faster.
fn best(
    config: &RawConfig,
    origin: &ModelOrigin,
    machine: &Machine,
    goal: Goal,
    known: TrainingPlan,
) -> Result<TrainingPlan, FindError> {
    let mut config = config.clone();
    config.planning.goal = Some(Goal::Fastest);
    let mut plan = TrainingPlan::for_model(&config, origin, machine)?;
    let slower = !plan.fits()
        || known.fits() && known.choice.time.tokens_per_second > plan.choice.time.tokens_per_second;
    if let Some(search) = &mut plan.search {
        search.goal = goal;
    }
    Ok(match slower {
        true => TrainingPlan { search: plan.search, ..known },
        false => plan,
    })
}

/// The configuration with what takes least memory by what its class allows: types, storage, optimizer and updates. Places, batches and
/// checkpointing stay open.
fn lightest(config: &RawConfig, origin: &ModelOrigin, machine: &Machine) -> Result<RawConfig, FindError> {
    let mut least = config.clone();
    least.planning.goal = Some(Goal::LeastMemory);
    // What fits comes later.
    least.memory.device_budget = None;
    let endless = Machine { device_bytes: machine.device_bytes.map(|_| u64::MAX / 4), ..*machine };
    let found = searched(&least, origin.spec(), origin.weights(), &endless)?;
    let mut own = config.clone();
    own.planning = Default::default();
    let Some(found) = found.config else { return Ok(own) };
    let (from, into) = (found.training, &mut own.training);
    into.mixed_precision = from.mixed_precision;
    into.master_weights = from.master_weights;
    into.gradient_dtype = from.gradient_dtype;
    into.quantization = from.quantization;
    into.optimizer = from.optimizer;
    into.optimizer_in_backward = from.optimizer_in_backward;
    into.in_backward_clipping = from.in_backward_clipping;
    into.activation_compression = from.activation_compression;
    into.mlp_chunk_tokens = from.mlp_chunk_tokens;
    Ok(own)
}
