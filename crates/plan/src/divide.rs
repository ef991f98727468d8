//! How ranks divide the work where that is left open: every division that can be is planned dry, as far as it may be the fastest
//! that fits.
//!
//! Precision and places of tensors are decided before, as on one rank: no division is taken that loses precision or sends tensors
//! away where another fits without. Bounds leave out what is known not to fit, or to be slower; they are such that what is
//! left out could not have been taken.

use std::collections::BTreeSet;
use std::time::Instant;

use plimsoll_model::{ModelSpec, WeightSource};
use plimsoll_parallel::Mesh;
use plimsoll_step::{Checkpointing, Offload, Precision, Ranks, Sharding, StepError, TrainingMethod};
use serde::Serialize;
use serde_json::{Value, json};

use crate::config::RawConfig;
use crate::limits::Limits;
use crate::method::training_method;
use crate::resolve::{
    AS_FAST, Choice, Search, batches, ladder, offloads, per_token, precisions, step_settings,
};
use crate::runs::DryRuns;
use crate::training_plan::Machine;

/// Divisions that are planned before it is asked again which of the others may be faster. The answer does not depend on it, and
/// what is counted does not depend on the number of threads.
const WAVE: usize = 4;

/// Where tensors are sent away, so many of the fastest divisions are looked at with what comes back.
const FILLED: usize = 3;

/// How the ranks of a plan divide the work, where the planner has decided that, and what else could have been.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Division {
    /// Ranks that take other micro-batches.
    pub data_parallel: u32,
    /// Of these, so many have different experts.
    pub expert_parallel: u32,
    /// Ranks that have parts of the same sequences.
    pub context_parallel: u32,
    /// Stages of layers.
    pub pipeline_parallel: u32,
    /// Ranks that share every product.
    pub tensor_parallel: u32,
    /// What those share that hold the same weights.
    pub zero_stage: u32,
    /// Ways of dividing the ranks that this model allows.
    pub candidates: usize,
    /// Those of them that were planned, and fit.
    pub fitting: usize,
    /// Those that do not fit.
    pub not_fitting: usize,
    /// Those of which it is known that they are slower, whether they fit or not.
    pub slower: usize,
    /// Whether what was not planned is known to be slower or not to fit.
    pub exhaustive: bool,
    /// How long the search took.
    pub seconds: f64,
}

impl Division {
    /// The document `search` of `plan --json`.
    pub(crate) fn to_json(&self) -> Value {
        let mut document = json!({ "goal": "tokens_per_second" });
        if let (Value::Object(map), Ok(Value::Object(own))) = (&mut document, serde_json::to_value(self)) {
            map.extend(own);
        }
        document
    }
}

/// A configuration with the ranks divided, and the step that was chosen for it.
pub(crate) struct Divided<'a> {
    pub config: RawConfig,
    pub runs: DryRuns<'a>,
    pub choice: Choice,
    pub division: Division,
}

/// One way of dividing the ranks.
struct Candidate<'a> {
    /// Its number among all, the simplest first.
    place: usize,
    /// What the user wrote with the ranks divided.
    said: RawConfig,
    /// The same as the search for a step takes it.
    config: RawConfig,
    runs: DryRuns<'a>,
}

/// What is decided before the ranks are divided.
#[derive(Clone, Copy)]
struct Level {
    offload: Offload,
    precision: Precision,
    /// Which of the lists of batches.
    batches: usize,
}

/// What became of a candidate.
enum Outcome {
    DoesNotFit,
    Slower,
    /// With these steps, of which another may be the fastest or the smallest.
    Fits(Vec<Choice>),
}

/// Divides the ranks of a configuration that leaves it open how.
pub(crate) fn divide<'a>(
    config: &RawConfig,
    spec: &'a ModelSpec,
    stored: Option<&WeightSource>,
    machine: &'a Machine,
) -> Result<Divided<'a>, StepError> {
    let begun = Instant::now();
    let method = &training_method(config, spec, stored)?;
    let limits = Limits::of(config, machine);
    let candidates = candidates(config, spec, method, machine)?;
    let config = &*config.for_chunks();
    let among = Among { config, spec, method, machine, limits, candidates: &candidates };
    let (place, choice, mut division) = among.chosen()?;
    division.seconds = begun.elapsed().as_secs_f64();
    let missing = StepError::Invariant { what: "the ranks are divided in no way" };
    let chosen = candidates.into_iter().find(|candidate| candidate.place == place).ok_or(missing)?;
    Ok(Divided { config: chosen.said, runs: chosen.runs, choice, division })
}

/// Every division that the model allows.
fn candidates<'a>(
    config: &RawConfig,
    spec: &'a ModelSpec,
    method: &TrainingMethod,
    machine: &'a Machine,
) -> Result<Vec<Candidate<'a>>, StepError> {
    let divisions = config.divisions().map_err(|_| StepError::Mesh {
        key: "parallel",
        what: "there is no way of dividing the ranks, or their number is not known",
        remedy: "give the number with --ranks, and set fewer keys",
    })?;
    let (mut all, mut wrong) = (Vec::new(), None);
    for config in divisions {
        let settings = step_settings(&config, spec, method, Precision::F32, Checkpointing::Full, 1);
        match settings.check_mesh(spec) {
            Ok(()) => {
                let runs = DryRuns::new(spec, &machine.rates);
                let own = config.for_chunks().into_owned();
                all.push(Candidate { place: all.len(), said: config, config: own, runs });
            }
            Err(error) => wrong = wrong.or(Some(error)),
        }
    }
    match wrong {
        Some(error) if all.is_empty() => Err(error),
        _ => Ok(all),
    }
}

/// The candidates, and what is the same for all of them.
struct Among<'a> {
    config: &'a RawConfig,
    spec: &'a ModelSpec,
    method: &'a TrainingMethod,
    machine: &'a Machine,
    limits: Limits,
    candidates: &'a [Candidate<'a>],
}

impl Among<'_> {
    /// The number of the best candidate, its step, and how many others there were.
    fn chosen(&self) -> Result<(usize, Choice, Division), StepError> {
        let lists = self.candidates.iter().map(|candidate| batches(&candidate.config).len()).max();
        for offload in offloads(self.config, self.limits) {
            for precision in precisions(&self.config.training, self.method, self.limits.narrow) {
                for batches in 0..lists.unwrap_or(0) {
                    if let Some(chosen) = self.of_level(Level { offload, precision, batches })? {
                        return Ok(chosen);
                    }
                }
            }
        }
        self.nearest()
    }

    /// The same with what was decided before; `None` where nothing fits.
    fn of_level(&self, level: Level) -> Result<Option<(usize, Choice, Division)>, StepError> {
        let product_seconds = self.product_seconds(level.precision);
        let mut order: Vec<(f64, &Candidate<'_>)> = self
            .candidates
            .iter()
            .map(|candidate| (least_per_token(&candidate.config, level, product_seconds), candidate))
            .collect();
        order.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let mut steps: Vec<(usize, Choice)> = Vec::new();
        let (mut fitting, mut not_fitting, mut slower) = (0, 0, 0);
        for wave in order.chunks(WAVE) {
            let rival = self.rival(&steps);
            let is_slower = |least: f64| rival.is_some_and(|rival| least > rival * AS_FAST);
            let outcomes =
                DryRuns::new(self.spec, &self.machine.rates).each(
                    wave,
                    |(least, candidate)| match is_slower(*least) {
                        true => Ok(Outcome::Slower),
                        false => self.outcome(candidate, level, rival),
                    },
                );
            for ((_, candidate), outcome) in wave.iter().zip(outcomes) {
                match outcome? {
                    Outcome::DoesNotFit => not_fitting += 1,
                    Outcome::Slower => slower += 1,
                    Outcome::Fits(own) => {
                        fitting += 1;
                        steps.extend(own.into_iter().map(|choice| (candidate.place, choice)));
                    }
                }
            }
        }
        // What is found out of a few alone: what comes back from other tiers, and exchanges behind the computation.
        let is_open = self.config.parallel.overlap_communication().set().is_none();
        let comes_back = offloads(self.config, self.limits).next() != Some(level.offload) || is_open;
        let finished = self.finished(steps, comes_back)?;
        Ok(self.best(finished).map(|(place, choice)| {
            let division =
                Division { fitting, not_fitting, slower, exhaustive: !comes_back, ..self.division(&choice) };
            (place, choice, division)
        }))
    }

    /// What becomes of a candidate beside the fastest that is known.
    fn outcome(
        &self,
        candidate: &Candidate<'_>,
        level: Level,
        rival: Option<f64>,
    ) -> Result<Outcome, StepError> {
        let Level { offload, precision, .. } = level;
        let lists = batches(&candidate.config);
        let Some(batches) = lists.get(level.batches) else { return Ok(Outcome::DoesNotFit) };
        let runs = &candidate.runs.one_at_a_time().within(self.limits);
        let search = Search { rival, ..self.search(candidate, runs) };
        let lightest = search.lightest_candidates(precision, offload, batches);
        if lightest.iter().all(|wanted| search.cannot_fit(wanted, [])) {
            return Ok(Outcome::DoesNotFit);
        }
        if search.is_beaten(precision, offload, batches)? {
            return Ok(Outcome::Slower);
        }
        if search.lightest(precision, offload, batches)?.is_none() {
            return Ok(Outcome::DoesNotFit);
        }
        let mut fitting = search.of_all_forms(precision, offload, batches)?;
        fitting.retain(|choice| self.limits.allow(choice));
        Ok(if fitting.is_empty() { Outcome::Slower } else { Outcome::Fits(fitting) })
    }

    fn search<'s>(&'s self, candidate: &'s Candidate<'_>, runs: &'s DryRuns<'s>) -> Search<'s> {
        let Among { method, limits, .. } = *self;
        Search { config: &candidate.config, method, runs, limits, ladder: &[], rival: None }
    }

    /// Seconds that a token takes in the fastest of these that automatic choices may take.
    fn rival(&self, steps: &[(usize, Choice)]) -> Option<f64> {
        let target = self.limits.target_bytes;
        let own = steps.iter().filter(|(_, choice)| self.limits.allow_within(choice, target));
        own.map(|(_, choice)| per_token(choice)).min_by(f64::total_cmp)
    }

    /// The steps as they will be taken: what was sent away comes back as far as there is room. Where that may change which is the
    /// fastest, of several.
    fn finished(
        &self,
        mut steps: Vec<(usize, Choice)>,
        comes_back: bool,
    ) -> Result<Vec<(usize, Choice)>, StepError> {
        steps = match comes_back {
            true => {
                steps.sort_by(|(_, one), (_, other)| per_token(one).total_cmp(&per_token(other)));
                let mut places = BTreeSet::new();
                steps.retain(|(place, _)| places.insert(*place) && places.len() <= FILLED);
                steps
            }
            false => self.best(steps).into_iter().collect(),
        };
        let finished = steps.into_iter().map(|(place, choice)| {
            let missing = StepError::Invariant { what: "a division of the ranks is not known" };
            let candidate = self.candidates.get(place).ok_or(missing)?;
            let runs = &candidate.runs.within(self.limits);
            Ok((place, self.search(candidate, runs).finished(choice)?))
        });
        finished.collect()
    }

    /// The fastest; of equally fast ones the smallest, and of equally small ones the simplest.
    fn best(&self, steps: Vec<(usize, Choice)>) -> Option<(usize, Choice)> {
        let target = self.limits.target_bytes;
        let (within, over): (Vec<_>, Vec<_>) =
            steps.into_iter().partition(|(_, choice)| self.limits.allow_within(choice, target));
        let steps = if within.is_empty() { over } else { within };
        let fastest = steps.iter().map(|(_, choice)| per_token(choice)).min_by(f64::total_cmp)?;
        let as_fast = steps.into_iter().filter(|(_, choice)| per_token(choice) <= fastest * AS_FAST);
        as_fast.min_by_key(|(place, choice)| (self.limits.memory(choice), *place))
    }

    /// Where nothing fits: the nearest step of the division that takes least at rest.
    fn nearest(&self) -> Result<(usize, Choice, Division), StepError> {
        let at_rest = |candidate: &&Candidate<'_>| {
            let Candidate { config, runs, place, .. } = candidate;
            let precision = precisions(&config.training, self.method, None).pop().unwrap_or(Precision::F32);
            let settings = step_settings(config, self.spec, self.method, precision, Checkpointing::Full, 1);
            (runs.at_rest(&settings).device, *place)
        };
        let missing = StepError::Invariant { what: "the ranks are divided in no way" };
        let candidate = self.candidates.iter().min_by_key(at_rest).ok_or(missing)?;
        let runs = &candidate.runs.within(self.limits);
        let ladder = &ladder(&candidate.config, self.spec, self.method, self.limits);
        let nearest = Search { ladder, ..self.search(candidate, runs) }.nearest()?;
        let choice = runs.complete(nearest)?;
        let division = Division { not_fitting: self.candidates.len(), ..self.division(&choice) };
        Ok((candidate.place, choice, division))
    }

    fn division(&self, choice: &Choice) -> Division {
        let Mesh { data, expert, context, pipeline, tensor } = choice.settings.ranks.mesh;
        Division {
            data_parallel: data,
            expert_parallel: expert,
            context_parallel: context,
            pipeline_parallel: pipeline,
            tensor_parallel: tensor,
            zero_stage: choice.settings.sharding.stage.number(),
            candidates: self.candidates.len(),
            fitting: 0,
            not_fitting: 0,
            slower: 0,
            exhaustive: true,
            seconds: 0.0,
        }
    }

    /// Seconds that the matrix products of a further token take, forward and backward, on one rank that has all of the model: what
    /// is made once a pass or once a step is not among them. 0 where sequences come one at a time.
    fn product_seconds(&self, precision: Precision) -> f64 {
        let Among { config, spec, method, machine, .. } = *self;
        let of = |sequences: u64| {
            let mut settings = step_settings(config, spec, method, precision, Checkpointing::None, sequences);
            settings.ranks = Ranks { rank: 0, mesh: Mesh::ALONE };
            settings.sharding = Sharding::default();
            let run = Choice::new(spec, settings, 1, &machine.rates);
            run.map(|run| machine.rates.matrix_products(&run.dry_run.tally))
        };
        let tokens = config.data.sequence_length().max(1) as f64;
        match (config.sequence_chunk(), of(1), of(2)) {
            (None, Ok(one), Ok(two)) => (two - one).max(0.0) / tokens,
            _ => 0.0,
        }
    }
}

/// Seconds that a token takes at least: its products are shared out, and the stages of a pipeline wait for each other.
fn least_per_token(config: &RawConfig, level: Level, product_seconds: f64) -> f64 {
    let mesh = config.parallel.mesh();
    let lists = batches(config);
    let most = lists.get(level.batches).into_iter().flatten().map(|(_, accumulation)| *accumulation).max();
    let waiting = f64::from(mesh.pipeline.saturating_sub(1)) / most.unwrap_or(1).max(1) as f64;
    product_seconds / f64::from(mesh.size().max(1)) * (1.0 + waiting)
}
