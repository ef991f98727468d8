//! The time line of a plan in a size that a page can hold: some hundred columns of time, and in each the moment at which a tier
//! holds most. Every one of these moments is exact; the peak is one of them.
//!
//! Iterations that are alike are in a plan's timeline once, with a gap behind them. A long gap is shown shorter than it is.

mod scale;
mod tier;

use plimsoll_memory::{Phase, Tag, Tier};
use plimsoll_plan::{Allocation, Moment, Part, Timeline};
use serde::Serialize;

use scale::Scale;
pub use scale::{Break, Tick};
use tier::Replay;
pub use tier::TierData;

/// Columns of a time line.
pub const COLUMNS: usize = 600;

/// Allocations at most, of all tiers together; the smallest are left to their tag's total.
const MOST_ALLOCATIONS: usize = 20_000;

/// Groups of what lives at the peak that are listed.
const MOST_GROUPS: usize = 16;

/// A time line.
#[derive(Clone, Debug, Serialize)]
pub struct TimelineData {
    /// The part of the work that it shows, in words.
    pub part: &'static str,
    /// What kind of step it is, in words.
    pub settings: String,
    /// Whether moments are microseconds; otherwise they count allocations and releases.
    pub has_seconds: bool,
    /// When each column begins, from the part's beginning on.
    pub begins: Vec<f64>,
    /// How long the part is.
    pub length: f64,
    /// Phases by their number.
    pub phases: Vec<String>,
    /// Names of allocations by their number.
    pub names: Vec<&'static str>,
    /// Tags by their number.
    pub tags: Vec<&'static str>,
    /// Where the axis has labels.
    pub ticks: Vec<Tick>,
    /// What the axis shows shorter than it is.
    pub breaks: Vec<Break>,
    /// The tiers that hold anything, the device first.
    pub tiers: Vec<TierData>,
    /// The largest groups of allocations at the device's peak.
    pub at_peak: Vec<Group>,
    /// Allocations that are too small or too short to be in any list.
    pub merged: usize,
}

/// Allocations by their numbers, a list for each of their properties.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Allocations {
    /// Name.
    pub name: Vec<usize>,
    /// Tag.
    pub tag: Vec<usize>,
    /// Layer.
    pub layer: Vec<Option<u32>>,
    /// Phase in which it is taken.
    pub phase: Vec<usize>,
    /// Size.
    pub bytes: Vec<u64>,
    /// When it is taken, from the part's beginning on; less than 0 for what was there before.
    pub birth: Vec<f64>,
    /// When it is given back; `None` for what stays.
    pub death: Vec<Option<f64>>,
    /// The first column at whose moment it lives.
    pub first: Vec<usize>,
    /// The last such column.
    pub last: Vec<usize>,
}

/// Allocations of one name that live at a moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Name.
    pub name: &'static str,
    /// Tag.
    pub tag: &'static str,
    /// Phase in which they are taken.
    pub phase: String,
    /// How many there are.
    pub count: usize,
    /// The first and the last layer.
    pub layers: Option<(u32, u32)>,
    /// Bytes of all.
    pub bytes: u64,
    /// When the first is taken, from the part's beginning on.
    pub since: f64,
}

impl TimelineData {
    /// What a page shows of a plan's timeline.
    pub fn of(timeline: &Timeline) -> TimelineData {
        let part = timeline.shown();
        let scale = Scale::of(timeline, &part);
        let mut tiers: Vec<TierData> = Vec::new();
        let mut kept: Vec<Kept<'_>> = Vec::new();
        for tier in timeline.tiers.iter().filter(|tier| tier.at_peak.peak > 0) {
            let replay = Replay::of(tier, &part, &scale);
            let events: Vec<u64> = replay.columns.iter().map(|column| column.event).collect();
            let inside = tier.allocations.iter().filter(|allocation| allocation.is_in(&part));
            let number = tiers.len();
            kept.extend(inside.map(|allocation| Kept::of(allocation, number, &events)));
            tiers.push(TierData::of(tier, replay, timeline, &scale));
        }
        let all = kept.len();
        kept.retain(|kept| kept.first <= kept.last);
        keep_largest(&mut kept);
        let merged = all - kept.len();
        let at_peak = tiers.first().map_or(Vec::new(), |device| {
            let live = kept.iter().filter(|kept| kept.tier == 0 && kept.lives_in(device.peak_column));
            groups(live.map(|kept| kept.allocation), &part)
        });
        let mut names: Vec<&'static str> = kept.iter().map(|kept| kept.allocation.name).collect();
        names.sort_unstable();
        names.dedup();
        for kept in &kept {
            if let Some(tier) = tiers.get_mut(kept.tier) {
                kept.add_to(&mut tier.allocations, &names, &part);
            }
        }
        let begin = |column: usize| scale.moment(column as f64 / COLUMNS as f64) - part.begin.micros;
        TimelineData {
            part: part.words(),
            settings: timeline.settings.clone(),
            has_seconds: timeline.has_seconds,
            begins: (0..COLUMNS).map(|column| rounded(begin(column))).collect(),
            length: part.end.micros - part.begin.micros,
            phases: PHASES.map(|phase| phase.to_string()).to_vec(),
            names,
            tags: Tag::ALL.map(Tag::name).to_vec(),
            ticks: scale.ticks(timeline.has_seconds),
            breaks: scale.breaks(),
            tiers,
            at_peak,
            merged,
        }
    }

    /// The device's.
    pub fn device(&self) -> Option<&TierData> {
        self.tiers.iter().find(|tier| tier.tier == Tier::Device.to_string())
    }
}

/// An allocation that a list can show.
struct Kept<'a> {
    allocation: &'a Allocation,
    tier: usize,
    first: usize,
    last: usize,
}

impl<'a> Kept<'a> {
    /// `events`: of each column, the event after which its moment is. Where the allocation lives at none of them, the last
    /// column is before the first.
    fn of(allocation: &'a Allocation, tier: usize, events: &[u64]) -> Kept<'a> {
        let first = events.partition_point(|event| *event < allocation.birth.event);
        let behind = match allocation.stays {
            true => events.len(),
            false => events.partition_point(|event| *event < allocation.death.event),
        };
        match behind.checked_sub(1) {
            Some(last) => Kept { allocation, tier, first, last },
            None => Kept { allocation, tier, first: 1, last: 0 },
        }
    }

    fn lives_in(&self, column: usize) -> bool {
        (self.first..=self.last).contains(&column)
    }

    fn add_to(&self, all: &mut Allocations, names: &[&'static str], part: &Part) {
        let Kept { allocation, first, last, .. } = self;
        let since = |moment: Moment| rounded(moment.micros - part.begin.micros);
        all.name.push(names.binary_search(&allocation.name).unwrap_or(0));
        all.tag.push(allocation.tag as usize);
        all.layer.push(allocation.layer);
        all.phase.push(phase_number(allocation.phase));
        all.bytes.push(allocation.bytes);
        all.birth.push(since(allocation.birth));
        all.death.push((!allocation.stays).then(|| since(allocation.death)));
        all.first.push(*first);
        all.last.push(*last);
    }
}

/// Leaves out the smallest where there are too many.
fn keep_largest(kept: &mut Vec<Kept<'_>>) {
    if kept.len() <= MOST_ALLOCATIONS {
        return;
    }
    let mut sizes: Vec<u64> = kept.iter().map(|kept| kept.allocation.bytes).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let least = sizes.get(MOST_ALLOCATIONS).copied().unwrap_or(0);
    kept.retain(|kept| kept.allocation.bytes > least);
}

/// The largest groups of what lives at a moment.
fn groups<'a>(live: impl Iterator<Item = &'a Allocation>, part: &Part) -> Vec<Group> {
    let mut all: Vec<Group> = Vec::new();
    for allocation in live {
        let (tag, phase) = (allocation.tag.name(), allocation.phase.to_string());
        let since = rounded(allocation.birth.micros - part.begin.micros);
        let is_same =
            |group: &&mut Group| (group.name, group.tag, &group.phase) == (allocation.name, tag, &phase);
        match all.iter_mut().find(is_same) {
            Some(group) => {
                group.count += 1;
                group.bytes += allocation.bytes;
                group.since = group.since.min(since);
                group.layers = match (group.layers, allocation.layer) {
                    (Some((first, last)), Some(layer)) => Some((first.min(layer), last.max(layer))),
                    (known, layer) => known.or(layer.map(|layer| (layer, layer))),
                };
            }
            None => all.push(Group {
                name: allocation.name,
                tag,
                phase,
                count: 1,
                layers: allocation.layer.map(|layer| (layer, layer)),
                bytes: allocation.bytes,
                since,
            }),
        }
    }
    all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then(a.name.cmp(b.name)));
    all.truncate(MOST_GROUPS);
    all
}

const PHASES: [Phase; 6] =
    [Phase::Setup, Phase::Forward, Phase::Loss, Phase::Backward, Phase::Optimizer, Phase::Generate];

fn phase_number(phase: Phase) -> usize {
    PHASES.iter().position(|known| *known == phase).unwrap_or(0)
}

/// A tenth of a microsecond is enough.
fn rounded(micros: f64) -> f64 {
    (10.0 * micros).round() / 10.0
}

#[cfg(test)]
mod tests {
    use plimsoll_memory::AtPeak;
    use plimsoll_plan::{Stretch, TierTimeline};

    use super::*;

    /// So many allocations, one after the other, that all stay.
    fn timeline(count: u64) -> Timeline {
        let moment = |event: u64| Moment { event, micros: event as f64 };
        let end = moment(count + 1);
        let mut offset = 0;
        let allocation = |event: u64| {
            let bytes = 64 * (1 + event % 7);
            offset += bytes;
            Allocation {
                name: "q",
                tag: Tag::Activations,
                layer: Some(event as u32),
                phase: Phase::Forward,
                offset: offset - bytes,
                bytes,
                birth: moment(event),
                death: end,
                stays: true,
            }
        };
        let allocations: Vec<Allocation> = (0..count).map(allocation).collect();
        let tier = TierTimeline {
            tier: Tier::Device,
            allocations,
            at_peak: AtPeak { peak: offset, ..AtPeak::default() },
            peak_moment: Some(moment(count - 1)),
            line: None,
            changes: Vec::new(),
        };
        Timeline {
            model: "m".to_owned(),
            settings: String::new(),
            tiers: vec![tier],
            parts: vec![Part { what: "step", begin: moment(0), end }],
            stretches: vec![Stretch { what: (Phase::Forward, Some(3)), begin: moment(0), end }],
            counted: Vec::new(),
            has_seconds: true,
        }
    }

    #[test]
    fn the_smallest_of_very_many_are_merged_and_the_peak_stays_exact() {
        let data = TimelineData::of(&timeline(50_000));
        let device = data.device().unwrap();
        let listed = device.allocations.bytes.len();
        assert!(listed <= MOST_ALLOCATIONS && listed > MOST_ALLOCATIONS / 3, "{listed}");
        assert_eq!(listed + data.merged, 50_000);
        assert!(device.allocations.bytes.iter().all(|bytes| *bytes > 64), "the smallest go first");
        assert_eq!(device.peak_column, COLUMNS - 1);
        assert_eq!(
            (device.live_in(COLUMNS - 1), device.top[COLUMNS - 1]),
            (device.peak_bytes, device.peak_bytes)
        );
        let few = TimelineData::of(&timeline(300));
        assert_eq!((few.merged, few.at_peak[0].count, few.at_peak[0].layers), (0, 300, Some((0, 299))));
        assert_eq!(few.at_peak[0].bytes, few.device().unwrap().peak_bytes);
    }
}
