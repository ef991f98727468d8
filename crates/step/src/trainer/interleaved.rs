//! Interleaved stages: a rank has several runs of layers, and a micro-batch goes through all ranks as often. While a stage waits for
//! the first micro-batch and for the last one, these go through one run of layers instead of all, so that a rank waits for that
//! share of the time (Narayanan et al. 2021; Megatron-LM's virtual pipeline stages).
//!
//! A leg is a micro-batch's way through one run of layers. Forward, micro-batches come in groups of as many as there are stages: a
//! group goes through the first runs of all ranks, then through the second ones. Backward, the same from the last run to the first.
//! So each run has its micro-batches in their order, forward and backward, and adds up their gradients as one rank does.
//!
//! Ranks go in step. In a tick a rank takes one leg forward and one back, as far as there are any, and then exchanges what its
//! neighbours need for the next tick. What a rank sends at the end of its n-th tick after the first stage's first one, the other
//! receives at the end of the same tick. Forward legs are exchanged around all ranks before backward ones: nobody waits for somebody
//! who waits.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use plimsoll_device::{DeviceExt, Iterations, KnownRounds};
use plimsoll_memory::Phase;
use plimsoll_parallel::least_common_multiple;

use super::pipeline::Way;
use super::schedule::{Exchange, Side, Slot};
use crate::StepError;
use crate::stage::{MOST_INTERLEAVED, Stage};

/// In which order a rank takes its legs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interleaved {
    /// Which of how many stages.
    number: u64,
    stages: u64,
    /// Runs of layers of each.
    rounds: u64,
    micro_batches: u64,
}

/// A micro-batch's way through a run of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leg {
    run: usize,
    micro_batch: u64,
}

/// What a rank does from one exchange to the next.
#[derive(Clone, Copy, Debug)]
struct Tick {
    forward: Option<Leg>,
    backward: Option<Leg>,
    /// The forward leg whose output goes to the next stage, and the one whose input comes from the stage before.
    passes_on: Option<Leg>,
    takes_up: Option<Leg>,
    /// The backward leg whose gradient goes to the stage before, and the one whose gradient comes from the next stage.
    gives_back: Option<Leg>,
    gets_back: Option<Leg>,
}

impl Interleaved {
    /// That of a stage, for so many micro-batches.
    pub fn of(stage: &Stage, micro_batches: u64) -> Interleaved {
        let [number, stages, rounds] = [stage.number, stage.count, stage.rounds].map(u64::from);
        Interleaved { number, stages, rounds, micro_batches }
    }

    /// Legs in each direction.
    fn legs(self) -> u64 {
        self.rounds * self.micro_batches
    }

    /// Legs that go forward before the first one comes back, where there are so many.
    pub fn ahead(self) -> u64 {
        2 * (self.stages - 1 - self.number) + (self.rounds - 1) * self.stages
    }

    /// Legs after which runs come in the same order again.
    fn turn(self) -> u64 {
        self.stages * self.rounds
    }

    /// Turns after which legs that are under way lie where the ones that many turns before lay. Each takes the place of the one that
    /// came back last, and they do not come back in the order in which they went forward.
    fn turns_of_places(self) -> u64 {
        let (turn, ahead) = (self.turn() as usize, self.ahead() as usize);
        // Which forward leg one that comes back was.
        let goes_back = |leg: usize| {
            let Leg { run, micro_batch } = self.backward(leg as u64);
            let (group, place) = (micro_batch / self.stages, micro_batch % self.stages);
            (group * self.turn() + run as u64 * self.stages + place) as usize
        };
        let first = (ahead / turn + 2) * turn;
        let mut places: Vec<usize> = (0..first + turn).collect();
        for leg in ahead + 1..places.len() {
            let freed = places.get(goes_back(leg - ahead - 1)).copied();
            if let (Some(place), Some(freed)) = (places.get_mut(leg), freed) {
                *place = freed;
            }
        }
        // What lies where, of the legs that are under way and of the free place, by their distance from the last one.
        let at = |end: usize| {
            let back: HashSet<usize> = (0..end - ahead).map(goes_back).collect();
            let free = goes_back(end - ahead - 1);
            let under_way = (0..end).filter(|leg| !back.contains(leg)).chain([free]);
            under_way.filter_map(|leg| places.get(leg).copied()).collect::<Vec<_>>()
        };
        let later: HashMap<usize, usize> = at(first).into_iter().zip(at(first + turn)).collect();
        let (mut seen, mut turns) = (HashSet::new(), 1u64);
        for mut place in later.keys().copied() {
            let mut length = 0;
            while seen.insert(place) {
                length += 1;
                place = later.get(&place).copied().unwrap_or(place);
            }
            turns = least_common_multiple(turns, length.max(1));
        }
        turns
    }

    fn begins(self, leg: &Leg) -> bool {
        self.number == 0 && leg.run == 0
    }

    fn ends(self, leg: &Leg) -> bool {
        self.number + 1 == self.stages && leg.run as u64 + 1 == self.rounds
    }

    /// One of the forward legs.
    fn forward(self, leg: u64) -> Leg {
        let (group, within) = (leg / self.turn(), leg % self.turn());
        let (run, place) = (within / self.stages, within % self.stages);
        Leg { run: run as usize, micro_batch: group * self.stages + place }
    }

    /// One of the backward legs.
    fn backward(self, leg: u64) -> Leg {
        let forward = self.forward(leg);
        Leg { run: self.rounds as usize - 1 - forward.run, ..forward }
    }

    /// The ticks of a step. Before the first leg is one in which that comes in.
    fn ticks(self) -> u64 {
        1 + self.legs() + self.ahead()
    }

    fn tick(self, number: u64) -> Tick {
        let within = |leg: Option<u64>| leg.filter(|leg| *leg < self.legs());
        let forward = |tick: u64| within(tick.checked_sub(1)).map(|leg| self.forward(leg));
        let backward = |tick: u64| within(tick.checked_sub(1 + self.ahead())).map(|leg| self.backward(leg));
        let (now, next) = (number, number + 1);
        Tick {
            forward: forward(now),
            backward: backward(now),
            passes_on: forward(now).filter(|leg| !self.ends(leg)),
            takes_up: forward(next).filter(|leg| !self.begins(leg)),
            gives_back: backward(now).filter(|leg| !self.begins(leg)),
            gets_back: backward(next).filter(|leg| !self.ends(leg)),
        }
    }
}

/// The ticks in which one leg goes forward and one comes back, but for the last of them.
struct Steady<'w, 's, 'c, 'a> {
    way: &'w mut Way<'s, 'c, 'a>,
    order: Interleaved,
    /// Ticks after which all comes round.
    turn: usize,
    /// Those that were run; a dry run leaves out some.
    taken: u64,
}

impl Way<'_, '_, '_> {
    /// All micro-batches, through every run of layers.
    pub fn interleaved(&mut self, order: Interleaved) -> Result<(), StepError> {
        let (ahead, legs) = (order.ahead(), order.legs());
        if order.micro_batches > MOST_INTERLEAVED {
            return Err(StepError::Invariant { what: "interleaved stages have too many micro-batches" });
        }
        if !order.micro_batches.is_multiple_of(order.stages) {
            let (micro_batches, stages) = (order.micro_batches, order.stages as u32);
            return Err(StepError::UnevenGroups { micro_batches, stages });
        }
        let first = 1 + ahead.min(legs);
        (0..first).try_for_each(|tick| self.tick(order, tick))?;
        // The last of those with a leg in both directions is followed by none that goes forward.
        let steady = legs.saturating_sub(ahead + 1);
        let device = self.trainer.device;
        let turn = order.turn().saturating_mul(order.turns_of_places());
        // One that is longer than all of them never comes round.
        let turn = usize::try_from(turn.min(steady + 1)).unwrap_or(usize::MAX / 16);
        device.repeat(steady, Steady { way: self, order, turn, taken: 0 })?;
        (first + steady..order.ticks()).try_for_each(|tick| self.tick(order, tick))
    }

    fn tick(&mut self, order: Interleaved, number: u64) -> Result<(), StepError> {
        self.trainer.device.enter(Phase::Forward, None);
        let tick = order.tick(number);
        let forward = tick.forward.map(|leg| self.forward(leg.run, leg.micro_batch)).transpose()?;
        let backward = tick.backward.map(|leg| self.backward(leg.run, leg.micro_batch)).transpose()?;
        let front = |leg: Leg| Ok::<_, StepError>((Side::Next, self.front(leg.run)?));
        let back = |leg: Leg| self.back(leg.run, 0);
        let next_back = |leg: Leg| {
            // Behind the one that comes back in this tick.
            let behind = usize::from(tick.backward.is_some_and(|now| now.run == leg.run));
            Ok::<_, StepError>((Side::Next, self.back(leg.run, behind)?))
        };
        let onwards = Exchange {
            send: tick.passes_on.map(front).transpose()?,
            receive: tick.takes_up.map(|_| (Side::Previous, 0)),
        };
        let backwards = Exchange {
            send: tick.gives_back.map(back).transpose()?.map(|lane| (Side::Previous, lane)),
            receive: tick.gets_back.map(next_back).transpose()?,
        };
        let done = tick.backward.map(back).transpose()?.map(|lane| Slot::Done { lane });
        let slots = [forward, backward, onwards.slot(), backwards.slot(), done];
        let slots: Vec<Slot> = slots.into_iter().flatten().collect();
        if !slots.is_empty() {
            let next = order.tick(number + 1);
            let forward = next.forward.map(|leg| Slot::Forward(self.leg(leg.run, 0, leg.micro_batch)));
            let backward = next.backward.map(|leg| Slot::Backward(self.leg(leg.run, 0, leg.micro_batch)));
            self.perform_before(&slots, forward.or(backward).as_ref())?;
        }
        if let Some(leg) = tick.backward {
            self.done(leg.run);
        }
        Ok(())
    }
}

impl Iterations for Steady<'_, '_, '_, '_> {
    type Error = StepError;

    fn run(&mut self, index: u64) -> Result<(), StepError> {
        self.taken += 1;
        self.way.tick(self.order, 1 + self.order.ahead() + index)
    }

    fn state(&self) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        (self.way.trainer.state_of_passes(), self.taken % self.order.turn()).hash(&mut hasher);
        self.way.hash_places(&mut hasher);
        Some(hasher.finish())
    }

    fn turn(&self) -> usize {
        self.turn
    }

    fn known(&mut self) -> Option<&mut KnownRounds> {
        Some(&mut self.way.trainer.known_passes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stages, rounds and micro-batches.
    const SHAPES: [[u64; 3]; 9] =
        [[2, 2, 2], [2, 2, 8], [2, 3, 4], [2, 5, 2], [3, 2, 3], [3, 2, 9], [4, 2, 8], [4, 3, 4], [5, 4, 20]];

    fn orders([stages, rounds, micro_batches]: [u64; 3]) -> Vec<Interleaved> {
        (0..stages).map(|number| Interleaved { number, stages, rounds, micro_batches }).collect()
    }

    /// The legs of a rank in a direction, with the ticks in which it takes them.
    fn legs(order: Interleaved, of: fn(Tick) -> Option<Leg>) -> Vec<(u64, Leg)> {
        (0..order.ticks()).filter_map(|tick| Some((tick, of(order.tick(tick))?))).collect()
    }

    #[test]
    fn each_run_has_every_micro_batch_once_in_their_order() {
        for shape in SHAPES {
            for order in orders(shape) {
                for of in [|tick: Tick| tick.forward, |tick: Tick| tick.backward] {
                    for run in 0..order.rounds as usize {
                        let own = legs(order, of).into_iter().filter(|(_, leg)| leg.run == run);
                        let own: Vec<u64> = own.map(|(_, leg)| leg.micro_batch).collect();
                        assert_eq!(own, (0..order.micro_batches).collect::<Vec<_>>(), "{order:?}");
                    }
                }
            }
        }
    }

    /// Whatever somebody sends at a moment the neighbour receives at the same moment, one tick before it needs it; and what comes back
    /// has gone forward.
    #[test]
    fn ranks_go_in_step() {
        for shape in SHAPES {
            let orders = orders(shape);
            let stages = orders.len();
            for (rank, order) in orders.iter().enumerate() {
                let [next, previous] = [(rank + 1) % stages, (rank + stages - 1) % stages];
                let (mut forward, mut there) = (HashSet::new(), HashSet::new());
                // The first rank's ticks begin first, each other's one later than those of the rank before it.
                for moment in 0..order.ticks() + stages as u64 {
                    let of = |rank: usize| {
                        let tick = moment.checked_sub(rank as u64);
                        tick.map(|tick| orders[rank].tick(tick))
                    };
                    let Some(own) = of(rank) else { continue };
                    let (behind, before) = (of(next), of(previous));
                    let run = |leg: Leg, further: bool| Leg { run: leg.run + usize::from(further), ..leg };
                    let on = own.passes_on.map(|leg| run(leg, next == 0));
                    assert_eq!(on, behind.and_then(|tick| tick.takes_up), "{order:?} {moment}");
                    let back = own.gives_back.map(|leg| Leg { run: leg.run - usize::from(rank == 0), ..leg });
                    assert_eq!(back, before.and_then(|tick| tick.gets_back), "{order:?} {moment}");
                    let key = |leg: Leg| (leg.run, leg.micro_batch);
                    forward.extend(own.forward.map(key));
                    there.extend(own.forward.filter(|leg| order.ends(leg)).map(key));
                    assert!(
                        own.backward
                            .is_none_or(|leg| forward.contains(&key(leg)) && there.contains(&key(leg)))
                    );
                    there.extend(own.gets_back.map(key));
                }
            }
        }
    }

    #[test]
    fn places_come_round() {
        let turns = |shape| orders(shape).into_iter().map(Interleaved::turns_of_places).collect::<Vec<_>>();
        assert_eq!((turns([2, 2, 8]), turns([3, 3, 9])), (vec![5, 3], vec![24, 2, 12]));
        assert_eq!(turns([4, 2, 8]), [11, 9, 7, 5]);
    }

    /// Megatron's warm-up, and no more than that under way.
    #[test]
    fn legs_are_ahead_by_the_warm_up() {
        let ahead = |shape| orders(shape).into_iter().map(Interleaved::ahead).collect::<Vec<_>>();
        assert_eq!((ahead([4, 2, 8]), ahead([2, 3, 4])), (vec![10, 8, 6, 4], vec![6, 4]));
        for shape in SHAPES {
            for order in orders(shape) {
                let under_way = |tick: u64| {
                    let count = |of| legs(order, of).into_iter().filter(|(at, _)| *at <= tick).count() as u64;
                    count(|tick| tick.forward) - count(|tick| tick.backward)
                };
                let most = (0..order.ticks()).map(under_way).max().unwrap();
                assert_eq!(most, order.ahead().min(order.legs()), "{order:?}");
            }
        }
    }
}
