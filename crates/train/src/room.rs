//! Room on disk for what a run writes: asked for before the first step, and waited for while there is no checkpoint.

use std::error::Error;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use plimsoll_device::Device;
use plimsoll_memory::ByteSize;
use plimsoll_plan::hardware::disk_space;
use plimsoll_step::{StateKind, Trainer};

use crate::checkpoint::Checkpoint;
use crate::run::RunSettings;
use crate::{Event, Observer, StopFlag, TrainError};

/// How long a full disk is waited for at most.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long until the first new attempt; later ones come more slowly.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Refuses a run whose first checkpoint and model would not fit on the disk that they go to.
pub(crate) fn check<D: Device>(
    trainer: &Trainer<'_, D>,
    settings: &RunSettings,
    steps_done: u64,
) -> Result<(), TrainError> {
    let (mut model, mut states) = (0, 0);
    for tensor in trainer.state()? {
        match tensor.kind {
            StateKind::Weight => model += tensor.bytes(),
            _ => states += tensor.bytes(),
        }
    }
    let saves = |every: u64| (steps_done / every + 1) * every <= settings.schedule.total_steps;
    let checkpoint = if settings.save_steps.is_some_and(saves) { model + states } else { 0 };
    let model = if settings.final_model { model } else { 0 };
    let Ok(space) = disk_space(&settings.output) else { return Ok(()) };
    if model + checkpoint <= space.available.0 {
        return Ok(());
    }
    Err(TrainError::NoRoom {
        path: settings.output.clone(),
        model: ByteSize(model),
        checkpoint: ByteSize(checkpoint),
        available: space.available,
    })
}

/// Writes a file of a run. While there is no checkpoint that it could be continued from, a full disk does not end it: it
/// tries again until there is room, or somebody asks to stop, or ten minutes have passed.
pub(crate) fn write_patiently<T>(
    run: &Path,
    mut write: impl FnMut() -> Result<T, TrainError>,
    observer: &mut dyn Observer,
    stop: &StopFlag,
) -> Result<T, TrainError> {
    let begun = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        let patient = || begun.elapsed() < PATIENCE && !stop.is_raised();
        let lost_otherwise = || Checkpoint::list(run).is_ok_and(|all| all.is_empty());
        let error = match write() {
            Err(error) if is_full_disk(&error) && patient() && lost_otherwise() => error,
            outcome => return outcome,
        };
        if pause == FIRST_PAUSE {
            observer.event(Event::WaitingForSpace { error: &error, patience: PATIENCE });
        }
        let until = Instant::now() + pause;
        while Instant::now() < until && !stop.is_raised() {
            std::thread::sleep(Duration::from_millis(100));
        }
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Whether space on a disk is what is missing.
fn is_full_disk(error: &TrainError) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        }
        cause = error.source();
    }
    false
}
