//! How many experts are on the device at a time where they come by themselves, and what that makes a step read.

use std::ops::RangeInclusive;

use plimsoll_model::{ExpertsSpec, ModelSpec};
use plimsoll_step::{StepError, StepSettings};
use serde::Serialize;

use crate::config::{Auto, RawConfig};
use crate::resolve::{Choice, Search};

/// Slots that are of use: from those for one token, with one on its way, to one for each expert of the model; `None` of a model without
/// experts.
pub(crate) fn of_use(spec: &ModelSpec) -> Option<RangeInclusive<u32>> {
    let experts = spec.experts.as_ref()?;
    let layers = spec.layers().filter(|layer| spec.experts_of(*layer).is_some()).count() as u64;
    let all = u32::try_from(experts.count.saturating_mul(layers)).unwrap_or(u32::MAX - 1);
    let least = u32::try_from(experts.per_token.max(2)).unwrap_or(all).min(all);
    (all > 0).then_some(least..=all)
}

/// The same step with as many slots as the configuration says, or with the fewest; with none where experts come with their layers.
pub(crate) fn settled(config: &RawConfig, spec: &ModelSpec, settings: StepSettings) -> StepSettings {
    let expert_slots = match of_use(spec).filter(|_| settings.experts_can_come(spec)) {
        None => 0,
        Some(slots) => match config.memory.expert_slots() {
            Auto::Auto => *slots.start(),
            Auto::Set(said) => u32::try_from(said).unwrap_or(u32::MAX).min(*slots.end()),
        },
    };
    StepSettings { expert_slots, ..settings }
}

/// The same step with the fewest slots, where it has any.
pub(crate) fn fewest(spec: &ModelSpec, settings: StepSettings, before: u32) -> StepSettings {
    let least = of_use(spec).filter(|_| settings.experts_can_come(spec)).map(|slots| *slots.start());
    let expert_slots = match before {
        0 => least.unwrap_or(0),
        before => least.map_or(0, |least| least.min(before)),
    };
    StepSettings { expert_slots, ..settings }
}

impl Search<'_> {
    /// The same step with as many slots as there is room for, up to the experts of a layer: all micro-batches of a pass then share what
    /// is read, and so do the products of a layer that is computed again. Where there is room for more, layers may stay whole.
    pub(crate) fn with_slots(&self, choice: Choice, room: u64) -> Result<Choice, StepError> {
        let Some(experts) = self.runs.spec.experts.as_ref() else { return Ok(choice) };
        let said = self.config.memory.expert_slots() != Auto::Auto;
        let (low, most) = (choice.settings.expert_slots, u32::try_from(experts.count).unwrap_or(u32::MAX));
        if said || low == 0 || low >= most || !self.fits(&choice, room) {
            return Ok(choice);
        }
        let base = choice.settings.clone();
        let with = |expert_slots| StepSettings { expert_slots, ..base.clone() };
        let all = self.runs.of(with(most), choice.accumulation)?;
        if self.fits(&all, room) {
            return Ok(all);
        }
        self.most_that_fit((low, choice), (most, &all), room, with)
    }

    /// Whether a step has slots for all experts of a layer, and nobody has said how many.
    pub(crate) fn has_slots_to_spare(&self, choice: &Choice) -> bool {
        let count = self.runs.spec.experts.as_ref().map_or(u64::MAX, |experts| experts.count);
        let open = self.config.memory.expert_slots() == Auto::Auto;
        open && u64::from(choice.settings.expert_slots) >= count
    }
}

/// What a step reads of experts that come by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpertReads {
    /// Experts that are there at a time.
    pub slots: u32,
    /// Experts of the model.
    pub experts: u64,
    /// Bytes of a step in which every micro-batch sends tokens to all experts of each layer.
    pub worst_bytes: u64,
    /// Bytes where every token goes to any experts of a layer with the same probability.
    pub even_bytes: u64,
}

impl ExpertReads {
    /// Those of a step that was run dry; `None` where experts come with their layers.
    pub(crate) fn of(spec: &ModelSpec, choice: &Choice) -> Option<ExpertReads> {
        let (settings, experts) = (&choice.settings, spec.experts.as_ref()?);
        if settings.expert_slots == 0 || !settings.experts_can_come(spec) {
            return None;
        }
        let all = settings.chunk_tokens().unwrap_or(settings.batch_size * settings.own_tokens());
        let tokens = match u64::from(settings.expert_slots) >= experts.count {
            // What is read once, all tokens of a pass share.
            true => all.saturating_mul(settings.micro_batches_per_pass),
            false => settings.mlp_chunk_tokens.map_or(all, |chunk| chunk.min(all)),
        };
        let worst_bytes = choice.dry_run.moved.experts;
        let even_bytes = (worst_bytes as f64 * share_of_used(experts, tokens)) as u64;
        let experts = of_use(spec).map_or(0, |slots| u64::from(*slots.end()));
        Some(ExpertReads { slots: settings.expert_slots, experts, worst_bytes, even_bytes })
    }
}

/// The share of the experts of a layer that some of so many tokens go to, if each goes to any with the same probability.
fn share_of_used(experts: &ExpertsSpec, tokens: u64) -> f64 {
    let missed = 1.0 - experts.per_token as f64 / experts.count.max(1) as f64;
    1.0 - missed.clamp(0.0, 1.0).powf(tokens as f64)
}

#[cfg(test)]
mod tests {
    use plimsoll_model::catalogue;

    use super::*;

    #[test]
    fn few_tokens_use_few_experts() {
        let spec = catalogue::find("qwen3-30b-a3b").unwrap();
        let experts = spec.experts.as_ref().unwrap();
        assert_eq!(share_of_used(experts, 0), 0.0);
        assert_eq!(share_of_used(experts, 1), 8.0 / 128.0);
        assert!((share_of_used(experts, 16) - 0.644).abs() < 1e-3);
        assert!(share_of_used(experts, 512) > 0.999_999);
        assert_eq!(of_use(&spec), Some(8..=128 * 48));
        assert_eq!(of_use(&catalogue::find("smollm2-135m").unwrap()), None);
    }
}
