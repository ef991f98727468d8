//! What a configuration leaves open, in the order in which it is tried: precisions, forms of checkpointing, and batches.

use plimsoll_device::DType;
use plimsoll_model::{Parameter, Role};
use plimsoll_step::{Checkpointing, Group, Linears, MOST_INTERLEAVED, Precision, TrainingMethod};

use crate::config::{
    Auto, GradientCheckpointing, GradientDtype, MasterWeights, MixedPrecision, RawConfig, TrainingConfig,
};

/// Sequences of an optimizer step where the user names none.
const DEFAULT_EFFECTIVE_BATCH: u64 = 8;

/// Precisions, the first to be tried first: f32 loses nothing; a device that is made for a narrow type is trained in that.
pub(crate) fn precisions(
    training: &TrainingConfig,
    method: &TrainingMethod,
    narrow: Option<DType>,
) -> Vec<Precision> {
    let gradients = |default| match training.gradient_dtype().set() {
        Some(GradientDtype::F32) => DType::F32,
        Some(GradientDtype::Bf16) => DType::Bf16,
        None => default,
    };
    // Adapters are in f32 themselves, and what is frozen needs no master.
    let is_narrow = |p: &Parameter| !matches!(p.role, Role::Lora(..));
    let trains_narrow = method.adapters().is_none_or(|adapters| adapters.layout.trained().any(is_narrow));
    // f32 weights have f32 gradients: `validate` refuses anything else where it was written.
    let f32 = Precision::F32;
    let bf16 = |master_weights| Precision {
        weights: DType::Bf16,
        activations: DType::Bf16,
        gradients: gradients(if master_weights || !trains_narrow { DType::F32 } else { DType::Bf16 }),
        master_weights,
        ..Precision::F32
    };
    // f32 weights are their own masters: no product of a block reads them as they are.
    let fp8 = |master_weights| match master_weights {
        true => Precision { gradients: gradients(DType::F32), ..Precision::FP8 },
        false => Precision { linears: Linears::Fp8, ..bf16(false) },
    };
    // Updates of half a step's rounding vanish in f16: there are always masters.
    let fp16 =
        Precision { gradients: gradients(DType::F32), master_weights: trains_narrow, ..Precision::F16 };
    // Without masters updates are rounded stochastically: that is for the user to choose.
    let masters = training.master_weights().set() != Some(MasterWeights::None) && trains_narrow;
    match training.mixed_precision().set() {
        Some(MixedPrecision::F32) => vec![f32],
        Some(MixedPrecision::Bf16) => vec![bf16(masters)],
        Some(MixedPrecision::Fp8) => vec![fp8(masters)],
        Some(MixedPrecision::Fp16) => vec![fp16],
        None => {
            // Scaled gradients and updates in the backward pass do not go together.
            let scales = narrow == Some(DType::F16) && !training.optimizer_in_backward();
            let sixteen = if scales { fp16 } else { bf16(masters) };
            // Beside weights of four bits, activations of 32 would save nothing.
            match method.adapters().is_some_and(|adapters| !adapters.weight_types.is_empty()) {
                true => vec![sixteen],
                false if narrow.is_some() => vec![sixteen, f32],
                false => vec![f32, sixteen],
            }
        }
    }
}

pub(crate) fn checkpointings(training: &TrainingConfig) -> Vec<Checkpointing> {
    match training.gradient_checkpointing().set() {
        Some(GradientCheckpointing::Form(form)) => vec![form],
        Some(GradientCheckpointing::Within(_)) => every_checkpointing(),
        None => {
            // The cheapest work for a byte first, a group more each time.
            let groups = |n| Checkpointing::Selective(Group::ALL.into_iter().take(n).collect());
            let none = [Checkpointing::None];
            let some = (2..Group::ALL.len()).map(groups);
            none.into_iter().chain(some).chain([Checkpointing::Full, Checkpointing::Sqrt]).collect()
        }
    }
}

/// Every set of groups, and the forms that keep still less.
fn every_checkpointing() -> Vec<Checkpointing> {
    let groups = Group::ALL.into_iter().filter(|group| *group != Group::Block);
    let sets = (1u32..32).map(|set| {
        let members = groups.clone().enumerate().filter(|(i, _)| set & (1 << i) != 0);
        Checkpointing::Selective(members.map(|(_, group)| group).collect())
    });
    let whole = [Checkpointing::None, Checkpointing::Full, Checkpointing::Sqrt];
    let every = [2, 3, 4, 8].map(Checkpointing::Every);
    whole.into_iter().chain(every).chain(sets).collect()
}

/// Pairs of batch size and accumulation that the user's words leave open, and those to turn to where none of them fits.
pub(crate) fn batches(config: &RawConfig) -> Vec<Vec<(u64, u64)>> {
    let mut all = every_batch(config);
    if config.sequence_chunk().is_some() {
        all.iter_mut().for_each(|batches| batches.retain(|(batch_size, _)| *batch_size == 1));
        all.retain(|batches| !batches.is_empty());
    }
    // Others do not go through interleaved stages in whole groups.
    let groups = config.parallel.micro_batch_groups();
    if groups > 1 {
        let goes = |steps: u64| steps.is_multiple_of(groups) && steps <= MOST_INTERLEAVED;
        all.iter_mut().for_each(|batches| batches.retain(|(_, steps)| goes(*steps)));
    }
    all
}

fn every_batch(config: &RawConfig) -> Vec<Vec<(u64, u64)>> {
    let training = &config.training;
    let ranks = config.parallel.data_parallel();
    let mut first = preferred_batches(training, ranks, config.parallel.micro_batch_groups());
    if let Some(dynamic) = config.dynamic_batching() {
        let batch_said = training.batch_size().set().is_some();
        if let (false, Auto::Auto) = (batch_said, training.gradient_accumulation_steps()) {
            let effective = first.first().map_or(1, |(batch, steps)| batch * steps);
            let effective = match training.effective_batch_size.and_then(Auto::set) {
                Some(_) => effective,
                None => effective.next_multiple_of(dynamic.min_batch_size().max(1)),
            };
            first = dynamic.sizes(effective).into_iter().rev().map(|size| (size, effective / size)).collect();
        }
        first.retain(|(batch, _)| dynamic.allows(*batch));
        // A batch that was said and does not fit is the first to give way.
        let smaller = |(batch, steps): (u64, u64)| {
            let whole = batch * steps;
            let sizes = dynamic.sizes(whole).into_iter().filter(move |size| *size < batch);
            sizes.map(move |size| vec![(size, whole / size)])
        };
        let further = first.clone().into_iter().filter(|_| batch_said).flat_map(smaller);
        return std::iter::once(first.clone()).chain(further).collect();
    }
    let said = [training.batch_size(), training.gradient_accumulation_steps()];
    let said = said.into_iter().chain(training.effective_batch_size).any(|key| key.set().is_some());
    if said || !training.optimizer_in_backward() {
        return vec![first];
    }
    // A sum over micro-batches is a gradient that lives through the whole pass: without it there is none to keep.
    let together = |batch_size| (batch_size, 1);
    let fewer = powers_of_two(DEFAULT_EFFECTIVE_BATCH / 2).map(together).collect();
    vec![first, vec![together(DEFAULT_EFFECTIVE_BATCH)], fewer]
}

/// Of one of so many ranks, which takes micro-batches in groups of so many.
fn preferred_batches(training: &TrainingConfig, ranks: u64, groups: u64) -> Vec<(u64, u64)> {
    let batch_size = training.batch_size().set();
    let accumulation = training.gradient_accumulation_steps().set();
    let own_of = |whole: u64| (whole / ranks.max(1)).max(1);
    let effective = training.effective_batch_size.and_then(Auto::set).map(own_of);
    match (batch_size, accumulation, effective) {
        (Some(b), Some(a), _) => vec![(b, a)],
        (Some(b), None, None) => vec![(b, groups)],
        (Some(b), None, Some(e)) => vec![(b, (e / b).max(1))],
        (None, Some(a), Some(e)) => vec![((e / a).max(1), a)],
        (None, Some(a), None) => powers_of_two(own_of(DEFAULT_EFFECTIVE_BATCH)).map(|b| (b, a)).collect(),
        (None, None, effective) => {
            let usual = own_of(DEFAULT_EFFECTIVE_BATCH).next_multiple_of(groups);
            let effective = effective.unwrap_or(usual);
            let splits = powers_of_two(effective).chain([effective]).filter(|b| effective.is_multiple_of(*b));
            let mut splits: Vec<_> = splits.map(|b| (b, effective / b)).collect();
            splits.dedup();
            splits
        }
    }
}

pub(super) fn powers_of_two(most: u64) -> impl Iterator<Item = u64> {
    (0..6).map(|power| 1 << power).take_while(move |n| *n <= most)
}
