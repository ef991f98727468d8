//! What was planned beside what was measured.

use plimsoll_plan::TrainingPlan;
use plimsoll_train::{Report, StepMetrics};
use serde::Serialize;

/// A number that was planned and measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What it is.
    pub what: String,
    /// Of what.
    pub unit: Unit,
    /// What the plan said; `None` where nobody knows the plan.
    pub planned: Option<f64>,
    /// What came out.
    pub measured: f64,
    /// Whether the two are to be equal.
    pub exact: bool,
}

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Tokens in a second.
    TokensPerSecond,
}

/// What a plan said, as far as it is known.
#[derive(Clone, Copy, Default)]
struct Said {
    device: Option<u64>,
    host: Option<u64>,
    disk: Option<u64>,
    process: Option<u64>,
    step_seconds: Option<f64>,
    tokens_per_second: Option<f64>,
}

impl Comparison {
    /// A run that has written its report.
    pub fn of_report(report: &Report) -> Vec<Comparison> {
        let (planned, measured) = (report.planned, report.measured);
        let said = Said {
            device: Some(planned.device_peak_bytes),
            host: Some(planned.host_peak_bytes),
            disk: Some(planned.disk_bytes),
            process: Some(planned.process_bytes),
            step_seconds: Some(planned.step_seconds),
            tokens_per_second: Some(planned.tokens_per_second),
        };
        let bytes = [
            measured.device_peak_bytes,
            measured.host_peak_bytes,
            measured.disk_bytes,
            measured.process_peak_rss_bytes,
        ];
        let mut rows = said.beside(bytes, measured.step_seconds_median, report.tokens_per_second_median);
        for rank in &report.ranks {
            rows.push(Comparison {
                what: format!("rank {}: device's arena", rank.rank),
                unit: Unit::Bytes,
                planned: Some(rank.planned.device_peak_bytes as f64),
                measured: rank.measured.device_peak_bytes as f64,
                exact: true,
            });
        }
        rows
    }

    /// A run of which there are only its steps, beside its plan as it is made now.
    pub fn of_steps(steps: &[StepMetrics], plan: Option<&TrainingPlan>) -> Vec<Comparison> {
        let Some(last) = steps.last() else { return Vec::new() };
        let said = plan.map_or(Said::default(), |plan| Said {
            device: Some(plan.peak_bytes()),
            host: Some(plan.host_bytes()),
            disk: Some(plan.disk_bytes()),
            process: Some(plan.process_bytes()),
            step_seconds: Some(plan.choice.time.step_seconds),
            tokens_per_second: Some(plan.choice.time.tokens_per_second),
        });
        let resident = steps.iter().map(|step| step.memory.process_rss_bytes).max().unwrap_or(0);
        let memory = last.memory;
        let bytes = [memory.device_peak_bytes, memory.host_peak_bytes, memory.disk_bytes, resident];
        let speed = median(steps.iter().map(|step| step.tokens_per_second));
        let before = steps.len().checked_sub(2).and_then(|index| steps.get(index));
        let tokens = last.tokens.saturating_sub(before.map_or(0, |step| step.tokens));
        let seconds = if speed > 0.0 { tokens as f64 / speed } else { 0.0 };
        said.beside(bytes, seconds, speed)
    }
}

impl Said {
    fn beside(
        self,
        [device, host, disk, process]: [u64; 4],
        step_seconds: f64,
        speed: f64,
    ) -> Vec<Comparison> {
        let bytes = |what: &str, planned: Option<u64>, measured: u64, exact: bool| Comparison {
            what: what.to_owned(),
            unit: Unit::Bytes,
            planned: planned.map(|bytes| bytes as f64),
            measured: measured as f64,
            exact,
        };
        let rate = |what: &str, unit: Unit, planned: Option<f64>, measured: f64| Comparison {
            what: what.to_owned(),
            unit,
            planned,
            measured,
            exact: false,
        };
        let all = [
            bytes("device's arena at its peak", self.device, device, true),
            bytes("host, with the data pipeline", self.host, host, false),
            bytes("disk", self.disk, disk, false),
            bytes("the whole process", self.process, process, false),
            rate("a step (median)", Unit::Seconds, self.step_seconds, step_seconds),
            rate("tokens/s (median)", Unit::TokensPerSecond, self.tokens_per_second, speed),
        ];
        let says_something = |row: &Comparison| row.measured > 0.0 || row.planned.unwrap_or(0.0) > 0.0;
        all.into_iter().filter(says_something).collect()
    }
}

/// The middle one of the numbers; 0 for none.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
