//! From what the user wrote to what will run: every `auto` decided by dry-running a short list of candidates and
//! taking the fastest that fits.

use std::sync::Arc;

use plimsoll_device::DType;
use plimsoll_device::cpu::at_once;
use plimsoll_memory::{Tag, Tier};
use plimsoll_model::{ModelSpec, Parameter, Role};
use plimsoll_step::{
    AttentionKind, Checkpointing, GradientClipping, Group, KeptLayers, Linears, LossScaling,
    MOST_INTERLEAVED, NormSource, Offload, Precision, Ranks, RouterTraining, StepError, StepSettings,
    TrainingMethod, UpdateTiming,
};

use crate::config::{
    Attention, Auto, GradientCheckpointing, GradientDtype, InBackwardClipping, MasterWeights, MixedPrecision,
    RawConfig, TrainingConfig,
};
use crate::dry_run::DryRun;
use crate::expert_slots;
use crate::limits::Limits;
use crate::offload::{self, TensorKind, as_said, kept_as_said, stages};
use crate::optimizer::optimizer_settings;
use crate::runs::{DryRuns, Wanted, threads};
use crate::stages::telling;
use crate::time::{Rates, TimeEstimate};

/// Sequences of an optimizer step where the user names none.
const DEFAULT_EFFECTIVE_BATCH: u64 = 8;

/// Logits of a chunk take about this much where the user does not say.
const LOGITS_BYTES: u64 = 32 << 20;

/// Choices within this share of the fastest one count as equally fast; the smallest of them is taken.
pub(crate) const AS_FAST: f64 = 1.01;

/// Tokens of a chunk below which a plan that is to need less does not go.
const LEAST_CHUNK: u64 = 256;

/// Micro-batches of a step up to which it is tried how many of them are best taken together: each such plan runs those of a
/// pass dry.
const MOST_TOGETHER: u64 = 32;

/// A training step with nothing left to decide, and what the dry run says of it.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The step.
    pub settings: StepSettings,
    /// Micro-batches of an optimizer step.
    pub accumulation: u64,
    /// The rank whose step was run dry: of a pipeline, one of the stage that takes most, until it is known that all fit.
    pub rank: u32,
    /// Whether all stages have been run: not where one takes more than there is.
    pub whole: bool,
    /// Its memory and arithmetic.
    pub dry_run: DryRun,
    /// Its time.
    pub time: TimeEstimate,
}

impl Choice {
    /// Runs a step dry.
    pub fn new(
        spec: &ModelSpec,
        settings: StepSettings,
        accumulation: u64,
        rates: &Rates,
    ) -> Result<Choice, StepError> {
        Choice::within(spec, settings, accumulation, rates, None)
    }

    /// The same; of a pipeline, no further stages where one does not keep to the limits.
    pub(crate) fn within(
        spec: &ModelSpec,
        settings: StepSettings,
        accumulation: u64,
        rates: &Rates,
        limits: Option<Limits>,
    ) -> Result<Choice, StepError> {
        // Of the ranks that micro-batches of this one go through, the first has most under way, and the last one has the head.
        let ranks = telling(spec, &settings, rates.wiring.network);
        Choice::through(ranks, spec, &settings, accumulation, rates, limits)
    }

    /// The same through the stages of these ranks.
    pub(crate) fn through(
        ranks: Vec<u32>,
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
        rates: &Rates,
        limits: Option<Limits>,
    ) -> Result<Choice, StepError> {
        let stages = ranks.len();
        let mut all: Vec<Choice> = Vec::new();
        for rank in ranks {
            all.push(Choice::of_stage(spec, settings, rank, accumulation, rates)?);
            if limits.is_some_and(|limits| all.last().is_some_and(|stage| !limits.allow(stage))) {
                break;
            }
        }
        let whole = all.len() == stages;
        let slowest = all.iter().map(|stage| stage.time);
        let slowest = slowest.max_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
        let bytes = |stage: &Choice| {
            let run = &stage.dry_run;
            (run.peak_bytes().saturating_add(run.host_bytes()), run.disk_bytes())
        };
        // Of several, the first.
        let heaviest = all.into_iter().rev().max_by_key(bytes);
        let heaviest = heaviest.ok_or(StepError::Invariant { what: "a pipeline has no stages" })?;
        let time = slowest.unwrap_or(heaviest.time);
        Ok(Choice { whole, time, ..heaviest })
    }

    /// A step through a pipeline, of which one stage is run: that of a rank.
    fn of_stage(
        spec: &ModelSpec,
        settings: &StepSettings,
        rank: u32,
        accumulation: u64,
        rates: &Rates,
    ) -> Result<Choice, StepError> {
        let ranks = Ranks { rank, ..settings.ranks };
        let own = StepSettings { ranks, ..settings.clone() };
        let dry_run = DryRun::timed_training(spec, &own, accumulation, rates)?;
        let time = TimeEstimate::of_stage(&dry_run, settings, accumulation);
        Ok(Choice { settings: settings.clone(), accumulation, rank, whole: true, dry_run, time })
    }

    /// The same of the rank that the settings are of.
    pub(crate) fn first_stage(
        spec: &ModelSpec,
        settings: StepSettings,
        accumulation: u64,
        rates: &Rates,
    ) -> Result<Choice, StepError> {
        let alone = Choice::of_stage(spec, &settings, settings.ranks.rank, accumulation, rates)?;
        Ok(Choice { whole: settings.ranks.mesh.pipeline <= 1, ..alone })
    }

    /// The same with what the rank that the settings are of takes, where another stage of a pipeline takes more.
    pub fn of_own_stage(self, spec: &ModelSpec, rates: &Rates) -> Result<Choice, StepError> {
        if self.settings.ranks.mesh.pipeline <= 1 {
            return Ok(self);
        }
        let dry_run = DryRun::timed_training(spec, &self.settings, self.accumulation, rates)?;
        Ok(Choice { dry_run, rank: self.settings.ranks.rank, whole: true, ..self })
    }

    /// Sequences of an optimizer step, of all ranks.
    pub fn sequences(&self) -> u64 {
        sequences(&self.settings, self.accumulation)
    }

    /// Bytes of arena that the step needs.
    pub fn peak_bytes(&self) -> u64 {
        self.dry_run.peak_bytes()
    }
}

fn sequences(settings: &StepSettings, accumulation: u64) -> u64 {
    let own = settings.batch_size.saturating_mul(accumulation);
    own.saturating_mul(u64::from(settings.ranks.mesh.data))
}

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
    let said = &config.memory.offload;
    std::iter::once(as_said(said)).chain(stages(said, limits.lower_tiers()))
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
        // A precision that loses nothing is preferred to one that does, however fast, but on a device that is made for the other.
        let together = if self.limits.narrow.is_some() { all.len() } else { 1 };
        for alike in all.chunks(together.max(1)) {
            for batches in batches(self.config) {
                let mut candidates = Vec::new();
                for precision in alike {
                    // Where the lightest form does not fit, no other will.
                    if self.lightest(*precision, offload, &batches)?.is_some() {
                        candidates.extend(self.of_all_forms(*precision, offload, &batches)?);
                    }
                }
                for room in [self.limits.target_bytes, self.limits.room_bytes] {
                    if let Some(index) = best(&candidates, |choice| self.fits(choice, room)) {
                        return Ok(Some(candidates.swap_remove(index)));
                    }
                }
            }
        }
        Ok(None)
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
    /// is room, and exchanges behind the computation.
    pub fn finished(&self, choice: Choice) -> Result<Choice, StepError> {
        let together = self.together(&choice)?;
        let filled = self.filled(choice)?;
        let Some(together) = together else { return self.overlapped(filled) };
        let together = self.filled(together)?;
        let faster = together.time.tokens_per_second > filled.time.tokens_per_second;
        self.overlapped(if faster { together } else { filled })
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
        // Forms that keep more and shorter batches come before, those that do not wait for each other at once.
        for turn in 0..forms.len() + batches.len() {
            let known: Vec<&Choice> = found.iter().flatten().flatten().collect();
            let places = (0..forms.len()).filter_map(|form| Some((form, turn.checked_sub(form)?)));
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
        self.runs.ahead_of_first([next, sizes.len() / 2].into_iter().filter_map(with));
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
    all.extend(made(wanted)?.into_iter().filter(|further| limits.memory(further) < lightest));
    all.retain(|other| {
        limits.memory(other) < limits.memory(choice)
            && other.dry_run.disk_bytes() <= limits.disk_bytes.max(choice.dry_run.disk_bytes())
    });
    all.sort_by_key(|other| std::cmp::Reverse(limits.memory(other)));
    Ok(all)
}

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
            let sixteen = if narrow == Some(DType::F16) { fp16 } else { bf16(masters) };
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

impl TimeEstimate {
    /// That of a rank's step. The stages of a pipeline wait for the first micro-batch to reach them, and for the last one to come back,
    /// each as long as it takes for a micro-batch, or for one in one of its runs of layers.
    fn of_stage(run: &DryRun, settings: &StepSettings, accumulation: u64) -> TimeEstimate {
        let mesh = settings.ranks.mesh;
        let tokens = (settings.batch_size * settings.sequence_length).saturating_mul(accumulation);
        let tokens = tokens.saturating_mul(u64::from(mesh.data));
        let mut times = run.times.unwrap_or_default();
        let legs = accumulation.max(1) as f64 * f64::from(settings.pipeline_schedule.rounds());
        let passes = times.elapsed - run.update_seconds;
        let idle = passes * f64::from(mesh.pipeline.saturating_sub(1)) / legs;
        times.elapsed += idle;
        times.waited += idle;
        TimeEstimate::new(times, &run.tally, tokens)
    }
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

fn powers_of_two(most: u64) -> impl Iterator<Item = u64> {
    (0..6).map(|power| 1 << power).take_while(move |n| *n <= most)
}

pub(crate) fn step_settings(
    config: &RawConfig,
    spec: &ModelSpec,
    method: &TrainingMethod,
    precision: Precision,
    checkpointing: Checkpointing,
    batch_size: u64,
) -> StepSettings {
    let training = &config.training;
    let sequence_length = config.data.sequence_length();
    let clip = training.max_gradient_norm();
    StepSettings {
        batch_size,
        sequence_length,
        precision,
        checkpointing,
        compression: training.activation_compression().0,
        attention: training.attention().set().map_or(AttentionKind::Flash, |attention| attention.0),
        // Which token it is says the tokenizer, when there is one; the plan is the same for each.
        document_end: (config.data.document_mask() && !config.data.has_samples())
            .then(|| spec.eos_tokens.first().copied().unwrap_or(0)),
        document_starts: config.data.has_samples() && config.data.packing(),
        target_weights: config.data.has_samples(),
        mlp_chunk_tokens: training.mlp_chunk_tokens,
        loss_chunk_tokens: training.loss_chunk_tokens().set().unwrap_or_else(|| {
            let tokens = config.sequence_chunk().unwrap_or(batch_size * sequence_length);
            loss_chunk_tokens(spec.vocab_size, tokens)
        }),
        optimizer: optimizer_settings(training),
        clipping: if clip > 0.0 { GradientClipping::GlobalNorm(clip) } else { GradientClipping::None },
        loss_scaling: (precision.activations == DType::F16).then(LossScaling::default),
        update: match (training.optimizer_in_backward(), training.in_backward_clipping) {
            (false, _) => UpdateTiming::AfterBackward,
            (true, Some(InBackwardClipping::PreviousNorm)) => {
                UpdateTiming::InBackward(NormSource::PreviousStep)
            }
            // Without clipping the norm is only reported: `validate` has seen to the rest.
            (true, Some(InBackwardClipping::SecondBackward) | None) => {
                UpdateTiming::InBackward(NormSource::SecondBackward)
            }
        },
        method: method.clone(),
        offload: Offload::NONE,
        kept_layers: kept_as_said(&config.memory.kept_layers),
        expert_slots: 0,
        micro_batches_per_pass: training.micro_batches_per_pass().set().unwrap_or(1),
        ranks: Ranks { rank: config.rank, mesh: config.parallel.mesh() },
        sharding: config.parallel.sharding(),
        overlap_communication: config.parallel.overlap_communication().set().unwrap_or(false),
        sequence_chunk_tokens: None,
        pipeline_schedule: config.parallel.schedule(),
        sequence_parallel: config.parallel.sequence_parallel(),
        evaluation_batch_size: training.eval_batch_size().set(),
        balance_loss: balance_loss(config, spec, method),
        routers: router_training(config, spec, method),
        stage: None,
        seed: training.seed(),
    }
}

/// Factor on the load-balancing loss of experts.
fn balance_loss(config: &RawConfig, spec: &ModelSpec, method: &TrainingMethod) -> f64 {
    let Some(experts) = &spec.experts else { return 0.0 };
    let usual = match method {
        // No stage of a pipeline sees all layers.
        TrainingMethod::Full if config.parallel.mesh().pipeline <= 1 => experts.router.balance_loss,
        _ => 0.0,
    };
    config.training.router_aux_loss_coef().set().unwrap_or(usual)
}

/// How fast the bias of a router changes that is balanced by it (DeepSeek-V3).
const BIAS_UPDATE_SPEED: f64 = 1e-3;

/// What else is done with routers.
fn router_training(config: &RawConfig, spec: &ModelSpec, method: &TrainingMethod) -> RouterTraining {
    let Some(experts) = &spec.experts else { return RouterTraining::default() };
    let training = &config.training;
    let from_scratch = config.model.path.is_none() && *method == TrainingMethod::Full;
    let speed = if from_scratch { BIAS_UPDATE_SPEED } else { 0.0 };
    let speed = training.router_bias_update_speed().set().unwrap_or(speed);
    RouterTraining {
        z_loss: training.router_z_loss_coef(),
        jitter: training.router_jitter_noise() as f32,
        capacity: training.expert_capacity_factor,
        correction_speed: if experts.router.correction { speed } else { 0.0 },
    }
}

/// The step of a configuration of which nothing is left open, or the first of its candidates.
pub(crate) fn settled(config: &RawConfig, spec: &ModelSpec, method: &TrainingMethod) -> Option<Wanted> {
    let precision = precisions(&config.training, method, None).first().copied()?;
    let form = checkpointings(&config.training).first().copied()?;
    let (batch_size, accumulation) = batches(config).first()?.first().copied()?;
    let settings = step_settings(config, spec, method, precision, form, batch_size);
    Some((at_home(config, spec, settings, as_said(&config.memory.offload)), accumulation))
}

/// Tokens of a chunk whose logits take about 32 MiB: a power of two, so that products stay on whole tiles.
pub fn loss_chunk_tokens(vocab_size: u64, tokens: u64) -> u64 {
    let most = (LOGITS_BYTES / (4 * vocab_size.max(1))).max(16);
    let power = 1 << (63 - most.leading_zeros());
    tokens.min(power).max(1)
}

/// The configuration with every `auto` of the step replaced by what was chosen: it can be run again.
pub fn resolved_config(config: &RawConfig, choice: &Choice) -> RawConfig {
    resolved_with(config, &choice.settings, choice.accumulation)
}

/// The same of a step that need not have been run.
pub(crate) fn resolved_with(config: &RawConfig, settings: &StepSettings, accumulation: u64) -> RawConfig {
    let mut resolved = config.clone();
    // What was looked for has been found.
    resolved.planning = Default::default();
    let Precision { weights, gradients, master_weights, linears, .. } = settings.precision;
    let fp8 = linears == Linears::Fp8;
    let narrow = fp8 || weights != DType::F32;
    resolved.memory.offload = offload::resolved(settings.offload);
    resolved.memory.kept_layers = offload::kept_resolved(settings.kept_layers);
    if settings.expert_slots > 0 {
        resolved.memory.expert_slots = Some(Auto::Set(u64::from(settings.expert_slots)));
    }
    if settings.can_overlap() {
        resolved.parallel.overlap_communication = Some(Auto::Set(settings.overlap_communication));
    }
    let training = &mut resolved.training;
    training.batch_size = Some(Auto::Set(settings.batch_size));
    training.gradient_accumulation_steps = Some(Auto::Set(accumulation));
    training.effective_batch_size = Some(Auto::Set(sequences(settings, accumulation)));
    training.mixed_precision = Some(Auto::Set(match weights {
        _ if fp8 => MixedPrecision::Fp8,
        DType::Bf16 => MixedPrecision::Bf16,
        DType::F16 => MixedPrecision::Fp16,
        _ => MixedPrecision::F32,
    }));
    training.master_weights = narrow.then_some(Auto::Set(match master_weights || weights == DType::F32 {
        true => MasterWeights::F32,
        false => MasterWeights::None,
    }));
    training.gradient_dtype = Some(Auto::Set(match gradients {
        DType::Bf16 => GradientDtype::Bf16,
        _ => GradientDtype::F32,
    }));
    training.gradient_checkpointing = Some(Auto::Set(GradientCheckpointing::Form(settings.checkpointing)));
    training.loss_chunk_tokens = Some(Auto::Set(settings.loss_chunk_tokens));
    training.micro_batches_per_pass = Some(Auto::Set(settings.micro_batches_per_pass));
    training.attention = Some(Auto::Set(Attention(settings.attention)));
    training.sequence_chunk_tokens = settings.sequence_chunk_tokens.or(training.sequence_chunk_tokens);
    if settings.balance_loss > 0.0 {
        training.router_aux_loss_coef = Some(Auto::Set(settings.balance_loss));
    }
    if settings.routers.correction_speed > 0.0 {
        training.router_bias_update_speed = Some(Auto::Set(settings.routers.correction_speed));
    }
    if config.data.validation.is_some() {
        training.eval_batch_size = Some(Auto::Set(settings.evaluated()));
    }
    resolved
}
