//! A run on a ladder of plans: to a smaller plan where memory is taken away, to a larger one when memory comes back. Where
//! an allocation was refused, the run continues from the last checkpoint.
//!
//! State goes from rung to rung through a checkpoint, as in a resumed run: every rung begins with the bits that the rung
//! before ended with.

use std::sync::Arc;

use plimsoll_device::{Device, DeviceError};
use plimsoll_disk::DiskError;
use plimsoll_memory::release_free_heap;
use plimsoll_monitor::Status;
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::TrainingPlan;
use plimsoll_plan::config::GradientCheckpointing;
use plimsoll_step::StepError;

use crate::checkpoint::{Checkpoint, sweep};
use crate::flight::Flight;
use crate::pressure::{MemoryReading, Policy, Pressure, RungChange};
use crate::run::{PartEnd, Progress, TrainingOutcome, thresholds_of};
use crate::{Observer, Prepared, RunEvent, StopFlag, TrainError, room};

/// What a run on a ladder needs from outside.
pub struct Surroundings<'s> {
    /// Makes a device whose arena has that many bytes.
    pub device: &'s mut dyn FnMut(u64) -> Result<Box<dyn Device + 's>, DeviceError>,
    /// Reads the state of memory, after every step; [`MemoryReading::now`], but for tests.
    pub memory: &'s mut dyn FnMut() -> MemoryReading,
    /// Watches the run.
    pub observer: &'s mut dyn Observer,
    /// Ends the run early.
    pub stop: StopFlag,
    /// The ranks that train together, each with a plan of its own; several are on one rung alone.
    pub ranks: &'s dyn Communicator,
}

impl Prepared {
    /// Trains as the first of `plans` says that is no rung to climb to, and as one of the others while memory asks for it. The plans
    /// take the same batches and end with the same model, but for the order of sums where batches are split.
    ///
    /// # Errors
    /// Whatever ends the run. Memory that is refused does so on the last rung alone.
    pub fn run(
        mut self,
        plans: &[TrainingPlan],
        with: Surroundings<'_>,
    ) -> Result<TrainingOutcome, TrainError> {
        let Surroundings { device, memory, observer, stop, ranks } = with;
        let leads = ranks.rank() == 0;
        let plans = if ranks.is_alone() { plans } else { plans.get(..1).unwrap_or_default() };
        let begin = plans.iter().position(|plan| !plan.is_above).unwrap_or(0);
        let Some(first) = plans.get(begin) else { return Err(TrainError::NoPlan) };
        let output = self.folder.path().to_owned();
        let mut room_left = u64::MAX;
        if leads {
            let needs = self.still_to_write(first)?;
            room_left = room::check(&output, first, needs, self.token_bytes())?;
            self.write_plan(first, &output)?;
            sweep(&output)?;
        }
        let thresholds = thresholds_of(first);
        let needs = plans.iter().map(TrainingPlan::process_bytes).collect();
        let dynamic = first.config.dynamic_batching().filter(|_| ranks.is_alone());
        let policy = match dynamic {
            Some(dynamic) => Policy::of_batches(dynamic, thresholds),
            None => Policy::of_ladder(thresholds),
        };
        let line = first.load_line.bytes.max(first.process_bytes());
        let mut pressure = Pressure::new(needs, line, thresholds, policy);
        let mut progress = Progress::new(self.start_state(), thresholds);
        progress.rung = begin as u64;
        progress.relief = dynamic.map(|_| Arc::default());
        // What the run keeps comes before what it tells of itself.
        if leads && room_left >= Flight::room(&output) {
            progress.flight = Some(Flight::begin(&output, first));
        }
        let outcome =
            self.climb(plans, device, memory, observer, (&stop, ranks), (&mut pressure, &mut progress));
        if let Some(flight) = progress.flight.take() {
            flight.end(&outcome);
        }
        outcome
    }

    /// From rung to rung until the run ends.
    fn climb<'s>(
        &mut self,
        plans: &[TrainingPlan],
        device: &mut dyn FnMut(u64) -> Result<Box<dyn Device + 's>, DeviceError>,
        memory: &mut dyn FnMut() -> MemoryReading,
        observer: &mut dyn Observer,
        (stop, ranks): (&StopFlag, &dyn Communicator),
        (pressure, progress): (&mut Pressure, &mut Progress),
    ) -> Result<TrainingOutcome, TrainError> {
        let mut rung = progress.rung as usize;
        loop {
            let Some(plan) = plans.get(rung) else { return Err(TrainError::NoPlan) };
            progress.rung = rung as u64;
            let relief = progress.relief.clone();
            let lookout = relief.clone().map(|relief| pressure.lookout(relief, rung));
            let mut judge = || {
                if !ranks.is_alone() {
                    return None;
                }
                let mut reading = memory();
                if let Some(relief) = &relief {
                    let status = pressure.memory(rung, &reading).status;
                    relief.look(status);
                    if status == Status::Emergency {
                        // What could be given back is: a smaller batch is for what is short then.
                        reading = memory();
                    }
                }
                pressure.judge(rung, &reading)
            };
            let made = device(plan.peak_bytes()).map_err(TrainError::from);
            let ended = made.and_then(|device| {
                self.run_rung(&*device, plan, progress, &mut judge, observer, stop.clone(), ranks)
            });
            drop(lookout);
            // The arena is gone; what the heap holds without need would count against the next one.
            release_free_heap();
            if plan.config.memory.disk_path.is_none() {
                // Our own folder, with nothing in it, since the spill file has no name; one that holds anything stays.
                let _ = std::fs::remove_dir(plan.config.disk_path());
            }
            let (change, checkpoint) = match ended {
                Ok(PartEnd::Done(report)) => {
                    let checkpoint = progress.checkpoint.take().map(|c| c.path);
                    return Ok(TrainingOutcome { report: *report, checkpoint });
                }
                Ok(PartEnd::Move(change)) => (change, progress.checkpoint.clone()),
                Err(error) if is_out_of_memory(&error) && rung + 1 < plans.len() => {
                    pressure.refuse(rung);
                    let back_to = progress.checkpoint.clone().or_else(|| self.resumed_from());
                    let why = format!("memory was refused: {error}");
                    (RungChange { to: rung + 1, why, memory: None }, back_to)
                }
                Err(error) => return Err(error),
            };
            self.continue_from(checkpoint.as_ref())?;
            progress.go_back_to(self.start_state());
            progress.rung_changes += 1;
            if let Some(next) = plans.get(change.to) {
                let step = progress.state.step;
                let RungChange { to, why, memory } = change;
                let batch_sizes = [plan, next].map(|plan| plan.choice.settings.batch_size);
                let now = &describe(next);
                observer.event(RunEvent::Rung { step, from: rung, to, why: &why, now, batch_sizes, memory });
            }
            rung = change.to;
        }
    }

    /// Sets where the next part of the run begins: at a checkpoint, or at the beginning.
    fn continue_from(&mut self, checkpoint: Option<&Checkpoint>) -> Result<(), TrainError> {
        self.resumed = match checkpoint {
            Some(checkpoint) => Some((checkpoint.clone(), checkpoint.state()?)),
            None => None,
        };
        Ok(())
    }
}

/// A plan in a few words.
fn describe(plan: &TrainingPlan) -> String {
    let settings = &plan.choice.settings;
    let away = if settings.offload == plimsoll_step::Offload::NONE { "" } else { ", offloading" };
    format!(
        "batch {} x {}, checkpointing {}{away}, {} in all",
        settings.batch_size,
        plan.choice.accumulation,
        GradientCheckpointing::Form(settings.checkpointing),
        plimsoll_memory::ByteSize(plan.process_bytes())
    )
}

/// Whether memory was refused, by an arena or by the system.
fn is_out_of_memory(error: &TrainError) -> bool {
    let device =
        |error: &DeviceError| matches!(error, DeviceError::OutOfMemory(_) | DeviceError::Reservation(_));
    let disk = |error: &DiskError| matches!(error, DiskError::Reservation(_) | DiskError::Tier(_));
    match error {
        TrainError::Device(error) | TrainError::Step(StepError::Device(error)) => device(error),
        TrainError::Disk(error) | TrainError::Step(StepError::Disk(error)) => disk(error),
        TrainError::Io { source, .. } => source.kind() == std::io::ErrorKind::OutOfMemory,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use plimsoll_memory::{Arena, Tag, Tier};

    use super::*;

    /// What a smaller rung may mend, and what no rung mends.
    #[test]
    fn memory_that_was_refused_is_told_from_other_errors() {
        let full = || Arena::new(Tier::Host, 64).alloc(128, Tag::Data, "x").unwrap_err();
        let io = |kind| TrainError::io("read", std::path::Path::new("file"), Error::from(kind));
        assert!(is_out_of_memory(&TrainError::Device(DeviceError::OutOfMemory(full()))));
        assert!(is_out_of_memory(&TrainError::Step(StepError::Device(DeviceError::OutOfMemory(full())))));
        assert!(is_out_of_memory(&TrainError::Disk(DiskError::Tier(Box::new(full())))));
        assert!(is_out_of_memory(&TrainError::Step(StepError::Disk(DiskError::Tier(Box::new(full()))))));
        assert!(is_out_of_memory(&io(ErrorKind::OutOfMemory)));
        assert!(!is_out_of_memory(&io(ErrorKind::NotFound)));
        assert!(!is_out_of_memory(&TrainError::Disk(DiskError::Stopped)));
        assert!(!is_out_of_memory(&TrainError::Step(StepError::Disk(DiskError::Stopped))));
    }
}
