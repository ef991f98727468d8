//! A run as it is seen: a plain value, whose size does not grow with the run.

use std::collections::VecDeque;
use std::sync::Arc;

use plimsoll_disk::IoStatistics;
use plimsoll_monitor::{Record, Status};
use plimsoll_report::{Bucket, Progress, RunState};
use plimsoll_train::{Report, StepMetrics};
use serde::Serialize;
use serde_json::{Value, json};

use crate::band::{Band, Moment};
use crate::curve::Curve;
use crate::event::{Event, Kind};
use crate::plan::PlanView;

/// Events that are kept.
const MOST_EVENTS: usize = 200;
/// Validations and changes of plans that are kept, each.
const MOST_MARKS: usize = 800;
/// Steps whose middle speed says how long the rest takes.
const OF_LATE: usize = 25;

/// How a run stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// No step has been taken.
    #[default]
    Waiting,
    /// Steps are taken.
    Running,
    /// It has come to its end.
    Finished,
    /// It was stopped and has said so.
    Stopped,
    /// It ended otherwise, in its own words.
    Ended(String),
    /// It has said no end, and nothing else for so many seconds: it was killed, or stands still.
    Silent(u64),
}

impl State {
    /// In words.
    pub fn words(&self) -> String {
        match self {
            State::Waiting => "no step yet".to_owned(),
            State::Running => "running".to_owned(),
            State::Finished => "finished".to_owned(),
            State::Stopped => "stopped".to_owned(),
            State::Ended(how) => format!("ended: {how}"),
            State::Silent(seconds) => format!("silent for {}", plimsoll_report::seconds(*seconds as f64)),
        }
    }

    /// Whether nothing more will come.
    pub fn is_over(&self) -> bool {
        matches!(self, State::Finished | State::Stopped | State::Ended(_))
    }
}

/// What is known of a run.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Its folder.
    pub name: String,
    /// Its plan, where there is one.
    pub plan: Option<Arc<PlanView>>,
    /// How it stands.
    pub state: State,
    /// Steps that it is to have, where they are known.
    pub total_steps: Option<u64>,
    /// Time to the end, where somebody knows better than by the speed of the last steps.
    pub seconds_left: Option<f64>,
    /// What the process was planned to take, where somebody knows better than a plan that was made again.
    pub planned_bytes: Option<u64>,
    /// Its steps.
    pub curve: Curve,
    /// Its memory by owner.
    pub band: Band,
    /// The last step.
    pub last: Option<StepMetrics>,
    /// Loss of the first step.
    pub first_loss: Option<f64>,
    /// Step and loss of validations.
    pub validation: Vec<(u64, f64)>,
    /// The first step and the number of each plan after the first.
    pub rungs: Vec<(u64, u64)>,
    /// Steps that were left out because of an overflow.
    pub skipped: u64,
    /// What went to and from lower tiers in the steps that were seen.
    pub io: IoStatistics,
    /// What the run said at its end.
    pub report: Option<Report>,
    /// What else the reader has to know.
    pub notes: Vec<String>,
    events: VecDeque<Event>,
    /// Events since the beginning, those that are kept no more among them.
    events_so_far: u64,
    first_step: u64,
    /// Tokens of a step.
    step_tokens: u64,
}

impl View {
    /// Of a run in a folder, of which nothing is known yet.
    pub fn of(name: impl Into<String>) -> View {
        View { name: name.into(), ..View::default() }
    }

    /// Takes a plan.
    pub fn planned(&mut self, plan: Arc<PlanView>) {
        self.total_steps = self.total_steps.or(plan.steps);
        self.plan = Some(plan);
    }

    /// A step was taken.
    pub fn step(&mut self, metrics: &StepMetrics) {
        let step = metrics.step;
        self.validation.retain(|(own, _)| *own < step);
        self.rungs.retain(|(own, _)| *own < step);
        if self.first_loss.is_none() || step <= self.first_step {
            self.first_step = step;
            self.first_loss = Some(metrics.loss).filter(|loss| loss.is_finite());
        }
        if let Some(loss) = metrics.validation_loss.filter(|loss| loss.is_finite()) {
            push_thinned(&mut self.validation, (step, loss));
        }
        if let Some(last) = &self.last {
            if last.step < step && last.rung != metrics.rung {
                push_thinned(&mut self.rungs, (step, metrics.rung));
            }
            if last.step.checked_add(1) == Some(step) {
                self.step_tokens = metrics.tokens.saturating_sub(last.tokens);
            }
        } else if step == 1 {
            self.step_tokens = metrics.tokens;
        }
        self.skipped = self.skipped.saturating_add(u64::from(metrics.skipped));
        if let Some(io) = metrics.io {
            self.io.bytes_read = self.io.bytes_read.saturating_add(io.bytes_read);
            self.io.bytes_written = self.io.bytes_written.saturating_add(io.bytes_written);
            self.io.io_seconds += io.io_seconds.max(0.0);
            self.io.waited_seconds += io.waited_seconds.max(0.0);
        }
        self.curve.push(Bucket::of_step(metrics));
        self.last = Some(metrics.clone());
    }

    /// The flight recorder has written something down.
    pub fn record(&mut self, record: &Record) {
        self.band.push(record);
    }

    /// Something happened.
    pub fn happened(&mut self, event: Event) {
        if self.events.back() == Some(&event) {
            return;
        }
        self.events.push_back(event);
        self.events_so_far = self.events_so_far.saturating_add(1);
        while self.events.len() > MOST_EVENTS {
            self.events.pop_front();
        }
    }

    /// Something happened, or nothing.
    pub(crate) fn happened_at_all(&mut self, event: Option<Event>) {
        event.into_iter().for_each(|event| self.happened(event));
    }

    /// Brings what was read from several files into the order of the steps.
    pub(crate) fn order_events(&mut self) {
        self.events.make_contiguous().sort_by_key(|event| event.step.unwrap_or(u64::MAX));
    }

    /// Events since the beginning.
    pub fn events_so_far(&self) -> u64 {
        self.events_so_far
    }

    /// What happened, the first first.
    pub fn events(&self) -> impl DoubleEndedIterator<Item = &Event> + ExactSizeIterator {
        self.events.iter()
    }

    /// Forgets all steps, of a file that is read anew.
    pub fn forget_steps(&mut self) {
        let kept = View {
            name: std::mem::take(&mut self.name),
            plan: self.plan.take(),
            total_steps: self.total_steps,
            planned_bytes: self.planned_bytes,
            band: std::mem::take(&mut self.band),
            notes: std::mem::take(&mut self.notes),
            events: std::mem::take(&mut self.events),
            events_so_far: self.events_so_far,
            ..View::default()
        };
        *self = kept;
    }

    /// The model's name, or the folder.
    pub fn title(&self) -> &str {
        self.plan.as_ref().map_or(&self.name, |plan| &plan.title)
    }

    /// The last step's number.
    pub fn steps_done(&self) -> u64 {
        self.last.as_ref().map_or(0, |last| last.step)
    }

    /// The share of the run that is done.
    pub fn share_done(&self) -> Option<f64> {
        let total = self.total_steps.filter(|total| *total > 0)?;
        Some((self.steps_done() as f64 / total as f64).clamp(0.0, 1.0))
    }

    /// Seconds to the end.
    pub fn left(&self) -> Option<f64> {
        if self.state.is_over() {
            return None;
        }
        self.seconds_left.or_else(|| {
            let steps = self.total_steps?.saturating_sub(self.steps_done());
            Some(steps as f64 * self.step_seconds()?)
        })
    }

    /// Time of a step of late.
    pub fn step_seconds(&self) -> Option<f64> {
        let speed = self.curve.recent_median(OF_LATE, |step| step.tokens_per_second)?;
        (self.step_tokens > 0).then(|| self.step_tokens as f64 / speed)
    }

    /// The load line: as the last step says it, or as planned.
    pub fn line_bytes(&self) -> Option<u64> {
        let said = self.last.as_ref().map(|last| last.memory.health.limit_bytes).filter(|line| *line > 0);
        said.or_else(|| self.plan.as_ref().map(|plan| plan.line_bytes))
    }

    /// What the process was planned to take.
    pub fn planned_process_bytes(&self) -> Option<u64> {
        let said = self.report.as_ref().map(|report| report.planned.process_bytes).or(self.planned_bytes);
        said.or_else(|| self.plan.as_ref().map(|plan| plan.process_bytes))
    }

    /// What the process takes now.
    pub fn rss_bytes(&self) -> Option<u64> {
        let recorded = self.band.last().map(|moment| moment.rss_bytes);
        recorded
            .or_else(|| self.last.as_ref().map(|last| last.memory.process_rss_bytes))
            .filter(|rss| *rss > 0)
    }

    /// How near to the line the run is.
    pub fn status(&self) -> Status {
        self.last.as_ref().map_or(Status::Normal, |last| last.memory.health.status)
    }

    /// Planned and measured bytes of each tier that the run uses.
    pub fn tiers(&self) -> Vec<Tier> {
        let plan = self.plan.as_ref();
        let measured = |of: fn(&StepMetrics) -> u64| self.last.as_ref().map(of);
        let all = [
            ("device", plan.map(|plan| plan.device_bytes), measured(|last| last.memory.device_peak_bytes)),
            ("host", plan.map(|plan| plan.host_bytes), measured(|last| last.memory.host_peak_bytes)),
            ("disk", plan.map(|plan| plan.disk_bytes), measured(|last| last.memory.disk_bytes)),
        ];
        let tiers = all.into_iter().map(|(name, planned, measured)| Tier { name, planned, measured });
        let is_used = |tier: &Tier| tier.planned.unwrap_or(0) > 0 || tier.measured.unwrap_or(0) > 0;
        tiers.filter(is_used).collect()
    }

    /// The curves of the last `window` steps, or of all.
    pub fn progress(&self, window: Option<u64>) -> Progress {
        let buckets = self.curve.points(window);
        let begin = buckets.first().map_or(0, |first| first.from);
        Progress {
            state: match self.state {
                State::Finished => RunState::Finished,
                State::Stopped => RunState::Stopped,
                State::Ended(_) => RunState::Ended,
                _ if self.last.is_none() => RunState::Empty,
                _ => RunState::Open,
            },
            steps: self.steps_done(),
            of_steps: self.total_steps,
            tokens: self.last.as_ref().map_or(0, |last| last.tokens),
            first_loss: self.first_loss,
            last_loss: self.last.as_ref().map(|last| last.loss).filter(|loss| loss.is_finite()),
            skipped: self.skipped,
            validation: self.validation.iter().filter(|(step, _)| *step >= begin).copied().collect(),
            rungs: self.rungs.iter().filter(|(step, _)| *step >= begin).copied().collect(),
            buckets,
        }
    }

    /// Memory over the last `window` steps, or over all of the time.
    pub fn moments(&self, window: Option<u64>) -> Vec<&Moment> {
        // What was before the first step belongs to a window that reaches back to it.
        let begin = window.and_then(|window| self.steps_done().checked_sub(window)).filter(|step| *step > 0);
        self.band.since(begin)
    }

    /// All of it for machines.
    pub fn to_json(&self) -> Value {
        let last = self.last.as_ref();
        let owners = self.band.last().map_or(Vec::new(), |moment| {
            let own = moment.by_kind.iter();
            own.map(|(kind, bytes)| json!({ "name": kind.words(), "bytes": bytes })).collect()
        });
        json!({
            "name": self.name,
            "state": self.state,
            "steps": self.steps_done(),
            "of_steps": self.total_steps,
            "seconds_left": self.left(),
            "first_loss": self.first_loss,
            "last": last,
            "validation": self.validation.last().map(|(step, loss)| json!({ "step": step, "loss": loss })),
            "memory": {
                "line_bytes": self.line_bytes(),
                "process_rss_bytes": self.rss_bytes(),
                "planned_process_bytes": self.planned_process_bytes(),
                "status": self.status(),
                "owners": owners,
            },
            "tiers": self.tiers(),
            "io": (self.io.io_seconds > 0.0).then(|| json!({
                "bytes_read": self.io.bytes_read,
                "bytes_written": self.io.bytes_written,
                "hidden_share": self.io.hidden_share(),
            })),
            "skipped": self.skipped,
            "plan": self.plan.as_deref(),
            "report": self.report,
            "notes": self.notes,
            "events": self.events,
        })
    }

    /// Says an event when memory has come nearer to the line, as a step tells it.
    pub(crate) fn note_status(&mut self, before: Status, metrics: &StepMetrics) {
        let health = metrics.memory.health;
        if health.status > before {
            let used = metrics.memory.process_rss_bytes;
            self.happened(Event::memory(metrics.step, health.status, used, health.limit_bytes));
        }
    }

    /// Says an event of a step that was left out.
    pub(crate) fn note_skipped(&mut self, metrics: &StepMetrics) {
        if metrics.skipped {
            let text = "the step was left out: its loss or gradients were not finite";
            self.happened(Event::new(Some(metrics.step), Kind::Warning, text));
        }
    }
}

/// A tier that a run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Tier {
    /// Which.
    pub name: &'static str,
    /// Bytes of the plan.
    pub planned: Option<u64>,
    /// Bytes at most so far.
    pub measured: Option<u64>,
}

/// Appends; where there are too many, every second one goes.
fn push_thinned<T: Copy>(all: &mut Vec<T>, value: T) {
    if all.len() >= MOST_MARKS {
        *all = all.iter().skip(1).step_by(2).copied().collect();
    }
    all.push(value);
}
