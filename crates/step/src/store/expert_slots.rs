//! Experts that live below the device and come when a token is sent to them: for each kind of their matrices a planned number of slots,
//! in which those that were used last stay.
//!
//! The order in which experts come changes no result: each has rows of its own.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hasher;
use std::sync::Arc;

use plimsoll_device::{Device, Tensor};
use plimsoll_disk::{Direction, DiskError, LowerTiers};
use plimsoll_memory::Tag;
use plimsoll_model::Role;
use rustc_hash::FxHashMap;

use super::counted_experts::{Counted, Groups};
use crate::StepError;
use crate::tier::{Parcel, Source, Transit, Transits, Unit, buffer};

/// Matrices of experts by layer, kind and number. Those of a kind are taken one after the other.
pub(crate) trait ExpertWeights {
    /// Inputs and outputs of a kind of matrix; `None` of what does not come by itself.
    fn sides(&self, layer: u32, role: Role) -> Option<[u64; 2]>;

    /// Begins to bring all matrices of experts of a layer, as many as there is room for.
    fn expect(&self, layer: u32, experts: &[u32]) -> Result<(), StepError>;

    /// The same for one kind of matrix, which is taken next of these experts; says in which order to take them: those that are here
    /// first.
    fn announce(&self, layer: u32, role: Role, experts: &[u32]) -> Result<Vec<u32>, StepError>;

    /// The matrix of an expert, waiting for it where it is not here yet. It stays until the next of its kind is taken.
    fn take(&self, layer: u32, role: Role, expert: u32) -> Result<Tensor, StepError>;

    /// In a dry run, in the place of [`announce`](Self::announce): how many of so many experts are here, on their way, and neither.
    fn count(&self, layer: u32, role: Role, used: u32) -> Result<Groups, StepError>;

    /// The matrix of one of such a group, waiting for all of them. Groups are taken in their order.
    fn take_group(&self, layer: u32, role: Role, groups: Groups, group: usize) -> Result<Tensor, StepError>;
}

/// How often matrices of experts were used, and how often they had to be read for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertTraffic {
    /// Times that a matrix of an expert was used by tokens of a pass.
    pub used: u64,
    /// Times that it had to be read first.
    pub read: u64,
    /// Bytes of that.
    pub bytes: u64,
}

/// Slots for experts, with what lives below them.
pub(crate) struct ExpertSlots<'a> {
    transits: Transits<'a>,
    kinds: BTreeMap<Role, Kind>,
    /// In a dry run, in the place of these.
    counted: BTreeMap<Role, Counted>,
}

/// One kind of matrix.
struct Kind {
    parcels: FxHashMap<Unit, Parcel<Role>>,
    state: RefCell<State>,
}

struct State {
    slots: Vec<Slot>,
    /// The slot of each expert that is here or on its way.
    places: FxHashMap<Unit, usize>,
    /// Those that nobody waits for, the one that was used the longest time ago first.
    free: BTreeSet<(u64, Option<Unit>, usize)>,
    /// The slot of the expert that was taken last, whose buffer may be in use.
    taken: Option<usize>,
    /// Counts uses.
    clock: u64,
    /// Experts that were announced and not yet begun, the next one last.
    waiting: Vec<Unit>,
    traffic: ExpertTraffic,
}

struct Slot {
    content: Content,
    /// The expert that is in it, or on its way there.
    expert: Option<Unit>,
    /// When what is in it was last used or asked for.
    used: u64,
    /// Whether somebody waits for it.
    is_wanted: bool,
}

enum Content {
    Here(Tensor),
    Coming(Transit),
    /// For the moment of an exchange.
    Nothing,
}

impl<'a> ExpertSlots<'a> {
    /// Takes memory for `count` experts.
    pub fn new(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        parcels: FxHashMap<Unit, Parcel<Role>>,
        count: u32,
    ) -> Result<Self, StepError> {
        let to_disk = parcels.values().any(Parcel::uses_disk);
        let transits = Transits::new(device, tiers, to_disk)?;
        let mut by_role: BTreeMap<Role, FxHashMap<Unit, Parcel<Role>>> = BTreeMap::new();
        for (unit, parcel) in parcels {
            if let Unit::Expert(_, _, role) = unit {
                by_role.entry(role).or_default().insert(unit, parcel);
            }
        }
        let (mut kinds, mut counted) = (BTreeMap::new(), BTreeMap::new());
        for (role, parcels) in by_role {
            let bytes = parcels.values().map(Parcel::bytes).max().unwrap_or(0);
            let slot = |_| buffer(device, bytes, Tag::Staging, "experts.slot");
            let buffers = (0..count).map(slot).collect::<Result<Vec<_>, StepError>>()?;
            if device.is_dry() {
                counted.insert(role, Counted::new(&transits, parcels, buffers));
            } else {
                kinds.insert(role, Kind::new(parcels, buffers));
            }
        }
        Ok(ExpertSlots { transits, kinds, counted })
    }

    /// What has come and gone so far.
    pub fn traffic(&self) -> ExpertTraffic {
        let counted = self.counted.values().map(Counted::traffic);
        let all = self.kinds.values().map(|kind| kind.state.borrow().traffic).chain(counted);
        all.fold(ExpertTraffic::default(), |all, own| ExpertTraffic {
            used: all.used + own.used,
            read: all.read + own.read,
            bytes: all.bytes + own.bytes,
        })
    }

    /// In a dry run: supposes from now on that tokens go to any experts alike.
    pub fn suppose_even_use(&self) {
        self.counted.values().for_each(Counted::suppose_even_use);
    }

    /// Feeds to a hasher what decides, in a dry run, how many experts will be read.
    pub fn hash_slots(&self, hasher: &mut impl Hasher) {
        self.counted.values().for_each(|kind| kind.hash(hasher));
    }

    fn kind(&self, role: Role) -> Result<&Kind, StepError> {
        self.kinds.get(&role).ok_or(NO_SUCH)
    }
}

const LOST: StepError = StepError::Invariant { what: "a slot for experts has lost its buffer" };
const NO_SUCH: StepError = StepError::Invariant { what: "an expert was asked for that lives nowhere" };

impl Kind {
    fn new(parcels: FxHashMap<Unit, Parcel<Role>>, buffers: Vec<Tensor>) -> Kind {
        let slot = |buffer| Slot { content: Content::Here(buffer), expert: None, used: 0, is_wanted: false };
        let slots: Vec<Slot> = buffers.into_iter().map(slot).collect();
        let free = (0..slots.len()).map(|place| (0, None, place)).collect();
        let (places, waiting, traffic) = (FxHashMap::default(), Vec::new(), ExpertTraffic::default());
        let state = State { slots, places, free, taken: None, clock: 0, waiting, traffic };
        Kind { parcels, state: RefCell::new(state) }
    }

    /// Begins to bring those that wait, in slots that nobody waits for.
    fn begin(&self, transits: &Transits<'_>, state: &mut State) -> Result<(), StepError> {
        while let Some(unit) = state.waiting.last().copied() {
            let Some((.., place)) = state.free.pop_first() else { return Ok(()) };
            state.waiting.pop();
            let slot = state.slots.get_mut(place).ok_or(LOST)?;
            if let Some(before) = slot.expert.replace(unit) {
                state.places.remove(&before);
            }
            let buffer = match std::mem::replace(&mut slot.content, Content::Nothing) {
                Content::Here(buffer) => buffer,
                // Nobody waits for it any more: a pass has failed.
                Content::Coming(transit) => transits.wait(transit)?.0,
                Content::Nothing => return Err(LOST),
            };
            let parcel = self.parcels.get(&unit).ok_or(NO_SUCH)?;
            slot.content =
                Content::Coming(transits.begin(parcel, Direction::Prefetch, Source::Buffer(buffer))?);
            (slot.used, slot.is_wanted) = (state.clock, true);
            state.places.insert(unit, place);
            state.traffic.read += 1;
            state.traffic.bytes += parcel.bytes();
        }
        Ok(())
    }

    /// Begins to bring experts, and says in which order they are there.
    fn expect(&self, transits: &Transits<'_>, units: &[Unit]) -> Result<Vec<Unit>, StepError> {
        let state = &mut *self.state.borrow_mut();
        state.clock += 1;
        state.taken = None;
        (0..state.slots.len()).for_each(|place| state.let_go(place));
        let (here, absent): (Vec<Unit>, Vec<Unit>) =
            units.iter().partition(|unit| state.places.contains_key(*unit));
        for unit in &here {
            if let Some(place) = state.places.get(unit).copied()
                && let Some(slot) = state.slots.get_mut(place)
            {
                state.free.remove(&(slot.used, slot.expert, place));
                (slot.used, slot.is_wanted) = (state.clock, true);
            }
        }
        state.waiting = absent.iter().rev().copied().collect();
        self.begin(transits, state)?;
        Ok([here, absent].concat())
    }

    fn take(&self, transits: &Transits<'_>, unit: Unit) -> Result<Tensor, StepError> {
        let state = &mut *self.state.borrow_mut();
        if let Some(place) = state.taken.take() {
            state.let_go(place);
        }
        self.begin(transits, state)?;
        let place = *state.places.get(&unit).ok_or(NO_SUCH)?;
        state.arrive(transits, place)??;
        state.taken = Some(place);
        let Some(Slot { content: Content::Here(buffer), .. }) = state.slots.get(place) else {
            return Err(LOST);
        };
        let views = self.parcels.get(&unit).and_then(|parcel| parcel.views(buffer));
        let matrix = views.and_then(|views| views.into_iter().next());
        let too_large = StepError::Invariant { what: "an expert is larger than its slot" };
        matrix.map(|(_, matrix)| matrix).ok_or(too_large)
    }
}

impl State {
    /// Nobody waits for a slot any more.
    fn let_go(&mut self, place: usize) {
        if let Some(slot) = self.slots.get_mut(place).filter(|slot| slot.is_wanted) {
            slot.is_wanted = false;
            self.free.insert((slot.used, slot.expert, place));
        }
    }

    /// Waits until what is on its way to a slot is there, and says what came of it. What failed is not the expert: whoever asks for it
    /// again has it read again.
    ///
    /// # Errors
    /// The buffer is lost.
    fn arrive(&mut self, transits: &Transits<'_>, place: usize) -> Result<Result<(), DiskError>, StepError> {
        let slot = self.slots.get_mut(place).ok_or(LOST)?;
        let transit = match std::mem::replace(&mut slot.content, Content::Nothing) {
            Content::Coming(transit) => transit,
            there => {
                slot.content = there;
                return Ok(Ok(()));
            }
        };
        let (buffer, outcome) = transits.wait(transit)?;
        slot.content = Content::Here(buffer);
        if outcome.is_err()
            && let Some(expert) = slot.expert
        {
            let was_free = self.free.remove(&(slot.used, slot.expert, place));
            slot.expert = None;
            self.places.remove(&expert);
            if was_free {
                self.free.insert((slot.used, None, place));
            }
        }
        Ok(outcome)
    }
}

impl ExpertWeights for ExpertSlots<'_> {
    fn sides(&self, layer: u32, role: Role) -> Option<[u64; 2]> {
        let parcel = match self.kinds.get(&role) {
            Some(kind) => kind.parcels.get(&Unit::Expert(layer, 0, role))?,
            None => self.counted.get(&role)?.first(layer)?,
        };
        match parcel.tensors() {
            [matrix] => {
                let inputs = *matrix.shape.last()?;
                Some([inputs, matrix.shape.iter().product::<u64>() / inputs.max(1)])
            }
            _ => None,
        }
    }

    fn expect(&self, layer: u32, experts: &[u32]) -> Result<(), StepError> {
        let used = experts.len() as u32;
        self.counted.values().for_each(|kind| kind.expect(self.transits.device, layer, used));
        self.kinds.iter().try_for_each(|(role, kind)| {
            let units: Vec<Unit> = experts.iter().map(|expert| Unit::Expert(layer, *expert, *role)).collect();
            kind.expect(&self.transits, &units).map(|_| ())
        })
    }

    fn announce(&self, layer: u32, role: Role, experts: &[u32]) -> Result<Vec<u32>, StepError> {
        let kind = self.kind(role)?;
        let units: Vec<Unit> = experts.iter().map(|expert| Unit::Expert(layer, *expert, role)).collect();
        let order = kind.expect(&self.transits, &units)?;
        kind.state.borrow_mut().traffic.used += experts.len() as u64;
        let number = |unit| if let Unit::Expert(_, expert, _) = unit { Some(expert) } else { None };
        Ok(order.into_iter().filter_map(number).collect())
    }

    fn take(&self, layer: u32, role: Role, expert: u32) -> Result<Tensor, StepError> {
        let taken = self.kind(role)?.take(&self.transits, Unit::Expert(layer, expert, role));
        if taken.is_err() {
            // What else is on its way may have failed too.
            for kind in self.kinds.values() {
                let state = &mut *kind.state.borrow_mut();
                (0..state.slots.len())
                    .try_for_each(|place| state.arrive(&self.transits, place).map(|_| ()))?;
            }
        }
        taken
    }

    fn count(&self, layer: u32, role: Role, used: u32) -> Result<Groups, StepError> {
        Ok(self.counted.get(&role).ok_or(NO_SUCH)?.announce(self.transits.device, layer, used))
    }

    fn take_group(&self, layer: u32, role: Role, groups: Groups, group: usize) -> Result<Tensor, StepError> {
        self.counted.get(&role).ok_or(NO_SUCH)?.take(self.transits.device, layer, groups, group)
    }
}
