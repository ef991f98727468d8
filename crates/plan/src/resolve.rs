//! From what the user wrote to what will run: every `auto` decided by dry-running a short list of candidates and
//! taking the fastest that fits.

mod candidates;
mod choice;
mod lighter;
mod settings;

use std::sync::Arc;

use plimsoll_memory::{Tag, Tier};
use plimsoll_model::{ModelSpec, Parameter, Role};
use plimsoll_step::{Checkpointing, Offload, Precision, StepError, StepSettings, TrainingMethod};

use self::candidates::powers_of_two;
pub(crate) use self::candidates::{batches, checkpointings, precisions};
pub use self::choice::Choice;
pub(crate) use self::choice::sequences;
pub use self::lighter::lighter_choices;
pub(crate) use self::settings::{
    check_model, chunk_within, evaluation_batch_size, resolved_with, settled, step_settings,
};
pub use self::settings::{loss_chunk_tokens, resolved_config};
use crate::config::{RawConfig, TrainingConfig};
use crate::expert_slots;
use crate::limits::Limits;
use crate::offload;
use crate::runs::{DryRuns, Wanted};

/// Choices within this share of the fastest one count as equally fast; the smallest of them is taken.
pub(crate) const AS_FAST: f64 = 1.01;
/// Logits of a chunk on a card take this much at most where the user does not say.
const CARD_LOGITS_BYTES: u64 = 1 << 30;

/// Micro-batches of a step up to which it is tried how many of them are best taken together: each such plan runs those of a
/// pass dry.
const MOST_TOGETHER: u64 = 32;

/// Decides every `auto` of the step. What the user left open stays on the device unless nothing fits then. Where nothing
/// fits at all, the smallest candidate comes back: it does not fit either.
pub(crate) fn choose(
    config: &RawConfig,
    method: &TrainingMethod,
    runs: &DryRuns<'_>,
    limits: Limits,
) -> Result<Choice, StepError> {
    let config = &*config.for_chunks();
    let ladder = ladder(config, runs.spec, method, limits);
    let runs = &runs.within(limits);
    let search = Search { config, method, runs, limits, ladder: &ladder, rival: None };
    for offload in offloads(config, limits) {
        if let Some(choice) = search.candidates(offload)? {
            return search.finished(choice);
        }
    }
    runs.complete(search.nearest()?)
}

/// Of divisions of the ranks, the lightest step of the first in which one fits, or, where none does, the nearest of all. A division that
/// the model cannot be trained in does not count beside others.
pub(crate) fn lightest_of(
    divisions: &[RawConfig],
    method: &TrainingMethod,
    runs: &DryRuns<'_>,
    limits: Limits,
) -> Result<Choice, StepError> {
    let mut nearest: Option<Result<Choice, StepError>> = None;
    for config in divisions {
        let found = match lightest_that_fits(config, method, runs, limits) {
            Ok(found) if limits.allow(&found) => return Ok(found),
            other => other,
        };
        let is_nearer = match (&found, &nearest) {
            (_, None) | (Ok(_), Some(Err(_))) => true,
            (Ok(found), Some(Ok(nearest))) => limits.distance(found) < limits.distance(nearest),
            (Err(_), Some(_)) => false,
        };
        if is_nearer {
            nearest = Some(found);
        }
    }
    nearest.unwrap_or(Err(StepError::Invariant { what: "the ranks are divided in no way" }))
}

/// The first of the lightest forms that fits, or, where none does, the nearest: whether anything fits, without a search
/// for the fastest that does. [`choose`] finds something that fits wherever this does.
pub(crate) fn lightest_that_fits(
    config: &RawConfig,
    method: &TrainingMethod,
    runs: &DryRuns<'_>,
    limits: Limits,
) -> Result<Choice, StepError> {
    let config = &*config.for_chunks();
    let ladder = ladder(config, runs.spec, method, limits);
    let runs = &runs.within(limits);
    let search = Search { config, method, runs, limits, ladder: &ladder, rival: None };
    for offload in offloads(config, limits) {
        for precision in precisions(&config.training, method, limits.narrow) {
            for batches in batches(config) {
                if let Some(choice) = search.lightest(precision, offload, &batches)? {
                    return Ok(choice);
                }
            }
        }
    }
    runs.complete(search.nearest()?)
}

/// What a search for a step goes by.
pub(crate) struct Search<'a> {
    pub config: &'a RawConfig,
    pub method: &'a TrainingMethod,
    pub runs: &'a DryRuns<'a>,
    pub limits: Limits,
    /// The lightest forms in the order in which they are tried.
    pub ladder: &'a [Wanted],
    /// Seconds that a token takes where the ranks divide the work in another way, if that is known and may be taken.
    pub rival: Option<f64>,
}

/// What the user says of offload, and more and more of it where that is left open.
pub(crate) fn offloads(config: &RawConfig, limits: Limits) -> impl Iterator<Item = Offload> {
    offload::offloads(&config.memory, limits.lower_tiers()).into_iter()
}

/// The lightest forms of all offloads, precisions and batches, in the order in which they are tried.
pub(crate) fn ladder(
    config: &RawConfig,
    spec: &ModelSpec,
    method: &TrainingMethod,
    limits: Limits,
) -> Vec<Wanted> {
    let training = &config.training;
    let mut all = Vec::new();
    for offload in offloads(config, limits) {
        for precision in precisions(training, method, limits.narrow) {
            for batch in batches(config).iter().filter_map(|batches| shortest(batches)) {
                for form in lightest_forms(training) {
                    let settings = step_settings(config, spec, method, precision, form, batch.0);
                    all.push((at_home(config, spec, settings, offload), batch.1));
                }
            }
        }
    }
    all
}

/// A step with its tensors on these tiers, and its sequences in chunks where they are to be.
fn at_home(config: &RawConfig, spec: &ModelSpec, settings: StepSettings, offload: Offload) -> StepSettings {
    // Where nothing comes, there is nothing to wait for.
    let offload = Offload { prefetch: offload.prefetch || offload.is_none(), ..offload };
    let sequence_chunk_tokens = config.sequence_chunk();
    expert_slots::settled(config, spec, StepSettings { offload, sequence_chunk_tokens, ..settings })
}

/// The batch of the fewest sequences.
fn shortest(batches: &[(u64, u64)]) -> Option<(u64, u64)> {
    batches.iter().copied().min_by_key(|(size, _)| *size)
}

/// The two strongest forms of checkpointing where it is left open.
fn lightest_forms(training: &TrainingConfig) -> Vec<Checkpointing> {
    let forms = checkpointings(training);
    if forms.len() > 1 { vec![Checkpointing::Full, Checkpointing::Sqrt] } else { forms }
}

impl Search<'_> {
    /// Whether a step keeps to the limits with so much room under the line.
    pub fn fits(&self, choice: &Choice, room: u64) -> bool {
        self.limits.allow_within(choice, room)
    }

    pub fn candidate(
        &self,
        precision: Precision,
        checkpointing: Checkpointing,
        (batch_size, accumulation): (u64, u64),
        offload: Offload,
    ) -> Wanted {
        let Search { config, method, runs, .. } = self;
        let settings = step_settings(config, runs.spec, method, precision, checkpointing, batch_size);
        (at_home(config, runs.spec, settings, offload), accumulation)
    }

    /// The best of all candidates with an offload.
    fn candidates(&self, offload: Offload) -> Result<Option<Choice>, StepError> {
        let all = precisions(&self.config.training, self.method, self.limits.narrow);
        // A precision that loses nothing is preferred to one that does, however fast; on a CPU that is made for bf16, bf16 is preferred.
        // Speeds of cards are the catalogue's; those of a CPU are measured, and shall not decide what a step computes.
        let together = if self.limits.narrow.is_some() && self.limits.is_apart { all.len() } else { 1 };
        for alike in all.chunks(together.max(1)) {
            for batches in batches(self.config) {
                let mut possible = Vec::new();
                for precision in alike {
                    // Where the lightest form does not fit, no other will.
                    if self.lightest(*precision, offload, &batches)?.is_some() {
                        possible.push(*precision);
                    }
                }
                // What there is no room for under the target need not be run where anything is below it.
                for room_bytes in [self.limits.target_bytes, self.limits.room_bytes] {
                    let within = Search { limits: Limits { room_bytes, ..self.limits }, ..*self };
                    let mut candidates = Vec::new();
                    for precision in &possible {
                        candidates.extend(within.of_all_forms(*precision, offload, &batches)?);
                    }
                    let fits = |choice: &Choice| self.fits(choice, room_bytes);
                    let Some(index) = best(&candidates, fits) else { continue };
                    if possible.len() > 1 && !offload.is_none() {
                        return self.fastest_when_filled(&candidates, &possible, fits);
                    }
                    return Ok(Some(candidates.swap_remove(index)));
                }
            }
        }
        Ok(None)
    }

    /// Of the best candidates of several precisions the one that is fastest when what was sent away has come back as far as there is room:
    /// how much that is depends on the room that a precision leaves.
    fn fastest_when_filled(
        &self,
        candidates: &[Choice],
        precisions: &[Precision],
        fits: impl Fn(&Choice) -> bool,
    ) -> Result<Option<Choice>, StepError> {
        let mut fastest: Option<(f64, Choice)> = None;
        for precision in precisions {
            let own = candidates.iter().filter(|choice| choice.settings.precision == *precision);
            let mut own: Vec<Choice> = own.cloned().collect();
            let Some(index) = best(&own, &fits) else { continue };
            let choice = own.swap_remove(index);
            let seconds = per_token(&self.finished(choice.clone())?);
            if fastest.as_ref().is_none_or(|(least, _)| seconds < *least) {
                fastest = Some((seconds, choice));
            }
        }
        Ok(fastest.map(|(_, choice)| choice))
    }

    /// The form that recomputes least.
    pub fn first_form(&self) -> Option<Checkpointing> {
        checkpointings(&self.config.training).first().copied()
    }

    /// The lightest candidates: the shortest of the batches, and the lightest forms.
    pub fn lightest_candidates(
        &self,
        precision: Precision,
        offload: Offload,
        batches: &[(u64, u64)],
    ) -> Vec<Wanted> {
        let forms = lightest_forms(&self.config.training);
        let of = |batch| forms.iter().map(move |form| self.candidate(precision, *form, batch, offload));
        shortest(batches).into_iter().flat_map(of).collect()
    }

    /// The same step with as many micro-batches in a pass as are worth it, what the planner has sent away brought back as far as there
    /// is room, exchanges behind the computation, and on a card more logits at once.
    pub fn finished(&self, choice: Choice) -> Result<Choice, StepError> {
        let together = self.together(&choice)?;
        let filled = self.filled(choice)?;
        let best = match together.map(|together| self.filled(together)).transpose()? {
            Some(together) if together.time.tokens_per_second > filled.time.tokens_per_second => together,
            _ => filled,
        };
        self.with_more_logits(self.overlapped(best)?)
    }

    /// The same with as many logits at once as there is room for, up to [`CARD_LOGITS_BYTES`], where that is faster, left open and a card computes:
    /// products of few rows leave most of its multiprocessors idle.
    fn with_more_logits(&self, choice: Choice) -> Result<Choice, StepError> {
        let Limits { target_bytes, .. } = self.limits;
        let open = self.config.training.loss_chunk_tokens().set().is_none();
        if !(open && !self.runs.rates.wiring.device.unified && self.fits(&choice, target_bytes)) {
            return Ok(choice);
        }
        let own = &choice.settings;
        let tokens = own.chunk_tokens().unwrap_or(own.batch_size.saturating_mul(own.sequence_length));
        let mut more = chunk_within(CARD_LOGITS_BYTES, self.runs.spec.vocab_size, tokens);
        while more > own.loss_chunk_tokens {
            let settings = StepSettings { loss_chunk_tokens: more, ..own.clone() };
            let other = self.runs.of(settings, choice.accumulation)?;
            if self.fits(&other, target_bytes)
                && other.time.tokens_per_second >= choice.time.tokens_per_second
            {
                return Ok(other);
            }
            more = more.next_power_of_two() / 2;
        }
        Ok(choice)
    }

    /// A candidate for every form of checkpointing and batch, but for those of which others say that they cannot be taken.
    pub fn of_all_forms(
        &self,
        precision: Precision,
        offload: Offload,
        batches: &[(u64, u64)],
    ) -> Result<Vec<Choice>, StepError> {
        let forms = checkpointings(&self.config.training);
        let mut found: Vec<Vec<Option<Choice>>> = forms.iter().map(|_| vec![None; batches.len()]).collect();
        let probes = self.probes(precision, offload, batches)?;
        let longest_first = self.has_room_for_all(precision, offload, batches)?;
        // Forms that keep more come before. So do longer batches, which say how fast shorter ones can be, where there is room for all
        // of them, and shorter ones, which say that there is none for longer ones, where there is not. Those that do not wait for each
        // other are run at once.
        for turn in 0..forms.len() + batches.len() {
            let known: Vec<&Choice> = found.iter().flatten().flatten().collect();
            let batch =
                |nth: usize| if longest_first { batches.len().checked_sub(nth + 1) } else { Some(nth) };
            let places = (0..forms.len()).filter_map(|form| Some((form, batch(turn.checked_sub(form)?)?)));
            let next = places.filter_map(|(form, batch)| {
                let wanted = self.candidate(precision, *forms.get(form)?, *batches.get(batch)?, offload);
                let of_form = found.get(form)?.iter().flatten();
                let too_large = of_form.clone().any(|shorter| self.has_no_room_for_more(shorter, &wanted))
                    || probes.iter().any(|probe| self.has_no_room_for_kept(probe, &wanted))
                    || known.iter().any(|full| self.has_no_room_for_segments(full, &wanted));
                (!too_large && !self.is_slower(&known, &wanted)).then_some((form, batch, wanted))
            });
            let next: Vec<(usize, usize, Wanted)> = next.collect();
            self.runs.ahead(next.iter().map(|(.., wanted)| wanted.clone()));
            for (form, batch, (settings, accumulation)) in next {
                let place = found.get_mut(form).and_then(|of_form| of_form.get_mut(batch));
                let choice = self.runs.of(settings, accumulation)?;
                if let Some(place) = place {
                    *place = Some(choice);
                }
            }
        }
        Ok(found.into_iter().flatten().flatten().collect())
    }

    /// Whether what keeps the most fits in the longest batch.
    fn has_room_for_all(
        &self,
        precision: Precision,
        offload: Offload,
        batches: &[(u64, u64)],
    ) -> Result<bool, StepError> {
        let longest = batches.iter().copied().max_by_key(|(size, _)| *size).filter(|_| batches.len() > 1);
        let (Some(batch), Some(form)) = (longest, self.first_form()) else { return Ok(false) };
        let wanted = self.candidate(precision, form, batch, offload);
        let known = self.runs.known();
        if self.cannot_fit(&wanted, known.iter().map(Arc::as_ref)) {
            return Ok(false);
        }
        let choice = self.runs.of(wanted.0, wanted.1)?;
        Ok(self.fits(&choice, self.limits.room_bytes))
    }

    /// Runs of the shortest batch that may say of several forms that there is no room for them: one of a form that keeps little and,
    /// where that fits, one that keeps more. Of ranks alone, whose runs are many.
    fn probes(
        &self,
        precision: Precision,
        offload: Offload,
        batches: &[(u64, u64)],
    ) -> Result<Vec<Choice>, StepError> {
        let forms = checkpointings(&self.config.training);
        let is_selective = |form: &Checkpointing| matches!(form, Checkpointing::Selective(_));
        let selective: Vec<Checkpointing> = forms.into_iter().filter(is_selective).collect();
        let batch = shortest(batches).filter(|_| self.config.parallel.mesh().size() > 1);
        let (Some(batch), Some(most)) = (batch, selective.last()) else { return Ok(Vec::new()) };
        let run = |form| {
            let (settings, accumulation) = self.candidate(precision, form, batch, offload);
            self.runs.of(settings, accumulation)
        };
        let first = run(*most)?;
        let second = match (self.fits(&first, self.limits.room_bytes), selective.get(selective.len() / 2)) {
            (true, Some(middle)) => Some(run(*middle)?),
            _ => None,
        };
        Ok([Some(first), second].into_iter().flatten().collect())
    }

    /// The same with as many micro-batches in a pass as are worth their memory. Only where the user leaves the number
    /// open, where passes read tensors from a disk, and where no bit depends on the number.
    fn together(&self, choice: &Choice) -> Result<Option<Choice>, StepError> {
        let Choice { settings, accumulation, .. } = choice;
        let Offload { parameters, gradients, .. } = settings.offload;
        let brings = parameters == Tier::Disk || gradients == Tier::Disk;
        let open = self.config.training.micro_batches_per_pass().set().is_none();
        let bits_stay = keeps_bits(self.runs.spec, self.method);
        // More of them take no less memory.
        let fits = |choice: &Choice| self.fits(choice, self.limits.target_bytes);
        let alone = settings.ranks.mesh.pipeline <= 1;
        if !(alone && open && brings && *accumulation <= MOST_TOGETHER && bits_stay && fits(choice)) {
            return Ok(None);
        }
        let mut sizes: Vec<u64> = powers_of_two(*accumulation).chain([*accumulation]).skip(1).collect();
        sizes.dedup();
        // The more, the fewer passes: the most that there is room for are the fastest. All of them first, then by halves.
        let with = |place: usize| {
            let micro_batches_per_pass = sizes.get(place).copied()?;
            Some((StepSettings { micro_batches_per_pass, ..settings.clone() }, *accumulation))
        };
        let (mut low, mut high, mut next) = (0, sizes.len(), sizes.len().saturating_sub(1));
        self.runs.ahead_of_first([next, next / 2].into_iter().filter_map(with));
        let mut most = None;
        while low < high
            && let Some((settings, accumulation)) = with(next)
        {
            let other = self.runs.of(settings, accumulation)?;
            if fits(&other) {
                (low, most) = (next + 1, Some(other));
            } else {
                high = next;
            }
            next = low.midpoint(high);
        }
        // Micro-batches share experts in the slots that there will be.
        let faster = |other: &Choice| {
            other.settings.expert_slots > 0
                || other.time.tokens_per_second > choice.time.tokens_per_second * AS_FAST
        };
        Ok(most.filter(faster))
    }

    /// The same with exchanges between ranks behind the computation, where that is left open, fits and is faster.
    fn overlapped(&self, choice: Choice) -> Result<Choice, StepError> {
        let open = self.config.parallel.overlap_communication().set().is_none();
        if !(open && choice.settings.can_overlap()) {
            return Ok(choice);
        }
        let Limits { target_bytes, room_bytes, .. } = self.limits;
        let room = if self.fits(&choice, target_bytes) { target_bytes } else { room_bytes };
        let settings = StepSettings { overlap_communication: true, ..choice.settings.clone() };
        let other = self.runs.of(settings, choice.accumulation)?;
        let faster = other.time.tokens_per_second > choice.time.tokens_per_second;
        Ok(if faster && self.fits(&other, room) { other } else { choice })
    }

    /// The first that fits of the lightest candidates.
    pub fn lightest(
        &self,
        precision: Precision,
        offload: Offload,
        batches: &[(u64, u64)],
    ) -> Result<Option<Choice>, StepError> {
        let room = self.limits.room_bytes.min(self.limits.arena_bytes);
        for wanted in self.lightest_candidates(precision, offload, batches) {
            let form = wanted.0.checkpointing;
            let known = self.runs.known();
            let known = || known.iter().map(Arc::as_ref);
            if self.cannot_fit(&wanted, known()) {
                continue;
            }
            // What is tried next, if this does not fit: most often the same form in another precision or place.
            let next = self.ladder.iter().skip_while(|next| **next != wanted);
            let next = next.filter(|next| next.0.checkpointing == form && !self.cannot_fit(next, known()));
            self.runs.ahead_of_first(next.cloned());
            let choice = self.runs.of(wanted.0, wanted.1)?;
            if self.fits(&choice, self.limits.room_bytes) {
                return Ok(Some(choice));
            }
            // No form of checkpointing spares any of that.
            if resident_bytes(&choice) > room {
                break;
            }
        }
        Ok(None)
    }
}

/// What there is of weights and states at the peak, whatever is kept of the activations.
fn resident_bytes(choice: &Choice) -> u64 {
    let at_peak = choice.dry_run.tags_at_peak();
    [Tag::Weights, Tag::MasterWeights, Tag::Optimizer, Tag::Adapters].map(|tag| at_peak.get(tag)).iter().sum()
}

/// Whether the order in which micro-batches go through the blocks changes no bit. It changes bits where a tied embedding is
/// trained: each micro-batch adds two parts to that gradient.
fn keeps_bits(spec: &ModelSpec, method: &TrainingMethod) -> bool {
    let table = |p: &Parameter| p.role == Role::TokenEmbedding;
    let trains_table = method.adapters().is_none_or(|adapters| adapters.layout.trained().any(table));
    !(spec.tie_word_embeddings && trains_table)
}

/// Seconds that a token takes.
pub(crate) fn per_token(choice: &Choice) -> f64 {
    1.0 / choice.time.tokens_per_second
}

/// The fastest candidate that fits; of equally fast ones the smallest.
fn best(candidates: &[Choice], fits: impl Fn(&Choice) -> bool) -> Option<usize> {
    let fitting = || candidates.iter().enumerate().filter(|(_, c)| fits(c));
    let fastest = fitting().map(|(_, c)| per_token(c)).min_by(f64::total_cmp)?;
    fitting()
        .filter(|(_, c)| per_token(c) <= fastest * AS_FAST)
        .min_by_key(|(_, c)| c.peak_bytes())
        .map(|(i, _)| i)
}
