//! What is in memory at the peak, tier by tier, beside what may be taken.

use plimsoll_memory::{AtPeak, Tag};
use plimsoll_plan::TrainingPlan;
use serde::Serialize;

/// A tier at its peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Breakdown {
    /// Which, in words.
    pub title: &'static str,
    /// All parts together, in bytes.
    pub bytes: u64,
    /// What may be taken, in bytes, where there is a limit.
    pub budget_bytes: Option<u64>,
    /// Whose limit that is.
    pub limited_by: Option<String>,
    /// In the order of the tags; what is no allocation comes last.
    pub parts: Vec<Part>,
}

/// Bytes of a kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// A tag, `gaps` or `overhead`.
    pub kind: &'static str,
    /// What it is, in words.
    pub what: String,
    /// How much.
    pub bytes: u64,
}

impl Breakdown {
    /// What a budget is held against, or a disk's room.
    pub fn of(plan: &TrainingPlan) -> Vec<Breakdown> {
        let (host, disk) = (&plan.choice.dry_run.host, &plan.choice.dry_run.disk);
        let mut device = parts(plan.choice.dry_run.at_peak(), "");
        device.push(Part {
            kind: "overhead",
            what: "program, libraries and buffers outside the arena".to_owned(),
            bytes: plan.overhead_bytes,
        });
        let pipeline =
            Part { kind: Tag::Data.name(), what: "data pipeline".to_owned(), bytes: plan.pipeline_bytes() };
        let mut all = Vec::new();
        match plan.limits.host_bytes {
            // One line counts everything.
            None => {
                device.extend(parts(host.at_peak(), "on the host: "));
                device.push(pipeline);
                all.push(Breakdown::new("Memory", device, Some(plan.load_line.bytes)));
            }
            Some(budget) => {
                all.push(Breakdown::new("Device", device, Some(plan.load_line.bytes)));
                let mut host = parts(host.at_peak(), "");
                host.push(pipeline);
                all.push(Breakdown::new("Host", host, Some(budget)));
            }
        }
        if let Some(line) = all.first_mut() {
            line.limited_by = Some(plan.load_line.by.to_string());
        }
        let free = plan.machine.disk_available.map(|_| plan.machine.disk_room());
        let room = plan.config.memory.disk_budget().set().map(|size| size.0).or(free);
        all.push(Breakdown::new("Disk", parts(disk.at_peak(), ""), room));
        all.retain(|tier| tier.bytes > 0);
        all
    }

    fn new(title: &'static str, parts: Vec<Part>, budget_bytes: Option<u64>) -> Breakdown {
        let parts: Vec<Part> = parts.into_iter().filter(|part| part.bytes > 0).collect();
        let bytes = parts.iter().map(|part| part.bytes).sum();
        Breakdown { title, bytes, budget_bytes, limited_by: None, parts }
    }
}

fn parts(at_peak: &AtPeak, place: &str) -> Vec<Part> {
    let what = |kind: &str| format!("{place}{}", kind.replace('_', " "));
    let tags = at_peak.by_tag.iter().map(|(tag, bytes)| (tag.name(), bytes));
    let all = tags.chain([("gaps", at_peak.gaps())]);
    all.map(|(kind, bytes)| Part { kind, what: what(kind), bytes }).collect()
}
