//! How an evaluation goes through its windows: how many at a time, and what of the weights stays in memory meanwhile.

use std::sync::Arc;

use plimsoll_device::{DType, Device};
use plimsoll_disk::LowerTiers;
use plimsoll_memory::release_free_heap;
use plimsoll_model::Parameter;
use plimsoll_plan::{
    DryRun, EvaluationPass, PassFootprint, fitting_residency, loss_chunk_tokens, streaming_overhead_bytes,
};
use plimsoll_step::{EvaluateSettings, Evaluator, Residency, StepError, WeightStorage};

use super::Task;
use crate::failure::Failure;
use crate::load_line::{PlannedProcess, PlanningRoom};
use crate::ranks::everybody;
use crate::session::Engine;
use crate::streaming::{self, Streaming};
use crate::weights::Weights;

/// Windows are taken together up to about this many tokens.
const TOKENS_PER_PASS: u64 = 2048;

/// What is evaluated as it is, without a cache.
#[derive(Clone, Copy)]
pub(super) struct Windows {
    pub count: u64,
    /// Tokens of the longest.
    pub longest: u64,
    /// Whether they hold samples: targets have weights, and samples see nothing of each other.
    pub samples: bool,
}

impl Windows {
    /// Tokens of so many windows whose logits exist at once.
    fn loss_chunk_tokens(self, task: &Task<'_>, together: u64) -> u64 {
        loss_chunk_tokens(task.model.files.spec().vocab_size, together.saturating_mul(self.longest))
    }
}

/// Passes that fit.
pub(super) struct Passes {
    /// Windows of a pass.
    pub together: u64,
    /// Which weights stay in memory, where not all fit.
    residency: Option<Residency>,
    pub dry_run: DryRun,
    /// What the process takes with them.
    pub planned: PlannedProcess,
}

impl Passes {
    /// Passes over windows, several together.
    ///
    /// # Errors
    /// As [`Passes::plan`].
    pub fn of_windows(task: &Task<'_>, engine: &Engine, windows: Windows) -> Result<Passes, Failure> {
        let Windows { count, longest, samples } = windows;
        let most = (TOKENS_PER_PASS / longest.max(1)).clamp(1, count.max(1));
        let (spec, precision) = (task.model.files.spec(), task.model.precision);
        Passes::plan(task, engine, most, |together, storage| {
            let loss_chunk_tokens = windows.loss_chunk_tokens(task, together);
            let (device, batch_size, length) = (engine.traits(), together, longest);
            let pass =
                EvaluationPass { device, precision, storage, batch_size, length, loss_chunk_tokens, samples };
            DryRun::evaluation(spec, task.dry(), pass)
        })
    }

    /// The most windows at a time, up to `most`, with all weights in memory; where one window does not fit so, the most
    /// with weights left on disk. All ranks take as many. `run` is the evaluation of so many windows, run dry.
    ///
    /// # Errors
    /// The smallest pass does not fit; or a dry run failed.
    pub fn plan(
        task: &Task<'_>,
        engine: &Engine,
        most: u64,
        run: impl Fn(u64, WeightStorage<'_>) -> Result<DryRun, StepError>,
    ) -> Result<Passes, Failure> {
        let mut passes = Passes::plan_alone(task, engine, most, &run)?;
        loop {
            let all = task.ranks.gather_numbers(&[passes.together as f64])?;
            let all = || all.iter().flatten().map(|together| *together as u64);
            let least = all().min().unwrap_or(passes.together);
            if all().all(|together| together == least) {
                return Ok(passes);
            }
            passes = Passes::plan_alone(task, engine, least, &run)?;
        }
    }

    /// The same of this rank by itself.
    fn plan_alone(
        Task { args, model, .. }: &Task<'_>,
        engine: &Engine,
        most: u64,
        run: &impl Fn(u64, WeightStorage<'_>) -> Result<DryRun, StepError>,
    ) -> Result<Passes, Failure> {
        let types = |p: &Parameter| model.weight_type(p);
        let run = |together, residency| run(together, model.storage(&types, residency));
        // What streams to a card passes through the host's memory.
        let stream_bytes = match engine.card {
            Some(_) => 0,
            None => streaming_overhead_bytes(model.own_spec(), model.storage(&types, None)),
        };
        let mut left = PlanningRoom::below(engine.line(args.memory));
        loop {
            // What planning leaves behind is no part of what evaluation needs.
            release_free_heap();
            let room = left.bytes(engine.overhead_of_what_computes()?);
            let mut found = None;
            for together in halves(most) {
                let dry_run = run(together, None)?;
                if dry_run.peak_bytes() <= room || (together == 1 && !model.can_stream()) {
                    found = Some((together, None, dry_run));
                    break;
                }
            }
            if found.is_none() {
                let room = room.saturating_sub(stream_bytes);
                for together in halves(most) {
                    let footprint = |residency| {
                        let run = run(together, Some(residency))?;
                        Ok(PassFootprint {
                            peak_bytes: run.peak_bytes(),
                            read_bytes: run.moved.read,
                            host_bytes: run.host_bytes(),
                            disk_bytes: run.disk_bytes(),
                        })
                    };
                    let mut residency = fitting_residency(model.own_spec(), room, footprint)?;
                    if residency.is_none() && together == 1 {
                        residency = Some(Residency::Spread { layers: 0, head: false, expert_slots: 0 });
                    }
                    if residency.is_some() {
                        let dry_run = run(together, residency)?;
                        found = Some((together, residency, dry_run));
                        break;
                    }
                }
            }
            release_free_heap();
            let Some((together, residency, dry_run)) = found else { continue };
            let models = dry_run.peak_bytes().saturating_add(residency.map_or(0, |_| stream_bytes));
            if let Some(planned) = left.settle(models, engine.overhead_of_what_computes()?)? {
                return Ok(Passes { together, residency, dry_run, planned });
            }
        }
    }

    /// How the weights are held, in these types.
    pub fn storage<'s>(
        &self,
        model: &'s Weights,
        types: &'s dyn Fn(&Parameter) -> DType,
    ) -> WeightStorage<'s> {
        model.storage(types, self.residency)
    }

    /// The tiers for what is left on disk, if anything is.
    pub fn tiers(
        &self,
        Task { args, model, ranks, .. }: &Task<'_>,
        device: &dyn Device,
    ) -> Result<(Arc<LowerTiers>, Option<Streaming>), Failure> {
        let layers = (model.own_spec().num_layers, ranks.rank() > 0);
        streaming::open(device, &self.dry_run, self.residency, &args.disk, layers)
    }

    /// A model that is measured as it was planned, and what is streamed of it.
    pub fn evaluator<'d>(
        &self,
        task: &Task<'d>,
        device: &'d dyn Device,
        windows: Windows,
    ) -> Result<(Evaluator<'d>, Option<Streaming>), Failure> {
        let (tiers, streaming) = self.tiers(task, device)?;
        let Task { model, ranks, .. } = task;
        let types = |p: &Parameter| model.weight_type(p);
        let (spec, storage) = (model.own_spec().clone(), self.storage(model, &types));
        let loss_chunk_tokens = windows.loss_chunk_tokens(task, self.together);
        let (precision, longest) = (model.precision, windows.longest);
        let settings = EvaluateSettings { precision, longest, loss_chunk_tokens };
        let mut evaluator = Evaluator::new(device, &tiers, spec, settings, storage)?;
        streaming::report_buffered(&tiers);
        evaluator.load(|p, rows, dtype, out| model.read_rows_into(p, rows, dtype, out))?;
        evaluator.join(everybody(*ranks)?, model.spec());
        Ok((evaluator, streaming))
    }
}

/// A number and its halves, down to 1.
fn halves(most: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(most.max(1)), |n| (*n > 1).then_some(n / 2))
}
