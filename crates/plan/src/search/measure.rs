//! Pieces: what each value of each axis changes, measured at a point by dry runs of every single change, and what follows from them for
//! values between two that were run.
//!
//! How layers are checkpointed and where their activations wait belong together: what is kept of a layer is what waits. So both are
//! measured together.

use plimsoll_memory::Tier;
use plimsoll_step::{Checkpointing, Group, Groups};

use super::axes::Setting;
use super::footprint::Footprint;
use super::space::{Point, mixes};
use super::walk::Walk;
use super::weigh::{Piece, Pieces};
use crate::offload::TensorKind;

/// Shares of the layers that are estimated between two ways.
const SHARES: [f64; 3] = [0.25, 0.5, 0.75];

/// How far from a number of layers others are looked at, as a share of all.
const NEARBY: f64 = 0.2;

/// Shares of the layers for mixes of two forms, and for layers that keep their activations on the device.
#[derive(Clone, Copy)]
struct Shares<'a> {
    of_mixes: &'a [f64],
    of_kept: &'a [f64],
}

const COARSE: Shares<'_> = Shares { of_mixes: &SHARES, of_kept: &SHARES };

/// A form of checkpointing and a place of activations by their numbers, and what they change.
#[derive(Clone, Copy)]
struct Kept {
    form: u16,
    place: u16,
    change: Footprint,
}

impl Walk<'_> {
    /// The pieces at a point that has been run.
    pub fn measured(&mut self, anchor: Point) -> Option<Pieces> {
        let base = self.made(&anchor)?.footprint;
        let axes = self.space.coupled..self.space.axes.len();
        let (form, place) = self.joint_axes();
        let alone: Vec<usize> = axes.filter(|axis| ![form, place].contains(axis)).collect();
        let mut points: Vec<Point> = Vec::new();
        for axis in &alone {
            points.extend(self.ends(&anchor, *axis).into_iter().map(|value| changed(anchor, *axis, value)));
        }
        // All of them at once, as a wave ends with its longest run.
        points.extend(self.ends(&anchor, form).into_iter().map(|value| changed(anchor, form, value)));
        self.run(&points);
        let mut options: Vec<Vec<Piece>> = Vec::new();
        for axis in alone {
            let changes = self.changes(anchor, axis, base);
            let mut all: Vec<(u16, Footprint)> = changes.clone();
            all.extend(self.between_places(axis, &changes, &SHARES));
            options.push(
                all.into_iter().map(|(value, change)| self.piece([(axis, value); 2], change)).collect(),
            );
        }
        let kept = self.kept(anchor, (form, place), base);
        let mut places: Vec<u16> = kept.iter().map(|kept| kept.place).collect();
        places.dedup();
        for place in places {
            // Forms differ where what they keep stays on the device, and may be alike where it does not.
            let of_place = kept.iter().filter(|kept| kept.place == place);
            let of_place: Vec<(u16, Footprint)> = of_place.map(|kept| (kept.form, kept.change)).collect();
            self.note_worth(form, &of_place);
        }
        options.push(self.joint(base, (form, place), &kept, COARSE, None));
        options.retain(|options| options.len() > 1);
        let pieces =
            Pieces { anchor, options, ends: kept.iter().map(|k| (k.form, k.place, k.change)).collect() };
        let coupled = self.space.coupled;
        self.measured.retain(|other| other.anchor.get(..coupled) != anchor.get(..coupled));
        self.measured.push(pieces.clone());
        Some(pieces)
    }

    /// The axes of checkpointing and of the place of activations.
    fn joint_axes(&self) -> (usize, usize) {
        let place = |values: &Vec<super::axes::Value>| {
            matches!(values.first().map(|v| &v.setting), Some(Setting::Place(TensorKind::Activations, ..)))
        };
        let none = self.space.axes.len();
        (
            self.space.checkpointing_axis().unwrap_or(none),
            self.space.axes.iter().position(place).unwrap_or(none),
        )
    }

    fn setting(&self, axis: usize, value: u16) -> Option<Setting> {
        Some(self.space.axes.get(axis)?.get(usize::from(value))?.setting.clone())
    }

    /// Whether a value is that tensors of a kind stay on the device.
    fn is_on_device(&self, axis: usize, value: u16) -> bool {
        matches!(self.setting(axis, value), Some(Setting::Place(_, Tier::Device, _)))
    }

    /// The values of an axis that are run: not those between two others.
    fn ends(&self, anchor: &Point, axis: usize) -> Vec<u16> {
        let values = self.space.axes.get(axis).map_or(&[][..], Vec::as_slice);
        let is_end = |setting: &Setting| match setting {
            Setting::Place(_, _, kept) => *kept == 0,
            Setting::Checkpointing(Checkpointing::Mixed { .. }) => false,
            // No pass has more micro-batches than a step, and it matters where passes bring something.
            Setting::Together(passes) => {
                *passes == 1 || *passes <= self.space.steps(anchor) && self.space.brings(anchor)
            }
            _ => true,
        };
        let ends = (0u16..).zip(values).filter(|(_, value)| is_end(&value.setting));
        ends.map(|(number, _)| number).filter(|number| self.is_worth(axis, *number)).collect()
    }

    /// What the values of an axis change that were run, and the point's own.
    fn changes(&self, anchor: Point, axis: usize, base: Footprint) -> Vec<(u16, Footprint)> {
        let own = anchor.get(axis).copied().unwrap_or(0);
        let others = self.ends(&anchor, axis).into_iter().filter(|value| *value != own).filter_map(|value| {
            let made = self.made(&changed(anchor, axis, value))?;
            Some((value, made.footprint.less(base)))
        });
        std::iter::once((own, Footprint::default())).chain(others).collect()
    }

    /// What forms of checkpointing change that are of use, with activations in each place.
    fn kept(&mut self, anchor: Point, (form, place): (usize, usize), base: Footprint) -> Vec<Kept> {
        let own = |axis: usize| anchor.get(axis).copied().unwrap_or(0);
        let with = |values: Vec<u16>, own: u16| if values.is_empty() { vec![own] } else { values };
        let forms = with(self.ends(&anchor, form), own(form));
        let mut places = with(self.ends(&anchor, place), own(place));
        // On the device, and on the first tier below it; on others where the point has them.
        let mut number = 0;
        places.retain(|value| {
            number += 1;
            number <= 2 || *value == own(place)
        });
        let point = |f: u16, p: u16| changed(changed(anchor, form, f), place, p);
        let mut all: Vec<(u16, u16)> =
            forms.iter().flat_map(|f| places.iter().map(move |p| (*f, *p))).collect();
        // Segments keep next to nothing, and take long to run.
        all.retain(|(f, p)| *p == own(place) || self.setting(form, *f).is_none_or(|setting| mixes(&setting)));
        // A form that takes more of everything than another where all that it keeps stays on the device does so elsewhere too.
        if self.is_on_device(place, own(place)) {
            let here: Vec<u16> = all.iter().filter(|(_, p)| *p == own(place)).map(|(f, _)| *f).collect();
            let points: Vec<Point> = here.iter().map(|f| point(*f, own(place))).collect();
            self.run(&points);
            let change = |f: u16| Some((f, self.made(&point(f, own(place)))?.footprint.less(base)));
            let changes: Vec<(u16, Footprint)> = here.into_iter().filter_map(change).collect();
            self.note_worth(form, &changes);
            all.retain(|(f, p)| *p == own(place) || self.is_worth(form, *f));
        }
        let points: Vec<Point> = all.iter().map(|(f, p)| point(*f, *p)).collect();
        self.run(&points);
        let kept = all.into_iter().filter_map(|(f, p)| {
            let change = self.made(&point(f, p))?.footprint.less(base);
            Some(Kept { form: f, place: p, change })
        });
        let mut kept: Vec<Kept> = kept.collect();
        if kept.iter().all(|one| (one.form, one.place) != (own(form), own(place))) {
            kept.push(Kept { form: own(form), place: own(place), change: Footprint::default() });
        }
        kept
    }

    fn piece(&self, set: [(usize, u16); 2], change: Footprint) -> Piece {
        let class = |(axis, value): (usize, u16)| {
            self.space
                .axes
                .get(axis)
                .and_then(|values| values.get(usize::from(value)))
                .map(|value| value.quality)
        };
        let quality = set.into_iter().filter_map(class).max().unwrap_or(crate::config::Quality::Lossless);
        Piece { set, quality, change }
    }

    /// What follows for mixes of two forms, and for layers that keep their activations on the device. Where `only` is given, of a form and of
    /// mixes with it.
    fn joint(
        &mut self,
        base: Footprint,
        (form, place): (usize, usize),
        ends: &[Kept],
        shares: Shares<'_>,
        only: Option<u16>,
    ) -> Vec<Piece> {
        let known = only.and_then(|only| self.setting(form, only)).map(|setting| both(&setting));
        let touches = |groups: Groups| known.as_ref().is_none_or(|known| known.contains(&Some(groups)));
        let mut all: Vec<Kept> = ends.to_vec();
        all.retain(|kept| {
            let own = self.setting(form, kept.form).and_then(|setting| groups(&setting));
            only.is_none_or(|only| only == kept.form) || own.is_some_and(touches)
        });
        let mut places: Vec<u16> = ends.iter().map(|kept| kept.place).collect();
        places.sort_unstable();
        places.dedup();
        for own in &places {
            let of_place: Vec<(u16, Footprint)> =
                ends.iter().filter(|kept| kept.place == *own).map(|kept| (kept.form, kept.change)).collect();
            let mixed = self.mixed(base, form, &of_place, shares.of_mixes, &touches);
            all.extend(mixed.into_iter().map(|(form, change)| Kept { form, place: *own, change }));
        }
        let mut forms: Vec<u16> = all.iter().map(|kept| kept.form).collect();
        forms.sort_unstable();
        forms.dedup();
        let mut more = Vec::new();
        for own in forms {
            let of_form: Vec<(u16, Footprint)> =
                all.iter().filter(|kept| kept.form == own).map(|kept| (kept.place, kept.change)).collect();
            let between = self.between_places(place, &of_form, shares.of_kept);
            more.extend(between.into_iter().map(|(place, change)| Kept { form: own, place, change }));
        }
        all.extend(more);
        let mut pieces: Vec<Piece> = Vec::new();
        for kept in all {
            let set = [(form, kept.form), (place, kept.place)];
            if pieces.iter().all(|other| other.set != set) {
                pieces.push(self.piece(set, kept.change));
            }
        }
        pieces
    }

    /// What follows for layers that stay on the device.
    fn between_places(
        &mut self,
        axis: usize,
        ends: &[(u16, Footprint)],
        shares: &[f64],
    ) -> Vec<(u16, Footprint)> {
        let layers = self.space.spec.num_layers;
        let known: Vec<(Setting, Footprint)> =
            ends.iter().filter_map(|(value, change)| Some((self.setting(axis, *value)?, *change))).collect();
        let home = known.iter().find(|(setting, _)| matches!(setting, Setting::Place(_, Tier::Device, _)));
        let Some((_, home)) = home else { return Vec::new() };
        let mut all = Vec::new();
        for (setting, change) in &known {
            let Setting::Place(kind, tier @ (Tier::Host | Tier::Disk), 0) = setting else { continue };
            for share in shares {
                let kept = (share * f64::from(layers)).round() as u64;
                let at = kept as f64 / f64::from(layers);
                let between = Setting::Place(*kind, *tier, kept);
                let number = if (1..u64::from(layers)).contains(&kept) {
                    self.space.number(axis, &between)
                } else {
                    None
                };
                all.extend(number.map(|number| (number, change.towards(*home, at))));
            }
        }
        all
    }

    /// What follows where the first layers are checkpointed in one way and the others in another.
    fn mixed(
        &mut self,
        base: Footprint,
        axis: usize,
        ends: &[(u16, Footprint)],
        shares: &[f64],
        touches: &dyn Fn(Groups) -> bool,
    ) -> Vec<(u16, Footprint)> {
        let layers = self.space.spec.num_layers;
        let forms: Vec<(Groups, Footprint)> = ends
            .iter()
            .filter_map(|(value, change)| {
                let setting = self.setting(axis, *value)?;
                mixes(&setting).then_some(())?;
                Some((groups(&setting)?, *change))
            })
            .collect();
        let mut all = Vec::new();
        let mut pairs = neighbours(base, forms);
        pairs.retain(|[(others, _), (first, _)]| touches(*others) || touches(*first));
        for [(others, more), (first, less)] in pairs {
            for share in shares {
                let count = (share * f64::from(layers)).round() as u32;
                if (1..layers).contains(&count) {
                    let at = f64::from(count) / f64::from(layers);
                    let form = Setting::Checkpointing(Checkpointing::Mixed { layers: count, first, others });
                    all.extend(self.space.number(axis, &form).map(|number| (number, more.towards(less, at))));
                }
            }
        }
        all
    }

    /// The same pieces with every number of layers between two ways, and nothing else changed of a point.
    pub fn finer(&mut self, pieces: &Pieces, best: &Point) -> Pieces {
        let layers = self.space.spec.num_layers;
        let shares: Vec<f64> = (1..layers).map(|k| f64::from(k) / f64::from(layers)).collect();
        let base = self.made(&pieces.anchor).map(|made| made.footprint).unwrap_or_default();
        let (form, place) = self.joint_axes();
        let mut options = Vec::new();
        for coarse in &pieces.options {
            let Some(axis) = coarse.first().map(|piece| piece.set[0].0) else { continue };
            let own = coarse.iter().filter(|piece| piece.is_of(best)).copied();
            let mut fine: Vec<Piece> = own.collect();
            let is_place =
                matches!(self.space.value(best, axis).map(|v| &v.setting), Some(Setting::Place(..)));
            if axis == form || axis == place {
                let ends: Vec<Kept> = pieces
                    .ends
                    .iter()
                    .map(|(form, place, change)| Kept { form: *form, place: *place, change: *change })
                    .collect();
                let kept = match self.space.value(best, place).map(|value| &value.setting) {
                    Some(Setting::Place(_, _, kept)) => *kept as f64 / f64::from(layers.max(1)),
                    _ => 0.0,
                };
                let near: Vec<f64> =
                    shares.iter().copied().filter(|share| (share - kept).abs() <= NEARBY).collect();
                let shares = Shares { of_mixes: &shares, of_kept: &near };
                let own = best.get(form).copied();
                fine.extend(self.joint(base, (form, place), &ends, shares, own));
            } else if is_place {
                let ends: Vec<(u16, Footprint)> = coarse
                    .iter()
                    .filter(|piece| {
                        matches!(self.setting(axis, piece.set[0].1), Some(Setting::Place(_, _, 0)))
                    })
                    .map(|piece| (piece.set[0].1, piece.change))
                    .collect();
                let all = self.between_places(axis, &ends, &shares);
                fine.extend(
                    ends.into_iter().chain(all).map(|(value, change)| self.piece([(axis, value); 2], change)),
                );
            }
            let mut unique: Vec<Piece> = Vec::new();
            for piece in fine {
                if unique.iter().all(|other| other.set != piece.set) {
                    unique.push(piece);
                }
            }
            options.push(unique);
        }
        options.retain(|options| !options.is_empty());
        Pieces { anchor: pieces.anchor, options, ends: pieces.ends.clone() }
    }
}

/// A point with another value on an axis; the same where there is no such axis.
pub(super) fn changed(mut point: Point, axis: usize, value: u16) -> Point {
    if let Some(place) = point.get_mut(axis) {
        *place = value;
    }
    point
}

/// What a form recomputes in every layer.
pub(super) fn groups(setting: &Setting) -> Option<Groups> {
    match setting {
        Setting::Checkpointing(Checkpointing::None) => Some(Groups::NONE),
        Setting::Checkpointing(Checkpointing::Full) => Some([Group::Block].into_iter().collect()),
        Setting::Checkpointing(Checkpointing::Selective(groups)) => Some(*groups),
        _ => None,
    }
}
/// What a form recomputes in its first layers and in the others, where that can be mixed.
fn both(setting: &Setting) -> [Option<Groups>; 2] {
    match setting {
        Setting::Checkpointing(Checkpointing::Mixed { first, others, .. }) => [Some(*first), Some(*others)],
        setting => [groups(setting); 2],
    }
}

/// Forms of which none lies above a mix of two others, by what they keep: each with the next that keeps less.
fn neighbours(base: Footprint, mut forms: Vec<(Groups, Footprint)>) -> Vec<[(Groups, Footprint); 2]> {
    let bytes = |change: Footprint| base.plus(change).in_all();
    let seconds = |change: Footprint| change.seconds();
    forms.sort_by(|(_, a), (_, b)| bytes(*b).total_cmp(&bytes(*a)).then(seconds(*a).total_cmp(&seconds(*b))));
    let mut hull: Vec<(Groups, Footprint)> = Vec::new();
    // From the form that keeps most: those that save bytes at the least seconds a byte.
    for form in forms {
        while let Some((_, last)) = hull.last().copied() {
            // One that takes no fewer seconds and keeps more is of no use.
            if seconds(last) >= seconds(form.1) {
                hull.pop();
                continue;
            }
            let Some((_, before)) = hull.len().checked_sub(2).and_then(|place| hull.get(place)).copied()
            else {
                break;
            };
            let slope =
                |a: Footprint, b: Footprint| (seconds(b) - seconds(a)) / (bytes(a) - bytes(b)).max(1.0);
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
