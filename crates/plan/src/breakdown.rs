//! Where the memory of a plan goes, and what each technique that it has saves: all of it from dry runs. The library's answers to what a memory
//! monitor is asked in the training loop.

use std::collections::BTreeMap;

use plimsoll_device::cpu::at_once;
use plimsoll_memory::{Phase, Tag};
use plimsoll_step::{AttentionKind, Checkpointing, StepError, StepSettings};
use serde::Serialize;

use crate::config::RawConfig;
use crate::resolve::{Choice, loss_chunk_tokens};
use crate::runs::threads;
use crate::technique::{Technique, Techniques};
use crate::training_plan::{LayerBytes, TrainingPlan};

/// Where the device's memory goes at the peak of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryBreakdown {
    /// The budget that counts, in bytes.
    pub total_bytes: u64,
    /// What lives in the arena at its peak.
    pub allocated_bytes: u64,
    /// The arena, which is taken once, and the overhead outside of it.
    pub reserved_bytes: u64,
    /// The arena alone.
    pub arena_bytes: u64,
    /// What lies outside the arena.
    pub overhead_bytes: u64,
    /// What is left of the budget.
    pub free_bytes: u64,
    /// Gaps between what lives in the arena at its peak.
    pub gap_bytes: u64,
    /// Gaps as a share of the arena.
    pub fragmentation: f64,
    /// Live bytes at the peak by tag.
    pub by_tag: BTreeMap<Tag, u64>,
    /// The same by layer.
    pub by_layer: Vec<LayerBytes>,
    /// The highest place of the arena that is in use in each phase.
    pub by_phase: BTreeMap<String, u64>,
    /// Bytes of the host tier, with the data pipeline.
    pub host_bytes: u64,
    /// The data pipeline's part of it.
    pub data_pipeline_bytes: u64,
    /// Bytes of disk.
    pub disk_bytes: u64,
}

/// A technique, whether a plan has it, and what it saves there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Optimization {
    /// In words.
    pub name: String,
    /// The keys that say it.
    pub keys: Vec<&'static str>,
    /// Whether the plan has it.
    pub enabled: bool,
    /// Bytes by which the device's peak would be higher without it, and with everything else; negative where it would be lower. `None`
    /// where the plan does not have it, or where there is no such step without it.
    pub bytes_saved: Option<i64>,
    /// Seconds that it adds to a step.
    pub seconds_added: Option<f64>,
}

/// Memory of activations for a shape of batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ActivationMemory {
    /// Sequences.
    pub batch_size: u64,
    /// Tokens of each.
    pub sequence_length: u64,
    /// Whether blocks are computed again in the backward pass.
    pub gradient_checkpointing: bool,
    /// Whether scores are not written out.
    pub flash_attention: bool,
    /// The most that activations and scores take at once.
    pub activation_bytes: u64,
    /// Bytes that checkpointing saves of it; 0 where it is off.
    pub saved_by_checkpointing_bytes: i64,
    /// The device's peak of such a step.
    pub peak_bytes: u64,
}

impl TrainingPlan {
    /// Where the device's memory goes.
    pub fn breakdown(&self) -> MemoryBreakdown {
        let ledger = &self.choice.dry_run.ledger;
        let (arena, allocated) = (self.peak_bytes(), self.at_peak().total());
        let used = self.bytes_under_the_line();
        let phases = Phase::ALL.into_iter().map(|phase| (phase.to_string(), ledger.phase_peak(phase)));
        let gaps = arena.saturating_sub(allocated);
        MemoryBreakdown {
            total_bytes: self.load_line.bytes,
            allocated_bytes: allocated,
            reserved_bytes: arena.saturating_add(self.overhead_bytes),
            arena_bytes: arena,
            overhead_bytes: self.overhead_bytes,
            free_bytes: self.load_line.bytes.saturating_sub(used),
            gap_bytes: gaps,
            fragmentation: gaps as f64 / arena.max(1) as f64,
            by_tag: self.at_peak().iter().collect(),
            by_layer: self.layers(),
            by_phase: phases.filter(|(_, bytes)| *bytes > 0).collect(),
            host_bytes: self.host_bytes(),
            data_pipeline_bytes: self.pipeline_bytes(),
            disk_bytes: self.disk_bytes(),
        }
    }

    /// Every technique that there is, and what each that the plan has saves: the step is run dry without it, with all others.
    pub fn optimizations(&self) -> Vec<Optimization> {
        let techniques = Techniques::of(&self.asked, &self.config, &self.choice);
        let all = techniques.all();
        let tried = at_once(&Technique::ALL, threads(), |one| {
            let enabled = all.contains(one);
            let without = enabled.then(|| {
                let (settings, accumulation) = techniques.without(&[*one]);
                Choice::new(&self.spec, settings, accumulation, &self.machine.rates).ok()
            });
            let without = without.flatten();
            let keys = one.keys().to_vec();
            Optimization {
                name: if enabled { techniques.words(*one) } else { keys.join(", ") },
                enabled,
                bytes_saved: without.as_ref().map(|other| signed(other.peak_bytes(), self.peak_bytes())),
                seconds_added: without.map(|o| self.choice.time.step_seconds - o.time.step_seconds),
                keys,
            }
        });
        tried.into_iter().collect()
    }

    /// Memory of activations for batches of a shape, as this plan's step would take them: with and without checkpointing, with and
    /// without flash attention, each run dry.
    ///
    /// # Errors
    /// There is no such step.
    pub fn activations(
        &self,
        batch_size: u64,
        sequence_length: u64,
    ) -> Result<Vec<ActivationMemory>, StepError> {
        let own = &self.choice.settings;
        let tokens = batch_size.saturating_mul(sequence_length);
        let said = self.asked.training.loss_chunk_tokens().set();
        let mut all = Vec::new();
        for flash_attention in [true, false] {
            let mut kept = 0;
            for gradient_checkpointing in [false, true] {
                let settings = StepSettings {
                    batch_size,
                    sequence_length,
                    loss_chunk_tokens: said.map_or_else(
                        || loss_chunk_tokens(self.spec.vocab_size, tokens),
                        |said| said.min(tokens),
                    ),
                    checkpointing: match gradient_checkpointing {
                        true => Checkpointing::Full,
                        false => Checkpointing::None,
                    },
                    attention: if flash_attention { AttentionKind::Flash } else { AttentionKind::Standard },
                    micro_batches_per_pass: 1,
                    evaluation_batch_size: Some(0),
                    sequence_chunk_tokens: None,
                    ..own.clone()
                };
                let run = Choice::new(&self.spec, settings, 1, &self.machine.rates)?.dry_run;
                let of = |tag| run.ledger.most(tag);
                let activation_bytes = of(Tag::Activations) + of(Tag::Attention);
                if !gradient_checkpointing {
                    kept = activation_bytes;
                }
                all.push(ActivationMemory {
                    batch_size,
                    sequence_length,
                    gradient_checkpointing,
                    flash_attention,
                    activation_bytes,
                    saved_by_checkpointing_bytes: signed(kept, activation_bytes),
                    peak_bytes: run.peak_bytes(),
                });
            }
        }
        Ok(all)
    }
}

impl RawConfig {
    /// A shape of batch as it is written on the command line: `8x2048`, or, of a number alone, so many sequences of
    /// `data.sequence_length`.
    ///
    /// # Errors
    /// It is none, in words.
    pub fn batch_shape(&self, text: &str) -> Result<(u64, u64), String> {
        let (batch, length) =
            text.split_once(['x', 'X']).map_or((text, None), |(batch, length)| (batch, Some(length)));
        let number = |text: &str, least: u64| {
            let number = text.trim().parse::<u64>().ok();
            number.filter(|number| (least..=1 << 24).contains(number))
        };
        let length = length.map_or(Some(self.data.sequence_length()), |length| number(length, 2));
        number(batch, 1).zip(length).ok_or_else(|| {
            format!("{text:?} is no shape of a batch; write SEQUENCESxTOKENS, for example 8x2048")
        })
    }
}

/// How much more one is than the other.
fn signed(one: u64, other: u64) -> i64 {
    i64::try_from(i128::from(one) - i128::from(other)).unwrap_or(i64::MAX)
}
