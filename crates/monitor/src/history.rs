//! The values of one quantity over time in little memory, and what they say: how fast it grows, when it reaches a line, whether it
//! leaks.

use crate::trend::{PHASES, Point, Trend, trend, trend_of_means};

/// Points that are kept; when there are so many, neighbours become one.
const MOST: usize = 512;
/// The share of the time that is a beginning, in which a process grows because it starts.
const BEGINNING: f64 = 0.25;

/// Values over time.
#[derive(Clone, Debug)]
pub struct History {
    points: Vec<Point>,
    /// Values in each point.
    stride: usize,
    /// Values since the last point.
    pending: Vec<Point>,
}

/// When a line is reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// Units of time until then.
    pub remaining: f64,
    /// Bytes for each of them.
    pub rate: f64,
}

impl History {
    /// No values yet.
    pub fn new() -> History {
        History { points: Vec::new(), stride: 1, pending: Vec::new() }
    }

    /// One more value. Whoever counts in steps may give several of one step.
    pub fn push(&mut self, at: f64, bytes: f64) {
        self.pending.push(Point { at, low: bytes, mean: bytes, high: bytes });
        if self.pending.len() < self.stride {
            return;
        }
        self.points.extend(Point::join(&self.pending));
        self.pending.clear();
        if self.points.len() >= MOST {
            self.points = self.points.chunks(2).filter_map(Point::join).collect();
            self.stride *= 2;
        }
    }

    /// Points so far.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Growth that is news: it has gone on until now, and at least half of it to values that there were not before. The longest time
    /// counts in which that is so.
    pub fn growth(&self) -> Option<(Trend, &[Point])> {
        let n = self.points.len();
        let all = [BEGINNING, 0.5, 0.75].map(|share| (share * n as f64).ceil() as usize);
        all.into_iter().find_map(|begin| {
            let (before, points) = self.points.split_at_checked(begin)?;
            let found = trend(points)?;
            let highest = before.iter().map(|point| point.high).fold(f64::NEG_INFINITY, f64::max);
            let span = points.last()?.at - points.first()?.at;
            (found.level - highest >= 0.5 * found.rate * span).then_some((found, points))
        })
    }

    /// When a line is reached, if it is within as much time as has been seen: nobody knows what comes after.
    pub fn forecast(&self, line: f64) -> Option<Forecast> {
        let (found, _) = self.growth()?;
        let seen = self.points.last()?.at - self.points.first()?.at;
        let rate = found.rate.max(found.late_rate);
        let remaining = ((line - found.level) / rate).max(0.0);
        (remaining <= seen).then_some(Forecast { remaining, rate })
    }

    /// Growth from the end of the beginning until now: what a process keeps from each equal phase to the next. With the units of time
    /// from then on.
    pub fn leak(&self) -> Option<(Trend, f64)> {
        let n = self.points.len();
        let points = self.points.get((BEGINNING * n as f64).ceil() as usize..)?;
        let found = trend(points).or_else(|| trend_of_means(points))?;
        Some((found, points.last()?.at - points.first()?.at))
    }

    /// The same after the end of what was watched: a process that ends gives everything back, so that what follows the highest point of
    /// the last quarter is no part of its life.
    pub fn without_end(&self) -> History {
        let quarter = self.points.len() - self.points.len() / 4;
        let last = (quarter..self.points.len()).max_by(|a, b| {
            let high = |place: &usize| self.points.get(*place).map_or(0.0, |point| point.high);
            high(a).total_cmp(&high(b))
        });
        let points = self.points.iter().take(last.map_or(usize::MAX, |last| last + 1)).copied().collect();
        History { points, stride: self.stride, pending: Vec::new() }
    }

    /// Values that [`History::leak`] needs at least.
    pub const ENOUGH: usize = PHASES * 4 / 3;
}

impl Default for History {
    fn default() -> History {
        History::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trend::tests::noise;

    fn history(values: impl IntoIterator<Item = f64>) -> History {
        let mut history = History::new();
        (0..).zip(values).for_each(|(step, value)| history.push(f64::from(step), value));
        history
    }

    #[test]
    fn little_memory_is_enough_for_a_long_time() {
        let long = history((0..100_000).map(|step| 5.0 + 0.5 * f64::from(step)));
        assert!(long.len() <= MOST && long.points.len() >= MOST / 2);
        assert!((long.leak().unwrap().0.rate - 0.5).abs() < 1e-9);
        assert_eq!(history([1.0; 15]).leak(), None);
    }

    #[test]
    fn a_line_is_forecast_when_half_of_the_way_is_gone() {
        // From 100 up by 1 a step: 200 is reached at step 100.
        let at = |step: i32| history((0..=step).map(|step| 100.0 + f64::from(step))).forecast(200.0);
        assert_eq!(at(40), None);
        let forecast = at(60).unwrap();
        assert!(
            (forecast.remaining - 40.0).abs() < 2.0 && (forecast.rate - 1.0).abs() < 1e-9,
            "{forecast:?}"
        );
        assert_eq!(at(110).unwrap().remaining, 0.0);
    }

    /// The teeth of a saw rise, but to nowhere that they have not been before.
    #[test]
    fn a_saw_of_long_teeth_gives_no_forecast_after_the_first_tooth() {
        for seed in 0..50 {
            let value = |step: usize| 600.0 + 3.0 * (step % 100) as f64 + noise(seed, step);
            for length in (110..400).step_by(10) {
                let found = history((0..length).map(value)).forecast(1000.0);
                assert_eq!(found, None, "{seed} {length}");
            }
        }
    }

    #[test]
    fn what_a_process_gives_back_at_its_end_hides_no_leak() {
        let life = (0..100).map(|step| 100.0 + f64::from(step));
        let ended = history(life.chain([150.0, 150.0, 151.0, 50.0, 5.0]));
        assert_eq!(ended.leak(), None);
        assert_eq!(ended.without_end().leak().unwrap().0.rate, 1.0);
        assert!(History::new().without_end().is_empty());
    }

    #[test]
    fn growth_that_begins_late_is_seen() {
        let late = history((0..400).map(|step: i32| 100.0 + f64::from((step - 250).max(0))));
        let (found, points) = late.growth().unwrap();
        assert_eq!((found.rate, points.len()), (1.0, 100));
        assert_eq!(late.leak(), None);
    }
}
