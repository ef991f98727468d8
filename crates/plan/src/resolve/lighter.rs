//! Steps to turn to when one no longer fits while it runs.

use plimsoll_device::cpu::at_once;
use plimsoll_memory::Tier;
use plimsoll_model::ModelSpec;
use plimsoll_step::{Checkpointing, Group, KeptLayers, Offload, StepError, StepSettings};

use super::{Choice, powers_of_two};
use crate::expert_slots;
use crate::limits::Limits;
use crate::offload::TensorKind;
use crate::runs::{Wanted, threads};
use crate::time::Rates;

/// Tokens of a chunk below which a plan that is to need less does not go.
const LEAST_CHUNK: u64 = 256;

/// Steps that do the same as `choice` in less memory: everything but what they recompute, how many sequences they take at
/// once and where tensors live stays. In the order in which they need less, the least last.
///
/// What the user fixed is not kept here: these are for when it no longer fits. Micro-batches have at least `least_batch` sequences,
/// or those that they have.
pub fn lighter_choices(
    spec: &ModelSpec,
    choice: &Choice,
    rates: &Rates,
    limits: Limits,
    least_batch: u64,
) -> Result<Vec<Choice>, StepError> {
    let own = &choice.settings;
    let effective = own.batch_size * choice.accumulation;
    let sizes = powers_of_two(own.batch_size).chain([own.batch_size]);
    let fits_in = |size: &u64| effective.is_multiple_of(*size) && *size >= least_batch.min(own.batch_size);
    let mut sizes: Vec<u64> = sizes.filter(fits_in).collect();
    sizes.dedup();
    let groups = Checkpointing::Selective(Group::ALL.into_iter().take(3).collect());
    let mut forms = vec![own.checkpointing];
    // A sequence in chunks keeps the inputs of layers, whatever there is room for.
    if own.chunk_tokens().is_none() {
        forms.extend([groups, Checkpointing::Full, Checkpointing::Sqrt]);
    }
    let lighter = |checkpointing, batch_size, offload, kept_layers| {
        let loss_chunk_tokens = own.loss_chunk_tokens.min(batch_size * own.sequence_length);
        let settings = StepSettings {
            checkpointing,
            batch_size,
            offload,
            kept_layers,
            loss_chunk_tokens,
            micro_batches_per_pass: 1,
            ..own.clone()
        };
        (expert_slots::fewest(spec, settings, own.expert_slots), effective / batch_size)
    };
    let made = |wanted: Vec<Wanted>| -> Result<Vec<Choice>, StepError> {
        let made = at_once(&wanted, threads(), |(settings, accumulation)| {
            Choice::new(spec, settings.clone(), *accumulation, rates)
        });
        made.into_iter().collect()
    };
    let mut wanted = Vec::new();
    if let Some(half) = own.chunk_tokens().map(|chunk| chunk / 2).filter(|half| *half >= LEAST_CHUNK) {
        let (settings, accumulation) =
            lighter(own.checkpointing, own.batch_size, own.offload, KeptLayers::NONE);
        wanted.push((StepSettings { sequence_chunk_tokens: Some(half), ..settings }, accumulation));
    }
    let mut kepts = vec![own.kept_layers, KeptLayers::NONE];
    kepts.dedup();
    for kept_layers in kepts {
        for checkpointing in &forms {
            for size in &sizes {
                wanted.push(lighter(*checkpointing, *size, own.offload, kept_layers));
            }
        }
    }
    let mut all = made(wanted)?;
    let least = sizes.first().copied().unwrap_or(own.batch_size);
    let lightest = all.iter().map(|other| limits.memory(other)).min().unwrap_or(0);
    let (mut offload, mut wanted) = (own.offload, Vec::new());
    for kind in TensorKind::IN_ORDER {
        let tier = kind.tier_mut(&mut offload);
        if *tier != Tier::Device {
            continue;
        }
        *tier = Tier::Disk;
        wanted.push(lighter(Checkpointing::Full, least, offload, KeptLayers::NONE));
    }
    let waits = Offload { prefetch: false, ..offload };
    wanted.push(lighter(Checkpointing::Full, least, waits, KeptLayers::NONE));
    all.extend(made(wanted)?.into_iter().filter(|further| limits.memory(further) < lightest));
    all.retain(|other| {
        limits.memory(other) < limits.memory(choice)
            && other.dry_run.disk_bytes() <= limits.disk_bytes.max(choice.dry_run.disk_bytes())
    });
    all.sort_by_key(|other| std::cmp::Reverse(limits.memory(other)));
    Ok(all)
}
