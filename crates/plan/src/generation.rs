//! Planning generation: the cache's type, the context, the length of a pass and the weights that stay in memory, as
//! memory allows. Every answer, the advice included, is found by dry runs of the decoder.

use std::fmt;
use std::ops::RangeInclusive;

use plimsoll_device::{DType, DeviceTraits};
use plimsoll_memory::{ByteSize, Tag, Tier};
use plimsoll_model::{ModelSpec, StoredWeights};
use plimsoll_step::{DecodeSettings, Precision, Residency, StepError, WeightOffload, WeightStorage};

use crate::streaming::largest;
use crate::{DryRun, PassFootprint, expert_slots, fitting_residency, streaming_overhead_bytes};

/// Tokens of a pass over the prompt, the fastest first.
const CHUNKS: [u64; 3] = [256, 64, 16];

/// The same on a device that is faster than what weights come to it through.
const CHUNKS_APART: [u64; 4] = [512, 256, 64, 16];

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
    /// Sequences that are decoded beside each other, each of such a context.
    pub sequences: u64,
    /// Tokens that are verified with a sequence's next one.
    pub drafted_tokens: u64,
    /// The memory below a device that has its own; `None` where the device's memory is the host's.
    pub apart: Option<Apart>,
    /// Bytes of disk that weights and caches may take.
    pub disk_room: u64,
}

/// A device with memory of its own, and the host below it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apart {
    /// The device.
    pub device: DeviceTraits,
    /// Bytes of host memory.
    pub host_room: u64,
}

/// Where weights live that do not stay on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Below {
    /// The tier.
    pub tier: Tier,
    /// Layers of them that live on the host although the tier is the disk.
    pub host_layers: u32,
}

impl Below {
    /// All of them on a tier.
    pub fn on(tier: Tier) -> Below {
        Below { tier, host_layers: 0 }
    }
}

/// A context, a type of cache and a length of passes that fit.
#[derive(Clone, Debug)]
pub struct GenerationPlan {
    /// What to make the decoder with.
    pub settings: DecodeSettings,
    /// Which weights stay in memory, where not all fit.
    pub residency: Option<Residency>,
    /// Where the others live.
    pub below: Below,
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
    /// Whether as many weights as possible were left below the device for that.
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

impl DoesNotFit {
    /// Why no context fits, without a remedy; `None` where some does.
    pub fn hopeless(&self) -> Option<String> {
        self.possible.is_empty().then(|| {
            let what = match self.streamed {
                true => "those weights that are in memory at a time",
                false => "the weights alone",
            };
            format!("{}no context fits, for {what} take {}", self.needs(), ByteSize(self.weights))
        })
    }

    fn needs(&self) -> String {
        let DoesNotFit { context, cache, needed, room, .. } = *self;
        format!(
            "a context of {context} tokens with a cache in {} needs {} beside the program, and {} may be used; ",
            cache_name(cache),
            ByteSize(needed),
            ByteSize(room)
        )
    }
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DoesNotFit { needed, room, possible, .. } = self;
        if let Some(hopeless) = self.hopeless() {
            let higher = ByteSize(needed.saturating_sub(*room));
            return write!(
                f,
                "{hopeless}: a load line that is {higher} higher is needed, or a model of a smaller type or size"
            );
        }
        f.write_str(&self.needs())?;
        f.write_str("what fits: ")?;
        for (i, CacheContext { cache, context }) in possible.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}--context {context} --kv-cache {}", cache_name(*cache))?;
        }
        Ok(())
    }
}

/// What the command line calls a type of cache.
#[must_use]
pub fn cache_name(cache: DType) -> &'static str {
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
                    return Ok(request.plan(found)?);
                }
            }
            // Without a choice every context is enough.
            let from = if request.in_files.is_some() { from } else { least };
            if from < most
                && let Some(context) = request.largest_context(cache, from, most, stream)?
                && let Some(found) = request.fitting(cache, context, stream)?
            {
                return Ok(request.plan(found)?);
            }
            if request.in_files.is_none() {
                break;
            }
        }
        // Slower, and without loss: the cache waits below the device too.
        for tier in request.lower_tiers() {
            for cache in &caches {
                if let Some(found) = request.fitting_on(*cache, most, true, *tier)? {
                    return Ok(request.plan(found)?);
                }
            }
        }
        let mut possible = Vec::new();
        for cache in [DType::F16, DType::Q8_0, DType::Q4_1] {
            let context = match request.fits_below(cache, least)? {
                true => Some(least),
                false => {
                    let most = request.spec.max_position_embeddings.max(most);
                    request.largest_context(cache, 1, most, request.in_files.is_some())?
                }
            };
            possible.extend(context.map(|context| CacheContext { cache, context }));
        }
        let (needed, weights) = request.smallest(cache, least)?.map_or((0, 0), |plan| {
            let tags = plan.dry_run.tags_at_peak();
            (plan.dry_run.peak_bytes(), tags.get(Tag::Weights) + tags.get(Tag::Staging))
        });
        let streamed = request.in_files.is_some();
        // What reads them takes some memory beside them.
        let reading = if streamed { request.streaming_bytes() } else { 0 };
        let needed = needed.saturating_add(reading);
        let context = least;
        Err(Box::new(DoesNotFit { context, cache, needed, weights, streamed, room: request.room, possible })
            .into())
    }

    /// The same with as many sequences beside each other as fit, up to `most`: each says what this plan's only one says, for the
    /// cache's type and the length of passes stay. Sequences share pages where the cache is in memory, `pages` of them if that is
    /// said. There may be fewer than all would fill: half as many where `most` is a suggestion, as few as sequences can begin with
    /// where it is asked for.
    pub fn with_sequences(
        &self,
        request: &GenerationRequest<'_>,
        most: u64,
        asked: bool,
        pages: Option<u64>,
    ) -> Result<GenerationPlan, StepError> {
        let fitting = |sequences: u64| -> Result<Option<Found>, StepError> {
            let settings = request.paged(DecodeSettings { sequences, ..self.settings });
            let fitting = |pages: u64| -> Result<Option<Found>, StepError> {
                let pages = settings.pages.map(|_| pages);
                self.fitting_with(request, DecodeSettings { pages, ..settings })
            };
            let all = pages.unwrap_or(settings.pages.unwrap_or(0));
            if let Some(found) = fitting(all)? {
                return Ok(Some(found));
            }
            let least = settings.least_pages(request.spec).min(all);
            let low = if asked { least } else { least.max(all / 2) };
            match settings.pages.is_none() || pages.is_some() {
                true => Ok(None),
                false => largest(low..all, fitting),
            }
        };
        // As many as may be are there most often.
        if most < 2 {
            return Ok(self.clone());
        }
        let found = match fitting(most)? {
            Some(found) => Some(found),
            None => largest(2..most, fitting)?,
        };
        found.map_or_else(|| Ok(self.clone()), |found| request.plan(found))
    }

    /// Whether settings fit: with what this plan keeps in memory, or where it brings weights with as many as then can be.
    fn fitting_with(
        &self,
        request: &GenerationRequest<'_>,
        settings: DecodeSettings,
    ) -> Result<Option<Found>, StepError> {
        if self.residency.is_some() {
            let found = request.residency(settings)?;
            return Ok(found.map(|(residency, below)| Found { settings, residency: Some(residency), below }));
        }
        let footprint = request.footprint(settings, None, self.below)?;
        let fits = footprint.peak_bytes <= request.room && request.allows_below(&footprint);
        Ok(fits.then_some(Found { settings, residency: None, below: self.below }))
    }
}

/// Settings that fit, with what stays in memory for that.
struct Found {
    settings: DecodeSettings,
    residency: Option<Residency>,
    below: Below,
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
        // Whether sequences stand beside each other changes no type.
        let settings = DecodeSettings { sequences: 1, pages: None, ..self.settings(DType::F32, context, 1) };
        let dry_run = DryRun::generation(self.spec, settings, self.storage, 1)?;
        let small = dry_run.tags_at_peak().get(Tag::KvCache) <= SMALL_CACHE;
        let exact = small.then_some(DType::F32);
        Ok(exact.into_iter().chain([DType::F16, DType::Q8_0]).collect())
    }

    fn settings(&self, cache: DType, context: u64, chunk: u64) -> DecodeSettings {
        let settings = DecodeSettings {
            precision: self.precision,
            cache,
            cache_tier: Tier::Device,
            context,
            prompt_chunk_tokens: chunk,
            sequences: self.sequences,
            pages: None,
            drafted_tokens: self.drafted_tokens,
        };
        self.paged(settings)
    }

    /// The same with pages for all sequences, where they share any.
    fn paged(&self, settings: DecodeSettings) -> DecodeSettings {
        let shared = settings.sequences > 1 && settings.cache_tier == Tier::Device;
        DecodeSettings { pages: shared.then(|| settings.most_pages(self.spec)), ..settings }
    }

    fn prompt(&self, context: u64) -> u64 {
        self.prompt_tokens.unwrap_or(context)
    }

    fn device(&self) -> DeviceTraits {
        self.apart.map_or(DeviceTraits::CPU, |apart| apart.device)
    }

    /// Tokens of a pass, in the order in which they are tried.
    fn chunks(&self) -> impl Iterator<Item = u64> {
        let all = if self.apart.is_some() { &CHUNKS_APART[..] } else { &CHUNKS };
        all.iter().copied().filter(|chunk| self.pass_tokens.is_none_or(|said| said == *chunk))
    }

    /// The tiers that weights and caches may be brought from, the nearest first.
    fn lower_tiers(&self) -> &'static [Tier] {
        match (self.in_files, self.apart) {
            (None, _) => &[],
            (Some(_), Some(Apart { host_room: 1.., .. })) => &[Tier::Host, Tier::Disk],
            _ => &[Tier::Disk],
        }
    }

    /// Memory of the line that reading takes beside the arena: a device with memory of its own has none of it.
    fn streaming_bytes(&self) -> u64 {
        match self.apart {
            None => streaming_overhead_bytes(self.spec, self.storage),
            Some(_) => 0,
        }
    }

    /// The same storage with weights below the device, but for those that stay.
    pub(crate) fn storage_with(&self, residency: Option<Residency>, below: Below) -> WeightStorage<'_> {
        let Below { tier, host_layers } = below;
        let offload = residency.map(|residency| WeightOffload {
            tier,
            in_files: self.in_files,
            residency,
            host_layers,
        });
        WeightStorage { offload, ..self.storage }
    }

    /// The fastest form that fits the most context that is asked for: with all weights in memory, else with as many as can be, else with
    /// the cache below the device too.
    pub(crate) fn fitting_plan(&self) -> Result<Option<GenerationPlan>, StepError> {
        let most = *self.context.end();
        let caches = self.caches(most)?;
        let in_memory = [(false, Tier::Device), (true, Tier::Device)];
        let ways = in_memory.into_iter().chain(self.lower_tiers().iter().map(|tier| (true, *tier)));
        for (stream, tier) in ways.filter(|(stream, _)| !stream || self.in_files.is_some()) {
            for cache in &caches {
                if let Some(found) = self.fitting_on(*cache, most, stream, tier)? {
                    return Ok(Some(self.plan(found)?));
                }
            }
        }
        Ok(None)
    }

    /// Whether a context fits with its cache below the device.
    fn fits_below(&self, cache: DType, context: u64) -> Result<bool, StepError> {
        for tier in self.lower_tiers() {
            if self.fitting_on(cache, context, true, *tier)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether any form fits the most context that is asked for: that with the shortest passes and least on the device does, if any.
    pub(crate) fn fits(&self) -> Result<bool, StepError> {
        let most = *self.context.end();
        let Some(chunk) = self.chunks().last() else { return Ok(false) };
        // With the narrowest cache as far below as can be, a device has least.
        let (cache, tiers) = (self.narrowest_cache(most)?, self.lower_tiers());
        let lowest = Below::on(tiers.last().copied().unwrap_or(Tier::Disk));
        let heads: &[Option<bool>] =
            if self.in_files.is_some() { &[Some(false), Some(true), None] } else { &[None] };
        for cache_tier in tiers.iter().rev().copied().chain([Tier::Device]) {
            let settings = self.paged(DecodeSettings { cache_tier, ..self.settings(cache, most, chunk) });
            for head in heads {
                let residency = head.map(|head| self.least(head));
                let room = self.room.saturating_sub(residency.map_or(0, |_| self.streaming_bytes()));
                let found = self.footprint(settings, residency, lowest)?;
                if found.peak_bytes <= room && self.allows_below(&found) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// What keeps least on the device, with or without the head: no layer, and no more experts than a token goes to.
    fn least(&self, head: bool) -> Residency {
        let expert_slots = expert_slots::of_use(self.spec).map_or(0, |slots| *slots.start());
        Residency::Spread { layers: 0, head, expert_slots }
    }

    /// Whether the host and the disk have as much.
    fn allows_below(&self, found: &PassFootprint) -> bool {
        found.host_bytes <= self.apart.map_or(u64::MAX, |apart| apart.host_room)
            && found.disk_bytes <= self.disk_room
    }

    /// Whether weights and cache fit on the device as a whole.
    pub(crate) fn fits_on_device(&self) -> Result<bool, StepError> {
        let most = *self.context.end();
        for cache in self.caches(most)? {
            if self.fitting(cache, most, false)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The narrowest type of cache that is tried.
    pub(crate) fn narrowest_cache(&self, context: u64) -> Result<DType, StepError> {
        Ok(self.caches(context)?.last().copied().unwrap_or(DType::F32))
    }

    /// The form that takes least of the device, whether it fits or not: with as little there as can be, where weights can be brought.
    pub(crate) fn smallest(&self, cache: DType, context: u64) -> Result<Option<GenerationPlan>, StepError> {
        let settings = self.settings(cache, context, CHUNKS[CHUNKS.len() - 1]);
        let below = Below::on(Tier::Disk);
        let mut smallest: Option<GenerationPlan> = None;
        for cache_tier in self.lower_tiers().last().copied().into_iter().chain([Tier::Device]) {
            let settings = self.paged(DecodeSettings { cache_tier, pages: None, ..settings });
            for head in [true, false] {
                let residency = self.in_files.map(|_| self.least(head));
                let plan = self.plan(Found { settings, residency, below })?;
                if smallest.as_ref().is_none_or(|best| plan.dry_run.peak_bytes() < best.dry_run.peak_bytes())
                {
                    smallest = Some(plan);
                }
            }
        }
        Ok(smallest)
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
        for chunk in self.chunks() {
            let settings = self.paged(DecodeSettings { cache_tier, ..self.settings(cache, context, chunk) });
            if !stream {
                let below = Below::on(Tier::Disk);
                if self.footprint(settings, None, below)?.peak_bytes <= self.room {
                    return Ok(Some(Found { settings, residency: None, below }));
                }
            } else if let Some((residency, below)) = self.residency(settings)? {
                return Ok(Some(Found { settings, residency: Some(residency), below }));
            }
        }
        Ok(None)
    }

    fn footprint(
        &self,
        settings: DecodeSettings,
        residency: Option<Residency>,
        below: Below,
    ) -> Result<PassFootprint, StepError> {
        let (storage, prompt) = (self.storage_with(residency, below), self.prompt(settings.context));
        DryRun::generation_footprint(self.device(), self.spec, settings, storage, prompt)
    }

    /// What stays on the device where weights are brought, and where the others live: on the host as far as there is room, else where
    /// the files are.
    fn residency(&self, settings: DecodeSettings) -> Result<Option<(Residency, Below)>, StepError> {
        let room = self.room.saturating_sub(self.streaming_bytes());
        let most = |below: Below| {
            fitting_residency(self.spec, room, |residency| self.footprint(settings, Some(residency), below))
        };
        let goes_below = |residency, below| {
            Ok::<_, StepError>(self.allows_below(&self.footprint(settings, Some(residency), below)?))
        };
        let tiers = self.lower_tiers();
        if tiers.contains(&Tier::Host) {
            let below = Below::on(Tier::Host);
            if let Some(residency) = most(below)?
                && goes_below(residency, below)?
            {
                return Ok(Some((residency, below)));
            }
        }
        let Some(residency) = most(Below::on(Tier::Disk))? else { return Ok(None) };
        let with = |host_layers| Below { tier: Tier::Disk, host_layers };
        if !goes_below(residency, with(0))? {
            return Ok(None);
        }
        // `low` layers fit the host, `high` do not.
        let (mut low, mut high) = (0, self.spec.num_layers - residency.layers(self.spec.num_layers));
        while tiers.contains(&Tier::Host) && low + 1 < high {
            let middle = low.midpoint(high);
            match goes_below(residency, with(middle))? {
                true => low = middle,
                false => high = middle,
            }
        }
        Ok(Some((residency, with(low))))
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

    fn plan(&self, found: Found) -> Result<GenerationPlan, StepError> {
        let Found { settings, residency, below } = found;
        let (storage, prompt) = (self.storage_with(residency, below), self.prompt(settings.context));
        let dry_run = DryRun::generation_for(self.device(), self.spec, settings, storage, prompt)?;
        Ok(GenerationPlan { settings, residency, below, dry_run })
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
            sequences: 1,
            drafted_tokens: 0,
            apart: None,
            disk_room: u64::MAX,
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
                    sequences: 1,
                    pages: None,
                    drafted_tokens: 0,
                };
                let types = |_: &Parameter| DType::F32;
                let storage = WeightStorage::new(&types);
                let quick = DryRun::generation_footprint(DeviceTraits::CPU, &spec, settings, storage, prompt)
                    .unwrap();
                assert_eq!(
                    quick.peak_bytes,
                    DryRun::generation(&spec, settings, storage, prompt).unwrap().peak_bytes()
                );
            }
        }
    }
}
