//! The Pareto front of a search: points of which none takes less memory, less time and loses less than another.

use serde::Serialize;

use super::space::Point;
use super::walk::{Made, Walk};
use super::weigh::{Aim, Merit, Pieces};
use crate::config::{Quality, RawConfig};

/// Lines between the least memory and the most for which a front has a point looked for.
const LINES: u32 = 16;
/// Runs for each of them and each combination of coupled axes.
const WAVES: usize = 3;
/// What is not better by this share is not run.
const BETTER: f64 = 0.985;

/// A point of the front: nothing that was run takes less memory, is faster and loses less.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FrontPoint {
    /// Bytes of the device's arena.
    pub device_peak_bytes: u64,
    /// Seconds of an optimizer step.
    pub step_seconds: f64,
    /// Tokens over that time.
    pub tokens_per_second: f64,
    /// The least class that allows it.
    pub quality: Quality,
    /// The configuration, with nothing left open: it can be run.
    pub config: RawConfig,
}

impl Walk<'_> {
    /// Runs points all along the front of every class that is allowed.
    pub fn along_the_front(&mut self, quality: Quality, room: u64) {
        for class in Quality::ALL.iter().copied().filter(|class| *class <= quality) {
            let fastest = self.aim(Merit::Seconds, room, class);
            let all: Vec<Pieces> = self.measured.clone();
            let mut own: Vec<Pieces> = all.into_iter().filter(|pieces| self.is_of_class(pieces, class)).collect();
            if own.is_empty() {
                // No walk has come by here: none was as fast.
                let roots = self.space.roots.iter().filter_map(|root| Some((*root, self.made(root)?.footprint.seconds())));
                let roots = roots.filter(|(root, _)| self.space.quality(root) <= class);
                let Some((root, _)) = roots.min_by(|(_, a), (_, b)| a.total_cmp(b)) else { continue };
                self.from(root, &fastest);
                own.extend(self.measured.last().cloned());
            }
            let smallest = Aim { merit: Merit::Bytes, ..fastest };
            for pieces in &own {
                self.follow(pieces, &smallest);
            }
            let bytes = |made: &Made| made.footprint.under_the_line(&self.limits);
            let fitting = self.all().filter(|(point, made)| made.fits && self.space.quality(point) <= class);
            let all = fitting.map(|(_, made)| bytes(made));
            let (least, most) = all.fold((f64::INFINITY, 0.0f64), |(least, most), b| (least.min(b), most.max(b)));
            for line in (0..LINES).filter(|_| least.is_finite()) {
                let share = f64::from(line) / f64::from(LINES - 1);
                let aim = Aim { room: least * (most / least).powf(share), ..fastest };
                for pieces in &own {
                    self.follow(pieces, &aim);
                }
            }
        }
    }

    /// Whether pieces were measured where a class is.
    fn is_of_class(&self, pieces: &Pieces, class: Quality) -> bool {
        self.space.roots.iter().any(|root| self.is_of(&pieces.anchor, root) && self.space.quality(root) <= class)
    }

    /// The best that pieces say there is for an aim, run and corrected.
    fn follow(&mut self, pieces: &Pieces, aim: &Aim) {
        let mut base = pieces.anchor;
        for _ in 0..WAVES {
            let best = self.best(aim, |_| true);
            let cutoff = best.map_or(f64::INFINITY, |(_, best)| aim.merit(best.footprint) * BETTER);
            let next = self.estimated(pieces, base, aim, cutoff);
            let Some(first) = next.first().copied() else { return };
            self.run(&[first]);
            base = if self.made(&first).is_some() { first } else { base };
        }
    }

    /// The points that no other one beats, from the least memory on.
    pub fn front(&self) -> Vec<(Point, Made)> {
        let fitting: Vec<(Point, Made, Quality)> = self
            .all()
            .filter(|(_, made)| made.fits)
            .map(|(point, made)| (*point, *made, self.space.quality(point)))
            .collect();
        let key = |(_, made, quality): &(Point, Made, Quality)| (made.device_bytes, made.footprint.seconds(), *quality);
        let mut front: Vec<(Point, Made, Quality)> = Vec::new();
        for own in &fitting {
            let (bytes, seconds, quality) = key(own);
            let beaten = fitting.iter().any(|other| {
                let (b, s, q) = key(other);
                b <= bytes && s <= seconds && q <= quality && (b, s, q) != (bytes, seconds, quality)
            });
            let known = front.iter().any(|other| key(other) == (bytes, seconds, quality));
            if !beaten && !known {
                front.push(*own);
            }
        }
        front.sort_by(|a, b| {
            let (a, b) = (key(a), key(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2))
        });
        front.into_iter().map(|(point, made, _)| (point, made)).collect()
    }
}
