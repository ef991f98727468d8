//! What is known of a step before it is run, from what it takes at rest and from runs of others: a run that could decide nothing
//! is left out.

use std::cmp::Ordering;

use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_model::{BlockId, ModelSpec};
use plimsoll_step::{
    Checkpointing, Compression, Group, Offload, Precision, SavePolicy, StepError, StepSettings,
};

use crate::limits::Limits;
use crate::offload::TensorKind;
use crate::resolve::{AS_FAST, Choice, Search, per_token, sequences};
use crate::runs::Wanted;

/// Inputs of layers that are on their way out of the device at once.
const LEAVING: u64 = 2;

/// Layers whose weights a pass may find in the buffers, from the one before it or from its own forward half, at most.
const IN_BUFFERS: u32 = 6;

impl Search<'_> {
    /// Bytes of arena that a step takes at least, known without running it: what it takes at rest and, of those `known` that
    /// keep more on the device and are otherwise the same, what it would have there too.
    pub fn least_bytes<'c>(&self, wanted: &Wanted, known: impl IntoIterator<Item = &'c Choice>) -> u64 {
        let Offload { parameters, optimizer, .. } = wanted.0.offload;
        // Where nothing but buffers stays on the device, that is not worth asking.
        let at_rest = match (parameters, optimizer) {
            (Tier::Device, _) | (_, Tier::Device) => self.runs.at_rest(&wanted.0).device,
            _ => 0,
        };
        let still_there = known.into_iter().filter_map(|choice| still_there(self.runs.spec, choice, wanted));
        still_there.fold(at_rest, u64::max)
    }

    /// Bytes of disk that a step takes at least, known without running it; 0 where there is enough for anything.
    pub fn least_disk_bytes(&self, settings: &StepSettings) -> u64 {
        let Offload { parameters, gradients, optimizer, .. } = settings.offload;
        match [parameters, gradients, optimizer].contains(&Tier::Disk) && self.limits.disk_bytes < u64::MAX {
            true => self.runs.at_rest(settings).disk,
            false => 0,
        }
    }

    /// Whether a step is known not to fit without running it; `known` as in [`least_bytes`](Self::least_bytes).
    pub fn cannot_fit<'c>(&self, wanted: &Wanted, known: impl IntoIterator<Item = &'c Choice>) -> bool {
        let Limits { room_bytes, arena_bytes, disk_bytes, .. } = self.limits;
        self.least_disk_bytes(&wanted.0) > disk_bytes
            || self.least_bytes(wanted, known) > room_bytes.min(arena_bytes)
    }

    /// Whether a candidate shows that no other of its form with more sequences fits: there is no room for its own.
    pub fn has_no_room_for_more(&self, shorter: &Choice, wanted: &Wanted) -> bool {
        takes_no_less(shorter, wanted)
            && shorter.peak_bytes() > self.limits.room_bytes.min(self.limits.arena_bytes)
    }

    /// The same of a candidate that recomputes more than another one with as many sequences or more.
    pub fn has_no_room_for_kept(&self, lighter: &Choice, wanted: &Wanted) -> bool {
        keeps_no_less(wanted.0.checkpointing, lighter.settings.checkpointing)
            && wanted.0.offload.activations == Tier::Device
            && takes_no_less(lighter, wanted)
            && lighter.peak_bytes() > self.limits.room_bytes.min(self.limits.arena_bytes)
    }

    /// The same of a candidate that is checkpointed layer by layer, and one in segments.
    pub fn has_no_room_for_segments(&self, full: &Choice, wanted: &Wanted) -> bool {
        full.settings.checkpointing == Checkpointing::Full
            && full.settings.ranks.mesh.pipeline <= 1
            && wanted.0.checkpointing == Checkpointing::Sqrt
            && takes_no_less(full, wanted)
            && not_spared(self.runs.spec, full) > self.limits.room_bytes.min(self.limits.arena_bytes)
    }

    /// Whether a candidate would not be among the fastest that fit, as what recomputes no more than it says: of its batch, or
    /// of another.
    pub fn is_slower(&self, known: &[&Choice], wanted: &Wanted) -> bool {
        let less =
            known.iter().filter(|less| recomputes_less(less.settings.checkpointing, wanted.0.checkpointing));
        let of_disk = known.iter().map(|longer| self.least_of_disk(longer, wanted));
        let all = less.map(|less| self.least_per_token(less, wanted)).chain(of_disk);
        let Some(least) = all.max_by(f64::total_cmp) else { return false };
        let slower = |room| {
            let fitting = known.iter().filter(|choice| self.fits(choice, room));
            let rival = self.rival.filter(|_| room == self.limits.target_bytes);
            let fastest = fitting.map(|choice| per_token(choice)).chain(rival).min_by(f64::total_cmp);
            fastest.is_some_and(|fastest| least > fastest * AS_FAST)
        };
        let Limits { target_bytes, room_bytes, .. } = self.limits;
        // Where it would be over the target, those count that fit in the room.
        let over_target = || {
            wanted.0.checkpointing == Checkpointing::Sqrt
                && self.least_bytes(wanted, known.iter().copied()) > target_bytes
        };
        slower(target_bytes) || over_target() && slower(room_bytes)
    }

    /// Whether another division of the ranks is known to be faster than any form with these batches.
    pub fn is_beaten(
        &self,
        precision: Precision,
        offload: Offload,
        batches: &[(u64, u64)],
    ) -> Result<bool, StepError> {
        let (Some(rival), Some(form)) = (self.rival, self.first_form()) else { return Ok(false) };
        // Longer batches are mostly the faster ones.
        for batch in batches.iter().rev() {
            let wanted = self.candidate(precision, form, *batch, offload);
            let is_slower = |run: &Choice| self.least_per_token(run, &wanted) > rival * AS_FAST;
            // One stage of a pipeline may say so already: no step is faster than any of its stages.
            if wanted.0.ranks.mesh.pipeline > 1 && is_slower(&self.runs.first_stage(&wanted)?) {
                continue;
            }
            if !is_slower(&self.runs.of(wanted.0.clone(), wanted.1)?) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Seconds that a token takes at least in a step which recomputes all that `less` does. What is recomputed takes time, and
    /// what is kept takes none where it is neither moved nor compressed.
    fn least_per_token(&self, less: &Choice, (settings, accumulation): &Wanted) -> f64 {
        let own = &less.settings;
        if own.compression != Compression::None {
            return 0.0;
        }
        // Of all ranks, as in the time of a plan.
        let tokens = |settings: &StepSettings, accumulation| {
            sequences(settings, accumulation).saturating_mul(settings.sequence_length)
        };
        let all = tokens(own, less.accumulation);
        // Updates wait for what they bring, whatever the passes before them do.
        let passes_waited = less.time.waiting_seconds - less.dry_run.updates.waited;
        let without_waiting = less.time.step_seconds - passes_waited.max(0.0);
        let as_many = all == tokens(settings, *accumulation);
        let seconds = match own.batch_size.cmp(&settings.batch_size) {
            Ordering::Equal if own.offload.activations == Tier::Device => less.time.step_seconds,
            Ordering::Equal => without_waiting,
            // The same arithmetic in shorter operations, and what a pass does once is done more often.
            Ordering::Greater if as_many => without_waiting,
            // Full fine-tuning has no products that are made once in a pass, however long it is.
            Ordering::Less if own.method.adapters().is_none() && as_many => {
                self.runs.rates.products(&less.dry_run.tally)
            }
            Ordering::Less | Ordering::Greater => 0.0,
        };
        seconds / all.max(1) as f64
    }

    /// Seconds that a token takes at least in a step of shorter batches than a known one has: the disk does all that it does there,
    /// and reads the weights again for each further pass.
    fn least_of_disk(&self, longer: &Choice, (settings, accumulation): &Wanted) -> f64 {
        let own = &longer.settings;
        let StepSettings { batch_size, checkpointing, loss_chunk_tokens, .. } = *settings;
        let further = accumulation.saturating_sub(longer.accumulation);
        let reads = settings.offload.parameters == Tier::Disk && settings.expert_slots == 0;
        // What is kept more on disk is moved more.
        let moves_no_less =
            settings.offload.activations == Tier::Device || recomputes_less(checkpointing, own.checkpointing);
        let alone = settings.ranks.mesh.size() == 1;
        if further == 0
            || !(reads && moves_no_less && alone)
            || longer.sequences() != sequences(settings, *accumulation)
            || (StepSettings { batch_size, checkpointing, loss_chunk_tokens, ..own.clone() }) != *settings
        {
            return 0.0;
        }
        let bytes = bytes_of_pass(self.runs.spec, settings).saturating_mul(further);
        let seconds = longer.time.disk_seconds + bytes as f64 / self.runs.rates.disk.read;
        seconds / longer.sequences().saturating_mul(settings.sequence_length).max(1) as f64
    }
}

/// Bytes of weights that a pass reads from the disk at least.
fn bytes_of_pass(spec: &ModelSpec, settings: &StepSettings) -> u64 {
    let away = spec.num_layers.saturating_sub(settings.kept_layers.parameters).saturating_sub(IN_BUFFERS);
    let of_layer = |layer| {
        let own = spec.block_parameters(BlockId::Layer(layer));
        let matrices = own.iter().filter(|p| p.role.is_block_matrix());
        let bytes = matrices.map(|p| {
            let dtype = settings.method.weight_type(p, settings.precision.weights);
            dtype.bytes_for(p.elements()).unwrap_or(0)
        });
        bytes.sum::<u64>()
    };
    // Adapters may be such that the backward half goes through no more than some layers.
    let halves = if settings.method.adapters().is_some() { 1 } else { 2 };
    (0..away).map(of_layer).sum::<u64>() * halves
}

/// Whether a candidate with more sequences than `shorter` has takes as much memory, if all else is the same.
fn takes_no_less(shorter: &Choice, (settings, accumulation): &Wanted) -> bool {
    // A sum over micro-batches is memory that one micro-batch does without.
    shorter.settings.batch_size <= settings.batch_size && (shorter.accumulation > 1) == (*accumulation > 1)
}

/// Bytes that a step has on the device at the moment when another reaches its peak which keeps more there: the inputs of all layers
/// instead of those of segments, or kinds of tensors that are away in the step. `None` where they differ otherwise.
fn still_there(spec: &ModelSpec, other: &Choice, (settings, accumulation): &Wanted) -> Option<u64> {
    let StepSettings { checkpointing, offload, .. } = *settings;
    let before = &other.settings;
    let in_segments = match (before.checkpointing, checkpointing) {
        // A stage of a pipeline has several micro-batches under way.
        (Checkpointing::Full, Checkpointing::Sqrt) if settings.ranks.mesh.pipeline <= 1 => true,
        (one, other) if one == other => false,
        _ => return None,
    };
    let alike = StepSettings { checkpointing, offload, ..before.clone() };
    let as_many_buffers = before.offload.prefetch == offload.prefetch;
    if (other.accumulation > 1) != (*accumulation > 1) || alike != *settings || !as_many_buffers {
        return None;
    }
    let at_peak = other.dry_run.at_peak();
    let mut left = if in_segments { not_spared(spec, other) } else { at_peak.by_tag.total() };
    for kind in TensorKind::IN_ORDER {
        match (kind.tier(before.offload), kind.tier(offload)) {
            (one, other) if one == other => {}
            // Updates take what they need in other ways where states are away.
            (Tier::Device, _) if at_peak.phase == Phase::Backward => {
                let of_kind = tags(kind).iter().map(|tag| at_peak.by_tag.get(*tag)).sum();
                left = left.saturating_sub(of_kind);
            }
            _ => return None,
        }
    }
    Some(left)
}

/// What tensors of a kind are tagged with.
fn tags(kind: TensorKind) -> &'static [Tag] {
    match kind {
        TensorKind::Optimizer => &[Tag::Optimizer, Tag::MasterWeights],
        TensorKind::Gradients => &[Tag::Gradients],
        TensorKind::Activations => &[Tag::Activations, Tag::Attention],
        TensorKind::Parameters => &[Tag::Weights, Tag::MasterWeights, Tag::Adapters],
    }
}

/// Bytes of the device that a step takes at least which is checkpointed in segments and otherwise the same, where this one is checkpointed
/// layer by layer.
pub(crate) fn least_in_segments(spec: &ModelSpec, choice: &Choice) -> Option<u64> {
    let is_full = choice.settings.checkpointing == Checkpointing::Full;
    (is_full && choice.settings.ranks.mesh.pipeline <= 1).then(|| not_spared(spec, choice))
}

/// Bytes that are live at the peak of a step which keeps the inputs of layers, and would be there if it kept those of
/// segments: all but inputs of layers. Whoever goes back through a layer has those of its segment before it too.
fn not_spared(spec: &ModelSpec, full: &Choice) -> u64 {
    let at_peak = full.dry_run.at_peak();
    let spared = match (at_peak.phase, at_peak.layer) {
        // Inputs that leave the device are there for as long as they are on their way.
        _ if full.settings.offload.activations != Tier::Device => {
            LEAVING.saturating_add(u64::from(full.settings.kept_layers.activations))
        }
        (Phase::Backward, Some(layer)) => {
            let policy = SavePolicy::new(Checkpointing::Sqrt, full.settings.compression, spec.num_layers);
            let before = policy.segments().filter(|segment| segment.end <= layer);
            before.map(|segment| segment.len().saturating_sub(1) as u64).sum()
        }
        _ => u64::from(spec.num_layers),
    };
    let inputs = full.settings.layer_input_bytes(spec).saturating_mul(spared);
    at_peak.by_tag.total() - at_peak.by_tag.get(Tag::Activations).min(inputs)
}

/// Whether one form keeps all of every layer that another does, and more.
fn keeps_no_less(one: Checkpointing, other: Checkpointing) -> bool {
    let in_layers = matches!(other, Checkpointing::Full | Checkpointing::Selective(_));
    one != other && in_layers && recomputes_less(one, other)
}

/// Whether one form recomputes nothing that another does not.
fn recomputes_less(one: Checkpointing, other: Checkpointing) -> bool {
    use Checkpointing::{Every, Full, None, Selective, Sqrt};
    match (one, other) {
        (Full, Full)
        | (Sqrt, Sqrt)
        | (None, _)
        | (Selective(_), Full | Every(_) | Sqrt)
        | (Full, Every(_) | Sqrt) => true,
        (Selective(one), Selective(other)) => {
            Group::ALL.into_iter().all(|group| !one.contains(group) || other.contains(group))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_model::catalogue;

    use super::*;
    use crate::config::{Method, RawConfig};
    use crate::method::training_method;
    use crate::resolve::{offloads, precisions, step_settings};
    use crate::runs::{DryRuns, tests::RATES};

    /// Every form, batch, precision and offload of an automatic search, run: none is below what was known of it.
    #[test]
    fn no_run_is_smaller_or_faster_than_what_is_known_before() {
        for method in [Method::Full, Method::Lora, Method::Qlora] {
            for optimizer_in_backward in [false, true] {
                let mut config = RawConfig::default();
                config.training.method = Some(method);
                config.training.optimizer_in_backward = Some(optimizer_in_backward);
                check_bounds(&config);
            }
        }
    }

    fn check_bounds(config: &RawConfig) {
        let spec = ModelSpec { num_layers: 12, ..catalogue::find("smollm2-135m").unwrap() };
        let method = training_method(config, &spec, None).unwrap();
        let runs = DryRuns::new(&spec, &RATES);
        let limits = Limits { disk_bytes: 1 << 50, ..Limits::endless() };
        let search = Search { config, method: &method, runs: &runs, limits, ladder: &[], rival: None };
        let groups = |n| Checkpointing::Selective(Group::ALL.into_iter().take(n).collect());
        let forms = [Checkpointing::None, groups(2), groups(4), Checkpointing::Full, Checkpointing::Sqrt];
        let accumulates = !config.training.optimizer_in_backward();
        let batches: &[(u64, u64)] = if accumulates { &[(1, 4), (2, 2), (4, 1)] } else { &[(1, 1), (4, 1)] };
        let mut by_disk = 0.0;
        for precision in precisions(&config.training, &method, None) {
            let mut made = Vec::new();
            for offload in offloads(config, limits) {
                let wanted = |form, (batch_size, accumulation)| {
                    let settings = step_settings(config, &spec, &method, precision, form, batch_size);
                    (StepSettings { offload, ..settings }, accumulation)
                };
                let all = forms.iter().flat_map(|form| batches.iter().map(|batch| wanted(*form, *batch)));
                let all: Vec<Wanted> = all.collect();
                runs.ahead(all.iter().cloned());
                made.extend(all.into_iter().map(|(settings, n)| runs.of(settings, n).unwrap()));
            }
            for choice in &made {
                let own = (choice.settings.clone(), choice.accumulation);
                let StepSettings { offload, checkpointing, batch_size, .. } = choice.settings;
                let which = (offload, checkpointing, batch_size);
                let others = made.iter().filter(|other| other.settings != own.0);
                assert!(search.least_bytes(&own, others) <= choice.peak_bytes(), "{which:?}");
                let least_disk = search.least_disk_bytes(&own.0);
                assert!(least_disk <= choice.dry_run.disk_bytes(), "{which:?}");
                // Adapters and their states are small: they stay.
                let moves_states = offload.optimizer == Tier::Disk && method.adapters().is_none();
                assert!(least_disk > 0 || !moves_states, "{which:?}");
                for other in made.iter().filter(|other| other.settings.offload == own.0.offload) {
                    let keeps_more = keeps_no_less(other.settings.checkpointing, own.0.checkpointing);
                    let at_home = own.0.offload.activations == Tier::Device;
                    if keeps_more
                        && at_home
                        && takes_no_less(choice, &(other.settings.clone(), other.accumulation))
                    {
                        assert!(other.peak_bytes() >= choice.peak_bytes(), "{which:?} {:?}", other.settings);
                    }
                    if recomputes_less(other.settings.checkpointing, own.0.checkpointing) {
                        assert!(search.least_per_token(other, &own) <= per_token(choice) * 1.000_001);
                    }
                    let of_disk = search.least_of_disk(other, &own);
                    assert!(of_disk <= per_token(choice) * 1.000_001, "{which:?} {:?}", other.settings);
                    by_disk = f64::max(by_disk, of_disk / per_token(choice));
                }
            }
        }
        // Adapters are counted half, and updates in the backward pass come in one pass.
        let is_full = accumulates && method.adapters().is_none();
        assert!(!is_full || by_disk > 0.4, "{by_disk}");
    }
}
