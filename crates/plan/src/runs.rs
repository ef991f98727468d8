//! The dry runs of a search: each is made once, however often it is asked for, and those that do not wait for each other are
//! made at the same time. What they say decides, not which of them is done first, so that a plan is the same on any number
//! of threads.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_device::cpu::at_once;
use plimsoll_memory::usable_cores;
use plimsoll_model::{ModelSpec, WeightSource};
use plimsoll_step::{Checkpointing, StepError, StepSettings, TrainingMethod};

use crate::config::RawConfig;
use crate::dry_run::{AtRest, DryRun};
use crate::limits::Limits;
use crate::method::{Layouts, method_among};
use crate::resolve::Choice;
use crate::time::Rates;

/// A step to run dry, and its micro-batches.
pub(crate) type Wanted = (StepSettings, u64);

/// The dry runs of a model on a machine.
pub(crate) struct DryRuns<'a> {
    pub spec: &'a ModelSpec,
    pub rates: &'a Rates,
    threads: usize,
    /// What a step has to keep to, for whoever asks: of one that does not, not all stages of a pipeline need be run.
    limits: Option<Limits>,
    made: Arc<Mutex<Vec<Arc<Choice>>>>,
    /// Steps at rest.
    rested: Arc<Mutex<Vec<(StepSettings, AtRest)>>>,
    layouts: Arc<Layouts>,
}

impl<'a> DryRuns<'a> {
    /// None yet; as many at a time as there are cores.
    pub fn new(spec: &'a ModelSpec, rates: &'a Rates) -> Self {
        let (made, rested, layouts) = (Arc::default(), Arc::default(), Arc::default());
        DryRuns { spec, rates, threads: threads(), limits: None, made, rested, layouts }
    }

    /// The same runs one at a time: for one of several searches that go on at once.
    pub fn one_at_a_time(&self) -> DryRuns<'a> {
        DryRuns { threads: 1, ..self.same() }
    }

    /// The same runs for somebody to whom a step is of use that keeps to these limits.
    pub fn within(&self, limits: Limits) -> DryRuns<'a> {
        DryRuns { limits: Some(limits), ..self.same() }
    }

    fn same(&self) -> DryRuns<'a> {
        let (made, rested, layouts) =
            (Arc::clone(&self.made), Arc::clone(&self.rested), Arc::clone(&self.layouts));
        DryRuns { made, rested, layouts, ..*self }
    }

    /// What `config` trains of the model.
    pub fn method(
        &self,
        config: &RawConfig,
        stored: Option<&WeightSource>,
    ) -> Result<TrainingMethod, StepError> {
        method_among(&self.layouts, config, self.spec, stored)
    }

    /// The same step with all of its stages.
    pub fn complete(&self, choice: Choice) -> Result<Choice, StepError> {
        if choice.whole {
            return Ok(choice);
        }
        Choice::new(self.spec, choice.settings, choice.accumulation, self.rates)
    }

    /// The first stage of a step through a pipeline.
    pub fn first_stage(&self, (settings, accumulation): &Wanted) -> Result<Choice, StepError> {
        Choice::first_stage(self.spec, settings.clone(), *accumulation, self.rates)
    }

    /// A step run dry, now or earlier.
    pub fn of(&self, settings: StepSettings, accumulation: u64) -> Result<Choice, StepError> {
        if let Some(made) = self.find(&settings, accumulation) {
            return Ok(Choice::clone(&made));
        }
        let choice = Choice::within(self.spec, settings, accumulation, self.rates, self.limits)?;
        self.made().push(Arc::new(choice.clone()));
        Ok(choice)
    }

    /// Makes runs that will be asked for, all at once. On one thread each is made when it is asked for: perhaps it never is.
    pub fn ahead(&self, wanted: impl IntoIterator<Item = Wanted>) {
        if self.threads == 1 {
            return;
        }
        let missing = |(settings, accumulation): &Wanted| self.find(settings, *accumulation).is_none();
        let mut distinct: Vec<Wanted> = Vec::new();
        for wanted in wanted.into_iter().filter(missing) {
            if !distinct.contains(&wanted) {
                distinct.push(wanted);
            }
        }
        // Whoever asks for one that failed is told why.
        at_once(&distinct, self.threads, |(settings, accumulation)| {
            self.of(settings.clone(), *accumulation).is_ok()
        });
    }

    /// As many of these as can be made at once: what will be asked for next if the first of them does not settle the matter.
    pub fn ahead_of_first(&self, wanted: impl IntoIterator<Item = Wanted>) {
        let mut wanted = wanted.into_iter().peekable();
        if wanted.peek().is_some_and(|(settings, accumulation)| self.find(settings, *accumulation).is_none())
        {
            self.ahead(wanted.take(self.threads));
        }
    }

    /// The answer of each question, in order, as many at a time as there are threads.
    pub fn each<T: Sync, R: Send>(&self, questions: &[T], answer: impl Fn(&T) -> R + Sync) -> Vec<R> {
        at_once(questions, self.threads, answer)
    }

    /// What a step's weights, states and buffers take before the first pass, whatever its batch and its checkpointing are;
    /// nothing where it cannot begin.
    pub fn at_rest(&self, settings: &StepSettings) -> AtRest {
        let (batch_size, micro_batches_per_pass) = (1, 1);
        let checkpointing = Checkpointing::Full;
        let alike = StepSettings { batch_size, micro_batches_per_pass, checkpointing, ..settings.clone() };
        let known = self.rested().iter().find(|(settings, _)| *settings == alike).map(|(_, known)| *known);
        known.unwrap_or_else(|| {
            let at_rest = DryRun::at_rest(self.rates.wiring.device, self.spec, &alike).unwrap_or_default();
            self.rested().push((alike, at_rest));
            at_rest
        })
    }

    /// How many are made at a time.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// All runs that were made.
    pub fn known(&self) -> Vec<Arc<Choice>> {
        self.made().clone()
    }

    /// A step that was run dry, if it was.
    pub fn find(&self, settings: &StepSettings, accumulation: u64) -> Option<Arc<Choice>> {
        let says = |made: &Choice| made.whole || self.limits.is_some_and(|limits| !limits.allow(made));
        let same = |made: &&Arc<Choice>| {
            made.accumulation == accumulation && made.settings == *settings && says(made)
        };
        self.made().iter().find(same).cloned()
    }

    fn rested(&self) -> MutexGuard<'_, Vec<(StepSettings, AtRest)>> {
        self.rested.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn made(&self) -> MutexGuard<'_, Vec<Arc<Choice>>> {
        // Runs are added whole.
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads that can work at the same time.
pub(crate) fn threads() -> usize {
    usable_cores()
}

#[cfg(test)]
pub(crate) mod tests {
    use plimsoll_model::catalogue;

    use super::*;
    use crate::resolve::choose;

    pub(crate) const RATES: Rates = Rates::of_cpu([1e11, 2e11], 2e10, 1e9);

    fn runs(spec: &ModelSpec, threads: usize) -> DryRuns<'_> {
        DryRuns { threads, ..DryRuns::new(spec, &RATES) }
    }

    #[test]
    fn a_search_finds_the_same_on_any_number_of_threads_and_runs_nothing_twice() {
        let spec = ModelSpec { num_layers: 12, ..catalogue::find("smollm2-135m").unwrap() };
        let config = RawConfig::default();
        for room_bytes in [40 << 20, 300 << 20, 1 << 30, 4 << 30] {
            let limits = Limits { room_bytes, target_bytes: room_bytes / 10 * 9, ..Limits::endless() };
            let found = [1, 2, 5].map(|threads| {
                let runs = runs(&spec, threads);
                let found = choose(&config, &TrainingMethod::Full, &runs, limits).unwrap();
                let made = runs.made();
                for (place, one) in made.iter().enumerate() {
                    let again = |other: &Arc<Choice>| {
                        (&other.settings, other.accumulation) == (&one.settings, one.accumulation)
                    };
                    assert!(!made.iter().skip(place + 1).any(again), "{:?}", one.settings);
                }
                (found.settings, found.accumulation)
            });
            assert!(found.iter().all(|choice| *choice == found[0]), "{room_bytes}: {found:?}");
        }
    }
}
