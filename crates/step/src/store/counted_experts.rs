//! Slots for experts in a dry run. Experts of a layer are alike, so that they are not followed one by one: it is counted how many of each
//! layer are here, and those that come are moved together.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};

use plimsoll_device::{Device, Due, Tensor, Transferred};
use plimsoll_disk::Direction;
use plimsoll_model::Role;
use rustc_hash::FxHashMap;

use super::expert_slots::ExpertTraffic;
use crate::StepError;
use crate::tier::{Parcel, Transits, Unit};

/// What becomes of the experts of a layer that are used: those that are here come first, then those that are on their way, then
/// those that are not yet begun.
pub(crate) type Groups = [u32; 3];

/// One kind of matrix.
pub(super) struct Counted {
    /// All of them; the first stands for the one in use.
    slots: Vec<Tensor>,
    layers: BTreeMap<u32, Layer>,
    state: RefCell<State>,
}

/// The experts of a layer.
struct Layer {
    /// The first of them.
    first: Parcel<Role>,
    /// What moves for the first so many of them, and their bytes.
    moved: Vec<(Transferred, u64)>,
}

impl Layer {
    /// How many experts the layer has.
    fn count(&self) -> u32 {
        self.moved.len().saturating_sub(1) as u32
    }
}

#[derive(Default)]
struct State {
    /// How many experts of which layers are here, the layer that was used last behind the others.
    here: VecDeque<(u32, u32)>,
    /// The layer that was expected last, and its groups.
    expected: Option<u32>,
    groups: Groups,
    /// Whether any tokens are supposed to go to any experts alike.
    is_even: bool,
    /// When those that are on their way arrive.
    due: Due,
    traffic: ExpertTraffic,
}

impl Counted {
    pub fn new(transits: &Transits<'_>, parcels: FxHashMap<Unit, Parcel<Role>>, slots: Vec<Tensor>) -> Self {
        let mut by_layer: BTreeMap<u32, BTreeMap<u32, Parcel<Role>>> = BTreeMap::new();
        for (unit, parcel) in parcels {
            if let Unit::Expert(layer, expert, _) = unit {
                by_layer.entry(layer).or_default().insert(expert, parcel);
            }
        }
        let layer = |(layer, parcels): (u32, BTreeMap<u32, Parcel<Role>>)| {
            let mut moved = vec![(Transferred::default(), 0)];
            for parcel in parcels.values() {
                let (before, bytes) = moved.last().copied().unwrap_or_default();
                let own = transits.moved(parcel, Direction::Prefetch);
                moved.push((before.plus(own), bytes + parcel.bytes()));
            }
            let (_, first) = parcels.into_iter().next()?;
            Some((layer, Layer { first, moved }))
        };
        let layers = by_layer.into_iter().filter_map(layer).collect();
        Counted { slots, layers, state: RefCell::default() }
    }

    pub fn traffic(&self) -> ExpertTraffic {
        self.state.borrow().traffic
    }

    pub fn hash(&self, hasher: &mut impl Hasher) {
        self.state.borrow().here.hash(hasher);
    }

    /// The first expert of a layer.
    pub fn first(&self, layer: u32) -> Option<&Parcel<Role>> {
        self.layers.get(&layer).map(|layer| &layer.first)
    }

    /// Begins to bring `used` experts of a layer, as many as there is room for.
    pub fn expect(&self, device: &dyn Device, layer: u32, used: u32) {
        let state = &mut *self.state.borrow_mut();
        let here = match state.is_even {
            true => self.share_here(state, layer, used),
            false => self.here(state, layer).min(used),
        };
        let coming = (used - here).min(self.count().saturating_sub(here));
        state.groups = [here, coming, used - here - coming];
        state.expected = Some(layer);
        state.due = self.bring(device, state, layer, coming);
        if !state.is_even {
            let stay = self.count().min(used);
            self.enter(state, layer, stay);
        }
    }

    /// Supposes from now on what many tokens lead to that go to any experts alike: of each layer as many are here, and of those that tokens
    /// go to the same share.
    pub fn suppose_even_use(&self) {
        let state = &mut *self.state.borrow_mut();
        let each = self.count() / (self.layers.len() as u32).max(1);
        state.here = self.layers.iter().map(|(layer, own)| (*layer, each.min(own.count()))).collect();
        state.is_even = true;
    }

    /// How many of so many experts of a layer are here, if all are as likely: whole numbers that are the share in the mean of all layers.
    fn share_here(&self, state: &State, layer: u32, used: u32) -> u32 {
        let all = u64::from(self.layers.get(&layer).map_or(0, Layer::count).max(1));
        let number = self.layers.keys().position(|other| *other == layer).unwrap_or(0) as u64;
        let whole = |layers: u64| layers * u64::from(used) * u64::from(self.here(state, layer)) / all;
        (whole(number + 1) - whole(number)).min(u64::from(used)) as u32
    }

    /// The experts of a layer in the order in which they are taken.
    pub fn announce(&self, device: &dyn Device, layer: u32, used: u32) -> Groups {
        let is_expected = {
            let state = self.state.borrow();
            state.groups.iter().sum::<u32>() == used && state.expected == Some(layer)
        };
        if !is_expected {
            self.expect(device, layer, used);
        }
        let state = &mut *self.state.borrow_mut();
        state.traffic.used += u64::from(used);
        std::mem::take(&mut state.groups)
    }

    /// A group's matrix, when all of the group are here. When those that were on their way are, the rest of them begin to come.
    pub fn take(
        &self,
        device: &dyn Device,
        layer: u32,
        groups: Groups,
        group: usize,
    ) -> Result<Tensor, StepError> {
        let state = &mut *self.state.borrow_mut();
        if group > 0 {
            device.wait(std::mem::take(&mut state.due));
        }
        if group == 1 {
            let [.., rest] = groups;
            state.due = self.bring(device, state, layer, rest);
        }
        let views = self.first(layer).and_then(|parcel| parcel.views(self.slots.first()?));
        let matrix = views.and_then(|views| views.into_iter().next());
        matrix
            .map(|(_, matrix)| matrix)
            .ok_or(StepError::Invariant { what: "an expert is larger than its slot" })
    }

    fn count(&self) -> u32 {
        self.slots.len() as u32
    }

    fn here(&self, state: &State, layer: u32) -> u32 {
        state.here.iter().find(|(other, _)| *other == layer).map_or(0, |(_, count)| *count)
    }

    fn bring(&self, device: &dyn Device, state: &mut State, layer: u32, count: u32) -> Due {
        let moved = self.layers.get(&layer).and_then(|layer| layer.moved.get(count as usize));
        let Some((moved, bytes)) = moved.filter(|_| count > 0) else { return Due::default() };
        state.traffic.read += u64::from(count);
        state.traffic.bytes += bytes;
        device.transfer(*moved, Due::default())
    }

    /// So many experts of a layer are here from now on, in the place of those that were used the longest time ago.
    fn enter(&self, state: &mut State, layer: u32, count: u32) {
        let count = count.max(self.here(state, layer));
        state.here.retain(|(other, _)| *other != layer);
        let mut room = self.count() - count.min(self.count());
        for (_, others) in state.here.iter_mut().rev() {
            *others = (*others).min(room);
            room -= *others;
        }
        state.here.retain(|(_, others)| *others > 0);
        state.here.push_back((layer, count));
    }
}
