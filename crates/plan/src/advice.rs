//! What else could be done: single changes to a chosen step, each run dry.

use plimsoll_device::DType;
use plimsoll_memory::Tier;
use plimsoll_model::ModelSpec;
use plimsoll_step::{Checkpointing, Precision, StepError, StepSettings};
use serde::Serialize;

use crate::offload::Kind;
use crate::resolve::{Choice, Limits};
use crate::time::Rates;

/// A change, and what it would give.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alternative {
    /// The assignments that make it, as `--set` takes them.
    pub change: Vec<String>,
    /// Bytes of arena.
    pub peak_bytes: u64,
    /// Bytes of the host tier with the data pipeline.
    pub host_bytes: u64,
    /// Bytes of disk.
    pub disk_bytes: u64,
    /// Time of an optimizer step.
    pub step_seconds: f64,
    /// Tokens over that time.
    pub tokens_per_second: f64,
    /// Whether it fits the budget.
    pub fits: bool,
}

/// Ways to need less memory than `choice`, lightest change of the step's speed first.
pub fn alternatives(
    spec: &ModelSpec,
    choice: &Choice,
    rates: &Rates,
    limits: Limits,
) -> Result<Vec<Alternative>, StepError> {
    let mut list = Vec::new();
    for (change, settings, accumulation) in changes(choice) {
        let other = match Choice::new(spec, settings, accumulation, rates) {
            Err(StepError::TooManyHeld { .. }) => continue,
            other => other?,
        };
        if other.peak_bytes() < choice.peak_bytes() {
            list.push(Alternative {
                change,
                peak_bytes: other.peak_bytes(),
                host_bytes: limits.host_tier(&other),
                disk_bytes: other.dry_run.disk_bytes(),
                step_seconds: other.time.step_seconds,
                tokens_per_second: other.time.tokens_per_second,
                fits: limits.allow(&other),
            });
        }
    }
    // Those that fit first, the fastest of them first.
    list.sort_by(|a, b| b.fits.cmp(&a.fits).then(b.tokens_per_second.total_cmp(&a.tokens_per_second)));
    Ok(list)
}

type Change = (Vec<String>, StepSettings, u64);

fn changes(choice: &Choice) -> Vec<Change> {
    let base = &choice.settings;
    let mut list: Vec<Change> = Vec::new();
    let mut add = |words: &[&[String]], settings: StepSettings, accumulation: u64| {
        if settings != *base {
            list.push((words.concat(), settings, accumulation));
        }
    };
    let set = |key: &str, value: &dyn std::fmt::Display| format!("training.{key}={value}");

    let full = vec![set("gradient_checkpointing", &"full")];
    let with_full = |s: &StepSettings| StepSettings { checkpointing: Checkpointing::Full, ..s.clone() };
    let effective = base.batch_size * choice.accumulation;
    let single = vec![set("batch_size", &1), set("gradient_accumulation_steps", &effective)];
    let with_single = |s: &StepSettings| StepSettings { batch_size: 1, ..s.clone() };
    let pure =
        vec![set("mixed_precision", &"bf16"), set("master_weights", &"none"), set("gradient_dtype", &"bf16")];
    let with_pure = |s: &StepSettings| StepSettings {
        precision: Precision {
            weights: DType::Bf16,
            activations: DType::Bf16,
            gradients: DType::Bf16,
            ..Precision::F32
        },
        ..s.clone()
    };
    let accumulation = choice.accumulation;
    add(&[&full], with_full(base), accumulation);
    add(&[&single], with_single(base), effective);
    add(&[&full, &single], with_full(&with_single(base)), effective);
    add(&[&pure], with_pure(base), accumulation);
    add(&[&pure, &full], with_pure(&with_full(base)), accumulation);
    add(&[&pure, &full, &single], with_pure(&with_full(&with_single(base))), effective);
    // Everything that is still on the device goes to disk, a kind more each time.
    let (mut words, mut offload) = (Vec::new(), base.offload);
    for kind in Kind::IN_ORDER {
        let tier = kind.tier_mut(&mut offload);
        if *tier == Tier::Device {
            *tier = Tier::Disk;
            words.push(format!("memory.offload.{}=disk", kind.name()));
            add(&[&words], StepSettings { offload, ..base.clone() }, accumulation);
        }
    }
    let with_offload = |s: StepSettings| StepSettings { offload, ..s };
    if !words.is_empty() {
        add(&[&full, &words], with_offload(with_full(base)), accumulation);
        add(&[&full, &single, &words], with_offload(with_full(&with_single(base))), effective);
    }
    if base.sequence_length >= 256 {
        let half = base.sequence_length / 2;
        let shorter = vec![format!("data.sequence_length={half}")];
        let with_shorter = |s: &StepSettings| StepSettings {
            sequence_length: half,
            loss_chunk_tokens: s.loss_chunk_tokens.min(half * s.batch_size),
            ..s.clone()
        };
        add(&[&shorter], with_shorter(base), accumulation);
        add(
            &[&pure, &full, &single, &shorter],
            with_shorter(&with_pure(&with_full(&with_single(base)))),
            effective,
        );
    }
    list
}
