//! A timeline as Chrome's trace events in the object form
//! (<https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>), which Perfetto reads.
//!
//! A tier is a process and an allocation a complete event on a row where it is alone. What stays to the end has rows below
//! those of what comes and goes. Bytes by tag are counters. The parts and phases of the work are a process of their own.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use plimsoll_memory::{CountedEvents, Phase, Tier};
use serde::Serialize;

use super::{Allocation, Moment, Stretch, TierTimeline, Timeline};

/// The process of parts and phases; those of the tiers follow.
const WORK: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    #[serde(rename = "traceEvents")]
    events: Vec<Entry<'a>>,
    #[serde(rename = "displayTimeUnit")]
    unit: &'static str,
    #[serde(rename = "otherData")]
    about: About<'a>,
}

/// What the trace is of.
#[derive(Serialize)]
struct About<'a> {
    model: &'a str,
    settings: &'a str,
    time: &'static str,
    peaks: BTreeMap<String, Peak>,
    iterations: &'static str,
    counted: &'a [CountedEvents],
}

#[derive(Serialize)]
struct Peak {
    bytes: u64,
    event: Option<u64>,
    at_peak: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<Line>,
}

#[derive(Serialize)]
struct Line {
    bytes: u64,
    what: &'static str,
}

#[derive(Serialize)]
struct Entry<'a> {
    name: Cow<'a, str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    cat: &'static str,
    ph: &'static str,
    pid: u32,
    tid: usize,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Args,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Args {
    Allocation {
        tag: &'static str,
        layer: Option<u32>,
        phase: Phase,
        bytes: u64,
        offset: u64,
        birth: u64,
        /// `None` of what lives on.
        death: Option<u64>,
    },
    Stretch {
        first_event: u64,
        end_event: u64,
    },
    Bytes {
        bytes: u64,
    },
    Name {
        name: String,
    },
    Order {
        sort_index: usize,
    },
}

/// Perfetto's and Chrome's own words for what has a name or an order.
fn metadata(name: &'static str, pid: u32, tid: usize, args: Args) -> Entry<'static> {
    Entry { name: Cow::Borrowed(name), cat: "", ph: "M", pid, tid, ts: 0.0, dur: None, args }
}

/// The document.
pub(super) fn write(timeline: &Timeline) -> serde_json::Result<Vec<u8>> {
    let mut events = process(WORK, "step");
    events.push(metadata("thread_name", WORK, 1, Args::Name { name: "parts".to_owned() }));
    events.push(metadata("thread_name", WORK, 2, Args::Name { name: "phases".to_owned() }));
    events.extend(timeline.parts.iter().map(|part| stretch(Cow::Borrowed(part.what), 1, part)));
    events.extend(timeline.stretches.iter().map(|own| {
        let name = match own.what {
            (phase, Some(layer)) => format!("{phase}, layer {layer}"),
            (phase, None) => phase.to_string(),
        };
        stretch(Cow::Owned(name), 2, own)
    }));
    for (pid, tier) in (WORK + 1..).zip(&timeline.tiers) {
        of_tier(tier, pid, &mut events);
    }
    let peaks = timeline.tiers.iter().map(|tier| {
        let peak = Peak {
            bytes: tier.at_peak.peak,
            event: tier.peak_moment.map(|moment| moment.event),
            at_peak: crate::tags_json(&tier.at_peak.by_tag, tier.at_peak.gaps()),
            line: tier.line.map(|(bytes, what)| Line { bytes, what }),
        };
        (tier.tier.to_string(), peak)
    });
    let about = About {
        model: &timeline.model,
        settings: &timeline.settings,
        time: match timeline.has_seconds {
            true => "the plan's time",
            false => "a microsecond stands for an allocation or a release",
        },
        peaks: peaks.collect(),
        iterations: "iterations that are alike are in the timeline once: those of the events under `counted`, from `first` to before `end`, would happen `times` times more",
        counted: &timeline.counted,
    };
    serde_json::to_vec(&Document { events, unit: "ms", about })
}

fn process(pid: u32, name: &str) -> Vec<Entry<'static>> {
    vec![
        metadata("process_name", pid, 0, Args::Name { name: name.to_owned() }),
        metadata("process_sort_index", pid, 0, Args::Order { sort_index: pid as usize }),
    ]
}

fn stretch<W>(name: Cow<'static, str>, tid: usize, stretch: &Stretch<W>) -> Entry<'static> {
    let args = Args::Stretch { first_event: stretch.begin.event, end_event: stretch.end.event };
    complete(name, "work", WORK, tid, [stretch.begin, stretch.end], args)
}

fn complete<'a>(
    name: Cow<'a, str>,
    cat: &'static str,
    pid: u32,
    tid: usize,
    [begin, end]: [Moment; 2],
    args: Args,
) -> Entry<'a> {
    let dur = Some((end.micros - begin.micros).max(0.0));
    Entry { name, cat, ph: "X", pid, tid, ts: begin.micros, dur, args }
}

fn of_tier(tier: &TierTimeline, pid: u32, events: &mut Vec<Entry<'_>>) {
    if tier.allocations.is_empty() {
        return;
    }
    let name = match tier.tier {
        Tier::Device => "device memory",
        Tier::Host => "host memory",
        Tier::Disk => "disk",
    };
    events.extend(process(pid, name));
    let rows = rows(&tier.allocations);
    let used: BTreeMap<usize, bool> =
        tier.allocations.iter().zip(&rows).map(|(allocation, row)| (*row, allocation.stays)).collect();
    for (row, stays) in used {
        let name = if stays { "stays" } else { "comes and goes" };
        events.push(metadata("thread_name", pid, row, Args::Name { name: name.to_owned() }));
        events.push(metadata("thread_sort_index", pid, row, Args::Order { sort_index: row }));
    }
    for (allocation, row) in tier.allocations.iter().zip(rows) {
        let Allocation { name, tag, layer, phase, offset, bytes, birth, death, stays } = *allocation;
        let args = Args::Allocation {
            tag: tag.name(),
            layer,
            phase,
            bytes,
            offset,
            birth: birth.event,
            death: (!stays).then_some(death.event),
        };
        events.push(complete(Cow::Borrowed(name), "allocation", pid, row, [birth, death], args));
    }
    events.extend(tier.changes.iter().map(|change| Entry {
        name: Cow::Borrowed(change.tag.name()),
        cat: "",
        ph: "C",
        pid,
        tid: 0,
        ts: change.moment.micros,
        dur: None,
        args: Args::Bytes { bytes: change.live },
    }));
}

/// A row for each allocation, from 1: the lowest that is free at its birth, for what stays to the end below all others.
fn rows(allocations: &[Allocation]) -> Vec<usize> {
    let mut rows = vec![0; allocations.len()];
    let mut free: BTreeSet<usize> = BTreeSet::new();
    let mut busy: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut last = 0;
    let mut new_row = || {
        last += 1;
        last
    };
    for (allocation, row) in allocations.iter().zip(&mut rows).filter(|(allocation, _)| !allocation.stays) {
        while let Some(&Reverse((death, done))) = busy.peek()
            && death <= allocation.birth.event
        {
            busy.pop();
            free.insert(done);
        }
        *row = free.pop_first().unwrap_or_else(&mut new_row);
        busy.push(Reverse((allocation.death.event, *row)));
    }
    for (_, row) in allocations.iter().zip(&mut rows).filter(|(allocation, _)| allocation.stays) {
        *row = new_row();
    }
    rows
}
