//! `plimsoll train`: plan, print the plan, refuse what does not fit, train.

use std::io::Write;
use std::path::Path;

use plimsoll_device::cuda::OpenCard;
use plimsoll_memory::{ByteSize, release_free_heap};
use plimsoll_parallel::{Collectives, Communicator};
use plimsoll_plan::config::{RawConfig, Started};
use plimsoll_plan::{ProcessLimits, TrainingPlan};
use plimsoll_report::count;
use plimsoll_train::{
    CONFIG_FILE, Checkpoint, MemoryReading, Observer, Prepared, Report, Resumption, Surroundings,
    TrainingOutcome,
};
use plimsoll_watch::{Live, PlanView};

use crate::args::TrainArgs;
use crate::commands::advice::{misfits, remedies, wrapped};
use crate::commands::plan::describe::{describe, whole_run};
use crate::commands::warmup;
use crate::dashboard::{Dashboard, Watching};
use crate::failure::Failure;
use crate::load_line::kept_so_far;
use crate::models::{self, Need};
use crate::output::{out, outln};
use crate::progress::TrainingProgress;
use crate::ranks::{self, Stopping};
use crate::row;
use crate::screen::{self, Restorer};
use crate::session::{DiskUse, Engine, answers, load_config_on, resident_bytes};
use crate::signals::StopSignals;
use crate::speeds::PlanSpeeds;
use crate::table;
use crate::units::seconds;

pub fn run(args: &TrainArgs) -> Result<(), Failure> {
    if let Some(ranks) = args.ranks {
        // What is wrong in the configuration is said once.
        let started = Started { ranks, of_each_machine: Some(ranks) };
        load_config_on(&args.source, &[], started)?.training_data()?;
    }
    ranks::on_each(Stopping::Saving, args.ranks, |ranks| run_rank(args, ranks))
}

/// The report of a run that is resumed and has come to its end: nothing is left to do. The last checkpoint may be of an earlier step
/// than the last one; where later ones have been taken away, somebody wants to go on from it.
fn finished(prepared: &Prepared, plan: &TrainingPlan) -> Option<Report> {
    let step = prepared.resumption()?.step;
    let output = &plan.config.output;
    let report = Report::of_run(&output.dir()).ok()??;
    let last_saved =
        report.steps.checked_div(output.save_steps()).map_or(0, |times| times * output.save_steps());
    let reached = if step >= last_saved { report.steps.max(step) } else { step };
    (report.finished && reached >= prepared.total_steps(plan)).then_some(report)
}

/// The same of one that has no checkpoint to go on from and was asked for in just these words.
fn finished_without_checkpoint(config: &RawConfig) -> Option<Report> {
    let folder = config.output.dir();
    let report = Report::of_run(&folder).ok()?.filter(|report| report.finished)?;
    let earlier = RawConfig::from_file(&folder.join(CONFIG_FILE)).ok()?;
    let is_same = config.changes_since(&earlier).is_empty();
    (is_same && Checkpoint::is_none_left(&folder)).then_some(report)
}

/// Whether the first rank has found a report of a run that is finished, which it shows: all ranks know it then.
fn is_finished(
    args: &TrainArgs,
    ranks: &dyn Communicator,
    report: Option<Report>,
    folder: &Path,
    and: &str,
) -> Result<bool, Failure> {
    let is_finished = ranks.any(report.is_some())?;
    match report {
        Some(report) if args.json => outln!("{}", serde_json::to_string_pretty(&report)?)?,
        Some(_) => outln!("the run in {} is finished: nothing is left to do{and}", folder.display())?,
        None => {}
    }
    Ok(is_finished)
}

/// One rank of a run, or the only one.
fn run_rank(args: &TrainArgs, ranks: &dyn Communicator) -> Result<(), Failure> {
    let leads = ranks.rank() == 0;
    let started = ranks::started(ranks)?;
    let mut config = load_config_on(&args.source, &[], started)?;
    config.rank = ranks.rank();
    config.training_data()?;
    let quiet = args.json || !leads;
    let report = (args.resume && leads).then(|| finished_without_checkpoint(&config)).flatten();
    if is_finished(args, ranks, report, &config.output.dir(), ", and there is no checkpoint to go on from")? {
        return Ok(());
    }
    let origin = models::origin(&config, Need::Files, quiet)?;
    let mut prepared = Prepared::of_rank(config, origin, args.resume, ranks)?;
    let answers = answers(&args.source)?;
    let said = if leads { answers + &beginning(&prepared, args.resume) } else { String::new() };
    let mut notes = said;
    for (key, report) in prepared.sample_reports().filter(|_| leads) {
        notes.push_str(&format!("{key}: {report}\n\n"));
    }
    for (key, left_out) in prepared.left_out_records().filter(|_| leads) {
        notes.push_str(&format!("{key}: {left_out}\n\n"));
    }
    if args.json {
        let _ = write!(std::io::stderr(), "{notes}");
    } else {
        // What cannot be shown is no reason not to train.
        let _ = out!("{notes}");
    }
    let engine = Engine::of_rank(ranks, args.threads, args.device)?;
    if engine.card.is_some() && prepared.config().training.dynamic_batching.enabled() {
        return Err(Failure::usage(
            "training.dynamic_batching: on a card the micro-batch does not change yet",
        ));
    }
    let machine = engine.machine_that_computes(prepared.config(), prepared.spec().vocab_size)?;
    // The first rank decides, and all plan what it has decided, each for itself.
    let decided = match leads {
        true => Some(engine.plan(
            prepared.config(),
            &machine,
            |plan: &TrainingPlan| {
                DiskUse::of(plan, prepared.still_to_write(plan).map_or(0, |needs| needs.bytes()))
            },
            |machine| prepared.plan(machine),
        )?),
        false => None,
    };
    let plan = match (decided, ranks.is_alone()) {
        (Some(plan), true) => plan,
        (decided, _) => {
            let yaml = decided.as_ref().map(|plan| plan.config.to_yaml()).transpose()?;
            let yaml = ranks.broadcast(yaml.unwrap_or_default().into_bytes())?;
            match decided {
                Some(plan) => plan,
                None => {
                    let config = RawConfig::from_str(&String::from_utf8_lossy(&yaml), "the plan of rank 0")?;
                    let mut config = with_budgets_of(&config.on_ranks(started)?, prepared.config());
                    config.rank = ranks.rank();
                    let own = with_places_of(&config, prepared.config());
                    prepared.decide(config);
                    let plan = prepared.plan(&machine)?;
                    // A rank with less memory than the first one sends more of its tensors away.
                    if plan.fits() {
                        plan
                    } else {
                        prepared.decide(own);
                        prepared.plan(&machine)?
                    }
                }
            }
        }
    };
    if !quiet {
        let speeds = PlanSpeeds::here(&engine, &plan);
        // What cannot be shown is no reason not to train.
        let (steps, validation) = (prepared.total_steps(&plan), prepared.validation_sequences());
        let run = whole_run(&plan, Some(steps), validation, prepared.token_bytes());
        let _ = out!("{}{run}", describe(&plan, &speeds));
    }
    if let Some(note) = warmup::note(&plan.config, prepared.total_steps(&plan)).filter(|_| leads) {
        let note = wrapped(&note, "");
        if args.json {
            let _ = write!(std::io::stderr(), "{note}");
        } else {
            let _ = out!("{note}");
        }
    }
    // The first rank decides: others may not see what it has written.
    let report = if leads { finished(&prepared, &plan) } else { None };
    let remedy = "; raise training.steps or training.epochs to go on";
    if is_finished(args, ranks, report, &plan.config.output.dir(), remedy)? {
        return Ok(());
    }
    if !plan.fits() {
        return Err(Failure::does_not_fit(format!("{}{}", misfits(&plan), remedies(&plan))));
    }
    if engine.card.is_none() {
        kept_so_far(plan.load_line)?;
    }
    let own = resident_bytes();
    let needed = ranks::sum_on_this_machine(ranks, plan.process_bytes().saturating_sub(own))?;
    if let Some(free) = engine.free_bytes().filter(|free| needed > *free) {
        return Err(Failure::does_not_fit(match engine.ranks() {
            1 => format!(
                "the plan needs {}, within the load line of {}, but this machine has only {} to give",
                ByteSize(plan.process_bytes()),
                ByteSize(plan.load_line.bytes),
                ByteSize(free.saturating_add(own))
            ),
            ranks => format!(
                "the plans of the {ranks} ranks here need {} together beyond what they have, and this machine has only {} free",
                ByteSize(needed),
                ByteSize(free)
            ),
        }));
    }
    if engine.card.is_some() {
        let below = ranks::sum_on_this_machine(ranks, plan.host_bytes())?;
        if let Some(free) = ProcessLimits::detect().available.filter(|free| below > *free) {
            return Err(Failure::does_not_fit(format!(
                "the plans of the ranks here put {} of host memory below their cards, and this machine has only {} free; lower \
                 memory.host_budget, or put more on disk (memory.offload)",
                ByteSize(below),
                ByteSize(free)
            )));
        }
    }
    // Nobody begins before everybody has room.
    ranks.barrier()?;
    let output = plan.config.output.dir();
    let beside = plan.process_bytes() - plan.peak_bytes();
    let advice = (!plan.config.memory.silent_mode()).then(|| plan.alternatives.clone());
    let mut progress =
        TrainingProgress::new(&plan.config.output, plan.load_line.bytes, beside, advice, quiet);
    let restorer = Restorer::default();
    let has_dashboard = args.dashboard && leads && ranks.is_alone() && screen::is_there();
    let view = if has_dashboard { Some(PlanView::of(&plan)?) } else { None };
    let live = has_dashboard.then(|| {
        let every = (plan.config.output.eval_steps(), plan.config.output.save_steps());
        let live = Live::new(&output.display().to_string(), view, every.0, every.1);
        match prepared.resumption() {
            Some(Resumption { step, .. }) => live.resumed(&output, *step),
            None => live,
        }
    });
    let (total_steps, is_resumed) = (prepared.total_steps(&plan), prepared.resumption().is_some());
    let dynamic = plan.config.training.dynamic_batching.enabled();
    if dynamic && !ranks.is_alone() && !quiet {
        let _ =
            outln!("training.dynamic_batching: several ranks keep the micro-batch that they begin with\n");
    }
    let ladder = if ranks.is_alone() && engine.card.is_none() { plan.ladder()? } else { vec![plan] };
    if dynamic && ranks.is_alone() && !quiet {
        let _ = out!("{}", batches_of(&ladder));
    }
    // What planning leaves over is no part of what the run needs.
    release_free_heap();
    // Until here there is nothing to save.
    let signals = match has_dashboard {
        true => StopSignals::listen_beside(&restorer)?,
        false => StopSignals::listen(!ranks.is_alone())?,
    };
    let dashboard = live.as_ref().map(|live| Dashboard::begin(live.clone(), &output, restorer.clone()));
    let dashboard = dashboard.transpose()?;
    let mut watching;
    let observer: &mut dyn Observer = match live {
        Some(live) => {
            watching = Watching { live, lines: progress.beside(&restorer) };
            &mut watching
        }
        None => &mut progress,
    };
    let surroundings = Surroundings {
        device: &mut |bytes| engine.arena(bytes),
        memory: &mut || engine.card.as_deref().map_or_else(MemoryReading::now, memory_of),
        observer,
        stop: signals.flag().clone(),
        ranks,
    };
    let outcome = prepared.run(&ladder, surroundings);
    if let Some(dashboard) = dashboard {
        for event in dashboard.close() {
            // What cannot be shown is in the run's files.
            let _ = outln!("{event}");
        }
    }
    let outcome = outcome?;
    if !leads {
        // The first one speaks for all.
    } else if args.json {
        outln!("{}", serde_json::to_string_pretty(&outcome.report)?)?;
    } else {
        out!("\n{}", summary(&outcome, &output, total_steps, is_resumed))?;
    }
    if outcome.report.finished {
        return Ok(());
    }
    Err(Failure::stopped(match signals.exit_code() {
        // The program that started the ranks knows the signal that it was told, and has its code.
        ranks::TOLD if args.launched => 0,
        code => code,
    }))
}

/// The memory of a card.
fn memory_of(card: &OpenCard) -> MemoryReading {
    let free = card.free_bytes().ok();
    let own_bytes = card.card().memory.saturating_sub(free.unwrap_or(0));
    MemoryReading { own_bytes, container_free: None, available: free }
}

/// The plans between which dynamic batches go.
fn batches_of(ladder: &[TrainingPlan]) -> String {
    let mut rows = vec![row!["rung", "micro-batch", "accumulation", "memory", "tokens/s"]];
    for (rung, plan) in ladder.iter().enumerate() {
        let begins = ladder.iter().position(|plan| !plan.is_above) == Some(rung);
        rows.push(row![
            format!("{rung}{}", if begins { ", begins here" } else { "" }),
            plan.choice.settings.batch_size.to_string(),
            plan.choice.accumulation.to_string(),
            ByteSize(plan.process_bytes()),
            format!("{:.0}", plan.choice.time.tokens_per_second)
        ]);
    }
    format!("dynamic batches go between these plans:\n{}\n", table::render(&rows))
}

/// What the first rank has decided, with the budgets of this one.
fn with_budgets_of(decided: &RawConfig, said: &RawConfig) -> RawConfig {
    let mut config = decided.clone();
    config.memory = said.memory.clone();
    config.memory.offload = decided.memory.offload.clone();
    config.memory.kept_layers = decided.memory.kept_layers.clone();
    config.memory.expert_slots = decided.memory.expert_slots;
    config.memory.prefetch = decided.memory.prefetch;
    config
}

/// The same with places of tensors as this rank's configuration has them or leaves them open. No other rank sees where a rank has its
/// weights, states and activations. Gradients are summed in an order that depends on where they are.
fn with_places_of(decided: &RawConfig, said: &RawConfig) -> RawConfig {
    let mut config = decided.clone();
    let (offload, kept) = (&said.memory.offload, &said.memory.kept_layers);
    let own = &mut config.memory;
    own.offload.parameters = offload.parameters;
    own.offload.optimizer = offload.optimizer;
    own.offload.activations = offload.activations;
    own.expert_slots = said.memory.expert_slots;
    own.prefetch = said.memory.prefetch;
    own.kept_layers.parameters = kept.parameters;
    own.kept_layers.optimizer = kept.optimizer;
    own.kept_layers.activations = kept.activations;
    config
}

/// Where a run that was asked to resume goes on, and what is different from there.
fn beginning(prepared: &Prepared, resume: bool) -> String {
    let folder = prepared.config().output.dir();
    match prepared.resumption() {
        None if resume => {
            format!("{} has no checkpoint to resume from: the run begins anew\n\n", folder.display())
        }
        None => String::new(),
        Some(Resumption { step, changes, unknown }) => {
            let mut text = format!("resuming after step {step}\n");
            if *unknown {
                text.push_str(
                    "its plimsoll.yaml is missing or damaged: what has changed since is not known\n",
                );
            }
            for change in changes {
                text.push_str(&format!("from here on: {change}\n"));
            }
            text + "\n"
        }
    }
}

/// What came of a run: how far it is, its loss, planned against measured, and where things are.
fn summary(outcome: &TrainingOutcome, output: &Path, total_steps: u64, is_resumed: bool) -> String {
    let report = &outcome.report;
    let (planned, measured) = (&report.planned, &report.measured);
    let steps = match report.finished {
        true => format!("finished: {} steps", count(report.steps)),
        false => format!("stopped: {} of {} steps", count(report.steps), count(total_steps)),
    };
    let took = match is_resumed {
        true => format!("this part took {}", seconds(report.seconds)),
        false => format!("in {}", seconds(report.seconds)),
    };
    let mut text = format!("{steps}, {} tokens, {took}\n", count(report.tokens));
    if let (Some(first), Some(last)) = (report.first_loss, report.last_loss) {
        let validation = report.validation_loss.map_or(String::new(), |loss| {
            format!("; validation loss {loss:.4}, perplexity {:.3}", loss.exp())
        });
        text.push_str(&format!("loss {first:.4} to {last:.4}{validation}\n"));
    }
    text.push('\n');
    let mut rows = vec![
        row!["", "planned", "measured"],
        row!["arena", ByteSize(planned.device_peak_bytes), ByteSize(measured.device_peak_bytes)],
        row!["host", ByteSize(planned.host_peak_bytes), ByteSize(measured.host_peak_bytes)],
        row!["disk", ByteSize(planned.disk_bytes), ByteSize(measured.disk_bytes)],
        row!["process", ByteSize(planned.process_bytes), ByteSize(measured.process_peak_rss_bytes)],
        row!["step", seconds(planned.step_seconds), seconds(measured.step_seconds_median)],
        row![
            "tokens/s",
            format!("{:.0}", planned.tokens_per_second),
            format!("{:.0}", report.tokens_per_second_median)
        ],
    ];
    rows.retain(|row| row[0] != "disk" || planned.disk_bytes > 0 || measured.disk_bytes > 0);
    for rank in &report.ranks {
        let (planned, measured) = (rank.planned.process_bytes, rank.measured.process_bytes);
        let host = rank.host.as_ref().filter(|_| report.has_several_hosts());
        let name = format!("rank {}{}", rank.rank, host.map_or(String::new(), |host| format!(", {host}")));
        rows.push(row![name, ByteSize(planned), ByteSize(measured)]);
    }
    text.push_str(&table::render(&rows));
    if let Some(io) = report.io {
        let hidden =
            io.hidden_share.map_or(String::new(), |s| format!(", {:.0} % of its time hidden", 100.0 * s));
        let (read, written) = (ByteSize(io.bytes_read), ByteSize(io.bytes_written));
        text.push_str(&format!("read {read}, written {written}{hidden}\n"));
    }
    text.push_str(&match report.rung_changes {
        0 => String::new(),
        1 => "memory made the run change its plan once\n".to_owned(),
        times => format!("memory made the run change its plan {times} times\n"),
    });
    if let Some(checkpoint) = &outcome.checkpoint {
        text.push_str(&format!("the last checkpoint is {}\n", checkpoint.display()));
    }
    text + &format!("everything is in {}; `plimsoll report {0} -o report.html` shows it\n", output.display())
}
