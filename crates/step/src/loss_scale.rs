//! The dynamic scale of the loss, for gradients in f16.

use crate::settings::LossScaling;

/// The state of a dynamic loss scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The factor on the loss.
    pub scale: f64,
    /// Good steps since it last changed.
    pub good_steps: u64,
    /// Steps skipped in all because their gradients overflowed.
    pub skipped_steps: u64,
}

impl LossScale {
    /// The smallest scale: gradients that overflow unscaled are not the scale's fault.
    const SMALLEST: f64 = 1.0;

    pub(crate) fn new(scaling: LossScaling) -> LossScale {
        LossScale { scale: scaling.initial, good_steps: 0, skipped_steps: 0 }
    }

    /// After a step whose gradients were finite.
    pub(crate) fn grow(&mut self, scaling: LossScaling) {
        self.good_steps += 1;
        if self.good_steps >= scaling.growth_interval {
            *self = LossScale { scale: self.scale * scaling.growth, good_steps: 0, ..*self };
        }
    }

    /// After a step whose gradients overflowed; `false` where the scale cannot get smaller.
    pub(crate) fn back_off(&mut self, scaling: LossScaling) -> bool {
        let smaller = self.scale * scaling.backoff;
        let possible = self.scale > Self::SMALLEST;
        let skipped_steps = self.skipped_steps + u64::from(possible);
        *self = LossScale { scale: smaller.max(Self::SMALLEST), good_steps: 0, skipped_steps };
        possible
    }
}
