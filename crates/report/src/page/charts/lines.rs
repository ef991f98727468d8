//! Curves of a run: loss, speed, memory.

use std::fmt::Write;

use plimsoll_memory::ByteSize;
use plimsoll_plan::{byte_ticks, nice_step};
use serde::Serialize;

use super::{Label, share};
use crate::page::count;
use crate::progress::{Bucket, Progress};

/// Height and width of the curves in their own unit.
const UNIT: f64 = 10_000.0;

/// A number over the steps of a run.
#[derive(Debug, Serialize)]
pub struct LineChart {
    /// What the script calls it.
    key: &'static str,
    title: &'static str,
    /// The mean of each bucket.
    path: String,
    /// From the least to the most of each bucket, where these are several steps.
    band: Option<String>,
    /// Values that are by themselves: validations, and steps that have no neighbour.
    dots: Vec<Dot>,
    /// What was planned, and its words.
    planned: Option<Label>,
    sizes: Vec<Label>,
    steps: Vec<Label>,
    /// What the dots are, if not steps.
    dots_are: Option<&'static str>,
    /// Steps at which the run took another plan.
    changes: Vec<Label>,
    buckets: usize,
}

#[derive(Debug, Serialize)]
struct Dot {
    x: f64,
    y: f64,
    title: String,
}

/// What a curve shows.
struct Curve<'a> {
    key: &'static str,
    title: &'static str,
    value: &'a dyn Fn(&Bucket) -> Option<f64>,
    range: [f64; 2],
    ticks: Vec<(f64, String)>,
    planned: Option<(f64, String)>,
    band: bool,
}

impl LineChart {
    /// Loss, speed and the memory of the process, with what was planned of them.
    pub fn of_run(run: &Progress, speed: Option<f64>, bytes: Option<f64>) -> Vec<LineChart> {
        let all = |value: &dyn Fn(&Bucket) -> Option<f64>| -> Vec<f64> {
            run.buckets.iter().filter_map(value).collect()
        };
        let loss = |bucket: &Bucket| bucket.loss;
        let rate = |bucket: &Bucket| bucket.tokens_per_second;
        let resident = |bucket: &Bucket| Some(bucket.resident_bytes as f64).filter(|bytes| *bytes > 0.0);
        let mut losses = all(&loss);
        losses.extend(run.validation.iter().map(|(_, loss)| *loss));
        let [least, most] = around(&losses);
        let fastest = all(&rate).into_iter().chain(speed).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let highest = all(&resident).into_iter().chain(bytes).fold(0.0, f64::max).max(1.0);
        let top = 1.12 * highest;
        let curves = [
            Curve {
                key: "loss",
                title: "Loss",
                value: &loss,
                range: [least, most],
                ticks: numbers([least, most]),
                planned: None,
                band: true,
            },
            Curve {
                key: "speed",
                title: "Speed",
                value: &rate,
                range: [0.0, 1.12 * fastest],
                ticks: numbers([0.0, 1.12 * fastest]).into_iter().filter(|(value, _)| *value > 0.0).collect(),
                planned: speed
                    .map(|speed| (speed, format!("planned: {} tokens/s", count(speed.round() as u64)))),
                band: false,
            },
            Curve {
                key: "memory",
                title: "Memory of the process",
                value: &resident,
                range: [0.0, top],
                ticks: byte_ticks(top, 3.0)
                    .into_iter()
                    .filter(|bytes| *bytes > 0.0)
                    .map(|bytes| (bytes, ByteSize(bytes as u64).to_string()))
                    .collect(),
                planned: bytes.map(|bytes| (bytes, format!("planned: {}", ByteSize(bytes as u64)))),
                band: false,
            },
        ];
        let drawn =
            curves.into_iter().filter(|curve| run.buckets.iter().any(|own| (curve.value)(own).is_some()));
        drawn.map(|curve| LineChart::of(run, curve)).collect()
    }

    /// The learning rate; `None` where no step has one.
    pub fn of_learning_rate(run: &Progress) -> Option<LineChart> {
        let most = run.buckets.iter().filter_map(|bucket| bucket.lr).reduce(f64::max)?;
        let range = [0.0, 1.12 * most.max(f64::MIN_POSITIVE)];
        let ticks = (1..=2).map(|half| 0.5 * f64::from(half) * most);
        Some(LineChart::of(
            run,
            Curve {
                key: "lr",
                title: "Learning rate",
                value: &|bucket| bucket.lr,
                range,
                ticks: ticks.map(|lr| (lr, format!("{lr:.1e}"))).collect(),
                planned: None,
                band: false,
            },
        ))
    }

    fn of(run: &Progress, curve: Curve<'_>) -> LineChart {
        let Curve { key, title, value, range, ticks, planned, band } = curve;
        let steps = [run.buckets.first().map_or(1, |own| own.to) as f64, run.steps as f64];
        let x = |step: u64| share(step as f64, steps);
        let y = |value: f64| 1.0 - share(value, range);
        let mut path = String::new();
        let mut dots = Vec::new();
        let points: Vec<(u64, Option<f64>)> = run.buckets.iter().map(|own| (own.to, value(own))).collect();
        let at = |index: Option<usize>| index.and_then(|index| points.get(index)).and_then(|(_, own)| *own);
        for (index, (step, own)) in points.iter().enumerate() {
            let Some(own) = *own else { continue };
            let (before, after) = (at(index.checked_sub(1)), at(Some(index + 1)));
            let command = if before.is_some() { 'L' } else { 'M' };
            let _ = write!(path, "{command}{:.0} {:.0}", UNIT * x(*step), UNIT * y(own));
            if before.is_none() && after.is_none() {
                dots.push(Dot { x: x(*step), y: y(own), title: format!("step {}", count(*step)) });
            }
        }
        let validations = if key == "loss" { run.validation.as_slice() } else { &[] };
        dots.extend(validations.iter().map(|(step, loss)| Dot {
            x: x(*step),
            y: y(*loss),
            title: format!("validation at step {}: {loss:.4}", count(*step)),
        }));
        LineChart {
            key,
            title,
            path,
            band: band.then(|| self::band(run, &x, &y)).flatten(),
            dots,
            planned: planned.map(|(value, text)| Label { at: y(value), text }),
            sizes: ticks.into_iter().map(|(value, text)| Label { at: y(value), text }).collect(),
            steps: step_labels(steps),
            dots_are: (!validations.is_empty()).then_some("validation"),
            changes: run
                .rungs
                .iter()
                .map(|(step, rung)| Label { at: x(*step), text: format!("plan {rung} from step {step}") })
                .collect(),
            buckets: run.buckets.len(),
        }
    }
}

/// From the least to the most of what is drawn as one point.
fn band(run: &Progress, x: &impl Fn(u64) -> f64, y: &impl Fn(f64) -> f64) -> Option<String> {
    run.buckets.iter().find(|bucket| bucket.to > bucket.from)?;
    let point = |bucket: &Bucket, value: f64| format!("{:.0} {:.0}", UNIT * x(bucket.to), UNIT * y(value));
    let upper = run.buckets.iter().filter_map(|bucket| Some(point(bucket, bucket.most?)));
    let lower = run.buckets.iter().rev().filter_map(|bucket| Some(point(bucket, bucket.least?)));
    let points: Vec<String> = upper.chain(lower).collect();
    (!points.is_empty()).then(|| format!("M{}z", points.join("L")))
}

/// A range around numbers, with some room.
fn around(values: &[f64]) -> [f64; 2] {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !(least.is_finite() && most.is_finite()) {
        return [0.0, 1.0];
    }
    let room = 0.08 * (most - least).max(1e-3 * most.abs()).max(1e-9);
    [least - room, most + room]
}

/// Round numbers in a range, with the decimals that they need.
fn numbers([least, most]: [f64; 2]) -> Vec<(f64, String)> {
    let step = nice_step((most - least) / 5.0);
    let decimals = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
    let first = (least / step).ceil();
    let values = (0..8).map(|n| (first + f64::from(n)) * step).take_while(|value| *value <= most);
    let label = |value: f64| match decimals {
        0 if value >= 0.0 => count(value.round() as u64),
        _ => format!("{value:.decimals$}"),
    };
    values.map(|value| (value, label(value))).collect()
}

/// Round steps.
fn step_labels([first, last]: [f64; 2]) -> Vec<Label> {
    let step = nice_step(((last - first) / 6.0).max(1.0)).max(1.0);
    let steps = (0..12).map(|n| f64::from(n) * step).filter(|at| *at >= first && *at <= last);
    let label = |at: f64| Label { at: share(at, [first, last]), text: count(at as u64) };
    let mut labels: Vec<Label> = steps.map(label).collect();
    if labels.is_empty() {
        labels.push(label(last));
    }
    labels
}
