//! `plimsoll plan`: what a training run needs, before anything is loaded.

mod compare;
mod cost;
mod find;
mod import;

use std::collections::BTreeMap;
use std::path::Path;

use plimsoll_memory::{AtPeak, ByteSize, Tag};
use plimsoll_model::catalogue;
use plimsoll_parallel::Mesh;
use plimsoll_plan::config::{GradientCheckpointing, Imported, Override, RawConfig, Started};
use plimsoll_plan::{
    Catalogue, DiskRates, Division, Machine, ModelOrigin, ProcessLimits, Question, Sought, Target,
    TimeEstimate, TimelineFormat, TrainingPlan, ZeroRow, fitting_devices,
};
use plimsoll_step::{Adapters, Linears, ZeroStage};
use plimsoll_train::{TrainError, write_whole};
use serde_json::{Value, json};

use crate::args::{ConfigSource, PlanArgs};
use crate::commands::advice::{misfits, remedies};
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::needs;
use crate::output::{out, outln};
use crate::row;
use crate::session::{Engine, load_config_on, load_config_over};
use crate::table;

pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    // Before anything is planned, so that nobody waits for a file that cannot be written.
    let timeline = match &args.timeline {
        Some(file) => Some((file.as_path(), TimelineFormat::of(file)?)),
        None => None,
    };
    // Where a model is looked for, any stands for it.
    let any = catalogue::names().next().filter(|_| args.find == Some(Sought::Model));
    let model = any.map(str::to_owned).or_else(|| args.source.model.clone());
    let source = ConfigSource { model, ..args.source.clone() };
    if !args.compare.is_empty() {
        return compare::named(args, &source);
    }
    let named = args.hardware.as_deref();
    let target = named.map(|name| machine_of(name, args.ranks, args.host_memory)).transpose()?;
    if args.host_memory.is_some() && target.is_none() {
        return Err(Failure::usage("--host-memory is of a machine that --hardware or --compare names"));
    }
    let imported = args.import.as_deref().map(Imported::from_file).transpose()?.unwrap_or_default();
    let config = load_config_for((&source, &imported.overrides), target.as_ref(), args.ranks)?;
    let stated = config.memory.device_budget().set().is_some();
    if args.elsewhere && !stated {
        return Err(Failure::usage(
            "--elsewhere plans for another machine, whose memory has to be given, for example --memory 24GiB",
        ));
    }
    let origin = models::origin(&config, Need::Shape, args.json)?;
    // The run will have it in memory, so that its memory belongs to the plan.
    let _tokenizer = match &origin {
        ModelOrigin::Files(files) => files.tokenizer().ok(),
        ModelOrigin::Catalogue(_) | ModelOrigin::Scratch(..) => None,
    };
    if args.find == Some(Sought::Hardware) {
        let devices = fitting_devices(&config, &origin, plimsoll_train::host_bytes_per_token(&config))?;
        return match devices.is_empty() {
            true => Err(find::nothing(Sought::Hardware)),
            false => compare::show(args, devices),
        };
    }
    let mut found = None;
    let mut plan_for = |machine: &Machine| -> Result<TrainingPlan, Failure> {
        let Some(sought) = args.find else { return Ok(TrainingPlan::for_model(&config, &origin, machine)?) };
        let question = Question { config: &config, origin: &origin, machine };
        let largest = question.largest(sought)?.ok_or_else(|| find::nothing(sought))?;
        let plan = largest.plan.clone();
        found = Some((sought, largest));
        Ok(plan)
    };
    let (plan, speeds);
    if let Some(target) = &target {
        plan = plan_for(&target.machine(plimsoll_train::host_bytes_per_token(&config)))?;
        speeds = PlanSpeeds::of_catalogue(target);
    } else {
        let engine = Engine::start(None)?;
        let mut machine = engine.machine(&config);
        // A model that is known by its dimensions alone is not trained here.
        let elsewhere = args.elsewhere || matches!(origin, ModelOrigin::Catalogue(_)) && stated;
        if elsewhere {
            (machine.limits, machine.disk_available) = (ProcessLimits::NONE, None);
            machine.rates.disk = DiskRates::USUAL;
        }
        plan = engine.plan(&config, &machine, &mut plan_for)?;
        speeds = PlanSpeeds::of(&engine, &plan, elsewhere);
    }
    // Where no method is chosen, what each would need is a part of the answer.
    let undecided = config.training.method.is_none() && args.find.is_none();
    let needs = if undecided { needs::of(&origin).unwrap_or_default() } else { Vec::new() };
    if args.json {
        let mut document = plan.to_json();
        if let Value::Object(map) = &mut document {
            map.insert("speeds".to_owned(), speeds.json.clone());
            if let Some(target) = &target {
                map.insert("hardware".to_owned(), serde_json::to_value(target)?);
            }
            if let Some((sought, found)) = &found {
                map.insert("find".to_owned(), find::document(*sought, found));
            }
            if let Some(cost) = cost::of(&plan, args, target.as_ref()) {
                map.insert("cost".to_owned(), serde_json::to_value(cost)?);
            }
            if args.import.is_some() {
                map.insert("imported".to_owned(), import::document(&imported));
            }
            map.insert("needs".to_owned(), serde_json::to_value(&needs)?);
            if args.zero_table {
                map.insert("zero_table".to_owned(), serde_json::to_value(plan.zero_table()?)?);
            }
        }
        outln!("{}", serde_json::to_string_pretty(&document)?)?;
    } else {
        if args.import.is_some() {
            out!("{}", import::words(&imported, &plan.config.changes_since(&config)))?;
        }
        if let Some((sought, found)) = &found {
            out!("{}", find::words(*sought, found))?;
        }
        let steps = cost::of(&plan, args, target.as_ref());
        out!("{}{}", describe(&plan, &speeds), whole_run(&plan, steps.map(|cost| cost.steps)))?;
        if let Some(cost) = steps {
            out!("{}", cost::words(&cost, args, target.as_ref()))?;
        }
        if !plan.fits() {
            out!("\n{}{}", misfits(&plan), remedies(&plan))?;
        }
        if args.zero_table {
            out!("\n{}", zero_table(&plan)?)?;
        }
        if !needs.is_empty() {
            out!("\n{}\n{}", needs::TITLE, needs::table(&needs))?;
        }
    }
    if let Some((file, format)) = timeline {
        write_timeline(&plan, file, format)?;
        if !args.json {
            outln!("\nevery allocation of the step is in {}", file.display())?;
        }
    }
    if plan.fits() { Ok(()) } else { Err(Failure::shown_not_to_fit()) }
}

/// The machine of a name, or of so many of its devices where the name is that of one.
pub fn machine_of(name: &str, ranks: Option<u32>, host_memory: Option<ByteSize>) -> Result<Target, Failure> {
    let found = Catalogue::known().target(name)?;
    let target = match ranks.map(u64::from) {
        None => found,
        Some(ranks) if ranks == found.devices() => found,
        Some(ranks) if found.devices() == 1 => Catalogue::known().target(&format!("{ranks}x{name}"))?,
        Some(ranks) => {
            return Err(Failure::usage(format!(
                "--ranks {ranks}: --hardware {name} has {} devices, and each is a rank; leave --ranks away",
                found.devices()
            )));
        }
    };
    Ok(match host_memory {
        Some(bytes) => target.with_host_memory(bytes),
        None => target,
    })
}

/// The configuration of a run on every device of a machine, on so many ranks, or on as many as it says itself; over what a file of another
/// program says.
pub fn load_config_for(
    (source, imported): (&ConfigSource, &[Override]),
    target: Option<&Target>,
    ranks: Option<u32>,
) -> Result<RawConfig, Failure> {
    let count = |devices: u64| u32::try_from(devices).unwrap_or(u32::MAX);
    let config = match (target, ranks) {
        (Some(target), _) => {
            let of_each_machine = Some(count(target.devices_of_machine));
            load_config_on(source, imported, Started { ranks: count(target.devices()), of_each_machine })?
        }
        (None, Some(ranks)) => load_config_on(source, imported, Started { ranks, of_each_machine: None })?,
        (None, None) => load_config_over(source, imported, &[])?,
    };
    config.divisions()?;
    Ok(config)
}

/// What a rank holds, by stage and number of ranks.
fn zero_table(plan: &TrainingPlan) -> Result<String, Failure> {
    let mut rows =
        vec![row!["ZeRO", "data", "ranks", "weights", "gradients", "states", "messages", "paper", "arena"]];
    for line in plan.zero_table()? {
        let ZeroRow { zero_stage, ranks, data_parallel, weights, gradients, states, communication, .. } =
            line;
        let bytes = [weights, gradients, states, communication, line.paper_bytes, line.device_peak_bytes];
        let numbers = [zero_stage, data_parallel, ranks].map(|number| number.to_string());
        rows.push(numbers.into_iter().chain(bytes.map(|bytes| ByteSize(bytes).to_string())).collect());
    }
    Ok(format!(
        "what the first rank holds, the most of each kind, on whatever tier, for so many data parallel ranks:\n{}\
         paper: weights, gradients and states by the formula of the ZeRO paper. The arena has besides: activations,\n\
         workspace, and the gradients of a layer in whole before each rank has its share.\n",
        table::render(&rows)
    ))
}

fn write_timeline(plan: &TrainingPlan, file: &Path, format: TimelineFormat) -> Result<(), Failure> {
    write_file("the timeline", file, &plan.timeline()?.to_bytes(format)?)
}

/// Writes a file that was asked for by its name, whole or not at all.
pub fn write_file(what: &str, file: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_whole(file, bytes).map_err(|error| match error {
        // The remedies of other files are those of a run's folder.
        TrainError::Io { source, .. } => Failure::other(format!(
            "{what} could not be written to {}: {source}; name a file in a folder that you may write to and that has room",
            file.display()
        )),
        other => other.into(),
    })
}

/// Whose speeds a plan's time is made of.
pub struct PlanSpeeds {
    /// Where they are found.
    whose: String,
    /// Where they come from and how old they are.
    words: String,
    json: Value,
}

impl PlanSpeeds {
    /// Those of a plan for this machine.
    pub fn here(engine: &Engine, plan: &TrainingPlan) -> PlanSpeeds {
        PlanSpeeds::of(engine, plan, false)
    }

    /// Those of a plan for this machine, or for one of which nothing but its memory is known.
    fn of(engine: &Engine, plan: &TrainingPlan, elsewhere: bool) -> PlanSpeeds {
        let folder = plan.config.disk_path();
        let folder =
            Some(folder.as_path()).filter(|_| plan.disk_bytes() > 0 && plan.machine.disk_available.is_some());
        let cpu = &engine.hardware.cpu;
        let (name, threads) = (cpu.name.as_deref().unwrap_or(cpu.architecture), engine.pool.threads());
        let cpu = format!("{name}, {threads} thread{}", if threads == 1 { "" } else { "s" });
        PlanSpeeds {
            whose: match elsewhere {
                false => format!("on this machine's CPU ({cpu})"),
                true => format!(
                    "at the speed of this machine's CPU ({cpu}):\nthe machine that the plan is for has another"
                ),
            },
            words: engine.speeds().words(folder),
            json: engine.speeds().json(folder),
        }
    }

    /// Those of a machine of the catalogue.
    fn of_catalogue(target: &Target) -> PlanSpeeds {
        let mut words = "shares of what the vendor states, as measured elsewhere (plimsoll hardware shows the figures);\n\
                         this version trains on CPUs: what the same step takes on that device is the plan's claim"
            .to_owned();
        if target.disk.is_none() {
            words.push_str("\na disk of 2 GB/s read and 1 GB/s written, of any size, is assumed");
        }
        PlanSpeeds {
            whose: format!("on {}", target.title),
            words,
            json: json!({ "machine": null, "disk": null, "file": null }),
        }
    }

    /// What a rate is followed by.
    fn place(&self) -> &str {
        &self.whose
    }
}

/// The types of quantised weights, the most frequent first.
fn frozen_types(adapters: &Adapters) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    adapters.weight_types.values().for_each(|dtype| *counts.entry(dtype.name()).or_default() += 1);
    let mut names: Vec<(&str, usize)> = counts.into_iter().collect();
    names.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let names: Vec<&str> = names.into_iter().map(|(name, _)| name).collect();
    if names.is_empty() { String::new() } else { format!(", quantised as {}", names.join(", ")) }
}

/// Whose messages the plan has counted.
fn who_sends(mesh: Mesh) -> &'static str {
    if mesh.pipeline > 1 { "the first sends" } else { "each sends" }
}

/// How many ranks there are, and how they divide the work: the layers in runs, so many of each stage.
fn ways(mesh: Mesh, runs: u32) -> String {
    let of = |ranks: u32, what: &str| (ranks > 1).then(|| format!("{ranks} {what}"));
    let stages = match runs {
        1 => "pipeline stages".to_owned(),
        runs => format!("pipeline stages of {runs} runs of layers"),
    };
    let all = [
        of(mesh.pipeline, &stages),
        of(mesh.data, "data parallel"),
        of(mesh.context, "context parallel"),
        of(mesh.tensor, "tensor parallel"),
    ];
    let all: Vec<String> = all.into_iter().flatten().collect();
    match mesh.replicas() < mesh.size() || mesh.context > 1 {
        true => format!("{} ({})", mesh.size(), all.join(" x ")),
        false => mesh.size().to_string(),
    }
}

/// The ranks in a line, where there are several.
fn ranks(plan: &TrainingPlan) -> String {
    let (Some(largest), settings) = (plan.largest_rank(), &plan.choice.settings) else {
        return String::new();
    };
    let shared = match settings.sharding.stage {
        ZeroStage::Nothing if settings.ranks.mesh.replicas() < settings.ranks.count() => {
            "each with its part of the model"
        }
        ZeroStage::Nothing => "each with everything",
        ZeroStage::States => "with shares of optimizer states (ZeRO 1)",
        ZeroStage::Gradients => "with shares of optimizer states and gradients (ZeRO 2)",
        ZeroStage::Weights => "with shares of optimizer states, gradients and weights (ZeRO 3)",
    };
    let first = largest.ranks.first().copied().unwrap_or(0);
    let least = plan.ranks.iter().map(|group| group.device_peak_bytes).min().unwrap_or(0);
    let span = match least == largest.device_peak_bytes {
        true => "all take the same".to_owned(),
        false => format!("rank {first} takes most, the others at least {} of arena", ByteSize(least)),
    };
    let sent = plan.choice.dry_run.moved.sent;
    let count = ways(settings.ranks.mesh, settings.pipeline_schedule.rounds());
    format!(
        "ranks: {count}, {shared}; {span}; {} {} a step\n",
        who_sends(settings.ranks.mesh),
        ByteSize(sent.total_bytes())
    )
}

/// How the planner has divided the ranks, and why, in a line.
fn division(division: &Division) -> String {
    let Division { tensor_parallel, pipeline_parallel, context_parallel, data_parallel, .. } = *division;
    let ways = [
        (tensor_parallel, "tensor"),
        (pipeline_parallel, "pipeline"),
        (context_parallel, "context"),
        (data_parallel, "data"),
    ];
    let several = ways.into_iter().filter(|(ranks, _)| *ranks > 1);
    let mut way: Vec<String> = several.map(|(ranks, name)| format!("{name} {ranks}")).collect();
    if way.is_empty() {
        way.push("one rank".to_owned());
    }
    let chosen = format!("{}, ZeRO {}", way.join(" x "), division.zero_stage);
    let Division { fitting, not_fitting, slower, candidates, .. } = *division;
    let why = match (fitting, slower) {
        (0, _) => format!("none of {candidates} ways fits, and this one takes least at rest"),
        (1, 0) => "the only way that fits".to_owned(),
        (_, 0) => format!("fastest of {fitting} ways that fit"),
        _ => format!("fastest of {} ways, {fitting} of them planned in every form", fitting + slower),
    };
    let rest = match not_fitting {
        _ if fitting == 0 => String::new(),
        0 => String::new(),
        1 => "; one does not fit".to_owned(),
        n => format!("; {n} do not fit"),
    };
    format!("divided: {chosen}: {why}{rest}\n")
}

/// The plan for people.
pub fn describe(plan: &TrainingPlan, speeds: &PlanSpeeds) -> String {
    let settings = &plan.choice.settings;
    let precision = settings.precision;
    let master = if precision.master_weights { ", f32 master weights" } else { "" };
    let linears = if precision.linears == Linears::Fp8 { ", linear layers in 8-bit floats" } else { "" };
    let mut out = disk_needed(plan);
    out.push_str(&format!(
        "{}: {}, {} parameters, {} layers of width {}\n",
        plan.spec.name,
        plan.spec.architecture,
        count(plan.parameters()),
        plan.spec.num_layers,
        plan.spec.hidden_size
    ));
    if let Some(adapters) = settings.method.adapters() {
        let (trained, all) = (plan.trainable_parameters(), plan.parameters());
        out.push_str(&format!(
            "trained: {} of {} parameters, {:.3} %; adapters of {} modules beside frozen weights{}\n",
            count(trained),
            count(all),
            100.0 * trained as f64 / all.max(1) as f64,
            adapters.layout.modules().len(),
            frozen_types(adapters),
        ));
    }
    out.push_str(&format!(
        "step: {} x {} tokens{}, {} accumulated{}; {} weights{master}{linears}, {} gradients, checkpointing {}; logits of {} tokens at once\n",
        settings.batch_size,
        settings.sequence_length,
        settings.chunk_tokens().map_or(String::new(), |chunk| format!(" in chunks of {chunk}")),
        plan.choice.accumulation,
        if settings.micro_batches_per_pass > 1 {
            format!(", {} in a pass", settings.micro_batches_per_pass.min(plan.choice.accumulation))
        } else {
            String::new()
        },
        precision.weights,
        precision.gradients,
        checkpointing(plan),
        settings.loss_chunk_tokens
    ));
    out.push_str(&plan.division.as_ref().map_or(String::new(), division));
    out.push_str(&ranks(plan));
    let at_peak = plan.at_peak();
    out.push_str(&format!(
        "optimizer {}: {:.3} bytes of state a parameter\n\n",
        plan.config.training.optimizer(),
        plan.state_bytes_per_parameter()
    ));
    let mut rows: Vec<Vec<String>> =
        at_peak.iter().map(|(tag, bytes)| row![words(tag), ByteSize(bytes), share(bytes, plan)]).collect();
    let gaps = plan.choice.dry_run.at_peak().gaps();
    if gaps > 0 {
        rows.push(row!["gaps", ByteSize(gaps), share(gaps, plan)]);
    }
    rows.push(row![
        "overhead (outside the arena)",
        ByteSize(plan.overhead_bytes),
        share(plan.overhead_bytes, plan)
    ]);
    let host = &plan.choice.dry_run.host;
    rows.extend(tier_rows("on the host: ", host.at_peak(), plan));
    if plan.pipeline_bytes() > 0 {
        rows.push(row!["data pipeline", ByteSize(plan.pipeline_bytes()), share(plan.pipeline_bytes(), plan)]);
    }
    rows.push(row!["in all", ByteSize(plan.process_bytes()), share(plan.process_bytes(), plan)]);
    if let Some(budget) = plan.limits.host_bytes {
        rows.push(row!["of it on the host", ByteSize(plan.host_bytes()), ""]);
        rows.push(row!["host budget", ByteSize(budget), ""]);
    }
    let line = plan.load_line;
    rows.push(row![format!("load line ({})", line.by), ByteSize(line.bytes), ""]);
    for row in tier_rows("on disk: ", plan.choice.dry_run.disk.at_peak(), plan) {
        rows.push(row.into_iter().take(2).chain([String::new()]).collect());
    }
    out.push_str(&table::render(&rows));
    let (phase, layer) = plan.peak_place();
    let place =
        layer.map_or(format!("in the {phase} phase"), |l| format!("in the {phase} pass of layer {l}"));
    let time = &plan.choice.time;
    out.push_str(&format!(
        "\nthe peak is {place}; a layer holds {} there\nabout {} a step{}, {:.0} tokens/s {}\n{}\n{}\n",
        per_layer(plan),
        seconds(time.step_seconds),
        waiting(time, settings.ranks.count()),
        time.tokens_per_second,
        speeds.place(),
        speeds.words,
        if plan.fits() { "fits" } else { "does NOT fit" }
    ));
    out
}

/// What of a step is waiting, where that is a hundredth of it or more.
fn waiting(time: &TimeEstimate, ranks: u32) -> String {
    if time.waiting_seconds < 0.01 * time.step_seconds || time.waiting_seconds <= 0.0 {
        return String::new();
    }
    let what = match (time.disk_seconds > 0.0, ranks > 1) {
        (true, true) => "the disk and other ranks",
        (true, false) => "the disk",
        (false, true) => "other ranks",
        (false, false) => "the host's memory",
    };
    format!(" ({} of it waiting for {what})", seconds(time.waiting_seconds))
}

/// How long the whole run takes, of so many steps where that is known better than the configuration says it, and what it
/// leaves on disk.
pub fn whole_run(plan: &TrainingPlan, steps: Option<u64>) -> String {
    let needs = plan.run_needs(steps);
    let time = match (needs.steps, needs.seconds) {
        (Some(1), Some(time)) => format!("the whole run, a step: about {}", seconds(time)),
        (Some(steps), Some(time)) => format!("the whole run, {steps} steps: about {}", seconds(time)),
        _ => "how many steps the run has depends on the data".to_owned(),
    };
    let mut left = Vec::new();
    match needs.checkpoints {
        0 => {}
        1 => left.push(format!("a checkpoint of {}", ByteSize(needs.checkpoint_bytes))),
        n => left.push(format!("{n} checkpoints of {} each", ByteSize(needs.checkpoint_bytes))),
    }
    if needs.model_bytes > 0 {
        left.push(format!("the model of {}", ByteSize(needs.model_bytes)));
    }
    if left.is_empty() {
        return format!("{time}; it leaves no model behind\n");
    }
    let most = if needs.most_bytes > needs.left_bytes {
        format!(", at most {} at once", ByteSize(needs.most_bytes))
    } else {
        String::new()
    };
    format!("{time}\nit leaves {} on disk{most}:\n  {}\n", ByteSize(needs.left_bytes), left.join(" and "))
}

/// The disk that the run takes and what is there, before everything else; nothing where it takes none.
fn disk_needed(plan: &TrainingPlan) -> String {
    if plan.disk_bytes() == 0 {
        return String::new();
    }
    let free =
        plan.machine.disk_available.map_or(String::new(), |b| format!(", {} are free there", ByteSize(b)));
    let budget =
        plan.config.memory.disk_budget().set().map_or(String::new(), |b| format!(", the budget is {b}"));
    let folder = plan.config.disk_path();
    format!("disk: {} in {}{free}{budget}\n", ByteSize(plan.disk_bytes()), folder.display())
}

/// What lives on a lower tier at its peak.
fn tier_rows(place: &str, at_peak: &AtPeak, plan: &TrainingPlan) -> Vec<Vec<String>> {
    let tags = at_peak.by_tag.iter().map(|(tag, bytes)| (words(tag), bytes));
    let gaps = Some(("gaps".to_owned(), at_peak.gaps())).filter(|(_, bytes)| *bytes > 0);
    let row =
        |(name, bytes): (String, u64)| row![format!("{place}{name}"), ByteSize(bytes), share(bytes, plan)];
    tags.chain(gaps).map(row).collect()
}

/// The form of checkpointing.
pub fn checkpointing(plan: &TrainingPlan) -> String {
    GradientCheckpointing::Form(plan.choice.settings.checkpointing).to_string()
}

/// Bytes of a middle layer at the peak, by tag.
fn per_layer(plan: &TrainingPlan) -> String {
    let own = plan.own_layers();
    let middle = own.get(own.len() / 2).copied();
    let layers = plan.layers();
    let Some(layer) = layers.iter().find(|l| middle.is_some() && l.layer == middle) else {
        return "nothing".to_owned();
    };
    let parts: Vec<String> =
        layer.by_tag.iter().map(|(tag, bytes)| format!("{} {}", words(*tag), ByteSize(*bytes))).collect();
    parts.join(", ")
}

fn words(tag: Tag) -> String {
    tag.name().replace('_', " ")
}

fn share(bytes: u64, plan: &TrainingPlan) -> String {
    format!("{:.1} %", 100.0 * bytes as f64 / plan.process_bytes().max(1) as f64)
}

/// A count with three figures: 134.5M.
pub fn count(n: u64) -> String {
    match n {
        0..1_000_000 => n.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1}M", n as f64 / 1e6),
        _ => format!("{:.1}B", n as f64 / 1e9),
    }
}

/// A duration for people.
pub fn seconds(s: f64) -> String {
    match s {
        s if s < 1.0 => format!("{:.0} ms", 1000.0 * s),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
