//! What a run's plan says of it, as far as whoever watches wants to know.

use plimsoll_plan::TrainingPlan;
use plimsoll_report::{Allocations, TimelineData};
use plimsoll_step::StepError;
use serde::Serialize;

/// A plan as it is shown beside a run.
#[derive(Clone, Debug, Serialize)]
pub struct PlanView {
    /// The model's name.
    pub title: String,
    /// What kind of step it is, in words.
    pub settings: String,
    /// The load line.
    pub line_bytes: u64,
    /// Who has set it.
    pub line_by: String,
    /// The shares of the line from which on memory is high, critically so, and an emergency.
    pub thresholds: [f64; 3],
    /// The whole process.
    pub process_bytes: u64,
    /// The device's arena at its peak.
    pub device_bytes: u64,
    /// The host tier with the data pipeline.
    pub host_bytes: u64,
    /// On disk.
    pub disk_bytes: u64,
    /// Time of a step.
    pub step_seconds: f64,
    /// Tokens of a step over that time.
    pub tokens_per_second: f64,
    /// Steps of the whole run, where they are known.
    pub steps: Option<u64>,
    /// The device's peak on each of several ranks, by its number.
    pub ranks_device_bytes: Vec<u64>,
    /// Memory through the step.
    #[serde(skip)]
    pub timeline: TimelineData,
}

impl PlanView {
    /// Of a plan, with its time line in a size that can be kept beside a run.
    ///
    /// # Errors
    /// Those of a dry run; it was run before.
    pub fn of(plan: &TrainingPlan) -> Result<PlanView, StepError> {
        let mut timeline = TimelineData::of(&plan.timeline()?);
        // Who lives when is for whoever points at it, and much larger than the rest.
        for tier in &mut timeline.tiers {
            tier.allocations = Allocations::default();
        }
        (timeline.names, timeline.at_peak) = (Vec::new(), Vec::new());
        let [_, warning, critical, emergency] = plan.config.memory.shares();
        let of_ranks = plan
            .ranks
            .iter()
            .flat_map(|group| group.ranks.iter().map(|rank| (*rank, group.device_peak_bytes)));
        let mut of_ranks: Vec<(u32, u64)> = of_ranks.collect();
        of_ranks.sort_unstable();
        Ok(PlanView {
            title: plan.spec.name.clone(),
            settings: timeline.settings.clone(),
            line_bytes: plan.load_line.bytes,
            line_by: plan.load_line.by.to_string(),
            thresholds: [warning, critical, emergency],
            process_bytes: plan.process_bytes(),
            device_bytes: plan.peak_bytes(),
            host_bytes: plan.host_bytes(),
            disk_bytes: plan.disk_bytes(),
            step_seconds: plan.choice.time.step_seconds,
            tokens_per_second: plan.choice.time.tokens_per_second,
            steps: plan.run_needs(None).steps,
            ranks_device_bytes: of_ranks.into_iter().map(|(_, bytes)| bytes).collect(),
            timeline,
        })
    }
}
