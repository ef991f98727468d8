//! The answer in a sentence or two, and a few numbers.

use plimsoll_memory::ByteSize;
use plimsoll_plan::TrainingPlan;
use serde::Serialize;

use crate::compared::Comparison;
use crate::page::{count, seconds};
use crate::progress::{Progress, RunState};

/// A number that is worth being seen first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fact {
    /// What it is.
    pub what: &'static str,
    /// The number.
    pub value: String,
    /// What it is measured against.
    pub beside: String,
}

/// How the run stands, with what ended it where that is known, and whether the plan fits.
pub fn headline(
    plan: Option<&TrainingPlan>,
    place: &str,
    run: Option<(&Progress, Option<&str>)>,
    compared: &[Comparison],
) -> String {
    let mut sentences: Vec<String> = Vec::new();
    if let Some((run, ended)) = run {
        sentences.push(of_run(run, ended.unwrap_or_default()));
        sentences.extend(as_planned(compared));
    }
    match (plan, run) {
        (Some(plan), None) => sentences.push(of_plan(plan, place)),
        (Some(plan), Some((run, _))) if run.state == RunState::Empty => sentences.push(of_plan(plan, place)),
        _ => {}
    }
    sentences.join(" ")
}

fn of_plan(plan: &TrainingPlan, place: &str) -> String {
    let (bytes, line) = (ByteSize(plan.bytes_under_the_line()), ByteSize(plan.load_line.bytes));
    // What else is to be said of the speeds is left to `plan`.
    let place = place.lines().next().map(|line| line.trim_end_matches(':')).unwrap_or_default();
    let place = if place.is_empty() { String::new() } else { format!(" {place}") };
    let time = seconds(plan.choice.time.step_seconds);
    match plan.misfits().first() {
        None => format!("Fits: {bytes} of {line} at the peak, and about {time} a step{place}."),
        Some(misfit) => format!("Does not fit: {misfit}."),
    }
}

fn of_run(run: &Progress, ended: &str) -> String {
    let steps = match run.of_steps {
        Some(all) if all > run.steps => format!("{} of {} steps", count(run.steps), count(all)),
        _ if run.steps == 1 => "a step".to_owned(),
        _ => format!("{} steps", count(run.steps)),
    };
    let state = match run.state {
        RunState::Finished => format!("Finished after {steps}"),
        RunState::Stopped => format!("Stopped after {steps}"),
        RunState::Ended => {
            let when =
                if run.steps == 0 { "before its first step".to_owned() } else { format!("after {steps}") };
            return format!("Ended {when}: {}.", ended.trim_end_matches('.'));
        }
        RunState::Open => format!("{steps} so far; the run goes on or was killed"),
        RunState::Empty => return "No step has been taken yet.".to_owned(),
    };
    match (run.first_loss, run.last_loss) {
        (Some(first), Some(last)) if run.steps > 1 => format!("{state}: loss {first:.3} to {last:.3}."),
        (_, Some(last)) => format!("{state}: loss {last:.3}."),
        _ => format!("{state}."),
    }
}

/// Whether the device took what was planned.
fn as_planned(compared: &[Comparison]) -> Option<String> {
    let device = compared.iter().find(|row| row.exact)?;
    let (planned, measured) = (device.planned?, ByteSize(device.measured as u64));
    Some(match planned == device.measured {
        true => format!("The device took {measured}, as planned to the byte."),
        false => format!("The device took {measured}; planned were {}.", ByteSize(planned as u64)),
    })
}

/// The numbers of a plan, or those of a run whose plan is not known.
pub fn facts(plan: Option<&TrainingPlan>, run: Option<&Progress>) -> Vec<Fact> {
    let mut all = Vec::new();
    let mut fact = |what, value: String, beside: String| all.push(Fact { what, value, beside });
    if let Some(plan) = plan {
        let (bytes, line) = (plan.bytes_under_the_line(), plan.load_line.bytes);
        let share = 100.0 * bytes as f64 / line.max(1) as f64;
        let beside = format!("{share:.0} % of {}", ByteSize(line));
        fact("Memory at the peak", ByteSize(bytes).to_string(), beside);
        let time = &plan.choice.time;
        let waiting = match time.waiting_seconds / time.step_seconds.max(f64::MIN_POSITIVE) {
            share if share >= 0.01 => format!("{:.0} % of it waiting", 100.0 * share),
            _ => "planned".to_owned(),
        };
        fact("A step", seconds(time.step_seconds), waiting);
        fact("Speed", count(time.tokens_per_second.round() as u64), "tokens/s, planned".to_owned());
        let trained = match plan.trainable_parameters() {
            trained if trained == plan.parameters() => "all trained".to_owned(),
            trained => format!("{} trained", parameters(trained)),
        };
        fact("Parameters", parameters(plan.spec.parameter_count()), trained);
        let needs = plan.run_needs(run.and_then(|run| run.of_steps));
        if let (Some(steps), Some(time)) = (needs.steps, needs.seconds) {
            fact("The whole run", seconds(time), format!("{} steps", count(steps)));
        }
    }
    if let (None, Some(run)) = (plan, run) {
        fact("Steps", count(run.steps), String::new());
        fact("Tokens", count(run.tokens), String::new());
    }
    all
}

/// A count with three figures: 134.5M.
fn parameters(n: u64) -> String {
    match n {
        0..1_000_000 => count(n),
        1_000_000..1_000_000_000 => format!("{:.1}M", n as f64 / 1e6),
        _ => format!("{:.1}B", n as f64 / 1e9),
    }
}
