//! What a whole run takes beside memory: time, and the disk that its checkpoints and its model are written to.

use std::sync::Arc;

use plimsoll_device::Dry;
use plimsoll_disk::LowerTiers;
use plimsoll_model::{ModelSpec, WeightSource};
use plimsoll_parallel::Solo;
use plimsoll_step::{Checkpointing, Ranks, StateKind, StepError, StepSettings, Trainer};
use serde::Serialize;

use crate::config::{OutputConfig, RawConfig, TrainingLength};
use crate::method::training_method;
use crate::resolve::{precisions, step_settings};

/// Bytes of what a run writes, as the step's own state says: tensors, without the headers of their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SavedBytes {
    /// The model, or the adapters.
    pub model: u64,
    /// A checkpoint: the model, the states of the optimizer, and master weights.
    pub checkpoint: u64,
}

impl SavedBytes {
    /// What a trainer with these settings would write.
    pub(crate) fn of(spec: &ModelSpec, settings: &StepSettings) -> Result<SavedBytes, StepError> {
        let dry = Dry::new();
        let tiers = Arc::new(LowerTiers::dry());
        // A checkpoint holds what all ranks have.
        let alone = StepSettings { ranks: Ranks::default(), ..settings.clone() };
        let trainer = Trainer::new(&dry, tiers, spec.clone(), alone, &Solo)?;
        let (mut weights, mut states) = (0u64, 0u64);
        for tensor in trainer.state()? {
            match tensor.kind {
                StateKind::Weight => weights += tensor.bytes(),
                _ => states += tensor.bytes(),
            }
        }
        // Adapters are written in f32, whatever they are trained in.
        let adapters = settings.method.adapters();
        let model = adapters.map_or(weights, |adapters| adapters.layout.file_bytes(spec));
        Ok(SavedBytes { model, checkpoint: model.saturating_add(states) })
    }
}

/// What a run takes from its beginning to its end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunNeeds {
    /// Optimizer steps; `None` while the length of an epoch is unknown.
    pub steps: Option<u64>,
    /// Seconds of these steps. Validation and saving come on top.
    pub seconds: Option<f64>,
    /// Bytes of one checkpoint.
    pub checkpoint_bytes: u64,
    /// Checkpoints that are there at the end.
    pub checkpoints: u64,
    /// Bytes of the final model; 0 where none is written.
    pub model_bytes: u64,
    /// Bytes that the run leaves behind.
    pub left_bytes: u64,
    /// Bytes at the moment when there are most: a checkpoint is written before the oldest one is removed.
    pub most_bytes: u64,
}

/// What the validation of a run takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValidationNeeds {
    /// How often the run is validated.
    pub times: u64,
    /// Seconds, in all.
    pub seconds: f64,
}

/// What a run writes to a disk, at the moment when it is most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskNeeds {
    /// The final model; 0 if it is not there at that moment.
    pub model_bytes: u64,
    /// One checkpoint.
    pub checkpoint_bytes: u64,
    /// Checkpoints that are there at once, without those that were there before.
    pub most_checkpoints: u64,
    /// Offloaded tensors, where they go to the same disk.
    pub spill_bytes: u64,
}

impl DiskNeeds {
    /// In all.
    pub fn bytes(&self) -> u64 {
        self.checkpoint_bytes
            .saturating_mul(self.most_checkpoints)
            .saturating_add(self.model_bytes)
            .saturating_add(self.spill_bytes)
    }

    /// The least that a run can write that is resolved in whichever way: for a check before anything else is done.
    ///
    /// # Errors
    /// [`StepError`] where the settings go with no step.
    pub fn least(
        config: &RawConfig,
        spec: &ModelSpec,
        stored: Option<&WeightSource>,
        past: Past,
    ) -> Result<DiskNeeds, StepError> {
        let method = training_method(config, spec, stored)?;
        let (mut least, steps) = (None, steps_in(config));
        for precision in precisions(&config.training, &method, None) {
            let settings = step_settings(config, spec, &method, precision, Checkpointing::None, 1);
            let needs =
                Written::new(&config.output, SavedBytes::of(spec, &settings)?, steps.or(Some(0)), past);
            least = [least, Some(needs.most())].into_iter().flatten().min_by_key(DiskNeeds::bytes);
        }
        Ok(least.unwrap_or_default())
    }
}

/// What of a run is done already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// Optimizer steps.
    pub steps: u64,
    /// Checkpoints in its folder.
    pub checkpoints: u64,
}

/// The optimizer steps that a configuration names.
pub(crate) fn steps_in(config: &RawConfig) -> Option<u64> {
    match config.training.length() {
        TrainingLength::Steps(steps) => Some(steps),
        TrainingLength::Epochs(_) => None,
    }
}

/// The checkpoints and the model of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    saved: SavedBytes,
    final_model: bool,
    past: Past,
    /// Checkpoints at the moment when there are most, and at the end.
    most: u64,
    left: u64,
}

impl Written {
    /// Of a run of so many steps; of a long one where that is not known.
    pub fn new(output: &OutputConfig, saved: SavedBytes, steps: Option<u64>, past: Past) -> Written {
        let limit = output.save_total_limit();
        let saves = match (output.save_steps(), steps) {
            (0, _) => 0,
            (_, None) => limit.saturating_add(1),
            (every, Some(steps)) => (steps / every).saturating_sub(past.steps / every),
        };
        let all = past.checkpoints.saturating_add(saves);
        let (most, left) = match saves {
            0 => (past.checkpoints, past.checkpoints),
            // A folder may hold more than are kept now, until the first of this run's is there.
            _ => (all.min(limit.saturating_add(1)).max(past.checkpoints + 1), all.min(limit)),
        };
        Written { saved, final_model: output.final_model(), past, most, left }
    }

    fn model_bytes(&self) -> u64 {
        if self.final_model { self.saved.model } else { 0 }
    }

    /// What is on disk beyond what was there before, at the moment when that is most.
    pub fn most(&self) -> DiskNeeds {
        let at = |checkpoints: u64, model_bytes| DiskNeeds {
            model_bytes,
            checkpoint_bytes: self.saved.checkpoint,
            most_checkpoints: checkpoints.saturating_sub(self.past.checkpoints),
            spill_bytes: 0,
        };
        let (writing, end) = (at(self.most, 0), at(self.left, self.model_bytes()));
        if writing.bytes() > end.bytes() { writing } else { end }
    }

    /// What a run takes whose steps take so long.
    pub fn needs(&self, steps: Option<u64>, step_seconds: f64) -> RunNeeds {
        let left = self.saved.checkpoint.saturating_mul(self.left);
        RunNeeds {
            steps,
            seconds: steps.map(|steps| steps as f64 * step_seconds),
            checkpoint_bytes: self.saved.checkpoint,
            checkpoints: self.left,
            model_bytes: self.model_bytes(),
            left_bytes: left.saturating_add(self.model_bytes()),
            most_bytes: self.most().bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: SavedBytes = SavedBytes { model: 10, checkpoint: 30 };

    /// Checkpoints while there are most and at the end, and the bytes of `most`, of a run that saves every 10 steps.
    #[track_caller]
    fn check(limit: u64, steps: Option<u64>, past: Past, expected: [u64; 3]) {
        let output =
            OutputConfig { save_steps: Some(10), save_total_limit: Some(limit), ..OutputConfig::default() };
        let written = Written::new(&output, SAVED, steps, past);
        assert_eq!([written.most, written.left, written.most().bytes()], expected);
    }

    #[test]
    fn a_checkpoint_is_there_before_the_oldest_is_removed() {
        let new = Past::default();
        check(2, Some(9), new, [0, 0, 10]);
        check(2, Some(10), new, [1, 1, 40]);
        check(2, Some(20), new, [2, 2, 70]);
        check(2, Some(30), new, [3, 2, 90]);
        check(2, Some(1000), new, [3, 2, 90]);
        check(2, None, new, [3, 2, 90]);
        check(1, Some(1000), new, [2, 1, 60]);
    }

    #[test]
    fn what_a_resumed_run_has_written_before_takes_no_more_room() {
        check(2, Some(100), Past { steps: 50, checkpoints: 2 }, [3, 2, 30]);
        check(2, Some(100), Past { steps: 95, checkpoints: 2 }, [3, 2, 30]);
        check(2, Some(99), Past { steps: 95, checkpoints: 2 }, [2, 2, 10]);
        check(2, Some(100), Past { steps: 10, checkpoints: 1 }, [3, 2, 60]);
        // Five were kept before: the sixth is there until four of them are removed.
        check(2, Some(100), Past { steps: 50, checkpoints: 5 }, [6, 2, 30]);
    }

    #[test]
    fn time_and_what_is_left_are_those_of_the_whole_run() {
        let written = Written::new(&OutputConfig::default(), SAVED, Some(1000), Past::default());
        let needs = written.needs(Some(1000), 0.5);
        assert_eq!((needs.seconds, needs.checkpoints, needs.left_bytes), (Some(500.0), 2, 70));
        let none = OutputConfig { final_model: Some(false), save_steps: Some(0), ..OutputConfig::default() };
        let needs = Written::new(&none, SAVED, None, Past::default()).needs(None, 0.5);
        assert_eq!((needs.seconds, needs.left_bytes, needs.most_bytes), (None, 0, 0));
    }
}
