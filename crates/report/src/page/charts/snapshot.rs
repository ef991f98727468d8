//! Live bytes of a snapshot's trace, kind on kind.

use plimsoll_memory::ByteSize;
use plimsoll_plan::byte_ticks;
use plimsoll_stacks::snapshot::{Analysis, GuessedKind, TimelinePoint};
use serde::Serialize;

use super::Label;
use super::memory::{AIR, Area, outline};

/// The class of a kind in the sheet: its colour is that of our own tag.
pub fn class_of(kind: GuessedKind) -> &'static str {
    match kind {
        GuessedKind::OptimizerStates => "optimizer",
        GuessedKind::Unknown => "overhead",
        kind => kind.name(),
    }
}

/// Live bytes over the entries of a trace, and segments above them.
#[derive(Debug, Serialize)]
pub struct SnapshotChart {
    areas: Vec<Area>,
    sizes: Vec<Label>,
    /// Height of the peak, and where it is.
    peak: [f64; 2],
    peak_words: String,
    columns: usize,
}

impl SnapshotChart {
    /// None where there is no trace.
    pub fn of(analysis: &Analysis) -> Option<SnapshotChart> {
        let points = &analysis.timeline;
        let top = points.iter().map(|point| point.reserved_bytes.max(point.allocated_bytes)).max()?;
        let most = AIR * top.max(1) as f64;
        let from_above = |bytes: f64| 1.0 - bytes / most;
        let peak = points.iter().position(|point| point.allocated_bytes >= analysis.peak.allocated_bytes)?;
        Some(SnapshotChart {
            areas: areas(points, most),
            sizes: byte_ticks(most, 4.0)
                .into_iter()
                .filter(|bytes| *bytes > 0.0)
                .map(|bytes| Label { at: from_above(bytes), text: ByteSize(bytes as u64).to_string() })
                .collect(),
            peak: [
                from_above(analysis.peak.allocated_bytes as f64),
                (peak as f64 + 0.5) / points.len() as f64,
            ],
            peak_words: format!("peak {}", ByteSize(analysis.peak.allocated_bytes)),
            columns: points.len(),
        })
    }
}

fn areas(points: &[TimelinePoint], most: f64) -> Vec<Area> {
    let mut below = vec![0u64; points.len()];
    let mut areas = Vec::new();
    let kinds = GuessedKind::ALL.map(|kind| {
        let bytes: Vec<u64> = points.iter().map(|point| point.by_kind[kind as usize]).collect();
        (class_of(kind), bytes)
    });
    let unused =
        points.iter().map(|point| point.reserved_bytes.saturating_sub(point.allocated_bytes)).collect();
    for (kind, bytes) in kinds.into_iter().chain([("gaps", unused)]) {
        let above: Vec<u64> = below
            .iter()
            .zip(&bytes)
            .map(|(below, bytes): (&u64, &u64)| below.saturating_add(*bytes))
            .collect();
        if above != below {
            areas.push(Area {
                kind,
                path: outline(&below, &above, most),
                most: bytes.into_iter().max().unwrap_or(0),
            });
        }
        below = above;
    }
    areas
}
