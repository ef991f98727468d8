//! The page: templates filled with a document and the places of what its charts draw.
//!
//! Everything that is filled in is escaped by the template engine. Style and script stand in the page itself; a policy with
//! their hashes lets the browser run nothing else and load nothing at all.

mod charts;
mod snapshot;
mod style;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use minijinja::Environment;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value as Jinja;
use plimsoll_memory::ByteSize;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::compared::Unit;
use crate::document::Document;
use crate::progress::{Progress, RunState};
use crate::timeline::TimelineData;
pub use charts::{Area, LineChart, TierChart, stacked};
use charts::{Bar, Scatter, Waterfall};
pub use snapshot::snapshot_page;
pub use style::sheet as style_sheet;

/// A page that could not be made: a fault of this program.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// A template.
    #[error("the page could not be made: {0}")]
    Template(#[from] minijinja::Error),
    /// The data of the script.
    #[error("the page's data could not be written: {0}")]
    Data(#[from] serde_json::Error),
}

const SCRIPT: &str = include_str!("page/report.js");

/// What the script reads.
#[derive(Serialize)]
struct Data<'a> {
    timeline: Option<&'a TimelineData>,
    run: Option<&'a Progress>,
}

/// Writes the page of a document.
pub fn html(document: &Document) -> Result<String, PageError> {
    let style = style::sheet();
    let data = Data { timeline: document.timeline.as_ref(), run: document.run.as_ref() };
    let view = View {
        document,
        bars: document.memory.iter().map(Bar::of).collect(),
        tiers: tiers(document),
        lines: lines(document),
        waterfall: Waterfall::of(&document.waterfall),
        pareto: Scatter::of(&document.pareto, planned_peak(document)),
        style_hash: hash(&style),
        script_hash: hash(SCRIPT),
        style,
        script: SCRIPT,
        data: inert_json(&data)?,
        version: env!("CARGO_PKG_VERSION"),
    };
    let view = Jinja::from(minijinja::value::Serde(&view));
    Ok(environment()?.get_template("report.html")?.render(view)?)
}

/// What templates read.
#[derive(Serialize)]
struct View<'a> {
    document: &'a Document,
    bars: Vec<Bar>,
    tiers: Vec<TierChart>,
    lines: Vec<LineChart>,
    waterfall: Option<Waterfall>,
    pareto: Option<Scatter>,
    style: String,
    script: &'static str,
    /// JSON that is written as it is.
    data: String,
    style_hash: String,
    script_hash: String,
    version: &'static str,
}

fn tiers(document: &Document) -> Vec<TierChart> {
    let all = document.timeline.iter();
    all.flat_map(|timeline| timeline.tiers.iter().map(|tier| TierChart::of(timeline, tier))).collect()
}

/// The curves of a run, with what was planned beside them.
fn lines(document: &Document) -> Vec<LineChart> {
    let planned = |unit: Unit, what: &str| {
        let row = document.compared.iter().find(|row| row.unit == unit && row.what.starts_with(what));
        row.and_then(|row| row.planned)
    };
    let (speed, bytes) = (planned(Unit::TokensPerSecond, ""), planned(Unit::Bytes, "the whole process"));
    let run = document.run.as_ref().filter(|run| run.state != RunState::Empty);
    run.map_or(Vec::new(), |run| LineChart::of_run(run, speed, bytes))
}

fn planned_peak(document: &Document) -> Option<u64> {
    document.plan.as_ref().and_then(|plan| plan["memory"]["device"]["peak_bytes"].as_u64())
}

/// What pages are made with: the templates that they have in common, and filters for numbers.
///
/// # Errors
/// A template that is none: a fault of this program.
pub fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
    for (name, text) in [
        ("report.html", include_str!("page/report.html")),
        ("axes.html", include_str!("page/axes.html")),
        ("charts.html", include_str!("page/charts.html")),
        ("memory.html", include_str!("page/memory.html")),
        ("timeline.html", include_str!("page/timeline.html")),
        ("run.html", include_str!("page/run.html")),
        ("estimated.html", include_str!("page/estimated.html")),
        ("choices.html", include_str!("page/choices.html")),
        ("snapshot.html", include_str!("page/snapshot.html")),
    ] {
        environment.add_template(name, text)?;
    }
    environment.add_filter("bytes", |bytes: f64| size(bytes));
    environment.add_filter("seconds", seconds);
    environment.add_filter("micros", |micros: f64| seconds(1e-6 * micros));
    environment.add_filter("count", count);
    environment.add_filter("hex", |address: u64| format!("{address:#x}"));
    environment.add_filter("words", |name: &str| name.replace('_', " "));
    environment.add_filter("percent", |share: f64| format!("{:.1} %", 100.0 * share));
    environment.add_filter("place", |share: f64| charts::percent(share));
    Ok(environment)
}

/// JSON that ends no script and begins no comment or markup.
fn inert_json(data: &impl Serialize) -> serde_json::Result<String> {
    let json = serde_json::to_string(data)?;
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            c => text.push(c),
        }
    }
    Ok(text)
}

/// As a policy names a style or a script.
pub fn hash(text: &str) -> String {
    format!("sha256-{}", BASE64_STANDARD.encode(Sha256::digest(text)))
}

/// Bytes with a sign where there are fewer than none.
fn size(bytes: f64) -> String {
    let sign = if bytes < 0.0 { "−" } else { "" };
    format!("{sign}{}", ByteSize(bytes.abs() as u64))
}

/// A duration for people.
pub fn seconds(s: f64) -> String {
    let sign = if s < 0.0 { "−" } else { "" };
    let text = match s.abs() {
        0.0 => "0 s".to_owned(),
        s if s < 1e-3 => format!("{:.0} µs", 1e6 * s),
        s if s < 0.1 => format!("{:.1} ms", 1e3 * s),
        s if s < 1.0 => format!("{:.0} ms", 1e3 * s),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    };
    format!("{sign}{text}")
}

/// A whole number with its thousands apart.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0.0, 2e-5, 0.0123, 0.25, 3.0, 600.0, 9e3, -0.25].map(seconds),
            ["0 s", "20 µs", "12.3 ms", "250 ms", "3.0 s", "10 min", "2.5 h", "−250 ms"]
        );
        assert_eq!([size(1024.0), size(-2048.0)], ["1.00 KiB", "−2.00 KiB"]);
    }

    #[test]
    fn data_end_no_script() {
        let json = inert_json(&"</script><!-- & \u{2028}").unwrap();
        assert_eq!(json, r#""\u003c/script\u003e\u003c!-- \u0026 \u2028""#);
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), "</script><!-- & \u{2028}");
    }
}
