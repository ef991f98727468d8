//! A timeline as a picture: time goes across, a tier's memory upwards, and each allocation is a rectangle in its tag's colour
//! from its birth to its death. Of the parts of a timeline one is drawn: the last step, unless the peak is elsewhere.

use std::fmt::Write;

use plimsoll_memory::{ByteSize, Phase, Tag, Tier};

use super::areas::{Drawn, Rectangle, drawn};
use super::{Allocation, Moment, Part, TierTimeline, Timeline};
use crate::axes::{byte_ticks, nice_step, seconds};
use crate::colours::{COLOURS, Colour, OTHER_COLOUR, colour_of};
use crate::svg::{Svg, px};

const WIDTH: f64 = 1200.0;
/// Where panels begin, and how wide they are.
const LEFT: f64 = 92.0;
const ACROSS: f64 = 900.0;
const TOP: f64 = 86.0;
const LEGEND: f64 = LEFT + ACROSS + 24.0;
const DEVICE_HEIGHT: f64 = 460.0;
const LOWER_HEIGHT: f64 = 150.0;
/// Between panels: the axis of the one above, and the name of the one below.
const BETWEEN: f64 = 66.0;
/// Of the strip of phases.
const STRIP: f64 = 16.0;
/// Above the peak or the line, for its words.
const AIR: f64 = 22.0;
/// A line that is farther above the peak than this is not drawn, so that the peak can be seen.
const NEAR: f64 = 1.35;

const TEXT: &str = "#333";
const FAINT: &str = "#ddd";
const LINE: &str = "#c00";

/// The whole picture.
pub(super) fn draw(timeline: &Timeline) -> String {
    let part = timeline.shown();
    let panels: Vec<Panel<'_>> =
        timeline.tiers.iter().filter_map(|tier| Panel::new(timeline, tier, &part)).collect();
    let heights: f64 = panels.iter().map(|panel| panel.height + BETWEEN).sum();
    let height = TOP + heights + 46.0;
    let mut svg = Svg::new(WIDTH, height);
    let heading = format!("Who allocated this byte: {}", timeline.model);
    svg.text(24.0, 30.0, "start", 19, "#000", &heading);
    let clock =
        if timeline.has_seconds { "" } else { "; across: allocations and releases, one after the other" };
    let below = format!("{} of {}{clock}", part.words(), timeline.settings);
    svg.text(24.0, 52.0, "start", 13, TEXT, &below);
    let mut y = TOP;
    let (mut all, mut merged) = (0, 0);
    for (place, panel) in panels.iter().enumerate() {
        panel.draw(&mut svg, y);
        y += panel.height;
        all += panel.inside.len();
        merged += panel.drawn.merged.values().sum::<usize>();
        if place == 0 {
            strip(&mut svg, timeline, &part, y + 2.0);
        }
        y += BETWEEN;
    }
    for (line, note) in (0u8..).zip(notes(timeline, &part, all, merged)) {
        svg.text(24.0, y - 10.0 + 17.0 * f64::from(line), "start", 12, TEXT, &note);
    }
    svg.finish()
}

/// What is to be said below.
fn notes(timeline: &Timeline, part: &Part, all: usize, merged: usize) -> Vec<String> {
    let mut notes = vec![
        "Each rectangle is an allocation, from its birth to its death, at its place in memory; point at it for its name.".to_owned(),
        match merged {
            0 => format!("{all} allocations."),
            _ => format!("{all} allocations; {merged} are too small to be seen apart and are drawn together, as areas of their kind."),
        },
    ];
    let inside = |counted: &&plimsoll_memory::CountedEvents| {
        counted.first >= part.begin.event && counted.end <= part.end.event
    };
    let counted: Vec<String> = timeline
        .counted
        .iter()
        .filter(inside)
        .map(|counted| {
            format!("events {} to {}: {} times more", counted.first, counted.end - 1, counted.times)
        })
        .collect();
    if !counted.is_empty() {
        let more = if counted.len() > 3 { ", and others" } else { "" };
        let some: Vec<String> = counted.into_iter().take(3).collect();
        notes.push(format!("Iterations that are alike are drawn once ({}{more}).", some.join("; ")));
    }
    notes
}

/// A tier's part of the picture.
struct Panel<'a> {
    tier: &'a TierTimeline,
    part: Part,
    has_seconds: bool,
    height: f64,
    /// Bytes that the panel is high.
    top: f64,
    /// Allocations that live in the part, and their rectangles.
    inside: Vec<(&'a Allocation, Rectangle)>,
    drawn: Drawn,
}

impl<'a> Panel<'a> {
    /// `None` where nothing lives on the tier.
    fn new(timeline: &Timeline, tier: &'a TierTimeline, part: &Part) -> Option<Panel<'a>> {
        let peak = tier.at_peak.peak;
        if peak == 0 {
            return None;
        }
        let height = if tier.tier == Tier::Device { DEVICE_HEIGHT } else { LOWER_HEIGHT };
        let near = tier.line.map(|(bytes, _)| bytes).filter(|bytes| *bytes as f64 <= NEAR * peak as f64);
        let top = peak.max(near.unwrap_or(0)) as f64 * height / (height - AIR);
        let across = |moment: Moment| across(part, moment);
        let up = |bytes: u64| height * (1.0 - bytes as f64 / top);
        let inside: Vec<(&Allocation, Rectangle)> = tier
            .allocations
            .iter()
            .filter(|allocation| allocation.is_in(part))
            .map(|allocation| {
                let (left, right) = (across(allocation.birth), across(allocation.death));
                let upper = up(allocation.offset + allocation.bytes);
                let height = up(allocation.offset) - upper;
                (allocation, Rectangle { left, top: upper, width: right - left, height })
            })
            .collect();
        let rectangles: Vec<(Tag, Rectangle)> =
            inside.iter().map(|(allocation, own)| (allocation.tag, *own)).collect();
        let drawn = drawn(&rectangles, [ACROSS, height]);
        let (part, has_seconds) = (*part, timeline.has_seconds);
        Some(Panel { tier, part, has_seconds, height, top, inside, drawn })
    }

    fn draw(&self, svg: &mut Svg, y: f64) {
        let up = |bytes: f64| y + self.height * (1.0 - bytes / self.top);
        let name = match self.tier.tier {
            Tier::Device => "device memory, by address",
            Tier::Host => "host memory",
            Tier::Disk => "disk",
        };
        svg.text(LEFT, y - 8.0, "start", 13, "#000", name);
        for tick in byte_ticks(self.top, if self.tier.tier == Tier::Device { 4.0 } else { 2.0 }) {
            svg.line([LEFT, up(tick), LEFT + ACROSS, up(tick)], FAINT, "");
            svg.text(LEFT - 8.0, up(tick) + 4.0, "end", 12, TEXT, &ByteSize(tick as u64).to_string());
        }
        svg.open(&format!("transform=\"translate({} {})\"", px(LEFT), px(y)));
        self.areas(svg);
        self.rectangles(svg);
        svg.close();
        svg.line([LEFT, up(0.0), LEFT + ACROSS, up(0.0)], TEXT, "");
        self.axis(svg, up(0.0) + if self.tier.tier == Tier::Device { STRIP + 4.0 } else { 2.0 });
        self.marks(svg, &up, y);
        self.legend(svg, y);
    }

    fn areas(&self, svg: &mut Svg) {
        for (tag, areas) in &self.drawn.areas {
            let path: String = areas.iter().fold(String::new(), |mut path, area| {
                let Rectangle { left, top, width, height } = *area;
                let [left, top, width, height] = [left, top, width, height].map(px);
                let _ = write!(path, "M{left} {top}h{width}v{height}h-{width}z");
                path
            });
            let count = self.drawn.merged.get(tag).copied().unwrap_or(0);
            let title = format!("{tag}: {count} allocations, too small to be seen apart");
            svg.titled("path", &format!("fill=\"{}\" d=\"{path}\"", colour(*tag)), &title);
        }
    }

    fn rectangles(&self, svg: &mut Svg) {
        for tag in Tag::ALL {
            let apart = self.drawn.apart.iter().filter_map(|index| self.inside.get(*index));
            let mut own = apart.filter(|(allocation, _)| allocation.tag == tag).peekable();
            if own.peek().is_none() {
                continue;
            }
            svg.open(&format!("fill=\"{}\" stroke=\"#fff\" stroke-width=\".3\"", colour(tag)));
            for (allocation, Rectangle { left, top, width, height }) in own {
                let [left, top, width, height] = [*left, *top, *width, *height].map(px);
                let shape = format!("x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\"");
                svg.titled("rect", &shape, &title(allocation));
            }
            svg.close();
        }
    }

    /// When what happens.
    fn axis(&self, svg: &mut Svg, y: f64) {
        let (begin, end) = (self.part.begin.micros, self.part.end.micros);
        let step = nice_step((end - begin) / 6.0);
        // Seconds begin with the part; events have the numbers that the trace gives them.
        let first = if self.has_seconds { 0.0 } else { (begin / step).ceil() * step - begin };
        let length = (end - begin).max(f64::MIN_POSITIVE);
        for tick in (0..9).map(|n| first + f64::from(n) * step).take_while(|tick| *tick <= length) {
            let label = match self.has_seconds {
                true => seconds(1e-6 * tick, 1e-6 * step),
                false => format!("{:.0}", begin + tick),
            };
            let x = LEFT + ACROSS * tick / length;
            svg.text(x, y + 13.0, "middle", 12, TEXT, &label);
        }
    }

    /// The peak and the line.
    fn marks(&self, svg: &mut Svg, up: &impl Fn(f64) -> f64, y: f64) {
        let peak = self.tier.at_peak.peak;
        let at = up(peak as f64);
        svg.line([LEFT, at, LEFT + ACROSS, at], "#000", "5 3");
        svg.text(LEFT + 4.0, at - 4.0, "start", 12, "#000", &format!("peak {}", ByteSize(peak)));
        let inside = |moment: &Moment| (self.part.begin.event..self.part.end.event).contains(&moment.event);
        if let Some(moment) = self.tier.peak_moment.filter(inside) {
            let x = LEFT + across(&self.part, moment);
            svg.line([x, at - 9.0, x, at], "#000", "");
        }
        let Some((bytes, what)) = self.tier.line else { return };
        let label = format!("{what}: {}", ByteSize(bytes));
        let right = LEFT + ACROSS - 4.0;
        if bytes as f64 <= self.top {
            let at = up(bytes as f64);
            svg.line([LEFT, at, LEFT + ACROSS, at], LINE, "");
            svg.text(right, at - 4.0, "end", 12, LINE, &label);
        } else {
            svg.text(right, y - 8.0, "end", 12, LINE, &format!("{label}, above the picture"));
        }
    }

    /// Bytes at the peak.
    fn legend(&self, svg: &mut Svg, y: f64) {
        let at_peak = &self.tier.at_peak;
        svg.text(LEGEND, y + 2.0, "start", 12, "#000", "at the peak");
        let used = |tag: &Tag| {
            at_peak.by_tag.get(*tag) > 0 || self.inside.iter().any(|(allocation, _)| allocation.tag == *tag)
        };
        let known = COLOURS.iter().filter(|(tag, _)| used(tag));
        let mut rows: Vec<(Colour, String, u64)> =
            known.map(|(tag, own)| (*own, tag.name().replace('_', " "), at_peak.by_tag.get(*tag))).collect();
        if at_peak.gaps() > 0 {
            rows.push((OTHER_COLOUR, "gaps".to_owned(), at_peak.gaps()));
        }
        for (row, (own, name, bytes)) in (0u8..).zip(rows) {
            let y = y + 14.0 + 17.0 * f64::from(row);
            svg.rectangle([LEGEND, y, 11.0, 11.0], &hex(own));
            svg.text(LEGEND + 17.0, y + 10.0, "start", 12, TEXT, &name);
            let bytes = if bytes > 0 { ByteSize(bytes).to_string() } else { "-".to_owned() };
            svg.text(WIDTH - 12.0, y + 10.0, "end", 12, TEXT, &bytes);
        }
    }
}

/// Where a moment is in a panel, in pixels; what is outside is at the edge.
fn across(part: &Part, moment: Moment) -> f64 {
    let length = (part.end.micros - part.begin.micros).max(f64::MIN_POSITIVE);
    ACROSS * ((moment.micros - part.begin.micros) / length).clamp(0.0, 1.0)
}

fn title(allocation: &Allocation) -> String {
    let Allocation { name, tag, layer, phase, offset, bytes, birth, death, stays } = *allocation;
    let layer = layer.map_or(String::new(), |layer| format!(", layer {layer}"));
    let until = if stays { "stays".to_owned() } else { format!("until {}", death.event) };
    let size = ByteSize(bytes);
    format!("{name} ({tag}){layer}, {phase}, {size} at {offset}, event {} {until}", birth.event)
}

/// The phases below the panel of the device: the one in the middle of each pixel.
fn strip(svg: &mut Svg, timeline: &Timeline, part: &Part, y: f64) {
    let length = part.end.micros - part.begin.micros;
    let phase_at = |pixel: usize| {
        let micros = part.begin.micros + length * (pixel as f64 + 0.5) / ACROSS;
        let behind = timeline.stretches.partition_point(|stretch| stretch.begin.micros <= micros);
        timeline.stretches.get(behind.checked_sub(1)?).map(|stretch| stretch.what.0)
    };
    let mut from = 0;
    let end = ACROSS as usize;
    while from < end {
        let phase = phase_at(from);
        let until = (from..end).find(|pixel| phase_at(*pixel) != phase).unwrap_or(end);
        if let Some(phase) = phase {
            let (left, width) = (LEFT + from as f64, (until - from) as f64);
            svg.rectangle([left, y, width, STRIP - 2.0], phase_colour(phase));
            let name = phase.to_string();
            if width > 8.0 * name.len() as f64 {
                svg.text(left + 0.5 * width, y + 11.0, "middle", 11, TEXT, &name);
            }
        }
        from = until;
    }
}

fn phase_colour(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward | Phase::Generate => "#dbe9f4",
        Phase::Loss => "#f6dceb",
        Phase::Backward => "#fbe3d2",
        Phase::Optimizer => "#fdf1cf",
        Phase::Setup => "#eee",
    }
}

fn colour(tag: Tag) -> String {
    hex(colour_of(tag))
}

fn hex([red, green, blue]: Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

#[cfg(test)]
mod tests;
