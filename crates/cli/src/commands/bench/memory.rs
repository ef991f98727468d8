//! `plimsoll bench memory`: every memory technique planned and trained, one after the other and each alone.

use std::path::{Path, PathBuf};

use plimsoll_model::ModelSpec;
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{Machine, ModelOrigin};
use plimsoll_train::write_whole;

use super::base::{self, Base};
use super::charts;
use super::report::MemoryReport;
use super::rung::{self, Rung, Trainings};
use super::techniques::{self, Group, TECHNIQUES, Technique};
use crate::args::BenchMemoryArgs;
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::output::{out, outln};
use crate::overhead::Progress;
use crate::session::Engine;
use crate::signals::StopSignals;

pub fn run(args: &BenchMemoryArgs) -> Result<(), Failure> {
    let chosen = chosen(&args.only)?;
    let said = base::written(&args.run)?;
    let batch_size = args.batch_size.or(said.training.batch_size().set()).unwrap_or(4).max(1);
    let sequence_length = args.sequence_length.or(said.data.sequence_length).unwrap_or(512).max(2);
    let mut baseline = techniques::baseline(batch_size, sequence_length);
    if let Some(rate) = said.training.learning_rate {
        baseline.push(format!("training.learning_rate={rate}"));
    }
    let base = Base::new(&args.run, baseline, args.plan_only)?;
    let need = if args.plan_only { Need::Shape } else { Need::Files };
    let origin = models::origin(&base.config, need, args.run.json)?;
    if let (ModelOrigin::Catalogue(spec), false) = (&origin, args.plan_only) {
        return Err(Failure::usage(format!(
            "{} is known by its dimensions only: give --plan-only, or --model with its files",
            spec.name
        )));
    }
    // The trainings will have it in memory, so that its memory belongs to the plan.
    let tokenizer = match &origin {
        ModelOrigin::Files(files) => files.tokenizer().ok(),
        ModelOrigin::Catalogue(_) | ModelOrigin::Scratch(..) => None,
    };
    let engine = Engine::start(args.run.threads)?;
    let machine = engine.machine(&base.config, origin.spec().vocab_size, Progress::Planning);
    let mut report = MemoryReport {
        model: origin.spec().name.clone(),
        parameters: origin.spec().parameter_count(),
        batch_size,
        sequence_length,
        steps: args.run.steps,
        threads: engine.pool.threads(),
        cpu: engine.hardware.cpu.name.clone().unwrap_or_else(|| engine.hardware.cpu.architecture.to_owned()),
        ladder: Vec::new(),
        alone: Vec::new(),
    };
    // The machine belongs to the trainings from here on.
    drop((engine, tokenizer));

    let settings = Setting::all(&base, &chosen, origin.spec(), &machine)?;
    let mut trainings = None;
    if !args.plan_only {
        let stop = StopSignals::listen(false)?.flag().clone();
        trainings = Some(Trainings::new(base.train_arguments, stop));
    }
    let count = settings.len();
    let mut baseline = None;
    for (index, mut setting) in settings.into_iter().enumerate() {
        if let Some(trainings) = &mut trainings {
            if !args.run.json {
                // What cannot be shown is no reason not to go on.
                let _ = outln!("{} of {count}: {}{}", index + 1, setting.rung.name, setting.place());
            }
            match trainings.train(&setting.config, &setting.assignments)? {
                Ok(mut measured) => {
                    measured.compare(baseline.get_or_insert_with(|| measured.clone()));
                    setting.rung.measured = Some(measured);
                }
                // Without the baseline there is nothing to compare with.
                Err(error) if index == 0 => return Err(Failure::other(format!("the baseline: {error}"))),
                Err(error) => setting.rung.error = Some(error),
            }
        }
        if setting.on_ladder { report.ladder.push(setting.rung) } else { report.alone.push(setting.rung) }
    }
    if let Some(folder) = &args.out {
        write(&report, folder)?;
    }
    if args.run.json {
        outln!("{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        out!("\n{}", report.tables())?;
    }
    match report.failed().count() {
        0 => Ok(()),
        n => Err(Failure::other(format!("{n} settings could not be trained"))),
    }
}

/// The techniques that `--only` names; all if it names none.
fn chosen(only: &[String]) -> Result<Vec<&'static Technique>, Failure> {
    for name in only {
        if !TECHNIQUES.iter().any(|technique| technique.name == name) {
            let names: Vec<_> = TECHNIQUES.iter().map(|technique| technique.name).collect();
            return Err(Failure::usage(format!("--only {name}: there are {}", names.join(", "))));
        }
    }
    let wanted = |technique: &&Technique| only.is_empty() || only.iter().any(|name| name == technique.name);
    Ok(TECHNIQUES.iter().filter(wanted).collect())
}

/// A rung to be trained.
struct Setting {
    rung: Rung,
    config: RawConfig,
    /// Everything that is set over the baseline.
    assignments: Vec<String>,
    on_ladder: bool,
}

impl Setting {
    /// The baseline, the rungs of the ladder, and each technique alone, all planned.
    fn all(
        base: &Base,
        chosen: &[&'static Technique],
        spec: &ModelSpec,
        machine: &Machine,
    ) -> Result<Vec<Setting>, Failure> {
        let new = |name, group, what, set: Vec<String>, assignments: Vec<String>, on_ladder| {
            let mut config = base.config.clone();
            for assignment in &assignments {
                config.apply_set(assignment)?;
            }
            config.validate()?;
            let planned = rung::plan(&config, spec, machine)?;
            let rung = Rung { name, group, what, set, planned, measured: None, error: None };
            Ok::<_, Failure>(Setting { rung, config, assignments, on_ladder })
        };
        let mut settings =
            vec![new("baseline", Group::Baseline, techniques::BASELINE, Vec::new(), Vec::new(), true)?];
        let mut all = Vec::new();
        for technique in chosen.iter().filter(|technique| technique.rung) {
            let own = owned(technique.set);
            all.extend(own.iter().cloned());
            settings.push(new(technique.name, technique.group, technique.what, own, all.clone(), true)?);
        }
        for technique in chosen {
            let own = owned(technique.set);
            settings.push(new(technique.name, technique.group, technique.what, own.clone(), own, false)?);
        }
        Ok(settings)
    }

    fn place(&self) -> &'static str {
        match (self.rung.group, self.on_ladder) {
            (Group::Baseline, _) => "",
            (_, true) => ", with all before it",
            (_, false) => ", alone",
        }
    }
}

fn owned(set: &[&str]) -> Vec<String> {
    set.iter().map(|assignment| (*assignment).to_owned()).collect()
}

/// Writes the document, the tables and the pictures.
fn write(report: &MemoryReport, folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder)
        .map_err(|e| Failure::other(format!("{} could not be created: {e}", folder.display())))?;
    let mut files: Vec<(&str, String)> = vec![
        ("memory.json", format!("{}\n", serde_json::to_string_pretty(report)?)),
        ("memory.md", report.markdown()),
        ("memory-ladder.svg", charts::ladder(report)?),
    ];
    if let Some(picture) = charts::checkpointing(report)? {
        files.push(("checkpointing.svg", picture));
    }
    for (name, text) in files {
        let path: PathBuf = folder.join(name);
        write_whole(&path, text.as_bytes())?;
    }
    Ok(())
}
