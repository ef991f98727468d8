//! A plan or a run as one page that any browser opens without a network: what is in memory at the peak, how that comes and goes
//! through the step, what a run measured, and what else could be done.
//!
//! [`Document`] is what the page says, as data; [`Document::to_html`] is the page. [`snapshot_page`] is the page of a snapshot of PyTorch's
//! memory. It reads and writes no files, plans nothing
//! and knows no terminal.

#![forbid(unsafe_code)]

mod breakdown;
mod choices;
mod compared;
mod document;
mod estimated;
mod headline;
mod page;
mod progress;
mod timeline;

pub use breakdown::{Breakdown, Part};
pub use choices::{ParetoPoint, WaterfallEntry};
pub use compared::{Comparison, Unit};
pub use document::{Document, RunRecord, Subject};
pub use estimated::{Estimated, Smaller};
pub use page::{
    Area, LineChart, PageError, TierChart, count, environment as page_environment, hash as policy_hash,
    seconds, snapshot_page, stacked, style_sheet,
};
pub use progress::{Bucket, Progress, RunState};
pub use timeline::{Allocations, Break, Group, Tick, TierData, TimelineData};
