//! Loops whose iterations are alike. A device with memory runs them all. The dry device runs them until what they do
//! repeats, and counts the others: what a plan costs does not depend on how often something is done.

use std::collections::VecDeque;
use std::ops::Range;

use plimsoll_memory::{Layout, Traffic};

use crate::trace::Counted;
use crate::{Device, DeviceError, Dry};

/// Rounds of what is used in turn between two iterations that are alike, at most: buffers come round after a few iterations.
const LONGEST_PERIOD: usize = 4;

/// A loop, as [`DeviceExt::repeat`](crate::DeviceExt::repeat) takes it. A closure is one that has no state beside the device.
pub trait Iterations {
    /// What an iteration can fail with.
    type Error: From<DeviceError>;

    /// Runs one of them. Those that a dry device counts are left out, the numbers go on behind them.
    fn run(&mut self, index: u64) -> Result<(), Self::Error>;

    /// A number for whatever decides, beside the device's arena, what the iterations behind the first do: equal ones mean
    /// the same. `None` where that is not known: an iteration is then run once more, to see that it does the same.
    fn state(&self) -> Option<u64> {
        None
    }

    /// Iterations after which what is used in turn comes round: those that repeat are as many, or some times as many.
    fn turn(&self) -> usize {
        1
    }

    /// What earlier loops of the kind were found to repeat.
    fn known(&mut self) -> Option<&mut KnownRounds> {
        None
    }
}

impl<F, E> Iterations for F
where
    F: FnMut(u64) -> Result<(), E>,
    E: From<DeviceError>,
{
    type Error = E;

    fn run(&mut self, index: u64) -> Result<(), E> {
        self(index)
    }
}

/// What loops of a kind were found to repeat, for the next of them: which it may join, and what a round from there adds.
#[derive(Debug, Default)]
pub struct KnownRounds(Vec<(Layout, u64, Round)>);

/// The border between two iterations, and what the one before it did.
struct Border {
    layout: Layout,
    state: Option<u64>,
    /// The number of the arena's next event.
    event: u64,
    counted: Counted,
    /// `None` where none came before.
    traffic: Option<Traffic>,
}

impl Border {
    fn of<I: Iterations>(dry: &Dry, iterations: &I, traffic: Option<Traffic>) -> Border {
        let (layout, state) = (dry.arena().layout(), iterations.state());
        let (event, counted) = (dry.arena().next_event(), dry.counted());
        Border { layout, state, event, counted, traffic }
    }

    /// What the iterations since `earlier` have added.
    fn since(&self, earlier: &Border, period: usize) -> Round {
        Round {
            period: period as u64,
            like_event: earlier.event,
            events: earlier.event..self.event,
            added: self.counted.since(earlier.counted),
        }
    }
}

/// What one round of iterations adds.
#[derive(Clone, Debug)]
struct Round {
    /// Iterations.
    period: u64,
    /// The next event when memory was as it is where the round begins.
    like_event: u64,
    events: Range<u64>,
    added: Counted,
}

/// The round of `period` iterations that the last border closes: it is the one a period before. Where its state is not
/// known, each iteration must have done what the one a period before it did.
fn round(borders: &VecDeque<Border>, period: usize) -> Option<Round> {
    let last = borders.len().checked_sub(1)?;
    let at = |back: usize| borders.get(last.checked_sub(back)?);
    let (newer, older) = (at(0)?, at(period)?);
    // Before the first iteration, that one decides what it does.
    older.traffic?;
    if newer.state != older.state || newer.layout != older.layout {
        return None;
    }
    if newer.state.is_none() {
        let did = |back: usize| {
            let (after, before) = (at(back)?, at(back + 1)?);
            let Round { added, .. } = after.since(before, 1);
            Some((after.traffic?, added.tally, added.moved))
        };
        let same = |back| Some(did(back)? == did(back + period)?);
        if !(0..period).all(|back| same(back) == Some(true)) {
            return None;
        }
    }
    Some(newer.since(older, period))
}

/// Runs iterations until they repeat, and counts the others.
pub(crate) fn count<I: Iterations>(dry: &Dry, times: u64, mut iterations: I) -> Result<(), I::Error> {
    let (mut index, mut counted) = (0, false);
    let mut borders = VecDeque::from([Border::of(dry, &iterations, None)]);
    while index < times {
        let before = dry.arena().begin_traffic();
        let outcome = iterations.run(index);
        let traffic = dry.arena().end_traffic(before);
        outcome?;
        index += 1;
        if counted || index == times {
            continue;
        }
        let border = Border::of(dry, &iterations, Some(traffic));
        let mut found = known(dry, &mut iterations, &border);
        if found.is_none() {
            borders.push_back(border);
            if borders.len() > 2 * LONGEST_PERIOD * iterations.turn().max(1) + 1 {
                borders.pop_front();
            }
            let turn = iterations.turn().max(1);
            let mut periods = (turn..=LONGEST_PERIOD * turn).step_by(turn);
            found = periods.find_map(|period| round(&borders, period));
            if let (Some(round), Some(known)) = (&found, iterations.known()) {
                known.learn(&borders, round.clone());
            }
        }
        let Some(round) = found else { continue };
        let rounds = (times - index) / round.period;
        if rounds == 0 {
            continue;
        }
        dry.skip(round.added, rounds, round.like_event, round.events);
        counted = true;
        index += rounds * round.period;
    }
    Ok(())
}

/// The round that begins at a border, as earlier loops have found.
fn known<I: Iterations>(dry: &Dry, iterations: &mut I, border: &Border) -> Option<Round> {
    let known = iterations.known().filter(|_| dry.joins_loops())?;
    let at_border =
        |(layout, state, _): &&(Layout, u64, Round)| Some(*state) == border.state && *layout == border.layout;
    known.0.iter().find(at_border).map(|(.., round)| round.clone())
}

impl KnownRounds {
    /// Any of the borders of a round begins one that adds as much.
    fn learn(&mut self, borders: &VecDeque<Border>, round: Round) {
        let of_round = borders.iter().rev().take(usize::try_from(round.period).unwrap_or(usize::MAX));
        let begins = |border: &Border| Round { like_event: border.event, ..round.clone() };
        let known =
            of_round.filter_map(|border| Some((border.layout.clone(), border.state?, begins(border))));
        self.0.extend(known);
    }
}
