//! `plimsoll monitor --post-mortem`: what ended a run, what grew, since when, and what would have fitted, by dry runs.

use std::path::Path;

use plimsoll_memory::ByteSize;
use plimsoll_monitor::{Cause, Conditions, FLIGHT_RECORDER, PostMortem, Recording};
use plimsoll_plan::TrainingPlan;
use plimsoll_plan::hardware::SystemFiles;
use plimsoll_train::CONFIG_FILE;
use serde_json::{Value, json};

use crate::args::ConfigSource;
use crate::asked::Asked;
use crate::commands::advice::{misfits, remedies};
use crate::failure::Failure;
use crate::output::{out, outln};
use crate::row;
use crate::session::load_config;
use crate::table;
use crate::units::seconds;

pub fn run(path: &Path, json: bool) -> Result<(), Failure> {
    let file = if path.is_dir() { path.join(FLIGHT_RECORDER) } else { path.to_owned() };
    if !file.exists() {
        return Err(Failure::usage(format!(
            "--post-mortem {}: there is no recording of a run; name the folder that output.dir says, or the {FLIGHT_RECORDER} in it",
            path.display()
        )));
    }
    let recording = Recording::read(&file).map_err(|error| Failure::other(error.to_string()))?;
    let now = Conditions::after(&SystemFiles::of_this_machine(), &recording.about);
    let found = PostMortem::of(&recording, &now);
    let config = path.join(CONFIG_FILE);
    let bytes = room(&found);
    let plan = match (bytes, config.is_file()) {
        (Some(bytes), true) => Some(planned(&config, bytes, json)),
        _ => None,
    };
    if json {
        let mut document = json!(found);
        if let Value::Object(map) = &mut document {
            map.insert("words".to_owned(), found.cause.to_string().into());
            map.insert("room_bytes".to_owned(), json!(bytes));
            if let Some(Ok(plan)) = &plan {
                map.insert("plan".to_owned(), plan.to_json());
            }
        }
        return outln!("{}", serde_json::to_string_pretty(&document)?);
    }
    out!("{}", describe(&found))?;
    match (plan, bytes) {
        (Some(Ok(plan)), Some(bytes)) => out!("\n{}", would_fit(&plan, bytes)),
        // A model that has moved since cannot be planned; what was found is true all the same.
        (Some(Err(error)), _) => outln!("\nwhat would have fitted cannot be planned: {error}"),
        _ => Ok(()),
    }
}

/// What the run could have had at its end: the limit less what others held below it. Only where memory ended it.
fn room(found: &PostMortem) -> Option<u64> {
    let last = found.last.as_ref()?;
    let others = |used: u64| used.saturating_sub(last.rss);
    match found.cause {
        Cause::Container { limit_bytes, .. } => {
            let others = last.container.map_or(0, |[_, used]| others(used));
            Some(limit_bytes.saturating_sub(others))
        }
        Cause::Machine { total_bytes, .. } => {
            let others = last.machine.map_or(0, |[total, free]| others(total.saturating_sub(free)));
            Some(total_bytes.saturating_sub(others))
        }
        _ => None,
    }
}

/// The run's own configuration, planned for so many bytes.
fn planned(config: &Path, bytes: u64, quiet: bool) -> Result<TrainingPlan, Failure> {
    let source = ConfigSource {
        config: Some(config.to_owned()),
        set: vec![format!("memory.device_budget={bytes}")],
        ..ConfigSource::default()
    };
    let (plan, _) = Asked::on(None, load_config(&source)?, quiet)?.elsewhere()?.plan()?;
    Ok(plan)
}

/// What was found, for people.
fn describe(found: &PostMortem) -> String {
    let mut text = format!("{}: {}\n", found.what, found.cause);
    let Some(last) = &found.last else {
        return text + "nothing was recorded\n";
    };
    let step = last.step.map_or(String::new(), |step| format!(" after step {step}"));
    text.push_str(&format!(
        "last seen{step}, status {}, resident {}; the recording covers {}\n",
        last.status,
        ByteSize(last.rss),
        seconds(found.covers_seconds)
    ));
    if let Some([limit, used]) = last.container {
        text.push_str(&format!("the container had {} of {} in use\n", ByteSize(used), ByteSize(limit)));
    }
    if let Some([total, free]) = last.machine {
        text.push_str(&format!("the machine could still give {} of {}\n", ByteSize(free), ByteSize(total)));
    }
    if found.grown.is_empty() {
        text.push_str("nothing had grown\n");
    } else {
        let mut rows = vec![row!["grew", "usually", "at the end", "since"]];
        rows.extend(found.grown.iter().map(|grown| {
            let step = grown.since_step.map_or(String::new(), |step| format!(", step {step}"));
            let since = format!("{} before{step}", seconds(grown.since_seconds));
            row![grown.owner, ByteSize(grown.usual_bytes), ByteSize(grown.last_bytes), since]
        }));
        text.push_str(&format!("\n{}", table::render(&rows)));
    }
    let mut rows = vec![row!["owner", "at the end"]];
    rows.extend(last.owners.iter().map(|owner| row![owner.name, ByteSize(owner.bytes)]));
    text + "\n" + &table::render(&rows)
}

/// What would have fitted, for people.
fn would_fit(plan: &TrainingPlan, bytes: u64) -> String {
    let room = ByteSize(bytes);
    match plan.fits() {
        true => format!(
            "the run as it was planned takes {} and fits in the {room} that it could have had: what grew was not in its plan\n",
            ByteSize(plan.process_bytes())
        ),
        false => format!("the run could have had {room}\n{}{}", misfits(plan), remedies(plan)),
    }
}
