//! `plimsoll snapshot`: what PyTorch recorded of a device's memory.

use std::fs::File;
use std::path::Path;

use plimsoll_memory::ByteSize;
use plimsoll_report::snapshot_page;
use plimsoll_stacks::snapshot::{Analysis, Fragmentation, Leak, Limits, Live, OomEvent, read_snapshot};

use crate::args::SnapshotArgs;
use crate::failure::Failure;
use crate::output::{out, outln, write_file};
use crate::row;
use crate::table;

/// Stacks that are shown.
const SHOWN: usize = 12;

pub fn run(args: &SnapshotArgs) -> Result<(), Failure> {
    let analysis = analyse(args)?;
    if let Some(page) = &args.html {
        let name = args.file.display().to_string();
        let html = snapshot_page(&name, &analysis).map_err(|error| Failure::other(error.to_string()))?;
        write_file("the page", page, html.as_bytes())?;
    }
    match (args.json, &args.html) {
        (true, _) => outln!("{}", serde_json::to_string_pretty(&analysis)?),
        (false, Some(page)) => outln!("{}\n{}", headline(&analysis), page.display()),
        (false, None) => show(&analysis),
    }
}

fn analyse(args: &SnapshotArgs) -> Result<Analysis, Failure> {
    let path = args.file.display();
    let unreadable = |error: std::io::Error| Failure::usage(format!("{path} cannot be read: {error}"));
    let file = File::open(&args.file).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(Failure::usage(format!("{path} is a folder; name the file of the snapshot")));
    }
    let snapshot = read_snapshot(file, metadata.len(), Limits { memory: args.memory.0 })
        .map_err(|error| Failure::usage(format!("{path}, {error}{}", remedy(&args.file, &error.problem))))?;
    let devices = snapshot.devices();
    match args.device {
        Some(device) if device >= devices => Err(Failure::usage(format!(
            "{path} has {devices} devices, the first is 0; there is no device {device}"
        ))),
        Some(device) => Ok(Analysis::of(&snapshot, device)),
        None => Analysis::of_fullest(&snapshot).ok_or_else(|| {
            Failure::usage(format!("{path} has no device: nothing was recorded or allocated"))
        }),
    }
}

/// What to do about a file that cannot be read.
fn remedy(file: &Path, problem: &plimsoll_stacks::snapshot::Problem) -> String {
    use plimsoll_stacks::snapshot::Problem;
    match problem {
        Problem::TooLarge(_) => "; allow more with --memory".to_owned(),
        Problem::RunsCode(_) | Problem::Opcode(_) | Problem::NoSnapshot(_) => {
            format!("; write {} with torch.cuda.memory._dump_snapshot", file.display())
        }
        _ => String::new(),
    }
}

fn headline(analysis: &Analysis) -> String {
    format!(
        "Device {}: at most {} live in {} of segments, entry {} of {} of the trace",
        analysis.device,
        ByteSize(analysis.peak.allocated_bytes),
        ByteSize(analysis.peak.reserved_bytes),
        analysis.peak.entry + u64::from(analysis.entries > 0),
        analysis.entries,
    )
}

fn show(analysis: &Analysis) -> Result<(), Failure> {
    outln!("{}", headline(analysis))?;
    let kinds = analysis
        .peak
        .by_kind
        .iter()
        .map(|(kind, bytes)| row![kind.name().replace('_', " "), ByteSize(*bytes)]);
    outln!("\nLive at the peak, by what it is for (guessed from the stack)")?;
    out!("{}", table::render(&kinds.collect::<Vec<_>>()))?;
    outln!("\nLive at the peak, by line")?;
    let mut lines: Vec<_> = analysis.peak.live.iter().take(SHOWN).map(line_of).collect();
    let rest = analysis.peak.live.iter().skip(SHOWN);
    if analysis.peak.live.len() > SHOWN {
        let bytes = rest.clone().map(|live| live.bytes).fold(0, u64::saturating_add);
        lines.push(row![format!("{} stacks more", rest.count()), "", ByteSize(bytes)]);
    }
    out!("{}", table::render(&lines))?;
    show_held(&analysis.fragmentation)?;
    analysis.out_of_memory.iter().try_for_each(show_failed)?;
    if !analysis.leaks.is_empty() {
        outln!("\nWhat only grows")?;
        out!("{}", table::render(&analysis.leaks.iter().take(SHOWN).map(leak_of).collect::<Vec<_>>()))?;
    }
    for pattern in &analysis.patterns {
        let line = pattern.line.as_ref().map(|line| format!(" ({line})")).unwrap_or_default();
        outln!(
            "\n{}, {}{line}:\n  {}",
            pattern.name.replace('_', " "),
            ByteSize(pattern.bytes),
            pattern.advice
        )?;
    }
    Ok(())
}

fn line_of(live: &Live) -> Vec<String> {
    let line = live.line.as_ref().or(live.stack.first()).map_or("no stack was recorded", String::as_str);
    let before = if live.before_recording { ", before the recording" } else { "" };
    row![format!("{line}{before}"), live.kind.name().replace('_', " "), ByteSize(live.bytes)]
}

fn leak_of(leak: &Leak) -> Vec<String> {
    let line = leak.line.as_ref().or(leak.stack.first()).map_or("no line of Python", String::as_str);
    row![line, format!("{} not freed", leak.count), ByteSize(leak.bytes)]
}

fn show_held(held: &Fragmentation) -> Result<(), Failure> {
    outln!("\nHeld at the end")?;
    let rows = [
        row!["segments", ByteSize(held.reserved_bytes)],
        row!["in use", ByteSize(held.allocated_bytes)],
        row!["of it by rounding", ByteSize(held.rounding_bytes)],
        row!["waiting for other streams", ByteSize(held.pending_bytes)],
        row!["unused", ByteSize(held.unused_bytes)],
        row!["of it whole segments, which empty_cache gives back", ByteSize(held.releasable_bytes)],
        row!["largest free block", ByteSize(held.largest_free_bytes)],
        row!["unused at the peak", ByteSize(held.unused_at_peak_bytes)],
    ];
    out!("{}", table::render(&rows))
}

fn show_failed(failed: &OomEvent) -> Result<(), Failure> {
    outln!(
        "\nOut of memory at {}: {} asked, {} free on the device, {} live in {} of segments",
        failed.line.as_deref().unwrap_or("an unknown line"),
        ByteSize(failed.asked_bytes),
        ByteSize(failed.device_free_bytes),
        ByteSize(failed.allocated_bytes),
        ByteSize(failed.reserved_bytes),
    )
}
