//! What a run tells whoever watches it.

use std::path::Path;
use std::time::Duration;

use plimsoll_monitor::Status;

use crate::{RungMemory, StepMetrics, TrainError};

/// Something happened in a run.
#[derive(Clone, Debug)]
pub enum RunEvent<'a> {
    /// Training begins, after `steps_done` steps of an earlier part of the run.
    Started {
        /// Steps done before.
        steps_done: u64,
        /// Steps of the whole run.
        total_steps: u64,
        /// Tokens of the training data.
        data_tokens: u64,
    },
    /// A step was taken.
    Step(&'a StepMetrics),
    /// The validation loss was measured.
    Validated {
        /// After this step.
        step: u64,
        /// Mean loss over the validation targets.
        loss: f64,
    },
    /// A checkpoint is on disk, whole.
    Saved(&'a Path),
    /// The process's memory has come near the load line.
    MemoryHigh {
        /// After this step.
        step: u64,
        /// How near.
        status: Status,
        /// Resident set of the process in bytes.
        process_bytes: u64,
        /// The load line in bytes.
        budget_bytes: u64,
    },
    /// Offloaded tensors can only be read and written through the page cache, which is emptied of them again: direct I/O is
    /// refused there.
    BufferedDisk(&'a Path),
    /// The run goes on with another plan: one that needs less memory, or again one that needs more.
    Rung {
        /// After this step.
        step: u64,
        /// The plan before: 0 is the one that the run began with.
        from: usize,
        /// The plan from now on.
        to: usize,
        /// Why.
        why: &'a str,
        /// What the plan from now on is, in a few words.
        now: &'a str,
        /// Sequences of a micro-batch, before and from now on.
        batch_sizes: [u64; 2],
        /// What the plan before needed of what there was; `None` where memory was refused.
        memory: Option<RungMemory>,
    },
    /// Memory was so short that batches made ahead, waiting buffers and free heap were given back at once.
    GaveBack {
        /// After this step.
        step: u64,
        /// How many bytes that were.
        bytes: u64,
    },
    /// The disk is full and there is no checkpoint yet: the run waits for space, so that nothing is lost. Said at once, and
    /// again every minute.
    WaitingForSpace {
        /// What was tried, and the system's answer.
        error: &'a TrainError,
        /// For how long it has waited.
        waited: Duration,
        /// How long the run waits at most.
        patience: Duration,
    },
    /// The run ends before its time, on request.
    Stopping {
        /// After this step.
        step: u64,
        /// Whether a checkpoint is written now; if not, nothing was done since the last one.
        saving: bool,
    },
}

/// Watches a run.
pub trait Observer {
    /// Called from the training thread, between steps.
    fn event(&mut self, event: RunEvent<'_>);
}

/// Watches nothing.
impl Observer for () {
    fn event(&mut self, _: RunEvent<'_>) {}
}
