//! The steps of a run in bounded memory: the whole run in some hundred points, and the last steps one by one.

use std::collections::VecDeque;

use plimsoll_report::Bucket;

/// Points of the whole run; when there are so many, neighbours become one.
const MOST: usize = 800;
/// Steps that are kept one by one.
const RECENT: usize = 1000;

/// Steps in order.
#[derive(Clone, Debug)]
pub struct Curve {
    whole: Vec<Bucket>,
    /// Steps in each point of the whole.
    stride: usize,
    /// Steps since the last point.
    pending: Vec<Bucket>,
    recent: VecDeque<Bucket>,
}

impl Default for Curve {
    fn default() -> Curve {
        Curve { whole: Vec::new(), stride: 1, pending: Vec::new(), recent: VecDeque::new() }
    }
}

impl Curve {
    /// One more step. Steps from its number on, of a run that went back to a checkpoint, are forgotten.
    pub fn push(&mut self, step: Bucket) {
        while self.recent.back().is_some_and(|last| last.to >= step.from) {
            self.recent.pop_back();
        }
        self.pending.retain(|kept| kept.to < step.from);
        while self.whole.last().is_some_and(|last| last.to >= step.from) {
            self.whole.pop();
        }
        self.recent.push_back(step.clone());
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        self.pending.push(step);
        if self.pending.len() < self.stride {
            return;
        }
        self.whole.extend(Bucket::join(&self.pending));
        self.pending.clear();
        if self.whole.len() >= MOST {
            self.whole = self.whole.chunks(2).filter_map(Bucket::join).collect();
            self.stride = self.stride.saturating_mul(2);
        }
    }

    /// The last step.
    pub fn last(&self) -> Option<&Bucket> {
        self.recent.back()
    }

    /// The points of the last `window` steps, or of all: no more than are kept.
    pub fn points(&self, window: Option<u64>) -> Vec<Bucket> {
        let last = self.last().map_or(0, |last| last.to);
        let begin = window.map_or(0, |window| last.saturating_add(1).saturating_sub(window));
        let reaches = self.recent.front().is_some_and(|first| first.from <= begin);
        if window.is_some() && reaches {
            let shown: Vec<Bucket> = self.recent.iter().filter(|step| step.from >= begin).cloned().collect();
            let size = shown.len().div_ceil(MOST).max(1);
            return shown.chunks(size).filter_map(Bucket::join).collect();
        }
        let whole = self.whole.iter().filter(|point| point.to >= begin).cloned();
        whole.chain(Bucket::join(&self.pending)).collect()
    }

    /// The middle of what the last steps have of something; `None` where they have nothing.
    pub fn recent_median(&self, steps: usize, value: impl Fn(&Bucket) -> Option<f64>) -> Option<f64> {
        let mut all: Vec<f64> = self.recent.iter().rev().take(steps).filter_map(value).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Bucket {
        Bucket {
            from: step,
            to: step,
            loss: Some(step as f64),
            least: Some(step as f64),
            most: Some(step as f64),
            grad_norm: None,
            lr: Some(1e-3),
            tokens_per_second: Some(100.0),
            resident_bytes: step,
        }
    }

    fn curve(steps: std::ops::RangeInclusive<u64>) -> Curve {
        let mut curve = Curve::default();
        steps.for_each(|number| curve.push(step(number)));
        curve
    }

    #[test]
    fn a_long_run_takes_little_memory_and_loses_no_step() {
        let long = curve(1..=100_001);
        assert!(long.whole.len() < MOST && long.recent.len() == RECENT && long.pending.len() < long.stride);
        let points = long.points(None);
        assert_eq!((points[0].from, points.last().unwrap().to), (1, 100_001));
        assert!(points.windows(2).all(|pair| pair[0].to + 1 == pair[1].from));
        assert_eq!(points.iter().map(|point| point.most.unwrap()).fold(0.0, f64::max), 100_001.0);
        assert_eq!(long.points(Some(100)).len(), 100);
        assert_eq!(long.points(Some(100))[0].from, 99_902);
        // Farther than single steps reach.
        let points = long.points(Some(50_000));
        assert!(points[0].to >= 50_002 && points.len() > MOST / 8, "{}", points.len());
        assert_eq!(long.recent_median(5, |point| point.loss), Some(99_999.0));
    }

    #[test]
    fn a_run_that_goes_back_forgets_what_it_takes_anew() {
        let mut curve = curve(1..=20);
        curve.push(step(11));
        let steps: Vec<u64> = curve.points(None).iter().map(|point| point.to).collect();
        assert_eq!(steps, (1..=11).collect::<Vec<_>>());
        assert_eq!(curve.points(Some(4)).len(), 4);
        // Numbers of a damaged file.
        curve.push(step(u64::MAX));
        curve.push(step(u64::MAX));
        curve.push(step(0));
        assert_eq!(curve.points(Some(9)).len(), 1);
        assert!(
            Curve::default().points(None).is_empty() && Curve::default().recent_median(3, |_| None).is_none()
        );
    }
}
