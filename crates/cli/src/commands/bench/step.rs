//! `plimsoll bench step`: a few steps of a training, each operation measured, beside what the machine could do at most.

use std::collections::BTreeMap;
use std::sync::Arc;

use plimsoll_device::{Cpu, Device, Spent, Timed, TimedOperation, Timings};
use plimsoll_parallel::Solo;
use plimsoll_plan::TrainingPlan;
use plimsoll_train::{MemoryReading, Observer, Prepared, RunEvent, Surroundings};

use super::base::Base;
use super::roofline::{Measured, Roofline};
use super::rung::quoted;
use super::techniques;
use crate::args::BenchStepArgs;
use crate::commands::advice::{misfits, remedies};
use crate::failure::Failure;
use crate::load_line::kept_so_far;
use crate::models::{self, Need};
use crate::output::{out, outln};
use crate::overhead::Progress;
use crate::session::{DiskUse, Engine};
use crate::signals::StopSignals;

pub fn run(args: &BenchStepArgs) -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let mut set = match args.run.config {
        // What a file leaves open is the planner's.
        Some(_) => Vec::new(),
        None => techniques::baseline(args.batch_size.unwrap_or(4), args.sequence_length.unwrap_or(512)),
    };
    let asked = [("training.batch_size", args.batch_size), ("data.sequence_length", args.sequence_length)];
    set.extend(asked.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?))));
    set.push(format!("output.dir={}", quoted(&folder.path().join("run"))?));
    let Base { config, .. } = Base::new(&args.run, set, false)?;
    config.training_data()?;
    let origin = models::origin(&config, Need::Files, args.run.json)?;
    let mut prepared = Prepared::with_model(config, origin, false)?;
    let engine = Engine::start_measuring(args.run.threads, !args.kept_speeds)?;
    let machine = engine.machine(prepared.config(), prepared.spec().vocab_size, Progress::Ready);
    // Nothing is saved.
    let disk_use = |plan: &TrainingPlan| DiskUse::of(plan, 0);
    let plan = engine.plan(prepared.config(), &machine, disk_use, |machine| prepared.plan(machine))?;
    if !plan.fits() {
        return Err(Failure::does_not_fit(format!("{}{}", misfits(&plan), remedies(&plan))));
    }
    kept_so_far(plan.load_line)?;
    prepared.decide(plan.config.clone());

    let timings = Timings::new();
    let mut watching = Watching { timings: &timings, steps: Vec::new(), tokens: 0 };
    let signals = StopSignals::listen(false)?;
    let surroundings = Surroundings {
        device: &mut |bytes| {
            let cpu = Cpu::with_pool(Arc::clone(&engine.pool), engine.isa, bytes)?;
            Ok(Box::new(Timed::new(Box::new(cpu), &timings)) as Box<dyn Device>)
        },
        memory: &mut MemoryReading::now,
        observer: &mut watching,
        stop: signals.flag().clone(),
        ranks: &Solo,
    };
    let outcome = prepared.run(std::slice::from_ref(&plan), surroundings)?;
    if !outcome.report.finished {
        return Err(Failure::stopped(signals.exit_code()));
    }
    let roofline = Roofline::new(&plan, &engine, watching.steps)?;
    match args.run.json {
        true => outln!("{}", serde_json::to_string_pretty(&roofline)?),
        false => out!("{}", roofline.describe()),
    }
}

/// Takes what was spent at the end of each step.
struct Watching<'t> {
    timings: &'t Timings,
    steps: Vec<Measured>,
    tokens: u64,
}

impl Observer for Watching<'_> {
    fn event(&mut self, event: RunEvent<'_>) {
        if let RunEvent::Step(step) = event {
            let seconds = (step.tokens - self.tokens) as f64 / step.tokens_per_second;
            self.tokens = step.tokens;
            let operations: BTreeMap<TimedOperation, Spent> = self.timings.take();
            self.steps.push(Measured { seconds, operations });
        }
    }
}
