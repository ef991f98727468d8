//! Where the marks of the charts are. Places are shares of a chart's width and height, so that a chart is as wide as the page is
//! and its words stay as large as they are.

mod lines;
mod memory;
mod scatter;
mod snapshot;

pub use lines::LineChart;
pub use memory::{Area, Bar, TierChart, stacked};
pub use scatter::{Scatter, Waterfall};
pub use snapshot::{SnapshotChart, class_of};

use serde::Serialize;

/// A label at a place of an axis, from 0 to 1.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Label {
    /// From the left, or from above.
    pub at: f64,
    /// What it says.
    pub text: String,
}

/// A share as SVG has it.
pub fn percent(share: f64) -> String {
    let text = format!("{:.3}", 100.0 * share);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

/// The share of `value` on the way from `least` to `most`.
fn share(value: f64, [least, most]: [f64; 2]) -> f64 {
    if most > least { ((value - least) / (most - least)).clamp(0.0, 1.0) } else { 0.5 }
}
