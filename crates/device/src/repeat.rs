//! Loops whose iterations are alike. A device with memory runs them all. The dry device runs them until what they do
//! repeats, and counts the others: what a plan costs does not depend on how often something is done.

use std::collections::VecDeque;

use plimsoll_memory::{Layout, Traffic};

use crate::{Clock, Device, DeviceError, Dry, Tally, Times};

/// Iterations between two that are alike, at most: buffers that are used in turn come round after a few.
const LONGEST_PERIOD: usize = 4;

/// A loop, as [`DeviceExt::repeat`](crate::DeviceExt::repeat) takes it. A closure is one that has no state beside the device.
pub trait Iterations {
    /// What an iteration can fail with.
    type Error: From<DeviceError>;

    /// Runs one of them. Those that a dry device counts are left out, the numbers go on behind them.
    fn run(&mut self, index: u64) -> Result<(), Self::Error>;

    /// A number for whatever decides, beside the device's arena, what the next iteration does: equal ones mean the same.
    fn state(&self) -> u64 {
        0
    }

    /// Totals that the iterations add to beside the device's tally.
    fn totals(&self) -> [u64; 2] {
        [0; 2]
    }

    /// Adds to these totals what iterations would that are counted.
    fn count(&mut self, _totals: [u64; 2]) {}
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

/// The border between two iterations, and what the one before it did.
#[derive(Clone)]
struct Border {
    layout: Layout,
    state: u64,
    /// The number of the arena's next event.
    event: u64,
    tally: Tally,
    times: Option<Times>,
    totals: [u64; 2],
    /// `None` where none came before.
    traffic: Option<Traffic>,
}

impl Border {
    fn of<I: Iterations>(dry: &Dry, iterations: &I, traffic: Option<Traffic>) -> Border {
        let (layout, state) = (dry.arena().layout(), iterations.state());
        let times = dry.clock().map(Clock::times);
        let event = dry.arena().next_event();
        Border { layout, state, event, tally: dry.tally(), times, totals: iterations.totals(), traffic }
    }
}

/// What one round of iterations adds.
struct Round {
    /// The number of its first event.
    first_event: u64,
    tally: Tally,
    totals: [u64; 2],
    /// The clock before it.
    began: Option<Times>,
}

/// The round of `period` iterations that the last borders have seen twice: each iteration did what the one a period
/// before it did, and the border that it leaves is the one a period before.
fn round(borders: &VecDeque<Border>, period: usize) -> Option<Round> {
    let last = borders.len().checked_sub(1)?;
    let at = |back: usize| borders.get(last.checked_sub(back)?);
    let added = |back: usize| {
        let (after, before) = (at(back)?, at(back + 1)?);
        let totals = [0, 1].map(|i| after.totals[i] - before.totals[i]);
        Some((after.tally.less(before.tally), totals))
    };
    for back in 0..period {
        let (newer, older) = (at(back)?, at(back + period)?);
        let same_traffic = newer.traffic? == older.traffic?;
        if !same_traffic || added(back)? != added(back + period)? {
            return None;
        }
    }
    let (newer, older) = (at(0)?, at(period)?);
    if newer.state != older.state || newer.layout != older.layout {
        return None;
    }
    let totals = [0, 1].map(|i| newer.totals[i] - older.totals[i]);
    let (first_event, began) = (older.event, older.times);
    Some(Round { first_event, tally: newer.tally.less(older.tally), totals, began })
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
        if counted || times - index < 2 {
            continue;
        }
        borders.push_back(Border::of(dry, &iterations, Some(traffic)));
        if borders.len() > 2 * LONGEST_PERIOD + 1 {
            borders.pop_front();
        }
        let found = (1..=LONGEST_PERIOD).find_map(|period| Some((period as u64, round(&borders, period)?)));
        let Some((period, Round { first_event, tally, totals, began })) = found else { continue };
        let rounds = (times - index) / period;
        if rounds == 0 {
            continue;
        }
        dry.arena().count_again(first_event, rounds);
        dry.add(tally.times(rounds));
        if let (Some(clock), Some(began)) = (dry.clock(), began) {
            clock.repeat(began, rounds);
        }
        iterations.count(totals.map(|total| total.saturating_mul(rounds)));
        counted = true;
        index += rounds * period;
    }
    Ok(())
}
