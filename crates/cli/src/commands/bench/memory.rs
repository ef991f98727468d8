//! `plimsoll bench memory`: every memory technique planned and trained, one after the other and each alone.

use std::path::{Path, PathBuf};

use plimsoll_model::ModelSpec;
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{Machine, ModelOrigin};
use plimsoll_train::write_whole;

use super::charts;
use super::report::MemoryReport;
use super::rung::{self, Rung, Trainings, quoted};
use super::techniques::{self, Group, TECHNIQUES, Technique};
use crate::args::{BenchMemoryArgs, ConfigSource};
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::output::{out, outln};
use crate::session::{Engine, load_config};
use crate::signals::StopSignals;

/// The model of the benchmark, and where `examples/get-smollm2` puts it.
const MODEL_FILE: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
/// The same model's dimensions, which are enough to plan.
const MODEL_NAME: &str = "smollm2-135m";
/// The text that comes with the program's source.
const DATA_FILE: &str = "examples/data/shakespeare.txt";

pub fn run(args: &BenchMemoryArgs) -> Result<(), Failure> {
    let chosen = chosen(&args.only)?;
    let base = Base::new(args)?;
    let need = if args.plan_only { Need::Shape } else { Need::Files };
    let origin = models::origin(&base.config, need, args.json)?;
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
    let engine = Engine::start(args.threads)?;
    let machine = engine.machine(&base.config);
    let mut report = MemoryReport {
        model: origin.spec().name.clone(),
        parameters: origin.spec().parameter_count(),
        batch_size: args.batch_size,
        sequence_length: args.sequence_length,
        steps: args.steps,
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
            if !args.json {
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
    if args.json {
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

/// The baseline: the user's configuration, and the arguments that give `plimsoll train` the same.
struct Base {
    config: RawConfig,
    train_arguments: Vec<String>,
}

impl Base {
    /// From the file, then what the benchmark sets, then every `--set`.
    fn new(args: &BenchMemoryArgs) -> Result<Base, Failure> {
        let mut set = techniques::baseline(args.batch_size, args.sequence_length);
        set.extend([
            format!("training.steps={}", args.steps),
            "output.save_steps=0".to_owned(),
            "output.eval_steps=0".to_owned(),
            "output.final_model=false".to_owned(),
            "data.validation=".to_owned(),
        ]);
        match (&args.data, &args.config) {
            (Some(path), _) => set.push(format!("data.train={}", quoted(path)?)),
            (None, None) => set.push(format!("data.train={DATA_FILE}")),
            (None, Some(_)) => {}
        }
        set.extend(args.set.iter().cloned());
        let scratch = args.set.iter().any(|assignment| assignment.starts_with("model"));
        let model = match &args.model {
            Some(model) => Some(model.clone()),
            None if scratch || args.config.is_some() => None,
            None if Path::new(MODEL_FILE).exists() => Some(MODEL_FILE.to_owned()),
            None if args.plan_only => Some(MODEL_NAME.to_owned()),
            None => {
                return Err(Failure::usage(format!(
                    "{MODEL_FILE} is missing: fetch it with examples/get-smollm2, or give --model or --plan-only"
                )));
            }
        };
        if !args.plan_only && args.data.is_none() && args.config.is_none() && !Path::new(DATA_FILE).exists() {
            return Err(Failure::usage(format!(
                "{DATA_FILE} is missing: give --data with a text to train on"
            )));
        }
        let mut train_arguments = vec!["train".to_owned(), "--json".to_owned()];
        if let Some(path) = &args.config {
            train_arguments.push(
                path.to_str()
                    .map(str::to_owned)
                    .ok_or_else(|| Failure::usage(format!("{}: the path is not UTF-8", path.display())))?,
            );
        }
        if let Some(model) = &model {
            train_arguments.extend(["--model".to_owned(), model.clone()]);
        }
        if let Some(threads) = args.threads {
            train_arguments.extend(["--threads".to_owned(), threads.to_string()]);
        }
        for assignment in &set {
            train_arguments.extend(["--set".to_owned(), assignment.clone()]);
        }
        let config = load_config(&ConfigSource {
            config: args.config.clone(),
            set,
            model,
            batch_size: None,
            sequence_length: None,
            memory: None,
            mixed_precision: None,
            gradient_checkpointing: None,
        })?;
        Ok(Base { config, train_arguments })
    }
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
