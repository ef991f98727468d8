//! Where weights are while a step runs. The step gathers a block, uses it, and releases it; whether the block was
//! there all along or came from a file is the store's affair.

mod away;
mod counted_experts;
mod expert_slots;
mod expert_visit;
mod shared;
mod streamed;

use std::collections::BTreeMap;

use plimsoll_device::{DType, Device, DeviceError, DeviceExt, Elementwise, Magnitude, Rounding, Tensor};
use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_model::{
    Adapted, AdapterLayout, BlockId, LoraPart, ModelSpec, NormSpec, Parameter, Role, StoredWeights,
};

use crate::StepError;
use crate::adapter::{Dora, LowRank, ranks_of_experts};
use crate::head::{reshaped, rows};
use crate::linear::{Linear, Weight};
use crate::norm::Norm;
use crate::products::Products;
use crate::settings::stays;

pub use expert_slots::ExpertTraffic;
pub(crate) use expert_slots::ExpertWeights;
pub(crate) use expert_visit::ExpertVisit;
pub(crate) use shared::Sharing;
pub(crate) use streamed::{Training, WeightStore, experts_can_come};

/// The weights of one block, for as long as the step works on it.
#[derive(Clone, Debug)]
pub struct BlockWeights {
    block: BlockId,
    tensors: Vec<(Role, Tensor)>,
    /// Which weights have an adapter.
    adapters: Vec<AdapterUse>,
}

/// A weight's adapter: linears of one stored tensor share A.
#[derive(Clone, Copy, Debug)]
struct AdapterUse {
    of: Adapted,
    a: Role,
    scale: f32,
    dora: bool,
}

impl BlockWeights {
    /// Weights of a block, by role.
    pub fn new(block: BlockId, tensors: Vec<(Role, Tensor)>) -> BlockWeights {
        BlockWeights { block, tensors, adapters: Vec::new() }
    }

    /// The adapter of a weight, if it has one.
    pub(crate) fn adapter(&self, role: Role) -> Result<Option<LowRank<'_>>, StepError> {
        let Some(AdapterUse { of, a, scale, dora }) =
            self.adapters.iter().find(|used| used.of.role() == role).copied()
        else {
            return Ok(None);
        };
        let b_role = Role::Lora(LoraPart::B, of);
        let dora = if dora {
            let role = Role::Lora(LoraPart::Magnitude, of);
            let squares = self.find(Role::Lora(LoraPart::Squares, of));
            let offsets = self.find(Role::Lora(LoraPart::Offsets, of));
            Some(Dora { role, magnitude: self.get(role)?, squares, offsets })
        } else {
            None
        };
        let (a_role, a, b) = (a, self.get(a)?, self.get(b_role)?);
        Ok(Some(LowRank { block: self.block, a_role, a, b_role, b, offsets: None, scale, dora }))
    }

    /// Whether any of its adapters has lengths.
    fn has_lengths(&self) -> bool {
        self.adapters.iter().any(|used| used.dora)
    }

    /// Does once what adapters with lengths need of the weights, when all have their values.
    fn prepare(&self, device: &dyn Device, products: Option<&Products<'_>>) -> Result<(), StepError> {
        for used in self.adapters.iter().filter(|used| used.dora) {
            let weight = self.get(used.of.role())?;
            let Some(adapter) = self.adapter(used.of.role())? else { continue };
            let Some(dora) = adapter.dora else { continue };
            if let Some(squares) = dora.squares {
                adapter.squares_of(device, products, weight, squares)?;
                continue;
            }
            let outputs = weight.rows();
            let alloc = |name| device.alloc(DType::F32, &[1, outputs], Tag::Workspace, name);
            let (squares, copy) = (alloc("dora.squares")?, alloc("dora.magnitude")?);
            adapter.squares_of(device, products, weight, &squares)?;
            let lengths = adapter.lengths_of(device, products, &squares, weight)?;
            let out = reshaped(dora.magnitude, &[1, outputs])?;
            device.run(Elementwise::Cast { x: &out, out: &copy, rounding: Rounding::Nearest })?;
            device.run(Elementwise::Fill { out: &squares, value: 1.0 })?;
            device.run(Magnitude::ScaleColumns {
                x: &squares,
                factors: &copy,
                divisors: Some(&lengths),
                bias: None,
                offsets: None,
                out: &out,
                accumulate: false,
            })?;
        }
        Ok(())
    }

    /// Sets the lengths of rows to those that the weights have with their adapters: where DoRA begins.
    fn reset_magnitudes(
        &self,
        device: &dyn Device,
        products: Option<&Products<'_>>,
    ) -> Result<(), StepError> {
        for used in self.adapters.iter().filter(|used| used.dora) {
            let weight = self.get(used.of.role())?;
            let Some(adapter) = self.adapter(used.of.role())? else { continue };
            if let Some(Dora { magnitude: out, squares: Some(squares), .. }) = adapter.dora {
                let lengths = adapter.lengths_of(device, products, squares, weight)?;
                let x = &reshaped(&lengths, out.shape().dims())?;
                device.run(Elementwise::Cast { x, out, rounding: Rounding::Nearest })?;
            }
        }
        Ok(())
    }

    /// The block that they belong to.
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// One weight.
    pub fn get(&self, role: Role) -> Result<&Tensor, StepError> {
        self.find(role).ok_or(StepError::MissingWeight { block: self.block, role })
    }

    /// One weight, if the block has it.
    pub fn find(&self, role: Role) -> Option<&Tensor> {
        self.tensors.iter().find(|(r, _)| *r == role).map(|(_, tensor)| tensor)
    }

    pub(crate) fn linear(&self, weight: Role, bias: Option<Role>) -> Result<Linear<'_>, StepError> {
        self.linear_of(weight, bias, Weight::Here(self.get(weight)?))
    }

    /// A linear whose weight may be somewhere else than with the others.
    pub(crate) fn linear_of<'w>(
        &'w self,
        role: Role,
        bias: Option<Role>,
        weight: Weight<'w>,
    ) -> Result<Linear<'w>, StepError> {
        Ok(Linear {
            block: self.block,
            role,
            weight,
            bias: bias.and_then(|role| Some((role, self.find(role)?))),
            adapter: self.adapter(role)?,
            offsets: None,
        })
    }

    pub(crate) fn norm(
        &self,
        weight: Role,
        bias: Option<Role>,
        spec: &NormSpec,
    ) -> Result<Norm<'_>, StepError> {
        Ok(Norm {
            block: self.block,
            role: weight,
            weight: self.get(weight)?,
            bias: bias.and_then(|role| Some((role, self.find(role)?))),
            epsilon: spec.epsilon as f32,
            weight_offset: if spec.one_plus_weight { 1.0 } else { 0.0 },
        })
    }
}

/// How the weights of a model are held.
#[derive(Clone, Copy)]
pub struct WeightStorage<'a> {
    /// The type of each: one of blocks where nothing but products and the embedding read it.
    pub types: &'a dyn Fn(&Parameter) -> DType,
    /// Adapters beside them, in f32.
    pub adapters: Option<&'a AdapterLayout>,
    /// Whether weights or adapters change from step to step.
    pub trained: bool,
    /// Where the matrices live that are brought when they are needed; all are on the device where `None`.
    pub offload: Option<WeightOffload<'a>>,
}

/// Matrices of the layers and tables of the vocabulary that live below the device. Vectors and learned positions are small
/// and stay.
#[derive(Clone, Copy)]
pub struct WeightOffload<'a> {
    /// Where they live.
    pub tier: Tier,
    /// What files hold as it is computed with: on the disk tier, it is read from there. All else is written into a home of
    /// its own when the weights are loaded.
    pub in_files: Option<&'a StoredWeights>,
    /// What stays on the device all the same.
    pub residency: Residency,
    /// Of the layers that do not stay, so many, spread evenly, live on the host whatever the tier is, and the tables of the
    /// vocabulary with them.
    pub host_layers: u32,
}

impl WeightOffload<'_> {
    /// Where the matrices of a block live that do not stay.
    fn tier_of(&self, spec: &ModelSpec, block: BlockId) -> Tier {
        if self.host_layers == 0 {
            return self.tier;
        }
        let away = || spec.layers().filter(|layer| !self.residency.keeps(spec, BlockId::Layer(*layer)));
        let on_host = match block {
            BlockId::Layer(layer) => {
                let (all, i) = (away().count() as u64, away().filter(|other| *other < layer).count() as u64);
                is_one_of(i, u64::from(self.host_layers), all)
            }
            _ => true,
        };
        if on_host { Tier::Host } else { self.tier }
    }
}

/// Whether number `i` is one of so many that are spread evenly over `all`: where the line of slope chosen / all reaches a further
/// whole number.
fn is_one_of(i: u64, chosen: u64, all: u64) -> bool {
    let (chosen, all) = (chosen.min(all), all.max(1));
    (i + 1) * chosen / all > i * chosen / all
}

/// How much of a model stays on the device where not all of it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// So many layers, spread evenly, and the head's table, which a tied embedding is, or not: for passes that bring all
    /// others in turn.
    Spread {
        /// Layers.
        layers: u32,
        /// Whether the head's table stays.
        head: bool,
        /// Slots for experts, which then come by themselves when a token is sent to them, whatever else stays of their layers; with 0
        /// they come or stay with their layers. Of weights that nothing trains.
        expert_slots: u32,
    },
    /// So many layers, counted from the last one: the backward pass begins with them.
    Last {
        /// Layers.
        layers: u32,
        /// As in `Spread`; of experts that nothing trains.
        expert_slots: u32,
    },
}

impl Residency {
    /// Slots for experts that come by themselves.
    pub fn expert_slots(self) -> u32 {
        match self {
            Residency::Spread { expert_slots, .. } | Residency::Last { expert_slots, .. } => expert_slots,
        }
    }

    /// Layers that stay of `num_layers`.
    pub fn layers(self, num_layers: u32) -> u32 {
        let (Residency::Spread { layers, .. } | Residency::Last { layers, .. }) = self;
        layers.min(num_layers)
    }

    /// Whether the matrices of a block stay.
    pub fn keeps(self, spec: &ModelSpec, block: BlockId) -> bool {
        match (self, block) {
            (Residency::Spread { layers, .. }, BlockId::Layer(layer)) => {
                let i = spec.place_of(layer).unwrap_or(0);
                is_one_of(u64::from(i), u64::from(layers), u64::from(spec.num_layers))
            }
            (Residency::Spread { head, .. }, BlockId::Embedding) => head && spec.tie_word_embeddings,
            (Residency::Spread { head, .. }, BlockId::Head) => head,
            (Residency::Last { layers, .. }, block) => stays(block, layers, spec),
        }
    }
}

impl<'a> WeightStorage<'a> {
    /// Weights of these types, without adapters, on the device.
    pub fn new(types: &'a dyn Fn(&Parameter) -> DType) -> Self {
        WeightStorage { types, adapters: None, trained: false, offload: None }
    }
}

/// What the router of a layer has done in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertCounts {
    /// The layer.
    pub layer: u32,
    /// How often each expert was chosen.
    pub chosen: Vec<u32>,
    /// Of these choices, how many no expert took.
    pub dropped: u32,
}

/// The parts of [`Role::RouterLoad`]: how often each expert was chosen `[E, 1]`, and how much was dropped `[1, 1]`.
pub(crate) fn load_parts(load: &Tensor) -> Result<(Tensor, Tensor), StepError> {
    let experts = load.rows().saturating_sub(1);
    Ok((rows(load, 0, experts)?, rows(load, experts, experts + 1)?))
}

/// What a store has in the arena all the time.
#[derive(Debug)]
pub(crate) struct ResidentStore {
    blocks: BTreeMap<BlockId, BlockWeights>,
    /// The model's and the adapters'.
    parameters: Vec<Parameter>,
}

impl ResidentStore {
    /// Everything that it holds: the model's parameters, then those of adapters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Takes memory for those weights of the model that are resident, and for all of the adapters; their values are to be
    /// written by the caller.
    fn allocate(
        device: &dyn Device,
        spec: &ModelSpec,
        storage: WeightStorage<'_>,
        is_resident: &dyn Fn(&Parameter) -> bool,
    ) -> Result<Self, StepError> {
        spec.check()?;
        let WeightStorage { types, adapters, .. } = storage;
        let adapter_parameters = adapters.map(AdapterLayout::parameters).unwrap_or_default();
        let modules = adapters.map(AdapterLayout::modules).unwrap_or_default();
        let mut blocks = BTreeMap::new();
        for block in spec.blocks() {
            device.enter(Phase::Setup, block.layer());
            let mut tensors = spec
                .block_parameters(block)
                .into_iter()
                .filter(is_resident)
                .map(|p| Ok((p.role, device.alloc(types(&p), &p.shape, Tag::Weights, p.role.name())?)))
                .collect::<Result<Vec<_>, DeviceError>>()?;
            for p in adapter_parameters.iter().filter(|p| p.block == block) {
                let tensor = device.alloc(DType::F32, &p.shape, Tag::Adapters, p.role.name())?;
                tensors.push((p.role, tensor));
            }
            let experts = block.layer().and_then(|layer| spec.experts_of(layer));
            if let Some(experts) = experts.filter(|_| storage.trained) {
                let name = Role::RouterLoad.name();
                let load = device.alloc(DType::U32, &[experts.total() + 1, 1], Tag::Workspace, name)?;
                device.write(&load, &mut |bytes| bytes.fill(0))?;
                tensors.push((Role::RouterLoad, load));
            }
            let mut weights = BlockWeights::new(block, tensors);
            for module in modules.iter().filter(|module| module.block == block) {
                let Some(a) = module.a_role() else { continue };
                for of in &module.parts {
                    let dora = weights.find(Role::Lora(LoraPart::Magnitude, *of)).is_some();
                    weights.adapters.push(AdapterUse { of: *of, a, scale: module.scale, dora });
                    if dora && storage.trained {
                        let rows = weights.get(Role::Lora(LoraPart::Magnitude, *of))?.elements();
                        let squares = device.alloc(DType::F32, &[rows], Tag::Adapters, "dora.squares")?;
                        weights.tensors.push((Role::Lora(LoraPart::Squares, *of), squares));
                        if let [experts, rank, _] = *weights.get(a)?.shape().dims() {
                            let offsets = ranks_of_experts(device, experts, rank, Tag::Adapters)?;
                            weights.tensors.push((Role::Lora(LoraPart::Offsets, *of), offsets));
                        }
                    }
                }
            }
            blocks.insert(block, weights);
        }
        let base = spec.parameters().into_iter().filter(is_resident);
        let parameters = base.chain(adapter_parameters.iter().cloned()).collect();
        Ok(ResidentStore { blocks, parameters })
    }

    /// The layers whose experts are counted, with the counts.
    pub fn counted(&self) -> impl Iterator<Item = (u32, &Tensor)> {
        self.blocks.iter().filter_map(|(block, own)| Some((block.layer()?, own.find(Role::RouterLoad)?)))
    }

    /// Begins to count how often experts are chosen.
    pub fn forget_loads(&self, device: &dyn Device) -> Result<(), StepError> {
        self.counted().try_for_each(|(_, load)| Ok(device.write(load, &mut |bytes| bytes.fill(0))?))
    }

    /// How often each was chosen since.
    pub fn loads(&self, device: &dyn Device) -> Result<Vec<ExpertCounts>, StepError> {
        let of = |(layer, load)| {
            let mut chosen = device.read_u32(load)?;
            let dropped = chosen.pop().unwrap_or(0);
            Ok(ExpertCounts { layer, chosen, dropped })
        };
        self.counted().map(of).collect()
    }

    /// What it has of a block.
    pub fn gather(&self, block: BlockId) -> Result<BlockWeights, StepError> {
        let missing = StepError::MissingWeight { block, role: Role::TokenEmbedding };
        self.blocks.get(&block).cloned().ok_or(missing)
    }

    /// The tensor of a parameter.
    pub fn tensor(&self, parameter: &Parameter) -> Result<&Tensor, StepError> {
        let missing = StepError::MissingWeight { block: parameter.block, role: parameter.role };
        self.blocks.get(&parameter.block).ok_or(missing)?.get(parameter.role)
    }
}
