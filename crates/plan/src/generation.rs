//! Planning generation: the cache's type, the context, the length of a pass and the weights that stay in memory, as
//! memory allows. Every answer, the advice included, is found by dry runs of the decoder.

use std::fmt;
use std::ops::RangeInclusive;

use plimsoll_device::DType;
use plimsoll_memory::{ByteSize, Tag, Tier};
use plimsoll_model::{ModelSpec, StoredWeights};
use plimsoll_step::{DecodeSettings, Precision, Residency, StepError, WeightOffload, WeightStorage};

use crate::{DryRun, fitting_residency, streaming_overhead_bytes};

/// Tokens of a pass over the prompt, the fastest first.
const CHUNKS: [u64; 3] = [256, 64, 16];

/// An f32 cache up to this size is not worth a loss of precision, however small.
const SMALL_CACHE: u64 = 32 << 20;

/// Contexts that are tried are multiples of this, or the ends of what was asked for.
const CONTEXT_STEP: u64 = 64;

/// What is to be generated, and in how much memory.
#[derive(Clone)]
pub struct GenerationRequest<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Storage types.
    pub precision: Precision,
    /// How weights are held.
    pub storage: WeightStorage<'a>,
    /// Tokens of the longest prompt; one as long as the context where `None`.
    pub prompt_tokens: Option<u64>,
    /// The least context that will do, and the most that can be used.
    pub context: RangeInclusive<u64>,
    /// The type of the cache. Where `None`, f32 for a small cache, f16 for a larger one, and 8 bits where only 8 bits fit;
    /// with bf16 activations bf16 or 8 bits.
    pub cache: Option<DType>,
    /// Bytes that weights, cache and workspace may take.
    pub room: u64,
    /// Where files hold weights as they are computed with, if weights may be brought from disk when they are needed.
    pub in_files: Option<&'a StoredWeights>,
    /// A context that is enough: beyond it, weights in memory are preferred to more context.
    pub enough_context: u64,
    /// Tokens of a pass, where others decide.
    pub pass_tokens: Option<u64>,
}

/// A context, a type of cache and a length of passes that fit.
#[derive(Clone, Debug)]
pub struct GenerationPlan {
    /// What to make the decoder with.
    pub settings: DecodeSettings,
    /// Which weights stay in memory, where not all fit.
    pub residency: Option<Residency>,
    /// What it will need.
    pub dry_run: DryRun,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum GenerationPlanError {
    /// The model cannot be run so.
    #[error(transparent)]
    Step(#[from] StepError),
    /// It needs more memory than there is.
    #[error(transparent)]
    DoesNotFit(#[from] Box<DoesNotFit>),
}

/// What was asked for does not fit; and what would.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct DoesNotFit {
    /// The context that was asked for.
    pub context: u64,
    /// The cache that was tried last.
    pub cache: DType,
    /// Bytes that they need with the shortest passes.
    pub needed: u64,
    /// Bytes of weights among them.
    pub weights: u64,
    /// Whether as many weights as possible were left on disk for that.
    pub streamed: bool,
    /// Bytes that there are.
    pub room: u64,
    /// The largest contexts that fit, by the cache's type.
    pub possible: Vec<CacheContext>,
}

/// A context that fits with a type of cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheContext {
    /// The cache's type.
    pub cache: DType,
    /// Tokens.
    pub context: u64,
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DoesNotFit { context, cache, needed, weights, streamed, room, possible } = self;
        write!(
            f,
            "a context of {context} tokens with a cache in {} needs {} beside the program, and {} may be used; ",
            cache_name(*cache),
            ByteSize(*needed),
            ByteSize(*room)
        )?;
        if possible.is_empty() {
            let what =
                if *streamed { "those weights that are in memory at a time" } else { "the weights alone" };
            return write!(
                f,
                "no context fits, for {what} take {}: a model of a smaller type or size is needed",
                ByteSize(*weights)
            );
        }
        f.write_str("what fits: ")?;
        for (i, CacheContext { cache, context }) in possible.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}--context {context} --kv-cache {}", cache_name(*cache))?;
        }
        Ok(())
    }
}

/// What the command line calls a type of cache.
fn cache_name(cache: DType) -> &'static str {
    match cache {
        DType::Q8_0 => "int8",
        DType::Q4_1 => "int4",
        other => other.name(),
    }
}

impl GenerationPlan {
    /// The first type of cache with which the most context fits with all weights in memory, or a smaller context that is
    /// enough; else the most context with weights on disk, as few of them as possible; or else the largest context that
    /// fits.
    pub fn resolve(request: &GenerationRequest<'_>) -> Result<GenerationPlan, GenerationPlanError> {
        let (least, most) = (*request.context.start(), *request.context.end());
        let caches = request.caches(most)?;
        let cache = caches.last().copied().unwrap_or(DType::F32);
        let enough = request.enough_context.clamp(least, most);
        for (from, stream) in [(enough, false), (least, request.in_files.is_some())] {
            for cache in &caches {
                if let Some(found) = request.fitting(*cache, most, stream)? {
                    return request.plan(found);
                }
            }
            // Without a choice every context is enough.
            let from = if request.in_files.is_some() { from } else { least };
            if from < most
                && let Some(context) = request.largest_context(cache, from, most, stream)?
                && let Some(found) = request.fitting(cache, context, stream)?
            {
                return request.plan(found);
            }
            if request.in_files.is_none() {
                break;
            }
        }
        // Slower, and without loss: the cache waits on disk too.
        if request.in_files.is_some() {
            for cache in &caches {
                if let Some(found) = request.fitting_on(*cache, most, true, Tier::Disk)? {
                    return request.plan(found);
                }
            }
        }
        let mut possible = Vec::new();
        for cache in [DType::F16, DType::Q8_0, DType::Q4_1] {
            let most = request.spec.max_position_embeddings.max(most);
            let context = request.largest_context(cache, 1, most, request.in_files.is_some())?;
            possible.extend(context.map(|context| CacheContext { cache, context }));
        }
        let settings = request.settings(cache, least, CHUNKS[CHUNKS.len() - 1]);
        let tried = [true, false].map(|head| request.in_files.map(|_| Residency::Spread { layers: 0, head }));
        let mut smallest: Option<GenerationPlan> = None;
        for residency in tried {
            let plan = request.plan(Found { settings, residency })?;
            if smallest.as_ref().is_none_or(|best| plan.dry_run.peak_bytes() < best.dry_run.peak_bytes()) {
                smallest = Some(plan);
            }
        }
        let (needed, weights) = smallest.map_or((0, 0), |plan| {
            let tags = plan.dry_run.tags_at_peak();
            (plan.dry_run.peak_bytes(), tags.get(Tag::Weights) + tags.get(Tag::Staging))
        });
        let streamed = request.in_files.is_some();
        // What reads them takes some memory beside them.
        let reading = if streamed { streaming_overhead_bytes(request.spec, request.storage) } else { 0 };
        let needed = needed.saturating_add(reading);
        let context = least;
        Err(Box::new(DoesNotFit { context, cache, needed, weights, streamed, room: request.room, possible })
            .into())
    }
}

/// Settings that fit, with what stays in memory for that.
struct Found {
    settings: DecodeSettings,
    residency: Option<Residency>,
}

impl GenerationRequest<'_> {
    /// The types of cache to try, in order.
    fn caches(&self, context: u64) -> Result<Vec<DType>, StepError> {
        if let Some(cache) = self.cache {
            return Ok(vec![cache]);
        }
        if self.precision.activations == DType::Bf16 {
            return Ok(vec![DType::Bf16, DType::Q8_0]);
        }
        let settings = self.settings(DType::F32, context, 1);
        let dry_run = DryRun::generation(self.spec, settings, self.storage, 1)?;
        let small = dry_run.tags_at_peak().get(Tag::KvCache) <= SMALL_CACHE;
        let exact = small.then_some(DType::F32);
        Ok(exact.into_iter().chain([DType::F16, DType::Q8_0]).collect())
    }

    fn settings(&self, cache: DType, context: u64, chunk: u64) -> DecodeSettings {
        let (precision, prompt_chunk_tokens) = (self.precision, chunk);
        DecodeSettings { precision, cache, cache_tier: Tier::Device, context, prompt_chunk_tokens }
    }

    fn prompt(&self, context: u64) -> u64 {
        self.prompt_tokens.unwrap_or(context)
    }

    /// The same storage with weights on disk, but for those that stay.
    fn storage(&self, residency: Option<Residency>) -> WeightStorage<'_> {
        let offload =
            residency.map(|residency| WeightOffload { tier: Tier::Disk, in_files: self.in_files, residency });
        WeightStorage { offload, ..self.storage }
    }

    /// The settings with the longest passes that fit: with all weights in memory, or with weights on disk where `stream`
    /// says so.
    fn fitting(&self, cache: DType, context: u64, stream: bool) -> Result<Option<Found>, StepError> {
        self.fitting_on(cache, context, stream, Tier::Device)
    }

    /// The same with a cache that lives on a tier.
    fn fitting_on(
        &self,
        cache: DType,
        context: u64,
        stream: bool,
        cache_tier: Tier,
    ) -> Result<Option<Found>, StepError> {
        let chunks = CHUNKS.into_iter().filter(|chunk| self.pass_tokens.is_none_or(|said| said == *chunk));
        for chunk in chunks {
            let settings = DecodeSettings { cache_tier, ..self.settings(cache, context, chunk) };
            let run = |residency: Option<Residency>| {
                let storage = self.storage(residency);
                DryRun::generation_footprint(self.spec, settings, storage, self.prompt(context))
            };
            let residency = if stream {
                let room = self.room.saturating_sub(streaming_overhead_bytes(self.spec, self.storage));
                match fitting_residency(self.spec, room, |residency| run(Some(residency)))? {
                    None => continue,
                    found => found,
                }
            } else if run(None)?.peak_bytes <= self.room {
                None
            } else {
                continue;
            };
            return Ok(Some(Found { settings, residency }));
        }
        Ok(None)
    }

    /// The largest context from `least` to `most` that fits.
    fn largest_context(
        &self,
        cache: DType,
        least: u64,
        most: u64,
        stream: bool,
    ) -> Result<Option<u64>, StepError> {
        if self.fitting(cache, most, stream)?.is_some() {
            return Ok(Some(most));
        }
        // In steps; `low` fits, `high` does not.
        let (mut low, mut high) = (least / CONTEXT_STEP, most.div_ceil(CONTEXT_STEP));
        while low + 1 < high {
            let middle = low.midpoint(high);
            match self.fitting(cache, middle * CONTEXT_STEP, stream)? {
                Some(_) => low = middle,
                None => high = middle,
            }
        }
        let largest = (low * CONTEXT_STEP).max(least);
        Ok(self.fitting(cache, largest, stream)?.map(|found| found.settings.context))
    }

    fn plan(&self, found: Found) -> Result<GenerationPlan, GenerationPlanError> {
        let Found { settings, residency } = found;
        let prompt = self.prompt(settings.context);
        let dry_run = DryRun::generation(self.spec, settings, self.storage(residency), prompt)?;
        Ok(GenerationPlan { settings, residency, dry_run })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_model::{Parameter, catalogue};

    fn request<'a>(spec: &'a ModelSpec, context: RangeInclusive<u64>, room: u64) -> GenerationRequest<'a> {
        GenerationRequest {
            spec,
            precision: Precision::F32,
            storage: WeightStorage::new(&|_| DType::F32),
            prompt_tokens: None,
            context,
            cache: None,
            room,
            in_files: None,
            enough_context: 1,
            pass_tokens: None,
        }
    }

    fn smollm2() -> ModelSpec {
        catalogue::find("smollm2-135m").unwrap()
    }

    #[test]
    fn a_small_cache_is_exact_and_a_large_one_f16() {
        let spec = smollm2();
        let cache = |context| {
            let plan = GenerationPlan::resolve(&request(&spec, context..=context, 4 << 30)).unwrap();
            assert_eq!(plan.settings.context, context);
            plan.settings.cache
        };
        assert_eq!((cache(64), cache(2048)), (DType::F32, DType::F16));
    }

    #[test]
    fn less_room_makes_passes_shorter_then_the_cache_and_then_the_context() {
        let spec = smollm2();
        let whole = GenerationPlan::resolve(&request(&spec, 2048..=2048, 4 << 30)).unwrap();
        let mut before = (whole.settings.prompt_chunk_tokens, whole.settings.cache);
        let mut seen = vec![before];
        let mut room = whole.dry_run.peak_bytes();
        let error = loop {
            room -= 1 << 20;
            match GenerationPlan::resolve(&request(&spec, 2048..=2048, room)) {
                Ok(plan) => {
                    assert!(plan.dry_run.peak_bytes() <= room);
                    let now = (plan.settings.prompt_chunk_tokens, plan.settings.cache);
                    if now != before {
                        seen.push(now);
                        before = now;
                    }
                }
                Err(error) => break error,
            }
        };
        assert_eq!(seen.first(), Some(&(256, DType::F16)));
        assert_eq!(seen.last(), Some(&(16, DType::Q8_0)));
        let GenerationPlanError::DoesNotFit(error) = error else { panic!("{error}") };
        assert_eq!((error.context, error.cache, error.room), (2048, DType::Q8_0, room));
        assert!(error.needed > room && error.weights < room);
        let contexts: Vec<u64> = error.possible.iter().map(|possible| possible.context).collect();
        assert!(contexts.is_sorted() && contexts.len() == 3 && contexts[2] > 2048, "{error}");
        // What is said to fit does, and no step more.
        for CacheContext { cache, context } in error.possible {
            let fits = |context| {
                let request =
                    GenerationRequest { cache: Some(cache), ..request(&spec, context..=context, room) };
                GenerationPlan::resolve(&request).is_ok()
            };
            assert!(fits(context) && !fits(context + CONTEXT_STEP), "{cache} {context}");
        }
        // Where less will do, the context is what gives way.
        let plan = GenerationPlan::resolve(&request(&spec, 1..=2048, room)).unwrap();
        assert!(plan.settings.context < 2048 && plan.settings.cache == DType::Q8_0);
    }

    #[test]
    fn a_model_that_does_not_fit_at_all_is_called_so() {
        let spec = smollm2();
        let error = GenerationPlan::resolve(&request(&spec, 1..=2048, 100 << 20)).unwrap_err().to_string();
        assert!(error.contains("no context fits") && error.contains("weights alone"), "{error}");
    }

    #[test]
    fn the_quick_peak_is_the_peak() {
        for name in ["smollm2-135m", "gemma-3-1b"] {
            let spec = catalogue::find(name).unwrap();
            for (prompt, context, chunk) in [(100, 128, 16), (64, 64, 64), (1, 1, 8), (1500, 1600, 512)] {
                let settings = DecodeSettings {
                    cache_tier: Tier::Device,
                    precision: Precision::F32,
                    cache: DType::F16,
                    context,
                    prompt_chunk_tokens: chunk,
                };
                let types = |_: &Parameter| DType::F32;
                let storage = WeightStorage::new(&types);
                let quick = DryRun::generation_footprint(&spec, settings, storage, prompt).unwrap();
                assert_eq!(
                    quick.peak_bytes,
                    DryRun::generation(&spec, settings, storage, prompt).unwrap().peak_bytes()
                );
            }
        }
    }
}
