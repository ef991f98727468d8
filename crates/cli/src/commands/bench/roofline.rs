//! Where the time of a step goes, beside what each operation would take at the machine's bounds.

use std::collections::BTreeMap;

use plimsoll_device::{Pace, Spent, TimedOperation};
use plimsoll_memory::Phase;
use plimsoll_plan::{BoundBy, Rates, TrainingPlan};
use serde::Serialize;
use serde_json::Value;

use crate::commands::plan::describe;
use crate::failure::Failure;
use crate::row;
use crate::session::Engine;
use crate::table;
use crate::units::seconds;

/// Operations with a smaller share of the step are one row for people.
const SMALL: f64 = 0.005;

/// A step as it was measured.
pub struct Measured {
    pub seconds: f64,
    pub operations: BTreeMap<TimedOperation, Spent>,
}

/// What `bench step` answers. Times are those of the median step, so that they add up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Roofline {
    pub model: String,
    /// The step in words.
    #[serde(skip)]
    pub plan: String,
    /// With every `auto` decided.
    pub config: Value,
    pub threads: usize,
    pub cpu: String,
    /// Steps that were measured.
    pub steps: usize,
    pub machine: MachinePeak,
    pub step: StepTime,
    /// The longest first.
    pub operations: Vec<OperationTime>,
}

/// What the machine does at most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MachinePeak {
    pub f32_flops_per_second: f64,
    pub bf16_flops_per_second: f64,
    pub memory_bytes_per_second: f64,
    pub exps_per_second: f64,
}

/// A whole step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTime {
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// What the plan says.
    pub planned_seconds: f64,
    /// The sum of what the operations take at their bounds.
    pub bound_seconds: f64,
    /// The sum of what they took.
    pub operations_seconds: f64,
    /// Floating-point operations of products and attention.
    pub flops: u64,
    /// What the plan says of them.
    pub planned_flops: u64,
}

/// Operations of one kind in a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperationTime {
    pub phase: Phase,
    pub name: &'static str,
    /// Rows, inner length and columns of a product.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sides: Option<[u64; 3]>,
    pub calls: u64,
    pub seconds: f64,
    pub bound_seconds: f64,
    pub bound_by: BoundBy,
    pub planned_seconds: f64,
    pub flops: u64,
    pub bytes: u64,
}

impl Roofline {
    /// Of measured steps, of which the first one touches everything for the first time.
    pub fn new(plan: &TrainingPlan, engine: &Engine, mut steps: Vec<Measured>) -> Result<Roofline, Failure> {
        let rates = &engine.speeds().machine.rates;
        let cpu = &engine.hardware.cpu;
        let mut measured = if steps.len() > 1 { steps.split_off(1) } else { steps };
        measured.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let Some(median) = measured.get(measured.len() / 2) else {
            return Err(Failure::other("no step was taken"));
        };
        let (operations, whole) = (operations(median, rates), median.seconds);
        let time = &plan.choice.time;
        // As many tokens as are planned.
        let tokens = time.tokens_per_second * time.step_seconds;
        let sum = |of: fn(&OperationTime) -> f64| operations.iter().map(of).sum::<f64>();
        Ok(Roofline {
            model: plan.spec.name.clone(),
            config: serde_json::from_str(&plan.config.to_json()?)?,
            plan: describe::step(plan),
            threads: engine.pool.threads(),
            cpu: cpu.name.clone().unwrap_or_else(|| cpu.architecture.to_owned()),
            steps: measured.len(),
            machine: MachinePeak {
                f32_flops_per_second: rates.matmul_f32,
                bf16_flops_per_second: rates.matmul_bf16,
                memory_bytes_per_second: rates.memory_bandwidth,
                exps_per_second: rates.exps,
            },
            step: StepTime {
                seconds: whole,
                tokens_per_second: tokens / whole,
                planned_seconds: time.step_seconds,
                bound_seconds: sum(|operation| operation.bound_seconds),
                operations_seconds: sum(|operation| operation.seconds),
                flops: operations.iter().map(|operation| operation.flops).sum(),
                planned_flops: time.flops_per_step,
            },
            operations,
        })
    }

    /// For people.
    pub fn describe(&self) -> String {
        let StepTime { seconds: whole, planned_seconds, bound_seconds, .. } = self.step;
        let giga = |rate: f64| format!("{:.0}", rate / 1e9);
        let peak = &self.machine;
        let mut text = format!(
            "{}, {} threads of {}\n{}\
             at most: {} GFLOP/s in f32, {} in bf16, {:.1} GB/s of memory\n\
             a step takes {} ({:.0} tokens/s, the median of {}); {} were planned, and {} are the sum of all bounds: {:.0} %\n\n",
            self.model,
            self.threads,
            self.cpu,
            self.plan,
            giga(peak.f32_flops_per_second),
            giga(peak.bf16_flops_per_second),
            peak.memory_bytes_per_second / 1e9,
            seconds(whole),
            self.step.tokens_per_second,
            self.steps,
            seconds(planned_seconds),
            seconds(bound_seconds),
            100.0 * bound_seconds / whole
        );
        let mut rows = vec![row![
            "operation",
            "rows x inner x columns",
            "calls",
            "time",
            "of the step",
            "of its bound",
            "bound by",
            "GFLOP/s",
            "GB/s",
            "planned"
        ]];
        let is_large = |operation: &&OperationTime| operation.seconds >= SMALL * whole;
        rows.extend(self.operations.iter().filter(is_large).map(|operation| operation.cells(whole)));
        let small: Vec<&OperationTime> = self.operations.iter().filter(|one| !is_large(one)).collect();
        let sum = |of: fn(&OperationTime) -> f64| small.iter().map(|one| of(one)).sum::<f64>();
        let others = sum(|one| one.seconds);
        rows.push(row![
            format!("{} others", small.len()),
            "",
            small.iter().map(|one| one.calls).sum::<u64>(),
            milliseconds(others),
            percent(others / whole),
            percent(sum(|one| one.bound_seconds) / others),
            "",
            "",
            "",
            milliseconds(sum(|one| one.planned_seconds))
        ]);
        let beside = whole - self.step.operations_seconds;
        rows.push(row!["beside operations", "", "", milliseconds(beside), percent(beside / whole)]);
        text.push_str(&table::render(&rows));
        text
    }
}

impl OperationTime {
    fn cells(&self, whole: f64) -> Vec<String> {
        let sides = self.sides.map(|[rows, inner, columns]| format!("{rows} x {inner} x {columns}"));
        let rate = |count: u64| match count {
            0 => String::new(),
            count => format!("{:.1}", count as f64 / self.seconds / 1e9),
        };
        row![
            format!("{} {}", self.phase, self.name),
            sides.unwrap_or_default(),
            self.calls,
            milliseconds(self.seconds),
            percent(self.seconds / whole),
            percent(self.bound_seconds / self.seconds),
            self.bound_by.name(),
            rate(self.flops),
            rate(self.bytes),
            milliseconds(self.planned_seconds)
        ]
    }
}

/// The operations of a step, the longest first.
fn operations(step: &Measured, rates: &Rates) -> Vec<OperationTime> {
    let time = |(operation, Spent { seconds, tally }): (&TimedOperation, &Spent)| {
        let bound = rates.bound(tally);
        OperationTime {
            phase: operation.phase,
            name: operation.name,
            sides: operation.sides,
            calls: tally.operations,
            seconds: *seconds,
            bound_seconds: bound.seconds,
            bound_by: bound.by,
            planned_seconds: rates.operations(tally),
            flops: tally.flops(),
            bytes: tally.bytes.saturating_add(tally.matmul_bytes),
        }
    };
    let mut operations: Vec<OperationTime> = step.operations.iter().map(time).collect();
    operations.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    operations
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", 1e3 * seconds)
}

fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.0} %", 100.0 * share) } else { String::new() }
}
