//! Search: of everything that a configuration leaves open, the best for a goal, and what else there is between memory, time and quality.
//!
//! A space has far more points than can be run. So every single change is run dry at a few points, and the rest is put together from
//! these pieces: what is estimated best is run, which corrects the estimates, until nothing is estimated better than what was found. What
//! is answered was run.

mod axes;
mod footprint;
mod front;
mod goals;
mod measure;
mod picture;
mod space;
mod walk;
mod weigh;

#[cfg(test)]
mod tests;

use std::time::Instant;

use plimsoll_model::{ModelSpec, WeightSource};
use plimsoll_step::StepError;
use serde::Serialize;
use serde_json::{Value, json};

pub use self::front::FrontPoint;
pub use self::goals::device_for_goal;
use self::space::{Point, Space};
use self::walk::{Made, Walk};
use self::weigh::Merit;
use crate::config::{Auto, Goal, Quality, RawConfig};
use crate::divide::divide;
use crate::limits::Limits;
use crate::resolve::{Choice, choose, resolved_with, settled};
use crate::training_plan::Machine;

/// Points that are as fast as the fastest but for this share: of them the one that loses least is taken, and the smallest of those.
const AS_GOOD: f64 = 1.005;

/// Points of a space up to which every one is run.
const EXHAUSTIVE: f64 = 400.0;

/// What was searched, and how.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SearchReport {
    /// What for.
    pub goal: Goal,
    /// Among what.
    pub quality: Quality,
    /// Configurations that the space has.
    pub candidates: f64,
    /// Estimates that were made of parts of them.
    pub weighed: u64,
    /// Configurations that were run dry.
    pub dry_runs: usize,
    /// How long it took.
    pub seconds: f64,
    /// Whether every configuration of the space was run dry.
    pub exhaustive: bool,
    /// Seconds of the fastest step that was found, were there memory for everything: no configuration is known to be faster.
    pub bound_step_seconds: Option<f64>,
    /// What no other configuration that was run beats, from the least memory on.
    #[serde(skip)]
    pub front: Vec<FrontPoint>,
}

impl SearchReport {
    /// The document `search` of `plan --json`.
    pub(crate) fn to_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_else(|_| json!({}))
    }
}

/// What a search has found.
pub(crate) struct Found {
    /// The best configuration, with nothing left open; `None` where nothing fits.
    pub config: Option<RawConfig>,
    pub report: SearchReport,
}

/// Searches what a configuration leaves open, on one machine, for the fastest step or the least memory.
pub(crate) fn searched(
    config: &RawConfig,
    spec: &ModelSpec,
    stored: Option<&WeightSource>,
    machine: &Machine,
) -> Result<Found, StepError> {
    let begun = Instant::now();
    let goal = config.planning.goal.unwrap_or(Goal::Fastest);
    let quality = config.planning.quality.unwrap_or(Quality::Lossless);
    let limits = Limits::of(config, machine);
    let asked = config;
    let config = &divided(config, spec, stored, machine, quality)?;
    let divisions = [config.clone()];
    let space = Space::new(config, spec, stored, limits, quality, &divisions)?;
    let size = space.size();
    let mut walk = Walk::new(space, &machine.rates, limits);
    let merit = match goal {
        Goal::LeastMemory => Merit::Bytes,
        _ => Merit::Seconds,
    };
    let exhaustive = size <= EXHAUSTIVE;
    let (mut best, mut plain) = (None, None);
    if exhaustive {
        let all = walk.space.every_point();
        walk.run(&all);
    } else if !walk.space.is_long {
        // What is found without a search is a point like others: no answer is worse. What it takes to find is not run again.
        let method = walk.runs.method(config, stored)?;
        let found = choose(config, &method, &walk.runs, limits)?;
        let point = walk.space.point_of(&(found.settings.clone(), found.accumulation));
        walk.run(point.as_slice());
        plain = Some(found);
    }
    for room in [limits.target_bytes, limits.room_bytes] {
        let aim = walk.aim(merit, room, quality);
        if !exhaustive {
            walk.everywhere(&aim);
        }
        best = walk.chosen(&aim);
        if best.is_some() {
            break;
        }
    }
    if !exhaustive && best.is_some() {
        walk.along_the_front(quality, limits.target_bytes);
        let aim = walk.aim(merit, limits.target_bytes, quality);
        best = walk.chosen(&aim).or(best);
    }
    // Prefetching is no axis: it is given up where nothing fits with it.
    let open = config.memory.prefetch().set().is_none() && !limits.lower_tiers().is_empty();
    if best.is_none() && open {
        return searched(&waiting(asked), spec, stored, machine);
    }
    let front = walk.front();
    let front = front.iter().filter_map(|(point, made)| walk.front_point(point, made));
    let front: Vec<FrontPoint> = front.collect();
    let unlimited = walk.all().map(|(_, made)| made.step_seconds).min_by(f64::total_cmp);
    let report = SearchReport {
        goal,
        quality,
        candidates: size,
        weighed: walk.weighed,
        dry_runs: walk.order.len(),
        seconds: begun.elapsed().as_secs_f64(),
        exhaustive,
        bound_step_seconds: unlimited,
        front,
    };
    let Some((point, made)) = best else { return Ok(Found { config: None, report }) };
    let found = walk.space.config(&point);
    let waits = match (goal, plain) {
        (Goal::LeastMemory, _) if open => {
            let other = waiting(&found);
            let method = walk.runs.method(&other, stored)?;
            let run = settled(&other, spec, &method).map(|(settings, n)| walk.runs.of(settings, n));
            let less = |run: &Choice| run.peak_bytes() as f64 * AS_GOOD < made.device_bytes as f64;
            run.transpose()?.filter(|run| limits.allow(run) && less(run)).map(|_| other)
        }
        (Goal::Fastest, Some(plain)) if !plain.settings.offload.prefetch && limits.allow(&plain) => {
            let is_faster = plain.time.tokens_per_second > made.tokens_per_second;
            is_faster.then(|| resolved_with(config, &plain.settings, plain.accumulation))
        }
        _ => None,
    };
    Ok(Found { config: Some(waits.unwrap_or(found)), report })
}

/// The same without prefetching.
fn waiting(config: &RawConfig) -> RawConfig {
    let mut config = config.clone();
    config.memory.prefetch = Some(Auto::Set(false));
    config
}

/// The configuration with the ranks divided as the planner does where that is open: in the first precision of those that a class allows
/// in which they are most often divided, bf16 with f32 masters where that is proven enough.
fn divided(
    config: &RawConfig,
    spec: &ModelSpec,
    stored: Option<&WeightSource>,
    machine: &Machine,
    quality: Quality,
) -> Result<RawConfig, StepError> {
    let mut own = config.clone();
    own.planning = Default::default();
    if !(config.parallel.has_open_ways() || config.parallel.has_open_stage()) {
        return Ok(own);
    }
    let mut narrow = own.clone();
    let open = axes::precisions(config, machine.rates.wiring.narrow);
    let mut allowed = open.iter().filter(|value| value.quality <= quality.min(Quality::Proven));
    if let Some(value) = allowed.next_back() {
        value.setting.apply(&mut narrow);
    }
    let found = divide(&narrow, spec, stored, machine)?;
    own.parallel = found.config.parallel;
    Ok(own)
}

impl Walk<'_> {
    /// The best point for an aim: of those that are as good, the one that loses least, and the smallest of those.
    fn chosen(&self, aim: &weigh::Aim) -> Option<(Point, Made)> {
        let (_, best) = self.best(aim, |_| true)?;
        let most = aim.merit(best.footprint) * AS_GOOD;
        let as_good =
            self.all().filter(|(_, made)| self.keeps(made, aim) && aim.merit(made.footprint) <= most);
        let rank = |point: &Point, made: &Made| (self.space.quality(point), aim.second(made.footprint));
        let chosen = as_good.min_by(|(p, a), (q, b)| {
            let (one, other) = (rank(p, a), rank(q, b));
            one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
        });
        chosen.map(|(point, made)| (*point, *made))
    }

    /// A point of the front as a configuration that can be run.
    fn front_point(&self, point: &Point, made: &Made) -> Option<FrontPoint> {
        let (settings, accumulation) = self.space.wanted(point)?;
        Some(FrontPoint {
            device_peak_bytes: made.device_bytes,
            step_seconds: made.step_seconds,
            tokens_per_second: made.tokens_per_second,
            quality: self.space.quality(point),
            above_target: made.footprint.under_the_line(&self.limits) > self.limits.target_bytes as f64,
            config: resolved_with(&self.space.config(point), &settings, accumulation),
        })
    }
}
