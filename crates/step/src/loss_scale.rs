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

#[cfg(test)]
mod tests {
    use super::*;

    const SCALING: LossScaling = LossScaling { initial: 4.0, growth: 2.0, growth_interval: 3, backoff: 0.5 };

    /// Good steps are counted anew after every change.
    #[test]
    fn the_scale_grows_after_so_many_good_steps_each_time() {
        let mut scale = LossScale::new(SCALING);
        let scales: Vec<f64> = (0..7)
            .map(|_| {
                scale.grow(SCALING);
                scale.scale
            })
            .collect();
        assert_eq!(scales, [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]);
        assert_eq!((scale.good_steps, scale.skipped_steps), (1, 0));
        assert!(scale.back_off(SCALING));
        assert_eq!(scale, LossScale { scale: 8.0, good_steps: 0, skipped_steps: 1 });
    }

    /// Gradients that overflow with a scale of 1 are not the scale's fault: such a step is not skipped.
    #[test]
    fn the_scale_does_not_get_smaller_than_one() {
        let mut scale = LossScale { scale: 1.5, good_steps: 2, skipped_steps: 7 };
        assert!(scale.back_off(SCALING));
        assert_eq!(scale, LossScale { scale: 1.0, good_steps: 0, skipped_steps: 8 });
        assert!(!scale.back_off(SCALING));
        assert_eq!(scale, LossScale { scale: 1.0, good_steps: 0, skipped_steps: 8 });
    }
}
