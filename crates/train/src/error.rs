//! What can end a run.

use std::path::{Path, PathBuf};

use plimsoll_data::DataError;
use plimsoll_device::DeviceError;
use plimsoll_disk::DiskError;
use plimsoll_memory::ByteSize;
use plimsoll_model::adapter::ResidualError;
use plimsoll_model::convert::ConversionError;
use plimsoll_model::tokenizer::TokenizerError;
use plimsoll_model::{AdapterError, ModelError, SafetensorsError, SaveError};
use plimsoll_plan::OriginError;
use plimsoll_plan::config::ConfigError;
use plimsoll_step::StepError;

/// A run that could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The tiers below the device could not be made.
    #[error("memory.disk_path: {0}")]
    Disk(#[from] DiskError),
    /// The data could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model could not be found.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// The model could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Adapters could not be read or written.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// What adapters leave of the weights could not be had.
    #[error(transparent)]
    Residual(#[from] ResidualError),
    /// The tokenizer could not be written.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Weights could not be drawn.
    #[error(transparent)]
    Init(#[from] ConversionError),
    /// A file of a checkpoint or the final model could not be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A file of a checkpoint could not be read.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// The OS refused.
    #[error("could not {action} {}: {source}{}", .path.display(), remedy(.source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// The OS's answer.
        source: std::io::Error,
    },
    /// A checkpoint that does not belong to this run, or is damaged.
    #[error("{}: {reason}", .path.display())]
    Checkpoint {
        /// The checkpoint or its file.
        path: PathBuf,
        /// What does not fit, and what to do.
        reason: String,
    },
    /// The output folder already holds a run, and the run was not asked to resume.
    #[error("{} already holds a run; {}", .path.display(), if *.resumable {
        "add --resume to continue it, or choose another output.dir"
    } else {
        "it has finished and left no checkpoint to continue from; choose another output.dir"
    })]
    OutputInUse {
        /// The folder.
        path: PathBuf,
        /// Whether it has a checkpoint.
        resumable: bool,
    },
    /// The disk is too full for what the run would write.
    #[error(
        "{}: the run would write {}, and this disk has room for {available}; free some space or choose another output.dir{}",
        .path.display(),
        written(*.model, *.checkpoint),
        if .checkpoint.0 > 0 { ", or write no checkpoints (output.save_steps: 0)" } else { "" }
    )]
    NoRoom {
        /// The run's folder.
        path: PathBuf,
        /// What the final model takes.
        model: ByteSize,
        /// What one checkpoint takes; 0 if none is to be written.
        checkpoint: ByteSize,
        /// What is free.
        available: ByteSize,
    },
    /// A run was started without any plan: a programming error.
    #[error("there is no plan to train by")]
    NoPlan,
    /// The weights went bad; everything up to the last checkpoint is kept.
    #[error("step {step}: {source}. What is known of it is in {}", .diagnostic.display())]
    NotFinite {
        /// 1-based number of the step.
        step: u64,
        /// What came out.
        source: StepError,
        /// The file that says more.
        diagnostic: PathBuf,
    },
}

impl TrainError {
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> TrainError {
        TrainError::Io { action, path: path.to_owned(), source }
    }
}

fn written(model: ByteSize, checkpoint: ByteSize) -> String {
    match (model.0, checkpoint.0) {
        (_, 0) => format!("{model} (its model)"),
        (0, _) => format!("{checkpoint} (a checkpoint)"),
        _ => format!("{} (a checkpoint {checkpoint}, the model {model})", ByteSize(model.0 + checkpoint.0)),
    }
}

fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            "; free some space or choose another output.dir, then --resume"
        }
        std::io::ErrorKind::FileTooLarge => "; raise `ulimit -f` or choose another output.dir, then --resume",
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            "; choose an output.dir that you may write to"
        }
        _ => "",
    }
}
