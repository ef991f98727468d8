//! The training loop: schedules, checkpoints, metrics, reports. It knows no terminal: it tells an [`Observer`].

#![forbid(unsafe_code)]

mod alike;
mod checkpoint;
mod diagnostic;
mod error;
mod flight;
mod identity;
mod ladder;
mod metrics;
mod observer;
mod output_folder;
mod prepared;
mod pressure;
mod relief;
mod report;
mod resumption;
mod room;
mod run;
mod samples;
mod schedule;
mod stop;
mod tokenizer;

pub use checkpoint::{Checkpoint, TrainerState};
pub use diagnostic::{BadOutput, Diagnostic};
pub use error::TrainError;
pub use flight::{RUN_COMPLETE, RUN_STOPPED};
pub use identity::FileIdentity;
pub use ladder::Surroundings;
pub use metrics::{ExpertLoad, ExpertReads, MemoryHealth, MemoryMetrics, StepMetrics};
pub use observer::{Observer, RunEvent};
pub use output_folder::{LOCK, OutputFolder, was_killed};
pub use prepared::{CONFIG_FILE, Prepared, host_bytes_per_token};
pub use pressure::{MemoryReading, RungMemory};
pub use report::{Io, Measured, Planned, REPORT_FILE, RankBytes, RankReport, Report};
pub use resumption::Resumption;
pub use run::{RunSettings, TrainingOutcome, micro_batch};
pub use samples::sample_encoder;
pub use schedule::{Decay, Schedule};
pub use stop::StopFlag;
pub use tokenizer::tokenizer;

use std::io::Write;
use std::path::Path;

/// Replaces a file whole: written aside, synced, renamed.
///
/// # Errors
/// [`TrainError`] with the file, if its folder is missing or full, for example.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        let mut builder = tempfile::Builder::new();
        // Temporary files are the owner's alone; this one is to have the permissions of any new file.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut aside = builder.prefix(".writing-").tempfile_in(folder)?;
        aside.write_all(bytes)?;
        aside.as_file().sync_all()?;
        aside.persist(path).map_err(|e| e.error)?;
        checkpoint::sync_folder(folder);
        Ok(())
    };
    write().map_err(|e| TrainError::io("write", path, e))
}
