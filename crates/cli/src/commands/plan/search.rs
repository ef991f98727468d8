//! What a search has found: how it was found, and the Pareto front.

use plimsoll_memory::ByteSize;
use plimsoll_plan::config::{Goal, GradientCheckpointing};
use plimsoll_plan::{Finder, Found, FrontPoint, SearchReport, Sought, Target, TrainingPlan, device_for_goal};

use crate::args::{ConfigSource, PlanArgs};
use crate::asked::Asked;
use crate::failure::Failure;
use crate::row;
use crate::speeds::PlanSpeeds;
use crate::table;
use crate::units::seconds;

/// The command line with its goal and its class as keys of the configuration.
pub fn source(args: &PlanArgs, source: ConfigSource) -> ConfigSource {
    let keys = [("goal", &args.goal), ("quality", &args.quality)];
    let said =
        keys.into_iter().filter_map(|(key, value)| Some(format!("planning.{key}={}", value.as_ref()?)));
    let set = source.set.iter().cloned().chain(said).collect();
    ConfigSource { set, ..source }
}

/// Refuses a picture of a search that is not asked for.
pub fn check(args: &PlanArgs, asked: &Asked) -> Result<(), Failure> {
    match args.pareto.is_some() && asked.config.planning == Default::default() {
        true => Err(Failure::usage("--pareto draws what a search finds: name a --goal or a --quality")),
        false => Ok(()),
    }
}

/// The device that a goal asks for, and the plan on it; `None` where the goal asks for none.
pub fn device(asked: &Asked) -> Result<Option<(Target, TrainingPlan)>, Failure> {
    let Some(goal @ (Goal::SmallestDevice | Goal::Cheapest)) = asked.config.planning.goal else {
        return Ok(None);
    };
    let of_token = plimsoll_train::host_bytes_per_token(&asked.config);
    let found = device_for_goal(&asked.config, &asked.origin, of_token, goal)?;
    Ok(Some(found.ok_or_else(|| nothing(goal))?))
}

/// The longest sequence or the largest batch, where the goal is one of these.
pub fn largest(asked: &Asked) -> Result<Option<(Sought, Found, PlanSpeeds)>, Failure> {
    let (goal, sought) = match asked.config.planning.goal {
        Some(goal @ Goal::LongestSequence) => (goal, Sought::SequenceLength),
        Some(goal @ Goal::LargestBatch) => (goal, Sought::BatchSize),
        _ => return Ok(None),
    };
    let mut found = None;
    let (_, speeds) = asked.plan_by(&mut |machine| {
        let finder = Finder { config: &asked.config, origin: &asked.origin, machine };
        let largest = finder.for_goal(goal)?.ok_or_else(|| nothing(goal))?;
        let plan = largest.plan.clone();
        found = Some(largest);
        Ok(plan)
    })?;
    Ok(found.map(|found| (sought, found, speeds)))
}

/// Nothing fits.
fn nothing(goal: Goal) -> Failure {
    Failure::does_not_fit(format!(
        "nothing fits for the goal {goal}; plimsoll plan without --goal says what is missing and what would help"
    ))
}

/// How the plan was found, and what else there is.
pub fn words(plan: &TrainingPlan, report: &SearchReport) -> String {
    let SearchReport { goal, quality, candidates, dry_runs, exhaustive, .. } = report;
    let how = match exhaustive {
        true => "every one was run dry".to_owned(),
        false => {
            let bound = report.bound_step_seconds.filter(|_| plan.fits()).map(|least| {
                let more = 100.0 * (plan.choice.time.step_seconds / least - 1.0);
                format!("; with memory for everything a step would take {}, {more:.0} % less", seconds(least))
            });
            format!("{dry_runs} were run dry{}", bound.unwrap_or_default())
        }
    };
    let mut out = format!(
        "searched: {goal}, {quality}: {candidates:.3e} configurations, {how}; {:.1} s\n",
        report.seconds
    );
    if report.front.is_empty() {
        return out;
    }
    let mut rows =
        vec![row!["device", "a step", "tokens/s", "quality", "precision", "optimizer", "checkpointing"]];
    rows.extend(report.front.iter().map(line));
    out.push_str(&format!("\nmemory against time, every line a plan that fits:\n{}", table::render(&rows)));
    out
}

fn line(point: &FrontPoint) -> Vec<String> {
    let training = &point.config.training;
    let precision = training.mixed_precision().set().map_or(String::new(), |precision| precision.to_string());
    let form = match training.gradient_checkpointing().set() {
        Some(GradientCheckpointing::Form(form)) => GradientCheckpointing::Form(form).to_string(),
        _ => String::new(),
    };
    row![
        ByteSize(point.device_peak_bytes),
        seconds(point.step_seconds),
        format!("{:.0}", point.tokens_per_second),
        point.quality,
        precision,
        training.optimizer(),
        form
    ]
}
