//! The page of a snapshot of PyTorch's memory. It has no script: what it shows is decided when it is made.

use minijinja::value::Value as Jinja;
use plimsoll_stacks::snapshot::{Analysis, Live};
use serde::Serialize;

use super::charts::{Bar, SnapshotChart, class_of};
use super::{PageError, environment, hash, style};
use crate::breakdown::{Breakdown, Part};

/// Stacks that are listed.
const MOST_STACKS: usize = 100;

/// Segments that are listed.
const MOST_SEGMENTS: usize = 100;

#[derive(Serialize)]
struct View<'a> {
    name: &'a str,
    analysis: &'a Analysis,
    chart: Option<SnapshotChart>,
    bar: Bar,
    parts: Vec<Part>,
    live: Vec<Row<'a>>,
    /// Stacks that are not listed, and their bytes.
    others: (usize, u64),
    most_segments: usize,
    style: String,
    style_hash: String,
    version: &'static str,
}

#[derive(Serialize)]
struct Row<'a> {
    class: &'static str,
    live: &'a Live,
}

/// Writes the page of what a snapshot shows of a device. `name` is the file's.
///
/// # Errors
/// A fault of this program.
pub fn snapshot_page(name: &str, analysis: &Analysis) -> Result<String, PageError> {
    let style = style::sheet();
    let live = &analysis.peak.live;
    let parts: Vec<Part> = analysis
        .peak
        .by_kind
        .iter()
        .map(|(kind, bytes)| Part {
            kind: class_of(*kind),
            what: kind.name().replace('_', " "),
            bytes: *bytes,
        })
        .collect();
    let breakdown = Breakdown {
        title: "Device",
        bytes: analysis.peak.allocated_bytes,
        budget_bytes: None,
        limited_by: None,
        parts: parts.clone(),
    };
    let others = live.iter().skip(MOST_STACKS).map(|live| live.bytes).fold(0, u64::saturating_add);
    let view = View {
        name,
        analysis,
        chart: SnapshotChart::of(analysis),
        bar: Bar::of(&breakdown),
        parts,
        live: live.iter().take(MOST_STACKS).map(|live| Row { class: class_of(live.kind), live }).collect(),
        others: (live.len().saturating_sub(MOST_STACKS), others),
        most_segments: MOST_SEGMENTS,
        style_hash: hash(&style),
        style,
        version: env!("CARGO_PKG_VERSION"),
    };
    let view = Jinja::from(minijinja::value::Serde(&view));
    Ok(environment()?.get_template("snapshot.html")?.render(view)?)
}
