//! The passes of a step that others follow, as a loop of which a dry run counts what repeats.

use std::hash::{DefaultHasher, Hash, Hasher};

use plimsoll_device::{Iterations, KnownRounds};

use super::Trainer;
use crate::StepError;
use crate::settings::MicroBatches;

/// Every pass but the last one.
pub(super) struct Passes<'s, 'a> {
    pub trainer: &'s mut Trainer<'a>,
    pub micro_batches: MicroBatches<'s>,
    /// Micro-batches of each.
    pub together: u64,
    pub gradient_scale: f32,
}

impl Iterations for Passes<'_, '_> {
    type Error = StepError;

    fn run(&mut self, index: u64) -> Result<(), StepError> {
        let first = index * self.together;
        let group = self.micro_batches.group(first, self.together);
        self.trainer.forward_backward(&group, first, self.gradient_scale, None)
    }

    fn state(&self) -> Option<u64> {
        Some(self.trainer.state_of_passes())
    }

    fn known(&mut self) -> Option<&mut KnownRounds> {
        Some(&mut self.trainer.known_passes)
    }
}

impl Trainer<'_> {
    /// What lies in the buffers and on the tiers below, and which gradients there are, as a number.
    pub(super) fn state_of_passes(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let Trainer { weights, gradients, optimizer, keys, tiers, .. } = self;
        weights.hash_buffers(&mut hasher);
        gradients.hash_state(&mut hasher);
        optimizer.hash_buffers(&mut hasher);
        keys.iter().for_each(|keys| keys.hash_buffers(&mut hasher));
        tiers.host().layout().hash(&mut hasher);
        tiers.disk().layout().hash(&mut hasher);
        hasher.finish()
    }
}
