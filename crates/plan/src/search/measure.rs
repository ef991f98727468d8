//! Pieces: what each value of each axis changes, measured at a point by dry runs of every single change, and what follows from them for
//! values between two that were run.

use plimsoll_memory::Tier;
use plimsoll_step::{Checkpointing, Group, Groups};

use super::axes::Setting;
use super::footprint::Footprint;
use super::space::{Point, mixes};
use super::walk::Walk;
use super::weigh::{Piece, Pieces};

/// Shares of the layers that are estimated between two ways.
const SHARES: [f64; 3] = [0.25, 0.5, 0.75];

impl Walk<'_> {
    /// The pieces at a point that has been run.
    pub fn measured(&mut self, anchor: Point) -> Option<Pieces> {
        let base = self.made(&anchor)?.footprint;
        let mut singles: Vec<(usize, u16)> = Vec::new();
        for axis in self.space.coupled..self.space.axes.len() {
            let values = self.space.axes.get(axis).map_or(&[][..], Vec::as_slice);
            let own = anchor.get(axis).copied().unwrap_or(0);
            for (number, value) in (0u16..).zip(values) {
                let is_end = match value.setting {
                    Setting::Place(_, _, kept) => kept == 0,
                    Setting::Checkpointing(Checkpointing::Mixed { .. }) => false,
                    _ => true,
                };
                if number != own && is_end && self.is_worth(axis, number) {
                    singles.push((axis, number));
                }
            }
        }
        let point = |(axis, number): (usize, u16)| changed(anchor, axis, number);
        let points: Vec<Point> = singles.iter().copied().map(point).collect();
        self.run(&points);
        let mut by_axis: Vec<(usize, Vec<Piece>)> = Vec::new();
        for axis in self.space.coupled..self.space.axes.len() {
            if self.space.axes.get(axis).is_none_or(Vec::is_empty) {
                continue;
            }
            let of_axis = singles.iter().filter(|(own, _)| *own == axis);
            let changes = of_axis.filter_map(|single| {
                let made = self.made(&point(*single))?;
                Some((single.1, made.footprint.less(base)))
            });
            let own = anchor.get(axis).copied().unwrap_or(0);
            let mut changes: Vec<(u16, Footprint)> =
                std::iter::once((own, Footprint::default())).chain(changes).collect();
            self.note_worth(axis, &changes);
            changes.extend(self.between(axis, base, &changes, &SHARES));
            by_axis.push((axis, self.pieces(axis, &changes)));
        }
        let pieces = Pieces { anchor, by_axis };
        let coupled = self.space.coupled;
        self.measured.retain(|other| other.anchor.get(..coupled) != anchor.get(..coupled));
        self.measured.push(pieces.clone());
        Some(pieces)
    }

    fn pieces(&self, axis: usize, changes: &[(u16, Footprint)]) -> Vec<Piece> {
        let mut all: Vec<Piece> = Vec::new();
        for (value, change) in changes {
            let quality = self.space.axes.get(axis).and_then(|values| values.get(usize::from(*value)));
            let Some(quality) = quality.map(|value| value.quality) else { continue };
            if all.iter().all(|other| other.value != *value) {
                all.push(Piece { value: *value, quality, change: *change });
            }
        }
        all
    }

    /// The same pieces with every number of layers between two ways, and nothing else changed of a point.
    pub fn finer(&mut self, pieces: &Pieces, best: &Point) -> Pieces {
        let shares: Vec<f64> = {
            let layers = self.space.spec.num_layers;
            (1..layers).map(|k| f64::from(k) / f64::from(layers)).collect()
        };
        let base = self.made(&pieces.anchor).map(|made| made.footprint).unwrap_or_default();
        let mut by_axis = Vec::new();
        for (axis, options) in &pieces.by_axis {
            let own = best.get(*axis).copied().unwrap_or(0);
            let is_end = |piece: &&Piece| {
                let value = self.space.axes.get(*axis).and_then(|v| v.get(usize::from(piece.value)));
                !matches!(
                    value.map(|value| &value.setting),
                    Some(Setting::Checkpointing(Checkpointing::Mixed { .. }) | Setting::Place(_, _, 1..))
                )
            };
            let numeric = matches!(
                self.space.value(best, *axis).map(|value| &value.setting),
                Some(Setting::Checkpointing(_) | Setting::Place(..))
            );
            let ends: Vec<(u16, Footprint)> =
                options.iter().filter(is_end).map(|piece| (piece.value, piece.change)).collect();
            let mut changes: Vec<(u16, Footprint)> = options
                .iter()
                .filter(|piece| piece.value == own)
                .map(|piece| (piece.value, piece.change))
                .collect();
            if numeric {
                changes.extend(ends.iter().copied());
                changes.extend(self.between(*axis, base, &ends, &shares));
            }
            let fine = self.pieces(*axis, &changes);
            by_axis.push((*axis, fine));
        }
        Pieces { anchor: pieces.anchor, by_axis }
    }

    /// What follows for values between those that were measured.
    fn between(
        &mut self,
        axis: usize,
        base: Footprint,
        ends: &[(u16, Footprint)],
        shares: &[f64],
    ) -> Vec<(u16, Footprint)> {
        let setting = |number: u16| {
            self.space.axes.get(axis).and_then(|values| values.get(usize::from(number))).map(|v| v.setting.clone())
        };
        let layers = self.space.spec.num_layers;
        let known: Vec<(Setting, Footprint)> =
            ends.iter().filter_map(|(number, change)| Some((setting(*number)?, *change))).collect();
        let mut wanted: Vec<(Setting, Footprint)> = Vec::new();
        let home = known.iter().find(|(setting, _)| matches!(setting, Setting::Place(_, Tier::Device, _)));
        for (setting, change) in &known {
            if let (Setting::Place(kind, tier @ (Tier::Host | Tier::Disk), 0), Some((_, home))) = (setting, home) {
                for share in shares {
                    let kept = (share * f64::from(layers)).round() as u64;
                    let at = kept as f64 / f64::from(layers);
                    if (1..u64::from(layers)).contains(&kept) {
                        wanted.push((Setting::Place(*kind, *tier, kept), change.towards(*home, at)));
                    }
                }
            }
        }
        let forms: Vec<(Groups, Footprint)> = known
            .iter()
            .filter(|(setting, _)| mixes(setting))
            .filter_map(|(setting, change)| Some((groups(setting)?, *change)))
            .collect();
        for [(others, more), (first, less)] in neighbours(base, forms) {
            for share in shares {
                let count = (share * f64::from(layers)).round() as u32;
                if (1..layers).contains(&count) {
                    let at = f64::from(count) / f64::from(layers);
                    let form = Checkpointing::Mixed { layers: count, first, others };
                    wanted.push((Setting::Checkpointing(form), more.towards(less, at)));
                }
            }
        }
        let number = |(setting, change): (Setting, Footprint)| Some((self.space.number(axis, &setting)?, change));
        wanted.into_iter().filter_map(number).collect()
    }
}

/// A point with another value on an axis.
pub(super) fn changed(mut point: Point, axis: usize, value: u16) -> Point {
    if let Some(place) = point.get_mut(axis) {
        *place = value;
    }
    point
}

/// What a form recomputes in every layer.
fn groups(setting: &Setting) -> Option<Groups> {
    match setting {
        Setting::Checkpointing(Checkpointing::None) => Some(Groups::NONE),
        Setting::Checkpointing(Checkpointing::Full) => Some([Group::Block].into_iter().collect()),
        Setting::Checkpointing(Checkpointing::Selective(groups)) => Some(*groups),
        _ => None,
    }
}

/// Forms of which none lies above a mix of two others, by what they keep: each with the next that keeps less.
fn neighbours(base: Footprint, mut forms: Vec<(Groups, Footprint)>) -> Vec<[(Groups, Footprint); 2]> {
    let bytes = |change: Footprint| base.plus(change).in_all();
    let seconds = |change: Footprint| change.seconds();
    forms.sort_by(|(_, a), (_, b)| {
        bytes(*b).total_cmp(&bytes(*a)).then(seconds(*a).total_cmp(&seconds(*b)))
    });
    let mut hull: Vec<(Groups, Footprint)> = Vec::new();
    // From the form that keeps most: those that save bytes at the least seconds a byte.
    for form in forms {
        while let Some((_, last)) = hull.last().copied() {
            // One that takes no fewer seconds and keeps more is of no use.
            if seconds(last) >= seconds(form.1) {
                hull.pop();
                continue;
            }
            let Some((_, before)) = hull.len().checked_sub(2).and_then(|place| hull.get(place)).copied() else {
                break;
            };
            let slope = |a: Footprint, b: Footprint| {
                (seconds(b) - seconds(a)) / (bytes(a) - bytes(b)).max(1.0)
            };
            if slope(before, last) >= slope(last, form.1) {
                hull.pop();
            } else {
                break;
            }
        }
        hull.push(form);
    }
    hull.windows(2).filter_map(|pair| <[_; 2]>::try_from(pair.to_vec()).ok()).collect()
}
