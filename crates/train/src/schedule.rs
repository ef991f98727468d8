//! The learning rate of every step: warm-up, then constant, linear or cosine decay.

/// The shape of the decay after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// The peak rate to the end.
    Constant,
    /// In a straight line to the floor.
    Linear,
    /// Along half a cosine to the floor (Loshchilov and Hutter 2017, without restarts).
    Cosine,
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
    /// The learning rate of the step after `steps_done` steps.
    pub fn lr(&self, steps_done: u64) -> f64 {
        if steps_done < self.warmup_steps {
            return self.learning_rate * (steps_done + 1) as f64 / self.warmup_steps as f64;
        }
        let decaying = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = ((steps_done - self.warmup_steps) as f64 / decaying).min(1.0);
        let share = match self.decay {
            Decay::Constant => return self.learning_rate,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
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
}
