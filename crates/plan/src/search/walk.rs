//! The walk through a space: from the fastest point of each combination of coupled axes to the best that keeps to the limits. At every
//! turn the points that pieces say are best are run dry, and what they take corrects the estimates, until nothing is estimated better
//! than what was found.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use plimsoll_device::cpu::at_once;
use plimsoll_memory::Tier;
use plimsoll_step::{Checkpointing, Offload};

use super::footprint::Footprint;
use super::space::{LIGHT, Point, Space};
use super::weigh::{Aim, Estimate, Merit, Pieces, weighed};
use crate::bounds::least_in_segments;
use crate::config::Quality;
use crate::limits::Limits;
use crate::resolve::Choice;
use crate::runs::{DryRuns, Wanted, threads};
use crate::time::Rates;

/// Points that are run at a time, whatever the number of threads.
const WAVE: usize = 4;
/// Waves from one measurement of pieces to the next, and measurements from the first combination of coupled axes and from the best point.
const WAVES: usize = 12;
const TURNS: usize = 2;
/// Waves that bring nothing, after which there is an end.
const IDLE: usize = 2;
/// What comes as near as this to the best is looked at with pieces of its own.
const NEAR: f64 = 1.1;
/// A combination of coupled axes whose plainest point is slower than the best, were it slowed down by this share of what others are slowed down
/// under the line, is not walked.
const SLOWER: f64 = 0.25;
/// What is not faster by this share is not looked for.
const WORTH: f64 = 0.998;
/// Dry runs after which no further combination of coupled axes is begun.
const MOST_RUNS: usize = 500;

/// How long a dry run takes beside others: most where layers are checkpointed in segments, more where more comes and goes.
fn length((settings, accumulation): &Wanted) -> (bool, usize, u64) {
    let segments = matches!(settings.checkpointing, Checkpointing::Sqrt | Checkpointing::Every(2..));
    let Offload { parameters, gradients, optimizer, activations, .. } = settings.offload;
    let below =
        [parameters, gradients, optimizer, activations].into_iter().filter(|tier| *tier != Tier::Device);
    (segments, below.count(), settings.micro_batches_per_pass.min(*accumulation))
}

/// A point that was run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Made {
    pub footprint: Footprint,
    pub device_bytes: u64,
    pub step_seconds: f64,
    pub tokens_per_second: f64,
    /// Bytes of the device that the same step checkpointed in segments takes at least, where this one is checkpointed layer by layer.
    pub in_segments: Option<u64>,
    /// Whether it keeps to every limit.
    pub fits: bool,
}

/// What is known of a space.
pub(super) struct Walk<'a> {
    pub space: Space<'a>,
    rates: &'a Rates,
    /// What is run without a search.
    pub runs: DryRuns<'a>,
    pub limits: Limits,
    threads: usize,
    made: HashMap<Point, Option<Made>>,
    /// Points that could be run, in order.
    pub order: Vec<Point>,
    /// Values of which it is known whether they are of use, and those that are.
    seen: BTreeSet<(usize, u16)>,
    worth: BTreeSet<(usize, u16)>,
    /// Pieces that were measured.
    pub measured: Vec<Pieces>,
    /// Estimates that were made.
    pub weighed: u64,
}

impl<'a> Walk<'a> {
    pub fn new(space: Space<'a>, rates: &'a Rates, limits: Limits) -> Walk<'a> {
        Walk {
            runs: DryRuns::new(space.spec, rates),
            space,
            rates,
            limits,
            threads: threads(),
            made: HashMap::new(),
            order: Vec::new(),
            seen: BTreeSet::new(),
            worth: BTreeSet::new(),
            measured: Vec::new(),
            weighed: 0,
        }
    }

    /// The same on so many threads.
    #[cfg(test)]
    pub fn on_threads(self, threads: usize) -> Walk<'a> {
        Walk { threads, ..self }
    }

    pub fn made(&self, point: &Point) -> Option<&Made> {
        self.made.get(point)?.as_ref()
    }

    /// All that were run.
    pub fn all(&self) -> impl Iterator<Item = (&Point, &Made)> {
        self.order.iter().filter_map(|point| Some((point, self.made(point)?)))
    }

    /// Runs points dry that were not.
    pub fn run(&mut self, points: &[Point]) {
        let mut missing: Vec<Point> = Vec::new();
        for point in points {
            if !self.made.contains_key(point) && !missing.contains(point) {
                missing.push(*point);
            }
        }
        let (space, rates, limits, runs) = (&self.space, self.rates, self.limits, &self.runs);
        let wanted: Vec<_> = missing.iter().map(|point| space.wanted(point)).collect();
        // Those that take longest begin first: nobody waits long for the last one.
        let mut turns: Vec<usize> = (0..missing.len()).collect();
        turns.sort_by_key(|place| std::cmp::Reverse(wanted.get(*place).and_then(Option::as_ref).map(length)));
        let made = at_once(&turns, self.threads, |place| {
            let (settings, accumulation) = wanted.get(*place)?.clone()?;
            let choice = match runs.find(&settings, accumulation) {
                Some(known) => known,
                None => {
                    Arc::new(Choice::within(space.spec, settings, accumulation, rates, Some(limits)).ok()?)
                }
            };
            Some(Made {
                footprint: Footprint::of(&choice, &limits),
                device_bytes: choice.peak_bytes(),
                step_seconds: choice.time.step_seconds,
                tokens_per_second: choice.time.tokens_per_second,
                in_segments: least_in_segments(space.spec, &choice),
                fits: choice.whole && limits.allow(&choice),
            })
        });
        let mut made: Vec<(usize, Option<Made>)> = turns.into_iter().zip(made).collect();
        made.sort_unstable_by_key(|(place, _)| *place);
        for (point, (_, made)) in missing.into_iter().zip(made) {
            if made.is_some() {
                self.order.push(point);
            }
            self.made.insert(point, made);
        }
    }

    /// Whether a value may be of use: it is not known to take more of everything than another.
    pub fn is_worth(&self, axis: usize, value: u16) -> bool {
        !self.seen.contains(&(axis, value)) || self.worth.contains(&(axis, value))
    }

    /// Notes which values of an axis are of use, beside each other.
    pub fn note_worth(&mut self, axis: usize, changes: &[(u16, Footprint)]) {
        let quality = |value: u16| {
            self.space.axes.get(axis).and_then(|all| all.get(usize::from(value))).map(|value| value.quality)
        };
        for (value, change) in changes {
            let beaten = changes.iter().any(|(other, less)| {
                let alike = less.is_within(*change) && quality(*other) <= quality(*value);
                other != value && alike && (!change.is_within(*less) || other < value)
            });
            if !beaten {
                self.worth.insert((axis, *value));
            }
        }
        self.seen.extend(changes.iter().map(|(value, _)| (axis, *value)));
    }

    /// What a walk for a goal aims at, with so much room.
    pub fn aim(&self, merit: Merit, room: u64, quality: Quality) -> Aim {
        let room = if room == u64::MAX { f64::INFINITY } else { room as f64 };
        Aim { merit, limits: self.limits, room, quality }
    }

    /// Whether a point that was run keeps to an aim.
    pub fn keeps(&self, made: &Made, aim: &Aim) -> bool {
        made.fits && aim.allows(made.footprint)
    }

    /// The best of these points that keeps to an aim.
    pub fn best(&self, aim: &Aim, among: impl Fn(&Point) -> bool) -> Option<(Point, Made)> {
        let fitting = self.all().filter(|(point, made)| {
            among(point) && self.keeps(made, aim) && self.space.quality(point) <= aim.quality
        });
        let rank = |made: &Made| (aim.merit(made.footprint), aim.second(made.footprint));
        let best = fitting.min_by(|(_, a), (_, b)| {
            let (a, b) = (rank(a), rank(b));
            a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        best.map(|(point, made)| (*point, *made))
    }

    /// Walks everywhere.
    pub fn everywhere(&mut self, aim: &Aim) {
        let allowed = |root: &Point| self.space.quality(root) <= aim.quality;
        let roots: Vec<Point> = self.space.roots.iter().copied().filter(allowed).collect();
        self.run(&roots);
        let mut order: Vec<(f64, Point)> =
            roots.iter().filter_map(|root| Some((self.made(root)?.footprint.seconds(), *root))).collect();
        order.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let (most_runs, turns) = if self.space.is_long { (MOST_RUNS / 4, 1) } else { (MOST_RUNS, TURNS) };
        // By how much the best of a root was slower than its plainest point, at least.
        let mut slower: f64 = f64::INFINITY;
        for (number, &(seconds, root)) in order.iter().enumerate() {
            let best = self.best(aim, |_| true);
            let share = if slower.is_finite() { 1.0 + SLOWER * (slower - 1.0) } else { 0.0 };
            let hopeless = |seconds: f64| {
                let beaten = |(_, best): &(Point, Made)| seconds * share >= best.footprint.seconds();
                aim.merit == Merit::Seconds && best.as_ref().is_some_and(beaten)
            };
            if hopeless(seconds) || self.order.len() >= most_runs {
                continue;
            }
            match (best, self.measured.last().cloned()) {
                (Some((best, _)), Some(pieces)) => {
                    let later = order.iter().skip(number).filter(|(seconds, _)| !hopeless(*seconds));
                    let seeds: Vec<Point> =
                        later.take(WAVE).map(|(_, root)| self.moved(best, root)).collect();
                    // Where the best stays what it is, as it mostly does, they are those of the next turns.
                    if seeds.first().is_some_and(|seed| !self.made.contains_key(seed)) {
                        self.run(&seeds);
                    }
                    self.walk_beside(best, pieces, root, aim);
                }
                _ => self.walk_from(root, aim, turns),
            }
            if let Some((_, own)) = self.best(aim, |point| self.is_of(point, &root)) {
                slower = slower.min(own.footprint.seconds() / seconds);
            }
        }
        if let Some((best, _)) = self.best(aim, |_| true) {
            // Pieces of its own say nearly always what a second turn would.
            self.walk_from(best, aim, 1);
        }
    }

    pub fn is_of(&self, point: &Point, root: &Point) -> bool {
        point.iter().take(self.space.coupled).eq(root.iter().take(self.space.coupled))
    }

    /// A point with a root's values on the coupled axes.
    pub fn moved(&self, mut point: Point, root: &Point) -> Point {
        for (place, own) in point.iter_mut().zip(root).take(self.space.coupled) {
            *place = *own;
        }
        point
    }

    /// From where another root has its best point, with that one's pieces; with pieces of its own where it comes near.
    fn walk_beside(&mut self, best: Point, pieces: Pieces, root: Point, aim: &Aim) {
        let seed = self.moved(best, &root);
        self.run(&[seed]);
        let anchor = if self.made(&seed).is_some() { seed } else { root };
        self.approach(&Pieces { anchor, ..pieces }, aim);
        let Some(nearest) = self.nearest(&root, aim) else { return };
        let merit = |point: &Point| self.made(point).map_or(f64::INFINITY, |made| aim.merit(made.footprint));
        let is_near = |(best, _): (Point, Made)| merit(&nearest) <= merit(&best) * NEAR;
        if self.best(aim, |_| true).is_none_or(is_near) {
            self.walk_from(nearest, aim, 1);
        }
    }

    /// From a point, or from what takes little where that does not fit, to the best one with its values on the coupled axes.
    pub fn walk_from(&mut self, root: Point, aim: &Aim, turns: usize) {
        let mut anchor = root;
        if self.made(&root).is_none_or(|made| !self.keeps(made, aim)) {
            // Segments take longest: they are run where nothing else is light enough.
            for form in LIGHT {
                let light = self.space.light(&root, &[form]);
                self.run(&light);
                let keeps = |point: &Point| self.made(point).is_some_and(|made| self.keeps(made, aim));
                if light.iter().any(keeps) {
                    break;
                }
            }
            anchor = self.nearest(&root, aim).unwrap_or(root);
        }
        for _ in 0..turns {
            let Some(pieces) = self.measured(anchor) else { return };
            self.approach(&pieces, aim);
            let Some(next) = self.nearest(&root, aim) else { return };
            let fine = self.finer(&pieces, &next);
            self.approach(&fine, aim);
            let Some(next) = self.nearest(&root, aim).filter(|next| *next != anchor) else { return };
            anchor = next;
        }
    }

    /// The best point of a root, or the one that is nearest to fitting.
    fn nearest(&self, root: &Point, aim: &Aim) -> Option<Point> {
        if let Some((best, _)) = self.best(aim, |point| self.is_of(point, root)) {
            return Some(best);
        }
        let own = self.all().filter(|(point, _)| self.is_of(point, root));
        let own = own.filter(|(point, _)| self.space.quality(point) <= aim.quality);
        let over = |made: &Made| made.footprint.over(&aim.limits, aim.room);
        own.min_by(|(_, a), (_, b)| over(a).total_cmp(&over(b))).map(|(point, _)| *point)
    }

    /// Runs what these pieces say is best, until nothing is estimated better than what was found.
    pub fn approach(&mut self, pieces: &Pieces, aim: &Aim) {
        let (mut base, mut idle) = (pieces.anchor, 0);
        for _ in 0..WAVES {
            let best = self.best(aim, |_| true);
            let own = self.nearest(&pieces.anchor, aim);
            let own = own.and_then(|point| Some((point, *self.made(&point)?)));
            let cutoff = best.as_ref().map_or(f64::INFINITY, |(_, best)| aim.merit(best.footprint) * WORTH);
            let mut next = self.estimated(pieces, base, aim, cutoff, WAVE);
            let fits = own.as_ref().is_some_and(|(_, made)| self.keeps(made, aim));
            if next.is_empty() && !fits {
                let nearer = Aim { merit: Merit::Excess, ..*aim };
                let over = own.map_or(f64::INFINITY, |(_, made)| nearer.merit(made.footprint) * WORTH);
                next = self.estimated(pieces, base, &nearer, over, WAVE);
            }
            if next.is_empty() {
                return;
            }
            let next: Vec<Point> = next.into_iter().map(|(point, _)| point).collect();
            self.run(&next);
            let known = next.iter().find(|point| self.made(point).is_some());
            base = known.copied().unwrap_or(base);
            let same = fits && self.nearest(&pieces.anchor, aim) == own.map(|(point, _)| point);
            idle = if same { idle + 1 } else { 0 };
            if idle == IDLE {
                return;
            }
        }
    }

    /// So many of the points that are estimated best and were not run.
    pub fn estimated(
        &mut self,
        pieces: &Pieces,
        base: Point,
        aim: &Aim,
        cutoff: f64,
        count: usize,
    ) -> Vec<Estimate> {
        let Some(footprint) = self.made(&base).map(|made| made.footprint) else { return Vec::new() };
        let known = |point: &Point| self.made.contains_key(point);
        let (best, nodes) = weighed(pieces, (base, footprint), aim, cutoff, count, &known);
        self.weighed += nodes;
        best
    }
}
