//! The learning rate of every step: warm-up, then a decay, or Adafactor's own.

use plimsoll_plan::config::{LrSchedule, RawConfig};

/// The shape of the decay after warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// The peak rate to the end.
    Constant,
    /// In a straight line to the floor.
    Linear,
    /// Along half a cosine to the floor (Loshchilov and Hutter 2017, without restarts).
    Cosine,
    /// With the inverse square root of the step (Vaswani et al. 2017), not below the floor. It begins as if the warm-up,
    /// or [`Decay::STEPS_WITHOUT_WARMUP`] where there is none, had been steps of it.
    InverseSqrt,
    /// Warmup-stable-decay (Hu et al. 2024, MiniCPM): the peak rate, then in a straight line to the floor over the last
    /// steps.
    StableThenLinear {
        /// The last steps as a share of all.
        decay_ratio: f64,
    },
    /// Adafactor's relative step (Shazeer and Stern 2018): min(0.01, 1 / sqrt(step)), whatever the peak rate.
    Relative {
        /// Whether 0.01 is 1e-6 times the step.
        warmup_init: bool,
    },
}

impl Decay {
    /// Where the inverse square root begins without a warm-up (transformers).
    pub const STEPS_WITHOUT_WARMUP: u64 = 10_000;
}

/// A learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The peak learning rate.
    pub learning_rate: f64,
    /// The shape of the decay.
    pub decay: Decay,
    /// Steps of linear rise; the first step takes `1 / warmup_steps` of the peak, the last one all of it.
    pub warmup_steps: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// The rate that decay ends at, as a share of the peak.
    pub min_lr_ratio: f64,
}

impl Schedule {
    /// The learning rates of a run of `total_steps` steps of `sequences` sequences each. A warm-up that is given as a share
    /// of the steps is rounded up, as transformers does.
    pub(crate) fn of(config: &RawConfig, sequences: u64, total_steps: u64) -> Schedule {
        let training = &config.training;
        let reference = training.reference_batch_size.unwrap_or(sequences);
        let warmup = training.warmup_ratio.map(|ratio| (ratio * total_steps as f64).ceil() as u64);
        let options = &training.optimizer_options;
        Schedule {
            learning_rate: training.learning_rate()
                * training.learning_rate_scaling().factor(sequences, reference),
            decay: match training.lr_schedule() {
                _ if config.relative_step() => {
                    Decay::Relative { warmup_init: options.warmup_init.unwrap_or(false) }
                }
                LrSchedule::Constant => Decay::Constant,
                LrSchedule::Linear => Decay::Linear,
                LrSchedule::Cosine => Decay::Cosine,
                LrSchedule::InverseSqrt => Decay::InverseSqrt,
                LrSchedule::Wsd => Decay::StableThenLinear { decay_ratio: training.decay_ratio() },
            },
            warmup_steps: warmup.unwrap_or(training.warmup_steps()),
            total_steps,
            min_lr_ratio: training.min_lr_ratio(),
        }
    }

    /// The learning rate of the step after `steps_done` steps.
    pub fn lr(&self, steps_done: u64) -> f64 {
        if let Decay::Relative { warmup_init } = self.decay {
            let step = (steps_done + 1) as f64;
            return step.powf(-0.5).min(if warmup_init { 1e-6 * step } else { 1e-2 });
        }
        if steps_done < self.warmup_steps {
            return self.learning_rate * (steps_done + 1) as f64 / self.warmup_steps as f64;
        }
        let after = steps_done - self.warmup_steps;
        let fall = |first: u64| {
            let falling = self.total_steps.saturating_sub(first).max(1) as f64;
            (steps_done.saturating_sub(first) as f64 / falling).min(1.0)
        };
        let share = match self.decay {
            Decay::Constant | Decay::Relative { .. } => return self.learning_rate,
            Decay::Linear => 1.0 - fall(self.warmup_steps),
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * fall(self.warmup_steps)).cos()),
            Decay::InverseSqrt => {
                let scale = match self.warmup_steps {
                    0 => Decay::STEPS_WITHOUT_WARMUP,
                    steps => steps,
                } as f64;
                let share = (scale / (scale + after as f64)).sqrt();
                return self.learning_rate * share.max(self.min_lr_ratio);
            }
            Decay::StableThenLinear { decay_ratio } => {
                let last = (decay_ratio * self.total_steps as f64).ceil() as u64;
                1.0 - fall(self.total_steps.saturating_sub(last).max(self.warmup_steps))
            }
        };
        self.learning_rate * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(decay: Decay, min_lr_ratio: f64, expected: &[f64]) {
        let schedule = Schedule { learning_rate: 1.0, decay, warmup_steps: 2, total_steps: 6, min_lr_ratio };
        for (step, lr) in expected.iter().enumerate() {
            assert!((schedule.lr(step as u64) - lr).abs() < 1e-12, "{decay:?} step {step}");
        }
    }

    #[test]
    fn schedules_rise_and_fall_as_documented() {
        check(Decay::Constant, 0.0, &[0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        check(Decay::Linear, 0.0, &[0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]);
        check(Decay::Linear, 0.2, &[0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]);
        let half = 0.5 * (1.0 + std::f64::consts::FRAC_1_SQRT_2);
        check(Decay::Cosine, 0.0, &[0.5, 1.0, 1.0, half, 0.5, 1.0 - half, 0.0]);
        let root = |x: f64| x.sqrt();
        check(
            Decay::InverseSqrt,
            0.0,
            &[0.5, 1.0, 1.0, root(2.0 / 3.0), root(0.5), root(0.4), root(1.0 / 3.0)],
        );
        check(Decay::InverseSqrt, 0.9, &[0.5, 1.0, 1.0, 0.9, 0.9]);
        let wsd = Decay::StableThenLinear { decay_ratio: 0.5 };
        check(wsd, 0.0, &[0.5, 1.0, 1.0, 1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0]);
        check(Decay::StableThenLinear { decay_ratio: 0.0 }, 0.0, &[0.5, 1.0, 1.0, 1.0, 1.0, 1.0]);
        check(Decay::StableThenLinear { decay_ratio: 1.0 }, 0.0, &[0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]);
        check(Decay::Relative { warmup_init: false }, 0.0, &[0.01; 6]);
        check(Decay::Relative { warmup_init: true }, 0.0, &[1e-6, 2e-6, 3e-6]);
        let late = Schedule {
            learning_rate: 1.0,
            decay: Decay::Relative { warmup_init: false },
            warmup_steps: 0,
            total_steps: 40_000,
            min_lr_ratio: 0.0,
        };
        assert_eq!(late.lr(39_999), 0.005);
    }

    /// Warm-up steps of a run of so many steps.
    fn warmup(setting: &str, total_steps: u64) -> u64 {
        let config = RawConfig::from_str(&format!("training: {{{setting}}}"), "test").unwrap();
        Schedule::of(&config, 8, total_steps).warmup_steps
    }

    #[test]
    fn a_warm_up_that_is_a_share_of_the_steps_is_rounded_up() {
        let ratio = |total_steps| warmup("warmup_ratio: 0.25", total_steps);
        assert_eq!([1, 3, 4, 5, 8, 9, 100, 101].map(ratio), [1, 1, 1, 2, 2, 3, 25, 26]);
        assert_eq!([warmup("warmup_ratio: 0", 7), warmup("warmup_ratio: 1", 7)], [0, 7]);
        assert_eq!([warmup("warmup_steps: 5", 3), warmup("learning_rate: 1", 3)], [5, 0]);
    }

    #[test]
    fn the_peak_rate_is_the_one_that_is_set_scaled_to_the_batch() {
        let rate = |setting: &str| {
            let config = RawConfig::from_str(&format!("training: {{{setting}}}"), "test").unwrap();
            let schedule = Schedule::of(&config, 32, 10);
            assert_eq!((schedule.total_steps, schedule.min_lr_ratio), (10, 0.0));
            schedule.learning_rate
        };
        assert_eq!(rate("learning_rate: 3e-4"), 3e-4);
        let scaled = "learning_rate: 1.0, reference_batch_size: 8, learning_rate_scaling: ";
        assert_eq!(rate(&format!("{scaled}none")), 1.0);
        assert_eq!(rate(&format!("{scaled}linear")), 4.0);
        assert_eq!(rate(&format!("{scaled}sqrt")), 2.0);
    }

    #[test]
    fn a_run_shorter_than_its_warm_up_only_rises() {
        let schedule = Schedule {
            learning_rate: 1.0,
            decay: Decay::Cosine,
            warmup_steps: 10,
            total_steps: 3,
            min_lr_ratio: 0.0,
        };
        assert_eq!([0, 1, 2].map(|s| schedule.lr(s)), [0.1, 0.2, 0.3]);
    }

    /// Adafactor has rates of its own, unless one is set.
    #[test]
    fn a_relative_step_takes_the_place_of_every_schedule() {
        let decay = |setting: &str| {
            let config = RawConfig::from_str(&format!("training: {{{setting}}}"), "test").unwrap();
            Schedule::of(&config, 8, 10).decay
        };
        let relative = |warmup_init| Decay::Relative { warmup_init };
        assert_eq!(decay("optimizer: adafactor"), relative(false));
        assert_eq!(decay("optimizer: adafactor, optimizer_options: {warmup_init: true}"), relative(true));
        assert_eq!(decay("optimizer: adafactor, learning_rate: 1e-3, lr_schedule: linear"), Decay::Linear);
        assert_eq!(decay("lr_schedule: constant"), Decay::Constant);
    }
}
