//! A model of fewer layers that stands for one of many: of layers that are alike in a row, the first few and the last few stay.
//! What a step does to the layers between them is what it does to the last of the first ones.

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::DType;
use plimsoll_memory::Tier;
use plimsoll_model::{BlockId, LayerKind, ModelSpec, Role};
use plimsoll_step::{
    Adapters, Checkpointing, KeptLayers, LayerPolicy, Offload, SavePolicy, Stage, StepSettings,
    TrainingMethod, ZeroStage,
};

/// Layers of a pattern that repeats, at most: Gemma 3 has one with full attention behind every five with a window.
const LONGEST_PATTERN: usize = 8;

/// A smaller model is worth it that lacks one of so many layers.
const WORTH: usize = 6;

/// Inputs of segments that are on their way out of the device at once.
const LEAVING: usize = 2;

/// The smaller model, its step, and what is missing.
pub(super) struct Fold {
    pub spec: ModelSpec,
    pub settings: StepSettings,
    /// The layers of the whole model that are there, in order.
    pub layers: Vec<u32>,
    /// The smaller model's layers by what repeats together: one layer, or a pattern of several.
    pub units: Vec<Range<u32>>,
    pub gaps: Vec<Gap>,
}

/// Units that are not there.
pub(super) struct Gap {
    /// The unit before them, which they are like.
    pub unit: usize,
    /// How many they are.
    pub times: usize,
}

/// What distinguishes a layer from others, for memory and costs.
#[derive(PartialEq)]
struct Layer {
    kind: LayerKind,
    saved: LayerPolicy,
    /// Whether its parameters, gradients, states and activations stay on the device.
    stays: [bool; 4],
    /// Adapters and what is trained beside them, by shape.
    trained: Vec<(Role, Vec<u64>)>,
    /// Weights of types of their own.
    types: Vec<(Role, DType)>,
}

impl Fold {
    /// The smallest that is known to do; `None` where that is the model itself.
    pub fn of(spec: &ModelSpec, settings: &StepSettings) -> Option<Fold> {
        // Files hold some layers in more pages than others.
        let from_files = |adapters: &Adapters| !adapters.in_files.is_empty();
        if settings.offload.parameters == Tier::Disk && settings.method.adapters().is_some_and(from_files) {
            return None;
        }
        // Slots for more than the experts of a layer hold those of layers that are not its neighbours.
        if spec.experts.as_ref().is_some_and(|experts| u64::from(settings.expert_slots) > experts.count) {
            return None;
        }
        // Whole matrices are dealt out: layers differ.
        if settings.sharers() > 1 && !settings.optimizer.kind.shares_rows() {
            return None;
        }
        // The layers of a stage are numbered anew.
        let all: Vec<u32> = spec.layers().collect();
        let spec = &spec.of_layers(&all);
        let settings = &StepSettings { method: method_of(settings, &all), ..settings.clone() };
        let policy = SavePolicy::new(settings.checkpointing, settings.compression, spec.num_layers);
        let policy = policy.numbered(spec.runs());
        let segment = policy.segments().map(|segment| segment.len()).max()?;
        let alike = layers(spec, settings, &policy);
        let reach = Reach::of(settings, segment);
        let (mut kept, mut units, mut gaps) = (Vec::new(), Vec::new(), Vec::new());
        let mut keep = |layers: Range<usize>| {
            let place = kept.len() as u32;
            units.push(place..place + layers.len() as u32);
            kept.extend(layers.map(|layer| layer as u32));
            units.len() - 1
        };
        // Layers of several runs do not follow each other.
        for run in spec.runs() {
            let (begin, end) = (run.start as usize, run.end as usize);
            let alike = alike.get(begin..end)?;
            let mut next = begin;
            while next < end {
                let Some((pattern, missing)) = repeated(alike, next - begin, &reach) else {
                    keep(next..next + 1);
                    next += 1;
                    continue;
                };
                let (before, after) = reach.stay(pattern);
                let mut several = |first: usize, times| {
                    let patterns = (first..).step_by(pattern).take(times);
                    patterns.map(|first| keep(first..first + pattern)).last()
                };
                let unit = several(next, before)?;
                next += (before + missing) * pattern;
                several(next, after)?;
                next += after * pattern;
                gaps.push(Gap { unit, times: missing });
            }
        }
        // To find what a step does and to count it takes about as long as a few layers more.
        let missing = all.len() - kept.len();
        (missing * WORTH >= all.len() && missing > 0).then(|| {
            let settings = smaller(spec, settings, segment as u32, &kept);
            let of_model = kept.iter().filter_map(|layer| all.get(*layer as usize).copied()).collect();
            Fold { spec: spec.of_layers(&kept), settings, layers: of_model, units, gaps }
        })
    }

    /// Parts of other stages.
    pub fn parts_elsewhere(&self) -> u64 {
        self.settings.stage.as_ref().map_or(0, Stage::parts_elsewhere)
    }

    /// Parts that are measured and updated by themselves, of the layers that are missing.
    pub fn missing_parts(&self) -> u64 {
        let mut trained = self.settings.method.trained(&self.spec);
        if let Some(stage) = &self.settings.stage {
            trained.retain(|p| stage.counts(p));
        }
        let of = |gap: &Gap| {
            let layers = self.units.get(gap.unit).cloned().unwrap_or_default();
            let own = |block| matches!(block, BlockId::Layer(layer) if layers.contains(&layer));
            trained.iter().filter(|p| own(p.block)).count() as u64 * gap.times as u64
        };
        self.gaps.iter().map(of).sum()
    }
}

/// Layers ahead of the one in use that anything is done for: buffers are few, and what is prefetched goes into them. What ranks
/// exchange behind the computation is that of a layer more, and of two where gathered weights come ahead of it.
fn ahead(settings: &StepSettings) -> usize {
    let Offload { gradients, activations, .. } = settings.offload;
    let further = match settings.overlap_communication && settings.can_overlap() {
        false => 0,
        true => 1 + usize::from(settings.sharding.stage == ZeroStage::Weights),
    };
    let below = match (gradients, activations) {
        _ if settings.offload.is_none() => 1,
        (Tier::Device, Tier::Device) => 2,
        _ => 3,
    };
    below + further
}

/// How far a layer's own work reaches.
struct Reach {
    /// Layers of a segment.
    segment: usize,
    /// Layers ahead of the one in use that anything is done for.
    ahead: usize,
    /// Whether the inputs of segments leave the device.
    leaves: bool,
}

impl Reach {
    fn of(settings: &StepSettings, segment: usize) -> Reach {
        let leaves = segment > 1 && settings.offload.activations != Tier::Device;
        Reach { segment, ahead: ahead(settings), leaves }
    }

    /// Layers after which what is used in turn stands as before, where that shows: the inputs of segments that leave the device.
    fn round(&self) -> usize {
        if self.leaves { LEAVING } else { 1 }
    }

    /// Patterns that stay at the beginning and at the end of layers in a row. Two before a gap and one behind it must do what those
    /// between them do: neither the first nor the last, and nobody ahead of whom is beyond these.
    fn stay(&self, pattern: usize) -> (usize, usize) {
        let ahead = if self.leaves { LEAVING } else { self.ahead.div_ceil(pattern) };
        (2 + ahead, 1 + ahead)
    }
}

/// The length of the pattern that layers from `first` on repeat, and how many of the patterns need not be there, so that the
/// most layers go. Layers that are checkpointed in segments go by whole segments, and all go by whole rounds.
fn repeated(alike: &[Layer], first: usize, reach: &Reach) -> Option<(usize, usize)> {
    let segment = reach.segment;
    let patterns = if segment > 1 { segment..=segment } else { 1..=LONGEST_PATTERN };
    if !first.is_multiple_of(segment) {
        return None;
    }
    let missing = |pattern: usize| {
        let later = alike.iter().skip(first + pattern);
        let same = alike.iter().skip(first).zip(later).take_while(|(one, other)| one == other).count();
        let (before, after) = reach.stay(pattern);
        let most = ((same + pattern) / pattern).checked_sub(before + after)?;
        let together = (1..).find(|patterns| (patterns * pattern).is_multiple_of(reach.round()))?;
        Some((pattern, most / together * together)).filter(|(_, missing)| *missing > 0)
    };
    // Of those that leave out as many, the shortest.
    patterns.rev().filter_map(missing).max_by_key(|(pattern, missing)| pattern * missing)
}

/// Whether a layer is among the last `kept`.
fn stays(spec: &ModelSpec, layer: u32, kept: u32) -> bool {
    layer >= spec.num_layers.saturating_sub(kept)
}

fn layers(spec: &ModelSpec, settings: &StepSettings, policy: &SavePolicy) -> Vec<Layer> {
    let KeptLayers { parameters, gradients, optimizer, activations } = settings.kept_layers;
    let kept = [parameters, gradients, optimizer, activations];
    let kind = |layer| {
        let kind = spec.layer_kind(layer);
        // A window that reaches over all positions is none.
        LayerKind { window: kind.window.filter(|window| *window < settings.sequence_length), ..kind }
    };
    let mut all: Vec<Layer> = (0..spec.num_layers)
        .map(|layer| Layer {
            kind: kind(layer),
            saved: policy.layer(layer),
            stays: kept.map(|kept| stays(spec, layer, kept)),
            trained: Vec::new(),
            types: Vec::new(),
        })
        .collect();
    let Some(adapters) = settings.method.adapters() else { return all };
    let layer_of = |block| if let BlockId::Layer(layer) = block { Some(layer as usize) } else { None };
    for p in adapters.layout.trained() {
        if let Some(own) = layer_of(p.block).and_then(|layer| all.get_mut(layer)) {
            own.trained.push((p.role, p.shape.clone()));
        }
    }
    let types = spec.parameters().into_iter().filter_map(|p| {
        let dtype = adapters.weight_types.get(&(p.block, p.role))?;
        Some((layer_of(p.block)?, (p.role, *dtype)))
    });
    for (layer, own_type) in types {
        if let Some(own) = all.get_mut(layer) {
            own.types.push(own_type);
        }
    }
    all
}

/// The settings for no more than some of the layers, which say the same of each.
fn smaller(spec: &ModelSpec, settings: &StepSettings, segment: u32, layers: &[u32]) -> StepSettings {
    let kept = |kept: u32| layers.iter().filter(|layer| stays(spec, **layer, kept)).count() as u32;
    let KeptLayers { parameters, gradients, optimizer, activations } = settings.kept_layers;
    let among = |first: u32| layers.iter().filter(|layer| **layer < first).count() as u32;
    let checkpointing = match settings.checkpointing {
        Checkpointing::Every(_) | Checkpointing::Sqrt => Checkpointing::Every(segment),
        Checkpointing::Ratio(share) => {
            let first = (f64::from(spec.num_layers) * share.clamp(0.0, 1.0)).round() as u32;
            Checkpointing::Ratio(f64::from(among(first)) / layers.len().max(1) as f64)
        }
        Checkpointing::Mixed { layers: first, first: before, others } => {
            Checkpointing::Mixed { layers: among(first), first: before, others }
        }
        form @ (Checkpointing::None | Checkpointing::Full | Checkpointing::Selective(_)) => form,
    };
    StepSettings {
        checkpointing,
        method: method_of(settings, layers),
        kept_layers: KeptLayers {
            parameters: kept(parameters),
            gradients: kept(gradients),
            optimizer: kept(optimizer),
            activations: kept(activations),
        },
        ..settings.clone()
    }
}

/// What is trained of no more than some of the layers, numbered anew.
fn method_of(settings: &StepSettings, layers: &[u32]) -> TrainingMethod {
    let Some(adapters) = settings.method.adapters() else { return TrainingMethod::Full };
    let types = adapters.weight_types.iter();
    let types = types.filter_map(|((block, role), dtype)| Some(((block.among(layers)?, *role), *dtype)));
    TrainingMethod::Adapters(Arc::new(Adapters {
        layout: adapters.layout.of_layers(layers),
        dropout: adapters.dropout,
        weight_types: types.collect(),
        in_files: Default::default(),
    }))
}
