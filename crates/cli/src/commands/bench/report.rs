//! The outcome of `bench memory`: as JSON, as tables for the terminal, and as tables in Markdown.

use serde::Serialize;

use super::rung::{Rung, size};
use crate::row;
use crate::table;

/// Everything that was found. Its JSON is described in docs/techniques.md; keys may be added, none change.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    pub model: String,
    pub parameters: u64,
    pub batch_size: u64,
    pub sequence_length: u64,
    pub steps: u64,
    /// Threads that the plan's times are for.
    pub threads: usize,
    pub cpu: String,
    /// The baseline, then every rung with all those before it.
    pub ladder: Vec<Rung>,
    /// Every technique over the baseline alone.
    pub alone: Vec<Rung>,
}

impl MemoryReport {
    /// The tables for a terminal.
    pub fn tables(&self) -> String {
        let mut out = format!("{}\n\n", self.heading());
        for (title, rungs) in self.parts() {
            let mut rows = vec![headings(title)];
            rows.extend(rungs.iter().map(cells));
            out.push_str(&table::render(&rows));
            out.push('\n');
        }
        for rung in self.failed() {
            out.push_str(&format!("{}: {}\n", rung.name, rung.error.as_deref().unwrap_or_default()));
        }
        out
    }

    /// The tables in Markdown, with what every technique does.
    pub fn markdown(&self) -> String {
        let mut out = format!("{}.\n", self.heading());
        for (title, rungs) in self.parts() {
            let headings = headings(title);
            out.push_str(&format!("\n| {} | what |\n|---|{}---|\n", headings.join(" | "), "---:|".repeat(6)));
            for rung in rungs {
                out.push_str(&format!("| {} | {} |\n", cells(rung).join(" | "), rung.what));
            }
        }
        for rung in self.failed() {
            out.push_str(&format!("\n{}: {}\n", rung.name, rung.error.as_deref().unwrap_or_default()));
        }
        out
    }

    /// Rungs that could not be trained.
    pub fn failed(&self) -> impl Iterator<Item = &Rung> {
        self.ladder.iter().chain(&self.alone).filter(|rung| rung.error.is_some())
    }

    fn heading(&self) -> String {
        let trained = self.ladder.iter().any(|rung| rung.measured.is_some());
        let how = if trained { format!("{} steps", self.steps) } else { "planned".to_owned() };
        format!(
            "{}, {} parameters, {} x {} tokens a step, {how}; {} threads of {}",
            self.model, self.parameters, self.batch_size, self.sequence_length, self.threads, self.cpu
        )
    }

    fn parts(&self) -> [(&'static str, &[Rung]); 2] {
        [("each with all above it", &self.ladder), ("each alone", &self.alone)]
    }
}

fn headings(title: &str) -> Vec<String> {
    row![title, "planned peak", "measured", "process RSS", "tokens/s", "loss", "to baseline"]
}

/// A row of the tables.
fn cells(rung: &Rung) -> Vec<String> {
    let planned = size(rung.planned.peak_bytes);
    let Some(measured) = &rung.measured else {
        return row![rung.name, planned, "-", "-", "-", "-", "-"];
    };
    let change = match (measured.same_losses, measured.loss_change) {
        (Some(true), _) => "same bits".to_owned(),
        (_, Some(change)) => format!("{:+.3} %", 100.0 * change),
        _ => "-".to_owned(),
    };
    row![
        rung.name,
        planned,
        size(measured.peak_bytes),
        size(measured.process_rss_bytes),
        format!("{:.0}", measured.tokens_per_second),
        measured.last_loss().map_or("-".to_owned(), |loss| format!("{loss:.4}")),
        change,
    ]
}
