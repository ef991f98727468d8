//! What a run costs.

use plimsoll_plan::{Price, ProcessLimits, RunCost, Target, TrainingPlan};

use crate::args::PlanArgs;
use crate::units::{count, seconds};

/// Tokens of a run whose length nobody has said.
pub const BILLION: u64 = 1_000_000_000;

/// Devices of a run: those of its machine, or one for each rank that has a machine of its own. This machine is one.
fn devices(plan: &TrainingPlan, target: Option<&Target>) -> u64 {
    let elsewhere = plan.machine.limits == ProcessLimits::NONE;
    target.map_or(if elsewhere { u64::from(plan.config.ranks()) } else { 1 }, Target::devices)
}

/// Dollars an hour for so many devices: what the user pays, or as the catalogue has it.
pub fn prices(args: &PlanArgs, devices: u64, target: Option<&Target>) -> Option<[f64; 2]> {
    match args.price {
        Some(price) => Some([price, price].map(|price| price * devices as f64)),
        None => target.and_then(Target::dollars_an_hour),
    }
}

/// The run on a machine, where the user has asked for its length or price, or its price is known.
pub fn of(plan: &TrainingPlan, args: &PlanArgs, target: Option<&Target>) -> Option<RunCost> {
    if target.is_none() && args.tokens.is_none() && args.price.is_none() {
        return None;
    }
    let devices = devices(plan, target);
    plan.cost(args.tokens, devices, prices(args, devices, target))
}

/// The same in words.
pub fn words(cost: &RunCost, args: &PlanArgs, target: Option<&Target>) -> String {
    let each = match cost.device_hours > cost.hours {
        true => format!(", {} device hours", hours(cost.device_hours)),
        false => String::new(),
    };
    let date = target.filter(|_| args.price.is_none()).and_then(|target| target.price.as_ref());
    let date = date.map(|Price { date, .. }| date).filter(|date| !date.is_empty());
    let date = date.map_or(String::new(), |date| format!(" at prices of {date}"));
    let price = cost.dollars.map_or(String::new(), |range| format!(", {}{date}", dollars(range)));
    let time = seconds(cost.hours * 3600.0);
    format!("{} tokens in {} steps: about {time}{each}{price}\n", count(cost.tokens), cost.steps)
}

/// From the lowest to the highest, or one price.
pub fn dollars([low, high]: [f64; 2]) -> String {
    let of = |price: f64| match price {
        price if price < 100.0 => format!("{price:.2}"),
        price => format!("{price:.0}"),
    };
    let (low, high) = (of(low), of(high));
    if low == high { format!("${low}") } else { format!("${low} to ${high}") }
}

/// Hours with as many figures as matter.
pub fn hours(hours: f64) -> String {
    match hours {
        hours if hours < 10.0 => format!("{hours:.2}"),
        hours => format!("{hours:.0}"),
    }
}
