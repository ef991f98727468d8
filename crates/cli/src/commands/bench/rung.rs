//! One setting of the benchmark: planned here, then trained by a process of its own, whose resident set is its alone.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use plimsoll_memory::ByteSize;
use plimsoll_memory::run_on_all_cores;
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{Machine, TrainingPlan};
use plimsoll_train::{REPORT_FILE, StopFlag};
use serde::{Deserialize, Serialize};

use super::techniques::Group;
use crate::failure::{DOES_NOT_FIT, Failure};

/// A setting with what was planned and what came out.
#[derive(Clone, Debug, Serialize)]
pub struct Rung {
    pub name: &'static str,
    pub group: Group,
    pub what: &'static str,
    /// What it changes, over the rung before it or over the baseline.
    pub set: Vec<String>,
    pub planned: PlannedRung,
    /// `None` if nothing was trained.
    pub measured: Option<MeasuredRung>,
    /// Why nothing was measured although it was tried.
    pub error: Option<String>,
}

/// What the plan says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedRung {
    /// Peak of the device's arena.
    pub peak_bytes: u64,
    /// Bytes by tag at that peak, in the order of the tags.
    pub at_peak: serde_json::Value,
    /// The arena and what lies outside it.
    pub process_bytes: u64,
    pub step_seconds: f64,
    pub tokens_per_second: f64,
}

/// What the training process reported.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasuredRung {
    /// Peak of the device's arena.
    pub peak_bytes: u64,
    /// Highest resident set of the process, as the kernel saw it.
    pub process_rss_bytes: u64,
    /// Median of the steps.
    pub step_seconds: f64,
    /// Median of the steps.
    pub tokens_per_second: f64,
    /// Loss of each step, before its update; null where it was no number.
    pub losses: Vec<Option<f64>>,
    /// Loss of the last step over that of the baseline, less 1.
    pub loss_change: Option<f64>,
    /// Whether every loss has the bits of the baseline's.
    pub same_losses: Option<bool>,
}

impl MeasuredRung {
    pub fn last_loss(&self) -> Option<f64> {
        self.losses.last().copied().flatten()
    }

    /// Fills in how the losses compare with the baseline's.
    pub fn compare(&mut self, baseline: &MeasuredRung) {
        self.loss_change = match (self.last_loss(), baseline.last_loss()) {
            (Some(own), Some(reference)) if reference != 0.0 => Some(own / reference - 1.0),
            _ => None,
        };
        self.same_losses = Some(self.losses == baseline.losses);
    }
}

/// Plans a setting.
pub fn plan(
    config: &RawConfig,
    spec: &plimsoll_model::ModelSpec,
    machine: &Machine,
) -> Result<PlannedRung, Failure> {
    let plan = TrainingPlan::new(config, spec, machine)?;
    let time = &plan.choice.time;
    Ok(PlannedRung {
        peak_bytes: plan.peak_bytes(),
        at_peak: plimsoll_plan::tags_json(&plan.at_peak(), plan.choice.dry_run.at_peak().gaps()),
        process_bytes: plan.process_bytes(),
        step_seconds: time.step_seconds,
        tokens_per_second: time.tokens_per_second,
    })
}

/// Trains settings, each in a process of its own; a setting that was trained before is not trained again.
pub struct Trainings {
    /// Arguments of every `plimsoll train`.
    arguments: Vec<String>,
    stop: StopFlag,
    done: BTreeMap<String, Result<MeasuredRung, String>>,
}

impl Trainings {
    pub fn new(arguments: Vec<String>, stop: StopFlag) -> Trainings {
        Trainings { arguments, stop, done: BTreeMap::new() }
    }

    /// Trains a setting with `assignments` over the common arguments; `config` is what they come to. The text says why
    /// it could not be trained.
    pub fn train(
        &mut self,
        config: &RawConfig,
        assignments: &[String],
    ) -> Result<Result<MeasuredRung, String>, Failure> {
        let key = config.to_yaml()?;
        if let Some(done) = self.done.get(&key) {
            return Ok(done.clone());
        }
        let outcome = self.run(assignments)?;
        self.done.insert(key, outcome.clone());
        Ok(outcome)
    }

    fn run(&self, assignments: &[String]) -> Result<Result<MeasuredRung, String>, Failure> {
        let folder = tempfile::tempdir()?;
        let output = folder.path().join("run");
        let errors_path = folder.path().join("errors");
        let mut command = Command::new(std::env::current_exe()?);
        command.args(&self.arguments);
        for assignment in assignments {
            command.args(["--set", assignment]);
        }
        command.args(["--set", &format!("output.dir={}", quoted(&output)?)]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&errors_path)?);
        // This thread keeps to one core, and its children would with it.
        let start = move || {
            run_on_all_cores();
            command.spawn()
        };
        let child = std::thread::spawn(start)
            .join()
            .unwrap_or_else(|_| Err(std::io::Error::other("the thread that starts it panicked")))
            .map_err(|e| Failure::other(format!("a training process could not be started: {e}")))?;
        let status = self.wait(child)?;
        if !status.success() {
            let errors = std::fs::read(&errors_path).unwrap_or_default();
            let errors = String::from_utf8_lossy(&errors).trim().to_owned();
            let errors = errors.strip_prefix("error: ").unwrap_or(&errors);
            return Ok(Err(match status.code() {
                Some(code) if code == i32::from(DOES_NOT_FIT) => {
                    let first = errors.lines().next().unwrap_or_default();
                    format!("does not fit: {first}")
                }
                _ if errors.is_empty() => format!("the training process ended with {status}"),
                _ => errors.to_owned(),
            }));
        }
        read(&output).map(Ok)
    }

    /// Waits for a process; when the user wishes to stop, ends it without its checkpoint.
    fn wait(&self, mut child: Child) -> Result<ExitStatus, Failure> {
        /// Little against a step of any model worth measuring, and no load on the machine.
        const PAUSE: Duration = Duration::from_millis(20);
        loop {
            if self.stop.is_raised() {
                // It may have ended by itself: a signal of the terminal reaches both.
                let _ = child.kill();
                child.wait()?;
                return Err(Failure::other("stopped"));
            }
            match child.try_wait()? {
                Some(status) => return Ok(status),
                None => std::thread::sleep(PAUSE),
            }
        }
    }
}

/// A path as a YAML text, whatever is in it.
pub fn quoted(path: &Path) -> Result<String, Failure> {
    let text = path.to_str().ok_or_else(|| {
        Failure::usage(format!("{}: the path is not UTF-8, which a configuration needs", path.display()))
    })?;
    Ok(serde_json::to_string(text)?)
}

/// What a finished run says of itself.
fn read(output: &Path) -> Result<MeasuredRung, Failure> {
    #[derive(Deserialize)]
    struct Report {
        measured: Measured,
        tokens_per_second_median: f64,
    }
    #[derive(Deserialize)]
    struct Measured {
        device_peak_bytes: u64,
        process_peak_rss_bytes: u64,
        step_seconds_median: f64,
    }
    #[derive(Deserialize)]
    struct Step {
        loss: Option<f64>,
    }
    let report: Report = serde_json::from_slice(&std::fs::read(output.join(REPORT_FILE))?)?;
    let metrics = std::fs::read_to_string(output.join("metrics.jsonl"))?;
    let steps: Result<Vec<Step>, _> = metrics.lines().map(serde_json::from_str).collect();
    Ok(MeasuredRung {
        peak_bytes: report.measured.device_peak_bytes,
        process_rss_bytes: report.measured.process_peak_rss_bytes,
        step_seconds: report.measured.step_seconds_median,
        tokens_per_second: report.tokens_per_second_median,
        losses: steps?.into_iter().map(|step| step.loss).collect(),
        loss_change: None,
        same_losses: None,
    })
}

/// Bytes as tables show them.
pub fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}
