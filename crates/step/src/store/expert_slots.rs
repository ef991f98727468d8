//! Experts that live below the device and come when a token is sent to them: a planned number of slots, in which the experts that
//! were used last stay.
//!
//! The order in which experts come changes no result: each has rows of its own.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use plimsoll_device::{Device, Tensor};
use plimsoll_disk::{Direction, LowerTiers};
use plimsoll_memory::Tag;
use plimsoll_model::Role;

use crate::StepError;
use crate::tier::{Parcel, Source, Transit, Transits, Unit, buffer};

/// Experts by layer and number, which a pass takes one after the other.
pub(crate) trait ExpertWeights {
    /// Begins to bring experts of a layer, as many as there is room for, and says in which order to take them: those that are
    /// here first.
    fn announce(&self, layer: u32, experts: &[u32]) -> Result<Vec<u32>, StepError>;

    /// The matrices of an expert, waiting for them where they are not here yet. They stay until the next is taken.
    fn take(&self, layer: u32, expert: u32) -> Result<Vec<(Role, Tensor)>, StepError>;
}

/// How often experts were used, and how often they had to be read for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertTraffic {
    /// Times that an expert was used by tokens of a pass.
    pub used: u64,
    /// Times that it had to be read first.
    pub read: u64,
    /// Bytes of that.
    pub bytes: u64,
}

/// Slots for experts, with what lives below them.
pub(crate) struct ExpertSlots<'a> {
    transits: Transits<'a>,
    parcels: HashMap<Unit, Parcel<Role>>,
    state: RefCell<State>,
}

struct State {
    slots: Vec<Slot>,
    /// The slot of each expert that is here or on its way.
    places: HashMap<Unit, usize>,
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
    /// Takes memory for `count` slots.
    pub fn new(
        device: &'a dyn Device,
        tiers: &Arc<LowerTiers>,
        parcels: HashMap<Unit, Parcel<Role>>,
        count: u32,
    ) -> Result<Self, StepError> {
        let bytes = parcels.values().map(Parcel::bytes).max().unwrap_or(0);
        let slot = |_| {
            let content = Content::Here(buffer(device, bytes, Tag::Staging, "experts.slot")?);
            Ok(Slot { content, expert: None, used: 0, is_wanted: false })
        };
        let slots = (0..count).map(slot).collect::<Result<Vec<_>, StepError>>()?;
        let to_disk = parcels.values().any(Parcel::uses_disk);
        let transits = Transits::new(device, tiers, to_disk)?;
        let (places, waiting, traffic) = (HashMap::new(), Vec::new(), ExpertTraffic::default());
        let state = State { slots, places, taken: None, clock: 0, waiting, traffic };
        let state = RefCell::new(state);
        Ok(ExpertSlots { transits, parcels, state })
    }

    /// What has come and gone so far.
    pub fn traffic(&self) -> ExpertTraffic {
        self.state.borrow().traffic
    }

    /// Begins to bring those that wait, in slots that nobody waits for.
    fn begin(&self, state: &mut State) -> Result<(), StepError> {
        while let Some(unit) = state.waiting.last().copied() {
            let free = state.slots.iter().enumerate().filter(|(_, slot)| !slot.is_wanted);
            let Some((place, _)) = free.min_by_key(|(_, slot)| slot.used) else { return Ok(()) };
            state.waiting.pop();
            let slot = &mut state.slots[place];
            if let Some(before) = slot.expert.replace(unit) {
                state.places.remove(&before);
            }
            let buffer = match std::mem::replace(&mut slot.content, Content::Nothing) {
                Content::Here(buffer) => buffer,
                // Nobody waits for it any more: a pass has failed.
                Content::Coming(transit) => self.transits.wait(transit)?.0,
                Content::Nothing => return Err(LOST),
            };
            let parcel = self.parcels.get(&unit).ok_or(NO_SUCH)?;
            slot.content =
                Content::Coming(self.transits.begin(parcel, Direction::Prefetch, Source::Buffer(buffer))?);
            (slot.used, slot.is_wanted) = (state.clock, true);
            state.places.insert(unit, place);
            state.traffic.read += 1;
            state.traffic.bytes += parcel.bytes();
        }
        Ok(())
    }
}

const LOST: StepError = StepError::Invariant { what: "a slot for experts has lost its buffer" };
const NO_SUCH: StepError = StepError::Invariant { what: "an expert was asked for that lives nowhere" };

impl ExpertWeights for ExpertSlots<'_> {
    fn announce(&self, layer: u32, experts: &[u32]) -> Result<Vec<u32>, StepError> {
        let state = &mut *self.state.borrow_mut();
        state.clock += 1;
        state.taken = None;
        state.slots.iter_mut().for_each(|slot| slot.is_wanted = false);
        let unit = |expert: u32| Unit::Expert(layer, expert);
        let (here, absent): (Vec<u32>, Vec<u32>) =
            experts.iter().partition(|expert| state.places.contains_key(&unit(**expert)));
        for expert in &here {
            if let Some(place) = state.places.get(&unit(*expert)) {
                let slot = &mut state.slots[*place];
                (slot.used, slot.is_wanted) = (state.clock, true);
            }
        }
        state.waiting = absent.iter().rev().map(|expert| unit(*expert)).collect();
        state.traffic.used += experts.len() as u64;
        self.begin(state)?;
        Ok([here, absent].concat())
    }

    fn take(&self, layer: u32, expert: u32) -> Result<Vec<(Role, Tensor)>, StepError> {
        let (state, unit) = (&mut *self.state.borrow_mut(), Unit::Expert(layer, expert));
        if let Some(slot) = state.taken.take().and_then(|place| state.slots.get_mut(place)) {
            slot.is_wanted = false;
        }
        self.begin(state)?;
        let place = *state.places.get(&unit).ok_or(NO_SUCH)?;
        let slot = &mut state.slots[place];
        if matches!(slot.content, Content::Coming(_))
            && let Content::Coming(transit) = std::mem::replace(&mut slot.content, Content::Nothing)
        {
            let (buffer, outcome) = self.transits.wait(transit)?;
            slot.content = Content::Here(buffer);
            if let Err(error) = outcome {
                // What is there is not the expert: whoever asks for it again has it read again.
                slot.expert = None;
                state.places.remove(&unit);
                return Err(error.into());
            }
        }
        state.taken = Some(place);
        let Content::Here(buffer) = &slot.content else { return Err(LOST) };
        let views = self.parcels.get(&unit).and_then(|parcel| parcel.views(buffer));
        views.ok_or(StepError::Invariant { what: "an expert is larger than its slot" })
    }
}
