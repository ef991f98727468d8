//! What else would fit: fewer sequences, a shorter context, a narrower cache, another storage of the weights. Each is found by dry runs,
//! and planned as it is said.

use plimsoll_device::DType;
use plimsoll_step::StepError;
use serde::Serialize;

use super::{InferencePlan, InferenceQuestion};
use crate::generation::{GenerationRequest, cache_name};

/// Contexts that are tried are multiples of this.
const CONTEXT_STEP: u64 = 64;

/// Types of weights that are tried, the widest first.
const STORAGES: [DType; 3] = [DType::Q8_0, DType::Q4K, DType::Nf4];

/// Types of caches that are tried, the widest first.
const CACHES: [DType; 2] = [DType::Q8_0, DType::Q4_1];

/// A change of one flag, and what comes of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InferenceChange {
    /// The flag.
    pub flag: &'static str,
    /// Its value.
    pub value: String,
    /// Tokens a second of all sequences.
    pub tokens_per_second: f64,
    /// The arena of the device that takes most.
    pub device_peak_bytes: u64,
    /// Whether all of it is on the device.
    pub all_on_device: bool,
}

/// What would fit where the plan does not; what would be on the device as a whole where the plan is not. The plan answers the question
/// `settled`, whose cache is decided.
pub(super) fn of(
    question: &InferenceQuestion<'_>,
    settled: &InferenceQuestion<'_>,
    plan: &InferencePlan,
) -> Result<Vec<InferenceChange>, StepError> {
    let mut changes = Vec::new();
    if plan.fits() && plan.is_all_on_device() {
        return Ok(changes);
    }
    let is_enough = |other: &InferencePlan| other.fits() && (!plan.fits() || other.is_all_on_device());
    let mut add = |flag, value: String, other: InferenceQuestion<'_>| -> Result<bool, StepError> {
        let found = other.answer()?;
        let enough = is_enough(&found);
        if enough {
            changes.push(InferenceChange {
                flag,
                value,
                tokens_per_second: found.tokens_per_second(),
                device_peak_bytes: found.largest().map_or(0, |stage| stage.generation.dry_run.peak_bytes()),
                all_on_device: found.is_all_on_device(),
            });
        }
        Ok(enough)
    };
    let may_do = |other: InferenceQuestion<'_>| {
        other.every_device(|request| match plan.fits() {
            true => request.fits_on_device(),
            false => request.fits(),
        })
    };
    for dtype in STORAGES {
        let other = InferenceQuestion { quantize: dtype.into(), ..*question }.settled()?;
        let narrower = other.weight_bytes() < question.weight_bytes();
        if narrower && may_do(other)? && add("--quantize", dtype.name().to_owned(), other)? {
            break;
        }
    }
    let narrower = |dtype: &DType| plan.cache().is_none_or(|own| bits(*dtype) < bits(own));
    for dtype in CACHES.into_iter().filter(narrower) {
        let other = InferenceQuestion { cache: Some(dtype), ..*question };
        if may_do(other)? && add("--kv-cache", cache_name(dtype).to_owned(), other)? {
            break;
        }
    }
    // However many sequences there are, they have the cache of one.
    let with = |sequences| InferenceQuestion { sequences, ..*settled };
    if let Some(sequences) = largest(question.sequences.saturating_sub(1), |n| may_do(with(n)))? {
        add("--parallel", sequences.to_string(), with(sequences))?;
    }
    let with = |steps: u64| InferenceQuestion { context: steps * CONTEXT_STEP, ..*question }.settled();
    let most = question.context.saturating_sub(1) / CONTEXT_STEP;
    if let Some(steps) = largest(most, |n| may_do(with(n)?))? {
        add("--context", (steps * CONTEXT_STEP).to_string(), with(steps)?)?;
    }
    Ok(changes)
}

/// Bytes of 256 values.
fn bits(dtype: DType) -> u64 {
    dtype.bytes_for(256).unwrap_or(u64::MAX)
}

/// The largest number from 1 to `most` that fits, where what fits is all up to some number.
fn largest(
    most: u64,
    mut fits: impl FnMut(u64) -> Result<bool, StepError>,
) -> Result<Option<u64>, StepError> {
    if most == 0 || !fits(1)? {
        return Ok(None);
    }
    // `low` fits, `high` does not or is not asked for.
    let (mut low, mut high) = (1, most + 1);
    while low + 1 < high {
        let middle = low.midpoint(high);
        match fits(middle)? {
            true => low = middle,
            false => high = middle,
        }
    }
    Ok(Some(low))
}

impl InferenceQuestion<'_> {
    fn weight_bytes(&self) -> u64 {
        let of = |p| self.type_of(p).bytes_for(p.elements()).unwrap_or(0);
        self.origin.spec().parameters().iter().map(of).sum()
    }

    /// Whether the part of every device is so.
    fn every_device(
        &self,
        is_so: impl Fn(&GenerationRequest<'_>) -> Result<bool, StepError>,
    ) -> Result<bool, StepError> {
        for rank in 0..self.ranks.max(1) {
            if !self.with_request(&self.part(rank), None, &is_so)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
