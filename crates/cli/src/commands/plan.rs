//! `plimsoll plan`: what a training run needs, before anything is loaded.

mod breakdown;
mod compare;
mod cost;
pub mod describe;
mod explain;
mod find;
mod import;
mod inference;
mod ranks;
mod search;
mod waterfall;

use std::io::Write;
use std::path::Path;

use plimsoll_model::catalogue;
use plimsoll_plan::config::{Imported, RawConfig};
use plimsoll_plan::{
    Finder, Found, ModelOrigin, Need, RunCost, Sought, TimelineFormat, TrainingPlan, Waterfall,
    fitting_devices,
};
use serde_json::{Value, json};

use crate::args::{ConfigSource, PlanArgs};
use crate::asked::Asked;
use crate::commands::advice::{misfits, remedies, wrapped};
use crate::commands::warmup;
use crate::failure::Failure;
use crate::needs;
use crate::output::{out, outln, write_file};
use crate::session::answers;
use crate::speeds::PlanSpeeds;
use describe::{describe, whole_run};

pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    if args.inference.inference {
        return inference::run(args);
    }
    // Before anything is planned, so that nobody waits for a file that cannot be written.
    let timeline = match &args.timeline {
        Some(file) => Some((file.as_path(), TimelineFormat::of(file)?)),
        None => None,
    };
    if let Some(file) = &args.pareto {
        check_picture(file)?;
    }
    if let Some(key) = &args.explain {
        RawConfig::default().check_key(key, &format!("--explain {key}"))?;
    }
    // Where a model is looked for, any stands for it.
    let any = catalogue::names().next().filter(|_| args.find == Some(Sought::Model));
    let model = any.map(str::to_owned).or_else(|| args.source.model.clone());
    let source = search::source(args, ConfigSource { model, ..args.source.clone() });
    if !args.compare.is_empty() {
        return compare::named(args, &source);
    }
    let imported = args.import.as_deref().map(|path| import::read(path, &source));
    let imported = imported.transpose()?.unwrap_or_default();
    let mut asked = Asked::new(&source, &imported, &args.machine, args.json)?;
    let answers = answers(&source)?;
    if args.json {
        let _ = write!(std::io::stderr(), "{answers}");
    } else {
        out!("{answers}")?;
    }
    search::check(args, &asked)?;
    if args.elsewhere {
        asked = asked.elsewhere()?;
    }
    // The run will have it in memory, so that its memory belongs to the plan.
    let _tokenizer = match &asked.origin {
        ModelOrigin::Files(files) => files.tokenizer().ok(),
        ModelOrigin::Catalogue(_) | ModelOrigin::Scratch(..) => None,
    };
    if args.find == Some(Sought::Hardware) {
        let of_token = plimsoll_train::host_bytes_per_token(&asked.config);
        let devices = fitting_devices(&asked.config, &asked.origin, of_token)?;
        return match devices.is_empty() {
            true => Err(find::nothing(Sought::Hardware)),
            false => compare::show(args, devices),
        };
    }
    let on_device = search::device(&asked)?.map(|(target, plan)| {
        let speeds = PlanSpeeds::of_catalogue(&target);
        asked.target = Some(target);
        (plan, speeds)
    });
    let answer = Answer::new(args, &asked, &imported, on_device)?;
    match args.json {
        true => {
            let _ = write!(std::io::stderr(), "{}", answer.note().unwrap_or_default());
            outln!("{}", serde_json::to_string_pretty(&answer.document()?)?)?;
        }
        false => out!("{}", answer.words()?)?,
    }
    if let Some((file, search)) = args.pareto.as_deref().zip(answer.plan.search.as_ref()) {
        let picture = search.to_svg(&answer.plan.spec.name, answer.plan.peak_bytes());
        write_file("the picture", file, picture.as_bytes())?;
    }
    if let Some((file, format)) = timeline {
        write_file("the timeline", file, &answer.plan.timeline()?.to_bytes(format)?)?;
        if !args.json {
            outln!("\nevery allocation of the step is in {}", file.display())?;
        }
    }
    if answer.plan.fits() { Ok(()) } else { Err(Failure::shown_not_to_fit()) }
}

/// Refuses a file whose name does not say that it is a picture.
fn check_picture(file: &Path) -> Result<(), Failure> {
    match file.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("svg")) {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "{}: the front is drawn as a picture; give the file a name that ends with .svg",
            file.display()
        ))),
    }
}

/// Behind a plan that was not searched for.
const SEARCH_FURTHER: &str =
    "this is the fastest of a short list: --goal fastest --quality proven searches all that is left open\n";

/// A plan with what was asked of it.
struct Answer<'a> {
    args: &'a PlanArgs,
    asked: &'a Asked,
    imported: &'a Imported,
    plan: TrainingPlan,
    speeds: PlanSpeeds,
    found: Option<(Sought, Found)>,
    cost: Option<RunCost>,
    /// What each method would need, where none is chosen.
    needs: Vec<Need>,
}

impl<'a> Answer<'a> {
    fn new(
        args: &'a PlanArgs,
        asked: &'a Asked,
        imported: &'a Imported,
        on_device: Option<(TrainingPlan, PlanSpeeds)>,
    ) -> Result<Answer<'a>, Failure> {
        let mut found = None;
        let (plan, speeds) = match args.find {
            None => match (on_device, search::largest(asked)?) {
                (Some(planned), _) => planned,
                (None, Some((sought, largest, speeds))) => {
                    let plan = largest.plan.clone();
                    found = Some((sought, largest));
                    (plan, speeds)
                }
                (None, None) if args.json || args.waterfall => asked.plan()?,
                // Words say what would take less where nothing fits, and not where it does.
                (None, None) => asked.plan_in_brief()?,
            },
            Some(sought) => asked.plan_by(&mut |machine| {
                let finder = Finder { config: &asked.config, origin: &asked.origin, machine };
                let largest = finder.largest(sought)?.ok_or_else(|| find::nothing(sought))?;
                let plan = largest.plan.clone();
                found = Some((sought, largest));
                Ok(plan)
            })?,
        };
        let undecided = asked.config.training.method.is_none() && args.find.is_none();
        let needs = if undecided { needs::of(&asked.origin).unwrap_or_default() } else { Vec::new() };
        let cost = cost::of(&plan, args, asked.target.as_ref());
        Ok(Answer { args, asked, imported, plan, speeds, found, cost, needs })
    }

    /// For machines.
    fn document(&self) -> Result<Value, Failure> {
        let mut document = self.plan.to_json();
        let mut insert = |key: &str, value: Value| {
            if let Value::Object(map) = &mut document {
                map.insert(key.to_owned(), value);
            }
        };
        insert("speeds", self.speeds.json.clone());
        if let Some(target) = &self.asked.target {
            insert("hardware", serde_json::to_value(target)?);
        }
        if let Some((sought, found)) = &self.found {
            insert("find", find::document(*sought, found));
        }
        if let Some(cost) = self.cost {
            insert("cost", json!(cost));
        }
        if self.args.import.is_some() {
            insert("imported", import::document(self.imported));
        }
        insert("needs", serde_json::to_value(&self.needs)?);
        if self.args.zero_table {
            insert("zero_table", serde_json::to_value(self.plan.zero_table()?)?);
        }
        if self.args.waterfall {
            let Waterfall { entries, next } = self.plan.waterfall()?;
            insert("waterfall", json!(entries));
            insert("waterfall_next", json!(next));
        }
        if self.args.breakdown {
            insert("breakdown", json!(self.plan.breakdown()));
            insert("optimizations", json!(self.plan.optimizations()));
        }
        if !self.args.activations.is_empty() {
            insert("activations", json!(breakdown::activations(&self.plan, &self.args.activations)?));
        }
        if let Some(key) = &self.args.explain {
            insert("explain", json!(self.plan.explain(key, &self.asked.origin)?));
        }
        Ok(document)
    }

    /// What to know of the run that is no error, in lines.
    fn note(&self) -> Option<String> {
        let steps = self.plan.run_needs(self.cost.map(|cost| cost.steps)).steps?;
        Some(wrapped(&warmup::note(&self.plan.config, steps)?, ""))
    }

    /// For people.
    fn words(&self) -> Result<String, Failure> {
        let Answer { args, asked, plan, .. } = self;
        let mut out = String::new();
        // Whoever asks for a reason wants that, and not the plan.
        if let Some(key) = &args.explain {
            return Ok(explain::words(&plan.explain(key, &asked.origin)?));
        }
        if args.import.is_some() {
            out.push_str(&import::words(self.imported, &plan.config.changes_since(&asked.config)));
        }
        if let Some((sought, found)) = &self.found {
            out.push_str(&find::words(*sought, found));
        }
        if let Some(report) = &plan.search {
            out.push_str(&format!("{}\n", search::words(plan, report)));
        }
        out.push_str(&describe(plan, &self.speeds));
        out.push_str(&whole_run(plan, self.cost.map(|cost| cost.steps), None, 0));
        if let Some(note) = self.note() {
            out.push_str(&note);
        }
        if let Some(cost) = &self.cost {
            out.push_str(&cost::words(cost, args, asked.target.as_ref()));
        }
        if !plan.fits() {
            out.push_str(&format!("\n{}{}", misfits(plan), remedies(plan)));
        } else if plan.search.is_none() && self.found.is_none() {
            out.push_str(SEARCH_FURTHER);
        }
        if args.zero_table {
            out.push_str(&format!("\n{}", ranks::zero_table(plan)?));
        }
        if args.waterfall {
            out.push_str(&format!("\n{}", waterfall::words(&plan.waterfall()?)));
        }
        if args.breakdown {
            out.push_str(&format!("\n{}", breakdown::words(plan)));
        }
        if !args.activations.is_empty() {
            let all = breakdown::activations(plan, &args.activations)?;
            out.push_str(&format!("\n{}", breakdown::activation_words(&all)));
        }
        if !self.needs.is_empty() {
            out.push_str(&format!("\n{}\n{}", needs::TITLE, needs::table(&self.needs)));
        }
        Ok(out)
    }
}
