//! What is known of a step whose loss or gradients were not finite: `diagnostic.json` in the run's folder.

use std::path::{Path, PathBuf};

use plimsoll_device::Device;
use plimsoll_step::{MicroBatch, StepError, Trainer, block_name};
use serde::Serialize;

use crate::TrainError;

/// The file's name.
const FILE: &str = "diagnostic.json";

/// A step that could not be taken.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diagnostic {
    /// 1-based number of the step.
    pub step: u64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Training windows consumed before the step.
    pub windows: u64,
    /// What was wrong.
    pub error: String,
    /// The micro-batch and, in the order of the forward pass, the first block whose output was not finite.
    pub first_bad_output: Option<BadOutput>,
    /// The first block, in the order of the backward pass, whose gradients were not finite.
    pub first_bad_gradient: Option<String>,
    /// The factor on the loss, where there is one.
    pub loss_scale: Option<f64>,
}

/// Where the forward pass went wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BadOutput {
    /// 0-based number of the micro-batch.
    pub micro_batch: usize,
    /// The block.
    pub block: String,
}

impl Diagnostic {
    /// Looks for the place by another forward pass of every micro-batch; weights stay as they are.
    pub(crate) fn of_step<D: Device>(
        trainer: &mut Trainer<'_, D>,
        micro_batches: &[MicroBatch<'_>],
        (step, lr, windows): (u64, f64, u64),
        error: &StepError,
    ) -> Diagnostic {
        let mut outputs = micro_batches.iter().enumerate().filter_map(|(micro_batch, batch)| {
            // Another error here would hide the one that is being looked into.
            let block = trainer.first_bad_output(batch).ok().flatten()?;
            Some(BadOutput { micro_batch, block: block_name(block) })
        });
        let first_bad_output = outputs.next();
        let first_bad_gradient = match error {
            StepError::NotFinite { block, .. } => block.map(block_name),
            StepError::NotFiniteWithin { block } => Some(block_name(*block)),
            _ => None,
        };
        let loss_scale = trainer.progress().loss_scale.map(|loss_scale| loss_scale.scale);
        let error = error.to_string();
        Diagnostic { step, lr, windows, error, first_bad_output, first_bad_gradient, loss_scale }
    }

    /// Writes the file into the run's folder.
    pub(crate) fn write(&self, folder: &Path) -> Result<PathBuf, TrainError> {
        let path = folder.join(FILE);
        let json = serde_json::to_vec_pretty(self)
            .map_err(|e| TrainError::io("write", &path, std::io::Error::other(e)))?;
        crate::write_whole(&path, &json)?;
        Ok(path)
    }
}
