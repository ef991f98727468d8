//! `plimsoll train`: plan, print the plan, refuse what does not fit, train.

use std::sync::Arc;

use plimsoll_device::Cpu;
use plimsoll_memory::{ByteSize, release_free_heap};
use plimsoll_train::{MemoryReading, Prepared, StopFlag, Surroundings, TrainingOutcome};

use crate::args::TrainArgs;
use crate::commands::advice::{misfits, remedies};
use crate::commands::plan::{PlanSpeeds, describe};
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::output::{out, outln};
use crate::progress::TrainingProgress;
use crate::row;
use crate::session::{Engine, load_config};
use crate::table;

pub fn run(args: &TrainArgs) -> Result<(), Failure> {
    let config = load_config(&args.source)?;
    let stop = StopFlag::new();
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second signal ends the program at once.
        signal_hook::flag::register_conditional_shutdown(signal, 130, stop.shared())?;
        signal_hook::flag::register(signal, stop.shared())?;
    }
    config.training_data()?;
    let origin = models::origin(&config, Need::Files, args.json)?;
    let prepared = Prepared::with_model(config, origin, args.resume)?;
    for (key, report) in prepared.sample_reports().filter(|_| !args.json) {
        let _ = outln!("{key}: {report}\n");
    }
    let engine = Engine::start(args.threads)?;
    let machine = engine.machine(prepared.config());
    let plan = engine.plan(prepared.config(), &machine, |machine| prepared.plan(machine))?;
    if !args.json {
        // What cannot be shown is no reason not to train.
        let _ = out!("{}", describe(&plan, &PlanSpeeds::here(&engine, &plan)));
    }
    if !plan.fits() {
        return Err(Failure::does_not_fit(format!("{}{}", misfits(&plan), remedies(&plan))));
    }
    let limits = plan.machine.limits;
    if let Some(available) = limits.available.filter(|available| plan.process_bytes() > *available) {
        return Err(Failure::does_not_fit(format!(
            "the plan needs {}, within the load line of {}, but this machine has only {} to give",
            ByteSize(plan.process_bytes()),
            ByteSize(plan.load_line.bytes),
            ByteSize(available)
        )));
    }
    let output = plan.config.output.dir();
    let logging_steps = plan.config.output.logging_steps();
    let beside = plan.process_bytes() - plan.peak_bytes();
    let mut progress = TrainingProgress::new(logging_steps, plan.load_line.bytes, beside, args.json);
    let ladder = if plan.config.memory.ladder() { plan.ladder()? } else { vec![plan] };
    // What planning leaves over is no part of what the run needs.
    release_free_heap();
    let surroundings = Surroundings {
        device: &mut |bytes| Cpu::with_pool(Arc::clone(&engine.pool), engine.isa, bytes),
        memory: &mut MemoryReading::now,
        observer: &mut progress,
        stop,
    };
    let outcome = prepared.run(&ladder, surroundings)?;
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&outcome.report)?)?;
    } else {
        out!("\n{}", summary(&outcome))?;
        outln!("everything is in {}", output.display())?;
    }
    Ok(())
}

/// Planned against measured.
fn summary(outcome: &TrainingOutcome) -> String {
    let report = &outcome.report;
    let (planned, measured) = (&report.planned, &report.measured);
    let mut rows = vec![
        row!["", "planned", "measured"],
        row!["arena", ByteSize(planned.device_peak_bytes), ByteSize(measured.device_peak_bytes)],
        row!["host", ByteSize(planned.host_peak_bytes), ByteSize(measured.host_peak_bytes)],
        row!["disk", ByteSize(planned.disk_bytes), ByteSize(measured.disk_bytes)],
        row!["process", ByteSize(planned.process_bytes), ByteSize(measured.process_peak_rss_bytes)],
        row![
            "step",
            crate::commands::plan::seconds(planned.step_seconds),
            crate::commands::plan::seconds(measured.step_seconds_median)
        ],
        row![
            "tokens/s",
            format!("{:.0}", planned.tokens_per_second),
            format!("{:.0}", report.tokens_per_second_median)
        ],
    ];
    rows.retain(|row| row[0] != "disk" || planned.disk_bytes > 0 || measured.disk_bytes > 0);
    let io = report.io.map(|io| {
        let hidden =
            io.hidden_share.map_or(String::new(), |s| format!(", {:.0} % of its time hidden", 100.0 * s));
        format!("read {}, written {}{hidden}\n", ByteSize(io.bytes_read), ByteSize(io.bytes_written))
    });
    table::render(&rows) + &io.unwrap_or_default()
}
