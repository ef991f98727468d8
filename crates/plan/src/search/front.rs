//! The Pareto front of a search: points of which none takes less memory, less time and loses less than another.

use plimsoll_step::Checkpointing;
use serde::Serialize;

use super::space::{LIGHT, Point};
use super::walk::{Made, Walk};
use super::weigh::{Aim, Merit, Pieces};
use crate::config::{Quality, RawConfig};

/// Lines between the least memory and the most for which a front has a point looked for, closer and closer, and the runs after which no
/// further line is begun.
const LINES: [u32; 3] = [10, 20, 40];
const MOST_RUNS: usize = 80;
/// Corrections for each of them, and runs for each correction.
const WAVES: usize = 3;
const AT_ONCE: usize = 6;
/// Points of the same pieces that are run at a time where the best point of each would leave other threads without work.
const AT_LEAST: usize = 2;
/// Combinations of coupled axes that are looked at beside those that were measured.
const FURTHER: usize = 12;
/// Types and updates that have pieces of their own at the least memory.
const MEASURED: usize = 3;
/// What is not better by this share is not run.
const BETTER: f64 = 0.99;

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
    /// Whether it fills more of the load line than `memory.target_utilization` lets choices fill: it fits, and is not chosen.
    pub above_target: bool,
    /// The configuration, with nothing left open: it can be run.
    pub config: RawConfig,
}

impl Walk<'_> {
    /// Runs points all along the front of every class that is allowed.
    pub fn along_the_front(&mut self, quality: Quality, room: u64) {
        for class in Quality::ALL.iter().copied().filter(|class| *class <= quality) {
            let fastest = self.aim(Merit::Seconds, room, class);
            // Not every class, and nothing whose runs take long, is looked at closely.
            let closely = class == quality && !self.space.is_long;
            let pieces = self.along_ends(&fastest, closely);
            let most = self.order.len() + if closely { MOST_RUNS } else { MOST_RUNS / 4 };
            for lines in LINES {
                self.along_lines(&fastest, &pieces, lines, most);
            }
        }
    }

    /// Pieces of a class at the least memory, at the most and, where it is looked at closely, between them.
    fn along_ends(&mut self, fastest: &Aim, closely: bool) -> Vec<Pieces> {
        let roots: Vec<Point> = self.space.roots.clone();
        let roots: Vec<Point> =
            roots.into_iter().filter(|root| self.space.quality(root) <= fastest.quality).collect();
        let shortest = self.space.shortest(&roots);
        self.run_light(&shortest, fastest);
        let mut pieces: Vec<Pieces> = self.measured.clone();
        pieces.retain(|pieces| self.is_of_class(pieces, fastest.quality));
        let smallest = Aim { merit: Merit::Bytes, ..*fastest };
        for aim in [smallest, *fastest] {
            let Some((best, _)) = self.best(&aim, |_| true) else { return pieces };
            if aim.merit == Merit::Bytes || pieces.iter().all(|pieces| !self.is_of(&pieces.anchor, &best)) {
                self.measure_from(best, &aim, &mut pieces);
            }
        }
        let between = self.line(fastest, 0.5);
        if let Some((best, _)) = self.best(&between, |_| true).filter(|_| closely) {
            self.measure_from(best, &between, &mut pieces);
        }
        if closely {
            // Other types and other updates, where nothing was measured: first those that take least.
            let least = |root: &Point| {
                let own = self.best(&smallest, |point| self.is_of(point, root));
                own.map_or(f64::INFINITY, |(_, made)| smallest.merit(made.footprint))
            };
            let mut order: Vec<(f64, Point)> = shortest.iter().map(|root| (least(root), *root)).collect();
            order.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            for (_, root) in order.into_iter().take(MEASURED) {
                let is_known = pieces.iter().any(|own| self.space.is_alike(&own.anchor, &root));
                let best = self.best(&smallest, |point| self.is_of(point, &root)).filter(|_| !is_known);
                if let Some((best, _)) = best {
                    self.measure_from(best, &smallest, &mut pieces);
                }
            }
        }
        // From what takes little elsewhere too, the fastest combinations first, what was measured at what is most alike says enough.
        let seconds = |root: &Point| self.made(root).map_or(f64::INFINITY, |made| made.footprint.seconds());
        let mut others = roots.clone();
        others.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        others.truncate(if closely { FURTHER } else { 0 });
        let light: Vec<Point> =
            others.iter().flat_map(|root| self.space.light(root, &[Checkpointing::Full])).collect();
        self.run(&light);
        let mut anchors = Vec::new();
        for root in &others {
            let alike = |own: &&Pieces| self.space.alike(&own.anchor, root);
            let Some(known) = pieces.iter().rev().max_by_key(alike).cloned() else { continue };
            let own = self.best(&smallest, |point| self.is_of(point, root));
            let anchor = own.map_or(self.moved(known.anchor, root), |(point, _)| point);
            anchors.push(anchor);
            pieces.push(Pieces { anchor, ..known });
        }
        self.run(&anchors);
        pieces
    }

    /// What takes little, of these roots: in segments where that may be what takes least.
    fn run_light(&mut self, roots: &[Point], fastest: &Aim) {
        let smallest = Aim { merit: Merit::Bytes, ..*fastest };
        let [full, segments] = LIGHT.map(|form| {
            roots.iter().flat_map(|root| self.space.light(root, &[form])).collect::<Vec<Point>>()
        });
        self.run(&full);
        let least = self.best(&smallest, |_| true).map(|(_, made)| smallest.merit(made.footprint));
        let may_be_less = |(full, _): &(&Point, Point)| {
            let bytes = self.made(full).and_then(|made| made.in_segments);
            least.zip(bytes).is_none_or(|(least, bytes)| (bytes as f64) < least)
        };
        let segments = full.iter().zip(segments).filter(may_be_less).map(|(_, point)| point);
        let segments: Vec<Point> = segments.collect();
        self.run(&segments);
    }

    fn measure_from(&mut self, point: Point, aim: &Aim, pieces: &mut Vec<Pieces>) {
        self.walk_from(point, aim, 1);
        pieces.extend(self.measured.last().cloned());
    }

    /// What these pieces say is best at every one of so many lines, run and corrected, as long as there are no more than so many runs.
    fn along_lines(&mut self, fastest: &Aim, pieces: &[Pieces], lines: u32, most: usize) {
        for number in 0..lines {
            if self.order.len() >= most {
                return;
            }
            let aim = self.line(fastest, f64::from(number) / f64::from(lines - 1));
            let mut bases: Vec<Point> = pieces.iter().map(|pieces| pieces.anchor).collect();
            for _ in 0..WAVES {
                let best = self.best(&aim, |_| true);
                let cutoff = best.map_or(f64::INFINITY, |(_, best)| aim.merit(best.footprint) * BETTER);
                let mut next: Vec<(usize, f64, usize, Point)> = Vec::new();
                for (place, (pieces, base)) in pieces.iter().zip(&bases).enumerate() {
                    let best = self.estimated(pieces, *base, &aim, cutoff, AT_LEAST).into_iter().enumerate();
                    next.extend(
                        best.map(|(rank, (point, footprint))| (rank, aim.merit(footprint), place, point)),
                    );
                }
                next.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
                let firsts = next.iter().take_while(|(rank, ..)| *rank == 0).count();
                next.truncate(firsts.clamp(AT_LEAST, AT_ONCE));
                if next.is_empty() {
                    break;
                }
                let points: Vec<Point> = next.iter().map(|(.., point)| *point).collect();
                self.run(&points);
                // The best of each last.
                for (.., place, point) in next.into_iter().rev() {
                    if let Some(base) = bases.get_mut(place).filter(|_| self.made(&point).is_some()) {
                        *base = point;
                    }
                }
            }
        }
    }

    /// A line at a share of the way from the least memory to that of the fastest point.
    fn line(&self, fastest: &Aim, share: f64) -> Aim {
        let bytes = |aim: &Aim| {
            let best = self.best(aim, |_| true);
            best.map_or(0.0, |(_, made)| made.footprint.under_the_line(&self.limits))
        };
        let least = bytes(&Aim { merit: Merit::Bytes, ..*fastest });
        let most = bytes(fastest).max(least);
        Aim { room: least * (most / least.max(1.0)).powf(share), ..*fastest }
    }

    /// Whether pieces were measured where a class is.
    fn is_of_class(&self, pieces: &Pieces, class: Quality) -> bool {
        self.space
            .roots
            .iter()
            .any(|root| self.is_of(&pieces.anchor, root) && self.space.quality(root) <= class)
    }

    /// The points that no other one beats, from the least memory on.
    pub fn front(&self) -> Vec<(Point, Made)> {
        let fitting: Vec<(Point, Made, Quality)> = self
            .all()
            .filter(|(_, made)| made.fits)
            .map(|(point, made)| (*point, *made, self.space.quality(point)))
            .collect();
        let key = |(_, made, quality): &(Point, Made, Quality)| {
            (made.device_bytes, made.footprint.seconds(), *quality)
        };
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
