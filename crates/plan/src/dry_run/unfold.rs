//! From what a model of fewer layers did to what the whole one does: each visit of the last layer before a gap is made again for
//! each layer that is missing. The same requests go to the same allocators, so that peaks are those of a run through all
//! layers, to the byte.
//!
//! That holds because no request depends on an address. The layers around a gap are checked to have done the same, request by request. A
//! loop that was counted is gone through once where it ends with the memory as it was when it began, in the whole model too. Where it
//! does not, as where micro-batches of a pipeline take each other's place, every round of it is gone through.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::iter::Peekable;
use std::ops::Range;
use std::slice;

use plimsoll_device::{Collective, Communicated, Scope, Tally, Times, Trace, Transferred};
use plimsoll_memory::{ALIGNMENT, Layout, Ledger, MemoryEvent, Phase, Piece, Replay, Tag, Tier};
use plimsoll_step::Numbers;

use super::fold::Fold;

/// What another unit's visit took is found by how far away that unit is, up to so many units; beyond, by which unit it is.
const NEAR: isize = 3;

/// What a run through all layers does.
pub(super) struct Unfolded {
    /// The ledgers of device, host and disk.
    pub ledgers: [Ledger; 3],
    /// What the missing layers add to the scopes that were asked for.
    pub added: Added,
}

/// What scopes add up to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Added {
    pub tally: Tally,
    pub moved: Transferred,
    pub times: Times,
    /// What of it is in the optimizer's phase.
    pub updates: Times,
}

/// Something that a scope does to memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Request {
    Take(Taken),
    /// Gives back what a visit took: the visit, and the number of the request among those with which it took something.
    Give(usize, usize),
    /// Memory is as it will be where iterations are counted: the number of the repeat.
    LoopBegins(usize),
    /// Iterations are counted.
    LoopEnds(usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Taken {
    tier: usize,
    bytes: u64,
    tag: Tag,
    name: &'static str,
    phase: Phase,
    /// The layer that it belongs to.
    owner: Option<u32>,
}

/// Scopes of one unit that follow each other, or one that is of none.
struct Visit {
    /// A layer, or layers that repeat together.
    unit: Option<usize>,
    /// Its number among the visits of its unit.
    nth: usize,
    scopes: Range<usize>,
    /// The number of requests that take.
    takes: usize,
}

/// A run through a part of the layers.
struct Folded<'a> {
    fold: &'a Fold,
    trace: &'a Trace,
    /// Parts that are measured and updated by themselves, of the layers that are missing.
    missing_parts: u64,
    visits: Vec<Visit>,
    /// What each scope requests.
    requests: Vec<Vec<Request>>,
}

/// What visits have taken and not given back, and the place of its arena.
struct Held {
    pieces: Vec<Option<(usize, Piece)>>,
    /// Places of pieces that were given back.
    free: Vec<u32>,
    /// Where each thing is that was taken, visit after visit.
    taken: Vec<u32>,
    /// Where in `taken` a visit begins, of visits that belong to no unit.
    visits: Vec<usize>,
    /// The same of units' visits, by the number of the visit and the place of the unit.
    units: Vec<Vec<usize>>,
}

impl Held {
    fn new(folded: &Folded<'_>) -> Held {
        let nths = folded.visits.iter().map(|visit| visit.nth + 1).max().unwrap_or(0);
        let places = folded.place(folded.fold.units.len());
        let (pieces, free, taken) = (Vec::new(), Vec::new(), Vec::new());
        let visits = vec![usize::MAX; folded.visits.len()];
        Held { pieces, free, taken, visits, units: vec![vec![usize::MAX; places]; nths] }
    }

    /// A visit begins: what is added from now on is what it takes.
    fn begin(&mut self, index: usize, place: Option<usize>, visit: &Visit) {
        let first = match place {
            None => self.visits.get_mut(index),
            Some(place) => self.units.get_mut(visit.nth).and_then(|places| places.get_mut(place)),
        };
        if let Some(first) = first {
            *first = self.taken.len();
        }
    }

    fn add(&mut self, tier: usize, piece: Piece) {
        let place = self.free.pop().unwrap_or(self.pieces.len() as u32);
        match self.pieces.get_mut(place as usize) {
            Some(free) => *free = Some((tier, piece)),
            None => self.pieces.push(Some((tier, piece))),
        }
        self.taken.push(place);
    }

    /// What a visit took, which is given back.
    fn take(
        &mut self,
        index: usize,
        unit: Option<usize>,
        visit: &Visit,
        place: usize,
    ) -> Option<(usize, Piece)> {
        let first = match unit {
            None => self.visits.get(index)?,
            Some(unit) => self.units.get(visit.nth)?.get(unit)?,
        };
        let slot = self.taken.get_mut(first.checked_add(place)?)?;
        let piece = self.pieces.get_mut(*slot as usize)?.take();
        self.free.push(std::mem::replace(slot, u32::MAX));
        piece
    }
}

/// A visit of the whole run: which one it is like, and by how many units its own comes later.
#[derive(Clone, Copy)]
struct Again {
    visit: usize,
    later: usize,
}

/// A round of a loop that is gone through again.
struct Round {
    /// The loop.
    index: usize,
    /// Where it begins in the order.
    first: usize,
    /// The visits of the round that was run.
    visits: Range<usize>,
    /// Which one it is, after the one that was run.
    number: u64,
    /// How many there are.
    times: u64,
}

impl Round {
    /// The visit that stands for one of the rounds before, from which something is given back.
    fn of_visit(&self, from: usize) -> usize {
        let length = self.visits.len().max(1);
        let now = from + length * usize::try_from(self.number).unwrap_or(usize::MAX / length);
        match now.checked_sub(self.visits.end) {
            None => now,
            Some(beyond) => self.visits.start + beyond % length,
        }
    }

    fn next(self) -> Option<Round> {
        (self.number < self.times).then(|| Round { number: self.number + 1, ..self })
    }
}

/// The whole run. `None` where the smaller one does not say what that is. `ledgers` are those of device, host and disk, which
/// recorded their events; costs are added up of the scopes `step`; `parts` are those whose norms are taken. `alignment` is that of
/// the device's arena.
pub(super) fn unfolded(
    fold: &Fold,
    trace: &Trace,
    ledgers: [&Ledger; 3],
    step: Range<usize>,
    parts: u64,
    alignment: u64,
) -> Option<Unfolded> {
    let folded = Folded::new(fold, trace, ledgers)?;
    for gap in &fold.gaps {
        folded.check_alike(gap.unit)?;
    }
    let ledgers = folded.run(&folded.order()?, parts + folded.missing_parts, alignment)?;
    let mut added = folded.added(step.clone());
    added.moved.sent = added.moved.sent.plus(folded.norms_sent(step, parts));
    Some(Unfolded { ledgers, added })
}

impl<'a> Folded<'a> {
    fn new(fold: &'a Fold, trace: &'a Trace, ledgers: [&Ledger; 3]) -> Option<Self> {
        let units = (0..).zip(&fold.units).flat_map(|(unit, layers)| layers.clone().map(move |_| unit));
        let units: Vec<usize> = units.collect();
        let unit_of = |layer: u32| units.get(layer as usize).copied();
        let mut visits: Vec<Visit> = Vec::new();
        let mut seen = vec![0; fold.units.len()];
        for (index, scope) in trace.scopes.iter().enumerate() {
            let unit = match scope.layer {
                Some(layer) => Some(unit_of(layer)?),
                None => None,
            };
            match visits.last_mut().filter(|last| unit.is_some() && last.unit == unit) {
                Some(last) => last.scopes.end = index + 1,
                None => {
                    let nth = unit.and_then(|unit| seen.get_mut(unit)).map_or(0, |seen| {
                        *seen += 1;
                        *seen - 1
                    });
                    visits.push(Visit { unit, nth, scopes: index..index + 1, takes: 0 });
                }
            }
        }
        let requests = requests(trace, ledgers, &mut visits)?;
        Some(Folded { fold, trace, missing_parts: fold.missing_parts(), visits, requests })
    }

    /// The scopes of a visit with what they request.
    fn scopes(&self, visit: &Visit) -> impl Iterator<Item = (&Scope, &Vec<Request>)> {
        let scopes = self.trace.scopes.iter().zip(&self.requests);
        scopes.skip(visit.scopes.start).take(visit.scopes.len())
    }

    /// Whether the units around a gap did the same at each visit: the one behind it, the one before, and the one before that.
    fn check_alike(&self, unit: usize) -> Option<()> {
        let all = |unit| self.visits.iter().filter(move |visit| visit.unit == Some(unit));
        let (last, others) = (all(unit), [all(unit.checked_sub(1)?), all(unit + 1)]);
        let last: Vec<&Visit> = last.collect();
        for other in others {
            let other: Vec<&Visit> = other.collect();
            let same = last.len() == other.len() && last.iter().zip(&other).all(|(a, b)| self.is_like(a, b));
            same.then_some(())?;
        }
        Some(())
    }

    fn is_like(&self, one: &Visit, other: &Visit) -> bool {
        let (Some(own), Some(others)) = (one.unit, other.unit) else { return false };
        let first = |unit: usize| self.fold.units.get(unit).map_or(0, |layers| layers.start);
        let layers = i64::from(first(others)) - i64::from(first(own));
        let units = others as isize - own as isize;
        let later = |layer: Option<u32>| layer.map(|layer| i64::from(layer) + layers);
        let layer = |layer: Option<u32>| layer.map(i64::from);
        let unit = |visit: usize| self.visits.get(visit).map(|visit| (visit.unit, visit.nth));
        let same = |a: &Request, b: &Request| match (a, b) {
            (Request::Take(a), Request::Take(b)) => {
                let owner = later(a.owner) == layer(b.owner) || a.owner == b.owner;
                owner && Taken { owner: None, ..*a } == Taken { owner: None, ..*b }
            }
            (Request::Give(a, place), Request::Give(b, other)) => {
                let (Some((Some(a), nth)), Some((Some(b), nth_of_b))) = (unit(*a), unit(*b)) else {
                    return false;
                };
                place == other && nth == nth_of_b && a as isize + units == b as isize
            }
            (Request::LoopBegins(_), Request::LoopBegins(_))
            | (Request::LoopEnds(_), Request::LoopEnds(_)) => true,
            _ => false,
        };
        one.nth == other.nth
            && one.scopes.len() == other.scopes.len()
            && self.scopes(one).zip(self.scopes(other)).all(|((a, of_a), (b, of_b))| {
                a.phase == b.phase
                    && later(a.layer) == layer(b.layer)
                    && (a.tally, a.moved) == (b.tally, b.moved)
                    && of_a.len() == of_b.len()
                    && of_a.iter().zip(of_b).all(|(a, b)| same(a, b))
            })
    }

    /// The visits of the whole run, in order: through a gap in the direction in which the visits go.
    fn order(&self) -> Option<Vec<Again>> {
        let unit = |index: Option<usize>| index.and_then(|index| self.visits.get(index)?.unit);
        let missing: usize = self.fold.gaps.iter().map(|gap| gap.times).sum();
        let rounds = self.visits.iter().map(|visit| visit.nth + 1).max().unwrap_or(0);
        let mut all = Vec::with_capacity(self.visits.len() + missing * rounds);
        for (visit, own) in self.visits.iter().enumerate() {
            let gap = self.fold.gaps.iter().find(|gap| own.unit == Some(gap.unit));
            let here = Again { visit, later: 0 };
            let Some(gap) = gap else {
                all.push(here);
                continue;
            };
            let missing = (1..=gap.times).map(|later| Again { visit, later });
            let comes_next = unit(Some(visit + 1)) == Some(gap.unit + 1);
            let came_before = unit(visit.checked_sub(1)) == Some(gap.unit + 1);
            match (came_before, comes_next) {
                (false, true) => all.extend(std::iter::once(here).chain(missing)),
                (true, false) => all.extend(missing.rev().chain([here])),
                _ => return None,
            }
        }
        Some(all)
    }

    /// The place of a unit among all units.
    fn place(&self, unit: usize) -> usize {
        let before = self.fold.gaps.iter().filter(|gap| gap.unit < unit);
        unit + before.map(|gap| gap.times).sum::<usize>()
    }

    /// Makes all requests.
    fn run(&self, order: &[Again], parts: u64, alignment: u64) -> Option<[Ledger; 3]> {
        let tiers = [(Tier::Device, alignment), (Tier::Host, ALIGNMENT), (Tier::Disk, ALIGNMENT)];
        let mut arenas = tiers.map(|(tier, alignment)| Replay::new(tier, alignment));
        let layouts = |arenas: &[Replay; 3]| arenas.each_ref().map(Replay::layout);
        let (mut held, all) = (Held::new(self), parts + self.fold.parts_elsewhere());
        let mut loops: HashMap<usize, ([Layout; 3], usize)> = HashMap::new();
        let (mut next, mut again) = (0, None::<Round>);
        while let Some(Again { visit: index, later }) = order.get(next) {
            let (place_in_order, visit) = (next, self.visits.get(*index)?);
            next += 1;
            let here = visit.unit.map(|unit| self.place(unit) + later);
            held.begin(*index, here, visit);
            for (_, requests) in self.scopes(visit) {
                let label = |layer: Option<u32>| self.layer(layer, visit, *later);
                let mut entered = [None; 3];
                for request in requests {
                    match *request {
                        Request::Take(Taken { tier, bytes, tag, name, phase, owner }) => {
                            let arena = arenas.get_mut(tier)?;
                            let entered = entered.get_mut(tier)?;
                            if *entered != Some((phase, owner)) {
                                arena.enter(phase, label(owner));
                                *entered = Some((phase, owner));
                            }
                            let bytes = match visit.unit {
                                Some(_) => bytes,
                                None => Numbers::bytes_under(name, parts, all).unwrap_or(bytes),
                            };
                            held.add(tier, arena.take(bytes, tag, name).ok()?);
                        }
                        Request::Give(from, place) => {
                            let from = again.as_ref().map_or(from, |round| round.of_visit(from));
                            let taken = self.visits.get(from)?;
                            let of = match taken.unit {
                                None => None,
                                Some(unit) => Some(self.place_from(visit, here, unit)?),
                            };
                            let (tier, piece) = held.take(from, of, taken, place)?;
                            arenas.get_mut(tier)?.give_back(piece);
                        }
                        Request::LoopBegins(index) => {
                            if again.is_none() {
                                loops.insert(index, (layouts(&arenas), place_in_order));
                            }
                        }
                        Request::LoopEnds(index) => {
                            let ended = layouts(&arenas);
                            let (begun, first) = loops.get(&index)?;
                            again = match again {
                                None if *begun == ended => None,
                                None => Some(self.round(index, order, *first, place_in_order)?),
                                Some(round) if round.index == index => round.next(),
                                // Loops within the round come round by themselves, as they did before.
                                round => round,
                            };
                            if let Some(round) = again.as_ref().filter(|round| round.index == index) {
                                next = round.first;
                            }
                        }
                    }
                }
            }
        }
        Some(arenas.map(Replay::into_ledger))
    }

    /// The second round of a loop that begins and ends at these places of the order; `None` where it does not do so with a visit.
    fn round(&self, index: usize, order: &[Again], first: usize, last: usize) -> Option<Round> {
        let repeat = self.trace.repeats.get(index)?;
        let (begin, end) = (order.get(first)?.visit, order.get(last)?.visit + 1);
        let first_event = |visit: usize| {
            let scope = self.visits.get(visit)?.scopes.start;
            self.trace.scopes.get(scope).map(|scope| scope.first_event)
        };
        let ends_with_visit = self.visits.get(end - 1)?.scopes.end == repeat.scope + 1;
        let whole = first_event(begin)? == repeat.like_event && ends_with_visit && repeat.times > 0;
        whole.then_some(Round { index, first, visits: begin..end, number: 1, times: repeat.times })
    }

    /// The place of a unit that a visit has to do with, which is itself at `here`.
    fn place_from(&self, visit: &Visit, here: Option<usize>, unit: usize) -> Option<usize> {
        if let (Some(own), Some(here)) = (visit.unit, here) {
            let away = unit as isize - own as isize;
            if away.abs() <= NEAR {
                return here.checked_add_signed(away);
            }
        }
        // From far away nobody knows which of the missing ones it is.
        let is_before_gap = self.fold.gaps.iter().any(|gap| gap.unit == unit);
        (!is_before_gap).then(|| self.place(unit))
    }

    /// The whole model's number of a layer, in a visit that is made again so many units later.
    fn layer(&self, layer: Option<u32>, visit: &Visit, later: usize) -> Option<u32> {
        let layer = layer?;
        let own = visit.unit.and_then(|unit| self.fold.units.get(unit)).filter(|own| own.contains(&layer));
        let further = own.map_or(0, |own| later as u32 * own.len() as u32);
        self.fold.layers.get(layer as usize).map(|number| number + further)
    }

    /// What ranks send each other more in these scopes when they agree on the norms of the missing layers too.
    fn norms_sent(&self, scopes: Range<usize>, parts: u64) -> Communicated {
        let is_total =
            |request: &&Request| matches!(request, Request::Take(taken) if taken.name == Numbers::TOTAL);
        let own = self.requests.get(scopes).unwrap_or_default();
        let times = own.iter().flatten().filter(is_total).count() as u64;
        let missing = Numbers::share_bytes(parts + self.missing_parts) - Numbers::share_bytes(parts);
        let mesh = self.fold.settings.ranks.mesh;
        let others = |ranks: u32| u64::from(ranks.saturating_sub(1));
        // In messages that were counted before.
        let shares = Communicated::of_many(
            Collective::AllReduce,
            times * others(self.fold.settings.sharers()) * missing,
            0,
        );
        let squares = self.missing_parts * size_of::<f32>() as u64;
        shares.plus(Communicated::of_many(
            Collective::AllGather,
            others(mesh.pipeline * mesh.parts()) * squares,
            0,
        ))
    }

    /// What the missing layers add to these scopes, and to iterations that were counted in them.
    fn added(&self, scopes: Range<usize>) -> Added {
        let mut added = Added::default();
        let within: Vec<_> =
            self.trace.repeats.iter().filter(|repeat| scopes.contains(&repeat.scope)).collect();
        for gap in &self.fold.gaps {
            for visit in self.visits.iter().filter(|visit| visit.unit == Some(gap.unit)) {
                for index in visit.scopes.clone() {
                    let Some(scope) = self.trace.scopes.get(index) else { continue };
                    // What is counted in the scope itself is part of what it adds.
                    let around =
                        within.iter().filter(|r| r.scope != index && r.round.contains(&scope.first_event));
                    let counted = around.fold(0u64, |all, repeat| all.saturating_add(repeat.times));
                    let times = counted.saturating_add(u64::from(scopes.contains(&index)));
                    let times = times.saturating_mul(gap.times as u64);
                    added.tally = added.tally.plus(scope.tally.times(times));
                    added.moved = added.moved.plus(scope.moved.times(times));
                    added.times = added.times.plus(scope.times, times as f64);
                    if scope.phase == Phase::Optimizer {
                        added.updates = added.updates.plus(scope.times, times as f64);
                    }
                }
            }
        }
        added
    }
}

/// What each scope requests, in order. What is given back is what was last taken at its address.
fn requests(trace: &Trace, ledgers: [&Ledger; 3], visits: &mut [Visit]) -> Option<Vec<Vec<Request>>> {
    let first_event = |scope: usize| trace.scopes.get(scope).map(|scope| scope.first_event);
    // Where loops begin and end: the scope, the event before which that is, ends before beginnings.
    let mut borders = Vec::new();
    let repeats = trace.repeats.iter().enumerate().filter(|(_, repeat)| repeat.like_event < repeat.event);
    for (index, repeat) in repeats {
        let begins = match first_event(repeat.scope)? <= repeat.like_event {
            true => repeat.scope,
            false => trace.scopes.partition_point(|s| s.first_event <= repeat.like_event).checked_sub(1)?,
        };
        borders.push((begins, repeat.like_event, 1, Request::LoopBegins(index)));
        borders.push((repeat.scope, repeat.event, 0, Request::LoopEnds(index)));
    }
    borders.sort_by_key(|(scope, event, order, _)| (*scope, *event, *order));
    let (mut events, mut borders) = (in_order(ledgers).peekable(), borders.into_iter().peekable());
    let mut live: HashMap<u64, (usize, usize), BuildHasherDefault<OfAddress>> = HashMap::default();
    let mut all = Vec::new();
    for (index, visit) in visits.iter_mut().enumerate() {
        for scope in visit.scopes.clone() {
            let end = first_event(scope + 1).unwrap_or(u64::MAX);
            let count = first_event(scope + 1).zip(first_event(scope)).map_or(0, |(end, first)| end - first);
            let mut own = Vec::with_capacity(count as usize);
            loop {
                let event = events.peek().filter(|(_, event)| event.number < end);
                let number = event.map_or(u64::MAX, |(_, event)| event.number);
                if let Some((.., border)) =
                    borders.next_if(|(of, before, ..)| *of == scope && *before <= number)
                {
                    own.push(border);
                    continue;
                }
                if event.is_none() {
                    break;
                }
                let (tier, event) = events.next()?;
                // Offsets are multiples of more than there are tiers.
                let address = event.offset + tier as u64;
                own.push(match event.delta > 0 {
                    true => {
                        live.insert(address, (index, visit.takes));
                        visit.takes += 1;
                        let MemoryEvent { tag, name, phase, owner, .. } = *event;
                        Request::Take(Taken { tier, bytes: event.delta as u64, tag, name, phase, owner })
                    }
                    false => {
                        let (visit, place) = live.remove(&address)?;
                        Request::Give(visit, place)
                    }
                });
            }
            all.push(own);
        }
    }
    events.next().is_none().then_some(all)
}

/// The events of several arenas that were numbered together, each with the place of its arena.
fn in_order(ledgers: [&Ledger; 3]) -> impl Iterator<Item = (usize, &MemoryEvent)> {
    let [mut device, mut host, mut disk] = ledgers.map(|ledger| ledger.events().iter().peekable());
    std::iter::from_fn(move || {
        let next = |events: &mut Peekable<slice::Iter<'_, MemoryEvent>>| {
            events.peek().map_or(u64::MAX, |event| event.number)
        };
        let [of_device, of_host, of_disk] = [next(&mut device), next(&mut host), next(&mut disk)];
        match of_device < of_host.min(of_disk) {
            true => device.next().map(|event| (0, event)),
            false if of_host < of_disk => host.next().map(|event| (1, event)),
            false => disk.next().map(|event| (2, event)),
        }
    })
}

/// A hash of one number, for the many addresses of a run: nobody chooses these so that they collide.
#[derive(Default)]
struct OfAddress(u64);

impl Hasher for OfAddress {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}
