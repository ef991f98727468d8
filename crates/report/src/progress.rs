//! What a run has done so far: its loss and its speed, in a number of points that a page can hold.

use plimsoll_train::{Report, StepMetrics};
use serde::Serialize;

/// Points of a curve at most.
const MOST_POINTS: usize = 800;

/// How a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// It has come to its end.
    Finished,
    /// It was stopped before its end and has said so.
    Stopped,
    /// An error ended it.
    Ended,
    /// It has said no end: it goes on, or was killed.
    Open,
    /// It has not taken a step.
    Empty,
}

/// The steps of a run, over all its parts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// How it stands.
    pub state: RunState,
    /// The last step.
    pub steps: u64,
    /// Steps that it is to have, where that is known.
    pub of_steps: Option<u64>,
    /// Tokens so far.
    pub tokens: u64,
    /// Loss of the first step.
    pub first_loss: Option<f64>,
    /// Loss of the last step.
    pub last_loss: Option<f64>,
    /// Steps that were left out because of an overflow.
    pub skipped: u64,
    /// Steps in order, several together where there are many.
    pub buckets: Vec<Bucket>,
    /// Step and loss of each validation.
    pub validation: Vec<(u64, f64)>,
    /// The first step and the number of each plan after the first, where memory made the run change plans.
    pub rungs: Vec<(u64, u64)>,
}

/// Some steps in a row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// The first.
    pub from: u64,
    /// The last.
    pub to: u64,
    /// Their mean loss; `None` where it is no number.
    pub loss: Option<f64>,
    /// Their least loss.
    pub least: Option<f64>,
    /// Their greatest loss.
    pub most: Option<f64>,
    /// Their mean norm of gradients.
    pub grad_norm: Option<f64>,
    /// The learning rate of the last.
    pub lr: Option<f64>,
    /// Tokens in a second: tokens over the time of all.
    pub tokens_per_second: Option<f64>,
    /// The most that the process held after one of them, in bytes.
    pub resident_bytes: u64,
}

impl Progress {
    /// Of a run's steps, its report where it has one, and how many steps it is to have.
    pub fn of(steps: &[StepMetrics], report: Option<&Report>, of_steps: Option<u64>) -> Progress {
        let last = steps.last();
        let told = report.filter(|report| last.is_none_or(|last| last.step <= report.steps));
        let state = match (told, last) {
            (Some(report), _) if report.finished => RunState::Finished,
            (Some(_), _) => RunState::Stopped,
            (None, Some(_)) => RunState::Open,
            (None, None) => RunState::Empty,
        };
        let finite = |loss: f64| Some(loss).filter(|loss| loss.is_finite());
        let validation =
            steps.iter().filter_map(|step| Some((step.step, step.validation_loss.and_then(finite)?)));
        let validation: Vec<(u64, f64)> = validation.collect();
        let changed = steps.windows(2).filter_map(|pair| match pair {
            [before, after] if before.rung != after.rung => Some((after.step, after.rung)),
            _ => None,
        });
        let size = steps.len().div_ceil(MOST_POINTS).max(1);
        Progress {
            state,
            steps: last.map_or(0, |last| last.step),
            of_steps,
            tokens: last.map_or(0, |last| last.tokens),
            first_loss: steps.first().and_then(|step| finite(step.loss)),
            last_loss: last.and_then(|step| finite(step.loss)),
            skipped: steps.iter().filter(|step| step.skipped).count() as u64,
            buckets: steps.chunks(size).filter_map(Bucket::of).collect(),
            validation: thinned(validation),
            rungs: changed.collect(),
        }
    }
}

/// The last of so many in a row, so that no more than the most are left.
fn thinned<T: Copy>(all: Vec<T>) -> Vec<T> {
    let size = all.len().div_ceil(MOST_POINTS).max(1);
    all.chunks(size).filter_map(|some| some.last().copied()).collect()
}

impl Bucket {
    /// One step.
    pub fn of_step(step: &StepMetrics) -> Bucket {
        let finite = |value: f64| Some(value).filter(|value| value.is_finite());
        let loss = finite(step.loss);
        Bucket {
            from: step.step,
            to: step.step,
            loss,
            least: loss,
            most: loss,
            grad_norm: finite(step.grad_norm),
            lr: finite(step.lr),
            tokens_per_second: finite(step.tokens_per_second).filter(|speed| *speed > 0.0),
            resident_bytes: step.memory.process_rss_bytes,
        }
    }

    /// Several that follow each other as one; `None` for none.
    pub fn join(all: &[Bucket]) -> Option<Bucket> {
        let (first, last) = (all.first()?, all.last()?);
        // Steps have alike many tokens, so that the time of all is the sum of what each takes for one token.
        let slowness = mean(all, |bucket| bucket.tokens_per_second.map(|speed| 1.0 / speed));
        Some(Bucket {
            from: first.from,
            to: last.to,
            loss: mean(all, |bucket| bucket.loss),
            least: all.iter().filter_map(|bucket| bucket.least).reduce(f64::min),
            most: all.iter().filter_map(|bucket| bucket.most).reduce(f64::max),
            grad_norm: mean(all, |bucket| bucket.grad_norm),
            lr: last.lr,
            tokens_per_second: slowness.map(|slowness| 1.0 / slowness),
            resident_bytes: all.iter().map(|bucket| bucket.resident_bytes).max().unwrap_or(0),
        })
    }

    fn of(steps: &[StepMetrics]) -> Option<Bucket> {
        Bucket::join(&steps.iter().map(Bucket::of_step).collect::<Vec<_>>())
    }

    fn steps(&self) -> f64 {
        self.to.saturating_sub(self.from) as f64 + 1.0
    }
}

/// The mean over the steps of all buckets that have a value.
fn mean(all: &[Bucket], value: impl Fn(&Bucket) -> Option<f64>) -> Option<f64> {
    let having = all.iter().filter_map(|bucket| Some((value(bucket)?, bucket.steps())));
    let (sum, steps) = having.fold((0.0, 0.0), |(sum, steps), (value, own)| (sum + value * own, steps + own));
    (steps > 0.0).then(|| sum / steps)
}

#[cfg(test)]
mod tests {
    use plimsoll_train::{MemoryHealth, MemoryMetrics};

    use super::*;

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 4.0 - step as f64 * 0.001,
            grad_norm: 1.0,
            skipped: false,
            loss_scale: None,
            lr: 1e-3,
            tokens: 64 * step,
            tokens_per_second: if step.is_multiple_of(2) { 100.0 } else { 300.0 },
            batch_size: 2,
            memory: MemoryMetrics {
                device_peak_bytes: 1,
                host_peak_bytes: 2,
                disk_bytes: 0,
                process_rss_bytes: step,
                health: MemoryHealth::default(),
            },
            rung: u64::from(step > 900),
            micro_batch_size: 2,
            validation_loss: step.is_multiple_of(500).then_some(3.0),
            io: None,
            ranks_rss_bytes: Vec::new(),
            experts: Vec::new(),
            expert_reads: None,
        }
    }

    #[test]
    fn many_steps_are_shown_together_and_none_is_lost() {
        let steps: Vec<StepMetrics> = (1..=1700).map(step).collect();
        let progress = Progress::of(&steps, None, Some(2000));
        assert_eq!((progress.state, progress.steps, progress.tokens), (RunState::Open, 1700, 64 * 1700));
        assert_eq!(progress.buckets.len(), 567);
        let edges: Vec<(u64, u64)> = progress.buckets.iter().map(|bucket| (bucket.from, bucket.to)).collect();
        assert!(edges.windows(2).all(|pair| pair[0].1 + 1 == pair[1].0) && edges[566] == (1699, 1700));
        let first = &progress.buckets[0];
        assert_eq!((first.least, first.most, first.resident_bytes), (Some(3.997), Some(3.999), 3));
        // Twice 300 tokens/s and once 100.
        assert!((first.tokens_per_second.unwrap() - 180.0).abs() < 1e-9);
        assert_eq!((progress.validation.len(), progress.rungs), (3, vec![(901, 1)]));
    }

    #[test]
    fn what_is_no_number_is_left_out() {
        let bad = StepMetrics { loss: f64::NAN, tokens_per_second: 0.0, skipped: true, ..step(1) };
        let progress = Progress::of(&[bad], None, None);
        let bucket = &progress.buckets[0];
        assert_eq!((bucket.loss, bucket.tokens_per_second, progress.first_loss), (None, None, None));
        assert_eq!(progress.skipped, 1);
        assert_eq!(Progress::of(&[], None, None).state, RunState::Empty);
    }
}
