//! What a search may decide, as data: each axis with its values, each value with the least quality class that allows it and, where
//! that is not `lossless`, the source of the claim.

use plimsoll_device::DType;
use plimsoll_memory::Tier;
use plimsoll_step::{AttentionKind, Checkpointing, Compression, Group, Groups};

use crate::config::{
    ActivationCompression, Attention, Auto, GradientCheckpointing, GradientDtype, InBackwardClipping,
    MasterWeights, MixedPrecision, OffloadTarget, Optimizer, ParallelConfig, Quality, Quantization,
    RawConfig,
};
use crate::offload::TensorKind;

/// Something that a search decides.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Setting {
    /// How ranks divide the work.
    Division(Box<ParallelConfig>),
    /// Types of weights, their masters, and gradients.
    Precision(MixedPrecision, MasterWeights, GradientDtype),
    /// How frozen weights are stored.
    Storage(Quantization),
    /// Sequences of a micro-batch, and micro-batches.
    Batch(u64, u64),
    /// The optimizer.
    Optimizer(Optimizer),
    /// When layers are updated: behind the backward pass, or in it, clipped by a norm from there.
    Update(Option<InBackwardClipping>),
    /// What the backward pass computes again.
    Checkpointing(Checkpointing),
    /// How saved activations are compressed.
    Compression(Compression),
    /// How tokens attend to each other.
    Attention(AttentionKind),
    /// Tokens whose logits exist at once.
    LossChunk(Option<u64>),
    /// Tokens that feed-forward parts take at once.
    MlpChunk(Option<u64>),
    /// Where a kind of tensor lives, and the layers that keep theirs on the device.
    Place(TensorKind, Tier, u64),
    /// Micro-batches in a pass.
    Together(u64),
}

/// A setting, and the least class that allows it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Value {
    pub setting: Setting,
    pub quality: Quality,
}

/// Precisions. bf16 with f32 masters: Micikevicius et al. 2018, Kalamkar et al. 2019. Without masters, rounded stochastically: Zamirai
/// et al. 2020, who find it close, not equal. fp8: Micikevicius et al. 2022, with scales of their own recipe. bf16 gradients under f32
/// masters are what many stacks do, and no paper's claim.
const PRECISIONS: [(MixedPrecision, MasterWeights, GradientDtype, Quality); 6] = {
    use MixedPrecision::{Bf16, F32, Fp8};
    const F: GradientDtype = GradientDtype::F32;
    const B: GradientDtype = GradientDtype::Bf16;
    [
        (F32, MasterWeights::None, F, Quality::Lossless),
        (Bf16, MasterWeights::F32, F, Quality::Proven),
        (Bf16, MasterWeights::F32, B, Quality::Anything),
        (Bf16, MasterWeights::None, B, Quality::Anything),
        (Fp8, MasterWeights::F32, F, Quality::Anything),
        (Fp8, MasterWeights::None, B, Quality::Anything),
    ]
};

/// Storage of frozen weights. NF4 beside adapters: Dettmers et al. 2023 (QLoRA). int8: Dettmers et al. 2022 (LLM.int8()), whose outliers
/// stay in 16 bits, so that ours is no more than near to it.
const STORAGES: [(Quantization, Quality); 3] = [
    (Quantization::Stored, Quality::Lossless),
    (Quantization::As(DType::Nf4), Quality::Proven),
    (Quantization::As(DType::Q8_0), Quality::Anything),
];

/// Optimizers that take AdamW's learning rate. 8-bit states: Dettmers et al. 2022. Adam-mini: Zhang et al. 2024. bf16 states, rounded
/// stochastically, are nobody's claim. Others (Lion, SGD, GaLore, APOLLO, Adafactor) want another rate: they are the user's to choose.
const OPTIMIZERS: [(Optimizer, Quality); 4] = [
    (Optimizer::AdamW, Quality::Lossless),
    (Optimizer::AdamW8bit, Quality::Proven),
    (Optimizer::AdamMini, Quality::Proven),
    (Optimizer::AdamWBf16, Quality::Anything),
];

/// Updates in the backward pass (Lv et al. 2023). Clipped by a second backward pass they are exact; by the step before's norm they are not.
const UPDATES: [(Option<InBackwardClipping>, Quality); 3] = [
    (None, Quality::Lossless),
    (Some(InBackwardClipping::SecondBackward), Quality::Lossless),
    (Some(InBackwardClipping::PreviousNorm), Quality::Anything),
];

/// Saved activations as 8-bit codes: Chen et al. 2021 (ActNN) and Liu et al. 2022 (GACT) round otherwise.
const COMPRESSIONS: [(Compression, Quality); 2] =
    [(Compression::None, Quality::Lossless), (Compression::Int8 { block: 256 }, Quality::Anything)];

/// Tokens of chunks. Whatever they are, no more than the order of sums changes.
const LOSS_CHUNKS: [u64; 5] = [64, 256, 1024, 4096, 16384];
const MLP_CHUNKS: [u64; 3] = [256, 1024, 4096];

/// Blocks of a segment of checkpointing.
const SEGMENTS: [u32; 2] = [2, 4];

/// Micro-batches that go through a layer before the next layer's turn.
const TOGETHER: [u64; 6] = [1, 2, 4, 8, 16, 32];

fn lossless(setting: Setting) -> Value {
    Value { setting, quality: Quality::Lossless }
}

impl Setting {
    /// Writes it into a configuration. What the user has said there is not on any axis.
    pub fn apply(&self, config: &mut RawConfig) {
        let training = &mut config.training;
        match self {
            Setting::Division(parallel) => config.parallel = (**parallel).clone(),
            Setting::Precision(mixed, masters, gradients) => {
                let is_open = |key: Option<Auto<_>>| key.and_then(Auto::set).is_none();
                training.mixed_precision = Some(Auto::Set(*mixed));
                // f32 weights have no masters and no other gradients.
                if is_open(training.master_weights) && *mixed != MixedPrecision::F32 {
                    training.master_weights = Some(Auto::Set(*masters));
                }
                if training.gradient_dtype().set().is_none() && *mixed != MixedPrecision::F32 {
                    training.gradient_dtype = Some(Auto::Set(*gradients));
                }
            }
            Setting::Storage(storage) => training.quantization = Some(Auto::Set(*storage)),
            Setting::Batch(size, steps) => {
                training.batch_size = Some(Auto::Set(*size));
                training.gradient_accumulation_steps = Some(Auto::Set(*steps));
            }
            Setting::Optimizer(optimizer) => training.optimizer = Some(*optimizer),
            Setting::Update(None) => training.optimizer_in_backward = Some(false),
            Setting::Update(Some(clipping)) => {
                training.optimizer_in_backward = Some(true);
                training.in_backward_clipping = (training.max_gradient_norm() > 0.0).then_some(*clipping);
            }
            Setting::Checkpointing(form) => {
                training.gradient_checkpointing = Some(Auto::Set(GradientCheckpointing::Form(*form)));
            }
            Setting::Compression(form) => {
                training.activation_compression = Some(ActivationCompression(*form));
            }
            Setting::Attention(kind) => training.attention = Some(Auto::Set(Attention(*kind))),
            Setting::LossChunk(tokens) => training.loss_chunk_tokens = tokens.map(Auto::Set),
            Setting::MlpChunk(tokens) => training.mlp_chunk_tokens = *tokens,
            Setting::Place(kind, tier, kept) => {
                kind.say(&mut config.memory, OffloadTarget::from(*tier), *kept);
            }
            Setting::Together(passes) => training.micro_batches_per_pass = Some(Auto::Set(*passes)),
        }
    }
}

/// Precisions that the configuration leaves open, of which the first loses nothing. On a device that is made to train in a 16-bit type,
/// that type with f32 masters is what every loss is compared with, and counts as lossless.
pub(super) fn precisions(config: &RawConfig, narrow: Option<DType>) -> Vec<Value> {
    let training = &config.training;
    let said = training.mixed_precision().set();
    if said.is_some() {
        return Vec::new();
    }
    let masters = training.master_weights().set();
    let gradients = training.gradient_dtype().set();
    let may = |precision: &&(MixedPrecision, MasterWeights, GradientDtype, Quality)| {
        let (mixed, own_masters, own_gradients, _) = **precision;
        // f32 goes with what the user says of narrower types where that says nothing of f32.
        match mixed {
            MixedPrecision::F32 => {
                masters != Some(MasterWeights::F32) && gradients != Some(GradientDtype::Bf16)
            }
            _ => {
                masters.is_none_or(|said| said == own_masters)
                    && gradients.is_none_or(|said| said == own_gradients)
            }
        }
    };
    let value = |(mixed, masters, gradients, quality): &(_, _, _, _)| {
        let is_bf16 = *mixed == MixedPrecision::Bf16;
        // What has no bf16 is trained in fp16, with masters and a scaled loss.
        let mixed = if is_bf16 && narrow == Some(DType::F16) { MixedPrecision::Fp16 } else { *mixed };
        let is_usual = is_bf16 && narrow.is_some() && *quality == Quality::Proven;
        let quality = if is_usual { Quality::Lossless } else { *quality };
        Value { setting: Setting::Precision(mixed, *masters, *gradients), quality }
    };
    let can_be = |(mixed, masters, ..): &&(_, _, _, _)| {
        let is_fp16 = narrow == Some(DType::F16) && *mixed == MixedPrecision::Bf16;
        !(is_fp16 && *masters == MasterWeights::None)
    };
    PRECISIONS.iter().filter(may).filter(can_be).map(value).collect()
}

pub(super) fn storages() -> Vec<Value> {
    let value = |(storage, quality)| Value { setting: Setting::Storage(storage), quality };
    STORAGES.into_iter().map(value).collect()
}

pub(super) fn optimizers() -> Vec<Value> {
    let value = |(optimizer, quality)| Value { setting: Setting::Optimizer(optimizer), quality };
    OPTIMIZERS.into_iter().map(value).collect()
}

/// Where there is no clipping, updates in the backward pass are exact without a second one.
pub(super) fn updates(clips: bool) -> Vec<Value> {
    let value = |(update, quality)| Value { setting: Setting::Update(update), quality };
    UPDATES.into_iter().take(if clips { UPDATES.len() } else { 2 }).map(value).collect()
}

pub(super) fn compressions() -> Vec<Value> {
    let value = |(form, quality)| Value { setting: Setting::Compression(form), quality };
    COMPRESSIONS.into_iter().map(value).collect()
}

/// Everything kept, every set of groups, and the forms that keep less. What mixes two of them comes later.
pub(super) fn checkpointings(layers: u32) -> Vec<Value> {
    let groups = [Group::Norms, Group::Attention, Group::Qkv];
    let ends: [&[Group]; 3] = [&[], &[Group::Swiglu], &[Group::Ffn]];
    // Who drops all of the feed-forward part drops its activation too.
    let sets = (0..1u32 << groups.len()).flat_map(|set| {
        ends.map(|end| {
            let members = groups.into_iter().enumerate().filter(move |(i, _)| set & (1 << i) != 0);
            members.map(|(_, group)| group).chain(end.iter().copied()).collect::<Groups>()
        })
    });
    let sets = sets.filter(|groups| *groups != Groups::NONE).map(Checkpointing::Selective);
    let every = SEGMENTS.into_iter().filter(|blocks| *blocks < layers).map(Checkpointing::Every);
    let forms = [Checkpointing::None].into_iter().chain(sets).chain([Checkpointing::Full]);
    let segments = (layers > 3).then_some(Checkpointing::Sqrt);
    forms.chain(segments).chain(every).map(|form| lossless(Setting::Checkpointing(form))).collect()
}

pub(super) fn attentions() -> Vec<Value> {
    [AttentionKind::Flash, AttentionKind::Standard].map(|kind| lossless(Setting::Attention(kind))).into()
}

/// As many as the planner takes without a search, and more or less.
pub(super) fn loss_chunks(tokens: u64) -> Vec<Value> {
    let sizes = LOSS_CHUNKS.into_iter().filter(|size| *size <= tokens).map(Some);
    std::iter::once(None).chain(sizes).map(|size| lossless(Setting::LossChunk(size))).collect()
}

pub(super) fn mlp_chunks(tokens: u64) -> Vec<Value> {
    let sizes = MLP_CHUNKS.into_iter().filter(|size| *size < tokens).map(Some);
    std::iter::once(None).chain(sizes).map(|size| lossless(Setting::MlpChunk(size))).collect()
}

/// On the device, or on a lower tier but for so many layers.
pub(super) fn places(kind: TensorKind, tiers: &[Tier], layers: u32) -> Vec<Value> {
    let below = tiers.iter().flat_map(|tier| (0..u64::from(layers)).map(move |kept| (*tier, kept)));
    let all = std::iter::once((Tier::Device, 0)).chain(below);
    all.map(|(tier, kept)| lossless(Setting::Place(kind, tier, kept))).collect()
}

pub(super) fn togethers(most: u64) -> Vec<Value> {
    let some = TOGETHER.into_iter().filter(|passes| *passes <= most);
    some.map(|passes| lossless(Setting::Together(passes))).collect()
}

pub(super) fn batches(splits: impl IntoIterator<Item = (u64, u64)>) -> Vec<Value> {
    splits.into_iter().map(|(size, steps)| lossless(Setting::Batch(size, steps))).collect()
}

pub(super) fn divisions(all: impl IntoIterator<Item = ParallelConfig>) -> Vec<Value> {
    all.into_iter().map(|parallel| lossless(Setting::Division(Box::new(parallel)))).collect()
}
