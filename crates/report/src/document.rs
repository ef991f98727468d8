//! What the page says, as data: also what `plimsoll report --json` prints.

use plimsoll_plan::{Alternative, TrainingPlan};
use plimsoll_step::StepError;
use plimsoll_train::{Report, StepMetrics};
use serde::Serialize;
use serde_json::Value;

use crate::breakdown::Breakdown;
use crate::choices::{ParetoPoint, WaterfallEntry};
use crate::compared::Comparison;
use crate::estimated::Estimated;
use crate::headline::{Fact, facts, headline};
use crate::page::{self, PageError};
use crate::progress::{Progress, RunState};
use crate::timeline::TimelineData;

/// Other settings that are listed.
const MOST_ALTERNATIVES: usize = 8;

/// What a report is of.
#[derive(Debug, Default)]
pub struct Subject<'a> {
    /// What was asked for, as the user named it.
    pub name: String,
    /// The plan; `None` where it cannot be made any more.
    pub plan: Option<&'a TrainingPlan>,
    /// Whose speed the plan's time is: "on NVIDIA RTX 4090".
    pub place: String,
    /// The run.
    pub run: Option<&'a RunRecord>,
    /// From the naive step to the chosen one.
    pub waterfall: Vec<WaterfallEntry>,
    /// Choices that nothing beats.
    pub pareto: Vec<ParetoPoint>,
    /// What else the reader has to know.
    pub notes: Vec<String>,
}

/// What a run has left in its folder.
#[derive(Clone, Debug, Default)]
pub struct RunRecord {
    /// The configuration that it was started with, every `auto` decided.
    pub configuration: Option<String>,
    /// Its steps.
    pub steps: Vec<StepMetrics>,
    /// Its report, where it came to an end.
    pub report: Option<Report>,
    /// How it ended, in words, where it said so to its flight recorder.
    pub ended: Option<String>,
}

/// What a page says.
#[derive(Clone, Debug, Serialize)]
pub struct Document {
    /// What was asked for.
    pub name: String,
    /// The model's name.
    pub title: String,
    /// What kind of step it is.
    pub settings: Option<String>,
    /// The answer in a sentence or two.
    pub headline: String,
    /// Whether the plan fits; `None` where there is no plan.
    pub fits: Option<bool>,
    /// A few numbers.
    pub facts: Vec<Fact>,
    /// What else the reader has to know.
    pub notes: Vec<String>,
    /// Why the plan does not fit.
    pub misfits: Vec<String>,
    /// Other settings: of a plan that does not fit, those that do.
    pub alternatives: Vec<Alternative>,
    /// Tiers at their peaks.
    pub memory: Vec<Breakdown>,
    /// Memory through the step.
    pub timeline: Option<TimelineData>,
    /// The run so far.
    pub run: Option<Progress>,
    /// Planned beside measured.
    pub compared: Vec<Comparison>,
    /// From the naive step to the chosen one.
    pub waterfall: Vec<WaterfallEntry>,
    /// Choices that nothing beats.
    pub pareto: Vec<ParetoPoint>,
    /// The configuration with every `auto` decided.
    pub configuration: Option<String>,
    /// The plan, as `plan --json` prints it.
    pub plan: Option<Value>,
    /// Of a run of another stack: phases, changes, and what was decided.
    pub estimated: Option<Estimated>,
}

impl Document {
    /// What there is to say of a subject.
    ///
    /// # Errors
    /// Those of a dry run; it was run before.
    pub fn of(subject: Subject<'_>) -> Result<Document, StepError> {
        let Subject { name, plan, place, run, waterfall, pareto, notes } = subject;
        let timeline = plan.map(TrainingPlan::timeline).transpose()?;
        let timeline = timeline.as_ref().map(TimelineData::of);
        let of_steps = plan.and_then(|plan| plan.run_needs(None).steps);
        let mut progress = run.map(|run| Progress::of(&run.steps, run.report.as_ref(), of_steps));
        let ended = run.and_then(|run| run.ended.as_deref());
        // A part that was stopped may have been gone on with since.
        if let Some(run) = progress.as_mut().filter(|run| run.state != RunState::Finished && ended.is_some())
        {
            run.state = RunState::Ended;
        }
        // A report is of the last part of a run that said an end. Later steps are of a part that has not.
        let compared = run.map_or(Vec::new(), |run| match (&run.report, run.steps.last()) {
            (Some(report), last) if last.is_none_or(|last| last.step <= report.steps) => {
                Comparison::of_report(report)
            }
            _ => Comparison::of_steps(&run.steps, plan),
        });
        let configuration = match plan {
            Some(plan) => plan.config.to_yaml().ok(),
            None => run.and_then(|run| run.configuration.clone()),
        };
        Ok(Document {
            title: plan.map_or_else(|| name.clone(), |plan| plan.spec.name.clone()),
            settings: timeline.as_ref().map(|timeline| timeline.settings.clone()),
            headline: headline(plan, &place, progress.as_ref().map(|run| (run, ended)), &compared),
            fits: plan.map(TrainingPlan::fits),
            facts: facts(plan, progress.as_ref()),
            notes,
            // What a run has taken, it had.
            misfits: plan.filter(|_| run.is_none()).map_or(Vec::new(), TrainingPlan::misfits),
            alternatives: plan.filter(|_| run.is_none()).map_or(Vec::new(), alternatives),
            memory: plan.map_or(Vec::new(), Breakdown::of),
            timeline,
            run: progress,
            compared,
            waterfall,
            pareto,
            configuration,
            plan: plan.map(TrainingPlan::to_json),
            estimated: None,
            name,
        })
    }

    /// The page: one file that needs no other.
    ///
    /// # Errors
    /// None that depends on the document.
    pub fn to_html(&self) -> Result<String, PageError> {
        page::html(self)
    }
}

/// Those that fit, by their peak where the plan fits, and the fastest first where it does not.
fn alternatives(plan: &TrainingPlan) -> Vec<Alternative> {
    let mut fitting: Vec<Alternative> = plan.alternatives.iter().filter(|own| own.fits).cloned().collect();
    if plan.fits() {
        fitting.sort_by_key(|own| own.peak_bytes);
    } else {
        fitting.sort_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
    }
    fitting.truncate(MOST_ALTERNATIVES);
    fitting
}
