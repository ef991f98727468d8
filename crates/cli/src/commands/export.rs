//! `plimsoll export`: what was planned, as a configuration of another program.

use std::path::{Path, PathBuf};

use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{DiskRates, Exported, Machine, ModelOrigin, ProcessLimits, Target, TrainingPlan};

use crate::args::ExportArgs;
use crate::commands::plan::{load_config_for, machine_of, write_file};
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::output::{out, outln, write_error};
use crate::session::Engine;

pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    let named = args.hardware.as_deref();
    let target = named.map(|name| machine_of(name, args.ranks, args.host_memory)).transpose()?;
    let config = load_config_for((&args.source, &[]), target.as_ref(), args.ranks)?;
    let origin = models::origin(&config, Need::Shape, true)?;
    let plan = planned(&config, &origin, target.as_ref())?;
    if !plan.fits() {
        return Err(Failure::does_not_fit(format!(
            "nothing was exported: {}; plimsoll plan says with the same arguments what would fit",
            plan.misfits().join("; ")
        )));
    }
    let exported = plan.export(args.format, target.map_or(1, |target| target.nodes))?;
    match &args.output {
        Some(file) => write(&exported, file),
        None => show(&exported),
    }
}

/// The plan for a machine of the catalogue, or for this one.
fn planned(
    config: &RawConfig,
    origin: &ModelOrigin,
    target: Option<&Target>,
) -> Result<TrainingPlan, Failure> {
    if let Some(target) = target {
        let machine = target.machine(plimsoll_train::host_bytes_per_token(config));
        return Ok(TrainingPlan::for_model(config, origin, &machine)?);
    }
    let engine = Engine::start(None)?;
    let mut machine = engine.machine(config);
    // As in `plan`: a model that is known by its dimensions alone is not trained here.
    if matches!(origin, ModelOrigin::Catalogue(_)) && config.memory.device_budget().set().is_some() {
        (machine.limits, machine.disk_available) = (ProcessLimits::NONE, None);
        machine.rates.disk = DiskRates::USUAL;
    }
    let make = |machine: &Machine| -> Result<TrainingPlan, Failure> {
        Ok(TrainingPlan::for_model(config, origin, machine)?)
    };
    engine.plan(config, &machine, make)
}

fn show(exported: &Exported) -> Result<(), Failure> {
    out!("{}", exported.text()?)?;
    if !exported.has_comments() {
        write_error(format_args!("{}", exported.remarks()));
    }
    Ok(())
}

fn write(exported: &Exported, file: &Path) -> Result<(), Failure> {
    write_file("the configuration", file, exported.text()?.as_bytes())?;
    if exported.has_comments() {
        outln!("{}", file.display())?;
        return Ok(());
    }
    let mut name = file.as_os_str().to_owned();
    name.push(".notes.txt");
    let notes = PathBuf::from(name);
    write_file("what could not be carried over", &notes, exported.remarks().as_bytes())?;
    outln!("{}\n{}", file.display(), notes.display())?;
    Ok(())
}
