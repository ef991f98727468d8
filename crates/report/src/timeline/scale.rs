//! Where on the axis a moment is. Long gaps, which stand for iterations that were counted, are shown shorter than they are.

use plimsoll_plan::{Part, Timeline, nice_step};
use serde::Serialize;

/// Gaps that are shorter than this share of the rest are not marked.
const LEAST: f64 = 0.02;

/// Gaps that are marked at most.
const MOST_GAPS: usize = 8;

/// The share of the axis that a gap has at most.
const GAP: f64 = 0.07;

/// The least share of the axis from one label to the next.
const APART: f64 = 0.06;

/// The gaps that an axis of so many microseconds marks, and how much of the axis a microsecond has outside of those that are shown
/// shorter than they are.
fn marked(mut gaps: Vec<Gap>, mut rest: f64) -> (Vec<Gap>, f64) {
    gaps.sort_by(|a, b| b.length().total_cmp(&a.length()));
    let mut taken: Vec<Gap> = Vec::new();
    for gap in gaps {
        let apart = taken.iter().all(|other| gap.end <= other.begin || gap.begin >= other.end);
        let long = gap.length() < rest && gap.length() > LEAST * (rest - gap.length());
        if apart && long && taken.len() < MOST_GAPS {
            rest -= gap.length();
            taken.push(gap);
        }
    }
    let rate = |shorter: usize, rest: f64| (1.0 - GAP * shorter as f64) / rest;
    // Those that are short anyway are as wide as they are. The shortest are asked first, for each makes the others narrower.
    let mut shorter = taken.len();
    for gap in taken.iter().rev().take_while(|gap| gap.length() > 0.0) {
        if gap.length() * rate(shorter, rest) > GAP {
            break;
        }
        rest += gap.length();
        shorter -= 1;
    }
    (taken, rate(shorter, rest))
}

/// A label of the axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tick {
    /// Its place, from 0 to 1.
    pub at: f64,
    /// What it says.
    pub label: String,
}

/// Iterations that the axis shows shorter than they are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Break {
    /// Where it begins, from 0 to 1.
    pub from: f64,
    /// Where it ends.
    pub to: f64,
    /// How many times more the iteration before it happens.
    pub times: u64,
    /// How long it is, in microseconds.
    pub length: f64,
}

/// Moments to places.
#[derive(Clone, Debug)]
pub struct Scale {
    /// In order, without gaps between them.
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Microseconds.
    begin: f64,
    end: f64,
    /// From 0 to 1.
    left: f64,
    right: f64,
    /// Of a gap.
    times: Option<u64>,
}

/// A gap before it has a place.
#[derive(Clone, Copy, Debug)]
struct Gap {
    begin: f64,
    end: f64,
    times: u64,
}

impl Gap {
    fn length(&self) -> f64 {
        self.end - self.begin
    }
}

impl Scale {
    /// The scale of a part of a timeline.
    pub fn of(timeline: &Timeline, part: &Part) -> Scale {
        Scale::with(part.begin.micros, part.end.micros, gaps(timeline, part))
    }

    fn with(begin: f64, end: f64, gaps: Vec<Gap>) -> Scale {
        let (mut taken, rate) = marked(gaps, (end - begin).max(f64::MIN_POSITIVE));
        taken.sort_by(|a, b| a.begin.total_cmp(&b.begin));
        let (mut pieces, mut from, mut left) = (Vec::new(), begin, 0.0);
        let mut push = |end: f64, share: f64, times: Option<u64>| {
            pieces.push(Piece { begin: from, end, left, right: left + share, times });
            (from, left) = (end, left + share);
        };
        let mut at = begin;
        for gap in &taken {
            push(gap.begin, rate * (gap.begin - at), None);
            push(gap.end, GAP.min(rate * gap.length()), Some(gap.times));
            at = gap.end;
        }
        push(end, rate * (end - at), None);
        // The last ends where the axis does, whatever was rounded.
        if let Some(last) = pieces.last_mut() {
            last.right = 1.0;
        }
        Scale { pieces }
    }

    /// The place of a moment, from 0 to 1.
    pub fn place(&self, micros: f64) -> f64 {
        let behind = self.pieces.partition_point(|piece| piece.end <= micros);
        let Some(piece) = self.pieces.get(behind).or(self.pieces.last()) else { return 0.0 };
        let share = (micros - piece.begin) / (piece.end - piece.begin).max(f64::MIN_POSITIVE);
        piece.left + (piece.right - piece.left) * share.clamp(0.0, 1.0)
    }

    /// The moment at a place.
    pub fn moment(&self, place: f64) -> f64 {
        let behind = self.pieces.partition_point(|piece| piece.right <= place);
        let Some(piece) = self.pieces.get(behind).or(self.pieces.last()) else { return 0.0 };
        let share = (place - piece.left) / (piece.right - piece.left).max(f64::MIN_POSITIVE);
        piece.begin + (piece.end - piece.begin) * share.clamp(0.0, 1.0)
    }

    /// What is shown shorter than it is.
    pub fn breaks(&self) -> Vec<Break> {
        let gaps = self.pieces.iter().filter_map(|piece| Some((piece, piece.times?)));
        gaps.map(|(piece, times)| Break {
            from: piece.left,
            to: piece.right,
            times,
            length: piece.end - piece.begin,
        })
        .collect()
    }

    /// Labels at round moments, from the beginning on.
    pub fn ticks(&self, has_seconds: bool) -> Vec<Tick> {
        let Some(begin) = self.pieces.first().map(|piece| piece.begin) else { return Vec::new() };
        let open = || self.pieces.iter().filter(|piece| piece.times.is_none());
        let length: f64 = open().map(|piece| piece.end - piece.begin).sum();
        let step = nice_step(length / 6.0);
        let mut ticks: Vec<Tick> = Vec::new();
        for piece in open() {
            let first = ((piece.begin - begin) / step).ceil();
            for n in (0..12).map(|n| first + f64::from(n)) {
                let micros = n * step;
                let at = self.place(begin + micros);
                let near = ticks.last().is_some_and(|last| at - last.at < APART);
                if begin + micros <= piece.end && !near && at <= 0.97 {
                    ticks.push(Tick { at, label: label(micros, step, length, has_seconds) });
                }
            }
        }
        ticks
    }
}

/// A moment in the unit that suits the axis, with the decimals that its steps need.
fn label(micros: f64, step: f64, length: f64, has_seconds: bool) -> String {
    if !has_seconds {
        return format!("{micros:.0}");
    }
    let (scale, unit) = match length {
        length if length < 2e3 => (1.0, "µs"),
        length if length < 2e6 => (1e-3, "ms"),
        _ => (1e-6, "s"),
    };
    let decimals = (-(step * scale).log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{:.decimals$} {unit}", micros * scale)
}

/// The gaps behind iterations that were counted.
fn gaps(timeline: &Timeline, part: &Part) -> Vec<Gap> {
    let inside = timeline
        .counted
        .iter()
        .filter(|counted| counted.first >= part.begin.event && counted.end <= part.end.event);
    if timeline.counted.is_empty() {
        return Vec::new();
    }
    let all = timeline.tiers.iter().flat_map(|tier| &tier.allocations);
    let mut moments: Vec<(u64, f64)> =
        all.flat_map(|own| [own.birth, own.death]).map(|moment| (moment.event, moment.micros)).collect();
    moments.sort_by_key(|(event, _)| *event);
    let at = |event: u64| {
        let index = moments.partition_point(|(number, _)| *number < event);
        moments.get(index).map_or(part.end.micros, |(_, micros)| *micros)
    };
    let gap = |first: u64, end: u64, times: u64| {
        let (begin, until) = (at(first), at(end).min(part.end.micros));
        // The iteration that is shown takes as long as each of the others.
        let iteration = (until - begin) / (times as f64 + 1.0);
        let shown = (begin + iteration).max(at(end.saturating_sub(1)));
        Gap { begin: shown, end: until, times }
    };
    inside.map(|counted| gap(counted.first, counted.end, counted.times)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_gaps_are_shown_shorter_and_every_moment_has_its_place() {
        let gap = |begin: f64, end: f64| Gap { begin, end, times: 63 };
        let scale = Scale::with(100.0, 7100.0, vec![gap(600.0, 6600.0), gap(300.0, 310.0)]);
        let breaks = scale.breaks();
        assert_eq!((breaks.len(), breaks[0].times, breaks[0].length), (1, 63, 6000.0));
        assert!((breaks[0].to - breaks[0].from - GAP).abs() < 1e-12);
        assert_eq!((scale.place(100.0), scale.place(7100.0)), (0.0, 1.0));
        // What is before the gap is as wide as what is behind it.
        assert!((scale.place(600.0) - (1.0 - scale.place(6600.0))).abs() < 1e-9);
        for micros in [100.0, 333.0, 600.0, 3000.0, 6600.0, 7000.0] {
            assert!((scale.moment(scale.place(micros)) - micros).abs() < 1e-6, "{micros}");
        }
        let ticks = scale.ticks(true);
        assert!(ticks.windows(2).all(|pair| pair[1].at - pair[0].at >= APART), "{ticks:?}");
        assert!(ticks.iter().any(|tick| tick.label == "200 µs"), "{ticks:?}");
        assert!(ticks.iter().any(|tick| tick.at > breaks[0].to), "{ticks:?}");
    }

    #[test]
    fn short_gaps_are_as_wide_as_they_are() {
        let gap = |begin: f64, end: f64| Gap { begin, end, times: 3 };
        let scale = Scale::with(0.0, 1000.0, vec![gap(100.0, 140.0), gap(500.0, 900.0)]);
        let widths: Vec<f64> = scale.breaks().iter().map(|gap| gap.to - gap.from).collect();
        let rate = (1.0 - GAP) / 600.0;
        assert!((widths[0] - 40.0 * rate).abs() < 1e-9 && (widths[1] - GAP).abs() < 1e-9, "{widths:?}");
    }

    #[test]
    fn an_axis_without_length_is_one() {
        let scale = Scale::with(5.0, 5.0, Vec::new());
        assert_eq!((scale.place(5.0), scale.moment(0.5)), (0.0, 5.0));
        assert_eq!(Scale::with(0.0, 3e6, Vec::new()).ticks(true)[1].label, "0.5 s");
    }
}
