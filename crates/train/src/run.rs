//! The loop: batches in, steps, validation, checkpoints, and at the end the model and the report. A run goes through it once
//! for every rung that it is on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use plimsoll_data::{Batch, Batches};
use plimsoll_device::Device;
use plimsoll_disk::IoMeter;
use plimsoll_monitor::{Health, History, Status, Thresholds};
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::TrainingPlan;
use plimsoll_plan::hardware::host;
use plimsoll_step::{MicroBatch, StepError, StepOutcome, Trainer};

use crate::checkpoint::{Checkpoint, TrainerState, tidy};
use crate::diagnostic::Diagnostic;
use crate::flight::Flight;
use crate::metrics::{
    ExpertLoad, ExpertReads, MemoryHealth, MemoryMetrics, MetricsFormats, MetricsLog, StepMetrics,
};
use crate::pressure::RungChange;
use crate::relief::Relief;
use crate::report::{Io, Measured, Planned, RankReport, Report, median};
use crate::{Observer, RunEvent, Schedule, StopFlag, TrainError, room};

/// Steps that may be skipped one after the other: a model that gives nothing but these is lost.
const MOST_SKIPPED: u64 = 10;

/// How a run goes; the step itself is set up already.
#[derive(Clone, Debug)]
pub struct RunSettings {
    /// The run's folder.
    pub output: PathBuf,
    /// Learning rates and length.
    pub schedule: Schedule,
    /// Micro-batches of an optimizer step.
    pub accumulation: u64,
    /// Steps between checkpoints.
    pub save_steps: Option<u64>,
    /// Checkpoints that are kept.
    pub save_total_limit: Option<u64>,
    /// Steps between measurements of the validation loss.
    pub eval_steps: Option<u64>,
    /// What is written of the steps beside `metrics.jsonl`.
    pub metrics: MetricsFormats,
    /// Whether the final model is written.
    pub final_model: bool,
    /// Whether a step whose loss or gradients are not finite is skipped instead of ending the run.
    pub skip_not_finite: bool,
    /// Tokens of the training data.
    pub data_tokens: u64,
    /// The load line in bytes.
    pub load_line: u64,
    /// Whether nothing is said about memory.
    pub silent: bool,
    /// The plan's numbers.
    pub planned: Planned,
}

/// The shares of the load line at which a plan's run says something.
pub(crate) fn thresholds_of(plan: &TrainingPlan) -> Thresholds {
    let [target, warning, critical, emergency] = plan.config.memory.shares();
    Thresholds { target, warning, critical, emergency }
}

/// A validation loss, and the bytes of the batches that it was measured on, of which there is one at a time.
pub type Validated = (f64, u64);

/// Measures a validation loss.
pub type Validate<'c, 'a> = dyn FnMut(&mut Trainer<'a>) -> Result<Option<Validated>, TrainError> + 'c;

/// Writes a model's files into a folder.
pub type SaveModel<'c, 'a> = dyn Fn(&Trainer<'a>, &Path) -> Result<(), TrainError> + 'c;

/// The run's connections to the rest: where batches come from, how the model is saved, who watches.
pub(crate) struct Connections<'c, 'a> {
    /// Gives the next micro-batch; there is always one.
    pub batches: &'c mut Batches,
    /// Measures the mean validation loss; `None` where there is no validation data.
    pub validate: &'c mut Validate<'c, 'a>,
    /// Writes the model's files into a folder.
    pub save_model: &'c SaveModel<'c, 'a>,
    /// Resident set of the process: now, and the highest so far.
    pub process_memory: &'c dyn Fn() -> (u64, u64),
    /// Says at a step boundary whether the run has to go on with another plan.
    pub judge: &'c mut dyn FnMut() -> Option<RungChange>,
    /// Watches the run.
    pub observer: &'c mut dyn Observer,
    /// Ends the run early.
    pub stop: StopFlag,
    /// The ranks that train together. The first one writes what the run leaves; all end alike.
    pub ranks: &'c dyn Communicator,
}

impl Connections<'_, '_> {
    /// Whether this rank writes what the run leaves.
    fn leads(&self) -> bool {
        self.ranks.rank() == 0
    }

    /// Whether something is so on any rank.
    fn on_any(&self, here: bool) -> Result<bool, TrainError> {
        match self.ranks.is_alone() {
            true => Ok(here),
            false => Ok(self.ranks.any(here)?),
        }
    }

    /// Writes something. A run on one rank waits for room on a full disk.
    fn write<T>(
        &mut self,
        folder: &Path,
        mut write: impl FnMut() -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        if !self.ranks.is_alone() {
            return write();
        }
        let clock = room::SystemClock::start();
        room::write_patiently(folder, write, self.observer, &self.stop, &clock)
    }
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct TrainingOutcome {
    /// The report, as written.
    pub report: Report,
    /// The last checkpoint written by this part of the run.
    pub checkpoint: Option<PathBuf>,
}

/// How a part of a run ended.
pub(crate) enum PartEnd {
    /// With the schedule, or because somebody asked to stop.
    Done(Box<Report>),
    /// With a checkpoint, for another rung to go on from.
    Move(RungChange),
}

/// Trains until the schedule ends, somebody asks to stop, or the run has to change rungs.
pub(crate) fn run<'a>(
    device: &'a dyn Device,
    trainer: &mut Trainer<'a>,
    settings: &RunSettings,
    progress: &mut Progress,
    mut with: Connections<'_, 'a>,
) -> Result<PartEnd, TrainError> {
    trainer.resume(progress.state.progress(trainer.progress()));
    let mut metrics_log = match with.leads() {
        true => Some(MetricsLog::open(&settings.output, progress.state.step, settings.metrics)?),
        false => None,
    };
    let before = progress.planned;
    progress.planned = Some(before.map_or(settings.planned, |before| before.and(settings.planned)));
    if let (Some(relief), spare) = (&progress.relief, with.batches.spare()) {
        relief.of_pipeline(spare);
    }
    if before.is_none() {
        with.observer.event(RunEvent::Started {
            steps_done: progress.state.step,
            total_steps: settings.schedule.total_steps,
            data_tokens: settings.data_tokens,
        });
    }
    let total = settings.schedule.total_steps;
    // What was done before this part is saved already.
    let mut stopped = with.on_any(progress.state.step < total && with.stop.is_raised())?;
    if stopped {
        with.observer.event(RunEvent::Stopping { step: progress.state.step, saving: false });
    }
    while !stopped && progress.state.step < total {
        let mut metrics = one_step(device, trainer, settings, progress, &mut with)?;
        let step = progress.state.step;
        if is_due(settings.eval_steps, step, total)
            && let Some((loss, bytes)) = (with.validate)(trainer)?
        {
            progress.evaluation_bytes = progress.evaluation_bytes.max(bytes);
            metrics.validation_loss = Some(loss);
            progress.validation_loss = Some(loss);
            with.observer.event(RunEvent::Validated { step, loss });
        }
        if let Some(log) = &mut metrics_log {
            with.write(&settings.output, || log.append(&metrics))?;
        }
        with.observer.event(RunEvent::Step(&metrics));
        let rescue = progress.watch_memory(settings, &metrics, &mut with);
        // Asked once a step: whoever asks to stop after this is heard after the next one.
        stopped = with.on_any(step < total && with.stop.is_raised())?;
        let rescue = with.on_any(rescue)?;
        if stopped {
            with.observer.event(RunEvent::Stopping { step, saving: true });
        }
        let change = if stopped || step >= total { None } else { (with.judge)() };
        if let Some(bytes) = progress.relief.as_ref().and_then(|relief| relief.told()) {
            with.observer.event(RunEvent::GaveBack { step, bytes });
        }
        let due = settings.save_steps.is_some_and(|n| n > 0 && step.is_multiple_of(n));
        if stopped || rescue || due || change.is_some() {
            // A checkpoint is continued by the lines after it, so that those before it must not get lost.
            if let Some(log) = &metrics_log {
                log.sync()?;
            }
            progress.save(trainer, settings, &mut with)?;
        }
        if let Some(change) = change {
            progress.note_tiers(device, trainer, with.batches);
            return Ok(PartEnd::Move(change));
        }
    }
    let finished = progress.state.step >= total;
    if finished && settings.final_model {
        let save_model = with.save_model;
        trainer.on_first_rank(|| with.write(&settings.output, || save_model(trainer, &settings.output)))?;
        with.observer.event(RunEvent::Saved(&settings.output));
    }
    progress.note_tiers(device, trainer, with.batches);
    let report = progress.report(settings, &with, finished)?;
    if with.leads() {
        report.write(&settings.output)?;
    }
    Ok(PartEnd::Done(Box::new(report)))
}

/// Takes one optimizer step and describes it.
fn one_step<'a>(
    device: &dyn Device,
    trainer: &mut Trainer<'a>,
    settings: &RunSettings,
    progress: &mut Progress,
    with: &mut Connections<'_, 'a>,
) -> Result<StepMetrics, TrainError> {
    let begun = Instant::now();
    let meter = trainer.tiers().meter();
    let moved_before = meter.as_ref().map(IoMeter::totals);
    let experts_before = trainer.expert_traffic();
    let batches =
        (0..settings.accumulation).map(|_| with.batches.next_batch()).collect::<Result<Vec<Batch>, _>>()?;
    let micro_batches: Vec<MicroBatch<'_>> = batches.iter().map(micro_batch).collect();
    let lr = settings.schedule.lr(progress.state.step);
    let step = progress.state.step + 1;
    let outcome = match trainer.step(&micro_batches, lr) {
        Ok(outcome) => outcome,
        Err(error @ (StepError::NotFinite { .. } | StepError::NotFiniteWithin { .. })) => {
            let place = (step, lr, progress.state.windows);
            let diagnostic = Diagnostic::of_step(trainer, &micro_batches, place, &error);
            let path = match with.leads() {
                true => diagnostic.write(&settings.output)?,
                false => settings.output.clone(),
            };
            match error {
                StepError::NotFinite { loss, grad_norm, .. }
                    if settings.skip_not_finite && progress.skipped_in_a_row < MOST_SKIPPED =>
                {
                    StepOutcome { loss, grad_norm, targets: 0, skipped: true }
                }
                source => return Err(TrainError::NotFinite { step, source, diagnostic: path }),
            }
        }
        Err(other) => return Err(other.into()),
    };
    progress.skipped_in_a_row = if outcome.skipped { progress.skipped_in_a_row + 1 } else { 0 };
    let seconds = begun.elapsed().as_secs_f64();
    let ranks = u64::from(trainer.settings().ranks.mesh.data);
    let tokens = ranks * batches.iter().map(|b| b.tokens.len() as u64).sum::<u64>();
    let micro_batch_size = trainer.settings().batch_size;
    let sequences = ranks * micro_batch_size * settings.accumulation;
    drop(micro_batches);
    batches.into_iter().for_each(|batch| with.batches.reuse(batch));
    progress.state.step = step;
    progress.state.take(trainer.progress());
    progress.state.windows += sequences;
    progress.state.tokens += tokens;
    progress.seconds.push(seconds);
    progress.tokens_per_second.push(tokens as f64 / seconds);
    if outcome.loss.is_finite() {
        progress.first_loss.get_or_insert(outcome.loss);
        progress.last_loss = Some(outcome.loss);
    }
    let process_rss_bytes = (with.process_memory)().0;
    let ranks_rss_bytes = match with.ranks.is_alone() {
        true => Vec::new(),
        false => {
            let all = with.ranks.gather_numbers(&[process_rss_bytes as f64])?;
            all.into_iter().map(|of_rank| of_rank.first().map_or(0, |bytes| *bytes as u64)).collect()
        }
    };
    let health = progress.judge_memory(step, process_rss_bytes, settings.load_line);
    if let Some(flight) = &progress.flight {
        let arena = device.arena();
        flight.step(
            step,
            health.status,
            arena.ledger(),
            (arena.high_water(), trainer.tiers().host().high_water()),
        );
    }
    let loads = trainer.expert_loads()?;
    Ok(StepMetrics {
        step,
        loss: outcome.loss,
        grad_norm: outcome.grad_norm,
        skipped: outcome.skipped,
        loss_scale: trainer.progress().loss_scale.map(|loss_scale| loss_scale.scale),
        lr,
        tokens: progress.state.tokens,
        tokens_per_second: tokens as f64 / seconds,
        batch_size: sequences,
        memory: MemoryMetrics {
            device_peak_bytes: device.arena().high_water(),
            host_peak_bytes: trainer.tiers().host().high_water() + progress.pipeline_bytes(with.batches),
            disk_bytes: trainer.tiers().disk().high_water(),
            process_rss_bytes,
            health,
        },
        rung: progress.rung,
        micro_batch_size,
        validation_loss: None,
        io: meter.zip(moved_before).map(|(meter, before)| Io::of(meter.totals().since(&before))),
        ranks_rss_bytes,
        experts: loads.iter().map(ExpertLoad::new).collect(),
        expert_reads: experts_before
            .zip(trainer.expert_traffic())
            .map(|(before, now)| ExpertReads::between(before, now)),
    })
}

/// A batch as the step takes it.
pub fn micro_batch(batch: &Batch) -> MicroBatch<'_> {
    MicroBatch {
        tokens: &batch.tokens,
        targets: &batch.targets,
        weights: batch.weights.as_deref(),
        document_starts: batch.document_starts.as_deref(),
    }
}

/// Whether something that happens every `every` steps, and at the end, happens after `step`.
fn is_due(every: Option<u64>, step: u64, total: u64) -> bool {
    step == total || every.is_some_and(|n| n > 0 && step.is_multiple_of(n))
}

/// What a run carries from step to step, and from rung to rung.
pub(crate) struct Progress {
    pub state: TrainerState,
    /// The last checkpoint that this process has written.
    pub checkpoint: Option<Checkpoint>,
    /// The rung that it is on.
    pub rung: u64,
    /// How often it has changed rungs.
    pub rung_changes: u64,
    begun: Instant,
    seconds: Vec<f64>,
    tokens_per_second: Vec<f64>,
    first_loss: Option<f64>,
    last_loss: Option<f64>,
    validation_loss: Option<f64>,
    skipped_in_a_row: u64,
    /// How near to the load line the process is, and whether it has come nearer with the last step.
    health: Health,
    has_risen: bool,
    /// Its memory over the steps.
    history: History,
    /// Writes down who has which memory, where this rank leads.
    pub flight: Option<Flight>,
    /// Gives memory back at once where it is short, with dynamic batches.
    pub relief: Option<Arc<Relief>>,
    /// What the plans said that the run went by.
    planned: Option<Planned>,
    pipeline_peak: u64,
    /// Batches that were evaluated, the largest of them.
    evaluation_bytes: u64,
    device_peak: u64,
    host_peak: u64,
    disk_peak: u64,
    io: Option<Io>,
}

impl Progress {
    /// Begins at a state.
    pub fn new(state: TrainerState, thresholds: Thresholds) -> Progress {
        Progress {
            state,
            checkpoint: None,
            rung: 0,
            rung_changes: 0,
            begun: Instant::now(),
            seconds: Vec::new(),
            tokens_per_second: Vec::new(),
            first_loss: None,
            last_loss: None,
            validation_loss: None,
            skipped_in_a_row: 0,
            health: Health::new(thresholds),
            has_risen: false,
            history: History::new(),
            flight: None,
            relief: None,
            planned: None,
            pipeline_peak: 0,
            evaluation_bytes: 0,
            device_peak: 0,
            host_peak: 0,
            disk_peak: 0,
            io: None,
        }
    }

    /// Stands at a state that was reached before.
    pub fn go_back_to(&mut self, state: TrainerState) {
        (self.state, self.skipped_in_a_row) = (state, 0);
    }

    /// The most that the data pipeline has taken, with a batch that was evaluated.
    fn pipeline_bytes(&self, batches: &Batches) -> u64 {
        batches.most_bytes() + self.evaluation_bytes
    }

    /// Notes what a part of the run has taken of every tier.
    fn note_tiers(&mut self, device: &dyn Device, trainer: &Trainer<'_>, batches: &Batches) {
        let tiers = trainer.tiers();
        let pipeline = self.pipeline_bytes(batches);
        self.pipeline_peak = self.pipeline_peak.max(pipeline);
        let host = tiers.host().high_water() + pipeline;
        self.device_peak = self.device_peak.max(device.arena().high_water());
        self.host_peak = self.host_peak.max(host);
        self.disk_peak = self.disk_peak.max(tiers.disk().high_water());
        if let Some(meter) = tiers.meter() {
            self.io = Some(Io::of(meter.totals()).and(self.io));
        }
    }

    /// Judges the process's memory after a step.
    fn judge_memory(&mut self, step: u64, process_rss_bytes: u64, load_line: u64) -> MemoryHealth {
        let utilization = process_rss_bytes as f64 / load_line.max(1) as f64;
        let (status, has_risen) = self.health.take(utilization);
        self.has_risen = has_risen;
        self.history.push(step as f64, process_rss_bytes as f64);
        let forecast = self.history.forecast(load_line as f64);
        MemoryHealth {
            status,
            utilization,
            limit_bytes: load_line,
            forecast_steps: forecast.map(|forecast| forecast.remaining.ceil() as u64),
            growing_bytes_per_step: forecast.map(|forecast| forecast.rate),
        }
    }

    /// Says when memory has risen to another status; whether it is time to save because of it.
    fn watch_memory(
        &self,
        settings: &RunSettings,
        metrics: &StepMetrics,
        with: &mut Connections<'_, '_>,
    ) -> bool {
        let status = metrics.memory.health.status;
        if self.has_risen && !settings.silent {
            with.observer.event(RunEvent::MemoryHigh {
                step: metrics.step,
                status,
                process_bytes: metrics.memory.process_rss_bytes,
                budget_bytes: settings.load_line,
            });
        }
        self.has_risen && status == Status::Emergency
    }

    fn save<'a>(
        &mut self,
        trainer: &Trainer<'a>,
        settings: &RunSettings,
        with: &mut Connections<'_, 'a>,
    ) -> Result<(), TrainError> {
        let save_model = with.save_model;
        let write = || {
            Checkpoint::write(&settings.output, &self.state, trainer, |folder| save_model(trainer, folder))
        };
        let written = trainer.on_first_rank(|| with.write(&settings.output, write))?;
        let Some(checkpoint) = written else { return Ok(()) };
        tidy(&settings.output, settings.save_total_limit)?;
        with.observer.event(RunEvent::Saved(&checkpoint.path));
        self.checkpoint = Some(checkpoint);
        Ok(())
    }

    fn report(
        &self,
        settings: &RunSettings,
        with: &Connections<'_, '_>,
        finished: bool,
    ) -> Result<Report, TrainError> {
        let planned = self.planned.unwrap_or(settings.planned);
        let rss = (with.process_memory)().1;
        let own = [
            planned.device_peak_bytes,
            planned.host_peak_bytes,
            planned.disk_bytes,
            planned.process_bytes,
            self.device_peak,
            self.host_peak,
            self.disk_peak,
            rss,
        ];
        let ranks = match with.ranks.is_alone() {
            true => Vec::new(),
            false => {
                let told = with.ranks.gather_numbers(&own.map(|bytes| bytes as f64))?;
                let hosts = with.ranks.gather_bytes(host().unwrap_or_default().as_bytes())?;
                RankReport::of_all(&told, &hosts)
            }
        };
        Ok(Report {
            planned,
            measured: Measured {
                device_peak_bytes: self.device_peak,
                host_peak_bytes: self.host_peak,
                pipeline_bytes: self.pipeline_peak,
                disk_bytes: self.disk_peak,
                process_peak_rss_bytes: rss,
                step_seconds_median: median(&self.seconds),
            },
            tokens_per_second_median: median(&self.tokens_per_second),
            io: self.io,
            rung_changes: self.rung_changes,
            steps: self.state.step,
            tokens: self.state.tokens,
            first_loss: self.first_loss,
            last_loss: self.last_loss,
            validation_loss: self.validation_loss,
            finished,
            seconds: self.begun.elapsed().as_secs_f64(),
            ranks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_every_few_steps_is_done_at_the_end_too() {
        let due = |every| (1..=7).filter(|step| is_due(every, *step, 7)).collect::<Vec<_>>();
        assert_eq!(
            [due(Some(2)), due(Some(7)), due(Some(0)), due(None)],
            [vec![2, 4, 6, 7], vec![7], vec![7], vec![7]]
        );
        assert_eq!(due(Some(1)), [1, 2, 3, 4, 5, 6, 7]);
    }
}
