//! The pictures of `bench memory`, as SVG: the ladder as a waterfall, and checkpointing as memory against time.

use plimsoll_plan::{COLOURS, OTHER_COLOUR};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::report::MemoryReport;
use super::rung::{Rung, size};
use super::techniques::Group;
use crate::failure::Failure;

const GIB: f64 = (1u64 << 30) as f64;
const WIDTH: u32 = 1000;
const FONT: &str = "sans-serif";
const GREY: RGBColor = RGBColor(90, 90, 90);
const GONE: RGBColor = RGBColor(232, 232, 232);
const LINE: RGBColor = RGBColor(0, 114, 178);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The ladder as a waterfall: a bar a rung, in the colours of what is in memory at the peak, and behind it in grey what
/// the rung took away.
pub fn ladder(report: &MemoryReport) -> Result<String, Failure> {
    const ROW: u32 = 36;
    const LEFT: u32 = 210;
    const TOP: i32 = 70;
    let rungs = &report.ladder;
    let height = TOP as u32 + ROW * rungs.len() as u32 + 60;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        title(
            &area,
            "Peak memory of a training step, each technique with all above it",
            &format!(
                "{}, {} x {} tokens; the arena's peak",
                report.model, report.batch_size, report.sequence_length
            ),
        )?;
        let largest = rungs.iter().map(gib).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let count = rungs.len() as f64;
        let mut chart = ChartBuilder::on(&area)
            .margin_top(TOP)
            .margin_right(130)
            .margin_bottom(24)
            .x_label_area_size(32)
            .y_label_area_size(LEFT)
            .build_cartesian_2d(0.0..largest, count..0.0)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .y_labels(0)
            .max_light_lines(1)
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(215, 215, 215))
            .x_label_formatter(&|x| format!("{x:.2} GiB"))
            .label_style((FONT, 12))
            .draw()
            .map_err(failed)?;
        let mut before: Option<f64> = None;
        for (row, rung) in rungs.iter().enumerate() {
            let (top, bottom) = (row as f64 + 0.14, row as f64 + 0.86);
            let peak = gib(rung);
            if let Some(before) = before.filter(|before| *before > peak) {
                let gone = Rectangle::new([(peak, top), (before, bottom)], GONE.filled());
                chart.draw_series([gone]).map_err(failed)?;
            }
            let mut from = 0.0;
            for (colour, bytes) in parts(rung) {
                let to = from + bytes as f64 / GIB;
                let part = Rectangle::new([(from, top), (to, bottom)], colour.filled());
                chart.draw_series([part]).map_err(failed)?;
                from = to;
            }
            let (_, y) = chart.backend_coord(&(0.0, row as f64 + 0.5));
            text(&area, rung.name, (LEFT as i32 - 10, y), HPos::Right, 14, &BLACK)?;
            let end = chart.backend_coord(&(before.unwrap_or(peak).max(peak), 0.0)).0;
            let change = before.filter(|b| *b > 0.0).map_or(String::new(), |b| percent(peak / b - 1.0));
            let label = format!("{}{change}", size(rung.planned.peak_bytes));
            text(&area, &label, (end + 8, y), HPos::Left, 13, &BLACK)?;
            before = Some(peak);
        }
        legend(&area, rungs, height as i32 - 14)?;
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

/// Memory against time of every form of checkpointing; `None` if none was asked for.
pub fn checkpointing(report: &MemoryReport) -> Result<Option<String>, Failure> {
    const HEIGHT: u32 = 560;
    let forms: Vec<&Rung> = report.alone.iter().filter(|rung| rung.group == Group::Checkpointing).collect();
    let Some(baseline) = report.ladder.first().filter(|_| !forms.is_empty()) else { return Ok(None) };
    let trained = baseline.measured.is_some();
    let points = points(baseline, &forms, trained);
    let most = |of: fn(&Point) -> f64| points.iter().map(of).fold(0.0, f64::max);
    let (slowest, largest) = (most(|p| p.time).max(1.05), most(|p| p.peak).max(f64::MIN_POSITIVE));
    let fastest = points.iter().map(|p| p.time).fold(1.0, f64::min);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        title(
            &area,
            "Gradient checkpointing: peak memory against time",
            &format!(
                "{}, {} x {} tokens; everything else as in the baseline; the line joins the forms that no other beats in both",
                report.model, report.batch_size, report.sequence_length
            ),
        )?;
        let room = 0.12 * (slowest - fastest);
        let mut chart = ChartBuilder::on(&area)
            .margin_top(70)
            .margin_right(30)
            .margin_bottom(12)
            .x_label_area_size(44)
            .y_label_area_size(80)
            .build_cartesian_2d(fastest - 0.2 * room..slowest + 1.6 * room, 0.0..1.08 * largest)
            .map_err(failed)?;
        let clock = if trained { "measured" } else { "planned" };
        chart
            .configure_mesh()
            .max_light_lines(1)
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(215, 215, 215))
            .x_desc(format!("time of a step over that without checkpointing ({clock})"))
            .y_desc("peak of the arena")
            .x_label_formatter(&|x| format!("{x:.2}"))
            .y_label_formatter(&|y| format!("{y:.2} GiB"))
            .label_style((FONT, 12))
            .draw()
            .map_err(failed)?;
        let front = front(&points);
        let line = LineSeries::new(front.iter().map(|p| (p.time, p.peak)), LINE.stroke_width(2));
        chart.draw_series(line).map_err(failed)?;
        let mut labels: Vec<(i32, i32)> = Vec::new();
        for point in &points {
            let at = (point.time, point.peak);
            chart.draw_series([Circle::new(at, 5, LINE.filled())]).map_err(failed)?;
            let place = free_place(chart.backend_coord(&at), &labels);
            text(&area, &point.label, place, HPos::Left, 13, &BLACK)?;
            labels.push(place);
        }
        area.present().map_err(failed)?;
    }
    Ok(Some(svg))
}

/// A form of checkpointing in the picture.
struct Point {
    /// Over the time without.
    time: f64,
    /// GiB.
    peak: f64,
    label: String,
}

/// The baseline and the forms, the fastest first; forms that could not be trained are left out.
fn points(baseline: &Rung, forms: &[&Rung], trained: bool) -> Vec<Point> {
    let seconds = |rung: &Rung| match trained {
        true => rung.measured.as_ref().map(|measured| measured.step_seconds),
        false => Some(rung.planned.step_seconds),
    };
    let Some(reference) = seconds(baseline).filter(|seconds| *seconds > 0.0) else { return Vec::new() };
    let label = |rung: &Rung| match rung.set.first().and_then(|set| set.split_once('=')) {
        Some((_, value)) => value.trim_matches(['{', '}']).to_owned(),
        None => "none".to_owned(),
    };
    let mut points: Vec<Point> = std::iter::once(&baseline)
        .chain(forms)
        .filter_map(|rung| {
            Some(Point { time: seconds(rung)? / reference, peak: gib(rung), label: label(rung) })
        })
        .collect();
    points.sort_by(|a, b| a.time.total_cmp(&b.time));
    points
}

/// Of points in the order of their time, those with less memory than every faster one.
fn front(points: &[Point]) -> Vec<&Point> {
    let mut least = f64::INFINITY;
    let better = |point: &&Point| {
        let better = point.peak < least;
        least = least.min(point.peak);
        better
    };
    points.iter().filter(better).collect()
}

/// A place for a label beside a point: the nearest one above or below that no earlier label has.
fn free_place(point: (i32, i32), taken: &[(i32, i32)]) -> (i32, i32) {
    const LABEL: (i32, i32) = (240, 15);
    let free = |place: &(i32, i32)| {
        taken.iter().all(|other| (other.0 - place.0).abs() >= LABEL.0 || (other.1 - place.1).abs() >= LABEL.1)
    };
    let places = (0..40).flat_map(|n| [-n, n]).map(|n| (point.0 + 10, point.1 - 2 + 4 * n));
    places.into_iter().find(free).unwrap_or(point)
}

/// What a rung holds at its peak, in the order of the tags.
fn parts(rung: &Rung) -> Vec<(RGBColor, u64)> {
    let Some(tags) = rung.planned.at_peak.as_object() else { return Vec::new() };
    let part = |(name, bytes): (&String, &serde_json::Value)| (colour(name), bytes.as_u64().unwrap_or(0));
    tags.iter().map(part).collect()
}

fn colour(tag: &str) -> RGBColor {
    let [red, green, blue] =
        COLOURS.iter().find(|(known, _)| known.name() == tag).map_or(OTHER_COLOUR, |(_, colour)| *colour);
    RGBColor(red, green, blue)
}

fn gib(rung: &Rung) -> f64 {
    rung.planned.peak_bytes as f64 / GIB
}

fn percent(change: f64) -> String {
    format!("  {:+.0} %", 100.0 * change)
}

/// The colours that can be seen, on a line.
fn legend(area: &Area<'_>, rungs: &[Rung], y: i32) -> Result<(), Failure> {
    /// A pixel or so.
    const VISIBLE: f64 = 1.0 / 800.0;
    let largest = rungs.iter().map(|rung| rung.planned.peak_bytes).max().unwrap_or(0) as f64;
    let mut names: Vec<&String> = Vec::new();
    for tags in rungs.iter().filter_map(|rung| rung.planned.at_peak.as_object()) {
        let seen = tags.iter().filter(|(_, bytes)| bytes.as_f64().unwrap_or(0.0) > VISIBLE * largest);
        names.extend(seen.map(|(name, _)| name));
    }
    let known = |name: &str| COLOURS.iter().position(|(tag, _)| tag.name() == name);
    names.sort_by_key(|name| (known(name).unwrap_or(COLOURS.len()), name.as_str()));
    names.dedup();
    let mut x = 24;
    for name in names {
        let mark = Rectangle::new([(x, y - 6), (x + 12, y + 6)], colour(name).filled());
        area.draw(&mark).map_err(failed)?;
        text(area, &name.replace('_', " "), (x + 17, y), HPos::Left, 12, &GREY)?;
        x += 40 + 7 * name.len() as i32;
    }
    Ok(())
}

fn title(area: &Area<'_>, main: &str, below: &str) -> Result<(), Failure> {
    text(area, main, (24, 24), HPos::Left, 19, &BLACK)?;
    text(area, below, (24, 48), HPos::Left, 13, &GREY)
}

/// A text whose middle line is at `place`.
fn text(
    area: &Area<'_>,
    text: &str,
    place: (i32, i32),
    side: HPos,
    points: i32,
    colour: &RGBColor,
) -> Result<(), Failure> {
    let style = TextStyle::from((FONT, points)).color(colour).pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(text.to_owned(), place, style)).map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::other(format!("a picture could not be drawn: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(time: f64, peak: f64) -> Point {
        Point { time, peak, label: String::new() }
    }

    #[test]
    fn the_line_joins_what_nothing_beats() {
        let points = [point(1.0, 4.0), point(1.1, 5.0), point(1.2, 3.0), point(1.3, 3.0), point(1.4, 1.0)];
        let times: Vec<f64> = front(&points).iter().map(|p| p.time).collect();
        assert_eq!(times, [1.0, 1.2, 1.4]);
    }

    #[test]
    fn labels_keep_clear_of_each_other() {
        let mut places = Vec::new();
        for _ in 0..5 {
            let place = free_place((100, 100), &places);
            assert!(places.iter().all(|other: &(i32, i32)| (other.1 - place.1).abs() >= 15));
            places.push(place);
        }
    }
}
