//! Judges samples as they come: how near the limit is, when it is reached, what grows, and whether anything leaks.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::health::{Health, Status, Thresholds};
use crate::history::{Forecast, History};
use crate::sample::Sample;

/// Growth over the time that was looked at counts from here on: the kernel's counters lag by some tens of pages a core.
const LEAST_GROWTH: f64 = (1 << 20) as f64;
/// Processes whose growth is followed, the largest ones.
const MOST_PROCESSES: usize = 32;
/// A leak is looked for again when there is so much more to look at: few looks, few false alarms.
const LOOK_AGAIN: f64 = 1.0625;
/// Looks in a row that have to agree on the rate.
const AGREE: u32 = 2;
/// A leak is told when its rate is known to a tenth.
const KNOWN_TO: f64 = 0.1;

/// In what time is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Steps of training.
    Steps,
}

impl Unit {
    /// The unit's name in the singular.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Seconds => "second",
            Unit::Steps => "step",
        }
    }
}

/// What can grow.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Quantity {
    /// Memory of no file.
    Anonymous,
    /// Pages of files.
    File,
    /// Shared memory.
    Shared,
    /// Swap.
    Swap,
    /// The resident set of one process.
    Process {
        /// Its id.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// The memory of a GPU.
    Gpu {
        /// Its number.
        index: u32,
    },
}

impl std::fmt::Display for Quantity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Quantity::Anonymous => f.write_str("anonymous memory"),
            Quantity::File => f.write_str("pages of files"),
            Quantity::Shared => f.write_str("shared memory"),
            Quantity::Swap => f.write_str("swap"),
            Quantity::Process { pid, name } => write!(f, "process {pid} ({name})"),
            Quantity::Gpu { index } => write!(f, "GPU {index}"),
        }
    }
}

/// Something that grows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Growing {
    /// What.
    #[serde(flatten)]
    pub quantity: Quantity,
    /// Bytes for each second or step.
    pub rate: f64,
}

/// Growth from each equal phase to the next.
#[derive(Clone, Debug, PartialEq)]
pub struct Leak {
    /// What grows: [`Quantity::Anonymous`] stands for anonymous and shared memory and swap together.
    pub quantity: Quantity,
    /// Bytes for each second or step.
    pub rate: f64,
    /// One less the chance that steady memory looks like this.
    pub confidence: f64,
    /// In what the rate is.
    pub unit: Unit,
    /// About how far off the rate can be, as a share of it.
    pub spread: f64,
}

/// What is said of a sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// How near the limit is.
    pub status: Status,
    /// Whether it is nearer than it was.
    pub has_risen: bool,
    /// The share of the limit in use; `None` where there is no limit.
    pub utilization: Option<f64>,
    /// When the limit is reached, if the present trend goes there within as much time as was seen.
    pub forecast: Option<Forecast>,
    /// What grows, the fastest first.
    pub growing: Vec<Growing>,
    /// A leak that has just been found; each is told once.
    pub leak: Option<Leak>,
}

/// Watches samples.
pub struct Watch {
    unit: Unit,
    health: Health,
    used: History,
    limit: u64,
    quantities: BTreeMap<Quantity, History>,
    /// What a process keeps: anonymous and shared memory and swap.
    kept: History,
    /// The number of values at which a leak is looked for next.
    next_look: usize,
    values: usize,
    /// The rate that the last look found, and how many looks before it have agreed.
    agreed: Option<(f64, u32)>,
    was_told: bool,
}

impl Watch {
    /// With these thresholds, in this unit.
    pub fn new(thresholds: Thresholds, unit: Unit) -> Watch {
        Watch {
            unit,
            health: Health::new(thresholds),
            used: History::new(),
            limit: 0,
            quantities: BTreeMap::new(),
            kept: History::new(),
            next_look: History::ENOUGH,
            values: 0,
            agreed: None,
            was_told: false,
        }
    }

    /// In what time is counted.
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// Judges a sample; `at`: its second or step.
    pub fn judge(&mut self, at: f64, sample: &Sample) -> Judgement {
        let mut now: Vec<(Quantity, u64)> = vec![
            (Quantity::Anonymous, sample.anonymous_bytes),
            (Quantity::File, sample.file_bytes),
            (Quantity::Shared, sample.shared_bytes),
            (Quantity::Swap, sample.swap_bytes),
        ];
        if sample.processes.len() > 1 {
            let processes = sample.processes.iter().take(MOST_PROCESSES);
            now.extend(processes.map(|process| {
                let name = process.name.clone();
                (Quantity::Process { pid: process.pid, name }, process.rss_bytes)
            }));
        }
        now.extend(sample.gpu.iter().map(|gpu| (Quantity::Gpu { index: gpu.index }, gpu.used_bytes)));
        let ended = |quantity: &Quantity| {
            matches!(quantity, Quantity::Process { .. }) && !now.iter().any(|(other, _)| other == quantity)
        };
        self.quantities.retain(|quantity, _| !ended(quantity));
        for (quantity, bytes) in now {
            self.quantities.entry(quantity).or_default().push(at, bytes as f64);
        }
        let kept = sample.anonymous_bytes + sample.shared_bytes + sample.swap_bytes;
        self.kept.push(at, kept as f64);
        self.values += 1;

        let mut forecast = None;
        let mut utilization = None;
        let (mut status, mut has_risen) = (Status::Normal, false);
        if let Some(room) = sample.room {
            if room.limit_bytes != self.limit {
                // Another limit is another line, with other things below it.
                (self.limit, self.used) = (room.limit_bytes, History::new());
            }
            self.used.push(at, room.used_bytes as f64);
            forecast = self.used.forecast(room.limit_bytes as f64);
            utilization = Some(room.share());
            (status, has_risen) = self.health.take(room.share());
        }
        Judgement { status, has_risen, utilization, forecast, growing: self.growing(), leak: self.look() }
    }

    /// What grows now.
    fn growing(&self) -> Vec<Growing> {
        let mut growing: Vec<Growing> = Vec::new();
        for (quantity, history) in &self.quantities {
            let Some((found, points)) = history.growth() else { continue };
            let span =
                points.last().map_or(0.0, |last| last.at) - points.first().map_or(0.0, |first| first.at);
            if found.rate * span >= LEAST_GROWTH {
                growing.push(Growing { quantity: quantity.clone(), rate: found.rate });
            }
        }
        growing.sort_by(|a, b| b.rate.total_cmp(&a.rate));
        growing
    }

    /// Looks for a leak where it is time to.
    fn look(&mut self) -> Option<Leak> {
        if self.values < self.next_look {
            return None;
        }
        self.next_look = (self.values as f64 * LOOK_AGAIN).ceil() as usize;
        let found = self.leak().filter(|leak| leak.spread <= KNOWN_TO);
        let agrees = |rate: f64, before: f64| (rate / before - 1.0).abs() <= KNOWN_TO;
        self.agreed = found.as_ref().map(|leak| match self.agreed {
            Some((before, looks)) if agrees(leak.rate, before) => (leak.rate, looks + 1),
            _ => (leak.rate, 1),
        });
        let is_news = self.agreed.is_some_and(|(_, looks)| looks >= AGREE) && !self.was_told;
        self.was_told |= is_news;
        found.filter(|_| is_news)
    }

    /// The leak that the whole life of what was watched shows, if it shows one.
    pub fn leak_after_the_end(&self) -> Option<Leak> {
        self.leak_in(History::without_end)
    }

    /// The leak that all samples so far show, if they show one.
    pub fn leak(&self) -> Option<Leak> {
        self.leak_in(History::clone)
    }

    fn leak_in(&self, life: impl Fn(&History) -> History) -> Option<Leak> {
        let gpus = self.quantities.iter().filter(|(quantity, _)| matches!(quantity, Quantity::Gpu { .. }));
        let all = std::iter::once((&Quantity::Anonymous, &self.kept)).chain(gpus);
        let found = all.filter_map(|(quantity, history)| {
            let (found, span) = life(history).leak()?;
            (found.rate * span >= LEAST_GROWTH).then(|| Leak {
                quantity: quantity.clone(),
                rate: found.rate,
                confidence: found.confidence,
                unit: self.unit,
                spread: found.spread,
            })
        });
        found.max_by(|a, b| a.rate.total_cmp(&b.rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::GpuSample;
    use crate::process::ProcessSample;
    use crate::sample::{LimitedBy, Room};
    use crate::trend::tests::noise;

    const MIB: u64 = 1 << 20;
    const BALANCED: Thresholds = Thresholds { target: 0.90, warning: 0.92, critical: 0.95, emergency: 0.97 };

    fn sample(anonymous: f64, limit: u64) -> Sample {
        let used_bytes = anonymous as u64;
        Sample {
            rss_bytes: used_bytes,
            anonymous_bytes: used_bytes,
            room: Some(Room { limit_bytes: limit, used_bytes, limited_by: LimitedBy::Asked }),
            ..Sample::default()
        }
    }

    /// The step at which a leak is told of a process that leaks 1 MB a step below a saw and noise; and its rate.
    #[test]
    fn a_leak_is_told_within_200_steps_with_its_rate() {
        for seed in 0..100 {
            let mut watch = Watch::new(BALANCED, Unit::Steps);
            let depth = 40e6 * noise(seed, 1 << 30);
            let period = 3 + seed as usize % 11;
            let told = (0..200).find_map(|step| {
                let saw = depth * (step % period) as f64 / period as f64;
                let bytes = 3e8 + 1e6 * step as f64 + saw + 3e6 * noise(seed, step);
                watch.judge(step as f64, &sample(bytes, 1 << 40)).leak
            });
            let told = told.unwrap_or_else(|| panic!("{seed}"));
            assert!((told.rate / 1e6 - 1.0).abs() < 0.1, "{seed} {told:?}");
            assert_eq!(told.quantity, Quantity::Anonymous);
        }
    }

    #[test]
    fn steady_processes_are_not_reported() {
        for seed in 0..100 {
            let mut watch = Watch::new(BALANCED, Unit::Steps);
            let depth = 400e6 * noise(seed, 1 << 30);
            let period = 2 + seed as usize % 13;
            for step in 0..400 {
                // It starts, and then does the same again and again.
                let start = 5e8 * (1.0 - (-(step as f64) / 3.0).exp());
                let saw = depth * (step % period) as f64 / period as f64;
                let judged =
                    watch.judge(step as f64, &sample(start + saw + 2e7 * noise(seed, step), 1 << 40));
                assert_eq!(judged.leak, None, "{seed} {step}");
            }
            assert_eq!(watch.leak(), None, "{seed}");
        }
    }

    #[test]
    fn what_grows_is_named_and_the_line_is_forecast() {
        let mut watch = Watch::new(BALANCED, Unit::Seconds);
        let process = |pid, name: &str, rss_bytes| ProcessSample {
            pid,
            name: name.into(),
            rss_bytes,
            ..ProcessSample::default()
        };
        let judged: Vec<Judgement> = (0..90)
            .map(|second| {
                let grows = 200 * MIB + 4 * MIB * second;
                let mut sample = sample((grows + 100 * MIB) as f64, 700 * MIB);
                sample.processes = vec![process(7, "python", grows), process(8, "worker", 100 * MIB)];
                sample.gpu =
                    vec![GpuSample { index: 0, used_bytes: MIB, total_bytes: 9 * MIB, processes: vec![] }];
                watch.judge(second as f64, &sample)
            })
            .collect();
        let last = judged.last().unwrap();
        assert_eq!(last.status, Status::Warning);
        let names: Vec<String> = last.growing.iter().map(|growing| growing.quantity.to_string()).collect();
        assert_eq!(names, ["anonymous memory", "process 7 (python)"]);
        assert!((last.growing[0].rate / (4.0 * MIB as f64) - 1.0).abs() < 1e-6);
        let first = judged.iter().position(|judged| judged.forecast.is_some()).unwrap();
        // 700 MiB are reached at second 100.
        let remaining = judged[first].forecast.unwrap().remaining;
        assert!((remaining - (100 - first) as f64).abs() < 3.0 && first < 60, "{first} {remaining}");
        let rises = judged.iter().filter(|judged| judged.has_risen).count();
        assert_eq!(rises, 1);
    }

    #[test]
    fn without_a_limit_nothing_is_near_it() {
        let mut watch = Watch::new(BALANCED, Unit::Seconds);
        let judged = watch.judge(0.0, &Sample::default());
        assert_eq!((judged.status, judged.utilization, judged.forecast), (Status::Normal, None, None));
    }
}
