//! `plimsoll estimate`: what a run of another stack takes.

mod asked;
mod describe;
mod lengths;
mod ours;

use std::path::PathBuf;

use plimsoll_memory::ByteSize;
use plimsoll_plan::{Catalogue, Target};
use plimsoll_stacks::{Answer, Change};
use serde_json::{Value, json};

use crate::args::EstimateArgs;
use crate::failure::Failure;
use crate::output::{out, outln};
use asked::Asked;
use ours::Ours;

pub fn run(args: &EstimateArgs) -> Result<(), Failure> {
    let asked = Asked::new(args)?;
    let answer = asked.request.answer()?;
    let report = Report {
        changes: if args.brief { Vec::new() } else { answer.changes(&asked.request) },
        cards: cards(&answer),
        ours: if args.brief { None } else { ours::plan(&answer) },
        asked,
        answer,
    };
    match args.json {
        true => outln!("{}", serde_json::to_string_pretty(&report.document()?)?)?,
        false => out!("{}", describe::describe(&report))?,
    }
    if report.answer.fits() { Ok(()) } else { Err(Failure::shown_not_to_fit()) }
}

/// The run that another program's files describe, for a log of memory that ran out.
pub struct Explained(Report);

impl Explained {
    /// Runs it dry; `hardware` and `model` are what the files do not say.
    pub fn new(
        files: &[PathBuf],
        model: Option<&String>,
        hardware: Option<String>,
    ) -> Result<Explained, Failure> {
        // A request is JSON, as the stacks' own files are: it is known by its key.
        let is_request = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            serde_json::from_str::<Value>(&text).is_ok_and(|value| value.get("stack").is_some())
        };
        let request = files.iter().find(|path| files.len() == 1 && is_request(path)).cloned();
        let args = EstimateArgs {
            files: if request.is_some() { Vec::new() } else { files.to_vec() },
            request,
            model: model.cloned(),
            hardware,
            ..EstimateArgs::default()
        };
        let asked = Asked::new(&args)?;
        let answer = asked.request.answer()?;
        let changes = answer.changes(&asked.request);
        Ok(Explained(Report { changes, cards: cards(&answer), ours: ours::plan(&answer), asked, answer }))
    }

    /// As `estimate --json` has it.
    pub fn document(&self) -> Result<Value, Failure> {
        self.0.document()
    }

    /// For people: where the run passes what the message counted, then the whole estimate.
    pub fn describe(&self, in_tensors: Option<u64>) -> String {
        format!("{}\n{}", self.passes(in_tensors), describe::describe(&self.0))
    }

    fn passes(&self, in_tensors: Option<u64>) -> String {
        let estimate = &self.0.answer.estimate;
        let memory = self.0.answer.resolved.target.device.memory.0;
        let outside = estimate.device_used_bytes.saturating_sub(estimate.reserved_peak_bytes);
        let room = memory.saturating_sub(outside);
        let mut out = String::from("the run of these files, run dry:\n");
        match estimate.phases.iter().find(|phase| phase.reserved_bytes > room) {
            Some(phase) => out.push_str(&format!(
                "- it passes the {} that the device has beside {} of context and communication in the {} phase\n",
                ByteSize(room),
                ByteSize(outside),
                phase.phase
            )),
            None => out.push_str(&format!(
                "- it stays below the {} that the device has for it, at {}: other processes were on the device, or the run was not that of \
                 these files\n",
                ByteSize(room),
                ByteSize(estimate.reserved_peak_bytes)
            )),
        }
        let Some(bytes) = in_tensors else { return out };
        match estimate.phases.iter().find(|phase| phase.allocated_bytes >= bytes) {
            Some(phase) => out.push_str(&format!(
                "- the message counts {} in tensors: the run reaches that in the {} phase\n",
                ByteSize(bytes),
                phase.phase
            )),
            None => out.push_str(&format!(
                "- the message counts {} in tensors, and the run reaches {} at most: something else is kept, such as outputs of earlier steps\n",
                ByteSize(bytes),
                ByteSize(estimate.allocated_peak_bytes)
            )),
        }
        out
    }
}

/// An answer with what follows from it.
struct Report {
    asked: Asked,
    answer: Answer,
    changes: Vec<Change>,
    /// Cards of the catalogue that would hold it, the smallest first.
    cards: Vec<Target>,
    /// What Plimsoll would need for the same.
    ours: Option<Ours>,
}

impl Report {
    fn document(&self) -> Result<Value, Failure> {
        let Report { asked, answer, changes, cards, ours } = self;
        let mut document = serde_json::to_value(&answer.estimate)?;
        let device = &answer.resolved.target.device;
        let further = json!({
            "fits": answer.fits(),
            "hardware": { "name": device.name, "title": device.title, "memory_bytes": device.memory },
            "request": asked.request,
            "decided": answer.resolved.decided,
            "not_read": asked.left,
            "changes": changes,
            "fits_on": cards.iter().map(|card| card.device.name.as_str()).collect::<Vec<_>>(),
            "plimsoll": ours,
        });
        if let (Value::Object(document), Value::Object(further)) = (&mut document, further) {
            document.extend(further);
        }
        Ok(document)
    }
}

/// The devices of the catalogue that would hold the run, the smallest first. Kernels of attention may differ from card to card, which is left out.
fn cards(answer: &Answer) -> Vec<Target> {
    let catalogue = Catalogue::known();
    let known = catalogue.devices().iter().filter_map(|device| catalogue.target(&device.name).ok());
    let holds = |target: &Target| ByteSize(answer.used_bytes_on(target)) <= target.device.memory;
    let mut cards: Vec<Target> = known.filter(holds).collect();
    cards.sort_by_key(|card| card.device.memory);
    cards
}
