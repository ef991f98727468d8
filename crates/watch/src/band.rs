//! Who holds the memory of a run, from the beginning until now: the records of its flight recorder, in bounded memory.

use plimsoll_memory::Tag;
use plimsoll_monitor::{Owner, Record, Status};
use plimsoll_plan::{Colour, OTHER_COLOUR, colour_of};

/// Moments that are kept; when there are so many, of two neighbours the one that holds more is.
const MOST: usize = 600;

/// An owner, as pictures name and paint it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Held {
    /// A tag of the arena.
    Tagged(Tag),
    /// Gaps between what the arena holds.
    Gaps,
    /// The host tier.
    Host,
    /// The program, its threads and its heap.
    Program,
    /// Files that are mapped.
    Files,
    /// What has gone to swap.
    Swap,
    /// Anything else.
    Other,
}

impl Held {
    /// From the bottom of a picture to its top.
    pub fn all() -> impl Iterator<Item = Held> {
        let tags = Tag::ALL.into_iter().map(Held::Tagged);
        tags.chain([Held::Gaps, Held::Host, Held::Program, Held::Files, Held::Swap, Held::Other])
    }

    fn of(name: &str) -> Held {
        let tag = Tag::ALL.into_iter().find(|tag| tag.name() == name);
        match (tag, name) {
            (Some(tag), _) => Held::Tagged(tag),
            (_, "gaps of the arena") => Held::Gaps,
            (_, "host tier") => Held::Host,
            (_, "program, threads and heap") => Held::Program,
            (_, "mapped files") => Held::Files,
            (_, "swapped out") => Held::Swap,
            _ => Held::Other,
        }
    }

    /// For people.
    pub fn words(self) -> String {
        match self {
            Held::Tagged(tag) => tag.name().replace('_', " "),
            Held::Gaps => "gaps".to_owned(),
            Held::Host => "host tier".to_owned(),
            Held::Program => "program".to_owned(),
            Held::Files => "mapped files".to_owned(),
            Held::Swap => "swap".to_owned(),
            Held::Other => "other".to_owned(),
        }
    }

    /// What the style sheet of pages calls it.
    pub fn class(self) -> &'static str {
        match self {
            Held::Tagged(tag) => tag.name(),
            Held::Gaps | Held::Other => "gaps",
            Held::Host => "data",
            Held::Program => "overhead",
            Held::Files => "files",
            Held::Swap => "swap",
        }
    }

    /// In pictures.
    pub fn colour(self) -> Colour {
        match self {
            Held::Tagged(tag) => colour_of(tag),
            Held::Gaps | Held::Other => OTHER_COLOUR,
            Held::Host => [100, 100, 100],
            Held::Program => [125, 130, 140],
            Held::Files => [170, 175, 185],
            Held::Swap => [200, 60, 60],
        }
    }
}

/// Memory at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Moment {
    /// Seconds since 1970.
    pub time: f64,
    /// The step that was done last.
    pub step: Option<u64>,
    /// How near to its limit the run was.
    pub status: Status,
    /// The resident set.
    pub rss_bytes: u64,
    /// The run's own memory by kind, from the bottom of a picture to its top.
    pub by_kind: Vec<(Held, u64)>,
    /// What others use of the container or the machine, whichever has less left.
    pub others_bytes: u64,
}

impl Moment {
    fn of(record: &Record) -> Moment {
        let is_other = |owner: &&Owner| owner.name.starts_with("others ");
        let of = |kind: Held| {
            let own = record.owners.iter().filter(|owner| !is_other(owner) && Held::of(&owner.name) == kind);
            (kind, own.fold(0u64, |sum, owner| sum.saturating_add(owner.bytes)))
        };
        Moment {
            time: record.time,
            step: record.step,
            status: record.status,
            rss_bytes: record.rss,
            by_kind: Held::all().map(of).filter(|(_, bytes)| *bytes > 0).collect(),
            others_bytes: record.owners.iter().filter(is_other).map(|owner| owner.bytes).max().unwrap_or(0),
        }
    }

    /// Bytes of all kinds.
    pub fn total(&self) -> u64 {
        self.by_kind.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

/// Moments in order.
#[derive(Clone, Debug)]
pub struct Band {
    moments: Vec<Moment>,
    /// Records in each moment.
    stride: usize,
    /// Records since the last moment, and the one of them that holds most.
    pending: (usize, Option<Moment>),
    last: Option<Moment>,
}

impl Default for Band {
    fn default() -> Band {
        Band { moments: Vec::new(), stride: 1, pending: (0, None), last: None }
    }
}

impl Band {
    /// One more record.
    pub fn push(&mut self, record: &Record) {
        if !record.time.is_finite() {
            return;
        }
        let moment = Moment::of(record);
        self.last = Some(moment.clone());
        let highest = match self.pending.1.take() {
            Some(before) => larger(before, moment),
            None => moment,
        };
        self.pending = (self.pending.0 + 1, Some(highest));
        if self.pending.0 < self.stride {
            return;
        }
        self.moments.extend(std::mem::take(&mut self.pending).1);
        if self.moments.len() >= MOST {
            let mut all = std::mem::take(&mut self.moments).into_iter();
            while let Some(first) = all.next() {
                self.moments.push(match all.next() {
                    Some(second) => larger(first, second),
                    None => first,
                });
            }
            self.stride = self.stride.saturating_mul(2);
        }
    }

    /// What there was last.
    pub fn last(&self) -> Option<&Moment> {
        self.last.as_ref()
    }

    /// The moments since a step, or all.
    pub fn since(&self, step: Option<u64>) -> Vec<&Moment> {
        let all = self.moments.iter().chain(self.pending.1.as_ref());
        all.filter(|moment| step.is_none_or(|step| moment.step.is_some_and(|own| own >= step))).collect()
    }
}

fn larger(a: Moment, b: Moment) -> Moment {
    if b.total() >= a.total() { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(time: u64, bytes: u64) -> Record {
        let owners = vec![
            Owner { name: "weights".into(), bytes },
            Owner { name: "program, threads and heap".into(), bytes: 5 },
            Owner { name: "others on the machine".into(), bytes: 1 << 40 },
        ];
        Record { time: time as f64, step: Some(time), rss: bytes, owners, ..Record::default() }
    }

    #[test]
    fn peaks_stay_however_long_it_goes_on() {
        let mut band = Band::default();
        (0..50_000).for_each(|time| band.push(&record(time, if time == 31_234 { 1000 } else { 10 })));
        let all = band.since(None);
        assert!(all.len() <= MOST && all.len() > MOST / 3, "{}", all.len());
        assert!(all.windows(2).all(|pair| pair[0].time < pair[1].time));
        assert_eq!(all.iter().map(|moment| moment.total()).max(), Some(1005));
        assert!(band.since(Some(49_000)).len() < all.len());
        assert_eq!(band.last().unwrap().time, 49_999.0);
    }

    #[test]
    fn owners_have_their_kinds_and_others_are_apart() {
        let mut band = Band::default();
        let mut hostile = record(1, 7);
        hostile.owners.extend((0..100).map(|n| Owner { name: "x".repeat(5000), bytes: u64::MAX - n }));
        band.push(&hostile);
        band.push(&Record { time: f64::NAN, ..record(2, 7) });
        let last = band.last().unwrap();
        assert_eq!((last.time, last.others_bytes, last.total()), (1.0, 1 << 40, u64::MAX));
        let kinds = [(Held::Tagged(Tag::Weights), 7), (Held::Program, 5), (Held::Other, u64::MAX)];
        assert_eq!(last.by_kind, kinds);
    }
}
