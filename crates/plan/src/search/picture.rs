//! The Pareto front as a picture: memory across, the time of a step upwards, a line of points for each class of quality.

use plimsoll_memory::ByteSize;

use super::{FrontPoint, SearchReport};
use crate::Colour;
use crate::axes::{byte_ticks, nice_step, seconds};
use crate::config::Quality;
use crate::svg::{Svg, px};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 84.0;
const TOP: f64 = 96.0;
const ACROSS: f64 = WIDTH - LEFT - 40.0;
const UP: f64 = HEIGHT - TOP - 74.0;

const TEXT: &str = "#333";
const FAINT: &str = "#ddd";
const LINE: &str = "#c00";

/// Colours that the colour-blind can tell apart (Okabe and Ito), and what a class means.
fn class(quality: Quality) -> (Colour, &'static str) {
    match quality {
        Quality::Lossless => ([0, 114, 178], "lossless: no bit changes, or the order of sums alone"),
        Quality::Proven => ([0, 158, 115], "proven: published to train as well"),
        Quality::Anything => ([213, 94, 0], "anything"),
    }
}

impl SearchReport {
    /// The front as an SVG picture, with the arena that the chosen plan takes.
    pub fn to_svg(&self, model: &str, chosen_bytes: u64) -> String {
        let mut svg = Svg::new(WIDTH, HEIGHT);
        svg.text(24.0, 30.0, "start", 19, "#000", &format!("Memory against time: {model}"));
        let below = format!(
            "{} settings run dry of {:.3e} that there are; each point can be run, and none takes more of everything than another",
            self.dry_runs, self.candidates
        );
        svg.text(24.0, 52.0, "start", 13, TEXT, &below);
        let most = |value: fn(&FrontPoint) -> f64| self.front.iter().map(value).fold(0.0, f64::max);
        let bytes = (most(|point| point.device_peak_bytes as f64) * 1.05).max(1.0);
        // Far slower points would hide how the others differ.
        let mut times: Vec<f64> = self.front.iter().map(|point| point.step_seconds).collect();
        times.sort_by(f64::total_cmp);
        let slowest = times.last().copied().unwrap_or(1.0);
        let time = slowest * 1.08;
        let across = |value: f64| LEFT + ACROSS * value / bytes;
        let up = |value: f64| TOP + UP * (1.0 - value / time);
        for tick in byte_ticks(bytes, 4.0) {
            svg.line([across(tick), TOP, across(tick), TOP + UP], FAINT, "");
            svg.text(across(tick), TOP + UP + 18.0, "middle", 12, TEXT, &ByteSize(tick as u64).to_string());
        }
        let step = nice_step(time / 6.0);
        for tick in (0..9).map(|n| f64::from(n) * step).take_while(|tick| *tick <= time) {
            svg.line([LEFT, up(tick), LEFT + ACROSS, up(tick)], FAINT, "");
            svg.text(LEFT - 8.0, up(tick) + 4.0, "end", 12, TEXT, &seconds(tick, step));
        }
        svg.text(LEFT + ACROSS / 2.0, HEIGHT - 28.0, "middle", 13, TEXT, "the device's arena");
        svg.text(LEFT, TOP - 8.0, "start", 13, TEXT, "a step");
        let at = across(chosen_bytes as f64);
        svg.line([at, TOP, at, TOP + UP], LINE, "5 3");
        svg.text(at - 4.0, TOP + 12.0, "end", 12, LINE, "chosen");
        let classes =
            Quality::ALL.iter().filter(|class| self.front.iter().any(|point| point.quality == **class));
        for (place, quality) in (0u8..).zip(classes) {
            let ([red, green, blue], words) = class(*quality);
            let colour = format!("#{red:02x}{green:02x}{blue:02x}");
            let own = self.front.iter().filter(|point| point.quality == *quality);
            let places: Vec<(f64, f64, &FrontPoint)> = own
                .map(|point| (across(point.device_peak_bytes as f64), up(point.step_seconds), point))
                .collect();
            for pair in places.windows(2) {
                if let [(x1, y1, _), (x2, y2, _)] = pair {
                    // Between two points the one with less memory is the best.
                    svg.line([*x1, *y1, *x2, *y1], &colour, "");
                    svg.line([*x2, *y1, *x2, *y2], &colour, "");
                }
            }
            for (x, y, point) in &places {
                let title = format!(
                    "{}, {} a step, {:.0} tokens/s, {quality}",
                    ByteSize(point.device_peak_bytes),
                    seconds(point.step_seconds, point.step_seconds / 100.0),
                    point.tokens_per_second
                );
                let attributes = format!("cx=\"{}\" cy=\"{}\" r=\"4\" fill=\"{colour}\"", px(*x), px(*y));
                svg.titled("circle", &attributes, &title);
            }
            let y = HEIGHT - 8.0;
            let x = LEFT + 300.0 * f64::from(place);
            svg.rectangle([x - 14.0, y - 9.0, 10.0, 10.0], &colour);
            svg.text(x, y, "start", 12, TEXT, words);
        }
        svg.finish()
    }
}
