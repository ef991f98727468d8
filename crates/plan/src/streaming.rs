//! How much of a model stays in memory where not all of it fits: as much as dry runs find room for. The rest is
//! streamed from disk.

use std::ops::{Range, RangeInclusive};

use plimsoll_disk::LowerTiers;
use plimsoll_model::{ModelSpec, Parameter};
use plimsoll_step::{Residency, StepError, WeightStorage};

use crate::expert_slots;

/// What a dry run of a forward pass found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassFootprint {
    /// The arena's peak.
    pub peak_bytes: u64,
    /// Bytes of weights and cache that a pass brings: reads from disk, or copies from the host to a device with memory of its own.
    pub read_bytes: u64,
    /// The host tier's peak.
    pub host_bytes: u64,
    /// What is taken of the disk.
    pub disk_bytes: u64,
}

/// The residency with which a pass reads the fewest bytes of those that fit `room`; `run` runs the job dry with one. `None`
/// where the job does not fit with everything below the device.
pub fn fitting_residency(
    spec: &ModelSpec,
    room: u64,
    mut run: impl FnMut(Residency) -> Result<PassFootprint, StepError>,
) -> Result<Option<Residency>, StepError> {
    let mut best: Option<(Residency, u64)> = None;
    let mut fits = |residency: Residency| -> Result<Option<(Residency, u64)>, StepError> {
        let PassFootprint { peak_bytes, read_bytes, .. } = run(residency)?;
        Ok((peak_bytes <= room).then_some((residency, read_bytes)))
    };
    // A head that is larger than layers makes every buffer larger, so that it may be better kept.
    for head in [true, false] {
        let with = |layers| Residency::Spread { layers, head, expert_slots: 0 };
        let fitting = largest(0..u64::from(spec.num_layers) + 1, |layers| fits(with(layers as u32)))?;
        best = better(best, fitting);
    }
    Ok(better(best, fitting_slots(spec, &mut fits)?).map(|(residency, _)| residency))
}

/// The one with which fewer bytes are read; of equals the first.
fn better(one: Option<(Residency, u64)>, other: Option<(Residency, u64)>) -> Option<(Residency, u64)> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other.1 < one.1 { other } else { one }),
        (one, other) => one.or(other),
    }
}

/// What the largest number of a range gives that fits; `None` where the first does not, or there is none. What fits with a number fits with a smaller one.
pub(crate) fn largest<T>(
    numbers: Range<u64>,
    mut fits: impl FnMut(u64) -> Result<Option<T>, StepError>,
) -> Result<Option<T>, StepError> {
    if numbers.is_empty() {
        return Ok(None);
    }
    let Some(mut fitting) = fits(numbers.start)? else { return Ok(None) };
    // `low` fits, `high` does not.
    let (mut low, mut high) = (numbers.start, numbers.end);
    while low + 1 < high {
        let middle = low.midpoint(high);
        match fits(middle)? {
            Some(found) => (low, fitting) = (middle, found),
            None => high = middle,
        }
    }
    Ok(Some(fitting))
}

/// Of a mixture of experts, as many slots for experts as fit beside as much of everything else as fits: that is used for every token.
/// With what a pass then reads.
fn fitting_slots(
    spec: &ModelSpec,
    fits: &mut impl FnMut(Residency) -> Result<Option<(Residency, u64)>, StepError>,
) -> Result<Option<(Residency, u64)>, StepError> {
    let Some((least, all)) = expert_slots::of_use(spec).map(RangeInclusive::into_inner) else {
        return Ok(None);
    };
    for (layers, head) in [(spec.num_layers, true), (spec.num_layers, false), (0, false)] {
        let with = |expert_slots| Residency::Spread { layers, head, expert_slots };
        let numbers = u64::from(least)..u64::from(all) + 1;
        let fitting = largest(numbers, |slots| fits(with(slots as u32)))?;
        if fitting.is_some() {
            return Ok(fitting);
        }
    }
    Ok(None)
}

/// Memory that weights on disk take at most, beside the arena: the threads that read them, and buffers for rows of the
/// embedding.
pub fn streaming_overhead_bytes(spec: &ModelSpec, storage: WeightStorage<'_>) -> u64 {
    let row_bytes = |p: &Parameter| (storage.types)(p).bytes_for(p.columns()).unwrap_or(0);
    let table = spec.parameters().into_iter().find(Parameter::is_table);
    LowerTiers::memory_bytes(table.as_ref().map_or(0, row_bytes))
}
