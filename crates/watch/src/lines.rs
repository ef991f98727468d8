//! A view as lines, where there is no terminal: a line for a step now and then, and one for each event.

use plimsoll_memory::ByteSize;
use plimsoll_monitor::Status;
use plimsoll_report::seconds;

use crate::view::{State, View};

/// Seconds from one line of a step to the next, at least.
const EVERY: f64 = 10.0;

/// What was said of a run.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    events: u64,
    step: Option<u64>,
    at: Option<f64>,
    state: Option<State>,
}

impl Lines {
    /// What is new since the last call; `now` in seconds.
    pub fn news(&mut self, view: &View, now: f64) -> Vec<String> {
        let mut lines = Vec::new();
        if self.state.is_none() {
            lines.push(match &view.plan {
                Some(plan) => format!("{}: {}, {}", view.name, plan.title, plan.settings),
                None => view.name.clone(),
            });
            lines.extend(view.notes.iter().cloned());
        }
        let new = view.events_so_far().saturating_sub(self.events);
        let kept = view.events().len();
        let skipped = kept.saturating_sub(usize::try_from(new).unwrap_or(usize::MAX));
        lines.extend(view.events().skip(skipped).map(ToString::to_string));
        self.events = view.events_so_far();
        let is_over = view.state.is_over() && self.state.as_ref() != Some(&view.state);
        let is_due = self.at.is_none_or(|at| now - at >= EVERY) || is_over;
        if let Some(last) = view.last.as_ref().filter(|last| is_due && Some(last.step) != self.step) {
            (self.step, self.at) = (Some(last.step), Some(now));
            lines.extend(step_line(view));
        }
        let kind = |state: &State| std::mem::discriminant(state);
        if self.state.as_ref().map(kind) != Some(kind(&view.state)) {
            lines.push(format!("the run: {}", view.state.words()));
        }
        self.state = Some(view.state.clone());
        lines.iter().map(|line| clean(line)).collect()
    }
}

/// The last step in a line.
fn step_line(view: &View) -> Option<String> {
    let last = view.last.as_ref()?;
    let of = view.total_steps.map_or(String::new(), |total| format!("/{total}"));
    let mut text = format!(
        "step {}{of}  loss {:.4}  {:.0} tokens/s  lr {:.2e}  grad norm {:.3}",
        last.step, last.loss, last.tokens_per_second, last.lr, last.grad_norm
    );
    let now = view.rss_bytes().map(|rss| format!("{} now", ByteSize(rss)));
    let planned = view.planned_process_bytes().map(|bytes| format!("{} planned", ByteSize(bytes)));
    let line = view.line_bytes().map(|line| format!("line {}", ByteSize(line)));
    let memory: Vec<String> = [now, planned, line].into_iter().flatten().collect();
    if !memory.is_empty() {
        text.push_str(&format!("  memory {}", memory.join(", ")));
    }
    if view.status() != Status::Normal {
        text.push_str(&format!("  memory is {}", view.status()));
    }
    if let Some(left) = view.left() {
        text.push_str(&format!("  {} left", seconds(left)));
    }
    Some(text)
}

/// Text of files without what moves a terminal's cursor.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::tests::{metrics, view};

    #[test]
    fn a_run_is_said_in_lines() {
        let (mut lines, mut view) = (Lines::default(), view());
        let first = lines.news(&view, 0.0);
        let step = "step 40/100  loss 2.0500  256 tokens/s  lr 1.00e-3  grad norm 1.250  memory 240.0 MiB now, line 256.0 MiB  memory is warning  2 min left";
        assert_eq!(
            first,
            [
                "runs/demo",
                "step 20: validation loss 2.5000, perplexity 12.182",
                "step 20: saved runs/demo/checkpoint-20",
                "step 31: memory is near the load line: 240.0 MiB of 256.0 MiB",
                step,
                "the run: running",
            ]
        );
        assert!(lines.news(&view, 1.0).is_empty());
        view.step(&metrics(41));
        assert!(lines.news(&view, 2.0).is_empty());
        assert_eq!(lines.news(&view, 12.0).len(), 1);
        // The last step is said at the end, whenever that is; what moves a cursor is not said.
        view.step(&metrics(42));
        view.state = State::Ended("\u{1b}[2Jkilled".to_owned());
        let last = lines.news(&view, 12.5);
        assert_eq!((last.len(), last[1].as_str()), (2, "the run: ended:  [2Jkilled"));
    }
}
