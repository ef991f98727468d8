//! What a recording says after the end: how the process ended, what grew, and since when.
//!
//! The kernel's own counts come first: whoever it has ended for memory is counted, in the group and on the machine. Where those are gone,
//! with the container for example, the last record has to do.

use plimsoll_memory::ByteSize;
use serde::Serialize;

use crate::conditions::Conditions;
use crate::recorder::{Record, Recording};

/// Where nothing counts any more: so full was the container, or the machine, that its kernel looks for somebody to end. The
/// emergency threshold of the balanced profile.
const FULL: f64 = 0.97;
/// Growth of an owner that is named: the kernel's counters lag by some tens of pages a core.
const LEAST_GROWTH: u64 = 1 << 20;
/// An owner has begun to grow where the last tenth of the way from its usual size is left behind for good.
const BEGUN: f64 = 0.1;

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum Cause {
    /// It is still there.
    Running,
    /// As it said itself.
    Ended {
        /// Its words.
        how: String,
    },
    /// The kernel ended it, because its container had no more memory.
    Container {
        /// The container's limit at the end.
        limit_bytes: u64,
        /// The limit that it had before, where it was lowered.
        lowered_from: Option<u64>,
        /// Whether the kernel has counted it.
        is_counted: bool,
    },
    /// The kernel ended it, because the machine had no more memory.
    Machine {
        /// What it had in all.
        total_bytes: u64,
        /// Whether the kernel has counted it.
        is_counted: bool,
    },
    /// The machine went away with it.
    MachineLost,
    /// The recording is of another machine, which alone could say more.
    Elsewhere {
        /// Its name.
        host: String,
    },
    /// Something else ended it, while there was memory.
    NotMemory,
}

/// Something that had more memory at the end than usual.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Grown {
    /// Who.
    pub owner: String,
    /// Its usual bytes.
    pub usual_bytes: u64,
    /// Its bytes at the end.
    pub last_bytes: u64,
    /// Seconds before the last record at which that began.
    pub since_seconds: f64,
    /// The step at which that began.
    pub since_step: Option<u64>,
}

/// What is known after the end.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PostMortem {
    /// What ran.
    pub what: String,
    /// How it ended.
    #[serde(flatten)]
    pub cause: Cause,
    /// The last record.
    pub last: Option<Record>,
    /// What grew, the most first.
    pub grown: Vec<Grown>,
    /// Seconds that the recording covers.
    pub covers_seconds: f64,
    /// Records that were not whole.
    pub torn_records: usize,
}

impl PostMortem {
    /// Of a recording, under the conditions that are there now.
    pub fn of(recording: &Recording, now: &Conditions) -> PostMortem {
        let records = &recording.records;
        let span = |(first, last): (&Record, &Record)| (last.time - first.time).max(0.0);
        PostMortem {
            what: recording.about.what.clone(),
            cause: cause(recording, now),
            last: records.last().cloned(),
            grown: grown(records),
            covers_seconds: records.first().zip(records.last()).map_or(0.0, span),
            torn_records: recording.torn,
        }
    }
}

fn cause(recording: &Recording, now: &Conditions) -> Cause {
    let about = &recording.about;
    if let Some(how) = &about.ended {
        return Cause::Ended { how: how.clone() };
    }
    if about.host != now.host {
        return Cause::Elsewhere { host: about.host.clone() };
    }
    if about.boot != now.boot {
        return Cause::MachineLost;
    }
    if now.is_alive {
        return Cause::Running;
    }
    let last = recording.records.last();
    let [in_group, on_machine] = [0, 1].map(|place| now.oom_kills[place] > about.oom_kills[place]);
    let container = last.and_then(|last| last.container);
    let machine = last.and_then(|last| last.machine);
    let first_limit =
        recording.records.iter().filter_map(|record| record.container).map(|[limit, _]| limit).max();
    let limit = [container.map(|[limit, _]| limit), now.group_limit].into_iter().flatten().min();
    let was_full = container.is_some_and(|[limit, used]| used as f64 >= FULL * limit as f64);
    // A limit that falls below what is used leaves no time for a record.
    let was_lowered = now.group_limit.zip(container).is_some_and(|(limit, [_, used])| limit <= used);
    if let Some(limit) = limit.filter(|_| in_group || was_full || was_lowered) {
        let lowered_from = first_limit.filter(|before| *before > limit);
        return Cause::Container { limit_bytes: limit, lowered_from, is_counted: in_group };
    }
    match machine {
        Some([total, free]) if on_machine || free as f64 <= (1.0 - FULL) * total as f64 => {
            Cause::Machine { total_bytes: total, is_counted: on_machine }
        }
        _ => Cause::NotMemory,
    }
}

/// The owners that have more at the end than usual.
fn grown(records: &[Record]) -> Vec<Grown> {
    // Before its first step a run says nothing of what its arena holds.
    let begun = records.iter().position(|record| record.step.is_some()).unwrap_or(0);
    let records = records.get(begun..).unwrap_or_default();
    let Some(last) = records.last() else { return Vec::new() };
    let mut list: Vec<Grown> = Vec::new();
    for owner in &last.owners {
        let of = |record: &Record| {
            record.owners.iter().find(|other| other.name == owner.name).map_or(0, |o| o.bytes)
        };
        let bytes: Vec<u64> = records.iter().map(of).collect();
        let mut first_half: Vec<u64> = bytes.iter().take(bytes.len().div_ceil(2)).copied().collect();
        first_half.sort_unstable();
        let usual = first_half.get(first_half.len() / 2).copied().unwrap_or(0);
        // What has grown all the time was smallest at first.
        let usual = usual.min(bytes.first().copied().unwrap_or(usual));
        let growth = owner.bytes.saturating_sub(usual);
        if growth < LEAST_GROWTH {
            continue;
        }
        let begun = usual + (BEGUN * growth as f64) as u64;
        let since =
            records.iter().zip(&bytes).rev().find(|(_, bytes)| **bytes <= begun).map(|(record, _)| record);
        let since = since.or(records.first());
        list.push(Grown {
            owner: owner.name.clone(),
            usual_bytes: usual,
            last_bytes: owner.bytes,
            since_seconds: since.map_or(0.0, |record| (last.time - record.time).max(0.0)),
            since_step: since.and_then(|record| record.step),
        });
    }
    list.sort_by_key(|grown| std::cmp::Reverse(grown.last_bytes - grown.usual_bytes));
    list
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counted = |is_counted: bool| match is_counted {
            true => "the kernel has counted it",
            false => "as the last record shows",
        };
        match self {
            Cause::Running => f.write_str("it is still running"),
            Cause::Ended { how } => write!(f, "it ended by itself: {how}"),
            Cause::Container { limit_bytes, lowered_from, is_counted } => {
                let limit = ByteSize(*limit_bytes);
                write!(f, "the kernel ended it at the container's limit of {limit} ({})", counted(*is_counted))?;
                match lowered_from {
                    Some(before) => write!(f, "; the limit had been lowered from {}", ByteSize(*before)),
                    None => Ok(()),
                }
            }
            Cause::Machine { total_bytes, is_counted } => write!(
                f,
                "the kernel ended it because the machine's {} were used up ({})",
                ByteSize(*total_bytes),
                counted(*is_counted)
            ),
            Cause::MachineLost => f.write_str("the machine was started anew since: it went away with the run"),
            Cause::Elsewhere { host } => {
                write!(f, "it ran on {host}: ask there, where the kernel's counts are")
            }
            Cause::NotMemory => f.write_str(
                "memory did not end it, there was room: a signal (kill -9, a scheduler, a time limit), a crash, or an end that nobody recorded",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::{About, Owner};

    const MIB: u64 = 1 << 20;

    /// 100 records, four a second: one owner grows by 4 MiB each from record 60 on.
    fn recording() -> Recording {
        let record = |number: u64| {
            let cache = 50 * MIB + 4 * MIB * number.saturating_sub(60);
            let owners = vec![
                Owner { name: "weights".into(), bytes: 300 * MIB },
                Owner { name: "cache".into(), bytes: cache },
            ];
            Record {
                time: 1000.0 + number as f64 / 4.0,
                step: Some(number),
                container: Some([1024 * MIB, 400 * MIB + cache]),
                machine: Some([9000 * MIB, 5000 * MIB]),
                owners,
                ..Record::default()
            }
        };
        let about = About { host: "box".into(), boot: "a".into(), oom_kills: [1, 1], ..About::default() };
        Recording { about, records: (0..100).map(record).collect(), torn: 0 }
    }

    fn now() -> Conditions {
        Conditions {
            host: "box".into(),
            boot: "a".into(),
            is_alive: false,
            oom_kills: [1, 1],
            group_limit: Some(1024 * MIB),
        }
    }

    #[test]
    fn what_grew_is_named_with_its_beginning() {
        let found = PostMortem::of(&recording(), &now());
        assert_eq!(found.grown.len(), 1);
        let grown = &found.grown[0];
        assert_eq!(
            (grown.owner.as_str(), grown.usual_bytes, grown.last_bytes),
            ("cache", 50 * MIB, 206 * MIB)
        );
        assert_eq!((grown.since_step, found.covers_seconds), (Some(63), 24.75));
        assert_eq!(grown.since_seconds, 9.0);
    }

    #[test]
    fn every_end_has_its_cause() {
        let of = |now: Conditions| PostMortem::of(&recording(), &now).cause;
        assert_eq!(of(now()), Cause::NotMemory);
        assert_eq!(of(Conditions { is_alive: true, ..now() }), Cause::Running);
        assert_eq!(of(Conditions { boot: "b".into(), ..now() }), Cause::MachineLost);
        assert_eq!(of(Conditions { host: "other".into(), ..now() }), Cause::Elsewhere { host: "box".into() });
        let limit_bytes = 1024 * MIB;
        let counted = Cause::Container { limit_bytes, lowered_from: None, is_counted: true };
        assert_eq!(of(Conditions { oom_kills: [2, 2], ..now() }), counted);
        // The group is gone, and with it the count.
        let gone = Conditions { oom_kills: [0, 1], group_limit: None, ..now() };
        assert_eq!(of(gone.clone()), Cause::NotMemory);
        let machine = Cause::Machine { total_bytes: 9000 * MIB, is_counted: true };
        assert_eq!(of(Conditions { oom_kills: [0, 2], ..gone }), machine);
        let lowered = Conditions { group_limit: Some(256 * MIB), ..now() };
        assert_eq!(
            of(lowered),
            Cause::Container { limit_bytes: 256 * MIB, lowered_from: Some(limit_bytes), is_counted: false }
        );
    }

    #[test]
    fn a_full_container_is_seen_without_counts() {
        let mut full = recording();
        full.records.last_mut().unwrap().container = Some([500 * MIB, 490 * MIB]);
        let gone = Conditions { oom_kills: [0, 1], group_limit: None, ..now() };
        let found = PostMortem::of(&full, &gone).cause;
        let lowered_from = Some(1024 * MIB);
        assert_eq!(found, Cause::Container { limit_bytes: 500 * MIB, lowered_from, is_counted: false });
        assert!(found.to_string().contains("lowered from 1.00 GiB"), "{found}");
        full.about.ended = Some("finished".into());
        assert_eq!(PostMortem::of(&full, &now()).cause, Cause::Ended { how: "finished".into() });
        assert_eq!(PostMortem::of(&Recording { records: vec![], ..recording() }, &now()).grown, []);
    }
}
