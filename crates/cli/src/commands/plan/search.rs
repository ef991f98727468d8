//! What a search has found: how it was found, and the Pareto front.

use plimsoll_memory::ByteSize;
use plimsoll_plan::config::{Auto, Goal, GradientCheckpointing, OffloadConfig, OffloadTarget, RawConfig};
use plimsoll_plan::{Finder, Found, FrontPoint, SearchReport, Sought, Target, TrainingPlan, device_for_goal};

use crate::args::{ConfigSource, PlanArgs};
use crate::asked::Asked;
use crate::failure::Failure;
use crate::row;
use crate::speeds::PlanSpeeds;
use crate::table;
use crate::units::seconds;

/// Points of the front that are as near as this in memory and in time count as one for people.
const ALIKE: f64 = 1.05;
/// Behind the bytes of a point that the choice may not take.
const ABOVE: &str = " *";

/// The command line with its goal and its class as keys of the configuration.
pub fn source(args: &PlanArgs, source: ConfigSource) -> ConfigSource {
    let keys = [("goal", &args.goal), ("quality", &args.quality)];
    let said =
        keys.into_iter().filter_map(|(key, value)| Some(format!("planning.{key}={}", value.as_ref()?)));
    let set = source.set.iter().cloned().chain(said).collect();
    ConfigSource { set, ..source }
}

/// Refuses a picture of a search that is not asked for; and a machine, or the memory of one, where a device is looked for.
pub fn check(args: &PlanArgs, asked: &Asked) -> Result<(), Failure> {
    if args.pareto.is_some() && asked.config.planning == Default::default() {
        return Err(Failure::usage("--pareto draws what a search finds: name a --goal or a --quality"));
    }
    let what = match (args.find, goal_of_devices(asked)) {
        (Some(Sought::Hardware), _) => "--find hardware".to_owned(),
        (_, Some(goal)) => format!("the goal {goal}"),
        _ => return Ok(()),
    };
    let named = [
        ("--hardware", args.machine.hardware.is_some()),
        ("--memory", args.source.memory.is_some()),
        ("--elsewhere", args.elsewhere),
    ];
    match named.into_iter().find(|(_, is_said)| *is_said) {
        Some((flag, _)) => Err(Failure::usage(format!(
            "{what} looks for a device among all of the catalogue, each with its own memory; leave {flag} out"
        ))),
        None => Ok(()),
    }
}

/// The goal, where it asks for a device.
fn goal_of_devices(asked: &Asked) -> Option<Goal> {
    asked.config.planning.goal.filter(|goal| matches!(goal, Goal::SmallestDevice | Goal::Cheapest))
}

/// The device that a goal asks for, and the plan on it; `None` where the goal asks for none.
pub fn device(asked: &Asked) -> Result<Option<(Target, TrainingPlan)>, Failure> {
    let Some(goal) = goal_of_devices(asked) else { return Ok(None) };
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
                let less = 100.0 * (1.0 - least / plan.choice.time.step_seconds);
                format!("; with memory for everything a step would take {}, {less:.0} % less", seconds(least))
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
    let mut rows = vec![row![
        "device",
        "a step",
        "tokens/s",
        "quality",
        "precision",
        "optimizer",
        "checkpointing",
        "below the device"
    ]];
    let shown = apart(&report.front);
    rows.extend(shown.iter().map(|point| line(point)));
    let rest = match report.front.len() - shown.len() {
        0 => String::new(),
        rest => format!("; {rest} that are almost the same are left out (--json has all)"),
    };
    let [share, ..] = plan.config.memory.shares();
    let above = match shown.iter().any(|point| point.above_target) {
        true => format!(
            "{ABOVE} fills more of the load line than memory.target_utilization ({share}) lets a choice fill\n"
        ),
        false => String::new(),
    };
    out.push_str(&format!(
        "\nmemory against time, every line a plan that fits{rest}:\n{}{above}",
        table::render(&rows)
    ));
    out
}

/// Of points in order, those that somebody may want to choose between: of each class the ends, and what differs from the one before.
fn apart(front: &[FrontPoint]) -> Vec<&FrontPoint> {
    let mut shown: Vec<&FrontPoint> = Vec::new();
    for (place, point) in front.iter().enumerate() {
        let of_class = |other: &&FrontPoint| other.quality == point.quality;
        let is_last = !front.iter().skip(place + 1).any(|other| of_class(&other));
        let differs = |before: &FrontPoint| {
            let bytes = point.device_peak_bytes as f64 / before.device_peak_bytes.max(1) as f64;
            bytes > ALIKE || before.step_seconds > point.step_seconds * ALIKE
        };
        let before = shown.iter().rev().copied().find(of_class);
        if is_last || before.is_none_or(differs) {
            shown.push(point);
        }
    }
    shown
}

/// What of a point is not on the device.
fn below(config: &RawConfig) -> String {
    let OffloadConfig { optimizer, gradients, activations, parameters } = config.memory.offload;
    let kinds = [
        ("states", optimizer),
        ("gradients", gradients),
        ("activations", activations),
        ("weights", parameters),
    ];
    let on = |target: OffloadTarget| {
        let own = kinds.iter().filter(|(_, place)| place.and_then(Auto::set) == Some(target));
        let names: Vec<&str> = own.map(|(name, _)| *name).collect();
        (!names.is_empty()).then(|| format!("{} on {target}", names.join(", ")))
    };
    let tiers: Vec<String> = [OffloadTarget::Host, OffloadTarget::Disk].into_iter().filter_map(on).collect();
    tiers.join("; ")
}

fn line(point: &FrontPoint) -> Vec<String> {
    let training = &point.config.training;
    let precision = training.mixed_precision().set().map_or(String::new(), |precision| precision.to_string());
    let form = match training.gradient_checkpointing().set() {
        Some(GradientCheckpointing::Form(form)) => GradientCheckpointing::Form(form).to_string(),
        _ => String::new(),
    };
    row![
        format!("{}{}", ByteSize(point.device_peak_bytes), if point.above_target { ABOVE } else { "" }),
        seconds(point.step_seconds),
        format!("{:.0}", point.tokens_per_second),
        point.quality,
        precision,
        training.optimizer(),
        form,
        below(&point.config)
    ]
}

#[cfg(test)]
mod tests {
    use plimsoll_plan::config::Quality;

    use super::*;

    #[test]
    fn points_that_are_almost_the_same_are_shown_once_and_the_ends_of_each_class_always() {
        let point = |device_peak_bytes, step_seconds, quality| FrontPoint {
            device_peak_bytes,
            step_seconds,
            tokens_per_second: 1.0 / step_seconds,
            quality,
            above_target: false,
            config: RawConfig::default(),
        };
        let front = [
            point(100, 9.0, Quality::Proven),
            point(102, 8.9, Quality::Proven),
            point(103, 12.0, Quality::Lossless),
            point(104, 6.0, Quality::Proven),
            point(120, 5.99, Quality::Proven),
            point(121, 5.98, Quality::Proven),
        ];
        let shown: Vec<u64> = apart(&front).iter().map(|point| point.device_peak_bytes).collect();
        assert_eq!(shown, [100, 103, 104, 120, 121]);
        assert!(apart(&[]).is_empty());
    }

    #[test]
    fn what_is_below_the_device_is_said_by_tier() {
        let places =
            ["memory.offload={optimizer: disk, gradients: host, activations: host, parameters: device}"];
        let config = RawConfig::from_overrides(places).unwrap();
        assert_eq!(below(&config), "gradients, activations on host; states on disk");
    }
}
