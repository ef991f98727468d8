//! A step of which nothing is left open, and what its dry run says.

use plimsoll_model::ModelSpec;
use plimsoll_step::{Ranks, StepError, StepSettings};

use crate::dry_run::DryRun;
use crate::limits::Limits;
use crate::stages::telling;
use crate::time::{Rates, TimeEstimate};

/// A training step with nothing left to decide, and what the dry run says of it.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The step.
    pub settings: StepSettings,
    /// Micro-batches of an optimizer step.
    pub accumulation: u64,
    /// The rank whose step was run dry: of a pipeline, one of the stage that takes most, until it is known that all fit.
    pub rank: u32,
    /// Whether all stages have been run: not where one takes more than there is.
    pub whole: bool,
    /// Its memory and arithmetic.
    pub dry_run: DryRun,
    /// Its time.
    pub time: TimeEstimate,
}

impl Choice {
    /// Runs a step dry.
    pub fn new(
        spec: &ModelSpec,
        settings: StepSettings,
        accumulation: u64,
        rates: &Rates,
    ) -> Result<Choice, StepError> {
        Choice::within(spec, settings, accumulation, rates, None)
    }

    /// The same; of a pipeline, no further stages where one does not keep to the limits.
    pub(crate) fn within(
        spec: &ModelSpec,
        settings: StepSettings,
        accumulation: u64,
        rates: &Rates,
        limits: Option<Limits>,
    ) -> Result<Choice, StepError> {
        // Of the ranks that micro-batches of this one go through, the first has most under way, and the last one has the head.
        let ranks = telling(spec, &settings, rates.wiring.network);
        Choice::through(ranks, spec, &settings, accumulation, rates, limits)
    }

    /// The same through the stages of these ranks.
    pub(crate) fn through(
        ranks: Vec<u32>,
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
        rates: &Rates,
        limits: Option<Limits>,
    ) -> Result<Choice, StepError> {
        let stages = ranks.len();
        let mut all: Vec<Choice> = Vec::new();
        for rank in ranks {
            all.push(Choice::of_stage(spec, settings, rank, accumulation, rates)?);
            if limits.is_some_and(|limits| all.last().is_some_and(|stage| !limits.allow(stage))) {
                break;
            }
        }
        let whole = all.len() == stages;
        let slowest = all.iter().map(|stage| stage.time);
        let slowest = slowest.max_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
        let bytes = |stage: &Choice| {
            let run = &stage.dry_run;
            (run.peak_bytes().saturating_add(run.host_bytes()), run.disk_bytes())
        };
        // Of several, the first.
        let heaviest = all.into_iter().rev().max_by_key(bytes);
        let heaviest = heaviest.ok_or(StepError::Invariant { what: "a pipeline has no stages" })?;
        let time = slowest.unwrap_or(heaviest.time);
        Ok(Choice { whole, time, ..heaviest })
    }

    /// A step through a pipeline, of which one stage is run: that of a rank.
    fn of_stage(
        spec: &ModelSpec,
        settings: &StepSettings,
        rank: u32,
        accumulation: u64,
        rates: &Rates,
    ) -> Result<Choice, StepError> {
        let ranks = Ranks { rank, ..settings.ranks };
        let own = StepSettings { ranks, ..settings.clone() };
        let dry_run = DryRun::timed_training(spec, &own, accumulation, rates)?;
        let time = TimeEstimate::of_stage(&dry_run, settings, accumulation);
        Ok(Choice { settings: settings.clone(), accumulation, rank, whole: true, dry_run, time })
    }

    /// The same of the rank that the settings are of.
    pub(crate) fn first_stage(
        spec: &ModelSpec,
        settings: StepSettings,
        accumulation: u64,
        rates: &Rates,
    ) -> Result<Choice, StepError> {
        let alone = Choice::of_stage(spec, &settings, settings.ranks.rank, accumulation, rates)?;
        Ok(Choice { whole: settings.ranks.mesh.pipeline <= 1, ..alone })
    }

    /// The same with what the rank that the settings are of takes, where another stage of a pipeline takes more.
    pub fn of_own_stage(self, spec: &ModelSpec, rates: &Rates) -> Result<Choice, StepError> {
        if self.settings.ranks.mesh.pipeline <= 1 {
            return Ok(self);
        }
        let dry_run = DryRun::timed_training(spec, &self.settings, self.accumulation, rates)?;
        Ok(Choice { dry_run, rank: self.settings.ranks.rank, whole: true, ..self })
    }

    /// Sequences of an optimizer step, of all ranks.
    pub fn sequences(&self) -> u64 {
        sequences(&self.settings, self.accumulation)
    }

    /// Bytes of arena that the step needs.
    pub fn peak_bytes(&self) -> u64 {
        self.dry_run.peak_bytes()
    }
}

/// The same of settings.
pub(crate) fn sequences(settings: &StepSettings, accumulation: u64) -> u64 {
    let own = settings.batch_size.saturating_mul(accumulation);
    own.saturating_mul(u64::from(settings.ranks.mesh.data))
}

impl TimeEstimate {
    /// That of a rank's step. The stages of a pipeline wait for the first micro-batch to reach them, and for the last one to come back,
    /// each as long as it takes for a micro-batch, or for one in one of its runs of layers.
    fn of_stage(run: &DryRun, settings: &StepSettings, accumulation: u64) -> TimeEstimate {
        let mesh = settings.ranks.mesh;
        let tokens = (settings.batch_size * settings.sequence_length).saturating_mul(accumulation);
        let tokens = tokens.saturating_mul(u64::from(mesh.data));
        let mut times = run.times.unwrap_or_default();
        let legs = accumulation.max(1) as f64 * f64::from(settings.pipeline_schedule.rounds());
        let passes = times.elapsed - run.updates.elapsed;
        let idle = passes * f64::from(mesh.pipeline.saturating_sub(1)) / legs;
        times.elapsed += idle;
        times.waited += idle;
        TimeEstimate::new(times, &run.tally, tokens)
    }
}
