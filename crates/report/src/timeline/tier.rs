//! What a tier holds in each column of a time line.

use std::collections::BTreeMap;

use plimsoll_memory::{Phase, Tag};
use plimsoll_plan::{Part, Stretch, TierTimeline, Timeline};
use serde::Serialize;

use super::scale::Scale;
use super::{Allocations, COLUMNS, phase_number};

const TAGS: usize = Tag::ALL.len();

/// A tier through the part that is shown.
#[derive(Clone, Debug, Serialize)]
pub struct TierData {
    /// Which.
    pub tier: String,
    /// Its peak.
    pub peak_bytes: u64,
    /// The column in which the tier is at its peak, or nearest to it.
    pub peak_column: usize,
    /// What may be taken of it, and who says so.
    pub line: Option<(u64, &'static str)>,
    /// Bytes of each tag that occurs, column by column, with the tag's number.
    pub live: Vec<(usize, Vec<u64>)>,
    /// The end of the highest allocation, column by column: what is live, and the gaps in it.
    pub top: Vec<u64>,
    /// The phase of each column's moment, by its number.
    pub phase: Vec<usize>,
    /// The layer of each column's moment.
    pub layer: Vec<Option<u32>>,
    /// What lives at these moments.
    pub allocations: Allocations,
}

/// A moment of a tier: the one of its column at which most is live.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Column {
    /// The event that the moment follows.
    pub event: u64,
    /// Bytes by tag.
    pub by_tag: [u64; TAGS],
    /// The end of the highest allocation.
    pub top: u64,
    /// Whether this is where the peak was first reached.
    is_peak: bool,
}

impl Column {
    fn live(&self) -> u64 {
        self.by_tag.iter().sum()
    }

    /// What counts in a column: the peak itself, then as high an end, then as many bytes as there are.
    fn rank(&self, peak: u64) -> (bool, bool, u64) {
        (self.is_peak, self.top == peak, self.live())
    }
}

/// The columns of a tier.
pub struct Replay {
    pub columns: Vec<Column>,
}

/// The tier while its events happen again.
struct State<'a> {
    tier: &'a TierTimeline,
    /// How many allocations end there.
    ends: BTreeMap<u64, u32>,
    now: Column,
}

impl State<'_> {
    fn happen(&mut self, event: &Event) {
        let Some(allocation) = self.tier.allocations.get(event.allocation) else { return };
        let end = allocation.offset + allocation.bytes;
        let bytes = self.now.by_tag.get_mut(allocation.tag as usize);
        let count = self.ends.entry(end).or_default();
        if event.is_birth {
            bytes.into_iter().for_each(|bytes| *bytes += allocation.bytes);
            *count += 1;
        } else {
            bytes.into_iter().for_each(|bytes| *bytes = bytes.saturating_sub(allocation.bytes));
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.ends.remove(&end);
            }
        }
        self.now.event = event.number;
        self.now.top = self.ends.last_key_value().map_or(0, |(end, _)| *end);
        self.now.is_peak = self.tier.peak_moment.is_some_and(|moment| moment.event == event.number);
    }
}

struct Event {
    number: u64,
    micros: f64,
    allocation: usize,
    is_birth: bool,
}

impl Replay {
    /// Lets everything in a part happen again.
    pub fn of(tier: &TierTimeline, part: &Part, scale: &Scale) -> Replay {
        let mut events: Vec<Event> = Vec::new();
        for (allocation, own) in tier.allocations.iter().enumerate().filter(|(_, own)| own.is_in(part)) {
            let event = |moment: plimsoll_plan::Moment, is_birth: bool| Event {
                number: moment.event,
                micros: moment.micros,
                allocation,
                is_birth,
            };
            events.push(event(own.birth, true));
            if !own.stays && own.death.event < part.end.event {
                events.push(event(own.death, false));
            }
        }
        events.sort_by_key(|event| event.number);
        let mut state = State { tier, ends: BTreeMap::new(), now: Column::default() };
        let mut events = events.into_iter().peekable();
        while let Some(event) = events.next_if(|event| event.number < part.begin.event) {
            state.happen(&event);
        }
        let column_of = |micros: f64| ((scale.place(micros) * COLUMNS as f64) as usize).min(COLUMNS - 1);
        let peak = tier.at_peak.peak;
        let mut columns = Vec::with_capacity(COLUMNS);
        for column in 0..COLUMNS {
            let mut best = state.now;
            while let Some(event) = events.next_if(|event| column_of(event.micros) <= column) {
                state.happen(&event);
                if state.now.rank(peak) > best.rank(peak) {
                    best = state.now;
                }
            }
            // What a later column begins with is no longer the moment of the peak.
            state.now.is_peak = false;
            columns.push(best);
        }
        Replay { columns }
    }

    /// The column of the peak; where the part does not reach it, the one that comes nearest.
    fn peak_column(&self, peak: u64) -> usize {
        let first_at = |is: &dyn Fn(&Column) -> bool| self.columns.iter().position(is);
        let highest = self.columns.iter().map(|column| column.top).max().unwrap_or(0);
        first_at(&|column| column.is_peak)
            .or_else(|| first_at(&|column| column.top == peak))
            .or_else(|| first_at(&|column| column.top == highest))
            .unwrap_or(0)
    }
}

impl TierData {
    /// Without the allocations.
    pub fn of(tier: &TierTimeline, replay: Replay, timeline: &Timeline, scale: &Scale) -> TierData {
        let columns = &replay.columns;
        let of_tag = |tag: usize| -> Vec<u64> {
            columns.iter().map(|column| column.by_tag.get(tag).copied().unwrap_or(0)).collect()
        };
        let live = (0..TAGS).map(|tag| (tag, of_tag(tag)));
        let begins = (0..columns.len()).map(|column| scale.moment(column as f64 / COLUMNS as f64));
        let moments = columns.iter().zip(begins);
        let places = moments.map(|(column, begin)| place(&timeline.stretches, column.event, begin));
        let (phase, layer) = places.map(|(phase, layer)| (phase_number(phase), layer)).unzip();
        TierData {
            tier: tier.tier.to_string(),
            peak_bytes: tier.at_peak.peak,
            peak_column: replay.peak_column(tier.at_peak.peak),
            line: tier.line,
            live: live.filter(|(_, bytes)| bytes.iter().any(|bytes| *bytes > 0)).collect(),
            top: columns.iter().map(|column| column.top).collect(),
            phase,
            layer,
            allocations: Allocations::default(),
        }
    }

    /// Bytes of all tags in a column.
    pub fn live_in(&self, column: usize) -> u64 {
        self.live.iter().filter_map(|(_, bytes)| bytes.get(column)).sum()
    }
}

/// The phase and the layer around an event; where nothing has happened since the column began, those at its beginning.
fn place(stretches: &[Stretch<(Phase, Option<u32>)>], event: u64, begin: f64) -> (Phase, Option<u32>) {
    let by_event = stretches.partition_point(|stretch| stretch.begin.event <= event);
    let by_time = stretches.partition_point(|stretch| stretch.begin.micros <= begin);
    let around = by_event.max(by_time).checked_sub(1).and_then(|index| stretches.get(index));
    around.map_or((Phase::Setup, None), |stretch| stretch.what)
}
