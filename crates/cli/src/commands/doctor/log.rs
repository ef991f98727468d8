//! `plimsoll doctor FILE`: what a log says of memory that ran out, and what would fit.

use std::fs::File;
use std::io::{BufReader, Write, stdin};
use std::path::Path;

use plimsoll_memory::ByteSize;
use plimsoll_plan::oom::{Diagnosis, Message, diagnose};
use plimsoll_plan::{Catalogue, Target, TrainingPlan};
use serde_json::{Value, json};

use crate::args::{ConfigSource, DoctorArgs};
use crate::asked::Asked;
use crate::commands::advice::{misfits, remedies};
use crate::commands::estimate::Explained;
use crate::commands::plan::describe::checkpointing;
use crate::failure::Failure;
use crate::output::{out, outln};
use crate::row;
use crate::session::{answers, load_config};
use crate::table;
use crate::units::seconds;

pub fn run(args: &DoctorArgs, path: &Path) -> Result<(), Failure> {
    let name = path.display();
    let failed = |error: std::io::Error| Failure::other(format!("{name}: {error}"));
    let found = match path.as_os_str() == "-" {
        true => diagnose(&mut stdin().lock()),
        false => diagnose(&mut BufReader::new(File::open(path).map_err(failed)?)),
    };
    let Some(found) = found.map_err(failed)? else {
        return Err(Failure::other(format!(
            "{name} says nothing of memory that ran out; give the log of the process that failed (PyTorch, the kernel's dmesg, \
             kubectl describe, SLURM)"
        )));
    };
    let explained = explained(args, &found)?;
    let plan = match &explained {
        Some(_) => None,
        None => planned(args, &found)?,
    };
    if args.json {
        let document = json!({
            "diagnosis": found,
            "plan": plan.as_ref().map(|(target, plan)| planned_json(target, plan)),
            "estimate": explained.as_ref().map(Explained::document).transpose()?,
        });
        return outln!("{}", serde_json::to_string_pretty(&document)?);
    }
    out!("{}", describe(&found))?;
    if let Some(explained) = &explained {
        return out!("\n{}", explained.describe(found.message.allocated));
    }
    match &plan {
        Some((target, plan)) => out!("\n{}", describe_plan(target, plan)),
        None if found.message.source.is_device() => outln!(
            "\nwith the files of the run's stack (--estimate FILE) the run is explained phase by phase; with a configuration of Plimsoll's \
             (--config FILE, or --model NAME and --set KEY=VALUE) each change is planned in bytes"
        ),
        None => Ok(()),
    }
}

/// What was found, for people.
fn describe(found: &Diagnosis) -> String {
    let Diagnosis { message, line, scene, messages, .. } = found;
    let more = if *messages > 1 { format!(" (the first of {messages} messages)") } else { String::new() };
    let step = scene.step.map_or(String::new(), |step| format!(", step {step}"));
    let process = message.process.as_ref().map_or(String::new(), |name| format!(" of {name}"));
    let mut out = format!("line {line}: {} ran out of memory{process}{step}{more}\n", message.source.name());
    let rows = numbers(message);
    if !rows.is_empty() {
        out.push_str(&table::render(&rows));
    }
    out.push('\n');
    out.extend(found.meaning.iter().map(|text| format!("- {text}\n")));
    out.push_str("\nwhat to change, the first first:\n");
    let rows: Vec<Vec<String>> = (1..)
        .zip(&found.remedies)
        .map(|(number, remedy)| vec![format!("{number:>2}. {}", remedy.what), remedy.why.to_owned()])
        .collect();
    let width = rows.iter().filter_map(|row| row.first()).map(|cell| cell.chars().count()).max().unwrap_or(0);
    out.extend(rows.iter().map(|row| format!("{:<width$}  {}\n", row[0], row[1])));
    out
}

/// The numbers that a message has.
fn numbers(message: &Message) -> Vec<Vec<String>> {
    let others = match message.outside() {
        Some(_) => "held by other processes",
        None => "other processes, or outside of the allocator",
    };
    let all = [
        ("asked for", message.tried),
        ("the device has", message.total),
        ("free", message.free),
        ("in tensors", message.allocated),
        ("held by the allocator beside them", message.unallocated),
        ("held by this process outside of the allocator", message.outside()),
        (others, message.others()),
        ("this process may have", message.allowed),
        ("the process had", message.in_use.filter(|_| message.total.is_none())),
    ];
    let known = all.into_iter().filter_map(|(what, bytes)| Some(row![what, ByteSize(bytes?)]));
    known.collect()
}

/// The run of another stack's files, on the device that was named or has the memory that the message names.
fn explained(args: &DoctorArgs, found: &Diagnosis) -> Result<Option<Explained>, Failure> {
    if args.estimate.is_empty() {
        return Ok(None);
    }
    let like = |total| Catalogue::known().like(total).map(|target| target.device.name);
    let hardware = args.hardware.clone().or_else(|| found.message.total.and_then(like));
    Explained::new(&args.estimate, args.model.as_ref(), hardware).map(Some)
}

/// The plan of the run's configuration for its device, where both are known.
fn planned(args: &DoctorArgs, found: &Diagnosis) -> Result<Option<(Target, TrainingPlan)>, Failure> {
    if args.config.is_none() && args.model.is_none() {
        return Ok(None);
    }
    let target = match (&args.hardware, found.message.total) {
        (Some(name), _) => Catalogue::known().target(name)?,
        (None, total) => total.and_then(|total| Catalogue::known().like(total)).ok_or_else(|| {
            Failure::usage(
                "the message does not say how much memory the device has; name it, for example --hardware rtx-4090",
            )
        })?,
    };
    let source = ConfigSource {
        config: args.config.clone(),
        model: args.model.clone(),
        set: args.set.clone(),
        ..ConfigSource::default()
    };
    let config = load_config(&source)?;
    let _ = write!(std::io::stderr(), "{}", answers(&source)?);
    let (plan, _) = Asked::on(Some(target.clone()), config, args.json)?.plan()?;
    Ok(Some((target, plan)))
}

fn planned_json(target: &Target, plan: &TrainingPlan) -> Value {
    let mut document = plan.to_json();
    if let Value::Object(map) = &mut document {
        map.insert("hardware".to_owned(), json!(target));
    }
    document
}

/// What the same would take here, for people.
fn describe_plan(target: &Target, plan: &TrainingPlan) -> String {
    let needs = ByteSize(plan.peak_bytes().saturating_add(plan.overhead_bytes));
    let settings = &plan.choice.settings;
    let mut out = format!(
        "as Plimsoll would run it on {}: {} x {} tokens, {} accumulated, {} weights, {} optimizer, checkpointing {}\n",
        target.title,
        settings.batch_size,
        settings.sequence_length,
        plan.choice.accumulation,
        settings.precision.weights,
        plan.config.training.optimizer(),
        checkpointing(plan),
    );
    let host = plan.choice.dry_run.host_bytes();
    let beside = if host > 0 { format!(", {} on the host", ByteSize(host)) } else { String::new() };
    let disk = if plan.disk_bytes() > 0 {
        format!(", {} on disk", ByteSize(plan.disk_bytes()))
    } else {
        String::new()
    };
    if plan.fits() {
        out.push_str(&format!(
            "it takes {needs} of the device{beside}{disk} and fits; about {} a step\n",
            seconds(plan.choice.time.step_seconds)
        ));
    } else {
        out.push_str(&format!("{}{}", misfits(plan), remedies(plan)));
    }
    out
}
