//! The same step on several machines, side by side.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{LimitedBy, RunCost, Target, TrainingPlan};
use serde_json::{Value, json};

use super::cost;
use crate::args::{ConfigSource, PlanArgs};
use crate::asked::{load_config_for, machine_of, target_named};
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::output::{out, outln};
use crate::overhead::Progress;
use crate::row;
use crate::table;
use crate::units::{count, seconds};
use plimsoll_plan::config::Imported;

/// A machine, the plan for it, and what a run costs there.
struct Line {
    target: Target,
    plan: TrainingPlan,
    cost: Option<RunCost>,
}

/// The machines that `--compare` names.
pub fn named(args: &PlanArgs, source: &ConfigSource) -> Result<(), Failure> {
    let (mut plans, mut origin) = (Vec::new(), None);
    for name in &args.compare {
        let target = target_named(name, &args.machine)?;
        let config = load_config_for((source, &Imported::default()), Some(&target), None)?;
        if origin.is_none() {
            origin = Some(models::origin(&config, Need::Shape, args.json)?);
        }
        let Some(origin) = &origin else { continue };
        let machine = machine_of(&target, &config, origin, Progress::Planning);
        let plan = match args.json {
            true => TrainingPlan::for_model(&config, origin, &machine)?,
            false => TrainingPlan::in_brief(&config, origin, &machine)?,
        };
        plans.push((target, plan));
    }
    show(args, plans)
}

/// Shows plans for machines, in order.
pub fn show(args: &PlanArgs, plans: Vec<(Target, TrainingPlan)>) -> Result<(), Failure> {
    let any_fits = plans.iter().any(|(_, plan)| plan.fits());
    let lines: Vec<Line> = plans
        .into_iter()
        .map(|(target, plan)| {
            let known = cost::of(&plan, args, Some(&target));
            let billion = || {
                plan.cost(
                    Some(cost::BILLION),
                    target.devices(),
                    cost::prices(args, target.devices(), Some(&target)),
                )
            };
            let cost = known.or_else(billion);
            Line { target, plan, cost }
        })
        .collect();
    match args.json {
        true => {
            let rows: Vec<Value> = lines.iter().map(Line::json).collect();
            outln!("{}", serde_json::to_string_pretty(&json!({ "compare": rows }))?)?;
        }
        false => out!("{}", table(&lines))?,
    }
    if any_fits { Ok(()) } else { Err(Failure::shown_not_to_fit()) }
}

impl Line {
    fn json(&self) -> Value {
        let mut document = self.plan.to_json();
        if let Value::Object(map) = &mut document {
            map.insert("hardware".to_owned(), json!(self.target));
            map.insert("cost".to_owned(), json!(self.cost));
        }
        document
    }

    fn row(&self) -> Vec<String> {
        let Line { target, plan, cost } = self;
        let time = &plan.choice.time;
        let bytes = |bytes: u64| if bytes == 0 { "-".to_owned() } else { ByteSize(bytes).to_string() };
        let device = ByteSize(plan.peak_bytes().saturating_add(plan.overhead_bytes));
        let mut row = row![
            target.name,
            if plan.fits() { "yes" } else { "NO" },
            match plan.load_line.by {
                LimitedBy::Budget => format!("{device} of {} (the budget)", ByteSize(plan.load_line.bytes)),
                _ => format!("{device} of {}", target.device.memory),
            },
            bytes(plan.choice.dry_run.host_bytes()),
            bytes(plan.disk_bytes()),
        ];
        if !plan.fits() {
            return row;
        }
        let of_cost = cost.map(|cost| {
            let dollars = cost.dollars.map_or("-".to_owned(), cost::dollars);
            [cost::hours(cost.hours), dollars]
        });
        row.extend([seconds(time.step_seconds), format!("{:.0}", time.tokens_per_second)]);
        row.extend(of_cost.into_iter().flatten());
        row
    }
}

fn table(lines: &[Line]) -> String {
    let tokens = lines.iter().find_map(|line| line.cost).map_or(0, |cost| cost.tokens);
    let mut rows =
        vec![row!["", "fits", "a device", "its host", "disk", "step", "tokens/s", "hours", "dollars"]];
    rows.extend(lines.iter().map(Line::row));
    format!(
        "{}\nhours and dollars are those of {} tokens. Each machine has the plan that is best for it: batch, checkpointing and offload\n\
         may differ (--json has them). Speeds are the plan's claim: steps were timed on an H200 alone.\n",
        table::render(&rows),
        count(tokens)
    )
}
