//! What each technique of a plan saves and costs, from the naive step on.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{Waterfall, WaterfallEntry};

use crate::commands::advice::{packed, quoted, wrapped};
use crate::row;
use crate::table;
use crate::units::seconds;

/// Columns of the bar that the naive peak has.
const BAR: usize = 24;

/// For people: a line for each technique, and what would come next.
pub fn words(waterfall: &Waterfall) -> String {
    let Some((naive, techniques)) = waterfall.entries.split_first() else { return String::new() };
    let highest = waterfall.entries.iter().map(|entry| entry.device_peak_bytes).max().unwrap_or(0);
    let mut rows = vec![
        row!["", "saves", "mostly", "adds to a step", "device", ""],
        row![
            "the naive way",
            "",
            "",
            seconds(naive.step_seconds),
            ByteSize(naive.device_peak_bytes),
            bar(naive, naive, highest)
        ],
    ];
    for (entry, before) in techniques.iter().zip(&waterfall.entries) {
        rows.push(row![
            entry.change,
            signed_bytes(entry.bytes_saved),
            most(entry),
            signed_seconds(entry.seconds_added),
            ByteSize(entry.device_peak_bytes),
            bar(entry, before, highest)
        ]);
    }
    let saved: i64 = techniques.iter().map(|entry| entry.bytes_saved).sum();
    let added: f64 = techniques.iter().map(|entry| entry.seconds_added).sum();
    let last = waterfall.entries.last().unwrap_or(naive);
    let peak = ByteSize(last.device_peak_bytes);
    rows.push(row!["the plan", signed_bytes(saved), "", signed_seconds(added), peak, ""]);
    let title = format!(
        "{}; and what each technique does to the peak of the device, on top of those above it:",
        naive.change
    );
    format!("{}{}{}", wrapped(&title, ""), table::render(&rows), next(waterfall))
}

fn next(waterfall: &Waterfall) -> String {
    let Some(next) = &waterfall.next else { return String::new() };
    let sets: Vec<String> = next.set.iter().map(|set| format!("--set {}", quoted(set))).collect();
    let saved = signed_bytes(next.bytes_saved);
    let price = match next.seconds_added {
        added if added < 0.0 => format!("{saved}, and {} of each step", seconds(-added)),
        added => format!("{saved} for {} more a step", seconds(added)),
    };
    format!("next: {} would save {price}\n{}", next.change, packed(&sets, "      "))
}

/// What is left of the naive peak, and what was saved last.
fn bar(entry: &WaterfallEntry, before: &WaterfallEntry, highest: u64) -> String {
    let columns = |bytes: u64| (bytes as f64 / highest.max(1) as f64 * BAR as f64).round() as usize;
    let left = columns(entry.device_peak_bytes).max(1);
    let saved = columns(before.device_peak_bytes).saturating_sub(left);
    format!("{}{}{}", "█".repeat(left), "░".repeat(saved), " ".repeat(BAR.saturating_sub(left + saved)))
}

/// The kind of tensor of which most is saved or, where nothing is, of which most is added.
fn most(entry: &WaterfallEntry) -> String {
    let sign = if entry.bytes_saved < 0 { -1 } else { 1 };
    let found = entry.by_tag.iter().max_by_key(|(_, bytes)| bytes.saturating_mul(sign));
    found.map_or(String::new(), |(tag, bytes)| format!("{} {}", tag.replace('_', " "), signed_bytes(*bytes)))
}

fn signed_bytes(bytes: i64) -> String {
    format!("{}{}", if bytes < 0 { "-" } else { "" }, ByteSize(bytes.unsigned_abs()))
}

fn signed_seconds(added: f64) -> String {
    format!("{}{}", if added < 0.0 { "-" } else { "" }, seconds(added.abs()))
}

#[cfg(test)]
mod tests {
    use plimsoll_plan::FurtherStep;

    use super::*;

    fn entry(change: &str, device_peak_bytes: u64, bytes_saved: i64) -> WaterfallEntry {
        WaterfallEntry {
            change: change.to_owned(),
            set: Vec::new(),
            bytes_saved,
            by_tag: [("activations", bytes_saved)].into(),
            seconds_added: -0.5,
            device_peak_bytes,
            at_peak: Default::default(),
            host_bytes: 0,
            disk_bytes: 0,
            step_seconds: 1.5,
        }
    }

    #[test]
    fn each_technique_has_a_line_and_a_bar() {
        let entries = vec![
            entry("the naive way: all", 8 << 30, 0),
            entry("flash attention", 6 << 30, 2 << 30),
            entry("more in a pass", 7 << 30, -(1 << 30)),
        ];
        let next = FurtherStep {
            change: "none".to_owned(),
            set: vec!["a={b: c}".to_owned()],
            bytes_saved: 1 << 30,
            seconds_added: -2.0,
            device_peak_bytes: 6 << 30,
        };
        let words = words(&Waterfall { entries, next: Some(next) });
        let lines: Vec<&str> = words.lines().collect();
        assert!(lines[0].starts_with("the naive way: all; and what each technique does"), "{words}");
        let line = |change: &str| lines.iter().find(|line| line.trim_start().starts_with(change)).unwrap();
        let cells =
            |change: &str| line(change).split("  ").filter(|cell| !cell.is_empty()).collect::<Vec<_>>();
        assert_eq!(cells("the naive way ").last(), Some(&&*"█".repeat(24)));
        let bar = format!("{}{}", "█".repeat(18), "░".repeat(6));
        let flash = ["flash attention", "2.00 GiB", "activations 2.00 GiB", "-500 ms", "6.00 GiB", &bar];
        assert_eq!(cells("flash").iter().map(|cell| cell.trim()).collect::<Vec<_>>(), flash);
        let more = line("more in a pass");
        assert!(more.contains("-1.00 GiB") && more.ends_with(&"█".repeat(21)), "{words}");
        assert!(line("the plan").contains(" 1.00 GiB "), "{words}");
        assert!(
            words.ends_with(
                "next: none would save 1.00 GiB, and 2.0 s of each step\n      --set 'a={b: c}'\n"
            )
        );
    }
}
