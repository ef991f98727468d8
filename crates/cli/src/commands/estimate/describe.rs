//! An estimate for people.

use plimsoll_memory::ByteSize;
use plimsoll_stacks::{Estimate, Kind, Phase};

use super::Report;
use crate::row;
use crate::table;
use crate::units::count;

/// Columns of the bar that the largest kind has.
const BAR: u64 = 28;

/// Cards that are named.
const CARDS: usize = 6;

/// The whole answer.
pub fn describe(report: &Report) -> String {
    let estimate = &report.answer.estimate;
    let mut out = head(report);
    out.push_str(&totals(report));
    out.push_str(&format!(
        "\nthe peak is in the {} phase, at {}; live there:\n",
        estimate.peak.phase, estimate.peak.moment
    ));
    out.push_str(&at_peak(estimate));
    out.push_str("\nby phase:\n");
    out.push_str(&phases(estimate));
    out.push_str(&fit(report));
    out.push_str(&uncertain(estimate));
    out.push_str(&rules(report));
    out
}

fn head(report: &Report) -> String {
    let run = &report.answer.resolved.run;
    let versions = run.versions;
    let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    let what = match (&run.adapter, run.quantization) {
        (None, _) => "full".to_owned(),
        (Some(adapter), None) => format!("LoRA of rank {}", adapter.rank),
        (Some(adapter), Some(_)) => format!("QLoRA of rank {}", adapter.rank),
    };
    let what = match run.phase {
        Phase::Train => format!("training, {what}"),
        Phase::Infer { generated } => format!("inference, tokens generated: {generated}"),
        Phase::Load => "loading".to_owned(),
    };
    let mut out = format!(
        "{}: {}, {} parameters; {what}; {} x {} tokens on {}\n",
        run.model.name,
        run.model.architecture,
        count(run.model.parameter_count()),
        run.batch,
        run.sequence,
        report.answer.resolved.target.title,
    );
    out.push_str(&format!(
        "torch {}, transformers {}, PEFT {}, bitsandbytes {}\n",
        dotted(versions.torch),
        dotted(versions.transformers),
        dotted(versions.peft),
        dotted(versions.bitsandbytes),
    ));
    if !report.asked.programs.is_empty() {
        out.push_str(&format!("read: {}\n", report.asked.programs.join(", ")));
    }
    if !report.asked.assumed.is_empty() {
        out.push_str(&format!(
            "nothing says these, so they were taken: {}\n",
            report.asked.assumed.join(", ")
        ));
    }
    out.push('\n');
    out
}

fn totals(report: &Report) -> String {
    let Estimate { allocated_peak_bytes, reserved_peak_bytes, device_used_bytes, .. } =
        report.answer.estimate;
    table::render(&[
        row!["max_memory_allocated", ByteSize(allocated_peak_bytes)],
        row!["max_memory_reserved", ByteSize(reserved_peak_bytes)],
        row!["nvidia-smi will show", ByteSize(device_used_bytes)],
        row!["the card has", report.answer.resolved.target.device.memory],
    ])
}

fn at_peak(estimate: &Estimate) -> String {
    let largest = estimate.peak.at_peak.values().copied().max().unwrap_or(0).max(1);
    let mut kinds: Vec<(&Kind, u64)> = estimate
        .peak
        .at_peak
        .iter()
        .map(|(kind, bytes)| (kind, *bytes))
        .filter(|(_, bytes)| *bytes > 0)
        .collect();
    kinds.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let whole = estimate.allocated_peak_bytes.max(1);
    let rows: Vec<Vec<String>> = kinds
        .into_iter()
        .map(|(kind, bytes)| {
            let columns =
                u64::try_from(u128::from(bytes) * u128::from(BAR) / u128::from(largest)).unwrap_or(BAR);
            let filled = "█".repeat(columns.max(1) as usize);
            let bar = format!("{filled:<width$}", width = BAR as usize);
            row![words(*kind), ByteSize(bytes), format!("{:.1} %", 100.0 * bytes as f64 / whole as f64), bar]
        })
        .collect();
    table::render(&rows)
}

/// A kind of memory in words.
fn words(kind: Kind) -> &'static str {
    match kind {
        Kind::Weights => "weights",
        Kind::Adapters => "adapters",
        Kind::WeightCopies => "copies of weights",
        Kind::Gradients => "gradients",
        Kind::OptimizerStates => "optimizer states",
        Kind::SavedActivations => "saved for backward",
        Kind::Temporary => "temporary",
        Kind::Logits => "logits and loss",
        Kind::KvCache => "key-value cache",
        Kind::Communication => "communication",
        Kind::Workspace => "workspaces of libraries",
    }
}

fn phases(estimate: &Estimate) -> String {
    let mut rows = vec![row!["", "allocated", "reserved", "host"]];
    rows.extend(estimate.phases.iter().map(|phase| {
        row![
            phase.phase,
            ByteSize(phase.allocated_bytes),
            ByteSize(phase.reserved_bytes),
            ByteSize(phase.host_bytes)
        ]
    }));
    table::render(&rows)
}

/// Whether it fits, what would, and what Plimsoll would need.
fn fit(report: &Report) -> String {
    let answer = &report.answer;
    let title = &answer.resolved.target.title;
    let mut out = match (answer.fits(), answer.fits_without_cache()) {
        (true, _) => format!("\nfits {title}\n"),
        (false, true) => format!(
            "\ndoes NOT fit {title} as it is: only where the caching allocator finds room by giving back what it keeps\n"
        ),
        (false, false) => format!("\ndoes NOT fit {title}\n"),
    };
    let names: Vec<&str> = report.cards.iter().map(|card| card.device.name.as_str()).collect();
    out.push_str(&match names.len() {
        0 => "no card of the catalogue would hold it\n".to_owned(),
        more if more > CARDS => {
            format!("it would fit {} and {} larger ones\n", names[..CARDS].join(", "), more - CARDS)
        }
        _ => format!("it would fit {}\n", names.join(", ")),
    });
    if !report.changes.is_empty() {
        out.push_str("\nwhat would make it smaller, the cheapest first (nvidia-smi):\n");
        let rows: Vec<Vec<String>> = report
            .changes
            .iter()
            .map(|change| {
                let fits = if change.fits && !answer.fits() { "fits" } else { "" };
                row![change.what, ByteSize(change.device_used_bytes), fits]
            })
            .collect();
        out.push_str(&table::render(&rows));
    }
    if let Some(ours) = &report.ours {
        let fits = if ours.fits { "" } else { ", which does not fit" };
        out.push_str(&format!(
            "\nPlimsoll would need {} for the same{fits}\n",
            ByteSize(ours.device_used_bytes)
        ));
    }
    out
}

fn uncertain(estimate: &Estimate) -> String {
    if estimate.uncertain.is_empty() {
        return String::new();
    }
    let rows: Vec<Vec<String>> = estimate
        .uncertain
        .iter()
        .map(|unknown| row![unknown.what, format!("± {}", ByteSize(unknown.bytes))])
        .collect();
    format!("\nnot known:\n{}", table::render(&rows))
}

/// What the request left open, and what of the files says nothing.
fn rules(report: &Report) -> String {
    let mut out = String::new();
    let decided = &report.answer.resolved.decided;
    if !decided.is_empty() {
        out.push_str("\ndecided:\n");
        for decision in decided {
            out.push_str(&format!("  {} = {}: {}\n", decision.key, decision.value, decision.rule));
        }
    }
    if !report.asked.left.is_empty() {
        out.push_str(&format!("\nnot read, as far as memory goes:\n  {}\n", report.asked.left.join("\n  ")));
    }
    out
}
