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
use plimsoll_parallel::CommunicationError;
use plimsoll_plan::config::{ConfigError, KeyChange};
use plimsoll_plan::{DiskNeeds, OriginError};
use plimsoll_step::StepError;

/// A run that could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Other ranks could not be reached.
    #[error(transparent)]
    Ranks(#[from] CommunicationError),
    /// This rank has something in its configuration that all ranks must have alike.
    #[error(
        "{key} is {here} here and {there} on rank 0: all ranks need the same configuration; copy the file of rank 0's machine, or give all ranks the same words"
    )]
    OtherConfiguration {
        /// The key.
        key: &'static str,
        /// Its value here.
        here: String,
        /// And on rank 0.
        there: String,
    },
    /// This rank has other files than rank 0.
    #[error("{what}; {remedy}")]
    OtherFiles {
        /// What is otherwise.
        what: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Another rank has something else than rank 0, and says so.
    #[error("rank {rank} has not what rank 0 has, and says what")]
    OfOtherRank {
        /// Which.
        rank: u32,
    },
    /// A checkpoint that rank 0 goes on from and this machine does not have.
    #[error(
        "{source}. Rank 0 goes on from this checkpoint, and all ranks read it: copy its folder from the machine of rank 0 to this one, or put output.dir on a folder that all mount"
    )]
    UnseenCheckpoint {
        /// What is wrong with it here.
        source: Box<TrainError>,
    },
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
    /// A checkpoint of which a file cannot be read.
    #[error("{source}. {}", instead_of(.path, .earlier.as_deref()))]
    BrokenCheckpoint {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<TrainError>,
        /// The one before it, if there is one.
        earlier: Option<PathBuf>,
    },
    /// A line of a run's metrics that says no step.
    #[error("{}, line {line}: this is no step of a run: {reason}; take the line out, or put the file back as the run wrote it", .path.display())]
    Metrics {
        /// The file.
        path: PathBuf,
        /// 1-based number of the line.
        line: u64,
        /// What is wrong with it.
        reason: serde_json::Error,
    },
    /// The report of a run that says none.
    #[error("{}: this is no report of a run: {reason}; remove the file to see the run without it, or put it back as the run wrote it", .path.display())]
    Report {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: serde_json::Error,
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
    /// There is a file in place of the folder.
    #[error("output.dir: {} is no folder: a file has its name, or that of a folder above it; choose another one", .path.display())]
    NoFolder {
        /// What was named.
        path: PathBuf,
    },
    /// Another process writes to the folder.
    #[error(
        "{} is in use by {owner}, and two runs cannot write to one folder; wait for it, stop it, or choose another folder",
        .path.display()
    )]
    FolderTaken {
        /// The folder.
        path: PathBuf,
        /// Whose it is, in words.
        owner: String,
    },
    /// A checkpoint of another optimizer.
    #[error(
        "{}: it holds the states of training.optimizer {saved}, the configuration says {optimizer}; set it to {saved}, or start a new run from the checkpoint as the model",
        .path.display()
    )]
    OtherOptimizer {
        /// The checkpoint.
        path: PathBuf,
        /// Whose states it holds.
        saved: String,
        /// What the configuration says.
        optimizer: String,
    },
    /// What a resumed run has begun with was changed, and it is nothing that can change on the way.
    #[error("--resume: {}", refused(.changes, .config))]
    NotTheSameRun {
        /// The keys, with what they were and what they are.
        changes: Vec<KeyChange>,
        /// The file that says how the run was begun.
        config: PathBuf,
    },
    /// The disk is too full for what the run would write.
    #[error(
        "{}: the run would write {}, and this disk has room for {available}{}; free some space or choose another output.dir{}",
        .path.display(),
        written(.needs),
        beside_tokens(*.token_bytes),
        fewer(.needs)
    )]
    NoRoom {
        /// The run's folder.
        path: PathBuf,
        /// What it would write.
        needs: DiskNeeds,
        /// What is free.
        available: ByteSize,
        /// What the tokens of its data take there already, until it ends.
        token_bytes: u64,
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

/// What a run writes, in words.
fn written(needs: &DiskNeeds) -> String {
    let DiskNeeds { model_bytes, checkpoint_bytes, most_checkpoints, spill_bytes } = *needs;
    let mut parts = Vec::new();
    match most_checkpoints {
        0 => {}
        1 => parts.push(format!("a checkpoint of {}", ByteSize(checkpoint_bytes))),
        n => parts.push(format!("{n} checkpoints at once, {} each", ByteSize(checkpoint_bytes))),
    }
    if model_bytes > 0 {
        parts.push(if parts.is_empty() {
            "its model".to_owned()
        } else {
            format!("its model of {}", ByteSize(model_bytes))
        });
    }
    if spill_bytes > 0 {
        parts.push(format!("{} of offloaded tensors", ByteSize(spill_bytes)));
    }
    format!("{} ({})", ByteSize(needs.bytes()), parts.join(", "))
}

/// What a run has written of which no file is to be seen.
fn beside_tokens(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(" beside the tokens of its data ({})", ByteSize(bytes)) }
}

/// What to resume from in place of a checkpoint.
fn instead_of(path: &Path, earlier: Option<&Path>) -> String {
    match earlier {
        Some(earlier) => format!(
            "Put the file back; or move {} away, and --resume goes on from {}",
            path.display(),
            earlier.display()
        ),
        None => "Put the file back: there is no earlier checkpoint to resume from".to_owned(),
    }
}

/// How to write less.
fn fewer(needs: &DiskNeeds) -> &'static str {
    match needs.most_checkpoints {
        0 => "",
        1 | 2 => ", or write no checkpoints (output.save_steps: 0)",
        _ => ", or keep fewer checkpoints (output.save_total_limit; 0 for output.save_steps writes none)",
    }
}

/// Why a run cannot go on with these changes.
fn refused(changes: &[KeyChange], config: &Path) -> String {
    let changes: Vec<String> = changes.iter().map(KeyChange::to_string).collect();
    format!(
        "the run was begun otherwise: {}. Restore what it was begun with ({} has it), or start a new run from the checkpoint as its model. If a file only has another name now, write the new name there",
        changes.join("; "),
        config.display()
    )
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
