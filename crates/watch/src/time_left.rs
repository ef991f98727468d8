//! How long a run still takes: its steps, and the validations and checkpoints between them, each as long as those so far.

use std::time::Duration;

/// What happens again and again.
#[derive(Clone, Copy, Debug, Default)]
struct Repeated {
    count: u32,
    time: Duration,
}

impl Repeated {
    fn add(&mut self, time: Duration) {
        (self.count, self.time) = (self.count + 1, self.time + time);
    }

    fn mean(&self) -> Duration {
        self.time.checked_div(self.count).unwrap_or_default()
    }
}

/// Tells a run's steps, validations and checkpoints apart, by when each of them ended.
#[derive(Clone, Debug, Default)]
pub struct TimeLeft {
    eval_steps: u64,
    save_steps: u64,
    steps: Repeated,
    validations: Repeated,
    checkpoints: Repeated,
    /// When what came last ended.
    last: Duration,
    validated: bool,
}

impl TimeLeft {
    /// Of a run with so many steps from one validation to the next, and from one checkpoint to the next; 0: none.
    pub fn new(eval_steps: u64, save_steps: u64) -> TimeLeft {
        TimeLeft { eval_steps, save_steps, ..TimeLeft::default() }
    }

    /// Something ended that is not counted.
    pub fn pass(&mut self, now: Duration) {
        self.last = now;
    }

    /// A validation ended, of which the step is told afterwards.
    pub fn validated(&mut self) {
        self.validated = true;
    }

    /// A step ended, and its validation where it had one.
    pub fn stepped(&mut self, now: Duration) {
        let time = now.saturating_sub(self.last);
        match std::mem::take(&mut self.validated) && self.steps.count > 0 {
            true => self.validations.add(time.saturating_sub(self.steps.mean())),
            false => self.steps.add(time),
        }
        self.last = now;
    }

    /// A checkpoint is written.
    pub fn saved(&mut self, now: Duration) {
        self.checkpoints.add(now.saturating_sub(self.last));
        self.last = now;
    }

    /// The time from `step` to the last of `total` steps. What never happened so far is not counted.
    pub fn after(&self, step: u64, total: u64) -> Duration {
        let within = |every: u64| match every {
            0 => 0,
            every => total / every - step.min(total) / every,
        };
        let times = |of: &Repeated, count: u64| of.mean().as_secs_f64() * count as f64;
        let seconds = times(&self.steps, total.saturating_sub(step))
            + times(&self.validations, within(self.eval_steps))
            + times(&self.checkpoints, within(self.save_steps));
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_validation_is_no_slow_step() {
        let mut left = TimeLeft::new(5, 8);
        let at = Duration::from_secs;
        left.pass(at(3));
        (1..5).for_each(|step| left.stepped(at(3 + 2 * step)));
        assert_eq!(left.after(4, 20), at(2 * 16));
        // The fifth step takes 2 s and its validation 10 s: it comes three times more.
        left.validated();
        left.stepped(at(23));
        assert_eq!(left.after(5, 20), at(2 * 15 + 3 * 10));
        (6..9).for_each(|step| left.stepped(at(13 + 2 * step)));
        left.saved(at(33));
        assert_eq!(left.after(8, 20), at(2 * 12 + 3 * 10 + 4));
        // A pause that belongs to nothing.
        left.pass(at(1000));
        left.stepped(at(1002));
        assert_eq!(left.after(9, 20), at(2 * 11 + 3 * 10 + 4));
        assert_eq!(left.after(20, 20), at(0));
    }

    #[test]
    fn a_run_that_begins_with_a_validation_has_a_first_guess() {
        let mut left = TimeLeft::new(1, 0);
        left.validated();
        left.stepped(Duration::from_secs(4));
        assert_eq!(left.after(1, 3), Duration::from_secs(8));
        assert_eq!(TimeLeft::default().after(0, 10), Duration::ZERO);
    }
}
