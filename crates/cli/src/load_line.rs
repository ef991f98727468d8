//! The load line of a command, and what the process takes held against it.

use plimsoll_memory::ByteSize;
use plimsoll_plan::hardware::process_memory;
use plimsoll_plan::{LimitedBy, LoadLine};
use serde_json::{Value, json};

use crate::failure::Failure;

/// Refuses to go on where the process has been larger than the load line already: reading a tokenizer, measuring the
/// machine and planning take memory for a moment, which no plan can undo.
pub fn kept_so_far(line: LoadLine) -> Result<(), Failure> {
    match peak_bytes() {
        Some(peak) if peak > line.bytes => Err(Failure::does_not_fit(format!(
            "the load line is {} ({}), but the program has taken {} already, for its own code, its data and the tokenizer; \
             {}",
            ByteSize(line.bytes),
            line.by,
            ByteSize(peak),
            remedy(line)
        ))),
        _ => Ok(()),
    }
}

/// How often a plan is made until it fits beside what planning leaves in memory.
const PLANS: u32 = 4;

/// What the process's size may drift by between a plan and its run.
const DRIFT: u64 = 512 << 10;

/// By how much the process's size differs from run to run.
const OTHERWISE: u64 = 3 << 20;

/// The room for a plan, found by planning: a plan that fills all that there was leaves none for itself and for what
/// planning has touched.
pub struct PlanningRoom {
    line: LoadLine,
    /// Left free for the plan itself.
    spare: u64,
    plans: u32,
}

impl PlanningRoom {
    pub fn below(line: LoadLine) -> PlanningRoom {
        PlanningRoom { line, spare: DRIFT, plans: 0 }
    }

    /// What the model and its working memory may take, where all else takes `overhead` before a plan is made.
    pub fn bytes(&self, overhead: u64) -> u64 {
        self.line.bytes.saturating_sub(overhead).saturating_sub(self.spare)
    }

    /// What to do where so much is needed, with a line that is enough, in whole MiB: what the program takes beside it is not quite the
    /// same in every run.
    pub fn enough(&self, models: u64, overhead: u64) -> String {
        let bytes = models.saturating_add(overhead).saturating_add(self.spare).saturating_add(OTHERWISE);
        let enough = ByteSize(bytes.div_ceil(1 << 20).saturating_mul(1 << 20));
        format!("{}: {enough} is enough", remedy(self.line))
    }

    /// What the process takes with a plan: `models` bytes for models and their working memory, and `beside`, measured once
    /// the plan was made, for all else. `None` where that is more than the line; the next plan then has less room, by as
    /// much as this one was over.
    ///
    /// # Errors
    /// No plan was small enough.
    pub fn settle(&mut self, models: u64, beside: u64) -> Result<Option<PlannedProcess>, Failure> {
        let bytes = models.saturating_add(beside);
        let over = bytes.saturating_sub(self.line.bytes);
        if over == 0 {
            return Ok(Some(PlannedProcess { line: self.line, models, bytes }));
        }
        self.plans += 1;
        self.spare = self.spare.saturating_add(over);
        if self.plans < PLANS {
            return Ok(None);
        }
        Err(Failure::does_not_fit(format!(
            "this needs {}: {} for the model and its working memory, {}; {}",
            ByteSize(bytes),
            ByteSize(models),
            beside_the_model(self.line, beside),
            remedy(self.line)
        )))
    }
}

/// What a command without a training's plan will take in all.
#[derive(Clone, Copy)]
pub struct PlannedProcess {
    line: LoadLine,
    /// Models, caches and working memory: exact, and the same on every run.
    models: u64,
    /// With what the process was measured to take beside them.
    bytes: u64,
}

impl PlannedProcess {
    /// Planned against measured, for machines.
    pub fn document(&self) -> Value {
        json!({
            "load_line_bytes": self.line.bytes,
            "limited_by": self.line.by,
            "planned_model_bytes": self.models,
            "planned_bytes": self.bytes,
            "process_peak_rss_bytes": peak_bytes(),
        })
    }
}

/// What is left of the line beside the model, in words.
pub fn beside_the_model(line: LoadLine, beside: u64) -> String {
    format!(
        "{} for the program, its threads and the tokenizer; the load line is {} ({})",
        ByteSize(beside),
        ByteSize(line.bytes),
        line.by
    )
}

fn remedy(line: LoadLine) -> &'static str {
    match line.by {
        LimitedBy::Budget => "state a higher line",
        _ => "give it more",
    }
}

/// The most that the process has taken so far; `None` where the system does not say.
fn peak_bytes() -> Option<u64> {
    process_memory().and_then(|memory| memory.peak_resident).map(|size| size.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_over_the_line_leaves_the_next_one_less_room_and_the_last_is_refused() {
        let mut room = PlanningRoom::below(LoadLine { bytes: 10 << 20, by: LimitedBy::Budget });
        let first = room.bytes(4 << 20);
        assert_eq!(first, (6 << 20) - DRIFT);
        assert_eq!(room.enough(8 << 20, 4 << 20), "state a higher line: 16.0 MiB is enough");
        let higher = PlanningRoom::below(LoadLine { bytes: 16 << 20, by: LimitedBy::Budget });
        assert!(higher.bytes((4 << 20) + OTHERWISE) >= 8 << 20);
        assert!(room.settle(first, (4 << 20) + DRIFT + 100).unwrap().is_none());
        let second = room.bytes(4 << 20);
        assert_eq!(second, first - 100);
        let planned = room.settle(second, (4 << 20) + DRIFT + 100).unwrap().unwrap();
        assert_eq!(planned.document()["planned_model_bytes"], second);
        assert_eq!(planned.document()["planned_bytes"], 10 << 20);
        assert!(room.settle(second, 6 << 20).unwrap().is_none());
        assert!(room.settle(second, 6 << 20).unwrap().is_none());
        let Err(refusal) = room.settle(second, 6 << 20) else { panic!("four plans were over the line") };
        let words = refusal.to_string();
        assert!(words.contains("state a higher line") && words.contains("10.0 MiB"), "{words}");
    }
}
