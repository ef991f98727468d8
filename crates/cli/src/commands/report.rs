//! `plimsoll report`: a plan, a run, or an estimate of another stack as one page for a browser.

mod source;

use std::path::Path;

use plimsoll_monitor::{FLIGHT_RECORDER, Recording};
use plimsoll_plan::TrainingPlan;
use plimsoll_plan::config::Imported;
use plimsoll_report::{Document, ParetoPoint, RunRecord, Subject, WaterfallEntry};
use plimsoll_stacks::Request;
use plimsoll_train::{CONFIG_FILE, RUN_COMPLETE, RUN_STOPPED, Report, StepMetrics};

use crate::args::{ConfigSource, ReportArgs};
use crate::asked::Asked;
use crate::failure::Failure;
use crate::output::{errln, outln, write_file};
use source::{PlanDocument, Source};

pub fn run(args: &ReportArgs) -> Result<(), Failure> {
    // Before anything is planned, so that nobody waits for a file that cannot be written.
    if let Some(file) = &args.output {
        can_be_written(file)?;
    }
    let document = match Source::of(&args.source)? {
        Source::Run(folder) => of_run(args, &folder)?,
        Source::Document(document) => of_document(args, &document)?,
        Source::Request(request) => of_estimate(args, *request)?,
        Source::Configuration => of_configuration(args)?,
    };
    if let Some(file) = &args.output {
        let page = document.to_html().map_err(|error| Failure::other(error.to_string()))?;
        write_file("the report", file, page.as_bytes())?;
    }
    match (&args.output, args.json) {
        (_, true) => outln!("{}", serde_json::to_string_pretty(&document)?),
        (Some(file), false) => outln!("{}\n{}", document.headline, file.display()),
        (None, false) => Ok(()),
    }
}

fn can_be_written(file: &Path) -> Result<(), Failure> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(Failure::usage(format!(
            "{}: {} is no folder; create it or choose another file",
            file.display(),
            folder.display()
        )));
    }
    match file.is_dir() {
        true => Err(Failure::usage(format!(
            "{} is a folder; name a file, for example report.html",
            file.display()
        ))),
        false => Ok(()),
    }
}

/// A run of another stack, answered again; the flags that a request has words for go over it.
fn of_estimate(args: &ReportArgs, mut request: Request) -> Result<Document, Failure> {
    if args.source.changes_more_than_the_model() || args.machine.ranks.is_some() {
        return Err(Failure::usage(
            "a run of another stack is not changed by flags of plan; write another request with `plimsoll estimate ... --json`",
        ));
    }
    if let Some(model) = &args.source.model {
        request.model.clone_from(model);
    }
    if args.machine.hardware.is_some() {
        request.hardware.clone_from(&args.machine.hardware);
    }
    let answer = request.answer()?;
    let name = args.source.config.as_ref().map_or_else(String::new, |path| path.display().to_string());
    Ok(Document::of_estimate(name, &request, &answer)?)
}

fn of_configuration(args: &ReportArgs) -> Result<Document, Failure> {
    let asked = Asked::new(&args.source, &Imported::default(), &args.machine, args.json)?;
    let (plan, speeds) = asked.plan()?;
    let named = args.source.config.as_ref().map(|path| path.display().to_string());
    let name = named.or_else(|| args.source.model.clone()).unwrap_or_default();
    Ok(Document::of(Subject {
        name,
        plan: Some(&plan),
        place: speeds.place().to_owned(),
        waterfall: WaterfallEntry::of(&plan)?,
        pareto: ParetoPoint::of(&plan)?,
        ..Subject::default()
    })?)
}

/// The configuration of a document of `plan --json`, planned again. What else the document has is shown as it is.
fn of_document(args: &ReportArgs, document: &PlanDocument) -> Result<Document, Failure> {
    let source = ConfigSource { config: None, ..args.source.clone() };
    let machine = document.machine(&args.machine);
    let asked = Asked::new(&source, &document.imported(&machine)?, &machine, args.json)?;
    let (plan, speeds) = asked.plan()?;
    let waterfall = match document.entries("waterfall")? {
        missing if missing.is_empty() => WaterfallEntry::of(&plan)?,
        said => said,
    };
    let said = document.peak_bytes().filter(|said| *said != plan.peak_bytes());
    let note = said.map(|said| {
        format!(
            "The document names a peak of {said} bytes; planned again, the peak is {} bytes. Flags, another version of Plimsoll or another model file change a plan.",
            plan.peak_bytes()
        )
    });
    Ok(Document::of(Subject {
        name: document.name.clone(),
        plan: Some(&plan),
        place: speeds.place().to_owned(),
        waterfall,
        pareto: document.entries("pareto")?,
        notes: note.into_iter().collect(),
        run: None,
    })?)
}

/// What is in a run's folder, and the plan of its configuration, made again where that can be.
fn of_run(args: &ReportArgs, folder: &Path) -> Result<Document, Failure> {
    let configuration = folder.join(CONFIG_FILE);
    let record = RunRecord {
        configuration: std::fs::read_to_string(&configuration).ok(),
        steps: StepMetrics::of_run(folder)?,
        report: Report::of_run(folder)?,
        ended: ended(folder),
    };
    let (mut notes, mut plan, mut place) = (Vec::new(), None, String::new());
    match planned_again(args, &configuration) {
        Ok((mut made, whose)) => {
            let said = record.report.as_ref().map(|report| report.planned.device_peak_bytes);
            // What the program takes beside the arena was measured by the run; this process is another.
            if let Some(report) = record.report.as_ref().filter(|_| said == Some(made.peak_bytes())) {
                let beside = made.process_bytes() - made.overhead_bytes;
                made.overhead_bytes = report.planned.process_bytes.saturating_sub(beside);
            }
            if said.is_some_and(|said| said != made.peak_bytes()) {
                notes.push(format!(
                    "The run was planned with a peak of {} bytes; its configuration, planned again, has one of {} bytes. The breakdown and the time line are those of the plan that was made again.",
                    said.unwrap_or(0),
                    made.peak_bytes()
                ));
            }
            (plan, place) = (Some(made), whose);
        }
        // Flags were to change the plan: there has to be one.
        Err(failure) if args.source.changes_anything() => return Err(failure),
        Err(failure) => {
            errln!("the plan of the run could not be made again: {failure}");
            notes.push(format!(
                "The plan of this run could not be made again, so that there is no breakdown and no time line: {failure}. Paths of a configuration are relative to the folder in which the run was started; --model names a model that was moved."
            ));
        }
    }
    let waterfall = plan.as_ref().map(WaterfallEntry::of).transpose()?.unwrap_or_default();
    Ok(Document::of(Subject {
        name: folder.display().to_string(),
        plan: plan.as_ref(),
        place,
        waterfall,
        run: Some(&record),
        notes,
        ..Subject::default()
    })?)
}

/// What ended a run that came to no end of its own, where it said so to its flight recorder.
fn ended(folder: &Path) -> Option<String> {
    let how = Recording::read(&folder.join(FLIGHT_RECORDER)).ok()?.about.ended?;
    (how != RUN_COMPLETE && how != RUN_STOPPED).then_some(how)
}

fn planned_again(args: &ReportArgs, configuration: &Path) -> Result<(TrainingPlan, String), Failure> {
    let source = ConfigSource { config: Some(configuration.to_owned()), ..args.source.clone() };
    let asked = Asked::new(&source, &Imported::default(), &args.machine, true)?;
    let (plan, speeds) = asked.plan()?;
    Ok((plan, speeds.place().to_owned()))
}
