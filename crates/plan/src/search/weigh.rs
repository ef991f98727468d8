//! Points put together from pieces: of all combinations of an axis' values, those that are estimated best, by branch and bound over the
//! estimates. Nothing is run here.

use super::footprint::Footprint;
use super::space::Point;
use crate::config::Quality;
use crate::limits::Limits;

/// Nodes of a tree that are looked at, at most: what is best then counts.
const MOST_NODES: u64 = 60_000;

/// What is to be least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Merit {
    Seconds,
    /// Bytes under the line; seconds where these are the same.
    Bytes,
    /// What is over the line.
    Excess,
}

/// What a point has to keep to, and what makes one better.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aim {
    pub merit: Merit,
    pub limits: Limits,
    /// Bytes under the line.
    pub room: f64,
    /// The class of what may be chosen.
    pub quality: Quality,
}

impl Aim {
    /// Whether what is needed is there.
    pub fn allows(&self, footprint: Footprint) -> bool {
        self.merit == Merit::Excess || footprint.over(&self.limits, self.room) <= 0.0
    }

    /// The less, the better.
    pub fn merit(&self, footprint: Footprint) -> f64 {
        match self.merit {
            Merit::Seconds => footprint.seconds(),
            Merit::Bytes => footprint.under_the_line(&self.limits),
            Merit::Excess => footprint.over(&self.limits, self.room),
        }
    }

    /// What decides between points of the same merit.
    pub fn second(&self, footprint: Footprint) -> f64 {
        match self.merit {
            Merit::Seconds => footprint.under_the_line(&self.limits),
            Merit::Bytes | Merit::Excess => footprint.seconds(),
        }
    }
}

/// A value of an axis, or of two that belong together, and what it changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Axes and values; twice the same where there is one.
    pub set: [(usize, u16); 2],
    pub quality: Quality,
    pub change: Footprint,
}

impl Piece {
    /// Whether a point has it.
    pub fn is_of(&self, point: &Point) -> bool {
        self.set.iter().all(|(axis, value)| point.get(*axis).is_none_or(|own| own == value))
    }
}

/// The pieces of each axis.
#[derive(Clone)]
pub(super) struct Pieces {
    /// The point that they were measured at.
    pub anchor: Point,
    /// Of an axis each, or of two that belong together.
    pub options: Vec<Vec<Piece>>,
    /// What was run of the two that do: values on both, and what they change.
    pub ends: Vec<(u16, u16, Footprint)>,
}

/// A point, and what it is estimated to take.
pub(super) type Estimate = (Point, Footprint);

/// Up to `count` points of which none is among `known`, the best first; all better than `cutoff`. And how many nodes were looked at.
pub(super) fn weighed(
    pieces: &Pieces,
    base: (Point, Footprint),
    aim: &Aim,
    cutoff: f64,
    count: usize,
    known: &dyn Fn(&Point) -> bool,
) -> (Vec<Estimate>, u64) {
    // The estimate of the plain anchor, such that the base's is exact.
    let (at, mut start) = base;
    for options in &pieces.options {
        let own = options.iter().find(|piece| piece.is_of(&at));
        start = start.less(own.map_or(Footprint::default(), |piece| piece.change));
    }
    let mut axes: Vec<Vec<Piece>> = pieces.options.clone();
    for options in &mut axes {
        options.retain(|piece| piece.quality <= aim.quality);
        options.sort_by(|a, b| aim.merit(start.plus(a.change)).total_cmp(&aim.merit(start.plus(b.change))));
    }
    // What decides most comes first.
    let spread = |options: &[Piece]| {
        let all = options.iter().map(|piece| start.plus(piece.change).under_the_line(&aim.limits));
        let (least, most) = all.fold((f64::INFINITY, 0.0f64), |(l, m), x| (l.min(x), m.max(x)));
        most - least
    };
    axes.sort_by(|a, b| spread(b).total_cmp(&spread(a)));
    let mut rest = vec![Footprint::default()];
    for options in axes.iter().rev() {
        let least = options.iter().map(|piece| piece.change).reduce(Footprint::least).unwrap_or_default();
        rest.push(rest.last().copied().unwrap_or_default().plus(least));
    }
    rest.reverse();
    let mut tree = Tree { axes: &axes, rest: &rest, aim, count, known, nodes: 0, cutoff, best: Vec::new() };
    tree.branch(0, at, start);
    (tree.best, tree.nodes)
}

struct Tree<'a> {
    axes: &'a [Vec<Piece>],
    /// What all axes from each on change at least.
    rest: &'a [Footprint],
    aim: &'a Aim,
    count: usize,
    known: &'a dyn Fn(&Point) -> bool,
    nodes: u64,
    cutoff: f64,
    best: Vec<Estimate>,
}

impl Tree<'_> {
    fn branch(&mut self, depth: usize, point: Point, footprint: Footprint) {
        let Some(options) = self.axes.get(depth) else {
            return self.leaf(point, footprint);
        };
        let rest = self.rest.get(depth + 1).copied().unwrap_or_default();
        for piece in options {
            if self.nodes >= MOST_NODES {
                return;
            }
            self.nodes += 1;
            let own = footprint.plus(piece.change);
            let least = own.plus(rest);
            if !self.aim.allows(least) || self.aim.merit(least) >= self.cutoff {
                continue;
            }
            let mut point = point;
            for (axis, value) in piece.set {
                if let Some(place) = point.get_mut(axis) {
                    *place = value;
                }
            }
            self.branch(depth + 1, point, own);
        }
    }

    fn leaf(&mut self, point: Point, footprint: Footprint) {
        if (self.known)(&point) {
            return;
        }
        let aim = self.aim;
        let rank = |(_, own): &Estimate| (aim.merit(*own), aim.second(*own));
        let place = self.best.partition_point(|other| {
            let (one, other) = (rank(other), rank(&(point, footprint)));
            one.0.total_cmp(&other.0).then(one.1.total_cmp(&other.1)).is_le()
        });
        self.best.insert(place, (point, footprint));
        if self.best.len() > self.count {
            self.best.pop();
        }
        if self.best.len() == self.count
            && let Some(last) = self.best.last()
        {
            self.cutoff = self.cutoff.min(rank(last).0);
        }
    }
}
