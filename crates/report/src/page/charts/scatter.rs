//! The way from the naive step to the chosen one as bars, and the choices that nothing beats as points.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{byte_ticks, nice_step};
use serde::Serialize;

use super::{Label, share};
use crate::choices::{ParetoPoint, WaterfallEntry, differences};
use crate::page::seconds;

/// The entries of a waterfall, each with its bar.
#[derive(Debug, Serialize)]
pub struct Waterfall {
    rows: Vec<Fall>,
}

#[derive(Debug, Serialize)]
struct Fall {
    change: String,
    saved: i64,
    seconds: f64,
    bytes: u64,
    /// What is left.
    width: f64,
    /// What the change took away, to the right of what is left.
    gone: f64,
    is_first: bool,
}

impl Waterfall {
    /// `None` where there is no entry.
    pub fn of(entries: &[WaterfallEntry]) -> Option<Waterfall> {
        let most = entries.iter().map(|entry| entry.device_peak_bytes).max()?.max(1) as f64;
        let mut before: Option<u64> = None;
        let rows = entries.iter().map(|entry| {
            let bytes = entry.device_peak_bytes;
            let gone = before.map_or(0, |before| before.saturating_sub(bytes));
            let row = Fall {
                change: entry.change.clone(),
                saved: entry.bytes_saved,
                seconds: entry.seconds_added,
                bytes,
                width: bytes as f64 / most,
                gone: gone as f64 / most,
                is_first: before.is_none(),
            };
            before = Some(bytes);
            row
        });
        Some(Waterfall { rows: rows.collect() })
    }
}

/// Time across, memory upwards.
#[derive(Debug, Serialize)]
pub struct Scatter {
    points: Vec<Point>,
    times: Vec<Label>,
    sizes: Vec<Label>,
    /// The classes of quality that occur, with the shape of each.
    classes: Vec<Class>,
    /// Whether time is drawn by its logarithm.
    is_log: bool,
}

#[derive(Debug, Serialize)]
struct Point {
    x: f64,
    y: f64,
    bytes: u64,
    seconds: f64,
    quality: String,
    shape: &'static str,
    is_chosen: bool,
    differs: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Class {
    quality: String,
    shape: &'static str,
}

/// Times that are this many times apart are drawn by their logarithm.
const FAR: f64 = 8.0;

/// The shape of a class.
fn shape(quality: &str) -> &'static str {
    match quality {
        "lossless" | "" => "circle",
        "proven" => "square",
        _ => "triangle",
    }
}

impl Scatter {
    /// `None` where there is no point. `chosen`: the peak of the plan's own.
    pub fn of(points: &[ParetoPoint], chosen: Option<u64>) -> Option<Scatter> {
        let times: Vec<f64> = points.iter().map(|point| point.step_seconds.max(1e-9)).collect();
        let quickest = times.iter().copied().reduce(f64::min)?;
        let slowest = times.iter().copied().fold(quickest, f64::max);
        let is_log = slowest > FAR * quickest;
        let axis = |time: f64| if is_log { time.log10() } else { time };
        let room = 0.06 * (axis(slowest) - axis(quickest)).max(0.05 * axis(slowest).abs()).max(1e-9);
        let range = [axis(quickest) - room, axis(slowest) + room];
        let top = 1.12 * points.iter().map(|point| point.device_peak_bytes).max()?.max(1) as f64;
        let x = |time: f64| share(axis(time), range);
        let y = |bytes: f64| 1.0 - bytes / top;
        let configs: Vec<_> = points.iter().map(|point| &point.config).collect();
        let differs = differences(&configs);
        let mut drawn: Vec<Point> = points
            .iter()
            .zip(&times)
            .zip(differs)
            .map(|((point, time), differs)| Point {
                x: x(*time),
                y: y(point.device_peak_bytes as f64),
                bytes: point.device_peak_bytes,
                seconds: point.step_seconds,
                quality: point.quality.clone(),
                shape: shape(&point.quality),
                is_chosen: chosen == Some(point.device_peak_bytes),
                differs,
            })
            .collect();
        drawn.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(b.bytes.cmp(&a.bytes)));
        let mut classes: Vec<Class> = Vec::new();
        for point in &drawn {
            if !classes.iter().any(|class| class.quality == point.quality) {
                classes.push(Class { quality: point.quality.clone(), shape: point.shape });
            }
        }
        let sizes = byte_ticks(top, 4.0).into_iter().filter(|bytes| *bytes > 0.0);
        Some(Scatter {
            points: drawn,
            times: time_labels(quickest, slowest, is_log)
                .into_iter()
                .map(|time| label(x(time), time))
                .collect(),
            sizes: sizes
                .map(|bytes| Label { at: y(bytes), text: ByteSize(bytes as u64).to_string() })
                .collect(),
            classes,
            is_log,
        })
    }
}

fn label(at: f64, time: f64) -> Label {
    Label { at, text: seconds(time) }
}

/// Round times; of a logarithmic axis 1, 2 and 5 of each power of ten.
fn time_labels(quickest: f64, slowest: f64, is_log: bool) -> Vec<f64> {
    if !is_log {
        let step = nice_step(((slowest - quickest) / 5.0).max(1e-3 * slowest));
        let first = (quickest / step).ceil();
        return (0..8).map(|n| (first + f64::from(n)) * step).take_while(|time| *time <= slowest).collect();
    }
    let decade = |power: i32| [1.0, 2.0, 5.0].map(|n| n * 10f64.powi(power));
    let (first, last) = (quickest.log10().floor() as i32, slowest.log10().ceil() as i32);
    let times = (first..=last).flat_map(decade).filter(|time| *time >= quickest && *time <= slowest);
    times.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn point(step_seconds: f64, device_peak_bytes: u64, quality: &str) -> ParetoPoint {
        ParetoPoint {
            device_peak_bytes,
            step_seconds,
            quality: quality.to_owned(),
            config: json!({"a": step_seconds}),
        }
    }

    #[test]
    fn points_are_in_order_with_their_shapes_and_the_chosen_one() {
        let points = [point(3.0, 100, "proven"), point(1.0, 300, "lossless"), point(2.0, 200, "anything")];
        let scatter = Scatter::of(&points, Some(200)).unwrap();
        let drawn: Vec<(&str, bool)> = scatter.points.iter().map(|own| (own.shape, own.is_chosen)).collect();
        assert_eq!(drawn, [("circle", false), ("triangle", true), ("square", false)]);
        assert!(scatter.points.windows(2).all(|pair| pair[0].x < pair[1].x && pair[0].y < pair[1].y));
        assert!(!scatter.is_log && scatter.points[0].differs == ["a: 1.0"]);
        assert!(Scatter::of(&[point(1.0, 5, ""), point(100.0, 1, "")], None).unwrap().is_log);
        assert!(Scatter::of(&[], None).is_none());
    }

    #[test]
    fn a_waterfall_shows_what_each_change_took_away() {
        let entry = |change: &str, bytes_saved, device_peak_bytes| WaterfallEntry {
            change: change.to_owned(),
            bytes_saved,
            seconds_added: 0.0,
            device_peak_bytes,
        };
        let falls =
            Waterfall::of(&[entry("naive", 0, 200), entry("a", 150, 50), entry("b", -50, 100)]).unwrap();
        let shares: Vec<(f64, f64)> = falls.rows.iter().map(|row| (row.width, row.gone)).collect();
        assert_eq!(shares, [(1.0, 0.0), (0.25, 0.75), (0.5, 0.0)]);
    }
}
