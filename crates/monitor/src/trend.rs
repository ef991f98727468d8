//! Whether something grows steadily, how fast, and how sure that is.
//!
//! Memory of a training process rises and falls within every step, jumps, and is noisy. So the points are cut into equal phases, and
//! a phase is judged by its lowest point: what is never given back. Where work has a rhythm that is longer than a phase, the lowest points
//! rise and fall with it; there the mean of a phase, in which most of a rhythm is averaged away, may show what they do not.
//!
//! Either grows if the test of Mann (1945) and Kendall (1975) says so; the rate is the median of the slopes between all pairs (Theil 1950,
//! Sen 1968), which single jumps do not move. A walk at random passes that test too often, so that growth also has to go on in each part
//! of the time and to stand out of what is left when the line is taken away.

/// A moment or several, with the values in them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Seconds, or the number of a step.
    pub at: f64,
    /// Bytes at least.
    pub low: f64,
    /// Bytes on average.
    pub mean: f64,
    /// Bytes at most.
    pub high: f64,
}

/// Steady growth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// Bytes for each unit of [`Point::at`].
    pub rate: f64,
    /// One less the chance that values in no order look like this.
    pub confidence: f64,
    /// The highest value of late.
    pub level: f64,
    /// The rate in the last third.
    pub late_rate: f64,
    /// About so far off the rate can be, as a share of it.
    pub spread: f64,
}

/// Phases: four for each third, so that a third has six slopes.
pub const PHASES: usize = 12;
/// The chance of a false alarm that is accepted where values are in no order: 1 in 1000, one-sided.
const LEAST_Z: f64 = 3.09;
/// What the rates of a part and of the whole may differ by and still be the same growth, with so many parts: noise on four points
/// moves the slope of a third about so much where growth is as large as `STANDS_OUT` asks for.
const THIRDS: (usize, f64) = (3, 3.0);
/// A third of the time has too few beats of a long rhythm for a mean of it.
const HALVES: (usize, f64) = (2, 2.0);
/// Growth has to be so many times the range of what is left without the line. Walks at random stay below it in all but a few of a
/// thousand (`walks_at_random_are_seldom_growth`).
const STANDS_OUT: f64 = 4.0;

/// Half of the interval that has a slope with 90 % confidence, in standard deviations of a normal distribution.
const CONFIDENT: f64 = 1.645;

/// The growth of the lowest points of some points in order; `None` where there is none, or not enough points to tell.
pub fn trend(points: &[Point]) -> Option<Trend> {
    let phases = phases(points)?;
    let found = growth(&phases, |phase| phase.low, THIRDS)?;
    Some(Trend { spread: found.left, ..found.trend })
}

/// The same by the means of phases, for work of a long rhythm.
pub fn trend_of_means(points: &[Point]) -> Option<Trend> {
    let phases = phases(points)?;
    Some(growth(&phases, |phase| phase.mean, HALVES)?.trend)
}

fn phases(points: &[Point]) -> Option<Vec<Point>> {
    let length = points.len() / PHASES;
    if length == 0 {
        return None;
    }
    let begin = points.len() - length * PHASES;
    Some(points.get(begin..)?.chunks_exact(length).filter_map(Point::join).collect())
}

/// The growth of phases.
struct Growth {
    trend: Trend,
    /// The range of what is left without the line, as a share of the growth.
    left: f64,
}

/// The growth of a value of each phase, which has to go on in each of so many parts.
fn growth(phases: &[Point], of: fn(&Point) -> f64, (parts, steady): (usize, f64)) -> Option<Growth> {
    let values: Vec<(f64, f64)> = phases.iter().map(|phase| (phase.at, of(phase))).collect();
    let confidence = mann_kendall(&values)?;
    let rate = slope(&values)?;
    let own: Vec<f64> = values.chunks_exact(PHASES / parts).filter_map(slope).collect();
    let is_steady = |part: &f64| *part >= rate / steady && *part <= rate * steady;
    if rate <= 0.0 || own.len() < parts || !own.iter().all(is_steady) {
        return None;
    }
    let (first, last) = (values.first()?, values.last()?);
    let left = |(at, value): &(f64, f64)| value - rate * at;
    let range = values.iter().map(left).fold(f64::NEG_INFINITY, f64::max)
        - values.iter().map(left).fold(f64::INFINITY, f64::min);
    let left = range / (rate * (last.0 - first.0));
    let late_rate = own.last().copied().unwrap_or(rate);
    let level = phases.iter().rev().take(2).map(|phase| phase.high).fold(f64::NEG_INFINITY, f64::max);
    let trend = Trend { rate, confidence, level, late_rate, spread: uncertainty(&values)? / rate };
    (left * STANDS_OUT <= 1.0).then_some(Growth { trend, left })
}

impl Point {
    /// Several points as one; `None` for none.
    pub fn join(points: &[Point]) -> Option<Point> {
        let at = points.iter().map(|point| point.at).sum::<f64>() / points.len().max(1) as f64;
        let low = points.iter().map(|point| point.low).reduce(f64::min)?;
        let mean = points.iter().map(|point| point.mean).sum::<f64>() / points.len().max(1) as f64;
        let high = points.iter().map(|point| point.high).reduce(f64::max)?;
        Some(Point { at, low, mean, high })
    }
}

/// One less the chance, one-sided, that so many pairs rise where there is no order; `None` where the chance is above that of
/// `LEAST_Z`.
fn mann_kendall(values: &[(f64, f64)]) -> Option<f64> {
    let mut sum = 0.0;
    for (place, (_, early)) in values.iter().enumerate() {
        for (_, late) in values.iter().skip(place + 1) {
            sum += (late - early).partial_cmp(&0.0).map_or(0.0, |order| f64::from(order as i8));
        }
    }
    let z = (sum - 1.0) / deviation(values.len());
    (z >= LEAST_Z).then(|| normal_below(z))
}

/// The standard deviation of the pairs that rise less those that fall, where there is no order.
fn deviation(values: usize) -> f64 {
    let n = values as f64;
    (n * (n - 1.0) * (2.0 * n + 5.0) / 18.0).sqrt()
}

/// The share of a normal distribution below `z`, at least 0: Abramowitz and Stegun, 26.2.17, to 7.5e-8.
fn normal_below(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let factors = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = factors.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
    1.0 - sum * (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// The median of the slopes between all pairs; `None` where all are at one moment.
fn slope(values: &[(f64, f64)]) -> Option<f64> {
    let slopes = slopes(values);
    slopes.get(slopes.len() / 2).copied()
}

/// Half of the interval that has the slope with 90 % confidence, by the order of slopes (Sen 1968).
fn uncertainty(values: &[(f64, f64)]) -> Option<f64> {
    let slopes = slopes(values);
    let inside = CONFIDENT * deviation(values.len());
    let outside = ((slopes.len() as f64 - inside) / 2.0).max(0.0) as usize;
    Some((slopes.get(slopes.len().checked_sub(outside + 1)?)? - slopes.get(outside)?) / 2.0)
}

/// The slopes between all pairs, in order.
fn slopes(values: &[(f64, f64)]) -> Vec<f64> {
    let mut slopes = Vec::with_capacity(values.len() * values.len() / 2);
    for (place, (begin, early)) in values.iter().enumerate() {
        let pairs = values.iter().skip(place + 1).filter(|(end, _)| end > begin);
        slopes.extend(pairs.map(|(end, late)| (late - early) / (end - begin)));
    }
    slopes.sort_by(f64::total_cmp);
    slopes
}

#[cfg(test)]
pub(crate) mod tests {
    use plimsoll_memory::splitmix64;

    use super::*;

    /// A number from 0 to 1 that looks random.
    pub fn noise(seed: u64, place: usize) -> f64 {
        (splitmix64(seed, place as u64) >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn points(values: impl IntoIterator<Item = f64>) -> Vec<Point> {
        (0..)
            .zip(values)
            .map(|(at, value)| Point { at: f64::from(at), low: value, mean: value, high: value })
            .collect()
    }

    #[test]
    fn a_line_has_its_slope_and_a_level_none() {
        let found = trend(&points((0..48).map(|step| 100.0 + 3.0 * f64::from(step)))).unwrap();
        assert_eq!((found.rate, found.late_rate, found.level), (3.0, 3.0, 241.0));
        assert!(found.confidence > 0.9999, "{found:?}");
        assert_eq!(trend(&points([100.0; 48])), None);
        assert_eq!(trend(&points((0..48).map(|step| 100.0 - f64::from(step)))), None);
        assert_eq!(trend(&points((0..11).map(f64::from))), None);
        assert_eq!(trend(&[]), None);
        assert_eq!(trend(&[Point { at: 1.0, low: f64::NAN, mean: 2.0, high: 2.0 }; 24]), None);
    }

    /// A leak below a saw, jumps and noise is found with its rate.
    #[test]
    fn growth_below_noise_has_its_rate() {
        for seed in 0..200 {
            let value = |step: usize| {
                let saw = 300.0 * (step % 7) as f64;
                1e4 + 10.0 * step as f64 + saw + 60.0 * noise(seed, step)
            };
            let found = trend(&points((0..150).map(value))).unwrap_or_else(|| panic!("{seed}"));
            assert!((found.rate / 10.0 - 1.0).abs() < 0.1, "{seed} {found:?}");
        }
    }

    /// Work with a rhythm of up to a fifth of the time, as processes have it whose heap keeps what was given back.
    #[test]
    fn growth_below_a_long_rhythm_has_its_rate() {
        for seed in 0..200 {
            let period = 13 + seed as usize % 18;
            let value = |step: usize| {
                let saw = 40.0 * (step % period) as f64 / period as f64;
                100.0 + step as f64 + saw + 5.0 * noise(seed, step)
            };
            let found = trend_of_means(&points((50..200).map(value))).unwrap_or_else(|| panic!("{seed}"));
            assert!((found.rate - 1.0).abs() < 0.12 && found.spread < 0.25, "{seed} {found:?}");
        }
    }

    #[test]
    fn what_is_steady_does_not_grow() {
        let mut false_alarms = 0;
        for seed in 0..1000 {
            let period = 2 + (noise(seed, 1 << 20) * 40.0) as usize;
            let depth = 500.0 * noise(seed, 1 << 21);
            let saw = |step: usize| depth * (step % period) as f64 / period as f64 + 50.0 * noise(seed, step);
            for length in [24, 60, 150, 400] {
                // Whoever sees one tooth alone sees growth.
                if length >= 2 * period {
                    let points = points((0..length).map(saw));
                    false_alarms += usize::from(trend(&points).or_else(|| trend_of_means(&points)).is_some());
                }
            }
        }
        assert_eq!(false_alarms, 0);
    }

    #[test]
    fn a_jump_and_a_rise_that_ends_are_no_steady_growth() {
        assert_eq!(trend(&points((0..100).map(|step| if step < 50 { 1.0 } else { 2.0 }))), None);
        assert_eq!(trend(&points((0..100).map(|step| f64::from(step.min(60))))), None);
        assert_eq!(trend(&points((0..100).map(|step| 1.0 - (-f64::from(step) / 15.0).exp()))), None);
    }

    #[test]
    fn walks_at_random_are_seldom_growth() {
        let walk = |seed: u64| {
            let mut value = 1e6;
            points((0..200).map(|step| {
                value += noise(seed, step) - 0.5;
                value
            }))
        };
        let grows = |points: Vec<Point>| trend(&points).is_some() || trend_of_means(&points).is_some();
        let found = (0..1000).filter(|seed| grows(walk(*seed))).count();
        assert!(found < 10, "{found}");
    }

    #[test]
    fn the_normal_distribution_is_that_of_tables() {
        for (z, below) in [(0.0, 0.5), (1.0, 0.841_344_746), (1.959_963_985, 0.975), (3.09, 0.998_999_2)] {
            assert!((normal_below(z) - below).abs() < 1e-6, "{z}");
        }
    }
}
