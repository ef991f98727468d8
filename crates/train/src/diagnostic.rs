//! What is known of a step whose loss or gradients were not finite: `diagnostic.json` in the run's folder.

use std::path::{Path, PathBuf};

use plimsoll_step::{MicroBatch, StepError, Trainer};
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
    pub(crate) fn of_step(
        trainer: &mut Trainer<'_>,
        micro_batches: &[MicroBatch<'_>],
        (step, lr, windows): (u64, f64, u64),
        error: &StepError,
    ) -> Diagnostic {
        let several = trainer.settings().ranks.count() > 1;
        let outputs = micro_batches.iter().enumerate().map(|(micro_batch, batch)| {
            // Another error here would hide the one that is being looked into.
            let block = trainer.first_bad_output(batch).ok().flatten()?;
            Some(BadOutput { micro_batch, block: block.to_string() })
        });
        let first_bad_output = match several {
            // All are looked at: ranks that share weights bring them together.
            true => outputs.collect::<Vec<_>>().into_iter().flatten().next(),
            false => outputs.flatten().next(),
        };
        let first_bad_gradient = match error {
            StepError::NotFinite { block, .. } => block.map(|block| block.to_string()),
            StepError::NotFiniteWithin { block } => Some(block.to_string()),
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

#[cfg(test)]
mod tests {
    use plimsoll_device::Dry;
    use plimsoll_model::BlockId;
    use plimsoll_parallel::Solo;
    use plimsoll_plan::ModelOrigin;
    use plimsoll_plan::config::RawConfig;
    use plimsoll_step::{LossScaling, StepSettings};

    use super::*;

    #[test]
    fn the_block_that_a_gradient_is_blamed_on_is_named() {
        let text = "model: {from_scratch: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2}}";
        let origin = ModelOrigin::find(&RawConfig::from_str(text, "test").unwrap()).unwrap();
        let dry = Dry::new();
        let loss_scaling = Some(LossScaling { initial: 8.0, ..LossScaling::default() });
        let settings = StepSettings { loss_scaling, ..StepSettings::new(1, 4) };
        let mut trainer =
            Trainer::new(&dry, Default::default(), origin.spec().clone(), settings, &Solo).unwrap();
        let mut blamed = |error: StepError| {
            let diagnostic = Diagnostic::of_step(&mut trainer, &[], (3, 0.5, 24), &error);
            assert_eq!((diagnostic.step, diagnostic.lr, diagnostic.windows), (3, 0.5, 24));
            assert_eq!((diagnostic.loss_scale, &diagnostic.first_bad_output), (Some(8.0), &None));
            assert_eq!(diagnostic.error, error.to_string());
            diagnostic.first_bad_gradient
        };
        let not_finite = |block| StepError::NotFinite { loss: 1.0, grad_norm: f64::NAN, block };
        assert_eq!(blamed(not_finite(Some(BlockId::Layer(0)))).as_deref(), Some("layer 0"));
        assert_eq!(blamed(not_finite(None)), None);
        let within = StepError::NotFiniteWithin { block: BlockId::Head };
        assert_eq!(blamed(within).as_deref(), Some("the head"));
    }
}
