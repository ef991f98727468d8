//! `plimsoll estimate`: what a run of another stack takes.

mod asked;
mod describe;
mod ours;

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
