//! What is known of a step before it is run, from what it takes at rest and from runs of others: a run that could decide nothing
//! is left out.

use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_model::ModelSpec;
use plimsoll_step::{Checkpointing, Compression, Group, SavePolicy, StepSettings};

use crate::limits::Limits;
use crate::resolve::{AS_FAST, Choice, Search, per_token};
use crate::runs::Wanted;

impl Search<'_> {
    /// Bytes of arena that a step takes at least, known without running it: what it takes at rest and, where `like` is the same
    /// step with another form of checkpointing, what that does not spare.
    pub fn least_bytes(&self, settings: &StepSettings, like: Option<&Choice>) -> u64 {
        let at_rest = self.runs.bytes_at_rest(settings);
        like.map_or(at_rest, |like| at_rest.max(not_spared(self.runs.spec, like)))
    }

    /// Whether a candidate shows that no other of its form with more sequences fits: there is no room for its own.
    pub fn has_no_room_for_more(&self, shorter: &Choice, wanted: &Wanted) -> bool {
        takes_no_less(shorter, wanted)
            && shorter.peak_bytes() > self.limits.room_bytes.min(self.limits.arena_bytes)
    }

    /// The same of a candidate that is checkpointed layer by layer, and one in segments.
    pub fn has_no_room_for_segments(&self, full: &Choice, wanted: &Wanted) -> bool {
        full.settings.checkpointing == Checkpointing::Full
            && wanted.0.checkpointing == Checkpointing::Sqrt
            && takes_no_less(full, wanted)
            && not_spared(self.runs.spec, full) > self.limits.room_bytes.min(self.limits.arena_bytes)
    }

    /// Whether a candidate would not be among the fastest that fit, as what recomputes no more than it says: of its batch, or
    /// of another.
    pub fn is_slower(&self, known: &[&Choice], wanted: &Wanted) -> bool {
        let less =
            known.iter().filter(|less| recomputes_less(less.settings.checkpointing, wanted.0.checkpointing));
        let Some(least) = less.map(|less| self.least_per_token(less, wanted)).max_by(f64::total_cmp) else {
            return false;
        };
        let slower = |room| {
            let fitting = known.iter().filter(|choice| self.fits(choice, room));
            let fastest = fitting.map(|choice| per_token(choice)).min_by(f64::total_cmp);
            fastest.is_some_and(|fastest| least > fastest * AS_FAST)
        };
        let Limits { target_bytes, room_bytes, .. } = self.limits;
        // Where it would be over the target, those count that fit in the room.
        let strongest = known.iter().find(|choice| {
            let StepSettings { checkpointing, batch_size, .. } = choice.settings;
            checkpointing == Checkpointing::Full && batch_size == wanted.0.batch_size
        });
        let over_target = || {
            wanted.0.checkpointing == Checkpointing::Sqrt
                && self.least_bytes(&wanted.0, strongest.copied()) > target_bytes
        };
        slower(target_bytes) || over_target() && slower(room_bytes)
    }

    /// Seconds that a token takes at least in a step which recomputes all that `less` does. What is recomputed takes time, and
    /// what is kept takes none where it is neither moved nor compressed.
    fn least_per_token(&self, less: &Choice, (settings, accumulation): &Wanted) -> f64 {
        let own = &less.settings;
        if own.compression != Compression::None {
            return 0.0;
        }
        let tokens = |settings: &StepSettings, accumulation: u64| {
            (settings.batch_size * settings.sequence_length).saturating_mul(accumulation)
        };
        let all = tokens(own, less.accumulation);
        let seconds = match own.batch_size == settings.batch_size {
            true if own.offload.activations == Tier::Device => less.time.step_seconds,
            true => less.time.step_seconds - less.time.waiting_seconds,
            // Full fine-tuning has no products that are made once in a pass, however long it is.
            false if own.method.adapters().is_none() && all == tokens(settings, *accumulation) => {
                self.runs.rates.products(&less.dry_run.tally)
            }
            false => 0.0,
        };
        seconds / all.max(1) as f64
    }
}

/// Whether a candidate with more sequences than `shorter` has takes as much memory, if all else is the same.
fn takes_no_less(shorter: &Choice, (settings, accumulation): &Wanted) -> bool {
    // A sum over micro-batches is memory that one micro-batch does without.
    shorter.settings.batch_size <= settings.batch_size && (shorter.accumulation > 1) == (*accumulation > 1)
}

/// Bytes that are live at the peak of a step which keeps the inputs of layers, and would be there if it kept those of
/// segments: all but inputs of layers. Whoever goes back through a layer has those of its segment before it too.
fn not_spared(spec: &ModelSpec, full: &Choice) -> u64 {
    let at_peak = full.dry_run.at_peak();
    let spared = match (at_peak.phase, at_peak.layer) {
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
    use plimsoll_step::TrainingMethod;

    use super::*;
    use crate::config::RawConfig;
    use crate::resolve::{offloads, precisions, step_settings};
    use crate::runs::{DryRuns, tests::RATES};

    /// Every form, batch, precision and offload of an automatic search, run: none is below what was known of it.
    #[test]
    fn no_run_is_smaller_or_faster_than_what_is_known_before() {
        let spec = ModelSpec { num_layers: 12, ..catalogue::find("smollm2-135m").unwrap() };
        let (config, method) = (RawConfig::default(), TrainingMethod::Full);
        let runs = DryRuns::new(&spec, &RATES);
        let limits = Limits::endless();
        let search = Search { config: &config, method: &method, runs: &runs, limits, ladder: &[] };
        let groups = |n| Checkpointing::Selective(Group::ALL.into_iter().take(n).collect());
        let forms = [Checkpointing::None, groups(2), groups(4), Checkpointing::Full, Checkpointing::Sqrt];
        for precision in precisions(&config.training, &method) {
            for offload in offloads(&config) {
                let wanted = |form, (batch_size, accumulation)| {
                    let settings = step_settings(&config, &spec, &method, precision, form, batch_size);
                    (StepSettings { offload, ..settings }, accumulation)
                };
                let batches = [(1, 4), (2, 2), (4, 1)];
                let all = forms.iter().flat_map(|form| batches.map(|batch| wanted(*form, batch)));
                let all: Vec<Wanted> = all.collect();
                runs.ahead(all.iter().cloned());
                let made: Vec<Choice> =
                    all.iter().map(|(settings, n)| runs.of(settings.clone(), *n).unwrap()).collect();
                for choice in &made {
                    let own = (choice.settings.clone(), choice.accumulation);
                    assert!(search.least_bytes(&own.0, None) <= choice.peak_bytes(), "{own:?}");
                    for other in &made {
                        let (before, after) = (other.settings.checkpointing, own.0.checkpointing);
                        if (before, after) == (Checkpointing::Full, Checkpointing::Sqrt)
                            && takes_no_less(other, &own)
                        {
                            assert!(
                                search.least_bytes(&own.0, Some(other)) <= choice.peak_bytes(),
                                "{own:?}"
                            );
                        }
                        if recomputes_less(before, after) {
                            assert!(search.least_per_token(other, &own) <= per_token(choice) * 1.000_001);
                        }
                    }
                }
            }
        }
    }
}
