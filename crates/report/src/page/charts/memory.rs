//! Bars of what is in memory at the peak, and areas of what is through the step.

use std::fmt::Write;

use plimsoll_memory::ByteSize;
use plimsoll_plan::byte_ticks;
use serde::Serialize;

use super::Label;
use crate::breakdown::Breakdown;
use crate::timeline::{Break, COLUMNS, TierData, TimelineData};

/// A budget that is so many times what is taken is not drawn, so that the parts can be seen.
const NEAR: f64 = 3.0;

/// A line that is higher above the peak than this is not drawn.
const NEAR_LINE: f64 = 1.35;

/// Room above the peak for its words.
pub(super) const AIR: f64 = 1.1;

/// A line that is nearer to the peak than this share of the picture has the peak's words above it.
const CLOSE: f64 = 0.17;

/// Height of the areas in their own unit.
const HEIGHT: f64 = 10_000.0;

/// Shares from which a word has room in a strip.
const ROOM: f64 = 0.09;

/// A tier at its peak as a bar.
#[derive(Debug, Serialize)]
pub struct Bar {
    segments: Vec<Segment>,
    /// Where the budget ends, if that is near enough to be drawn.
    line: Option<f64>,
    /// The share of the budget that is taken.
    taken: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Segment {
    kind: &'static str,
    title: String,
    at: f64,
    width: f64,
    share: f64,
}

impl Bar {
    pub fn of(tier: &Breakdown) -> Bar {
        let bytes = tier.bytes.max(1) as f64;
        let budget = tier.budget_bytes.map(|budget| budget as f64);
        let near = budget.filter(|budget| *budget <= NEAR * bytes);
        // A little more than all, so that the line at the end is seen.
        let whole = 1.002 * near.unwrap_or(0.0).max(bytes);
        let mut at = 0.0;
        let segments = tier.parts.iter().map(|part| {
            let width = part.bytes as f64 / whole;
            let segment = Segment {
                kind: part.kind,
                title: format!("{}: {}", part.what, ByteSize(part.bytes)),
                at,
                width,
                share: part.bytes as f64 / bytes,
            };
            at += width;
            segment
        });
        Bar {
            segments: segments.collect(),
            line: near.map(|budget| budget / whole),
            taken: budget.filter(|budget| *budget > 0.0).map(|budget| tier.bytes as f64 / budget),
        }
    }
}

/// A tier through the step.
#[derive(Debug, Serialize)]
pub struct TierChart {
    tier: String,
    areas: Vec<Area>,
    sizes: Vec<Label>,
    times: Vec<Label>,
    breaks: Vec<Break>,
    strip: Vec<Stretch>,
    /// Height of the peak, and where it is reached.
    peak: [f64; 2],
    peak_words: String,
    /// Height of these words.
    words_at: f64,
    peak_bytes: u64,
    /// The line, if it is near enough to be drawn, and its words.
    line: Option<f64>,
    line_words: Option<String>,
    columns: usize,
}

/// A kind's bytes over time.
#[derive(Debug, Serialize)]
pub struct Area {
    /// The kind, as the style sheet calls it.
    pub kind: &'static str,
    /// Its outline: a unit across for each column, 10,000 for the height.
    pub path: String,
    /// The most that it has.
    pub most: u64,
}

#[derive(Debug, Serialize)]
struct Stretch {
    phase: String,
    at: f64,
    width: f64,
    has_room: bool,
}

impl TierChart {
    /// Of a tier of a time line.
    pub fn of(timeline: &TimelineData, tier: &TierData) -> TierChart {
        let peak = tier.peak_bytes.max(1) as f64;
        let line = tier.line.map(|(bytes, _)| bytes as f64);
        let near = line.filter(|line| *line <= NEAR_LINE * peak);
        let most = AIR * near.unwrap_or(0.0).max(peak);
        let from_above = |bytes: f64| 1.0 - bytes / most;
        let words = |line: f64, what: &str| match line > NEAR_LINE * peak {
            true => format!("{what}: {}, above the picture", ByteSize(line as u64)),
            false => format!("{what}: {}", ByteSize(line as u64)),
        };
        let column = tier.peak_column;
        let layer = tier.layer.get(column).copied().flatten();
        let phase = tier.phase.get(column).and_then(|phase| timeline.phases.get(*phase));
        let place = match (phase, layer) {
            (Some(phase), Some(layer)) => format!(" ({phase}, layer {layer})"),
            (Some(phase), None) => format!(" ({phase})"),
            _ => String::new(),
        };
        TierChart {
            tier: tier.tier.clone(),
            areas: areas(timeline, tier, most),
            sizes: byte_ticks(most, 4.0)
                .into_iter()
                .filter(|bytes| *bytes > 0.0)
                .map(|bytes| Label { at: from_above(bytes), text: ByteSize(bytes as u64).to_string() })
                .collect(),
            times: timeline.ticks.iter().map(|t| Label { at: t.at, text: t.label.clone() }).collect(),
            breaks: timeline.breaks.clone(),
            strip: strip(timeline, tier),
            peak: [from_above(peak), (column as f64 + 0.5) / COLUMNS as f64],
            peak_words: format!("peak {}{place}", ByteSize(tier.peak_bytes)),
            words_at: match near {
                Some(line) if line >= peak && (line - peak) < CLOSE * most => from_above(line),
                _ => from_above(peak),
            },
            peak_bytes: tier.peak_bytes,
            line: near.map(from_above),
            line_words: tier.line.map(|(line, what)| words(line as f64, what)),
            columns: COLUMNS,
        }
    }
}

/// The tags on top of each other, and the gaps on top of all.
fn areas(timeline: &TimelineData, tier: &TierData, most: f64) -> Vec<Area> {
    let columns = tier.top.len();
    let gaps: Vec<u64> = (0..columns)
        .map(|column| tier.top.get(column).copied().unwrap_or(0).saturating_sub(tier.live_in(column)))
        .collect();
    let tags = tier.live.iter().map(|(tag, bytes)| (timeline.tags.get(*tag).copied().unwrap_or(""), bytes));
    stacked(tags.chain([("gaps", &gaps)]), most)
}

/// Kinds on top of each other in a picture that is as high as `most` bytes; each has bytes for every column.
pub fn stacked<'a>(kinds: impl Iterator<Item = (&'static str, &'a Vec<u64>)>, most: f64) -> Vec<Area> {
    let mut below: Vec<u64> = Vec::new();
    let mut areas = Vec::new();
    for (kind, bytes) in kinds {
        below.resize(bytes.len(), 0);
        let sums = below.iter().zip(bytes).map(|(below, bytes)| below.saturating_add(*bytes));
        let above: Vec<u64> = sums.collect();
        if above != below {
            let path = outline(&below, &above, most);
            areas.push(Area { kind, path, most: bytes.iter().copied().max().unwrap_or(0) });
        }
        below = above;
    }
    areas
}

/// A path along the upper edge and back along the lower one. A column is as wide as 1, and the picture as high as `most` bytes.
pub(super) fn outline(below: &[u64], above: &[u64], most: f64) -> String {
    let height = |bytes: u64| (HEIGHT * (1.0 - bytes as f64 / most)).round() as i64;
    let mut path = String::new();
    let mut last = None;
    let upper = above.iter().enumerate().map(|(column, bytes)| (column, height(*bytes)));
    for (column, y) in upper {
        match last {
            None => write!(path, "M0 {y}"),
            Some(before) if before != y => write!(path, "H{column}V{y}"),
            Some(_) => Ok(()),
        }
        .unwrap_or(());
        last = Some(y);
    }
    let _ = write!(path, "H{}", above.len());
    let mut last = None;
    for (column, bytes) in below.iter().enumerate().rev() {
        let y = height(*bytes);
        match last {
            None => write!(path, "V{y}"),
            Some(before) if before != y => write!(path, "H{}V{y}", column + 1),
            Some(_) => Ok(()),
        }
        .unwrap_or(());
        last = Some(y);
    }
    path.push_str("H0z");
    path
}

/// Phases in a row.
fn strip(timeline: &TimelineData, tier: &TierData) -> Vec<Stretch> {
    let mut stretches: Vec<(usize, usize)> = Vec::new();
    for phase in &tier.phase {
        match stretches.last_mut() {
            Some((last, columns)) if last == phase => *columns += 1,
            _ => stretches.push((*phase, 1)),
        }
    }
    let mut at = 0.0;
    let stretch = |(phase, columns): (usize, usize)| {
        let width = columns as f64 / COLUMNS as f64;
        let phase = timeline.phases.get(phase).cloned().unwrap_or_default();
        let stretch = Stretch { phase, at, width, has_room: width >= ROOM };
        at += width;
        stretch
    };
    stretches.into_iter().map(stretch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outline_goes_there_and_back() {
        assert_eq!(outline(&[0, 0, 0], &[5, 5, 10], 10.0), "M0 5000H2V0H3V10000H0z");
        assert_eq!(outline(&[5, 0], &[10, 10], 10.0), "M0 0H2V10000H1V5000H0z");
    }
}
