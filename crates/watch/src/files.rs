//! A run by the files in its folder, while it writes them or afterwards: `metrics.jsonl`, `flight-recorder.bin`, `report.json` and the
//! checkpoints. Nothing but these files is needed, so that the run may be another process on another machine. The plan is made elsewhere.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use plimsoll_monitor::{About, FLIGHT_RECORDER, Follower, RecorderError, Status};
use plimsoll_train::{Checkpoint, RUN_COMPLETE, RUN_STOPPED, Report, StepMetrics, was_killed};

use crate::event::{Event, Kind};
use crate::tail::{Found, Tail};
use crate::view::{State, View};

pub(crate) const METRICS: &str = "metrics.jsonl";
const REPORT: &str = "report.json";
/// A report that is larger is none of ours.
const MOST_REPORT_BYTES: u64 = 4 << 20;
/// Seconds after which a flight recorder that says no end has stopped: it writes four times a second.
const QUIET_RECORDER: f64 = 10.0;
/// The same where only steps can tell: a step may take long.
const QUIET_STEPS: f64 = 120.0;
/// The end of a run that has said none and whose process is gone.
const KILLED: &str = "the process is gone: it was killed";
/// Lines that say no step are told one by one, up to so many.
const MOST_BAD_LINES: u64 = 5;

/// Follows the files of a run.
#[derive(Debug)]
pub struct RunFiles {
    folder: PathBuf,
    steps: Tail,
    recorder: Follower,
    about: Option<About>,
    /// When the report and the metrics were changed last, and how long the report was.
    report: Option<(SystemTime, u64)>,
    checkpoints: BTreeSet<u64>,
    bad_lines: u64,
    /// Whether everything that was there at first has been read.
    has_read_all: bool,
    /// Errors that were told.
    told: BTreeSet<String>,
}

impl RunFiles {
    /// The run in a folder, which need not be there yet.
    pub fn of(folder: &Path) -> RunFiles {
        RunFiles {
            folder: folder.to_owned(),
            steps: Tail::of(folder.join(METRICS)),
            recorder: Follower::of(folder.join(FLIGHT_RECORDER)),
            about: None,
            report: None,
            checkpoints: BTreeSet::new(),
            bad_lines: 0,
            has_read_all: false,
            told: BTreeSet::new(),
        }
    }

    /// Whether a folder has anything of a run.
    pub fn are_in(folder: &Path) -> bool {
        [METRICS, FLIGHT_RECORDER, REPORT, plimsoll_train::CONFIG_FILE]
            .iter()
            .any(|name| folder.join(name).is_file())
    }

    /// Brings a view up to date; whether there is more to read at once. `now`: seconds since 1970.
    pub fn look(&mut self, view: &mut View, now: f64) -> bool {
        let more = self.look_at_steps(view);
        self.look_at_report(view);
        self.look_at_recorder(view);
        if !more {
            self.look_at_checkpoints(view);
            if !self.has_read_all {
                self.has_read_all = true;
                view.order_events();
            }
        }
        view.state = self.state(view, now);
        more
    }

    fn look_at_recorder(&mut self, view: &mut View) {
        match self.recorder.news() {
            Ok(news) => {
                if news.begins_anew && self.about.is_some() {
                    view.happened(Event::new(None, Kind::Begin, "the run goes on in another process"));
                }
                news.records.iter().for_each(|record| view.record(record));
                view.planned_bytes = news.about.planned_bytes;
                self.about = Some(news.about);
            }
            Err(RecorderError::Io { source, .. }) if is_not_there(&source) => {}
            Err(error) => self.tell(view, error.to_string()),
        }
    }

    fn look_at_steps(&mut self, view: &mut View) -> bool {
        let (bad_lines, has_read_all) = (&mut self.bad_lines, self.has_read_all);
        let looked = self.steps.look(|found| match found {
            Found::Anew => {
                view.forget_steps();
                *bad_lines = 0;
                if has_read_all {
                    view.happened(Event::new(None, Kind::Begin, "the run was begun anew or resumed"));
                }
            }
            Found::Step(step) => take_step(view, &step),
            Found::NoStep(line) => {
                *bad_lines = bad_lines.saturating_add(1);
                if *bad_lines <= MOST_BAD_LINES {
                    let text = format!("line {line} of {METRICS} says no step and is left out");
                    view.happened(Event::new(None, Kind::Warning, text));
                }
            }
        });
        match looked {
            Ok(more) => more,
            Err(error) if is_not_there(&error) => false,
            Err(error) => {
                self.tell(view, format!("{}: {error}", self.folder.join(METRICS).display()));
                false
            }
        }
    }

    fn look_at_report(&mut self, view: &mut View) {
        let path = self.folder.join(REPORT);
        let Ok(metadata) = std::fs::metadata(&path) else {
            (self.report, view.report) = (None, None);
            return;
        };
        let now = metadata.modified().ok().map(|modified| (modified, metadata.len()));
        if now == self.report && now.is_some() {
            return;
        }
        self.report = now;
        view.report = None;
        if !metadata.is_file() || metadata.len() > MOST_REPORT_BYTES {
            self.tell(view, format!("{} is no report", path.display()));
            return;
        }
        match Report::of_run(&self.folder) {
            Ok(report) => view.report = report,
            Err(error) => self.tell(view, error.to_string()),
        }
    }

    fn look_at_checkpoints(&mut self, view: &mut View) {
        // A folder that is not there yet has none.
        let Ok(there) = Checkpoint::list(&self.folder) else { return };
        for checkpoint in &there {
            if self.checkpoints.insert(checkpoint.step) {
                let text = format!("saved {}", checkpoint.path.display());
                view.happened(Event::new(Some(checkpoint.step), Kind::Saved, text));
            }
        }
        // One that is written again is news again.
        self.checkpoints = there.iter().map(|checkpoint| checkpoint.step).collect();
    }

    /// How the run stands, by whatever says it.
    fn state(&self, view: &View, now: f64) -> State {
        let silent_for = |since: f64| (now - since).max(0.0);
        let ended = self.about.as_ref().and_then(|about| about.ended.as_deref());
        let recorded = view.band.last().map(|moment| moment.time);
        let is_recording = self.about.is_some() && ended.is_none();
        if is_recording && recorded.is_none_or(|last| silent_for(last) < QUIET_RECORDER) {
            return if view.last.is_some() { State::Running } else { State::Waiting };
        }
        // A report is of the last part of a run that said an end.
        match view.report.as_ref().filter(|report| report.steps >= view.steps_done()) {
            Some(report) if report.finished => return State::Finished,
            Some(_) => return State::Stopped,
            None => {}
        }
        match ended {
            Some(RUN_COMPLETE) => return State::Finished,
            Some(RUN_STOPPED) => return State::Stopped,
            Some(how) => return State::Ended(how.to_owned()),
            None => {}
        }
        let written = std::fs::metadata(self.folder.join(METRICS)).and_then(|metadata| metadata.modified());
        let written = written.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let last = written.map(|time| time.as_secs_f64()).into_iter().chain(recorded).reduce(f64::max);
        match (last, &view.last) {
            (None, _) if !was_killed(&self.folder) => State::Waiting,
            (Some(last), Some(_)) if self.about.is_none() && silent_for(last) < QUIET_STEPS => State::Running,
            (Some(last), None) if self.about.is_none() && silent_for(last) < QUIET_STEPS => State::Waiting,
            (Some(last), _) if !was_killed(&self.folder) => State::Silent(silent_for(last) as u64),
            _ => State::Ended(KILLED.to_owned()),
        }
    }

    /// Says what is wrong with a file, once.
    fn tell(&mut self, view: &mut View, text: String) {
        if self.told.len() < 20 && self.told.insert(text.clone()) {
            view.happened(Event::new(None, Kind::Warning, text));
        }
    }
}

/// A step of the file, with the events that it tells.
fn take_step(view: &mut View, metrics: &StepMetrics) {
    let last = view.last.as_ref().map(|last| (last.memory.health.status, last.rung));
    let (status, rung) = last.unwrap_or((Status::Normal, 0));
    view.step(metrics);
    if metrics.rung != rung {
        let way = if metrics.rung > rung { "less" } else { "more" };
        let text = format!("went on by plan {}, which needs {way} memory", metrics.rung);
        view.happened(Event::new(Some(metrics.step), Kind::Plan, text));
    }
    view.note_status(status, metrics);
    view.note_skipped(metrics);
    if let Some(loss) = metrics.validation_loss {
        view.happened(Event::evaluation(metrics.step, loss));
    }
}

fn is_not_there(error: &io::Error) -> bool {
    // A recording that is being made is too short for a moment.
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

#[cfg(test)]
mod tests;
