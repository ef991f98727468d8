//! What happens in a run besides its steps, in words.

use plimsoll_memory::ByteSize;
use plimsoll_monitor::Status;
use plimsoll_train::RunEvent;
use serde::Serialize;

/// What kind of event it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A part of a run begins.
    Begin,
    /// The loss of a validation.
    Evaluation,
    /// A checkpoint or the model was written.
    Saved,
    /// The run goes on with another plan.
    Plan,
    /// Something to look at.
    Warning,
    /// The run ends.
    End,
}

/// Something happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    /// After this step, where that matters.
    pub step: Option<u64>,
    /// What kind.
    pub kind: Kind,
    /// What, in words.
    pub text: String,
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.step {
            Some(step) => write!(f, "step {step}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

impl Event {
    /// An event.
    pub fn new(step: Option<u64>, kind: Kind, text: impl Into<String>) -> Event {
        Event { step, kind, text: text.into() }
    }

    /// A validation.
    pub fn evaluation(step: u64, loss: f64) -> Event {
        let text = format!("validation loss {loss:.4}, perplexity {:.3}", loss.exp());
        Event::new(Some(step), Kind::Evaluation, text)
    }

    /// Memory that has come nearer to the line.
    pub fn memory(step: u64, status: Status, process_bytes: u64, line_bytes: u64) -> Event {
        let words = match status {
            Status::Emergency => "at the load line, saving",
            Status::Critical => "critically near the load line",
            Status::Warning | Status::Normal => "near the load line",
        };
        let text = format!("memory is {words}: {} of {}", ByteSize(process_bytes), ByteSize(line_bytes));
        Event::new(Some(step), Kind::Warning, text)
    }

    /// What the loop tells; `None` of its steps and its beginning.
    pub fn of(event: &RunEvent<'_>) -> Option<Event> {
        Some(match event {
            RunEvent::Started { .. } | RunEvent::Step(_) => return None,
            RunEvent::Validated { step, loss } => Event::evaluation(*step, *loss),
            RunEvent::Saved(path) => Event::new(None, Kind::Saved, format!("saved {}", path.display())),
            RunEvent::MemoryHigh { step, status, process_bytes, budget_bytes } => {
                Event::memory(*step, *status, *process_bytes, *budget_bytes)
            }
            RunEvent::BufferedDisk(folder) => {
                let text = format!(
                    "direct I/O is refused in {}: offloaded tensors go through the page cache, which is emptied of them again",
                    folder.display()
                );
                Event::new(None, Kind::Warning, text)
            }
            RunEvent::Rung { step, from, to, why, now, .. } => {
                let way = if to > from { "less" } else { "more" };
                let text = format!("going on with {way} memory: {why}; now {now}");
                Event::new(Some(*step), Kind::Plan, text)
            }
            RunEvent::GaveBack { step, bytes } => {
                let text = format!(
                    "memory is short: batches made ahead, waiting buffers and free heap were given back, {}",
                    ByteSize(*bytes)
                );
                Event::new(Some(*step), Kind::Warning, text)
            }
            RunEvent::WaitingForSpace { error, waited, patience } => {
                let already = match waited.as_secs() / 60 {
                    0 => String::new(),
                    minutes => format!(" (it has waited for {minutes})"),
                };
                let text = format!(
                    "warning: {error}. There is no checkpoint yet, so the run waits for space, for {} minutes at most{already}",
                    patience.as_secs() / 60
                );
                Event::new(None, Kind::Warning, text)
            }
            RunEvent::Stopping { step, saving } => {
                let text = match (saving, step) {
                    (true, _) => {
                        format!("asked to stop: saving after step {step}; --resume goes on from there")
                    }
                    (false, 0) => "asked to stop before the first step: there is nothing to save".to_owned(),
                    (false, _) => {
                        format!("asked to stop: nothing was done since the checkpoint of step {step}")
                    }
                };
                Event::new(None, Kind::End, text)
            }
        })
    }
}
