//! Why a plan does not fit, and what would, for people.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{Alternative, Extent, LeastNeed, MemoryAndDisk, Resource, Shortage, TrainingPlan};

use crate::row;
use crate::table;

/// Columns that lines keep to.
const WIDTH: usize = 100;

/// Columns of a change in words.
const WIDEST: usize = 52;

/// Changes of a kind that are shown: the fastest.
const SHOWN: usize = 4;

/// Why a plan does not fit, a line each.
pub fn misfits(plan: &TrainingPlan) -> String {
    plan.misfits().into_iter().map(|reason| wrapped(&reason, "")).collect()
}

/// What would fit instead or, where nothing does, the least that each method takes.
pub fn remedies(plan: &TrainingPlan) -> String {
    let Some(refusal) = &plan.refusal else { return String::new() };
    let mut out = refusal.with_more_disk.map_or(String::new(), |need| more_disk(plan, need));
    let fitting = |extent| -> Vec<&Alternative> {
        let own = plan.alternatives.iter().filter(|other| other.fits && other.extent == extent);
        own.take(SHOWN).collect()
    };
    let kinds = [
        ("single changes that would fit", fitting(Extent::Single)),
        ("other methods that would fit", fitting(Extent::Method)),
        ("several changes together that would fit", fitting(Extent::Bundle)),
    ];
    let none = kinds.iter().all(|(_, list)| list.is_empty());
    for (title, list) in kinds.iter().filter(|(_, list)| !list.is_empty()) {
        out.push_str(&format!("\n{title}\n{}", changes(plan, list)));
    }
    if none {
        out.push_str(&least(plan, &refusal.least));
    }
    out
}

/// What a larger disk would do.
fn more_disk(plan: &TrainingPlan, need: MemoryAndDisk) -> String {
    let allowed_bytes = plan.limits.disk_bytes;
    let shortage = Shortage { resource: Resource::Disk, needed_bytes: need.disk_bytes, allowed_bytes };
    let memory = ByteSize(need.memory_bytes.saturating_add(plan.overhead_bytes));
    let sentence = plan.sentence(&shortage).replacen("the plan needs", "then it needs", 1);
    wrapped(&format!("with tensors on disk it would fit in {memory} of memory: {sentence}"), "")
}

/// Changes with what they would give, each with its assignments below it.
fn changes(plan: &TrainingPlan, list: &[&Alternative]) -> String {
    let disk = list.iter().any(|other| other.disk_bytes > 0);
    let mut rows = vec![row!["", "saves", "time", "at least"]];
    if disk {
        rows[0].push("disk".to_owned());
    }
    for other in list {
        let host = if plan.limits.is_apart { 0 } else { other.host_bytes };
        let bytes = other.peak_bytes.saturating_add(host).saturating_add(plan.overhead_bytes);
        let sign = if other.bytes_saved < 0 { "-" } else { "" };
        let mut row = row![
            shortened(&other.what, WIDEST),
            format!("{sign}{}", ByteSize(other.bytes_saved.unsigned_abs())),
            format!("{:+.1} %", 100.0 * other.slower),
            ByteSize(bytes)
        ];
        if disk {
            row.push(ByteSize(other.disk_bytes).to_string());
        }
        rows.push(row);
    }
    let table = table::render(&rows);
    let mut lines = table.lines();
    let mut out = lines.next().map_or(String::new(), |heads| format!("{heads}\n"));
    for (line, other) in lines.zip(list) {
        let sets: Vec<String> = other.change.iter().map(|set| format!("--set {}", quoted(set))).collect();
        out.push_str(&format!("{line}\n{}", packed(&sets, "      ")));
    }
    out
}

/// What each method takes at least.
fn least(plan: &TrainingPlan, list: &[LeastNeed]) -> String {
    if list.is_empty() {
        return "\nnone of the changes that were tried would fit\n".to_owned();
    }
    let mut rows = vec![row!["", "memory", "with disk", "memory without disk"]];
    for LeastNeed { method, with_disk, without_disk, .. } in list {
        let memory = |need: &MemoryAndDisk| ByteSize(need.memory_bytes.saturating_add(plan.overhead_bytes));
        let name = match method.name() {
            "full" => "full fine-tuning",
            "lora" => "LoRA",
            _ => "QLoRA",
        };
        rows.push(row![name, memory(with_disk), ByteSize(with_disk.disk_bytes), memory(without_disk)]);
    }
    let length = plan.choice.settings.sequence_length;
    format!(
        "\nnone of the changes that were tried would fit; the least that each method takes, with one\nsequence of {length} tokens at a time in bf16 and as much as possible on disk:\n{}",
        table::render(&rows)
    )
}

/// An assignment as a shell takes it.
pub fn quoted(set: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._=-/".contains(c);
    if set.chars().all(plain) { set.to_owned() } else { format!("'{set}'") }
}

/// A text of at most so many characters.
fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some(_) => text.chars().take(most.saturating_sub(3)).chain("...".chars()).collect(),
    }
}

/// A text in lines of at most [`WIDTH`] columns.
pub fn wrapped(text: &str, margin: &str) -> String {
    let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
    packed(&words, margin)
}

/// Words that are not cut, as many on a line as go there.
pub fn packed(words: &[String], margin: &str) -> String {
    let (mut out, mut line) = (String::new(), String::new());
    for word in words {
        let columns = margin.len() + line.chars().count() + 1 + word.chars().count();
        if !line.is_empty() && columns > WIDTH {
            out.push_str(&format!("{margin}{line}\n"));
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    out.push_str(&format!("{margin}{line}\n"));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_no_wider_than_a_page() {
        let words: Vec<String> = (0..40).map(|n| format!("--set training.key_{n}=value")).collect();
        let text = packed(&words, "      ");
        assert!(text.lines().all(|line| line.len() <= WIDTH && line.starts_with("      --set")));
        assert_eq!(text.split_whitespace().count(), 80);
        assert_eq!(wrapped("a b", ""), "a b\n");
        assert_eq!(shortened("what is changed", 10), "what is...");
        assert_eq!(quoted("a.b={c: 1}"), "'a.b={c: 1}'");
    }
}
