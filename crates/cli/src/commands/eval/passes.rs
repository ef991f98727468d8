//! How an evaluation goes through its windows: how many at a time, and what of the weights stays in memory meanwhile.

use plimsoll_device::Cpu;
use plimsoll_memory::release_free_heap;
use plimsoll_model::{Staging, WeightStream};
use plimsoll_plan::{DryRun, LoadLine, fitting_staging};
use plimsoll_step::StepError;

use crate::args::EvalArgs;
use crate::failure::Failure;
use crate::load_line::{PlannedProcess, PlanningRoom};
use crate::session::Engine;
use crate::streaming::{self, Streaming};
use crate::weights::Weights;

/// Passes that fit.
pub(super) struct Passes {
    /// Windows of a pass.
    pub together: u64,
    /// What of the weights is brought when it is needed, where not all fit.
    pub staging: Option<Staging>,
    dry_run: DryRun,
    /// What streaming takes beside the arena.
    stream_bytes: u64,
}

impl Passes {
    /// The most windows at a time, up to `most`, with all weights in memory; where one window does not fit so, the most
    /// with weights left on disk. Where nothing fits, the least that there is: [`device`](Passes::device) refuses it.
    /// `run` is the evaluation of so many windows, run dry.
    pub fn plan(
        engine: &Engine,
        model: &Weights,
        line: LoadLine,
        most: u64,
        run: impl Fn(u64, Option<&Staging>) -> Result<DryRun, StepError>,
    ) -> Result<Passes, Failure> {
        let stream = model.stream_plan();
        let stream_bytes = stream.overhead_bytes();
        let mut left = PlanningRoom::below(line);
        loop {
            // What planning leaves behind is no part of what evaluation needs.
            release_free_heap();
            let room = left.bytes(engine.overhead_bytes());
            let mut found = None;
            for together in halves(most) {
                let dry_run = run(together, None)?;
                if dry_run.peak_bytes() <= room || (together == 1 && !model.can_stream()) {
                    found = Some(Passes { together, staging: None, dry_run, stream_bytes: 0 });
                    break;
                }
            }
            if found.is_none() {
                let room = room.saturating_sub(stream_bytes);
                for together in halves(most) {
                    let peak = |staging: &Staging| Ok(run(together, Some(staging))?.peak_bytes());
                    let mut staging = fitting_staging(&stream, room, peak)?;
                    if staging.is_none() && together == 1 {
                        staging = Some(stream.staging(0, false, 1));
                    }
                    if staging.is_some() {
                        let dry_run = run(together, staging.as_ref())?;
                        found = Some(Passes { together, staging, dry_run, stream_bytes });
                        break;
                    }
                }
            }
            release_free_heap();
            let settles = |passes: &Passes| {
                let beside = engine.overhead_bytes().saturating_add(passes.stream_bytes);
                left.settles(passes.dry_run.peak_bytes().saturating_add(beside))
            };
            if let Some(passes) = found.filter(settles) {
                return Ok(passes);
            }
        }
    }

    /// A device with the memory that was planned, and what the process will take in all.
    pub fn device(&self, engine: &Engine, line: LoadLine) -> Result<(Cpu, PlannedProcess), Failure> {
        engine.device(&self.dry_run, self.stream_bytes, line)
    }

    /// The weights that are left on disk, if any are.
    pub fn open(
        &self,
        args: &EvalArgs,
        model: &Weights,
    ) -> Result<(Option<WeightStream>, Option<Streaming>), Failure> {
        let open = |staging| streaming::open(model, &model.stream_plan(), staging, &args.disk);
        Ok(self.staging.as_ref().map(open).transpose()?.unzip())
    }
}

/// A number and its halves, down to 1.
fn halves(most: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(most.max(1)), |n| (*n > 1).then_some(n / 2))
}
