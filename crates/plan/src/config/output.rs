//! `output`: what a run writes, where, and how often.

use std::path::PathBuf;

use super::section::section;

section! {
    /// What a run writes, where, and how often.
    pub struct OutputConfig at "output" {
        /// The folder that everything is written to.
        dir: PathBuf = PathBuf::from("plimsoll-output");
        /// Optimizer steps from one checkpoint to the next; 0: only when a run is stopped.
        save_steps: u64 = 500;
        /// Checkpoints that are kept; older ones are removed.
        save_total_limit: u64 = 2, AT_LEAST_ONE;
        /// Optimizer steps from one printed line to the next.
        logging_steps: u64 = 10, AT_LEAST_ONE;
        /// Optimizer steps from one validation to the next; 0: only after the last.
        eval_steps: u64 = 0;
        /// Whether the steps are also written as a table, metrics.csv.
        csv: bool = false;
        /// Whether the steps are also written as event files for TensorBoard, into the folder tensorboard.
        tensorboard: bool = false;
        /// Whether the trained model is written at the end, as a Hugging Face folder.
        final_model: bool = true;
    }
}
