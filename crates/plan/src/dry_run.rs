//! Runs the step program dry: the exact memory of a job and its arithmetic, in milliseconds.

mod evaluating;
mod fold;
mod generating;
mod unfold;

use std::ops::Range;
use std::sync::Arc;

use plimsoll_device::{Clock, DType, Device, DeviceTraits, Dry, Tally, Times, Transferred};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::{AtPeak, Ledger, TagBytes};
use plimsoll_model::{ModelSpec, Parameter};
use plimsoll_parallel::DryRanks;
use plimsoll_step::{MicroBatch, StepError, StepSettings, Trainer, UpdateTiming};

pub use self::evaluating::EvaluationPass;
use self::fold::Fold;
pub(crate) use self::generating::tokens_that_tell;
use self::unfold::{Unfolded, unfolded};
use crate::timeline::END;
use crate::{Network, Rates};

/// What a dry run found out.
#[derive(Clone, Debug)]
pub struct DryRun {
    /// The device arena's ledger after the job: peak and breakdown.
    pub ledger: Ledger,
    /// What lives on the host meanwhile.
    pub host: Ledger,
    /// What lives on disk meanwhile.
    pub disk: Ledger,
    /// Arithmetic of one step, evaluation pass or generated token.
    pub tally: Tally,
    /// What one step moves between the tiers.
    pub moved: Transferred,
    /// How long the step takes, where the run had a clock.
    pub times: Option<Times>,
    /// What of it comes behind its passes, for norms and updates.
    pub updates: Times,
}

/// What the evaluation of a batch takes between steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationPhase {
    /// Bytes of the arena: what lives all the time, and the pass.
    pub peak_bytes: u64,
    /// Seconds.
    pub seconds: f64,
}

/// What weights, states and buffers of a step take before its first pass, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AtRest {
    /// Of the device's arena.
    pub device: u64,
    /// Of the disk.
    pub disk: u64,
}

/// A training step, and what it takes to find it in a trace.
struct Traced {
    run: DryRun,
    /// The scopes of the step.
    step: Range<usize>,
    /// The parts that are measured and updated by themselves.
    parts: u64,
}

impl DryRun {
    /// One optimizer step of `accumulation` micro-batches, and the evaluation of a batch where the settings have one. Of layers that are alike a few are run, and the others counted.
    pub fn training(
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
    ) -> Result<DryRun, StepError> {
        DryRun::training_within(|dry| dry, None, spec, settings, accumulation)
    }

    /// The same, on a device of these traits.
    pub fn training_for(
        device: DeviceTraits,
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
    ) -> Result<DryRun, StepError> {
        DryRun::training_within(|dry| dry.standing_for(device), None, spec, settings, accumulation)
    }

    /// The same, on a machine of these rates.
    pub fn timed_training(
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
        rates: &Rates,
    ) -> Result<DryRun, StepError> {
        let timed = |dry: Dry| dry.standing_for(rates.wiring.device).timed(Clock::new(*rates));
        DryRun::training_within(timed, rates.wiring.network, spec, settings, accumulation)
    }

    /// The same on dry devices that are `made` what they have to be.
    fn training_within(
        made: impl Fn(Dry) -> Dry,
        network: Option<Network>,
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
    ) -> Result<DryRun, StepError> {
        settings.check_mesh(spec)?;
        let (spec, settings) = &settings.of_stage(spec);
        let ranks = |settings: &StepSettings| ranks_of(settings, network);
        let few = DryRun::few_on(&made(Dry::tracing()), spec, settings, accumulation, &ranks);
        let all = || Ok(DryRun::training_on(&made(Dry::new()), spec, settings, accumulation, &ranks)?.run);
        few.map_or_else(all, Ok)
    }

    /// The same through every layer, on a dry device of one's own.
    pub fn training_of_all(
        dry: &Dry,
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
    ) -> Result<DryRun, StepError> {
        Ok(DryRun::training_on(dry, spec, settings, accumulation, &on_one_machine)?.run)
    }

    /// The same through a few layers of those that are alike, on a dry device that traces. `None` where too few are, or where
    /// what the few did does not say what all would do: an error is better told of the whole model too.
    pub fn training_of_few(
        dry: &Dry,
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
    ) -> Option<DryRun> {
        let (spec, settings) = &settings.of_stage(spec);
        DryRun::few_on(dry, spec, settings, accumulation, &on_one_machine)
    }

    fn few_on(
        dry: &Dry,
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
        ranks: &dyn Fn(&StepSettings) -> DryRanks,
    ) -> Option<DryRun> {
        let fold = Fold::of(spec, settings)?;
        let Traced { run, step, parts } =
            DryRun::training_on(dry, &fold.spec, &fold.settings, accumulation, ranks).ok()?;
        let ledgers = [&run.ledger, &run.host, &run.disk];
        let alignment = dry.traits().alignment;
        let Unfolded { ledgers, added } =
            unfolded(&fold, &dry.take_trace()?, ledgers, step, parts, alignment)?;
        let [ledger, host, disk] = ledgers;
        let moved = run.moved.plus(added.moved);
        let times = run.times.map(|times| times.plus(added.times, 1.0));
        let (tally, updates) = (run.tally.plus(added.tally), run.updates.plus(added.updates, 1.0));
        Some(DryRun { ledger, host, disk, tally, moved, times, updates })
    }

    /// The same with every allocation and release of the step in the ledgers, and when it happens, but for iterations that
    /// are like those before them.
    pub fn timeline(
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
        rates: &Rates,
    ) -> Result<DryRun, StepError> {
        let dry = Dry::recording().standing_for(rates.wiring.device).timed(Clock::new(*rates));
        let ranks = |settings: &StepSettings| ranks_of(settings, rates.wiring.network);
        Ok(DryRun::training_on(&dry, spec, settings, accumulation, &ranks)?.run)
    }

    /// What the evaluation of a batch between steps takes.
    pub fn evaluation_phase(
        spec: &ModelSpec,
        settings: &StepSettings,
        rates: &Rates,
    ) -> Result<EvaluationPhase, StepError> {
        let (spec, settings) = &settings.of_stage(spec);
        let dry = Dry::new().standing_for(rates.wiring.device).timed(Clock::new(*rates));
        let tiers = Arc::new(LowerTiers::dry_beside(dry.arena()));
        let ranks = ranks_of(settings, rates.wiring.network);
        let mut trainer = Trainer::new(&dry, tiers, spec.clone(), settings.clone(), &ranks)?;
        trainer.load(nothing)?;
        let elapsed = || dry.clock().map_or(0.0, |clock| clock.times().elapsed);
        let (batch, begun) = (batch_without_contents(settings), elapsed());
        trainer.evaluate(settings.evaluated(), &batch)?;
        Ok(EvaluationPhase { peak_bytes: dry.arena().high_water(), seconds: elapsed() - begun })
    }

    /// What a step takes before its first pass.
    pub(crate) fn at_rest(
        device: DeviceTraits,
        spec: &ModelSpec,
        settings: &StepSettings,
    ) -> Result<AtRest, StepError> {
        settings.check_mesh(spec)?;
        let (spec, settings) = &settings.of_stage(spec);
        let few = DryRun::few_at_rest(device, spec, settings);
        let all = || Ok(DryRun::resting(&Dry::new().standing_for(device), spec, settings)?.0);
        let [ledger, _, disk] = few.map_or_else(all, Ok::<_, StepError>)?;
        Ok(AtRest { device: ledger.at_peak().peak, disk: disk.at_peak().peak })
    }

    /// The ledgers of a step at rest, from a few layers of those that are alike.
    fn few_at_rest(device: DeviceTraits, spec: &ModelSpec, settings: &StepSettings) -> Option<[Ledger; 3]> {
        let fold = Fold::of(spec, settings)?;
        let dry = Dry::tracing().standing_for(device);
        let (ledgers, parts) = DryRun::resting(&dry, &fold.spec, &fold.settings).ok()?;
        let trace = dry.take_trace()?;
        Some(unfolded(&fold, &trace, ledgers.each_ref(), 0..0, parts, device.alignment)?.ledgers)
    }

    /// The ledgers of device, host and disk of a step at rest, and the parts that it measures and updates.
    fn resting(
        dry: &Dry,
        spec: &ModelSpec,
        settings: &StepSettings,
    ) -> Result<([Ledger; 3], u64), StepError> {
        let tiers = Arc::new(LowerTiers::dry_beside(dry.arena()));
        let ranks = on_one_machine(settings);
        let trainer = Trainer::new(dry, Arc::clone(&tiers), spec.clone(), settings.clone(), &ranks)?;
        let DryRun { ledger, host, disk, .. } =
            DryRun::of(dry, &tiers, Tally::default(), Transferred::default());
        Ok(([ledger, host, disk], trainer.parts()))
    }

    fn training_on(
        dry: &Dry,
        spec: &ModelSpec,
        settings: &StepSettings,
        accumulation: u64,
        ranks: &dyn Fn(&StepSettings) -> DryRanks,
    ) -> Result<Traced, StepError> {
        let tiers = Arc::new(LowerTiers::dry_beside(dry.arena()));
        dry.arena().mark("load");
        let (own, step) = (spec.clone(), settings.clone());
        let ranks = ranks(settings);
        let mut trainer = Trainer::new(dry, Arc::clone(&tiers), own, step, &ranks)?;
        trainer.load(nothing)?;
        trainer.reset_magnitudes()?;
        let micro_batch = batch_without_contents(settings);
        let took = || {
            let times = dry.clock().map(Clock::times);
            (dry.take_tally(), dry.moved(), times, dry.scopes(), dry.update_times())
        };
        let mut before = took();
        dry.arena().mark("step");
        trainer.step_alike(&micro_batch, accumulation, 0.0)?;
        let mut after = took();
        // The first step of a run may do more than the others, as there is no norm of a step before it to clip by; and it
        // finds nothing in the buffers of what lives elsewhere.
        let is_like_all = settings.update == UpdateTiming::AfterBackward && settings.offload.is_none();
        if !is_like_all {
            before = after;
            dry.arena().mark("next step");
            trainer.step_alike(&micro_batch, accumulation, 0.0)?;
            after = took();
        }
        let (tally, moved, ended, end, updates) = after;
        let (_, moved_before, began, begin, updates_before) = before;
        let moved = moved.less(moved_before);
        let times = ended.zip(began).map(|(ended, began)| ended.since(began));
        if settings.evaluated() > 0 {
            dry.arena().mark("evaluation");
            trainer.evaluate(settings.evaluated(), &micro_batch)?;
        }
        dry.arena().mark(END);
        let updates = updates.since(updates_before);
        let run = DryRun { times, updates, ..DryRun::of(dry, &tiers, tally, moved) };
        Ok(Traced { run, step: begin..end, parts: trainer.parts() })
    }

    fn of(dry: &Dry, tiers: &LowerTiers, tally: Tally, moved: Transferred) -> DryRun {
        let (host, disk) = (tiers.host().end_record(), tiers.disk().end_record());
        let (ledger, times, updates) = (dry.arena().end_record(), None, Times::default());
        DryRun { ledger, host, disk, tally, moved, times, updates }
    }

    /// Bytes of host memory that the job needs beside the data pipeline's.
    pub fn host_bytes(&self) -> u64 {
        self.host.at_peak().peak
    }

    /// Bytes of disk that the job needs.
    pub fn disk_bytes(&self) -> u64 {
        self.disk.at_peak().peak
    }

    /// Bytes of arena that the job needs.
    pub fn peak_bytes(&self) -> u64 {
        self.ledger.at_peak().peak
    }

    /// What was live at the peak.
    pub fn at_peak(&self) -> &AtPeak {
        self.ledger.at_peak()
    }

    /// Live bytes by tag at the peak.
    pub fn tags_at_peak(&self) -> TagBytes {
        self.at_peak().by_tag
    }
}

/// A batch of any size, for a device without memory.
fn batch_without_contents(settings: &StepSettings) -> MicroBatch<'static> {
    MicroBatch {
        weights: settings.target_weights.then_some(&[]),
        document_starts: settings.document_starts.then_some(&[]),
        ..MicroBatch::new(&[], &[])
    }
}

/// The rank that takes a step, without wires.
fn ranks_of(settings: &StepSettings, network: Option<Network>) -> DryRanks {
    let (rank, count) = (settings.ranks.rank, settings.ranks.count());
    DryRanks::on_machines(rank, count, network.map_or(count, |network| network.ranks_of_machine))
}

/// The same where all ranks are on one machine, or nobody asks how long messages take.
fn on_one_machine(settings: &StepSettings) -> DryRanks {
    ranks_of(settings, None)
}

/// There is nothing to load on a dry device, but what follows the loading is run.
fn nothing(_: &Parameter, _: Range<u64>, _: DType, _: &mut [u8]) -> Result<(), StepError> {
    Ok(())
}
