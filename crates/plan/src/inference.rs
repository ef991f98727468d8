//! Planning inference: what it takes to run a model for so many sequences of so many tokens, and how fast it goes. The decoder is run
//! dry; what does not fit on the device comes from the host or from the model's file, as it does when it generates.

mod changes;

use plimsoll_device::{DType, Transferred};
use plimsoll_memory::{Tag, Tier};
use plimsoll_model::{ModelSpec, Parameter, StoredWeight, StoredWeights, TypesByGroup};
use plimsoll_step::{Precision, Residency, Stage, StepError, WeightStorage};
use serde_json::{Value, json};

use crate::config::RawConfig;
use crate::dry_run::DryRun;
use crate::generation::{Apart, GenerationPlan, GenerationRequest};
use crate::limits::{Limits, load_line};
use crate::load_line::LoadLine;
use crate::method::quantized_as;
use crate::origin::ModelOrigin;
use crate::shortage::{Resource, Shortage};
use crate::training_plan::{Machine, tags_json};

pub use changes::InferenceChange;

/// Types of a cache, from the widest to the narrowest.
pub const CACHES: [DType; 5] = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Q4_1];

/// What is to be run, and where.
#[derive(Clone, Copy)]
pub struct InferenceQuestion<'a> {
    /// The model. One that is known by its dimensions alone is taken for a file of bf16 matrices, or of quantised ones.
    pub origin: &'a ModelOrigin,
    /// Whose budgets count.
    pub config: &'a RawConfig,
    /// The machine.
    pub machine: &'a Machine,
    /// Devices that have the layers, one run of them after the other.
    pub ranks: u32,
    /// Storage types.
    pub precision: Precision,
    /// What linears are quantised to, where anything is said.
    pub quantize: TypesByGroup,
    /// The type of the cache, where it is said.
    pub cache: Option<DType>,
    /// Tokens of a sequence, prompt and answer.
    pub context: u64,
    /// Sequences beside each other.
    pub sequences: u64,
}

/// What a device has and does.
#[derive(Clone, Debug)]
pub struct InferenceStage {
    /// Its layers.
    pub spec: ModelSpec,
    /// What is where, and its memory.
    pub generation: GenerationPlan,
    /// A prompt as long as the context but for a token, in one sequence.
    pub prompt: DryRun,
    /// The token after that, in every sequence.
    pub token: DryRun,
}

/// A plan of inference.
#[derive(Clone, Debug)]
pub struct InferencePlan {
    /// The model.
    pub spec: ModelSpec,
    /// What each device does.
    pub stages: Vec<InferenceStage>,
    /// Tokens of the prompt whose time is planned.
    pub prompt_tokens: u64,
    /// What a device's arena and the overhead may take.
    pub load_line: LoadLine,
    /// What lies outside the arena, in bytes.
    pub overhead_bytes: u64,
    /// What the plan must keep to.
    pub limits: Limits,
    /// Bytes of all weights as they are computed with.
    pub weight_bytes: u64,
    /// The types of the linears' weights.
    pub weight_types: Vec<DType>,
    /// What there is too little of; nothing where it fits.
    pub shortages: Vec<Shortage>,
    /// What else would fit, or would fit on the device; each was planned.
    pub changes: Vec<InferenceChange>,
}

/// The narrowest of these types of a cache.
fn narrowest(caches: impl IntoIterator<Item = DType>) -> Option<DType> {
    caches.into_iter().max_by_key(|dtype| CACHES.iter().position(|known| known == dtype))
}

/// A file as a catalogue's model would have it: its matrices in these types, one behind the other.
fn imagined_file(spec: &ModelSpec, types: &dyn Fn(&Parameter) -> DType) -> StoredWeights {
    let mut end = 0;
    let place = |p: Parameter| {
        let dtype = types(&p);
        let start = end;
        end += dtype.bytes_for(p.elements()).unwrap_or(0);
        ((p.block, p.role), StoredWeight { path: "model".into(), bytes: start..end, dtype })
    };
    spec.parameters().into_iter().map(place).collect()
}

impl InferenceQuestion<'_> {
    /// The plan, with what else would fit where it does not, or not all on the device.
    ///
    /// # Errors
    /// The model cannot be run so.
    pub fn plan(&self) -> Result<InferencePlan, StepError> {
        let settled = self.settled()?;
        let plan = settled.answer()?;
        let changes = changes::of(self, &settled, &plan)?;
        Ok(InferencePlan { changes, ..plan })
    }

    /// The same without what else would fit.
    fn answer(&self) -> Result<InferencePlan, StepError> {
        let spec = self.origin.spec();
        let (limits, line) = (Limits::of(self.config, self.machine), load_line(self.config, self.machine));
        let mut shortages = Vec::new();
        let mut stages = self.stages(None, &mut shortages)?;
        if let [_, _, ..] = stages[..] {
            // All have passes of as many tokens, and caches of one type.
            let settings = || stages.iter().map(|stage| stage.generation.settings);
            let tokens = settings().map(|own| own.prompt_chunk_tokens).min().unwrap_or(1);
            let cache = narrowest(settings().map(|own| own.cache));
            shortages.clear();
            stages = self.stages(cache.map(|cache| (tokens, cache)), &mut shortages)?;
        }
        let disk: u64 = stages.iter().map(|stage| stage.generation.dry_run.disk_bytes()).max().unwrap_or(0);
        if disk > limits.disk_bytes {
            let (resource, needed_bytes, allowed_bytes) = (Resource::Disk, disk, limits.disk_bytes);
            shortages.push(Shortage { resource, needed_bytes, allowed_bytes });
        }
        let mut weight_types: Vec<DType> = Vec::new();
        for p in spec.parameters().iter().filter(|p| p.role.is_block_matrix()) {
            let dtype = self.type_of(p);
            if !weight_types.contains(&dtype) {
                weight_types.push(dtype);
            }
        }
        let bytes = |p: &Parameter| self.type_of(p).bytes_for(p.elements()).unwrap_or(0);
        Ok(InferencePlan {
            spec: spec.clone(),
            stages,
            prompt_tokens: self.prompt_tokens(),
            load_line: line,
            overhead_bytes: self.machine.overhead_bytes,
            limits,
            weight_bytes: spec.parameters().iter().map(bytes).sum(),
            weight_types,
            shortages,
            changes: Vec::new(),
        })
    }

    /// The same with the cache that one sequence has: `generate` has that type however many are answered at once, so that their number
    /// changes no token.
    fn settled(&self) -> Result<Self, StepError> {
        if self.sequences < 2 || self.cache.is_some() {
            return Ok(*self);
        }
        let one = InferenceQuestion { sequences: 1, ..*self };
        let cache_of = |rank| {
            let cache = |request: &GenerationRequest<'_>| {
                planned(request, self.context).map(|(plan, _)| plan.settings.cache)
            };
            one.with_request(&self.part(rank), None, cache)
        };
        let caches: Vec<DType> = (0..self.ranks.max(1)).map(cache_of).collect::<Result<_, _>>()?;
        Ok(InferenceQuestion { cache: narrowest(caches), ..*self })
    }

    /// A prompt that leaves room for a token.
    fn prompt_tokens(&self) -> u64 {
        self.context.saturating_sub(1).max(1)
    }

    /// The type in which a weight is kept: as `generate` keeps it.
    fn type_of(&self, p: &Parameter) -> DType {
        let (p, widest) = (&self.origin.spec().original(p), self.precision.weights);
        let quantized = self.quantize.of(p).and_then(|dtype| quantized_as(p, dtype));
        quantized.unwrap_or_else(|| match self.origin.weights() {
            Some(stored) => stored.inference_dtype(p, widest),
            // As models are published.
            None if p.shape.len() >= 2 => DType::Bf16,
            None => widest,
        })
    }

    /// Each device's part, planned; what one of them has too little of is added to the shortages. `decided` says the tokens of a pass
    /// and the type of the cache.
    fn stages(
        &self,
        decided: Option<(u64, DType)>,
        shortages: &mut Vec<Shortage>,
    ) -> Result<Vec<InferenceStage>, StepError> {
        let mut stages = Vec::new();
        for rank in 0..self.ranks.max(1) {
            let spec = self.part(rank);
            let stage = self.with_request(&spec, decided, |request| {
                let (generation, short) = planned(request, self.context)?;
                let (storage, rates) =
                    (request.storage_with(generation.residency, generation.below), &self.machine.rates);
                let settings = generation.settings;
                let [prompt, token] =
                    DryRun::timed_generation(rates, &spec, settings, storage, self.prompt_tokens())?;
                Ok((InferenceStage { spec: spec.clone(), generation, prompt, token }, short))
            })?;
            stages.push(stage.0);
            // The largest counts.
            match (shortages.first_mut(), stage.1) {
                (Some(known), Some(own)) if own.bytes() > known.bytes() => *known = own,
                (None, Some(own)) => shortages.push(own),
                _ => {}
            }
        }
        Ok(stages)
    }

    fn part(&self, rank: u32) -> ModelSpec {
        let spec = self.origin.spec();
        if self.ranks > 1 { Stage::part(spec, rank, self.ranks) } else { spec.clone() }
    }

    /// What is asked of a device's decoder.
    fn with_request<T>(
        &self,
        spec: &ModelSpec,
        decided: Option<(u64, DType)>,
        then: impl FnOnce(&GenerationRequest<'_>) -> Result<T, StepError>,
    ) -> Result<T, StepError> {
        let types = |p: &Parameter| self.type_of(p);
        let in_files = match self.origin.weights() {
            None => imagined_file(spec, &types),
            Some(stored) => {
                let whole = self.origin.spec().parameters().into_iter();
                let place = |p: Parameter| Some(((p.block, p.role), stored.stored_as(&p, self.type_of(&p))?));
                whole.filter_map(place).collect()
            }
        };
        let limits = Limits::of(self.config, self.machine);
        let device = self.machine.rates.wiring.device;
        let apart = (!device.unified).then(|| Apart { device, host_room: limits.host_bytes.unwrap_or(0) });
        then(&GenerationRequest {
            spec,
            precision: self.precision,
            storage: WeightStorage::new(&types),
            prompt_tokens: Some(self.prompt_tokens()),
            context: self.context..=self.context,
            cache: decided.map_or(self.cache, |(_, cache)| Some(cache)),
            room: limits.room_bytes,
            in_files: Some(&in_files),
            enough_context: self.context,
            pass_tokens: decided.map(|(tokens, _)| tokens),
            sequences: self.sequences,
            drafted_tokens: 0,
            apart,
            disk_room: limits.disk_bytes,
        })
    }
}

/// What fits; or the form that takes least, and what that is short of.
fn planned(
    request: &GenerationRequest<'_>,
    context: u64,
) -> Result<(GenerationPlan, Option<Shortage>), StepError> {
    // Where not even the least form fits, no other has to be tried.
    if request.fits()?
        && let Some(plan) = request.fitting_plan()?
    {
        return Ok((plan, None));
    }
    let plan = request.smallest(request.narrowest_cache(context)?, context)?;
    let plan = plan.ok_or(StepError::Invariant { what: "there is no smallest form of a decoder" })?;
    let (needed, room) = (plan.dry_run.peak_bytes(), request.room);
    let (host, host_room) =
        (plan.dry_run.host_bytes(), request.apart.map_or(u64::MAX, |apart| apart.host_room));
    let short = match needed > room {
        true => Shortage { resource: Resource::Memory, needed_bytes: needed, allowed_bytes: room },
        false => Shortage { resource: Resource::Host, needed_bytes: host, allowed_bytes: host_room },
    };
    Ok((plan, Some(short)))
}

/// Where the layers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerPlaces {
    /// On the device.
    pub device: u32,
    /// On the host.
    pub host: u32,
    /// In the model's file, or in a file of ours.
    pub disk: u32,
}

impl InferenceStage {
    /// Slots for experts that come when a token is sent to them; 0 where they are where their layers are.
    pub fn expert_slots(&self) -> u32 {
        self.generation.residency.map_or(0, Residency::expert_slots)
    }

    /// Where its layers are.
    pub fn layers(&self) -> LayerPlaces {
        let (all, plan) = (self.spec.num_layers, &self.generation);
        let device = plan.residency.map_or(all, |residency: Residency| residency.layers(all));
        let away = all - device;
        let host = if plan.below.tier == Tier::Host { away } else { plan.below.host_layers.min(away) };
        LayerPlaces { device, host, disk: away - host }
    }
}

impl InferencePlan {
    /// Whether there is enough of everything.
    pub fn fits(&self) -> bool {
        self.shortages.is_empty()
    }

    /// The device that takes most.
    pub fn largest(&self) -> Option<&InferenceStage> {
        self.stages.iter().rev().max_by_key(|stage| stage.generation.dry_run.peak_bytes())
    }

    /// The type of the caches.
    pub fn cache(&self) -> Option<DType> {
        self.stages.first().map(|stage| stage.generation.settings.cache)
    }

    /// Whether all weights and the cache are on the device.
    pub fn is_all_on_device(&self) -> bool {
        self.stages.iter().all(|stage| {
            stage.generation.residency.is_none() && stage.generation.settings.cache_tier == Tier::Device
        })
    }

    /// Where the layers of all devices are.
    pub fn layers(&self) -> LayerPlaces {
        self.stages.iter().map(InferenceStage::layers).fold(LayerPlaces::default(), |all, own| LayerPlaces {
            device: all.device + own.device,
            host: all.host + own.host,
            disk: all.disk + own.disk,
        })
    }

    fn seconds(&self, of: impl Fn(&InferenceStage) -> &DryRun) -> f64 {
        self.stages.iter().map(|stage| of(stage).times.unwrap_or_default().elapsed).sum()
    }

    /// Seconds of the prompt: one device after the other.
    pub fn prompt_seconds(&self) -> f64 {
        self.seconds(|stage| &stage.prompt)
    }

    /// Seconds of a token in every sequence.
    pub fn token_seconds(&self) -> f64 {
        self.seconds(|stage| &stage.token)
    }

    /// Tokens a second of all sequences together.
    pub fn tokens_per_second(&self) -> f64 {
        let sequences = self.stages.first().map_or(1, |stage| stage.generation.settings.sequences);
        sequences as f64 / self.token_seconds().max(f64::MIN_POSITIVE)
    }

    /// Tokens of the prompt a second.
    pub fn prompt_tokens_per_second(&self) -> f64 {
        self.prompt_tokens as f64 / self.prompt_seconds().max(f64::MIN_POSITIVE)
    }

    /// What a token in every sequence moves between the tiers.
    pub fn moved_per_token(&self) -> Transferred {
        self.stages.iter().fold(Transferred::default(), |all, stage| all.plus(stage.token.moved))
    }

    /// For machines.
    pub fn to_json(&self) -> Value {
        let Some(largest) = self.largest() else { return Value::Null };
        let (settings, run) = (largest.generation.settings, &largest.generation.dry_run);
        let (moved, layers) = (self.moved_per_token(), self.layers());
        let pass = |run: &DryRun, seconds: f64| {
            json!({
                "seconds": seconds,
                "waiting_seconds": run.times.unwrap_or_default().waited,
                "peak_bytes": run.peak_bytes(),
                "at_peak": tags_json(&run.tags_at_peak(), run.at_peak().gaps()),
            })
        };
        json!({
            "model": {
                "name": self.spec.name,
                "architecture": self.spec.architecture,
                "parameters": self.spec.parameter_count(),
                "active_parameters": self.spec.experts.as_ref().map(|_| self.spec.active_parameter_count()),
                "weight_bytes": self.weight_bytes,
            },
            "inference": {
                "context": settings.context,
                "parallel": settings.sequences,
                "kv_cache_pages": settings.pages,
                "page_tokens": settings.pages.map(|_| settings.page_tokens(&largest.spec)),
                "weights": self.weight_types.iter().map(|dtype| dtype.name()).collect::<Vec<_>>(),
                "activations": settings.precision.activations.name(),
                "kv_cache": settings.cache.name(),
                "kv_cache_bytes": self.cache_bytes(),
                "kv_cache_tier": tier_name(settings.cache_tier),
                "pass_tokens": settings.prompt_chunk_tokens,
                "devices": self.stages.len(),
                "layers": { "device": layers.device, "host": layers.host, "disk": layers.disk },
                "expert_slots": self.stages.iter().map(InferenceStage::expert_slots).sum::<u32>(),
            },
            "fits": self.fits(),
            "memory": {
                "device": {
                    "budget_bytes": self.load_line.bytes,
                    "limited_by": self.load_line.by,
                    "peak_bytes": run.peak_bytes(),
                    "overhead_bytes": self.overhead_bytes,
                    "at_peak": tags_json(&run.tags_at_peak(), run.at_peak().gaps()),
                },
                "host": {
                    "budget_bytes": self.limits.host_bytes,
                    "peak_bytes": run.host_bytes(),
                    "at_peak": tags_json(&run.host.at_peak().by_tag, run.host.at_peak().gaps()),
                },
                "disk": {
                    "peak_bytes": run.disk_bytes(),
                    "at_peak": tags_json(&run.disk.at_peak().by_tag, run.disk.at_peak().gaps()),
                },
            },
            "time": {
                "tokens_per_second": self.tokens_per_second(),
                "prompt_tokens_per_second": self.prompt_tokens_per_second(),
                "prompt_tokens": self.prompt_tokens,
                "bytes_per_token": { "from_host": moved.copied_in.saturating_sub(moved.read), "from_disk": moved.read },
                "prompt": pass(&largest.prompt, self.prompt_seconds()),
                "token": pass(&largest.token, self.token_seconds()),
            },
            "shortages": self.shortages,
            "changes": self.changes,
        })
    }

    /// Bytes of the key-value caches of all sequences and layers, wherever they live.
    pub fn cache_bytes(&self) -> u64 {
        let of = |stage: &InferenceStage| {
            let DryRun { ledger, host, disk, .. } = &stage.generation.dry_run;
            [ledger, host, disk].map(|ledger| ledger.most(Tag::KvCache)).iter().sum::<u64>()
        };
        self.stages.iter().map(of).sum()
    }
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
    }
}
